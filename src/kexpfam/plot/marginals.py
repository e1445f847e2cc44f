"""One column at a time: the histogram of the data, and over it what the model says."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR, legend_above, one_panel

__all__ = ["histogram", "name_levels", "plot_marginal"]

# A column with no more distinct values than this is shown as shares of each.
MOST_VALUES = 20
FEWEST_BARS, MOST_BARS = 15, 40
# Labels up to the first length lie flat below a panel, and are cut at the second.
SHORT_LABEL, LONGEST_LABEL = 4, 14
# Places of the curve that draws are smoothed to, within the width of a bar.
FINE = 16


def plot_marginal(
    values: ArrayLike,
    draws: ArrayLike | None = None,
    *,
    name: str = "x",
    levels: Sequence[str] | None = None,
    ax: Axes | None = None,
    labels: bool = True,
) -> Figure:
    """Return the histogram of one column, and over it the density of draws of a model: it takes some thousands to be smooth.

    A column of few distinct values is shown as the share of each, draws counted with the value that is nearest; ``levels`` are
    the labels of a category, whose values are their places. Gaps (NaN) are left out.
    """
    figure, axis = one_panel(ax, width=3.4, height=2.6)
    column = np.asarray(values, float).ravel()
    column = column[np.isfinite(column)]
    drawn = None if draws is None else np.asarray(draws, float).ravel()
    drawn = None if drawn is None else drawn[np.isfinite(drawn)]
    distinct = np.unique(column) if levels is None else np.arange(len(levels), dtype=float)
    if len(distinct) <= MOST_VALUES or levels is not None:
        _shares(axis, column, distinct, drawn)
    else:
        edges = histogram(axis, column)
        if drawn is not None:
            points, density = smoothed(drawn, edges)
            axis.plot(points, density, color=MODEL_COLOUR, linewidth=2.0, label="model")
        axis.set_ylabel("density")
    axis.set_xlabel(name)
    if levels is not None:
        name_levels(axis.xaxis, levels)
    if labels and drawn is not None:
        legend_above(axis)
    return figure


def name_levels(axis: XAxis | YAxis, levels: Sequence[str]) -> None:
    """Put the labels of a category, the first few of many, where their codes are."""
    shown = [
        level if len(level) <= LONGEST_LABEL else f"{level[: LONGEST_LABEL - 1]}…"
        for level in levels[:MOST_VALUES]
    ]
    axis.set_ticks(list(range(len(shown))), shown)
    for label in axis.get_ticklabels():
        label.set_parse_math(False)
        label.set_rotation(30 if isinstance(axis, XAxis) and max(map(len, shown)) > SHORT_LABEL else 0)


def histogram(axis: Axes, data: np.ndarray, draws: np.ndarray | None = None) -> np.ndarray:
    """Draw the histogram of data, and the outline of that of draws, as densities; return the edges of the bars."""
    edges = _edges(data)
    axis.hist(data, bins=edges.tolist(), density=True, color=DATA_COLOUR, alpha=0.35, label="data")
    if draws is not None:
        axis.hist(
            draws,
            bins=edges.tolist(),
            density=True,
            histtype="step",
            color=MODEL_COLOUR,
            alpha=0.7,
            label="draws",
        )
    return edges


def smoothed(draws: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places and the density of draws there, smoothed by half the width of a bar and mirrored at the ends.

    The curve spans the edges and one bar more on either side; draws beyond count in the total.
    """
    from scipy.ndimage import gaussian_filter1d  # slow to import

    bar = edges[1] - edges[0]
    low, high = max(edges[0] - bar, draws.min()), min(edges[-1] + bar, draws.max())
    if not high > low:
        low, high = edges[0], edges[-1]
    cells = max(int(np.ceil(FINE * (high - low) / bar)), 1)
    counts, fine = np.histogram(draws, bins=cells, range=(low, high))
    width = fine[1] - fine[0]
    density = gaussian_filter1d(counts / (len(draws) * width), 0.5 * bar / width, mode="reflect")
    return 0.5 * (fine[1:] + fine[:-1]), density


def _edges(values: np.ndarray) -> np.ndarray:
    """Return the edges of equal bars, by the rule of Freedman and Diaconis within limits."""
    low, high = values.min(), values.max()
    if not high > low:
        return np.array([low - 0.5, low + 0.5])
    width = 2.0 * np.subtract(*np.percentile(values, [75, 25])) / len(values) ** (1.0 / 3.0)
    wanted = (high - low) / width if width > 0.0 else MOST_BARS
    # Between modes that lie apart the quartiles are no measure of width: some bars there are in any case.
    fewest = min(FEWEST_BARS, int(np.sqrt(len(values))))
    return np.linspace(low, high, int(np.clip(np.ceil(wanted), max(fewest, 1), MOST_BARS)) + 1)


def _shares(axis: Axes, values: np.ndarray, distinct: np.ndarray, draws: np.ndarray | None) -> None:
    width = 0.8 * (np.diff(distinct).min() if len(distinct) > 1 else 1.0)
    axis.bar(
        distinct,
        _counts(values, distinct) / len(values),
        width=width,
        color=DATA_COLOUR,
        alpha=0.35,
        label="data",
    )
    if draws is not None:
        axis.plot(
            distinct,
            _counts(draws, distinct) / len(draws),
            "o",
            color=MODEL_COLOUR,
            markersize=5,
            label="model",
        )
    axis.set_ylabel("share of rows")
    axis.set_ylim(bottom=0.0)


def _counts(values: np.ndarray, distinct: np.ndarray) -> np.ndarray:
    """Return how many values are nearest to each of the distinct ones."""
    nearest = np.searchsorted(0.5 * (distinct[1:] + distinct[:-1]), values)
    return np.bincount(nearest, minlength=len(distinct))
