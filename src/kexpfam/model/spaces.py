"""Function spaces for f.

A span is a finite set of features of one argument that are orthonormal in their space. The space of f is the product of a span
for the condition and one for the target: ``f(y | x) = phi(x)^T W psi(y)`` and ``|f|_H = |W|``. Without a condition, phi is the
constant 1. So the penalty is the same line of code for every space, and every solver of f sees matrices of features and
nothing else. Features of NumPy arrays are NumPy arrays, made without compiling anything; those of JAX arrays can be traced.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.jax_settings import double_precision
from kexpfam.model.kernels import AbstractKernel, AbstractStationary
from kexpfam.model.measures import Nodes
from kexpfam.model.networks import ACTIVATIONS

__all__ = [
    "AbstractFunctionSpace",
    "AbstractSpan",
    "Constant",
    "FeatureSpace",
    "KernelSpan",
    "NetworkSpan",
    "RandomFeatures",
    "in_chunks",
    "spread_rows",
]

# Directions of the span whose squared norm is below this share of the largest are lost in float64's rounding.
EIGENVALUE_FLOOR = 1e-10
# Rows whose features are made at a time.
ROWS_PER_CHUNK = 16384


class AbstractSpan(eqx.Module):
    """Functions ``features(x) . weights`` of one argument, with norm ``|weights|``."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of features."""

    @abc.abstractmethod
    def features(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, "b r"]:
        """Return the features of each row."""

    def evaluate(
        self, weights: Float[AnyArray, " r"], points: Float[AnyArray, "b d"]
    ) -> Float[AnyArray, " b"]:
        """Return the function with these weights at each row."""
        return self.features(points) @ weights

    def matrix(self, points: AnyArray) -> Float[AnyArray, "n r"]:
        """Return the features of many rows as a NumPy matrix, in chunks so that only the result is ever large."""
        return in_chunks(self.features, points)

    def waves(self, count: int, dim: int, *, key: Key[Array, ""]) -> Float[AnyArray, "count dim"]:
        """Return frequencies at which these functions of ``dim`` coordinates vary; of unit size if nothing is known."""
        return jr.normal(key, (count, dim))

    def total(self, points: AnyArray, counts: np.ndarray | None = None) -> Float[np.ndarray, " r"]:
        """Return the sum of the features over rows, each as often as it counts; only some of them are there at a time."""
        return _summed(self.features, points, counts)

    def node_matrix(self, nodes: Nodes) -> np.ndarray:
        """Return the features of nodes, of which a grid may be cheaper than so many points."""
        return self.matrix(nodes.points)

    def node_values(self, weights: np.ndarray, nodes: Nodes) -> np.ndarray:
        """Return the function with these weights at each node."""
        return in_chunks(lambda points: self.evaluate(weights, points), nodes.points)


class Constant(AbstractSpan):
    """The one feature 1: what a function of no condition has."""

    @property
    def size(self) -> int:
        return 1

    def features(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, "b r"]:
        return points.__array_namespace__().ones((points.shape[0], 1))


