"""Passes over all rows, and the summaries that they compute.

One process reads all blocks, several processes read some blocks each, or Dask workers read their partitions.
Summaries are merged; the result does not depend on the number of processes.
"""

import abc
import json
import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import narwhals.stable.v2 as nw
import numpy as np
import safetensors.numpy

from kexpfam import processes
from kexpfam.data.blocks import RowBlocks, Step, as_parts, joined, numbers, part, partition, stepped
from kexpfam.data.frames import wrapped
from kexpfam.progress import Listener, Report

# The forms in which ``to_bytes`` packs tables, beside the name of a library of frames.
ARRAY, CELLS, SERIES = "array", "cells", ".series"
# Standard deviations by which the bound on random numbers exceeds the expected one in ``take_overview``.
MARGIN = 8.0


class Summary(abc.ABC):
    """A statistic of the rows that were added."""

    rows: int = 0

    @abc.abstractmethod
    def fresh(self) -> Self:
        """Return an empty summary of the same kind."""

    @abc.abstractmethod
    def add(self, start: int, parts: tuple[Any, ...]) -> None:
        """Add a block; ``start`` is the number of its first row."""

    @abc.abstractmethod
    def packed(self) -> bytes:
        """Return the summary as bytes."""

    @abc.abstractmethod
    def merge(self, content: bytes) -> None:
        """Merge the packed summary of later rows."""

    def add_block(self, start: int, block: Any) -> None:
        """Add a block and count its rows, unless it is empty."""
        parts = as_parts(block)
        if len(parts[0]):
            self.add(start, parts)
            self.rows += len(parts[0])


