"""Probability distributions: base densities p0, noise of a transport, importance proposals.

``log_density(x)`` is normalised and takes one point or rows of points, as NumPy or traced JAX arrays;
``sample(count, key=...)`` draws. ``marginal(dims)`` is the distribution of some coordinates and ``completed``
draws the others given those, both in closed form: a function f of few coordinates is fitted, normalised and
sampled in these coordinates only. ``given(condition)`` is the distribution under a condition: itself, unless
it depends on one.
"""

import abc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, PlainModule, RandomKey, row_slices
from kexpfam.data.weights import weighted_covariance, weighted_mean
from kexpfam.jax_settings import double_precision
from kexpfam.model.networks import Network

LOG_TWO_PI = float(np.log(2.0 * np.pi))
# Added to the diagonal of covariances of standardised data: repeated values would make a component singular.
COVARIANCE_FLOOR = 1e-5
# Range of the log scales of a mixture network, in standard deviations of the target.
LOG_SCALES = (-6.0, 2.0)
# Numbers in memory at a time when many points are evaluated.
NUMBERS_PER_CHUNK = 8_000_000
# Rows of the blocks of compiled programs: for single rows, for few and for many.
ROWS_PER_BLOCK = 2, 32, 512
# Rows whose features are computed at a time.
ROWS_PER_CHUNK = 16384
# Draws of a small and of a large block.
DRAWS_PER_BLOCK = 256, 4096

Dims = tuple[int, ...]


def logsumexp(values: Float[AnyArray, "..."], axis: int = -1) -> Any:
    """Return ``log sum exp`` of NumPy or JAX arrays; minus infinity where all values are."""
    if isinstance(values, jax.Array):
        return jax.nn.logsumexp(values, axis=axis)
    values = np.asarray(values)
    top = values.max(axis=axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0).astype(values.dtype)
    with np.errstate(divide="ignore", over="ignore"):
        return np.log(np.exp(values - top).sum(axis=axis)) + top.squeeze(axis)


def in_chunks(compute: Callable, *arrays: AnyArray, rows_per_chunk: int = ROWS_PER_CHUNK) -> Any:
    """Return ``compute(*arrays)`` as a NumPy array, some rows at a time; traced arrays are not chunked."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return compute(*arrays)
    arrays = tuple(np.asarray(array) for array in arrays)
    chunks = row_slices(max(len(arrays[0]), 1), rows_per_chunk)
    with double_precision():
        return np.concatenate([np.asarray(compute(*(array[rows] for array in arrays))) for rows in chunks])


def in_blocks(compute: Callable, *arrays: np.ndarray) -> Any:
    """Return ``compute(*arrays)`` as NumPy arrays, in blocks of rows of three sizes, the last one padded.

    A compiled function has three programs then, whatever the number of rows. Blocks are computed in threads.
    """
    count = len(arrays[0])

    def padded(array: np.ndarray, start: int, size: int) -> np.ndarray:
        block = array[start : start + size]
        return np.concatenate([block, np.zeros((size - len(block), *array.shape[1:]), array.dtype)])

    def computed(block: tuple[int, int]) -> Any:
        with double_precision():
            return jax.tree.map(np.asarray, compute(*(padded(array, *block) for array in arrays)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        each = pool.map if count > ROWS_PER_BLOCK[-1] else map
        pieces = list(each(computed, _blocks(count)))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *pieces)


def drawn_in_blocks(draw: Callable, count: int, *, key: RandomKey) -> np.ndarray:
    """Return ``count`` draws by ``draw(size, key=...)`` in blocks of one of two sizes.

    A compiled sampler has two programs then, whatever the number of draws.
    """
    size = next((size for size in DRAWS_PER_BLOCK if count <= size), DRAWS_PER_BLOCK[-1])
    blocks = [draw(size, key=jr.fold_in(key, k)) for k in range(-(-max(count, 1) // size))]
    return np.concatenate(blocks)[:count]


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the size of every block, at least one: up to four blocks of a size."""
    start = 0
    while start < max(count, 1):
        size = next((size for size in ROWS_PER_BLOCK if count - start <= 4 * size), ROWS_PER_BLOCK[-1])
        yield start, size
        start += size