class KernelSpan(AbstractSpan):
    r"""The span of ``k(z_j, .)`` over the centres, in Nyström-whitened coordinates.

    With the Gram matrix of the centres :math:`K = U D U^\top`, the features are :math:`D^{-1/2} U^\top k(x)`: orthonormal
    in the RKHS. All training points as centres give the full space. Memory: ``m * (d + rank)``.
    """

    kernel: AbstractKernel
    centres: Float[AnyArray, "m d"]
    whitening: Float[AnyArray, "m r"]

    @classmethod
    def build(
        cls,
        kernel: AbstractKernel,
        centres: AnyArray,
        *,
        rank: int | None = None,
        floor: float = EIGENVALUE_FLOOR,
    ) -> "KernelSpan":
        """Return the span of the centres, without directions that rounding would make."""
        centres = np.ascontiguousarray(centres, float)
        # All of them and then the leading ones: a third of the time that LAPACK takes for the leading ones alone.
        values, vectors = np.linalg.eigh(np.asarray(kernel.gram(centres, centres)))
        leading = slice(-min(rank or len(centres), len(centres)), None)
        values, vectors = values[leading], vectors[:, leading]
        kept = values > floor * values[-1]
        # Rows first, as a file keeps them: products are then the same to the last bit before and after.
        return cls(kernel, centres, np.ascontiguousarray(vectors[:, kept] / np.sqrt(values[kept])))

    @property
    def size(self) -> int:
        return self.whitening.shape[1]

    def features(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, "b r"]:
        return self.kernel.gram(points.astype(self.whitening.dtype), self.centres) @ self.whitening

    def evaluate(
        self, weights: Float[AnyArray, " r"], points: Float[AnyArray, "b d"]
    ) -> Float[AnyArray, " b"]:
        # Folding the whitening into the weights makes one row cost m instead of m * r.
        return self.kernel.gram(points.astype(self.whitening.dtype), self.centres) @ (
            self.whitening @ weights
        )

    def waves(self, count: int, dim: int, *, key: Key[Array, ""]) -> Float[AnyArray, "count dim"]:
        if not isinstance(self.kernel, AbstractStationary):
            return super().waves(count, dim, key=key)
        return self.kernel.frequencies(count, dim, key=key)

    def total(self, points: AnyArray, counts: np.ndarray | None = None) -> Float[np.ndarray, " r"]:
        # The whitening of a sum costs what that of a single row does.
        gram = lambda part: self.kernel.gram(part.astype(self.whitening.dtype), self.centres)
        return _summed(gram, points, counts) @ self.whitening

    def node_matrix(self, nodes: Nodes) -> np.ndarray:
        factors = self._factors(nodes)
        if factors is None:
            return self.matrix(nodes.points)
        first, *others = factors
        for other in others:
            first = (first[:, None, :] * other[None, :, :]).reshape(-1, first.shape[1])
        return first @ self.whitening

    def node_values(self, weights: np.ndarray, nodes: Nodes) -> np.ndarray:
        factors = self._factors(nodes)
        if factors is None:
            return super().node_values(weights, nodes)
        first, *others = factors
        first = first * (self.whitening @ weights)
        for other in others[:-1]:
            first = (first[:, None, :] * other[None, :, :]).reshape(-1, first.shape[1])
        return (first @ others[-1].T).ravel() if others else first.sum(1)

    def _factors(self, nodes: Nodes) -> list[np.ndarray] | None:
        """Return the Gram matrix of a grid and the centres along each coordinate, if the kernel is a product of them.

        A grid of n^d nodes takes d n exponentials per centre instead of n^d.
        """
        factors, centres = [], np.asarray(self.centres)
        for j, axis in enumerate(nodes.axes):
            kernel = self.kernel.along(j)
            if kernel is None:
                return None
            factors.append(np.asarray(kernel.gram(axis[:, None], centres[:, j : j + 1])))
        return factors or None


class RandomFeatures(AbstractSpan):
    """``sqrt(1/r) (cos(w_i . x), sin(w_i . x))``: a kernel's space by Monte Carlo over its spectrum, memory ``r * d``."""

    frequencies: Float[AnyArray, "r d"]

    @classmethod
    def draw(
        cls, kernel: AbstractStationary, dim: int, *, count: int, key: Key[Array, ""]
    ) -> "RandomFeatures":
        """Return ``2 * count`` features of the kernel."""
        return cls(np.asarray(kernel.frequencies(count, dim, key=key)))

    @property
    def size(self) -> int:
        return 2 * self.frequencies.shape[0]

    def waves(self, count: int, dim: int, *, key: Key[Array, ""]) -> Float[AnyArray, "count dim"]:
        return jr.choice(key, jnp.asarray(self.frequencies), (count,))

    def features(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, "b r"]:
        phase = points.astype(self.frequencies.dtype) @ self.frequencies.T
        xp = phase.__array_namespace__()
        return xp.concat([xp.cos(phase), xp.sin(phase)], axis=1) / self.frequencies.shape[0] ** 0.5


class NetworkSpan(AbstractSpan):
    """The last hidden layer of a network, divided by the root of its width: features that are learned, not given."""

    body: eqx.nn.MLP

    @classmethod
    def draw(
        cls, dim: int, *, width: int, depth: int, activation: str = "silu", key: Key[Array, ""]
    ) -> "NetworkSpan":
        """Return the features of a random network with ``depth`` hidden layers."""
        function = ACTIVATIONS[activation]
        return cls(
            eqx.nn.MLP(
                dim, width, width, depth - 1, function, function, dtype=jnp.result_type(float), key=key
            )
        )

    @property
    def size(self) -> int:
        return int(self.body.out_size)

    def features(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, "b r"]:
        return _network_features(self.body, points) / np.sqrt(self.size)


class AbstractFunctionSpace(eqx.Module):
    """A space of functions f with a norm, each f held as whatever the space knows how to evaluate."""

    @abc.abstractmethod
    def evaluate(
        self, f: Any, target: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"]
    ) -> Float[AnyArray, " b"]:
        """Return f at each row."""

    @abc.abstractmethod
    def squared_norm(self, f: Any) -> Float[AnyArray, ""]:
        """Return ``|f|^2``."""

    @abc.abstractmethod
    def stepped(
        self,
        f: Any,
        shrinkage: float | Float[AnyArray, ""],
        target: Float[AnyArray, "b d"],
        condition: Float[AnyArray, "b p"],
        coefficients: Float[AnyArray, " b"],
    ) -> Any:
        """Return ``shrinkage * f + sum_b coefficients_b k(x_b, .)``: what a step along a functional gradient makes of f."""


