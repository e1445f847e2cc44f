"""The library's own estimators: a kernel exponential family for ``p(x)``, and one for ``p(y | x)``."""

import warnings

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from sklearn.utils.validation import check_is_fitted

from kexpfam import storage
from kexpfam.conditional import ConditionalDensity
from kexpfam.conditional_selection import PENALTIES, ConditionalSearch, Scaled, conditional_base, product_space
from kexpfam.density import Completion, Density
from kexpfam.diagnostics import ConditionalDiagnosis, Diagnosis, diagnose, diagnose_conditional
from kexpfam.face import (
    ConditionalFace,
    DensityFace,
    FittedModel,
    check_columns,
    check_scale,
    check_targets,
    in_double_precision,
    key_from,
    one_of,
    warn_of_uncertain_constant,
    warn_of_uncertain_partitions,
)
from kexpfam.kernels import KERNELS
from kexpfam.measures import BASES, best_mixture
from kexpfam.partition import METHODS, log_partition
from kexpfam.potentials import Constant, FeatureSpace, RandomFeatures, choose_centres
from kexpfam.progress import Listener
from kexpfam.sample import Sample, Scaling
from kexpfam.selection import Search, reduced
from kexpfam.solvers.annealed import AnnealedLikelihood
from kexpfam.solvers.contrastive import ContrastiveDivergence
from kexpfam.solvers.dde import DDE
from kexpfam.solvers.exact import Exact
from kexpfam.solvers.functional import FunctionalGradient
from kexpfam.solvers.learned_features import AdaptedFeatures, DeepNetwork
from kexpfam.solvers.mmd_gan import MMDGAN
from kexpfam.solvers.moment_matching import MomentMatching
from kexpfam.solvers.random_features import RandomFeatureGradient
from kexpfam.solvers.singly_dual import SinglyDual
from kexpfam.solvers.task import Task

# The one place where a name becomes a solver.
SOLVERS: dict[str, type] = {
    "dde": DDE,
    "exact": Exact,
    "contrastive": ContrastiveDivergence,
    "annealed": AnnealedLikelihood,
    "moment_matching": MomentMatching,
    "singly_dual": SinglyDual,
    "mmd_gan": MMDGAN,
    "functional": FunctionalGradient,
    "random_features": RandomFeatureGradient,
    "adapted": AdaptedFeatures,
    "deep": DeepNetwork,
}
KNOW_CONDITIONS = ("dde", "exact")
KNOW_NO_CONDITIONS = tuple(solver for name, solver in SOLVERS.items() if name not in KNOW_CONDITIONS)
SPACES = ("nystrom", "full", "random_features")
# Features of the target in a conditional fit, and the smallest share of the largest that a feature may have.
TARGET_FEATURES, SPACE_FLOOR = 20, 1e-8
# Features of the condition: from ... to, one for so many rows.
CONDITION_FEATURES, ROWS_PER_FEATURE = (60, 150), 20


def checked_solver(estimator: FittedModel):
    """Return the estimator's solver, once the settings that both estimators have are known to make sense."""
    one_of("kernel", estimator.kernel, KERNELS)
    if isinstance(estimator.base, str):
        one_of("base", estimator.base, BASES)
    if estimator.rkhs_penalty is not None and not 0.0 < estimator.rkhs_penalty < np.inf:
        raise ValueError(f"rkhs_penalty must be positive and finite, got {estimator.rkhs_penalty}.")
    if estimator.n_centres is not None and estimator.n_centres < 1:
        raise ValueError(f"n_centres must be at least 1, got {estimator.n_centres}.")
    if hasattr(estimator.solver, "solve"):
        return estimator.solver
    one_of("solver", estimator.solver, SOLVERS)
    return SOLVERS[estimator.solver]()