class Sums(Summary):
    """The sum of a vector-valued ``function`` of blocks over all rows.

    Blocks are summed within their page, and pages in their order. The rounding does not depend on the number
    of processes.
    """

    def __init__(self, function: Callable[[tuple[Any, ...]], np.ndarray], page: int) -> None:
        self._function, self._page = function, page
        self._pages = dict[int, np.ndarray]()

    def fresh(self) -> "Sums":
        return Sums(self._function, self._page)

    def add(self, start: int, parts: tuple[Any, ...]) -> None:
        self._add(start // self._page, np.asarray(self._function(parts), float))

    def packed(self) -> bytes:
        pages = {"sums": np.stack([*self._pages.values()])} if self._pages else {}
        return to_bytes(pages | {"pages": np.array([*self._pages], int), "rows": np.array(self.rows)})

    def merge(self, content: bytes) -> None:
        arrays, _ = from_bytes(content)
        self.rows += int(arrays["rows"])
        for page, found in zip(arrays["pages"].tolist(), arrays.get("sums", ()), strict=True):
            self._add(page, found)

    @property
    def total(self) -> np.ndarray:
        """Return the sum over all rows."""
        if not self._pages:
            raise ValueError("there is no row of data.")
        return np.sum([self._pages[page] for page in sorted(self._pages)], axis=0)

    def _add(self, page: int, found: np.ndarray) -> None:
        self._pages[page] = self._pages[page] + found if page in self._pages else found


def take_overview(blocks: RowBlocks, most: int, *, seed: int, report: Listener | None = None) -> "Overview":
    """Return the overview of a table with a sample of at most ``most`` rows, after one pass.

    Memory is about twice ``most`` rows and one block.
    """
    total = blocks.rows
    bound = np.inf if total is None or total <= most else (most + MARGIN * (most**0.5 + 1.0)) / total
    found = run_pass(blocks, Overview(most, seed, bound), stage="reading", report=report)
    if found.held < min(most, found.rows):  # probability 1e-15
        found = run_pass(blocks, Overview(most, seed, np.inf), stage="reading", report=report)
    if not found.low:
        raise ValueError("there is no row of data.")
    return found


class Overview(Summary):
    """The number of rows, the range of each column, and a uniform sample without replacement, in row order.

    Sample and ranges have one entry per table: features, targets and so on. Ranges are NaN for columns
    without numbers.

    Every row has a random number that depends on its position; the rows of the smallest numbers are the
    sample. So the sample does not depend on the blocks or on the processes. Rows of numbers above ``bound``
    are skipped.
    """

    def __init__(self, most: int, seed: int, bound: float) -> None:
        self._most, self._seed, self._bound = most, seed, bound
        self._numbers, self._places = np.zeros(0), np.zeros(0, int)
        self._parts = list[tuple[Any, ...]]()
        self.low, self.high, self._first = list[np.ndarray](), list[np.ndarray](), 0

    def fresh(self) -> "Overview":
        return Overview(self._most, self._seed, self._bound)

    @property
    def held(self) -> int:
        """Return the number of rows in memory."""
        return len(self._numbers)

    def add(self, start: int, parts: tuple[Any, ...]) -> None:
        sizes = {len(one) for one in parts}
        if len(sizes) != 1:
            shown = " and ".join(map(str, sorted(sizes)))
            raise ValueError(f"after row {start}, the parts of a block have {shown} rows.")
        cells = [numbers(one) for one in parts]
        self._widen([np.fmin.reduce(one) for one in cells], [np.fmax.reduce(one) for one in cells], start)
        stream = np.random.PCG64(self._seed)
        stream.advance(start)  # one step of the generator is one number
        drawn = np.random.Generator(stream).random(len(parts[0]))
        small = np.flatnonzero(drawn < self._bound)
        if len(small):
            # Copies: a slice would keep the whole block alive.
            self._hold(drawn[small], start + small, tuple(part(table, small) for table in parts))

    @property
    def sample(self) -> tuple[Any, ...]:
        """Return the sample in row order."""
        self._shrink()
        return self._parts[0]

    def packed(self) -> bytes:
        if self.held:
            self._shrink()
        arrays = {"numbers": self._numbers, "places": self._places}
        arrays |= {"rows": np.array(self.rows), "start": np.array(self._first)}
        for side in ("low", "high"):
            arrays |= {f"{side}.{k}": values for k, values in enumerate(getattr(self, side))}
        return to_bytes(arrays, self._parts[0] if self._parts else ())

    def merge(self, content: bytes) -> None:
        arrays, tables = from_bytes(content)
        count = sum(name.startswith("low.") for name in arrays)
        if count:
            low, high = ([arrays[f"{side}.{k}"] for k in range(count)] for side in ("low", "high"))
            self._widen(low, high, int(arrays["start"]))
        self.rows += int(arrays["rows"])
        if tables:
            self._hold(arrays["numbers"], arrays["places"], tables)

    def _widen(self, low: list[np.ndarray], high: list[np.ndarray], start: int) -> None:
        """Extend the ranges by those of more rows, the first of which is ``start``."""
        if not self.low:
            self.low, self.high, self._first = low, high, start
            return
        widths, known = [len(side) for side in low], [len(side) for side in self.low]
        if widths != known:
            found = f"{widths[0]} columns where the first has {known[0]}"
            raise ValueError(f"after row {start}, a block has {found}.")
        self.low = [np.fmin(old, new) for old, new in zip(self.low, low, strict=True)]
        self.high = [np.fmax(old, new) for old, new in zip(self.high, high, strict=True)]

    def _hold(self, drawn: np.ndarray, places: np.ndarray, tables: tuple[Any, ...]) -> None:
        self._parts.append(tables)
        self._numbers = np.concatenate([self._numbers, drawn])
        self._places = np.concatenate([self._places, places])
        if self.held > 2 * self._most:
            self._shrink()

    def _shrink(self) -> None:
        """Keep the rows of the smallest numbers, in row order."""
        tables = tuple(joined(parts) for parts in zip(*self._parts, strict=True))
        chosen = np.argsort(self._places, kind="stable")
        if self.held > self._most:
            smallest = np.argpartition(self._numbers, self._most - 1)[: self._most]
            chosen = smallest[np.argsort(self._places[smallest])]
            self._bound = min(self._bound, self._numbers[smallest].max())
        self._parts = [tuple(part(table, chosen) for table in tables)]
        self._numbers, self._places = self._numbers[chosen], self._places[chosen]


S = TypeVar("S", bound=Summary)


def run_pass(blocks: RowBlocks, summary: S, *, stage: str, report: Listener | None = None) -> S:
    """Return the summary of all rows of the blocks; ``stage`` is its name in the progress bar."""
    rank, count = processes.place()
    client = _client(blocks)
    if client is not None:
        _run_on_workers(client, blocks, summary, stage, report)
    elif count == 1:
        _run(blocks, summary, stage, report)
    else:
        own = lambda: _run(blocks, summary.fresh(), stage, report, rank, count).packed()
        for content in processes.gathered(own):
            summary.merge(content)
    blocks.check_rows(summary.rows)
    return summary


def _run(
    blocks: RowBlocks, summary: S, stage: str, report: Listener | None, rank: int = 0, count: int = 1
) -> S:
    """Return the summary of the blocks of one process."""
    total = blocks.rows or 0
    for start, block in blocks.numbered(rank, count):
        summary.add_block(start, block)
        if report is not None:
            # The other processes are assumed to be equally fast.
            seen = count * summary.rows
            report(Report(stage, min(seen, total) if total else seen, total, {}))
    return summary


def _client(blocks: RowBlocks) -> Any:
    """Return the active Dask client if the blocks are Dask partitions, else None."""
    if "distributed" not in sys.modules or blocks.read is not partition:
        return None
    try:
        return sys.modules["distributed"].get_client()
    except ValueError:
        return None


def _run_on_workers(
    client: Any, blocks: RowBlocks, summary: Summary, stage: str, report: Listener | None
) -> None:
    """Summarise each partition on a worker and merge the results."""
    import dask
    from distributed import as_completed

    sizes = [dask.delayed(len)(one) for one in blocks.sources]
    lengths = blocks.lengths or client.gather(client.compute(sizes))
    starts = np.cumsum([0, *lengths])
    work = client.scatter(partial(_summarised, summary.fresh(), blocks.steps), broadcast=True)
    sources = zip(blocks.sources, starts, strict=False)
    futures = client.compute([dask.delayed(operator.call)(work, one, int(start)) for one, start in sources])
    found, seen = dict[Any, bytes](), 0
    places = {future.key: place for place, future in enumerate(futures)}
    for future, content in as_completed(futures, with_results=True):
        found[places[future.key]] = content
        seen += lengths[places[future.key]]
        if report is not None:
            report(Report(stage, seen, int(starts[-1]), {}))
    for place in sorted(found):
        summary.merge(found[place])


def _summarised(summary: Summary, steps: tuple[Step, ...], block: Any, start: int) -> bytes:
    """Return the packed summary of one partition."""
    own = summary.fresh()
    own.add_block(start, stepped(steps, block, start))
    return own.packed()


def to_bytes(arrays: dict[str, np.ndarray], tables: tuple[Any, ...] = ()) -> bytes:
    """Return named arrays of numbers, and tables, as bytes in formats that run no code.

    Arrays are stored as safetensors, frames as Arrow streams, other cells as JSON.
    """
    packed = [_packed(table) for table in tables]
    tensors = {f"array.{name}": np.array(values) for name, values in arrays.items()}
    tensors |= {f"table.{k}": content for k, (_, content) in enumerate(packed)}
    return safetensors.numpy.save(tensors, {"kinds": json.dumps([kind for kind, _ in packed])})


def from_bytes(content: bytes) -> tuple[dict[str, np.ndarray], tuple[Any, ...]]:
    """Return the arrays and the tables that ``to_bytes`` has packed."""
    tensors = safetensors.numpy.load(content)
    size = int.from_bytes(content[:8], "little")
    kinds = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["kinds"])
    tables = tuple(_unpacked(kind, tensors.pop(f"table.{k}")) for k, kind in enumerate(kinds))
    return {name.removeprefix("array."): values for name, values in tensors.items()}, tables


