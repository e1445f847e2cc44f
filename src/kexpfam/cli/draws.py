"""What commands compute block by block, so that memory does not grow with the rows that go in or come out."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kexpfam.cli.inputs import reading_for

if TYPE_CHECKING:
    import numpy as np

    from kexpfam.data.tables import Reading

__all__ = ["Scores", "draws_at", "draws_in_blocks"]

# Draws that are held at a time.
BLOCK_DRAWS = 65536


class Scores:
    """The number and the mean of scores that pass by."""

    rows: int = 0
    mean: float = float("nan")

    def add(self, scores: "np.ndarray") -> list[float]:
        """Return the scores, once they are counted."""
        before = 0.0 if not self.rows else self.mean * (self.rows / (self.rows + len(scores)))
        self.rows += len(scores)
        self.mean = before + float(scores.sum()) / self.rows
        return scores.tolist()


def draws_in_blocks(estimator: Any, number: int, *, seed: int, refine: int) -> Iterator[list[Any]]:
    """Yield draws row by row; those of the first block are the library's own for that seed, and further ones follow on."""
    import numpy as np

    state, left = np.random.RandomState(seed), number
    while True:
        # A number that is none is left to the estimator to refuse.
        yield from estimator.sample(min(left, BLOCK_DRAWS), random_state=state, refine=refine).tolist()
        left -= BLOCK_DRAWS
        if left <= 0:
            return


def draws_at(
    estimator: Any, at: Path, features: list[str], number: int, *, reading: "Reading", seed: int, refine: int
) -> Iterator[list[Any]]:
    """Yield draws of targets at each row of a table, with the row that they belong to, from 0."""
    import numpy as np

    from kexpfam.data.streams import table_blocks

    state, row = np.random.RandomState(seed), 0
    rows = max(1, BLOCK_DRAWS // max(1, number))
    for block in table_blocks(at, features, reading_for(estimator, reading), rows=rows):
        draws = estimator.sample(block.values, number, random_state=state, refine=refine)
        for of_row in draws.reshape(len(block.values), number, -1).tolist():
            yield from ([row, *draw] for draw in of_row)
            row += 1
