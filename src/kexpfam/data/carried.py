"""Carried columns: linear combinations of other columns, which are left out of a model and computed from the
others."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kexpfam.data.columns import NEARLY_COLLINEAR
from kexpfam.data.scaling import constant_columns

# Coefficients of standardised columns below the residual, or below this, have no part in a combination.
NO_COEFFICIENT = 1e-12
# Rows may deviate this many times as far as the training rows.
SLACK = 2.0
# Coefficients are rounded to these significant digits where this does not raise the residual above rounding.
DIGITS, ROUNDING = 12, 1e-12


class Combination(NamedTuple):
    """The column at ``place`` is ``constant + sum(coefficients * columns at parts)`` within ``tolerance``."""

    place: int
    parts: tuple[int, ...]
    coefficients: np.ndarray
    constant: float
    tolerance: float

    @staticmethod
    def of(values: np.ndarray, place: int, parts: Sequence[int]) -> "Combination":
        """Return the least-squares fit of one column by others, with the tolerance of these rows."""
        target, others = values[:, place], values[:, list(parts)]
        centre, spread = others.mean(axis=0), others.std(axis=0)
        slopes = np.linalg.lstsq((others - centre) / spread, target - target.mean(), rcond=None)[0] / spread
        found = Combination(place, tuple(parts), slopes, float(target.mean() - slopes @ centre), 0.0)
        short = found._replace(
            coefficients=np.array([_short(one) for one in slopes]), constant=_short(found.constant)
        )
        residual, rounded = (np.abs(target - one.value(values)).max() for one in (found, short))
        if rounded <= max(residual, ROUNDING * np.abs(target).max()):
            found, residual = short, rounded
        return found._replace(tolerance=float(max(SLACK * residual, NEARLY_COLLINEAR * target.std())))

    def value(self, values: np.ndarray) -> np.ndarray:
        """Return the combination of each row of all columns; NaN if a part is missing."""
        return self.constant + values[:, list(self.parts)] @ self.coefficients


class Carried(NamedTuple):
    """The combinations of a table of ``width`` columns; the parts of each are columns that are modelled."""

    combinations: tuple[Combination, ...]
    width: int

    @staticmethod
    def found(values: np.ndarray, among: Sequence[int]) -> "Carried | None":
        """Return the columns that are combinations of those before them, or None if there are none.

        Only the columns ``among`` are considered, in the rows in which they are complete. A column is carried
        if the residual has a standard deviation below ``NEARLY_COLLINEAR`` times that of the column.
        """
        rows = values[~np.isnan(values[:, list(among)]).any(axis=1)]
        if len(rows) <= len(among):
            return None  # few rows always lie on a plane
        varying = [j for j in among if not constant_columns(rows[:, [j]])[0]]
        columns = rows[:, varying]
        standard = (columns - columns.mean(axis=0)) / (columns.std(axis=0) * np.sqrt(len(rows)))
        triangle: np.ndarray = np.asarray(np.linalg.qr(standard, mode="r"))
        basis, kept, combinations = np.zeros((len(triangle), 0)), list[int](), list[Combination]()
        for k, place in enumerate(varying):
            rest = triangle[:, k]
            for _ in range(2):  # a second projection removes the rounding of the first
                rest = rest - basis @ (basis.T @ rest)
            size = float(np.linalg.norm(rest))
            if size >= NEARLY_COLLINEAR:
                basis, kept = np.column_stack([basis, rest / size]), [*kept, k]
                continue
            shares = np.linalg.lstsq(triangle[:, kept], triangle[:, k], rcond=None)[0]
            part = np.abs(shares) > max(size, NO_COEFFICIENT)
            parts = [varying[j] for j, own in zip(kept, part, strict=True) if own]
            combinations.append(Combination.of(rows, place, parts))
        return Carried(tuple(combinations), values.shape[1]) if combinations else None

    @property
    def places(self) -> list[int]:
        """Return the positions of the carried columns."""
        return [one.place for one in self.combinations]

    @property
    def modelled(self) -> list[int]:
        """Return the positions of the other columns."""
        return [j for j in range(self.width) if j not in self.places]

    def dropped(self, values: np.ndarray) -> np.ndarray:
        """Return the modelled columns of rows of all columns.

        A missing cell is computed if it is the only one that a known carried cell depends on. Rows off the
        plane have infinite cells, which lie outside any support.
        """
        values = self._solved(values)
        off = np.zeros(len(values), bool)
        for one in self.combinations:
            off |= np.abs(values[:, one.place] - one.value(values)) > one.tolerance
        values[off, self.combinations[0].parts[0]] = np.inf
        return values[:, self.modelled]

    def restored(self, values: np.ndarray) -> np.ndarray:
        """Return rows of all columns of those of the modelled ones; the last axis has the columns."""
        rows = np.full((*values.shape[:-1], self.width), np.nan)
        rows[..., self.modelled] = values
        flat = rows.reshape(-1, self.width)
        for one in self.combinations:
            flat[:, one.place] = one.value(flat)
        return flat.reshape(rows.shape)

    def undetermined(self, values: np.ndarray) -> np.ndarray:
        """Return which rows of all columns have a known carried cell of which several parts are missing."""
        values = self._solved(values)
        known = [~np.isnan(values[:, one.place]) & np.isnan(one.value(values)) for one in self.combinations]
        return np.any(known, axis=0)

    def _solved(self, values: np.ndarray) -> np.ndarray:
        """Return a copy of the rows in which carried cells determine a missing cell each."""
        values = values.copy()
        # A solved cell may leave a single one elsewhere.
        for one in self.combinations * len(self.combinations):
            parts = values[:, list(one.parts)]
            gaps = np.isnan(parts)
            rows = np.flatnonzero((gaps.sum(axis=1) == 1) & ~np.isnan(values[:, one.place]))
            gap = gaps[rows].argmax(axis=1)
            known = one.constant + np.nansum(parts[rows] * one.coefficients, axis=1)
            solved = (values[rows, one.place] - known) / one.coefficients[gap]
            values[rows, np.array(one.parts)[gap]] = solved
        return values


def _short(number: float) -> float:
    """Return a number with few significant digits."""
    return float(f"{number:.{DIGITS}g}")
