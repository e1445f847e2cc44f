"""Figures of the use of a model: what makes a row unusual, and drift."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR, legend_above, panels, shortened

# Most columns of an explanation, and most curves of a monitor with a name.
MOST_CELLS, MOST_CURVES = 12, 3


def plot_explanation(explanation: Any, row: int = 0, *, ax: Axes | None = None) -> Figure:
    """Return a figure of the surprise of the columns of one row, the most surprising on top."""
    surprise = np.nan_to_num(explanation.surprise[row], posinf=np.nan)
    surprise = np.where(np.isnan(surprise), 1.2 * max(np.nanmax(np.append(surprise, 1.0)), 1.0), surprise)
    order = np.argsort(-surprise)[:MOST_CELLS]
    figure, (axis,) = panels(1, ax, width=7.0, height=0.9 + 0.32 * len(order))
    places = np.arange(len(order))[::-1]
    axis.barh(places, surprise[order], color=MODEL_COLOUR, height=0.6)
    axis.axvline(0.0, color="black", linewidth=0.8)
    names = [f"{explanation.names[j]} = {explanation.cell(row, int(j))}" for j in order]
    axis.set_yticks(places, [shortened(name, 60) for name in names])
    for tick in axis.get_yticklabels():
        tick.set_parse_math(False)
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
