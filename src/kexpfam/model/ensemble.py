"""Densities that are mixtures: of chains, and of candidates with weights."""

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key
from scipy.stats import qmc
from threadpoolctl import ThreadpoolController

from kexpfam.data.sample import AnyArray, PlainModule
from kexpfam.data.scaling import Scaling
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import AtomLaw, Chain, ChainDraws, ChainSampler, Layout
from kexpfam.model.density import Inputs
from kexpfam.model.distributions import (
    MEAN_DRAWS,
    ROWS,
    AbstractDensity,
    AbstractDistributions,
    Distributions,
    mean_of_draws,
    narrowed,
    supported_mean,
)
from kexpfam.model.families import AbstractTilted, RealLine
from kexpfam.model.measures import ROWS_PER_BLOCK, AbstractMeasure, drawn_in_blocks, in_blocks, logsumexp

__all__ = ["ChainDensity", "LawDensity", "Pool", "Stack"]

# What is computed once per model, by the identity of its weights: it takes as long as many rows.
_PREPARED: dict[int, tuple[weakref.ref, dict[Callable, Any]]] = {}


@lru_cache
def _libraries() -> ThreadpoolController:
    """Return the controller of the threads of libraries; to find the libraries takes as long as a draw."""
    return ThreadpoolController()


class Pool(PlainModule):
    """The law of one column whose potential is the weighted sum of those of stacked members.

    Without weights it is the mean of the potentials. A mixture of members is wider than each of them by the
    distances of their locations; this law is as wide as they are, and narrower if the weights sum to more
    than 1. The chance of an atom is the mean of theirs.
    """

    members: Chain
    weights: Float[AnyArray, " m"] | None = None

    @staticmethod
    def suits(layout: Layout) -> bool:
        """Return whether there is a single column with a tilt."""
        return layout.dim == 1 and isinstance(layout.families[0], AbstractTilted)

    @property
    def columns(self) -> Layout:
        """Return the layout of the members."""
        return self.members.columns

    @property
    def dim(self) -> int:
        """Return the number of columns."""
        return 1

    def single(self, x: Float[Array, "n p"]) -> AtomLaw:
        """Return the law of the column, in compiled functions."""
        members, layout, count = self.members, self.members.columns, len(self.members.order)
        weights = np.full(count, 1.0 / count) if self.weights is None else self.weights

        def of_member(own: Chain) -> tuple[AnyArray, AnyArray | None]:
            law = own.within(layout).single(x)
            return law.outputs, law.chance

        outputs, chances = _each(of_member, members, len(x))
        family = dataclasses.replace(cast(Any, layout.families[0].at(0)), pool=weights)
        if chances is None:
            return AtomLaw(family, outputs.swapaxes(0, 1), None)
        chance = (weights[:, None] * chances).sum(axis=0) / weights.sum()
        return AtomLaw(family, outputs.swapaxes(0, 1), jnp.log(chance) - jnp.log1p(-chance))

    def log_densities(
        self, y: Float[AnyArray, "n 1"], x: Float[AnyArray, "n p"], *, cells: int | None = None
    ) -> Float[AnyArray, "n 1"]:
        """Return the log density of the column in each row, 0 where it is missing; a block of rows of NumPy
        arrays at a time."""
        if isinstance(y, np.ndarray):
            return in_blocks(lambda *rows: _pool_scores(self, *rows, cells=cells), y, x)
        missing = jnp.isnan(y)
        found = self.single(jnp.asarray(x)).log_density(jnp.where(missing, 0.0, y)[:, 0], cells)
        return jnp.where(missing, 0.0, found[:, None])

    def sample(self, x: Float[AnyArray, "n p"], levels: Float[AnyArray, "n 1"]) -> ChainDraws:
        """Return the quantiles of the column at these levels."""
        if isinstance(x, np.ndarray):
            return ChainDraws(*in_blocks(partial(_pool_draws, self), x, levels))
        values, log_density = self.single(jnp.asarray(x)).drawn(levels[:, 0], None)
        return ChainDraws(values[:, None], log_density, 0.0 * log_density)


