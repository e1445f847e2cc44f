"""Ensembles of chains, trained by minibatch likelihood and early stopping on held-out rows.

Members differ in their random weights, in the order of their columns and in the rows that they hold out. A
member is stopped by the rows that the others hold out; its own give the held-out log density of rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.data.scaling import Scaling
from kexpfam.fit.folds import elsewhere
from kexpfam.fit.loop import averaged, each, optimiser, run, scan, stepped
from kexpfam.fit.members import epochs, own_members
from kexpfam.fit.polish import Polish, polished
from kexpfam.fit.problem import Checkpoint, Status
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.chain import Chain, Layout, keep_all
from kexpfam.model.families import FAMILIES, AbstractTilted
from kexpfam.progress import Listener
from kexpfam.settings import SettingsRecord, check_at_least

__all__ = ["EFFORTS", "Ensemble", "Learned", "bounded_mean", "learn", "tilted_targets"]

# Cells per bump while training; bumps beyond the least are a multiple of EVEN_BUMPS, as blocks of cells are.
CELLS_PER_BUMP, EVEN_BUMPS = 4, 8
# Held-out rows that are scored at a time.
JUDGED_ROWS = 2048
# Epochs between two checks of the checkpoint and the stop rule.
CHUNK = 5


class Learned(SettingsRecord):
    """Settings of the training of an ensemble of chains.

    Parameters
    ----------
    folds, repeats : int
        Parts of the rows that are held out in turn, and members per part.
    rows : int
        With many rows fewer parts are held out: about ``rows / n``, at least 2.
    held_out : float
        The share of the rows in one part.
    shuffled : bool
        Whether every member has a random order of the columns.
    width, depth : int
        Hidden units per layer for a single target, and layers. For more targets there are ``units`` per
        target, but at least twice the width.
    units : int
        See above.
    steps : int
        Maximal number of updates for ten targets and more, up to 2.5 times as many for fewer. The schedule
        of rates ends there, or after ``epochs`` if that is sooner.
    epochs, patience : int
        Maximal number of passes over the rows, and of passes without a better held-out score.
    progress : float
        The smallest rise of the held-out score (nats) that counts as better.
    farthest : float
        Log densities are counted as at most this far (nats) below the median of the held-out rows.
    batch, least_batch, batches : int
        Rows per update, at most and at least, and updates per epoch that are aimed for.
    rate, last_rate, warm_up, decay : float
        Highest learning rate of AdamW, the share to which it falls along half a cosine, the epochs over
        which it rises first, and the weight decay. A network wider than twice ``width`` has a smaller rate
        in proportion.
    rkhs_penalty : float
        The weight of ``|c|^2 / 2`` for the weights of the tilt's coefficients.
    dropout : float
        The share of hidden units that are dropped in an update, for five targets and more; for fewer it
        falls to two fifths of this.
    average : float
        The share of the old weights in the exponential moving average.
    bumps, rows_per_bump, most_bumps : int
        The least number of bumps of a tilt, the rows for one more, and the most for one or two targets; for
        more targets the most is smaller.
    cells : int
        The least number of cells of the residual while training; there are four per bump.
    polish : tuple of float
        Falling penalties of the convex problem that corrects the tilts of columns on the real line; held-out
        rows choose among them. Empty: no correction.
    polish_progress : float
        The smallest rise of the held-out score (nats) that counts as better there.
    polish_steps : int
        Maximal number of iterations per penalty.
    polished_rows : int
        The largest number of rows times targets that are corrected.
    """

    folds: int = 5
    repeats: int = 2
    rows: int = 20_000
    held_out: float = 0.15
    shuffled: bool = True
    width: int = 64
    depth: int = 2
    units: int = 12
    steps: int = 6_000
    epochs: int = 400
    patience: int = 25
    progress: float = 1e-4
    farthest: float = 20.0
    batch: int = 256
    least_batch: int = 32
    batches: int = 16
    rate: float = 1e-2
    last_rate: float = 0.02
    warm_up: float = 5.0
    decay: float = 1e-4
    rkhs_penalty: float = 2e-3
    dropout: float = 0.05
    average: float = 0.95
    bumps: int = 20
    rows_per_bump: int = 150
    most_bumps: int = 64
    cells: int = 160
    polish: tuple[float, ...] = (0.1, 0.01, 1e-3, 1e-4)
    polish_progress: float = 1e-3
    polish_steps: int = 100
    polished_rows: int = 1_000

    def __check_init__(self) -> None:
        counts = ("folds", "repeats", "rows", "width", "depth", "units", "steps", "epochs", "patience")
        check_at_least(self, 1, *counts, "batch", "least_batch", "batches", "cells", "rows_per_bump")
        check_at_least(self, 1, "warm_up", "polish_steps")
        check_at_least(self, 2, "bumps", "most_bumps")
        check_at_least(self, 2, "folds")
        check_at_least(self, 0, "rate", "decay", "rkhs_penalty", "dropout", "average", "last_rate")
        if any(low <= 0.0 for low in self.polish):
            raise ValueError(f"polish must be positive penalties, got {self.polish!r}.")
        if not 0.0 < self.held_out * self.folds <= 1.0:
            raise ValueError(
                f"the held-out parts must not overlap: got held_out={self.held_out} and folds={self.folds}."
            )

    def continued(self) -> "Learned":
        """Return the settings of training that goes on from fitted members: fewer epochs, a smaller rate."""
        epochs, patience = max(10, self.epochs // 10), max(3, self.patience // 5)
        changes: Any = {"epochs": epochs, "patience": patience, "rate": 0.2 * self.rate, "warm_up": 1.0}
        return dataclasses.replace(self, **changes)

    def parts(self, rows: int) -> int:
        """Return the number of parts that are held out in turn."""
        return min(self.folds, max(2, round(self.rows / rows)))

    def resolution(self, rows: int, targets: int) -> int:
        """Return the number of bumps of a tilt for so many rows and targets with tilts."""
        most = min(self.most_bumps, 2 * self.most_bumps // max(targets, 1))
        return max(self.bumps, min(most, rows // self.rows_per_bump) // EVEN_BUMPS * EVEN_BUMPS)

    def updates(self, targets: int) -> int:
        """Return the maximal number of updates for so many targets."""
        return round(self.steps * min(2.5, max(1.0, 10.0 / targets)))

    def dropped(self, targets: int) -> float:
        """Return the share of hidden units that are dropped for so many targets."""
        return self.dropout * min(1.0, max(0.4, targets / 5))

    def hidden(self, targets: int) -> int:
        """Return the hidden units per layer for so many targets."""
        return self.width if targets == 1 else max(2 * self.width, self.units * targets)


# Settings by effort. Twice as many members take about twice the time.
EFFORTS = {
    "fast": Learned(folds=2, repeats=1, epochs=200, patience=10, polish=()),
    "default": Learned(),
    "best": Learned(folds=6, repeats=4, rows=60_000, patience=50, steps=12_000, epochs=800),
}


class Ensemble(NamedTuple):
    """Stacked members and how they were found.

    ``held_out`` is the log density of each row under the members that held it out, NaN where none did.
    """

    chain: Chain
    held_out: np.ndarray
    status: Status
    trace: dict[str, np.ndarray]
    polish: Polish | None


class MemberRows(eqx.Module):
    """The rows, those that each member trains on and holds out, and the members of this process.

    These are the first ``owned`` of ``own``.
    """

    target: Float[AnyArray, "n d"]
    condition: Float[AnyArray, "n p"]
    kept: Int[AnyArray, "m k"]
    held: Int[AnyArray, "m h"]
    own: Int[AnyArray, " m"]
    owned: Int[AnyArray, ""]
    layout: Layout
    weight: Float[AnyArray, " n"] | None = None

    def weights(self, rows: Int[Array, " b"]) -> Float[Array, " b"] | None:
        """Return the weights of some rows, of mean one over all rows; None where they are equal."""
        return None if self.weight is None else self.weight[rows]


class EpochHealth(NamedTuple):
    """The mean held-out log density of the members, and how many of them still improve."""

    held_out: Float[Array, ""]
    improving: Float[Array, ""]


class MemberState(eqx.Module):
    """A member in training: its weights, their moving average and the optimiser's moments."""

    chain: Chain
    average: Chain
    moments: Any


