"""Conditional densities p(y | x): intervals along a feature, densities under one condition, pairs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.data.kinds import AbstractKind, Real
from kexpfam.estimators.base import Seed
from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.estimators.derived import GivenDensity
from kexpfam.plot import canvas
from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR, panels, target_names
from kexpfam.plot.columns import name_levels, plot_marginal, plot_pairs
from kexpfam.plot.densities import line
from kexpfam.plot.numbers import drawn, kinds_of, numbers_of, training_rows


@canvas.bare_arrays()
def plot_conditional(
    estimator: ConditionalEstimator,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    feature: int | str = 0,
    coverages: Sequence[float] = (0.5, 0.9),
    ax: Axes | None = None,
) -> Figure:
    """Return the median of y and its central intervals along one feature, with the training data or ``X, y``.

    The other features are fixed at their training medians, or most frequent labels. The points keep their own
    values of these features, so that the intervals need not cover them at the nominal rate.
    """
    trained = training_rows(estimator)[0]
    shown, targets = rows_to_show(estimator, X, y)
    kinds = kinds_of(estimator, trained.shape[1], targets.shape[1])
    if targets.shape[1] > 1:
        raise ValueError("intervals need a single target: use plot_given(estimator.given(x)) for this model.")
    if kinds.targets[0].categorical:
        raise ValueError("a categorical target has no intervals: use plot_targets(estimator) for this model.")
    names = canvas.feature_names(estimator, trained.shape[1])
    place = canvas.column_at(feature, names)
    figure, (axis,) = panels(1, ax, width=6.4, height=4.2)
    labels = kinds.features[place].labels
    column = shown[:, place]
    along = np.linspace(np.nanmin(column), np.nanmax(column), 160) if labels is None else range(len(labels))
    centre = [_centre(values, kind) for values, kind in zip(trained.T, kinds.features, strict=True)]
    grid = np.tile(centre, (len(along), 1))
    grid[:, place] = along
    _intervals(axis, estimator, grid, place, coverages, labelled=labels is not None)
    points = canvas.some_rows(np.column_stack([column, targets[:, 0]]))
    if labels is not None:
        points[:, 0] += np.random.default_rng(0).uniform(-0.3, 0.3, len(points))
        name_levels(axis.xaxis, labels)
    canvas.scatter(axis, points, s=8, color=DATA_COLOUR, label="data")
    others = " (the other features at their medians)" if len(names) > 1 else ""
    axis.set(xlabel=names[place] + others, ylabel=target_names(estimator, 1)[0])
    if ax is None:
        figure.legend(loc="outside upper center", ncols=2 + len(coverages), frameon=False)
    return figure


@canvas.bare_arrays()
def plot_targets(
    estimator: ConditionalEstimator,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    random_state: Seed = 0,
) -> Figure:
    """Return pairs of targets: the training data, or ``X, y``, and one draw given the condition of each."""
    X, targets = rows_to_show(estimator, X, y)
    draws = drawn(estimator, 1, random_state, X).reshape(targets.shape)
    names = target_names(estimator, targets.shape[1])
    levels = [kind.labels for kind in kinds_of(estimator, X.shape[1], targets.shape[1]).targets]
    if len(names) == 1:
        return plot_marginal(targets, draws, name=names[0], levels=levels[0])
    return plot_pairs(targets, draws, names, levels=levels)


def plot_given(
    given: GivenDensity, *, n_samples: int = 1000, random_state: Seed = 0, ax: Axes | None = None
) -> Figure:
    """Return the density under one condition with draws; for several targets, draws of the first two."""
    draws = np.asarray(given.sample(n_samples, random_state=random_state)).reshape(n_samples, -1)
    names = target_names(given, draws.shape[1])
    figure, (axis,) = panels(1, ax, width=5.0, height=3.8)
    axis.set_xlabel(names[0])
    kind = given.target_kinds[0] if given.target_kinds else Real()
    if draws.shape[1] > 1:
        canvas.scatter(axis, draws, s=5.0, color=MODEL_COLOUR, label="draws")
        axis.set_aspect(canvas.aspect(np.ptp(draws[:, :2], axis=0)))  # type: ignore[arg-type]
        axis.set_ylabel(names[1])
    elif kind.discrete:
        _probabilities(axis, given, draws[:, 0], kind.labels)
    else:
        _curve(axis, given, draws[:, 0])
    if given.condition:
        listed = (f"{name} = {cell(value)}" for name, value in given.condition.items())
        axis.set_title(f"given {', '.join(listed)}")
    return figure


def rows_to_show(
    estimator: ConditionalEstimator, X: ArrayLike | None, y: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return features and targets as two-dimensional arrays: ``X, y``, or the training data."""
    if (X is None) != (y is None):
        raise ValueError("pass both X and y, or neither for the training data.")
    rows, targets = training_rows(estimator) if X is None else numbers_of(estimator, X, y)
    return rows, targets


