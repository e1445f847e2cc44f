"""The interface of fitted densities, and distribution functions with their quantiles, moments and CRPS."""

import abc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.kinds import AbstractKind
from kexpfam.data.sample import AnyArray, PlainModule, RandomKey, row_slices
from kexpfam.jax_settings import double_precision
from kexpfam.stacklevel import caller_level

# In model units: beyond, squares overflow, and any log density is below the smallest number.
FAR = 1e150
# The outer mass on either side that must not decide a moment: of a law, and of draws.
OUTER_MASS, OUTER_DRAWS = 1e-4, 1e-2
# Draws for the mean of several targets.
MEAN_DRAWS = 512
# Most steps of a search for a quantile, and the relative rounding of its result.
MOST_STEPS, ROUNDING = 120, 2e-15
# Rows whose distribution functions are in memory at a time.
ROWS = 2048


class MomentWarning(UserWarning):
    """Moments of some laws are NaN, because mass that no data supports would decide them."""


class AbstractDistributions(PlainModule):
    """Distributions of one number, one per row.

    Moments are exact. A moment is NaN, with a ``MomentWarning``, where the outer mass decides it: where it
    differs from that of the law with its outer 1e-4 of mass on either side moved to the quantiles there (of
    every part of a mixture), by more than the standard deviation of the latter.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abc.abstractmethod
    def cdf(self, y: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Return ``P(Y <= y)`` of several values per row."""

    @abc.abstractmethod
    def quantile(self, levels: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Return the quantiles at several levels per row."""

    @abc.abstractmethod
    def cells(self) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, "n m"]]:
        """Return the middles of all cells, in any order, and their masses."""

    @abc.abstractmethod
    def moments(self, *ends: Float[np.ndarray, "n 1"]) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of each row; values outside the ends are moved there."""

    @abc.abstractmethod
    def polygon(self) -> "Distributions":
        """Return the distribution functions as polygons."""

    def mean(self) -> Float[np.ndarray, " n"]:
        """Return the mean of each row."""
        return supported_mean(self.moments(), self.inner_moments())

    def variance(self) -> Float[np.ndarray, " n"]:
        """Return the variance of each row."""
        (_, deviation), (_, inner) = self.moments(), self.inner_moments()
        return _unless_outer(deviation, deviation - inner, inner, "variance") ** 2

    def centre(self, kind: AbstractKind) -> Float[np.ndarray, " n"]:
        """Return the mean of numbers, the likeliest label, or the mean direction of angles."""
        return self.mean() if kind.others.has_mean else kind.centre(*self.cells())

    def mean_difference(self) -> Float[np.ndarray, " n"]:
        """Return ``E|Y - Y'|`` of two independent draws of each row: twice the integral of ``F (1 - F)``."""
        points, levels = self.polygon().points, self.polygon().levels
        left, right = levels[:, :-1], levels[:, 1:]
        heights = 0.5 * (left + right) - (left**2 + left * right + right**2) / 3.0
        return 2.0 * np.sum(np.diff(points, axis=1) * heights, axis=1)

    def crps(self, y: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        r"""Return the CRPS, :math:`\int (F(t) - 1[y \le t])^2 dt`, of each row.

        Each side of y is a polygon of its own, of which the integral of the square is known.
        """
        whole, at = self.polygon(), self.cdf(y[:, None])
        points = np.concatenate([whole.points, y[:, None]], axis=1)
        order = np.argsort(points, axis=1, kind="stable")
        points = np.take_along_axis(points, order, axis=1)
        levels = np.take_along_axis(np.concatenate([whole.levels, at], axis=1), order, axis=1)
        below = points[:, 1:] <= y[:, None]
        left, right = (np.where(below, part, 1.0 - part) for part in (levels[:, :-1], levels[:, 1:]))
        return np.sum(np.diff(points, axis=1) * (left**2 + left * right + right**2) / 3.0, axis=1)

    @abc.abstractmethod
    def inner_moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the moments of each row after its outer mass has been moved to the quantiles there."""


class Distributions(AbstractDistributions):
    """``P(Y <= points[i, j]) = levels[i, j]``, linear in between; both rise, levels from 0 to 1."""

    points: Float[AnyArray, "n m"]
    levels: Float[AnyArray, "n m"]

    @staticmethod
    def of_cells(edges: Float[AnyArray, "n m"], masses: Float[AnyArray, "n k"]) -> "Distributions":
        """Return the laws with these masses in the cells between these edges, uniform within each."""
        xp = masses.__array_namespace__()
        levels = xp.concatenate([xp.zeros_like(masses[:, :1]), xp.cumsum(masses, axis=1)], axis=1)
        return Distributions.of_levels(edges, levels / levels[:, -1:])

    @staticmethod
    def of_levels(points: Float[AnyArray, "n m"], levels: Float[AnyArray, "n m"]) -> "Distributions":
        """Return the laws with these levels at these points; points beyond 1e150 are moved there."""
        return Distributions(points.__array_namespace__().clip(points, -FAR, FAR), levels)

    def with_atom(self, value: float, chance: Float[np.ndarray, " n"]) -> "Distributions":
        """Return the laws of a value that has this probability, and otherwise follows this law."""
        chance = chance[:, None]
        at = _interpolated(np.full((len(self), 1), value), self.points, self.levels) * (1.0 - chance)
        levels = self.levels * (1.0 - chance) + chance * (self.points > value)
        points = np.concatenate([self.points, np.full((len(self), 2), value)], axis=1)
        levels = np.concatenate([levels, at, at + chance], axis=1)
        order = np.lexsort((levels, points), axis=1)
        return Distributions(*(np.take_along_axis(part, order, axis=1) for part in (points, levels)))

    def __len__(self) -> int:
        return len(self.points)

    def cdf(self, y: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        return _interpolated(y, self.points, self.levels)

    def quantile(self, levels: Float[AnyArray, "n k"]) -> Float[AnyArray, "n k"]:
        return _interpolated(levels, self.levels, self.points)

    def cells(self) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, "n m"]]:
        return 0.5 * (self.points[:, 1:] + self.points[:, :-1]), np.diff(self.levels, axis=1)

    def moments(self, *ends: Float[AnyArray, "n 1"]) -> tuple[AnyArray, AnyArray]:
        xp = self.points.__array_namespace__()
        points, masses = xp.clip(self.points, *ends) if ends else self.points, xp.diff(self.levels, axis=1)
        mean = 0.5 * xp.einsum("ij,ij->i", masses, points[:, 1:] + points[:, :-1])
        away = points - mean[:, None]
        left, right = away[:, :-1], away[:, 1:]
        squares = left * left + left * right + right * right
        return mean, xp.sqrt(xp.einsum("ij,ij->i", masses, squares) / 3.0)

    def inner_moments(self) -> tuple[AnyArray, AnyArray]:
        xp, outer = self.points.__array_namespace__(), np.array([OUTER_MASS, 1.0 - OUTER_MASS])
        ends = self.quantile(xp.tile(xp.asarray(outer), (len(self), 1)))
        low, high = ends[:, :1], ends[:, 1:]
        return self.moments(xp.where(high > low, low, -FAR), xp.where(high > low, high, FAR))

    def polygon(self) -> "Distributions":
        return self

    @property
    def jumps(self) -> bool:
        """Return whether a distribution function jumps between its ends."""
        points = self.points
        repeated = (points[:, 1:] == points[:, :-1]) & (points[:, 1:] > points[:, :1])
        return bool(np.any(repeated & (points[:, 1:] < points[:, -1:])))

    @staticmethod
    def mixture(
        parts: "Sequence[AbstractDistributions]", weights: Float[np.ndarray, " k"]
    ) -> AbstractDistributions:
        """Return the mixture of distributions, row by row."""
        laws = [MixedDistributions.of(part) for part in parts]
        longest = max(law.points.shape[2] for law in laws)
        # The last point is repeated where a part has fewer points.
        repeat = lambda values: np.repeat(values[:, :, -1:], longest - values.shape[2], axis=2)
        fill = lambda values: values if values.shape[2] == longest else np.dstack([values, repeat(values)])
        points, levels = (
            np.concatenate([fill(getattr(law, name)) for law in laws], axis=1)
            for name in ("points", "levels")
        )
        shares = [weight * law.weights for weight, law in zip(weights / np.sum(weights), laws, strict=True)]
        mixed = MixedDistributions(points, levels, np.concatenate(shares))
        return mixed.polygon() if mixed.flat.jumps else mixed


class MixedDistributions(AbstractDistributions):
    """Mixtures of distributions without jumps, which are merged only where a polygon is needed."""

    points: Float[np.ndarray, "n k m"]
    levels: Float[np.ndarray, "n k m"]
    weights: Float[np.ndarray, " k"]

    @staticmethod
    def of(law: AbstractDistributions) -> "MixedDistributions":
        """Return a law as a mixture, of a single part unless it is one."""
        if isinstance(law, MixedDistributions):
            return law
        whole = law.polygon()
        return MixedDistributions(whole.points[:, None], whole.levels[:, None], np.ones(1))

    @property
    def flat(self) -> Distributions:
        """Return the parts of all rows as rows of their own."""
        size = self.points.shape[2]
        return Distributions(self.points.reshape(-1, size), self.levels.reshape(-1, size))

    def __len__(self) -> int:
        return len(self.points)

    def cdf(self, y: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        return self._mixed(self.flat.cdf(self._repeated(y)))

    def quantile(self, levels: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Return the quantiles by the Illinois method, between those of the parts.

        They are those of the polygon up to rounding.
        """
        found = self.flat.quantile(self._repeated(levels)).reshape(*self.points.shape[:2], -1)
        low, high = found.min(axis=1), found.max(axis=1)
        low, high = np.where(levels >= 1.0, high, low), np.where(levels <= 0.0, low, high)
        below, above = levels - self.cdf(low), self.cdf(high) - levels
        rose = np.full(levels.shape, -1)
        for _ in range(MOST_STEPS):
            if np.all(high - low <= ROUNDING * (np.abs(low) + np.abs(high))):
                break
            total = below + above
            share = np.where(total > 0.0, below / np.where(total > 0.0, total, 1.0), 0.5)
            middle = low + share * (high - low)
            rest = levels - self.cdf(middle)
            exact, up = np.abs(rest) <= ROUNDING, rest >= 0.0
            # The distance of the end that stays twice is halved, so that it moves as well.
            below = np.where(up, rest, np.where(rose == 0, 0.5 * below, below))
            above = np.where(up, np.where(rose == 1, 0.5 * above, above), -rest)
            low, high = np.where(up | exact, middle, low), np.where(~up | exact, middle, high)
            rose = up.astype(int)
        return 0.5 * (low + high)

    def cells(self) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, "n m"]]:
        middles, masses = (part.reshape(*self.points.shape[:2], -1) for part in self.flat.cells())
        masses = self.weights[:, None] * masses
        return middles.reshape(len(self), -1), masses.reshape(len(self), -1)

    def moments(self, *ends: Float[np.ndarray, "n 1"]) -> tuple[np.ndarray, np.ndarray]:
        return self._pooled(*self.flat.moments(*map(self._repeated, ends)))

    def inner_moments(self) -> tuple[np.ndarray, np.ndarray]:
        return self._pooled(*self.flat.inner_moments())

    def _pooled(self, *moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the moments of the mixtures from those of all parts."""
        return pooled_moments(self.weights, *(part.reshape(len(self), -1) for part in moments))

    def polygon(self) -> Distributions:
        """Return the mixture on the points of all parts.

        Where points repeat there may be a jump: the first of them has the level before it.
        """
        points = np.sort(self.points.reshape(len(self), -1), axis=1)
        levels = self.cdf(points)
        repeated = points[:, 1:] == points[:, :-1]
        if np.any(repeated):
            flat = self.flat
            before = _interpolated(self._repeated(points), flat.points, flat.levels, side="left")
            first = np.concatenate([np.ones((len(points), 1), bool), ~repeated], axis=1)
            levels = np.where(first, self._mixed(before), levels)
        return Distributions(points, levels)

    def _repeated(self, values: np.ndarray) -> np.ndarray:
        """Return the rows once per part."""
        return np.repeat(values, len(self.weights), axis=0)

    def _mixed(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sums over the parts."""
        by_part = values.reshape(*self.points.shape[:2], *values.shape[1:])
        return np.einsum("k,nk...->n...", self.weights, by_part)


def pooled_moments(
    weights: Float[np.ndarray, " k"], means: Float[np.ndarray, "n k"], deviations: Float[np.ndarray, "n k"]
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of mixtures, one per row, from those of their parts."""
    mean = means @ weights
    return mean, np.sqrt((deviations**2 + (means - mean[:, None]) ** 2) @ weights)


def supported_mean(
    moments: tuple[np.ndarray, np.ndarray], inner: tuple[np.ndarray, np.ndarray]
) -> Float[np.ndarray, " n"]:
    """Return the means, NaN with a ``MomentWarning`` where the outer mass decides them."""
    return _unless_outer(moments[0], np.abs(moments[0] - inner[0]), inner[1], "mean")


def mean_of_draws(draws: Float[np.ndarray, "n m"], kind: AbstractKind) -> Float[np.ndarray, " n"]:
    """Return the mean of draws of each row, the likeliest label, or the mean direction of angles.

    The mean of numbers is NaN, with a ``MomentWarning``, where the outer hundredth of the draws decides it.
    """
    centre = kind.centre(draws, np.full(draws.shape, 1.0 / draws.shape[1]))
    if not kind.others.has_mean:
        return centre
    low, high = np.quantile(draws, [OUTER_DRAWS, 1.0 - OUTER_DRAWS], axis=1, keepdims=True)
    inner = np.where(high > low, np.clip(draws, low, high), draws)
    return _unless_outer(centre, np.abs(centre - inner.mean(axis=1)), inner.std(axis=1), "mean", OUTER_DRAWS)


def _unless_outer(
    moment: np.ndarray, change: np.ndarray, width: np.ndarray, name: str, outer: float = OUTER_MASS
) -> np.ndarray:
    """Return moments, NaN where the outer mass changes them by more than the width of the law."""
    # Rounding is no change: a law may be a single point.
    bad = ~(change <= width + 1e-9 * np.abs(moment))
    if np.any(bad):
        warnings.warn(
            f"the {name} of {bad.sum()} of {bad.size} laws is NaN, because the outer {outer:g} of their "
            "mass would decide it, which no data supports: use quantile, such as the median.",
            MomentWarning,
            stacklevel=caller_level(),
        )
    return np.where(bad, np.nan, moment)


class AbstractDensity(PlainModule):
    """A fitted density in data units, with or without a condition.

    Targets are rows; X are the conditions, one per target, and None if the density has no condition.
    Distribution functions, quantiles and CRPS are for a single target.
    """

    @property
    @abc.abstractmethod
    def conditional(self) -> bool:
        """Return whether the density depends on a condition."""

    @abc.abstractmethod
    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        """Return the normalised log density of each target; ``-inf`` outside the support."""

    def log_prob(self, y: Float[AnyArray, "*d"], x: Float[AnyArray, "*p"] | None = None) -> Float[Array, ""]:
        """Return ``log p(y | x)`` at one point as a pure function, for jit, grad and vmap of JAX.

        It is computed in float64 and returned in the precision of y as an array of JAX: a NumPy array of
        float64 is one of float32 unless JAX is set to float64. ``score_samples`` always keeps float64.
        """
        point = jnp.asarray(y)
        rows = (point,) if x is None else (point, jnp.asarray(x))
        return _in_double(_copied(self), jnp.result_type(point.dtype, jnp.float32))(*rows)

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: RandomKey) -> Float[Array, " d"]:
        """Return one draw as a pure function of its key, for jit and vmap of JAX, in JAX's precision."""
        raise TypeError(f"a {type(self).__name__} draws on the host only; use sample.")

    def support(self) -> Float[np.ndarray, "2 d"] | None:
        """Return the bounds of each column of the target, (2, d); None if all are infinite."""
        return positive(self)

    @abc.abstractmethod
    def sample(self, count: int, X: np.ndarray | None = None, *, key: RandomKey) -> np.ndarray:
        """Return draws: (count, dimensions), or under conditions (rows, count, dimensions)."""

    @abc.abstractmethod
    def given(self, x: np.ndarray) -> "AbstractDensity":
        """Return the density under one condition, which has no condition itself."""

    @abc.abstractmethod
    def distributions(self, X: np.ndarray | None = None) -> AbstractDistributions:
        """Return the distribution of the single target under each condition, or of the only one."""

    def mean(
        self, X: np.ndarray | None = None, *, draws: int = MEAN_DRAWS, key: RandomKey | None = None
    ) -> np.ndarray:
        """Return the mean under each condition, (rows, dimensions).

        ``draws`` and ``key`` are for densities of several targets whose mean is that of draws.
        """
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
        """Return the CRPS of each row: the integral of ``(F(t | x) - 1[y <= t])^2``."""
        return np.concatenate([part.crps(targets[rows, 0]) for part, rows in self._pieces(X)])

    def _pieces(self, X: np.ndarray | None) -> Iterator[tuple[AbstractDistributions, slice]]:
        """Yield the distributions of blocks of rows, and the slices of these."""
        if not self.conditional or X is None:
            yield self.distributions(X), slice(None)
            return
        for rows in row_slices(len(X), ROWS):
            yield self.distributions(X[rows]), rows


def positive(density: Any) -> Float[np.ndarray, "2 d"] | None:
    """Return the bounds of columns of which some are modelled by logarithms; None if none is."""
    logs = np.asarray(density.scaling.logs, bool)
    return np.stack([np.where(logs, 0.0, -np.inf), np.full(len(logs), np.inf)]) if logs.any() else None


def narrowed(tree: Any) -> Any:
    """Return a tree whose float64 arrays are copies in the precision of JAX."""
    narrow = lambda leaf: leaf.astype(jnp.result_type(float) if leaf.dtype == np.float64 else leaf.dtype)
    return jax.tree.map(lambda leaf: narrow(leaf) if eqx.is_array(leaf) else leaf, _copied(tree))


def _copied(tree: Any) -> Any:
    """Return a tree with copies of its arrays: JAX caches the precision of constants by identity."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def _in_double(density: Any, precision: np.dtype) -> Callable:
    """Return the log density of one row as a JAX function with values and derivatives in float64.

    The derivative is a custom rule, because transposition after the context would use the caller's precision.
    """

    def wide(*rows: Float[Array, "..."]) -> Float[Array, ""]:
        y, *x = (row.astype(float).reshape(1, -1) for row in rows)
        if y.size != (width := density.scaling.width):
            raise ValueError(f"log_prob takes a point of size {width}, got {y.size}: use jax.vmap for more.")
        z = density.scaling.to_model(y)
        # A missing cell is NaN in model units, and an atom infinite.
        off = jnp.any(~(jnp.abs(z) < FAR) & ~jnp.isnan(y) & ~density.scaling.atoms(y))
        # The centre replaces points that are outside the support or too far out, where derivatives are NaN.
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
    at: AnyArray, abscissae: AnyArray, ordinates: AnyArray, side: Literal["left", "right"] = "right"
) -> AnyArray:
    """Return each row's polygon at several places, from the given side where it jumps, constant outside."""
    xp = abscissae.__array_namespace__()
    low, high, count = abscissae[:, :1], abscissae[:, -1:], abscissae.shape[1]
    place = xp.clip(_places(abscissae, at, side) - 1, 0, count - 2)
    (left, right), (bottom, top) = (
        (xp.take_along_axis(part, place, axis=1), xp.take_along_axis(part, place + 1, axis=1))
        for part in (abscissae, ordinates)
    )
    wide = right > left
    # At a jump, the level from the right is that after it.
    share = xp.where(wide, (at - left) / xp.where(wide, right - left, 1.0), float(side == "right"))
    inner = bottom + xp.clip(share, 0.0, 1.0) * (top - bottom)
    return xp.where(at < low, ordinates[:, :1], xp.where(at > high, ordinates[:, -1:], inner))


def _places(abscissae: AnyArray, at: AnyArray, side: Literal["left", "right"]) -> AnyArray:
    """Return ``numpy.searchsorted`` of each row, by bisection in all rows at once if values are few."""
    rows, count = abscissae.shape
    if at.shape[1] > count:
        both = zip(abscissae, at, strict=True)
        return np.stack([np.searchsorted(row, wanted, side=side) for row, wanted in both])
    xp = abscissae.__array_namespace__()
    before = xp.less_equal if side == "right" else xp.less
    flat, start = xp.ravel(abscissae), count * np.arange(rows)[:, None]
    place, step = xp.zeros(at.shape, int), 1 << (count.bit_length() - 1)
    while step:
        further = xp.minimum(place + step, count)
        place = xp.where(before(flat[start + further - 1], at), further, place)
        step //= 2
    return place


def scores(
    density: Any, targets: Float[np.ndarray, "n d"], *X: Float[np.ndarray, "n p"]
) -> Float[np.ndarray, " n"]:
    """Return the log density of points of any size: ``-inf`` where they are so far out that z overflows.

    Cells may be missing in the columns in which cells were missing in training.
    """
    scaling = density.scaling
    missing = np.isnan(targets)
    if np.any(missing & ~np.array(scaling.gaps or False)):
        raise ValueError("Input contains NaN: this density has no answer to missing cells.")
    with np.errstate(over="ignore", invalid="ignore"):
        far = ~(np.abs(scaling.to_model(targets)) < FAR) & ~missing & ~scaling.atoms(targets)
        far = np.any(far, axis=1)
        # The centre replaces far points, because not every density accepts infinity.
        near = np.where(far[:, None], scaling.to_data(np.zeros((1, targets.shape[1]))), targets)
        found = np.where(far, -np.inf, np.asarray(density.log_density(near, *X)))
    if np.isnan(found).any():
        raise ValueError("Input X contains NaN in columns that had no missing values during fit.")
    return found
