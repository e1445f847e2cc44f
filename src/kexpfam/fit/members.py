"""The training of the members of an ensemble of chains.

A member is trained by a compiled program of a few updates, whose shapes depend on the columns but not on the
number of rows; batches and dropout are drawn on the host. Members are trained in threads, and several
processes share them.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from kexpfam import processes
from kexpfam.data.sample import AnyArray
from kexpfam.fit.folds import elsewhere
from kexpfam.fit.loop import averaged, optimiser
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import Chain, Layout
from kexpfam.progress import TimeBudget

__all__ = ["Hyper", "MemberRows", "Rates", "Trainer", "bounded_mean", "epochs", "with_weights"]

# Updates per call of the compiled program, and held-out rows that are scored per call.
UPDATES, SCORED_ROWS = 16, 256
# The recent rise of a score is an exponential moving average over this part of the epochs: one in RECENT.
RECENT = 10


class MemberRows(NamedTuple):
    """The rows in model units, and of each member the rows that it trains on and holds out, its share of the
    learning rate and its weights before training."""

    target: Float[np.ndarray, "n d"]
    condition: Float[np.ndarray, "n p"]
    weight: Float[np.ndarray, " n"] | None
    kept: Int[np.ndarray, "m k"]
    held: Int[np.ndarray, "m h"]
    rates: Float[np.ndarray, " m"]
    chain: Chain
    layout: Layout


class Hyper(NamedTuple):
    """Numbers that are inputs of the compiled program: other values need no other program."""

    decay: Float[AnyArray, ""]
    rkhs_penalty: Float[AnyArray, ""]
    average: Float[AnyArray, ""]


class Rates(NamedTuple):
    """Learning rates and dropout, which fall along half a cosine; rates rise over the first epochs.

    With a time budget they fall at least as fast as the budget is spent. Dropout ends at zero: a law that is
    trained with it is at least as wide as the noise that it adds.
    """

    highest: float
    last_share: float
    warm_up: float
    epochs: int
    dropout: float
    budget: TimeBudget | None = None

    def at(self, epoch: int) -> float:
        """Return the learning rate of an epoch."""
        share = self._cosine(epoch) * min((epoch + 1.0) / self.warm_up, 1.0)
        return self.highest * (self.last_share + (1.0 - self.last_share) * share)

    def threshold(self, epoch: int) -> int:
        """Return the number of random bytes with which a hidden unit is kept in an epoch."""
        return round(256 * (1.0 - self.dropout * self._cosine(epoch)))

    def _cosine(self, epoch: int) -> float:
        done = max(epoch / self.epochs, 0.0 if self.budget is None else min(1.0, self.budget.spent()))
        return 0.5 * (1.0 + np.cos(np.pi * done))


class Batches(NamedTuple):
    """The rows of some updates, random bytes, of which a hidden unit is dropped whose byte is not below the
    threshold, the learning rate, and how many of the updates are made."""

    target: Float[AnyArray, "u b d"]
    condition: Float[AnyArray, "u b p"]
    weight: Float[AnyArray, "u b"] | None
    noise: UInt8[AnyArray, "u layers b w"]
    threshold: Float[AnyArray, ""]
    rate: Float[AnyArray, ""]
    count: Int[AnyArray, ""]


class MemberState(eqx.Module):
    """A member in training: its weights as a vector, their moving average and the optimiser's moments."""

    weights: Float[AnyArray, "*m w"]
    average: Float[AnyArray, "*m w"]
    moments: Any


class MemberEpochs(NamedTuple):
    """A member after some epochs, its averaged weights after each, and the scores of the rows that it holds
    out."""

    member: MemberState
    averages: Float[np.ndarray, "e w"]
    scores: Float[np.ndarray, " e"]


class EnsembleState(eqx.Module):
    """All members, and for each the best weights so far, their held-out score, its recent rise per epoch, the
    epochs since the last rise, and whether the member is still trained."""

    step: Int[AnyArray, ""]
    members: MemberState
    best: Float[AnyArray, "m w"]
    top: Float[AnyArray, " m"]
    rise: Float[AnyArray, " m"]
    stale: Int[AnyArray, " m"]
    active: Bool[AnyArray, " m"]


class EpochHealth(NamedTuple):
    """The mean held-out log density of the members, and how many of them are still trained."""

    held_out: float
    active: float


