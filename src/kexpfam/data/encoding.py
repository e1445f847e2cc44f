"""Tables and their numbers: labels as codes, missing cells as NaN."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np

from kexpfam.data.kinds import AbstractKind, Category, Real, as_kind, is_missing
from kexpfam.data.rounding import Rounding, Roundings
from kexpfam.data.sample import PlainModule
from kexpfam.data.scaling import heavy_tailed_columns
from kexpfam.stacklevel import caller_level

# A column of whole numbers with at most FEW_VALUES values, each REPEATED times on average, may be counts.
FEW_VALUES, REPEATED = 20, 10
# A column within 0 and 1 that comes this close to both may be a proportion.
CLOSE_TO_ENDS = 0.1
# Labels of a column that a message names.
MOST_NAMED = 5

DATES = (
    "dates or durations: convert them to numbers, such as days since the first of them, or hours of the day "
    "of kind 'periodic:24'."
)

Wanted = Mapping[Any, Any] | None


class ColumnKindWarning(UserWarning):
    """A column of real numbers has values typical of another kind."""


class UnseenLabelWarning(UserWarning):
    """Some input labels were not among those of the fit and are treated as unknown."""


class TableSchema(PlainModule):
    """The names and kinds of the columns of a table, which encode cells as numbers and decode numbers.

    ``roundings`` are the lattices of the table's cells, to which decoded draws are rounded; None where there
    is none, and empty if there is none at all. ``places`` are the positions of the columns in the table, if
    others were left out.
    """

    kinds: tuple[AbstractKind, ...] = eqx.field(static=True)
    names: tuple[str, ...] | None = eqx.field(static=True, default=None)
    roundings: tuple[Rounding | Roundings | None, ...] = eqx.field(static=True, default=())
    places: tuple[int, ...] | None = eqx.field(static=True, default=None)

    @staticmethod
    def of(
        columns: Sequence[np.ndarray],
        names: Sequence[str] | None = None,
        wanted: Any = None,
        labelled: Collection[int] = (),
        remedy: str = "",
    ) -> "TableSchema":
        """Return the requested kinds of columns, by name or position, and labels where cells are labels.

        ``labelled`` are the positions of columns of labels that are numbers. ``remedy`` ends the message on a
        kind of a column that does not exist.
        """
        asked = {j: Category() for j in labelled} | _by_position(wanted, len(columns), names, remedy)
        labels = [str(j) if names is None else repr(names[j]) for j in range(len(columns))]
        kinds = [_kind(asked.get(j), column, labels[j]) for j, column in enumerate(columns)]
        return TableSchema(tuple(kinds), None if names is None else tuple(map(str, names)))

    def with_roundings(self, values: np.ndarray, wanted: Wanted) -> "TableSchema":
        """Return the schema with the lattices of the values of columns that are not labels, whole or angles.

        Columns of which "real" was requested have none.
        """
        asked = _by_position(wanted, len(self.kinds), self.names)
        own = [
            kind.others.has_kernel and not (kind.is_default and j in asked)
            for j, kind in enumerate(self.kinds)
        ]
        found = [Roundings.found(values[:, j]) if rounds else None for j, rounds in enumerate(own)]
        return TableSchema(self.kinds, self.names, tuple(found) if any(found) else ())

    def part(self, kept: Sequence[int]) -> "TableSchema":
        """Return the schema of some of the columns, by their positions in this schema."""
        places, names, roundings = self.places or range(len(self.kinds)), self.names, self.roundings
        return TableSchema(
            tuple(self.kinds[j] for j in kept),
            None if names is None else tuple(names[j] for j in kept),
            tuple(roundings[j] for j in kept) if roundings else (),
            tuple(places[j] for j in kept),
        )

    @property
    def labels(self) -> list[str]:
        """Return the names of the columns, x0, x1, ... where they have none."""
        return list(self.names or (f"x{j}" for j in self.places or range(len(self.kinds))))

    @property
    def steps(self) -> dict[str | int, float]:
        """Return the rounding step of each rounded column, by name or position."""
        roundings = self.roundings or (None,) * len(self.kinds)
        columns = zip(self.shown.items(), roundings, strict=True)
        found = {
            name: kind.others.rounding or own for (name, kind), own in columns if not kind.others.discrete
        }
        return {name: one.size for name, one in found.items() if one is not None}

    @property
    def shown(self) -> dict[str | int, AbstractKind]:
        """Return the kinds by name, or by position where the columns have no names."""
        return dict(zip(self.names or self.places or range(len(self.kinds)), self.kinds, strict=True))

    @property
    def plain(self) -> bool:
        """Return whether all columns are real numbers."""
        return all(kind.is_default for kind in self.kinds)

    def encode(self, columns: Sequence[np.ndarray], *, unknown: bool = False) -> np.ndarray:
        """Return the cells as numbers, (rows, columns).

        New labels raise an error; with ``unknown`` they are -1.
        """
        parts = zip(columns, self.kinds, map(str, self.names or range(len(self.kinds))), strict=True)
        return np.column_stack([kind.numbers(column, name, unknown=unknown) for column, kind, name in parts])

    def warn_of_unseen(self, columns: Sequence[np.ndarray], values: np.ndarray) -> None:
        """Warn of labels that did not occur during fit; they are -1 among the values."""
        found = []
        for j, (name, kind) in enumerate(self.shown.items()):
            if kind.categorical and np.any(new := values[:, j] < 0.0):
                labels = list(dict.fromkeys(columns[j][new].tolist()))
                more = f" and {len(labels) - MOST_NAMED} others" if len(labels) > MOST_NAMED else ""
                found.append(f"column {name!r} holds {', '.join(map(repr, labels[:MOST_NAMED]))}{more}")
        if found:
            message = f"some labels were not seen during fit and are treated as unknown: {'; '.join(found)}."
            warnings.warn(message, UnseenLabelWarning, stacklevel=caller_level())

    def decode(self, values: np.ndarray, *, whole: bool = True) -> np.ndarray:
        """Return numbers as cells in one array, of objects if some of them are texts.

        With ``whole``, columns of whole numbers are of an integer type and rounded numbers are rounded; means
        are not.
        """
        if not any(kind.others.discrete for kind in self.kinds) and not self.roundings:
            return values
        cells = self.cells(values.reshape(-1, values.shape[-1]), whole=whole)
        types = {cell.dtype.kind for cell in cells}
        dtype = cells[0].dtype if len(types) == 1 else float if types <= {"i", "f"} else object
        decoded = np.empty((len(cells[0]), len(cells)), dtype)
        for j, cell in enumerate(cells):
            decoded[:, j] = cell
        return decoded.reshape(values.shape)

    def cells(self, values: np.ndarray, *, whole: bool = True) -> list[np.ndarray]:
        """Return numbers as cells, one array per column, each of the type of its column."""
        values = self.rounded(values) if whole else values
        return [kind.cells(values[:, j], whole=whole) for j, kind in enumerate(self.kinds)]

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return numbers with those of rounded columns moved to their lattice; the last axis has the
        columns."""
        values = values.copy() if self.roundings else values
        for j, rounding in enumerate(self.roundings):
            if rounding is not None:
                kind, near = self.kinds[j], rounding.nearest(values[..., j])
                # Rounding leads neither out of the support nor to an atom.
                values[..., j] = np.where(kind.inside(near) & (near != kind.atom), near, values[..., j])
        return values

    def inside(self, values: np.ndarray) -> np.ndarray:
        """Return which rows of numbers lie in the support."""
        each = [kind.inside(values[:, j]) for j, kind in enumerate(self.kinds)]
        return np.all(each, axis=0) if each else np.ones(len(values), bool)

    def check(self, values: np.ndarray) -> None:
        """Raise if a value is outside the support of its column, or if all cells of a column are missing."""
        for (name, kind), column in zip(self.shown.items(), values.T, strict=True):
            outside = column[~kind.inside(column)]
            if len(outside):
                wrong = f"column {name} holds {outside[0]:g}, which is not {kind}"
                raise ValueError(f"{wrong}: correct its kind or the cell.")
            if np.all(np.isnan(column)):
                raise ValueError(f"column {name} holds nothing but missing cells: leave it out.")

    def hints(self, values: np.ndarray, wanted: Wanted, *, setting: str = "columns") -> None:
        """Warn of real columns with values typical of another kind, unless "real" was requested.

        ``setting`` is the name of the estimator's setting of kinds.
        """
        asked = _by_position(wanted, len(self.kinds), self.names)
        doubted = [j for j, kind in enumerate(self.kinds) if kind.is_default and j not in asked]
        names = list(self.shown)
        for kinds, looks, test in (
            ("'integer', 'count', 'rounded' or 'category'", "few whole numbers", _few_whole_numbers),
            ("'rounded'", "few rounded numbers", _few_rounded_numbers),
            ("'bounded:0:1'", "numbers from 0 to 1", _proportion),
            ("'positive'", "positive numbers with a long tail", _long_tailed),
        ):
            found = [names[j] for j in doubted if test(values[~np.isnan(values[:, j]), j])]
            if found:
                message = (
                    f"column(s) {', '.join(map(str, found))} hold {looks} and are treated as real: "
                    f"choose {kinds} or 'real' with {setting}={{{found[0]!r}: ...}}."
                )
                warnings.warn(message, ColumnKindWarning, stacklevel=caller_level())


