"""Bars and curves: rankings, surprises of a row, drift, and the steps of a solver."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.estimators.base import Estimator
from kexpfam.plot.canvas import (
    DATA_COLOUR,
    MODEL_COLOUR,
    aspect,
    axis_limits,
    legend_above,
    panels,
    scatter_both,
    shortened,
)

# Most columns of an explanation, and most curves of a monitor with a name.
MOST_CELLS, MOST_CURVES = 12, 3


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
    places = _named_places(axis, names, 24)
    spread = None if errors is None else 2.0 * np.asarray(errors, float)
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.errorbar(values, places, xerr=spread, fmt="o", color=MODEL_COLOUR, markersize=6, elinewidth=1.5)
    axis.set_ylim(-0.6, len(values) - 0.4)
    axis.set_xlabel(label if errors is None else f"{label}, ± 2 standard errors")
    return figure


def _named_places(axis: Axes, names: Sequence[str], most: int) -> np.ndarray:
    """Return the heights of named rows, the first on top; label them with at most ``most`` characters."""
    places = np.arange(len(names))[::-1]
    axis.set_yticks(places, [shortened(name, most) for name in names])
    for tick in axis.get_yticklabels():
        tick.set_parse_math(False)
    return places


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
    low, high = axis_limits(data[:, :2], draws[steps[-1]][:, :2])
    figure, axes = panels(len(chosen), width=2.6, height=2.6, columns=3)
    for axis, step in zip(axes, [steps[i] for i in chosen], strict=True):
        scatter_both(axis, data, draws[step])
        axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect=aspect(high - low))
        axis.axis("off")
        axis.set_title("initialisation" if step == 0 else f"after {step:,} steps")
    return figure


def plot_explanation(explanation: Any, row: int = 0, *, ax: Axes | None = None) -> Figure:
    """Return a figure of the surprise of the columns of one row, the most surprising on top."""
    surprise = np.nan_to_num(explanation.surprise[row], posinf=np.nan)
    surprise = np.where(np.isnan(surprise), 1.2 * max(np.nanmax(np.append(surprise, 1.0)), 1.0), surprise)
    order = np.argsort(-surprise)[:MOST_CELLS]
    figure, (axis,) = panels(1, ax, width=7.0, height=0.9 + 0.32 * len(order))
    names = [f"{explanation.names[j]} = {explanation.cell(row, int(j))}" for j in order]
    axis.barh(_named_places(axis, names, 60), surprise[order], color=MODEL_COLOUR, height=0.6)
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.set_xlabel("surprise (nats)")
    axis.set_title(f"row {row}: p = {explanation.p_values[row]:.2g}", loc="left")
    return figure


def plot_monitor(monitor: Any, *, ax: Axes | None = None) -> Figure:
    """Return a figure of the evidence against exchangeability after each row, with the alarm's limit."""
    figure, (axis,) = panels(1, ax, width=7.0, height=3.2)
    logs = monitor.log_evidence / np.log(10.0)
    steps = np.arange(1, len(logs) + 1)
    top = np.argsort(-logs.max(axis=0, initial=-np.inf))[:MOST_CURVES]
    for place in range(logs.shape[1]):
        look: Any = {"color": "0.75", "linewidth": 0.8} if place not in top else {"linewidth": 1.4}
        axis.plot(steps, logs[:, place], label=monitor.names[place] if place in top else None, **look)
    axis.plot(steps, monitor.log_total / np.log(10.0), color="black", linewidth=1.8, label="mean of all")
    axis.axhline(-np.log10(monitor.level), color=DATA_COLOUR, linestyle="--", label="alarm")
    axis.set_xlabel("row")
    axis.set_ylabel("evidence of drift (log10)")
    legend_above(axis)
    return figure
