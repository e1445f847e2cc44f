"""The scikit-learn face: what every estimator of the library shares, whatever it fits and however.

A fit leaves ``density_``, which scores and draws in the data's own units; the face checks what users pass and what they get.
"""

import abc
import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key
from numpy.typing import ArrayLike
from sklearn.base import DensityMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from kexpfam import processes, storage
from kexpfam.cache import use_compilation_cache
from kexpfam.data.frames import as_table, framed, layout_of
from kexpfam.data.sample import AnyArray
from kexpfam.data.tables import numbered
from kexpfam.data.weights import Weighted, checked_weights, counted_mean, effective_rows, is_whole
from kexpfam.estimators.given import GivenDensity
from kexpfam.estimators.messages import Seed, check_scale, one_of, shown, whole
from kexpfam.estimators.output import FrameOutput
from kexpfam.estimators.predictive import Predictive
from kexpfam.estimators.showing import Shown
from kexpfam.model.density import LARGE_ERROR, Density
from kexpfam.model.distributions import AbstractDensity, scores
from kexpfam.model.ensemble import Stack
from kexpfam.model.precision import double_precision
from kexpfam.progress import Bar, Listener
from kexpfam.stacklevel import caller_level

if TYPE_CHECKING:
    pass

__all__ = [
    "ConditionalEstimator",
    "DensityEstimator",
    "Estimator",
    "GivenDensity",
    "Seed",
    "UncertainNormaliserWarning",
    "check_scale",
    "key_from",
    "keys_from",
    "listening",
    "one_of",
    "shown",
    "warn_of_uncertain_normaliser",
    "whole",
]

FEWEST_ROWS = 10
# Characters of a value that an error message repeats.


class UncertainNormaliserWarning(UserWarning):
    """The normaliser's error bar is too wide for log densities to be taken at face value."""


def key_from(random_state: Seed) -> Key[Array, ""]:
    """Return the JAX key of a scikit-learn random state."""
    return keys_from(random_state, 1)[0]


def keys_from(random_state: Seed, count: int) -> list[Key[Array, ""]]:
    """Return several keys of a scikit-learn random state."""
    try:
        seeds = check_random_state(random_state).randint(2**31 - 1, size=count)
    except ValueError:
        kinds = "a whole number from 0 to 2**32 - 1, a numpy.random.RandomState or None"
        raise ValueError(f"random_state must be {kinds}; got {shown(random_state)}.") from None
    return [jr.key(seed) for seed in seeds]