def columns_of(table: Any) -> list[np.ndarray]:
    """Return the columns of a frame or of a two-dimensional array, each with a type of its own."""
    columns = _frame_columns(table)
    return [np.asarray(column) for column in (table.T if columns is None else columns)]


def categorical(table: Any) -> frozenset[int]:
    """Return the positions of the columns of a frame that have a categorical type."""
    columns = _frame_columns(table) or []
    types = [str(getattr(column, "dtype", getattr(column, "type", ""))).lower() for column in columns]
    return frozenset(j for j, name in enumerate(types) if name.startswith(("categor", "enum", "dictionary")))


def _frame_columns(table: Any) -> list[Any] | None:
    if not hasattr(table, "columns") or not hasattr(table, "__getitem__"):
        return None
    return [table[name] for name in getattr(table, "column_names", None) or list(table.columns)]


def _by_position(
    wanted: Any, width: int, names: Sequence[str] | None, remedy: str = ""
) -> dict[int, AbstractKind]:
    """Return the requested kinds by position."""
    if not isinstance(wanted, Mapping | None):
        example = {0 if names is None else names[0]: "positive"}
        raise TypeError(
            f"kinds of columns are a dict by name or position, such as {example}; got {wanted!r}."
        )
    found = {}
    for column, kind in (wanted or {}).items():
        named = [] if names is None else [j for j, name in enumerate(names) if name == str(column)]
        whole = isinstance(column, int | np.integer) and not isinstance(column, bool)
        if not named and whole and -width <= column < width:
            named = [int(column) % width]
        if not named:
            known = f"the columns are {', '.join(names or ())}"
            known = f"positions are 0 to {width - 1}" if names is None else known
            raise ValueError(f"there is no column {column!r} to be of kind {kind!r}: {known}.{remedy}")
        found[named[0]] = as_kind(kind)
    return found


