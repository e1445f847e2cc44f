"""The kernel exponential family by score matching: a linear system instead of a normaliser, draws by HMC."""

from dataclasses import dataclass
from typing import Any, Self

import jax.random as jr
import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam.baselines.derivatives import (
    Basis,
    DerivativeSpan,
    ValueSpan,
    base_scores,
    fitted_losses,
    full_weights,
)
from kexpfam.baselines.score_search import (
    ScoreSearch,
    ScoreSelection,
    WalkSearch,
    grid_selection,
    walk_selection,
)
from kexpfam.data.columns import check_columns, check_targets
from kexpfam.data.sample import RandomKey, Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.tables import numbered
from kexpfam.data.weights import weighted_mean
from kexpfam.estimators.base import (
    Seed,
    check_scale,
    key_from,
    keys_from,
    one_of,
    warn_of_uncertain_normaliser,
    whole,
)
from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.estimators.density import DensityEstimator
from kexpfam.fit.convex import best_sampler
from kexpfam.fit.distil import Distillation
from kexpfam.fit.mixture import best_mixture
from kexpfam.fit.problem import Problem, Solution, Status
from kexpfam.integrate.nodes import RESAMPLING_SHARE, seed_from
from kexpfam.integrate.partition import METHODS, log_partition
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.measure import Evidence, diagnose, measure_log_partition, measure_status, sampler_fit
from kexpfam.model import measures
from kexpfam.model.density import Inputs, Sampler, Tilt, TiltedDensity
from kexpfam.model.kernels import Gaussian
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import Constant, FeatureSpace, spread_rows
from kexpfam.progress import Listener

VARIANTS = ("nystrom", "full", "lite")
# Score matching needs a base whose density vanishes at infinity.
SCORE_BASES = ("gaussian", "mixture")


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
    one_of("base", given, SCORE_BASES)
    if given == "mixture":
        return mixture
    return measures.Gaussian.fitted(np.asarray(sample.target), width=width, weight=sample.weight)


@dataclass(kw_only=True, eq=False, repr=False)
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

    variant: str = "nystrom"
    lengthscale: ArrayLike | None = None
    rkhs_penalty: float | None = None
    n_centres: int | None = None
    base: str | AbstractMeasure = "mixture"
    normaliser: str = "auto"
    search: ScoreSearch | None = None
    max_functions: int = 1000
    max_equations: int = 6000
    chain_steps: int = 10
    random_state: Seed = None
    progress: bool | Listener = False

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

    def sample(
        self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0, exact: bool = False
    ) -> Any:
        """Return draws of shape (n_samples, n_features), each from its own HMC chain.

        ``refine=0`` starts the chains at training points, so that modes keep the data's shares. ``refine=k``
        starts them at importance-resampled draws of a mixture, so that modes have the shares of the fitted
        density, and takes k steps. ``exact=True`` is that of ``KernelExpFamily.sample``.
        """
        check_is_fitted(self, "density_")
        if refine or exact:
            return super().sample(n_samples, random_state, refine=refine, exact=exact)
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

    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        density, chosen, weight = self.density_, self.selection_.chosen, self._weight
        fit = sampler_fit(density, self._training, settings.draws, settings=settings, weight=weight, key=key)
        loss = float(weighted_mean(fitted_losses(density.tilt, self._sample), weight))
        held_out = "no selection ran" if chosen is None else f"{chosen.loss:.4f} held out"
        level, meaning = "good", "Chains start near the density."
        if fit.share < RESAMPLING_SHARE:
            level = "poor"
            meaning = "Chains start far from the density: shares of modes may be wrong. Raise rkhs_penalty."
        text, share = f"{loss:.4f} in training, {held_out}", f"{fit.share:.0%}"
        starts = (fit.share, None, level, meaning, "effective share of starts", share)
        # f is exact and draws are refined: no level depends on the sampler.
        measured = [
            measure_status(self.solution_.status, label=""),
            Measurement("loss", loss, label="score-matching loss", text=text),
            measure_log_partition(density.log_partition),
            Measurement("effective_share", *starts),
            *calibration,
        ]
        return Diagnosis(measured)

    @property
    def _sample(self) -> Sample:
        return Sample.unconditional(self._training, self._weight)

    def _check_settings(self, rows: int, width: int) -> None:
        one_of("variant", self.variant, VARIANTS)
        one_of("normaliser", self.normaliser, METHODS)
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
        width, search = points.shape[1], self.search or ScoreSearch()
        count = self._centres(width, search.functions)
        basis = lambda lengthscale: self._basis(points, lengthscale, count, seed)
        given = (self.lengthscale, self.rkhs_penalty)
        return grid_selection(basis, self._sample, base_scores(base, points), *given, search, seed, listener)


@dataclass(kw_only=True, eq=False, repr=False)
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
    random_state, progress
        As in ``ScoreMatchingExpFamily``; a callable gets a ``Report`` after each trial.

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

    condition_lengthscale: ArrayLike | None = None
    lengthscale: float | None = None
    rkhs_penalty: float | None = None
    base: str | AbstractMeasure = "gaussian"
    base_width: float = 1.5
    search: WalkSearch | None = None
    max_equations: int = 4500
    random_state: Seed = None
    progress: bool | Listener = False

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

    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        # f solves its own problem in closed form; a certificate exists for the likelihood only.
        found = Evidence(
            density=self.density_,
            training=self._training,
            weight=self._weight,
            status={"kernel": self.solution_.status},
            calibration=calibration,
            settings=settings,
            key=key,
        )
        return diagnose(found)

    def _check_settings(self, inputs: int, rows: int, columns: int) -> None:
        check_scale("base_width", self.base_width, ())
        check_scale("condition_lengthscale", self.condition_lengthscale, (), (inputs,), may_be_infinite=True)
        check_scale("lengthscale", self.lengthscale, ())
        check_scale("rkhs_penalty", self.rkhs_penalty, ())
        check_equations(rows, columns, self.max_equations, "use fewer rows, or ConditionalKernelExpFamily")

    def _select(
        self, sample: Sample, base: AbstractMeasure, seed: int, listener: Listener | None
    ) -> ScoreSelection:
        given = (self.condition_lengthscale, self.lengthscale, self.rkhs_penalty)
        return walk_selection(sample, base, *given, self.search or WalkSearch(), seed, listener)

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
