"""The features of f: how many there are, and the rows that their kernels are put on."""

from typing import NamedTuple

import numpy as np

from kexpfam.data.sample import Sample
from kexpfam.data.weights import distinct_rows
from kexpfam.model.kernels import KERNELS
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan, spread_rows
from kexpfam.settings import SettingsRecord, at_least

# Centres of a one-dimensional target: this far apart (length scales) and beyond the data (standard
# deviations).
CENTRE_SPACING, CENTRE_MARGIN, MOST_TARGET_CENTRES = 0.7, 0.5, 100


class Features(SettingsRecord):
    """How many features f has.

    Parameters
    ----------
    centres : int
        Spread-out training rows that kernels are put on.
    rank : int or None
        Leading features kept where there is no condition; None keeps all.
    condition_rank : tuple of int
        The least and the largest number of leading features of the condition.
    rows_per_feature : int
        Between them there is one feature for every so many rows.
    target_rank : int
        Leading features of the target under a condition.
    floor : float
        Features below this share of the strongest are left out.
    """

    centres: int = at_least(1, 400)
    rank: int | None = None
    condition_rank: tuple[int, int] = (60, 150)
    rows_per_feature: int = at_least(1, 20)
    target_rank: int = at_least(1, 20)
    floor: float = 1e-10

    def __check_init__(self) -> None:
        low, high = self.condition_rank
        if not 1 <= low <= high:
            raise ValueError(
                f"condition_rank must be two rising numbers of at least 1, got {self.condition_rank!r}."
            )


class Centres(NamedTuple):
    """Spread-out rows that kernels are put on: targets, and conditions if there are any."""

    target: np.ndarray
    condition: np.ndarray


def centre_rows(sample: Sample, features: Features, *, seed: int) -> Centres:
    """Return the centres of a space; under a condition, distinct conditions and distinct targets each for
    themselves."""
    spread = lambda rows, most: rows[spread_rows(rows, most, seed=seed)]
    if not sample.conditional:
        targets = np.asarray(sample.target)
        # Centres cover the data, whatever the number of repetitions of a row.
        return Centres(spread(targets[distinct_rows(targets)], features.centres), np.zeros((1, 0)))
    conditions, targets = (np.unique(np.asarray(part), axis=0) for part in (sample.condition, sample.target))
    return Centres(
        targets if targets.shape[1] == 1 else spread(targets, MOST_TARGET_CENTRES),
        spread(conditions, features.centres),
    )


def build_space(
    kernel: str,
    sample: Sample,
    centres: Centres,
    lengthscales: tuple[np.ndarray, np.ndarray],
    features: Features,
) -> FeatureSpace:
    """Return the space of f: kernels on the centres, or under a condition the product of leading features.

    ``lengthscales`` are those of the target and of the condition.
    """
    of_target, of_condition = (KERNELS[kernel](scales) for scales in lengthscales)
    if not sample.conditional:
        return FeatureSpace(
            Constant(), KernelSpan.build(of_target, centres.target, rank=features.rank, floor=features.floor)
        )
    rank = int(np.clip(sample.effective_rows // features.rows_per_feature, *features.condition_rank))
    condition = KernelSpan.build(of_condition, centres.condition, rank=rank, floor=features.floor)
    points = covering_centres(centres.target, float(lengthscales[0].min()))
    return FeatureSpace(
        condition, KernelSpan.build(of_target, points, rank=features.target_rank, floor=features.floor)
    )


def covering_centres(targets: np.ndarray, lengthscale: float) -> np.ndarray:
    """Return centres for functions of the target under a condition: on a line evenly spaced ones, else the
    targets given.

    The best f is not a combination of kernels at the training targets alone: it also lowers the density where
    no targets were observed, so that its centres have to cover the line.
    """
    if targets.shape[1] > 1:
        return targets
    low, high = targets.min() - CENTRE_MARGIN, targets.max() + CENTRE_MARGIN
    needed = int(np.ceil((high - low) / (CENTRE_SPACING * lengthscale)))
    return np.linspace(low, high, int(np.clip(needed, 6, MOST_TARGET_CENTRES)))[:, None]