class ChainDensity(AbstractDensity):
    """An ensemble of chains that were learned from different rows and in different orders.

    It is the mixture in equal parts, or, if it is ``pooled`` and has a single target with a tilt, their
    ``Pool`` to this ``power``. ``at`` is the condition of a density that was made by ``given``. A row with
    missing cells has the density of its other cells.
    """

    members: Chain
    scaling: Scaling
    inputs: Inputs
    at: Float[np.ndarray, " p"] | None = None
    # Files of older versions do not store these.
    pooled: bool = eqx.field(static=True, default=False)
    power: float = eqx.field(static=True, default=1.0)

    @property
    def conditional(self) -> bool:
        return self.inputs.low.size > 0 and self.at is None

    def __len__(self) -> int:
        return len(self.members.order)

    def log_density(
        self, targets: Float[AnyArray, "n d"], X: Float[AnyArray, "n p"] | None = None
    ) -> Float[AnyArray, " n"]:
        xp, condition = targets.__array_namespace__(), self._conditions(X, len(targets))
        inside = self.scaling.inside(targets)
        z = xp.where(inside[:, None], self.scaling.to_model(targets), 0.0)
        log_density = self.log_model_density(z, condition)
        return xp.where(inside, log_density + self.scaling.log_jacobian(targets), -np.inf)

    def log_model_density(
        self, z: Float[AnyArray, "n d"], condition: Float[AnyArray, "n p"]
    ) -> Float[AnyArray, " n"]:
        """Return the log density of targets in model units."""
        if isinstance(z, jax.Array):
            parts = [law.log_densities(z, condition).sum(1) for law in self.laws]
            return logsumexp(jnp.stack(parts), axis=0) - np.log(len(parts))
        members, _ = self._resident
        if self.pooled:
            return self._pool(members).log_densities(z, condition)[:, 0]
        return in_blocks(lambda *rows: _scores(members, *rows), z, condition)

    @property
    def laws(self) -> list:
        """Return the laws of which the density is the mixture in equal parts."""
        if self.pooled:
            return [self._pool(self.members)]
        return [self.members.member(k) for k in range(len(self))]

    def _pool(self, members: Chain) -> Pool:
        """Return the pool of these members to the power of the density."""
        return Pool(members, np.full(len(self), self.power / len(self)))

    def _prepared(self, make: Callable) -> Any:
        """Return ``make(self)``, which is kept as long as the weights are; it may not refer to them."""
        weights, place = self.members.out, id(self.members.out)
        kept = _PREPARED.get(place)
        if kept is None or kept[0]() is not weights:
            kept = _PREPARED[place] = weakref.ref(weights, lambda _: _PREPARED.pop(place, None)), {}
        if make not in kept[1]:
            kept[1][make] = make(self)
        return kept[1][make]

    @property
    def _resident(self) -> tuple[Chain, Scaling]:
        """Return members and scaling as arrays of JAX."""
        return self._prepared(_on_device)

    @property
    def _real(self) -> bool:
        """Return whether the first target is on the real line."""
        return isinstance(self.members.columns.families[0], RealLine)

    def of_members(self, function: Callable, places: Sequence[int] | None = None) -> list:
        """Return ``function(sampler, k)`` of every member, or of some, in threads."""
        samplers = self._prepared(_samplers)
        places = range(len(self)) if places is None else places
        if len(places) == 1:
            return [function(samplers[places[0]], places[0])]
        # The members share the cores, so that each has one thread of linear algebra.
        with _libraries().limit(limits=1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda k: function(samplers[k], k), places))

    def sample(self, count: int, X: np.ndarray | None = None, *, key: Key[Array, ""]) -> np.ndarray:
        condition = self._conditions(X, 1)
        draw = self._pooled_draws if self.pooled else self._mixed_draws
        draws = draw(condition, count, np.random.default_rng(np.asarray(jr.key_data(key))))
        shape = (len(condition), count) if self.conditional else (count,)
        return self.scaling.to_data(draws).reshape(*shape, self.members.dim)

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        owner_key, level_key = jr.split(key)
        own = narrowed(self)
        condition = jnp.asarray(own._conditions(None if x is None else jnp.asarray(x, float)[None], 1), float)
        levels = jr.uniform(level_key, (1, own.members.dim), float)
        if own.pooled:
            return own.scaling.to_data(own._pool(own.members).sample(condition, levels).targets)[0]
        owner = jr.randint(owner_key, (), 0, len(self))
        weights = jax.tree.map(jnp.asarray, own.members.within(None))
        member = weights.within(own.members.layout).member(owner)
        return own.scaling.to_data(member.drawn(condition, levels))[0]

    def support(self) -> Float[np.ndarray, "2 d"] | None:
        (low, high), atoms = self.scaling.ends, self.scaling.atom_values
        ends = np.stack([np.fmin(np.where(self.scaling.logs, 0.0, low), atoms), np.fmax(high, atoms)])
        return ends if np.isfinite(ends).any() else None

    def _mixed_draws(
        self, condition: Float[np.ndarray, "n p"], count: int, rng: np.random.Generator
    ) -> Float[np.ndarray, "draws d"]:
        """Return draws under each condition in model units, each by a random member."""
        rows, dim = np.repeat(condition, count, axis=0), self.members.dim
        owner = rng.integers(len(self), size=len(rows))
        streams, targets = rng.spawn(len(self)), np.zeros((len(rows), dim))

        def drawn(member: ChainSampler, k: int) -> None:
            own = np.flatnonzero(owner == k)
            targets[own] = member.sample(rows[own], uniform_levels(streams[k], len(own), dim)).targets

        self.of_members(drawn, np.unique(owner).tolist())
        return targets

    def _pooled_draws(
        self, condition: Float[np.ndarray, "n p"], count: int, rng: np.random.Generator
    ) -> Float[np.ndarray, "draws 1"]:
        """Return draws under each condition in model units; its law is computed once."""
        drawn, family = [], cast(AbstractTilted, self.members.columns.families[0].at(0))
        for start in range(0, len(condition), ROWS):
            points, upto, chance = self._cut(condition[start : start + ROWS])
            atom = np.zeros((len(points), 1)) if chance is None else chance[:, None]
            levels = rng.random((len(points), count))
            rest = np.clip((levels - atom) / np.maximum(1.0 - atom, np.finfo(float).tiny), 0.0, 1.0)
            values = family.settled(Distributions.of_levels(points, upto).quantile(rest))
            drawn.append(np.where(levels < atom, np.inf, values).ravel())
        return np.concatenate(drawn)[:, None]

    def _cut(self, condition: Float[np.ndarray, "n p"]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return points and levels of the law on the real line in model units, and the atom's chance."""
        pool = self._pool(self._resident[0])
        return in_blocks(lambda rows: _cut(pool, rows), condition)

    def given(self, x: np.ndarray) -> "ChainDensity":
        at = self.inputs.to_model(x[None])[0]
        return eqx.tree_at(lambda d: d.at, self, at, is_leaf=lambda leaf: leaf is None)

    def distributions(self, X: np.ndarray | None = None) -> AbstractDistributions:
        if self.members.dim != 1:
            raise ValueError(
                "distribution functions and quantiles are for targets of one dimension; use sample instead."
            )
        condition = self._conditions(X, 1)
        if self.pooled:
            points, levels, chance = self._cut(condition)
            family = cast(AbstractTilted, self.members.columns.families[0].at(0))
            laws, chances = [family.steps(points, levels)], [chance]
        else:
            each = [member.single(condition) for member in self.laws]
            laws = [own.family.law(own.outputs, None) for own in each]
            chances = [own.chance for own in each]
        parts = [Distributions.of_levels(_in_data(self.scaling, law.points), law.levels) for law in laws]
        atom = self.scaling.kinds[0].atom
        if atom is not None:
            both: Any = zip(parts, chances, strict=True)
            parts = [part.with_atom(atom, chance) for part, chance in both]
        if len(parts) == 1:
            return parts[0]
        return Distributions.mixture(parts, np.full(len(parts), 1.0 / len(parts)))

    def mean(
        self, X: np.ndarray | None = None, *, draws: int = MEAN_DRAWS, key: Key[Array, ""] | None = None
    ) -> np.ndarray:
        """Return the mean of numbers, the likeliest label and the mean direction of angles, by column.

        It is exact for a single target. For several it is that of ``draws`` draws: random ones with a key;
        otherwise quantiles of the chain at the levels of a Sobol sequence, which are the same in every call.
        """
        kinds = self.scaling.kinds
        if len(kinds) == 1 and kinds[0].atom is None and self.pooled and self._real:
            members, scaling = self._resident
            own = self._pool(members), scaling
            moments = in_blocks(lambda rows: _moments(*own, rows), self._conditions(X, 1))
            return supported_mean(*moments)[:, None]
        if len(kinds) == 1:
            return np.concatenate([part.centre(kinds[0])[:, None] for part, _ in self._pieces(X)])
        if key is None:
            found = self._sobol_draws(self._conditions(X, 1), draws)
        else:
            found = self.sample(draws, X, key=key).reshape(-1, draws, len(kinds))
        return np.stack([mean_of_draws(found[..., j], kind) for j, kind in enumerate(kinds)], axis=1)

    def _sobol_draws(self, condition: np.ndarray, draws: int) -> np.ndarray:
        """Return at least so many draws per condition at the levels of a Sobol sequence, in data units."""
        levels = self._sobol_levels(draws)
        _, size, dim = levels.shape
        rows = np.repeat(condition, size, axis=0)

        def drawn(member: ChainSampler, k: int) -> np.ndarray:
            own = np.tile(levels[k], (len(condition), 1))
            return self.scaling.to_data(member.sample(rows, own).targets).reshape(len(condition), size, dim)

        return np.concatenate(self.of_members(drawn), axis=1)

    def _sobol_levels(self, draws: int) -> Float[np.ndarray, "m size d"]:
        """Return the levels of at least so many draws, equally many by every member."""
        members, exponent = len(self), max(0, int(np.ceil(np.log2(draws / len(self)))))
        power = (members - 1).bit_length() + exponent
        points = qmc.Sobol(self.members.dim, scramble=False).random_base2(power)
        levels = points[: members << exponent] + 0.5 / len(points)
        return levels.reshape(members, -1, self.members.dim).astype(np.float32)

    def log_completion_weights(self, z: Float[np.ndarray, "n d"], count: int) -> Float[np.ndarray, "n c"]:
        """Return log weights whose mean, as weights, is the density of the known cells, in model units.

        Unknown cells are NaN. At least ``count`` completions have the levels of a Sobol sequence, equally
        many by every member; the error of their mean is smaller than that of as many random ones.
        """
        levels = self._sobol_levels(count)
        found = np.zeros((len(z), *levels.shape[:2]))
        known, owner = np.unique(~np.isnan(z), axis=0, return_inverse=True)
        groups = [np.flatnonzero(owner.ravel() == k) for k in range(len(known))]

        def weighed(member: ChainSampler, k: int) -> None:
            for rows in groups:
                found[rows, k] = member.log_weights(np.zeros((len(rows), 0)), z[rows], levels[k])

        self.of_members(weighed)
        return found.reshape(len(z), -1)

    def probabilities(self, X: np.ndarray | None = None) -> np.ndarray:
        """Return the probability of each label of the single target, (rows, labels)."""
        (kind,) = self.scaling.kinds
        if not kind.categorical:
            raise ValueError(f"only labels have a list of probabilities, and the target is {kind}.")
        codes = np.arange(len(kind.levels), dtype=float)
        upto = [part.cdf(np.tile(codes, (len(part), 1))) for part, _ in self._pieces(X)]
        return np.diff(np.concatenate(upto), axis=1, prepend=0.0)

    def _conditions(self, X: Float[AnyArray, "n p"] | None, rows: int) -> Float[AnyArray, "n q"]:
        if self.at is not None:
            return np.tile(self.at, (rows, 1))
        if not self.conditional:
            return np.zeros((rows, 0))
        if X is None:
            raise TypeError("this density has a condition: name the inputs X, or take given(x) first.")
        return self.inputs.to_model(X)


def _on_device(density: ChainDensity) -> tuple[Chain, Scaling]:
    """Return masked members in float64 and the scaling."""
    masked = [density.members.member(k).masked().within(None) for k in range(len(density))]
    wide = lambda part: part.astype(float) if part.dtype == np.float32 else part
    members = jax.tree.map(lambda *parts: wide(np.stack(parts)), *masked).within(density.members.layout)
    with double_precision():
        return jax.device_put((members, density.scaling))


def _samplers(density: ChainDensity) -> list[ChainSampler]:
    return [ChainSampler(density.members.member(k)) for k in range(len(density))]


@partial(jax.jit, static_argnames="cells")
def _pool_scores(
    pool: Pool, z: Float[Array, "n 1"], condition: Float[Array, "n p"], *, cells: int | None
) -> Float[Array, "n 1"]:
    return pool.log_densities(z, condition, cells=cells)


@jax.jit
def _pool_draws(pool: Pool, condition: Float[Array, "n p"], levels: Float[Array, "n 1"]) -> tuple[Array, ...]:
    found: Any = pool.sample(condition, levels)
    return tuple(found)


@jax.jit
def _scores(members: Chain, z: Float[Array, "n d"], condition: Float[Array, "n p"]) -> Float[Array, " n"]:
    """Return the log density of the mixture of members."""
    of_member = lambda weights: weights.within(members.layout).log_densities(z, condition).sum(1)
    parts = _each(of_member, members, len(z))
    return logsumexp(parts, axis=0) - np.log(len(parts))


def _each(function: Callable, members: Chain, rows: int) -> Any:
    """Return a function of every member: of all at once for few rows, otherwise one after the other."""
    each = jax.vmap(function) if rows < ROWS_PER_BLOCK[-1] else partial(jax.lax.map, function)
    return each(members.within(None))


@jax.jit
def _cut(pool: Pool, condition: Float[Array, "n p"]) -> tuple[Array, Array, Array | None]:
    """Return points and levels of the pool's law without its atom, in model units, and the atom's chance."""
    law = pool.single(condition)
    family: Any = law.family
    return *family.params(law.outputs).law(family.cells), law.chance


def _in_data(scaling: Scaling, points: Float[AnyArray, "n m"]) -> Float[AnyArray, "n m"]:
    """Return values of the single target in data units."""
    return scaling.to_data(points.reshape(-1, 1)).reshape(points.shape)


@jax.jit
def _moments(
    pool: Pool, scaling: Scaling, condition: Float[Array, "n p"]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return mean and deviation of each row, and those without the outer mass."""
    points, levels, _ = _cut(pool, condition)
    law = Distributions.of_levels(_in_data(scaling, points), levels)
    return law.moments(), law.inner_moments()


def uniform_levels(rng: np.random.Generator, count: int, dim: int) -> Float[np.ndarray, "n d"]:
    """Return random levels of distribution functions, (count, dim)."""
    return rng.random((dim, count), np.float32).T


class LawDensity(AbstractDensity):
    """A law of the data in model units, such as a mixture of normals, in data units."""

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
        return self.scaling.to_data(drawn_in_blocks(self.law.draws, count, key=key))

    def draw(self, x: Float[AnyArray, " p"] | None = None, *, key: Key[Array, ""]) -> Float[Array, " d"]:
        law, scaling = narrowed((self.law, self.scaling))
        return scaling.to_data(law.sample(1, key=key))[0]

    def given(self, x: np.ndarray) -> AbstractDensity:
        raise TypeError("this density has no condition.")

    def distributions(self, X: np.ndarray | None = None) -> AbstractDistributions:
        raise ValueError("a law has no distribution function; use sample instead.")


class Stack(AbstractDensity):
    """A mixture of densities, ``p = sum_k weights_k p_k``."""

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

    def distributions(self, X: np.ndarray | None = None) -> AbstractDistributions:
        return Distributions.mixture([part.distributions(X) for part in self.parts], self.weights)

    def mean(self, X: np.ndarray | None = None, **options: Any) -> np.ndarray:
        """Return the mean under each condition; ``options`` are those of the parts."""
        means = np.stack([part.mean(X, **options) for part in self.parts])
        return np.einsum("k,knd->nd", self.weights, means)