def _packed(table: Any) -> tuple[str, np.ndarray]:
    """Return the kind of a table and its content as an array."""
    frame = wrapped(table)
    if frame is None:
        values = np.asarray(table)
        if values.dtype.kind in "biuf":
            return ARRAY, np.array(values)
        values = np.asarray(table, dtype=object)
        plain = lambda cell: cell.item() if isinstance(cell, np.generic) else str(cell)
        cells = json.dumps([values.shape, values.ravel().tolist()], default=plain)
        return CELLS, np.frombuffer(cells.encode(), np.uint8)
    import pyarrow

    kind, sink = frame.implementation.value, pyarrow.BufferOutputStream()
    if isinstance(frame, nw.Series):
        kind, frame = kind + SERIES, frame.alias("" if frame.name is None else frame.name).to_frame()
    # A frame of pandas stores its types in the metadata.
    arrow = nw.maybe_reset_index(frame).to_arrow()
    with pyarrow.ipc.new_stream(sink, arrow.schema) as writer:
        writer.write_table(arrow)
    return kind, np.frombuffer(sink.getvalue(), np.uint8)


def _unpacked(kind: str, content: np.ndarray) -> Any:
    if kind == ARRAY:
        return content
    if kind == CELLS:
        shape, cells = json.loads(content.tobytes())
        values = np.empty(len(cells), object)
        values[:] = cells
        return values.reshape(shape)
    import pyarrow

    table = pyarrow.ipc.open_stream(content.tobytes()).read_all()
    frame = nw.from_arrow(table, backend=kind.removesuffix(SERIES))  # type: ignore[arg-type]
    return (frame[frame.columns[0]] if kind.endswith(SERIES) else frame).to_native()
