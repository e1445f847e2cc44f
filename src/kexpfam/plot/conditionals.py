"""Pictures of a conditional density p(y | x): intervals along a feature, one condition at a time, and pairs of targets."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.data.kinds import AbstractKind, Real
from kexpfam.estimators.base import Seed
from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.estimators.derived import GivenDensity
from kexpfam.plot.canvas import (
    DATA_COLOUR,
    MODEL_COLOUR,
    bare_arrays,
    column_at,
    comparable,
    feature_names,
    one_panel,
    scatter,
    some_rows,
    target_names,
)
from kexpfam.plot.densities import GRID_POINTS, line
from kexpfam.plot.marginals import name_levels, plot_marginal
from kexpfam.plot.numbers import drawn, kinds_of, levels_of, numbers_of, training_rows
from kexpfam.plot.pairs import plot_pairs

__all__ = ["plot_conditional", "plot_given", "plot_targets"]

# Draws farther from the median than so many interquartile ranges are not shown.
FARTHEST = 4.0


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
    trained = training_rows(estimator)[0]
    shown, targets = rows_to_show(estimator, X, y)
    kinds = kinds_of(estimator, trained.shape[1], targets.shape[1])
    if targets.shape[1] > 1:
        raise ValueError(
            "intervals are for targets of one dimension: use plot_given(estimator.given(x)) for this model."
        )
    if kinds.targets[0].categorical:
        raise ValueError("labels have no intervals: use plot_targets(estimator) for this model.")
    names = feature_names(estimator, trained.shape[1])
    place = column_at(feature, names)
    figure, axis = one_panel(ax, width=6.4, height=4.2)
    labels = levels_of(kinds.features[place])
    middle = [_middle(column, kind) for column, kind in zip(trained.T, kinds.features, strict=True)]
    grid = np.tile(middle, (GRID_POINTS if labels is None else len(labels), 1))
    low, high = np.nanmin(shown[:, place]), np.nanmax(shown[:, place])
    grid[:, place] = np.linspace(low, high, GRID_POINTS) if labels is None else np.arange(len(labels))
    points = some_rows(np.column_stack([shown[:, place], targets[:, 0]]))
    (_bands if labels is None else _bars)(axis, estimator, grid, place, coverages)
    if labels is not None:
        points[:, 0] += np.random.default_rng(0).uniform(-0.3, 0.3, len(points))
        name_levels(axis.xaxis, labels)
    axis.scatter(
        points[:, 0],
        points[:, 1],
        s=8,
        color=DATA_COLOUR,
        alpha=0.6,
        linewidths=0,
        label="data",
        rasterized=True,
    )
    others = " (the other features at their medians)" if trained.shape[1] > 1 else ""
    axis.set_xlabel(names[place] + others)
    axis.set_ylabel(target_names(estimator, 1)[0])
    if ax is None:
        figure.legend(loc="outside upper center", ncols=2 + len(coverages), frameon=False)
    return figure


@bare_arrays()
def plot_targets(
    estimator: ConditionalEstimator,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    random_state: Seed = 0,
) -> Figure:
    """Return the pairs of several targets: the training data, or those given, and a draw under the condition of each."""
    X, targets = rows_to_show(estimator, X, y)
    draws, names = (
        drawn(estimator, 1, random_state, X).reshape(targets.shape),
        target_names(estimator, targets.shape[1]),
    )
    levels = [levels_of(kind) for kind in kinds_of(estimator, X.shape[1], targets.shape[1]).targets]
    if len(names) == 1:
        return plot_marginal(targets, draws, name=names[0], levels=levels[0])
    return plot_pairs(targets, draws, names, levels=levels)


def plot_given(
    given: GivenDensity, *, n_samples: int = 1000, random_state: Seed = 0, ax: Axes | None = None
) -> Figure:
    """Return the density under one condition with draws of the sampler; the draws alone, if y has two dimensions or more."""
    draws = np.asarray(given.sample(n_samples, random_state=random_state)).reshape(n_samples, -1)
    names = given.target_names or (["y"] if draws.shape[1] == 1 else [f"y{k}" for k in range(draws.shape[1])])
    figure, axis = one_panel(ax, width=5.0, height=3.8)
    kind = given.target_kinds[0] if given.target_kinds else Real()
    if draws.shape[1] == 1 and kind.discrete:
        _probabilities(axis, given, draws[:, 0], levels_of(kind))
        axis.set_xlabel(names[0])
    elif draws.shape[1] == 1:
        # A few draws far out would make the rest small.
        middle = draws[:, 0][
            np.abs(draws[:, 0] - np.median(draws)) <= FARTHEST * np.subtract(*np.percentile(draws, [75, 25]))
        ]
        shares = np.full(len(middle), 1.0 / len(draws))
        counts, edges = np.histogram(middle, bins=40, weights=shares)
        axis.stairs(counts / np.diff(edges), edges, color=MODEL_COLOUR, alpha=0.6, label="draws")
        line(axis, given, around=middle)
        axis.set_xlabel(names[0])
        axis.legend(frameon=False)
    else:
        scatter(axis, None, draws[:, :2])
        axis.set_aspect("equal" if comparable(np.ptp(draws[:, :2], axis=0)) else "auto")
        axis.set(xlabel=names[0], ylabel=names[1])
    if given.condition:
        axis.set_title(
            "given " + ", ".join(f"{name} = {cell(value)}" for name, value in given.condition.items())
        )
    return figure


def rows_to_show(
    estimator: ConditionalEstimator, X: ArrayLike | None, y: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return features and targets, both as columns: those given, or those of the training."""
    if (X is None) != (y is None):
        raise ValueError("give both X and y, or neither to see the training data.")
    rows, targets = training_rows(estimator) if X is None or y is None else numbers_of(estimator, X, y)
    return rows, targets


