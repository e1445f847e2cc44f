"""A fitted model with rows to evaluate it on, and draws."""

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from kexpfam.estimators.base import key_from
from kexpfam.judge.diagnosis import Diagnosis
from kexpfam.judge.metrics import permutation_losses
from kexpfam.judge.pit import pit_measurements, region_levels
from kexpfam.model.density import Estimate
from kexpfam.plot.canvas import feature_names, some_rows, target_names
from kexpfam.plot.numbers import Kinds, drawn, kinds_of, numbers_of, training_rows


@dataclass(frozen=True)
class Evaluation:
    """A model and rows in model numbers; for a joint density X has no columns and Y has all.

    ``given`` are the rows as they were given; it is empty for the training rows.
    """

    model: Any
    X: np.ndarray
    Y: np.ndarray
    seed: int
    given: tuple[Any, ...] = ()
    most_rows: int = 1000  # that are scored
    ranking_draws: int = 200  # per row, for its rank
    plot_draws: int = 10_000

    @classmethod
    def of(cls, model: Any, X: ArrayLike | None, y: ArrayLike | None, seed: int, **sizes: int) -> Self:
        """Return the model with held-out rows, or with the training rows if X is None."""
        if y is not None and not model.conditional:
            raise ValueError("y is for conditional models: this one is a density of all columns of X.")
        if model.conditional and (X is None) != (y is None):
            raise ValueError("give both X and y of held-out rows, or neither to see the training rows.")
        given = () if X is None else (X, y) if model.conditional else (X,)
        *condition, targets = numbers_of(model, *given) if given else training_rows(model)
        rows = condition[0] if condition else np.zeros((len(targets), 0))
        return cls(model, rows, targets, seed, given, **sizes)

    @property
    def unseen(self) -> bool:
        """Return whether the rows are held-out rows."""
        return bool(self.given)

    @property
    def conditional(self) -> bool:
        """Return whether the density has features."""
        return self.X.shape[1] > 0

    @property
    def kinds(self) -> Kinds:
        """Return the kinds of features and targets."""
        return kinds_of(self.model, self.X.shape[1], self.Y.shape[1])

    @property
    def ordered(self) -> bool:
        """Return whether there is a single target with a distribution function: numbers, none missing."""
        single = self.conditional and self.Y.shape[1] == 1
        return single and not self.kinds.targets[0].categorical and not np.any(np.isnan(self.Y))

    @property
    def features(self) -> list[str]:
        """Return the names of the features."""
        return feature_names(self.model, self.X.shape[1]) if self.conditional else []

    @property
    def targets(self) -> list[str]:
        """Return the names of the targets."""
        return (target_names if self.conditional else feature_names)(self.model, self.Y.shape[1])

    @property
    def rows(self) -> str:
        """Return "held-out rows" or "training rows"."""
        return "held-out rows" if self.unseen else "training rows"

    def some(self) -> tuple[np.ndarray, np.ndarray]:
        """Return features and targets of at most ``most_rows`` rows."""
        both = some_rows(np.arange(len(self.Y)), self.most_rows)
        return self.X[both], self.Y[both]

    def log_density(self, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
        """Return the log density of each row."""
        given = (X,) if self.conditional else ()
        return np.asarray(self.model._log_density(self.model.density_, Y, *given))

    def drawn(self, X: np.ndarray, count: int) -> np.ndarray:
        """Return draws: ``count`` under each condition, or ``count`` in all for a joint density."""
        given = (X,) if self.conditional else ()
        return drawn(self.model, count, self.seed, *given).reshape(-1, self.Y.shape[1])

    @functools.cached_property
    def coverage(self) -> tuple[np.ndarray, str, Diagnosis | None]:
        """Return the region level of each row, the name of the regions, and the PIT if there is one."""
        if not self.ordered:
            return self._region_levels(), "regions of highest density", None
        found = Diagnosis(pit_measurements(self.model.density_, *self.some(), key=key_from(self.seed)))
        return found.region_level, found["region_level"].text, found

    def _region_levels(self) -> np.ndarray:
        X, Y = self.some()
        own, rng = self.log_density(X, Y), np.random.default_rng(self.seed)
        if not self.conditional:
            return region_levels(own, self.log_density(X, self.drawn(X, self.most_rows)), rng=rng)
        count = self.ranking_draws
        others = self.log_density(np.repeat(X, count, axis=0), self.drawn(X, count))
        return region_levels(own, others.reshape(len(X), count), rng=rng)


class Subject(Evaluation):
    """The subject of a report: an evaluation with diagnosis, draws and permutation losses."""

    @functools.cached_property
    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis; with the calibration on held-out rows if all targets are numbers."""
        numbers = not any(kind.categorical for kind in self.kinds.targets)
        given = self.given if numbers and not np.any(np.isnan(self.Y)) else ()
        return self.model.diagnose(*given, random_state=self.seed)

    @functools.cached_property
    def coverage(self) -> tuple[np.ndarray, str, Diagnosis | None]:
        known = self.diagnosis
        return (known.region_level, known["region_level"].text, known) if "pit" in known else super().coverage

    @functools.cached_property
    def draws(self) -> np.ndarray:
        """Return draws under the conditions of the rows."""
        shown, count = some_rows(self.X, self.plot_draws), self.plot_draws
        return self.drawn(shown, -(-count // len(shown)) if self.conditional else count)

    @functools.cached_property
    def losses(self) -> dict[str, Estimate]:
        """Return permutation losses of the features, or of all columns, the largest first."""
        X, Y = self.some()
        columns, names = (X, self.features) if self.conditional else (Y, self.targets)
        if columns.shape[1] < 2 and not self.conditional:
            return {}
        score = (lambda x: self.log_density(x, Y)) if self.conditional else (lambda y: self.log_density(X, y))
        losses = permutation_losses(score, columns, rng=np.random.default_rng(self.seed))
        return dict(sorted(zip(names, losses, strict=True), key=lambda pair: -pair[1].value))
