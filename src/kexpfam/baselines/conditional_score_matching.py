"""The conditional kernel exponential family by score matching (KCEF)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted
from threadpoolctl import threadpool_limits

from kexpfam.baselines.derivatives import (
    DerivativeSpan,
    ValueSpan,
    base_scores,
    derivative_gram,
    folds_of,
    full_path,
    full_weights,
    losses,
    one_standard_error,
)
from kexpfam.baselines.score_matching import (
    SCORE_BASES,
    ScoreSelection,
    ScoreSettings,
    ScoreTrial,
    score_base,
    trials_of,
)
from kexpfam.data.columns import check_targets
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import part_of, standard_error, weighted_mean
from kexpfam.estimators.base import (
    ConditionalEstimator,
    Seed,
    check_scale,
    key_from,
    keys_from,
    one_of,
    warn_of_uncertain_normaliser,
)
from kexpfam.estimators.showing import remembered
from kexpfam.fit.bases import best_mixture
from kexpfam.fit.convex import best_sampler
from kexpfam.fit.distil import Distillation
from kexpfam.fit.problem import Problem, Solution, Status
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Diagnosis, Judgement, judge, sampler_fit
from kexpfam.model.density import Density, Estimate, Inputs
from kexpfam.model.kernels import Gaussian, median_distance
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.spaces import FeatureSpace
from kexpfam.progress import Listener, Report

__all__ = ["ConditionalScoreMatching"]

FOLDS = 10
# Settings are ranked on this many rows at most.
MOST_ROWS = 300
# Rows times columns of the target: the system and the weights take 16 bytes for each pair.
MOST_EQUATIONS = 4500
PENALTIES = 10.0 ** np.arange(1.0, -6.1, -0.5)
# Length scales as powers of two: of the condition in median distances, of the target in standard deviations. Shorter ones of
# the target chase ties, longer ones make f a polynomial whose tails outgrow the base.
CONDITION_POWERS, SEPARATE_POWERS, TARGET_POWERS = (-4.0, 4.0), (-5.0, 5.0), (-1.0, 2.0)
STRIDES, MOST_ROUNDS, SEPARATE_ROUNDS = (1.0, 0.5), 4, 2
# A step of the walk must gain this many standard errors of the difference; a length scale of its own, that many.
WALK_ERRORS, SEPARATE_ERRORS = 0.5, 1.0
LEAST_GAIN = 1e-4
# In standard deviations of the target. Where nothing was learned f is 0, and far targets must be possible there.
BASE_WIDTH = 1.5


class _Visit(NamedTuple):
    trial: ScoreTrial
    rows: np.ndarray
    weight: np.ndarray | None

    def beats(self, other: "_Visit", errors: float) -> bool:
        gains = other.rows - self.rows
        return bool(
            weighted_mean(gains, self.weight) > LEAST_GAIN + errors * standard_error(gains, self.weight)
        )


@dataclass
class _Walk:
    """A walk over powers of two, one axis at a time, with the whole path of penalties at every place."""

    sample: Sample
    scores: np.ndarray
    condition_lengthscale: np.ndarray | None
    lengthscale: float | None
    penalties: np.ndarray
    seed: int
    report: Listener | None
    trials: list[ScoreTrial] = field(default_factory=list)
    grams: dict[float, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folds = folds_of(self.sample.target, FOLDS, seed=self.seed)
        self.unit = median_distance(self.sample.condition)

    def run(self) -> ScoreTrial:
        """Return the best trial, with a length scale of its own for each input where that is worth it."""
        places, power = np.zeros(self.sample.condition.shape[1]), 0.0
        best = self.visit(places, power)
        for stride in STRIDES:
            for _ in range(MOST_ROUNDS):
                start = best
                if self.lengthscale is None:
                    power, best = self._along(
                        power, stride, TARGET_POWERS, lambda p, q=places: (q, p), best, WALK_ERRORS
                    )
                if self.condition_lengthscale is None:
                    common = lambda p, q=places, r=power: (q + p, r)
                    shift, best = self._along(0.0, stride, self._room(places), common, best, WALK_ERRORS)
                    places = places + shift
                if best is start:
                    break
        if self.condition_lengthscale is None and len(places) > 1:
            best = self._separated(places, power, best)
        return best.trial

    def _room(self, places: np.ndarray) -> tuple[float, float]:
        return CONDITION_POWERS[0] - places.min(), CONDITION_POWERS[1] - places.max()

    def _along(
        self,
        power: float,
        stride: float,
        limits: tuple[float, float],
        place: Callable[..., tuple[np.ndarray, float]],
        best: _Visit,
        errors: float,
    ) -> tuple[float, _Visit]:
        """Walk up, then down, as long as it gains; return where that leads and what was found there."""
        for direction in (stride, -stride):
            while limits[0] <= power + direction <= limits[1]:
                candidate = self.visit(*place(power + direction))
                if not candidate.beats(best, errors):
                    break
                power, best = power + direction, candidate
        return power, best

    def _separated(self, places: np.ndarray, power: float, best: _Visit) -> _Visit:
        for _ in range(SEPARATE_ROUNDS):
            start = best
            for j, axis in enumerate(np.eye(len(places))):
                one = lambda p, q=places, e=axis, j=j: (q + (p - q[j]) * e, power)
                there, best = self._along(places[j], STRIDES[0], SEPARATE_POWERS, one, best, SEPARATE_ERRORS)
                places = places + (there - places[j]) * axis
            if best is start:
                break
        return best

    def visit(self, places: np.ndarray, power: float) -> _Visit:
        """Return the trial of the one-standard-error rule among the penalties, and the held-out loss of each row."""
        given, sample = self.condition_lengthscale, self.sample
        scales = self.unit * 2.0**places if given is None else np.broadcast_to(given, places.shape)
        lengthscale = 2.0**power if self.lengthscale is None else self.lengthscale
        if lengthscale not in self.grams:
            self.grams[lengthscale] = derivative_gram(Gaussian(lengthscale), sample.target, sample.target)
        gram = Gaussian(scales).gram(sample.condition, sample.condition)
        blocks, weight = self.grams[lengthscale] * gram[:, None, :, None], sample.weight
        table = fold_losses(blocks, self.scores, self.folds, self.penalties, weight)
        path = trials_of(scales, lengthscale, self.penalties, table, weight)
        self.trials += path
        if self.report is not None:
            self.report(
                Report("selection", len(self.trials), 0, {"score": -min(trial.loss for trial in self.trials)})
            )
        chosen = one_standard_error(table, weight)
        return _Visit(path[chosen], table[:, chosen], weight)


def fold_losses(
    blocks: np.ndarray,
    scores: np.ndarray,
    folds: list[np.ndarray],
    penalties: np.ndarray,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """Return the loss of each row under the fit that did not see its fold, (rows, penalties)."""
    n, operators = blocks.shape[:2]
    table = np.empty((n, len(penalties)))
    for fold in folds:
        columns = blocks[:, :, ~fold]
        weights = full_path(columns[~fold], scores[~fold], penalties, part_of(weight, ~fold))
        applied = columns[fold].reshape(fold.sum() * operators, -1) @ weights.reshape(-1, len(penalties))
        table[fold] = losses(applied.reshape(fold.sum(), operators, -1), scores[fold])
    return table


class ConditionalScoreMatching(ConditionalEstimator):
    r"""Conditional density :math:`p(y | x) = p_0(y) \exp(f(x, y) - A_x(f))` by score matching in y (Arbel and Gretton 2018).

    f lies in the RKHS of the product of Gaussian kernels :math:`k(x, x') k(y, y')` and minimises

    .. math:: J(f) = \frac1n \sum_{ij} \Big( \tfrac12 (\partial_{y_j} f)^2 + \partial_{y_j} f\, \partial_j \log p_0(y_i)
        + \partial_{y_j}^2 f \Big)(x_i, y_i) + \tfrac{\eta}{2} |f|^2

    exactly: a linear system of rows times columns of y. Several columns of y are matched jointly, where the paper takes one
    factor per column. Everything left at ``None`` is chosen by the cross-validated loss, with equal targets in one fold.

    Parameters
    ----------
    condition_lengthscale : float, array of shape (n_features,) or None
        Length scales of x, in units of the standardised data; large ones say that an input matters little.
    lengthscale : float or None
        Length scale of y, in units of the standardised target.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``.
    base : {"gaussian", "mixture"} or measure
        The base measure p0 on targets; "gaussian" is 1.5 times as wide as the targets.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each setting that was tried.

    Attributes
    ----------
    density_ : Density
        The fitted density, independent of how it was fitted.
    solution_ : Solution
        f, and a sampler: the density's own cells on a grid, or a mixture network for y of more than two columns.
    selection_ : ScoreSelection
        The chosen settings and every setting tried.
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from kexpfam.estimators import ConditionalScoreMatching
    >>> x = np.random.default_rng(0).uniform(-2, 2, size=(60, 1))
    >>> y = np.sin(2 * x[:, 0]) + 0.2 * np.random.default_rng(1).normal(size=60)
    >>> model = ConditionalScoreMatching(random_state=0).fit(x, y)
    >>> model.quantile(x[:3], [0.05, 0.95]).shape
    (3, 2)
    """

    _stored = ("density_", "_training", "_training_targets", "_flat_targets", "solution_", "selection_")

    def __init__(
        self,
        *,
        condition_lengthscale: ArrayLike | None = None,
        lengthscale: float | None = None,
        rkhs_penalty: float | None = None,
        base: str | AbstractMeasure = "gaussian",
        random_state: Seed = None,
        progress: bool | Listener = False,
    ) -> None:
        self.condition_lengthscale = condition_lengthscale
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.random_state = random_state
        self.progress = progress

    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None) -> Self:
        self._check_settings(X.shape[1], targets.size)
        check_targets(X, targets, self._names, self._target_names)
        seed_key, sampler_key, nodes_key = keys_from(self.random_state, 3)
        seed, weight = seed_from(seed_key), self._weight
        inputs, scaling = (Scaling.standardising(part, weight=weight) for part in (X, targets))
        sample = Sample(scaling.to_model(targets), inputs.to_model(X), weight)
        mixture = best_mixture(sample.target, seed=seed, weight=weight)
        base = score_base(self.base, sample, mixture, width=BASE_WIDTH)
        self.selection_ = self._select(sample, base, seed, listener)
        problem, weights = self._solved(sample, base, mixture)
        tilt, finer = problem.tilt(weights), problem.nodes(fineness=problem.integration.finer, key=nodes_key)
        coarse = problem.nodes(key=nodes_key) if finer.is_grid else None
        sampler = best_sampler(problem, tilt, coarse or finer, Distillation(), key=sampler_key)
        self.solution_ = Solution(tilt, sampler, Status.CONVERGED, {}, {})
        self.density_ = Density(
            tilt, sampler, scaling, Inputs.of(inputs, sample.condition), None, finer, coarse, None
        )
        warn_of_uncertain_normaliser(self.density_, X)
        return self

    @remembered
    def diagnose(
        self,
        X: ArrayLike | None = None,
        y: ArrayLike | None = None,
        random_state: Seed = 0,
        *,
        settings: Judgement | None = None,
    ) -> Diagnosis:
        """Return what can be known about the quality of the fit; with held-out X and y, its calibration too.

        f solves its own problem in closed form, so that its gap is 0; it has no certificate, which is one of the likelihood.
        """
        check_is_fitted(self, "density_")
        density, key, settings = self.density_, key_from(random_state), settings or Judgement()
        status, calibration = self.solution_.status, self._calibration(X, y, key=key)
        fit = sampler_fit(density, self._training, settings.draws, weight=self._weight, key=key)
        partitions, errors = density.log_partitions(self._training), density.partition_errors(self._training)
        worst = Estimate(float(weighted_mean(partitions, self._weight)), float(errors.max()), np.inf)
        verdict, advice = judge(status, worst, 0.0, fit, calibration, conditional=True, settings=settings)
        facts = (status, True, worst, 0.0, fit.kl, fit.draws.folds, fit.share, None, calibration, None)
        return self._repaired(Diagnosis(*facts, verdict, advice))

    def _check_settings(self, width: int, equations: int) -> None:
        if not isinstance(self.base, AbstractMeasure):
            one_of("base", self.base, SCORE_BASES)
        # An infinite length scale of an input switches it off.
        check_scale("condition_lengthscale", self.condition_lengthscale, (), (width,), may_be_infinite=True)
        check_scale("lengthscale", self.lengthscale, ())
        check_scale("rkhs_penalty", self.rkhs_penalty, ())
        if equations > MOST_EQUATIONS:
            raise ValueError(
                f"score matching solves a system of rows * columns of y = {equations:,} equations, and {MOST_EQUATIONS:,} is "
                "the most it takes on: use fewer rows, or ConditionalKernelExpFamily."
            )

    def _select(
        self, sample: Sample, base: AbstractMeasure, seed: int, listener: Listener | None
    ) -> ScoreSelection:
        given = None if self.condition_lengthscale is None else np.asarray(self.condition_lengthscale, float)
        if given is not None and self.lengthscale is not None and self.rkhs_penalty is not None:
            scales = np.broadcast_to(given, (sample.condition.shape[1],)).copy()
            settings = ScoreSettings(scales, np.asarray(self.lengthscale, float), float(self.rkhs_penalty))
            return ScoreSelection(settings, None, [])
        rows = sample.rows(np.sort(np.random.default_rng(seed).permutation(len(sample))[:MOST_ROWS]))
        penalties = PENALTIES if self.rkhs_penalty is None else np.array([float(self.rkhs_penalty)])
        lengthscale = None if self.lengthscale is None else float(self.lengthscale)
        walk = _Walk(rows, base_scores(base, rows.target), given, lengthscale, penalties, seed, listener)
        # Products of small matrices: waking a second thread for each costs more than it saves.
        with threadpool_limits(limits=1, user_api="blas"):
            chosen = walk.run()
        scales = np.array(chosen.condition_lengthscale)
        return ScoreSelection(
            ScoreSettings(scales, np.array(chosen.lengthscale), chosen.rkhs_penalty), chosen, walk.trials
        )

    def _solved(
        self, sample: Sample, base: AbstractMeasure, proposal: AbstractMeasure
    ) -> tuple[Problem, np.ndarray]:
        """Return the problem in the solution's own space, and its weights there: each row's derivatives meet its own x."""
        condition_lengthscale, lengthscale, penalty = self.selection_.settings
        kernel, condition_kernel = Gaussian(lengthscale), Gaussian(condition_lengthscale)
        derivatives = full_weights(
            kernel, condition_kernel, sample, base_scores(base, sample.target), penalty
        )
        weights, rows = np.zeros((len(sample), *derivatives.shape)), np.arange(len(sample))
        weights[rows, rows] = derivatives
        space = FeatureSpace(
            ValueSpan(condition_kernel, sample.condition), DerivativeSpan(kernel, sample.target)
        )
        return Problem(sample, base, space, penalty, proposal), weights.ravel()
