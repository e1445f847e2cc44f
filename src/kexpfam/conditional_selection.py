"""Length scales, penalty and base width of a conditional density, by cross-validation inside the training data.

A setting is a point on a geometric lattice. The search walks along its axes (the power transformation of the target, length
scales of condition and target, width of the base), with a path of falling penalties at every point it visits; then it tries
the length scale of each input on its own. Few rows make the best score a matter of luck, so the search does not keep the best
setting but the mean of all it has tried, each with the weight that its score deserves.
"""

from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from threadpoolctl import threadpool_limits

from kexpfam.kernels import KERNELS, median_distance
from kexpfam.measures import AbstractMeasure, tailed_gaussian
from kexpfam.nodes import grid_nodes, importance_nodes
from kexpfam.potentials import FeatureSpace, KernelSpan, spread_rows
from kexpfam.progress import Listener, Report
from kexpfam.sample import Sample, Scaling
from kexpfam.selection import fit_base
from kexpfam.solvers import convex
from kexpfam.solvers.task import Task, distinct_conditions, likelihood

FOLDS, REPEATS = 5, 2
# Settings are ranked on this many rows at most.
MOST_ROWS = 600
MOST_CENTRES = 400
# Centres of the target: this far apart (length scales) and beyond the data (standard deviations), and so many at most.
CENTRE_SPACING, CENTRE_MARGIN, MOST_TARGET_CENTRES = 0.7, 0.5, 100
CENTRE_COUNTS = (6, 9, 14, 20, 30, 45, 68, 100)
# Features of condition and target while ranking; the fit itself keeps more.
CONDITION_FEATURES, TARGET_FEATURES = (24, 48), 10
# More rows support shorter length scales, which take more features to tell apart: one for so many rows.
ROWS_PER_FEATURE = 8
SELECTION_FLOOR = 1e-6
# The grid of the target while ranking, by its number of dimensions, and draws where there is no grid.
SELECTION_FINENESS = {1: 0.25, 2: 0.25}
SELECTION_NODES = 1024
PENALTIES = 10.0 ** np.arange(0.0, -6.5, -1.0)
PATIENCE = 2
FOLD_STEPS, FOLD_TOLERANCE = 3, 1e-3
# A step of the walk must gain this much (nats).
WORTHWHILE = 0.001
# A length scale of its own must gain this much (nats) and this many standard errors of the difference.
RELEVANCE_GAIN, RELEVANCE_ERRORS = 0.002, 1.0
RELEVANCE_FACTORS = (3.0, 0.5)
# Weight of a trial in the mean: exp(DESERT * rows * (score - best score)).
DESERT = 0.5
# Length scales of the condition are in units of the median distance, those of the target in standard deviations.
LATTICE = {
    "power": np.array([0.0, 1.0]),
    "condition_lengthscale": 2.0 ** np.arange(-4.0, 4.1, 0.5),
    "lengthscale": 2.0 ** np.arange(-3.0, 2.1, 0.5),
    "width": np.array([0.6, 0.8, 1.0, 1.25, 1.6]),
}
START = {"power": 1, "condition_lengthscale": 8, "lengthscale": 6, "width": 2}
FIRST_STRIDE = {"power": 1, "condition_lengthscale": 2, "lengthscale": 2, "width": 1}
MOST_ROUNDS = 4


class ConditionalTrial(NamedTuple):
    """One setting and its cross-validated mean log density of the target, in the data's own units."""

    power: bool
    condition_lengthscale: tuple[float, ...]
    lengthscale: float
    width: float
    rkhs_penalty: float
    score: float
    standard_error: float


class ConditionalSettings(NamedTuple):
    """What a fit needs: whether the target is power-transformed, the length scales, the width of the base, the penalty."""

    power: bool
    condition_lengthscale: np.ndarray
    lengthscale: float
    width: float
    rkhs_penalty: float


class ConditionalSelection(eqx.Module):
    """The settings, the best single trial (none if the user fixed everything), and every trial on the way."""

    settings: ConditionalSettings
    chosen: ConditionalTrial | None
    trials: list[ConditionalTrial]


class Scaled(NamedTuple):
    """The training rows under one scaling of the target, and what that scaling adds to each log density."""

    sample: Sample
    log_jacobian: np.ndarray

    @staticmethod
    def of(scaling: Scaling, targets: np.ndarray, condition: np.ndarray) -> "Scaled":
        target = jnp.asarray(scaling.to_model(targets))
        return Scaled(Sample(target, jnp.asarray(condition)), np.asarray(scaling.log_jacobian(targets)))