class Nodes(NamedTuple):
    """Weighted points of a distribution: ``sum_j exp(log_weights[j]) h(points[j])`` is ``E[h]``.

    ``edges`` are the borders of the cells of a grid along each dimension, and empty for draws.
    """

    points: np.ndarray  # (j, d)
    log_weights: np.ndarray  # (j,)
    edges: tuple[np.ndarray, ...]

    @property
    def is_grid(self) -> bool:
        """Return whether the nodes are the cells of a grid."""
        return len(self.edges) > 0

    @property
    def axes(self) -> list[np.ndarray]:
        """Return the midpoints of the cells of a grid along each dimension."""
        return [0.5 * (edge[1:] + edge[:-1]) for edge in self.edges]

    @property
    def widths(self) -> np.ndarray:
        """Return the widths of the cells, (j, d); 0 for draws."""
        return mesh([np.diff(edge) for edge in self.edges]) if self.is_grid else np.zeros_like(self.points)


def mesh(axes: Sequence[np.ndarray]) -> np.ndarray:
    """Return the points of a grid, last axis fastest, (j, d); without axes a single point."""
    if not axes:
        return np.zeros((1, 0))
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def grid_cells(edges: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return midpoints and widths of the cells between borders along each dimension, (j, d)."""
    return mesh([0.5 * (edge[1:] + edge[:-1]) for edge in edges]), mesh([np.diff(edge) for edge in edges])


class AbstractMeasure(PlainModule):
    """A probability distribution on the space of targets."""

    @abc.abstractmethod
    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        """Return the normalised log density at a point, or at each row; ``-inf`` off the support."""

    @abc.abstractmethod
    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        """Draw ``count`` points."""

    def marginal(self, dims: Sequence[int] | AnyArray) -> "AbstractMeasure":
        """Return the distribution of the coordinates ``dims``."""
        raise TypeError(f"{type(self).__name__} has no marginals in closed form.")

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the corners of a box of ``spread`` standard deviations, or of the whole bounded support."""
        raise TypeError(f"{type(self).__name__} has no bounds.")

    def completed(self, dims: Dims, values: Float[Array, "b s"], *, key: RandomKey) -> Float[Array, "b d"]:
        """Return points with these values in the coordinates ``dims`` and the other coordinates drawn."""
        raise TypeError(f"{type(self).__name__} has no conditionals in closed form.")

    def log_densities(self, points: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
        """Return the log densities of many points, computed some rows at a time."""
        rows = max(1, NUMBERS_PER_CHUNK // self._numbers_per_row)
        return in_chunks(self.log_density, points, rows_per_chunk=rows)

    @property
    def _numbers_per_row(self) -> int:
        return 64

    def draws(self, count: int, *, key: RandomKey) -> np.ndarray:
        """Return ``count`` draws as a NumPy array."""
        with double_precision():
            return np.asarray(_jitted_sample(self, count, key))

    def fold(self, x: Float[AnyArray, "... d"]) -> Float[AnyArray, "... d"]:
        """Map points onto the support; the identity for unbounded support."""
        return x

    def given(self, condition: Float[AnyArray, " p"]) -> "AbstractMeasure":
        """Return the distribution under a condition."""
        return self


class Gaussian(AbstractMeasure):
    """``N(mean, cholesky cholesky^T)``."""

    mean: Float[AnyArray, " d"]
    cholesky: Float[AnyArray, "d d"]

    @classmethod
    def fitted(cls, points: np.ndarray, *, width: float = 1.0, weight: np.ndarray | None = None) -> Self:
        """Return the normal with the mean of the points and ``width**2`` times their covariance."""
        covariance = weighted_covariance(points, weight) + COVARIANCE_FLOOR * np.eye(points.shape[1])
        return cls(weighted_mean(points, weight), width * np.linalg.cholesky(covariance))

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        return self.as_mixture().log_density(x)

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        noise = jr.normal(key, (count, self.mean.size), self.mean.dtype)
        return self.mean + noise @ self.cholesky.T

    def marginal(self, dims: Sequence[int] | AnyArray) -> "Gaussian":
        rows = self.cholesky[np.asarray(dims)]
        cholesky = self.mean.__array_namespace__().linalg.cholesky(rows @ rows.T)
        return Gaussian(self.mean[np.asarray(dims)], cholesky)

    def completed(self, dims: Dims, values: Float[Array, "b s"], *, key: RandomKey) -> Float[Array, "b d"]:
        return self.as_mixture().completed(dims, values, key=key)

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        deviation = np.sqrt(np.sum(np.asarray(self.cholesky) ** 2, 1))
        return np.asarray(self.mean) - spread * deviation, np.asarray(self.mean) + spread * deviation

    def as_mixture(self) -> "Mixture":
        """Return the normal as a mixture of one component."""
        xp = self.mean.__array_namespace__()
        return Mixture.of(xp.zeros(1, dtype=self.mean.dtype), self.mean[None], self.cholesky[None])


class StandardNormal(AbstractMeasure):
    """``N(0, I)``."""

    dim: int = eqx.field(static=True)

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        return -0.5 * ((x**2).sum(-1) + self.dim * LOG_TWO_PI)

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        return jr.normal(key, (count, self.dim), jnp.float32)

    def marginal(self, dims: Sequence[int] | AnyArray) -> "StandardNormal":
        return StandardNormal(len(dims))

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        return np.full(self.dim, -spread), np.full(self.dim, spread)


class Box(AbstractMeasure):
    """The uniform distribution on ``[low, high]``."""

    low: Float[AnyArray, " d"]
    high: Float[AnyArray, " d"]

    @classmethod
    def fitted(cls, points: np.ndarray, *, padding: float = 0.2) -> "Box":
        """Return the bounding box of the points, widened on each side by ``padding`` times their range."""
        low, high = points.min(0), points.max(0)
        margin = padding * (high - low)
        return cls(low - margin, high + margin)

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        xp = x.__array_namespace__()
        inside = xp.all((x >= self.low) & (x <= self.high), axis=-1)
        return xp.where(inside, -xp.sum(xp.log(xp.asarray(self.high - self.low))), -xp.inf)

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        unit = jr.uniform(key, (count, self.low.size), self.low.dtype)
        return self.low + (self.high - self.low) * unit

    def marginal(self, dims: Sequence[int] | AnyArray) -> "Box":
        return Box(self.low[np.asarray(dims)], self.high[np.asarray(dims)])

    def completed(self, dims: Dims, values: Float[Array, "b s"], *, key: RandomKey) -> Float[Array, "b d"]:
        return self.sample(values.shape[0], key=key).at[:, jnp.asarray(dims)].set(values)

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.low), np.asarray(self.high)

    def fold(self, x: Float[AnyArray, "... d"]) -> Float[AnyArray, "... d"]:
        # Reflection at the bounds: continuous, measure-preserving, and the identity inside.
        width = self.high - self.low
        phase = (x - self.low) % (2.0 * width)
        return self.low + x.__array_namespace__().where(phase > width, 2.0 * width - phase, phase)


class Mixture(AbstractMeasure):
    """``sum_k weight_k N(mean_k, cholesky_k cholesky_k^T)``."""

    log_weights: Float[AnyArray, " k"]
    means: Float[AnyArray, "k d"]
    choleskys: Float[AnyArray, "k d d"]
    # Inverse factors: log_density needs no triangular solve per point and component.
    whiteners: Float[AnyArray, "k d d"]

    @classmethod
    def of(
        cls,
        log_weights: Float[AnyArray, " k"],
        means: Float[AnyArray, "k d"],
        choleskys: Float[AnyArray, "k d d"],
    ) -> "Mixture":
        """Return the mixture with these Cholesky factors."""
        return cls(log_weights, means, choleskys, choleskys.__array_namespace__().linalg.inv(choleskys))

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        xp = x.__array_namespace__()
        whiteners = xp.asarray(self.whiteners)
        components, dim = self.means.shape
        # whitener_k (x - mean_k) for all k by one product: (n, d) x (d, k d).
        product = (x @ whiteners.reshape(components * dim, dim).T).reshape(*x.shape[:-1], components, dim)
        whitened = product - xp.einsum("kij,kj->ki", whiteners, xp.asarray(self.means))
        log_determinants = xp.log(xp.abs(xp.diagonal(whiteners, axis1=1, axis2=2))).sum(1)
        exponents = self.log_weights + log_determinants - 0.5 * (whitened**2).sum(-1) - 0.5 * dim * LOG_TWO_PI
        return exponents[..., 0] if components == 1 else logsumexp(exponents)

    @property
    def _numbers_per_row(self) -> int:
        return 3 * self.means.size

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        component_key, noise_key = jr.split(key)
        # Inversion needs one random number per draw; jr.categorical needs one per draw and component.
        heights = jnp.cumsum(jax.nn.softmax(jnp.asarray(self.log_weights)))
        level = heights[-1] * jr.uniform(component_key, (count,), heights.dtype)
        component = jnp.sum(heights[:-1] <= level[:, None], 1)
        noise = jr.normal(noise_key, (count, self.means.shape[1]), self.means.dtype)
        scaled = jnp.einsum("nij,nj->ni", jnp.asarray(self.choleskys)[component], noise)
        return jnp.asarray(self.means)[component] + scaled

    def marginal(self, dims: Sequence[int] | AnyArray) -> "Mixture":
        rows = self.choleskys[:, np.asarray(dims), :]
        choleskys = self.means.__array_namespace__().linalg.cholesky(rows @ rows.mT)
        return Mixture.of(self.log_weights, self.means[:, np.asarray(dims)], choleskys)

    def completed(self, dims: Dims, values: Float[Array, "b s"], *, key: RandomKey) -> Float[Array, "b d"]:
        # With the known coordinates first, they are the condition of a joint mixture.
        order = np.asarray([*dims, *(j for j in range(self.means.shape[1]) if j not in dims)])
        joint = JointMixture(self.marginal(order), len(dims))
        keys = jr.split(key, values.shape[0])
        rest = jax.vmap(lambda value, row_key: joint.given(value).sample(1, key=row_key)[0])(values, keys)
        return jnp.concatenate([values, rest], 1)[:, np.argsort(order)]

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        means = np.asarray(self.means)
        deviation = np.sqrt(np.sum(np.asarray(self.choleskys) ** 2, 2))
        return (means - spread * deviation).min(0), (means + spread * deviation).max(0)


class ConditionalMeasure(AbstractMeasure):
    """A distribution that is defined under a condition only: use ``given(condition)``."""

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        raise TypeError(f"{type(self).__name__} has a density under a condition only: use given(condition).")

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        raise TypeError(f"{type(self).__name__} has draws under a condition only: use given(condition).")


class JointMixture(ConditionalMeasure):
    """A mixture over (condition, target): ``given(condition)`` is a mixture of linear regressions."""

    joint: Mixture
    condition_dim: int = eqx.field(static=True)

    def given(self, condition: Float[AnyArray, " p"]) -> Mixture:
        p = self.condition_dim
        if p == 0:
            return self.joint
        # Block Cholesky L = [[A, 0], [B, D]]: target | condition = mean + B A^-1 (condition - mean) + D
        # noise, and the diagonal blocks of L^-1 are A^-1 and D^-1.
        joint = self.joint
        whitened = jnp.einsum("kij,kj->ki", joint.whiteners[:, :p, :p], condition - joint.means[:, :p])
        means = joint.means[:, p:] + jnp.einsum("kij,kj->ki", joint.choleskys[:, p:, :p], whitened)
        log_determinants = jnp.sum(jnp.log(jnp.diagonal(joint.whiteners[:, :p, :p], axis1=1, axis2=2)), 1)
        log_weights = joint.log_weights + log_determinants - 0.5 * jnp.sum(whitened**2, 1)
        blocks = joint.choleskys[:, p:, p:], joint.whiteners[:, p:, p:]
        return Mixture(jax.nn.log_softmax(log_weights), means, *blocks)

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        low, high = self.joint.bounds(spread)
        return low[self.condition_dim :], high[self.condition_dim :]


class Cells(AbstractMeasure):
    """A density that is constant on each cell of a grid."""

    log_masses: Float[AnyArray, " j"]
    edges: tuple[Float[AnyArray, " _"], ...]

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        xp = x.__array_namespace__()
        index = 0
        inside = True
        log_volume = xp.zeros(x.shape[:-1])
        for j, borders in enumerate(self.edges):
            place = xp.searchsorted(xp.asarray(borders), x[..., j], side="right") - 1
            inside = inside & (place >= 0) & (place < borders.size - 1)
            place = xp.clip(place, 0, borders.size - 2)
            index = index * (borders.size - 1) + place
            log_volume = log_volume + xp.log(xp.diff(xp.asarray(borders)))[place]
        return xp.where(inside, xp.asarray(self.log_masses)[index] - log_volume, -xp.inf)

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        cell_key, place_key = jr.split(key)
        # Inversion needs one random number per draw; jr.categorical needs one per draw and cell. Constant
        # masses are summed on the host, because XLA folds constants slowly.
        xp = self.log_masses.__array_namespace__()
        cumulative = jnp.asarray(xp.cumsum(xp.exp(self.log_masses)))
        levels = jr.uniform(cell_key, (count,), cumulative.dtype) * cumulative[-1]
        index = jnp.clip(jnp.searchsorted(cumulative, levels, side="right"), 0, cumulative.size - 1)
        places = jnp.unravel_index(index, tuple(edge.size - 1 for edge in self.edges))
        edges = [jnp.asarray(edge) for edge in self.edges]
        low = jnp.stack([edge[at] for edge, at in zip(edges, places, strict=True)], 1)
        width = jnp.stack([jnp.diff(edge)[at] for edge, at in zip(edges, places, strict=True)], 1)
        return low + width * jr.uniform(place_key, low.shape, low.dtype)

    def draws(self, count: int, *, key: RandomKey) -> np.ndarray:
        # The same inversion with NumPy, without compilation.
        rng = np.random.default_rng(np.asarray(jr.key_data(key)))
        cumulative = np.cumsum(np.exp(self.log_masses))
        index = np.searchsorted(cumulative, rng.uniform(size=count) * cumulative[-1], side="right")
        shape = tuple(edge.size - 1 for edge in self.edges)
        places = np.unravel_index(np.minimum(index, cumulative.size - 1), shape)
        cells = zip(self.edges, places, strict=True)
        return np.stack([edge[at] + np.diff(edge)[at] * rng.uniform(size=count) for edge, at in cells], 1)

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        return np.array([edge[0] for edge in self.edges]), np.array([edge[-1] for edge in self.edges])


class MixtureNetwork(ConditionalMeasure):
    """``sum_k weight_k(x) N(mean_k(x), diag(scale_k(x))^2)`` with parameters by a network of x."""

    network: Network
    components: int = eqx.field(static=True)
    dim: int = eqx.field(static=True)

    @classmethod
    def draw(
        cls,
        condition_dim: int,
        targets: np.ndarray,
        *,
        components: int,
        key: RandomKey,
        **shape: Any,
    ) -> "MixtureNetwork":
        """Return a network of this ``width`` and ``depth`` whose means start at quantiles of the targets."""
        dim = targets.shape[1]
        outputs = components * (1 + 2 * dim)
        network = Network.draw(condition_dim, outputs, zero_initialised=True, key=key, **shape)
        levels = np.quantile(targets, (np.arange(components) + 0.5) / components, axis=0)
        if dim > 1:
            levels = targets[np.random.default_rng(0).choice(len(targets), components)]
        start = np.concatenate(
            [np.zeros(components), levels.ravel(), np.full(components * dim, -np.log(components) / dim)]
        )
        bias = lambda measure: measure.network.layers[-1].bias
        return eqx.tree_at(bias, cls(network, components, dim), jnp.asarray(start, jnp.float32))

    def given(self, condition: Float[AnyArray, " p"]) -> Mixture:
        k, d = self.components, self.dim
        outputs = self.network(condition[None], jnp.zeros((1, 0)))[0]
        logits, means, log_scales = jnp.split(outputs, [k, k + k * d])
        scales = jnp.exp(jnp.clip(log_scales, *LOG_SCALES)).reshape(k, d)
        diagonal = lambda values: values[:, :, None] * jnp.eye(d)
        log_weights = jax.nn.log_softmax(logits)
        return Mixture(log_weights, means.reshape(k, d), diagonal(scales), diagonal(1.0 / scales))


def draw_each(
    measure: AbstractMeasure, condition: Float[AnyArray, "b p"], *, key: RandomKey
) -> Float[Array, "b k"]:
    """Draw one point under each condition, in one call if the distribution has no condition."""
    if not _depends_on_condition(measure, condition):
        return measure.sample(condition.shape[0], key=key)
    keys = jr.split(key, condition.shape[0])
    return jax.vmap(lambda c, k: measure.given(c).sample(1, key=k)[0])(condition, keys)


def log_density_each(
    measure: AbstractMeasure, x: Float[Array, "b d"], condition: Float[AnyArray, "b p"]
) -> Float[Array, " b"]:
    """Return the log density of each row under its condition."""
    if not _depends_on_condition(measure, condition):
        return measure.log_density(x)
    return jax.vmap(lambda row, c: measure.given(c).log_density(row))(x, jnp.asarray(condition))


def _depends_on_condition(measure: AbstractMeasure, condition: Float[AnyArray, "b p"]) -> bool:
    return condition.shape[1] > 0 and type(measure).given is not AbstractMeasure.given


_jitted_sample = eqx.filter_jit(lambda measure, count, key: measure.sample(count, key=key))
