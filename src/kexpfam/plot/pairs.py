"""Pairs of columns: data and draws, with each column alone on the diagonal."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike

from kexpfam.plot.canvas import Picture, axis_limits, plain_text, scatter_both, shortened, some_rows
from kexpfam.plot.marginals import name_levels, plot_marginal


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
    figure = Picture(figsize=(side * count + 0.4, side * count + 0.4), layout=layout)
    low, high = axis_limits(data, draws)
    labels = list(levels or [None] * count)
    categorical = np.array([label is not None for label in labels])
    for row, column in np.argwhere(np.tri(count)).tolist():
        axis = figure.add_subplot(count, count, row * count + column + 1)
        plain_text(axis)
        if column == row:
            both = data[:, row], draws[:, row]
            plot_marginal(*both, name=names[row], levels=labels[row], ax=axis, labels=False)
            axis.set_ylabel("")
            axis.set_yticks([])
        else:
            pair = [column, row]
            shown = (_jittered(some_rows(t[:, pair], most_rows), categorical[pair]) for t in (data, draws))
            scatter_both(axis, *shown, size=4.0)
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
