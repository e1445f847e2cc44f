"""Quantiles, intervals, distribution functions and regions of a conditional density, and their conformal repair."""

import abc
import dataclasses
import warnings
from typing import Any, Self, TypeVar

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state

from kexpfam.estimators.messages import numbers_of, shown
from kexpfam.judge.calibration import Calibration, JointCalibration, calibrate, density_ranks
from kexpfam.judge.conformal import Conformal, conformalise
from kexpfam.stacklevel import caller_level

__all__ = ["Predictive", "SeenRowsWarning"]

AnyDiagnosis = TypeVar("AnyDiagnosis", bound=Any)
# A repair from fewer rows bounds next to nothing.
FEWEST_ROWS = 10
# Draws per row behind the regions of a model that was not repaired.
REGION_DRAWS = 200
# A larger share of training rows among those of a repair is no accident.
MOST_SEEN = 0.5


class SeenRowsWarning(UserWarning):
    """A repair was made from rows that the model was fitted to: it says nothing about rows to come."""


class Predictive(abc.ABC):
    """What a conditional model says about y besides its density.

    After ``calibrate(X, y)`` these are repaired: they cover what they say on rows that are exchangeable with those given.
    ``score_samples``, ``log_prob``, ``sample``, ``predict`` and ``given`` stay those of the density.
    """

    density_: Any
    _training: np.ndarray
    _training_targets: np.ndarray
    _conformal: Conformal | None = None

    @abc.abstractmethod
    def _checked_features(self, X: ArrayLike) -> np.ndarray:
        """Return the conditions as numbers."""

    @abc.abstractmethod
    def _checked_rows(self, X: ArrayLike, y: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
        """Return conditions and targets as numbers."""

    def quantile(self, X: ArrayLike, levels: ArrayLike) -> np.ndarray:
        """Return conditional quantiles at each level, of shape (n, n_levels), or (n,) for a single number; 1-D y only.

        After ``calibrate`` with n rows y lies below each with its probability, up to 1 / (n + 1).
        """
        X, wanted = self._checked_features(X), np.atleast_1d(numbers_of(levels))
        if wanted.ndim != 1 or wanted.size == 0 or not np.all((wanted > 0.0) & (wanted < 1.0)):
            raise ValueError(
                f"levels must lie strictly between 0 and 1, and there must be one at least; got {shown(levels)}."
            )
        found = self.density_.quantile(
            wanted if self._conformal is None else self._conformal.level(wanted), X
        )
        return found[:, 0] if np.ndim(levels) == 0 else found

    def interval(self, X: ArrayLike, coverage: float = 0.9) -> np.ndarray:
        """Return the central interval that holds y with this probability, of shape (n, 2); 1-D y only.

        After ``calibrate`` with n rows the probability is at least that, and less than 2 / (n + 1) more; with too few rows for
        the coverage the interval is unbounded.
        """
        _check_share("coverage", coverage)
        if self._conformal is None:
            return self.quantile(X, [0.5 - 0.5 * coverage, 0.5 + 0.5 * coverage])
        low, high = self._conformal.ends(coverage)
        tiny = np.finfo(float).eps
        found = self.density_.quantile(np.clip([low, high], tiny, 1.0 - tiny), self._checked_features(X))
        # At level 0 the density has no target below, and the next one may lie there all the same.
        return np.where([low > 0.0, high < 1.0], found, [-np.inf, np.inf])

    def cdf(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return ``P(Y <= y | x)`` of each row; 1-D y only. After ``calibrate`` its values are uniform, up to 1 / (n + 1)."""
        X, targets = self._checked_rows(X, y)
        with np.errstate(over="ignore"):  # a point too far out for the arithmetic is at infinity
            levels = self.density_.cdf(targets, X)
        return levels if self._conformal is None else self._conformal.cdf(levels)

    def in_region(self, X: ArrayLike, y: ArrayLike, level: float = 0.9) -> np.ndarray:
        """Return whether each y lies in the highest-density region of this probability under its x; y of any width.

        The region holds the points than which draws of the density are more probable with at most this probability, by 200
        draws per row. After ``calibrate`` with n rows y lies in it with at least this probability.
        """
        _check_share("level", level)
        X, targets = self._checked_rows(X, y)
        repair = self._conformal
        draws, threshold = (
            (REGION_DRAWS, level) if repair is None else (repair.draws, repair.threshold(level))
        )
        return density_ranks(self.density_, X, targets, draws=draws, key=jr.key(0)) <= threshold

    def calibrate(
        self,
        X: ArrayLike | None,
        y: ArrayLike | None = None,
        *,
        draws: int = REGION_DRAWS,
        random_state: Any = 0,
    ) -> Self:
        """Repair quantiles, intervals, distribution functions and regions by rows that the model has not seen; return itself.

        Split conformal prediction: if these rows and the next are exchangeable, intervals and regions hold the next y with at
        least the probability they state, whatever the density is worth. That holds on average over x, not at every x. What
        it did is in ``calibration_``; ``draws`` per row stand behind regions. ``calibrate(None)`` and a new fit undo it.
        """
        if X is None:
            self._conformal = None
            return self
        X, targets = self._checked_rows(X, y)
        if len(X) < FEWEST_ROWS:
            raise ValueError(f"a repair takes {FEWEST_ROWS} rows at least, got {len(X)}.")
        if not isinstance(draws, int | np.integer) or draws < 1:
            raise ValueError(f"draws must be a whole number of at least 1, got {shown(draws)}.")
        self._warn_of_seen(X, targets)
        key = jr.key(check_random_state(random_state).randint(2**31 - 1))
        self._conformal = conformalise(self.density_, X, targets, draws=int(draws), key=key)
        return self

    @property
    def calibration_(self) -> Conformal:
        """What ``calibrate`` found: rows, and the coverage of intervals (regions, for several targets) before and after."""
        if getattr(self, "_conformal", None) is None:
            raise AttributeError(
                "this model was not repaired: call calibrate(X, y) with rows that it has not seen."
            )
        assert self._conformal is not None
        return self._conformal

    def _calibration(
        self, X: ArrayLike | None, y: ArrayLike | None, *, key: Key[Array, ""]
    ) -> Calibration | JointCalibration | None:
        if X is None:
            return None
        X, targets = self._checked_rows(X, y)
        found = calibrate(self.density_, X, targets, key=key)
        if self._conformal is None:
            return found
        return dataclasses.replace(
            found, repaired=self._conformal.coverage(self.density_, X, targets, key=key)
        )

    def _repaired(self, diagnosis: AnyDiagnosis) -> AnyDiagnosis:
        """Return the diagnosis with what is known of the repair."""
        return dataclasses.replace(diagnosis, repair=self._conformal)

    def _warn_of_seen(self, X: np.ndarray, targets: np.ndarray) -> None:
        trained = {row.tobytes() for row in np.concatenate([self._training, self._training_targets], axis=1)}
        seen = np.mean([row.tobytes() in trained for row in np.concatenate([X, targets], axis=1)])
        if seen > MOST_SEEN:
            message = f"{seen:.0%} of these rows are among those that the model was fitted to: hold rows out for the repair."
            warnings.warn(message, SeenRowsWarning, stacklevel=caller_level())


def _check_share(name: str, value: Any) -> None:
    if np.ndim(value) or not 0.0 < numbers_of(value) < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {shown(value)}.")
