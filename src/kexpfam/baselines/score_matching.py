"""The kernel exponential family by score matching: no normaliser in the fit, a linear system instead, and chains to draw."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from sklearn.utils.validation import check_is_fitted
from threadpoolctl import threadpool_limits

from kexpfam.baselines.derivatives import (
    Basis,
    DerivativeSpan,
    Quadratic,
    base_scores,
    fitted_losses,
    folds_of,
    full_weights,
    steadiest,
)
from kexpfam.density import RESAMPLING_SHARE, Density, walked
from kexpfam.diagnostics import Verdict, judge, sampler_divergence
from kexpfam.face import (
    DensityFace,
    check_columns,
    in_double_precision,
    key_from,
    one_of,
    warn_of_uncertain_constant,
    whole,
)
from kexpfam.kernels import Gaussian, median_distance
from kexpfam.measures import AbstractMeasure, best_mixture
from kexpfam.partition import METHODS, Estimate, log_partition
from kexpfam.potentials import Constant, FeatureSpace, Tilt, spread_rows
from kexpfam.progress import Listener, Report
from kexpfam.sample import Sample, Scaling
from kexpfam.selection import Settings, fit_base
from kexpfam.solvers.loop import Status
from kexpfam.solvers.task import Solution
from kexpfam.transports import Identity, Sampler

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


class ScoreTrial(NamedTuple):
    """One setting, its cross-validated score-matching loss (lower is better) and the standard error over folds."""

    lengthscale: float
    rkhs_penalty: float
    loss: float
    standard_error: float


class ScoreSelection(eqx.Module):
    """The settings, the trial that won them (none if the user fixed them all), and every trial on the way."""

    settings: Settings
    chosen: ScoreTrial | None
    trials: list[ScoreTrial]


@dataclass(frozen=True)
class ScoreMatchingDiagnosis(Verdict):
    """What was measured about a fit by score matching; ``str()`` of it is the report a person reads."""

    status: Status
    log_partition: Estimate
    loss: float
    held_out_loss: float | None
    f_gap: float
    sampler_kl: Estimate
    effective_share: float
    verdict: str
    advice: tuple[str, ...]
    certificate: None = None

    def rows(self) -> list[tuple[str, str]]:
        held_out = "no selection ran" if self.held_out_loss is None else f"{self.held_out_loss:.4f} held out"
        return [
            ("verdict", self.verdict.upper()),
            ("score-matching loss", f"{self.loss:.4f} in training, {held_out}"),
            ("log Z", str(self.log_partition)),
            ("effective share of starts", f"{self.effective_share:.0%}"),
        ]


class ScoreMatchingExpFamily(DensityFace):
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
    >>> from kexpfam.baselines.score_matching import ScoreMatchingExpFamily
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
        variant="nystrom",
        lengthscale=None,
        rkhs_penalty=None,
        n_centres=None,
        base="mixture",
        normaliser="auto",
        random_state=None,
        progress=False,
    ):
        self.variant = variant
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.n_centres = n_centres
        self.base = base
        self.normaliser = normaliser
        self.random_state = random_state
        self.progress = progress

    def _fit(self, X: np.ndarray, listener: Listener | None):
        self._check_settings(*X.shape)
        check_columns(X, self)
        seed_key, partition_key = jr.split(key_from(self.random_state))
        seed = int(jr.randint(seed_key, (), 0, 2**31 - 1))
        scaling = Scaling.standardising(X)
        points = np.asarray(scaling.to_model(X))
        base = fit_base(self.base, points, seed=seed) if isinstance(self.base, str) else self.base
        self.selection_ = self._select(points, base, seed, listener)
        proposal = best_mixture(points, seed=seed)
        tilt = self._solve(points, self.selection_.settings, seed)
        sampler = Sampler(proposal, Identity(), base)
        self.solution_ = Solution(tilt, sampler, Status.CONVERGED, {}, {})
        estimate = log_partition(tilt, proposal, points, method=self.normaliser, key=partition_key)
        self.density_ = Density(tilt, sampler, scaling, estimate, None)
        self._training = points
        warn_of_uncertain_constant(estimate)
        return self

    @in_double_precision
    def sample(self, n_samples=1, random_state=None, *, refine=0):
        """Return draws of shape (n_samples, n_features), each from a chain of HMC of its own.

        ``refine=0`` starts the chains at training points, as users of score matching do: between modes that no chain
        crosses, the data's shares remain. ``refine=k`` starts them at draws of a mixture that are resampled by importance
        weight, so that modes have their shares in the fitted density, and takes k steps.
        """
        check_is_fitted(self, "density_")
        if refine:
            return super().sample(n_samples, random_state, refine=refine)
        density, count, key = self.density_, whole("n_samples", n_samples, 1), key_from(random_state)
        start_key, tune_key, move_key = jr.split(key, 3)
        # Every training point starts as many chains as any other, up to one.
        order = np.asarray(jr.permutation(start_key, len(self._training)))
        starts = self._training[order[np.arange(count) % len(order)]]
        draws = walked(density.tilt, starts, np.zeros((count, 0)), CHAIN_STEPS, tune_key, move_key)
        return np.asarray(density.scaling.to_data(draws))

    @in_double_precision
    def diagnose(self, random_state=0) -> ScoreMatchingDiagnosis:
        """Return what can be known about the quality of the fit; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        density, chosen = self.density_, self.selection_.chosen
        kl, share = sampler_divergence(density.tilt, density.sampler, density.log_partition, key=key_from(random_state))
        # The solution is in closed form and draws are refined, so that only the normaliser is left to judge.
        nothing = Estimate(0.0, 0.0, np.inf)
        verdict, advice = judge(self.solution_.status, density.log_partition, 0.0, nothing, 1.0)
        if share < RESAMPLING_SHARE:
            advice += ("Chains start far from the density: the shares of its modes in draws may be off. Raise rkhs_penalty.",)
            verdict = "poor"
        held_out = None if chosen is None else chosen.loss
        return ScoreMatchingDiagnosis(
            status=self.solution_.status,
            log_partition=density.log_partition,
            loss=float(fitted_losses(density.tilt, Sample.unconditional(self._training)).mean()),
            held_out_loss=held_out,
            f_gap=0.0,
            sampler_kl=kl,
            effective_share=share,
            verdict=verdict,
            advice=advice,
        )

    def _check_settings(self, rows: int, width: int) -> None:
        one_of("variant", self.variant, VARIANTS)
        one_of("normaliser", self.normaliser, METHODS)
        if not isinstance(self.base, AbstractMeasure):
            one_of("base", self.base, SCORE_BASES)
        if self.lengthscale is not None:
            scales = np.asarray(self.lengthscale, float)
            if scales.shape not in ((), (width,)) or not np.all((scales > 0.0) & np.isfinite(scales)):
                raise ValueError(f"lengthscale must be positive, finite, and one number or {width}; got {self.lengthscale!r}.")
        if self.rkhs_penalty is not None and not 0.0 < self.rkhs_penalty < np.inf:
            raise ValueError(f"rkhs_penalty must be positive and finite, got {self.rkhs_penalty}.")
        if self.n_centres is not None and self.n_centres < 1:
            raise ValueError(f"n_centres must be at least 1, got {self.n_centres}.")
        if self.variant == "full" and rows * width > MOST_EQUATIONS:
            raise ValueError(
                f"variant='full' solves a system of rows * columns = {rows * width:,} equations, and {MOST_EQUATIONS:,} is the "
                "most it takes on: use variant='nystrom'."
            )

    def _basis(self, points: np.ndarray, lengthscale, count: int, seed: int) -> Basis:
        build = Basis.of_values if self.variant == "lite" else Basis.of_derivatives
        distinct = np.unique(points, axis=0)
        return build(Gaussian(jnp.asarray(lengthscale)), distinct[spread_rows(distinct, count, seed=seed)])

    def _centres(self, width: int, functions: int) -> int:
        """Return the number of centres that make a basis of so many functions."""
        return max(2, functions if self.variant == "lite" else functions // (width + 1))

    def _solve(self, points: np.ndarray, settings: Settings, seed: int) -> Tilt:
        """Return the tilted base that minimises the penalised loss."""
        penalty, base = settings.rkhs_penalty, settings.base
        scores = np.asarray(base_scores(base, jnp.asarray(points)))
        count = self.n_centres or self._centres(points.shape[1], MOST_FUNCTIONS)
        if self.variant == "full":
            kernel, sample = Gaussian(jnp.asarray(settings.lengthscale)), Sample.unconditional(points)
            weights = full_weights(kernel, Gaussian(jnp.ones(())), sample, scores, penalty).ravel()
            space = FeatureSpace(Constant(), DerivativeSpan(kernel, sample.target))
        else:
            basis = self._basis(points, settings.lengthscale, count, seed)
            weights = basis.weights(basis.quadratic(points, scores).path(np.array([penalty]))[:, 0])
            space = FeatureSpace(Constant(), basis.span)
        return Tilt(space, jnp.asarray(weights), base)

    def _select(self, points: np.ndarray, base: AbstractMeasure, seed: int, listener: Listener | None) -> ScoreSelection:
        dims = tuple(range(points.shape[1]))
        if self.lengthscale is not None and self.rkhs_penalty is not None:
            scales = np.broadcast_to(np.asarray(self.lengthscale, float), (len(dims),))
            return ScoreSelection(Settings(base, dims, scales, float(self.rkhs_penalty)), None, [])
        scores = np.asarray(base_scores(base, jnp.asarray(points)))
        folds = folds_of(points, FOLDS, seed=seed)
        factors = LENGTHSCALES * median_distance(points) if self.lengthscale is None else [1.0]
        shape = np.ones(len(dims)) if self.lengthscale is None else np.asarray(self.lengthscale, float) * np.ones(len(dims))
        penalties = PENALTIES if self.rkhs_penalty is None else np.array([float(self.rkhs_penalty)])
        ranked, trials = [], []
        # Products of small matrices: waking a second thread for each costs more than it saves.
        with threadpool_limits(limits=1, user_api="blas"):
            for step, factor in enumerate(factors):
                basis = self._basis(points, factor * shape, self._centres(len(dims), RANKING_FUNCTIONS), seed)
                table = fold_losses(basis, points, scores, folds, penalties)
                errors = table.std(0) / np.sqrt(len(table))
                path = [
                    ScoreTrial(float(factor * shape.min()), float(penalty), float(loss), float(error))
                    for penalty, loss, error in zip(penalties, table.mean(0), errors, strict=True)
                ]
                trials += path
                place = steadiest(table)
                ranked.append((path[place], factor, table[:, place]))
                if listener is not None:
                    listener(Report("selection", step + 1, len(factors), {"score": -min(trial.loss for trial in trials)}))
        # The loss hardly sees f away from the data; of scales that it cannot tell apart, the shortest leaves f least there.
        chosen, factor, _ = ranked[steadiest(np.stack([losses for _, _, losses in ranked], 1))]
        return ScoreSelection(Settings(base, dims, factor * shape, chosen.rkhs_penalty), chosen, trials)


def fold_losses(
    basis: Basis, points: np.ndarray, scores: np.ndarray, folds: list[np.ndarray], penalties: np.ndarray
) -> np.ndarray:
    """Return the mean loss on each fold of the fit to the others, (folds, penalties)."""
    parts = [basis.quadratic(points[fold], scores[fold]) for fold in folds]
    whole = functools.reduce(Quadratic.plus, parts)
    return np.stack([part.losses(whole.minus(part).path(penalties)) for part in parts])
