"""The library's own estimators: a kernel exponential family for ``p(x)``, and one for ``p(y | x)``.

Both are one model. What they share is ``KernelModel``; they differ in what they are called with.
"""

import abc
import warnings

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key
from sklearn.utils.validation import check_is_fitted

from kexpfam import storage
from kexpfam.data.columns import check_columns, check_targets
from kexpfam.data.scaling import Scaling
from kexpfam.estimators.base import (
    ConditionalEstimator,
    DensityEstimator,
    Estimator,
    check_scale,
    key_from,
    keys_from,
    one_of,
    warn_of_uncertain_normaliser,
    whole,
)
from kexpfam.fit.bases import BASES, best_mixture
from kexpfam.fit.problem import Problem, Solution, Solver, solver_from
from kexpfam.fit.select import (
    Context,
    Features,
    Fixed,
    Scaled,
    Search,
    Selection,
    Settings,
    build_space,
    centre_rows,
    reduced,
    search,
)
from kexpfam.integrate.nodes import Integration, seed_from, uses_grid
from kexpfam.integrate.partition import METHODS, log_partition
from kexpfam.judge.diagnosis import Diagnosis, Judgement, diagnose
from kexpfam.model.density import Completion, Density, Inputs
from kexpfam.model.kernels import KERNELS
from kexpfam.model.measures import AbstractMeasure, Box
from kexpfam.model.precision import double_precision
from kexpfam.model.spaces import Constant, FeatureSpace, RandomFeatures

__all__ = ["ConditionalKernelExpFamily", "KernelExpFamily", "KernelModel", "NearlyDeterministicWarning"]

SPACES = ("nystrom", "full", "random_features")
# Features below this share of the strongest are left out of a product space.
PRODUCT_FLOOR = 1e-8


class NearlyDeterministicWarning(UserWarning):
    """The targets are (nearly) a function of the inputs: no likelihood is high enough, and its height says little."""


