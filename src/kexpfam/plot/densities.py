"""Densities p(x): curves in one dimension, maps in two, pairs of columns in more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kexpfam.estimators.base import Seed
from kexpfam.estimators.density import DensityEstimator
from kexpfam.plot import canvas
from kexpfam.plot.canvas import MODEL_COLOUR, axis_limits, panels, some_rows
from kexpfam.plot.columns import histogram, plot_marginal, plot_pairs
from kexpfam.plot.numbers import drawn, kinds_of, numbers_of, training_rows

F_TITLE = "f = log(p / p0) + log Z"


@canvas.bare_arrays()
def plot_density(
    estimator: DensityEstimator,
    data: ArrayLike | None = None,
    *,
    n_samples: int | None = None,
    dims: Sequence[int | str] | None = None,
    random_state: Seed = 0,
    ax: Axes | None = None,
) -> Figure:
    """Return a figure of the fitted density with the training data, or with ``data``.

    In one dimension: the density over a histogram, and the learned f. In two: maps of both, and draws of the
    sampler with the data. In more: draws and data of every pair of columns. ``dims`` selects columns by name
    or position. ``n_samples`` is by default 1000, and 10,000 for more than two columns. With ``ax`` only the
    first panel is drawn; for more than two columns, the pair selected by ``dims``.
    """
    several = getattr(estimator, "n_features_in_", 0) > 2
    draws = drawn(estimator, n_samples or (10_000 if several else 1000), random_state)
    if data is not None:
        (rows,) = numbers_of(estimator, data)
    else:
        rows = training_rows(estimator)[0] if hasattr(estimator, "density_") else draws
    width = draws.shape[1]
    names = canvas.feature_names(estimator, width)
    kinds = kinds_of(estimator, 0, width).targets
    numeric = not any(kind.discrete for kind in kinds) and not np.any(np.isnan(rows))
    if width == 1 and not numeric:
        return plot_marginal(rows, draws, name=names[0], levels=kinds[0].labels, ax=ax)
    if width <= 2 and numeric:
        return (_plot_line if width == 1 else _plot_plane)(estimator, rows, draws, names, ax)
    shown = [canvas.column_at(one, names, "column") for one in (range(width) if dims is None else dims)]
    rows, draws, names = rows[:, shown], draws[:, shown], [names[k] for k in shown]
    if len(shown) == 2 and numeric:
        figure, (axis,) = panels(1, ax, width=5.0, height=4.6)
        _clouds(axis, rows, draws)
        _frame(axis, rows, draws, names)
        return figure
    if ax is not None:
        raise ValueError("ax can show one pair of columns: choose two with dims=, or omit ax.")
    return plot_pairs(rows, draws, names, levels=[kinds[k].labels for k in shown])


def line(axis: Axes, density: Any, around: np.ndarray) -> np.ndarray:
    """Draw a one-dimensional density around these values; return the points of the curve, (n, 1)."""
    margin = 0.1 * np.ptp(around)
    points = np.linspace(around.min() - margin, around.max() + margin, 400)[:, None]
    curve = np.exp(density.score_samples(points))
    axis.plot(points[:, 0], curve, color=MODEL_COLOUR, linewidth=2.0, label="density")
    axis.set_ylabel("density")
    axis.set_ylim(bottom=0.0)
    return points


def _plot_line(model: Any, data: np.ndarray, draws: np.ndarray, names: list[str], ax: Axes | None) -> Figure:
    figure, axes = panels(2 if _has_potential(model) else 1, ax, width=4.5, height=3.6)
    histogram(axes[0], data[:, 0], draws[:, 0])
    points = line(axes[0], model, data)
    canvas.legend_above(axes[0])
    if len(axes) > 1:
        axes[1].plot(points[:, 0], model.potential(points), color=MODEL_COLOUR)
        axes[1].set_title(F_TITLE)
        axes[1].set_ylabel("f")
    for axis in axes:
        axis.set_xlabel(names[0])
    return figure


def _plot_plane(model: Any, data: np.ndarray, draws: np.ndarray, names: list[str], ax: Axes | None) -> Figure:
    low, high = axis_limits(data, draws)
    spans = high - low
    # Colour bars are as high as the figure, so the figure is as high as its panels.
    height = 0.9 + 2.4 * (spans[1] / spans[0] if canvas.aspect(spans) == "equal" else 1.0)
    count = 3 if _has_potential(model) else 2
    figure, axes = panels(count, ax, width=3.6, height=height, boxed=True)
    grid = np.meshgrid(*np.linspace(low, high, 160).T)
    points = np.column_stack([coordinate.ravel() for coordinate in grid])
    density = np.exp(model.score_samples(points)).reshape(grid[0].shape)
    _map(axes[0], grid, density, "density", cmap=canvas.DENSITY_COLOURS, vmin=0.0)
    canvas.scatter(axes[0], some_rows(data), s=3, color=canvas.DATA_COLOUR)
    axes[0].set_title("density and data")
    if len(axes) == 3:
        f = model.potential(points).reshape(grid[0].shape)
        # Far from the data f only cancels the base density: the colours cover the region of high density.
        limits = {"vmin": np.percentile(f, 5), "vmax": f[density > 1e-4 * density.max()].max()}
        _map(axes[1], grid, f, "f", cmap="viridis", **limits)
        axes[1].set_title(F_TITLE)
    if len(axes) > 1:
        _clouds(axes[-1], data, draws)
    for axis in axes:
        _frame(axis, data, draws, names)
    return figure


def _clouds(axis: Axes, data: np.ndarray, draws: np.ndarray) -> None:
    canvas.scatter_both(axis, some_rows(data), some_rows(draws))
    axis.set_title("data and draws")
    axis.legend(loc="upper right", markerscale=3)


def _frame(axis: Axes, data: np.ndarray, draws: np.ndarray, names: list[str]) -> None:
    """Set limits, names and aspect of two columns."""
    low, high = axis_limits(data, draws)
    axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel=names[0], ylabel=names[1])
    axis.set_aspect(canvas.aspect(high - low))  # type: ignore[arg-type]


def _map(axis: Axes, grid: Sequence[np.ndarray], values: np.ndarray, label: str, **colours: Any) -> None:
    mesh = axis.pcolormesh(*grid, values, shading="auto", rasterized=True, **colours)
    axis.figure.colorbar(mesh, ax=axis, label=label)


def _has_potential(estimator: Any) -> bool:
    """Return whether the model has a single f; mixtures and kernel density estimates have none."""
    return hasattr(estimator, "potential") and hasattr(getattr(estimator, "density_", None), "potential")