class Estimator(FrameOutput, Shown, abc.ABC):
    """What all estimators share: names of columns, progress, precision, and storage of what ``_stored`` lists."""

    conditional: ClassVar[bool]
    _stored: tuple[str, ...]
    _training: np.ndarray
    _weight: np.ndarray | None = None
    density_: Any
    # What the files of all estimators hold, whatever else they do.
    _shared: ClassVar[tuple[str, ...]] = ("_weight",)

    @property
    def _names(self) -> list[str] | None:
        return getattr(self, "column_names_", None)

    def _validated(self, X: ArrayLike, *, reset: bool) -> np.ndarray:
        """Return the rows as finite numbers; ``reset`` for those of a fit."""
        least = FEWEST_ROWS if reset else 1
        return validate_data(self, as_table(X), dtype=np.float64, reset=reset, ensure_min_samples=least)

    def _validated_pair(
        self, X: ArrayLike, y: ArrayLike | None, *, reset: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets as finite numbers; ``reset`` for those of a fit."""
        numeric = {"dtype": np.float64, "multi_output": True, "y_numeric": True}
        least, y = FEWEST_ROWS if reset else 1, None if y is None else as_table(y)
        return validate_data(self, as_table(X), y, **numeric, reset=reset, ensure_min_samples=least)

    def _log_density(self, density: Any, targets: np.ndarray, *X: np.ndarray) -> np.ndarray:
        return scores(density, targets, *X)

    def _decoded(self, values: np.ndarray, *, whole: bool = True) -> np.ndarray:
        """Return numbers as cells of the table that was fitted to; means of integers are not ``whole``."""
        return values

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[Listener | None]:
        """Give a fit its listener, float64 and the compilation cache."""
        use_compilation_cache()
        self._diagnosis = None
        with listening(self.get_params(deep=False).get("progress", False)) as listener, double_precision():
            yield listener

    @property
    def _merges_equal_rows(self) -> bool:
        """Return whether rows that are equal are one row with more weight: not where repetition is what there is to learn."""
        return True

    def _counted(self, sample_weight: ArrayLike | None, *tables: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the rows that a fit is made to, once they are known to be enough, and keep what they count."""
        weight = checked_weights(sample_weight, len(tables[0]))
        rows, self._weight = Weighted.of(
            np.concatenate(tables, axis=1), weight, merged=self._merges_equal_rows
        )
        if weight is None:
            return tables
        if (seen := int(np.sum(weight if is_whole(weight) else weight > 0.0))) < FEWEST_ROWS:
            raise ValueError(f"sample_weight leaves {seen} rows, and {FEWEST_ROWS} are needed at least.")
        return tuple(table[rows] for table in tables)

    @property
    def training_weight_(self) -> np.ndarray:
        """What each of the rows in ``training_data_`` counts; of rows that are equal only one is kept if weights were given."""
        check_is_fitted(self, "density_")
        return np.ones(len(self._training)) if self._weight is None else self._weight

    @property
    def _effective_rows(self) -> float:
        return effective_rows(self._weight, len(self._training))

    def save(self, path: str | os.PathLike) -> None:
        """Write the fitted model to one file: arrays and readable metadata, no code."""
        check_is_fitted(self, "density_")
        skipped = ("progress", "checkpoint", "random_state")
        params = {name: value for name, value in self.get_params(deep=False).items() if name not in skipped}
        state = {"params": params} | {
            name.strip("_"): getattr(self, name) for name in (*self._stored, *self._shared)
        }
        metadata = {
            "n_features_in": self.n_features_in_,
            "columns": self._names,
            "fitted_to_frame": hasattr(self, "feature_names_in_"),
            "targets": getattr(self, "target_names_", None),
            "layouts": [self._layout, self._target_layout],
        }
        storage.save_tree(path, type(self).__name__, state, metadata)

    def _draws(self, density: Any, count: Any, random_state: Seed, refine: Any, *X: np.ndarray) -> np.ndarray:
        """Return plain or refined draws of a density; those of baselines follow their density already."""
        count, refine, key = whole("n_samples", count, 1), whole("refine", refine, 0), key_from(random_state)
        if not refine or not isinstance(density, Density):
            return density.sample(count, *X, key=key)
        from kexpfam.integrate.chains import refine as refined  # BlackJAX is slow to import

        return refined(density, count, refine, *X, key=key)


class DensityEstimator(DensityMixin, Estimator):
    """The face of a density ``p(x)``."""

    conditional: ClassVar[bool] = False

    @abc.abstractmethod
    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        """Fit to rows that were checked; each estimator has its own way."""

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the density to the rows of X; y is ignored.

        A row of weight 2 is a row that was seen twice, one of weight 0 is left out; see ``docs/weights.md``.
        """
        self._note_layout(X)
        points = self._validated(X, reset=True)
        (points,) = self._counted(sample_weight, points)
        with self._fitting() as listener:
            return self._fit(points, listener)

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Return the normalised log density of each row, in the data's own units; -inf off a bounded support."""
        points = self._checked_points(X)
        return self._log_density(self.density_, points)

    def log_prob(self, x: Float[AnyArray, "*d"]) -> Float[Array, ""]:
        """Return ``log p(x)`` at one point as a pure function of JAX: jit it, differentiate it, vmap it over rows.

        It is ``score_samples`` of that point, computed in float64 whatever JAX is set to and given in the precision of x.
        """
        check_is_fitted(self, "density_")
        return self.density_.log_prob(x)

    def score(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> float:
        """Return the mean log density of the rows, by their weights if there are any."""
        return counted_mean(self.score_samples(X), sample_weight)

    def sample(self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0) -> Any:
        """Return draws of shape (n_samples, n_features), in a frame if the model was fitted to one (see ``set_output``).

        ``refine=0`` is the fitted sampler: milliseconds. ``refine=k`` resamples by importance weight and moves each draw by
        k steps of HMC, which leaves the density itself invariant.
        """
        check_is_fitted(self, "density_")
        draws = self._decoded(self._draws(self.density_, n_samples, random_state, refine))
        return self._rows_like(None, draws, self._names or numbered(draws.shape[1]))

    @property
    def training_data_(self) -> np.ndarray:
        """The rows the model was fitted to, in the data's own units."""
        check_is_fitted(self, "density_")
        return self._decoded(self.density_.scaling.to_data(self._training))

    def _checked_points(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self, "density_")
        return self._validated(X, reset=False)


class ConditionalEstimator(Predictive, Estimator):
    """The face of a conditional density ``p(y | x)``."""

    conditional: ClassVar[bool] = True
    _shared: ClassVar[tuple[str, ...]] = ("_weight", "_conformal")
    _training_targets: np.ndarray
    _flat_targets: bool

    @abc.abstractmethod
    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None) -> Self:
        """Fit to rows that were checked; each estimator has its own way."""

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the density of y given X; y has shape (n,) or (n, p).

        A row of weight 2 is a row that was seen twice, one of weight 0 is left out; see ``docs/weights.md``.
        """
        self._note_layout(X, y)
        rows, targets = self._validated_pair(X, y, reset=True)
        self._flat_targets = targets.ndim == 1
        rows, targets = self._counted(sample_weight, rows, targets.astype(np.float64).reshape(len(rows), -1))
        with self._fitting() as listener:
            self._training, self._training_targets, self._conformal = rows, targets, None
            return self._fit(self._training, self._training_targets, listener)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    def score_samples(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return ``log p(y | x)`` of each row, normalised and in the data's own units; -inf off a bounded support."""
        X, targets = self._checked_rows(X, y)
        return self._log_density(self.density_, targets, X)

    def log_prob(self, x: Float[AnyArray, "*p"], y: Float[AnyArray, "*d"]) -> Float[Array, ""]:
        """Return ``log p(y | x)`` at one x and y as a pure function of JAX: jit it, differentiate it, vmap it over rows.

        It is ``score_samples`` there, computed in float64 whatever JAX is set to and given in the precision of y.
        """
        check_is_fitted(self, "density_")
        return self.density_.log_prob(y, x)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the mean of ``log p(y | x)`` over the rows, by their weights if there are any."""
        return counted_mean(self.score_samples(X, y), sample_weight)

    def sample(self, X: ArrayLike, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0) -> Any:
        """Return draws of y for each row of X, of shape (n, n_samples), or (n, n_samples, p) if y has columns.

        For a frame X they come as a frame of n times n_samples rows: the column "row" tells the row of X, from 0.

        ``refine=k`` chooses among several draws by importance weight and moves the choice by k steps of HMC, which leaves
        the density itself invariant.
        """
        features = self._checked_features(X)
        draws = self._decoded(self._draws(self.density_, n_samples, random_state, refine, features))
        frame = self._draws_like(X, draws, self._target_names)
        if frame is not None:
            return frame
        return draws[:, :, 0] if self._flat_targets else draws

    def predict(self, X: ArrayLike) -> Any:
        """Return the conditional mean of y, of labels the likeliest; for a frame X, as a series or frame."""
        features = self._checked_features(X)
        mean = self._decoded(self.density_.mean(features), whole=False)
        return self._rows_like(X, mean[:, 0] if self._flat_targets else mean, self._target_names)

    def given(self, x: ArrayLike) -> "GivenDensity":
        """Return the density of y under one condition, as an object of its own."""
        row = self._checked_features(self._one_row(x))
        if len(row) != 1:
            raise ValueError(
                f"given() takes one condition of {self.n_features_in_} numbers, got {len(row)} of them."
            )
        return self._given(row[0])

    def _given(self, row: np.ndarray) -> "GivenDensity":
        """Return the density under a condition that was checked and is numbers."""
        features, cells = self._names or numbered(len(row)), getattr(self, "_columns", None)
        shown_row = row if cells is None else cells.decode(row[None])[0]
        given = GivenDensity(self.density_.given(row), self._flat_targets, self._draws)
        given.condition = {str(name): value for name, value in zip(features, shown_row, strict=True)}
        given.target_names = getattr(self, "target_names_", None)
        given.target_kinds = getattr(getattr(self, "_target_columns", None), "kinds", ())
        return given

    @property
    def training_data_(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows the model was fitted to: X and y."""
        check_is_fitted(self, "density_")
        return self._training, self._training_targets[:, 0] if self._flat_targets else self._training_targets

    @property
    def _target_names(self) -> list[str]:
        width = self._training_targets.shape[1]
        return getattr(self, "target_names_", None) or (["y"] if width == 1 else numbered(width, "y"))

    def _one_row(self, x: Any) -> Any:
        """Return a condition as a table of one row; one that has names, a dictionary or a row of pandas, is put in order."""
        layout = layout_of(x)
        if layout is not None and not layout.series:
            return x
        named = x if isinstance(x, Mapping) else dict(x) if hasattr(x, "index") and layout is not None else {}
        if (
            named
            and self._names is not None
            and (isinstance(x, Mapping) or set(map(str, named)) & set(self._names))
        ):
            cells = {str(name): cell for name, cell in named.items()}
            if missing := [name for name in self._names if name not in cells]:
                raise ValueError(f"given() needs {', '.join(self._names)}; there is no {', '.join(missing)}.")
            x = [cells[name] for name in self._names]
            if self._layout is not None:
                return framed([np.array([cell]) for cell in x], self._layout)
        if isinstance(x, Mapping):
            raise ValueError(
                "this model knows no names of columns: give the condition as a list of numbers, in their order."
            )
        return np.atleast_2d(np.asarray(as_table(x), dtype=float))

    def _checked_features(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self, "density_")
        return self._validated(X, reset=False)

    def _checked_rows(self, X: ArrayLike, y: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self, "density_")
        rows, targets = self._validated_pair(X, y, reset=False)
        targets = np.asarray(targets, dtype=np.float64).reshape(len(rows), -1)
        width = self._training_targets.shape[1]
        if targets.shape[1] != width:
            raise ValueError(f"y has {targets.shape[1]} columns, but the model was fitted to {width}.")
        return rows, targets


def listening(progress: Any) -> contextlib.AbstractContextManager[Listener | None]:
    """Return a context manager around the listener that ``progress`` asks for."""
    if not isinstance(progress, bool | None) and not callable(progress):
        raise TypeError(f"progress must be True, False or a function of a report; got {shown(progress)}.")
    if progress is True:
        return contextlib.nullcontext() if processes.place().rank else Bar()
    return contextlib.nullcontext(progress or None)


def warn_of_uncertain_normaliser(density: AbstractDensity, X: np.ndarray) -> None:
    """Warn if a normaliser is not to be trusted; to be called by ``_fit``."""
    for part in density.parts if isinstance(density, Stack) else (density,):
        if not isinstance(part, Density):
            continue  # cells of a residual have no uncertain normaliser
        if part.log_partition is not None and not part.log_partition.trustworthy:
            message = f"log Z = {part.log_partition}: log densities share an uncertain constant; diagnose() says what to do."
        elif part.log_partition is None and (worst := part.partition_errors(X).max()) > LARGE_ERROR:
            message = f"log Z(x) is uncertain by up to {worst:.2g}: log densities are too; diagnose() says what to do."
        else:
            continue
        warnings.warn(message, UncertainNormaliserWarning, stacklevel=caller_level())