class FeatureSpace(AbstractFunctionSpace):
    """The functions ``f(target | condition) = phi(condition)^T W psi(target)``; ``weights`` are the rows of W, one by one."""

    condition: AbstractSpan
    target: AbstractSpan

    @classmethod
    def of_kernels(
        cls, kernel: AbstractKernel, condition_kernel: AbstractKernel, centres: Sample
    ) -> "FeatureSpace":
        """Return the whole product space of the centres."""
        target = KernelSpan.build(kernel, centres.target)
        if not centres.conditional:
            return cls(Constant(), target)
        return cls(KernelSpan.build(condition_kernel, np.unique(centres.condition, axis=0)), target)

    @property
    def size(self) -> int:
        """Return the number of features."""
        return self.condition.size * self.target.size

    def features(
        self, target: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"]
    ) -> Float[AnyArray, "b r"]:
        """Return the features of each row."""
        return outer_features(self.condition.features(condition), self.target.features(target))

    def evaluate(
        self,
        weights: Float[AnyArray, " r"],
        target: Float[AnyArray, "b d"],
        condition: Float[AnyArray, "b p"],
    ) -> Float[AnyArray, " b"]:
        """Return f at each row."""
        if isinstance(self.condition, Constant):
            return self.target.evaluate(weights, target)
        return (self.coefficients(weights, condition) * self.target.features(target)).sum(1)

    def squared_norm(self, f: Float[AnyArray, " r"]) -> Float[AnyArray, ""]:
        return (f**2).sum()

    def stepped(
        self,
        f: Any,
        shrinkage: float | Float[AnyArray, ""],
        target: Float[AnyArray, "b d"],
        condition: Float[AnyArray, "b p"],
        coefficients: Float[AnyArray, " b"],
    ) -> Any:
        # Here k(x, .) is the function whose weights are the features of x.
        return shrinkage * f + coefficients @ self.features(target, condition)

    def coefficients(
        self, weights: Float[AnyArray, " r"], condition: Float[AnyArray, "b p"]
    ) -> Float[AnyArray, "b s"]:
        """Return the weights of the target's features under each condition: f(. | x) as a function of the target alone."""
        return self.condition.features(condition) @ weights.reshape(self.condition.size, self.target.size)

    def given(
        self, weights: Float[AnyArray, " r"], condition: Float[AnyArray, " p"]
    ) -> tuple["FeatureSpace", Float[AnyArray, " s"]]:
        """Return f under one condition as an unconditional function: its space and weights."""
        return FeatureSpace(Constant(), self.target), self.coefficients(weights, condition[None])[0]

    def matrix(self, target: AnyArray, condition: AnyArray) -> np.ndarray:
        """Return the features of many rows as a NumPy matrix."""
        psi = self.target.matrix(target)
        return (
            psi
            if isinstance(self.condition, Constant)
            else outer_features(self.condition.matrix(condition), psi)
        )


def outer_features(phi: Float[AnyArray, "b p"], psi: Float[AnyArray, "b s"]) -> Float[AnyArray, "b r"]:
    """Return the flattened outer product of the features of each row."""
    return (phi[:, :, None] * psi[:, None, :]).reshape(phi.shape[0], -1)


def spread_rows(rows: np.ndarray, most: int, *, seed: int) -> np.ndarray:
    """Return the positions of at most ``most`` rows that are spread over all, by k-means++ seeding."""
    if len(rows) <= most:
        return np.arange(len(rows))
    from sklearn.cluster import kmeans_plusplus  # slow to import

    return np.sort(kmeans_plusplus(rows, most, random_state=seed)[1])


def in_chunks(compute: Callable, *arrays: AnyArray, rows_per_chunk: int = ROWS_PER_CHUNK) -> Any:
    """Return ``compute`` of the arrays as one NumPy array, some rows at a time; of traced arrays, as a traced one."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return compute(*arrays)
    arrays = tuple(np.asarray(array) for array in arrays)
    starts = range(0, max(len(arrays[0]), 1), rows_per_chunk)
    with double_precision():
        return np.concatenate(
            [np.asarray(compute(*(array[i : i + rows_per_chunk] for array in arrays))) for i in starts]
        )


def _summed(compute: Callable, points: AnyArray, counts: np.ndarray | None) -> np.ndarray:
    """Return the sum over rows of ``compute``, some rows at a time."""
    total: Any = 0.0
    for start in range(0, max(len(points), 1), ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        found = in_chunks(compute, points[rows])
        total = total + (found.sum(axis=0) if counts is None else counts[rows] @ found)
    return total


@eqx.filter_jit
def _network_features(body: eqx.nn.MLP, points: Float[AnyArray, "b d"]) -> Float[Array, "b r"]:
    return jax.vmap(body)(points.astype(body.layers[0].weight.dtype))
