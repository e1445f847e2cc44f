"""A fitted density: its log, its sampler, its moments and quantiles, in the data's own units.

It does not know how it was fitted, so that everything downstream serves every solver alike. A density without a condition is
one whose condition has width zero; ``given(x)`` makes such a one of any.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import AnyArray
from kexpfam.data.scaling import Scaling
from kexpfam.jax_settings import double_precision
from kexpfam.model.distributions import AbstractDensity, Distributions, narrowed
from kexpfam.model.measures import (
    AbstractMeasure,
    Box,
    Cells,
    ConditionalMeasure,
    Nodes,
    draw_each,
    log_density_each,
    logsumexp,
)
from kexpfam.model.networks import AbstractTransport, Given, Identity
from kexpfam.model.spaces import Constant, FeatureSpace, in_chunks

__all__ = ["Completion", "Density", "Estimate", "Inputs", "Sampler", "Tilt", "TiltedCells", "WeightedDraws"]

# Probabilities in memory at a time.
CHUNK_NUMBERS = 4_000_000
# Conditions further outside the training range than this (standard deviations) are treated as if they were here.
CONDITION_MARGIN = 1.0
# The true error of an integral on a grid was found to be up to 3.5 times its change from a coarser one.
QUADRATURE_SAFETY = 4.0
# Fewer effective draws than this, or a larger error, and a normaliser is not to be trusted.
FEW_EFFECTIVE_DRAWS, LARGE_ERROR = 200.0, 0.05


class Estimate(NamedTuple):
    """A number with the evidence for it."""

    value: float
    standard_error: float
    effective_draws: float

    @property
    def trustworthy(self) -> bool:
        """Return whether the error is small and there are draws enough to believe it."""
        return self.standard_error < LARGE_ERROR and self.effective_draws > FEW_EFFECTIVE_DRAWS

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.1g} ({self.effective_draws:,.0f} effective draws)"


class Tilt(eqx.Module):
    """The unnormalised density ``p0(y) exp(f(y | x))``: whichever method found f, this is what it means."""

    space: FeatureSpace
    weights: Float[AnyArray, " r"]
    base: AbstractMeasure

    def f(self, x: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"]) -> Float[AnyArray, " b"]:
        """Return f at each row."""
        return self.space.evaluate(self.weights, x, condition)

    def log_unnormalised(self, x: Float[Array, " d"], condition: Float[Array, " p"]) -> Float[Array, ""]:
        """Return ``log p0(x) + f(x | condition)`` at one point."""
        return self.base.log_density(x) + self.f(x[None], condition[None])[0]

    def values(
        self, points: Float[AnyArray, "n d"], condition: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        """Return f at many points, in chunks of constant memory."""
        condition = np.zeros((len(points), 0)) if condition is None else condition
        return in_chunks(self.f, points, condition)

    def log_values(
        self, points: Float[AnyArray, "n d"], condition: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        """Return ``log p0 + f`` at many points."""
        return self.base.log_densities(points) + self.values(points, condition)

    def exponents(self, nodes: Nodes, condition: Float[AnyArray, "n p"]) -> Iterator[Any]:
        """Yield ``log_weights + f`` of the nodes under the conditions, some rows at a time: each (rows, nodes)."""
        if isinstance(self.space.condition, Constant):
            # One row serves all, and f at a point costs less than its features.
            exponents = nodes.log_weights + self.space.target.node_values(np.asarray(self.weights), nodes)
            yield np.broadcast_to(exponents, (len(condition), len(exponents)))
            return
        psi = self.space.target.node_matrix(nodes)
        weights = np.asarray(self.weights).reshape(self.space.condition.size, -1)
        rows = max(1, CHUNK_NUMBERS // len(nodes.log_weights))
        for start in range(0, len(condition), rows):
            phi = self.space.condition.matrix(condition[start : start + rows])
            yield nodes.log_weights + (phi @ weights) @ psi.T

    def log_partitions(self, nodes: Nodes, condition: Float[AnyArray, "n p"]) -> Float[AnyArray, " n"]:
        """Return ``log Z`` under each condition, as a sum over the nodes."""
        parts = [logsumexp(exponents, axis=1) for exponents in self.exponents(nodes, condition)]
        return condition.__array_namespace__().concatenate(parts)

    def given(self, condition: Float[AnyArray, " p"]) -> "Tilt":
        """Return the tilt under one condition, as one that knows no condition."""
        space, weights = self.space.given(self.weights, condition)
        return Tilt(space, weights, self.base)


class TiltedCells(ConditionalMeasure):
    """The tilted density under a condition, on the cells of a grid of the target."""

    space: FeatureSpace
    weights: Float[AnyArray, " r"]
    log_weights: Float[AnyArray, " j"]
    node_features: Float[AnyArray, "j b"]
    edges: tuple[Float[AnyArray, " _"], ...]

    @classmethod
    def on(cls, tilt: Tilt, nodes: Nodes) -> "TiltedCells | Cells":
        """Return the density on the cells of a grid; without a condition, as a law of its own."""
        if isinstance(tilt.space.condition, Constant):
            (exponents,) = next(tilt.exponents(nodes, np.zeros((1, 0))))
            return Cells(exponents - logsumexp(exponents), nodes.edges)
        features = tilt.space.target.node_matrix(nodes)
        return cls(tilt.space, np.asarray(tilt.weights), nodes.log_weights, features, nodes.edges)

    def given(self, condition: Float[AnyArray, " p"]) -> Cells:
        coefficients = self.space.coefficients(self.weights, condition[None])[0]
        return Cells(jax.nn.log_softmax(self.log_weights + self.node_features @ coefficients), self.edges)

    def bounds(self, spread: float) -> tuple[np.ndarray, np.ndarray]:
        return np.array([edge[0] for edge in self.edges]), np.array([edge[-1] for edge in self.edges])


class WeightedDraws(NamedTuple):
    """Draws of a sampler with their log density under it; where the map ``folds`` space, the true density is larger."""

    points: np.ndarray
    log_density: np.ndarray
    folds: bool


class Sampler(eqx.Module):
    """The law of ``transport(noise)`` with noise from the reference, folded onto the support of the base."""

    reference: AbstractMeasure
    transport: AbstractTransport
    base: AbstractMeasure

    def draw(self, condition: Float[AnyArray, "b p"], *, key: Key[Array, ""]) -> Float[Array, "b d"]:
        """Return one point per condition."""
        return self.base.fold(self.transport(draw_each(self.reference, condition, key=key), condition))

    def draw_several(
        self, condition: Float[AnyArray, "b p"], count: int, *, key: Key[Array, ""]
    ) -> Float[Array, "b count d"]:
        """Return ``count`` points per condition; what the reference makes of a condition is made once."""
        keys = jr.split(key, condition.shape[0])
        noise = jax.vmap(lambda c, k: self.reference.given(c).sample(count, key=k))(condition, keys)
        move = lambda c, rows: self.transport(rows, jnp.broadcast_to(c, (count, c.size)))
        return self.base.fold(jax.vmap(move)(condition, noise))

    def draws(self, count: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return ``count`` points as a NumPy array, for a sampler without a condition."""
        if isinstance(self.transport, Identity):
            return np.asarray(self.base.fold(self.reference.draws(count, key=key)))
        with double_precision():
            return np.asarray(_draw(self, count, key))

    def given(self, condition: Float[AnyArray, " p"]) -> "Sampler":
        """Return the sampler under one condition, as one that knows no condition."""
        return Sampler(self.reference.given(condition), Given(self.transport, condition), self.base)

    def weighted_draws(self, condition: np.ndarray, *, key: Key[Array, ""]) -> WeightedDraws:
        r"""Return one draw per condition with its density, :math:`\log q(g(\xi)) = \log r(\xi) - \log|\det Dg(\xi)|`.

        For noise as wide as the points. Exact where the transport is injective. A map whose determinant has both signs
        folds space: there the true q is larger, and a KL(q || p) computed from these densities is a lower bound.
        """
        with double_precision():
            points, log_density, signs = _draw_with_density(self, condition, key)
        folds = bool(np.min(signs) < 0.0 < np.max(signs))
        return WeightedDraws(np.asarray(points), np.asarray(log_density), folds)


