"""Rounded columns: the lattice that all values of a column lie on, or several with the share of each."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import AnyArray

# Most decimal places of a lattice: numbers with more of them are not rounded.
MOST_PLACES = 8
# Larger whole numbers are not exact in float64.
LARGEST_WHOLE = 2.0**53
# A value lies on a requested lattice if it is within this share of the step.
CLOSE = 1e-6
# The share of the values that have a lattice if some have none, the least share of a coarse lattice, those
# that are tried, as multiples of the finest, and the steps of EM for their shares.
MOSTLY, LEAST_SHARE, MULTIPLES, EM_STEPS = 0.9, 0.02, (100, 50, 20, 10, 5, 2, 1), 100
# In interquartile ranges: the largest step of a coarse lattice, which holds values by chance in proportion to
# its numbers, and the least step of a lattice that not all values have.
COARSEST, FINEST = 0.2, 1e-3
# The place of a draw in such a part of a cell of the finest lattice is as good as random.
PARTS = 4096.0


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
        places = next((d for d in range(MOST_PLACES + 1) if np.all(_has_places(values, d))), None)
        if places is None:
            return None
        whole = np.round(values * 10.0**places).astype(np.int64)
        step = int(np.gcd.reduce(np.diff(whole)))
        return Rounding(float(step), float(whole[0] % step), 10.0**places)

    @staticmethod
    def of_step(step: float, value: float = 0.0) -> "Rounding":
        """Return the lattice with this step through a value."""
        units = [10.0**d for d in range(MOST_PLACES + 1) if np.all(_has_places(np.array([step]), d))]
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


class Roundings(NamedTuple):
    """Several lattices in one column, the coarsest first, and the share of the values that each rounds.

    If the shares sum to less than 1, the other values are not rounded.
    """

    lattices: tuple[Rounding, ...]
    shares: tuple[float, ...]

    @property
    def size(self) -> float:
        """Return the distance of neighbours on the finest lattice."""
        return self.lattices[-1].size

    @staticmethod
    def found(column: np.ndarray) -> "Rounding | Roundings | None":
        """Return the lattices of a column, or its lattice if there is one, or None.

        Many columns hold numbers that were read off at different steps: whole numbers and a few halves, or
        tenths and a few means of several readings. At least nine tenths of the values must be on the finest
        lattice. A value can be on a coarse lattice by chance, so that the shares are those of a mixture,
        found by expectation maximisation.
        """
        values = column[~np.isnan(column)]
        on = [_has_places(values, d) for d in range(MOST_PLACES + 1)]
        shared = [one for level in (1.0, MOSTLY) for one in on if len(values) and one.mean() >= level]
        finest = Rounding.found(values[shared[0]]) if shared else None
        if finest is None:
            return None
        kept, spread = shared[0], np.subtract(*np.percentile(values, [75, 25]))
        if finest.size < FINEST * spread and not np.all(kept):
            return None
        steps = np.array([m for m in MULTIPLES if m == 1 or m * finest.size <= COARSEST * spread])
        multiples = np.round((values[kept] * finest.unit - finest.offset) / finest.step)
        heights = np.where(multiples[:, None] % steps == 0.0, steps, 0.0)
        shares = _mixture_shares(heights)
        kept_steps = (shares >= LEAST_SHARE) | (steps == 1)
        steps, heights = steps[kept_steps], heights[:, kept_steps]
        shares = _mixture_shares(heights)
        if np.log((heights * shares).sum(axis=1)).sum() < (len(steps) - 1) * np.log(len(multiples)):
            steps, shares = np.ones(1, int), np.ones(1)
        if len(steps) == 1 and np.all(kept):
            return finest
        lattices = [finest._replace(step=finest.step * step) for step in steps.tolist()]
        return Roundings(tuple(lattices), tuple((kept.mean() * shares).tolist()))

    def nearest(self, values: AnyArray) -> AnyArray:
        """Return each value rounded to one of the lattices, which its last digits choose in these shares;
        numbers that are on a lattice stay."""
        xp = values.__array_namespace__()
        near = [lattice.nearest(values) for lattice in self.lattices]
        level = values / self.size * PARTS % 1.0
        ends = np.cumsum(self.shares)
        found = values
        for end, one in zip(ends[::-1], near[::-1], strict=True):
            found = xp.where(level < end, one, found)
        for one in near:
            found = xp.where(one == values, values, found)
        return found


def _mixture_shares(heights: Float[np.ndarray, "n m"]) -> Float[np.ndarray, " m"]:
    """Return the shares of a mixture of densities with these heights at each value, by EM."""
    shares = np.full(heights.shape[1], 1.0 / heights.shape[1])
    for _ in range(EM_STEPS):
        parts = heights * shares
        shares = (parts / parts.sum(axis=1, keepdims=True)).mean(axis=0)
    return shares


def _has_places(values: np.ndarray, places: int) -> np.ndarray:
    """Return which values are numbers of so many decimal places."""
    unit = 10.0**places
    exact = np.abs(values) < LARGEST_WHOLE / unit
    return exact & (np.round(np.where(exact, values, 0.5) * unit) / unit == values)
