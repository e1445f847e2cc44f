"""Pictures of densities: what a person looks at before reading any number."""

import warnings
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg", force=False)
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import scipy.stats  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from kexpfam.face import in_double_precision  # noqa: E402

GRID_POINTS = 160
DATA_COLOUR, SAMPLE_COLOUR = "#c1272d", "#1f4e8c"


def plot_density(
    estimator, data: np.ndarray | None = None, *, n_samples: int = 1000, dims: Sequence[int] = (0, 1), random_state=0
) -> Figure:
    """Return a figure of the fit: the density with the data, the learned f, and draws of the sampler beside the data.

    In two dimensions the density and f are maps; in one, curves; in more, the two chosen dimensions are shown as draws
    of data and sampler, since a slice of a high-dimensional density shows little of it.
    """
    draws = estimator.sample(n_samples, random_state=random_state)
    data = draws if data is None else np.asarray(data)
    if draws.shape[1] == 1:
        return _plot_line(estimator, data, draws)
    if draws.shape[1] == 2:
        return _plot_plane(estimator, data, draws)
    return _plot_pairs(data, draws, dims)


def plot_trace(estimator) -> Figure:
    """Return a figure of the saddle steps: the terms of the objective and the health signals."""
    trace = estimator.solution_.trace
    if not trace:
        raise ValueError("this model has no saddle steps to show: fit it with solver='dde' and steps > 0.")
    names = ("value", "kl_dual", "sampler_gap", "effective_share")
    figure, axes = plt.subplots(1, len(names), figsize=(3.6 * len(names), 3.0), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        axis.plot(trace[name], color=SAMPLE_COLOUR, linewidth=0.8)
        axis.set_title(name.replace("_", " "))
        axis.set_xlabel("f updates")
    return figure


@in_double_precision
def plot_snapshots(estimator, *, most: int = 6) -> Figure:
    """Return sampler draws at several steps of a run, each over the data: convergence as the paper shows it.

    The model must have been fitted with ``DDE(snapshots=True)``.
    """
    kept = {int(step): np.asarray(draws) for step, draws in (estimator.solution_.snapshots or {}).items()}
    if not kept:
        raise ValueError("this model has no snapshots: fit it with solver=DDE(snapshots=True).")
    steps = sorted(kept)
    chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))]
    dims = list(estimator.selection_.settings.dims)
    if len(dims) < 2:
        raise ValueError("snapshots are drawn in two coordinates, and f depends on one here; use plot_density.")
    snapshots = {step: kept[step][:, :2] for step in chosen}
    data = np.asarray(estimator.density_.scaling.to_model(estimator.training_data_))[:, dims[:2]]
    columns = min(len(snapshots), 3)
    rows = -(-len(snapshots) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.4 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, (step, draws) in zip(axes.flat, snapshots.items(), strict=False):
        _scatter(axis, data, draws)
        axis.set_title("initialisation" if step == 0 else f"after {step:,} f updates")
    return figure


def plot_conditional(estimator, X=None, y=None, *, feature: int = 0, coverages: Sequence[float] = (0.5, 0.9)) -> Figure:
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
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    with warnings.catch_warnings():
        # A model fitted to a frame misses the names of its columns in a bare array.
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        _bands(axis, estimator, grid, feature, coverages)
    axis.scatter(shown[:, feature], targets.ravel(), s=8, color=DATA_COLOUR, alpha=0.6, linewidths=0, label="data")
    names = getattr(estimator, "column_names_", None) or [f"x{j}" for j in range(trained.shape[1])]
    axis.set_xlabel(names[feature] + (" (the other features at their medians)" if len(names) > 1 else ""))
    axis.set_ylabel((getattr(estimator, "target_names_", None) or ["y"])[0])
    figure.legend(loc="outside upper center", ncols=2 + len(coverages))
    return figure


def plot_calibration(diagnosis) -> Figure:
    """Return the histogram of held-out PIT values and the coverage of central intervals.

    The grey bands hold what chance does to a perfect model in 95 % of cases, for each bar and each level by itself.
    """
    calibration = getattr(diagnosis, "calibration", None)
    if calibration is None:
        raise ValueError("this diagnosis has no calibration: pass held-out X and y to diagnose() of a conditional model.")
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 4.0), layout="constrained")
    _plot_pit(axes[0], calibration)
    _plot_coverage(axes[1], calibration)
    return figure


def plot_given(given, *, n_samples: int = 1000, random_state=0) -> Figure:
    """Return the density under one condition with draws of the sampler; the draws alone, if y has two dimensions or more."""
    draws = given.sample(n_samples, random_state=random_state).reshape(n_samples, -1)
    figure, axis = plt.subplots(figsize=(5.0, 3.8), layout="constrained")
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


