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
from kexpfam.density import Completion, Density
from kexpfam.diagnostics import Diagnosis, diagnose
from kexpfam.kernels import KERNELS
from kexpfam.measures import BASES, best_mixture
from kexpfam.partition import METHODS, log_partition
from kexpfam.potentials import KernelSpan, RandomFeatures, choose_centres
from kexpfam.progress import Bar, Listener
from kexpfam.sample import Sample, Scaling, constant_columns
from kexpfam.selection import Search, reduced
from kexpfam.solvers.dde import DDE
from kexpfam.solvers.exact import Exact
from kexpfam.solvers.task import Task

# The one place where a name becomes a solver.
SOLVERS: dict[str, Callable] = {"dde": DDE, "exact": Exact}
SPACES = ("nystrom", "full", "random_features")
FEWEST_ROWS = 10
MANY_TIES = 0.1


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


class KernelExpFamily(DensityMixin, BaseEstimator):
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
        if hasattr(self, "feature_names_in_"):
            self.column_names_ = [str(name) for name in self.feature_names_in_]
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
            warnings.warn(message, UncertainNormaliserWarning, stacklevel=3)
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
        if n_samples < 1 or n_samples != int(n_samples):
            raise ValueError(f"n_samples must be a whole number of at least 1, got {n_samples}.")
        if refine < 0 or refine != int(refine):
            raise ValueError(f"refine must be a whole number of steps, 0 or more, got {refine}.")
        n_samples = int(n_samples)
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

    @in_double_precision
    def save(self, path) -> None:
        """Write the fitted model to one file: arrays and readable metadata, no code."""
        check_is_fitted(self, "density_")
        state = {
            "params": self._stored_params(),
            "density": self.density_,
            "task": self._task,
            "training": self._training,
            "solution": self.solution_,
            "selection": self.selection_,
        }
        frame = hasattr(self, "feature_names_in_")
        columns = getattr(self, "column_names_", None)
        metadata = {"n_features_in": self.n_features_in_, "columns": columns, "fitted_to_frame": frame}
        storage.save_tree(path, type(self).__name__, state, metadata)

    def _stored_params(self) -> dict:
        skipped = ("progress", "checkpoint", "random_state")
        return {name: value for name, value in self.get_params(deep=False).items() if name not in skipped}

    def _checked_solver(self, width: int):
        """Return the solver, once every setting is known to make sense."""
        one_of("kernel", self.kernel, KERNELS)
        one_of("space", self.space, SPACES)
        one_of("normaliser", self.normaliser, METHODS)
        if isinstance(self.base, str):
            one_of("base", self.base, BASES)
        if self.rkhs_penalty is not None and not 0.0 < self.rkhs_penalty < np.inf:
            raise ValueError(f"rkhs_penalty must be positive and finite, got {self.rkhs_penalty}.")
        if self.n_centres < 1:
            raise ValueError(f"n_centres must be at least 1, got {self.n_centres}.")
        if self.lengthscale is not None:
            scales = np.asarray(self.lengthscale, float)
            if scales.shape not in ((), (width,)):
                raise ValueError(f"lengthscale must be a number or {width} of them, got shape {scales.shape}.")
            if not np.all(scales > 0.0) or not np.any(np.isfinite(scales)):
                raise ValueError(f"lengthscale must be positive, and finite in one dimension at least; got {self.lengthscale}.")
        if hasattr(self.solver, "solve"):
            return self.solver
        one_of("solver", self.solver, SOLVERS)
        return SOLVERS[self.solver]()

    def _space(self, sample: Sample, lengthscale, seed: int, *, key):
        kernel = KERNELS[self.kernel](jnp.asarray(lengthscale))
        if self.space == "random_features":
            return RandomFeatures.draw(kernel, KERNELS[self.kernel](jnp.asarray(1.0)), sample, count=self.n_centres, key=key)
        centres = sample if self.space == "full" else choose_centres(sample, self.n_centres, seed=seed)
        return KernelSpan.build(kernel, kernel, centres)


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
        warnings.warn(message, TiesWarning, stacklevel=4)


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
    if metadata["fitted_to_frame"]:
        estimator.feature_names_in_ = np.array(metadata["columns"], dtype=object)
    estimator.density_, estimator._task, estimator._training = state["density"], state["task"], state["training"]
    estimator.solution_, estimator.selection_ = state["solution"], state["selection"]
    return estimator


ESTIMATORS = {"KernelExpFamily": KernelExpFamily}
