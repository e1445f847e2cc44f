"""The kernel exponential family by score matching: a linear system instead of a normaliser, draws by HMC."""

import functools
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax.random as jr
import numpy as np
from numpy.typing import ArrayLike
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
    one_standard_error,
)
from kexpfam.data.columns import check_columns
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.tables import numbered
from kexpfam.data.weights import standard_error, weighted_mean
from kexpfam.estimators.base import (
    Seed,
    check_scale,
    key_from,
    keys_from,
    one_of,
    remembered,
    warn_of_uncertain_normaliser,
    whole,
)
from kexpfam.estimators.density import DensityEstimator
from kexpfam.fit.mixture import best_mixture
from kexpfam.fit.problem import Solution, Status
from kexpfam.integrate.nodes import Integration, seed_from
from kexpfam.integrate.partition import METHODS, log_partition
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.measure import measure_log_partition, measure_status, sampler_fit
from kexpfam.model import measures
from kexpfam.model.density import Inputs, Sampler, Tilt, TiltedDensity
from kexpfam.model.kernels import Gaussian, median_distance
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import Constant, FeatureSpace, spread_rows
from kexpfam.progress import Listener, Report

__all__ = [
    "ScoreMatchingExpFamily",
    "ScoreSearch",
    "ScoreSelection",
    "ScoreSettings",
    "ScoreTrial",
]

VARIANTS = ("nystrom", "full", "lite")
# Score matching needs a base whose density vanishes at infinity.
SCORE_BASES = ("gaussian", "mixture")


class ScoreSearch(eqx.Module):
    """Settings of the search for length scale and penalty.

    Parameters
    ----------
    folds : int
        Folds of the cross-validation.
    lengthscales : tuple of float
        Candidates, in units of the median distance.
    penalties : tuple of float
        Candidates, from large to small.
    functions : int
        Functions in the basis while candidates are compared.
    """

    folds: int = 5
    lengthscales: tuple[float, ...] = tuple(2.0 ** np.arange(-4.5, 1.1, 0.5))
    penalties: tuple[float, ...] = tuple(10.0 ** np.arange(1.0, -9.1, -0.5))
    functions: int = 500


class ScoreSettings(NamedTuple):
    """Length scales in model units, and the penalty."""

    condition_lengthscale: np.ndarray
    lengthscale: np.ndarray
    rkhs_penalty: float


class ScoreTrial(NamedTuple):
    """Candidate settings with their cross-validated score-matching loss and its standard error."""

    condition_lengthscale: tuple[float, ...]
    lengthscale: float
    rkhs_penalty: float
    loss: float
    standard_error: float


class ScoreSelection(eqx.Module):
    """The settings, their trial (None if the caller gave all settings), and all trials."""

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
    scales = tuple(map(float, condition_lengthscale))
    errors = [standard_error(column, weight) for column in table.T]
    numbers = zip(penalties.tolist(), weighted_mean(table, weight).tolist(), errors, strict=True)
    return [ScoreTrial(scales, float(lengthscale), *row) for row in numbers]


def check_equations(rows: int, columns: int, most: Any, advice: str) -> None:
    """Raise if the linear system is larger than ``max_equations``."""
    if rows * columns > whole("max_equations", most, 1):
        raise ValueError(
            f"score matching solves rows * columns = {rows * columns:,} equations here, more than "
            f"max_equations={most:,}: {advice}."
        )


def score_base(
    given: str | AbstractMeasure, sample: Sample, mixture: AbstractMeasure, width: float
) -> AbstractMeasure:
    """Return the given base, the mixture, or a normal ``width`` times as wide as the targets."""
    if isinstance(given, AbstractMeasure):
        return given
    if given == "mixture":
        return mixture
    return measures.Gaussian.fitted(np.asarray(sample.target), width=width, weight=sample.weight)


