"""A conditional density that is a mixture of normals at training targets, with weights that depend on the condition."""

import abc
from collections.abc import Iterator

import equinox as eqx
import numpy as np
from jaxtyping import Array, Key
from scipy.spatial.distance import cdist
from scipy.special import ndtr, ndtri

from kexpfam.baselines.kernel_density import chunks, log_volume
from kexpfam.data.sample import AnyArray
from kexpfam.data.scaling import Scaling
from kexpfam.fit.bases import TAIL_WIDTH
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.measures import logsumexp

__all__ = ["AbstractWeights", "ConditionalMixture", "KernelWeights", "NeighbourWeights", "inputs", "safe_log"]

# Halvings of a bracket: beyond these, its ends are neighbours in double precision.
BISECTIONS = 60
# Conditions further out than this, in standard deviations, are moved there: beyond, squares cannot tell centres apart.
FURTHEST = 1e6


class AbstractWeights(eqx.Module):
    """How much each centre counts under a condition: a function of the distances to the conditions it was seen under."""

    points: eqx.AbstractVar[np.ndarray]

    def log_weights(self, condition: np.ndarray) -> np.ndarray:
        """Return log weights, (rows, centres), up to a constant per row; one of each row is finite at least."""
        return self.at_squares(cdist(condition, self.points, "sqeuclidean"))

    @abc.abstractmethod
    def at_squares(self, squares: np.ndarray) -> np.ndarray:
        """Return the log weights at these squared distances, (rows, centres); infinite ones have no weight."""


class KernelWeights(AbstractWeights):
    """``heights_j exp(-|x - x_j|^2 / (2 width^2))``; taken in logs, far from all x_j the nearest of positive height decides."""

    points: np.ndarray
    heights: np.ndarray
    width: float

    def at_squares(self, squares: np.ndarray) -> np.ndarray:
        return safe_log(self.heights) - 0.5 * squares / self.width**2


class NeighbourWeights(AbstractWeights):
    """Equal weights, or ``heights``, of the points within ``radius``; where there are none, of the nearest (or all tied)."""

    points: np.ndarray
    radius: float
    heights: np.ndarray | None = None

    def at_squares(self, squares: np.ndarray) -> np.ndarray:
        reach = np.maximum(self.radius**2, squares.min(axis=1, keepdims=True))
        return np.where(squares <= reach, 0.0 if self.heights is None else np.log(self.heights), -np.inf)


