"""Tables read block by block, as often as one asks: those that are larger than memory, or need not be held at all.

A block is a table of some rows: an array, or a frame of pandas, polars or Arrow. A source of blocks is a memory-mapped array, a
Parquet file or a folder of them, an Arrow or Dask frame, or anything that can be iterated over again and again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np

from kexpfam.data.frames import layout_of
from kexpfam.settings import SettingsRecord, check_whole

__all__ = [
    "RowBlocks",
    "Rows",
    "beside",
    "joined",
    "numbers",
    "part",
    "partition",
    "row_blocks",
    "stepped",
    "with_targets",
]

READ_ONCE = (
    "can be read only once, and a fit reads its rows several times: pass something that starts anew each time, such as a list "
    "of tables, an object with __iter__, or the path of a Parquet file."
)


class Rows(SettingsRecord):
    """How many rows a fit works with.

    Parameters
    ----------
    in_memory : int
        Rows that are held, at most: of more, a uniform sample without replacement is drawn while they are read. Scaling, hints,
        selection, mixtures, centres and learned bases are found on that sample. Sums over rows, which are the means of f's
        features and scores, are over all of them.
    kept : int
        Rows, at most, that stay in the model for pictures, diagnosis and reports; they are in its file.
    block : int
        Rows that are read at a time, where the source leaves the choice.
    """

    in_memory: int = 100_000
    kept: int = 2_000
    block: int = 65_536

    def __check_init__(self) -> None:
        check_whole(self, 100, "in_memory")
        check_whole(self, 10, "kept")
        check_whole(self, 1, "block")


@dataclass(frozen=True)
class RowBlocks:
    """A table in blocks, which come from sources one after the other; ``read`` starts a source anew each time it is called.

    ``lengths`` are the rows of each source, None where only reading would tell. Each of ``steps`` is done to every block, and
    is told which row is its first: it may add columns or take some away, but no rows. A page is as many rows as one process
    goes through at least, whatever the blocks are. ``beside`` are tables that must have as many rows, by name.
    """

    read: Callable[[Any], Iterable[Any]]
    sources: Sequence[Any] = (None,)
    lengths: tuple[int, ...] | None = None
    steps: tuple[Callable[[Any, int], Any], ...] = ()
    page: int = 65_536
    beside: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> int | None:
        """Return how many rows there are, or None where only reading would tell."""
        return None if self.lengths is None else sum(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        return (block for _, block in self.numbered())

    def then(self, step: Callable[[Any, int], Any]) -> "RowBlocks":
        """Return the blocks with another step done to each of them."""
        return replace(self, steps=(*self.steps, step))

    def numbered(self, rank: int = 0, count: int = 1) -> Iterator[tuple[int, Any]]:
        """Yield the blocks that are for one of several processes, each after the number of its first row.

        Where the lengths are known these are neighbours, and no more than their sources are read.
        """
        if self.lengths is None:
            read = self._started(self.sources)
            mine = lambda start: start // self.page % count == rank
        else:
            pages = -(-sum(self.lengths) // self.page)
            low, high = (pages * place // count * self.page for place in (rank, rank + 1))
            starts = (0, *accumulate(self.lengths))
            near = [
                place
                for place, length in enumerate(self.lengths)
                if starts[place] < high and starts[place] + length > low
            ]
            read = self._started([self.sources[place] for place in near], starts[near[0]] if near else 0)
            mine = lambda start: start >= low
            read = takewhile(lambda numbered: numbered[0] < high, read)
        yield from ((start, stepped(self.steps, block, start)) for start, block in read if mine(start))

    def check_rows(self, rows: int) -> None:
        """Raise unless all that stands beside the blocks has so many rows."""
        for name, length in self.beside:
            if length != rows:
                raise ValueError(f"{name} must have one entry for each of the {rows} rows, got {length}.")

    def _started(self, sources: Sequence[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        for source in sources:
            for block in self.read(source):
                yield start, block
                start += len(block[0] if isinstance(block, tuple) else block)


def stepped(steps: Iterable[Callable[[Any, int], Any]], block: Any, start: int) -> Any:
    """Return a block, of which ``start`` is the first row, after some steps."""
    for step in steps:
        block = step(block, start)
    return block


def row_blocks(source: Any, settings: Rows, *, columns: Sequence[str] | None = None) -> RowBlocks | None:
    """Return the blocks of a source, or None if it is a table of few enough rows to be held; ``columns`` are those of a file.

    An array or a frame with more than ``settings.in_memory`` rows is cut into slices, none of which is copied.
    """
    if isinstance(source, RowBlocks):
        return source
    if isinstance(source, str | os.PathLike):
        return _file(Path(source), settings, columns)
    if isinstance(source, Iterator) or hasattr(source, "read_next_batch"):
        raise TypeError(f"a {type(source).__name__} {READ_ONCE}")
    if _is_dataset(source):
        return _dataset(source, settings, columns)
    if hasattr(source, "npartitions") and hasattr(source, "get_partition"):  # a frame of Dask
        return RowBlocks(
            partition,
            [source.get_partition(place) for place in range(source.npartitions)],
            page=settings.block,
        )
    if _is_table(source):
        return None if len(source) <= settings.in_memory else _slices(source, settings)
    if isinstance(source, list | tuple):
        return _listed(source, settings) if source and _is_block(_block(source[0])) else None
    bare = not any(hasattr(source, name) for name in ("__array__", "__len__", "shape", "__getitem__"))
    if not bare or not isinstance(source, Iterable):
        return None
    return RowBlocks(lambda whole: map(_block, whole), [source], page=settings.block)


def with_targets(blocks: RowBlocks, y: Any) -> RowBlocks:
    """Return blocks of pairs (X, y); y is the name of a column or a list of them, or as many rows as there are in the blocks.

    Targets without a block of their own to stand in are an array, a frame, or the path of a .npy file.
    """
    named = isinstance(y, str) and Path(y).suffix != ".npy"
    listed = (
        isinstance(y, list | tuple)
        and y
        and len(y) != blocks.rows
        and all(isinstance(name, str) for name in y)
    )
    if named or listed:
        return blocks.then(partial(_separated, names=y))
    if isinstance(y, str | os.PathLike):
        y = _mapped(Path(y))
    y = np.asarray(y) if isinstance(y, list | tuple) else y
    if not hasattr(y, "__len__"):
        raise TypeError(
            f"the targets of rows in blocks are names of columns, or an array of all rows; got {type(y).__name__}."
        )
    return beside(blocks, y, "y")


def beside(blocks: RowBlocks, table: Any, name: str) -> RowBlocks:
    """Return each block with its rows of a table that is held whole; that has as many rows, or a pass will say so."""
    known = replace(blocks, beside=(*blocks.beside, (name, len(table))))
    if blocks.rows is not None:
        known.check_rows(blocks.rows)
    return known.then(partial(_with_rows_of, table=table, name=name))


def _with_rows_of(block: Any, start: int, *, table: Any, name: str) -> tuple[Any, ...]:
    parts = block if isinstance(block, tuple) else (block,)
    stop = start + len(parts[0])
    if stop > len(table):
        raise ValueError(
            f"{name} must have one entry for each row: there are {stop} rows at least, and {len(table)} entries."
        )
    return (*parts, part(table, slice(start, stop)))


def partition(frame: Any) -> Iterator[Any]:
    """Yield the only block of a partition of Dask."""
    yield frame.compute()


def _listed(tables: Sequence[Any], settings: Rows) -> RowBlocks:
    """Return the blocks of a list: of tables, all lengths are known."""
    first = [_block(table) for table in tables]
    lengths = tuple(len(block[0] if isinstance(block, tuple) else block) for block in first)
    return RowBlocks(lambda table: [_block(table)], tables, lengths, page=settings.block)


def _slices(table: Any, settings: Rows) -> RowBlocks:
    """Return the blocks of something that slices of rows can be taken from."""
    starts = range(0, len(table), settings.block)
    lengths = tuple(min(settings.block, len(table) - start) for start in starts)
    return RowBlocks(partial(_slice, table, settings.block), starts, lengths, page=settings.block)


def _slice(table: Any, size: int, start: int) -> Iterator[Any]:
    yield part(table, slice(start, start + size))


def _file(path: Path, settings: Rows, columns: Sequence[str] | None) -> RowBlocks:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder.")
    if path.is_dir() or path.suffix.lower() in (".parquet", ".pq"):
        try:
            import pyarrow
            import pyarrow.dataset
        except ImportError:
            raise ImportError(
                f"{path}: reading Parquet needs pyarrow: pip install 'kexpfam[data]'."
            ) from None
        try:
            # By default a reader fetches all of a file before it gives the first block.
            options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
            form = pyarrow.dataset.ParquetFileFormat(default_fragment_scan_options=options)
            return _dataset(pyarrow.dataset.dataset(path, format=form), settings, columns)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a readable Parquet file or folder ({error}).") from None
    if path.suffix.lower() != ".npy":
        raise ValueError(
            f"{path}: rows are read in blocks from .npy, .parquet and folders of .parquet files."
        )
    return _slices(_mapped(path), settings)


def _mapped(path: Path) -> np.ndarray:
    """Return an array on the disk, none of which is read before it is used; objects would be pickles, which run code."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a readable NPY file of numbers ({error}).") from None
    return values[:, None] if values.ndim == 1 else values


