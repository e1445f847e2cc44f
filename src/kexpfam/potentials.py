"""Function spaces for f, and the networks that play nu.

A span is a finite set of features of one argument that are orthonormal in their space. The space of f is the product of a span
for the condition and one for the target: ``f(y | x) = phi(x)^T W psi(y)`` and ``|f|_H = |W|``. Without a condition, phi is the
constant 1. So the penalty is the same line of code for every space, and every solver of f sees matrices of features and
nothing else.
"""

import abc
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key
from sklearn.cluster import kmeans_plusplus

from kexpfam.kernels import AbstractKernel, AbstractStationary
from kexpfam.measures import AbstractMeasure
from kexpfam.sample import Sample

# Directions of the span whose squared norm is below this share of the largest are lost in float64's rounding.
EIGENVALUE_FLOOR = 1e-10
# Kernel values held at a time where an expansion with any number of terms is evaluated at any number of points.
NUMBERS_PER_CHUNK = 8_000_000


class AbstractSpan(eqx.Module):
    """Functions ``features(x) . weights`` of one argument, with norm ``|weights|``."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of features."""

    @abc.abstractmethod
    def features(self, points: Float[Array, "b d"]) -> Float[Array, "b r"]:
        """Return the features of each row."""

    def evaluate(self, weights: Float[Array, " r"], points: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Return the function with these weights at each row."""
        return self.features(points) @ weights

    def matrix(self, points: ArrayLike, *, rows_per_chunk: int = 16384) -> np.ndarray:
        """Return the features of many rows as a NumPy matrix, in chunks so that only the result is ever large."""
        return _in_chunks(lambda rows: _jitted_features(self, rows), points, rows_per_chunk=rows_per_chunk)


class Constant(AbstractSpan):
    """The one feature 1: what a function of no condition has."""

    @property
    def size(self):
        return 1

    def features(self, points):
        return jnp.ones((points.shape[0], 1))


class KernelSpan(AbstractSpan):
    r"""The span of ``k(z_j, .)`` over the centres, in Nyström-whitened coordinates.

    With the Gram matrix of the centres :math:`K = U D U^\top`, the features are :math:`D^{-1/2} U^\top k(x)`: orthonormal
    in the RKHS. All training points as centres give the full space. Memory: ``m * (d + rank)``.
    """

    kernel: AbstractKernel
    centres: Float[Array, "m d"]
    whitening: Float[Array, "m r"]

    @classmethod
    def build(
        cls, kernel: AbstractKernel, centres: ArrayLike, *, rank: int | None = None, floor: float = EIGENVALUE_FLOOR
    ) -> "KernelSpan":
        """Return the span of the centres, without directions that rounding would make."""
        centres = jnp.asarray(centres)
        matrix = np.asarray(_jitted_gram(kernel, centres, centres), dtype=np.float64)
        values, vectors = scipy.linalg.eigh(matrix)
        kept = np.flatnonzero(values > floor * values[-1])
        kept = kept[-rank:] if rank else kept
        return cls(kernel, centres, jnp.asarray(vectors[:, kept] / np.sqrt(values[kept])))

    @property
    def size(self):
        return self.whitening.shape[1]

    def features(self, points):
        return self.kernel.gram(points.astype(self.whitening.dtype), self.centres) @ self.whitening

    def evaluate(self, weights, points):
        # Folding the whitening into the weights makes one row cost m instead of m * r.
        return self.kernel.gram(points.astype(self.whitening.dtype), self.centres) @ (self.whitening @ weights)

    def matrix(self, points, *, rows_per_chunk=16384):
        # Whitening on the NumPy side: its rank changes with every length scale and would compile a program each time.
        whitening = np.asarray(self.whitening)
        gram = lambda rows: np.asarray(_jitted_gram(self.kernel, rows, self.centres)) @ whitening
        return _in_chunks(gram, points, rows_per_chunk=rows_per_chunk)


class RandomFeatures(AbstractSpan):
    """``sqrt(1/r) (cos(w_i . x), sin(w_i . x))``: a kernel's space by Monte Carlo over its spectrum, memory ``r * d``."""

    frequencies: Float[Array, "r d"]

    @classmethod
    def draw(cls, kernel: AbstractStationary, dim: int, *, count: int, key: Key[Array, ""]) -> "RandomFeatures":
        """Return ``2 * count`` features of the kernel."""
        return cls(kernel.frequencies(count, dim, key=key))

    @property
    def size(self):
        return 2 * self.frequencies.shape[0]

    def features(self, points):
        phase = points.astype(self.frequencies.dtype) @ self.frequencies.T
        return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], 1) / jnp.sqrt(self.frequencies.shape[0])


