"""Tables in files: CSV, NPY, Parquet and Feather are read and written as named columns.

Every format is read as a sequence of Arrow tables of some rows each, so that memory does not grow with the
file. Messages count the rows of data from 1.
"""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import lzma
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from kexpfam.data.blocks import DATASETS, Rows, arrow_dataset, load_array, row_blocks
from kexpfam.data.text import (
    DATES,
    OPENING,
    Reading,
    TableError,
    cells_of,
    omitted,
    text_form,
    unreadable,
)
from kexpfam.files import written
from kexpfam.stacklevel import caller_level

if TYPE_CHECKING:
    import pyarrow

# The path that means standard input.
STANDARD_STREAM = Path("-")
BLOCK_ROWS = 65536
COMPRESSED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
TEXTS = {".csv": None, ".tsv": "\t", ".tab": "\t", ".txt": None, ".dat": None}
MAGIC = {b"\x93NUMPY": ".npy", b"PAR1": ".parquet", b"ARROW1": ".feather"}
READABLE = ".csv, .tsv, .txt, .npy, .parquet or .feather, compressed or not"
# Blocks of rows that are written, each a sequence of columns.
Blocks = Iterable[Sequence[np.ndarray]]
# Returns the positions of the columns to read, given the place for messages, the names if any, and the width.
Choice = Callable[[str, list[str] | None, int], list[int]]


class MissingColumnError(TableError):
    """A file lacks a requested column."""


class DroppedRowsWarning(UserWarning):
    """Rows with missing cells were dropped, as requested."""


class Table(NamedTuple):
    """Named columns; those of files without a header are named x0, x1, ...

    ``values`` are finite numbers, or NaN where missing cells are kept; an object array if some columns are
    labels.
    """

    names: list[str]
    values: np.ndarray

    def split(self, *widths: int) -> list[np.ndarray]:
        """Return the values in groups of adjacent columns; a group without labels is of numbers again."""
        groups = np.split(self.values, np.cumsum(widths)[:-1], axis=1)
        labelled = lambda group: any(isinstance(cell, str | bool) for cell in group.ravel())
        for k, group in enumerate(groups):
            if group.dtype == object and not labelled(group):
                with contextlib.suppress(TypeError, ValueError):
                    groups[k] = group.astype(float)
        return groups


class _Opened(NamedTuple):
    """An open file: the chosen columns, their rows, and the decimal mark of a text file."""

    place: str
    names: list[str]
    tables: Iterator["pyarrow.Table"]
    decimal: str | None = None

    def columns(self, table: "pyarrow.Table", reading: Reading, start: int) -> list[np.ndarray]:
        """Return the columns of some rows; ``start`` is the number of rows before them."""
        parts = zip(table.column_names, table.columns, strict=True)
        if self.decimal is None:
            return [_typed(self.place, name, column, reading) for name, column in parts]
        mark = self.decimal
        return [cells_of(self.place, name, column, reading, mark, start) for name, column in parts]


def read_table(
    path: Path,
    columns: list[str] | None = None,
    reading: Reading | None = None,
    *,
    choose: Choice | None = None,
) -> Table:
    """Return the table in a file, or the chosen columns in the given order; "-" is standard input."""
    import pyarrow

    reading = reading or Reading()
    with _open(path, choose or by_name(columns), reading, BLOCK_ROWS) as opened:
        tables = list(opened.tables)
    if not any(map(len, tables)):
        raise TableError(f"{opened.place}: there is no row of data.")
    whole = pyarrow.concat_tables(tables)
    table = _checked(opened.place, opened.names, opened.columns(whole, reading, 0), reading, 0)
    check_kept(opened.place, len(table.values), len(whole))
    return table


def table_blocks(
    path: Path,
    columns: list[str],
    reading: Reading | None = None,
    *,
    choose: Choice | None = None,
    rows: int = BLOCK_ROWS,
) -> Iterator[Table]:
    """Yield the named columns in blocks of at most ``rows`` rows.

    All columns are taken in their order if the file has no names. ``choose`` finds the columns in another
    way.
    """
    reading = reading or Reading()
    seen = kept = 0
    with _open(path, choose or by_name_or_order(columns), reading, rows) as opened:
        for raw in opened.tables:
            cells = opened.columns(raw, reading, seen)
            table = _checked(opened.place, columns, cells, reading, seen)
            seen, kept = seen + len(raw), kept + len(table.values)
            for start in range(0, len(table.values), rows):
                yield Table(columns, table.values[start : start + rows])
    check_kept(opened.place, kept, seen)


