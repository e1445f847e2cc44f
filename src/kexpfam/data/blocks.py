"""Tables that are read in blocks of rows, any number of times: for data larger than memory.

A block is a table of some rows: an array, or a frame of pandas, polars or Arrow. Blocks come from a
memory-mapped array, a Parquet or Feather file, a folder of Parquet files, an Arrow dataset, a Dask frame, or
any iterable that can be iterated over repeatedly.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np

from kexpfam.data.frames import arrow_table, layout_of, wrapped
from kexpfam.data.text import TableError
from kexpfam.settings import SettingsRecord, at_least

READ_ONCE = (
    "can be read only once, but a fit reads its rows several times. Pass a list of tables, an object with "
    "__iter__, or the path of a Parquet file."
)
# A change of a block, given the number of its first row.
Step = Callable[[Any, int], Any]
# The name of the Arrow dataset format of each suffix.
DATASETS = {".parquet": "parquet", ".pq": "parquet", ".feather": "ipc", ".arrow": "ipc"}


class Rows(SettingsRecord):
    """How many rows a fit works with.

    Parameters
    ----------
    in_memory : int
        Maximal number of rows in memory. Of more rows, a uniform sample without replacement is drawn while
        they are read. Scaling, hints, selection, mixtures, centres and learned bases use the sample; sums
        over rows (means of f's features and scores) use all rows.
    kept : int
        Maximal number of rows that the model and its file keep for plots, diagnosis and reports.
    block : int
        Rows per block, where the source leaves the choice.
    """

    in_memory: int = at_least(100, 100_000, whole=True)
    kept: int = at_least(10, 2_000, whole=True)
    block: int = at_least(1, 65_536, whole=True)


@dataclass(frozen=True)
class RowBlocks:
    """A table in blocks, read from sources in order; ``read`` starts a source anew in every call.

    ``lengths`` are the numbers of rows of the sources, None if unknown before reading. Each of ``steps`` is
    applied to every block, with the number of its first row; it may change columns but not rows. A page is
    the unit of rows that is assigned to a process. ``beside`` are the names and lengths of tables that need
    one row per row.
    """

    read: Callable[[Any], Iterable[Any]]
    sources: Sequence[Any] = (None,)
    lengths: tuple[int, ...] | None = None
    steps: tuple[Step, ...] = ()
    page: int = 65_536
    beside: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> int | None:
        """Return the number of rows, None if it is unknown before reading."""
        return None if self.lengths is None else sum(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        return (block for _, block in self.numbered())

    def then(self, step: Step) -> "RowBlocks":
        """Return the blocks with another step applied to each of them."""
        return replace(self, steps=(*self.steps, step))

    def numbered(self, rank: int = 0, count: int = 1) -> Iterator[tuple[int, Any]]:
        """Yield the blocks of one of ``count`` processes, each with the number of its first row.

        If the lengths are known, a process gets adjacent blocks and reads only their sources.
        """
        if self.lengths is None:
            read = self._started(self.sources)
            mine = lambda start: start // self.page % count == rank
        else:
            pages = -(-sum(self.lengths) // self.page)
            low, high = (pages * place // count * self.page for place in (rank, rank + 1))
            starts = (0, *accumulate(self.lengths))
            near = [place for place, (a, b) in enumerate(pairwise(starts)) if a < high and b > low]
            read = self._started([self.sources[place] for place in near], starts[near[0]] if near else 0)
            read = takewhile(lambda numbered: numbered[0] < high, read)
            mine = lambda start: start >= low
        yield from ((start, stepped(self.steps, block, start)) for start, block in read if mine(start))

    def check_rows(self, rows: int) -> None:
        """Raise unless all tables beside the blocks have this number of rows."""
        for name, length in self.beside:
            if length != rows:
                raise ValueError(f"{name} must have one entry for each of the {rows} rows, got {length}.")

    def _started(self, sources: Sequence[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        for source in sources:
            for block in self.read(source):
                yield start, block
                start += len(as_parts(block)[0])


def as_parts(block: Any) -> tuple[Any, ...]:
    """Return the tables of a block, which is one table or a tuple of them."""
    return block if isinstance(block, tuple) else (block,)


def stepped(steps: Iterable[Step], block: Any, start: int) -> Any:
    """Return a block after some steps; ``start`` is the number of its first row."""
    for step in steps:
        block = step(block, start)
    return block


def row_blocks(source: Any, settings: Rows, *, columns: Sequence[str] | None = None) -> RowBlocks | None:
    """Return the blocks of a source, or None if it is a table of at most ``settings.in_memory`` rows.

    ``columns`` are the columns that are read of a file or dataset. Arrays and frames are sliced without
    copies.
    """
    if isinstance(source, RowBlocks):
        return source
    if isinstance(source, str | os.PathLike):
        return _file(Path(source), settings, columns)
    if isinstance(source, Iterator) or hasattr(source, "read_next_batch"):
        raise TypeError(f"a {type(source).__name__} {READ_ONCE}")
    if type(source).__module__.startswith("pyarrow") and hasattr(source, "count_rows"):
        return _dataset(source, settings, columns)
    if hasattr(source, "npartitions") and hasattr(source, "get_partition"):  # a Dask frame
        parts = [source.get_partition(place) for place in range(source.npartitions)]
        return RowBlocks(partition, parts, page=settings.block)
    if _is_table(source):
        return None if len(source) <= settings.in_memory else _slices(source, settings)
    if isinstance(source, list | tuple):
        if not source or not _is_table(as_parts(_block(source[0]))[0]):
            return None
        lengths = tuple(len(as_parts(_block(table))[0]) for table in source)
        return RowBlocks(lambda table: [_block(table)], source, lengths, page=settings.block)
    bare = not any(hasattr(source, name) for name in ("__array__", "__len__", "shape", "__getitem__"))
    if not bare or not isinstance(source, Iterable):
        return None
    return RowBlocks(lambda whole: map(_block, whole), [source], page=settings.block)


def with_targets(blocks: RowBlocks, y: Any) -> RowBlocks:
    """Return blocks of pairs (X, y).

    y is the name of a column or a list of names, or the targets of all rows: an array, a frame or the path of
    a .npy file.
    """
    named = isinstance(y, str) and Path(y).suffix != ".npy"
    listed = isinstance(y, list | tuple) and y and len(y) != blocks.rows
    if named or (listed and all(isinstance(name, str) for name in y)):
        return blocks.then(partial(_separated, names=y))
    if isinstance(y, str | os.PathLike):
        y = load_array(Path(y), str(y))
    y = np.asarray(y) if isinstance(y, list | tuple) else y
    if not hasattr(y, "__len__"):
        raise TypeError(f"y must be names of columns or an array of all rows, got {type(y).__name__}.")
    return beside(blocks, y, "y")


def beside(blocks: RowBlocks, table: Any, name: str) -> RowBlocks:
    """Return each block with its rows of a table in memory, which must have as many rows as the blocks."""
    known = replace(blocks, beside=(*blocks.beside, (name, len(table))))
    if blocks.rows is not None:
        known.check_rows(blocks.rows)
    return known.then(partial(_with_rows_of, table=table, name=name))


def _with_rows_of(block: Any, start: int, *, table: Any, name: str) -> tuple[Any, ...]:
    parts = as_parts(block)
    stop = start + len(parts[0])
    if stop > len(table):
        found = f"there are {stop} rows or more, {len(table)} entries"
        raise ValueError(f"{name} must have one entry for each row; {found}.")
    return (*parts, part(table, slice(start, stop)))


def partition(frame: Any) -> Iterator[Any]:
    """Yield the only block of a Dask partition."""
    yield frame.compute()


def _slices(table: Any, settings: Rows) -> RowBlocks:
    """Return the blocks of a table in memory or memory-mapped."""
    size = settings.block
    starts = range(0, len(table), size)
    lengths = tuple(min(size, len(table) - start) for start in starts)
    read = lambda start: [part(table, slice(start, start + size))]
    return RowBlocks(read, starts, lengths, page=size)


def _file(path: Path, settings: Rows, columns: Sequence[str] | None) -> RowBlocks:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder.")
    suffix = ".parquet" if path.is_dir() else path.suffix.lower()
    if suffix == ".npy":
        return _slices(load_array(path, str(path)), settings)
    if suffix not in DATASETS:
        raise ValueError(f"{path}: row blocks are .npy, .parquet, .feather or folders of .parquet files.")
    return _dataset(arrow_dataset(path, suffix, str(path)), settings, columns)


def load_array(source: Path | bytes, place: str) -> np.ndarray:
    """Return the array of an NPY file, a vector as one column; that of a path is memory-mapped.

    Arrays of objects are refused, since unpickling can run code. ``place`` is the name in messages.
    """
    try:
        if isinstance(source, bytes):
            values = np.load(io.BytesIO(source), allow_pickle=False)
        else:
            values = np.load(source, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise TableError(f"{place}: not a readable NPY file of numbers ({error}).") from None
    if not isinstance(values, np.ndarray):
        values.close()
        raise TableError(f"{place}: expected an array of real numbers, got an archive of several arrays.")
    return values[:, None] if values.ndim == 1 else values


def arrow_dataset(source: Path | bytes, suffix: str, place: str) -> Any:
    """Return the Arrow dataset of a file, a folder or the bytes of a file."""
    import pyarrow
    import pyarrow.dataset as arrow

    form: Any = arrow.IpcFileFormat()
    if DATASETS[suffix] == "parquet":
        # By default a reader fetches all of a file before it returns the first batch.
        options = arrow.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
        form = arrow.ParquetFileFormat(default_fragment_scan_options=options)
    try:
        if not isinstance(source, bytes):
            return arrow.dataset(source, format=form)
        fragment = form.make_fragment(pyarrow.py_buffer(source))
        return arrow.FileSystemDataset([fragment], fragment.physical_schema, form)
    except (pyarrow.ArrowException, OSError) as error:
        name = "Parquet" if DATASETS[suffix] == "parquet" else "Feather"
        raise TableError(f"{place}: not a readable {name} file or folder ({error}).") from None


def _dataset(source: Any, settings: Rows, columns: Sequence[str] | None) -> RowBlocks:
    import pyarrow

    _check_present(columns or (), source.schema.names)
    # Read-ahead and threads would keep many batches in memory.
    options: dict[str, Any] = {"batch_readahead": 0, "fragment_readahead": 0, "use_threads": False}
    options["batch_size"] = settings.block
    if columns is not None:
        options["columns"] = list(columns)
    pieces, lengths = _pieces(source)
    if pieces != [source]:
        options["schema"] = source.schema
    read = lambda piece: (pyarrow.Table.from_batches([batch]) for batch in piece.to_batches(**options))
    return RowBlocks(read, pieces, lengths, page=settings.block)


def _pieces(source: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the parts of a dataset that can be read alone, such as row groups, and their numbers of rows."""
    try:
        fragments = list(source.get_fragments())
    except ValueError:  # fragments of a filtered dataset would lack the filter
        return [source], (source.count_rows(),)
    found = list[tuple[Any, int]]()
    for fragment in fragments:
        if hasattr(fragment, "split_by_row_group"):
            # count_rows() of a row group is that of the whole file.
            found += [(piece, piece.row_groups[0].num_rows) for piece in fragment.split_by_row_group()]
        else:
            found.append((fragment, fragment.count_rows()))
    return [piece for piece, _ in found], tuple(rows for _, rows in found)


def _is_table(source: Any) -> bool:
    if isinstance(source, np.ndarray):
        return source.ndim == 2
    return isinstance(wrapped(source), nw.DataFrame)


def _block(given: Any) -> Any:
    """Return a block as a frame or an array, or a tuple of them."""
    if isinstance(given, str | os.PathLike):
        raise TypeError("a block must be a table, not the path of a file; pass the path of their folder.")
    if isinstance(given, tuple):
        return tuple(map(_block, given))
    given = arrow_table(given)
    return given if layout_of(given) is not None else np.asarray(given)


def part(table: Any, rows: np.ndarray | slice) -> Any:
    """Return some rows of an array, a frame or a series."""
    found = wrapped(table)
    return np.asarray(table)[rows] if found is None else found[rows].to_native()


def joined(parts: Sequence[Any]) -> Any:
    """Return tables of the same type as one table."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    tables: Any = [wrapped(part) for part in parts]
    if isinstance(tables[0], nw.DataFrame):
        return nw.concat(tables).to_native()
    return nw.concat([series.to_frame() for series in tables])[tables[0].name].to_native()


def _separated(block: Any, start: int, *, names: str | Sequence[str]) -> tuple[Any, Any]:
    """Return a block without its targets, and the targets: a series for one name, a frame for a list."""
    frame = wrapped(block)
    if not isinstance(frame, nw.DataFrame):
        raise ValueError(f"the blocks are arrays without column names; pass y as an array, not as {names!r}.")
    wanted = [names] if isinstance(names, str) else list(names)
    _check_present(wanted, frame.columns)
    targets = frame[names] if isinstance(names, str) else frame.select(wanted)
    return frame.drop(wanted).to_native(), targets.to_native()


def _check_present(wanted: Sequence[str], known: Sequence[Any]) -> None:
    missing = [name for name in wanted if name not in known]
    if missing:
        shown = ", ".join(map(repr, missing))
        raise ValueError(f"there is no column {shown}; there are {', '.join(map(str, known))}.")


def numbers(table: Any) -> np.ndarray:
    """Return a table as numbers, (rows, columns), NaN for other cells; arrays of numbers are not copied."""
    frame = wrapped(table)
    if frame is None:
        values = np.asarray(table)
        values = values.reshape(len(values), -1)
        return values if values.dtype.kind in "iuf" else np.full(values.shape, np.nan)
    frame = frame.alias("y").to_frame() if isinstance(frame, nw.Series) else frame
    found = np.full((len(frame), len(frame.columns)), np.nan)
    for place, column in enumerate(frame.iter_columns()):
        if column.dtype.is_numeric():
            found[:, place] = column.cast(nw.Float64).to_numpy()
    return found
