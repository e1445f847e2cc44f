"""Function spaces for f.

A span is a finite set of features of one argument that are orthonormal in their space. The space of f is the
product of a span for the condition and a span for the target: ``f(y | x) = phi(x)^T W psi(y)`` and ``|f|_H =
|W|``. Without a condition, phi is the constant 1. The penalty is therefore the same for all spaces, and
solvers use matrices of features only. Features of NumPy arrays are NumPy arrays, computed without
compilation; those of JAX arrays can be traced.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, RandomKey, Sample, row_slices
from kexpfam.model.kernels import AbstractKernel, AbstractStationary
from kexpfam.model.measures import ROWS_PER_CHUNK, Nodes, in_chunks
from kexpfam.model.networks import ACTIVATIONS, Conditions

# Eigenvalues below this share of the largest one are rounding errors in float64.
EIGENVALUE_FLOOR = 1e-10

Weights = Float[AnyArray, " r"]
Rows = Float[AnyArray, "b d"]
Values = Float[AnyArray, " b"]
Scalar = float | Float[AnyArray, ""]


class AbstractSpan(eqx.Module):
    """Functions ``features(x) . weights`` of one argument, with norm ``|weights|``."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of features."""

    @abc.abstractmethod
    def features(self, points: Rows) -> Float[AnyArray, "b r"]:
        """Return the features of each row."""

    def evaluate(self, weights: Weights, points: Rows) -> Float[AnyArray, " b"]:
        """Return the function with these weights at each row."""
        return self.features(points) @ weights

    def matrix(self, points: AnyArray) -> Float[AnyArray, "n r"]:
        """Return the features of many rows as a NumPy matrix, computed in chunks."""
        return in_chunks(self.features, points)

    def waves(self, count: int, dim: int, *, key: RandomKey) -> Float[AnyArray, "count dim"]:
        """Return frequencies of functions of ``dim`` coordinates in the span; standard normal by default."""
        return jr.normal(key, (count, dim))

    def total(self, points: AnyArray, counts: np.ndarray | None = None) -> Float[np.ndarray, " r"]:
        """Return the sum of the features over rows, weighted by ``counts``, computed in chunks."""
        return _summed(self.features, points, counts)

    def node_matrix(self, nodes: Nodes) -> np.ndarray:
        """Return the features of the nodes; a product kernel on a grid is faster than on points."""
        return self.matrix(nodes.points)

    def node_values(self, weights: np.ndarray, nodes: Nodes) -> np.ndarray:
        """Return the function with these weights at each node."""
        return in_chunks(lambda points: self.evaluate(weights, points), nodes.points)


class Constant(AbstractSpan):
    """The single feature 1, for functions without a condition."""

    @property
    def size(self) -> int:
        return 1

    def features(self, points: Rows) -> Float[AnyArray, "b r"]:
        return points.__array_namespace__().ones((points.shape[0], 1))