@dataclass(frozen=True)
class ConditionalSearch:
    """What the user has fixed; ``None`` means: choose."""

    kernel: str = "gaussian"
    base: str | AbstractMeasure | None = None
    power: bool | None = None
    condition_lengthscale: float | np.ndarray | None = None
    lengthscale: float | None = None
    width: float | None = None
    rkhs_penalty: float | None = None
    seed: int = 0
    report: Listener | None = None

    def run(self, scaled: dict[bool, Scaled]) -> ConditionalSelection:
        """Return the settings for the training rows, given under each scaling that may be chosen."""
        rows = len(next(iter(scaled.values())).log_jacobian)
        chosen = np.sort(np.random.default_rng(self.seed).permutation(rows)[:MOST_ROWS])
        ranking = _Ranking(
            self, {power: Scaled(part.sample.rows(chosen), part.log_jacobian[chosen]) for power, part in scaled.items()}
        )
        if all(ranking.fixed(axis) for axis in LATTICE) and self.rkhs_penalty is not None:
            return ConditionalSelection(ranking.settings(ranking.start(), float(self.rkhs_penalty)), None, [])
        # Products of small matrices: waking a second thread for each costs more than it saves.
        with threadpool_limits(limits=1, user_api="blas"):
            finished = ranking.walk()
            settings = ranking.deserved()
            if finished and not ranking.fixed("condition_lengthscale"):
                settings = ranking.separated(settings)
        return ConditionalSelection(settings, max(ranking.trials, key=lambda trial: trial.score), ranking.trials)


