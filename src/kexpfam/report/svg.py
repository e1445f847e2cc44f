"""Figures as inline SVG, in the colours and the font of the page."""

import html
import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Resolution of scatter plots and maps, which are images within the SVG.
DOTS_PER_INCH = 144
POINTS_TO_PIXELS = 4.0 / 3.0
# Colours of matplotlib that become those of the page's text and background.
INK, PAPER = "#000000", "#ffffff"


def inline_svg(figure: Figure, name: str, caption: str) -> str:
    """Return the figure as an SVG element with a caption for screen readers.

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
    return re.sub(r"\n\s*", "\n", text.replace("<svg ", f"<svg {attributes} ", 1)).strip()
