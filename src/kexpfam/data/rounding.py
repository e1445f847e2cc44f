"""Rounded columns: the lattice that all values of a column lie on."""

from typing import NamedTuple

import numpy as np

from kexpfam.data.sample import AnyArray

# Most decimal places of a lattice: numbers with more of them are not rounded.
MOST_PLACES = 8
# Larger whole numbers are not exact in float64.
LARGEST_WHOLE = 2.0**53
# A value lies on a requested lattice if it is within this share of the step.
CLOSE = 1e-6


class Rounding(NamedTuple):
    """The numbers ``(offset + step k) / unit`` with whole k.

    Step, offset and unit are whole numbers where possible, so that each number is the float64 that a table
    holds: 3 / 10 is the number that is written 0.3, and 3 times 0.1 is not.
    """

    step: float
    offset: float = 0.0
    unit: float = 1.0

    @property
    def size(self) -> float:
        """Return the distance of neighbours."""
        return self.step / self.unit

    @staticmethod
    def found(column: np.ndarray) -> "Rounding | None":
        """Return the coarsest lattice of decimal numbers that holds all values, or None.

        The values are compared bit by bit with numbers of up to ``MOST_PLACES`` decimal places. Of several
        steps in one column the result is the greatest common divisor. Missing values are left out.
        """
        values = np.unique(column[~np.isnan(column)])
        if len(values) < 2:
            return None
        places = next((d for d in range(MOST_PLACES + 1) if _has_places(values, d)), None)
        if places is None:
            return None
        whole = np.round(values * 10.0**places).astype(np.int64)
        step = int(np.gcd.reduce(np.diff(whole)))
        return Rounding(float(step), float(whole[0] % step), 10.0**places)

    @staticmethod
    def of_step(step: float, value: float = 0.0) -> "Rounding":
        """Return the lattice with this step through a value."""
        units = [10.0**d for d in range(MOST_PLACES + 1) if _has_places(np.array([step]), d)]
        inverse = float(np.round(1.0 / step))
        if not units and abs(inverse * step - 1.0) < CLOSE:
            units = [inverse]
        unit = units[0] if units else 1.0
        own = float(np.round(step * unit)) if units else step
        offset = value * unit % own
        if abs(offset - np.round(offset)) < CLOSE * own:
            offset = float(np.round(offset))
        return Rounding(own, 0.0 if min(offset, own - offset) < CLOSE * own else offset, unit)

    def holds(self, values: np.ndarray) -> np.ndarray:
        """Return which values lie on the lattice, up to a millionth of the step."""
        return np.abs(self.nearest(values) - values) <= CLOSE * self.size

    def nearest(self, values: AnyArray) -> AnyArray:
        """Return the nearest number of the lattice to each value."""
        xp = values.__array_namespace__()
        multiples = xp.round((values * self.unit - self.offset) / self.step)
        return (self.offset + self.step * multiples) / self.unit


def _has_places(values: np.ndarray, places: int) -> bool:
    """Return whether all values are numbers of so many decimal places."""
    unit = 10.0**places
    if np.abs(values).max(initial=0.0) >= LARGEST_WHOLE / unit:
        return False
    return bool(np.all(np.round(values * unit) / unit == values))
