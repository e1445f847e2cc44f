"""Numbers with error bars, one per line."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.plot.canvas import MODEL_COLOUR, panels, shortened


def plot_ranking(
    names: Sequence[str],
    values: ArrayLike,
    errors: ArrayLike | None = None,
    *,
    label: str,
    ax: Axes | None = None,
) -> Figure:
    """Return a figure of values with error bars of two standard errors, the first name on top."""
    values = np.asarray(values, float)
    figure, (axis,) = panels(1, ax, width=5.0, height=0.9 + 0.32 * len(values))
    places = np.arange(len(values))[::-1]
    spread = None if errors is None else 2.0 * np.asarray(errors, float)
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.errorbar(values, places, xerr=spread, fmt="o", color=MODEL_COLOUR, markersize=6, elinewidth=1.5)
    axis.set_yticks(places, [shortened(name, 24) for name in names])
    for tick in axis.get_yticklabels():
        tick.set_parse_math(False)
    axis.set_ylim(-0.6, len(values) - 0.4)
    axis.set_xlabel(label if errors is None else f"{label}, ± 2 standard errors")
    return figure