class ConditionalMixture(eqx.Module):
    """``p(y | x) = (1 - background) sum_j w_j(x) N(y; c_j, width^2 I) + background N(y; 0, TAIL_WIDTH^2 I)``.

    All of it in standardised units. ``w(x)`` sums to one. ``varying`` marks the inputs that were not constant. Where the
    inputs have width zero there is no condition, and none has to be given.
    """

    weights: AbstractWeights
    centres: np.ndarray
    width: float
    background: float
    scaling: Scaling
    condition_scaling: Scaling
    varying: np.ndarray

    def log_density(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return the log density of each target under its condition, in the data's own units."""
        z, (centres, widths) = self.scaling.to_model(targets), self._components()
        found = np.empty(len(z))
        for rows, log_weights in self._log_weights(X, len(z)):
            squares = cdist(z[rows], centres, "sqeuclidean")
            found[rows] = logsumexp(log_weights - 0.5 * squares / widths**2 - log_volume(widths, z.shape[1]))
        return found + self.scaling.log_jacobian(targets)

    def mean(self, X: np.ndarray | None = None) -> np.ndarray:
        """Return the mean under each condition."""
        centres, _ = self._components()
        return self.scaling.to_data(
            np.concatenate([np.exp(log_weights) @ centres for _, log_weights in self._log_weights(X)])
        )

    def cdf(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return ``P(Y <= y | x)`` of each row, for targets of one dimension."""
        z, (centres, widths) = self.scaling.to_model(targets), self._line()
        weighted = self._log_weights(X, len(z))
        parts = [
            np.sum(np.exp(weights) * ndtr((z[rows] - centres) / widths), axis=1) for rows, weights in weighted
        ]
        return np.clip(np.concatenate(parts), 0.0, 1.0)

    def quantile(self, levels: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return the quantiles at each level, (rows, levels), for targets of one dimension: by bisection."""
        centres, widths = self._line()
        parts = [
            _bisect(np.exp(log_weights), centres, widths, levels) for _, log_weights in self._log_weights(X)
        ]
        found = np.concatenate(parts)
        return self.scaling.to_data(found.reshape(-1, 1)).reshape(found.shape)

    def crps(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return the continuous ranked probability score ``E|Y - y| - E|Y - Y'| / 2`` of each row, in closed form."""
        z, (centres, widths) = self.scaling.to_model(targets), self._line()
        scores = np.empty(len(z))
        for rows, log_weights in self._log_weights(X, len(z)):
            masses = np.exp(log_weights)
            scores[rows] = np.sum(masses * _mean_distance(z[rows] - centres, widths), axis=1)
            for part in chunks(np.arange(len(centres)), len(centres)):
                spreads = np.hypot(widths[:, None], widths[part])
                between = masses @ _mean_distance(centres[:, None] - centres[part], spreads)
                scores[rows] -= 0.5 * np.sum(between * masses[:, part], axis=1)
        return scores * self.scaling.scale[0]

    def sample(self, count: int, X: np.ndarray | None = None, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws: (count, dimensions), or under conditions (rows, count, dimensions)."""
        rng, (centres, widths) = np.random.default_rng(seed_from(key)), self._components()
        draws = np.empty((1 if X is None else len(X), count, centres.shape[1]))
        for rows, log_weights in self._log_weights(X):
            chosen = _choose(np.exp(log_weights), rng.uniform(size=(len(rows), count)))
            draws[rows] = centres[chosen] + widths[chosen, None] * rng.normal(
                size=(*chosen.shape, centres.shape[1])
            )
        found = self.scaling.to_data(draws.reshape(-1, centres.shape[1])).reshape(draws.shape)
        return found[0] if X is None else found

    def given(self, x: np.ndarray) -> "ConditionalMixture":
        """Return the density under one condition, as one that knows no condition."""
        log_weights = self.weights.log_weights(inputs(self.condition_scaling, self.varying, x[None]))[0]
        nothing = np.zeros((len(log_weights), 0))
        weights = KernelWeights(nothing, np.exp(log_weights - log_weights.max()), 1.0)
        settings = (self.centres, self.width, self.background, self.scaling)
        return ConditionalMixture(weights, *settings, Scaling.plain(nothing), np.zeros(0, bool))

    def _components(self) -> tuple[np.ndarray, np.ndarray]:
        """Return centres and widths, the background's last."""
        centres = np.concatenate([self.centres, np.zeros((1, self.centres.shape[1]))])
        return centres, np.append(np.full(len(self.centres), self.width), TAIL_WIDTH)

    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        centres, widths = self._components()
        if centres.shape[1] != 1:
            raise ValueError(
                "distribution functions and quantiles are for targets of one dimension; use sample instead."
            )
        return centres[:, 0], widths

    def _log_weights(self, X: np.ndarray | None, count: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield some rows at a time, with the log weights of every component; without a condition, ``count`` rows."""
        condition = inputs(self.condition_scaling, self.varying, np.zeros((count, 0)) if X is None else X)
        condition = np.clip(condition, -FURTHEST, FURTHEST)
        log_share, log_rest = safe_log(self.background), np.log1p(-self.background)
        for rows in chunks(np.arange(len(condition)), 4 * len(self.centres)):
            log_weights = self.weights.log_weights(condition[rows])
            log_weights = log_weights - logsumexp(log_weights)[:, None]
            yield rows, np.concatenate([log_weights + log_rest, np.full((len(rows), 1), log_share)], axis=1)


def safe_log(values: float | np.ndarray) -> AnyArray:
    """Return logarithms, those of 0 included."""
    with np.errstate(divide="ignore"):
        return np.log(values)


def inputs(scaling: Scaling, varying: np.ndarray, X: np.ndarray) -> np.ndarray:
    """Return standardised conditions; those that were constant say nothing, whatever they are now."""
    return np.where(varying, scaling.to_model(X), 0.0)


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


def _choose(masses: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return one component for each number in [0, 1), by the masses of its row."""
    levels = np.cumsum(masses, axis=1)
    levels /= levels[:, -1:]
    offsets = np.arange(len(masses))[:, None]
    # Row i's levels lie in (i, i + 1]: one sorted list serves all rows.
    places = (
        np.searchsorted((levels + offsets).ravel(), uniforms + offsets, side="right")
        - offsets * masses.shape[1]
    )
    return np.clip(places, 0, masses.shape[1] - 1)