def cell(value: object) -> str:
    """Return a cell of a table in few characters."""
    return f"{value:.3g}" if isinstance(value, float | np.floating) else str(value)


def _middle(column: np.ndarray, kind: AbstractKind) -> float:
    """Return the median of numbers, and the most frequent of labels."""
    seen = column[~np.isnan(column)]
    if not kind.categorical:
        return float(np.median(seen))
    codes, counts = np.unique(seen, return_counts=True)
    return float(codes[np.argmax(counts)])


def _probabilities(axis: Axes, given: GivenDensity, draws: np.ndarray, labels: list[str] | None) -> None:
    """Draw the probability of each value that was drawn, or of each label."""
    codes = np.unique(draws) if labels is None else np.arange(len(labels), dtype=float)
    axis.bar(codes, np.exp(given.score_samples(codes)), width=0.8, color=MODEL_COLOUR, alpha=0.6)
    axis.set_ylabel("probability")
    if labels is not None:
        name_levels(axis.xaxis, labels)


def _bands(
    axis: Axes, estimator: ConditionalEstimator, grid: np.ndarray, feature: int, coverages: Sequence[float]
) -> None:
    shades = np.linspace(0.25, 0.35, len(coverages))
    # The wide intervals lie under the narrow ones.
    for coverage, shade in zip(sorted(coverages, reverse=True), shades, strict=True):
        limits = _interval(estimator, grid, coverage)
        look: dict[str, Any] = {
            "color": matplotlib.colors.to_rgba(MODEL_COLOUR, shade),
            "linewidth": 0,
            "label": f"{coverage:.0%} interval",
        }
        axis.fill_between(grid[:, feature], limits[0], limits[1], **look)
    median = np.asarray(estimator.quantile(_cells(estimator, grid), 0.5))
    axis.plot(grid[:, feature], median, color=MODEL_COLOUR, linewidth=2.0, label="median")


def _bars(
    axis: Axes, estimator: ConditionalEstimator, grid: np.ndarray, feature: int, coverages: Sequence[float]
) -> None:
    """Draw intervals under each label, the narrow ones over the wide."""
    for coverage, width in zip(
        sorted(coverages, reverse=True), (0.35, 0.5, *[0.6] * len(coverages)), strict=False
    ):
        low, high = _interval(estimator, grid, coverage)
        look: dict[str, Any] = {
            "color": MODEL_COLOUR,
            "alpha": 0.25,
            "width": width,
            "label": f"{coverage:.0%} interval",
        }
        axis.bar(grid[:, feature], high - low, bottom=low, **look)
    median = np.asarray(estimator.quantile(_cells(estimator, grid), 0.5))
    axis.plot(
        grid[:, feature], median, "_", color=MODEL_COLOUR, markersize=24, markeredgewidth=2.5, label="median"
    )


def _interval(
    estimator: ConditionalEstimator, grid: np.ndarray, coverage: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of central intervals, repaired ones of a model that was."""
    low, high = np.asarray(estimator.interval(_cells(estimator, grid), coverage)).T
    return low, high


def _cells(estimator: Any, grid: np.ndarray) -> np.ndarray:
    """Return conditions that are numbers as cells of the table that was fitted to."""
    columns = getattr(estimator, "_columns", None)
    return grid if columns is None else columns.decode(grid, whole=False)
