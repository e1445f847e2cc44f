"""The front page's charts of held-out log densities, their caption and its table of fit times."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR
from reproduction.real_tables import DENSITY_MODELS, PUBLISHED, REGRESSORS, by_dataset, star
from reproduction.records import Record, good
from reproduction.tables import NOTHING, label, markdown

__all__ = ["caption", "charts", "cost"]

FITS = Path(__file__).parents[1] / "benchmarks" / "records" / "fits.jsonl"
# The printed values that have a bar.
PRETRAINED = "TabPFN 2"
PRINTED = ("deep ens.", PRETRAINED)
NAMES = {
    "auto": "kexpfam",
    "conditional kde": "kernel density",
    "sklearn mixture": "normal mixture",
    "deep ens.": "deep ensemble",
    "redwine": "red wine",
    "whitewine": "white wine",
}
COLOURS = (MODEL_COLOUR, DATA_COLOUR, "#b59a2c", "#8d79c4", "#8a9099", "#3f9e8f")
# Legible on white and on black.
INK = "#7b7b7b"
# A chart is legible in half the width of a page, and on a phone.
WIDTH, LEFT, PANEL, TOP, BOTTOM = 520, 40, 170, 80, 46
# Size of letters, and the width of most letters as a share of it.
FONT, LETTER = 15, 0.6


class Bar(NamedTuple):
    """A mean negative log density, the lower the better, with its standard error."""

    mean: float
    error: float


Groups = dict[str, list[Bar | None]]


def charts(records: dict[str, list[Record]]) -> dict[str, str]:
    """Return the charts as SVG by file name: p(y | x) and p(x), a group of bars per data set."""
    return {
        "held-out.svg": _svg(
            "p(y | x): NLL of held-out rows. Lower is better.",
            [*REGRESSORS, *PRINTED],
            _conditional(records.get("uci", [])),
        ),
        "held-out-joint.svg": _svg(
            "p(x): NLL of held-out rows per column. Lower is better.",
            DENSITY_MODELS,
            _per_column(records.get("joint", [])),
        ),
    }


def caption(records: dict[str, list[Record]]) -> str:
    """Return what the chart shows, and the versions of the code and of the packages behind its bars."""
    shown = [*good(records["uci"]), *good(records["joint"])]
    ours = [record for record in shown if record["cell"]["method"] == "auto"]
    versions = _listed(sorted({record["kexpfam"] for record in ours}))
    commits = _listed(sorted({record["commit"] for record in ours}))
    packages = {record["values"].get("package") for record in shown if record not in ours}
    peers = _listed(sorted(name for name in packages if name and not name.startswith("kexpfam")))
    return (
        "*Standard splits of the UCI regression sets, and one held-out fifth of the rows for p(x). Every "
        "estimator has its default settings. Lines: standard errors over splits. Sets with many repeated "
        f"values are left out, because their likelihood is unbounded. Measured with kexpfam {versions} "
        f"(commits {commits}), {peers}; deep ensembles as printed by Lakshminarayanan et al. 2017 and "
        "TabPFN 2 as printed at github.com/ayhamo/Probabilistic_Point_Estimations (commit 03c9e78); neither "
        "was run again.*"
    )


def cost(records: Any = None) -> str:
    """Return the table of the seconds of a default fit beside other estimators, from the newest run."""
    newest = json.loads(FITS.read_text().splitlines()[-1])
    names = list(dict.fromkeys(name for table in newest["fits"].values() for name in table))
    rows = []
    for table, found in newest["fits"].items():
        seconds = [f"{found[name]['seconds']:.1f}" if name in found else NOTHING for name in names]
        rows.append([table.replace("|", "\\|"), *seconds])
    return markdown(("seconds of a fit", *names), rows) + f"\n\nCommit `{newest['commit']}`, two cores."


def _conditional(records: list[Record]) -> Groups:
    """Return the bars of the regression sets, printed values last."""
    groups: Groups = {}
    for dataset, here in by_dataset(records):
        if not star(here):
            printed = PUBLISHED["regression"].get(dataset, {}).copy()
            if dataset in PUBLISHED["pretrained"]:
                printed[PRETRAINED] = PUBLISHED["pretrained"][dataset]
            bars = [_bar(good(here, method=method)) for method in REGRESSORS]
            others = [Bar(printed[name], 0.0) if name in printed else None for name in PRINTED]
            groups[dataset] = [*bars, *others]
    return groups


def _per_column(records: list[Record]) -> Groups:
    """Return the bars of the joint densities, divided by the number of columns."""
    groups: Groups = {}
    for dataset, here in by_dataset(records):
        if not star(here):
            columns = good(here)[0]["values"]["columns"]
            groups[dataset] = [_bar(good(here, method=each), columns) for each in DENSITY_MODELS]
    return groups


def _bar(records: list[Record], columns: int = 1) -> Bar | None:
    """Return mean and standard error over runs; infinite if a row has density 0, None without records."""
    if not records:
        return None
    values = [
        np.inf if record["values"]["impossible_rows"] else record["values"]["nll"] / columns
        for record in records
    ]
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return Bar(float(np.mean(values)), float(error))


def _svg(title: str, methods: Sequence[str], groups: Groups) -> str:
    """Return a chart: title, legend, lines of the scale, bars and names of the sets."""
    finite = [bar.mean for bars in groups.values() for bar in bars if bar and np.isfinite(bar.mean)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    step = next((one for one in (0.25, 0.5, 1.0, 2.0, 5.0) if (high - low) / one <= 5.0), 10.0)
    low, high = step * np.floor(low / step), step * np.ceil(max(high, low + step) / step)
    at = lambda value: round(TOP + PANEL * (high - min(value, high)) / (high - low), 1)
    parts = [f'<text x="0" y="18" font-weight="600">{escape(title)}</text>', _legend(methods)]
    for value in np.arange(low, high + step / 2.0, step):
        parts.append(f'<path d="M{LEFT} {at(value)}H{WIDTH}" stroke="{INK}" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at(value) + 5}" text-anchor="end">{value:g}</text>')
    room = (WIDTH - LEFT) / max(len(groups), 1)
    longest = max((len(line) for name in groups for line in _lines(name)), default=1)
    size = min(FONT, 0.95 * room / (LETTER * longest))
    for place, (name, bars) in enumerate(groups.items()):
        start = LEFT + place * room
        parts.append(_name(name, start + room / 2.0, size))
        parts += _group(bars, start + 0.08 * room, 0.84 * room / len(bars), at)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + PANEL + BOTTOM}" '
        'font-family="system-ui, -apple-system, Segoe UI, Arial, sans-serif" '
        f'font-size="{FONT}" fill="{INK}">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def _lines(dataset: str) -> list[str]:
    """Return the name of a set, one line per word."""
    return NAMES.get(dataset, dataset).replace("-", "- ").split()


def _name(dataset: str, middle: float, size: float) -> str:
    """Return the name of a set below its bars in letters of this size."""
    place = f'x="{middle:.1f}" font-size="{size:.1f}" text-anchor="middle"'
    return "".join(
        f'<text {place} y="{TOP + PANEL + 18 + 17 * row}">{escape(line)}</text>'
        for row, line in enumerate(_lines(dataset))
    )


def _group(bars: Sequence[Bar | None], start: float, width: float, at: Any) -> list[str]:
    """Return the bars of one set with their errors; an infinite one reaches the top and is marked."""
    parts = []
    for place, bar in enumerate(bars):
        if bar is None:
            continue
        left, colour = start + place * width, COLOURS[place]
        top, bottom = sorted((at(bar.mean), at(0.0)))
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="{0.86 * width:.1f}" '
            f'height="{max(bottom - top, 1.0):.1f}" fill="{colour}"/>'
        )
        middle = left + 0.43 * width
        if bar.error > 0.0 and np.isfinite(bar.mean):
            ends = f"M{middle:.1f} {at(bar.mean - bar.error)}V{at(bar.mean + bar.error)}"
            parts.append(f'<path d="{ends}" stroke="{INK}" stroke-width="2"/>')
        if not np.isfinite(bar.mean):
            parts.append(f'<text x="{middle:.1f}" y="{top - 4}" text-anchor="middle">∞</text>')
    return parts


def _legend(methods: Sequence[str]) -> str:
    """Return a square and a name per method, three in a line."""
    parts = []
    for place, (colour, method) in enumerate(zip(COLOURS, methods, strict=False)):
        left, top = 170 * (place % 3), 32 + 21 * (place // 3)
        name = escape(NAMES.get(method, label(method)))
        parts.append(f'<rect class="key" x="{left}" y="{top}" width="13" height="13" fill="{colour}"/>')
        parts.append(f'<text x="{left + 19}" y="{top + 12}">{name}</text>')
    return "\n".join(parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or NOTHING
