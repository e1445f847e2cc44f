"""Figures as text of a page: scalable, in the page's own ink and font, so that they are read in light and in dark."""

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

__all__ = ["inline_svg"]

# Clouds and maps are images within the drawing.
DOTS_PER_INCH = 144
POINTS_TO_PIXELS = 4.0 / 3.0
# What matplotlib writes for ink and for paper, and the page's words for them.
INK, PAPER = "#000000", "#ffffff"


def inline_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element; its inner names start with ``name``, which no other figure of the page has.

    Text stays text; black is the page's ink, white is its paper.
    """
    stream = io.StringIO()
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": name}
    with matplotlib.rc_context(options):
        figure.savefig(
            stream,
            format="svg",
            transparent=True,
            dpi=DOTS_PER_INCH,
            metadata={"Date": None, "Creator": None},
        )
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', f"{name}-", text)
    text = text.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1]) * POINTS_TO_PIXELS  # type: ignore[index]
    text = re.sub(
        r'<svg (.*?)width="[^"]*"',
        r"<svg \1",
        re.sub(r'(<svg .*?)height="[^"]*"', r"\1", text, count=1),
        count=1,
    )
    return re.sub(
        r"\n\s*", "\n", text.replace("<svg ", f'<svg role="img" style="--natural: {width:.0f}px" ', 1)
    ).strip()