class EnsembleState(eqx.Module):
    """All members, and for each the best weights so far, their held-out score and the epochs since."""

    step: Int[AnyArray, ""]
    members: MemberState
    best: Chain
    top: Float[AnyArray, " m"]
    stale: Int[AnyArray, " m"]


class Schedule(NamedTuple):
    """Settings that are inputs of the compiled program, so that other values need no other program."""

    rate: Float[AnyArray, ""]
    last_rate: Float[AnyArray, ""]
    warm_up: Float[AnyArray, ""]
    epochs: Float[AnyArray, ""]
    decay: Float[AnyArray, ""]
    rkhs_penalty: Float[AnyArray, ""]
    kept: Float[AnyArray, ""]
    average: Float[AnyArray, ""]
    patience: Int[AnyArray, ""]
    progress: Float[AnyArray, ""]
    farthest: Float[AnyArray, ""]

    @staticmethod
    def of(settings: Learned, targets: int, epochs: int) -> "Schedule":
        """Return the schedule for so many targets; a wide network has a smaller rate."""
        rate = settings.rate * min(1.0, 2.0 * settings.width / settings.hidden(targets))
        single = lambda number: np.asarray(number, np.float32)
        return Schedule(
            rate=np.asarray(rate),
            last_rate=np.asarray(settings.last_rate),
            warm_up=np.asarray(settings.warm_up),
            epochs=np.asarray(float(epochs)),
            decay=single(settings.decay),
            rkhs_penalty=single(settings.rkhs_penalty),
            kept=single(1.0 - settings.dropped(targets)),
            average=single(settings.average),
            patience=np.asarray(settings.patience),
            progress=single(settings.progress),
            farthest=single(settings.farthest),
        )

    def at(self, epoch: Int[Array, ""]) -> Float[Array, ""]:
        """Return the learning rate of an epoch."""
        cosine = 0.5 * (1.0 + jnp.cos(np.pi * epoch / self.epochs))
        share = cosine * jnp.minimum((epoch + 1.0) / self.warm_up, 1.0)
        return self.rate * (self.last_rate + (1.0 - self.last_rate) * share)


