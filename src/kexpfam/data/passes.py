"""A pass over all rows: what is left of it, whoever goes through them.

One process goes through all blocks, several go through some each, and workers of Dask go through partitions where they are.
What each of them keeps is a summary, and summaries can be put together so that nobody can tell how many there were.
"""

import abc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from kexpfam import processes
from kexpfam.data.blocks import RowBlocks, partition, stepped
from kexpfam.data.exchange import from_bytes, to_bytes
from kexpfam.progress import Listener, Report

__all__ = ["Sums", "Summary", "gone_through"]


class Summary(abc.ABC):
    """What is kept of the rows that were seen."""

    rows: int = 0

    @abc.abstractmethod
    def fresh(self) -> Self:
        """Return a summary of no rows."""

    @abc.abstractmethod
    def add(self, start: int, parts: tuple[Any, ...]) -> None:
        """Take in a block, of which ``start`` is the first row."""

    @abc.abstractmethod
    def packed(self) -> bytes:
        """Return the summary as bytes."""

    @abc.abstractmethod
    def take(self, content: bytes) -> None:
        """Take in another summary, of rows that come later."""

    def see(self, start: int, block: Any) -> None:
        """Count the rows of a block and take it in, unless it is empty."""
        parts = block if isinstance(block, tuple) else (block,)
        if len(parts[0]):
            self.add(start, parts)
            self.rows += len(parts[0])


class Sums(Summary):
    """The sum over all rows of a vector that ``function`` gives for the rows of a block.

    Blocks are added up within their page and pages in their order: the last bit does not show who went through them.
    """

    def __init__(self, function: Callable[[tuple[Any, ...]], np.ndarray], page: int) -> None:
        self._function, self._page, self._pages = function, page, dict[int, np.ndarray]()

    def fresh(self) -> "Sums":
        return Sums(self._function, self._page)

    def add(self, start: int, parts: tuple[Any, ...]) -> None:
        self._add(start // self._page, np.asarray(self._function(parts), float))

    def packed(self) -> bytes:
        pages = {"sums": np.stack([*self._pages.values()])} if self._pages else {}
        return to_bytes(pages | {"pages": np.array([*self._pages], int), "rows": np.array(self.rows)})

    def take(self, content: bytes) -> None:
        arrays, _ = from_bytes(content)
        self.rows += int(arrays["rows"])
        for page, found in zip(arrays["pages"].tolist(), arrays.get("sums", ()), strict=True):
            self._add(page, found)

    @property
    def total(self) -> np.ndarray:
        """Return the sum over all rows that were seen."""
        if not self._pages:
            raise ValueError("there is no row of data.")
        return np.sum([self._pages[page] for page in sorted(self._pages)], axis=0)

    def _add(self, page: int, found: np.ndarray) -> None:
        self._pages[page] = self._pages[page] + found if page in self._pages else found


S = TypeVar("S", bound=Summary)


def gone_through(blocks: RowBlocks, summary: S, *, stage: str, report: Listener | None = None) -> S:
    """Return the summary after all rows of the blocks; ``stage`` is what the progress bar calls it."""
    rank, count = processes.place()
    client = _client(blocks)
    if client is not None:
        _go_on_workers(client, blocks, summary, stage, report)
    elif count == 1:
        _go(blocks, summary, stage, report)
    else:
        for content in processes.gathered(
            lambda: _go(blocks, summary.fresh(), stage, report, rank, count).packed()
        ):
            summary.take(content)
    blocks.check_rows(summary.rows)
    return summary


def _go(
    blocks: RowBlocks, summary: S, stage: str, report: Listener | None, rank: int = 0, count: int = 1
) -> S:
    """Return the summary after the blocks of one process."""
    total = blocks.rows or 0
    for start, block in blocks.numbered(rank, count):
        summary.see(start, block)
        if report is not None:
            # The others are taken to be as far as this one.
            seen = count * summary.rows
            report(Report(stage, min(seen, total) if total else seen, total, {}))
    return summary


def _client(blocks: RowBlocks) -> Any:
    """Return the client of Dask that partitions can be sent to, if blocks are partitions and there is one."""
    if "distributed" not in sys.modules or blocks.read is not partition:
        return None
    try:
        return sys.modules["distributed"].get_client()
    except ValueError:
        return None


def _go_on_workers(
    client: Any, blocks: RowBlocks, summary: Summary, stage: str, report: Listener | None
) -> None:
    """Have the workers of a client go through the partitions, and take in what they keep of each."""
    import dask
    from distributed import as_completed

    lengths = blocks.lengths or client.gather(
        client.compute([dask.delayed(len)(one) for one in blocks.sources])
    )
    starts = np.cumsum([0, *lengths])
    work = client.scatter(partial(_summarised, summary.fresh(), blocks.steps), broadcast=True)
    tasks = [
        dask.delayed(_done)(work, one, int(start)) for one, start in zip(blocks.sources, starts, strict=False)
    ]
    futures, found, seen = client.compute(tasks), dict[Any, bytes](), 0
    places = {future.key: place for place, future in enumerate(futures)}
    for future, content in as_completed(futures, with_results=True):
        found[places[future.key]] = content
        seen += lengths[places[future.key]]
        if report is not None:
            report(Report(stage, seen, int(starts[-1]), {}))
    for place in sorted(found):
        summary.take(found[place])


def _done(work: Callable[[Any, int], bytes], block: Any, start: int) -> bytes:
    return work(block, start)


def _summarised(
    summary: Summary, steps: tuple[Callable[[Any, int], Any], ...], block: Any, start: int
) -> bytes:
    """Return what a worker keeps of one partition; it starts anew with each."""
    own = summary.fresh()
    own.see(start, stepped(steps, block, start))
    return own.packed()