def cell(value: object) -> str:
    """Return a cell of a table as short text."""
    return f"{value:.3g}" if isinstance(value, float | np.floating) else str(value)


def _centre(column: np.ndarray, kind: AbstractKind) -> float:
    """Return the median of numbers or the most frequent code of labels."""
    seen = column[~np.isnan(column)]
    if not kind.categorical:
        return float(np.median(seen))
    codes, counts = np.unique(seen, return_counts=True)
    return float(codes[np.argmax(counts)])


def _curve(axis: Axes, given: GivenDensity, draws: np.ndarray, farthest: float = 4.0) -> None:
    """Draw the density and the histogram of draws within ``farthest`` interquartile ranges of the median."""
    reach = farthest * np.subtract(*np.percentile(draws, [75, 25]))
    central = draws[np.abs(draws - np.median(draws)) <= reach]
    counts, edges = np.histogram(central, bins=40)
    axis.stairs(counts / len(draws) / np.diff(edges), edges, color=MODEL_COLOUR, alpha=0.6, label="draws")
    line(axis, given, around=central)
    axis.legend(frameon=False)


def _probabilities(axis: Axes, given: GivenDensity, draws: np.ndarray, labels: list[str] | None) -> None:
    """Draw the probability of each label, or of each value among the draws."""
    codes = np.unique(draws) if labels is None else np.arange(len(labels), dtype=float)
    axis.bar(codes, np.exp(given.score_samples(codes)), width=0.8, color=MODEL_COLOUR, alpha=0.6)
    axis.set_ylabel("probability")
    if labels is not None:
        name_levels(axis.xaxis, labels)


def _intervals(
    axis: Axes, estimator: Any, grid: np.ndarray, feature: int, coverages: Sequence[float], *, labelled: bool
) -> None:
    """Draw the median and the intervals along a feature, narrow intervals over wide ones: bars for labels."""
    columns = getattr(estimator, "_columns", None)
    cells = grid if columns is None else columns.decode(grid, whole=False)
    along = grid[:, feature]
    median = np.asarray(estimator.quantile(cells, 0.5))
    shades = np.linspace(0.25, 0.35, len(coverages))
    widths = (0.35, 0.5, *[0.6] * len(coverages))
    for place, coverage in enumerate(sorted(coverages, reverse=True)):
        low, high = np.asarray(estimator.interval(cells, coverage)).T
        look: dict[str, Any] = {"label": f"{coverage:.0%} interval", "color": to_rgba(MODEL_COLOUR, 0.25)}
        if labelled:
            axis.bar(along, high - low, bottom=low, width=widths[place], **look)
        else:
            look["color"] = to_rgba(MODEL_COLOUR, shades[place])
            axis.fill_between(along, low, high, linewidth=0, **look)
    marks: dict[str, Any] = {"marker": "_", "linestyle": "", "markersize": 24, "markeredgewidth": 2.5}
    look = marks if labelled else {"linewidth": 2.0}
    axis.plot(along, median, color=MODEL_COLOUR, label="median", **look)