class KernelModel(Estimator):
    """What both estimators are: settings are chosen, a solver finds f and a sampler, and a density is made of them."""

    _problem: Problem
    solution_: Solution
    selection_: Selection

    def _fit_model(self, targets: np.ndarray, X: np.ndarray, listener):
        """Fit to targets under conditions, which may have width zero."""
        solver = self._checked_solver(targets.shape[1], X.shape[1])
        seed_key, space_key, solve_key, partition_key = keys_from(self.random_state, 4)
        seed, search_settings = seed_from(seed_key), self.search or Search()
        fixed, integration = self._fixed(), self.integration or Integration()
        inputs = Scaling.standardising(X, power=True)
        condition = inputs.to_model(X)
        powers = (False, True) if fixed.power is None else (bool(fixed.power),)
        scalings = {power: Scaling.standardising(targets, power=power) for power in powers}
        scaled = {power: Scaled.of(scaling, targets, condition) for power, scaling in scalings.items()}
        if self.bounds is not None:
            low, high = checked_bounds(self.bounds, targets)
            fixed = fixed._replace(base={p: Box(s.to_model(low)[0], s.to_model(high)[0]) for p, s in scalings.items()})
        mixture = self._proposal(scaled, solver, integration, seed)
        self.selection_ = search(scaled, Context(fixed, search_settings, integration, mixture, seed, listener))
        settings = self.selection_.settings
        sample, base = scaled[settings.power].sample, self.selection_.base
        part, part_base, proposal = reduced(sample, base, settings.dims, mixture or base)
        space = self._space(part, settings, seed, key=space_key)
        self._problem = Problem(part, part_base, space, settings.rkhs_penalty, proposal, integration)
        checkpoint = storage.Checkpoint(self.checkpoint, (self._problem, solver)) if self.checkpoint is not None else None
        self.solution_ = solver.solve(self._problem, key=solve_key, report=listener, checkpoint=checkpoint)
        completion = None if len(settings.dims) == targets.shape[1] else Completion(base, settings.dims)
        scaling = scalings[settings.power]
        self.density_ = self._density(scaling, Inputs.of(inputs, condition), completion, key=partition_key)
        self.lengthscale_, self.rkhs_penalty_, self.base_ = settings.lengthscale, settings.rkhs_penalty, base
        return self

    def _proposal(self, scaled: dict[bool, Scaled], solver: Solver, integration: Integration, seed: int):
        """Return a mixture to draw importance nodes from, if anything is going to."""
        sample = scaled[max(scaled)].sample
        grid = uses_grid(sample.target.shape[1], conditional=sample.conditional, settings=integration)
        return None if grid and not solver.uses_proposal else best_mixture(np.asarray(sample.target), seed=seed)

    def _density(self, scaling: Scaling, inputs: Inputs, completion: Completion | None, *, key: Key[Array, ""]) -> Density:
        """Return the density of the solution, with its normaliser."""
        problem, (tilt, sampler, *_) = self._problem, self.solution_
        finer, coarse = (problem.nodes(fineness=fineness, key=key) for fineness in (problem.integration.finer, 1.0))
        tilt, sampler = on_host(tilt), on_host(sampler)
        if problem.conditional:
            return Density(tilt, sampler, scaling, inputs, None, finer, coarse if finer.is_grid else None, completion)
        data, how = np.asarray(problem.sample.target), self.get_params(deep=False).get("normaliser", "auto")
        options = {"method": how, "settings": problem.integration, "key": key}
        estimate = log_partition(tilt, sampler.reference, data, **options)
        return Density(tilt, sampler, scaling, inputs, estimate, finer if finer.is_grid else None, None, completion)

    def _diagnosed(self, calibration, settings: Judgement | None, key) -> Diagnosis:
        with double_precision():
            status = self.solution_.status
            return diagnose(self._problem, self.density_, self._training, status, calibration, settings=settings, key=key)

    def _fixed(self) -> Fixed:
        names = self.get_params(deep=False)
        return Fixed(**{name: names.get(name) for name in Fixed._fields})

    def _checked_solver(self, target_dim: int, condition_dim: int) -> Solver:
        """Return the solver, once every setting is known to make sense."""
        one_of("kernel", self.kernel, KERNELS)
        if isinstance(self.base, str):
            one_of("base", self.base, BASES)
        elif self.base is not None and not isinstance(self.base, AbstractMeasure):
            raise TypeError(f"base must be one of {', '.join(BASES)}, a measure or None; got {self.base!r}.")
        if self.bounds is not None and self.base not in (None, "box"):
            raise ValueError("bounds make the base a box: leave base at None or 'box'.")
        check_scale("rkhs_penalty", self.rkhs_penalty, ())
        if self.n_centres is not None:
            whole("n_centres", self.n_centres, 1)
        for name, record in (("search", Search), ("integration", Integration)):
            if not isinstance(getattr(self, name), record | None):
                raise TypeError(f"{name} must be a {record.__name__} or None, got {getattr(self, name)!r}.")
        solver = solver_from(self.solver, conditional=condition_dim > 0)
        settings = self.integration or Integration()
        if solver.grid_only and condition_dim and not uses_grid(target_dim, conditional=True, settings=settings):
            raise ValueError(f"{type(solver).__name__} needs a grid, and y has {target_dim} columns: use solver='auto'.")
        return solver

    def _space(self, sample, settings: Settings, seed: int, *, key) -> FeatureSpace:
        features = self._features()
        return build_space(self.kernel, sample, centre_rows(sample, features, seed=seed), settings.lengthscales, features)

    @abc.abstractmethod
    def _features(self) -> Features:
        """Return how many features f has."""