def converted(place: str, names: list[str], block: Any, reading: Reading, start: int) -> Table:
    """Return the named columns of a block of a file: an Arrow table, or an array of columns x0, x1, ..."""
    if isinstance(block, np.ndarray):
        cells = [np.asarray(block[:, int(name[1:])], float) for name in names]
    else:
        cells = [_typed(place, name, block.column(name), reading) for name in names]
    return _checked(place, names, cells, reading, start)


def by_name(columns: list[str] | None) -> Choice:
    """Return a choice of columns by name, in the given order; of all by default, which then need names."""

    def choose(place: str, names: list[str] | None, width: int) -> list[int]:
        known = numbered(width) if names is None else names
        if columns is None and "" in known:
            named = ",".join(name for name in known if name)
            problem = f"{place}: column {known.index('') + 1} has no name; if it contains row numbers, "
            raise TableError(f"{problem}select the others with --columns {named}.")
        wanted = known if columns is None else columns
        missing = [name for name in wanted if name not in known]
        if missing:
            there = ", ".join(known)
            raise MissingColumnError(f"{place}: no column {_quoted(missing)}; there are {there}.")
        ambiguous = [name for name in dict.fromkeys(wanted) if known.count(name) > 1]
        if ambiguous:
            raise TableError(f"{place}: several columns are called {_quoted(ambiguous)}; rename them.")
        repeated = [name for name in dict.fromkeys(wanted) if wanted.count(name) > 1]
        if repeated:
            raise TableError(f"{place}: column {_quoted(repeated)} is named twice.")
        return [known.index(name) for name in wanted]

    return choose


def by_name_or_order(columns: list[str]) -> Choice:
    """Return a choice of columns by name, or of all columns in their order if the file has no names."""

    def choose(place: str, names: list[str] | None, width: int) -> list[int]:
        try:
            return by_name(columns)(place, names, width)
        except MissingColumnError:
            if names is not None and names != numbered(width):
                raise
        if width != len(columns):
            needed = f"{len(columns)} are needed: {', '.join(columns)}"
            raise TableError(f"{place}: {width} columns without names, {needed}.")
        return list(range(width))

    return choose


def numbered(count: int, letter: str = "x") -> list[str]:
    """Return the names of columns without names."""
    return [f"{letter}{j}" for j in range(count)]


def check_kept(place: str, kept: int, rows: int) -> None:
    """Warn with the number of dropped rows, if there are any; raise if no row was kept."""
    if not kept:
        reason = "every row has a missing cell" if rows else "there is no row of data"
        raise TableError(f"{place}: {reason}.")
    if kept < rows:
        message = f"{place}: {rows - kept} of {rows} rows have missing cells and are dropped."
        warnings.warn(message, DroppedRowsWarning, stacklevel=caller_level())


@contextlib.contextmanager
def _open(path: Path, choose: Choice, reading: Reading, rows: int) -> Iterator[_Opened]:
    """Open a file, a folder of Parquet files or a pipe."""
    place = "standard input" if path == STANDARD_STREAM else str(path)
    regular = path != STANDARD_STREAM and (path.is_file() or path.is_dir() or not path.exists())
    suffix = _suffix(path) if regular else ""
    if regular and (path.is_dir() or (suffix not in TEXTS and path.suffix.lower() == suffix)):
        yield _open_binary(place, path, suffix, choose, rows)
        return
    with contextlib.nullcontext(sys.stdin.buffer) if path == STANDARD_STREAM else open(path, "rb") as file:
        try:
            opening, stream = _decompressed(file)
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise unreadable(place, error) from None
        suffix = suffix or next((kind for magic, kind in MAGIC.items() if opening.startswith(magic)), ".csv")
        if suffix in TEXTS:
            if reading.comment:
                mark = reading.comment.encode()
                lines = (line for line in stream if not line.lstrip().startswith(mark))
                opening, stream = _decompressed(io.BufferedReader(_Joined(lines)))
            reading = reading._replace(separator=reading.separator or TEXTS[suffix])
            form = text_form(place, opening, reading)
            positions = choose(place, form.names, form.width)
            known = numbered(form.width) if form.names is None else form.names
            tables = form.batches(stream, positions, reading)
            yield _Opened(place, [known[j] for j in positions], tables, form.decimal)
        else:
            yield _open_binary(place, stream.read(), suffix, choose, rows)


