"""The scikit-learn face that all estimators share.

A fit leaves ``density_``, an ``AbstractDensity`` in the data's own units. The face checks arguments, reads
tables and returns results in the container that came in."""

import abc
import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted

from kexpfam import processes, storage
from kexpfam.data.encoding import TableSchema
from kexpfam.data.frames import layout_of
from kexpfam.data.kinds import merge_equal_rows
from kexpfam.data.sample import RandomKey
from kexpfam.data.weights import Weighted, checked_weights, effective_rows, is_whole
from kexpfam.estimators.codec import FEWEST_ROWS, OUTPUTS, TableCodec, chosen_output, read_features
from kexpfam.estimators.messages import Seed, check_scale, check_share, one_of, shown, whole
from kexpfam.estimators.uses import Monitor
from kexpfam.files import written
from kexpfam.integrate.exact import exact_draws
from kexpfam.interrupts import interruptible
from kexpfam.jax_settings import check_fork, double_precision
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.drift import Martingales
from kexpfam.judge.novelty import SIDES, Reference, discoveries
from kexpfam.model.density import LARGE_ERROR, TiltedDensity
from kexpfam.model.distributions import AbstractDensity, scores
from kexpfam.model.ensemble import Stack
from kexpfam.progress import Bar, Listener, Report
from kexpfam.settings import SettingsRecord
from kexpfam.stacklevel import caller_level

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kexpfam.report import Page

__all__ = [
    "Estimator",
    "Seed",
    "UncertainNormaliserWarning",
    "check_scale",
    "key_from",
    "keys_from",
    "listening",
    "one_of",
    "remembered",
    "shown",
    "warn_of_uncertain_normaliser",
    "whole",
]


Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(diagnose: Method) -> Method:
    """Return ``diagnose`` of an estimator, which keeps its result.

    A second call with the same arguments returns it, if they are whole numbers and records."""

    @functools.wraps(diagnose)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = all(isinstance(one, int | SettingsRecord | None) for one in (*args, *kwargs.values()))
        asked = (args, kwargs) if plain else None
        if self._diagnosis is None or asked is None or asked != self._diagnosed_with:
            self._diagnosis = diagnose(self, *args, **kwargs)
            self._diagnosed_with = asked
        return self._diagnosis

    return cast(Method, keeping)


# Below this effective sample size few rows make the weighted spread. Ten rows are asked for without weights;
# scikit-learn's checks fit to weights with 5.4.
FEWEST_EFFECTIVE = 5.0


class UncertainNormaliserWarning(UserWarning):
    """The error of the normaliser is large; all log densities share it."""


def key_from(random_state: Seed) -> Key[Array, ""]:
    """Return the JAX key of a scikit-learn random state."""
    return keys_from(random_state, 1)[0]


def keys_from(random_state: Seed, count: int) -> list[Key[Array, ""]]:
    """Return several JAX keys of a random state of scikit-learn or NumPy."""
    check_fork()
    try:
        if isinstance(random_state, bool | np.bool_):
            raise ValueError
        if isinstance(random_state, np.random.Generator):
            seeds = random_state.integers(2**31 - 1, size=count)
        else:
            seeds = check_random_state(random_state).randint(2**31 - 1, size=count)
    except ValueError:
        kinds = "a whole number from 0 to 2**32 - 1, a numpy.random.Generator or RandomState, or None"
        raise ValueError(f"random_state must be {kinds}; got {shown(random_state)}.") from None
    return [jr.key(seed) for seed in seeds]


