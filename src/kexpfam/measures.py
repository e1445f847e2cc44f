"""Base measures p0, and the reference measures that transports start from.

A measure is written for one point: ``log_density(x)`` is normalised, ``sample(count, key=...)`` draws. ``marginal(dims)`` is
the measure of some coordinates and ``completed`` draws the others given those, both in closed form: a function f of few
coordinates is fitted, normalised and sampled in those alone. ``given(condition)`` is the measure under a condition: itself,
unless it depends on one.
"""

import abc
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

LOG_TWO_PI = float(np.log(2.0 * np.pi))
# Added to the diagonal of covariances of standardised data, so that no component can collapse onto tied points.
COVARIANCE_FLOOR = 1e-5


class AbstractMeasure(eqx.Module):
    """A probability measure on the space of targets."""

    @abc.abstractmethod
    def log_density(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        """Return the normalised log density at one point; ``-inf`` off the support."""

    @abc.abstractmethod
    def sample(self, count: int, *, key: Key[Array, ""]) -> Float[Array, "count d"]:
        """Draw ``count`` points."""

    @abc.abstractmethod
    def marginal(self, dims) -> "AbstractMeasure":
        """Return the measure of the coordinates ``dims``."""

    @abc.abstractmethod
    def bounds(self, spread: float) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """Return a box that holds the measure up to ``spread`` standard deviations (all of it, if bounded)."""

    def completed(self, dims: tuple[int, ...], values: Float[Array, "b s"], *, key: Key[Array, ""]) -> Float[Array, "b d"]:
        """Return points with the given values in the coordinates ``dims`` and the others drawn given those."""
        raise TypeError(f"a {type(self).__name__} does not know its conditionals.")

    def log_densities(self, points) -> np.ndarray:
        """Return the log densities of many points as a NumPy array."""
        return np.asarray(_jitted_log_density(self, jnp.asarray(points)))

    def draws(self, count: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return ``count`` draws as a NumPy array."""
        return np.asarray(_jitted_sample(self, count, key))

    def fold(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Map points onto the support; the identity for an unbounded one."""
        return x

    def given(self, condition: Float[Array, " p"]) -> "AbstractMeasure":
        """Return the measure under a condition."""
        return self


class Gaussian(AbstractMeasure):
    """``N(mean, cholesky cholesky^T)``."""

    mean: Float[Array, " d"]
    cholesky: Float[Array, "d d"]

    @classmethod
    def fitted(cls, points: np.ndarray, *, width: float = 1.0) -> "Gaussian":
        """Return the normal with the points' mean and ``width**2`` times their covariance."""
        dim = points.shape[1]
        covariance = np.cov(points, rowvar=False).reshape(dim, dim) + COVARIANCE_FLOOR * np.eye(dim)
        return cls(jnp.asarray(points.mean(0)), jnp.asarray(width * np.linalg.cholesky(covariance)))

    def log_density(self, x):
        return _normal_log_densities(x, self.mean[None], jnp.linalg.inv(self.cholesky)[None])[0]

    def sample(self, count, *, key):
        noise = jr.normal(key, (count, self.mean.size), self.mean.dtype)
        return self.mean + noise @ self.cholesky.T

    def marginal(self, dims):
        rows = self.cholesky[dims]
        return Gaussian(self.mean[dims], jnp.linalg.cholesky(rows @ rows.T))

    def completed(self, dims, values, *, key):
        return Mixture.of(jnp.zeros(1), self.mean[None], self.cholesky[None]).completed(dims, values, key=key)

    def bounds(self, spread):
        deviation = jnp.sqrt(jnp.sum(self.cholesky**2, 1))
        return self.mean - spread * deviation, self.mean + spread * deviation


class StandardNormal(AbstractMeasure):
    """``N(0, I)``: noise of any width."""

    dim: int = eqx.field(static=True)

    def log_density(self, x):
        return -0.5 * (jnp.sum(x**2) + self.dim * LOG_TWO_PI)

    def sample(self, count, *, key):
        return jr.normal(key, (count, self.dim), jnp.float32)

    def marginal(self, dims):
        return StandardNormal(len(dims))

    def bounds(self, spread):
        return jnp.full(self.dim, -spread), jnp.full(self.dim, spread)


class Box(AbstractMeasure):
    """The uniform measure on ``[low, high]``: density zero outside."""

    low: Float[Array, " d"]
    high: Float[Array, " d"]

    @classmethod
    def fitted(cls, points: np.ndarray, *, padding: float = 0.2) -> "Box":
        """Return the box of the points, widened on each side by ``padding`` times their range."""
        low, high = points.min(0), points.max(0)
        margin = padding * (high - low)
        return cls(jnp.asarray(low - margin), jnp.asarray(high + margin))

    def log_density(self, x):
        inside = jnp.all((x >= self.low) & (x <= self.high))
        return jnp.where(inside, -jnp.sum(jnp.log(self.high - self.low)), -jnp.inf)

    def sample(self, count, *, key):
        unit = jr.uniform(key, (count, self.low.size), self.low.dtype)
        return self.low + (self.high - self.low) * unit

    def marginal(self, dims):
        return Box(self.low[dims], self.high[dims])

    def completed(self, dims, values, *, key):
        return self.sample(values.shape[0], key=key).at[:, jnp.asarray(dims)].set(values)

    def bounds(self, spread):
        return self.low, self.high

    def fold(self, x):
        # Reflection at the walls: continuous, measure-preserving, and the identity inside.
        width = self.high - self.low
        phase = jnp.mod(x - self.low, 2.0 * width)
        return self.low + jnp.where(phase > width, 2.0 * width - phase, phase)


class Mixture(AbstractMeasure):
    """``sum_k weight_k N(mean_k, cholesky_k cholesky_k^T)``."""

    log_weights: Float[Array, " k"]
    means: Float[Array, "k d"]
    choleskys: Float[Array, "k d d"]
    # The inverse factors, kept because a triangular solve per point and component is what log_density must not cost.
    whiteners: Float[Array, "k d d"]

    @classmethod
    def of(cls, log_weights, means, choleskys) -> "Mixture":
        """Return the mixture with these factors."""
        choleskys = jnp.asarray(choleskys)
        return cls(jnp.asarray(log_weights), jnp.asarray(means), choleskys, jnp.linalg.inv(choleskys))

    @classmethod
    def fitted(cls, points: np.ndarray, *, components: int, diagonal: bool, seed: int) -> "Mixture":
        """Return the maximum-likelihood mixture, by scikit-learn's EM."""
        model = _expectation_maximisation(points, components, diagonal, seed)
        if diagonal:
            choleskys = np.sqrt(model.covariances_)[:, :, None] * np.eye(points.shape[1])
        else:
            choleskys = np.linalg.cholesky(model.covariances_)
        return cls.of(np.log(model.weights_), model.means_, choleskys)

    def log_density(self, x):
        return jax.nn.logsumexp(self.log_weights + _normal_log_densities(x, self.means, self.whiteners))

    def sample(self, count, *, key):
        component_key, noise_key = jr.split(key)
        # By inversion: one random number per draw, where jr.categorical takes one per draw and component.
        heights = jnp.cumsum(jax.nn.softmax(self.log_weights))
        level = heights[-1] * jr.uniform(component_key, (count,), heights.dtype)
        component = jnp.sum(heights[:-1] <= level[:, None], 1)
        noise = jr.normal(noise_key, (count, self.means.shape[1]), self.means.dtype)
        return self.means[component] + jnp.einsum("nij,nj->ni", self.choleskys[component], noise)

    def marginal(self, dims):
        rows = self.choleskys[:, dims, :]
        return Mixture.of(self.log_weights, self.means[:, dims], jnp.linalg.cholesky(rows @ rows.mT))

    def completed(self, dims, values, *, key):
        # The known coordinates first: then they are the condition of a joint mixture.
        order = jnp.asarray([*dims, *(j for j in range(self.means.shape[1]) if j not in dims)])
        joint = JointMixture(self.marginal(order), len(dims))
        keys = jr.split(key, values.shape[0])
        rest = jax.vmap(lambda value, row_key: joint.given(value).sample(1, key=row_key)[0])(values, keys)
        return jnp.concatenate([values, rest], 1)[:, jnp.argsort(order)]

    def bounds(self, spread):
        deviation = jnp.sqrt(jnp.sum(self.choleskys**2, 2))
        return (self.means - spread * deviation).min(0), (self.means + spread * deviation).max(0)


class JointMixture(AbstractMeasure):
    """A mixture over (condition, target), used through ``given(condition)``: a mixture of linear regressions."""

    joint: Mixture
    condition_dim: int = eqx.field(static=True)

    def given(self, condition):
        p = self.condition_dim
        if p == 0:
            return self.joint
        # Block Cholesky L = [[A, 0], [B, D]]: target | condition = mean + B A^-1 (condition - mean) + D noise, and the
        # diagonal blocks of L^-1 are A^-1 and D^-1.
        joint = self.joint
        whitened = jnp.einsum("kij,kj->ki", joint.whiteners[:, :p, :p], condition - joint.means[:, :p])
        means = joint.means[:, p:] + jnp.einsum("kij,kj->ki", joint.choleskys[:, p:, :p], whitened)
        log_weights = joint.log_weights + _normal_log_densities(condition, joint.means[:, :p], joint.whiteners[:, :p, :p])
        return Mixture(jax.nn.log_softmax(log_weights), means, joint.choleskys[:, p:, p:], joint.whiteners[:, p:, p:])

    def log_density(self, x):
        return self.joint.log_density(x)

    def sample(self, count, *, key):
        return self.joint.sample(count, key=key)

    def marginal(self, dims):
        return self.joint.marginal(dims)

    def bounds(self, spread):
        low, high = self.joint.bounds(spread)
        return low[self.condition_dim :], high[self.condition_dim :]


BASES = ("gaussian", "box", "mixture")
# A share of a base for conditional densities is this much wider than the rest: far targets are improbable, not impossible.
TAIL_SHARE, TAIL_WIDTH = 0.02, 4.0


def tailed_gaussian(points: np.ndarray, *, width: float) -> Mixture:
    """Return the normal with ``width**2`` times the points' covariance, and a small share of a wider one."""
    narrow = Gaussian.fitted(points, width=width)
    choleskys = jnp.stack([narrow.cholesky, TAIL_WIDTH * narrow.cholesky])
    return Mixture.of(jnp.log(jnp.array([1.0 - TAIL_SHARE, TAIL_SHARE])), jnp.stack([narrow.mean] * 2), choleskys)


def held_out_split(points: np.ndarray, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return four fifths of the points and the fifth that judges what is fitted to them."""
    order = np.random.default_rng(seed).permutation(len(points))
    return points[order[len(points) // 5 :]], points[order[: len(points) // 5]]


def best_mixture(points: np.ndarray, *, counts=(1, 2, 4, 8, 16, 32), seed: int) -> Mixture:
    """Return the mixture whose size and covariance type do best on a held-out fifth of the points, refitted to all."""
    training, held_out = held_out_split(points, seed=seed)
    best_score, best = -np.inf, (1, True)
    for diagonal in (False, True):
        worse, top = 0, -np.inf
        for components in counts:
            if components * 5 > len(training) or worse == 2:
                break
            score = _expectation_maximisation(training, components, diagonal, seed).score(held_out)
            worse, top = (0, score) if score > top else (worse + 1, top)
            if score > best_score:
                best_score, best = score, (components, diagonal)
    return Mixture.fitted(points, components=best[0], diagonal=best[1], seed=seed)


def _expectation_maximisation(points: np.ndarray, components: int, diagonal: bool, seed: int) -> GaussianMixture:
    model = GaussianMixture(
        components,
        covariance_type="diag" if diagonal else "full",
        reg_covar=COVARIANCE_FLOOR,
        max_iter=60,
        init_params="k-means++",
        random_state=seed,
    )
    # EM's own warning is about its last digits; whether the mixture serves is measured later, on held-out points.
    # One BLAS thread: EM multiplies many tiny matrices, and waking threads for each costs ten times the work.
    with warnings.catch_warnings(), threadpool_limits(limits=1, user_api="blas"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(points)


@eqx.filter_jit
def _jitted_log_density(measure, points):
    return jax.vmap(measure.log_density)(points)


@eqx.filter_jit
def _jitted_sample(measure, count, key):
    return measure.sample(count, key=key)


def _normal_log_densities(x, means, whiteners):
    """Return ``log N(x; mean_k, C_k)`` for every k, with ``C_k^-1 = whitener_k^T whitener_k``."""
    whitened = jnp.einsum("kij,kj->ki", whiteners, x - means)
    log_determinants = jnp.sum(jnp.log(jnp.diagonal(whiteners, axis1=1, axis2=2)), 1)
    return log_determinants - 0.5 * jnp.sum(whitened**2, 1) - 0.5 * x.size * LOG_TWO_PI
