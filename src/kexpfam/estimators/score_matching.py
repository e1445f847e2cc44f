"""The kernel exponential family by score matching: no normaliser in the fit, a linear system instead, and chains to draw."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax.random as jr
import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted
from threadpoolctl import threadpool_limits

from kexpfam.data.columns import check_columns
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.tables import numbered
from kexpfam.data.weights import standard_error, weighted_mean
from kexpfam.estimators.base import (
    DensityEstimator,
    Seed,
    check_scale,
    key_from,
    keys_from,
    one_of,
    warn_of_uncertain_normaliser,
    whole,
)
from kexpfam.estimators.derivatives import (
    Basis,
    DerivativeSpan,
    Quadratic,
    base_scores,
    fitted_losses,
    folds_of,
    full_weights,
    one_standard_error,
)
from kexpfam.estimators.showing import remembered
from kexpfam.fit.bases import best_mixture
from kexpfam.fit.problem import Solution, Status
from kexpfam.integrate.nodes import seed_from
from kexpfam.integrate.partition import METHODS, log_partition
from kexpfam.judge.diagnosis import AbstractDiagnosis, Judgement, judge, sampler_fit
from kexpfam.model import measures
from kexpfam.model.density import Density, Estimate, Inputs, Sampler, Tilt
from kexpfam.model.kernels import Gaussian, median_distance
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import Constant, FeatureSpace, spread_rows
from kexpfam.progress import Listener, Report

__all__ = [
    "ScoreMatchingDiagnosis",
    "ScoreMatchingExpFamily",
    "ScoreSelection",
    "ScoreSettings",
    "ScoreTrial",
]

VARIANTS = ("nystrom", "full", "lite")
# A base whose density does not vanish at its border has no score-matching loss.
SCORE_BASES = ("gaussian", "mixture")
FOLDS = 5
# Length scales are tried in units of the median distance.
LENGTHSCALES = 2.0 ** np.arange(-4.5, 1.1, 0.5)
PENALTIES = 10.0 ** np.arange(1.0, -9.1, -0.5)
# Functions in the basis of a fit where the number of centres is left open, and while settings are ranked.
MOST_FUNCTIONS, RANKING_FUNCTIONS = 1000, 500
# Rows of the linear system of the full solution: 6,000 take 300 MB and minutes.
MOST_EQUATIONS = 6000
# Steps of HMC behind every plain draw.
CHAIN_STEPS = 10


class ScoreSettings(NamedTuple):
    """What a fit needs; length scales are in model units, and without a condition it has none."""

    condition_lengthscale: np.ndarray
    lengthscale: np.ndarray
    rkhs_penalty: float


class ScoreTrial(NamedTuple):
    """One setting, its cross-validated score-matching loss (lower is better) and that loss's standard error."""

    condition_lengthscale: tuple[float, ...]
    lengthscale: float
    rkhs_penalty: float
    loss: float
    standard_error: float


class ScoreSelection(eqx.Module):
    """The settings, the trial that won them (none if the user fixed them all), and every trial on the way."""

    settings: ScoreSettings
    chosen: ScoreTrial | None
    trials: list[ScoreTrial]


def trials_of(
    condition_lengthscale: np.ndarray,
    lengthscale: float,
    penalties: np.ndarray,
    table: np.ndarray,
    weight: np.ndarray | None = None,
) -> list[ScoreTrial]:
    """Return one trial per penalty from a table of losses, (folds or rows, penalties)."""
    scales, errors = (
        tuple(map(float, condition_lengthscale)),
        [standard_error(column, weight) for column in table.T],
    )
    numbers = zip(penalties.tolist(), weighted_mean(table, weight).tolist(), errors, strict=True)
    return [ScoreTrial(scales, float(lengthscale), *row) for row in numbers]


def score_base(
    given: str | AbstractMeasure, sample: Sample, mixture: AbstractMeasure, width: float
) -> AbstractMeasure:
    """Return the base measure: the one given, the mixture, or a normal ``width`` times as wide as the targets."""
    if isinstance(given, AbstractMeasure):
        return given
    points = np.asarray(sample.target)
    return (
        mixture if given == "mixture" else measures.Gaussian.fitted(points, width=width, weight=sample.weight)
    )


