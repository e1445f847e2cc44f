"""Densities that are mixtures: of learned chains, and of whatever candidates held-out rows speak for."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Key
from threadpoolctl import ThreadpoolController

from kexpfam.data.kinds import AbstractKind, Atom, Category, Periodic, Positive
from kexpfam.data.sample import AnyArray
from kexpfam.data.scaling import Scaling
from kexpfam.data.units import Units
from kexpfam.model.chain import AbstractChain
from kexpfam.model.density import Inputs
from kexpfam.model.distributions import FAR, AbstractDensity, Distributions, moved_in, narrowed
from kexpfam.model.measures import AbstractMeasure, logsumexp
from kexpfam.model.mixed import MixedChain

__all__ = ["LawDensity", "LearnedDensity", "MixedDensity", "Stack"]

# Probabilities in memory at a time.
CHUNK_NUMBERS = 4_000_000
# Draws behind the mean of several targets.
MEAN_DRAWS = 512
# The share of them on either side that is not the central part of their law.
OUTER_DRAWS = 0.01


@lru_cache
def _libraries() -> ThreadpoolController:
    """Return what can tell libraries how many threads to use; to look for them takes as long as a draw."""
    return ThreadpoolController()


class LearnedDensity(AbstractDensity):
    """The mixture, in equal parts, of chains that were learned from different rows and in different orders.

    ``at`` is the condition of a density that was made by ``given``.
    """

    members: AbstractChain
    scaling: Scaling
    inputs: Inputs
    at: Float[np.ndarray, " p"] | None = None

    @property
    def conditional(self) -> bool:
        return self.inputs.low.size > 0 and self.at is None

    def __len__(self) -> int:
        return len(self.members.order)

    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        z, condition, xp = (
            self.scaling.to_model(targets),
            self._conditions(X, len(targets)),
            targets.__array_namespace__(),
        )
        inside = self._inside(z)
        z = xp.where(inside[:, None], z, 0.0)
        rows = max(1, CHUNK_NUMBERS // (self.members.cells * z.shape[1]))
        pieces = [
            self.log_model_density(z[i : i + rows], condition[i : i + rows]) for i in range(0, len(z), rows)
        ]
        log_density = xp.concatenate(pieces) if pieces else np.zeros(0)
        return xp.where(inside, log_density + self.scaling.log_jacobian(targets), -np.inf)

    def log_model_density(
        self, z: Float[AnyArray, "n d"], condition: Float[AnyArray, "n p"]
    ) -> Float[AnyArray, " n"]:
        """Return the log density of targets in model units."""
        log_density = lambda member, _: member.log_densities(z, condition, cells=member.cells).sum(1)
        parts = self._of_members(log_density, threads=not isinstance(z, jax.Array))
        return logsumexp(z.__array_namespace__().stack(parts), axis=0) - np.log(len(self))

    def _of_members(self, what: Callable, *, threads: bool = True) -> list:
        """Return ``what(member, k)`` of every member; NumPy's loops let other threads run, JAX traces in one."""
        one = lambda k: what(self.members.member(k), k)
        if not threads:
            return [one(k) for k in range(len(self))]
        # Threads of the linear algebra would wait for one another on the cores that the members have.
        with _libraries().limit(limits=1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(one, range(len(self))))

    def _inside(self, z: Float[AnyArray, "n d"]) -> Bool[AnyArray, " n"]:
        """Return which targets, in model units, lie in the support."""
        first: Any = self.members.member(0)
        if first.support is None:
            return np.ones(len(z), bool)
        ordered = z[:, first.order].astype(np.float32)
        return ((ordered >= first.support[0]) & (ordered <= first.support[1])).all(axis=1)

    def sample(self, count: int, X: np.ndarray | None = None, *, key: Key[Array, ""]) -> np.ndarray:
        condition = self._conditions(X, 1)
        draws = self.draws(np.repeat(condition, count, axis=0), key=key)[0]
        return self.scaling.to_data(draws).reshape(
            *((len(condition), count) if self.conditional else (count,)), -1
        )

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        owner_key, level_key = jr.split(key)
        own = narrowed(self)
        condition = jnp.asarray(own._conditions(None if x is None else jnp.asarray(x, float)[None], 1), float)
        owner = jr.randint(owner_key, (), 0, len(self))
        member = jax.tree.map(lambda part: jnp.asarray(part)[owner], own.members)
        levels = jr.uniform(level_key, (1, own.members.dim), float)
        return own.scaling.to_data(member.drawn(condition, levels, cells=member.cells))[0]

    def support(self) -> Float[np.ndarray, "2 d"] | None:
        first: Any = self.members.member(0)
        if first.support is None:
            return super().support()
        return self.scaling.to_data(first.support[:, np.argsort(first.order)].astype(float))

    def draws(self, condition: np.ndarray, *, key: Key[Array, ""]) -> tuple[np.ndarray, np.ndarray]:
        """Return one draw per condition, in model units, and its log density under the sampler: chains of cells."""
        rng = np.random.default_rng(np.asarray(jr.key_data(key)))
        owner = rng.integers(len(self), size=len(condition))
        streams, targets, own = (
            rng.spawn(len(self)),
            np.zeros((len(condition), self.members.dim)),
            np.zeros(len(condition)),
        )
        drawn = lambda member, k: member.sample(condition[owner == k], cells=member.cells, rng=streams[k])
        for k, draws in enumerate(self._of_members(drawn)):
            targets[owner == k], own[owner == k] = draws.targets, draws.log_density
        return targets, own

    def given(self, x: np.ndarray) -> "LearnedDensity":
        return eqx.tree_at(
            lambda d: d.at, self, self.inputs.to_model(x[None])[0], is_leaf=lambda leaf: leaf is None
        )

    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        if self.members.dim != 1:
            raise ValueError(
                "distribution functions and quantiles are for targets of one dimension; use sample instead."
            )
        condition = self._conditions(X, 1)
        rows = np.concatenate([condition, np.zeros((len(condition), 1))], axis=1)
        members: list[Any] = [self.members.member(k) for k in range(len(self))]
        parts = []
        for member in members:
            told = member.told(rows, member.units(rows)).link(0)
            edges, masses = told.cells(member.cells)
            with np.errstate(over="ignore"):
                points = self.scaling.to_data(told.in_units(edges).reshape(-1, 1)).reshape(edges.shape)
            parts.append(Distributions.of_cells(points, masses))
        return Distributions.mixture(parts, np.full(len(parts), 1.0 / len(parts)))

    def mean(self, X: np.ndarray | None = None) -> np.ndarray:
        if self.members.dim == 1:
            return super().mean(X)
        draws = np.moveaxis(self.sample(MEAN_DRAWS, X, key=jr.key(0)), -2, -1)
        means = _mean(draws)
        return means if self.conditional else means[None]

    def _conditions(self, X: Float[AnyArray, "n p"] | None, rows: int) -> Float[AnyArray, "n q"]:
        if self.at is not None:
            return np.tile(self.at, (rows, 1))
        if not self.conditional:
            return np.zeros((rows, 0))
        if X is None:
            raise TypeError("this density has a condition: name the inputs X, or take given(x) first.")
        return self.inputs.to_model(X)


