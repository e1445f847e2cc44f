"""Pictures of densities: what a person looks at before reading any number.

Figures are matplotlib's own objects, made without pyplot: importing this module changes no backend, and no figure stays in
pyplot's memory. A notebook shows them; elsewhere ``figure.savefig(path)`` writes them.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.estimators.base import ConditionalEstimator, DensityEstimator, Estimator, GivenDensity, Seed
from kexpfam.judge.calibration import Calibration
from kexpfam.judge.diagnosis import AbstractDiagnosis

__all__ = [
    "plot_calibration",
    "plot_conditional",
    "plot_density",
    "plot_given",
    "plot_snapshots",
    "plot_trace",
]

GRID_POINTS = 160
# Axes share a scale unless one is this many times longer than the other.
MOST_STRETCHED = 3.0
DATA_COLOUR, SAMPLE_COLOUR = "#c1272d", "#1f4e8c"


class _Picture(Figure):
    """A figure that a notebook shows although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()


def _panels(count: int, *, width: float, height: float, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    """Return a figure with this many panels of that size (inches), in rows of ``columns``, by default in one row."""
    columns = min(columns or count, count)
    rows = -(-count // columns)
    figure = _Picture(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


@contextlib.contextmanager
def _bare_arrays() -> Iterator[None]:
    """Let a model that was fitted to a frame take arrays, whose columns have no names, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        yield


@_bare_arrays()
def plot_density(
    estimator: DensityEstimator,
    data: ArrayLike | None = None,
    *,
    n_samples: int = 1000,
    dims: Sequence[int] = (0, 1),
    random_state: Seed = 0,
) -> Figure:
    """Return a figure of the fit: the density with the data, the learned f, and draws of the sampler beside the data.

    In two dimensions the density and f are maps; in one, curves; in more, the two chosen dimensions are shown as draws
    of data and sampler, since a slice of a high-dimensional density shows little of it.
    """
    draws = estimator.sample(n_samples, random_state=random_state)
    rows = draws if data is None else np.asarray(data)
    if draws.shape[1] == 1:
        return _plot_line(estimator, rows, draws)
    if draws.shape[1] == 2:
        return _plot_plane(estimator, rows, draws)
    return _plot_pairs(estimator, rows, draws, dims)


def plot_trace(estimator: Estimator) -> Figure:
    """Return a figure of the solver's steps: a panel for each series of its trace, by the name that the solver gives it."""
    trace = getattr(getattr(estimator, "solution_", None), "trace", None)
    if not trace:
        raise ValueError("this model has no steps to show: it was fitted outright; a solver with steps is solver='dde', say.")
    figure, axes = _panels(len(trace), width=3.6, height=3.0, columns=4)
    for axis, (name, series) in zip(axes, trace.items(), strict=True):
        axis.plot(np.arange(1, len(series) + 1), series, color=SAMPLE_COLOUR, linewidth=0.8)
        axis.set_title(name.replace("_", " "))
        axis.set_xlabel("step")
    return figure


def plot_snapshots(estimator: Any, *, most: int = 6) -> Figure:
    """Return sampler draws at several steps of a run, each over the data: convergence as the paper shows it.

    The model must have been fitted with ``DDE(snapshots=True)``. The first two coordinates of f are shown, in model units.
    """
    solution = getattr(estimator, "solution_", None)
    kept = {int(step): np.asarray(draws) for step, draws in (getattr(solution, "snapshots", None) or {}).items()}
    if not kept:
        raise ValueError("this model has no snapshots: fit it with solver=DDE(snapshots=True).")
    data, steps = np.asarray(estimator._problem.sample.target), sorted(kept)
    if data.shape[1] < 2:
        raise ValueError("snapshots are drawn in two coordinates, and f depends on one here; use plot().")
    chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))]
    figure, axes = _panels(len(chosen), width=3.4, height=3.4, columns=3)
    for axis, step in zip(axes, chosen, strict=True):
        _scatter(axis, data[:, :2], kept[step][:, :2])
        axis.axis("off")
        axis.set_title("initialisation" if step == 0 else f"after {step:,} steps")
    return figure


@_bare_arrays()
def plot_conditional(
    estimator: ConditionalEstimator,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    feature: int = 0,
    coverages: Sequence[float] = (0.5, 0.9),
) -> Figure:
    """Return the median of y and its central intervals along one feature, with the training data or those given as points.

    The other features are held at their training medians; the points have values of their own there, so that they need not
    fill the intervals as they do where there is one feature.
    """
    trained, targets = estimator.training_data_
    if targets.ndim == 2 and targets.shape[1] > 1:
        raise ValueError("intervals are for targets of one dimension: use plot_given(estimator.given(x)) for this model.")
    if not 0 <= feature < trained.shape[1]:
        raise ValueError(f"feature must be from 0 to {trained.shape[1] - 1}, got {feature}.")
    if (X is None) != (y is None):
        raise ValueError("give both X and y, or neither to see the training data.")
    shown, targets = (trained, targets) if X is None else (np.asarray(X), np.asarray(y))
    grid = np.tile(np.median(trained, axis=0), (GRID_POINTS, 1))
    grid[:, feature] = np.linspace(shown[:, feature].min(), shown[:, feature].max(), GRID_POINTS)
    figure, (axis,) = _panels(1, width=6.4, height=4.2)
    _bands(axis, estimator, grid, feature, coverages)
    axis.scatter(shown[:, feature], targets.ravel(), s=8, color=DATA_COLOUR, alpha=0.6, linewidths=0, label="data")
    others = " (the other features at their medians)" if trained.shape[1] > 1 else ""
    axis.set_xlabel(_name(estimator, feature) + others)
    axis.set_ylabel((getattr(estimator, "target_names_", None) or ["y"])[0])
    figure.legend(loc="outside upper center", ncols=2 + len(coverages))
    return figure


