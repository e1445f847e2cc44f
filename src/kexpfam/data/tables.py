"""Files of tables in and out: CSV and its kin, NPY and Parquet as named columns, with errors that say which cell is wrong."""

import bz2
import contextlib
import csv
import functools
import gzip
import io
import itertools
import lzma
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kexpfam.data.delimited import HOLDS_DATES, Cells, Reading, TableError, read_text
from kexpfam.files import written
from kexpfam.stacklevel import caller_level

__all__ = [
    "STANDARD_STREAM",
    "DroppedRowsWarning",
    "MissingColumnError",
    "Reading",
    "Table",
    "TableError",
    "by_name",
    "by_name_or_order",
    "checked_rows",
    "held_in_memory",
    "numbered",
    "opened_file",
    "parquet_column",
    "place_of",
    "read_parts",
    "read_source",
    "read_table",
    "read_values",
    "warn_of_dropped",
    "write_csv",
    "write_rows",
]

# The path that stands for standard input where a table is read.
STANDARD_STREAM = Path("-")
COMPRESSED: dict[str, tuple[bytes, Callable[..., Any]]] = {
    ".gz": (b"\x1f\x8b", gzip.open),
    ".bz2": (b"BZh", bz2.open),
    ".xz": (b"\xfd7zXZ", lzma.open),
}
# What opens a file anew each time, decompressed, and its type.
Source = tuple[Callable[[], BinaryIO], str]
# Rows that are turned into text at a time.
WRITTEN_ROWS = 65536
TEXTS = {".csv": None, ".tsv": "\t", ".tab": "\t", ".txt": None, ".dat": None}


class MissingColumnError(TableError):
    """A file lacks a column that was asked for; ``names`` are those it has."""

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(message)
        self.names = names


class DroppedRowsWarning(UserWarning):
    """Rows of a file were left out, as was asked for."""


class Table(NamedTuple):
    """Named columns; files without a header name them x0, x1, ...

    The values are finite numbers, with NaN for missing cells if they are kept, or objects if some columns hold labels.
    """

    names: list[str]
    values: np.ndarray

    def part(self, positions: list[int]) -> "Table":
        """Return some of the columns; numbers alone are numbers again."""
        values = self.values[:, positions]
        if values.dtype == object:
            with contextlib.suppress(TypeError, ValueError):
                if not any(isinstance(cell, str | bool) for cell in values.ravel()):
                    values = values.astype(float)
        return Table([self.names[j] for j in positions], values)


def read_table(path: Path, columns: list[str] | None = None, reading: Reading | None = None) -> Table:
    """Return the table in the file, or its chosen columns in the order given; "-" is standard input."""
    return _read(path, reading or Reading(), by_name(columns))


def read_parts(
    path: Path, parts: list[list[str]], rest: list[str] | None = None, reading: Reading | None = None
) -> list[Table]:
    """Return the columns of each part, and first of all the rest: all other columns unless they are named."""
    named = [*(rest or []), *(name for part in parts for name in part)]
    repeated = _repeated(named)
    if repeated:
        raise TableError(
            f"{path}: column {_quoted(repeated)} is named twice; a column is a feature, a target or a weight."
        )
    table = read_table(path, None if rest is None else named, reading)
    chosen = [_positions(str(path), table.names, len(table.names), columns=part) for part in parts]
    taken = {position for part in chosen for position in part}
    others = [j for j in range(len(table.names)) if j not in taken]
    if not others:
        raise TableError(f"{path}: no column is left for the features; there are {', '.join(table.names)}.")
    return [table.part(others), *map(table.part, chosen)]


def read_values(path: Path, columns: list[str], reading: Reading | None = None) -> np.ndarray:
    """Return the columns of these names, or all columns in their order if the file has no names of its own."""

    return _read(path, reading or Reading(), by_name_or_order(columns)).values


def by_name(columns: list[str] | None) -> Callable[[str, list[str] | None, int], list[int]]:
    """Return what finds columns by their names, in the order given; all of them by default."""
    return functools.partial(_positions, columns=columns)


def by_name_or_order(columns: list[str]) -> Callable[[str, list[str] | None, int], list[int]]:
    """Return what finds columns by their names, or takes all in their order where there are none."""

    def chosen(place: str, names: list[str] | None, width: int) -> list[int]:
        try:
            return _positions(place, names, width, columns=columns)
        except MissingColumnError:
            if names is not None and names != numbered(width):
                raise
        if width != len(columns):
            raise TableError(
                f"{place}: {width} columns without names where {len(columns)} are needed: {', '.join(columns)}."
            )
        return list(range(width))

    return chosen


def numbered(count: int, letter: str = "x") -> list[str]:
    """Return the names of columns that have none."""
    return [f"{letter}{j}" for j in range(count)]