class Estimator(BaseEstimator, abc.ABC):
    """Base class of all estimators.

    ``_stored`` names the fitted attributes that ``save`` writes. ``_takes_kinds`` is True if columns may be
    of several kinds and have missing values."""

    conditional: ClassVar[bool]
    _takes_kinds: ClassVar[bool] = False
    _stored: ClassVar[tuple[str, ...]] = ()
    _shared: ClassVar[tuple[str, ...]] = (
        "_codec",
        "_target_codec",
        "_weight",
        "_reference",
        "_calibrated",
    )
    density_: Any
    _codec: Any
    _target_codec: TableCodec | None = None
    _training: np.ndarray
    _weight: np.ndarray | None = None
    _diagnosis: Diagnosis | None = None
    _reference: Reference | None = None  # held-out scores of the fit
    _calibrated: Reference | None = None  # those of ``calibrate``
    _diagnosed_with: tuple[tuple, dict] | None = None

    # Tables.

    @property
    def _names(self) -> list[str] | None:
        return getattr(self, "column_names_", None)

    @property
    def _columns(self) -> TableSchema:
        """Return the columns of X that are modelled."""
        return self._codec.modelled

    @property
    def _target_columns(self) -> TableSchema | None:
        return None if self._target_codec is None else self._target_codec.columns

    @property
    def _described(self) -> TableSchema:
        """Return the columns of the density: those of y, or of X if there is no y."""
        return self._columns if self._target_codec is None else self._target_codec.columns

    def _note_names(self, X: Any, y: Any = None) -> None:
        """Keep the column names of frames; those of an earlier fit to a frame are removed."""
        for name, table in (("column_names_", X), ("target_names_", y)):
            codec = getattr(self, "_target_codec" if name == "target_names_" else "_codec", None)
            layout = layout_of(table)
            if layout is not None:
                setattr(self, name, layout.texts)
            elif codec is not None and codec.layout is not None:
                self.__dict__.pop(name, None)

    def _read(self, X: Any, *, reset: bool = False) -> np.ndarray:
        """Return the cells of X as numbers, without carried columns; ``reset`` for those of a fit."""
        values = self._read_all(X, reset=reset)
        return self._codec.dropped(values)

    def _read_all(self, X: Any, *, reset: bool = False) -> np.ndarray:
        kinds = getattr(self, "columns", None)
        return read_features(self, X, kinds=kinds, reset=reset, names=self._names)

    def _decoded(self, values: np.ndarray, *, whole: bool = True) -> np.ndarray:
        return (self._target_codec or self._codec).decode(values, whole=whole)

    def set_output(self, *, transform: str | None = None) -> Self:
        """Choose the container of ``sample`` and ``predict``.

        "default" is a frame where a frame came in, otherwise an array. "numpy" is an array; "pandas",
        "polars" and "pyarrow" are frames of that library. None changes nothing.
        ``sklearn.set_config(transform_output=...)`` sets it for all estimators without a choice of their own.
        """
        if transform is not None:
            one_of("output", transform, OUTPUTS)
            self._sklearn_output_config = {"transform": transform}  # clone() copies this attribute
        return self

    @property
    def _output(self) -> str:
        return chosen_output(self)

    # Fitting.

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[Listener]:
        """Provide a fit with progress and float64; restore the old model if it fails or is interrupted."""
        before = dict(self.__dict__)
        progress = self.get_params(deep=False).get("progress", False)
        try:
            with interruptible() as check, listening(progress) as listener, double_precision():

                def report(one: Report) -> None:
                    check()
                    if listener is not None:
                        listener(one)

                self._diagnosis = self._reference = self._calibrated = None
                yield report
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    @property
    def _merges_equal_rows(self) -> bool:
        """Return whether equal rows become one row of larger weight; repetition is information in discrete
        columns."""
        return merge_equal_rows(self._described.kinds)

    def _counted(self, sample_weight: ArrayLike | None, *tables: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the rows of positive weight, and keep their weights."""
        weight = checked_weights(sample_weight, len(tables[0]))
        joined = np.concatenate(tables, axis=1)
        rows, self._weight = Weighted.of(joined, weight, merged=self._merges_equal_rows)
        if weight is None:
            return tables
        if (seen := int(np.sum(weight if is_whole(weight) else weight > 0.0))) < FEWEST_ROWS:
            raise ValueError(f"sample_weight leaves {seen} rows; at least {FEWEST_ROWS} are needed.")
        if (size := effective_rows(weight, len(weight))) < FEWEST_EFFECTIVE:
            least = f"an effective sample size of at least {FEWEST_EFFECTIVE:g} is needed"
            raise ValueError(
                f"sample_weight leaves {size:.3g} effective rows, because few dominate; {least}."
            )
        return tuple(table[rows] for table in tables)

    @property
    def training_weight_(self) -> np.ndarray:
        """The weight of each row of ``training_data_``; equal rows are merged if weights were given."""
        check_is_fitted(self, "density_")
        return np.ones(len(self._training)) if self._weight is None else self._weight

    @property
    def _effective_rows(self) -> float:
        return effective_rows(self._weight, len(self._training))

    # Results.

    def _log_density(self, density: AbstractDensity, targets: np.ndarray, *X: np.ndarray) -> np.ndarray:
        return scores(density, targets, *X)

    def _draws(
        self,
        density: AbstractDensity,
        count: Any,
        random_state: Seed,
        refine: Any,
        *X: np.ndarray,
        exact: bool = False,
    ) -> np.ndarray:
        """Return plain, refined or exact draws; only kernel models have something to refine."""
        count, refine, key = whole("n_samples", count, 1), whole("refine", refine, 0), key_from(random_state)
        if exact:
            return exact_draws(density, count, *X, key=key)
        if not refine or not isinstance(density, TiltedDensity):
            return density.sample(count, *X, key=key)
        from kexpfam.integrate.chains import refine as refined  # BlackJAX is slow to import

        return refined(density, count, refine, *X, key=key)

    @abc.abstractmethod
    def _scored_rows(self, X: Any, y: Any) -> tuple[np.ndarray, ...]:
        """Return the targets of rows and, if there is one, their condition, as numbers."""

    @abc.abstractmethod
    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        """Return the measurements of the fit, and those on held-out rows if there are any."""

    def novelty(self, X: ArrayLike, y: ArrayLike | None = None, *, side: str = "low") -> np.ndarray:
        """Return a p-value of each row: small where its log density is lower than that of held-out rows.

        The p-values are conformal: they compare a row with the rows that were held out within the fit, or
        with those of ``calibrate`` if it was called. After ``calibrate``, at most a share t of exchangeable
        rows has p-values of at most t, whatever the density; without it the bound is about 2 t. The smallest
        value is ``1 / (rows + 1)``. ``side="both"`` also tests for rows that are too probable. A row with
        missing cells is compared with all rows by the density of its other cells."""
        check_is_fitted(self, "density_")
        one_of("side", side, SIDES)
        reference = self._held_out_scores()
        targets, *conditions = self._scored_rows(X, y)
        score = lambda density: self._log_density(density, targets, *conditions)
        return reference.p_values(reference.part_scores(self.density_, score), side)

    def flag(
        self, X: ArrayLike, y: ArrayLike | None = None, *, fdr: float = 0.05, side: str = "low"
    ) -> np.ndarray:
        """Return which rows are unusual, such that at most this share of them are not, on average.

        The procedure of Benjamini and Hochberg on the p-values of ``novelty``."""
        check_share("fdr", fdr)
        return discoveries(self.novelty(X, y, side=side), fdr)

    def monitor(
        self, *, level: float = 0.05, state: str | os.PathLike | None = None, random_state: int = 0
    ) -> Monitor:
        """Return a monitor of drift: ``update`` it with new rows, one or many at a time.

        Without drift the alarm is raised with at most the probability ``level``, however many rows are
        tested. ``state`` is a file that ``Monitor.save`` wrote."""
        check_is_fitted(self, "density_")
        check_share("level", level)
        if state is not None:
            return Monitor.load(self, state)
        columns = np.concatenate(self._training_columns(), axis=1)
        references = [*self._held_out_scores().repeated(), *columns.T]
        return Monitor(self, Martingales(references, seed=whole("random_state", random_state, 0)), level)

    @abc.abstractmethod
    def _training_columns(self) -> list[np.ndarray]:
        """Return the training rows, the columns of X first."""

    @property
    def _monitored_names(self) -> list[Any]:
        """Return the names of the columns, those of X first."""
        return [*self._columns.shown, *(self._target_columns.shown if self._target_columns else ())]

    def _monitored(self, X: Any, y: Any) -> np.ndarray:
        """Return what the monitor tests of each row: its score in each part, and its cells."""
        targets, *conditions = self._scored_rows(X, y)
        score = lambda density: self._log_density(density, targets, *conditions)
        scores = self._held_out_scores().part_scores(self.density_, score)
        return np.column_stack([*scores, *conditions, targets])

    def _p_values_or_nan(self, X: Any, y: Any) -> np.ndarray:
        """Return the p-values of rows; NaN if no rows were held out."""
        if self._reference is None and self._calibrated is None:
            return np.full(len(X), np.nan)
        return self.novelty(X, y)

    def _held_out_scores(self) -> Reference:
        """Return the scores that rows are compared with."""
        found = self._calibrated or self._reference
        if found is None:
            raise ValueError("this fit held out no rows: call calibrate with rows that it has not seen.")
        return found

    def _calibrate_scores(self, targets: np.ndarray, *conditions: np.ndarray) -> None:
        """Keep the scores of held-out rows for ``novelty``."""
        self._calibrated = Reference.of([self._log_density(self.density_, targets, *conditions)])

    def save(self, path: str | os.PathLike) -> None:
        """Write the fitted model to one file of arrays and readable metadata; it contains no code."""
        check_is_fitted(self, "density_")
        skipped = ("progress", "checkpoint", "random_state")
        params = {name: value for name, value in self.get_params(deep=False).items() if name not in skipped}
        names = (*self._stored, *self._shared)
        state = {"params": params} | {name.strip("_"): getattr(self, name) for name in names}
        metadata = {
            "n_features_in": self.n_features_in_,
            "columns": self._names,
            "fitted_to_frame": hasattr(self, "feature_names_in_"),
            "targets": getattr(self, "target_names_", None),
        }
        storage.save_tree(path, type(self).__name__, state, metadata)

    def export(self, path: str | os.PathLike, function: str = "score_samples") -> None:
        """Write a function of the model as StableHLO, for programs that have JAX but not kexpfam.

        ``score_samples`` takes rows as float64 numbers, the columns of X before those of y, labels as their
        position in the sorted labels; ``sample`` takes a seed per draw, and X under a condition. Both work
        for any number of rows. ``jax.export.deserialize`` reads the file. Needs ``kexpfam[export]``."""
        from kexpfam.estimators.export import FUNCTIONS, exported

        check_is_fitted(self, "density_")
        one_of("function", function, FUNCTIONS)
        inputs = self.n_features_in_ if self.conditional else 0
        with written(Path(path)) as file:
            file.write(exported(self.density_, function, inputs))

    def plot(self, *args: Any, **kwargs: Any) -> "Figure":
        """Return a figure of the fit; arguments are those of ``kexpfam.plot.plot_density`` or
        ``plot_conditional``."""
        from kexpfam import plot  # matplotlib is slow to import

        check_is_fitted(self, "density_")
        return plot.plot_model(self, *args, **kwargs)

    def report(
        self,
        path: str | os.PathLike | None = None,
        X: ArrayLike | None = None,
        y: ArrayLike | None = None,
        *,
        random_state: int = 0,
    ) -> "Page":
        """Return a report on the fit as one HTML page, and write it to ``path`` if given.

        The report compares the model with the held-out rows X (and y), or with the training rows if X is
        None."""
        from kexpfam.report import report  # matplotlib is slow to import

        check_is_fitted(self, "density_")
        page = report(self, X, y, random_state=random_state)
        if path is not None:
            page.save(path)
        return page

    def _html_repr(self) -> str:
        """Return scikit-learn's diagram, followed by the last diagnosis."""
        diagram = super()._html_repr()
        if not hasattr(self, "density_"):
            return diagram
        hint = "<p>Fitted. <code>diagnose()</code> gives a verdict, <code>report()</code> a page.</p>"
        return diagram + (hint if self._diagnosis is None else self._diagnosis._repr_html_())

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._takes_kinds
        tags.input_tags.string = self._takes_kinds
        tags.input_tags.categorical = self._takes_kinds
        return tags


def listening(progress: Any) -> contextlib.AbstractContextManager[Listener | None]:
    """Return a context manager of the listener that ``progress`` asks for."""
    if not isinstance(progress, bool | None) and not callable(progress):
        raise TypeError(f"progress must be True, False or a function of a report; got {shown(progress)}.")
    if progress is True:
        return contextlib.nullcontext() if processes.place().rank else Bar()
    return contextlib.nullcontext(progress or None)


def warn_of_uncertain_normaliser(density: AbstractDensity, X: np.ndarray) -> None:
    """Warn if the normaliser of a kernel model has a large error."""
    for part in density.parts if isinstance(density, Stack) else (density,):
        if not isinstance(part, TiltedDensity):
            continue  # other densities are normalised exactly
        if part.log_partition is not None and not part.log_partition.trustworthy:
            message = f"log Z = {part.log_partition}: log densities share this error; see diagnose()."
        elif part.log_partition is None and (worst := part.partition_errors(X).max()) > LARGE_ERROR:
            message = f"log Z(x) has an error of up to {worst:.2g}: log densities share it; see diagnose()."
        else:
            continue
        warnings.warn(message, UncertainNormaliserWarning, stacklevel=caller_level())