def plot_calibration(diagnosis: AbstractDiagnosis) -> Figure:
    """Return the histogram of held-out PIT values and the coverage of central intervals.

    The grey bands hold what chance does to a perfect model in 95 % of cases, for each bar and each level by itself.
    """
    calibration = getattr(diagnosis, "calibration", None)
    if calibration is None:
        raise ValueError("this diagnosis has no calibration: pass held-out X and y to diagnose() of a conditional model.")
    figure, axes = _panels(2, width=4.5, height=4.0)
    _plot_pit(axes[0], calibration)
    _plot_coverage(axes[1], calibration)
    return figure


def plot_given(given: GivenDensity, *, n_samples: int = 1000, random_state: Seed = 0) -> Figure:
    """Return the density under one condition with draws of the sampler; the draws alone, if y has two dimensions or more."""
    draws = given.sample(n_samples, random_state=random_state).reshape(n_samples, -1)
    figure, (axis,) = _panels(1, width=5.0, height=3.8)
    if draws.shape[1] == 1:
        _line(axis, given, draws, around=draws)
        axis.set_xlabel("y")
        axis.legend()
    else:
        _draws(axis, draws[:, :2])
        axis.set_xlabel("y, dimension 0")
        axis.set_ylabel("y, dimension 1")
        axis.set_title("draws of the sampler")
    return figure


def _plot_plane(estimator: Any, data: np.ndarray, draws: np.ndarray) -> Figure:
    low, high = _frame(data, draws)
    spans = high - low
    # Bars of colour are as high as the figure: it is made as high as its panels.
    height = 1.1 + 3.0 * (spans[1] / spans[0] if _comparable(spans) else 1.0)
    figure, axes = _panels(3 if _has_potential(estimator) else 2, width=4.4, height=height)
    grid = np.meshgrid(*(np.linspace(low[i], high[i], GRID_POINTS) for i in range(2)))
    points = np.column_stack([axis.ravel() for axis in grid])
    density = np.exp(estimator.score_samples(points)).reshape(grid[0].shape)
    _map(axes[0], grid, density, "density", cmap="Blues")
    axes[0].scatter(data[:, 0], data[:, 1], s=3, color=DATA_COLOUR, alpha=0.5, linewidths=0)
    axes[0].set_title("density and data")
    if _has_potential(estimator):
        f = estimator.potential(points).reshape(grid[0].shape)
        # Far from the data f only undoes the base measure; the colours are spent where the density is.
        limits = {"vmin": np.percentile(f, 5), "vmax": f[density > 1e-4 * density.max()].max()}
        _map(axes[1], grid, f, "f", cmap="viridis", **limits)
        axes[1].set_title("learned f = log p - log p0 + log Z")
    _scatter(axes[-1], data, draws)
    axes[-1].set_title("data and draws of the sampler")
    axes[-1].legend(loc="upper right", markerscale=3)
    for axis in axes:
        axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel=_name(estimator, 0), ylabel=_name(estimator, 1))
        axis.set_aspect("equal" if _comparable(spans) else "auto")
    return figure


