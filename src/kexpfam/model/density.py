"""The tilt of a base density: log density, sampler, moments and quantiles in data units.

It is independent of the solver that found f. A density without a condition has a condition of width zero;
``given(x)`` returns such a density.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, PlainModule, RandomKey, row_slices
from kexpfam.data.scaling import Scaling
from kexpfam.jax_settings import double_precision
from kexpfam.model.distributions import FAR, AbstractDensity, Distributions, narrowed
from kexpfam.model.measures import (
    AbstractMeasure,
    Box,
    Cells,
    ConditionalMeasure,
    Nodes,
    draw_each,
    drawn_in_blocks,
    in_blocks,
    log_density_each,
    logsumexp,
)
from kexpfam.model.networks import AbstractTransport, Given, Identity
from kexpfam.model.spaces import Constant, FeatureSpace, in_chunks
from kexpfam.model.trees import Trees

# Conditions are clipped to the training range, extended by this many standard deviations.
CONDITION_MARGIN = 1.0
# The error of an integral on a grid was measured to be at most 3.5 times its difference from a coarser grid.
QUADRATURE_SAFETY = 4.0
# A normaliser with fewer effective draws or a larger standard error is not reliable.
FEW_EFFECTIVE_DRAWS = 200.0
LARGE_ERROR = 0.05

Rows = Float[AnyArray, "n d"]
Conditions = Float[AnyArray, "n p"]


class Estimate(NamedTuple):
    """A number with its standard error and the effective number of draws."""

    value: float
    standard_error: float
    effective_draws: float

    @property
    def trustworthy(self) -> bool:
        """Return whether the standard error is small and the effective draws are enough to estimate it."""
        return self.standard_error < LARGE_ERROR and self.effective_draws > FEW_EFFECTIVE_DRAWS

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.1g} ({self.effective_draws:,.0f} effective draws)"


class Tilt(eqx.Module):
    """The unnormalised density ``p0(y) exp(f(y | x))``."""

    space: FeatureSpace
    weights: Float[AnyArray, " r"]
    base: AbstractMeasure

    def f(self, x: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"]) -> Float[AnyArray, " b"]:
        """Return f at each row."""
        return self.space.evaluate(self.weights, x, condition)

    def log_unnormalised(self, x: Float[Array, " d"], condition: Float[Array, " p"]) -> Float[Array, ""]:
        """Return ``log p0(x) + f(x | condition)`` at one point."""
        return self.base.log_density(x) + self.f(x[None], condition[None])[0]

    def values(self, points: Rows, condition: Conditions | None = None) -> Float[AnyArray, " n"]:
        """Return f at many points, computed in chunks."""
        condition = np.zeros((len(points), 0)) if condition is None else condition
        return in_chunks(self.f, points, condition)

    def log_values(self, points: Rows, condition: Conditions | None = None) -> Float[AnyArray, " n"]:
        """Return ``log p0 + f`` at many points."""
        return self.base.log_densities(points) + self.values(points, condition)

    def exponents(self, nodes: Nodes, condition: Conditions, most_numbers: int = 4_000_000) -> Iterator[Any]:
        """Yield ``log_weights + f`` of the nodes under some conditions at a time, (rows, nodes)."""
        if isinstance(self.space.condition, Constant):
            # All rows are equal, and f at a point costs less than its features.
            exponents = nodes.log_weights + self.space.target.node_values(np.asarray(self.weights), nodes)
            yield np.broadcast_to(exponents, (len(condition), len(exponents)))
            return
        psi = self.space.target.node_matrix(nodes)
        weights = np.asarray(self.weights).reshape(self.space.condition.size, -1)
        for rows in row_slices(len(condition), max(1, most_numbers // len(nodes.log_weights))):
            phi = self.space.condition.matrix(condition[rows])
            yield nodes.log_weights + (phi @ weights) @ psi.T

    def log_partitions(self, nodes: Nodes, condition: Conditions) -> Float[AnyArray, " n"]:
        """Return ``log Z`` under each condition, a sum over the nodes."""
        parts = [logsumexp(exponents, axis=1) for exponents in self.exponents(nodes, condition)]
        return condition.__array_namespace__().concatenate(parts)

    def given(self, condition: Float[AnyArray, " p"]) -> "Tilt":
        """Return the tilt under one condition, as an unconditional tilt."""
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
        """Return the density on the cells of a grid: ``Cells`` if there is no condition."""
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
    """Draws of a sampler and their log density, which is a lower bound if the transport ``folds`` space."""

    points: np.ndarray
    log_density: np.ndarray
    folds: bool


class Sampler(eqx.Module):
    """Distribution of ``transport(noise)``, noise from the reference, folded onto the base's support."""

    reference: AbstractMeasure
    transport: AbstractTransport
    base: AbstractMeasure

    def draw(self, condition: Float[AnyArray, "b p"], *, key: RandomKey) -> Float[Array, "b d"]:
        """Return one draw per condition."""
        return self.base.fold(self.transport(draw_each(self.reference, condition, key=key), condition))

    def draw_several(
        self, condition: Float[AnyArray, "b p"], count: int, *, key: RandomKey
    ) -> Float[Array, "b count d"]:
        """Return ``count`` draws per condition, with one evaluation of the reference per condition."""
        keys = jr.split(key, condition.shape[0])
        noise = jax.vmap(lambda c, k: self.reference.given(c).sample(count, key=k))(condition, keys)
        move = lambda c, rows: self.transport(rows, jnp.broadcast_to(c, (count, c.size)))
        return self.base.fold(jax.vmap(move)(condition, noise))

    def draws(self, count: int, *, key: RandomKey) -> np.ndarray:
        """Return ``count`` draws of a sampler without a condition as a NumPy array."""
        if isinstance(self.transport, Identity):
            return np.asarray(self.base.fold(self.reference.draws(count, key=key)))
        with double_precision():
            return np.asarray(_draw(self, count, key))

    def given(self, condition: Float[AnyArray, " p"]) -> "Sampler":
        """Return the sampler under one condition, as an unconditional sampler."""
        return Sampler(self.reference.given(condition), Given(self.transport, condition), self.base)

    def weighted_draws(self, condition: np.ndarray, *, key: RandomKey) -> WeightedDraws:
        r"""Return one draw per condition with its log density.

        It is :math:`\log q(g(\xi)) = \log r(\xi) - \log|\det Dg(\xi)|`. The noise must have the dimension of
        the points. The density is exact if the transport is injective. If the determinant has both signs, the
        transport folds space: the true q is larger, and KL(q || p) computed from these densities is a lower
        bound.
        """
        with double_precision():
            points, log_density, signs = _draw_with_density(self, condition, key)
        folds = bool(np.min(signs) < 0.0 < np.max(signs))
        return WeightedDraws(np.asarray(points), np.asarray(log_density), folds)