def _plot_plane(estimator, data, draws) -> Figure:
    panels = 3 if _has_potential(estimator) else 2
    figure, axes = plt.subplots(1, panels, figsize=(4.4 * panels, 4.3), layout="constrained")
    everything = np.concatenate([data, draws])
    margin = 0.08 * np.ptp(everything, axis=0)
    low, high = everything.min(0) - margin, everything.max(0) + margin
    grid_x, grid_y = np.meshgrid(*(np.linspace(low[i], high[i], GRID_POINTS) for i in range(2)))
    points = np.column_stack([grid_x.ravel(), grid_y.ravel()])
    density = np.exp(estimator.score_samples(points)).reshape(grid_x.shape)
    shown = axes[0].pcolormesh(grid_x, grid_y, density, cmap="Blues", shading="auto", rasterized=True)
    figure.colorbar(shown, ax=axes[0], label="density")
    axes[0].scatter(*data.T, s=3, color=DATA_COLOUR, alpha=0.5, linewidths=0)
    axes[0].set_title("density and data")
    if _has_potential(estimator):
        f = estimator.potential(points).reshape(grid_x.shape)
        # Far from the data f only undoes the base measure; the colours are spent where the density is.
        limits = {"vmin": np.percentile(f, 5), "vmax": f[density > 1e-4 * density.max()].max()}
        shown = axes[1].pcolormesh(grid_x, grid_y, f, cmap="viridis", shading="auto", rasterized=True, **limits)
        figure.colorbar(shown, ax=axes[1], label="f")
        axes[1].set_title("learned f = log p - log p0 + log Z")
    _scatter(axes[-1], data, draws)
    axes[-1].set_title("data and draws of the sampler")
    axes[-1].legend(loc="upper right", markerscale=3)
    for axis in axes:
        axis.set_xlim(low[0], high[0])
        axis.set_ylim(low[1], high[1])
        axis.set_aspect("equal")
    return figure


def _plot_line(estimator, data, draws) -> Figure:
    panels = 2 if _has_potential(estimator) else 1
    figure, axes = plt.subplots(1, panels, figsize=(4.5 * panels, 3.6), layout="constrained", squeeze=False)
    axes[0, 0].hist(data[:, 0], bins=40, density=True, color=DATA_COLOUR, alpha=0.3, label="data")
    points = _line(axes[0, 0], estimator, draws, around=data)
    axes[0, 0].legend()
    if _has_potential(estimator):
        axes[0, 1].plot(points[:, 0], estimator.potential(points), color="black")
        axes[0, 1].set_title("learned f")
    return figure


def _has_potential(estimator) -> bool:
    """Return whether there is an f to show: kernel density estimates and the like have none."""
    return hasattr(estimator, "potential")


def _line(axis, density, draws, *, around) -> np.ndarray:
    """Draw a density on the line over a histogram of its draws, and return the points where it was evaluated."""
    margin = 0.1 * np.ptp(around)
    points = np.linspace(around.min() - margin, around.max() + margin, 400)[:, None]
    axis.hist(draws[:, 0], bins=40, density=True, histtype="step", color=SAMPLE_COLOUR, label="draws")
    axis.plot(points[:, 0], np.exp(density.score_samples(points)), color="black", label="density")
    return points


def _bands(axis, estimator, grid, feature: int, coverages) -> None:
    colours = plt.get_cmap("Blues")(np.linspace(0.2, 0.4, len(coverages)))
    # The wide intervals lie under the narrow ones.
    for coverage, colour in zip(sorted(coverages, reverse=True), colours, strict=True):
        limits = estimator.interval(grid, coverage).T
        axis.fill_between(grid[:, feature], *limits, color=colour, linewidth=0, label=f"{coverage:.0%} interval")
    axis.plot(grid[:, feature], estimator.quantile(grid, 0.5), color=SAMPLE_COLOUR, label="median")


def _plot_pit(axis, calibration) -> None:
    bins = len(calibration.histogram)
    middles, rows = (np.arange(bins) + 0.5) / bins, calibration.rows
    axis.bar(middles, rows * calibration.histogram, width=1 / bins, color=SAMPLE_COLOUR, alpha=0.5, edgecolor="white")
    axis.axhspan(*_chance(rows, 1 / bins), color="black", alpha=0.12, linewidth=0)
    axis.axhline(rows / bins, color="black", linewidth=0.8)
    axis.set_xlim(0.0, 1.0)
    axis.set_xlabel("randomised PIT" if calibration.randomised else "PIT, F(y | x)")
    axis.set_ylabel("rows")
    axis.set_title(f"uniform if calibrated (KS p = {calibration.ks_p_value:.2g})")


def _plot_coverage(axis, calibration) -> None:
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


def _plot_pairs(data, draws, dims) -> Figure:
    figure, axis = plt.subplots(figsize=(5.0, 4.6), layout="constrained")
    _scatter(axis, data[:, list(dims)], draws[:, list(dims)])
    axis.set_xlabel(f"dimension {dims[0]}")
    axis.set_ylabel(f"dimension {dims[1]}")
    axis.set_title("data and draws of the sampler")
    axis.legend(loc="upper right", markerscale=3)
    return figure


def _scatter(axis, data, draws) -> None:
    axis.scatter(*data.T, s=4, color=DATA_COLOUR, alpha=0.6, linewidths=0, label="data")
    _draws(axis, draws)
    axis.set_aspect("equal")


def _draws(axis, draws) -> None:
    axis.scatter(*draws.T, s=4, color=SAMPLE_COLOUR, alpha=0.6, linewidths=0, label="draws")


def _chance(rows: int, shares) -> tuple[np.ndarray, np.ndarray]:
    """Return the limits that hold a binomial count with these shares in 95 % of cases."""
    low, high = scipy.stats.binom.interval(0.95, rows, shares)
    return np.maximum(low, 0), high
