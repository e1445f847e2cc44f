"""Tables as people have them, and the numbers that models work with: labels as codes, missing cells as NaN."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np

from kexpfam.data.kinds import AbstractKind, Atom, Category, Integer, Real, as_kind
from kexpfam.stacklevel import caller_level

__all__ = ["ColumnKindWarning", "Columns", "categorical", "columns_of"]

# A column of whole numbers with at most this many values, each repeated this often on average, may be counts or codes.
FEW_VALUES, REPEATED = 20, 10
# Labels that are more than this share of the rows, and more than a few, name the rows: they say nothing about others.
NAMES_ROWS = 0.5
# A column within 0 and 1 that comes this close to both may be a proportion.
CLOSE_TO_ENDS = 0.1

Wanted = Mapping[Any, Any] | None


class ColumnKindWarning(UserWarning):
    """A column is treated as real numbers, and looks as if it were of another kind."""


class Columns(eqx.Module):
    """The names and kinds of the columns of a table: what turns its cells into numbers and draws back into cells."""

    kinds: tuple[AbstractKind, ...] = eqx.field(static=True)
    names: tuple[str, ...] | None = eqx.field(static=True, default=None)

    @staticmethod
    def of(
        columns: Sequence[np.ndarray],
        names: Sequence[str] | None = None,
        wanted: Wanted = None,
        labelled: Collection[int] = (),
    ) -> "Columns":
        """Return the kinds of these columns: those that are wanted, by name or position, and labels where there are labels.

        ``labelled`` are the positions of columns that hold labels although these are numbers.
        """
        asked = {j: Category() for j in labelled} | _by_position(wanted, len(columns), names)
        labels = [str(j) if names is None else repr(names[j]) for j in range(len(columns))]
        kinds = [_settled(asked.get(j), column, labels[j]) for j, column in enumerate(columns)]
        return Columns(tuple(kinds), None if names is None else tuple(map(str, names)))

    @property
    def shown(self) -> dict[str | int, AbstractKind]:
        """Return the kinds by name, or by position where the columns have no names."""
        return dict(zip(self.names or range(len(self.kinds)), self.kinds, strict=True))

    @property
    def plain(self) -> bool:
        """Return whether all columns are real numbers."""
        return all(isinstance(kind, Real) for kind in self.kinds)

    def encode(self, columns: Sequence[np.ndarray], *, unknown: bool = False) -> np.ndarray:
        """Return the cells as numbers, (rows, columns); labels that are not known are -1, or raise unless ``unknown``."""
        names = self.names or range(len(self.kinds))
        parts = zip(columns, self.kinds, map(str, names), strict=True)
        return np.column_stack(
            [_numbers(column, kind, name, unknown=unknown) for column, kind, name in parts]
        )

    def decode(self, values: np.ndarray, *, whole: bool = True) -> np.ndarray:
        """Return numbers as cells: labels are labels; an array of objects, if some are texts, and of whole numbers, if all are.

        Means of integers are not ``whole``.
        """
        if not any(kind.discrete for kind in self.kinds):
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
        return [_cells(values[:, j], kind, whole=whole) for j, kind in enumerate(self.kinds)]

    def inside(self, values: np.ndarray) -> np.ndarray:
        """Return which rows of numbers lie in the support."""
        each = [kind.inside(values[:, j]) for j, kind in enumerate(self.kinds)]
        return np.all(each, axis=0) if each else np.ones(len(values), bool)

    def check(self, values: np.ndarray) -> None:
        """Raise if some rows lie outside the support of a column, or if a column is all gaps."""
        for name, kind, column in zip(
            self.names or range(len(self.kinds)), self.kinds, values.T, strict=True
        ):
            outside = column[~kind.inside(column)]
            if len(outside):
                raise ValueError(
                    f"column {name} holds {outside[0]:g}, which is not {kind}: correct its kind or the cell."
                )
            if np.all(np.isnan(column)):
                raise ValueError(f"column {name} holds nothing but missing cells: leave it out.")

    def hints(self, values: np.ndarray, wanted: Wanted) -> None:
        """Warn of real columns that look like counts or proportions; a kind that was asked for is not doubted."""
        asked = _by_position(wanted, len(self.kinds), self.names)
        doubted = [j for j, kind in enumerate(self.kinds) if isinstance(kind, Real) and j not in asked]
        names = list(self.names or range(len(self.kinds)))
        for kinds, looks, test in (
            ("'integer', 'count' or 'category'", "few whole numbers", _few_whole_numbers),
            ("'bounded:0:1'", "numbers from 0 to 1", _proportion),
        ):
            found = [names[j] for j in doubted if test(values[~np.isnan(values[:, j]), j])]
            if found:
                one = f"columns={{{found[0]!r}: ...}}"
                message = f"column(s) {', '.join(map(str, found))} hold {looks} and are treated as real: say {kinds} or 'real'"
                message += f" with {one}."
                warnings.warn(message, ColumnKindWarning, stacklevel=caller_level())


def columns_of(table: Any) -> list[np.ndarray]:
    """Return the columns of a frame or of a two-dimensional array, each with a type of its own."""
    if hasattr(table, "columns") and hasattr(table, "__getitem__"):
        names = getattr(table, "column_names", None) or list(table.columns)
        return [np.asarray(table[name]) for name in names]
    return [np.asarray(column) for column in table.T]


def categorical(table: Any) -> frozenset[int]:
    """Return the positions of the columns that a frame calls categories, whatever they are categories of."""
    if not hasattr(table, "columns") or not hasattr(table, "__getitem__"):
        return frozenset()
    columns = [table[name] for name in getattr(table, "column_names", None) or list(table.columns)]
    types = [str(getattr(column, "dtype", getattr(column, "type", ""))).lower() for column in columns]
    return frozenset(j for j, name in enumerate(types) if name.startswith(("categor", "enum", "dictionary")))


def _by_position(wanted: Wanted, width: int, names: Sequence[str] | None) -> dict[int, AbstractKind]:
    """Return the kinds that were asked for, by position."""
    found = {}
    for column, kind in (wanted or {}).items():
        named = [] if names is None else [j for j, name in enumerate(names) if name == str(column)]
        if not named and isinstance(column, int | np.integer) and -width <= column < width:
            named = [int(column) % width]
        if not named:
            known = (
                f"the columns are {', '.join(names)}"
                if names is not None
                else f"positions are 0 to {width - 1}"
            )
            raise ValueError(f"there is no column {column!r} to be of kind {kind!r}: {known}.")
        found[named[0]] = as_kind(kind)
    return found


def _settled(kind: AbstractKind | None, column: np.ndarray, name: str) -> AbstractKind:
    """Return the kind of a column; that of labels knows them."""
    _refuse_dates(column, name)
    if kind is None:
        kind = Category() if _holds_labels(column) else Real()
    if not isinstance(kind, Category) or kind.levels:
        return kind
    present = [cell for cell in column.tolist() if not _is_missing(cell)]
    levels = _sorted(dict.fromkeys(present))
    if len(levels) > max(FEW_VALUES, NAMES_ROWS * len(present)):
        raise ValueError(
            f"column {name} has {len(levels)} different labels in {len(present)} rows: it names rows; leave it out."
        )
    return Category(tuple(levels))


def _sorted(levels: Mapping[Any, None]) -> list:
    try:
        return sorted(levels)
    except TypeError:  # labels of several types
        return sorted(levels, key=str)


def _holds_labels(column: np.ndarray) -> bool:
    if column.dtype.kind in "bUST":
        return True
    if column.dtype.kind != "O":
        return False
    return any(isinstance(cell, str | bytes | bool | np.bool_) for cell in column.tolist())


def _refuse_dates(column: np.ndarray, name: str) -> None:
    first = (
        next((cell for cell in column.tolist() if not _is_missing(cell)), None)
        if column.dtype.kind == "O"
        else None
    )
    if column.dtype.kind in "mM" or hasattr(first, "isoformat") or hasattr(first, "total_seconds"):
        raise ValueError(
            f"column {name} holds dates or durations: turn them into numbers, such as days since the first of them, or hours "
            "of the day of kind 'periodic:24'."
        )


def _is_missing(cell: Any) -> bool:
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, float | np.floating) and bool(np.isnan(cell))


def _numbers(column: np.ndarray, kind: AbstractKind, name: str, *, unknown: bool) -> np.ndarray:
    """Return the cells of a column as numbers."""
    if isinstance(kind, Category):
        return _codes(column, kind, name, unknown=unknown)
    if column.dtype.kind in "biuf":
        numbers = column.astype(float)
    else:
        numbers = np.array(
            [np.nan if _is_missing(cell) else _number(cell, name) for cell in column.tolist()], float
        )
    if np.any(np.isinf(numbers)):
        raise ValueError(
            f"Input contains infinity or a value too large for dtype('float64') in column {name}."
        )
    return numbers


def _number(cell: Any, name: str) -> float:
    try:
        return float(cell)
    except TypeError:
        raise TypeError(
            f"column {name}: a cell must be a string or a number, and this argument is not: {cell!r}."
        ) from None
    except ValueError:
        raise ValueError(
            f"column {name} holds {cell!r}, which is no number; of kind 'category' it may hold texts."
        ) from None


def _codes(column: np.ndarray, kind: Category, name: str, *, unknown: bool) -> np.ndarray:
    places = {level: float(place) for place, level in enumerate(kind.levels)}
    texts = {str(level): float(place) for place, level in enumerate(kind.levels)}
    codes = [
        np.nan if _is_missing(cell) else places.get(cell, texts.get(str(cell), -1.0))
        for cell in column.tolist()
    ]
    found = np.array(codes, float)
    if not unknown and np.any(found < 0.0):
        stranger = column.tolist()[int(np.flatnonzero(found < 0.0)[0])]
        raise ValueError(
            f"column {name} holds {stranger!r}, which is none of its labels: {', '.join(map(str, kind.levels))}."
        )
    return found


def _cells(values: np.ndarray, kind: AbstractKind, *, whole: bool) -> np.ndarray:
    gaps = np.isnan(values)
    if isinstance(kind, Category):
        levels = (
            np.array(kind.levels)
            if len({type(level) for level in kind.levels}) == 1
            else np.array(kind.levels, object)
        )
        levels = levels.astype(object) if levels.dtype.kind in "UST" or gaps.any() else levels
        cells = levels[np.where(gaps, 0, values).astype(int)]
        if gaps.any():
            cells[gaps] = None
        return cells
    integers = isinstance(kind, Integer) or (isinstance(kind, Atom) and isinstance(kind.rest, Integer))
    return values.astype(int) if whole and integers and not gaps.any() else values


def _few_whole_numbers(column: np.ndarray) -> bool:
    distinct = np.unique(column)
    few = 2 <= len(distinct) <= FEW_VALUES and len(distinct) * REPEATED <= len(column)
    return bool(few and np.all(distinct == np.round(distinct)))


def _proportion(column: np.ndarray) -> bool:
    inside = len(column) > 0 and column.min() >= 0.0 and column.max() <= 1.0
    near = inside and column.min() < CLOSE_TO_ENDS and column.max() > 1.0 - CLOSE_TO_ENDS
    return bool(near and len(np.unique(column)) > 2)