class NetworkSpan(AbstractSpan):
    """The last hidden layer of a network, divided by the root of its width: features that are learned, not given."""

    body: eqx.nn.MLP

    @classmethod
    def draw(cls, dim: int, *, width: int, depth: int, activation: str = "silu", key: Key[Array, ""]) -> "NetworkSpan":
        """Return the features of a random network with ``depth`` hidden layers."""
        function = ACTIVATIONS[activation]
        return cls(eqx.nn.MLP(dim, width, width, depth - 1, function, function, dtype=jnp.result_type(float), key=key))

    @property
    def size(self):
        return int(self.body.out_size)

    def features(self, points):
        return jax.vmap(self.body)(points.astype(self.body.layers[0].weight.dtype)) / np.sqrt(self.size)


class AbstractFunctionSpace(eqx.Module):
    """A space of functions f with a norm, each f held as whatever the space knows how to evaluate."""

    @abc.abstractmethod
    def evaluate(self, f: Any, target: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, " b"]:
        """Return f at each row."""

    @abc.abstractmethod
    def squared_norm(self, f: Any) -> Float[Array, ""]:
        """Return ``|f|^2``."""

    @abc.abstractmethod
    def stepped(self, f: Any, shrinkage, target: Float[Array, "b d"], condition, coefficients: Float[Array, " b"]) -> Any:
        """Return ``shrinkage * f + sum_b coefficients_b k(x_b, .)``: what a step along a functional gradient makes of f."""


class FeatureSpace(AbstractFunctionSpace):
    """The functions ``f(target | condition) = phi(condition)^T W psi(target)``; ``weights`` are the rows of W, one by one."""

    condition: AbstractSpan
    target: AbstractSpan

    @classmethod
    def of_kernels(cls, kernel: AbstractKernel, condition_kernel: AbstractKernel, centres: Sample) -> "FeatureSpace":
        """Return the whole product space of the centres."""
        target = KernelSpan.build(kernel, centres.target)
        if centres.condition.shape[1] == 0:
            return cls(Constant(), target)
        return cls(KernelSpan.build(condition_kernel, np.unique(np.asarray(centres.condition), axis=0)), target)

    @property
    def size(self) -> int:
        """Return the number of features."""
        return self.condition.size * self.target.size

    def features(self, target: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, "b r"]:
        """Return the features of each row."""
        return outer_features(self.condition.features(condition), self.target.features(target))

    def evaluate(self, weights: Float[Array, " r"], target, condition) -> Float[Array, " b"]:
        """Return f at each row."""
        if isinstance(self.condition, Constant):
            return self.target.evaluate(weights, target)
        return jnp.sum(self.coefficients(weights, condition) * self.target.features(target), 1)

    def squared_norm(self, f):
        return jnp.sum(f**2)

    def stepped(self, f, shrinkage, target, condition, coefficients):
        # Here k(x, .) is the function whose weights are the features of x.
        return shrinkage * f + coefficients @ self.features(target, condition)

    def coefficients(self, weights: Float[Array, " r"], condition: Float[Array, "b p"]) -> Float[Array, "b s"]:
        """Return the weights of the target's features under each condition: f(. | x) as a function of the target alone."""
        return self.condition.features(condition) @ weights.reshape(self.condition.size, self.target.size)

    def given(self, weights: Float[Array, " r"], condition: Float[Array, " p"]) -> tuple["FeatureSpace", Float[Array, " s"]]:
        """Return f under one condition as an unconditional function: its space and weights."""
        return FeatureSpace(Constant(), self.target), self.coefficients(weights, condition[None])[0]

    def matrix(self, target: ArrayLike, condition: ArrayLike, *, rows_per_chunk: int = 16384) -> np.ndarray:
        """Return the features of many rows as a NumPy matrix."""
        psi = self.target.matrix(target, rows_per_chunk=rows_per_chunk)
        if isinstance(self.condition, Constant):
            return psi
        return outer_features(self.condition.matrix(condition, rows_per_chunk=rows_per_chunk), psi)


