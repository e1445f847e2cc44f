"""How chains are learned: minibatch likelihood, every member stopped when rows that the others hold out say so.

Members differ in their random weights, in the order of their columns and in the rows that are held out, so that together they
also tell how well rows are predicted that were not trained on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.fit.folds import elsewhere
from kexpfam.fit.loop import averaged, each, optimiser, run, scan, stepped
from kexpfam.fit.polish import Polish, polished
from kexpfam.fit.problem import Checkpoint, Status
from kexpfam.fit.team import epochs, own_members
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.chain import AbstractChain, Chain, keep_all
from kexpfam.model.mixed import MixedChain, Wiring
from kexpfam.progress import Listener
from kexpfam.settings import SettingsRecord, check_at_least

__all__ = ["EFFORTS", "Ensemble", "Learned", "bounded_mean", "learn"]

# The rate falls to this share of itself along half a cosine.
LAST_RATE = 0.02
# Epochs over which it rises first.
WARM_UP = 5.0
# A held-out score must rise by this much (nats) to count as better.
PROGRESS = 1e-4
# Nats below the median beyond which it does not matter how far a row is off.
FARTHEST = 20.0
SMALLEST_BATCH, BATCHES_PER_EPOCH = 32, 16
# Held-out rows that are scored at a time.
JUDGED_ROWS = 2048
# Cells per bump while training; and what bumps beyond the least are a multiple of, so that their cells come in whole blocks.
CELLS_PER_BUMP, EVEN_BUMPS = 4, 8
# Epochs between two looks at the clock, the checkpoint and the stop rule.
CHUNK = 5


class Learned(SettingsRecord):
    """How learned bases are trained: an ensemble of chains.

    Parameters
    ----------
    folds, repeats : int
        Parts of the rows that are held out, one after the other, and members that share one.
    rows : int
        With more rows than this share of ``folds``, fewer parts are held out: at least 2, about ``rows / n``.
    held_out : float
        The share of the rows in one part.
    shuffled : bool
        Whether every member takes the targets in a random order of its own.
    width, depth : int
        Hidden units per layer for a single target, and layers; with more targets there are up to ``units`` per target, but
        never fewer than twice the width.
    units : int
        See above.
    steps : int
        Updates, at most, for ten targets and more, and up to 2.5 times as many for fewer, where each costs less; the schedule
        of rates ends there, or after ``epochs`` if that is sooner.
    epochs, patience : int
        Passes over the rows, at most, and passes without a better held-out score.
    batch : int
        Rows per update, at most.
    rate, decay : float
        Of AdamW; a network wider than twice ``width`` takes a smaller rate in proportion.
    rkhs_penalty : float
        The weight of ``|c|^2 / 2`` for the weights of the tilt's coefficients.
    dropout : float
        The share of hidden units that are dropped in an update, for five targets and more; for fewer, which have fewer weights
        to hold back, it falls to two fifths of this.
    average : float
        The share of the old in the exponential moving average of the weights.
    bumps, rows_per_bump, most_bumps : int
        Bumps of a tilt, at least, and how many rows speak for one more: what is finer than rows can show is noise. The most are
        for one or two targets; for more there are fewer, because each costs more.
    cells : int
        Cells of the residual while training, at least; there are four to a bump.
    polish : tuple of float
        Penalties, falling, at which the weights of the tilts are found once more as a convex problem; held-out rows say where
        to stop, or to leave the weights as they are. Empty: they are left.
    polished_rows : int
        Rows times targets, at most, for which that is tried.
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
    batch: int = 256
    rate: float = 1e-2
    decay: float = 1e-4
    rkhs_penalty: float = 2e-3
    dropout: float = 0.05
    average: float = 0.95
    bumps: int = 20
    rows_per_bump: int = 150
    most_bumps: int = 64
    cells: int = 160
    polish: tuple[float, ...] = (0.1, 0.01, 1e-3, 1e-4)
    polished_rows: int = 1_000

    def __check_init__(self) -> None:
        counts = (
            "folds",
            "repeats",
            "rows",
            "width",
            "depth",
            "units",
            "steps",
            "epochs",
            "patience",
            "batch",
            "cells",
        )
        check_at_least(self, 1, *counts, "rows_per_bump")
        check_at_least(self, 2, "bumps", "most_bumps")
        check_at_least(self, 2, "folds")
        check_at_least(self, 0, "rate", "decay", "rkhs_penalty", "dropout", "average")
        if any(low <= 0.0 for low in self.polish):
            raise ValueError(f"polish must be positive penalties, got {self.polish!r}.")
        if not 0.0 < self.held_out * self.folds <= 1.0:
            raise ValueError(
                f"the held-out parts must not overlap: got held_out={self.held_out} and folds={self.folds}."
            )

    def parts(self, rows: int) -> int:
        """Return how many parts of so many rows are held out in turn."""
        return min(self.folds, max(2, round(self.rows / rows)))

    def resolution(self, rows: int, targets: int) -> int:
        """Return the bumps of a tilt for so many rows and targets."""
        most = min(self.most_bumps, 2 * self.most_bumps // targets)
        return max(self.bumps, min(most, rows // self.rows_per_bump) // EVEN_BUMPS * EVEN_BUMPS)

    def updates(self, targets: int) -> int:
        """Return the updates, at most, for so many targets."""
        return round(self.steps * min(2.5, max(1.0, 10.0 / targets)))

    def dropped(self, targets: int) -> float:
        """Return the share of hidden units that are dropped for so many targets."""
        return self.dropout * min(1.0, max(0.4, targets / 5))

    def hidden(self, targets: int) -> int:
        """Return the hidden units per layer for so many targets."""
        return self.width if targets == 1 else max(2 * self.width, self.units * targets)


# What a user's wish for speed or quality means. Members are independent, so that twice as many cost about twice the time.
EFFORTS = {
    "fast": Learned(folds=2, repeats=1, epochs=200, patience=10, polish=()),
    "default": Learned(),
    "best": Learned(folds=6, repeats=4, rows=60_000, patience=50, steps=12_000, epochs=800),
}


class Ensemble(NamedTuple):
    """Stacked members, the log density of each row under those that did not see it (NaN where all did), and how it ended."""

    chain: AbstractChain
    held_out: np.ndarray
    status: Status
    trace: dict[str, np.ndarray]
    polish: Polish | None


class Task(eqx.Module):
    """The rows, which of them each member trains on and is stopped by, and which members are this process's own.

    These are the first ``owned`` of ``own``.
    """

    target: Float[AnyArray, "n d"]
    condition: Float[AnyArray, "n p"]
    kept: Int[AnyArray, "m k"]
    held: Int[AnyArray, "m h"]
    own: Int[AnyArray, " m"]
    owned: Int[AnyArray, ""]
    support: Float[AnyArray, "m 2 d"] | None
    weight: Float[AnyArray, " n"] | None = None

    def counts(self, rows: Int[Array, " b"]) -> Float[Array, " b"] | None:
        """Return what some rows count, which is one in the mean over all; None where all count the same."""
        return None if self.weight is None else self.weight[rows]


class Progress(NamedTuple):
    """The mean held-out log density of the members, and how many of them still improve."""

    held_out: Float[Array, ""]
    improving: Float[Array, ""]


class Player(eqx.Module):
    """A member in training: its weights, their moving average and the optimiser's moments."""

    chain: AbstractChain
    average: AbstractChain
    moments: Any


class State(eqx.Module):
    """All members, and for each the best weights so far, their held-out score and the epochs since."""

    step: Int[AnyArray, ""]
    players: Player
    best: AbstractChain
    top: Float[AnyArray, " m"]
    stale: Int[AnyArray, " m"]


class Pace(NamedTuple):
    """Settings that are inputs of the compiled program, so that another value needs no other program.

    The highest rate and the epochs of its schedule; decay, penalty, the share of units that an update keeps and that of the old
    in the average; and the epochs without a better score after which a member has stopped.
    """

    rate: Float[AnyArray, ""]
    epochs: Float[AnyArray, ""]
    decay: Float[AnyArray, ""]
    rkhs_penalty: Float[AnyArray, ""]
    kept: Float[AnyArray, ""]
    average: Float[AnyArray, ""]
    patience: Int[AnyArray, ""]

    @staticmethod
    def of(settings: Learned, targets: int, epochs: int) -> "Pace":
        """Return the pace for so many targets; a wide network takes a smaller rate."""
        rate = settings.rate * min(1.0, 2.0 * settings.width / settings.hidden(targets))
        single = lambda share: np.asarray(share, np.float32)
        return Pace(
            rate=np.asarray(rate),
            epochs=np.asarray(float(epochs)),
            decay=single(settings.decay),
            rkhs_penalty=single(settings.rkhs_penalty),
            kept=single(1.0 - settings.dropped(targets)),
            average=single(settings.average),
            patience=np.asarray(settings.patience),
        )


class Trainer(eqx.Module):
    """One epoch of the members as one step of the loop: they are trained, and judged by the rows that others hold out."""

    parts: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    cells: int = eqx.field(static=True)
    pace: Pace

    def start(self, chain: AbstractChain) -> State:
        """Return the state before the first epoch."""
        members, weights = len(chain.order), eqx.filter(chain, eqx.is_inexact_array)
        shapes = jax.eval_shape(jax.vmap(optimiser().init), weights)
        moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        top, stale = np.full(members, -np.inf, np.float32), np.zeros(members, np.int32)
        return State(np.asarray(0), Player(chain, chain, moments), chain, top, stale)

    def trained(self, task: Task, state: State, key: Key[Array, ""]) -> tuple[Player, Float[Array, " m"]]:
        """Return the task's own members after an epoch, and the score of the rows that each holds out; 0 for the others."""
        rate, keys = self.rate(state.step), jr.split(key, len(task.own))

        def one(
            player: Player, kept: Array, held: Array, support: Array | None, key: Array
        ) -> tuple[Player, Array]:
            new = self.epoch(task, rate, player, kept, support, key)
            return new, bounded_mean(self.scores(task, new.average.within(support), held), task.counts(held))

        return each(one, task.own, task.owned, state.players, task.kept, task.held, task.support, keys)

    def judged(self, state: State, players: Player, own: Float[Array, " m"]) -> tuple[State, Progress]:
        """Return the state after an epoch that gave these players and held-out scores: the best weights so far are kept."""
        score = elsewhere(own, self.parts)
        better = score > state.top + PROGRESS
        keep = lambda new, old: jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        best, stale = jax.tree.map(keep, players.average, state.best), jnp.where(better, 0, state.stale + 1)
        improving = jnp.sum(stale <= self.pace.patience).astype(score.dtype)
        new = State(state.step + 1, players, best, jnp.where(better, score, state.top), stale)
        return new, Progress(jnp.mean(new.top), improving)

    def rate(self, epoch: Int[Array, ""]) -> Float[Array, ""]:
        """Return the learning rate of an epoch."""
        share = (
            0.5
            * (1.0 + jnp.cos(np.pi * epoch / self.pace.epochs))
            * jnp.minimum((epoch + 1.0) / WARM_UP, 1.0)
        )
        return self.pace.rate * (LAST_RATE + (1.0 - LAST_RATE) * share)

    def epoch(
        self,
        task: Task,
        rate: Float[Array, ""],
        player: Player,
        kept: Int[Array, " k"],
        support: Float[Array, "2 d"] | None,
        key: Key[Array, ""],
    ) -> Player:
        """Return a member after one pass over its rows."""
        order_key, drop_key = jr.split(key)
        steps = len(kept) // self.batch
        rows = kept[jr.permutation(order_key, len(kept))[: steps * self.batch]].reshape(steps, self.batch)

        def update(player: Player, drawn: tuple[Array, Array]) -> tuple[Player, None]:
            gradient = eqx.filter_grad(lambda chain: self.cost(chain.within(support), task, *drawn))(
                player.chain
            )
            directions, moments = optimiser().update(gradient, player.moments)
            shrunk = lambda direction, weight: -(direction + self.pace.decay * weight)
            chain = stepped(
                player.chain,
                jax.tree.map(shrunk, directions, eqx.filter(player.chain, eqx.is_inexact_array)),
                rate,
            )
            return Player(chain, averaged(player.average, chain, self.pace.average), moments), None

        return scan(update, player, (rows, jr.split(drop_key, steps)))[0]

    def cost(
        self, chain: AbstractChain, task: Task, rows: Int[Array, " b"], key: Key[Array, ""]
    ) -> Float[Array, ""]:
        """Return the penalised negative log likelihood of some rows, some units dropped."""
        keep = self.pace.kept
        thin = lambda h, layer: (
            h * (jr.bernoulli(jr.fold_in(key, layer), keep, h.shape) / keep).astype(h.dtype)
        )
        penalty = 0.5 * self.pace.rkhs_penalty * chain.penalty()
        scores, counts = self.score(task, chain, rows, thin), task.counts(rows)
        return penalty.astype(jnp.float32) - jnp.mean(scores if counts is None else counts * scores)

    def score(
        self, task: Task, chain: AbstractChain, rows: Int[Array, " b"], thin: Callable = keep_all
    ) -> Float[Array, " b"]:
        """Return the log density of some rows."""
        return jnp.sum(
            chain.log_densities(task.target[rows], task.condition[rows], cells=self.cells, thin=thin), axis=1
        )

    def scores(self, task: Task, chain: AbstractChain, rows: Int[Array, " h"]) -> Float[Array, " h"]:
        """Return the log density of many rows, some at a time: the cells of all of them would be most of a fit's memory."""
        whole = len(rows) // JUDGED_ROWS * JUDGED_ROWS
        if not whole:
            return self.score(task, chain, rows)
        parts = jax.lax.map(
            lambda part: self.score(task, chain, part), rows[:whole].reshape(-1, JUDGED_ROWS)
        ).ravel()
        return jnp.concatenate([parts, self.score(task, chain, rows[whole:])]) if whole < len(rows) else parts


def bounded_mean(
    scores: Float[AnyArray, " h"], counts: Float[AnyArray, " h"] | None = None
) -> Float[Array, ""]:
    """Return the mean of scores, none counted as more than FARTHEST below their median: no single row may end the training."""
    return jnp.average(jnp.maximum(scores, jnp.median(scores) - FARTHEST), weights=counts)


def learn(
    sample: Sample,
    settings: Learned,
    *,
    key: Key[Array, ""],
    support: Float[np.ndarray, "2 d"] | None = None,
    warped: Bool[np.ndarray, " d"] | None = None,
    wiring: Wiring | None = None,
    held: Int[np.ndarray, "k h"] | None = None,
    report: Listener | None = None,
    checkpoint: Checkpoint | None = None,
) -> Ensemble:
    """Return an ensemble learned from a sample in model units; ``support`` are bounds of the targets, in these units too.

    ``warped`` are the targets whose units are like logarithms. A ``wiring`` says of what kinds the targets are, and knows
    their bounds and their tails.
    """
    rows, dim = sample.target.shape
    seed_key, run_key = jr.split(key)
    seed = seed_from(seed_key)
    parts = settings.parts(rows)
    held, kept, orders = _dealt(rows, dim, settings, np.random.default_rng(seed), held)
    parts = len(held) // settings.repeats
    bumps = settings.resolution(rows, dim)
    shape = {"width": settings.hidden(dim), "depth": settings.depth, "seed": seed}
    chain: AbstractChain = (
        Chain.draw(sample.condition.shape[1], orders, **shape, bumps=bumps, warped=warped)
        if wiring is None
        else MixedChain.draw(sample.condition.shape[1], orders, wiring, np.asarray(sample.target), **shape)
    )
    bounds = None if support is None else np.stack([support[:, order] for order in orders]).astype(np.float32)
    batch = min(settings.batch, max(SMALLEST_BATCH, kept.shape[1] // BATCHES_PER_EPOCH), kept.shape[1])
    most = min(settings.epochs, -(-settings.updates(dim) // (kept.shape[1] // batch)))
    cells = settings.cells if wiring is not None else max(settings.cells, CELLS_PER_BUMP * bumps)
    trainer = Trainer(parts, batch, cells, Pace.of(settings, dim, most))
    counts = None if sample.weight is None else np.asarray(sample.weight / np.mean(sample.weight), np.float32)
    target, condition = np.asarray(sample.target, np.float32), np.asarray(sample.condition, np.float32)
    task = Task(target, condition, kept, held, *own_members(len(orders)), bounds, counts)
    enough = lambda state: bool(np.all(np.asarray(state.stale) > settings.patience))
    options = {
        "steps": most,
        "chunk": CHUNK,
        "stage": "learning",
        "stop": enough,
        "report": report,
        "checkpoint": checkpoint,
    }
    result = run(
        jax.tree.map(jnp.asarray, task), trainer, trainer.start(chain), key=run_key, compute=epochs, **options
    )
    best = jax.tree.map(np.asarray, result.state.best).within(bounds)
    polish = None
    if isinstance(best, Chain) and rows * dim <= settings.polished_rows:
        best, polish = polished(best, sample, kept, held, parts, settings.polish, cells)
    return Ensemble(best, held_out_scores(best, sample, held), result.status, result.trace, polish)


def _dealt(
    rows: int, dim: int, settings: Learned, rng: np.random.Generator, held: np.ndarray | None = None
) -> tuple[Int[np.ndarray, "m h"], Int[np.ndarray, "m k"], Int[np.ndarray, "m d"]]:
    """Return for each member the rows it is judged by, the rows it learns from, and its order of the columns."""
    if held is None:
        size, parts = max(1, int(settings.held_out * rows)), settings.parts(rows)
        held = rng.permutation(rows)[: parts * size].reshape(parts, size)
    held = np.tile(held, (settings.repeats, 1))
    kept = np.stack([np.setdiff1d(np.arange(rows), part) for part in held])
    orders = [rng.permutation(dim) if settings.shuffled else np.arange(dim) for _ in held]
    return held, kept, np.stack(orders)


def held_out_scores(chain: AbstractChain, sample: Sample, held: Int[np.ndarray, "m h"]) -> np.ndarray:
    """Return the log density of each row under the members that did not see it; NaN where all did."""
    sums, counts = np.full(len(sample), -np.inf), np.zeros(len(sample))
    for k, mine in enumerate(held):
        member = chain.member(k)
        for start in range(0, len(mine), JUDGED_ROWS):
            rows = mine[start : start + JUDGED_ROWS]
            part = sample.rows(rows)
            sums[rows] = np.logaddexp(
                sums[rows], member.log_densities(part.target, part.condition, cells=member.cells).sum(1)
            )
            counts[rows] += 1.0
    return np.where(counts > 0.0, sums - np.log(np.maximum(counts, 1.0)), np.nan)
