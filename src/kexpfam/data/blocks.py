"""Tables read block by block, as often as one asks: those that are larger than memory, or need not be held at all.

A block is a table of some rows: an array, or a frame of pandas, polars or Arrow. A source of blocks is a memory-mapped array, a
Parquet file or a folder of them, an Arrow or Dask frame, or anything that can be iterated over again and again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import narwhals.stable.v2 as nw
import numpy as np

from kexpfam.data.frames import layout_of
from kexpfam.progress import Listener, Report

__all__ = ["Overview", "RowBlocks", "Rows", "beside", "look_over", "row_blocks", "with_targets"]

READ_ONCE = (
    "can be read only once, and a fit reads its rows several times: pass something that starts anew each time, such as a list "
    "of tables, an object with __iter__, or the path of a Parquet file."
)


class Rows(eqx.Module):
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
        for name, least in (("in_memory", 100), ("kept", 10), ("block", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


@dataclass(frozen=True)
class RowBlocks:
    """A table in blocks; ``read`` starts anew each time it is called. ``rows`` is None where only reading would tell."""

    read: Callable[[], Iterable[Any]]
    rows: int | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())


class Overview(NamedTuple):
    """What one pass over all rows leaves: how many there are, a uniform sample in their order, and each column's range.

    There is one table, or one of features and one of targets and so on; ``low`` and ``high`` are NaN where cells are no
    numbers.
    """

    rows: int
    sample: tuple[Any, ...]
    low: tuple[np.ndarray, ...]
    high: tuple[np.ndarray, ...]


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
        return RowBlocks(lambda: (source.get_partition(place).compute() for place in range(source.npartitions)))
    if _is_table(source):
        rows = len(source)
        if rows <= settings.in_memory:
            return None
        starts = range(0, rows, settings.block)
        return RowBlocks(lambda: (_part(source, slice(start, start + settings.block)) for start in starts), rows)
    if isinstance(source, list | tuple):
        return RowBlocks(lambda: map(_block, source)) if source and _is_block(_block(source[0])) else None
    bare = not any(hasattr(source, name) for name in ("__array__", "__len__", "shape", "__getitem__"))
    return RowBlocks(lambda: map(_block, source)) if bare and isinstance(source, Iterable) else None


def with_targets(blocks: RowBlocks, y: Any) -> RowBlocks:
    """Return blocks of pairs (X, y); y is the name of a column or a list of them, or as many rows as there are in the blocks.

    Targets without a block of their own to stand in are an array, a frame, or the path of a .npy file.
    """
    named = isinstance(y, str) and Path(y).suffix != ".npy"
    listed = isinstance(y, list | tuple) and y and len(y) != blocks.rows and all(isinstance(name, str) for name in y)
    if named or listed:
        return RowBlocks(lambda: (_separated(block, y) for block in blocks), blocks.rows)
    if isinstance(y, str | os.PathLike):
        y = _mapped(Path(y))
    y = np.asarray(y) if isinstance(y, list | tuple) else y
    if not hasattr(y, "__len__"):
        raise TypeError(f"the targets of rows in blocks are names of columns, or an array of all rows; got {type(y).__name__}.")
    return RowBlocks(lambda: beside(blocks, y, "y"), blocks.rows)


def beside(blocks: Iterable[Any], table: Any, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield each block with its rows of a table that is held whole; raise if that has more rows or fewer."""
    start = 0
    for block in blocks:
        parts = block if isinstance(block, tuple) else (block,)
        stop = start + len(parts[0])
        yield (*parts, _part(table, slice(start, stop)))
        start = stop
    if start != len(table):
        raise ValueError(f"{name} must have one entry for each of the {start} rows, got {len(table)}.")


def look_over(blocks: RowBlocks, most: int, *, seed: int, report: Listener | None = None) -> Overview:
    """Return the overview of a table after one pass; it holds about twice ``most`` rows and a block at a time."""
    sample, rows = _Reservoir(most, seed), 0
    low, high = list[np.ndarray](), list[np.ndarray]()
    for block in blocks:
        parts = block if isinstance(block, tuple) else (block,)
        sizes = {len(part) for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"after row {rows}, a block has {' and '.join(map(str, sorted(sizes)))} rows in its parts.")
        if not sizes.pop():
            continue
        numbers = [_numbers(part) for part in parts]
        widths = [part.shape[1] for part in numbers]
        if not low:
            low, high = ([np.full(width, np.nan) for width in widths] for _ in range(2))
        elif [len(side) for side in low] != widths:
            raise ValueError(f"after row {rows}, a block has {widths[0]} columns where the first has {len(low[0])}.")
        low = [np.fmin(side, np.fmin.reduce(part)) for side, part in zip(low, numbers, strict=True)]
        high = [np.fmax(side, np.fmax.reduce(part)) for side, part in zip(high, numbers, strict=True)]
        sample.add(parts)
        rows += len(parts[0])
        if report is not None:
            report(Report("reading", rows, blocks.rows or 0, {}))
    if not low:
        raise ValueError("there is no row of data.")
    return Overview(rows, sample.tables(), tuple(low), tuple(high))


