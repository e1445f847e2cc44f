"""A report as one self-contained HTML page of blocks, each made by a macro of the templates."""

import functools
import html
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from kexpfam.files import written
from kexpfam.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

# Resolution of scatter plots and maps, which are images within the SVG.
DOTS_PER_INCH = 144
POINTS_TO_PIXELS = 4.0 / 3.0
# Colours of matplotlib that become those of the page's text and background.
INK, PAPER = "#000000", "#ffffff"


def block(macro: str, *content: Any, **options: Any) -> str:
    """Return a block of a page as HTML, by a macro of ``blocks.html``; empty if it has no content."""
    return getattr(_templates().get_template("blocks.html").module, macro)(*content, **options).strip()


paragraph, figures = functools.partial(block, "paragraph"), functools.partial(block, "figures")


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = (), summary: str = "") -> str:
    """Return a table of plain values: columns of numbers are aligned right. Without rows it is empty.

    With a ``summary`` the table is hidden until the summary is clicked.
    """
    numeric = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]
    return block("table", [list(map(_shown, row)) for row in rows], header, numeric, summary)


class Section:
    """A heading and its blocks; a section without blocks is omitted."""

    def __init__(self, title: str, *blocks: str) -> None:
        self.title = title
        self.blocks = [block for block in blocks if block]


@dataclass(frozen=True)
class Page:
    """A report as one HTML file: ``save`` writes it, and a notebook shows it."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]

    @functools.cached_property
    def html(self) -> str:
        """Return the whole file."""
        return _templates().get_template("page.html").render(page=self, version=__version__)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the page to one file and return its path."""
        with written(Path(path)) as file:
            file.write(self.html.encode())
        return Path(path)

    def _repr_html_(self) -> str:
        frame = 'style="width: 100%; height: 40rem; border: 1px solid #8884" title="report"'
        return f'<iframe {frame} srcdoc="{html.escape(self.html)}"></iframe>'

    def __str__(self) -> str:
        return f"{self.title}: a page of {len(self.html) // 1024} kB; save(path) writes it"


def drawn(figure: Figure, name: str, caption: str, *, many: bool = False) -> str:
    """Return a figure as SVG with a caption, also for screen readers; one with ``many`` panels may scroll.

    Text stays text; black is the page's text colour and white its background. All ids start with ``name``,
    which is unique within the page.
    """
    stream = io.StringIO()
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": name}
    plain: Any = {"transparent": True, "dpi": DOTS_PER_INCH, "metadata": {"Date": None, "Creator": None}}
    with matplotlib.rc_context(options):
        figure.savefig(stream, format="svg", **plain)
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', f"{name}-", text)
    text = text.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1]) * POINTS_TO_PIXELS  # type: ignore[index]
    for size in ("width", "height"):
        text = re.sub(rf'(<svg [^>]*?){size}="[^"]*"', r"\1", text, count=1)
    attributes = f'role="img" aria-label="{html.escape(caption)}" style="--natural: {width:.0f}px"'
    text = text.replace("<svg ", f"<svg {attributes} ", 1)
    return block("drawing", re.sub(r"\n\s*", "\n", text).strip(), caption, many)


@functools.cache
def _templates() -> "Environment":
    import jinja2  # needed for reports only

    options: Any = {"autoescape": True, "trim_blocks": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=jinja2.PackageLoader("kexpfam.report"), **options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if _is_number(value) else str(value)