class _Ranking:
    """The walk over the lattice: where it has been, and the scores it found there."""

    def __init__(self, search: ConditionalSearch, scaled: dict[bool, Scaled]):
        self.search, self.scaled = search, scaled
        self.trials: list[ConditionalTrial] = []
        self.row_scores: list[np.ndarray] = []
        self.best_at: dict[tuple, float] = {}
        condition = np.asarray(next(iter(scaled.values())).sample.condition)
        self.unit = median_distance(condition) or 1.0
        self.dim = condition.shape[1]
        self.folds = _folds(len(condition), search.seed)

    def fixed(self, axis: str) -> bool:
        if axis == "width" and self.search.base not in (None, "gaussian"):
            return True
        return getattr(self.search, axis) is not None or (axis == "power" and len(self.scaled) == 1)

    def start(self) -> dict[str, int]:
        position = dict(START)
        if self.fixed("power"):
            position["power"] = int(max(self.scaled))
        return position

    def settings(self, position: dict[str, int], penalty: float) -> ConditionalSettings:
        """Return the settings at a point of the lattice, with what the user fixed in its place."""
        at = {axis: float(values[position[axis]]) for axis, values in LATTICE.items()}
        search = self.search
        scales = (
            at["condition_lengthscale"] * self.unit if search.condition_lengthscale is None else search.condition_lengthscale
        )
        return ConditionalSettings(
            power=bool(at["power"]),
            condition_lengthscale=np.broadcast_to(np.asarray(scales, float), (self.dim,)).copy(),
            lengthscale=at["lengthscale"] if search.lengthscale is None else float(search.lengthscale),
            width=at["width"] if search.width is None else float(search.width),
            rkhs_penalty=penalty,
        )

    def walk(self) -> bool:
        """Walk along each axis in the direction that improves, in long steps first; return whether it was left to finish."""
        position, stride = self.start(), FIRST_STRIDE
        try:
            score = self.visit(position)
            for _ in range(MOST_ROUNDS):
                position, new_score = self._round(position, score, stride)
                if new_score == score:
                    if stride != FIRST_STRIDE:
                        break
                    stride = dict.fromkeys(LATTICE, 1)
                score = new_score
        except KeyboardInterrupt:
            if not self.trials:
                raise
            return False
        return True

    def _round(self, position, score, stride):
        for axis in (axis for axis in LATTICE if not self.fixed(axis)):
            for direction in (1, -1):
                start = position
                while True:
                    candidate = position | {axis: position[axis] + direction * stride[axis]}
                    if not 0 <= candidate[axis] < len(LATTICE[axis]):
                        break
                    new_score = self.visit(candidate)
                    if new_score <= score + WORTHWHILE:
                        break
                    position, score = candidate, new_score
                if position != start:
                    break
        return position, score

    def visit(self, position: dict[str, int]) -> float:
        place = tuple(position.values())
        if place not in self.best_at:
            penalties = PENALTIES if self.search.rkhs_penalty is None else [self.search.rkhs_penalty]
            self.best_at[place] = self.path(self.settings(position, 1.0), penalties)
        return self.best_at[place]

    def path(self, settings: ConditionalSettings, penalties) -> float:
        """Try falling penalties until the score stops rising; keep every trial and return the best score."""
        scaled, base = self.scaled[settings.power], self._base(settings)
        sample = scaled.sample
        space = product_space(
            self.search.kernel,
            sample,
            settings,
            int(np.clip(len(sample) // ROWS_PER_FEATURE, *CONDITION_FEATURES)),
            TARGET_FEATURES,
            floor=SELECTION_FLOOR,
            seed=self.search.seed,
        )
        task = Task(sample, base, space, 1.0, base)
        folds = _Folds(task, selection_nodes(task, self.search.seed), self.folds)
        offset = scaled.log_jacobian + base.log_densities(sample.target)
        best, stale = -np.inf, 0
        for penalty in penalties:
            scores = folds.scores(float(penalty)) + offset
            error = float(scores.std() / np.sqrt(len(scores)))
            scales = tuple(float(scale) for scale in settings.condition_lengthscale)
            self.trials.append(
                ConditionalTrial(
                    settings.power, scales, settings.lengthscale, settings.width, float(penalty), float(scores.mean()), error
                )
            )
            self.row_scores.append(scores)
            best, stale = (scores.mean(), 0) if scores.mean() > best else (best, stale + 1)
            if stale == PATIENCE:
                break
        if self.search.report is not None:
            top = max(trial.score for trial in self.trials)
            self.search.report(Report("selection", len(self.trials), 0, {"score": top}))
        return float(best)

    def deserved(self) -> ConditionalSettings:
        """Return the mean of the trials (of their logarithms) under the winner's scaling, weighted by desert."""
        best = max(self.trials, key=lambda trial: trial.score)
        trials = [trial for trial in self.trials if trial.power == best.power]
        rows = len(self.row_scores[0])
        weights = np.exp(DESERT * rows * (np.array([trial.score for trial in trials]) - best.score))
        mean = lambda values: np.exp(np.average(np.log(np.asarray(values)), axis=0, weights=weights))
        # Given scales may be infinite, and infinity times a vanishing weight is no number.
        given = self.fixed("condition_lengthscale")
        return ConditionalSettings(
            power=best.power,
            condition_lengthscale=np.asarray(best.condition_lengthscale)
            if given
            else mean([trial.condition_lengthscale for trial in trials]),
            lengthscale=float(mean([trial.lengthscale for trial in trials])),
            width=float(mean([trial.width for trial in trials])),
            rkhs_penalty=float(mean([trial.rkhs_penalty for trial in trials])),
        )

    def separated(self, settings: ConditionalSettings) -> ConditionalSettings:
        """Return the settings with a length scale of its own for each input where that is worth it."""
        if self.dim == 1:
            return settings
        try:
            scores = self._rows(settings)
            for j in range(self.dim):
                for factor in RELEVANCE_FACTORS:
                    scales = settings.condition_lengthscale.copy()
                    scales[j] *= factor
                    candidate = settings._replace(condition_lengthscale=scales)
                    gains = self._rows(candidate) - scores
                    error = gains.std() / np.sqrt(len(gains))
                    if gains.mean() > RELEVANCE_GAIN + RELEVANCE_ERRORS * error:
                        settings, scores = candidate, scores + gains
                        break
        except KeyboardInterrupt:
            pass
        return settings

    def _rows(self, settings: ConditionalSettings) -> np.ndarray:
        """Return the score of each row at these settings, reached from the larger penalties."""
        warm = [penalty for penalty in PENALTIES if penalty > 3.0 * settings.rkhs_penalty]
        self.path(settings, [*warm[-2:], settings.rkhs_penalty])
        return self.row_scores[-1]

    def _base(self, settings: ConditionalSettings) -> AbstractMeasure:
        return conditional_base(
            self.search.base, np.asarray(self.scaled[settings.power].sample.target), settings.width, seed=self.search.seed
        )


class _Folds:
    """The fits that leave one fold out, each continued from its own last penalty."""

    def __init__(self, task: Task, nodes, folds: np.ndarray):
        self.problem = likelihood(task, nodes)
        conditions = distinct_conditions(task.sample)
        self.phi, self.membership = self.problem.condition_features, conditions.membership
        self.psi = task.space.target.matrix(task.sample.target)
        self.left_out = folds
        self.problems = [self._without(conditions, ~out) for out in folds]
        self.weights = [np.zeros(self.problem.mean_feature.size) for _ in folds]

    def _without(self, conditions, kept: np.ndarray) -> convex.Likelihood:
        shares = np.bincount(conditions.membership[kept], minlength=len(conditions.values)) / kept.sum()
        mean = self.phi[conditions.membership[kept]].T @ self.psi[kept] / kept.sum()
        seen = shares > 0.0
        return self.problem._replace(mean_feature=mean.ravel(), shares=shares[seen], condition_features=self.phi[seen])

    def scores(self, penalty: float) -> np.ndarray:
        """Return the log density ratio to the base of each row, averaged over the fits that did not see it."""
        totals, counts = np.zeros(len(self.psi)), np.zeros(len(self.psi))
        for k, (problem, out) in enumerate(zip(self.problems, self.left_out, strict=True)):
            optimum = convex.maximise(problem, penalty, self.weights[k], tolerance=FOLD_TOLERANCE, most=FOLD_STEPS)
            self.weights[k] = optimum.weights
            rows = self.problem._replace(condition_features=self.phi[self.membership[out]])
            f = np.sum(rows.coefficients(optimum.weights) * self.psi[out], 1)
            totals[out] += f - convex.log_partitions(rows, optimum.weights)
            counts[out] += 1.0
        return totals / counts


def _folds(rows: int, seed: int) -> np.ndarray:
    """Return masks of the rows that each fit leaves out, (fits, rows)."""
    count = min(FOLDS, rows)
    rng = np.random.default_rng(seed)
    return np.concatenate([(rng.permutation(rows) % count) == np.arange(count)[:, None] for _ in range(REPEATS)])


def selection_nodes(task: Task, seed: int):
    """Return the nodes on which settings are ranked: a coarse grid, or draws where the target has too many dimensions."""
    dim = task.sample.target.shape[1]
    if dim in SELECTION_FINENESS:
        return grid_nodes(task.base, np.asarray(task.sample.target), fineness=SELECTION_FINENESS[dim])
    return importance_nodes(task.base, task.proposal, SELECTION_NODES, key=jr.key(seed))


def conditional_base(kind: str | AbstractMeasure | None, targets: np.ndarray, width: float, *, seed: int) -> AbstractMeasure:
    """Return the base measure on targets in model units."""
    if isinstance(kind, AbstractMeasure):
        return kind
    if kind in (None, "gaussian"):
        return tailed_gaussian(targets, width=width)
    return fit_base(kind, targets, seed=seed)


def product_space(
    kernel: str,
    sample: Sample,
    settings: ConditionalSettings,
    condition_features: int,
    target_features: int,
    *,
    floor: float,
    seed: int,
) -> FeatureSpace:
    """Return the product of the leading features of conditions and targets."""
    conditions = np.unique(np.asarray(sample.condition), axis=0)
    conditions = conditions[spread_rows(conditions, MOST_CENTRES, seed=seed)]
    scales = jnp.asarray(settings.condition_lengthscale)
    condition = KernelSpan.build(KERNELS[kernel](scales), conditions, rank=condition_features, floor=floor)
    centres = target_centres(np.asarray(sample.target), settings.lengthscale, seed=seed)
    target = KernelSpan.build(KERNELS[kernel](jnp.asarray(settings.lengthscale)), centres, rank=target_features, floor=floor)
    return FeatureSpace(condition, target)


def target_centres(targets: np.ndarray, lengthscale: float, *, seed: int) -> np.ndarray:
    """Return centres for functions of the target: evenly spaced on a line, spread-out targets in more dimensions.

    The best f is not a combination of kernels at the training targets alone: it pushes probability away from where
    targets could have been, so its centres have to cover the line.
    """
    if targets.shape[1] > 1:
        distinct = np.unique(targets, axis=0)
        return distinct[spread_rows(distinct, MOST_TARGET_CENTRES, seed=seed)]
    low, high = targets.min() - CENTRE_MARGIN, targets.max() + CENTRE_MARGIN
    needed = (high - low) / (CENTRE_SPACING * lengthscale)
    # One of few numbers, because each compiles programs of its own.
    count = min((count for count in CENTRE_COUNTS if count >= needed), default=MOST_TARGET_CENTRES)
    return np.linspace(low, high, count)[:, None]
