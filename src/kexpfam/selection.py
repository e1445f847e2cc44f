"""Base measure, length scales and penalty, chosen from the training data alone.

The search is nested: over base measures (only where there is a choice), over length scales (a walk on a geometric grid), over
penalties (a continuation from large to small). Every setting is scored by cross-validation, which costs little more than
one fit (`solvers.convex.fold_weights`). Dimensions that the ratio of data to base does not depend on get an infinite
length scale: f then lives on few coordinates, and its normaliser is exact or nearly so.
"""

from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax.random as jr
import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.inspection import permutation_importance

from kexpfam.kernels import KERNELS, median_distance
from kexpfam.measures import AbstractMeasure, Box, Gaussian, best_mixture
from kexpfam.nodes import Nodes, grid_nodes
from kexpfam.potentials import KernelSpan, choose_centres
from kexpfam.progress import Listener, Report
from kexpfam.sample import Sample
from kexpfam.solvers import convex
from kexpfam.solvers.reference import active_nodes
from kexpfam.solvers.task import Task, node_features

FOLDS = 10
# Length scales are tried on a grid of this factor, in units of the median distance, from this one outwards.
LENGTHSCALE_FACTOR = 2.0**0.5
FIRST_LENGTHSCALE = 0.4
LENGTHSCALE_RANGE = (0.02, 4.0)
PENALTIES = 10.0 ** np.arange(-2.0, -9.5, -1.0)
# A path of penalties ends after this many without a better score.
PATIENCE = 2
# Functions of up to this many coordinates are integrated on a grid during selection, others on importance draws.
SELECTION_GRID_DIMS = 2
SELECTION_NODES = 8192
# Up to this many dimensions all are taken to matter and the base need not be strong.
FEW_DIMS = 3
# A dimension matters if permuting it costs a classifier of data against base this much (nats), and 3 standard errors.
RELEVANCE_FLOOR = 0.01


class Trial(NamedTuple):
    """One setting and its cross-validated mean log density (model units, the base's own part included)."""

    base: str
    active: tuple[int, ...]
    lengthscale: float
    rkhs_penalty: float
    score: float
    standard_error: float


class Settings(NamedTuple):
    """What a fit needs: the choice for every setting that the user left open."""

    base: AbstractMeasure
    lengthscale: np.ndarray
    rkhs_penalty: float


class Selection(eqx.Module):
    """The chosen settings and every trial on the way to them."""

    settings: Settings
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        return max(self.trials, key=lambda trial: trial.score) if self.trials else None


