"""Outcome of a check, and the golden models that several checks use."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kexpfam
from kexpfam import storage

__all__ = ["GOLDEN", "Check", "Golden", "Outcome", "golden"]

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / str(storage.FORMAT)


class Outcome(NamedTuple):
    """The number of trials, a description of each failure, and the figure of the page.

    With ``counts`` the figure of ``spec.toml`` is filled with them instead, and the page adds the records
    of several seeds."""

    trials: int
    failures: list[str]
    figure: str = ""
    counts: dict[str, int] | None = None


# A check takes the number of trials, a seed, and an empty folder.
Check = Callable[[int, int, Path], Outcome]


class Golden(NamedTuple):
    """A stored model, and rows with the scores that they had when the file was written."""

    name: str
    path: Path
    rows: tuple[Any, ...]
    scores: np.ndarray

    @property
    def model(self) -> Any:
        """Return the loaded model."""
        return _loaded(self.path)


@functools.cache
def _loaded(path: Path) -> Any:
    return kexpfam.load(path)


def golden() -> Iterator[Golden]:
    """Yield the golden models of the current format; flows need an optional library and are left out."""
    for name, record in json.loads((GOLDEN / "expected.json").read_text()).items():
        if name != "SplineFlow":
            rows = tuple(_table(part) for part in record["rows"])
            yield Golden(name, GOLDEN / f"{name}.kexpfam", rows, np.array(record["scores"]))


def _table(part: Any) -> Any:
    if isinstance(part, list):
        return np.array(part)
    import pyarrow

    return pyarrow.table(part)
