"""One column at a time: histograms of the data and the density or the shares of draws from the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR, legend_above, panels, shortened

# A column with at most this many distinct values is shown as the share of each.
MOST_VALUES = 20


def plot_marginal(
    values: ArrayLike,
    draws: ArrayLike | None = None,
    *,
    name: str = "x",
    levels: Sequence[str] | None = None,
    ax: Axes | None = None,
    labels: bool = True,
) -> Figure:
    """Return the histogram of one column and the density of draws from a model.

    A column of few distinct values is shown as the share of each; draws count for the nearest value.
    ``levels`` are the labels of a category, whose values are their positions. Missing values (NaN) are left
    out.
    """
    figure, (axis,) = panels(1, ax, width=3.4, height=2.6)
    column = _finite(values)
    drawn = None if draws is None else _finite(draws)
    distinct = np.unique(column) if levels is None else np.arange(len(levels), dtype=float)
    if len(distinct) <= MOST_VALUES or levels is not None:
        _shares(axis, column, distinct, drawn)
    else:
        edges = histogram(axis, column)
        if drawn is not None:
            axis.plot(*smoothed(drawn, edges), color=MODEL_COLOUR, linewidth=2.0, label="model")
        axis.set_ylabel("density")
    axis.set_xlabel(name)
    if levels is not None:
        name_levels(axis.xaxis, levels)
    if labels and drawn is not None:
        legend_above(axis)
    return figure


def plot_columns(draws: np.ndarray, data: np.ndarray | None, columns: Any, names: Sequence[str]) -> Figure:
    """Return a panel per column: bars for labels and integers, histograms for other kinds.

    ``draws`` and ``data`` are arrays of numbers; ``columns`` has the kinds of the columns. Missing values
    are left out.
    """
    figure, axes = panels(len(names), width=3.6, height=3.0, columns=3)
    tables = [("draws", draws, MODEL_COLOUR)] + ([] if data is None else [("data", data, DATA_COLOUR)])
    for j, (axis, kind, name) in enumerate(zip(axes, columns.kinds, names, strict=True)):
        for place, (label, table, colour) in enumerate(tables):
            values = table[~np.isnan(table[:, j]), j]
            look: dict[str, Any] = {"color": colour, "label": label}
            if kind.discrete:
                seen, counts = np.unique(values, return_counts=True)
                axis.bar(seen + 0.4 * (place - 0.5), counts / counts.sum(), width=0.4, alpha=0.6, **look)
            else:
                axis.hist(values, bins=40, density=True, histtype="step", **look)
        if kind.labels:
            name_levels(axis.xaxis, kind.labels)
        axis.set_xlabel(str(name))
    axes[0].legend()
    return figure


def name_levels(axis: XAxis | YAxis, levels: Sequence[str]) -> None:
    """Label the codes of a category, at most the first ``MOST_VALUES``; rotate long labels."""
    shown = [shortened(level, 14) for level in levels[:MOST_VALUES]]
    axis.set_ticks(list(range(len(shown))), shown)
    rotated = isinstance(axis, XAxis) and max(map(len, shown)) > 4
    for label in axis.get_ticklabels():
        label.set_parse_math(False)
        label.set_rotation(30 if rotated else 0)


def histogram(axis: Axes, data: np.ndarray, draws: np.ndarray | None = None) -> np.ndarray:
    """Draw the histogram of the data, and of draws as an outline; return the edges of the bars."""
    edges = _edges(data)
    look: dict[str, Any] = {"bins": edges.tolist(), "density": True}
    axis.hist(data, color=DATA_COLOUR, alpha=0.35, label="data", **look)
    if draws is not None:
        axis.hist(draws, histtype="step", color=MODEL_COLOUR, alpha=0.7, label="draws", **look)
    return edges


def smoothed(draws: np.ndarray, edges: np.ndarray, fine: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return points, ``fine`` per bar, and the density of the draws there.

    The density is smoothed by half the width of a bar and reflected at the ends. The curve spans the edges
    and one bar more on either side; draws beyond count in the total.
    """
    from scipy.ndimage import gaussian_filter1d  # slow to import

    bar = edges[1] - edges[0]
    low, high = max(edges[0] - bar, draws.min()), min(edges[-1] + bar, draws.max())
    if not high > low:
        low, high = edges[0], edges[-1]
    cells = max(int(np.ceil(fine * (high - low) / bar)), 1)
    counts, borders = np.histogram(draws, bins=cells, range=(low, high))
    width = borders[1] - borders[0]
    density = gaussian_filter1d(counts / (len(draws) * width), 0.5 * bar / width, mode="reflect")
    return 0.5 * (borders[1:] + borders[:-1]), density


def _finite(values: ArrayLike) -> np.ndarray:
    column = np.asarray(values, float).ravel()
    return column[np.isfinite(column)]


def _edges(values: np.ndarray, fewest: int = 15, most: int = 40) -> np.ndarray:
    """Return the edges of equal bars: the rule of Freedman and Diaconis within limits."""
    low, high = values.min(), values.max()
    if not high > low:
        return np.array([low - 0.5, low + 0.5])
    width = 2.0 * np.subtract(*np.percentile(values, [75, 25])) / len(values) ** (1.0 / 3.0)
    wanted = (high - low) / width if width > 0.0 else most
    # The interquartile range of separated modes is too wide a measure: it would give too few bars.
    fewest = max(min(fewest, int(np.sqrt(len(values)))), 1)
    return np.linspace(low, high, int(np.clip(np.ceil(wanted), fewest, most)) + 1)


def _shares(axis: Axes, values: np.ndarray, distinct: np.ndarray, draws: np.ndarray | None) -> None:
    width = 0.8 * (np.diff(distinct).min() if len(distinct) > 1 else 1.0)
    axis.bar(distinct, _nearest(values, distinct), width=width, color=DATA_COLOUR, alpha=0.35, label="data")
    if draws is not None:
        axis.plot(distinct, _nearest(draws, distinct), "o", color=MODEL_COLOUR, markersize=5, label="model")
    axis.set_ylabel("share of rows")
    axis.set_ylim(bottom=0.0)


def _nearest(values: np.ndarray, distinct: np.ndarray) -> np.ndarray:
    """Return the share of values whose nearest distinct value is each."""
    nearest = np.searchsorted(0.5 * (distinct[1:] + distinct[:-1]), values)
    return np.bincount(nearest, minlength=len(distinct)) / len(values)
