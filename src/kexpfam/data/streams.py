"""Files read a block of rows at a time, so that memory does not grow with them: text, pipes, NPY, Parquet files and folders."""

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kexpfam.data.blocks import Rows, row_blocks
from kexpfam.data.delimited import OPENING, Cells, Reading, read_text_blocks
from kexpfam.data.tables import (
    COMPRESSED,
    STANDARD_STREAM,
    TEXTS,
    Table,
    TableError,
    by_name_or_order,
    checked_rows,
    held_in_memory,
    opened_file,
    parquet_column,
    place_of,
    read_source,
    warn_of_dropped,
)

__all__ = ["BLOCK_ROWS", "table_blocks"]

# Rows that are held at a time, and the bytes of text that are about as many.
BLOCK_ROWS, BLOCK_BYTES = 65536, 2**23


def table_blocks(
    path: Path,
    columns: list[str],
    reading: Reading | None = None,
    *,
    chosen: Callable[[str, list[str] | None, int], list[int]] | None = None,
    rows: int = BLOCK_ROWS,
    blocks: Iterable[Any] | None = None,
) -> Iterator[Table]:
    """Yield the columns of these names block by block, or all in their order if the file has no names of its own.

    ``chosen`` finds the positions of the columns in another way. ``blocks`` are what is to be read of a file that has blocks of
    its own, if that is not all.
    """
    reading, place, seen, kept = reading or Reading(), place_of(path), 0, 0
    find = chosen or by_name_or_order(columns)
    read = _cells(path, place, find, reading, rows)
    if blocks is not None:
        read = _cells_of(blocks, place, functools.partial(find, place), reading)
    for cells in read:
        table = checked_rows(place, columns, cells, reading)
        seen, kept = seen + len(cells.columns[0]), kept + len(table.values)
        # A block of text has as many rows as its bytes hold.
        for start in range(0, len(table.values), rows):
            yield Table(columns, table.values[start : start + rows])
    if not kept:
        raise TableError(f"{place}: {'every row has a missing cell' if seen else 'there is no row of data'}.")
    warn_of_dropped(place, seen - kept, seen)


def _cells(path: Path, place: str, chosen: Callable, reading: Reading, rows: int) -> Iterator[Cells]:
    choose = functools.partial(chosen, place)
    if path == STANDARD_STREAM or (path.exists() and not path.is_file() and not path.is_dir()):
        yield from _piped_cells(path, place, chosen, reading)
        return
    opened, suffix = (None, ".parquet") if path.is_dir() else opened_file(path)
    packed = path.suffix.lower() not in (suffix, ".pq") and not path.is_dir()
    if opened is not None and suffix in TEXTS:
        with opened() as file:
            separated = reading._replace(separator=reading.separator or TEXTS[suffix])
            yield from read_text_blocks(
                place, opened, separated, choose, functools.partial(file.read, BLOCK_BYTES)
            )
    elif opened is not None and packed:
        yield _whole(read_source(place, (opened, suffix), reading._replace(gaps="keep"), chosen))
    else:
        yield from _blocks_of_file(path, place, choose, reading, rows)


def _piped_cells(path: Path, place: str, chosen: Callable, reading: Reading) -> Iterator[Cells]:
    """Yield the cells that come through a pipe: text as it comes, anything else once it is all there."""
    source: Any = contextlib.nullcontext(sys.stdin.buffer) if path == STANDARD_STREAM else open(path, "rb")  # noqa: SIM115
    with source as file:
        opening = file.read(OPENING)
        if opening.startswith((b"\x93NUMPY", b"PAR1", *(magic for magic, _ in COMPRESSED.values()))):
            content = held_in_memory(opening + file.read())
            yield _whole(read_source(place, content, reading._replace(gaps="keep"), chosen))
            return
        start = opening[: opening.rfind(b"\n") + 1] or opening if len(opening) == OPENING else opening
        parts = iter([opening])
        read = lambda: next(parts, None) or file.read(BLOCK_BYTES)
        yield from read_text_blocks(
            place, functools.partial(io.BytesIO, start), reading, functools.partial(chosen, place), read
        )


def _whole(table: Table) -> Cells:
    return Cells([table.part([j]).values[:, 0] for j in range(len(table.names))])


def _blocks_of_file(path: Path, place: str, choose: Callable, reading: Reading, rows: int) -> Iterator[Cells]:
    """Yield the cells of a Parquet file or folder, or of an array on the disk."""
    try:
        blocks = row_blocks(path, Rows(block=rows))
    except (ValueError, ImportError) as error:
        raise TableError(str(error)) from None
    yield from _cells_of(blocks or (), place, choose, reading)


def _cells_of(blocks: Iterable[Any], place: str, choose: Callable, reading: Reading) -> Iterator[Cells]:
    for block in blocks:
        if not isinstance(block, np.ndarray):
            names = block.column_names
            yield Cells(
                [parquet_column(place, names[j], block.column(j), reading) for j in choose(names, len(names))]
            )
        elif block.ndim != 2 or block.dtype.kind not in "iuf":
            raise TableError(f"{place}: expected a two-dimensional array of real numbers, got {block.dtype}.")
        else:
            yield Cells([np.asarray(block[:, j], dtype=float) for j in choose(None, block.shape[1])])
