"""Columns alone, and pairs of columns: data, and draws or the density of a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike

from kexpfam.plot import canvas
from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR, legend_above, panels, shortened


def plot_marginal(
    values: ArrayLike,
    draws: ArrayLike | None = None,
    *,
    name: str = "x",
    levels: Sequence[str] | None = None,
    most_values: int = 20,
    ax: Axes | None = None,
    labels: bool = True,
) -> Figure:
    """Return the histogram of one column and the density of draws from a model.

    A column of at most ``most_values`` distinct values is shown as the share of each; draws count for the
    nearest value. ``levels`` are the labels of a category, whose values are their positions. Missing values
    (NaN) are left out.
    """
    figure, (axis,) = panels(1, ax, width=3.4, height=2.6)
    column = _finite(values)
    drawn = None if draws is None else _finite(draws)
    distinct = np.unique(column) if levels is None else np.arange(len(levels), dtype=float)
    if len(distinct) <= most_values or levels is not None:
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


def plot_pairs(
    data: ArrayLike,
    draws: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    levels: Sequence[Sequence[str] | None] | None = None,
    most_columns: int = 8,
    most_rows: int = 600,
) -> Figure:
    """Return a figure of all pairs of the first ``most_columns`` columns, with each column on the diagonal.

    The curves on the diagonal use all draws; the scatter plots show at most ``most_rows`` rows. ``levels``
    has, for each column, the labels of a category whose values are their positions, or None for numbers.
    """
    data, draws = np.asarray(data, float), np.asarray(draws, float)
    names = [f"x{k}" for k in range(data.shape[1])] if names is None else [str(name) for name in names]
    if data.shape[1] < 2 or data.shape[1:] != draws.shape[1:] or len(names) != data.shape[1]:
        raise ValueError(
            "a pair plot needs data and draws of the same columns, at least two, and a name for each: "
            f"got shapes {data.shape} and {draws.shape}, and {len(names)} names."
        )
    count = min(data.shape[1], most_columns)
    data, draws = data[:, :count], draws[:, :count]
    side = 2.0 if count <= 4 else 1.6
    layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    figure = canvas.Picture(figsize=(side * count + 0.4, side * count + 0.4), layout=layout)
    low, high = canvas.axis_limits(data, draws)
    labels = list(levels or [None] * count)
    categorical = np.array([label is not None for label in labels])
    for row, column in np.argwhere(np.tri(count)).tolist():
        axis = figure.add_subplot(count, count, row * count + column + 1)
        canvas.plain_text(axis)
        if column == row:
            both = data[:, row], draws[:, row]
            plot_marginal(*both, name=names[row], levels=labels[row], ax=axis, labels=False)
            axis.set_ylabel("")
            axis.set_yticks([])
        else:
            pair = [column, row]
            shown = (
                _jittered(canvas.some_rows(t[:, pair], most_rows), categorical[pair]) for t in (data, draws)
            )
            canvas.scatter_both(axis, *shown, size=4.0)
            axis.set_ylim(low[row], high[row])
        axis.set_xlim(low[column], high[column])
        _label(axis, names, row, column, labels, last=count - 1)
    figure.align_labels()
    handles = figure.axes[1].get_legend_handles_labels()
    figure.legend(*handles, loc="upper right", markerscale=3, frameon=False)
    return figure


def _jittered(points: np.ndarray, categorical: np.ndarray) -> np.ndarray:
    """Return the points with uniform noise on the codes of categories, so that they do not coincide."""
    return points + np.where(categorical, np.random.default_rng(0).uniform(-0.25, 0.25, points.shape), 0.0)


def _label(
    axis: Axes, names: list[str], row: int, column: int, labels: list[Sequence[str] | None], last: int
) -> None:
    """Label the axes of the first column and of the last row; the others share them."""
    axis.set_xlabel(shortened(names[column], 18) if row == last else "")
    axis.tick_params(labelbottom=row == last, labelleft=column == 0 and row > 0, labelsize="small")
    axis.tick_params(axis="x", labelrotation=30)
    sides = [(axis.xaxis, column)] + ([] if column == row else [(axis.yaxis, row)])
    for side, place in sides:
        if (levels := labels[place]) is not None:
            name_levels(side, levels)
        else:
            axis.locator_params(axis="x" if side is axis.xaxis else "y", nbins=4)
    if column == 0:
        axis.set_ylabel(shortened(names[row], 18))


def name_levels(axis: XAxis | YAxis, levels: Sequence[str], most: int = 20) -> None:
    """Label the codes of a category, at most the first ``most``; rotate long labels."""
    shown = [shortened(level, 14) for level in levels[:most]]
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
