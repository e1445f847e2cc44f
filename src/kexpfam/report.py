"""Pictures of densities: what a person looks at before reading any number."""

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg", force=False)
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

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


def _plot_plane(estimator, data, draws) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(13.0, 4.3), layout="constrained")
    everything = np.concatenate([data, draws])
    margin = 0.08 * np.ptp(everything, axis=0)
    low, high = everything.min(0) - margin, everything.max(0) + margin
    grid_x, grid_y = np.meshgrid(*(np.linspace(low[i], high[i], GRID_POINTS) for i in range(2)))
    points = np.column_stack([grid_x.ravel(), grid_y.ravel()])
    density = np.exp(estimator.score_samples(points)).reshape(grid_x.shape)
    f = estimator.potential(points).reshape(grid_x.shape)
    shown = axes[0].pcolormesh(grid_x, grid_y, density, cmap="Blues", shading="auto", rasterized=True)
    figure.colorbar(shown, ax=axes[0], label="density")
    axes[0].scatter(*data.T, s=3, color=DATA_COLOUR, alpha=0.5, linewidths=0)
    axes[0].set_title("density and data")
    # Far from the data f only undoes the base measure; the colours are spent where the density is.
    top = f[density > 1e-4 * density.max()]
    shown = axes[1].pcolormesh(
        grid_x, grid_y, f, cmap="viridis", shading="auto", vmin=np.percentile(f, 5), vmax=top.max(), rasterized=True
    )
    figure.colorbar(shown, ax=axes[1], label="f")
    axes[1].set_title("learned f = log p - log p0 + log Z")
    _scatter(axes[2], data, draws)
    axes[2].set_title("data and draws of the sampler")
    axes[2].legend(loc="upper right", markerscale=3)
    for axis in axes:
        axis.set_xlim(low[0], high[0])
        axis.set_ylim(low[1], high[1])
        axis.set_aspect("equal")
    return figure


def _plot_line(estimator, data, draws) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    margin = 0.1 * np.ptp(data)
    points = np.linspace(data.min() - margin, data.max() + margin, 400)[:, None]
    axes[0].hist(data[:, 0], bins=40, density=True, color=DATA_COLOUR, alpha=0.3, label="data")
    axes[0].hist(draws[:, 0], bins=40, density=True, histtype="step", color=SAMPLE_COLOUR, label="draws")
    axes[0].plot(points[:, 0], np.exp(estimator.score_samples(points)), color="black", label="density")
    axes[0].legend()
    axes[1].plot(points[:, 0], estimator.potential(points), color="black")
    axes[1].set_title("learned f")
    return figure


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
    axis.scatter(*draws.T, s=4, color=SAMPLE_COLOUR, alpha=0.6, linewidths=0, label="draws")
    axis.set_aspect("equal")
