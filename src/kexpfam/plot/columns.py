"""Pictures of tables with columns of several kinds: each column by itself, as its kind allows."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from kexpfam.data.encoding import Columns
from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR, panels

__all__ = ["plot_columns"]

BAR, BINS = 0.4, 40


def plot_columns(
    draws: np.ndarray, data: np.ndarray | None, columns: Columns, names: Sequence[str]
) -> Figure:
    """Return a panel for each column, as numbers: bars of labels and integers, histograms of others; gaps are left out."""
    figure, axes = panels(len(names), width=3.6, height=3.0, columns=3)
    tables = [("draws", draws, MODEL_COLOUR)] + ([] if data is None else [("data", data, DATA_COLOUR)])
    for j, (axis, kind, name) in enumerate(zip(axes, columns.kinds, names, strict=True)):
        for place, (label, table, colour) in enumerate(tables):
            values = table[~np.isnan(table[:, j]), j]
            if kind.discrete:
                seen, counts = np.unique(values, return_counts=True)
                axis.bar(
                    seen + BAR * (place - 0.5),
                    counts / counts.sum(),
                    width=BAR,
                    color=colour,
                    alpha=0.6,
                    label=label,
                )
            else:
                axis.hist(values, bins=BINS, density=True, histtype="step", color=colour, label=label)
        if kind.labels is not None:
            axis.set_xticks(range(len(kind.labels)), kind.labels)
        axis.set_xlabel(str(name))
    axes[0].legend()
    return figure
