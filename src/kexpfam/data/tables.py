"""Files of numbers in and out: CSV, NPY and Parquet as named float columns, with errors that say which cell is wrong."""

import contextlib
import csv
import io
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kexpfam.files import written

__all__ = ["MissingColumnError", "Table", "TableError", "numbered", "read_pair", "read_table", "read_values", "write_csv"]


class TableError(ValueError):
    """A file cannot be used as a table of numbers; the message says why and where."""


class MissingColumnError(TableError):
    """A file lacks a column that was asked for; ``names`` are those it has."""

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(message)
        self.names = names


class Table(NamedTuple):
    """Named columns of finite numbers; files without a header name them x0, x1, ..."""

    names: list[str]
    values: np.ndarray


def read_table(path: Path, columns: list[str] | None = None) -> Table:
    """Return the table in the file, or its chosen columns in the order given."""
    readers = {".csv": _read_csv, ".npy": _read_npy, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise TableError(f"{path}: unknown file type {path.suffix or '(none)'}; use .csv, .npy or .parquet.")
    if not path.is_file():
        raise TableError(f"{path}: no such file.")
    return readers[path.suffix.lower()](path, columns)


def read_pair(path: Path, targets: list[str], features: list[str] | None = None) -> tuple[Table, Table]:
    """Return the features and the targets in the file; the features are all other columns unless they are named."""
    named = [*(features or []), *targets]
    repeated = [name for name in dict.fromkeys(named) if named.count(name) > 1]
    if repeated:
        raise TableError(f"{path}: column {_quoted(repeated)} is named twice; a column is one feature or one target.")
    table = read_table(path, None if features is None else named)
    chosen = _positions(path, table.names, targets)
    others = [j for j in range(len(table.names)) if j not in chosen]
    if not others:
        raise TableError(f"{path}: no column is left for the features; there are {', '.join(table.names)}.")
    first, second = (Table([table.names[j] for j in part], table.values[:, part]) for part in (others, chosen))
    return first, second


def read_values(path: Path, columns: list[str]) -> np.ndarray:
    """Return the columns of these names, or all columns in their order if the file has no names of its own."""
    try:
        return read_table(path, columns).values
    except MissingColumnError as error:
        if error.names != numbered(len(error.names)):
            raise
        if len(error.names) != len(columns):
            raise TableError(
                f"{path}: {len(error.names)} columns without names where {len(columns)} are needed: {', '.join(columns)}."
            ) from None
    return read_table(path).values


def numbered(count: int, letter: str = "x") -> list[str]:
    """Return the names of columns that have none."""
    return [f"{letter}{j}" for j in range(count)]


def write_csv(path: Path, names: list[str], rows: Iterable[Collection[float]]) -> None:
    """Write a CSV file with a header; a failure leaves no half-written file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        stream = io.TextIOWrapper(file, newline="", encoding="utf-8")
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows([str(cell) for cell in row] for row in rows)
        stream.detach()


def _read_csv(path: Path, columns: list[str] | None) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: not a readable CSV file ({error}).") from None
    if not rows:
        raise TableError(f"{path}: the file is empty.")
    first = rows[0][1]
    has_header = any(not _is_number(cell) for cell in first)
    names = [cell.strip() for cell in first] if has_header else numbered(len(first))
    body = rows[1:] if has_header else rows
    if not body:
        raise TableError(f"{path}: there is a header but no row of data.")
    chosen = _positions(path, names, columns)
    values = np.empty((len(body), len(chosen)))
    for i, (line, row) in enumerate(body):
        if len(row) != len(names):
            raise TableError(f"{path}, line {line}: {len(row)} cells where {len(names)} were expected.")
        values[i] = [_number(path, line, names[j], row[j]) for j in chosen]
    return Table([names[j] for j in chosen], values)


def _read_npy(path: Path, columns: list[str] | None) -> Table:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise TableError(f"{path}: not a readable NPY file of numbers ({error}).") from None
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
        raise TableError(
            f"{path}: expected a two-dimensional array of real numbers, got {values.dtype} of shape {values.shape}."
        )
    return _checked(path, numbered(values.shape[1]), values, columns)


def _read_parquet(path: Path, columns: list[str] | None) -> Table:
    try:
        import pyarrow.parquet
    except ImportError:
        raise TableError("reading Parquet needs pyarrow: pip install 'kexpfam[data]'.") from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise TableError(f"{path}: not a readable Parquet file ({error}).") from None
    chosen = _positions(path, table.column_names, columns)
    names = [table.column_names[j] for j in chosen]
    arrays = [_floats(path, name, table.column(j).to_numpy()) for j, name in zip(chosen, names, strict=True)]
    return _checked(path, names, np.column_stack(arrays), None)


def _floats(path: Path, name: str, column: np.ndarray) -> np.ndarray:
    # Times would become counts of a unit that nobody chose.
    if column.dtype.kind not in "mM":
        with contextlib.suppress(TypeError, ValueError):
            return np.asarray(column, dtype=float)
    raise TableError(f"{path}: column {name!r} does not hold numbers.")


def _checked(path: Path, names: list[str], values: np.ndarray, columns: list[str] | None) -> Table:
    chosen = _positions(path, names, columns)
    values = np.asarray(values[:, chosen], dtype=float)
    if not len(values):
        raise TableError(f"{path}: there is no row of data.")
    bad = np.argwhere(~np.isfinite(values))
    if bad.size:
        row, column = bad[0]
        raise TableError(
            f"{path}, row {row + 1}: column {names[chosen[column]]!r} is {values[row, column]}; remove or fill such rows."
        )
    return Table([names[j] for j in chosen], values)


def _positions(path: Path, names: list[str], columns: list[str] | None) -> list[int]:
    if columns is None:
        return list(range(len(names)))
    missing = [name for name in columns if name not in names]
    if missing:
        raise MissingColumnError(f"{path}: no column {_quoted(missing)}; there are {', '.join(names)}.", names)
    ambiguous = [name for name in columns if names.count(name) > 1]
    if ambiguous:
        raise TableError(f"{path}: several columns are called {_quoted(ambiguous)}; rename them.")
    return [names.index(name) for name in columns]


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _number(path: Path, line: int, name: str, cell: str) -> float:
    if not _is_number(cell) or not np.isfinite(float(cell)):
        shown = repr(cell) if cell.strip() else "empty"
        raise TableError(f"{path}, line {line}: column {name!r} is {shown}, not a finite number; remove or fill such rows.")
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