class Trainer(eqx.Module):
    """The epochs of the members: each is trained, and scored by the rows that others hold out."""

    parts: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    cells: int = eqx.field(static=True)
    schedule: Schedule

    def start(self, chain: Chain) -> EnsembleState:
        """Return the state before the first epoch."""
        members, weights = len(chain.order), eqx.filter(chain, eqx.is_inexact_array)
        shapes = jax.eval_shape(jax.vmap(optimiser().init), weights)
        moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        top, stale = np.full(members, -np.inf, np.float32), np.zeros(members, np.int32)
        return EnsembleState(np.asarray(0), MemberState(chain, chain, moments), chain, top, stale)

    def trained(
        self, rows: MemberRows, state: EnsembleState, key: Key[Array, ""]
    ) -> tuple[MemberState, Float[Array, " m"]]:
        """Return this process's members after an epoch, and the score of the rows that each holds out."""
        rate, keys = self.schedule.at(state.step), jr.split(key, len(rows.own))

        def one(member: MemberState, kept: Array, held: Array, key: Array) -> tuple[MemberState, Array]:
            new = self.epoch(rows, rate, member, kept, key)
            scores = self.scores(rows, new.average.within(rows.layout), held)
            return new, bounded_mean(scores, self.schedule.farthest, rows.weights(held))

        return each(one, rows.own, rows.owned, state.members, rows.kept, rows.held, keys)

    def judged(
        self, state: EnsembleState, members: MemberState, own: Float[Array, " m"]
    ) -> tuple[EnsembleState, EpochHealth]:
        """Return the state after an epoch with these members and scores; the best weights are kept."""
        score = elsewhere(own, self.parts)
        better = score > state.top + self.schedule.progress
        keep = lambda new, old: jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        best, stale = jax.tree.map(keep, members.average, state.best), jnp.where(better, 0, state.stale + 1)
        improving = jnp.sum(stale <= self.schedule.patience).astype(score.dtype)
        new = EnsembleState(state.step + 1, members, best, jnp.where(better, score, state.top), stale)
        return new, EpochHealth(jnp.mean(new.top), improving)

    def epoch(
        self,
        rows: MemberRows,
        rate: Float[Array, ""],
        member: MemberState,
        kept: Int[Array, " k"],
        key: Key[Array, ""],
    ) -> MemberState:
        """Return a member after one pass over its rows."""
        order_key, drop_key = jr.split(key)
        steps = len(kept) // self.batch
        shuffled = kept[jr.permutation(order_key, len(kept))[: steps * self.batch]]

        def update(member: MemberState, batch: tuple[Array, Array]) -> tuple[MemberState, None]:
            cost = lambda chain: self.cost(chain.within(rows.layout), rows, *batch)
            gradient = eqx.filter_grad(cost)(member.chain)
            directions, moments = optimiser().update(gradient, member.moments)
            decayed = lambda direction, weight: -(direction + self.schedule.decay * weight)
            weights = eqx.filter(member.chain, eqx.is_inexact_array)
            chain = stepped(member.chain, jax.tree.map(decayed, directions, weights), rate)
            return MemberState(chain, averaged(member.average, chain, self.schedule.average), moments), None

        return scan(update, member, (shuffled.reshape(steps, self.batch), jr.split(drop_key, steps)))[0]

    def cost(
        self, chain: Chain, rows: MemberRows, batch: Int[Array, " b"], key: Key[Array, ""]
    ) -> Float[Array, ""]:
        """Return the penalised negative log likelihood of some rows, with dropout."""
        keep = self.schedule.kept
        dropout = lambda h, layer: (
            h * (jr.bernoulli(jr.fold_in(key, layer), keep, h.shape) / keep).astype(h.dtype)
        )
        penalty = 0.5 * self.schedule.rkhs_penalty * chain.penalty()
        scores, weights = self.score(rows, chain, batch, dropout), rows.weights(batch)
        return penalty.astype(jnp.float32) - jnp.mean(scores if weights is None else weights * scores)

    def score(
        self, rows: MemberRows, chain: Chain, some: Int[Array, " b"], dropout: Callable = keep_all
    ) -> Float[Array, " b"]:
        """Return the log density of some rows."""
        target, condition = rows.target[some], rows.condition[some]
        return jnp.sum(chain.log_densities(target, condition, cells=self.cells, dropout=dropout), axis=1)

    def scores(self, rows: MemberRows, chain: Chain, some: Int[Array, " h"]) -> Float[Array, " h"]:
        """Return the log density of many rows, in blocks that bound the memory."""
        whole = len(some) // JUDGED_ROWS * JUDGED_ROWS
        if not whole:
            return self.score(rows, chain, some)
        blocks = some[:whole].reshape(-1, JUDGED_ROWS)
        parts = jax.lax.map(lambda block: self.score(rows, chain, block), blocks).ravel()
        return jnp.concatenate([parts, self.score(rows, chain, some[whole:])]) if whole < len(some) else parts


