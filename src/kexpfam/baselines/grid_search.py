"""Cross-validation of settings on a grid, and the diagnosis of a fit whose only choice it is."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kexpfam.estimators.messages import shown
from kexpfam.judge.calibration import Calibration, JointCalibration
from kexpfam.judge.conformal import Conformal
from kexpfam.judge.diagnosis import AbstractDiagnosis

__all__ = ["GridSearch", "SearchDiagnosis", "deal", "grid_of"]


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


@dataclass(frozen=True)
class SearchDiagnosis(AbstractDiagnosis):
    """Diagnosis of a fit whose settings were chosen on a grid."""

    verdict: str
    selection: GridSearch
    calibration: Calibration | JointCalibration | None
    advice: tuple[str, ...]
    repair: Conformal | None = None

    @staticmethod
    def of(
        selection: GridSearch, calibration: Calibration | JointCalibration | None = None
    ) -> "SearchDiagnosis":
        """Return the diagnosis: good, unless a setting was chosen at an end of its grid."""
        if not (edge := selection.on_edge):
            return SearchDiagnosis("good", selection, calibration, ())
        advice = f"{' and '.join(edge)} chosen at an end of the grid: a better value may lie beyond it."
        return SearchDiagnosis("fair", selection, calibration, (advice,))

    def lines(self) -> list[tuple[str, str]]:
        chosen = ", ".join(f"{name} {value:.4g}" for name, value in self.selection.chosen.items())
        tried = f"{self.selection.losses.min():.4f} nats, best of {self.selection.losses.size}"
        calibrated = self.calibration.lines() if self.calibration is not None else []
        return [("chosen", chosen), ("held-out loss", tried), *calibrated]


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