class Trainer(NamedTuple):
    """The settings of the training of an ensemble.

    ``parts`` are held out in turn, ``updates`` are made in an epoch. The members of a repeat are trained
    until no held-out score of theirs has risen by ``progress`` in ``patience`` epochs. After ``trial``
    epochs a repeat is dropped if its score would end ``lag`` below the present one of another at its recent
    rise. ``farthest`` is that of ``bounded_mean``.
    """

    parts: int
    batch: int
    updates: int
    cells: int
    rates: Rates
    hyper: Hyper
    patience: int
    progress: float
    trial: int
    lag: float
    farthest: float
    seed: int

    def start(self, chain: Chain) -> EnsembleState:
        """Return the state before the first epoch."""
        members = len(chain.order)
        weights = np.stack([_flat(chain.member(k))[0] for k in range(members)])
        shapes = jax.eval_shape(jax.vmap(optimiser().init), weights)
        moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        top, rise, stale = np.full(members, -np.inf), np.zeros(members), np.zeros(members, int)
        start = MemberState(weights, weights, moments)
        return EnsembleState(np.asarray(0), start, weights, top, rise, stale, np.ones(members, bool))

    def trained(self, rows: MemberRows, state: EnsembleState, length: int, member: int) -> MemberEpochs:
        """Return a member after some epochs, with its weights and its score after each."""
        new, chain = jax.tree.map(lambda leaf: leaf[member], (state.members, rows.chain))
        held, found = rows.held[member], []
        with double_precision():
            for epoch in range(int(state.step), int(state.step) + length):
                for batches in self.batches(rows, epoch, member):
                    new = _updated(rows.layout, chain, self.hyper, new, batches, cells=self.cells)
                found.append((new.average, self.scores(rows, chain, new.average, held)))
        weight = None if rows.weight is None else rows.weight[held]
        score = lambda blocks: bounded_mean(np.concatenate(blocks)[: len(held)], self.farthest, weight)
        averages, scores = zip(*found, strict=True)
        return MemberEpochs(new, np.stack(averages), np.array([score(blocks) for blocks in scores]))

    def batches(self, rows: MemberRows, epoch: int, member: int) -> Iterator[Batches]:
        """Return the batches of an epoch; rows are in random order, all of them before one is repeated."""
        rng, kept = np.random.default_rng((self.seed, member, epoch)), rows.kept[member]
        passes = -(-self.updates * self.batch // len(kept))
        order = np.concatenate([rng.permutation(kept) for _ in range(passes)])
        _, depth, width = rows.chain.biases.shape
        for start in range(0, self.updates, UPDATES):
            count = min(UPDATES, self.updates - start)
            # The last call is padded with rows that are not used.
            places = np.resize(order[start * self.batch : (start + count) * self.batch], UPDATES * self.batch)
            chosen = places.reshape(UPDATES, self.batch)
            yield Batches(
                rows.target[chosen],
                rows.condition[chosen],
                None if rows.weight is None else rows.weight[chosen],
                rng.integers(0, 256, (UPDATES, depth, self.batch, width), np.uint8),
                np.asarray(self.rates.threshold(epoch), np.float32),
                np.asarray(self.rates.at(epoch) * rows.rates[member], np.float32),
                np.asarray(count),
            )

    def scores(
        self, rows: MemberRows, chain: Chain, weights: Float[AnyArray, " w"], some: Int[np.ndarray, " h"]
    ) -> list[Float[Array, " b"]]:
        """Return the log density of some rows under a member with these weights, in blocks.

        They are computed while the caller goes on. Rows at the end of the last block are repeated ones."""
        padded = np.resize(some, -(-len(some) // SCORED_ROWS) * SCORED_ROWS).reshape(-1, SCORED_ROWS)
        points = lambda block: (rows.target[block], rows.condition[block])
        return [_scored(rows.layout, chain, weights, *points(block), cells=self.cells) for block in padded]

    def judged(
        self, state: EnsembleState, averages: Float[np.ndarray, "m w"], own: Float[np.ndarray, " m"]
    ) -> tuple[EnsembleState, EpochHealth]:
        """Return the state after an epoch with these weights and scores; the best weights are kept."""
        score = np.where(state.active, elsewhere(own, self.parts), -np.inf)
        better = score > state.top + self.progress
        best = np.where(better[:, None], averages, state.best)
        top, stale = np.where(better, score, state.top), np.where(better, 0, state.stale + 1)
        risen = np.where(better & np.isfinite(state.top), score - state.top, 0.0)
        rise = state.rise + (risen - state.rise) * min(1.0, RECENT / self.rates.epochs)
        active = self.still_active(state.active, int(state.step), top, rise, stale)
        new = EnsembleState(state.step + 1, state.members, best, top, rise, stale, active)
        return new, EpochHealth(float(np.mean(top)), float(active.sum()))

    def still_active(
        self,
        active: Bool[np.ndarray, " m"],
        epoch: int,
        top: Float[np.ndarray, " m"],
        rise: Float[np.ndarray, " m"],
        stale: Int[np.ndarray, " m"],
    ) -> Bool[np.ndarray, " m"]:
        """Return the members that are trained after this epoch."""
        tops, rises = (part.reshape(-1, self.parts).mean(axis=1) for part in (top, rise))
        ends = tops + rises * (self.rates.epochs - epoch)
        good = ends > (tops.max() - self.lag if epoch >= self.trial else -np.inf)
        stales = stale.reshape(-1, self.parts).min(axis=1)
        return active & np.repeat(good & (stales <= self.patience), self.parts)


def epochs(
    rows: MemberRows, trainer: Trainer, state: EnsembleState, key: Key[Array, ""], length: int
) -> tuple[EnsembleState, EpochHealth]:
    """Return the state after some epochs and their health; each process trains its own members in threads.

    A member is trained for all of the epochs before it is judged after each of them, so that threads do not
    wait for each other. Processes exchange scores and weights. The key is not used: the batches of an epoch
    depend on the trainer's seed, the member and the number of the epoch.
    """
    healths, (rank, count) = [], processes.place()
    own = [k for k in range(rank, len(state.top), count) if state.active[k]]
    members, scores = jax.tree.map(np.array, state.members), np.zeros((len(state.top), length))
    averages = np.repeat(members.average[:, None], length, axis=1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for k, found in zip(own, pool.map(partial(trainer.trained, rows, state, length), own), strict=True):
            jax.tree.map(lambda stack, new, k=k: stack.__setitem__(k, new), members, found.member)
            averages[k], scores[k] = found.averages, found.scores
    members, averages, scores = merged((members, averages, scores))
    for epoch in range(length):
        state, health = trainer.judged(state, averages[:, epoch], scores[:, epoch])
        healths.append(health)
        if not np.any(state.active):
            break
    state = eqx.tree_at(lambda state: state.members, state, members)
    return state, jax.tree.map(lambda *series: np.stack(series), *healths)


def merged(members: Any) -> Any:
    """Return a tree with an axis of members, each from the process that trains it."""
    if processes.place().size == 1:
        return members
    leaves, structure = jax.tree.flatten(jax.tree.map(np.array, members))
    count, places = processes.place().size, np.arange(len(leaves[0]))
    mine = places % count == processes.place().rank
    contents = processes.gathered(lambda: b"".join(leaf[mine].tobytes() for leaf in leaves))
    for rank, content in enumerate(contents):
        theirs, start = places % count == rank, 0
        for leaf in leaves:
            part = np.frombuffer(content, leaf.dtype, leaf[theirs].size, start)
            leaf[theirs] = part.reshape(leaf[theirs].shape)
            start += part.nbytes
    return jax.tree.unflatten(structure, leaves)


def bounded_mean(
    scores: Float[np.ndarray, " h"], farthest: float, weights: Float[np.ndarray, " h"] | None = None
) -> float:
    """Return the mean of scores, none of them counted as further than ``farthest`` below the median."""
    return float(np.average(np.maximum(scores, np.median(scores) - farthest), weights=weights))


def with_weights(chain: Chain, weights: Float[AnyArray, "m w"]) -> Chain:
    """Return stacked members with these weights."""
    own = [_flat(chain.member(k))[1](weights[k]) for k in range(len(weights))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *own).within(chain.layout)


def _flat(chain: Chain) -> tuple[Float[Array, " w"], Callable[[Float[Array, " w"]], Chain]]:
    """Return the weights of a member as a vector, and the function that gives the member back.

    One vector has far fewer operations to compile than the tree.
    """
    fixed: Any = {"knots": chain.knots, "sees": chain.sees}
    own = dataclasses.replace(chain, layout=None, knots=None, sees=None)
    weights, rest = eqx.partition(own, eqx.is_inexact_array)
    vector, restored = ravel_pytree(weights)
    return vector, lambda new: dataclasses.replace(eqx.combine(restored(new), rest), **fixed)


@partial(jax.jit, static_argnames="cells")
def _updated(
    layout: Layout, chain: Chain, hyper: Hyper, member: MemberState, batches: Batches, *, cells: int
) -> MemberState:
    """Return a member after the updates of AdamW on these batches."""
    restored = _flat(chain)[1]

    def update(i: Int[Array, ""], member: MemberState) -> MemberState:
        batch = jax.tree.map(lambda part: part[i], batches[:4])
        whole = lambda weights: restored(weights).within(layout)
        cost = lambda weights: _cost(whole(weights), hyper, batches.threshold, *batch, cells=cells)
        direction, moments = optimiser().update(jax.grad(cost)(member.weights), member.moments)
        weights = member.weights - batches.rate * (direction + hyper.decay * member.weights)
        return MemberState(weights, averaged(member.average, weights, hyper.average), moments)

    return jax.lax.fori_loop(0, batches.count, update, member)


def _cost(
    chain: Chain,
    hyper: Hyper,
    threshold: Float[Array, ""],
    target: Float[Array, "b d"],
    condition: Float[Array, "b p"],
    weight: Float[Array, " b"] | None,
    noise: UInt8[Array, "layers b w"],
    *,
    cells: int,
) -> Float[Array, ""]:
    """Return the penalised negative log likelihood of a batch, with dropout."""
    dropout = lambda h, layer: h * ((noise[layer] < threshold) * (256.0 / threshold)).astype(h.dtype)
    scores = jnp.sum(chain.log_densities(target, condition, cells=cells, dropout=dropout), axis=1)
    mean = jnp.mean(scores if weight is None else weight * scores)
    return 0.5 * hyper.rkhs_penalty * chain.penalty() - mean


@partial(jax.jit, static_argnames="cells")
def _scored(
    layout: Layout,
    chain: Chain,
    weights: Float[Array, " w"],
    target: Float[Array, "n d"],
    condition: Float[Array, "n p"],
    *,
    cells: int,
) -> Float[Array, " n"]:
    """Return the log density of rows under a member with these weights."""
    member = _flat(chain)[1](weights).within(layout)
    return jnp.sum(member.log_densities(target, condition, cells=cells), axis=1)