def _suffix(path: Path) -> str:
    """Return the type of a file by its name, without the suffix of a compression."""
    if path.is_dir():
        return ".parquet"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] in ([".gz"], [".bz2"], [".xz"]):
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else "(none)"
    if suffix not in (*TEXTS, ".npy", *DATASETS):
        raise TableError(f"{path}: unknown file type {suffix}; use {READABLE}.")
    if not path.is_file():
        raise TableError(f"{path}: no such file.")
    return suffix


class _Joined(io.RawIOBase):
    """A stream of pieces of bytes, one after the other."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._rest = iter(pieces), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._pieces, b"")
        found, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)


def _decompressed(stream: Any) -> tuple[bytes, Any]:
    """Return the first bytes of a stream, and the stream from its start; a compressed one is decompressed."""
    opening = stream.read(OPENING)
    pieces = iter(lambda: stream.read(io.DEFAULT_BUFFER_SIZE), b"")
    rejoined = io.BufferedReader(_Joined(itertools.chain([opening], pieces)))
    for magic, unpack in COMPRESSED.items():
        if opening.startswith(magic):
            return _decompressed(unpack(rejoined))
    return opening, rejoined


def _open_binary(place: str, source: Path | bytes, suffix: str, choose: Choice, rows: int) -> _Opened:
    """Open an NPY, Parquet or Feather file, or the bytes of one."""
    try:
        if suffix == ".npy":
            return _open_array(place, load_array(source, place), choose, rows)
        dataset = arrow_dataset(source, suffix, place)
    except OSError as error:
        raise TableError(f"{place}: {error}") from None
    known = dataset.schema.names
    names = [known[j] for j in choose(place, known, len(known))]
    return _Opened(place, names, iter(row_blocks(dataset, Rows(block=rows), columns=names) or ()))


def _open_array(place: str, values: np.ndarray, choose: Choice, rows: int) -> _Opened:
    import pyarrow

    if values.ndim != 2 or values.dtype.kind not in "iuf":
        shown = f"{values.dtype} of shape {values.shape}"
        raise TableError(f"{place}: expected a two-dimensional array of real numbers, got {shown}.")
    positions = choose(place, None, values.shape[1])
    names = [f"x{j}" for j in positions]
    parts = (values[start : start + rows] for start in range(0, len(values), rows))
    tables = (pyarrow.table([np.asarray(part[:, j], float) for j in positions], names) for part in parts)
    return _Opened(place, names, tables)


def _typed(place: str, name: str, column: Any, reading: Reading) -> np.ndarray:
    """Return a column of a typed file as numbers, or as labels; missing cells are NaN or None."""
    import pyarrow.types as types

    kind = column.type
    if types.is_temporal(kind):
        raise TableError(f"{place}: column {name!r} contains {DATES}")
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    label = name in reading.labels
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    numeric = any(test(kind) for test in tests)
    if numeric and not label:
        return column.cast("float64").to_numpy().astype(float)
    texts = any(test(kind) for test in (types.is_string, types.is_large_string, types.is_boolean))
    if (numeric or texts) and (label or reading.texts):
        return np.array(column.to_pylist(), dtype=object)
    ways = f"; {omitted(name)}" if texts else ""
    raise TableError(f"{place}: column {name!r} does not contain numbers{ways}.")


def _checked(place: str, names: list[str], columns: list[np.ndarray], reading: Reading, start: int) -> Table:
    """Return the rows, after ``start`` others, with missing cells treated as ``reading.gaps`` says."""
    gaps = [np.isnan(one) if one.dtype != object else one == np.array(None) for one in columns]
    for name, column in zip(names, columns, strict=True):
        if column.dtype != object and np.isinf(column).any():
            row = int(np.flatnonzero(np.isinf(column))[0])
            cell = f"{place}, row {start + row + 1}: column {name!r} is {column[row]}"
            raise TableError(f"{cell}, not a finite number.")
    missing = np.any(gaps, axis=0)
    if reading.gaps == "refuse" and missing.any():
        row = int(np.flatnonzero(missing)[0])
        name = next(name for name, gap in zip(names, gaps, strict=True) if gap[row])
        raise TableError(
            f"{place}, row {start + row + 1}: column {name!r} is missing, as are cells of {missing.sum()} of "
            f"{len(missing)} rows; fill them, or drop these rows with --drop-missing."
        )
    if reading.gaps == "drop":
        columns = [column[~missing] for column in columns]
    if any(column.dtype == object for column in columns):
        columns = [column.astype(object) for column in columns]
    return Table(names, np.column_stack(columns))


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def write_table(path: Path, names: list[str], blocks: Blocks) -> int:
    """Write blocks of rows to a file of the type that its name says; return the number of rows.

    The file is written completely or not at all. Blocks are written as they come, except to .npy.
    """
    kind = output_type(path)
    with written(path) as file:
        if kind == ".npy":
            values = np.concatenate([np.column_stack(block) for block in blocks])
            if values.dtype.kind not in "iuf":
                raise TableError(f"{path}: labels cannot be written to .npy; use .csv, .parquet or .feather.")
            # Given a file, NumPy writes without Python's buffer and misses the error of a full disk.
            np.save(cast(Any, SimpleNamespace(write=file.write)), values)
            return len(values)
        if kind in DATASETS:
            return _write_arrow(file, kind, names, blocks)
        target: Any = contextlib.nullcontext(file)
        if path.suffix.lower() == ".gz":
            # Without a name and a time in its header, equal tables give equal files.
            target = gzip.GzipFile("", "wb", fileobj=file, mtime=0)
        with target as opened:
            stream = io.TextIOWrapper(opened, newline="", encoding="utf-8")
            rows = write_csv(stream, names, blocks, "\t" if kind == ".tsv" else ",")
            stream.detach()
            return rows


def output_type(path: Path) -> str:
    """Return the type of the table that is written to a path; a pipe or a device gets CSV."""
    device = path.parts[:2] == ("/", "dev")
    if device or (path.exists() and not path.is_file() and not path.is_dir()):
        return ".csv"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = suffixes[-2 if packed else -1] if len(suffixes) > packed else "(none)"
    if kind in (".csv", ".tsv") or (kind in (".npy", *DATASETS) and not packed):
        return kind
    raise TableError(
        f"{path}: unknown file type {kind}; tables are written as .csv, .tsv, .csv.gz, .tsv.gz, .npy, "
        ".parquet or .feather."
    )


def write_csv(stream: Any, names: list[str], blocks: Blocks, separator: str = ",") -> int:
    """Write a header and rows to a stream of text; return the number of rows. Numbers keep all their bits."""
    writer = csv.writer(stream, delimiter=separator, lineterminator="\n")
    rows = 0
    for place, block in enumerate(blocks):
        if not place:
            writer.writerow(names)
        writer.writerows(zip(*(column.tolist() for column in block), strict=True))
        rows += len(block[0])
    return rows


def _write_arrow(file: Any, kind: str, names: list[str], blocks: Blocks) -> int:
    import pyarrow
    import pyarrow.parquet

    blocks = iter(blocks)
    first = next(blocks)
    types = [pyarrow.array(column.tolist()).type for column in first]
    types = [pyarrow.float64() if one == pyarrow.null() else one for one in types]
    schema = pyarrow.schema(list(zip(names, types, strict=True)))
    writer: Any = pyarrow.parquet.ParquetWriter if DATASETS[kind] == "parquet" else pyarrow.ipc.new_file
    rows = 0
    with writer(file, schema) as target:
        for block in itertools.chain([first], blocks):
            cells = [pyarrow.array(column.tolist(), one) for column, one in zip(block, types, strict=True)]
            target.write(pyarrow.table(cells, schema=schema))
            rows += len(block[0])
    return rows