class Inputs(PlainModule):
    """Scaling of the conditions, the range of the training rows in model units, and trees whose outputs are
    further inputs."""

    scaling: Scaling
    low: Float[np.ndarray, " p"]
    high: Float[np.ndarray, " p"]
    trees: Trees | None = None

    @classmethod
    def of(cls, scaling: Scaling, condition: np.ndarray) -> "Inputs":
        """Return the inputs with the range of these training rows, in model units."""
        return cls(scaling, condition.min(0), condition.max(0))

    def to_model(self, X: Float[AnyArray, "n p"]) -> Float[AnyArray, "n q"]:
        """Return the rows in model units, clipped near the training range; constant columns stay constant."""
        xp, margin = X.__array_namespace__(), np.where(self.high > self.low, CONDITION_MARGIN, 0.0)
        rows = xp.clip(self.scaling.to_model(X), self.low - margin, self.high + margin)
        return rows if self.trees is None else xp.concatenate([rows, self.trees(rows)], axis=1)


class Completion(eqx.Module):
    """The coordinates that f does not depend on: their conditional distribution is that of the base."""

    base: AbstractMeasure
    dims: tuple[int, ...] = eqx.field(static=True)

    def log_conditional(self, points: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
        """Return ``log p0(other coordinates | dims)`` of each row."""
        xp = points.__array_namespace__()
        whole = self.base.log_densities(points)
        part = self.base.marginal(self.dims).log_densities(points[:, self.dims])
        return xp.where(xp.isfinite(whole), whole - xp.where(xp.isfinite(part), part, 0.0), -np.inf)

    def complete(self, values: np.ndarray, *, key: RandomKey) -> np.ndarray:
        """Return points with these values in ``dims`` and the other coordinates drawn."""
        of_block = lambda rows, index: _complete(self, rows, jr.fold_in(key, index[0]))
        return in_blocks(of_block, values, np.arange(len(values)))


class TiltedDensity(AbstractDensity):
    """``p(y | x) = p0(y) exp(f(y | x) - log Z(x))`` with a sampler, in data units.

    ``tilt`` and ``sampler`` are in the coordinates that f depends on, in model units; ``completion`` adds the
    other coordinates. Without a condition log Z is one number with its error, ``log_partition``. Under
    conditions it is a sum over ``nodes``: cells of a grid, with an error estimate from ``coarse_nodes``, or
    draws, with their standard error.
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
        return self.inputs.low.size > 0

    def log_density(self, targets: Rows, X: Conditions | None = None) -> Float[AnyArray, " n"]:
        z = self.scaling.to_model(targets)
        log_tilt = self.tilt.log_values(self._own(z), self._conditions(X, len(targets)))
        rest = 0.0 if self.completion is None else self.completion.log_conditional(z)
        return log_tilt + rest - self.log_partitions(X, len(targets)) + self.scaling.log_jacobian(targets)

    def potential(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return f at each row; the squares of points further out than FAR would overflow."""
        with np.errstate(over="ignore"):
            z = np.clip(self.scaling.to_model(targets), -FAR, FAR)
        return self.tilt.values(self._own(z), self._conditions(X, len(targets)))

    def log_partitions(self, X: Conditions | None = None, rows: int = 1) -> Float[AnyArray, " n"]:
        """Return ``log Z(x)`` of each row."""
        if self.log_partition is not None:
            return np.full(rows if X is None else len(X), self.log_partition.value)
        return self.tilt.log_partitions(self._nodes(), self._conditions(X, rows))

    def partition_errors(self, X: np.ndarray | None = None) -> np.ndarray:
        """Return the error of ``log Z(x)``: by a coarser grid, or the standard error of draws."""
        if self.log_partition is not None:
            return np.full(1 if X is None else len(X), self.log_partition.standard_error)
        if self.coarse_nodes is not None:
            coarse = self.tilt.log_partitions(self.coarse_nodes, self._conditions(X, 1))
            return QUADRATURE_SAFETY * np.abs(coarse - self.log_partitions(X))
        errors = [p.std(axis=1) / p.mean(axis=1) / np.sqrt(p.shape[1]) for p in self.probabilities(X)]
        return np.concatenate(errors)

    def probabilities(self, X: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield the probabilities of the nodes under some conditions at a time, (rows, nodes)."""
        for exponents in self.tilt.exponents(self._nodes(), self._conditions(X, 1)):
            yield np.exp(exponents - logsumexp(exponents)[:, None])

    def mean(self, X: np.ndarray | None = None, **options: Any) -> np.ndarray:
        """Return the mean under each condition."""
        points = self.scaling.to_data(self._nodes().points)
        return np.concatenate([masses @ points for masses in self.probabilities(X)])

    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        nodes = self._nodes()
        if len(nodes.edges) != 1:
            raise ValueError("distribution functions and quantiles need a single target; use sample instead.")
        edges = self.scaling.to_data(nodes.edges[0][:, None])[:, 0]
        masses = np.concatenate(list(self.probabilities(X)))
        return Distributions.of_cells(np.broadcast_to(edges, (len(masses), len(edges))), masses)

    def sample(self, count: int, X: np.ndarray | None = None, *, key: RandomKey) -> np.ndarray:
        draw_key, rest_key = (key, key) if self.completion is None else jr.split(key)
        if self.conditional:
            condition, size = self._conditions(X, 1), 1 << (count - 1).bit_length()
            of_block = lambda x, rows: _draw_several(self.sampler, x, size, jr.fold_in(draw_key, rows[0]))
            draws = in_blocks(of_block, condition, np.arange(len(condition)))[:, :count]
            return self.in_data_units(draws, key=rest_key)
        return self.in_data_units(drawn_in_blocks(self.sampler.draws, count, key=draw_key), key=rest_key)

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: RandomKey) -> Float[Array, " d"]:
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
        if isinstance(base, Box):
            return self.scaling.to_data(np.stack([base.low, base.high]))
        return super().support()

    def in_data_units(self, draws: np.ndarray, *, key: RandomKey) -> np.ndarray:
        """Return points in the coordinates of f as points in data units, with the other coordinates drawn."""
        rows = draws.reshape(-1, draws.shape[-1])
        whole = rows if self.completion is None else self.completion.complete(rows, key=key)
        return self.scaling.to_data(whole).reshape(*draws.shape[:-1], whole.shape[1])

    def given(self, x: np.ndarray) -> "TiltedDensity":
        row = x[None]
        nodes = self._nodes()
        error = float(self.partition_errors(row)[0])
        estimate = Estimate(float(self.log_partitions(row)[0]), error, float(len(nodes.log_weights)))
        condition = self._conditions(row, 1)[0]
        with double_precision():
            sampler = jax.tree.map(np.asarray, self.sampler.given(condition))
        empty = Inputs(Scaling.plain(np.zeros((1, 0))), np.zeros(0), np.zeros(0))
        tilt = self.tilt.given(condition)
        return TiltedDensity(tilt, sampler, self.scaling, empty, estimate, nodes, None, None)

    def _own(self, z: Rows) -> Float[AnyArray, "n s"]:
        """Return the coordinates that f depends on."""
        return z if self.completion is None else z[:, self.completion.dims]

    def _conditions(self, X: Conditions | None, rows: int) -> Float[AnyArray, "n q"]:
        if not self.conditional:
            return np.zeros((rows, 0))
        if X is None:
            raise TypeError("this density has a condition: pass X, or use given(x).")
        return self.inputs.to_model(X)

    def _nodes(self) -> Nodes:
        if self.nodes is None:
            raise ValueError("y has too many columns for a grid of moments and quantiles; use sample.")
        return self.nodes


@eqx.filter_jit
def _draw_with_density(
    sampler: Sampler, condition: Float[AnyArray, "b p"], key: RandomKey
) -> tuple[Float[Array, "b d"], Float[Array, " b"], Float[Array, " b"]]:
    noise = draw_each(sampler.reference, condition, key=key)
    move = lambda row, c: sampler.transport(row[None], c[None])[0].astype(row.dtype)
    determinant = lambda row, c: jnp.linalg.slogdet(jax.jacfwd(move)(row, c))
    signs, log_determinants = jax.vmap(determinant)(noise, condition)
    moved = sampler.base.fold(jax.vmap(move)(noise, condition))
    return moved, log_density_each(sampler.reference, noise, condition) - log_determinants, signs


_complete = eqx.filter_jit(lambda part, values, key: part.base.completed(part.dims, values, key=key))
_draw = eqx.filter_jit(lambda sampler, count, key: sampler.draw(jnp.zeros((count, 0)), key=key))
_draw_several = eqx.filter_jit(lambda sampler, x, count, key: sampler.draw_several(x, count, key=key))
