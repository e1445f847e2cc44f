"""Tables in and out of an estimator: cells to numbers, numbers to cells, frames of the library that came
in."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, check_consistent_length, validate_data

from kexpfam.data.carried import Carried
from kexpfam.data.encoding import DATES, TableSchema, categorical, columns_of
from kexpfam.data.frames import BACKENDS, Layout, as_table, framed, layout_of, row_name
from kexpfam.data.kinds import as_kind

__all__ = [
    "FEWEST_ROWS",
    "OUTPUTS",
    "TableCodec",
    "kinds_of_targets",
    "read_features",
    "read_targets",
    "refuse_dates",
]

# The least number of rows of a fit.
FEWEST_ROWS = 10
# The values of ``set_output``; "default" returns the container that came in.
OUTPUTS = ("default", "numpy", *BACKENDS)


class TableCodec(NamedTuple):
    """The columns of a table, the frame that they came in, if any, and the columns that are not modelled."""

    columns: TableSchema
    layout: Layout | None = None
    carried: Carried | None = None

    @property
    def modelled(self) -> TableSchema:
        """Return the columns that are not carried."""
        return self.columns if self.carried is None else self.columns.part(self.carried.modelled)

    def dropped(self, values: np.ndarray) -> np.ndarray:
        """Return the modelled columns of numbers of all columns."""
        return values if self.carried is None else self.carried.dropped(values)

    def restored(self, values: np.ndarray) -> np.ndarray:
        """Return numbers of all columns of those of the modelled ones."""
        return values if self.carried is None else self.carried.restored(values)

    def decode(self, values: np.ndarray, *, whole: bool = True) -> np.ndarray:
        """Return numbers of the modelled columns as cells of all; means of integers are not ``whole``."""
        if self.carried is not None:
            values = self.restored(self.modelled.rounded(values) if whole else values)
        return self.columns.decode(values, whole=whole)

    def rows(
        self,
        values: np.ndarray,
        output: str,
        names: Sequence[str],
        places: Sequence[int] | None = None,
        like: Any = None,
    ) -> Any:
        """Return rows of all columns, or of those at some places, in the chosen output container, with the
        index of the table ``like``."""
        layout = self.layout
        if layout is not None and places is not None:
            own_names, dtypes = ([part[j] for j in places] for part in (layout.names, layout.dtypes))
            layout = layout._replace(names=own_names, dtypes=dtypes)
        layout = _chosen(layout, output, names, flat=values.ndim == 1)
        return values if layout is None else _frame(values, layout, _index(like))

    def beside(self, X: Any, values: np.ndarray, output: str, names: Sequence[str]) -> Any:
        """Return one row of targets for each row of X, in the container of X unless another was chosen.

        Targets that came as an array are an array: meta-estimators of scikit-learn transform it.
        """
        flat = values.ndim == 1
        beside = None if self.layout is None else self._layout_beside(X, names, flat=flat)
        layout = _chosen(beside, output, names, flat=flat)
        return values if layout is None else _frame(values, layout, _index(X))

    def draws_beside(self, X: Any, draws: np.ndarray, output: str, names: Sequence[str]) -> Any:
        """Return draws of shape (n, draws, p) as a frame with a column for the row of X, or None for
        arrays."""
        layout = _chosen(self._layout_beside(X, names, flat=False), output, names, flat=False)
        if layout is None:
            return None
        rows, count, width = draws.shape
        texts = [row_name(layout.texts), *layout.names]
        layout = layout._replace(names=texts, dtypes=["Int64", *layout.dtypes])
        columns = [np.repeat(np.arange(rows), count), *draws.reshape(-1, width).T]
        index = _index(X) if layout.backend == "pandas" else None
        return framed(columns, layout, None if index is None else index.repeat(count))

    def _layout_beside(self, X: Any, names: Sequence[str], *, flat: bool) -> Layout | None:
        """Return the layout of targets next to a frame X."""
        beside = layout_of(X)
        if beside is None:
            return None
        own = self.layout or Layout(beside.backend, list(names), ["Float64"] * len(names))
        return own._replace(backend=beside.backend, series=flat)


def chosen_output(estimator: BaseEstimator) -> str:
    """Return the container set by ``set_output``, or scikit-learn's global ``transform_output``."""
    config = getattr(estimator, "_sklearn_output_config", get_config())
    return config.get("transform", config.get("transform_output", "default"))


def _chosen(layout: Layout | None, output: str, names: Sequence[str], *, flat: bool) -> Layout | None:
    """Return the layout in the chosen container; None is an array."""
    if output == "default":
        return layout
    if output == "numpy":
        return None
    plain = Layout(output, list(names), ["Float64"] * len(names), series=flat)
    return plain if layout is None else layout._replace(backend=output)


def _frame(values: np.ndarray, layout: Layout, index: Any) -> Any:
    columns = [values] if values.ndim == 1 else list(values.T)
    return framed(columns, layout, index if layout.backend == "pandas" else None)


