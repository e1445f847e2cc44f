"""How tables with columns of several kinds become numbers, and numbers cells: what ``columns=`` of an estimator does."""

from typing import Any, ClassVar

import numpy as np
from sklearn.utils import Tags
from sklearn.utils.validation import check_array, check_consistent_length, validate_data

from kexpfam.data.encoding import Columns, categorical, columns_of
from kexpfam.data.frames import as_table
from kexpfam.data.kinds import AbstractKind, as_kind, merge_equal_rows
from kexpfam.estimators.base import FEWEST_ROWS, Estimator, key_from
from kexpfam.model.distributions import scores
from kexpfam.model.partial import log_evidence

__all__ = ["TableReader"]

# Completions behind the density of a row with gaps in columns that had none in training.
GAP_DRAWS = 2048


class TableReader(Estimator):
    """An estimator that knows kinds of columns; missing cells are NaN, and labels codes, from here on."""

    columns: Any
    _columns: Columns
    _target_columns: Columns | None = None
    _kinds_stored: ClassVar[tuple[str, ...]] = ("_columns", "_target_columns")

    @property
    def columns_(self) -> dict[str | int, AbstractKind]:
        """The kind of each column of X, by name, or by position where there are no names."""
        return self._columns.shown

    @property
    def target_columns_(self) -> dict[str | int, AbstractKind]:
        """The kind of each column of y, by name or position; of a density without a condition, there is none."""
        return {} if self._target_columns is None else self._target_columns.shown

    @property
    def _described(self) -> Columns:
        """Return the columns that the density is of."""
        return self._columns if self._target_columns is None else self._target_columns

    @property
    def _merges_equal_rows(self) -> bool:
        # Held-out labels and counts would be ones that no other row has.
        return merge_equal_rows(self._described.kinds)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

    def _validated(self, X: Any, *, reset: bool) -> np.ndarray:
        X = as_table(X)
        if _only_numbers(X) and (self.columns is None if reset else self._columns.plain):
            values = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=reset)
            cells, labelled = list(values.T), frozenset[int]()
        else:
            table = _table(X)
            frame: dict[str, Any] = {"skip_check_array": True}
            array: dict[str, Any] = {"dtype": None, "ensure_all_finite": "allow-nan"}
            table = validate_data(
                self, table, reset=reset, **(array if isinstance(table, np.ndarray) else frame)
            )
            cells, labelled = columns_of(table), categorical(X)
        if reset:
            self._columns = Columns.of(cells, self._names, self.columns, labelled)
        values = self._columns.encode(cells, unknown=not reset and not self.conditional)
        if self.conditional and not reset:
            self._check_gaps(values)
        if reset:
            check_array(values, ensure_all_finite="allow-nan", ensure_min_samples=FEWEST_ROWS, estimator=self)
            self._columns.check(values)
        return values

    def _check_gaps(self, X: np.ndarray) -> None:
        """Raise if inputs lack cells in columns that had all of them in training."""
        strange = np.isnan(X).any(axis=0) & ~np.isnan(self._training).any(axis=0)
        if np.any(strange):
            names = [str(name) for name, bad in zip(self._columns.shown, strange, strict=True) if bad]
            raise ValueError(
                f"column(s) {', '.join(names)} lack cells, and had all of them where the model was fitted: NaN."
            )

    def _validated_pair(self, X: Any, y: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        if y is None:
            validate_data(self, X, y, skip_check_array=True, reset=reset)  # says that y is needed
        y = as_table(y)
        rows, wanted = self._validated(X, reset=reset), self.get_params(deep=False).get("target_columns")
        if _only_numbers(y):
            y = check_array(
                y,
                ensure_2d=False,
                dtype=np.float64,
                ensure_all_finite="allow-nan",
                input_name="y",
                estimator=self,
            )
        frame = hasattr(y, "columns")
        table = y if frame else np.asarray(y, None if _only_numbers(y) else object)
        check_consistent_length(rows, table)
        cells = columns_of(table if frame or table.ndim == 2 else table.reshape(-1, 1))
        if reset:
            names = getattr(self, "target_names_", None)
            self._target_columns = Columns.of(cells, names, _of_targets(wanted), categorical(y))
        assert self._target_columns is not None
        if len(cells) != len(self._target_columns.kinds):
            raise ValueError(
                f"y has {len(cells)} columns, but the model was fitted to {len(self._target_columns.kinds)}."
            )
        targets = self._target_columns.encode(cells, unknown=not reset)
        if reset:
            self._target_columns.check(targets)
        return rows, targets[:, 0] if np.ndim(table) == 1 else targets

    def _hint(self, values: np.ndarray, wanted: Any) -> None:
        """Warn of columns of the density that look like another kind than real; bounds say that they are not."""
        bounded = self.get_params(deep=False).get("bounds") is not None
        self._described.hints(
            values, dict.fromkeys(range(values.shape[1]), "real") if bounded else _of_targets(wanted)
        )

    def _log_density(self, density: Any, targets: np.ndarray, *X: np.ndarray) -> np.ndarray:
        """Return log densities, -inf off the support; what is there instead is of no account."""
        inside, found = self._described.inside(targets), np.full(len(targets), -np.inf)
        if not X and np.any(gaps := np.isnan(targets[:, ~self._signed(density)]).any(axis=1)):
            found[inside & gaps] = log_evidence(density, targets[inside & gaps], GAP_DRAWS, key=key_from(0))
            inside &= ~gaps
            if not np.any(inside):
                return found
        found[inside] = scores(density, targets[inside], *(part[inside] for part in X))
        return found

    def _signed(self, density: Any) -> np.ndarray:
        """Return the columns in which a gap is a state that the model knows: the others are integrated out."""
        return np.array(density.scaling.gaps or (False,) * len(self._described.kinds), bool)

    def _decoded(self, values: np.ndarray, *, whole: bool = True) -> np.ndarray:
        return self._described.decode(values, whole=whole)


def _only_numbers(table: Any) -> bool:
    """Return whether a table holds numbers and nothing else; it need not be one at all."""
    if hasattr(table, "columns"):
        kinds = {column.dtype.kind for column in columns_of(table)}
        return kinds <= set("iuf") and not categorical(table)
    if not isinstance(table, np.ndarray):
        try:
            table = np.asarray(table)
        except ValueError:  # rows of several lengths: to be told so by scikit-learn
            return True
    # What is no table, sparse or complex, say, is refused by scikit-learn in its own words.
    return table.dtype.kind in "iufcVM" or (table.dtype.kind == "O" and table.ndim != 2 and table.size <= 1)


def _table(X: Any) -> Any:
    """Return a frame as it is and anything else as an array of two dimensions that keeps the types of its cells."""
    return X if hasattr(X, "columns") or isinstance(X, np.ndarray) else np.array(X, dtype=object)


def _of_targets(wanted: Any) -> dict[Any, Any] | None:
    """Return the kinds of targets; a kind alone is that of the only one."""
    return wanted if wanted is None or isinstance(wanted, dict) else {0: as_kind(wanted)}