class KernelExpFamily(DensityFace):
    r"""Density :math:`p(x) = p_0(x) \exp(f(x) - A(f))` with f in an RKHS, by penalised maximum likelihood.

    Everything left at ``None`` is chosen from the training data (see ``selection_`` after the fit).

    Parameters
    ----------
    kernel : str
        One of "gaussian", "laplace", "matern32", "matern52", "inverse_multiquadric".
    lengthscale : float, array of shape (n_features,) or None
        In units of the standardised data; infinite entries switch a dimension off.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``.
    base : {"gaussian", "box", "mixture"}, measure or None
        The base measure p0. A measure given as an object is in units of the standardised data.
    space : {"nystrom", "full", "random_features"}
        f on spread-out centres, on all training points, or on random features.
    n_centres : int
        Number of centres, or of random frequencies.
    solver : str or solver object
        "dde" also learns a sampler that corrects its start; "exact" integrates on a grid (f of at most 3 dimensions). The
        others are described in ``docs/algorithms.md``: "functional", "random_features", "adapted", "deep", "contrastive",
        "annealed", "moment_matching", "singly_dual", "mmd_gan".
    normaliser : {"auto", "quadrature", "importance", "smc"}
        How ``log Z`` is computed.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of steps.
    checkpoint : path or None
        A file that is rewritten during the saddle steps; ``fit`` resumes from it if it exists.

    Attributes
    ----------
    density_ : Density
        The fitted density, independent of how it was fitted.
    solution_ : Solution
        Weights, sampler, status and trace of the solver.
    selection_ : Selection
        The chosen settings and every setting tried.
    n_features_in_ : int

    Examples
    --------
    >>> from kexpfam import KernelExpFamily
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(300, random_state=0)
    >>> density = KernelExpFamily(solver="exact", random_state=0).fit(X)
    >>> density.score_samples(X[:2]).shape
    (2,)
    >>> density.sample(5, random_state=1).shape
    (5, 2)
    """

    _stored = ("density_", "_task", "_training", "solution_", "selection_")

    def __init__(
        self,
        *,
        kernel="gaussian",
        lengthscale=None,
        rkhs_penalty=None,
        base=None,
        space="nystrom",
        n_centres=400,
        solver="dde",
        normaliser="auto",
        random_state=None,
        progress=False,
        checkpoint=None,
    ):
        self.kernel = kernel
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.space = space
        self.n_centres = n_centres
        self.solver = solver
        self.normaliser = normaliser
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def _fit(self, X: np.ndarray, listener: Listener | None):
        solver = self._checked_solver(X.shape[1])
        check_columns(X, self)
        seed_key, space_key, solve_key, partition_key = jr.split(key_from(self.random_state), 4)
        seed = int(jr.randint(seed_key, (), 0, 2**31 - 1))
        scaling = Scaling.standardising(X)
        sample = Sample.unconditional(scaling.to_model(X))
        proposal = best_mixture(np.asarray(sample.target), seed=seed)
        search = Search(self.kernel, self.base, self.lengthscale, self.rkhs_penalty, self.n_centres, seed, proposal, listener)
        self.selection_ = search.run(sample)
        settings = self.selection_.settings
        part, base, part_proposal = reduced(sample, settings.base, settings.dims, proposal)
        space = self._space(part, settings.lengthscale, seed, key=space_key)
        self._task = Task(part, base, space, settings.rkhs_penalty, part_proposal)
        checkpoint = storage.Checkpoint(self.checkpoint, self._task) if self.checkpoint is not None else None
        self.solution_ = solver.solve(self._task, key=solve_key, report=listener, checkpoint=checkpoint)
        tilt, sampler = self.solution_.tilt, self.solution_.sampler
        data = np.asarray(part.target)
        estimate = log_partition(tilt, sampler.reference, data, method=self.normaliser, key=partition_key)
        completion = None if len(settings.dims) == X.shape[1] else Completion(settings.base, settings.dims)
        self.density_ = Density(tilt, sampler, scaling, estimate, completion)
        self._training = np.asarray(sample.target)
        warn_of_uncertain_constant(estimate)
        return self

    @in_double_precision
    def diagnose(self, random_state=0) -> Diagnosis:
        """Return what can be known about the quality of the fit; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        density, solution = self.density_, self.solution_
        key = key_from(random_state)
        return diagnose(self._task, density.tilt, density.sampler, density.log_partition, solution.status, key=key)

    @in_double_precision
    def potential(self, X):
        """Return the learned f at each row: ``log p - log p0 + log Z``, all in standardised units."""
        X = self._checked_points(X)
        return self.density_.potential(X)

    def _checked_solver(self, width: int):
        """Return the solver, once every setting is known to make sense."""
        one_of("space", self.space, SPACES)
        one_of("normaliser", self.normaliser, METHODS)
        if self.lengthscale is not None:
            scales = np.asarray(self.lengthscale, float)
            if scales.shape not in ((), (width,)):
                raise ValueError(f"lengthscale must be a number or {width} of them, got shape {scales.shape}.")
            if not np.all(scales > 0.0) or not np.any(np.isfinite(scales)):
                raise ValueError(f"lengthscale must be positive, and finite in one dimension at least; got {self.lengthscale}.")
        return checked_solver(self)

    def _space(self, sample: Sample, lengthscale, seed: int, *, key):
        kernel = KERNELS[self.kernel](jnp.asarray(lengthscale))
        if self.space == "random_features":
            return FeatureSpace(Constant(), RandomFeatures.draw(kernel, sample.target.shape[1], count=self.n_centres, key=key))
        centres = sample if self.space == "full" else choose_centres(sample, self.n_centres, seed=seed)
        return FeatureSpace.of_kernels(kernel, kernel, centres)


class NearlyDeterministicWarning(UserWarning):
    """The targets are (nearly) a function of the inputs: no likelihood is high enough, and its height says little."""


class ConditionalKernelExpFamily(ConditionalFace):
    r"""Conditional density :math:`p(y | x) = p_0(y) \exp(f(x, y) - A_x(f))`, by penalised maximum likelihood.

    f lies in the RKHS of the product kernel :math:`k(x, x') k(y, y')`. Everything left at ``None`` is chosen from the training
    data by cross-validation (see ``selection_`` after the fit).

    Parameters
    ----------
    kernel : str
        One of "gaussian", "laplace", "matern32", "matern52", "inverse_multiquadric".
    condition_lengthscale : float, array of shape (n_features,) or None
        Length scales of x, in units of the standardised data; large ones say that an input matters little.
    lengthscale : float or None
        Length scale of y, in units of the standardised target.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``.
    base : {"gaussian", "box", "mixture"}, measure or None
        The base measure p0 on targets. None is a Gaussian with a small share of a wider one.
    base_width : float or None
        Width of a Gaussian base, in standard deviations of the target.
    power : bool or None
        Whether the target is first made less skewed by a Yeo-Johnson transformation.
    n_centres : int or None
        Features of x in the fit, at most; by default 60, and more from 1,200 rows on.
    solver : {"dde", "exact"} or solver object
        "exact" integrates on a grid (y of at most 2 dimensions) and draws from its cells; "dde" also learns a sampler.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of steps.
    checkpoint : path or None
        A file that is rewritten during the saddle steps; ``fit`` resumes from it if it exists.

    Attributes
    ----------
    density_ : ConditionalDensity
        The fitted density, independent of how it was fitted.
    solution_ : Solution
        Weights, sampler, status and trace of the solver.
    selection_ : ConditionalSelection
        The chosen settings and every setting tried.
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from kexpfam import ConditionalKernelExpFamily
    >>> x = np.random.default_rng(0).uniform(-2, 2, size=(80, 1))
    >>> y = np.sin(2 * x[:, 0]) + 0.2 * np.random.default_rng(1).normal(size=80)
    >>> model = ConditionalKernelExpFamily(solver="exact", random_state=0).fit(x, y)
    >>> model.score_samples(x[:3], y[:3]).shape
    (3,)
    >>> model.quantile(x[:3], [0.05, 0.95]).shape
    (3, 2)
    >>> model.sample(x[:3], 10, random_state=1).shape
    (3, 10)
    """

    _stored = ("density_", "_task", "_training", "_training_targets", "_flat_targets", "solution_", "selection_")

    def __init__(
        self,
        *,
        kernel="gaussian",
        condition_lengthscale=None,
        lengthscale=None,
        rkhs_penalty=None,
        base=None,
        base_width=None,
        power=None,
        n_centres=None,
        solver="dde",
        random_state=None,
        progress=False,
        checkpoint=None,
    ):
        self.kernel = kernel
        self.condition_lengthscale = condition_lengthscale
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.base_width = base_width
        self.power = power
        self.n_centres = n_centres
        self.solver = solver
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None):
        solver = self._checked_solver(X.shape[1])
        check_targets(X, targets, self)
        seed_key, solve_key, nodes_key = jr.split(key_from(self.random_state), 3)
        seed = int(jr.randint(seed_key, (), 0, 2**31 - 1))
        condition_scaling = Scaling.standardising(X, power=True)
        condition = np.asarray(condition_scaling.to_model(X))
        powers = (False, True) if self.power is None else (bool(self.power),)
        scalings = {power: Scaling.standardising(targets, power=power) for power in powers}
        scaled = {power: Scaled.of(scaling, targets, condition) for power, scaling in scalings.items()}
        search = ConditionalSearch(
            kernel=self.kernel,
            base=self.base,
            power=self.power,
            condition_lengthscale=self.condition_lengthscale,
            lengthscale=self.lengthscale,
            width=self.base_width,
            rkhs_penalty=self.rkhs_penalty,
            seed=seed,
            report=listener,
        )
        self.selection_ = search.run(scaled)
        settings = self.selection_.settings
        sample = scaled[settings.power].sample
        base = conditional_base(self.base, np.asarray(sample.target), settings.width, seed=seed)
        centres = self.n_centres or int(np.clip(len(X) // ROWS_PER_FEATURE, *CONDITION_FEATURES))
        space = product_space(self.kernel, sample, settings, centres, TARGET_FEATURES, floor=SPACE_FLOOR, seed=seed)
        proposal = best_mixture(np.asarray(sample.target), seed=seed)
        self._task = Task(sample, base, space, settings.rkhs_penalty, proposal)
        checkpoint = storage.Checkpoint(self.checkpoint, self._task) if self.checkpoint is not None else None
        self.solution_ = solver.solve(self._task, key=solve_key, report=listener, checkpoint=checkpoint)
        scaling = scalings[settings.power]
        self.density_ = ConditionalDensity.of_solution(self._task, self.solution_, scaling, condition_scaling, key=nodes_key)
        self._training, self._training_targets = X, targets
        warn_of_uncertain_partitions(self.density_.partition_errors(X))
        self._warn_if_nearly_deterministic()
        return self

    def _warn_if_nearly_deterministic(self) -> None:
        if self.rkhs_penalty is None and self.selection_.settings.rkhs_penalty < 2.0 * PENALTIES[-1]:
            message = (
                "the smallest penalty was the best: the targets are (nearly) a function of the inputs, or take few values. "
                "Their likelihood has no upper bound, so that a high score measures how narrow the spikes are."
            )
            warnings.warn(message, NearlyDeterministicWarning, stacklevel=5)

    def _checked_solver(self, width: int):
        # An infinite length scale of an input switches it off.
        check_scale("condition_lengthscale", self.condition_lengthscale, (), (width,), may_be_infinite=True)
        check_scale("lengthscale", self.lengthscale, ())
        check_scale("base_width", self.base_width, ())
        solver = checked_solver(self)
        if isinstance(solver, KNOW_NO_CONDITIONS):
            others = ", ".join(KNOW_CONDITIONS)
            raise ValueError(f"solver={self.solver!r} knows no condition: for p(y | x) choose one of {others}.")
        return solver

    @in_double_precision
    def diagnose(self, X=None, y=None, random_state=0) -> ConditionalDiagnosis:
        """Return what can be known about the quality of the fit; with held-out X and y, its calibration too."""
        check_is_fitted(self, "density_")
        key = key_from(random_state)
        calibration = None if X is None else self._calibration(X, y, key=key)
        return diagnose_conditional(self._task, self.density_, self._training, self.solution_.status, calibration, key=key)