class ScoreMatchingExpFamily(DensityEstimator):
    r"""Density :math:`p(x) = p_0(x) \exp(f(x) - A(f))` with f in a Gaussian RKHS, by score matching.

    f minimises the empirical Fisher divergence, which does not depend on the normaliser,

    .. math:: J(f) = \tfrac12 \langle f, C f \rangle + \langle f, \delta \rangle
        + \tfrac{\eta}{2} |f|^2, \quad
        C = \frac1n \sum_{ij} \partial_j k(x_i, \cdot) \otimes \partial_j k(x_i, \cdot), \quad
        \delta = \frac1n \sum_{ij} \big( \partial_j k(x_i, \cdot)\, \partial_j \log p_0(x_i)
        + \partial_j^2 k(x_i, \cdot) \big),

    so that f solves :math:`(C + \eta I) f = -\delta`. The loss hardly depends on
    the shares of separate modes.

    Parameters
    ----------
    variant : {"nystrom", "full", "lite"}
        f in the span of the kernel's derivatives at some centres (Sutherland et al. 2018), in the whole RKHS
        (Sriperumbudur et al. 2017), or in the span of kernels at some centres (Strathmann et al. 2015).
    lengthscale : float, array of shape (n_features,) or None
        In units of the standardised data; None chooses one number by the cross-validated score-matching loss.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``; None chooses it likewise.
    n_centres : int or None
        Number of centres of "nystrom" and "lite"; None makes a basis of ``max_functions`` functions.
    base : {"mixture", "gaussian"} or measure
        The base measure p0. The mixture determines the shares of the modes; from a normal base they can be
        wrong by nats. A measure given as an object is in units of the standardised data.
    normaliser : {"auto", "quadrature", "importance", "smc"}
        How ``log Z`` is computed after the fit.
    search : ScoreSearch or None
        Settings of the search for what is left at None.
    max_functions : int
        Functions in the basis of "nystrom" and "lite" if ``n_centres`` is None.
    max_equations : int
        Rows times columns of "full" at most: 6,000 equations take 300 MB and minutes.
    chain_steps : int
        HMC steps of each draw of ``sample`` with ``refine=0``.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each length scale.

    Attributes
    ----------
    density_ : TiltedDensity
    solution_ : Solution
        f, and the mixture where chains start.
    selection_ : ScoreSelection
        The chosen settings and all trials.
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
        search: ScoreSearch | None = None,
        max_functions: int = 1000,
        max_equations: int = 6000,
        chain_steps: int = 10,
        random_state: Seed = None,
        progress: bool | Listener = False,
    ) -> None:
        self.variant = variant
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.n_centres = n_centres
        self.base = base
        self.normaliser = normaliser
        self.search = search
        self.max_functions = max_functions
        self.max_equations = max_equations
        self.chain_steps = chain_steps
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
        self.density_ = TiltedDensity(tilt, sampler, scaling, inputs, estimate, None, None, None)
        warn_of_uncertain_normaliser(self.density_, X)
        return self

    def sample(self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0) -> Any:
        """Return draws of shape (n_samples, n_features), each from its own HMC chain.

        ``refine=0`` starts the chains at training points, so that modes keep the data's shares. ``refine=k``
        starts them at importance-resampled draws of a mixture, so that modes have the shares of the fitted
        density, and takes k steps.
        """
        check_is_fitted(self, "density_")
        if refine:
            return super().sample(n_samples, random_state, refine=refine)
        from kexpfam.integrate.chains import walked  # BlackJAX is slow to import

        count = whole("n_samples", n_samples, 1)
        start_key, tune_key, move_key = jr.split(key_from(random_state), 3)
        if self._weight is None:
            # The numbers of chains that start at two training points differ by at most one.
            order = np.asarray(jr.permutation(start_key, len(self._training)))
            places = order[np.arange(count) % len(order)]
        else:
            places = np.asarray(self._sample.drawn(count, key=start_key))
        conditions, steps = np.zeros((count, 0)), whole("chain_steps", self.chain_steps, 1)
        draws = walked(self.density_.tilt, self._training[places], conditions, steps, tune_key, move_key)
        names = self._names or numbered(draws.shape[1])
        return self._codec.rows(self.density_.scaling.to_data(draws), self._output, names)

    @remembered
    def diagnose(self, random_state: Seed = 0, *, settings: Judgement | None = None) -> Diagnosis:
        """Return the diagnosis of the fit; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")

        density, chosen, settings = self.density_, self.selection_.chosen, Judgement.of(settings)
        key = key_from(random_state)
        fit = sampler_fit(
            density, self._training, settings.draws, settings=settings, weight=self._weight, key=key
        )
        loss = float(weighted_mean(fitted_losses(density.tilt, self._sample), self._weight))
        held_out = "no selection ran" if chosen is None else f"{chosen.loss:.4f} held out"
        level, meaning = "good", "Chains start near the density."
        if fit.share < Integration().resampling_share:
            level = "poor"
            meaning = "Chains start far from the density: shares of modes may be wrong. Raise rkhs_penalty."
        text, share = f"{loss:.4f} in training, {held_out}", f"{fit.share:.0%}"
        # f is exact and draws are refined: no level depends on the sampler.
        return Diagnosis(
            [
                measure_status(self.solution_.status, label=""),
                Measurement("loss", loss, label="score-matching loss", text=text),
                measure_log_partition(density.log_partition),
                Measurement(
                    "effective_share", fit.share, None, level, meaning, "effective share of starts", share
                ),
            ]
        )

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
        whole("max_functions", self.max_functions, 2)
        if self.variant == "full":
            check_equations(rows, width, self.max_equations, "use variant='nystrom'")

    def _basis(self, points: np.ndarray, lengthscale: np.ndarray, count: int, seed: int) -> Basis:
        build = Basis.of_values if self.variant == "lite" else Basis.of_derivatives
        distinct = np.unique(points, axis=0)
        return build(Gaussian(lengthscale), distinct[spread_rows(distinct, count, seed=seed)])

    def _centres(self, width: int, functions: int) -> int:
        """Return the number of centres of a basis with this number of functions."""
        return max(2, functions if self.variant == "lite" else functions // (width + 1))

    def _solve(self, points: np.ndarray, base: AbstractMeasure, seed: int) -> Tilt:
        """Return the tilted base that minimises the penalised loss."""
        _, lengthscale, penalty = self.selection_.settings
        scores = base_scores(base, points)
        if self.variant == "full":
            span = DerivativeSpan(Gaussian(lengthscale), points)
            weights = full_weights(span.kernel, Gaussian(1.0), self._sample, scores, penalty).ravel()
            return Tilt(FeatureSpace(Constant(), span), weights, base)
        count = self.n_centres or self._centres(points.shape[1], self.max_functions)
        basis = self._basis(points, lengthscale, count, seed)
        weights = basis.weights(basis.quadratic(points, scores, self._weight).path(np.array([penalty]))[:, 0])
        return Tilt(FeatureSpace(Constant(), basis.span), weights, base)

    def _select(
        self, points: np.ndarray, base: AbstractMeasure, seed: int, listener: Listener | None
    ) -> ScoreSelection:
        width, nothing, search = points.shape[1], np.zeros(0), self.search or ScoreSearch()
        shape = np.ones(width) * (1.0 if self.lengthscale is None else np.asarray(self.lengthscale, float))
        if self.lengthscale is not None and self.rkhs_penalty is not None:
            return ScoreSelection(ScoreSettings(nothing, shape, float(self.rkhs_penalty)), None, [])
        scales = np.array(search.lengthscales) * median_distance(points)
        factors = scales if self.lengthscale is None else np.ones(1)
        penalties = np.array(search.penalties if self.rkhs_penalty is None else [float(self.rkhs_penalty)])
        sample, scores = self._sample, base_scores(base, points)
        folds = folds_of(points, search.folds, seed=seed)
        tables, paths = [], []
        # One BLAS thread: the matrices are too small for several.
        with threadpool_limits(limits=1, user_api="blas"):
            for step, factor in enumerate(factors):
                basis = self._basis(points, factor * shape, self._centres(width, search.functions), seed)
                tables.append(fold_losses(basis, sample, scores, folds, penalties))
                paths.append(trials_of(nothing, factor * shape.min(), penalties, tables[-1]))
                if listener is not None:
                    smallest = min(trial.loss for path in paths for trial in path)
                    listener(Report("selection", step + 1, len(factors), {"score": -smallest}))
        places = [one_standard_error(table) for table in tables]
        # The loss hardly depends on f away from the data; of equivalent scales the shortest makes f smallest
        # there.
        columns = [table[:, place] for table, place in zip(tables, places, strict=True)]
        best = one_standard_error(np.stack(columns, 1))
        chosen = paths[best][places[best]]
        settings = ScoreSettings(nothing, factors[best] * shape, chosen.rkhs_penalty)
        return ScoreSelection(settings, chosen, [trial for path in paths for trial in path])


def fold_losses(
    basis: Basis, sample: Sample, scores: np.ndarray, folds: list[np.ndarray], penalties: np.ndarray
) -> np.ndarray:
    """Return the mean loss on each fold of the fit to the others, (folds, penalties)."""
    held_out = ((sample.rows(fold), scores[fold]) for fold in folds)
    parts = [basis.quadratic(part.target, slopes, part.weight) for part, slopes in held_out]
    whole = functools.reduce(Quadratic.plus, parts)
    return np.stack([part.losses(whole.minus(part).path(penalties)) for part in parts])