def write_csv(path: Path, names: list[str], rows: Iterable[Collection[Any]]) -> None:
    """Write a CSV file with a header, with tabs if it is called .tsv and compressed if .gz; a failure leaves no half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    with written(path) as file, contextlib.ExitStack() as stack:
        packed = suffixes[-1:] == [".gz"]
        # Without a name and a time in it, equal tables make equal files.
        target: Any = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)) if packed else file
        stream = io.TextIOWrapper(target, newline="", encoding="utf-8")
        write_rows(stream, names, rows, "\t" if ".tsv" in suffixes[-2:] else ",")
        stream.detach()


def write_rows(stream: Any, names: list[str], rows: Iterable[Collection[Any]], separator: str = ",") -> None:
    """Write a header and rows of cells to a stream; numbers as short as they come back bit for bit."""
    writer = csv.writer(stream, delimiter=separator, lineterminator="\n")
    if not isinstance(rows, np.ndarray):
        # What fails at once leaves not even a header.
        rest = iter(rows)
        writer.writerows([names, *itertools.islice(rest, 1)])
        writer.writerows(rest)
        return
    writer.writerow(names)
    for start in range(0, len(rows), WRITTEN_ROWS):
        # Python's own numbers are written several times as fast as NumPy's.
        writer.writerows(rows[start : start + WRITTEN_ROWS].tolist())


def _read(path: Path, reading: Reading, chosen: Callable[[str, list[str] | None, int], list[int]]) -> Table:
    """Return the columns whose positions are chosen by the names, or by the width if there are none."""
    return read_source(place_of(path), opened_file(path), reading, chosen)


def place_of(path: Path) -> str:
    """Return what a file is called in messages."""
    return "standard input" if path == STANDARD_STREAM else str(path)


def read_source(
    place: str, source: Source, reading: Reading, chosen: Callable[[str, list[str] | None, int], list[int]]
) -> Table:
    """Return the columns that are chosen of what a source holds."""
    (opened, suffix), choose = source, functools.partial(chosen, place)
    if suffix in TEXTS:
        reading = reading._replace(separator=reading.separator or TEXTS[suffix])
        names, positions, cells = read_text(place, opened, reading, choose)
    else:
        names, positions, cells = {".npy": _read_npy, ".parquet": _read_parquet}[suffix](
            place, opened, reading, choose
        )
    known = numbered(max(positions, default=-1) + 1) if names is None else names
    return _checked(place, [known[j] for j in positions], cells, reading)


def opened_file(path: Path) -> Source:
    """Return what opens a file anew each time, decompressed, and its type: by its name, or by the first bytes of a pipe."""
    if path == STANDARD_STREAM:
        return held_in_memory(sys.stdin.buffer.read())
    if path.exists() and not path.is_file() and not path.is_dir():
        return held_in_memory(path.read_bytes())
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing: Callable[..., Any] = (
        COMPRESSED[suffixes.pop()][1] if suffixes and suffixes[-1] in COMPRESSED else open
    )
    suffix = suffixes[-1].replace(".pq", ".parquet") if suffixes else "(none)"
    if suffix not in (*TEXTS, ".npy", ".parquet"):
        raise TableError(
            f"{path}: unknown file type {suffix}; use .csv, .tsv, .txt, .npy or .parquet, compressed or not."
        )
    if not path.is_file():
        raise TableError(f"{path}: no such file.")
    return functools.partial(packing, path, "rb"), suffix


def held_in_memory(content: bytes) -> Source:
    """Return the source of bytes that came through a pipe, of the type that the first of them tell."""
    for magic, packing in COMPRESSED.values():
        if content.startswith(magic):
            return held_in_memory(packing(io.BytesIO(content)).read())
    suffix = (
        ".npy" if content.startswith(b"\x93NUMPY") else ".parquet" if content.startswith(b"PAR1") else ".csv"
    )
    return functools.partial(io.BytesIO, content), suffix


def _read_npy(
    place: str, opened: Callable[[], BinaryIO], reading: Reading, chosen: Callable
) -> tuple[list[str] | None, list[int], Cells]:
    try:
        with opened() as file:
            # Objects are pickles, and pickles run code.
            values = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise TableError(f"{place}: not a readable NPY file of numbers ({error}).") from None
    values = values[:, None] if getattr(values, "ndim", 0) == 1 else values
    is_array = isinstance(values, np.ndarray)
    if (
        not is_array
        or values.ndim != 2
        or not np.issubdtype(values.dtype, np.number)
        or np.iscomplexobj(values)
    ):
        shown = f"{values.dtype} of shape {values.shape}" if is_array else "an archive of several arrays"
        raise TableError(f"{place}: expected a two-dimensional array of real numbers, got {shown}.")
    positions = chosen(None, values.shape[1])
    return None, positions, Cells([np.asarray(values[:, j], dtype=float) for j in positions])


def _read_parquet(
    place: str, opened: Callable[[], BinaryIO], reading: Reading, chosen: Callable
) -> tuple[list[str] | None, list[int], Cells]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise TableError(f"{place}: reading Parquet needs pyarrow: pip install 'kexpfam[data]'.") from None
    try:
        with opened() as stream, pyarrow.parquet.ParquetFile(stream) as file:
            names = file.schema_arrow.names
            positions = chosen(names, len(names))
            table = file.read(columns=[names[j] for j in positions], use_pandas_metadata=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise TableError(f"{place}: not a readable Parquet file ({error}).") from None
    return (
        names,
        positions,
        Cells([parquet_column(place, names[j], table.column(names[j]), reading) for j in positions]),
    )


def parquet_column(place: str, name: str, column: Any, reading: Reading) -> np.ndarray:
    import pyarrow.types as types

    kind = column.type
    if types.is_temporal(kind):
        raise TableError(f"{place}: column {name!r} {HOLDS_DATES}")
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    label = name in reading.labels
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
        if not label:
            return column.cast("float64").to_numpy().astype(float)
        return np.array(column.to_pylist(), dtype=object)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind):
        if label or reading.texts:
            return np.array(column.to_pylist(), dtype=object)
        ways = f"leave it out (name the others with --columns), or have it as labels (--kind {name}=category)"
        raise TableError(f"{place}: column {name!r} does not hold numbers; {ways}.")
    raise TableError(f"{place}: column {name!r} does not hold numbers.")


def _checked(place: str, names: list[str], cells: Cells, reading: Reading) -> Table:
    """Return the table, once its gaps are dealt with and its numbers are known to be finite."""
    if not len(names) or not len(cells.columns[0]):
        raise TableError(f"{place}: there is no row of data.")
    table, rows = checked_rows(place, names, cells, reading), len(cells.columns[0])
    if not len(table.values):
        raise TableError(f"{place}: every row has a missing cell; --drop-missing leaves none.")
    warn_of_dropped(place, rows - len(table.values), rows)
    return table


def warn_of_dropped(place: str, dropped: int, rows: int) -> None:
    """Say how many rows were left out, if any were."""
    if dropped:
        message = f"{place}: {dropped} of {rows} rows have missing cells and are left out."
        warnings.warn(message, DroppedRowsWarning, stacklevel=caller_level())


def checked_rows(place: str, names: list[str], cells: Cells, reading: Reading) -> Table:
    """Return the rows of cells, of which there may be none, without those that are to be dropped."""
    columns, gaps = cells.columns, [_gaps(column) for column in cells.columns]
    for name, column in zip(names, columns, strict=True):
        if column.dtype != object and np.isinf(column).any():
            row = int(np.flatnonzero(np.isinf(column))[0])
            raise TableError(
                f"{place}, {cells.place(row)}: column {name!r} is {column[row]}, not a finite number."
            )
    missing = np.any(gaps, axis=0)
    if reading.gaps == "refuse" and missing.any():
        row = int(np.flatnonzero(missing)[0])
        name = next(name for name, gap in zip(names, gaps, strict=True) if gap[row])
        raise TableError(
            f"{place}, {cells.place(row)}: column {name!r} has no value, as have {missing.sum()} of {len(missing)} rows; fill "
            "them, or leave these rows out with --drop-missing."
        )
    if reading.gaps == "drop":
        columns = [column[~missing] for column in columns]
    if any(column.dtype == object for column in columns):
        return Table(names, np.column_stack([column.astype(object) for column in columns]))
    return Table(names, np.column_stack(columns))


def _gaps(column: np.ndarray) -> np.ndarray:
    return (
        np.isnan(column)
        if column.dtype != object
        else np.array([cell is None for cell in column], dtype=bool)
    )


def _positions(place: str, names: list[str] | None, width: int, *, columns: list[str] | None) -> list[int]:
    """Return the positions of the columns that were asked for; of all, if they have names of their own."""
    known = numbered(width) if names is None else names
    if columns is None:
        if "" in known:
            raise TableError(
                f"{place}: column {known.index('') + 1} has no name; if it holds the numbers of rows, choose the others with "
                f"--columns {','.join(name for name in known if name)}."
            )
        columns = known
    missing = [name for name in columns if name not in known]
    if missing:
        raise MissingColumnError(
            f"{place}: no column {_quoted(missing)}; there are {', '.join(known)}.", known
        )
    ambiguous = [name for name in dict.fromkeys(columns) if known.count(name) > 1]
    if ambiguous:
        raise TableError(f"{place}: several columns are called {_quoted(ambiguous)}; rename them.")
    repeated = _repeated(columns)
    if repeated:
        raise TableError(f"{place}: column {_quoted(repeated)} is named twice.")
    return [known.index(name) for name in columns]


def _repeated(names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))
