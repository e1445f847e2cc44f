"""Pictures of calibration on held-out rows: PIT values and coverage, with bands of what chance does to a perfect model."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.judge.bands import simultaneous_limits
from kexpfam.judge.diagnosis import Diagnosis
from kexpfam.plot.canvas import MODEL_COLOUR, one_panel, panels

__all__ = ["plot_calibration", "plot_pit", "plot_reliability"]

BARS, LEVELS = 10, 50
INK = "black"


def plot_calibration(diagnosis: Diagnosis) -> Figure:
    """Return the histogram of held-out PIT values and the coverage of central intervals.

    The grey bands hold all bars, and the whole curve, of a perfect model in 95 % of cases.
    """
    if "pit" not in diagnosis:
        raise ValueError(
            "this diagnosis has no calibration: pass held-out X and y to diagnose() of a conditional model."
        )
    figure, axes = panels(2, width=4.5, height=4.0)
    pit, levels = diagnosis["pit"], diagnosis["region_level"]
    plot_pit(pit.value, name=pit.text, ax=axes[0])
    axes[0].set_title(f"uniform if calibrated (KS p = {diagnosis.pit_p_value:.2g})")
    plot_reliability(levels.value, ax=axes[1])
    axes[1].set_title(f"{levels.text}, {diagnosis.held_out_rows} held-out rows")
    return figure


def plot_pit(values: ArrayLike, *, name: str = "PIT", ax: Axes | None = None) -> Figure:
    """Return the histogram of values that are uniform on [0, 1] if a model is right, with a simultaneous band of 95 %."""
    values = np.asarray(values, float)
    figure, axis = one_panel(ax, width=4.5, height=4.0)
    counts, rows = np.histogram(values, bins=BARS, range=(0.0, 1.0))[0], len(values)
    low, high = simultaneous_limits(rows, np.full(BARS, 1.0 / BARS), cumulative=False)
    axis.axhspan(
        low[0], high[0], color=INK, alpha=0.12, linewidth=0, label="95 % of chance, all bars at once"
    )
    axis.bar((np.arange(BARS) + 0.5) / BARS, counts, width=0.9 / BARS, color=MODEL_COLOUR, alpha=0.6)
    axis.axhline(rows / BARS, color=INK, linewidth=0.8)
    for limit in (low[0], high[0]):
        axis.axhline(limit, color=INK, linewidth=0.8, linestyle=":")
    axis.set(xlim=(0.0, 1.0), xlabel=name, ylabel="rows")
    return figure


def plot_reliability(levels_needed: ArrayLike, *, name: str = "coverage", ax: Axes | None = None) -> Figure:
    """Return the share of rows inside regions of each nominal coverage, with a simultaneous band of 95 %.

    ``levels_needed`` is, for every row, the coverage of the smallest region that holds it: of central intervals
    ``|2 PIT - 1|``, of regions of highest density the probability of a higher one. It is uniform if the model is right.
    """
    needed = np.asarray(levels_needed, float)
    figure, axis = one_panel(ax, width=4.5, height=4.0)
    levels = np.linspace(0.0, 1.0, LEVELS + 1)
    low, high = simultaneous_limits(len(needed), np.full(LEVELS, 1.0 / LEVELS), cumulative=True)
    band = [np.concatenate([[0.0], side / len(needed), [1.0]]) for side in (low, high)]
    look: dict[str, Any] = {"color": INK, "alpha": 0.12, "linewidth": 0, "label": "95 % of chance"}
    axis.fill_between(levels, band[0], band[1], **look)
    axis.plot(levels, levels, color=INK, linewidth=0.8, label="calibrated")
    observed = np.searchsorted(np.sort(needed), levels, side="right") / len(needed)
    axis.plot(levels, observed, color=MODEL_COLOUR, linewidth=2.0, label="observed")
    axis.legend(loc="lower right", frameon=False)
    axis.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0), xlabel=f"nominal {name}", ylabel=f"observed {name}")
    axis.set_aspect("equal")
    return figure