class KernelSpan(AbstractSpan):
    r"""The span of ``k(z_j, .)`` over the centres, in Nyström-whitened coordinates.

    With the Gram matrix of the centres :math:`K = U D U^\top`, the features are :math:`D^{-1/2} U^\top k(x)`:
    orthonormal in the RKHS. All training points as centres give the full space. Memory: ``m * (d + rank)``.
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
        """Return the span of the centres, without eigenvalues that are rounding errors."""
        centres = np.ascontiguousarray(centres, float)
        # All eigenvectors take a third of the time that LAPACK takes for the leading ones alone.
        values, vectors = np.linalg.eigh(np.asarray(kernel.gram(centres, centres)))
        leading = slice(-min(rank or len(centres), len(centres)), None)
        values, vectors = values[leading], vectors[:, leading]
        kept = values > floor * values[-1]
        # Row-major as in a file: products are equal to the last bit before saving and after loading.
        return cls(kernel, centres, np.ascontiguousarray(vectors[:, kept] / np.sqrt(values[kept])))

    @property
    def size(self) -> int:
        return self.whitening.shape[1]

    def features(self, points: Rows) -> Float[AnyArray, "b r"]:
        return self._gram(points) @ self.whitening

    def evaluate(self, weights: Weights, points: Rows) -> Float[AnyArray, " b"]:
        # The product of whitening and weights reduces the cost of a row from m * r to m.
        return self._gram(points) @ (self.whitening @ weights)

    def waves(self, count: int, dim: int, *, key: RandomKey) -> Float[AnyArray, "count dim"]:
        if not isinstance(self.kernel, AbstractStationary):
            return super().waves(count, dim, key=key)
        return self.kernel.frequencies(count, dim, key=key)

    def total(self, points: AnyArray, counts: np.ndarray | None = None) -> Float[np.ndarray, " r"]:
        # One product with the whitening serves the sum of all rows.
        return _summed(self._gram, points, counts) @ self.whitening

    def node_matrix(self, nodes: Nodes) -> np.ndarray:
        factors = self._factors(nodes)
        if factors is None:
            return self.matrix(nodes.points)
        return functools.reduce(_outer_rows, factors) @ self.whitening

    def node_values(self, weights: np.ndarray, nodes: Nodes) -> np.ndarray:
        factors = self._factors(nodes)
        if factors is None:
            return super().node_values(weights, nodes)
        first, *others = factors
        first = functools.reduce(_outer_rows, others[:-1], first * (self.whitening @ weights))
        return (first @ others[-1].T).ravel() if others else first.sum(1)

    def _gram(self, points: Rows) -> Float[AnyArray, "b m"]:
        return self.kernel.gram(points.astype(self.whitening.dtype), self.centres)

    def _factors(self, nodes: Nodes) -> list[np.ndarray] | None:
        """Return the Gram matrices of grid and centres per coordinate; None if the kernel is no product.

        A grid of n^d nodes takes d n exponentials per centre instead of n^d.
        """
        factors = []
        for j, axis in enumerate(nodes.axes):
            kernel = self.kernel.along(j)
            if kernel is None:
                return None
            factors.append(np.asarray(kernel.gram(axis[:, None], np.asarray(self.centres)[:, j : j + 1])))
        return factors or None


class RandomFeatures(AbstractSpan):
    """``sqrt(1/r) (cos(w_i . x), sin(w_i . x))``: random Fourier features of a kernel, memory ``r * d``."""

    frequencies: Float[AnyArray, "r d"]

    @classmethod
    def draw(cls, kernel: AbstractStationary, dim: int, *, count: int, key: RandomKey) -> "RandomFeatures":
        """Return ``2 * count`` features of the kernel."""
        return cls(np.asarray(kernel.frequencies(count, dim, key=key)))

    @property
    def size(self) -> int:
        return 2 * self.frequencies.shape[0]

    def waves(self, count: int, dim: int, *, key: RandomKey) -> Float[AnyArray, "count dim"]:
        return jr.choice(key, jnp.asarray(self.frequencies), (count,))

    def features(self, points: Rows) -> Float[AnyArray, "b r"]:
        phase = points.astype(self.frequencies.dtype) @ self.frequencies.T
        xp = phase.__array_namespace__()
        return xp.concat([xp.cos(phase), xp.sin(phase)], axis=1) / self.frequencies.shape[0] ** 0.5


class NetworkSpan(AbstractSpan):
    """Learned features: the last hidden layer of a network, divided by the square root of its width."""

    body: eqx.nn.MLP

    @classmethod
    def draw(
        cls, dim: int, *, width: int, depth: int, activation: str = "silu", key: RandomKey
    ) -> "NetworkSpan":
        """Return the features of a random network with ``depth`` hidden layers."""
        function = ACTIVATIONS[activation]
        dtype = jnp.result_type(float)
        return cls(eqx.nn.MLP(dim, width, width, depth - 1, function, function, dtype=dtype, key=key))

    @property
    def size(self) -> int:
        return int(self.body.out_size)

    def features(self, points: Rows) -> Float[AnyArray, "b r"]:
        return _network_features(self.body, points) / np.sqrt(self.size)


class AbstractFunctionSpace(eqx.Module):
    """A normed space of functions f; the space defines how an f is represented."""

    @abc.abstractmethod
    def evaluate(self, f: Any, target: Rows, condition: Conditions) -> Float[AnyArray, " b"]:
        """Return f at each row."""

    @abc.abstractmethod
    def squared_norm(self, f: Any) -> Float[AnyArray, ""]:
        """Return ``|f|^2``."""

    @abc.abstractmethod
    def stepped(
        self, f: Any, shrinkage: Scalar, target: Rows, condition: Conditions, coefficients: Values
    ) -> Any:
        """Return ``shrinkage * f + sum_b coefficients_b k(x_b, .)``: f after a functional gradient step."""


class FeatureSpace(AbstractFunctionSpace):
    """``f(target | condition) = phi(condition)^T W psi(target)``; ``weights`` are W, flattened by rows."""

    condition: AbstractSpan
    target: AbstractSpan

    @classmethod
    def of_kernels(
        cls, kernel: AbstractKernel, condition_kernel: AbstractKernel, centres: Sample
    ) -> "FeatureSpace":
        """Return the product space of the spans of all centres."""
        target = KernelSpan.build(kernel, centres.target)
        if not centres.conditional:
            return cls(Constant(), target)
        return cls(KernelSpan.build(condition_kernel, np.unique(centres.condition, axis=0)), target)

    @property
    def size(self) -> int:
        """Return the number of features."""
        return self.condition.size * self.target.size

    def features(self, target: Rows, condition: Conditions) -> Float[AnyArray, "b r"]:
        """Return the features of each row."""
        return outer_features(self.condition.features(condition), self.target.features(target))

    def evaluate(self, f: Weights, target: Rows, condition: Conditions) -> Float[AnyArray, " b"]:
        if isinstance(self.condition, Constant):
            return self.target.evaluate(f, target)
        return (self.coefficients(f, condition) * self.target.features(target)).sum(1)

    def squared_norm(self, f: Float[AnyArray, " r"]) -> Float[AnyArray, ""]:
        return (f**2).sum()

    def stepped(
        self, f: Any, shrinkage: Scalar, target: Rows, condition: Conditions, coefficients: Values
    ) -> Any:
        # k(x, .) is the function whose weights are the features of x.
        return shrinkage * f + coefficients @ self.features(target, condition)

    def coefficients(self, weights: Weights, condition: Conditions) -> Float[AnyArray, "b s"]:
        """Return the weights of f(. | x), as a function of the target, under each condition."""
        return self.condition.features(condition) @ weights.reshape(self.condition.size, self.target.size)

    def given(
        self, weights: Weights, condition: Float[AnyArray, " p"]
    ) -> tuple["FeatureSpace", Float[AnyArray, " s"]]:
        """Return the space and the weights of f under one condition, as an unconditional function."""
        return FeatureSpace(Constant(), self.target), self.coefficients(weights, condition[None])[0]

    def matrix(self, target: AnyArray, condition: AnyArray) -> np.ndarray:
        """Return the features of many rows as a NumPy matrix."""
        psi = self.target.matrix(target)
        if isinstance(self.condition, Constant):
            return psi
        return outer_features(self.condition.matrix(condition), psi)


def outer_features(phi: Float[AnyArray, "b p"], psi: Float[AnyArray, "b s"]) -> Float[AnyArray, "b r"]:
    """Return the flattened outer product of the features of each row."""
    return (phi[:, :, None] * psi[:, None, :]).reshape(phi.shape[0], -1)


def spread_rows(rows: np.ndarray, most: int, *, seed: int) -> np.ndarray:
    """Return the sorted positions of at most ``most`` rows, chosen by k-means++ seeding."""
    if len(rows) <= most:
        return np.arange(len(rows))
    from sklearn.cluster import kmeans_plusplus  # slow to import

    # Rounded, so that the last digits of a scaling do not change the choice.
    return np.sort(kmeans_plusplus(np.round(rows, 9), most, random_state=seed)[1])


def _outer_rows(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the products of all pairs of rows, the rows of ``second`` fastest."""
    return (first[:, None, :] * second[None, :, :]).reshape(-1, first.shape[1])


def _summed(compute: Callable, points: AnyArray, counts: np.ndarray | None) -> np.ndarray:
    """Return the sum over rows of ``compute``, weighted by ``counts``, some rows at a time."""
    total: Any = 0.0
    for rows in row_slices(max(len(points), 1), ROWS_PER_CHUNK):
        found = in_chunks(compute, points[rows])
        total = total + (found.sum(axis=0) if counts is None else counts[rows] @ found)
    return total


@eqx.filter_jit
def _network_features(body: eqx.nn.MLP, points: Float[AnyArray, "b d"]) -> Float[Array, "b r"]:
    return jax.vmap(body)(points.astype(body.layers[0].weight.dtype))
