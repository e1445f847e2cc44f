"""The scikit-learn face: thin, and the same for every estimator of the library."""

import contextlib
import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from kexpfam import storage
from kexpfam.conditional import ConditionalDensity
from kexpfam.conditional_selection import PENALTIES, ConditionalSearch, Scaled, conditional_base, product_space
from kexpfam.density import Completion, Density
from kexpfam.diagnostics import ConditionalDiagnosis, Diagnosis, calibrate, diagnose, diagnose_conditional
from kexpfam.kernels import KERNELS
from kexpfam.measures import BASES, best_mixture
from kexpfam.partition import LARGE_ERROR, METHODS, log_partition
from kexpfam.potentials import Constant, FeatureSpace, RandomFeatures, choose_centres
from kexpfam.progress import Bar, Listener
from kexpfam.sample import Sample, Scaling, constant_columns
from kexpfam.selection import Search, reduced
from kexpfam.solvers.dde import DDE
from kexpfam.solvers.exact import Exact
from kexpfam.solvers.task import Task, integration_nodes

# The one place where a name becomes a solver.
SOLVERS: dict[str, Callable] = {"dde": DDE, "exact": Exact}
SPACES = ("nystrom", "full", "random_features")
FEWEST_ROWS = 10
MANY_TIES = 0.1
# Features of the target in a conditional fit, and the smallest share of the largest that a feature may have.
TARGET_FEATURES, SPACE_FLOOR = 20, 1e-8
# Features of the condition: from ... to, one for so many rows.
CONDITION_FEATURES, ROWS_PER_FEATURE = (60, 150), 20
# The normaliser of a conditional density is integrated more finely than the fit, whose grid is the check on it.
PARTITION_FINENESS, PARTITION_NODES = 1.4, 16384


class TiesWarning(UserWarning):
    """So many rows are repeated that no density describes the data: any likelihood can be raised by a spike on the ties."""


class UncertainNormaliserWarning(UserWarning):
    """The normaliser's error bar is too wide for log densities to be taken at face value."""


def key_from(random_state) -> Key[Array, ""]:
    """Return the JAX key of a scikit-learn random state."""
    return jr.key(check_random_state(random_state).randint(2**31 - 1))


def in_double_precision(method):
    """Run a method with JAX's float64 switched on, and leave the caller's JAX as it was."""

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        with jax.enable_x64(True):
            return method(*args, **kwargs)

    return wrapped


class FittedModel(BaseEstimator):
    """What the estimators share: settings that must make sense, and storage."""

    def _solver_object(self):
        """Return the solver, once the settings that all estimators have are known to make sense."""
        one_of("kernel", self.kernel, KERNELS)
        if isinstance(self.base, str):
            one_of("base", self.base, BASES)
        if self.rkhs_penalty is not None and not 0.0 < self.rkhs_penalty < np.inf:
            raise ValueError(f"rkhs_penalty must be positive and finite, got {self.rkhs_penalty}.")
        if self.n_centres is not None and self.n_centres < 1:
            raise ValueError(f"n_centres must be at least 1, got {self.n_centres}.")
        if hasattr(self.solver, "solve"):
            return self.solver
        one_of("solver", self.solver, SOLVERS)
        return SOLVERS[self.solver]()

    def _remember_names(self) -> None:
        if hasattr(self, "feature_names_in_"):
            self.column_names_ = [str(name) for name in self.feature_names_in_]

    @in_double_precision
    def save(self, path) -> None:
        """Write the fitted model to one file: arrays and readable metadata, no code."""
        check_is_fitted(self, "density_")
        skipped = ("progress", "checkpoint", "random_state")
        params = {name: value for name, value in self.get_params(deep=False).items() if name not in skipped}
        state = {"params": params} | {name.strip("_"): getattr(self, name) for name in self._stored}
        frame = hasattr(self, "feature_names_in_")
        columns = getattr(self, "column_names_", None)
        metadata = {"n_features_in": self.n_features_in_, "columns": columns, "fitted_to_frame": frame}
        metadata |= {"targets": getattr(self, "target_names_", None)}
        storage.save_tree(path, type(self).__name__, state, metadata)


