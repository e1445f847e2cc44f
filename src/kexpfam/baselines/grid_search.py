"""Cross-validation of settings on a grid."""

from typing import Any, NamedTuple

import numpy as np

from kexpfam.estimators.messages import shown
from kexpfam.judge.diagnosis import Measurement


class GridSearch(NamedTuple):
    """Settings and their held-out losses; ``losses[i, j]`` belongs to ``grids[0][i]`` and ``grids[1][j]``."""

    names: tuple[str, ...]
    grids: tuple[np.ndarray, ...]
    losses: np.ndarray

    @property
    def place(self) -> tuple[int, ...]:
        """Return the position of the smallest loss."""
        return tuple(int(index) for index in np.unravel_index(np.argmin(self.losses), self.losses.shape))

    @property
    def chosen(self) -> dict[str, float]:
        """Return the settings of the smallest loss."""
        named = zip(self.names, self.grids, self.place, strict=True)
        return {name: float(grid[i]) for name, grid, i in named}

    @property
    def on_edge(self) -> tuple[str, ...]:
        """Return the names of the settings that were chosen at an end of their grids."""
        named = zip(self.names, self.grids, self.place, strict=True)
        return tuple(name for name, grid, i in named if len(grid) > 1 and i in (0, len(grid) - 1))

    def measurements(self) -> list[Measurement]:
        """Return the chosen settings and their loss; fair if a setting was chosen at an end of its grid."""
        chosen = ", ".join(f"{name} {value:.4g}" for name, value in self.chosen.items())
        loss, edge = float(self.losses.min()), " and ".join(self.on_edge)
        level, meaning = "good", "The chosen settings lie inside their grids."
        if edge:
            level, meaning = "fair", f"{edge} chosen at an end of the grid: a better value may lie beyond it."
        text = f"{loss:.4f} nats, best of {self.losses.size}"
        return [
            Measurement("chosen", self.chosen, None, level, meaning, label="chosen", text=chosen),
            Measurement("held_out_loss", loss, label="held-out loss", text=text),
        ]


def deal(count: int, folds: int, rng: np.random.Generator) -> np.ndarray:
    """Return the fold of each row: folds of nearly equal size, in random order."""
    return rng.permutation(np.arange(count) % folds)


def grid_of(name: str, value: Any, default: np.ndarray) -> np.ndarray:
    """Return the candidates of a setting: one number, several, or the default grid for None."""
    if value is None:
        return default
    try:
        grid = np.atleast_1d(np.asarray(value, float))
    except (TypeError, ValueError):
        grid = np.zeros(0)
    if grid.ndim != 1 or grid.size == 0 or not np.all((grid > 0.0) & (grid < np.inf)):
        raise ValueError(
            f"{name} must be a positive finite number, a list of them or None; got {shown(value)}."
        )
    return grid
