"""The scikit-learn face: what every estimator of the library shares, whatever it fits and however.

A fit leaves ``density_``, which scores and draws in the data's own units; the face checks what users pass and what they get.
"""

import abc
import contextlib
import functools
import warnings

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from kexpfam import storage
from kexpfam.density import Density
from kexpfam.diagnostics import Calibration, calibrate
from kexpfam.partition import LARGE_ERROR, Estimate
from kexpfam.progress import Bar, Listener
from kexpfam.sample import constant_columns

FEWEST_ROWS = 10
MANY_TIES, FEW_VALUES = 0.1, 0.9


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


class FittedModel(BaseEstimator, abc.ABC):
    """What all estimators share: names of columns, and storage of what ``_stored`` lists."""

    _stored: tuple[str, ...]

    def _listening(self):
        """Return a context manager around the listener that the estimator's ``progress`` asks for, if it has that setting."""
        progress = self.get_params(deep=False).get("progress", False)
        return listening(progress)

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


class DensityFace(DensityMixin, FittedModel):
    """The face of a density ``p(x)``: ``density_`` has ``log_density``, ``sample``, ``refined_sample`` and ``scaling``."""

    _training: np.ndarray

    @abc.abstractmethod
    def _fit(self, X: np.ndarray, listener: Listener | None):
        """Fit to rows that were checked; each estimator has its own way."""

    @in_double_precision
    def fit(self, X, y=None):
        """Fit the density to the rows of X; y is ignored."""
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=FEWEST_ROWS)
        self._remember_names()
        with self._listening() as listener:
            return self._fit(X, listener)

    @in_double_precision
    def score_samples(self, X):
        """Return the normalised log density of each row, in the data's own units; -inf off a bounded support."""
        X = self._checked_points(X)
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

    @property
    @in_double_precision
    def training_data_(self) -> np.ndarray:
        """The rows the model was fitted to, in the data's own units."""
        check_is_fitted(self, "density_")
        return np.asarray(self.density_.scaling.to_data(self._training))

    def _checked_points(self, X) -> np.ndarray:
        check_is_fitted(self, "density_")
        return validate_data(self, X, dtype=np.float64, reset=False)


class ConditionalFace(FittedModel):
    """The face of a conditional density ``p(y | x)``: ``density_`` has the methods of ``conditional.ConditionalDensity``."""

    _training: np.ndarray
    _training_targets: np.ndarray
    _flat_targets: bool

    @abc.abstractmethod
    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None):
        """Fit to rows that were checked; each estimator has its own way."""

    @in_double_precision
    def fit(self, X, y):
        """Fit the density of y given X; y has shape (n,) or (n, p)."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=FEWEST_ROWS)
        self._remember_names()
        y = np.asarray(y, dtype=np.float64)
        self._flat_targets = y.ndim == 1
        with self._listening() as listener:
            return self._fit(X, y.reshape(len(X), -1), listener)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

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

    def _calibration(self, X, y, *, key: Key[Array, ""]) -> Calibration:
        X, targets = self._checked_rows(X, y)
        if targets.shape[1] > 1:
            raise ValueError("calibration is for targets of one dimension: call diagnose() without X and y.")
        return calibrate(self.density_, X, targets, key=key)


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


def listening(progress: bool | Listener):
    """Return a context manager around the listener that ``progress`` asks for."""
    return Bar() if progress is True else contextlib.nullcontext(progress or None)


def one_of(name: str, value, known) -> None:
    """Raise unless the value is one of the known names."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}, or pass an object where one is allowed.")


def check_scale(name: str, value, *shapes: tuple[int, ...], may_be_infinite: bool = False) -> None:
    """Raise unless the value is positive and of one of the shapes; None, which leaves it to the data, is fine."""
    if value is None:
        return
    numbers = np.asarray(value, float)
    fine = np.all(numbers > 0.0) and (may_be_infinite or np.all(np.isfinite(numbers)))
    if numbers.shape not in shapes or not fine:
        raise ValueError(f"{name} must be positive and of shape {' or '.join(map(str, shapes))}, got {value!r}.")


def warn_of_uncertain_constant(estimate: Estimate) -> None:
    """Warn if the normaliser of a density is not to be trusted; to be called by ``_fit``."""
    if not estimate.trustworthy:
        message = f"log Z = {estimate}: log densities share an uncertain constant; diagnose() says what to do."
        warnings.warn(message, UncertainNormaliserWarning, stacklevel=5)


def warn_of_uncertain_partitions(errors: np.ndarray) -> None:
    """Warn if a normaliser of a conditional density is not to be trusted; to be called by ``_fit``."""
    if errors.max() > LARGE_ERROR:
        message = f"log Z(x) is uncertain by up to {errors.max():.2g}: log densities are too; diagnose() says what to do."
        warnings.warn(message, UncertainNormaliserWarning, stacklevel=5)


def check_targets(X: np.ndarray, targets: np.ndarray, estimator) -> None:
    """Raise for targets that have no density; warn of inputs that say nothing and targets that make likelihoods unbounded."""
    if np.any(constant_columns(targets)):
        raise ValueError("y is constant: a constant has no density.")
    constant = named_constants(X, estimator)
    if constant:
        message = f"constant input column(s) {constant} say nothing about y and are ignored."
        warnings.warn(message, UserWarning, stacklevel=5)
    warn_of_ties(targets, "y", "Jitter rounded targets by their rounding step; use a classifier for labels.")


def check_columns(X: np.ndarray, estimator) -> None:
    """Raise for columns that no density can describe; warn of rows that make likelihoods unbounded."""
    constant = named_constants(X, estimator)
    if constant:
        raise ValueError(f"constant column(s) {constant}: a constant has no density; remove them before fitting.")
    warn_of_ties(X, "the data", "Jitter rounded data by its rounding step.")


def named_constants(X: np.ndarray, estimator) -> str:
    """Return the names of the constant columns, or their positions where there are no names."""
    names = getattr(estimator, "feature_names_in_", np.arange(X.shape[1]))
    return ", ".join(str(name) for name in np.asarray(names)[constant_columns(X)])


def warn_of_ties(rows: np.ndarray, what: str, advice: str) -> None:
    """Warn of rows that repeat, on which a density can be made as high as one likes."""
    distinct = len(np.unique(rows, axis=0))
    repeated = 1.0 - distinct / len(rows)
    if repeated > MANY_TIES:
        kind = f"takes only {distinct} values" if repeated > FEW_VALUES else f"repeats in {repeated:.0%} of the rows"
        message = (
            f"{what} {kind}: a density can be made as high as one likes on repeated values, so its score says how narrow the "
            f"spikes are, not how good the fit is. {advice}"
        )
        warnings.warn(message, TiesWarning, stacklevel=6)
