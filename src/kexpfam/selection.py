"""Base measure, length scales and penalty, chosen from the training data alone.

The search is nested: over base measures (only where there is a choice), over length scales (a walk on a geometric grid), over
penalties (a continuation from large to small). Every setting is scored by cross-validation, which costs little more than
one fit (`solvers.convex.fold_weights`). Dimensions that the ratio of data to base does not depend on get an infinite
length scale: f then lives on few coordinates, and its normaliser is exact or nearly so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.inspection import permutation_importance
from threadpoolctl import threadpool_limits

from kexpfam.kernels import KERNELS, median_distance
from kexpfam.measures import AbstractMeasure, Box, Gaussian, best_mixture, held_out_split
from kexpfam.nodes import grid_nodes, importance_nodes
from kexpfam.potentials import Constant, FeatureSpace, KernelSpan, choose_centres
from kexpfam.progress import Listener, Report
from kexpfam.sample import Sample
from kexpfam.solvers import convex
from kexpfam.solvers.task import Task, likelihood

FOLDS = 10
# Length scales are tried on a grid of this factor, in units of the median distance, from this one outwards.
LENGTHSCALE_FACTOR = 2.0**0.5
FIRST_LENGTHSCALE = 0.4
LENGTHSCALE_RANGE = (0.02, 4.0)
# A step away from the middle of the range must gain this much (nats); less is noise of the folds.
WORTHWHILE = 0.002
PENALTIES = 10.0 ** np.arange(0.0, -9.5, -1.0)
# Features kept while ranking settings; the fit itself keeps all.
MOST_FEATURES = 250
THREADED_FEATURES = 150
# A path of penalties ends after this many without a better score.
PATIENCE = 2
# Functions of up to this many coordinates are integrated on a grid during selection, others on importance draws.
SELECTION_GRID_DIMS = 2
# A coarser grid than the fit's own: it only has to rank settings.
SELECTION_FINENESS = 0.75
SELECTION_NODES = 8192
# Up to this many dimensions all are taken to matter and the base need not be strong.
FEW_DIMS = 3
# A dimension matters if permuting it costs a classifier of data against base this much (nats), and 3 standard errors.
RELEVANCE_FLOOR = 0.01


class Trial(NamedTuple):
    """One setting and its cross-validated mean log density (model units, the base's own part included)."""

    base: str
    dims: tuple[int, ...]
    lengthscale: float
    rkhs_penalty: float
    score: float
    standard_error: float


class Settings(NamedTuple):
    """What a fit needs: the base, the coordinates f depends on, its length scales there, and the penalty."""

    base: AbstractMeasure
    dims: tuple[int, ...]
    lengthscale: np.ndarray
    rkhs_penalty: float


class Selection(eqx.Module):
    """The settings, the trial that won them (none if the user fixed them all), and every trial on the way."""

    settings: Settings
    chosen: Trial | None
    trials: list[Trial]


@dataclass(frozen=True)
class Search:
    """What the user has fixed; ``None`` means: choose."""

    kernel: str = "gaussian"
    base: str | AbstractMeasure | None = None
    lengthscale: float | np.ndarray | None = None
    rkhs_penalty: float | None = None
    centres: int = 400
    seed: int = 0
    proposal: AbstractMeasure | None = None
    report: Listener | None = None

    def run(self, sample: Sample) -> Selection:
        """Return the settings that cross-validation likes best, with the trials."""
        data = np.asarray(sample.target)
        bases = self._bases(data)
        if len(bases) == 1 and self.lengthscale is not None and self.rkhs_penalty is not None:
            (base,) = bases.values()
            dims, scales = self._given_lengthscale(data.shape[1])
            return Selection(Settings(base, dims, scales, float(self.rkhs_penalty)), None, [])
        trials: list[Trial] = []
        ranked = []
        for kind, base in bases.items():
            trial = self._best_on(sample, kind, base, self._dims(data, base), trials)
            # A base has seen the points that the folds are scored on; what that flatters it by is taken off.
            flattery = optimism(kind, data, seed=self.seed) if len(bases) > 1 else 0.0
            ranked.append((trial.score - flattery, trial))
        chosen = max(ranked)[1]
        scales = np.full(len(chosen.dims), chosen.lengthscale)
        if self.lengthscale is not None:
            _, scales = self._given_lengthscale(data.shape[1])
        return Selection(Settings(bases[chosen.base], chosen.dims, scales, chosen.rkhs_penalty), chosen, trials)

    def _given_lengthscale(self, dim: int) -> tuple[tuple[int, ...], np.ndarray]:
        """Return the coordinates with a finite length scale, and those length scales."""
        scales = np.broadcast_to(np.asarray(self.lengthscale, float), (dim,))
        return tuple(int(j) for j in np.flatnonzero(np.isfinite(scales))), scales[np.isfinite(scales)]

    def _bases(self, data: np.ndarray) -> dict[str, AbstractMeasure]:
        """Return the base measures to choose from: one, unless there are too many dimensions to be sure of any."""
        if isinstance(self.base, AbstractMeasure):
            return {"given": self.base}
        few = data.shape[1] <= FEW_DIMS
        kinds = [self.base] if self.base is not None else ["gaussian"] if few else ["gaussian", "mixture"]
        return {kind: fit_base(kind, data, seed=self.seed) for kind in kinds}

    def _dims(self, data: np.ndarray, base: AbstractMeasure) -> tuple[int, ...]:
        """Return the coordinates that f is to depend on."""
        everything = tuple(range(data.shape[1]))
        if self.lengthscale is not None:
            return self._given_lengthscale(data.shape[1])[0]
        if data.shape[1] <= FEW_DIMS:
            return everything
        return relevant_dimensions(data, base, seed=self.seed) or everything

    def _best_on(self, sample: Sample, kind: str, base: AbstractMeasure, dims: tuple[int, ...], trials: list[Trial]) -> Trial:
        """Walk over length scales from the middle of their range in the direction that improves."""
        unit = median_distance(np.asarray(sample.target)[:, dims])
        scored: dict[int, Trial] = {}

        def visit(index: int) -> float:
            scale = FIRST_LENGTHSCALE * LENGTHSCALE_FACTOR**index
            if not LENGTHSCALE_RANGE[0] <= scale <= LENGTHSCALE_RANGE[1]:
                return -np.inf
            if index not in scored:
                path = self._path(sample, kind, base, dims, np.full(len(dims), scale * unit))
                trials.extend(path)
                scored[index] = max(path, key=lambda trial: trial.score)
                if self.report is not None:
                    self.report(Report("selection", len(trials), 0, {"score": max(trial.score for trial in trials)}))
            return scored[index].score

        if self.lengthscale is not None:
            path = self._path(sample, kind, base, *self._given_lengthscale(sample.target.shape[1]))
            trials.extend(path)
            return max(path, key=lambda trial: trial.score)
        best = 0
        try:
            direction = 1 if visit(1) > visit(0) else -1
            while visit(best + direction) > visit(best) + WORTHWHILE:
                best += direction
        except KeyboardInterrupt:
            if not scored:
                raise
        return scored.get(best) or max(scored.values(), key=lambda trial: trial.score)

    def _path(self, sample: Sample, kind: str, base: AbstractMeasure, dims: tuple[int, ...], scales: np.ndarray) -> list[Trial]:
        """Return the trials along falling penalties at one length scale, up to where the score stops rising."""
        part, part_base, proposal = reduced(sample, base, dims, self.proposal or base)
        kernel = KERNELS[self.kernel](jnp.asarray(scales))
        centres = choose_centres(part, self.centres, seed=self.seed)
        space = FeatureSpace(Constant(), KernelSpan.build(kernel, centres.target, rank=MOST_FEATURES))
        task = Task(part, part_base, space, 1.0, proposal)
        problem, check = self._problems(task)
        features = space.matrix(task.sample.target, task.sample.condition)
        log_base = base.log_densities(sample.target)
        # Threads pay for large products only; for small ones they wait for each other, above all on a busy machine.
        with threadpool_limits(limits=1 if space.size < THREADED_FEATURES else None, user_api="blas"):
            return self._descend(kind, dims, scales, problem, check, features, log_base)

    def _descend(self, kind, dims, scales, problem, check, features, log_base) -> list[Trial]:
        folds = np.random.default_rng(self.seed).permutation(len(features)) % min(FOLDS, len(features))
        trials: list[Trial] = []
        weights, stale = np.zeros(features.shape[1]), 0
        for penalty in PENALTIES if self.rkhs_penalty is None else [self.rkhs_penalty]:
            optimum = convex.maximise(problem, penalty, weights, tolerance=1e-4)
            weights = optimum.weights
            scores = fold_scores(problem, check, optimum, penalty, features, folds) + log_base
            error = float(scores.std() / np.sqrt(len(scores)))
            trial = Trial(kind, dims, float(scales.min()), float(penalty), float(scores.mean()), error)
            improved = not trials or trial.score > max(t.score for t in trials)
            trials.append(trial)
            stale = 0 if improved else stale + 1
            if stale == PATIENCE:
                break
        return trials

    def _problems(self, task: Task) -> tuple[convex.Likelihood, convex.Likelihood]:
        """Return the likelihood to fit on and the one to score on.

        They share a grid where there is one. On importance draws they must differ: an optimum can hide mass between its
        own nodes, and only fresh ones show it.
        """
        if task.sample.target.shape[1] <= SELECTION_GRID_DIMS:
            problem = likelihood(task, grid_nodes(task.base, np.asarray(task.sample.target), fineness=SELECTION_FINENESS))
            return problem, problem
        keys = jr.split(jr.key(self.seed))
        fitting, scoring = (importance_nodes(task.base, task.proposal, SELECTION_NODES, key=key) for key in keys)
        return likelihood(task, fitting), likelihood(task, scoring)


def reduced(
    sample: Sample, base: AbstractMeasure, dims: tuple[int, ...], proposal: AbstractMeasure
) -> tuple[Sample, AbstractMeasure, AbstractMeasure]:
    """Return sample, base and proposal in the coordinates that f is to depend on."""
    if len(dims) == sample.target.shape[1]:
        return sample, base, proposal
    index = jnp.asarray(dims)
    return Sample(sample.target[:, index], sample.condition), base.marginal(index), proposal.marginal(index)


def fold_scores(problem, check, optimum, penalty, features, folds) -> np.ndarray:
    """Return the log density ratio to the base of each point, from the fit that did not see its fold."""
    members = np.eye(folds.max() + 1)[folds]
    totals, counts = members.T @ features, members.sum(0)
    means = (totals.sum(0) - totals) / (len(features) - counts)[:, None]
    problem = convex.without_negligible_nodes(problem, optimum.weights)
    weights = convex.fold_weights(problem, optimum, penalty, means)
    partitions = convex.log_partitions(check, weights)[:, 0]
    return np.sum(features * weights[folds], 1) - partitions[folds]


def relevant_dimensions(data: np.ndarray, base: AbstractMeasure, *, seed: int) -> tuple[int, ...]:
    """Return the dimensions that a classifier of data against base draws makes use of.

    The ratio of data to base is what f models, and a classifier's logit estimates it. Boosted trees cope with dimensions
    that carry nothing, which is what makes them a good judge of which ones do.
    """
    draws = base.draws(min(4 * len(data), 20_000), key=jr.key(seed))
    rows, labels = np.concatenate([data, draws]), np.repeat([1, 0], [len(data), len(draws)])
    weights = np.where(labels == 1, len(draws) / len(data), 1.0)
    order = np.random.default_rng(seed).permutation(len(rows))
    training, held_out = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    # One thread: small trees gain nothing from more, and lose much on a busy machine.
    with threadpool_limits(limits=1):
        model = HistGradientBoostingClassifier(max_iter=60, random_state=seed)
        model.fit(rows[training], labels[training], weights[training])
        result = permutation_importance(
            model,
            rows[held_out],
            labels[held_out],
            scoring="neg_log_loss",
            n_repeats=4,
            random_state=seed,
            sample_weight=weights[held_out],
        )
    errors = result.importances_std / np.sqrt(result.importances.shape[1])
    relevant = np.flatnonzero(result.importances_mean > np.maximum(RELEVANCE_FLOOR, 3.0 * errors))
    return tuple(int(j) for j in relevant)


def fit_base(kind: str, data: np.ndarray, *, seed: int) -> AbstractMeasure:
    """Return the base measure of that name, fitted to the data (already in model units)."""
    makers: dict[str, Callable[[np.ndarray], AbstractMeasure]] = {
        "gaussian": Gaussian.fitted,
        "box": Box.fitted,
        "mixture": lambda points: best_mixture(points, seed=seed),
    }
    if kind not in makers:
        raise ValueError(f"unknown base {kind!r}: choose one of {', '.join(makers)}, or pass a measure.")
    return makers[kind](data)


def optimism(kind: str, data: np.ndarray, *, seed: int) -> float:
    """Return how much higher a base of this kind scores points it was fitted to than points it was not (nats)."""
    training, held_out = held_out_split(data, seed=seed)
    base = fit_base(kind, training, seed=seed)
    return float(base.log_densities(training).mean() - base.log_densities(held_out).mean())
