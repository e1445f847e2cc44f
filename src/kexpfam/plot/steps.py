"""Pictures of a solver at work: its trace, and its sampler's draws on the way."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kexpfam.estimators.base import Estimator
from kexpfam.plot.canvas import MODEL_COLOUR, comparable, panels, scatter

__all__ = ["plot_snapshots", "plot_trace"]


def plot_trace(estimator: Estimator) -> Figure:
    """Return a figure of the solver's steps: a panel for each series of its trace, by the name that the solver gives it."""
    trace = getattr(getattr(estimator, "solution_", None), "trace", None)
    if not trace:
        raise ValueError(
            "this model has no steps to show: it was fitted outright; a solver with steps is solver='dde', say."
        )
    figure, axes = panels(len(trace), width=3.6, height=3.0, columns=4)
    for axis, (name, series) in zip(axes, trace.items(), strict=True):
        axis.plot(np.arange(1, len(series) + 1), series, color=MODEL_COLOUR, linewidth=0.8)
        axis.set_title(name.replace("_", " "))
        axis.set(xlabel="step", ylabel=name.replace("_", " "))
    return figure


def plot_snapshots(estimator: Any, *, most: int = 6) -> Figure:
    """Return sampler draws at several steps of a run, each over the data: convergence as the paper shows it.

    The model must have been fitted with ``DDE(snapshots=True)``. The first two coordinates of f are shown, in model units.
    """
    solution = getattr(estimator, "solution_", None)
    kept = {
        int(step): np.asarray(draws) for step, draws in (getattr(solution, "snapshots", None) or {}).items()
    }
    if not kept:
        raise ValueError("this model has no snapshots: fit it with solver=DDE(snapshots=True).")
    data, steps = np.asarray(estimator._problem.sample.target), sorted(kept)
    if data.shape[1] < 2:
        raise ValueError("snapshots are drawn in two coordinates, and f depends on one here; use plot().")
    chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))]
    figure, axes = panels(len(chosen), width=3.4, height=3.4, columns=3)
    for axis, step in zip(axes, chosen, strict=True):
        scatter(axis, data[:, :2], kept[step][:, :2])
        axis.set_aspect("equal" if comparable(np.ptp(data[:, :2], axis=0)) else "auto")
        axis.axis("off")
        axis.set_title("initialisation" if step == 0 else f"after {step:,} steps")
    return figure