class Expansion(eqx.Module):
    """``sum_j coefficients_j k(centres_j, .)`` in a fixed number of slots; empty ones have coefficient 0.

    New terms fill the slots after the first ``kept`` ones; once these are full, the oldest terms are overwritten.
    """

    centres: Float[Array, "m d"]
    coefficients: Float[Array, " m"]
    written: Int[Array, ""]
    kept: int = eqx.field(static=True)

    @classmethod
    def starting(cls, centres: ArrayLike, coefficients: ArrayLike, *, slots: int) -> "Expansion":
        """Return the expansion with these terms, to be kept, and room for ``slots`` more."""
        centres, coefficients = jnp.asarray(centres), jnp.asarray(coefficients)
        padded = jnp.concatenate([centres, jnp.zeros((slots, centres.shape[1]), centres.dtype)])
        return cls(padded, jnp.concatenate([coefficients, jnp.zeros(slots)]), jnp.array(0), len(centres))


class Expansions(AbstractFunctionSpace):
    """The finite kernel expansions: a function of the RKHS held by its own centres, with no space fixed in advance."""

    kernel: AbstractKernel

    def evaluate(self, f, target, condition):
        return self.kernel.gram(target.astype(f.centres.dtype), f.centres) @ f.coefficients

    def squared_norm(self, f):
        return f.coefficients @ self.kernel.gram(f.centres, f.centres) @ f.coefficients

    def stepped(self, f, shrinkage, target, condition, coefficients):
        slots = f.coefficients.size - f.kept
        places = f.kept + (f.written + jnp.arange(coefficients.size)) % slots
        return Expansion(
            f.centres.at[places].set(target.astype(f.centres.dtype)),
            (shrinkage * f.coefficients).at[places].set(coefficients),
            f.written + coefficients.size,
            f.kept,
        )

    def projected(self, f: Expansion, *, most: int, seed: int) -> tuple[KernelSpan, Float[Array, " r"]]:
        """Return the nearest function to f on at most ``most`` of its centres: a span, and f's weights there."""
        live = np.flatnonzero(np.asarray(f.coefficients))
        centres = np.asarray(f.centres)[live if live.size else slice(1)]
        span = KernelSpan.build(self.kernel, centres[spread_rows(centres, most, seed=seed)])
        # The features are orthonormal, so that f's weights are <f, feature>; by the reproducing property, values of f.
        return span, jnp.asarray(self.values(f, span.centres)) @ span.whitening

    def values(self, f: Expansion, points: ArrayLike) -> np.ndarray:
        """Return f at many points, in chunks of constant memory."""
        rows_per_chunk = max(1, NUMBERS_PER_CHUNK // f.coefficients.size)
        return _in_chunks(lambda rows: self.evaluate(f, rows, None), points, rows_per_chunk=rows_per_chunk)


class Member(eqx.Module):
    """One function of a space, as a thing to call: a nu with weights in place of a network."""

    space: AbstractFunctionSpace
    f: Any

    def __call__(self, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, " b"]:
        return self.space.evaluate(self.f, x, condition)

    def stepped(self, shrinkage, target, condition, coefficients) -> "Member":
        """Return ``shrinkage`` times this function plus kernels at the targets."""
        return Member(self.space, self.space.stepped(self.f, shrinkage, target, condition, coefficients))


def outer_features(phi, psi):
    """Return the flattened outer product of the features of each row."""
    return (phi[:, :, None] * psi[:, None, :]).reshape(phi.shape[0], -1)


class Tilt(eqx.Module):
    """The unnormalised density ``p0(x) exp(f(x | condition))``: whichever method found f, this is what it means."""

    space: FeatureSpace
    weights: Float[Array, " r"]
    base: AbstractMeasure

    def f(self, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, " b"]:
        return self.space.evaluate(self.weights, x, condition)

    def log_unnormalised(self, x: Float[Array, " d"], condition: Float[Array, " p"]) -> Float[Array, ""]:
        """Return ``log p0(x) + f(x | condition)`` at one point."""
        return self.base.log_density(x) + self.f(x[None], condition[None])[0]

    def values(self, points: np.ndarray, condition: np.ndarray | None = None, *, rows_per_chunk: int = 16384) -> np.ndarray:
        """Return f at many points, in chunks of constant memory."""
        evaluate = lambda rows, condition: _jitted_f(self, rows, condition)
        condition = np.zeros((len(points), 0)) if condition is None else condition
        return _in_chunks(evaluate, points, condition, rows_per_chunk=rows_per_chunk)

    def given(self, condition: Float[Array, " p"]) -> "Tilt":
        """Return the tilt under one condition, as one that knows no condition."""
        space, weights = self.space.given(self.weights, condition)
        return Tilt(space, weights, self.base)


# Functions with a name of their own, because a model must be storable and picklable, and JAX's and Equinox's are not.
def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ``x / (1 + exp(-x))``."""
    return jax.nn.silu(x)


def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ``max(x, 0)``."""
    return jax.nn.relu(x)


ACTIVATIONS = {"silu": silu, "relu": relu}


class Layer(eqx.Module):
    """``rows @ weight + bias``. The weight lies as inputs times outputs: so its products are fastest on a CPU."""

    weight: Float[Array, "a b"]
    bias: Float[Array, " b"]

    @classmethod
    def draw(cls, inputs: int, outputs: int, *, key: Key[Array, ""]) -> "Layer":
        """Return a layer with everything uniform between -1 and 1 over the root of the number of inputs."""
        weight_key, bias_key = jr.split(key)
        limit = 1.0 / np.sqrt(max(inputs, 1))
        uniform = lambda key, *shape: jr.uniform(key, shape, jnp.float32, -limit, limit)
        return cls(uniform(weight_key, inputs, outputs), uniform(bias_key, outputs))

    def __call__(self, rows: Float[Array, "n a"]) -> Float[Array, "n b"]:
        return rows @ self.weight + self.bias


class Network(eqx.Module):
    """A multilayer perceptron of a point and its condition: one number per row if it is a scalar function, else a row."""

    layers: tuple[Layer, ...]
    activation: Callable = eqx.field(static=True)
    scalar: bool = eqx.field(static=True)

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
    ) -> "Network":
        """Return a random network; a silent one has output 0 everywhere, so that its player starts at its anchor."""
        widths = [inputs, *[width] * depth, 1 if outputs == "scalar" else outputs]
        keys = jr.split(key, depth + 1)
        layers = [Layer.draw(*sizes, key=key) for sizes, key in zip(pairwise(widths), keys, strict=True)]
        if silent:
            layers[-1] = jax.tree.map(jnp.zeros_like, layers[-1])
        return cls(tuple(layers), ACTIVATIONS[activation], outputs == "scalar")

    def __call__(self, x: Float[Array, "b a"], condition: Float[Array, "b p"]) -> Float[Array, "b ..."]:
        rows = jnp.concatenate([x, condition], 1).astype(jnp.float32)
        for layer in self.layers[:-1]:
            rows = self.activation(layer(rows))
        values = self.layers[-1](rows)
        return values[:, 0] if self.scalar else values