def _is_dataset(source: Any) -> bool:
    return (
        type(source).__module__.startswith("pyarrow")
        and hasattr(source, "to_batches")
        and hasattr(source, "count_rows")
    )


def _dataset(source: Any, settings: Rows, columns: Sequence[str] | None) -> RowBlocks:
    import pyarrow
    import pyarrow.dataset

    missing = [name for name in columns or () if name not in source.schema.names]
    if missing:
        known = ", ".join(source.schema.names)
        raise ValueError(f"there is no column {', '.join(map(repr, missing))}; there are {known}.")
    # Reading ahead, on several threads above all, is how a scanner comes to hold many blocks at once.
    options: dict[str, Any] = {
        "batch_size": settings.block,
        "batch_readahead": 0,
        "fragment_readahead": 0,
        "use_threads": False,
        "schema": source.schema,
    }
    if columns is not None:
        options["columns"] = list(columns)
    read = lambda piece: (pyarrow.Table.from_batches([batch]) for batch in piece.to_batches(**options))
    pieces, lengths = _pieces(source)
    if pieces == [source]:
        del options["schema"]
    return RowBlocks(read, pieces, lengths, page=settings.block)


def _pieces(source: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return what of a dataset can be read alone, row groups of Parquet, and the rows of each."""
    try:
        fragments = list(source.get_fragments())
    except ValueError:  # those of a filtered dataset would be without the filter
        return [source], (source.count_rows(),)
    found = list[tuple[Any, int]]()
    for fragment in fragments:
        if hasattr(fragment, "split_by_row_group"):
            # Their count_rows() is that of the whole file.
            found += [(piece, piece.row_groups[0].num_rows) for piece in fragment.split_by_row_group()]
        else:
            found.append((fragment, fragment.count_rows()))
    return [piece for piece, _ in found], tuple(rows for _, rows in found)


def _is_table(source: Any) -> bool:
    layout = layout_of(source)
    return (isinstance(source, np.ndarray) and source.ndim == 2) or (layout is not None and not layout.series)


def _is_block(given: Any) -> bool:
    """Return whether something is a table, or starts with one as (X, y) does; a row as a tuple of numbers does not."""
    return _is_table(given[0] if isinstance(given, tuple) and given else given)


def _block(given: Any) -> Any:
    """Return a block as a table that rows can be taken from: a frame, or an array of two dimensions."""
    if isinstance(given, str | os.PathLike):
        raise TypeError(
            "a block is a table of rows, not the name of a file: put the files into a folder and pass its path."
        )
    if isinstance(given, tuple):
        return tuple(map(_block, given))
    if type(given).__module__.startswith("pyarrow") and type(given).__name__ == "RecordBatch":
        import pyarrow

        return pyarrow.Table.from_batches([given])
    return given if layout_of(given) is not None else np.asarray(given)


def part(table: Any, rows: np.ndarray | slice) -> Any:
    """Return some rows of an array, a frame or a series."""
    if isinstance(table, np.ndarray):
        return table[rows]
    if not nw.dependencies.is_into_dataframe(table) and not nw.dependencies.is_into_series(table):
        return np.asarray(table)[rows]
    return nw.from_native(table, eager_only=True, allow_series=True)[rows].to_native()


def joined(parts: Sequence[Any]) -> Any:
    """Return tables of the same kind as one."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    wrapped = [nw.from_native(part, eager_only=True, allow_series=True) for part in parts]
    if isinstance(wrapped[0], nw.DataFrame):
        return nw.concat(wrapped).to_native()
    name = wrapped[0].name
    return nw.concat([series.to_frame() for series in wrapped])[name].to_native()


def _separated(block: Any, start: int, *, names: str | Sequence[str]) -> tuple[Any, Any]:
    """Return a block without its targets, and the targets: a series if there is one name, a frame if there is a list."""
    if layout_of(block) is None:
        raise ValueError(
            f"the blocks are arrays, whose columns have no names: pass y as an array instead of {names!r}."
        )
    frame, wanted = nw.from_native(block, eager_only=True), [names] if isinstance(names, str) else list(names)
    missing = [name for name in wanted if name not in frame.columns]
    if missing:
        raise ValueError(
            f"there is no column {', '.join(map(repr, missing))}; there are {', '.join(map(str, frame.columns))}."
        )
    targets = frame[names] if isinstance(names, str) else frame.select(wanted)
    return frame.drop(wanted).to_native(), targets.to_native()


def numbers(table: Any) -> np.ndarray:
    """Return a table as numbers, (rows, columns), NaN where cells are none; an array of floats as it is."""
    if layout_of(table) is not None:
        wrapped = nw.from_native(table, eager_only=True, allow_series=True)
        columns = (
            [wrapped[name] for name in wrapped.columns] if isinstance(wrapped, nw.DataFrame) else [wrapped]
        )
        empty = np.full(len(wrapped), np.nan)
        found = [
            np.asarray(one.cast(nw.Float64).to_numpy(), float) if one.dtype.is_numeric() else empty
            for one in columns
        ]
        return np.stack(found, axis=1) if found else np.zeros((len(wrapped), 0))
    values = np.asarray(table)
    values = values.reshape(len(values), -1)
    return values if values.dtype.kind in "iuf" else np.full(values.shape, np.nan)
