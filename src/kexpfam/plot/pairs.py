"""Every pair of columns, and each column on its own, of data and of draws."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike

from kexpfam.plot.canvas import Picture, frame, plain_text, scatter, some_rows
from kexpfam.plot.marginals import name_levels, plot_marginal

__all__ = ["plot_pairs"]

MOST_COLUMNS = 8
# Points of a panel.
MOST_SHOWN = 600
Labels = list[Sequence[str] | None]


def plot_pairs(
    data: ArrayLike,
    draws: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    levels: Sequence[Sequence[str] | None] | None = None,
    most_columns: int = MOST_COLUMNS,
) -> Figure:
    """Return a figure of the pairs of the columns (the first few where there are many), each column alone on the diagonal.

    All draws are in the curves on the diagonal, and some hundreds of rows in the clouds below it. ``levels`` are, for each
    column, the labels of a category whose values are their places, or None for numbers.
    """
    data, draws = np.asarray(data, float), np.asarray(draws, float)
    names = [f"x{k}" for k in range(data.shape[1])] if names is None else [str(name) for name in names]
    if data.shape[1] < 2 or data.shape[1:] != draws.shape[1:] or len(names) != data.shape[1]:
        raise ValueError(
            f"a pair plot needs data and draws of the same columns, two at least, and a name for each: got shapes "
            f"{data.shape} and {draws.shape}, and {len(names)} names."
        )
    count = min(data.shape[1], most_columns)
    data, draws = data[:, :count], draws[:, :count]
    side = 2.0 if count <= 4 else 1.6
    layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    figure = Picture(figsize=(side * count + 0.4, side * count + 0.4), layout=layout)
    low, high = frame(data, draws)
    labels = list(levels or [None] * count)
    for row in range(count):
        for column in range(row + 1):
            axis = figure.add_subplot(count, count, row * count + column + 1)
            plain_text(axis)
            _cell(axis, data, draws, names, row, column, labels)
            axis.set_xlim(low[column], high[column])
            if column < row:
                axis.set_ylim(low[row], high[row])
            _labels(axis, names, row, column, labels, last=count - 1)
    figure.align_labels()
    figure.legend(
        *figure.axes[1].get_legend_handles_labels(), loc="upper right", markerscale=3, frameon=False
    )
    return figure


def _cell(
    axis: Axes, data: np.ndarray, draws: np.ndarray, names: list[str], row: int, column: int, labels: Labels
) -> None:
    if column == row:
        plot_marginal(data[:, row], draws[:, row], name=names[row], levels=labels[row], ax=axis, labels=False)
        axis.set_ylabel("")
        axis.set_yticks([])
    else:
        shown = [
            _apart(some_rows(part[:, [column, row]], MOST_SHOWN), [labels[column], labels[row]])
            for part in (data, draws)
        ]
        scatter(axis, shown[0], shown[1], size=4.0)


def _apart(points: np.ndarray, labels: Labels) -> np.ndarray:
    """Return points of which those on the same label lie beside one another."""
    shift = np.random.default_rng(0).uniform(-0.25, 0.25, points.shape)
    return points + np.where([label is not None for label in labels], shift, 0.0)


def _labels(axis: Axes, names: list[str], row: int, column: int, labels: Labels, last: int) -> None:
    """Name the axes at the left and at the bottom; the others share them."""
    axis.set_xlabel(_short(names[column]) if row == last else "")
    axis.tick_params(labelbottom=row == last, labelleft=column == 0 and row > 0, labelsize="small")
    axis.tick_params(axis="x", labelrotation=30)
    for side, place in ((axis.xaxis, column), (axis.yaxis, row)):
        if side is axis.yaxis and column == row:
            continue
        if (names_of_levels := labels[place]) is not None:
            name_levels(side, names_of_levels)
        else:
            axis.locator_params(axis="x" if side is axis.xaxis else "y", nbins=4)
    if column == 0:
        axis.set_ylabel(_short(names[row]))


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
