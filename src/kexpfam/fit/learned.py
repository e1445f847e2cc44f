"""Ensembles of chains, trained by minibatch likelihood and early stopping on held-out rows.

Members differ in their random weights, in the order of their columns and in the rows that they hold out. A
member is stopped by the rows that the others hold out; its own give the held-out log density of rows.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key
from scipy.optimize import minimize_scalar

from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.fit.loop import run
from kexpfam.fit.members import Hyper, MemberRows, Rates, Trainer, bounded_mean, epochs, with_weights
from kexpfam.fit.problem import Checkpoint, Status
from kexpfam.fit.trees import Boosting
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.chain import Chain, Layout, piecewise_knots
from kexpfam.model.ensemble import Pool
from kexpfam.model.families import FAMILIES, AbstractTilted
from kexpfam.model.measures import logsumexp
from kexpfam.progress import Listener, TimeBudget
from kexpfam.settings import SettingsRecord, check_at_least

__all__ = ["EFFORTS", "Ensemble", "Learned", "learn", "tilted_columns"]

# Cells per bump while training; bumps beyond the least are a multiple of EVEN_BUMPS, as blocks of cells are.
CELLS_PER_BUMP, EVEN_BUMPS = 4, 8
# Held-out rows that are scored at a time after the training.
JUDGED_ROWS = 2048
# The learning rate of members with encoded inputs, as a share of that of the others.
ENCODED_RATE = 0.5
# With more targets than the first number and at most the second number of rows for each, a tilt has fewer
# bumps.
FEW_TARGETS, FEW_ROWS = 6, 100
# The rows for which ``lag`` is meant.
LAG_ROWS = 1_000
# The parts of a view of the inputs.
VIEWS = {"plain", "encoded", "trees"}
# Epochs between two checks of the checkpoint and the stop rule.
CHUNK = 5
# The range of a pool's power, the rows that choose it, those that tell its slope, and the rows at which its
# logarithm is half.
POWERS, POWER_ROWS, SLOPE_ROWS, SHRINKING_ROWS = (0.5, 2.0), 2_000, 500, 400


class Learned(SettingsRecord):
    """Settings of the training of an ensemble of chains.

    Parameters
    ----------
    folds : int
        Parts of the rows that are held out in turn.
    repeats : int
        Members per part.
    rows : int
        With many rows fewer parts are held out: about ``rows / n``, at least 2.
    held_out : float
        The share of the rows in one part.
    shuffled : bool
        Whether every member has a random order of the columns.
    width : int
        Hidden units per layer for a single target.
    units : int
        Hidden units per layer and target for more targets; all together at least twice the width.
    depth : int
        Hidden layers.
    views : tuple of str
        The inputs of the repeats, one after the other, from the first again if there are more repeats:
        "plain" inputs, "encoded" ones (with a piecewise-linear encoding), "trees" (with predictions by
        boosted trees), or "encoded+trees". Repeats with trees are left out where there are none, as in joint
        densities. Held-out rows decide which of the others stay.
    pieces : int
        The largest number of pieces of the encoding.
    rows_per_piece : int
        The least number of rows in a piece.
    boosting : Boosting
        Settings of the trees.
    steps : int
        Maximal number of updates for ten targets and more, up to 2.5 times as many for fewer. The schedule
        of rates ends there, or after ``epochs`` if that is sooner.
    passes : int
        For a single target the updates are at least so many passes over the rows, if these are at most four
        times the updates above.
    epochs : int
        Maximal number of passes over the rows.
    patience : int
        Maximal number of passes without a better held-out score: twice as many for a single target, half as
        many for five targets and more.
    progress : float
        The smallest rise of the held-out score (nats) that counts as better.
    trial : float
        After this share of the passes repeats are compared. The held-out score of each is extrapolated to
        the end by its recent rise.
    lag : float
        A repeat is dropped if it would end so far (nats) below the present score of another. With fewer than
        a thousand rows the lag is larger in proportion: scores are less certain, and training is cheap.
    gain : float
        After the training a repeat is dropped if the held-out score falls by less than this (nats) without
        it.
    farthest : float
        Log densities are counted as at most this far (nats) below the median of the held-out rows.
    batch : int
        The largest number of rows per update.
    least_batch : int
        The least number of rows per update.
    batches : int
        Updates per epoch, within these limits.
    rate : float
        Highest learning rate of AdamW. A network wider than twice ``width`` has a smaller rate in proportion.
    last_rate : float
        The share of the rate to which it falls along half a cosine.
    warm_up : float
        Epochs over which the rate rises first.
    decay : float
        Weight decay.
    rkhs_penalty : float
        The weight of ``|c|^2 / 2`` for the weights of the tilt's coefficients.
    dropout : float
        The share of hidden units that are dropped in the first updates, for five targets and more; for
        fewer it is down to two fifths of this. It falls to zero along half a cosine.
    average : float
        The share of the old weights in the exponential moving average.
    bumps : int
        The least number of bumps of a tilt; three fifths of it for more than six targets with at most a
        hundred rows each.
    rows_per_bump : int
        Rows for one bump more.
    most_bumps : int
        The largest number of bumps for one or two targets; for more targets it is smaller.
    cells : int
        The least number of cells of the residual while training; there are four per bump.
    """

    folds: int = 5
    repeats: int = 3
    rows: int = 20_000
    held_out: float = 0.15
    shuffled: bool = True
    width: int = 64
    depth: int = 2
    units: int = 12
    views: tuple[str, ...] = ("plain", "encoded", "encoded+trees")
    boosting: Boosting = Boosting()
    pieces: int = 16
    rows_per_piece: int = 50
    steps: int = 2_000
    passes: int = 90
    epochs: int = 400
    patience: int = 20
    progress: float = 1e-4
    trial: float = 0.25
    lag: float = 0.1
    gain: float = 0.01
    farthest: float = 20.0
    batch: int = 256
    least_batch: int = 32
    batches: int = 16
    rate: float = 2e-2
    last_rate: float = 0.02
    warm_up: float = 5.0
    decay: float = 1e-4
    rkhs_penalty: float = 2e-3
    dropout: float = 0.05
    average: float = 0.95
    bumps: int = 20
    rows_per_bump: int = 150
    most_bumps: int = 64
    cells: int = 48

    def __check_init__(self) -> None:
        counts = ("folds", "repeats", "rows", "width", "depth", "units", "steps", "epochs", "patience")
        check_at_least(self, 1, *counts, "batch", "least_batch", "batches", "cells", "rows_per_bump")
        check_at_least(self, 1, "warm_up")
        check_at_least(self, 2, "bumps", "most_bumps")
        check_at_least(self, 2, "folds")
        check_at_least(self, 0, "rate", "decay", "rkhs_penalty", "dropout", "average", "last_rate")
        parts = {part for view in self.views for part in view.split("+")}
        if not self.views or not parts <= VIEWS:
            raise ValueError(f"views must be made of {sorted(VIEWS)}, joined by +, got {self.views!r}.")
        if not 0.0 < self.held_out * self.folds <= 1.0:
            raise ValueError(
                f"the held-out parts must not overlap: got held_out={self.held_out} and folds={self.folds}."
            )

    def continued(self, repeats: int) -> "Learned":
        """Return the settings of training that goes on from fitted members: fewer epochs, a smaller rate."""
        epochs, patience = max(10, self.epochs // 10), max(3, self.patience // 5)
        changes: Any = {"epochs": epochs, "patience": patience, "rate": 0.1 * self.rate, "warm_up": 1.0}
        return dataclasses.replace(self, repeats=repeats, views=("plain",), **changes)

    def parts(self, rows: int) -> int:
        """Return the number of parts that are held out in turn."""
        return min(self.folds, max(2, round(self.rows / rows)))

    def resolution(self, rows: int, targets: int) -> int:
        """Return the number of bumps of a tilt for so many rows and targets with tilts."""
        most = min(self.most_bumps, 2 * self.most_bumps // max(targets, 1))
        few = targets > FEW_TARGETS and rows <= FEW_ROWS * targets
        least = round(0.6 * self.bumps) if few else self.bumps
        return max(least, min(most, rows // self.rows_per_bump) // EVEN_BUMPS * EVEN_BUMPS)

    def updates(self, targets: int, each: int) -> int:
        """Return the maximal number of updates for so many targets; a pass over the rows has ``each``."""
        most = round(self.steps * min(2.5, max(1.0, 10.0 / targets)))
        return most if targets > 1 else max(most, min(4 * most, self.passes * each))

    def patient(self, targets: int) -> int:
        """Return the epochs without a better held-out score after which training ends."""
        if targets == 1:
            return 2 * self.patience
        return self.patience if targets < 5 else -(-self.patience // 2)

    def dropped(self, targets: int) -> float:
        """Return the share of hidden units that are dropped for so many targets."""
        return self.dropout * min(1.0, max(0.4, targets / 5))

    def hidden(self, targets: int) -> int:
        """Return the hidden units per layer for so many targets."""
        return self.width if targets == 1 else max(2 * self.width, self.units * targets)

    def repeated_views(self, *, trees: bool) -> tuple[str, ...]:
        """Return the view of each repeat, with or without trees."""
        every = [self.views[k % len(self.views)] for k in range(self.repeats)]
        return tuple(view for view in every if trees or "trees" not in view)

    def knots(
        self, inputs: Float[np.ndarray, "n a"], views: tuple[str, ...], parts: int
    ) -> Float[np.ndarray, "m a k"] | None:
        """Return the knots of each member's encoding; equal ones encode nothing."""
        pieces = min(self.pieces, len(inputs) // self.rows_per_piece)
        encoded = np.repeat(["encoded" in view for view in views], parts)
        if pieces < 2 or not encoded.any():
            return None
        return encoded[:, None, None] * piecewise_knots(inputs, pieces)

    def batch_size(self, rows: int) -> int:
        """Return the rows per update, a power of two: tables of similar size share compiled programs."""
        wanted = min(self.batch, max(self.least_batch, rows // self.batches))
        return 1 << round(np.log2(wanted))

    def trainer(self, parts: int, rows: int, targets: int, cells: int, seed: int) -> Trainer:
        """Return the trainer of members that have so many rows and targets; a wide network has a smaller
        rate."""
        batch = self.batch_size(rows)
        updates = max(1, rows // batch)
        epochs = min(self.epochs, -(-self.updates(targets, updates) // updates))
        rate = self.rate * min(1.0, 2.0 * self.width / self.hidden(targets))
        numbers = self.decay, self.rkhs_penalty, self.average
        hyper = Hyper(*(np.asarray(number, np.float32) for number in numbers))
        return Trainer(
            parts,
            batch,
            updates,
            cells,
            Rates(rate, self.last_rate, self.warm_up, epochs, self.dropped(targets)),
            hyper,
            self.patient(targets),
            self.progress,
            round(self.trial * epochs),
            self.lag * max(1.0, LAG_ROWS / rows),
            self.farthest,
            seed,
        )


# Settings by effort. Twice as many members take about twice the time.
EFFORTS = {
    "fast": Learned(folds=2, repeats=2, epochs=200, steps=1_000, passes=0, patience=8),
    "default": Learned(),
    "best": Learned(folds=6, repeats=6, rows=60_000, patience=40, steps=8_000, epochs=800),
}


class Ensemble(NamedTuple):
    """Stacked members and how they were found.

    ``held_out`` is the log density of each row under the members that held it out, NaN where none did;
    ``power`` is that of their pool.
    """

    chain: Chain
    power: float
    held_out: np.ndarray
    status: Status
    trace: dict[str, np.ndarray]


def learn(
    sample: Sample,
    settings: Learned,
    scaling: Scaling | None = None,
    *,
    key: Key[Array, ""],
    held: Int[np.ndarray, "parts h"] | None = None,
    trees: int = 0,
    start: Chain | None = None,
    report: Listener | None = None,
    checkpoint: Checkpoint | None = None,
    budget: TimeBudget | None = None,
) -> Ensemble:
    """Return an ensemble learned from a sample in model units.

    ``scaling`` is that of the targets, with their kinds; without it they are real. ``held`` are the parts of
    rows that are held out in turn; without it they are drawn at random. The last ``trees`` conditions are
    predictions by trees. ``start`` are the members that training starts from; without it their weights are
    random.
    """
    rows, dim = sample.target.shape
    seed_key, run_key = jr.split(key)
    seed = seed_from(seed_key)
    views = settings.repeated_views(trees=trees > 0)
    held, kept, orders = _dealt(rows, dim, settings, held, len(views), np.random.default_rng(seed))
    parts = len(held) // len(views)
    bumps = settings.resolution(rows, dim if scaling is None else len(tilted_columns(scaling)))
    layout = Layout.real(dim, bumps=bumps) if scaling is None else Layout.of(scaling, bumps=bumps)
    shape = {"width": settings.hidden(dim), "depth": settings.depth, "seed": seed}
    target, condition = (np.asarray(part) for part in (sample.target, sample.condition))
    if start is None:
        inputs = np.concatenate([condition, layout.encoding(target)], axis=1)
        knots, sees = settings.knots(inputs, views, parts), _seen(condition.shape[1], trees, views, parts)
        start = Chain.draw(condition.shape[1], orders, layout, z=target, knots=knots, sees=sees, **shape)
    chain, layout, knots = start, start.columns, start.knots
    cells = max(settings.cells, CELLS_PER_BUMP * bumps)
    trainer = settings.trainer(parts, kept.shape[1], dim, cells, seed_from(run_key))
    trainer = trainer._replace(rates=trainer.rates._replace(budget=budget))
    weight = None if sample.weight is None else np.asarray(sample.weight / np.mean(sample.weight), np.float32)
    rates = (
        np.ones(len(held)) if knots is None else np.where(np.ptp(knots, axis=(1, 2)) > 0.0, ENCODED_RATE, 1.0)
    )
    target, condition = target.astype(np.float32), condition.astype(np.float32)
    result = run(
        MemberRows(target, condition, weight, kept, held, rates, chain.within(None), layout),
        trainer,
        trainer.start(chain),
        key=run_key,
        compute=epochs,
        steps=trainer.rates.epochs,
        chunk=CHUNK,
        stage="learning",
        stop=lambda state: not np.any(state.active),
        report=report,
        checkpoint=checkpoint,
    )
    best = with_weights(chain, result.state.best)
    chosen = better_repeats(best, sample, held, parts, settings)
    best, held = best.member(chosen), held[chosen]
    power = best_power(best, sample, held, parts, settings)
    scores = held_out_scores(best, sample, held, parts, power=power)
    return Ensemble(best, power, scores, result.status, result.trace)


def tilted_columns(scaling: Scaling) -> list[int]:
    """Return the targets whose laws have bumps; labels and angles have none."""
    tilted = [issubclass(FAMILIES[kind.others.family], AbstractTilted) for kind in scaling.kinds]
    return np.flatnonzero(tilted).tolist()


def _dealt(
    rows: int,
    dim: int,
    settings: Learned,
    held: Int[np.ndarray, "parts h"] | None,
    repeats: int,
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
    held, kept = np.tile(held, (repeats, 1)), np.tile(kept, (repeats, 1))
    orders = [rng.permutation(dim) if settings.shuffled else np.arange(dim) for _ in held]
    return held, kept, np.stack(orders)


def _seen(inputs: int, trees: int, views: tuple[str, ...], parts: int) -> Float[np.ndarray, "m p"] | None:
    """Return which inputs each member uses, as zeros and ones; the last ``trees`` are those of trees."""
    if trees == 0:
        return None
    seen = np.ones((len(views), inputs))
    seen[["trees" not in view for view in views], -trees:] = 0.0
    return seen.repeat(parts, axis=0)


def better_repeats(
    chain: Chain, sample: Sample, held: Int[np.ndarray, "m h"], parts: int, settings: Learned
) -> Int[np.ndarray, " k"]:
    """Return the members of the repeats that are left when those without which held-out rows lose less than
    ``settings.gain`` (nats) are left out, one at a time."""
    repeats = np.arange(len(held)).reshape(-1, parts)
    score = lambda some: mean_held_out(
        chain, sample, held, parts, settings, np.isin(np.arange(len(repeats)), some) / len(some)
    )

    chosen = list(range(len(repeats)))
    while len(chosen) > 1:
        fewer = [[k for k in chosen if k != out] for out in chosen]
        scores = [score(some) for some in fewer]
        if max(scores) < score(chosen) - settings.gain:
            break
        chosen = fewer[int(np.argmax(scores))]
    return repeats[chosen].ravel()


def best_power(
    chain: Chain, sample: Sample, held: Int[np.ndarray, "m h"], parts: int, settings: Learned
) -> float:
    """Return the power of the pool of all members, as held-out rows tell it.

    A held-out row is scored by one member per repeat. The more members a pool has, the more accurate is its
    location, and the higher is the best power T. The reciprocal of T(r) is linear in 1 / r, like the variance
    of a mean of r members, so that it is known for all members from those for one and for all repeats. With
    few rows the logarithm of the power is smaller.
    """
    if not Pool.suits(chain.columns):
        return 1.0
    repeats = len(held) // parts

    def reciprocal(pools: Float[np.ndarray, "p r"], rows: int) -> float:
        some = held[:, : -(-rows // parts)]
        score = lambda shares, power: mean_held_out(chain, sample, some, parts, settings, shares, power)
        loss = lambda power: -sum(score(shares, power) for shares in pools)
        return 1.0 / minimize_scalar(loss, bounds=POWERS, method="bounded", options={"xatol": 0.02}).x

    pool = np.full((1, repeats), 1.0 / repeats)
    found = reciprocal(pool, POWER_ROWS)
    if repeats > 1:
        rise = reciprocal(np.eye(repeats), SLOPE_ROWS) - reciprocal(pool, SLOPE_ROWS)
        found -= rise / (1.0 - 1.0 / repeats) * (1.0 / repeats - 1.0 / len(held))
    rows = min(POWER_ROWS, held[:parts].size)
    return float(np.clip(1.0 / found, *POWERS) ** (rows / (rows + SHRINKING_ROWS)))


def mean_held_out(
    chain: Chain,
    sample: Sample,
    held: Int[np.ndarray, "m h"],
    parts: int,
    settings: Learned,
    shares: Float[np.ndarray, " r"] | None = None,
    power: float = 1.0,
) -> float:
    """Return the mean of the held-out scores, none of them counted as too far below the others."""
    seen = np.unique(held)
    weight = None if sample.weight is None else np.asarray(sample.weight)[seen]
    scores = held_out_scores(chain, sample, held, parts, shares, power)
    return bounded_mean(scores[seen], settings.farthest, weight)


def held_out_scores(
    chain: Chain,
    sample: Sample,
    held: Int[np.ndarray, "m h"],
    parts: int,
    shares: Float[np.ndarray, " r"] | None = None,
    power: float = 1.0,
) -> Float[np.ndarray, " n"]:
    """Return the log density of each row under the members that held it out, one per repeat with these
    shares, a pool to this power; NaN where none did."""
    found, repeats = np.full(len(sample), np.nan), len(held) // parts
    shares = np.full(repeats, 1.0 / repeats) if shares is None else shares
    for k, rows in enumerate(held[:parts]):
        own, part = chain.member(np.arange(k, len(held), parts)), sample.rows(rows)
        z, x = np.asarray(part.target, float), np.asarray(part.condition, float)
        if Pool.suits(chain.columns):
            found[rows] = Pool(own, power * shares).log_densities(z, x)[:, 0]
        else:
            found[rows] = mixture_scores(own, shares, z, x)
    return found


def mixture_scores(
    members: Chain, shares: Float[np.ndarray, " m"], z: Float[np.ndarray, "n d"], x: Float[np.ndarray, "n p"]
) -> Float[np.ndarray, " n"]:
    """Return the log density of rows under the mixture of members with these shares."""
    scores = np.full((len(shares), len(z)), -np.inf)
    for k in np.flatnonzero(shares):
        member = members.member(k)
        for start in range(0, len(z), JUDGED_ROWS):
            rows = slice(start, start + JUDGED_ROWS)
            scores[k, rows] = member.log_densities(z[rows], x[rows]).sum(1) + np.log(shares[k])
    return logsumexp(scores, axis=0)
