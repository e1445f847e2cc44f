"""What every fitted density can do, and the distribution functions that quantiles, PIT values, CRPS and means are made of."""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import AnyArray
from kexpfam.jax_settings import double_precision

__all__ = ["FAR", "AbstractDensity", "Distributions", "moved_in", "narrowed", "positive", "scores"]

# In model units: beyond, squares overflow, and any log density is below the smallest number.
FAR = 1e150
# Moments are of a law whose outermost points are moved in: those that are further from its central part, which lacks this share
# on either side, than so many times the width of that part.
OUTER_SHARE, OUTER_WIDTHS = 1e-4, 10.0
# Rows whose distribution functions are in memory at a time.
ROWS = 2048


class Distributions(eqx.Module):
    """``P(Y <= points[i, j]) = levels[i, j]``, linear in between; both rise along a row, levels from 0 to 1.

    Means, variances and scores are of what data can speak of: see ``settled``.
    """

    points: Float[np.ndarray, "n m"]
    levels: Float[np.ndarray, "n m"]

    @staticmethod
    def of_cells(edges: Float[np.ndarray, "n m"], masses: Float[np.ndarray, "n k"]) -> "Distributions":
        """Return the distributions that put these masses into the cells between these edges, evenly within each."""
        levels = np.concatenate([np.zeros((len(masses), 1)), np.cumsum(masses, axis=1)], axis=1)
        return Distributions(np.clip(edges, -FAR, FAR), levels / levels[:, -1:])

    def __len__(self) -> int:
        return len(self.points)

    def cdf(self, y: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Return ``P(Y <= y)`` of several values per row."""
        return _interpolated(y, self.points, self.levels)

    def quantile(self, levels: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Return the values below which the target lies with these probabilities, several per row."""
        return _interpolated(levels, self.levels, self.points)

    def settled(self) -> Float[np.ndarray, "n m"]:
        """Return the points, those far outside the central part of their law moved towards it.

        A law of logarithms that is unsure of a row has a billionth of its mass where numbers end. No row of data has a say in
        that, and it would decide the mean.
        """
        low, high = self.quantile(np.tile([OUTER_SHARE, 1.0 - OUTER_SHARE], (len(self), 1))).T[:, :, None]
        return moved_in(self.points, low, high)

    def mean(self) -> Float[np.ndarray, " n"]:
        """Return the mean of each row."""
        points = self.settled()
        return np.sum(np.diff(self.levels, axis=1) * 0.5 * (points[:, 1:] + points[:, :-1]), axis=1)

    def variance(self) -> Float[np.ndarray, " n"]:
        """Return the variance of each row."""
        centred = self.settled() - self.mean()[:, None]
        left, right = centred[:, :-1], centred[:, 1:]
        return np.sum(np.diff(self.levels, axis=1) * (left**2 + left * right + right**2) / 3.0, axis=1)

    def mean_difference(self) -> Float[np.ndarray, " n"]:
        """Return ``E|Y - Y'|`` of two independent draws of each row: twice the integral of ``F (1 - F)``."""
        left, right = self.levels[:, :-1], self.levels[:, 1:]
        heights = 0.5 * (left + right) - (left**2 + left * right + right**2) / 3.0
        return 2.0 * np.sum(np.diff(self.settled(), axis=1) * heights, axis=1)

    def crps(self, y: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        r"""Return the continuous ranked probability score, :math:`\int (F(t) - 1[y \le t])^2 dt`, of each row.

        Each side of y is a polygon of its own, of which the integral of the square is known.
        """
        at = self.cdf(y[:, None])
        points = np.concatenate([self.settled(), y[:, None]], axis=1)
        order = np.argsort(points, axis=1, kind="stable")
        points = np.take_along_axis(points, order, axis=1)
        levels = np.take_along_axis(np.concatenate([self.levels, at], axis=1), order, axis=1)
        below = points[:, 1:] <= y[:, None]
        left, right = (np.where(below, part, 1.0 - part) for part in (levels[:, :-1], levels[:, 1:]))
        return np.sum(np.diff(points, axis=1) * (left**2 + left * right + right**2) / 3.0, axis=1)

    @staticmethod
    def mixture(parts: "Sequence[Distributions]", weights: Float[np.ndarray, " k"]) -> "Distributions":
        """Return the mixture of distributions, row by row: exact, on the points of all of them.

        Where points repeat there may be a jump: the first of them has the level before it.
        """
        points = np.sort(np.concatenate([part.points for part in parts], axis=1), axis=1)
        levels = np.asarray(
            sum(weight * part.cdf(points) for weight, part in zip(weights, parts, strict=True))
        )
        repeated = points[:, 1:] == points[:, :-1]
        if np.any(repeated):
            before = sum(
                weight * _interpolated(points, part.points, part.levels, side="left")
                for weight, part in zip(weights, parts, strict=True)
            )
            first = np.concatenate([np.ones((len(points), 1), bool), ~repeated], axis=1)
            levels = np.where(first, np.asarray(before), levels)
        return Distributions(points, levels / np.sum(weights))


def moved_in(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return points of which none is further from what is between two bounds than ``OUTER_WIDTHS`` times its width."""
    reach = np.where(high > low, OUTER_WIDTHS * (high - low), FAR)
    return np.clip(points, low - reach, high + reach)


class AbstractDensity(eqx.Module):
    """A fitted density in the data's own units, with or without a condition.

    Targets are rows; X are the conditions, one per target, and left out where the density has none. Distribution functions,
    quantiles and scores made of them are for a single target.
    """

    @property
    @abc.abstractmethod
    def conditional(self) -> bool:
        """Return whether the density depends on a condition."""

    @abc.abstractmethod
    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        """Return the normalised log density of each target under its condition; ``-inf`` off a bounded support."""

    def log_prob(self, y: Float[AnyArray, "*d"], x: Float[AnyArray, "*p"] | None = None) -> Float[Array, ""]:
        """Return ``log p(y | x)`` at one point as a pure function of JAX: to be jitted, differentiated and vmapped.

        It is computed in float64 whatever JAX is set to, and comes back in the precision of y.
        """
        point = jnp.asarray(y)
        rows = (point,) if x is None else (point, jnp.asarray(x))
        return _in_double(_copied(self), jnp.result_type(point.dtype, jnp.float32))(*rows)

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        """Return one draw as a pure function of its key: to be jitted and vmapped, in the precision that JAX is set to."""
        raise TypeError(f"a {type(self).__name__} draws on the host only; use sample.")

    def support(self) -> Float[np.ndarray, "2 d"] | None:
        """Return the lower and the upper bound of each column of the target; None where there are none."""
        return positive(self)

    @abc.abstractmethod
    def sample(self, count: int, X: np.ndarray | None = None, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws: (count, dimensions), or under conditions (rows, count, dimensions)."""

    @abc.abstractmethod
    def given(self, x: np.ndarray) -> "AbstractDensity":
        """Return the density under one condition, as one that knows no condition."""

    @abc.abstractmethod
    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        """Return the distribution of the single target under each condition; one row where there is no condition."""

    def mean(self, X: np.ndarray | None = None) -> np.ndarray:
        """Return the mean under each condition, (rows, dimensions)."""
        return np.concatenate([part.mean()[:, None] for part, _ in self._pieces(X)])

    def cdf(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return ``P(Y <= y | x)`` of each row."""
        if not self.conditional:
            return self.distributions().cdf(targets.reshape(1, -1))[0]
        return np.concatenate([part.cdf(targets[rows])[:, 0] for part, rows in self._pieces(X)])

    def quantile(self, levels: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return the quantiles at each level, (rows, levels)."""
        return np.concatenate([part.quantile(np.tile(levels, (len(part), 1))) for part, _ in self._pieces(X)])

    def crps(self, targets: np.ndarray, X: np.ndarray) -> np.ndarray:
        """Return the continuous ranked probability score of each row: the integral of ``(F(t | x) - 1[y <= t])^2``."""
        return np.concatenate([part.crps(targets[rows, 0]) for part, rows in self._pieces(X)])

    def _pieces(self, X: np.ndarray | None) -> Iterator[tuple[Distributions, slice]]:
        """Yield the distributions of some rows at a time, and which these are."""
        if not self.conditional or X is None:
            yield self.distributions(X), slice(None)
            return
        for start in range(0, len(X), ROWS):
            yield self.distributions(X[start : start + ROWS]), slice(start, start + ROWS)


def positive(density: Any) -> Float[np.ndarray, "2 d"] | None:
    """Return the bounds of columns of which some stand for their logarithms; None if there are none of them."""
    logs = np.asarray(density.scaling.logs, bool)
    return np.stack([np.where(logs, 0.0, -np.inf), np.full(len(logs), np.inf)]) if logs.any() else None


def narrowed(tree: Any) -> Any:
    """Return a tree whose float64 arrays are copies in the precision that JAX is set to."""
    narrow = lambda leaf: leaf.astype(jnp.result_type(float) if leaf.dtype == np.float64 else leaf.dtype)
    return jax.tree.map(lambda leaf: narrow(leaf) if eqx.is_array(leaf) else leaf, _copied(tree))


def _copied(tree: Any) -> Any:
    """Return a tree with arrays of its own: JAX takes a constant's precision from the first program that it was part of."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def _in_double(density: Any, precision: np.dtype) -> Callable:
    """Return the log density of one row as a function of JAX that is computed, and differentiated, in float64.

    What is transposed after the context has ended would fall back to the caller's precision: the derivative is a rule of its
    own, in which all but the last product happens inside.
    """

    def wide(*rows: Float[Array, "..."]) -> Float[Array, ""]:
        y, *x = (row.astype(float).reshape(1, -1) for row in rows)
        z = density.scaling.to_model(y)
        # A missing cell is NaN and an atom infinite in model units, and neither is off the support.
        marked = (
            jnp.isnan(y) | density.scaling.atoms(y) if hasattr(density.scaling, "atoms") else jnp.isnan(y)
        )
        off = jnp.any(~(jnp.abs(z) < FAR) & ~marked)
        # The centre stands in for what is off the support or too far out, so that no derivative is NaN there.
        near = jnp.where(off, density.scaling.to_data(np.zeros(y.shape)), y)
        return jnp.where(off, -jnp.inf, jnp.asarray(density.log_density(near, *x))[0])

    def value(*rows: Float[Array, "..."]) -> Float[Array, ""]:
        with double_precision():
            found = wide(*rows)
        return found.astype(precision)

    def rule(rows: tuple, tangents: tuple) -> tuple[Float[Array, ""], Float[Array, ""]]:
        with double_precision():
            inside = tuple(row.astype(float) for row in rows)
            found, slopes = jax.value_and_grad(wide, argnums=tuple(range(len(rows))))(*inside)
        products = [
            (slope.astype(precision) * tangent).sum() for slope, tangent in zip(slopes, tangents, strict=True)
        ]
        return found.astype(precision), sum(products[1:], products[0]).astype(precision)

    function = jax.custom_jvp(value)
    function.defjvp(rule)
    return function


def _interpolated(
    at: np.ndarray, abscissae: np.ndarray, ordinates: np.ndarray, side: Literal["left", "right"] = "right"
) -> np.ndarray:
    """Return each row's polygon at several places of that row, from that side where it jumps; beyond its ends it is level."""
    low, high, count = abscissae[:, :1], abscissae[:, -1:], abscissae.shape[1]
    # Row by row: laid end to end, rows with far ends would leave no digits for their middles.
    place = np.stack(
        [np.searchsorted(row, wanted, side=side) for row, wanted in zip(abscissae, at, strict=True)]
    )
    place = np.clip(place - 1, 0, count - 2)
    (left, right), (bottom, top) = (
        (np.take_along_axis(part, place, axis=1), np.take_along_axis(part, place + 1, axis=1))
        for part in (abscissae, ordinates)
    )
    # A jump at the very place is behind from the right, and still to come from the left.
    share = np.where(
        right > left, (at - left) / np.where(right > left, right - left, 1.0), float(side == "right")
    )
    inner = bottom + np.clip(share, 0.0, 1.0) * (top - bottom)
    return np.where(at < low, ordinates[:, :1], np.where(at > high, ordinates[:, -1:], inner))


def scores(
    density: Any, targets: Float[np.ndarray, "n d"], *X: Float[np.ndarray, "n p"]
) -> Float[np.ndarray, " n"]:
    """Return the log density of points of any size: where they are so far out that the arithmetic overflows, ``-inf``."""
    if np.isnan(targets).any():
        raise ValueError("Input contains NaN: this density has no answer to missing cells.")
    with np.errstate(over="ignore", invalid="ignore"):
        far = np.any(~(np.abs(density.scaling.to_model(targets)) < FAR), axis=1)
        # The centre stands in for a far point, since not every density has an answer to infinity.
        near = np.where(far[:, None], density.scaling.to_data(np.zeros((1, targets.shape[1]))), targets)
        found = np.where(far, -np.inf, np.asarray(density.log_density(near, *X)))
    if np.isnan(found).any():
        raise ValueError(
            "Input X contains NaN in columns that had all their cells where the model was fitted."
        )
    return found
