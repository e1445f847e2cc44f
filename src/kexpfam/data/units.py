"""The units of columns of several kinds: numbers of a table, and what links of a chain and a network see of them."""

import equinox as eqx
import numpy as np
from jaxtyping import Float

from kexpfam.data.kinds import AbstractKind, Atom, Category, Integer, Periodic, Positive
from kexpfam.data.sample import AnyArray
from kexpfam.data.scaling import Scaling

__all__ = ["Units"]


class Units(Scaling):
    """The map between the numbers of a table and model units, column by column.

    Real, positive and bounded columns are standardised, angles are in radians, whole numbers and codes of labels stay as they
    are. Infinity stands for an atom, NaN for a missing cell. ``gaps`` tells in which columns cells were missing in the training
    rows.
    """

    kinds: tuple[AbstractKind, ...] = eqx.field(static=True, default=())
    gaps: tuple[bool, ...] = eqx.field(static=True, default=())
    whole: bool = eqx.field(static=True, default=True)

    @staticmethod
    def of(
        values: np.ndarray,
        kinds: tuple[AbstractKind, ...],
        *,
        whole: bool = True,
        power: bool = False,
        weight: np.ndarray | None = None,
    ) -> "Units":
        """Return the units of these columns; unless ``whole``, integers are standardised like real numbers."""
        parts = [
            _scaling(values[:, j], kind, whole=whole, power=power, weight=weight)
            for j, kind in enumerate(kinds)
        ]
        joined = Scaling.joined(parts)
        gaps = tuple(bool(gap) for gap in np.isnan(values).any(axis=0))
        fields = (joined.shift, joined.scale, joined.centre, joined.spread, joined.powers)
        return Units(*fields, warped=joined.warped, logs=joined.logs, kinds=kinds, gaps=gaps, whole=whole)

    def to_model(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        atoms, xp = self.atoms(values), values.__array_namespace__()
        return xp.where(atoms, np.inf, super().to_model(xp.where(atoms, np.nan, values)))

    def to_data(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        atoms, xp = np.isinf(values), values.__array_namespace__()
        at = np.array([kind.value if isinstance(kind, Atom) else np.nan for kind in self.kinds])
        return xp.where(atoms, at, super().to_data(xp.where(atoms, np.nan, values)))

    def log_jacobians(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        """Return ``log |dz/dx|`` where there is a density with respect to length; 0 at atoms, gaps and discrete values."""
        xp = values.__array_namespace__()
        counted = (
            self.atoms(values)
            | xp.isnan(values)
            | np.array([_others(kind).discrete for kind in self.kinds], bool)
        )
        return xp.where(counted, 0.0, super().log_jacobians(xp.where(counted, 1.0, values)))

    def atoms(self, values: Float[AnyArray, "n d"]) -> AnyArray:
        """Return which cells are atoms."""
        return values == np.array([kind.value if isinstance(kind, Atom) else np.nan for kind in self.kinds])

    def support(self) -> Float[np.ndarray, "2 d"]:
        """Return the ends of the support of each column in model units."""
        ends = np.array([_others(kind).ends for kind in self.kinds]).reshape(-1, 2).T
        logs = np.array(self.log_columns)
        with np.errstate(all="ignore"):
            inner = Scaling.to_model(self, np.where(np.isinf(ends) | logs, 1.0, ends))
        open_ends = np.where(np.array([[True], [False]]), -np.inf, np.inf)
        return np.where(np.isinf(ends) | logs, open_ends, inner)


def _stretch(unit: float) -> Scaling:
    """Return the scaling of one column by so many of the data's units."""
    zero, one = np.zeros(1), np.ones(1)
    return Scaling(zero, np.array([unit]), zero, one, one, warped=(False,))


def _others(kind: AbstractKind) -> AbstractKind:
    return kind.others if isinstance(kind, Atom) else kind


def _scaling(
    column: np.ndarray, kind: AbstractKind, *, whole: bool, power: bool, weight: np.ndarray | None
) -> Scaling:
    """Return the scaling of one column by the cells that are there and are no atoms."""
    seen = ~np.isnan(column)
    if isinstance(kind, Atom):
        seen, kind = seen & (column != kind.value), kind.others
    if isinstance(kind, Category) or (isinstance(kind, Integer) and whole) or not np.any(seen):
        return _stretch(1.0)
    if isinstance(kind, Periodic):
        return _stretch(kind.period / (2.0 * np.pi))
    own, logs = None if weight is None else weight[seen], (True,) if isinstance(kind, Positive) else ()
    return Scaling.standardising(column[seen, None], power=power, weight=own, logs=logs)
