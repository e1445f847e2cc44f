"""The conditional kernel exponential family by score matching (KCEF)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import equinox as eqx
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
    check_equations,
    score_base,
    trials_of,
)
from kexpfam.data.columns import check_targets
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import part_of, standard_error, weighted_mean
from kexpfam.estimators.base import (
    Seed,
    check_scale,
    key_from,
    keys_from,
    one_of,
    remembered,
    warn_of_uncertain_normaliser,
)
from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.fit.convex import best_sampler
from kexpfam.fit.distil import Distillation
from kexpfam.fit.mixture import best_mixture
from kexpfam.fit.problem import Problem, Solution, Status
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Diagnosis, Judgement
from kexpfam.judge.measure import diagnose
from kexpfam.model.density import Inputs, TiltedDensity
from kexpfam.model.kernels import Gaussian, median_distance
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.spaces import FeatureSpace
from kexpfam.progress import Listener, Report

__all__ = ["ConditionalScoreMatching", "WalkSearch"]


class WalkSearch(eqx.Module):
    """Settings of the search for length scales and penalty, by coordinate ascent over powers of two.

    Parameters
    ----------
    folds, rows : int
        Folds of the cross-validation, and rows in it at most.
    penalties : tuple of float
        Candidates, from large to small.
    condition_powers, separate_powers, target_powers : tuple of float
        Bounds of the exponents: of all inputs and of one input, in median distances, and of the target, in
        standard deviations. Shorter scales of the target fit ties; with longer ones the tails of f outgrow
        the base.
    strides : tuple of float
        Steps of the exponents, one pass each.
    rounds, separate_rounds : int
        Rounds over the coordinates at most: per stride, and over the separate length scales of the inputs.
    errors, separate_errors : float
        A step must lower the loss by this many standard errors of the difference.
    least_gain : float
        And by this much.
    """

    folds: int = 10
    rows: int = 300
    penalties: tuple[float, ...] = tuple(10.0 ** np.arange(1.0, -6.1, -0.5))
    condition_powers: tuple[float, float] = (-4.0, 4.0)
    separate_powers: tuple[float, float] = (-5.0, 5.0)
    target_powers: tuple[float, float] = (-1.0, 2.0)
    strides: tuple[float, ...] = (1.0, 0.5)
    rounds: int = 4
    separate_rounds: int = 2
    errors: float = 0.5
    separate_errors: float = 1.0
    least_gain: float = 1e-4


class _Visit(NamedTuple):
    trial: ScoreTrial
    rows: np.ndarray
    weight: np.ndarray | None

    def beats(self, other: "_Visit", errors: float, least: float) -> bool:
        gains = other.rows - self.rows
        return bool(weighted_mean(gains, self.weight) > least + errors * standard_error(gains, self.weight))


@dataclass
class _Walk:
    """Coordinate ascent over powers of two, with the whole path of penalties at every place."""

    sample: Sample
    scores: np.ndarray
    condition_lengthscale: np.ndarray | None
    lengthscale: float | None
    penalties: np.ndarray
    search: WalkSearch
    seed: int
    report: Listener | None
    trials: list[ScoreTrial] = field(default_factory=list)
    grams: dict[float, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folds = folds_of(self.sample.target, self.search.folds, seed=self.seed)
        self.unit = median_distance(self.sample.condition)

    def run(self) -> ScoreTrial:
        """Return the best trial, with separate length scales of the inputs where they lower the loss."""
        search, places, power = self.search, np.zeros(self.sample.condition.shape[1]), 0.0
        best = self.visit(places, power)
        for stride in search.strides:
            for _ in range(search.rounds):
                start = best
                if self.lengthscale is None:
                    target = lambda p, q=places: (q, p)
                    limits, errors = search.target_powers, search.errors
                    power, best = self._along(power, stride, limits, target, best, errors)
                if self.condition_lengthscale is None:
                    common = lambda p, q=places, r=power: (q + p, r)
                    low, high = search.condition_powers
                    limits = (low - places.min(), high - places.max())
                    shift, best = self._along(0.0, stride, limits, common, best, search.errors)
                    places = places + shift
                if best is start:
                    break
        if self.condition_lengthscale is None and len(places) > 1:
            best = self._separated(places, power, best)
        return best.trial

    def _along(
        self,
        power: float,
        stride: float,
        limits: tuple[float, float],
        place: Callable[..., tuple[np.ndarray, float]],
        best: _Visit,
        errors: float,
    ) -> tuple[float, _Visit]:
        """Step up, then down, while the loss falls; return the exponent and the visit there."""
        for direction in (stride, -stride):
            while limits[0] <= power + direction <= limits[1]:
                candidate = self.visit(*place(power + direction))
                if not candidate.beats(best, errors, self.search.least_gain):
                    break
                power, best = power + direction, candidate
        return power, best

    def _separated(self, places: np.ndarray, power: float, best: _Visit) -> _Visit:
        """Return the best visit with a separate length scale for each input."""
        search = self.search
        for _ in range(search.separate_rounds):
            start = best
            for j, axis in enumerate(np.eye(len(places))):
                one = lambda p, q=places, e=axis, j=j: (q + (p - q[j]) * e, power)
                limits, errors = search.separate_powers, search.separate_errors
                there, best = self._along(places[j], search.strides[0], limits, one, best, errors)
                places = places + (there - places[j]) * axis
            if best is start:
                break
        return best

    def visit(self, places: np.ndarray, power: float) -> _Visit:
        """Return the trial of the one-standard-error rule among the penalties, and its loss in each row."""
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
            smallest = min(trial.loss for trial in self.trials)
            self.report(Report("selection", len(self.trials), 0, {"score": -smallest}))
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
    r"""Conditional density :math:`p(y | x) = p_0(y) \exp(f(x, y) - A_x(f))` by score matching in y.

    f lies in the RKHS of the product of Gaussian kernels :math:`k(x, x') k(y, y')` and minimises

    .. math:: J(f) = \frac1n \sum_{ij} \Big( \tfrac12 (\partial_{y_j} f)^2 + \partial_{y_j} f\,
        \partial_j \log p_0(y_i)
        + \partial_{y_j}^2 f \Big)(x_i, y_i) + \tfrac{\eta}{2} |f|^2

    exactly: a linear system of rows times columns of y (Arbel and Gretton 2018). Several columns of y are
    matched jointly; the paper has one factor per column. Settings left at ``None`` are chosen by the
    cross-validated loss, with equal targets in one fold.

    Parameters
    ----------
    condition_lengthscale : float, array of shape (n_features,) or None
        Length scales of x, in units of the standardised data; an infinite one removes an input.
    lengthscale : float or None
        Length scale of y, in units of the standardised target.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``.
    base : {"gaussian", "mixture"} or measure
        The base measure p0 of the targets.
    base_width : float
        Width of the Gaussian base, in standard deviations of the target; f is 0 far from the data.
    search : WalkSearch or None
        Settings of the search for what is left at None.
    max_equations : int
        Rows times columns of y at most; system and weights take 16 bytes for each pair.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each trial.

    Attributes
    ----------
    density_ : TiltedDensity
    solution_ : Solution
        f, and a sampler: the cells of a grid, or a mixture network for y of more than two columns.
    selection_ : ScoreSelection
        The chosen settings and all trials.
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
        base_width: float = 1.5,
        search: WalkSearch | None = None,
        max_equations: int = 4500,
        random_state: Seed = None,
        progress: bool | Listener = False,
    ) -> None:
        self.condition_lengthscale = condition_lengthscale
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.base_width = base_width
        self.search = search
        self.max_equations = max_equations
        self.random_state = random_state
        self.progress = progress

    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None) -> Self:
        self._check_settings(X.shape[1], *targets.shape)
        check_targets(X, targets, self._names, self._target_names)
        seed_key, sampler_key, nodes_key = keys_from(self.random_state, 3)
        seed, weight = seed_from(seed_key), self._weight
        inputs, scaling = (Scaling.standardising(part, weight=weight) for part in (X, targets))
        sample = Sample(scaling.to_model(targets), inputs.to_model(X), weight)
        mixture = best_mixture(sample.target, seed=seed, weight=weight)
        base = score_base(self.base, sample, mixture, width=float(self.base_width))
        self.selection_ = self._select(sample, base, seed, listener)
        problem, weights = self._solved(sample, base, mixture)
        tilt = problem.tilt(weights)
        finer = problem.nodes(fineness=problem.integration.finer, key=nodes_key)
        coarse = problem.nodes(key=nodes_key) if finer.is_grid else None
        sampler = best_sampler(problem, tilt, coarse or finer, Distillation(), key=sampler_key)
        self.solution_ = Solution(tilt, sampler, Status.CONVERGED, {}, {})
        known = Inputs.of(inputs, sample.condition)
        self.density_ = TiltedDensity(tilt, sampler, scaling, known, None, finer, coarse, None)
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
        """Return the diagnosis of the fit; with held-out X and y, with its calibration.

        f solves its own problem in closed form; a certificate exists for the likelihood only.
        """
        check_is_fitted(self, "density_")
        key, settings = key_from(random_state), Judgement.of(settings)
        return diagnose(
            self.density_,
            self._training,
            self._weight,
            status={"kernel": self.solution_.status},
            calibration=self._calibration(X, y, settings=settings, key=key),
            settings=settings,
            key=key,
        )

    def _check_settings(self, inputs: int, rows: int, columns: int) -> None:
        if not isinstance(self.base, AbstractMeasure):
            one_of("base", self.base, SCORE_BASES)
        check_scale("base_width", self.base_width, ())
        check_scale("condition_lengthscale", self.condition_lengthscale, (), (inputs,), may_be_infinite=True)
        check_scale("lengthscale", self.lengthscale, ())
        check_scale("rkhs_penalty", self.rkhs_penalty, ())
        check_equations(rows, columns, self.max_equations, "use fewer rows, or ConditionalKernelExpFamily")

    def _select(
        self, sample: Sample, base: AbstractMeasure, seed: int, listener: Listener | None
    ) -> ScoreSelection:
        given = None if self.condition_lengthscale is None else np.asarray(self.condition_lengthscale, float)
        if given is not None and self.lengthscale is not None and self.rkhs_penalty is not None:
            scales = np.broadcast_to(given, (sample.condition.shape[1],)).copy()
            settings = ScoreSettings(scales, np.asarray(self.lengthscale, float), float(self.rkhs_penalty))
            return ScoreSelection(settings, None, [])
        search = self.search or WalkSearch()
        rows = sample.rows(np.sort(np.random.default_rng(seed).permutation(len(sample))[: search.rows]))
        penalties = np.array(search.penalties if self.rkhs_penalty is None else [float(self.rkhs_penalty)])
        lengthscale = None if self.lengthscale is None else float(self.lengthscale)
        scores = base_scores(base, rows.target)
        walk = _Walk(rows, scores, given, lengthscale, penalties, search, seed, listener)
        # One BLAS thread: the matrices are too small for several.
        with threadpool_limits(limits=1, user_api="blas"):
            chosen = walk.run()
        scales = np.array(chosen.condition_lengthscale)
        settings = ScoreSettings(scales, np.array(chosen.lengthscale), chosen.rkhs_penalty)
        return ScoreSelection(settings, chosen, walk.trials)

    def _solved(
        self, sample: Sample, base: AbstractMeasure, proposal: AbstractMeasure
    ) -> tuple[Problem, np.ndarray]:
        """Return the problem in the span of derivatives at y_i times kernels at x_i, and the weights."""
        condition_lengthscale, lengthscale, penalty = self.selection_.settings
        kernel, condition_kernel = Gaussian(lengthscale), Gaussian(condition_lengthscale)
        scores, rows = base_scores(base, sample.target), np.arange(len(sample))
        derivatives = full_weights(kernel, condition_kernel, sample, scores, penalty)
        weights = np.zeros((len(sample), *derivatives.shape))
        weights[rows, rows] = derivatives
        conditions = ValueSpan(condition_kernel, sample.condition)
        space = FeatureSpace(conditions, DerivativeSpan(kernel, sample.target))
        return Problem(sample, base, space, penalty, proposal), weights.ravel()