class MixedDensity(LearnedDensity):
    """The same of columns of several kinds; a row with missing cells has the density of the others."""

    members: MixedChain
    scaling: Units

    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        z, condition, xp = (
            self.scaling.to_model(targets),
            self._conditions(X, len(targets)),
            targets.__array_namespace__(),
        )
        rows = max(1, CHUNK_NUMBERS // (self.members.cells * z.shape[1]))
        pieces = [
            self.log_model_density(z[i : i + rows], condition[i : i + rows]) for i in range(0, len(z), rows)
        ]
        return (xp.concatenate(pieces) if pieces else np.zeros(0)) + self.scaling.log_jacobian(targets)

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        raise TypeError("columns of several kinds are drawn on the host only; use sample.")

    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        if self.members.dim != 1:
            raise ValueError(
                "distribution functions and quantiles are for targets of one dimension; use sample instead."
            )
        condition, wiring = self._conditions(X, 1), self.members.wiring
        rows = np.concatenate([condition, np.zeros((len(condition), len(wiring.input_owners)))], axis=1)
        parts = []
        for member in map(self.members.member, range(len(self))):
            points, levels = wiring.steps(
                wiring.told(member.outputs(rows)), 0, member.cells, atom=self._atom()
            )
            parts.append(Distributions(self._ordered(points), levels))
        return Distributions.mixture(parts, np.full(len(parts), 1.0 / len(parts)))

    def mean(self, X: np.ndarray | None = None) -> np.ndarray:
        """Return the mean of numbers, the likeliest label, the mean direction of angles: (rows, dimensions)."""
        kinds = self.scaling.kinds
        if len(kinds) == 1 and not isinstance(kinds[0], Category | Periodic):
            return super().mean(X)
        draws = self.sample(MEAN_DRAWS, X, key=jr.key(0))
        draws = draws if self.conditional else draws[None]
        return np.stack([_middle(draws[..., j], kind) for j, kind in enumerate(kinds)], axis=1)

    def probabilities(self, X: np.ndarray | None = None) -> np.ndarray:
        """Return the probability of each label of the single target, (rows, labels)."""
        (kind,) = self.scaling.kinds
        if not isinstance(kind, Category):
            raise ValueError(f"only labels have a list of probabilities, and the target is {kind}.")
        codes = np.arange(len(kind.levels), dtype=float)
        upto = [part.cdf(np.tile(codes, (len(part), 1))) for part, _ in self._pieces(X)]
        return np.diff(np.concatenate(upto), axis=1, prepend=0.0)

    def _atom(self) -> float | None:
        """Return the place of the atom among the other values, in the units of these."""
        (kind,) = self.scaling.kinds
        if not isinstance(kind, Atom):
            return None
        if isinstance(kind.rest, Positive):
            return -np.inf
        return float(Scaling.to_model(self.scaling, np.array([[kind.value]], float))[0, 0])

    def _ordered(self, points: np.ndarray) -> np.ndarray:
        """Return points of the single column in the data's units; the atom of a positive number is below all."""
        with np.errstate(over="ignore"):
            values = Scaling.to_data(self.scaling, points.reshape(-1, 1)).reshape(points.shape)
        values = np.clip(values, -FAR, FAR)
        (kind,) = self.scaling.kinds
        return np.where(np.isneginf(points), kind.value, values) if isinstance(kind, Atom) else values


def _middle(draws: np.ndarray, kind: AbstractKind) -> np.ndarray:
    """Return the mean of draws along the last axis, or what stands for it where there is none."""
    if isinstance(kind, Category):
        return np.argmax((draws[..., None] == np.arange(len(kind.levels))).sum(axis=-2), axis=-1).astype(
            float
        )
    if isinstance(kind, Periodic):
        turn = 2.0 * np.pi / kind.period
        return np.angle(np.exp(1j * turn * draws).mean(axis=-1)) / turn % kind.period
    return _mean(draws)


def _mean(draws: np.ndarray) -> np.ndarray:
    """Return the mean of draws along the last axis; one that is far outside all others does not decide it."""
    low, high = np.quantile(draws, [OUTER_DRAWS, 1.0 - OUTER_DRAWS], axis=-1, keepdims=True)
    return moved_in(draws, low, high).mean(axis=-1)


class LawDensity(AbstractDensity):
    """A law of the standardised data, such as a mixture of normals, in the data's own units."""

    law: AbstractMeasure
    scaling: Scaling

    @property
    def conditional(self) -> bool:
        return False

    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        return self.law.log_densities(self.scaling.to_model(targets)) + self.scaling.log_jacobian(targets)

    def sample(self, count: int, X: np.ndarray | None = None, *, key: Key[Array, ""]) -> np.ndarray:
        return self.scaling.to_data(self.law.draws(count, key=key))

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        law, scaling = narrowed((self.law, self.scaling))
        return scaling.to_data(law.sample(1, key=key))[0]

    def given(self, x: np.ndarray) -> AbstractDensity:
        raise TypeError("this density has no condition.")

    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        raise ValueError("a law does not know its distribution function; use sample instead.")


class Stack(AbstractDensity):
    """A mixture of densities, ``p = sum_k weights_k p_k``, its weights from rows that none of them had seen."""

    parts: tuple[AbstractDensity, ...]
    weights: Float[np.ndarray, " k"]
    scaling: Scaling

    @property
    def conditional(self) -> bool:
        return self.parts[0].conditional

    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        parts = [
            part.log_density(targets, X) + np.log(w) for part, w in zip(self.parts, self.weights, strict=True)
        ]
        return logsumexp(targets.__array_namespace__().stack(parts), axis=0)

    def sample(self, count: int, X: np.ndarray | None = None, *, key: Key[Array, ""]) -> np.ndarray:
        rng = np.random.default_rng(np.asarray(jr.key_data(key)))
        keys = jr.split(key, len(self.parts))
        if not self.conditional:
            shares = rng.multinomial(count, self.weights)
            draws = [
                p.sample(int(c), key=k) for p, c, k in zip(self.parts, shares, keys, strict=True) if c > 0
            ]
            return rng.permutation(np.concatenate(draws))
        several = np.stack([part.sample(count, X, key=k) for part, k in zip(self.parts, keys, strict=True)])
        owner = rng.choice(len(self.parts), size=several.shape[1:3], p=self.weights)
        return np.take_along_axis(several, owner[None, :, :, None], axis=0)[0]

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        owner_key, *keys = jr.split(key, 1 + len(self.parts))
        owner = jr.choice(owner_key, len(self.parts), p=jnp.asarray(self.weights.copy(), float))
        return jnp.stack([part.draw(x, key=k) for part, k in zip(self.parts, keys, strict=True)])[owner]

    def support(self) -> Float[np.ndarray, "2 d"] | None:
        bounds = [part.support() for part in self.parts]
        if any(bound is None for bound in bounds):
            return None
        lows, highs = zip(*bounds, strict=True)
        return np.stack([np.min(lows, axis=0), np.max(highs, axis=0)])

    def given(self, x: np.ndarray) -> "Stack":
        return Stack(tuple(part.given(x) for part in self.parts), self.weights, self.scaling)

    def distributions(self, X: np.ndarray | None = None) -> Distributions:
        return Distributions.mixture([part.distributions(X) for part in self.parts], self.weights)

    def mean(self, X: np.ndarray | None = None) -> np.ndarray:
        return np.einsum("k,knd->nd", self.weights, np.stack([part.mean(X) for part in self.parts]))