def choose_centres(sample: Sample, most: int, *, seed: int) -> Sample:
    """Return at most ``most`` rows, spread over the sample by k-means++ seeding; all of them if there are no more."""
    if len(sample) <= most:
        return sample
    rows = np.concatenate([np.asarray(sample.condition), np.asarray(sample.target)], 1)
    return sample.rows(jnp.asarray(spread_rows(rows, most, seed=seed)))


def spread_rows(rows: np.ndarray, most: int, *, seed: int) -> np.ndarray:
    """Return the positions of at most ``most`` rows that are spread over all, by k-means++ seeding."""
    if len(rows) <= most:
        return np.arange(len(rows))
    return np.sort(kmeans_plusplus(rows, most, random_state=seed)[1])


def _in_chunks(compute, *arrays, rows_per_chunk: int) -> np.ndarray:
    starts = range(0, len(arrays[0]), rows_per_chunk)
    pieces = [compute(*(jnp.asarray(array[i : i + rows_per_chunk]) for array in arrays)) for i in starts]
    return np.concatenate([np.asarray(piece) for piece in pieces])


@eqx.filter_jit
def _jitted_features(span: AbstractSpan, rows):
    return span.features(rows)


@eqx.filter_jit
def _jitted_f(tilt: Tilt, rows, condition):
    return tilt.f(rows, condition)


@eqx.filter_jit
def _jitted_gram(kernel, xs, zs):
    return kernel.gram(xs, zs)