def _frame(data: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of a box around the data and all but the outermost draws, which would make the rest small."""
    shown = np.concatenate([data, np.percentile(draws, [0.5, 99.5], axis=0)])
    margin = 0.08 * np.ptp(shown, axis=0)
    return shown.min(0) - margin, shown.max(0) + margin


def _comparable(spans: np.ndarray) -> bool:
    """Return whether two columns can share a scale; otherwise one of them would be drawn as a line."""
    return bool(spans.max() < MOST_STRETCHED * spans.min())


def _map(axis: Axes, grid: Sequence[np.ndarray], values: np.ndarray, label: str, **colours: Any) -> None:
    shown = axis.pcolormesh(*grid, values, shading="auto", rasterized=True, **colours)
    axis.figure.colorbar(shown, ax=axis, label=label)


def _plot_line(estimator: Any, data: np.ndarray, draws: np.ndarray) -> Figure:
    figure, axes = _panels(2 if _has_potential(estimator) else 1, width=4.5, height=3.6)
    axes[0].hist(data[:, 0], bins=40, density=True, color=DATA_COLOUR, alpha=0.3, label="data")
    points = _line(axes[0], estimator, draws, around=data)
    axes[0].legend()
    if _has_potential(estimator):
        axes[1].plot(points[:, 0], estimator.potential(points), color="black")
        axes[1].set_title("learned f")
    for axis in axes:
        axis.set_xlabel(_name(estimator, 0))
    return figure


def _name(estimator: Any, column: int) -> str:
    names = getattr(estimator, "column_names_", None)
    return names[column] if names else f"x{column}"


def _has_potential(estimator: Any) -> bool:
    """Return whether there is an f to show: kernel density estimates and the like have none."""
    return hasattr(estimator, "potential")


def _line(axis: Axes, density: Any, draws: np.ndarray, *, around: np.ndarray) -> np.ndarray:
    """Draw a density on the line over a histogram of its draws, and return the points where it was evaluated."""
    margin = 0.1 * np.ptp(around)
    points = np.linspace(around.min() - margin, around.max() + margin, 400)[:, None]
    axis.hist(draws[:, 0], bins=40, density=True, histtype="step", color=SAMPLE_COLOUR, label="draws")
    axis.plot(points[:, 0], np.exp(density.score_samples(points)), color="black", label="density")
    return points


def _bands(axis: Axes, estimator: ConditionalEstimator, grid: np.ndarray, feature: int, coverages: Sequence[float]) -> None:
    colours = matplotlib.colormaps["Blues"](np.linspace(0.2, 0.4, len(coverages)))
    # The wide intervals lie under the narrow ones.
    for coverage, colour in zip(sorted(coverages, reverse=True), colours, strict=True):
        limits = estimator.interval(grid, coverage).T
        axis.fill_between(grid[:, feature], *limits, color=colour, linewidth=0, label=f"{coverage:.0%} interval")
    axis.plot(grid[:, feature], estimator.quantile(grid, 0.5), color=SAMPLE_COLOUR, label="median")


def _plot_pit(axis: Axes, calibration: Calibration) -> None:
    bins = len(calibration.histogram)
    middles, rows = (np.arange(bins) + 0.5) / bins, calibration.rows
    axis.bar(middles, rows * calibration.histogram, width=1 / bins, color=SAMPLE_COLOUR, alpha=0.5, edgecolor="white")
    axis.axhspan(*_chance(rows, 1 / bins), color="black", alpha=0.12, linewidth=0)
    axis.axhline(rows / bins, color="black", linewidth=0.8)
    axis.set_xlim(0.0, 1.0)
    axis.set_xlabel("randomised PIT" if calibration.randomised else "PIT, F(y | x)")
    axis.set_ylabel("rows")
    axis.set_title(f"uniform if calibrated (KS p = {calibration.ks_p_value:.2g})")


def _plot_coverage(axis: Axes, calibration: Calibration) -> None:
    levels = np.linspace(0.0, 1.0, 101)
    low, high = _chance(calibration.rows, levels)
    limits = (low / calibration.rows, high / calibration.rows)
    axis.fill_between(levels, *limits, color="black", alpha=0.12, linewidth=0, label="95 % of chance")
    axis.plot(levels, levels, color="black", linewidth=0.8, label="calibrated")
    axis.plot(*zip(*calibration.coverage.items(), strict=True), "o", color=SAMPLE_COLOUR, label="observed")
    axis.legend(loc="lower right")
    axis.set_xlabel("nominal coverage")
    axis.set_ylabel("observed coverage")
    axis.set_title(f"central intervals, {calibration.rows} held-out rows")
    axis.set_aspect("equal")


def _plot_pairs(estimator: Any, data: np.ndarray, draws: np.ndarray, dims: Sequence[int]) -> Figure:
    figure, (axis,) = _panels(1, width=5.0, height=4.6)
    _scatter(axis, data[:, list(dims)], draws[:, list(dims)])
    axis.set_xlabel(_name(estimator, dims[0]))
    axis.set_ylabel(_name(estimator, dims[1]))
    axis.set_title("data and draws of the sampler")
    axis.legend(loc="upper right", markerscale=3)
    return figure


def _scatter(axis: Axes, data: np.ndarray, draws: np.ndarray) -> None:
    axis.scatter(data[:, 0], data[:, 1], s=4, color=DATA_COLOUR, alpha=0.6, linewidths=0, label="data")
    _draws(axis, draws)
    axis.set_aspect("equal" if _comparable(np.ptp(data, axis=0)) else "auto")


def _draws(axis: Axes, draws: np.ndarray) -> None:
    axis.scatter(draws[:, 0], draws[:, 1], s=4, color=SAMPLE_COLOUR, alpha=0.6, linewidths=0, label="draws")


def _chance(rows: int, shares: float | np.ndarray) -> tuple[Any, Any]:
    """Return the limits, low and high, that hold a binomial count with these shares in 95 % of cases."""
    import scipy.stats  # slow to import, and only the calibration needs it

    low, high = scipy.stats.binom.interval(0.95, rows, shares)
    return np.maximum(low, 0), high
