"""Steps of a solver: its trace, and draws of its sampler during the fit."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kexpfam.estimators.base import Estimator
from kexpfam.plot.canvas import MODEL_COLOUR, aspect, panels, scatter_both


def plot_trace(estimator: Estimator) -> Figure:
    """Return a figure with one panel per series of the solver's trace."""
    trace = getattr(getattr(estimator, "solution_", None), "trace", None)
    if not trace:
        raise ValueError("this model has no steps to show: use an iterative solver, such as solver='dde'.")
    figure, axes = panels(len(trace), width=3.6, height=3.0, columns=4)
    for axis, (name, series) in zip(axes, trace.items(), strict=True):
        title = name.replace("_", " ")
        axis.plot(np.arange(1, len(series) + 1), series, color=MODEL_COLOUR, linewidth=0.8)
        axis.set(title=title, xlabel="step", ylabel=title)
    return figure


def plot_snapshots(estimator: Any, *, most: int = 6) -> Figure:
    """Return draws of the sampler at several steps of a fit, each over the data, in model units.

    The model must have been fitted with ``DDE(snapshots=True)``. The first two coordinates of f are shown.
    """
    snapshots = getattr(getattr(estimator, "solution_", None), "snapshots", None) or {}
    draws = {int(step): np.asarray(points) for step, points in snapshots.items()}
    if not draws:
        raise ValueError("this model has no snapshots: fit it with solver=DDE(snapshots=True).")
    data = np.asarray(estimator._problem.sample.target)
    if data.shape[1] < 2:
        raise ValueError("snapshots show two coordinates, and f depends on one here; use plot() instead.")
    steps = sorted(draws)
    chosen = np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))
    figure, axes = panels(len(chosen), width=3.4, height=3.4, columns=3)
    for axis, step in zip(axes, [steps[i] for i in chosen], strict=True):
        scatter_both(axis, data, draws[step])
        axis.set_aspect(aspect(np.ptp(data[:, :2], axis=0)))  # type: ignore[arg-type]
        axis.axis("off")
        axis.set_title("initialisation" if step == 0 else f"after {step:,} steps")
    return figure
