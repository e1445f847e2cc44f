"""Pictures of a conditional density p(y | x): intervals along a feature, one condition at a time, and pairs of targets."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.estimators.base import ConditionalEstimator, GivenDensity, Seed
from kexpfam.plot.canvas import (
    DATA_COLOUR,
    MODEL_COLOUR,
    bare_arrays,
    column_at,
    comparable,
    drawn,
    feature_names,
    one_panel,
    scatter,
    some_rows,
    target_names,
)
from kexpfam.plot.densities import GRID_POINTS, line
from kexpfam.plot.pairs import plot_pairs

__all__ = ["plot_conditional", "plot_given", "plot_targets"]


@bare_arrays()
def plot_conditional(
    estimator: ConditionalEstimator,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    feature: int | str = 0,
    coverages: Sequence[float] = (0.5, 0.9),
    ax: Axes | None = None,
) -> Figure:
    """Return the median of y and its central intervals along one feature, with the training data or those given as points.

    The other features are held at their training medians; the points have values of their own there, so that they need not
    fill the intervals as they do where there is one feature.
    """
    trained = np.asarray(estimator.training_data_[0])
    shown, targets = rows_to_show(estimator, X, y)
    if targets.shape[1] > 1:
        raise ValueError("intervals are for targets of one dimension: use plot_given(estimator.given(x)) for this model.")
    names = feature_names(estimator, trained.shape[1])
    place = column_at(feature, names)
    grid = np.tile(np.median(trained, axis=0), (GRID_POINTS, 1))
    grid[:, place] = np.linspace(shown[:, place].min(), shown[:, place].max(), GRID_POINTS)
    figure, axis = one_panel(ax, width=6.4, height=4.2)
    points = some_rows(np.column_stack([shown[:, place], targets[:, 0]]))
    _bands(axis, estimator, grid, place, coverages)
    axis.scatter(points[:, 0], points[:, 1], s=8, color=DATA_COLOUR, alpha=0.6, linewidths=0, label="data", rasterized=True)
    others = " (the other features at their medians)" if trained.shape[1] > 1 else ""
    axis.set_xlabel(names[place] + others)
    axis.set_ylabel(target_names(estimator, 1)[0])
    if ax is None:
        figure.legend(loc="outside upper center", ncols=2 + len(coverages), frameon=False)
    return figure


@bare_arrays()
def plot_targets(
    estimator: ConditionalEstimator, X: ArrayLike | None = None, y: ArrayLike | None = None, *, random_state: Seed = 0
) -> Figure:
    """Return the pairs of several targets: the training data, or those given, and a draw under the condition of each."""
    X, targets = rows_to_show(estimator, X, y)
    draws = drawn(estimator, X, 1, random_state).reshape(targets.shape)
    return plot_pairs(targets, draws, target_names(estimator, targets.shape[1]))


def plot_given(given: GivenDensity, *, n_samples: int = 1000, random_state: Seed = 0, ax: Axes | None = None) -> Figure:
    """Return the density under one condition with draws of the sampler; the draws alone, if y has two dimensions or more."""
    draws = np.asarray(given.sample(n_samples, random_state=random_state)).reshape(n_samples, -1)
    names = given.target_names or (["y"] if draws.shape[1] == 1 else [f"y{k}" for k in range(draws.shape[1])])
    figure, axis = one_panel(ax, width=5.0, height=3.8)
    if draws.shape[1] == 1:
        axis.hist(draws[:, 0], bins=40, density=True, histtype="step", color=MODEL_COLOUR, alpha=0.6, label="draws")
        line(axis, given, around=draws)
        axis.set_xlabel(names[0])
        axis.legend(frameon=False)
    else:
        scatter(axis, None, draws[:, :2])
        axis.set_aspect("equal" if comparable(np.ptp(draws[:, :2], axis=0)) else "auto")
        axis.set(xlabel=names[0], ylabel=names[1])
    if given.condition:
        axis.set_title("given " + ", ".join(f"{name} = {value:.3g}" for name, value in given.condition.items()))
    return figure


def rows_to_show(estimator: ConditionalEstimator, X: ArrayLike | None, y: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Return features and targets, both as columns: those given, or those of the training."""
    if (X is None) != (y is None):
        raise ValueError("give both X and y, or neither to see the training data.")
    rows, targets = estimator.training_data_ if X is None or y is None else (X, y)
    return np.asarray(rows), np.asarray(targets).reshape(len(np.asarray(rows)), -1)


def _bands(axis: Axes, estimator: ConditionalEstimator, grid: np.ndarray, feature: int, coverages: Sequence[float]) -> None:
    shades = np.linspace(0.25, 0.35, len(coverages))
    # The wide intervals lie under the narrow ones.
    for coverage, shade in zip(sorted(coverages, reverse=True), shades, strict=True):
        limits = np.asarray(estimator.interval(grid, coverage)).T
        look: dict[str, Any] = {
            "color": matplotlib.colors.to_rgba(MODEL_COLOUR, shade),
            "linewidth": 0,
            "label": f"{coverage:.0%} interval",
        }
        axis.fill_between(grid[:, feature], *limits, **look)
    axis.plot(grid[:, feature], estimator.quantile(grid, 0.5), color=MODEL_COLOUR, linewidth=2.0, label="median")