@dataclass(frozen=True)
class Search:
    """What the user has fixed; ``None`` means: choose."""

    kernel: str = "gaussian"
    base: str | AbstractMeasure | None = None
    lengthscale: float | np.ndarray | None = None
    rkhs_penalty: float | None = None
    centres: int = 400
    seed: int = 0
    report: Listener | None = None

    def run(self, sample: Sample) -> Selection:
        """Return the settings that cross-validation likes best, with the trials."""
        data = np.asarray(sample.target)
        kinds = self._base_kinds(data.shape[1])
        bases = {kind: self.base if isinstance(self.base, AbstractMeasure) else fit_base(kind, data, seed=self.seed) for kind in kinds}
        if len(kinds) == 1 and self.lengthscale is not None and self.rkhs_penalty is not None:
            return Selection(Settings(bases[kinds[0]], np.asarray(self.lengthscale, float), float(self.rkhs_penalty)), [])
        trials: list[Trial] = []
        best = None
        for kind in kinds:
            active = self._active(data, bases[kind])
            trial = self._best_on(sample, kind, bases[kind], active, trials)
            # A mixture has seen the fold it is scored on; a held-out fit of it says by how much that flatters it.
            score = trial.score - (optimism(kind, data, seed=self.seed) if len(kinds) > 1 else 0.0)
            if best is None or score > best[0]:
                best = (score, trial)
        chosen = best[1]
        lengthscale = np.full(data.shape[1], np.inf)
        lengthscale[list(chosen.active)] = chosen.lengthscale
        if self.lengthscale is not None:
            lengthscale = np.asarray(self.lengthscale, float)
        return Selection(Settings(bases[chosen.base], lengthscale, chosen.rkhs_penalty), trials)

    def _base_kinds(self, dim: int) -> list[str]:
        if isinstance(self.base, AbstractMeasure):
            return ["given"]
        if self.base is not None:
            return [self.base]
        return ["gaussian"] if dim <= FEW_DIMS else ["gaussian", "mixture"]

    def _active(self, data: np.ndarray, base: AbstractMeasure) -> np.ndarray:
        if self.lengthscale is not None:
            return np.flatnonzero(np.isfinite(np.broadcast_to(self.lengthscale, (data.shape[1],))))
        if data.shape[1] <= FEW_DIMS:
            return np.arange(data.shape[1])
        found = relevant_dimensions(data, base, seed=self.seed)
        return found if found.size else np.arange(data.shape[1])

    def _best_on(self, sample: Sample, kind: str, base: AbstractMeasure, active: np.ndarray, trials: list[Trial]) -> Trial:
        """Walk over length scales from the middle of their range in the direction that improves."""
        data = np.asarray(sample.target)
        unit = median_distance(data[:, active])
        scored: dict[int, Trial] = {}

        def visit(index: int) -> float:
            scale = FIRST_LENGTHSCALE * LENGTHSCALE_FACTOR**index
            if not LENGTHSCALE_RANGE[0] <= scale <= LENGTHSCALE_RANGE[1]:
                return -np.inf
            if index not in scored:
                path = self._path(sample, kind, base, active, scale * unit)
                trials.extend(path)
                if self.report is not None:
                    self.report(Report("selection", len(trials), 0, {"score": max(trial.score for trial in trials)}))
                scored[index] = max(path, key=lambda trial: trial.score)
            return scored[index].score

        if self.lengthscale is not None:
            trials.extend(self._path(sample, kind, base, active, self.lengthscale))
            return max(trials, key=lambda trial: trial.score)
        try:
            best = 0
            direction = 1 if visit(1) > visit(0) else -1
            while visit(best + direction) > visit(best):
                best += direction
        except KeyboardInterrupt:
            if not scored:
                raise
        return max(scored.values(), key=lambda trial: trial.score)

    def _path(self, sample: Sample, kind: str, base: AbstractMeasure, active: np.ndarray, lengthscale) -> list[Trial]:
        """Return the trials along falling penalties at one length scale, up to where the score stops rising."""
        scales = np.full(sample.target.shape[1], np.inf)
        scales[active] = np.broadcast_to(lengthscale, scales.shape)[active]
        kernel = KERNELS[self.kernel](scales)
        space = KernelSpan.build(kernel, kernel, choose_centres(sample, self.centres, seed=self.seed), rank=300)
        problem, check = selection_problems(Task(sample, base, space, 1.0), seed=self.seed)
        features = space.matrix(sample.target, sample.condition)
        log_base = base.log_densities(sample.target)
        folds = np.random.default_rng(self.seed).permutation(len(sample)) % min(FOLDS, len(sample))
        trials, weights, stale = [], np.zeros(space.size), 0
        for penalty in PENALTIES if self.rkhs_penalty is None else [self.rkhs_penalty]:
            optimum = convex.maximise(problem, penalty, weights, tolerance=1e-4)
            weights = optimum.weights
            scores = fold_scores(problem, check, optimum, penalty, features, folds) + log_base
            trial = Trial(kind, tuple(int(j) for j in active), float(np.min(lengthscale)), float(penalty), float(scores.mean()),
                          float(scores.std() / np.sqrt(len(scores))))
            improved = not trials or trial.score > max(t.score for t in trials)
            trials.append(trial)
            stale = 0 if improved else stale + 1
            if stale == PATIENCE:
                break
        return trials