class KernelExpFamily(DensityMixin, FittedModel):
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
    solver : {"dde", "exact"} or solver object
        "dde" also learns a sampler that corrects its start; "exact" integrates on a grid (f of at most 3 dimensions).
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

    @in_double_precision
    def fit(self, X, y=None):
        """Fit the density to the rows of X; y is ignored."""
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=FEWEST_ROWS)
        self._remember_names()
        with listening(self.progress) as listener:
            return self._fit(X, listener)

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
        tilt, sampler = self._task.tilt(self.solution_.weights), self.solution_.sampler
        data = np.asarray(part.target)
        estimate = log_partition(tilt, sampler.reference, data, method=self.normaliser, key=partition_key)
        completion = None if len(settings.dims) == X.shape[1] else Completion(settings.base, settings.dims)
        self.density_ = Density(tilt, sampler, scaling, estimate, completion)
        self._training = np.asarray(sample.target)
        if not estimate.trustworthy:
            message = f"log Z = {estimate}: log densities share an uncertain constant; diagnose() says what to do."
            warnings.warn(message, UncertainNormaliserWarning, stacklevel=4)
        return self

    @in_double_precision
    def score_samples(self, X):
        """Return the normalised log density of each row, in the data's own units; -inf off a bounded support."""
        check_is_fitted(self, "density_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self.density_.log_density(X)

    def score(self, X, y=None):
        """Return the mean log density of the rows."""
        return float(np.mean(self.score_samples(X)))

    @in_double_precision
    def sample(self, n_samples=1, random_state=None, *, refine=0):
        """Return draws of shape (n_samples, n_features).

        ``refine=0`` is the learned sampler: milliseconds. ``refine=k`` resamples by importance weight and moves each draw by
        k steps of HMC, which leaves the density itself invariant.
        """
        check_is_fitted(self, "density_")
        n_samples, refine = whole("n_samples", n_samples, 1), whole("refine", refine, 0)
        key = key_from(random_state)
        if refine:
            return self.density_.refined_sample(n_samples, refine, key=key)
        return self.density_.sample(n_samples, key=key)

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
        check_is_fitted(self, "density_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self.density_.potential(X)

    @property
    @in_double_precision
    def training_data_(self) -> np.ndarray:
        """The rows the model was fitted to, in the data's own units."""
        check_is_fitted(self, "density_")
        return np.asarray(self.density_.scaling.to_data(self._training))

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
        return self._solver_object()

    def _space(self, sample: Sample, lengthscale, seed: int, *, key):
        kernel = KERNELS[self.kernel](jnp.asarray(lengthscale))
        if self.space == "random_features":
            return FeatureSpace(Constant(), RandomFeatures.draw(kernel, sample.target.shape[1], count=self.n_centres, key=key))
        centres = sample if self.space == "full" else choose_centres(sample, self.n_centres, seed=seed)
        return FeatureSpace.of_kernels(kernel, kernel, centres)


class NearlyDeterministicWarning(UserWarning):
    """The targets are (nearly) a function of the inputs: no likelihood is high enough, and its height says little."""


class ConditionalKernelExpFamily(FittedModel):
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

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    @in_double_precision
    def fit(self, X, y):
        """Fit the density of y given X; y has shape (n,) or (n, p)."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=FEWEST_ROWS)
        self._remember_names()
        y = np.asarray(y, dtype=np.float64)
        self._flat_targets = y.ndim == 1
        with listening(self.progress) as listener:
            return self._fit(X, y.reshape(len(X), -1), listener)

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
        nodes, coarse = (
            integration_nodes(self._task, proposal, PARTITION_NODES, fineness=fineness, key=nodes_key)
            for fineness in (PARTITION_FINENESS, 1.0)
        )
        self.density_ = ConditionalDensity(
            tilt=self._task.tilt(self.solution_.weights),
            sampler=self.solution_.sampler,
            scaling=scalings[settings.power],
            condition_scaling=condition_scaling,
            low=jnp.asarray(condition.min(0)),
            high=jnp.asarray(condition.max(0)),
            nodes=nodes,
            coarse_nodes=coarse if np.all(nodes.widths > 0.0) else None,
        )
        self._training, self._training_targets = X, targets
        self._warn_of_what_the_fit_shows()
        return self

    def _warn_of_what_the_fit_shows(self) -> None:
        error = float(self.density_.partition_errors(self._training).max())
        if error > LARGE_ERROR:
            message = f"log Z(x) is uncertain by up to {error:.2g}: log densities are too; diagnose() says what to do."
            warnings.warn(message, UncertainNormaliserWarning, stacklevel=5)
        if self.rkhs_penalty is None and self.selection_.settings.rkhs_penalty < 2.0 * PENALTIES[-1]:
            message = (
                "the smallest penalty was the best: the targets are (nearly) a function of the inputs, or take few values. "
                "Their likelihood has no upper bound, so that a high score measures how narrow the spikes are."
            )
            warnings.warn(message, NearlyDeterministicWarning, stacklevel=5)

    def _checked_solver(self, width: int):
        for name in ("condition_lengthscale", "lengthscale", "base_width"):
            value = getattr(self, name)
            shapes = ((), (width,)) if name == "condition_lengthscale" else ((),)
            if value is None:
                continue
            numbers = np.asarray(value, float)
            # An infinite length scale of an input switches it off.
            finite = name == "condition_lengthscale" or np.all(np.isfinite(numbers))
            if numbers.shape not in shapes or not np.all(numbers > 0.0) or not finite:
                raise ValueError(f"{name} must be positive and of shape {' or '.join(map(str, shapes))}, got {value!r}.")
        return self._solver_object()

    @in_double_precision
    def score_samples(self, X, y):
        """Return ``log p(y | x)`` of each row, normalised and in the data's own units; -inf off a bounded support."""
        X, targets = self._checked_rows(X, y)
        return self.density_.log_density(X, targets)

    def score(self, X, y):
        """Return the mean of ``log p(y | x)`` over the rows."""
        return float(np.mean(self.score_samples(X, y)))

    @in_double_precision
    def sample(self, X, n_samples=1, random_state=None, *, refine=0):
        """Return draws of y for each row of X, of shape (n, n_samples), or (n, n_samples, p) if y has columns.

        ``refine=k`` chooses among several draws by importance weight and moves the choice by k steps of HMC, which leaves
        the density itself invariant.
        """
        X = self._checked_features(X)
        n_samples, refine = whole("n_samples", n_samples, 1), whole("refine", refine, 0)
        key = key_from(random_state)
        draws = (
            self.density_.refined_sample(X, n_samples, refine, key=key)
            if refine
            else self.density_.sample(X, n_samples, key=key)
        )
        return draws[:, :, 0] if self._flat_targets else draws

    @in_double_precision
    def predict(self, X):
        """Return the conditional mean of y."""
        X = self._checked_features(X)
        mean = self.density_.mean(X)
        return mean[:, 0] if self._flat_targets else mean

    @in_double_precision
    def quantile(self, X, levels):
        """Return conditional quantiles at each level, of shape (n, n_levels), or (n,) for a single number; 1-D y only."""
        X, wanted = self._checked_features(X), np.atleast_1d(np.asarray(levels, dtype=float))
        if wanted.ndim != 1 or wanted.size == 0 or not np.all((wanted > 0.0) & (wanted < 1.0)):
            raise ValueError(f"levels must lie strictly between 0 and 1, and there must be one at least; got {levels!r}.")
        found = self.density_.quantile(X, wanted)
        return found[:, 0] if np.ndim(levels) == 0 else found

    def interval(self, X, coverage=0.9):
        """Return the central interval that holds y with this probability, of shape (n, 2); 1-D y only."""
        if not 0.0 < coverage < 1.0:
            raise ValueError(f"coverage must lie strictly between 0 and 1, got {coverage!r}.")
        return self.quantile(X, [0.5 - 0.5 * coverage, 0.5 + 0.5 * coverage])

    @in_double_precision
    def cdf(self, X, y):
        """Return ``P(Y <= y | x)`` of each row; 1-D y only."""
        X, targets = self._checked_rows(X, y)
        return self.density_.cdf(X, targets)

    @in_double_precision
    def given(self, x) -> "GivenDensity":
        """Return the density of y under one condition, as an object of its own."""
        row = self._checked_features(x if hasattr(x, "columns") else np.atleast_2d(np.asarray(x, dtype=float)))
        if len(row) != 1:
            raise ValueError(f"given() takes one condition of {self.n_features_in_} numbers, got {len(row)} of them.")
        return GivenDensity(self.density_.given(row[0]), self._flat_targets)

    @in_double_precision
    def diagnose(self, X=None, y=None, random_state=0) -> ConditionalDiagnosis:
        """Return what can be known about the quality of the fit; with held-out X and y, its calibration too."""
        check_is_fitted(self, "density_")
        key = key_from(random_state)
        calibration = None
        if X is not None:
            X, targets = self._checked_rows(X, y)
            if targets.shape[1] > 1:
                raise ValueError("calibration is for targets of one dimension: call diagnose() without X and y.")
            calibration = calibrate(self.density_, X, targets, key=key)
        return diagnose_conditional(self._task, self.density_, self._training, self.solution_.status, calibration, key=key)

    @property
    def training_data_(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows the model was fitted to: X and y."""
        check_is_fitted(self, "density_")
        return self._training, self._training_targets[:, 0] if self._flat_targets else self._training_targets

    def _checked_features(self, X) -> np.ndarray:
        check_is_fitted(self, "density_")
        return validate_data(self, X, dtype=np.float64, reset=False)

    def _checked_rows(self, X, y) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self, "density_")
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=False)
        targets = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
        width = self._training_targets.shape[1]
        if targets.shape[1] != width:
            raise ValueError(f"y has {targets.shape[1]} columns, but the model was fitted to {width}.")
        return X, targets


class GivenDensity:
    """``p(y | x)`` at one x: score points, draw, and look at it."""

    def __init__(self, density: Density, flat: bool):
        self.density, self._flat = density, flat

    @in_double_precision
    def score_samples(self, y):
        """Return the log density at each y, given with shape (n,) or (n, p)."""
        points = np.asarray(y, dtype=np.float64)
        return self.density.log_density(points.reshape(-1, self.density.scaling.shift.size))

    @in_double_precision
    def sample(self, n_samples=1, random_state=None, *, refine=0):
        """Return draws of y, of shape (n_samples,) or (n_samples, p)."""
        n_samples, refine, key = whole("n_samples", n_samples, 1), whole("refine", refine, 0), key_from(random_state)
        draws = self.density.refined_sample(n_samples, refine, key=key) if refine else self.density.sample(n_samples, key=key)
        return draws[:, 0] if self._flat else draws

    def plot(self):
        """Return a figure: the density of a one-dimensional y, draws of the first two columns of a wider one."""
        from kexpfam import report  # matplotlib is slow to import

        return report.plot_given(self)


def whole(name: str, value, least: int) -> int:
    """Return the value as a whole number of at least ``least``, or raise."""
    if value != int(value) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value}.")
    return int(value)


def check_targets(X: np.ndarray, targets: np.ndarray, estimator) -> None:
    """Raise for targets that have no density; warn of inputs that say nothing and targets that make likelihoods unbounded."""
    if np.any(constant_columns(targets)):
        raise ValueError("y is constant: a constant has no density.")
    constant = np.flatnonzero(constant_columns(X))
    names = getattr(estimator, "feature_names_in_", None)
    if constant.size:
        shown = ", ".join(str(names[j]) if names is not None else str(j) for j in constant)
        warnings.warn(f"constant input column(s) {shown} say nothing about y and are ignored.", UserWarning, stacklevel=5)
    repeated = 1.0 - len(np.unique(targets, axis=0)) / len(targets)
    if repeated > MANY_TIES:
        kind = (
            f"takes only {len(np.unique(targets, axis=0))} values"
            if repeated > 0.9
            else f"repeats in {repeated:.0%} of the rows"
        )
        message = (
            f"y {kind}: a density can be made as high as one likes on repeated values, so that its score says how narrow the "
            "spikes are, not how good the fit is. Jitter rounded targets by their rounding step; use a classifier for labels."
        )
        warnings.warn(message, TiesWarning, stacklevel=5)


def listening(progress: bool | Listener):
    """Return a context manager around the listener that ``progress`` asks for."""
    return Bar() if progress is True else contextlib.nullcontext(progress or None)


def one_of(name: str, value, known) -> None:
    """Raise unless the value is one of the known names."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}, or pass an object where one is allowed.")


def check_columns(X: np.ndarray, estimator) -> None:
    """Raise for columns that no density can describe; warn of rows that make likelihoods unbounded."""
    constant = np.flatnonzero(constant_columns(X))
    if constant.size:
        names = getattr(estimator, "feature_names_in_", None)
        shown = [str(names[j]) if names is not None else str(j) for j in constant]
        raise ValueError(f"constant column(s) {', '.join(shown)}: a constant has no density; remove them before fitting.")
    repeated = 1.0 - len(np.unique(X, axis=0)) / len(X)
    if repeated > MANY_TIES:
        message = (
            f"{repeated:.0%} of the rows repeat another: a density can be made as high as one likes on repeated values, so its "
            "score says how narrow the spikes are, not how good the fit is. Jitter rounded data by its rounding step."
        )
        warnings.warn(message, TiesWarning, stacklevel=5)


@in_double_precision
def load(path):
    """Return the estimator stored at ``path``; no code is executed on the way."""
    kind, state, metadata = storage.load_tree(path)
    if kind not in ESTIMATORS:
        raise storage.StorageError(f"{path} holds a {kind!r}, which is not an estimator of this version of kexpfam.")
    estimator = ESTIMATORS[kind](**state["params"])
    estimator.n_features_in_ = metadata["n_features_in"]
    if metadata["columns"] is not None:
        estimator.column_names_ = metadata["columns"]
    if metadata.get("targets") is not None:
        estimator.target_names_ = metadata["targets"]
    if metadata["fitted_to_frame"]:
        estimator.feature_names_in_ = np.array(metadata["columns"], dtype=object)
    for name in estimator._stored:
        setattr(estimator, name, state[name.strip("_")])
    return estimator


ESTIMATORS = {"KernelExpFamily": KernelExpFamily, "ConditionalKernelExpFamily": ConditionalKernelExpFamily}
