"""Calibration on held-out rows: PIT values and coverage, with simultaneous bands of a calibrated model."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.judge.diagnosis import Diagnosis
from kexpfam.judge.metrics import simultaneous_limits
from kexpfam.plot.canvas import MODEL_COLOUR, panels

BAND: dict[str, Any] = {"color": "black", "alpha": 0.12, "linewidth": 0}


def plot_calibration(diagnosis: Diagnosis) -> Figure:
    """Return the histogram of held-out PIT values and the coverage of central intervals.

    The grey bands contain all bars, and the whole curve, of a calibrated model with probability 95 %.
    """
    if "pit" not in diagnosis:
        raise ValueError("this diagnosis has no calibration: pass held-out X and y to diagnose().")
    figure, axes = panels(2, width=4.5, height=4.0)
    pit, levels = diagnosis["pit"], diagnosis["region_level"]
    plot_pit(pit.value, name=pit.text, ax=axes[0])
    axes[0].set_title(f"uniform if calibrated (p of all tests: {diagnosis.pit_p_value:.2g})")
    plot_reliability(levels.value, ax=axes[1])
    axes[1].set_title(f"{levels.text}, {diagnosis.held_out_rows} held-out rows")
    return figure


def plot_pit(values: ArrayLike, *, name: str = "PIT", bars: int = 10, ax: Axes | None = None) -> Figure:
    """Return the histogram of PIT values, uniform under a calibrated model, with a simultaneous 95 % band."""
    values = np.asarray(values, float)
    figure, (axis,) = panels(1, ax, width=4.5, height=4.0)
    counts = np.histogram(values, bins=bars, range=(0.0, 1.0))[0]
    low, high = simultaneous_limits(len(values), np.full(bars, 1.0 / bars), cumulative=False)
    axis.axhspan(low[0], high[0], label="95 % of chance, all bars at once", **BAND)
    axis.bar((np.arange(bars) + 0.5) / bars, counts, width=0.9 / bars, color=MODEL_COLOUR, alpha=0.6)
    axis.axhline(len(values) / bars, color="black", linewidth=0.8)
    for limit in (low[0], high[0]):
        axis.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlim=(0.0, 1.0), xlabel=name, ylabel="rows")
    return figure


def plot_reliability(
    levels_needed: ArrayLike, *, name: str = "coverage", steps: int = 50, ax: Axes | None = None
) -> Figure:
    """Return the share of rows inside regions of each nominal coverage, with a simultaneous 95 % band.

    ``levels_needed`` has, for each row, the coverage of the smallest region that contains it: ``|2 PIT - 1|``
    for central intervals, the probability of a higher density for highest-density regions. It is uniform
    under a calibrated model.
    """
    needed = np.sort(np.asarray(levels_needed, float))
    figure, (axis,) = panels(1, ax, width=4.5, height=4.0)
    levels = np.linspace(0.0, 1.0, steps + 1)
    limits = simultaneous_limits(len(needed), np.full(steps, 1.0 / steps), cumulative=True)
    low, high = (np.concatenate([[0.0], limit / len(needed), [1.0]]) for limit in limits)
    axis.fill_between(levels, low, high, label="95 % of chance", **BAND)
    axis.plot(levels, levels, color="black", linewidth=0.8, label="calibrated")
    observed = np.searchsorted(needed, levels, side="right") / len(needed)
    axis.plot(levels, observed, color=MODEL_COLOUR, linewidth=2.0, label="observed")
    axis.legend(loc="lower right", frameon=False)
    axis.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0), xlabel=f"nominal {name}", ylabel=f"observed {name}")
    axis.set_aspect("equal")
    return figure
