"""Pictures of a density p(x): curves on the line, maps of the plane, and pairs of columns where there are more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.estimators.base import Seed
from kexpfam.estimators.density import DensityEstimator
from kexpfam.plot.canvas import (
    DATA_COLOUR,
    DENSITY_COLOURS,
    MODEL_COLOUR,
    bare_arrays,
    column_at,
    comparable,
    feature_names,
    frame,
    legend_above,
    one_panel,
    panels,
    scatter,
    some_rows,
)
from kexpfam.plot.marginals import histogram, plot_marginal
from kexpfam.plot.numbers import drawn, kinds_of, levels_of, numbers_of, training_rows
from kexpfam.plot.pairs import plot_pairs

__all__ = ["line", "plot_density"]

GRID_POINTS = 160
LINE_POINTS = 400
# Draws of a cloud, and those that make the curve of a single column smooth.
PLAIN_DRAWS, SMOOTH_DRAWS = 1000, 10_000


@bare_arrays()
def plot_density(
    estimator: DensityEstimator,
    data: ArrayLike | None = None,
    *,
    n_samples: int | None = None,
    dims: Sequence[int | str] | None = None,
    random_state: Seed = 0,
    ax: Axes | None = None,
) -> Figure:
    """Return a figure of the fit, with the training data or those given.

    In one dimension: the density over a histogram, and the learned f. In two: maps of both, and draws of the sampler beside the
    data. In more, every pair of columns as draws and data, since a slice of a high-dimensional density shows little of it;
    ``dims`` are the columns to show, by name or place. On axes of the caller, ``ax``, stands the first panel alone; of more
    than two columns, the two of ``dims``.
    """
    several = getattr(estimator, "n_features_in_", 0) > 2
    count = n_samples or (SMOOTH_DRAWS if several else PLAIN_DRAWS)
    draws = drawn(estimator, count, random_state)
    if data is not None:
        (rows,) = numbers_of(estimator, data)
    else:
        rows = training_rows(estimator)[0] if hasattr(estimator, "density_") else draws
    names, kinds = feature_names(estimator, draws.shape[1]), kinds_of(estimator, 0, draws.shape[1])
    numeric = not any(kind.discrete for kind in kinds.targets) and not np.any(np.isnan(rows))
    if draws.shape[1] == 1 and not numeric:
        return plot_marginal(rows, draws, name=names[0], levels=levels_of(kinds.targets[0]), ax=ax)
    if draws.shape[1] == 1:
        return _plot_line(estimator, rows, draws, names, ax)
    if draws.shape[1] == 2 and numeric:
        return _plot_plane(estimator, rows, draws, names, ax)
    shown = [column_at(one, names, "column") for one in (range(len(names)) if dims is None else dims)]
    rows, draws, names = rows[:, shown], draws[:, shown], [names[k] for k in shown]
    if len(shown) == 2 and numeric:
        return _plot_clouds(rows, draws, names, ax)
    if ax is not None:
        raise ValueError(
            "pairs of more than two columns need a figure of their own: choose two with dims=, or leave ax alone."
        )
    return plot_pairs(rows, draws, names, levels=[levels_of(kinds.targets[k]) for k in shown])


def line(axis: Axes, density: Any, around: np.ndarray) -> np.ndarray:
    """Draw a density on the line around these values, and return the points where it was evaluated."""
    margin = 0.1 * np.ptp(around)
    points = np.linspace(around.min() - margin, around.max() + margin, LINE_POINTS)[:, None]
    axis.plot(
        points[:, 0],
        np.exp(density.score_samples(points)),
        color=MODEL_COLOUR,
        linewidth=2.0,
        label="density",
    )
    axis.set_ylabel("density")
    axis.set_ylim(bottom=0.0)
    return points


def _plot_line(
    estimator: Any, data: np.ndarray, draws: np.ndarray, names: list[str], ax: Axes | None
) -> Figure:
    both = ax is None and _has_potential(estimator)
    figure, axes = (
        panels(2, width=4.5, height=3.6) if both else _as_list(one_panel(ax, width=4.5, height=3.6))
    )
    histogram(axes[0], data[:, 0], draws[:, 0])
    points = line(axes[0], estimator, data)
    legend_above(axes[0])
    if both:
        axes[1].plot(points[:, 0], estimator.potential(points), color=MODEL_COLOUR)
        axes[1].set_title("learned f = log p - log p0 + log Z")
        axes[1].set_ylabel("f")
    for axis in axes:
        axis.set_xlabel(names[0])
    return figure


def _plot_plane(
    estimator: Any, data: np.ndarray, draws: np.ndarray, names: list[str], ax: Axes | None
) -> Figure:
    low, high = frame(data, draws)
    spans = high - low
    # Bars of colour are as high as the figure: it is made as high as its panels.
    height = 1.1 + 3.0 * (spans[1] / spans[0] if comparable(spans) else 1.0)
    count = 1 if ax is not None else 3 if _has_potential(estimator) else 2
    size: dict[str, Any] = {"width": 4.4, "height": height, "boxed": True}
    figure, axes = _as_list(one_panel(ax, **size)) if count == 1 else panels(count, **size)
    grid = np.meshgrid(*(np.linspace(low[i], high[i], GRID_POINTS) for i in range(2)))
    points = np.column_stack([axis.ravel() for axis in grid])
    density = np.exp(estimator.score_samples(points)).reshape(grid[0].shape)
    _map(axes[0], grid, density, "density", cmap=DENSITY_COLOURS, vmin=0.0)
    shown = some_rows(data)
    axes[0].scatter(
        shown[:, 0], shown[:, 1], s=3, color=DATA_COLOUR, alpha=0.6, linewidths=0, rasterized=True
    )
    axes[0].set_title("density and data")
    if count == 3:
        f = estimator.potential(points).reshape(grid[0].shape)
        # Far from the data f only undoes the base measure; the colours are spent where the density is.
        limits = {"vmin": np.percentile(f, 5), "vmax": f[density > 1e-4 * density.max()].max()}
        _map(axes[1], grid, f, "f", cmap="viridis", **limits)
        axes[1].set_title("learned f = log p - log p0 + log Z")
    if count > 1:
        scatter(axes[-1], shown, some_rows(draws))
        axes[-1].set_title("data and draws of the sampler")
        axes[-1].legend(loc="upper right", markerscale=3)
    for axis in axes:
        axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel=names[0], ylabel=names[1])
        axis.set_aspect("equal" if comparable(spans) else "auto")
    return figure


def _plot_clouds(data: np.ndarray, draws: np.ndarray, names: list[str], ax: Axes | None) -> Figure:
    figure, axis = one_panel(ax, width=5.0, height=4.6)
    scatter(axis, some_rows(data), some_rows(draws))
    low, high = frame(data, draws)
    axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel=names[0], ylabel=names[1])
    axis.set_aspect("equal" if comparable(high - low) else "auto")
    axis.set_title("data and draws of the sampler")
    axis.legend(loc="upper right", markerscale=3)
    return figure


def _map(axis: Axes, grid: Sequence[np.ndarray], values: np.ndarray, label: str, **colours: Any) -> None:
    shown = axis.pcolormesh(*grid, values, shading="auto", rasterized=True, **colours)
    axis.figure.colorbar(shown, ax=axis, label=label)


def _as_list(panel: tuple[Figure, Axes]) -> tuple[Figure, list[Axes]]:
    return panel[0], [panel[1]]


def _has_potential(estimator: Any) -> bool:
    """Return whether there is a single f to show: kernel density estimates, mixtures of candidates and the like have none."""
    return hasattr(estimator, "potential") and hasattr(getattr(estimator, "density_", None), "potential")
