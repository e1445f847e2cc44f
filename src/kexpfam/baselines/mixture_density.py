"""Mixtures of normals at training targets, whose weights may depend on a condition."""

import abc
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float
from scipy.spatial.distance import cdist
from scipy.special import ndtr, ndtri

from kexpfam.data.sample import AnyArray, RandomKey, row_slices
from kexpfam.data.scaling import Scaling
from kexpfam.integrate.nodes import choose_each, seed_from
from kexpfam.model.distributions import AbstractDensity, Distributions, narrowed
from kexpfam.model.measures import LOG_TWO_PI, logsumexp

# Numbers in one block of a matrix of rows and centres.
CHUNK_NUMBERS = 4_000_000
# Halvings of a bracket, after which its ends are neighbours in double precision.
BISECTIONS = 60
# Conditions are clipped to this many standard deviations: the squares of larger distances are equal in
# float64.
FURTHEST = 1e6
# Points of a tabulated distribution function, and the quantile levels of each component among them.
TABLE_POINTS = 4096
TABLE_LEVELS = np.concatenate(
    [[1e-12, 1e-8, 1e-5], np.linspace(1e-3, 1.0 - 1e-3, 99), [1 - 1e-5, 1 - 1e-8, 1 - 1e-12]]
)


def chunks(count: int, numbers_per_row: int) -> list[slice]:
    """Return slices that cover ``count`` rows, each with at most ``CHUNK_NUMBERS`` numbers."""
    return row_slices(count, max(1, CHUNK_NUMBERS // max(numbers_per_row, 1)))


def safe_log(values: float | np.ndarray) -> AnyArray:
    """Return logarithms; that of 0 is ``-inf``, without a warning."""
    with np.errstate(divide="ignore"):
        return np.log(values)


def log_volume(width: float | AnyArray, dims: int) -> AnyArray:
    """Return the log of the integral of ``exp(-|x|^2 / (2 width^2))`` over ``dims`` dimensions."""
    return dims * (np.log(width) + 0.5 * LOG_TWO_PI)


def squared_distances(xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
    """Return the squared distances of all pairs of rows."""
    return ((xs[:, None] - zs) ** 2).sum(-1) if isinstance(xs, jax.Array) else cdist(xs, zs, "sqeuclidean")


def standardised(scaling: Scaling, varying: Bool[np.ndarray, " p"], X: Float[AnyArray, "n p"]) -> AnyArray:
    """Return conditions in model units; columns that were constant in training are 0."""
    xp = X.__array_namespace__()
    return xp.clip(xp.where(varying, scaling.to_model(X), 0.0), -FURTHEST, FURTHEST)


class AbstractWeights(eqx.Module):
    """Weights of the centres: a function of the distances between a condition and the training conditions."""

    points: eqx.AbstractVar[np.ndarray]

    def log_weights(self, condition: Float[AnyArray, "n p"]) -> Float[AnyArray, "n m"]:
        """Return log weights up to a constant per row; at least one in each row is finite."""
        return self.at_squares(squared_distances(condition, self.points))

    @abc.abstractmethod
    def at_squares(self, squares: Float[AnyArray, "n m"]) -> Float[AnyArray, "n m"]:
        """Return the log weights at these squared distances; at infinite ones they are ``-inf``."""


class KernelWeights(AbstractWeights):
    """``heights_j exp(-|x - x_j|^2 / (2 width^2))``; the nearest x_j dominates far from all."""

    points: Float[np.ndarray, "m p"]
    heights: Float[np.ndarray, " m"]
    width: float

    def at_squares(self, squares: Float[AnyArray, "n m"]) -> Float[AnyArray, "n m"]:
        return safe_log(self.heights) - 0.5 * squares / self.width**2


class NeighbourWeights(AbstractWeights):
    """Equal weights, or ``heights``, of the points within ``radius``, or else of the nearest points."""

    points: Float[np.ndarray, "m p"]
    radius: float
    heights: Float[np.ndarray, " m"] | None = None

    def at_squares(self, squares: Float[AnyArray, "n m"]) -> Float[AnyArray, "n m"]:
        xp, log_heights = squares.__array_namespace__(), 0.0 if self.heights is None else np.log(self.heights)
        reach = xp.maximum(xp.asarray(self.radius**2), squares.min(axis=1, keepdims=True))
        return xp.where(squares <= reach, log_heights, -np.inf)


class MixtureDensity(AbstractDensity):
    """``p(y | x) = (1 - b) sum_j w_j(x) N(y; c_j, width^2 I) + b N(y; 0, background_width^2 I)``.

    All in standardised units; b is ``background`` and ``w(x)`` sums to one. ``varying`` marks the inputs that
    were not constant in training. Without inputs the density is unconditional.
    """

    weights: AbstractWeights
    centres: Float[np.ndarray, "m d"]
    width: float
    background: float
    background_width: float
    scaling: Scaling
    condition_scaling: Scaling
    varying: Bool[np.ndarray, " p"]

    @classmethod
    def unconditional(
        cls,
        centres: np.ndarray,
        heights: np.ndarray | None,
        widths: tuple[float, float, float],
        scaling: Scaling,
    ) -> "MixtureDensity":
        """Return the mixture with fixed weights, proportional to ``heights``; equal ones for None.

        ``widths`` are width, background and background width.
        """
        empty = np.zeros((len(centres), 0))
        weights = KernelWeights(empty, np.ones(len(centres)) if heights is None else heights, 1.0)
        return cls(weights, centres, *widths, scaling, Scaling.plain(empty), np.zeros(0, bool))

    @property
    def conditional(self) -> bool:
        return len(self.varying) > 0

    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        z, (centres, widths) = self.scaling.to_model(targets), self._components()
        parts = []
        for rows, log_weights in self._log_weights(X, len(z)):
            exponents = -0.5 * squared_distances(z[rows], centres) / widths**2
            parts.append(logsumexp(log_weights + exponents - log_volume(widths, z.shape[1])))
        return z.__array_namespace__().concat(parts) + self.scaling.log_jacobian(targets)

    def mean(self, X: np.ndarray | None = None, **options: Any) -> np.ndarray:
        centres, _ = self._components()
        means = [np.exp(log_weights) @ centres for _, log_weights in self._log_weights(X)]
        return self.scaling.to_data(np.concatenate(means))

    def cdf(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        (centres, widths), z = self._line(), self.scaling.to_model(targets.reshape(-1, 1))
        weighted = self._log_weights(X, len(z))
        parts = [np.sum(np.exp(log) * ndtr((z[rows] - centres) / widths), axis=1) for rows, log in weighted]
        return np.clip(np.concatenate(parts), 0.0, 1.0)

    def quantile(self, levels: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        line = self._line()
        parts = [_bisect(np.exp(log_weights), *line, levels) for _, log_weights in self._log_weights(X)]
        found = np.concatenate(parts)
        return self.scaling.to_data(found.reshape(-1, 1)).reshape(found.shape)

    def crps(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return the CRPS ``E|Y - y| - E|Y - Y'| / 2`` of each row, in closed form."""
        z, (centres, widths) = self.scaling.to_model(targets), self._line()
        scores = np.empty(len(z))
        for rows, log_weights in self._log_weights(X, len(z)):
            masses = np.exp(log_weights)
            scores[rows] = np.sum(masses * _mean_distance(z[rows] - centres, widths), axis=1)
            for part in chunks(len(centres), len(centres)):
                spreads = np.hypot(widths[:, None], widths[part])
                between = masses @ _mean_distance(centres[:, None] - centres[part], spreads)
                scores[rows] -= 0.5 * np.sum(between * masses[:, part], axis=1)
        return scores * self.scaling.scale[0]

    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        """Return distribution functions, exact at quantiles of the components and linear in between."""
        centres, widths = self._line()
        points = np.sort((centres + widths * ndtri(TABLE_LEVELS)[:, None]).ravel())
        if points.size > TABLE_POINTS:
            points = points[np.linspace(0, points.size - 1, TABLE_POINTS).astype(int)]
        masses = np.concatenate([np.exp(log_weights) for _, log_weights in self._log_weights(X)])
        parts = chunks(len(points), len(centres))
        blocks = [masses @ ndtr((points[part] - centres[:, None]) / widths[:, None]) for part in parts]
        levels = np.maximum.accumulate(np.clip(np.concatenate(blocks, axis=1), 0.0, 1.0), axis=1)
        levels[:, 0], levels[:, -1] = 0.0, 1.0
        points = self.scaling.to_data(points[:, None])[:, 0]
        return Distributions(np.broadcast_to(points, levels.shape), levels)

    def sample(self, count: int, X: np.ndarray | None = None, *, key: RandomKey) -> np.ndarray:
        rng, (centres, widths) = np.random.default_rng(seed_from(key)), self._components()
        parts = []
        for _, log_weights in self._log_weights(X):
            chosen = choose_each(np.exp(log_weights), rng.uniform(size=(len(log_weights), count)))
            noise = rng.normal(size=(*chosen.shape, centres.shape[1]))
            parts.append(centres[chosen] + widths[chosen, None] * noise)
        draws = np.concatenate(parts)
        found = self.scaling.to_data(draws.reshape(-1, centres.shape[1])).reshape(draws.shape)
        return found if self.conditional else found[0]

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: RandomKey) -> Float[Array, " d"]:
        chosen_key, noise_key = jr.split(key)
        own = narrowed(self)
        ((_, log_weights),) = own._log_weights(None if x is None else jnp.asarray(x, float)[None])
        centres, widths = map(jnp.asarray, own._components())
        chosen = jr.categorical(chosen_key, jnp.asarray(log_weights)[0])
        point = centres[chosen] + widths[chosen] * jr.normal(noise_key, (centres.shape[1],), centres.dtype)
        return own.scaling.to_data(point[None])[0]

    def given(self, x: np.ndarray) -> "MixtureDensity":
        if not self.conditional:
            raise TypeError("this density has no condition.")
        log_weights = self.weights.log_weights(standardised(self.condition_scaling, self.varying, x[None]))[0]
        heights = np.exp(log_weights - log_weights.max())
        widths = self.width, self.background, self.background_width
        return MixtureDensity.unconditional(self.centres, heights, widths, self.scaling)

    def _components(self) -> tuple[np.ndarray, np.ndarray]:
        """Return centres and widths; those of the background are last."""
        centres = np.concatenate([self.centres, np.zeros((1, self.centres.shape[1]))])
        return centres, np.append(np.full(len(self.centres), self.width), self.background_width)

    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        centres, widths = self._components()
        if centres.shape[1] != 1:
            raise ValueError(
                "distribution functions and quantiles are for targets of one dimension; use sample instead."
            )
        return centres[:, 0], widths

    def _log_weights(self, X: AnyArray | None, count: int = 1) -> Iterator[tuple[slice, AnyArray]]:
        """Yield slices of rows with their log weights of all components, (rows, components).

        The weights of an unconditional density have one row, for slices of ``count`` rows.
        """
        if self.conditional and X is None:
            raise TypeError("this density has a condition: pass X, or call given(x) first.")
        shares = safe_log(np.array([1.0 - self.background, self.background]))
        condition = np.zeros((1, 0)) if X is None else standardised(self.condition_scaling, self.varying, X)
        for rows in chunks(len(condition) if self.conditional else count, 4 * len(self.centres)):
            log_weights = self.weights.log_weights(condition[rows] if self.conditional else condition)
            log_weights = log_weights - logsumexp(log_weights)[:, None]
            xp = log_weights.__array_namespace__()
            last = xp.full((len(log_weights), 1), shares[1], dtype=log_weights.dtype)
            yield rows, xp.concat([log_weights + shares[0], last], axis=1)


def _bisect(masses: np.ndarray, centres: np.ndarray, widths: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the quantiles of mixtures with these masses, (rows, levels)."""
    found = np.empty((len(masses), len(levels)))
    for column, level in enumerate(levels):
        # A mixture's quantile lies between those of its components.
        ends = centres + widths * ndtri(level)
        low, high = np.full(len(masses), ends.min()), np.full(len(masses), ends.max())
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            below = np.sum(masses * ndtr((middle[:, None] - centres) / widths), axis=1) < level
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        found[:, column] = 0.5 * (low + high)
    return found


def _mean_distance(shift: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return ``E|shift + width N(0, 1)|``."""
    ratio = shift / width
    return 2.0 * width * np.exp(-0.5 * ratio**2) / np.sqrt(2.0 * np.pi) + shift * (2.0 * ndtr(ratio) - 1.0)