def _kind(kind: AbstractKind | None, column: np.ndarray, name: str) -> AbstractKind:
    """Return the kind of a column, by default labels or real numbers."""
    present = [cell for cell in column.tolist() if not is_missing(cell)] if column.dtype == object else []
    first = present[0] if present else None
    dated = any(hasattr(first, name) for name in ("isoformat", "strftime", "total_seconds"))
    if dated or column.dtype.kind in "mM" or isinstance(first, np.datetime64 | np.timedelta64):
        raise ValueError(f"column {name} contains {DATES}")
    if kind is None:
        labels = any(isinstance(cell, str | bytes | bool | np.bool_) for cell in present)
        kind = Category() if labels or column.dtype.kind in "bUST" else Real()
    return kind.fitted(column, name)


def _few_numbers(column: np.ndarray) -> bool:
    distinct = len(np.unique(column))
    return 2 <= distinct <= FEW_VALUES and distinct * REPEATED <= len(column)


def _few_whole_numbers(column: np.ndarray) -> bool:
    return _few_numbers(column) and bool(np.all(column == np.round(column)))


def _few_rounded_numbers(column: np.ndarray) -> bool:
    return _few_numbers(column) and not _few_whole_numbers(column) and Rounding.found(column) is not None


def _long_tailed(column: np.ndarray) -> bool:
    positive = len(column) > 0 and column.min() > 0.0
    return bool(positive and heavy_tailed_columns(column[:, None])[0])


def _proportion(column: np.ndarray) -> bool:
    inside = len(column) > 0 and column.min() >= 0.0 and column.max() <= 1.0
    near = inside and column.min() < CLOSE_TO_ENDS and column.max() > 1.0 - CLOSE_TO_ENDS
    return bool(near and len(np.unique(column)) > 2)