class _Reservoir:
    """A uniform sample without replacement: every row gets a random number, and those of the smallest numbers stay.

    The numbers come in the order of the rows, so that the sample does not depend on how they are cut into blocks.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._rng, self._worst = most, np.random.default_rng(seed), np.inf
        self._numbers, self._parts = np.zeros(0), list[tuple[Any, ...]]()

    def add(self, tables: tuple[Any, ...]) -> None:
        """Draw the numbers of a block's rows and keep those that may stay."""
        drawn = self._rng.random(len(tables[0]))
        low = np.flatnonzero(drawn < self._worst)
        if len(low):
            # Copies: a slice would keep the whole block alive.
            self._parts.append(tuple(_part(table, low) for table in tables))
            self._numbers = np.concatenate([self._numbers, drawn[low]])
        if len(self._numbers) > 2 * self._most:
            self._shrink()

    def tables(self) -> tuple[Any, ...]:
        """Return the sample, in the order of the rows."""
        self._shrink()
        return self._parts[0]

    def _shrink(self) -> None:
        tables = tuple(_joined(parts) for parts in zip(*self._parts, strict=True))
        if len(self._numbers) > self._most:
            chosen = np.sort(np.argpartition(self._numbers, self._most - 1)[: self._most])
            tables = tuple(_part(table, chosen) for table in tables)
            self._numbers = self._numbers[chosen]
            self._worst = self._numbers.max()
        self._parts = [tables]


def _file(path: Path, settings: Rows, columns: Sequence[str] | None) -> RowBlocks:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder.")
    if path.is_dir() or path.suffix.lower() in (".parquet", ".pq"):
        try:
            import pyarrow
            import pyarrow.dataset
        except ImportError:
            raise ImportError(f"{path}: reading Parquet needs pyarrow: pip install 'kexpfam[data]'.") from None
        try:
            # By default a reader fetches all of a file before it gives the first block.
            options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
            form = pyarrow.dataset.ParquetFileFormat(default_fragment_scan_options=options)
            return _dataset(pyarrow.dataset.dataset(path, format=form), settings, columns)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a readable Parquet file or folder ({error}).") from None
    if path.suffix.lower() != ".npy":
        raise ValueError(f"{path}: rows are read in blocks from .npy, .parquet and folders of .parquet files.")
    values = _mapped(path)
    starts = range(0, len(values), settings.block)
    return RowBlocks(lambda: (np.asarray(values[start : start + settings.block]) for start in starts), len(values))


def _mapped(path: Path) -> np.ndarray:
    """Return an array on the disk, none of which is read before it is used; objects would be pickles, which run code."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a readable NPY file of numbers ({error}).") from None
    return values[:, None] if values.ndim == 1 else values


def _is_dataset(source: Any) -> bool:
    return type(source).__module__.startswith("pyarrow") and hasattr(source, "to_batches") and hasattr(source, "count_rows")


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
    }
    if columns is not None:
        options["columns"] = list(columns)
    return RowBlocks(
        lambda: (pyarrow.Table.from_batches([batch]) for batch in source.to_batches(**options)), source.count_rows()
    )


def _is_table(source: Any) -> bool:
    layout = layout_of(source)
    return (isinstance(source, np.ndarray) and source.ndim == 2) or (layout is not None and not layout.series)


def _is_block(given: Any) -> bool:
    """Return whether something is a table, or starts with one as (X, y) does; a row as a tuple of numbers does not."""
    return _is_table(given[0] if isinstance(given, tuple) and given else given)


def _block(given: Any) -> Any:
    """Return a block as a table that rows can be taken from: a frame, or an array of two dimensions."""
    if isinstance(given, str | os.PathLike):
        raise TypeError("a block is a table of rows, not the name of a file: put the files into a folder and pass its path.")
    if isinstance(given, tuple):
        return tuple(map(_block, given))
    if type(given).__module__.startswith("pyarrow") and type(given).__name__ == "RecordBatch":
        import pyarrow

        return pyarrow.Table.from_batches([given])
    return given if layout_of(given) is not None else np.asarray(given)


def _part(table: Any, rows: np.ndarray | slice) -> Any:
    """Return some rows of an array, a frame or a series."""
    if isinstance(table, np.ndarray):
        return table[rows]
    if not nw.dependencies.is_into_dataframe(table) and not nw.dependencies.is_into_series(table):
        return np.asarray(table)[rows]
    return nw.from_native(table, eager_only=True, allow_series=True)[rows].to_native()


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    wrapped = [nw.from_native(part, eager_only=True, allow_series=True) for part in parts]
    if isinstance(wrapped[0], nw.DataFrame):
        return nw.concat(wrapped).to_native()
    name = wrapped[0].name
    return nw.concat([series.to_frame() for series in wrapped])[name].to_native()


def _separated(block: Any, names: str | Sequence[str]) -> tuple[Any, Any]:
    """Return a block without its targets, and the targets: a series if there is one name, a frame if there is a list."""
    if layout_of(block) is None:
        raise ValueError(f"the blocks are arrays, whose columns have no names: pass y as an array instead of {names!r}.")
    frame, wanted = nw.from_native(block, eager_only=True), [names] if isinstance(names, str) else list(names)
    missing = [name for name in wanted if name not in frame.columns]
    if missing:
        raise ValueError(f"there is no column {', '.join(map(repr, missing))}; there are {', '.join(map(str, frame.columns))}.")
    targets = frame[names] if isinstance(names, str) else frame.select(wanted)
    return frame.drop(wanted).to_native(), targets.to_native()


def _numbers(table: Any) -> np.ndarray:
    """Return a table as numbers, (rows, columns), NaN where cells are none; an array of floats as it is."""
    if layout_of(table) is not None:
        wrapped = nw.from_native(table, eager_only=True, allow_series=True)
        columns = [wrapped[name] for name in wrapped.columns] if isinstance(wrapped, nw.DataFrame) else [wrapped]
        empty = np.full(len(wrapped), np.nan)
        found = [np.asarray(one.cast(nw.Float64).to_numpy(), float) if one.dtype.is_numeric() else empty for one in columns]
        return np.stack(found, axis=1) if found else np.zeros((len(wrapped), 0))
    values = np.asarray(table)
    values = values.reshape(len(values), -1)
    return values if values.dtype.kind in "iuf" else np.full(values.shape, np.nan)