class Inputs(eqx.Module):
    """The conditions a density knows: their scaling, and the range of the training rows in model units."""

    scaling: Scaling
    low: Float[np.ndarray, " p"]
    high: Float[np.ndarray, " p"]

    @classmethod
    def of(cls, scaling: Scaling, condition: np.ndarray) -> "Inputs":
        """Return the inputs whose training rows, in model units, are these."""
        return cls(scaling, condition.min(0), condition.max(0))

    def to_model(self, X: Float[AnyArray, "n p"]) -> Float[AnyArray, "n q"]:
        """Return the rows in model units, kept near the training range; a column that was constant stays so."""
        margin = np.where(self.high > self.low, CONDITION_MARGIN, 0.0)
        return X.__array_namespace__().clip(self.scaling.to_model(X), self.low - margin, self.high + margin)


class Completion(eqx.Module):
    """The coordinates that f does not depend on: they follow the base, given the others."""

    base: AbstractMeasure
    dims: tuple[int, ...] = eqx.field(static=True)

    def log_conditional(self, points: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
        """Return ``log p0(other coordinates | dims)`` of each row."""
        xp = points.__array_namespace__()
        part = self.base.marginal(self.dims).log_densities(points[:, self.dims])
        whole = self.base.log_densities(points)
        return xp.where(xp.isfinite(whole), whole - xp.where(xp.isfinite(part), part, 0.0), -np.inf)

    def complete(self, values: np.ndarray, *, key: Key[Array, ""]) -> np.ndarray:
        """Return points with these values in ``dims`` and the other coordinates drawn."""
        with double_precision():
            return np.asarray(_complete(self, values, key))


class Density(AbstractDensity):
    """``p(y | x) = p0(y) exp(f(y | x) - log Z(x))`` with a sampler, in the units that the scalings lead back to.

    ``tilt`` and ``sampler`` live in the coordinates that f depends on; ``completion`` adds the others, if there are any.
    Without a condition log Z is one number with its error, ``log_partition``. Under conditions it is a sum over ``nodes``: the
    cells of a grid, judged by a coarser one, or draws, which judge themselves.
    """

    tilt: Tilt
    sampler: Sampler
    scaling: Scaling
    inputs: Inputs
    log_partition: Estimate | None
    nodes: Nodes | None
    coarse_nodes: Nodes | None
    completion: Completion | None

    @property
    def conditional(self) -> bool:
        """Return whether the density depends on a condition."""
        return self.inputs.low.size > 0

    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        """Return the normalised log density of each target under its condition; ``-inf`` off a bounded support."""
        condition, z = self._conditions(X, len(targets)), self.scaling.to_model(targets)
        part = z if self.completion is None else z[:, self.completion.dims]
        rest = 0.0 if self.completion is None else self.completion.log_conditional(z)
        log_tilt = self.tilt.log_values(part, condition)
        return log_tilt + rest - self.log_partitions(X, len(targets)) + self.scaling.log_jacobian(targets)

    def potential(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return f at each row."""
        z = self.scaling.to_model(targets)
        part = z if self.completion is None else z[:, self.completion.dims]
        return self.tilt.values(part, self._conditions(X, len(targets)))

    def log_partitions(self, X: Float[AnyArray, "n p"] | None = None, rows: int = 1) -> Float[AnyArray, " n"]:
        """Return ``log Z(x)`` of each row."""
        if self.log_partition is not None:
            return np.full(rows if X is None else len(X), self.log_partition.value)
        return self.tilt.log_partitions(self._nodes(), self._conditions(X, rows))

    def partition_errors(self, X: np.ndarray | None = None) -> np.ndarray:
        """Return the error of ``log Z(x)``: a multiple of the change from a coarser grid, or the standard error of draws."""
        if self.log_partition is not None:
            return np.full(1 if X is None else len(X), self.log_partition.standard_error)
        if self.coarse_nodes is not None:
            coarse = self.tilt.log_partitions(self.coarse_nodes, self._conditions(X, 1))
            return QUADRATURE_SAFETY * np.abs(coarse - self.log_partitions(X))
        return np.concatenate(
            [m.std(axis=1) / m.mean(axis=1) / np.sqrt(m.shape[1]) for m in self.probabilities(X)]
        )

    def probabilities(self, X: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield the probabilities of the nodes under the conditions, some rows at a time: each (rows, nodes)."""
        for exponents in self.tilt.exponents(self._nodes(), self._conditions(X, 1)):
            yield np.exp(exponents - logsumexp(exponents)[:, None])

    def mean(self, X: np.ndarray | None = None, **options: Any) -> np.ndarray:
        """Return the mean under each condition."""
        points = self.scaling.to_data(self._nodes().points)
        return np.concatenate([masses @ points for masses in self.probabilities(X)])

    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        edges = self.scaling.to_data(self._edges()[:, None])[:, 0]
        masses = np.concatenate(list(self.probabilities(X)))
        return Distributions.of_cells(np.broadcast_to(edges, (len(masses), len(edges))), masses)

    def sample(self, count: int, X: np.ndarray | None = None, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws of the sampler: (count, dimensions), or under conditions (rows, count, dimensions).

        Programs are compiled for few sizes, so that counts without a condition are rounded up.
        """
        draw_key, rest_key = (key, key) if self.completion is None else jr.split(key)
        if self.conditional:
            with double_precision():
                draws = np.asarray(_draw_several(self.sampler, self._conditions(X, 1), count, draw_key))
            return self.in_data_units(draws, key=rest_key)
        return self.in_data_units(self.sampler.draws(_rounded(count), key=draw_key), key=rest_key)[:count]

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        draw_key, rest_key = (key, key) if self.completion is None else jr.split(key)
        sampler = self.sampler
        if self.conditional:
            with double_precision():
                condition = self._conditions(None if x is None else jnp.asarray(x, float)[None], 1)
                sampler = sampler.given(condition[0])
        sampler, completion, scaling = narrowed((sampler, self.completion, self.scaling))
        point = sampler.draw(jnp.zeros((1, 0)), key=draw_key)
        whole = point if completion is None else _complete(completion, point, rest_key)
        return scaling.to_data(whole)[0]

    def support(self) -> Float[np.ndarray, "2 d"] | None:
        base = self.tilt.base if self.completion is None else self.completion.base
        return (
            self.scaling.to_data(np.stack([base.low, base.high]))
            if isinstance(base, Box)
            else super().support()
        )

    def in_data_units(self, draws: np.ndarray, *, key: Key[Array, ""]) -> np.ndarray:
        """Return points in the coordinates of f as points of the data, the other coordinates drawn."""
        rows = draws.reshape(-1, draws.shape[-1])
        whole = rows if self.completion is None else self.completion.complete(rows, key=key)
        return self.scaling.to_data(whole).reshape(*draws.shape[:-1], whole.shape[1])

    def given(self, x: np.ndarray) -> "Density":
        """Return the density under one condition, as one that knows no condition."""
        row, nodes = x[None], self._nodes()
        estimate = Estimate(
            float(self.log_partitions(row)[0]),
            float(self.partition_errors(row)[0]),
            float(len(nodes.log_weights)),
        )
        condition = self._conditions(row, 1)[0]
        with double_precision():
            sampler = jax.tree.map(np.asarray, self.sampler.given(condition))
        nothing = Inputs(Scaling.plain(np.zeros((1, 0))), np.zeros(0), np.zeros(0))
        return Density(
            self.tilt.given(condition), sampler, self.scaling, nothing, estimate, nodes, None, None
        )

    def _conditions(self, X: Float[AnyArray, "n p"] | None, rows: int) -> Float[AnyArray, "n q"]:
        if not self.conditional:
            return np.zeros((rows, 0))
        if X is None:
            raise TypeError("this density has a condition: name the inputs X, or take given(x) first.")
        return self.inputs.to_model(X)

    def _nodes(self) -> Nodes:
        if self.nodes is None:
            raise ValueError(
                "moments and quantiles need a grid of the target, and it has too many columns; use sample instead."
            )
        return self.nodes

    def _edges(self) -> np.ndarray:
        nodes = self._nodes()
        if len(nodes.edges) != 1:
            raise ValueError(
                "distribution functions and quantiles are for targets of one dimension; use sample instead."
            )
        return nodes.edges[0]


@eqx.filter_jit
def _draw_with_density(
    sampler: Sampler, condition: Float[AnyArray, "b p"], key: Key[Array, ""]
) -> tuple[Float[Array, "b d"], Float[Array, " b"], Float[Array, " b"]]:
    noise = draw_each(sampler.reference, condition, key=key)
    move = lambda row, c: sampler.transport(row[None], c[None])[0].astype(row.dtype)
    signs, log_determinants = jax.vmap(lambda row, c: jnp.linalg.slogdet(jax.jacfwd(move)(row, c)))(
        noise, condition
    )
    moved = sampler.base.fold(jax.vmap(move)(noise, condition))
    return moved, log_density_each(sampler.reference, noise, condition) - log_determinants, signs


@eqx.filter_jit
def _complete(
    completion: Completion, values: Float[AnyArray, "b s"], key: Key[Array, ""]
) -> Float[Array, "b d"]:
    return completion.base.completed(completion.dims, values, key=key)


@eqx.filter_jit
def _draw(sampler: Sampler, count: int, key: Key[Array, ""]) -> Float[Array, "b d"]:
    return sampler.draw(jnp.zeros((count, 0)), key=key)


@eqx.filter_jit
def _draw_several(
    sampler: Sampler, condition: Float[AnyArray, "b p"], count: int, key: Key[Array, ""]
) -> Float[Array, "b n d"]:
    return sampler.draw_several(condition, count, key=key)


def _rounded(count: int) -> int:
    """Return the next of 4 sizes per power of two, so that any number of draws uses one of few compiled programs."""
    quantum = max(2 ** (max(count - 1, 1).bit_length() - 3), 1)
    return -(-count // quantum) * quantum