def checked_bounds(bounds, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper bounds, one row each, once they are known to hold all targets."""
    low, high = (np.broadcast_to(np.asarray(side, float), (1, targets.shape[1])) for side in bounds)
    if not np.all(np.isfinite(low) & np.isfinite(high) & (low < high)):
        raise ValueError(f"bounds must be finite, the lower below the upper one, in every column; got {bounds!r}.")
    if np.any((targets < low) | (targets > high)):
        raise ValueError("some rows lie outside the bounds; widen them, or remove these rows.")
    return low, high


def on_host(module: eqx.Module):
    """Return a module with its arrays as NumPy arrays, which keep their precision whoever unpickles them."""
    arrays, rest = eqx.partition(module, eqx.is_array)
    return eqx.combine(jax.tree.map(np.asarray, arrays), rest)


class KernelExpFamily(DensityEstimator, KernelModel):
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
    bounds : pair of float or of arrays of shape (n_features,), or None
        Lower and upper end of the support, in the data's own units: the base is a box, and the density 0 outside it.
    space : {"nystrom", "full", "random_features"}
        f on spread-out centres, on all training points, or on random features.
    n_centres : int
        Number of centres, or of random frequencies.
    solver : str or Solver
        "auto" solves the convex problem outright, on a grid in up to three coordinates of f and on importance draws elsewhere;
        "exact" insists on the grid; "dde" is the doubly dual embedding. The others are the paper's, described in
        ``docs/algorithms.md``: "functional", "random_features", "adapted", "deep", "contrastive", "annealed",
        "moment_matching", "singly_dual", "mmd_gan".
    normaliser : {"auto", "quadrature", "importance", "smc"}
        How ``log Z`` is computed.
    search : Search or None
        How settings are searched for: folds, penalties, lattice.
    integration : Integration or None
        How integrals are done: cells, draws.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of steps.
    checkpoint : path or None
        A file that is rewritten during the steps of a solver; ``fit`` resumes from it if it exists.

    Attributes
    ----------
    density_ : Density
        The fitted density, independent of how it was fitted.
    solution_ : Solution
        f, sampler, status and trace of the solver.
    selection_ : Selection
        The chosen settings and every setting tried.
    lengthscale_, rkhs_penalty_, base_
        What was chosen.
    n_features_in_ : int

    Examples
    --------
    >>> from kexpfam import KernelExpFamily
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(300, random_state=0)
    >>> density = KernelExpFamily(random_state=0).fit(X)
    >>> density.score_samples(X[:2]).shape
    (2,)
    >>> density.sample(5, random_state=1).shape
    (5, 2)
    """

    _stored = ("density_", "_problem", "_training", "solution_", "selection_", "lengthscale_", "rkhs_penalty_", "base_")

    def __init__(
        self,
        *,
        kernel="gaussian",
        lengthscale=None,
        rkhs_penalty=None,
        base=None,
        bounds=None,
        space="nystrom",
        n_centres=400,
        solver="auto",
        normaliser="auto",
        search=None,
        integration=None,
        random_state=None,
        progress=False,
        checkpoint=None,
    ):
        self.kernel = kernel
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.bounds = bounds
        self.space = space
        self.n_centres = n_centres
        self.solver = solver
        self.normaliser = normaliser
        self.search = search
        self.integration = integration
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def _fit(self, X: np.ndarray, listener):
        one_of("space", self.space, SPACES)
        one_of("normaliser", self.normaliser, METHODS)
        check_scale("lengthscale", self.lengthscale, (), (X.shape[1],), may_be_infinite=True)
        if self.lengthscale is not None and not np.any(np.isfinite(self.lengthscale)):
            raise ValueError(f"lengthscale must be finite in one dimension at least; got {self.lengthscale}.")
        self._checked_solver(X.shape[1], 0)
        check_columns(X, self._names)
        self._fit_model(X, np.zeros((len(X), 0)), listener)
        self._training = self.density_.scaling.to_model(X)
        warn_of_uncertain_normaliser(self.density_, X)
        return self

    def diagnose(self, random_state=0, *, settings=None) -> Diagnosis:
        """Return what can be known about the quality of the fit; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        return self._diagnosed(None, settings, key_from(random_state))

    def potential(self, X):
        """Return the learned f at each row: ``log p - log p0 + log Z``, all in standardised units."""
        X = self._checked_points(X)
        return self.density_.potential(X)

    def _fixed(self) -> Fixed:
        return super()._fixed()._replace(power=False)

    def _features(self) -> Features:
        return Features(centres=np.iinfo(np.int32).max if self.space == "full" else self.n_centres)

    def _space(self, sample, settings: Settings, seed: int, *, key) -> FeatureSpace:
        if self.space != "random_features":
            return super()._space(sample, settings, seed, key=key)
        kernel, dim = KERNELS[self.kernel](settings.lengthscale), sample.target.shape[1]
        return FeatureSpace(Constant(), RandomFeatures.draw(kernel, dim, count=self.n_centres, key=key))


class ConditionalKernelExpFamily(ConditionalEstimator, KernelModel):
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
    bounds : pair of float or of arrays of shape (n_targets,), or None
        Lower and upper end of the support of y, in its own units: the base is a box, and the density 0 outside it.
    base_width : float or None
        Width of a Gaussian base, in standard deviations of the target.
    power : bool or None
        Whether the target is first made less skewed by a Yeo-Johnson transformation.
    n_centres : int or None
        Features of x in the fit, at most; by default 60, and more from 1,200 rows on.
    solver : str or Solver
        "auto" solves the convex problem outright, on a grid for y of up to two columns; "exact" insists on the grid; "dde" is
        the doubly dual embedding.
    search : Search or None
        How settings are searched for: folds, penalties, lattice.
    integration : Integration or None
        How integrals are done: cells, draws.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of steps.
    checkpoint : path or None
        A file that is rewritten during the steps of a solver; ``fit`` resumes from it if it exists.

    Attributes
    ----------
    density_ : Density
        The fitted density, independent of how it was fitted.
    solution_ : Solution
        f, sampler, status and trace of the solver.
    selection_ : Selection
        The chosen settings and every setting tried.
    lengthscale_, rkhs_penalty_, base_, condition_lengthscale_
        What was chosen.
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from kexpfam import ConditionalKernelExpFamily
    >>> x = np.random.default_rng(0).uniform(-2, 2, size=(80, 1))
    >>> y = np.sin(2 * x[:, 0]) + 0.2 * np.random.default_rng(1).normal(size=80)
    >>> model = ConditionalKernelExpFamily(random_state=0).fit(x, y)
    >>> model.score_samples(x[:3], y[:3]).shape
    (3,)
    >>> model.quantile(x[:3], [0.05, 0.95]).shape
    (3, 2)
    >>> model.sample(x[:3], 10, random_state=1).shape
    (3, 10)
    """

    _stored = (
        *("density_", "_problem", "_training", "_training_targets", "_flat_targets", "solution_", "selection_"),
        *("lengthscale_", "condition_lengthscale_", "rkhs_penalty_", "base_"),
    )

    def __init__(
        self,
        *,
        kernel="gaussian",
        condition_lengthscale=None,
        lengthscale=None,
        rkhs_penalty=None,
        base=None,
        bounds=None,
        base_width=None,
        power=None,
        n_centres=None,
        solver="auto",
        search=None,
        integration=None,
        random_state=None,
        progress=False,
        checkpoint=None,
    ):
        self.kernel = kernel
        self.condition_lengthscale = condition_lengthscale
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.bounds = bounds
        self.base_width = base_width
        self.power = power
        self.n_centres = n_centres
        self.solver = solver
        self.search = search
        self.integration = integration
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def _fit(self, X: np.ndarray, targets: np.ndarray, listener):
        # An infinite length scale of an input switches it off.
        check_scale("condition_lengthscale", self.condition_lengthscale, (), (X.shape[1],), may_be_infinite=True)
        check_scale("lengthscale", self.lengthscale, ())
        check_scale("base_width", self.base_width, ())
        self._checked_solver(targets.shape[1], X.shape[1])
        check_targets(X, targets, self._names)
        self._fit_model(targets, X, listener)
        self.condition_lengthscale_ = self.selection_.settings.condition_lengthscale
        warn_of_uncertain_normaliser(self.density_, X)
        self._warn_if_nearly_deterministic()
        return self

    def diagnose(self, X=None, y=None, random_state=0, *, settings=None) -> Diagnosis:
        """Return what can be known about the quality of the fit; with held-out X and y, its calibration too."""
        check_is_fitted(self, "density_")
        key = key_from(random_state)
        return self._diagnosed(self._calibration(X, y, key=key), settings, key)

    def _features(self) -> Features:
        rank = Features().condition_rank if self.n_centres is None else (self.n_centres, self.n_centres)
        return Features(condition_rank=rank, floor=PRODUCT_FLOOR)

    def _warn_if_nearly_deterministic(self) -> None:
        smallest = min((self.search or Search()).penalties)
        if self.rkhs_penalty is None and self.rkhs_penalty_ < 2.0 * smallest:
            message = (
                "the smallest penalty was the best: the targets are (nearly) a function of the inputs, or take few values. "
                "Their likelihood has no upper bound, so that a high score measures how narrow the spikes are."
            )
            warnings.warn(message, NearlyDeterministicWarning, stacklevel=4)
