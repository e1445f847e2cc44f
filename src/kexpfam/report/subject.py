"""What a report is on: a fitted model, rows to hold against it, and draws."""

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from kexpfam.estimators.base import key_from
from kexpfam.judge.calibration import Calibration, JointCalibration, calibrate
from kexpfam.judge.diagnosis import AbstractDiagnosis
from kexpfam.judge.relevance import Loss, permutation_losses, region_levels
from kexpfam.plot.canvas import feature_names, some_rows, target_names
from kexpfam.plot.numbers import Kinds, drawn, kinds_of, numbers_of, training_rows

__all__ = ["Held", "Subject"]

# Rows that are scored, draws that make curves smooth, and draws that a row is ranked among.
MOST_ROWS, DRAWS, RANKING_DRAWS = 1000, 10_000, 200
AnyCalibration = Calibration | JointCalibration


@dataclass(frozen=True)
class Held:
    """A model held against rows; of a joint density the features have width zero, and all columns are targets."""

    model: Any
    X: np.ndarray
    Y: np.ndarray
    seed: int
    # The rows as they were given, labels and all; none of the training.
    given: tuple[Any, ...] = ()

    @classmethod
    def against(cls, model: Any, X: ArrayLike | None, y: ArrayLike | None, seed: int) -> Self:
        """Return the model with rows that its fit should not have seen, or with those of the training if none are given."""
        unseen = X is not None
        if not model.conditional:
            if y is not None:
                raise ValueError("y is for conditional models: this one is a density of all columns of X.")
            (rows,) = numbers_of(model, X) if unseen else training_rows(model)
            return cls(model, np.zeros((len(rows), 0)), rows, seed, (X,) if unseen else ())
        if unseen != (y is not None):
            raise ValueError("give both X and y of held-out rows, or neither to see the training rows.")
        rows, targets = numbers_of(model, X, y) if unseen else training_rows(model)
        return cls(model, rows, targets, seed, (X, y) if unseen else ())

    @property
    def unseen(self) -> bool:
        """Return whether the rows are others than those of the training."""
        return bool(self.given)

    @property
    def conditional(self) -> bool:
        return self.X.shape[1] > 0

    @property
    def kinds(self) -> Kinds:
        """Return the kinds of features and targets."""
        return kinds_of(self.model, self.X.shape[1], self.Y.shape[1])

    @property
    def ordered(self) -> bool:
        """Return whether there is a single target under conditions that has a distribution function: numbers without gaps."""
        single = self.conditional and self.Y.shape[1] == 1
        return single and not self.kinds.targets[0].categorical and not np.any(np.isnan(self.Y))

    @property
    def features(self) -> list[str]:
        """Return the names of the features."""
        return feature_names(self.model, self.X.shape[1]) if self.conditional else []

    @property
    def targets(self) -> list[str]:
        """Return the names of the columns that the density is of."""
        return (target_names if self.conditional else feature_names)(self.model, self.Y.shape[1])

    @property
    def rows(self) -> str:
        """Return which rows the model is held against, in words."""
        return "held-out rows" if self.unseen else "training rows"

    def some(self) -> tuple[np.ndarray, np.ndarray]:
        """Return features and targets of as many rows as are worth scoring."""
        both = some_rows(np.arange(len(self.Y)), MOST_ROWS)
        return self.X[both], self.Y[both]

    def log_density(self, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
        """Return the log density of each row."""
        return np.asarray(
            self.model._log_density(self.model.density_, Y, *((X,) if self.conditional else ()))
        )

    def drawn(self, X: np.ndarray, count: int) -> np.ndarray:
        """Return draws, ``count`` under each condition or ``count`` in all where there is none."""
        return drawn(self.model, count, self.seed, *((X,) if self.conditional else ())).reshape(
            -1, self.Y.shape[1]
        )

    @functools.cached_property
    def coverage(self) -> tuple[np.ndarray, str, AnyCalibration | None]:
        """Return the level of the region that each row needs, what the regions are, and the calibration of a single target."""
        if not self.ordered:
            return self._region_levels(), "regions of highest density", None
        found = calibrate(self.model.density_, *self.some(), key=key_from(self.seed))
        return found.entries, found.words[1], found

    def _region_levels(self) -> np.ndarray:
        X, Y = self.some()
        own, rng = self.log_density(X, Y), np.random.default_rng(self.seed)
        if not self.conditional:
            others = self.log_density(X, self.drawn(X, MOST_ROWS))
            return region_levels(own, np.broadcast_to(others, (len(Y), len(others))), rng=rng)
        others = self.log_density(np.repeat(X, RANKING_DRAWS, axis=0), self.drawn(X, RANKING_DRAWS))
        return region_levels(own, others.reshape(len(X), RANKING_DRAWS), rng=rng)


class Subject(Held):
    """A model that is reported on: with its diagnosis, draws, and what matters to it."""

    @functools.cached_property
    def diagnosis(self) -> AbstractDiagnosis:
        """Return the verdict; of targets that are numbers without gaps, with the calibration on unseen rows."""
        numbers = self.conditional and not any(kind.categorical for kind in self.kinds.targets)
        given = self.given if numbers and not np.any(np.isnan(self.Y)) else ()
        return self.model.diagnose(*given, random_state=self.seed)

    @functools.cached_property
    def coverage(self) -> tuple[np.ndarray, str, AnyCalibration | None]:
        known = getattr(self.diagnosis, "calibration", None)
        return super().coverage if known is None else (known.entries, known.words[1], known)

    @functools.cached_property
    def draws(self) -> np.ndarray:
        """Return draws, under the conditions of the rows in turn."""
        shown = some_rows(self.X, DRAWS)
        return self.drawn(shown, -(-DRAWS // len(shown)) if self.conditional else DRAWS)

    @functools.cached_property
    def losses(self) -> dict[str, Loss]:
        """Return what is lost where a feature is shuffled; of a joint density, where any column is. The largest first."""
        X, Y = self.some()
        columns, names = (X, self.features) if self.conditional else (Y, self.targets)
        if columns.shape[1] < 2 and not self.conditional:
            return {}
        score = (lambda x: self.log_density(x, Y)) if self.conditional else (lambda y: self.log_density(X, y))
        losses = permutation_losses(score, columns, rng=np.random.default_rng(self.seed))
        return dict(sorted(zip(names, losses, strict=True), key=lambda pair: -pair[1].value))
