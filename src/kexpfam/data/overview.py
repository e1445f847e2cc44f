"""What one pass over all rows leaves: their number, the range of each column, and a uniform sample."""

from typing import Any, NamedTuple

import numpy as np

from kexpfam.data.blocks import RowBlocks, joined, numbers, part
from kexpfam.data.exchange import from_bytes, to_bytes
from kexpfam.data.passes import Summary, gone_through
from kexpfam.progress import Listener

__all__ = ["Overview", "look_over"]

# Standard deviations of the number of rows below a bound by which that is more than what is expected there.
MARGIN = 8.0


class Overview(NamedTuple):
    """What one pass over all rows leaves: how many there are, a uniform sample in their order, and each column's range.

    There is one table, or one of features and one of targets and so on; ``low`` and ``high`` are NaN where cells are no
    numbers.
    """

    rows: int
    sample: tuple[Any, ...]
    low: tuple[np.ndarray, ...]
    high: tuple[np.ndarray, ...]


def look_over(blocks: RowBlocks, most: int, *, seed: int, report: Listener | None = None) -> Overview:
    """Return the overview of a table after one pass; it holds about twice ``most`` rows and a block at a time."""
    total = blocks.rows
    bound = np.inf if total is None or total <= most else (most + MARGIN * (most**0.5 + 1.0)) / total
    glance = gone_through(blocks, _Glance(most, seed, bound), stage="reading", report=report)
    if glance.held < min(most, glance.rows):  # which happens once in 1e15 tables
        glance = gone_through(blocks, _Glance(most, seed, np.inf), stage="reading", report=report)
    if not glance.low:
        raise ValueError("there is no row of data.")
    return Overview(glance.rows, glance.sample(), tuple(glance.low), tuple(glance.high))


class _Glance(Summary):
    """Ranges, and a uniform sample without replacement: every row has a random number, and those of the smallest ones stay.

    The number is that of the row's place in the table, so that the sample does not depend on how rows are cut into blocks, nor
    on who goes through them. Those of ``bound`` and more are left out at once.
    """

    def __init__(self, most: int, seed: int, bound: float) -> None:
        self._most, self._seed, self._bound = most, seed, bound
        self._numbers, self._places, self._parts = np.zeros(0), np.zeros(0, int), list[tuple[Any, ...]]()
        self.low, self.high, self._first = list[np.ndarray](), list[np.ndarray](), 0

    def fresh(self) -> "_Glance":
        return _Glance(self._most, self._seed, self._bound)

    @property
    def held(self) -> int:
        """Return how many rows are held."""
        return len(self._numbers)

    def add(self, start: int, parts: tuple[Any, ...]) -> None:
        sizes = {len(one) for one in parts}
        if len(sizes) != 1:
            raise ValueError(
                f"after row {start}, a block has {' and '.join(map(str, sorted(sizes)))} rows in its parts."
            )
        cells = [numbers(one) for one in parts]
        self._widen([np.fmin.reduce(one) for one in cells], [np.fmax.reduce(one) for one in cells], start)
        stream = np.random.PCG64(self._seed)
        stream.advance(start)  # one step of the generator is one number
        drawn = np.random.Generator(stream).random(len(parts[0]))
        small = np.flatnonzero(drawn < self._bound)
        if len(small):
            # Copies: a slice would keep the whole block alive.
            self._hold(drawn[small], start + small, tuple(part(table, small) for table in parts))

    def sample(self) -> tuple[Any, ...]:
        """Return the sample, in the order of the rows."""
        self._shrink()
        return self._parts[0]

    def packed(self) -> bytes:
        ends = {
            f"{side}.{k}": values for side in ("low", "high") for k, values in enumerate(getattr(self, side))
        }
        if self.held:
            self._shrink()
        own = {
            "numbers": self._numbers,
            "places": self._places,
            "rows": np.array(self.rows),
            "start": np.array(self._first),
        }
        return to_bytes(own | ends, self._parts[0] if self._parts else ())

    def take(self, content: bytes) -> None:
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
            raise ValueError(
                f"after row {start}, a block has {widths[0]} columns where the first has {known[0]}."
            )
        self.low = [np.fmin(old, new) for old, new in zip(self.low, low, strict=True)]
        self.high = [np.fmax(old, new) for old, new in zip(self.high, high, strict=True)]

    def _hold(self, drawn: np.ndarray, places: np.ndarray, tables: tuple[Any, ...]) -> None:
        self._parts.append(tables)
        self._numbers, self._places = (
            np.concatenate([self._numbers, drawn]),
            np.concatenate([self._places, places]),
        )
        if self.held > 2 * self._most:
            self._shrink()

    def _shrink(self) -> None:
        """Keep the rows of the smallest numbers, in the order of the rows."""
        tables = tuple(joined(parts) for parts in zip(*self._parts, strict=True))
        chosen = np.argsort(self._places, kind="stable")
        if self.held > self._most:
            smallest = np.argpartition(self._numbers, self._most - 1)[: self._most]
            chosen = smallest[np.argsort(self._places[smallest])]
            self._bound = min(self._bound, self._numbers[smallest].max())
        self._parts = [tuple(part(table, chosen) for table in tables)]
        self._numbers, self._places = self._numbers[chosen], self._places[chosen]
