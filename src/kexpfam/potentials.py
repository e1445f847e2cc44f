"""Function spaces for f, and the networks that play nu.

A feature space is a finite set of features that are orthonormal in it: ``f = features . weights`` and
``|f|_H^2 = |weights|^2``. So the penalty is the same line of code for every space, and every solver of f sees a matrix of
features and nothing else.
"""

import abc
from typing import Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key
from sklearn.cluster import kmeans_plusplus

from kexpfam.kernels import AbstractKernel, AbstractStationary
from kexpfam.measures import AbstractMeasure
from kexpfam.sample import Sample

# Directions of the span whose squared norm is below this share of the largest are lost in float64's rounding.
EIGENVALUE_FLOOR = 1e-10


class AbstractFeatureSpace(eqx.Module):
    """Functions ``f(target | condition) = features(target, condition) . weights`` with ``|f|_H = |weights|``."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of features."""

    @abc.abstractmethod
    def features(self, target: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, "b r"]:
        """Return the features of each row."""

    def evaluate(self, weights: Float[Array, " r"], target, condition) -> Float[Array, " b"]:
        """Return f at each row."""
        return self.features(target, condition) @ weights

    def matrix(self, target: ArrayLike, condition: ArrayLike, *, rows_per_chunk: int = 16384) -> np.ndarray:
        """Return the features of many rows as a NumPy matrix, in chunks so that only the result is ever large."""
        return _in_chunks(lambda rows: _jitted_features(self, rows), target, condition, rows_per_chunk)


class KernelSpan(AbstractFeatureSpace):
    r"""The span of ``k_c(c_j, .) k(z_j, .)`` over the centres, in Nyström-whitened coordinates.

    With the Gram matrix of the centres :math:`K = U D U^\top`, the features are :math:`D^{-1/2} U^\top k(x)`: orthonormal
    in the RKHS. All training points as centres give the full space. Memory: ``m * (d + p + rank)``.
    """

    kernel: AbstractKernel
    condition_kernel: AbstractKernel
    centres: Sample
    whitening: Float[Array, "m r"]

    @classmethod
    def build(
        cls, kernel: AbstractKernel, condition_kernel: AbstractKernel, centres: Sample, *, rank: int | None = None
    ) -> Self:
        """Return the span of the centres, without directions that rounding would make."""
        matrix = np.asarray(_jitted_gram(kernel, condition_kernel, centres, centres), dtype=np.float64)
        values, vectors = scipy.linalg.eigh(matrix)
        kept = np.flatnonzero(values > EIGENVALUE_FLOOR * values[-1])
        kept = kept[-rank:] if rank else kept
        return cls(kernel, condition_kernel, centres, jnp.asarray(vectors[:, kept] / np.sqrt(values[kept])))

    @property
    def size(self):
        return self.whitening.shape[1]

    def features(self, target, condition):
        rows = Sample(target.astype(self.whitening.dtype), condition.astype(self.whitening.dtype))
        return _product_gram(self.kernel, self.condition_kernel, rows, self.centres) @ self.whitening

    def evaluate(self, weights, target, condition):
        # Folding the whitening into the weights makes one row cost m instead of m * r.
        rows = Sample(target.astype(self.whitening.dtype), condition.astype(self.whitening.dtype))
        return _product_gram(self.kernel, self.condition_kernel, rows, self.centres) @ (self.whitening @ weights)

    def matrix(self, target, condition, *, rows_per_chunk=16384):
        # Whitening on the NumPy side: its rank changes with every length scale and would compile a program each time.
        whitening = np.asarray(self.whitening)
        gram = lambda rows: np.asarray(_jitted_gram(self.kernel, self.condition_kernel, rows, self.centres)) @ whitening
        return _in_chunks(gram, target, condition, rows_per_chunk)


class RandomFeatures(AbstractFeatureSpace):
    """``sqrt(1/r) (cos(w_i . x), sin(w_i . x))``: a kernel's space by Monte Carlo over its spectrum, memory ``r * d``."""

    frequencies: Float[Array, "r d"]
    condition_frequencies: Float[Array, "r p"]

    @classmethod
    def draw(
        cls,
        kernel: AbstractStationary,
        condition_kernel: AbstractStationary,
        sample: Sample,
        *,
        count: int,
        key: Key[Array, ""],
    ) -> Self:
        """Return ``2 * count`` features of the product kernel."""
        target_key, condition_key = jax.random.split(key)
        return cls(
            kernel.frequencies(count, sample.target.shape[1], key=target_key),
            condition_kernel.frequencies(count, sample.condition.shape[1], key=condition_key),
        )

    @property
    def size(self):
        return 2 * self.frequencies.shape[0]

    def features(self, target, condition):
        phase = target.astype(self.frequencies.dtype) @ self.frequencies.T
        phase = phase + condition.astype(self.frequencies.dtype) @ self.condition_frequencies.T
        return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], 1) / jnp.sqrt(self.frequencies.shape[0])