def bounded_mean(
    scores: Float[AnyArray, " h"],
    farthest: Float[AnyArray, ""] | float,
    weights: Float[AnyArray, " h"] | None = None,
) -> Float[Array, ""]:
    """Return the mean of scores, none of them counted as further than ``farthest`` below the median."""
    return jnp.average(jnp.maximum(scores, jnp.median(scores) - farthest), weights=weights)


def learn(
    sample: Sample,
    settings: Learned,
    scaling: Scaling | None = None,
    *,
    key: Key[Array, ""],
    held: Int[np.ndarray, "parts h"] | None = None,
    start: Chain | None = None,
    report: Listener | None = None,
    checkpoint: Checkpoint | None = None,
) -> Ensemble:
    """Return an ensemble learned from a sample in model units.

    ``scaling`` is that of the targets, with their kinds; without it they are real. ``held`` are the parts of
    rows that are held out in turn; without it they are drawn at random. ``start`` are the members that
    training starts from; without it their weights are random.
    """
    rows, dim = sample.target.shape
    seed_key, run_key = jr.split(key)
    seed = seed_from(seed_key)
    held, kept, orders = _dealt(rows, dim, settings, held, np.random.default_rng(seed))
    parts = len(held) // settings.repeats
    bumps = settings.resolution(rows, dim if scaling is None else tilted_targets(scaling))
    layout = Layout.real(dim, bumps=bumps) if scaling is None else Layout.of(scaling, bumps=bumps)
    shape = {"width": settings.hidden(dim), "depth": settings.depth, "seed": seed}
    target, condition = (np.asarray(part) for part in (sample.target, sample.condition))
    chain = Chain.draw(condition.shape[1], orders, layout, z=target, **shape) if start is None else start
    layout = chain.columns
    size = kept.shape[1]
    batch = min(settings.batch, max(settings.least_batch, size // settings.batches), size)
    most = min(settings.epochs, -(-settings.updates(dim) // (size // batch)))
    cells = max(settings.cells, CELLS_PER_BUMP * bumps)
    trainer = Trainer(parts, batch, cells, Schedule.of(settings, dim, most))
    weight = None if sample.weight is None else np.asarray(sample.weight / np.mean(sample.weight), np.float32)
    target, condition = target.astype(np.float32), condition.astype(np.float32)
    members = MemberRows(target, condition, kept, held, *own_members(len(orders)), layout, weight)
    result = run(
        jax.tree.map(jnp.asarray, members),
        trainer,
        trainer.start(chain.within(None)),
        key=run_key,
        compute=epochs,
        steps=most,
        chunk=CHUNK,
        stage="learning",
        stop=lambda state: bool(np.all(np.asarray(state.stale) > settings.patience)),
        report=report,
        checkpoint=checkpoint,
    )
    best, polish = jax.tree.map(np.asarray, result.state.best).within(layout), None
    if rows * dim <= settings.polished_rows:
        options: Any = {"progress": settings.polish_progress, "steps": settings.polish_steps}
        best, polish = polished(best, sample, kept, held, parts, settings.polish, cells, **options)
    return Ensemble(best, held_out_scores(best, sample, held), result.status, result.trace, polish)


def tilted_targets(scaling: Scaling) -> int:
    """Return the number of targets whose laws have bumps; labels and angles have none."""
    return sum(issubclass(FAMILIES[kind.others.family], AbstractTilted) for kind in scaling.kinds)


def _dealt(
    rows: int,
    dim: int,
    settings: Learned,
    held: Int[np.ndarray, "parts h"] | None,
    rng: np.random.Generator,
) -> tuple[Int[np.ndarray, "m h"], Int[np.ndarray, "m k"], Int[np.ndarray, "m d"]]:
    """Return the rows that each member holds out, those that it trains on, and its order of the columns."""
    if held is None:
        parts, size = settings.parts(rows), max(1, int(settings.held_out * rows))
        order = rng.permutation(rows)
        shifted = [np.roll(order, -size * k) for k in range(parts)]
        held = np.stack([part[:size] for part in shifted])
        kept = np.stack([part[size:] for part in shifted])
    else:
        held = np.asarray(held)
        kept = np.stack([np.setdiff1d(np.arange(rows), part) for part in held])
    held, kept = np.tile(held, (settings.repeats, 1)), np.tile(kept, (settings.repeats, 1))
    orders = [rng.permutation(dim) if settings.shuffled else np.arange(dim) for _ in held]
    return held, kept, np.stack(orders)


def held_out_scores(chain: Chain, sample: Sample, held: Int[np.ndarray, "m h"]) -> np.ndarray:
    """Return the log density of each row under the members that held it out; NaN where none did."""
    sums, counts = np.full(len(sample), -np.inf), np.zeros(len(sample))
    for k, mine in enumerate(held):
        member = chain.member(k)
        for start in range(0, len(mine), JUDGED_ROWS):
            rows = mine[start : start + JUDGED_ROWS]
            part = sample.rows(rows)
            scores = member.log_densities(part.target, part.condition).sum(1)
            sums[rows] = np.logaddexp(sums[rows], scores)
            counts[rows] += 1.0
    return np.where(counts > 0.0, sums - np.log(np.maximum(counts, 1.0)), np.nan)