def _index(X: Any) -> Any:
    """Return the index of a pandas frame, or None."""
    layout = None if X is None else layout_of(X)
    return X.index if layout is not None and layout.backend == "pandas" and hasattr(X, "index") else None


def read_features(estimator: Any, X: Any, *, kinds: Any, reset: bool, names: list[str] | None) -> np.ndarray:
    """Return the cells of X as numbers; missing values are NaN, labels are codes, new labels -1.

    ``reset`` is for a fit: the columns are then described anew in ``estimator._codec``. ``kinds`` are those
    the user asked for, or None if the estimator takes real columns only."""
    layout, X = layout_of(X), as_table(X)
    refuse_dates(X, "X")
    if not estimator._takes_kinds:
        least = FEWEST_ROWS if reset else 1
        values = validate_data(estimator, X, dtype=np.float64, reset=reset, ensure_min_samples=least)
        if reset:
            estimator._codec = TableCodec(TableSchema.of(list(values.T), names), layout)
        return values
    if _only_numbers(X) and (kinds is None if reset else estimator._codec.columns.plain):
        values = validate_data(estimator, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=reset)
        cells, labelled = list(values.T), frozenset[int]()
    else:
        table = X if hasattr(X, "columns") or isinstance(X, np.ndarray) else np.array(X, dtype=object)
        array: dict[str, Any] = {"dtype": None, "ensure_all_finite": "allow-nan"}
        options: dict[str, Any] = array if isinstance(table, np.ndarray) else {"skip_check_array": True}
        cells = columns_of(validate_data(estimator, table, reset=reset, **options))
        labelled = categorical(X)
    if reset:
        remedy = " Kinds of y are set with target_columns." if estimator.conditional else ""
        estimator._codec = TableCodec(TableSchema.of(cells, names, kinds, labelled, remedy), layout)
    columns = estimator._codec.columns
    values = columns.encode(cells, unknown=not reset)
    if estimator.conditional and not reset:
        columns.warn_of_unseen(cells, values)
    if reset:
        check_array(
            values, ensure_all_finite="allow-nan", ensure_min_samples=FEWEST_ROWS, estimator=estimator
        )
        columns.check(values)
        if not estimator.conditional:
            estimator._codec = TableCodec(columns.with_roundings(values, kinds), layout)
    return values


def read_targets(
    estimator: Any, y: Any, rows: np.ndarray, *, kinds: Any, reset: bool, names: list[str] | None
) -> np.ndarray:
    """Return the cells of y as numbers, of shape (n,) or (n, p)."""
    if y is None:
        validate_data(estimator, rows, y, skip_check_array=True, reset=False)  # raises: y is required
    layout, y = layout_of(y), as_table(y)
    refuse_dates(y, "y")
    finite = "allow-nan" if estimator._takes_kinds else True
    numbers = not estimator._takes_kinds or _only_numbers(y)
    if numbers:
        options: Any = {"ensure_all_finite": finite, "input_name": "y", "estimator": estimator}
        y = check_array(y, ensure_2d=False, dtype=np.float64, **options)
    frame = hasattr(y, "columns")
    table = y if frame else np.asarray(y, None if numbers else object)
    check_consistent_length(rows, table)
    cells = columns_of(table if frame or table.ndim == 2 else table.reshape(-1, 1))
    if reset:
        columns = TableSchema.of(cells, names, kinds_of_targets(kinds), categorical(y))
        estimator._target_codec = TableCodec(columns, layout)
    columns = estimator._target_codec.columns
    if len(cells) != len(columns.kinds):
        raise ValueError(f"y has {len(cells)} columns, but the model was fitted to {len(columns.kinds)}.")
    targets = columns.encode(cells, unknown=not reset)
    if reset:
        columns.check(targets)
        columns = columns.with_roundings(targets, kinds_of_targets(kinds))
        estimator._target_codec = TableCodec(columns, layout)
    return targets[:, 0] if np.ndim(table) == 1 else targets


def kinds_of_targets(wanted: Any) -> dict[Any, Any] | None:
    """Return kinds of targets by position or name; a single kind is that of the only target."""
    return wanted if wanted is None or isinstance(wanted, dict) else {0: as_kind(wanted)}


def refuse_dates(table: Any, name: str) -> None:
    """Raise for an array of dates or durations, which NumPy converts to numbers without a word."""
    if isinstance(table, np.ndarray) and table.dtype.kind in "mM":
        raise ValueError(f"{name} contains {DATES}")


def _only_numbers(table: Any) -> bool:
    """Return whether a table holds nothing but numbers, or is no table and is left to scikit-learn to
    refuse."""
    if hasattr(table, "columns"):
        kinds = {column.dtype.kind for column in columns_of(table)}
        return kinds <= set("iuf") and not categorical(table)
    if not isinstance(table, np.ndarray):
        try:
            table = np.asarray(table)
        except ValueError:  # rows of different lengths
            return True
    return table.dtype.kind in "iufcV" or (table.dtype.kind == "O" and table.ndim != 2 and table.size <= 1)