class Tilt(eqx.Module):
    """The unnormalised density ``p0(x) exp(f(x | condition))``: whichever method found f, this is what it means."""

    space: AbstractFeatureSpace
    weights: Float[Array, " r"]
    base: AbstractMeasure

    def f(self, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, " b"]:
        return self.space.evaluate(self.weights, x, condition)

    def log_unnormalised(self, x: Float[Array, " d"], condition: Float[Array, " p"]) -> Float[Array, ""]:
        """Return ``log p0(x) + f(x | condition)`` at one point."""
        return self.base.log_density(x) + self.f(x[None], condition[None])[0]

    def values(self, points: np.ndarray, *, rows_per_chunk: int = 16384) -> np.ndarray:
        """Return f at many points that have no condition, in chunks of constant memory."""
        evaluate = lambda rows: _jitted_f(self, rows)
        return _in_chunks(evaluate, points, np.zeros((len(points), 0)), rows_per_chunk)


# Functions with a name of their own, because a model must be storable and picklable, and JAX's and Equinox's are not.
def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ``x / (1 + exp(-x))``."""
    return jax.nn.silu(x)


def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ``max(x, 0)``."""
    return jax.nn.relu(x)


def identity(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x."""
    return x


ACTIVATIONS = {"silu": silu, "relu": relu}


class Network(eqx.Module):
    """A multilayer perceptron of a point and its condition."""

    mlp: eqx.nn.MLP

    @classmethod
    def draw(
        cls,
        inputs: int,
        outputs: int | Literal["scalar"],
        *,
        width: int,
        depth: int,
        silent: bool,
        activation: str = "silu",
        key: Key[Array, ""],
    ) -> Self:
        """Return a random network; a silent one has output 0 everywhere, so that its player starts at its anchor."""
        mlp = eqx.nn.MLP(inputs, outputs, width, depth, ACTIVATIONS[activation], identity, dtype=jnp.float32, key=key)
        if silent:
            last = lambda net: (net.layers[-1].weight, net.layers[-1].bias)
            mlp = eqx.tree_at(last, mlp, replace_fn=jnp.zeros_like)
        return cls(mlp)

    def __call__(self, x: Float[Array, "b a"], condition: Float[Array, "b p"]) -> Float[Array, "b ..."]:
        rows = jnp.concatenate([x, condition], 1).astype(jnp.float32)
        return jax.vmap(self.mlp)(rows)


def choose_centres(sample: Sample, most: int, *, seed: int) -> Sample:
    """Return at most ``most`` rows, spread over the sample by k-means++ seeding; all of them if there are no more."""
    if len(sample) <= most:
        return sample
    rows = np.concatenate([np.asarray(sample.condition), np.asarray(sample.target)], 1)
    _, chosen = kmeans_plusplus(rows, most, random_state=seed)
    return sample.rows(jnp.asarray(np.sort(chosen)))


def _in_chunks(compute, target, condition, rows_per_chunk) -> np.ndarray:
    starts = range(0, len(target), rows_per_chunk)
    return np.concatenate(
        [
            np.asarray(
                compute(Sample(jnp.asarray(target[i : i + rows_per_chunk]), jnp.asarray(condition[i : i + rows_per_chunk])))
            )
            for i in starts
        ]
    )


@eqx.filter_jit
def _jitted_features(space, rows: Sample):
    return space.features(rows.target, rows.condition)


@eqx.filter_jit
def _jitted_f(tilt: Tilt, rows: Sample):
    return tilt.f(rows.target, rows.condition)


@eqx.filter_jit
def _jitted_gram(kernel, condition_kernel, xs: Sample, zs: Sample):
    return _product_gram(kernel, condition_kernel, xs, zs)


def _product_gram(kernel: AbstractKernel, condition_kernel: AbstractKernel, xs: Sample, zs: Sample):
    matrix = kernel.gram(xs.target, zs.target)
    if xs.condition.shape[1] == 0:
        return matrix
    return matrix * condition_kernel.gram(xs.condition, zs.condition)
