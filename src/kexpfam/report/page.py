"""One self-contained page: no script, no network, everything that came from outside escaped."""

import html
import importlib.resources
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from kexpfam.files import written
from kexpfam.report.svg import inline_svg
from kexpfam.version import __version__

__all__ = ["Page", "code", "drawing", "grid", "items", "paragraph", "section", "table", "text"]

# Nothing is fetched and nothing is run, whatever a column is called.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Page:
    """A report as one HTML file; a notebook shows it, ``save`` writes it."""

    title: str
    body: str

    @property
    def html(self) -> str:
        """Return the whole file."""
        style = importlib.resources.files("kexpfam.report").joinpath("style.css").read_text("utf-8")
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{text(self.title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{self.body}
<footer>kexpfam {__version__}. This file needs no network and runs no script.</footer>
</main>
</body>
</html>
"""

    def save(self, path: str | os.PathLike) -> Path:
        """Write the page to one file, and return its path."""
        with written(Path(path)) as file:
            file.write(self.html.encode())
        return Path(path)

    def _repr_html_(self) -> str:
        frame = 'style="width: 100%; height: 40rem; border: 1px solid #8884" title="report"'
        return f'<iframe {frame} srcdoc="{html.escape(self.html)}"></iframe>'

    def __str__(self) -> str:
        return f"{self.title}: a page of {len(self.html) // 1024} kB; save(path) writes it"


def text(value: object) -> str:
    """Return anything as text of a page."""
    return html.escape(str(value))


def paragraph(*parts: str, kind: str = "") -> str:
    """Return a paragraph of HTML parts."""
    return f"<p{_class(kind)}>{' '.join(parts)}</p>"


def items(lines: Iterable[str]) -> str:
    """Return a list of lines of plain text; nothing where there are none."""
    shown = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f"<ul>{shown}</ul>" if shown else ""


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; nothing where it has no parts."""
    inner = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n{inner}\n</section>" if inner else ""


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table of plain values: numbers to the right, the first column as a name; nothing where there are no rows."""
    if not rows:
        return ""
    numeric = [all(_is_number(row[k]) for row in rows) for k in range(len(rows[0]))]
    kinds = ["number" if number else "name" if k == 0 else "" for k, number in enumerate(numeric)]
    head = "".join(
        f"<th{_class(kind)}>{text(name)}</th>" for name, kind in zip(header, kinds, strict=bool(header))
    )
    cells = lambda row: "".join(
        f"<td{_class(kind)}>{text(_shown(cell))}</td>" for cell, kind in zip(row, kinds, strict=True)
    )
    body = "\n".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{f"<thead><tr>{head}</tr></thead>" if head else ""}<tbody>{body}</tbody></table></div>'


def code(*lines: str) -> str:
    """Return lines of a program."""
    return f"<pre>{text(chr(10).join(lines))}</pre>"


def drawing(figure: Figure, name: str, caption: str, *, many: bool = False) -> str:
    """Return a figure with its caption; one of many panels may be wider than a phone, and scrolls in its own frame."""
    drawn = inline_svg(figure, name).replace("<svg ", f'<svg aria-label="{text(caption)}" ', 1)
    return f"<figure{_class('many' if many else '')}>{drawn}<figcaption>{text(caption)}</figcaption></figure>"


def grid(figures: Iterable[str], *, large: bool = False) -> str:
    """Return figures side by side, as many as the width allows."""
    inner = "\n".join(figure for figure in figures if figure)
    return f'<div class="grid{" large" if large else ""}">{inner}</div>' if inner else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if _is_number(value) else str(value)