def selection_problems(task: Task, *, seed: int) -> tuple[convex.Likelihood, convex.Likelihood]:
    """Return the likelihood to fit on and the one to score on.

    They share a grid where there is one. On importance draws they must differ: an optimum can hide mass between its own
    nodes, and only fresh ones show it.
    """
    data = np.asarray(task.sample.target)
    if len(task.active) <= SELECTION_GRID_DIMS:
        node_sets = [grid_nodes(task.base, task.active, data)]
    else:
        keys = jr.split(jr.key(seed), 2)
        proposal = best_mixture(data, seed=seed)
        node_sets = [active_nodes(task, proposal, SELECTION_NODES, key=key) for key in keys]
    mean = task.space.matrix(task.sample.target, task.sample.condition).mean(0)
    problems = [_likelihood_on(task, nodes, mean) for nodes in node_sets]
    return problems[0], problems[-1]


def fold_scores(problem, check, optimum, penalty, features, folds) -> np.ndarray:
    """Return the log density ratio to the base of each point, from the fit that did not see its fold."""
    members = np.eye(folds.max() + 1)[folds]
    totals, counts = members.T @ features, members.sum(0)
    means = (totals.sum(0) - totals) / (len(features) - counts)[:, None]
    problem = convex.without_negligible_nodes(problem, optimum.weights)
    weights = convex.fold_weights(problem, optimum, penalty, means)
    partitions = convex.log_partitions(check, weights)[:, 0]
    return np.sum(features * weights[folds], 1) - partitions[folds]


def relevant_dimensions(data: np.ndarray, base: AbstractMeasure, *, seed: int) -> np.ndarray:
    """Return the dimensions that a classifier of data against base draws makes use of.

    The ratio of data to base is what f models, and a classifier's logit estimates it. Boosted trees cope with dimensions
    that carry nothing, which is what makes them a good judge of which ones do.
    """
    draws = base.draws(min(4 * len(data), 20_000), key=jr.key(seed))
    rows, labels = np.concatenate([data, draws]), np.repeat([1, 0], [len(data), len(draws)])
    weights = np.where(labels == 1, len(draws) / len(data), 1.0)
    order = np.random.default_rng(seed).permutation(len(rows))
    training, held_out = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    model = HistGradientBoostingClassifier(max_iter=60, random_state=seed)
    model.fit(rows[training], labels[training], weights[training])
    result = permutation_importance(
        model, rows[held_out], labels[held_out], scoring="neg_log_loss", n_repeats=4, random_state=seed, sample_weight=weights[held_out]
    )
    errors = result.importances_std / np.sqrt(result.importances.shape[1])
    return np.flatnonzero(result.importances_mean > np.maximum(RELEVANCE_FLOOR, 3.0 * errors))


def fit_base(kind: str, data: np.ndarray, *, seed: int) -> AbstractMeasure:
    """Return the base measure of that name, fitted to the data (already in model units)."""
    makers = {"gaussian": Gaussian.fitted, "box": Box.fitted, "mixture": lambda points: best_mixture(points, seed=seed)}
    if kind not in makers:
        raise ValueError(f"unknown base {kind!r}: choose one of {', '.join(makers)}, or pass a measure.")
    return makers[kind](data)


def optimism(kind: str, data: np.ndarray, *, seed: int) -> float:
    """Return how much higher a base scores points it was fitted to than points it was not (mean over 5 folds)."""
    folds = np.random.default_rng(seed).permutation(len(data)) % 5
    gaps = []
    full = fit_base(kind, data, seed=seed).log_densities(data)
    for fold in range(5):
        part = fit_base(kind, data[folds != fold], seed=seed)
        held_out = part.log_densities(data[folds == fold])
        gaps.append(full[folds == fold].mean() - held_out.mean())
    return float(np.mean(gaps))


def _likelihood_on(task: Task, nodes: Nodes, mean: np.ndarray) -> convex.Likelihood:
    features, shares = node_features(task.space, task.sample.condition, nodes)
    return convex.Likelihood(mean, features, np.broadcast_to(nodes.log_weights, features.shape[:2]), shares)
