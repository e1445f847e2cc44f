"""What people pass: checked, as numbers, and as error messages show it."""

import sys
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kexpfam.settings import one_of, shown

__all__ = [
    "Seed",
    "central_levels",
    "check_scale",
    "check_share",
    "checked_levels",
    "numbers_of",
    "one_of",
    "shown",
    "whole",
]

Seed = int | np.integer | np.random.RandomState | np.random.Generator | None


def numbers_of(value: Any) -> np.ndarray:
    """Return a value as numbers; NaN if it is something else, such as a boolean."""
    try:
        array = np.asarray(value)
        return np.array(np.nan) if array.dtype == bool else array.astype(float)
    except (TypeError, ValueError):
        return np.array(np.nan)


def whole(name: str, value: Any, least: int) -> int:
    """Return the value as a whole number of at least ``least``, or raise."""
    try:
        fine = (
            value == int(value) and least <= value <= sys.maxsize and not isinstance(value, bool | np.bool_)
        )
    except (TypeError, ValueError, OverflowError):
        fine = False
    if not fine:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
    return int(value)


def check_share(name: str, value: Any) -> None:
    """Raise unless the value lies strictly between 0 and 1."""
    if np.ndim(value) or not 0.0 < numbers_of(value) < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {shown(value)}.")


def check_scale(
    name: str, value: ArrayLike | None, *shapes: tuple[int, ...], may_be_infinite: bool = False
) -> None:
    """Raise unless the value is positive and of one of the shapes; None, which leaves it to the data, is
    fine."""
    if value is None:
        return
    numbers = numbers_of(value)
    fine = np.all(numbers > 0.0) and (may_be_infinite or np.all(np.isfinite(numbers)))
    if numbers.shape not in shapes or not fine:
        raise ValueError(
            f"{name} must be positive and of shape {' or '.join(map(str, shapes))}, got {shown(value)}."
        )


def checked_levels(levels: ArrayLike) -> np.ndarray:
    """Return one or more probability levels as a vector, or raise."""
    wanted = np.atleast_1d(numbers_of(levels))
    if wanted.ndim != 1 or wanted.size == 0 or not np.all((wanted > 0.0) & (wanted < 1.0)):
        raise ValueError(f"levels must be one or more numbers strictly between 0 and 1; got {shown(levels)}.")
    return wanted


def central_levels(coverage: Any) -> list[float]:
    """Return the levels of both ends of the central interval of this probability, or raise."""
    check_share("coverage", coverage)
    return [0.5 - 0.5 * coverage, 0.5 + 0.5 * coverage]