@dataclass(frozen=True)
class ScoreMatchingDiagnosis(AbstractDiagnosis):
    """What was measured about a fit by score matching; the share is that of effective draws where chains start."""

    log_partition: Estimate
    loss: float
    held_out_loss: float | None
    effective_share: float
    verdict: str
    advice: tuple[str, ...]

    def lines(self) -> list[tuple[str, str]]:
        held_out = "no selection ran" if self.held_out_loss is None else f"{self.held_out_loss:.4f} held out"
        return [
            ("score-matching loss", f"{self.loss:.4f} in training, {held_out}"),
            ("log Z", str(self.log_partition)),
            ("effective share of starts", f"{self.effective_share:.0%}"),
        ]


class ScoreMatchingExpFamily(DensityEstimator):
    r"""Density :math:`p(x) = p_0(x) \exp(f(x) - A(f))` with f in a Gaussian RKHS, by score matching.

    f minimises the empirical Fisher divergence, which knows no normaliser,

    .. math:: J(f) = \tfrac12 \langle f, C f \rangle + \langle f, \delta \rangle + \tfrac{\eta}{2} |f|^2, \quad
        C = \frac1n \sum_{ij} \partial_j k(x_i, \cdot) \otimes \partial_j k(x_i, \cdot), \quad
        \delta = \frac1n \sum_{ij} \big( \partial_j k(x_i, \cdot)\, \partial_j \log p_0(x_i) + \partial_j^2 k(x_i, \cdot) \big),

    so that f solves :math:`(C + \eta I) f = -\delta`. Score matching hardly sees how mass is shared between separate modes.

    Parameters
    ----------
    variant : {"nystrom", "full", "lite"}
        f in the span of the kernel's derivatives at some centres (Sutherland et al. 2018), the solution over the whole RKHS
        (Sriperumbudur et al. 2017), or f in the span of kernels at some centres (Strathmann et al. 2015).
    lengthscale : float, array of shape (n_features,) or None
        In units of the standardised data; None chooses one number by the cross-validated score-matching loss.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``; None chooses it likewise.
    n_centres : int or None
        Number of centres of "nystrom" and "lite"; None is as many as make a basis of 1,000 functions.
    base : {"mixture", "gaussian"} or measure
        The base measure p0. A mixture settles the shares of the modes, to which the loss is blind: from a normal base they
        can come out nats wrong. A measure given as an object is in units of the standardised data.
    normaliser : {"auto", "quadrature", "importance", "smc"}
        How ``log Z`` is computed after the fit.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each length scale that was tried.

    Attributes
    ----------
    density_ : Density
        The fitted density, independent of how it was fitted.
    solution_ : Solution
        f, and the mixture where chains start.
    selection_ : ScoreSelection
        The chosen settings and every setting tried.
    n_features_in_ : int

    Examples
    --------
    >>> from kexpfam.estimators import ScoreMatchingExpFamily
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(100, random_state=0)
    >>> density = ScoreMatchingExpFamily(lengthscale=0.7, rkhs_penalty=1e-3, random_state=0).fit(X)
    >>> density.score_samples(X[:2]).shape
    (2,)
    """

    _stored = ("density_", "_training", "solution_", "selection_")

    def __init__(
        self,
        *,
        variant: str = "nystrom",
        lengthscale: ArrayLike | None = None,
        rkhs_penalty: float | None = None,
        n_centres: int | None = None,
        base: str | AbstractMeasure = "mixture",
        normaliser: str = "auto",
        random_state: Seed = None,
        progress: bool | Listener = False,
    ) -> None:
        self.variant = variant
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.n_centres = n_centres
        self.base = base
        self.normaliser = normaliser
        self.random_state = random_state
        self.progress = progress

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        self._check_settings(*X.shape)
        check_columns(X, self._names)
        seed_key, partition_key = keys_from(self.random_state, 2)
        seed, nothing = seed_from(seed_key), np.zeros((len(X), 0))
        scaling = Scaling.standardising(X, weight=self._weight)
        self._training = points = scaling.to_model(X)
        proposal = best_mixture(points, seed=seed, weight=self._weight)
        base = score_base(self.base, Sample.unconditional(points, self._weight), proposal, width=1.0)
        self.selection_ = self._select(points, base, seed, listener)
        tilt, sampler = self._solve(points, base, seed), Sampler(proposal, Identity(), base)
        self.solution_ = Solution(tilt, sampler, Status.CONVERGED, {}, {})
        estimate = log_partition(tilt, proposal, points, method=self.normaliser, key=partition_key)
        inputs = Inputs.of(Scaling.plain(nothing), nothing)
        self.density_ = Density(tilt, sampler, scaling, inputs, estimate, None, None, None)
        warn_of_uncertain_normaliser(self.density_, X)
        return self

    def sample(self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0) -> Any:
        """Return draws of shape (n_samples, n_features), each from a chain of HMC of its own.

        ``refine=0`` starts the chains at training points, as users of score matching do: between modes that no chain
        crosses, the data's shares remain. ``refine=k`` starts them at draws of a mixture that are resampled by importance
        weight, so that modes have their shares in the fitted density, and takes k steps.
        """
        check_is_fitted(self, "density_")
        if refine:
            return super().sample(n_samples, random_state, refine=refine)
        from kexpfam.integrate.chains import walked  # BlackJAX is slow to import

        count = whole("n_samples", n_samples, 1)
        start_key, tune_key, move_key = jr.split(key_from(random_state), 3)
        # Every training point starts as many chains as any other, up to one.
        order = np.asarray(jr.permutation(start_key, len(self._training)))
        places = (
            order[np.arange(count) % len(order)]
            if self._weight is None
            else self._sample.drawn(count, key=start_key)
        )
        starts = self._training[np.asarray(places)]
        draws = walked(self.density_.tilt, starts, np.zeros((count, 0)), CHAIN_STEPS, tune_key, move_key)
        return self._rows_like(
            None, self.density_.scaling.to_data(draws), self._names or numbered(draws.shape[1])
        )

    @remembered
    def diagnose(
        self, random_state: Seed = 0, *, settings: Judgement | None = None
    ) -> ScoreMatchingDiagnosis:
        """Return what can be known about the quality of the fit; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        from kexpfam.integrate.nodes import Integration

        density, chosen, settings = self.density_, self.selection_.chosen, settings or Judgement()
        status, partition = self.solution_.status, density.log_partition
        fit = sampler_fit(
            density, self._training, settings.draws, weight=self._weight, key=key_from(random_state)
        )
        # The solution is in closed form and draws are refined, so that only the normaliser is left to judge.
        exact = fit._replace(kl=Estimate(0.0, 0.0, np.inf), share=1.0)
        verdict, advice = judge(status, partition, 0.0, exact, None, conditional=False, settings=settings)
        if fit.share < Integration.resampling_share:
            advice += (
                "Chains start far from the density: the shares of its modes in draws may be off. Raise rkhs_penalty.",
            )
            verdict = "poor"
        loss = float(weighted_mean(fitted_losses(density.tilt, self._sample), self._weight))
        held_out = None if chosen is None else chosen.loss
        return ScoreMatchingDiagnosis(partition, loss, held_out, fit.share, verdict, advice)

    @property
    def _sample(self) -> Sample:
        return Sample.unconditional(self._training, self._weight)

    def _check_settings(self, rows: int, width: int) -> None:
        one_of("variant", self.variant, VARIANTS)
        one_of("normaliser", self.normaliser, METHODS)
        if not isinstance(self.base, AbstractMeasure):
            one_of("base", self.base, SCORE_BASES)
        check_scale("lengthscale", self.lengthscale, (), (width,))
        check_scale("rkhs_penalty", self.rkhs_penalty, ())
        if self.n_centres is not None:
            whole("n_centres", self.n_centres, 1)
        if self.variant == "full" and rows * width > MOST_EQUATIONS:
            raise ValueError(
                f"variant='full' solves a system of rows * columns = {rows * width:,} equations, and {MOST_EQUATIONS:,} is the "
                "most it takes on: use variant='nystrom'."
            )

    def _basis(self, points: np.ndarray, lengthscale: np.ndarray, count: int, seed: int) -> Basis:
        build = Basis.of_values if self.variant == "lite" else Basis.of_derivatives
        distinct = np.unique(points, axis=0)
        return build(Gaussian(lengthscale), distinct[spread_rows(distinct, count, seed=seed)])

    def _centres(self, width: int, functions: int) -> int:
        """Return the number of centres that make a basis of so many functions."""
        return max(2, functions if self.variant == "lite" else functions // (width + 1))

    def _solve(self, points: np.ndarray, base: AbstractMeasure, seed: int) -> Tilt:
        """Return the tilted base that minimises the penalised loss."""
        _, lengthscale, penalty = self.selection_.settings
        scores = base_scores(base, points)
        if self.variant == "full":
            span = DerivativeSpan(Gaussian(lengthscale), points)
            weights = full_weights(span.kernel, Gaussian(1.0), self._sample, scores, penalty).ravel()
            return Tilt(FeatureSpace(Constant(), span), weights, base)
        count = self.n_centres or self._centres(points.shape[1], MOST_FUNCTIONS)
        basis = self._basis(points, lengthscale, count, seed)
        weights = basis.weights(basis.quadratic(points, scores, self._weight).path(np.array([penalty]))[:, 0])
        return Tilt(FeatureSpace(Constant(), basis.span), weights, base)

    def _select(
        self, points: np.ndarray, base: AbstractMeasure, seed: int, listener: Listener | None
    ) -> ScoreSelection:
        width, nothing = points.shape[1], np.zeros(0)
        shape = np.ones(width) * (1.0 if self.lengthscale is None else np.asarray(self.lengthscale, float))
        if self.lengthscale is not None and self.rkhs_penalty is not None:
            return ScoreSelection(ScoreSettings(nothing, shape, float(self.rkhs_penalty)), None, [])
        factors = LENGTHSCALES * median_distance(points) if self.lengthscale is None else np.ones(1)
        penalties = PENALTIES if self.rkhs_penalty is None else np.array([float(self.rkhs_penalty)])
        sample, scores, folds = self._sample, base_scores(base, points), folds_of(points, FOLDS, seed=seed)
        tables, paths = [], []
        # Products of small matrices: waking a second thread for each costs more than it saves.
        with threadpool_limits(limits=1, user_api="blas"):
            for step, factor in enumerate(factors):
                basis = self._basis(points, factor * shape, self._centres(width, RANKING_FUNCTIONS), seed)
                tables.append(fold_losses(basis, sample, scores, folds, penalties))
                paths.append(trials_of(nothing, factor * shape.min(), penalties, tables[-1]))
                if listener is not None:
                    smallest = min(trial.loss for path in paths for trial in path)
                    listener(Report("selection", step + 1, len(factors), {"score": -smallest}))
        places = [one_standard_error(table) for table in tables]
        # The loss hardly sees f away from the data; of scales that it cannot tell apart, the shortest leaves f least there.
        best = one_standard_error(
            np.stack([table[:, place] for table, place in zip(tables, places, strict=True)], 1)
        )
        chosen = paths[best][places[best]]
        settings = ScoreSettings(nothing, factors[best] * shape, chosen.rkhs_penalty)
        return ScoreSelection(settings, chosen, [trial for path in paths for trial in path])


def fold_losses(
    basis: Basis, sample: Sample, scores: np.ndarray, folds: list[np.ndarray], penalties: np.ndarray
) -> np.ndarray:
    """Return the mean loss on each fold of the fit to the others, (folds, penalties)."""
    kept = [sample.rows(fold) for fold in folds]
    parts = [
        basis.quadratic(part.target, scores[fold], part.weight)
        for part, fold in zip(kept, folds, strict=True)
    ]
    whole = functools.reduce(Quadratic.plus, parts)
    return np.stack([part.losses(whole.minus(part).path(penalties)) for part in parts])
