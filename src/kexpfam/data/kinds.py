"""Kinds of columns: the support of each, its scaling, its encoding as an input, its family and its cells.

Real, positive, bounded and periodic columns have densities with respect to length; integers, labels and
atoms have probabilities. Rounded numbers have the probability of their interval over its length.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from kexpfam.data.rounding import Rounding
from kexpfam.data.sample import AnyArray, PlainModule
from kexpfam.data.scaling import Scaling

# Harmonics of an angle that are inputs of a network.
INPUT_HARMONICS = 2
# Spacings of whole numbers that are compared, in units of the argument of arcsinh.
SPACINGS = (0.5, 1.0, 2.0, 5.0, 20.0, 100.0)
# Labels identify rows if there are more than FEW_LABELS and than this share of the rows.
FEW_LABELS, IDENTIFYING_SHARE = 20, 0.5

Label = str | int | float | bool


class AbstractKind(PlainModule):
    """The kind of a column; values are numbers in data units, NaN where a cell is missing.

    The defaults are those of real numbers. ``family`` is the key in ``kexpfam.model.families.FAMILIES`` of
    the column's law as a target, ``has_kernel`` whether a kernel model can be its density.
    """

    family: ClassVar[str] = "real"
    discrete: ClassVar[bool] = False
    logarithmic: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    categorical: ClassVar[bool] = False
    has_mean: ClassVar[bool] = True
    has_kernel: ClassVar[bool] = False
    # Whether numbers have this kind unless another is requested.
    is_default: ClassVar[bool] = False
    # Number of inputs of a network that encode a value.
    inputs: ClassVar[int] = 1

    @property
    def ends(self) -> tuple[float, float]:
        """Return the lower and the upper end of the support."""
        return -math.inf, math.inf

    @property
    def atom(self) -> float | None:
        """Return the value with a probability of its own, if there is one."""
        return None

    @property
    def others(self) -> "AbstractKind":
        """Return the kind of the values beside the atom."""
        return self

    @property
    def rounding(self) -> Rounding | None:
        """Return the lattice of the values, if there is one."""
        return Rounding(1.0) if self.discrete else None

    @property
    def merges_equal_rows(self) -> bool:
        """Return whether equal rows may be merged into one with a weight."""
        return not self.discrete

    @property
    def labels(self) -> list[str] | None:
        """Return the names of labels in the order of their codes; None for numbers."""
        return None

    @property
    def description(self) -> str:
        """Return the kind in a few words."""
        return repr(self).removesuffix("()").lower()

    def inside(self, values: np.ndarray) -> np.ndarray:
        """Return which values lie in the support; missing ones do."""
        low, high = self.ends
        return np.isnan(values) | (np.isfinite(values) & (values >= low) & (values <= high))

    def fitted(self, column: np.ndarray, name: str) -> "AbstractKind":
        """Return the kind with what it takes from the cells of a column."""
        return self

    def scaling(self, column: np.ndarray, *, inputs: bool, power: bool, weight: np.ndarray | None) -> Scaling:
        """Return the scaling of one column to model units, as an input or as a target."""
        if not len(column):
            return _multiple(1.0)
        logs = (True,) if self.logarithmic else ()
        return Scaling.standardising(column[:, None], power=power, weight=weight, logs=logs)

    def encoded(self, z: Float[AnyArray, " n"]) -> Float[AnyArray, "n e"]:
        """Return the inputs of a network that encode values in model units."""
        return z[:, None]

    def centre(self, values: Float[AnyArray, "n m"], masses: Float[AnyArray, "n m"]) -> Float[AnyArray, " n"]:
        """Return the mean of each row of values with these masses, which sum to 1."""
        return np.sum(masses * values, axis=1)

    def numbers(self, column: np.ndarray, name: str, *, unknown: bool) -> np.ndarray:
        """Return the cells of a column as numbers; with ``unknown``, new labels are -1."""
        if column.dtype.kind in "biuf":
            numbers = column.astype(float)
        else:
            cells = [np.nan if is_missing(cell) else _as_float(cell, name) for cell in column.tolist()]
            numbers = np.array(cells, float)
        if np.any(np.isinf(numbers)):
            problem = "infinity or a value too large for dtype('float64')"
            raise ValueError(f"Input contains {problem} in column {name}.")
        return numbers

    def cells(self, values: np.ndarray, *, whole: bool) -> np.ndarray:
        """Return numbers as cells; with ``whole``, discrete numbers are of an integer type."""
        return values


class Real(AbstractKind):
    """Any number."""

    has_kernel: ClassVar[bool] = True
    is_default: ClassVar[bool] = True


class Positive(AbstractKind):
    """Numbers above zero, modelled by their logarithms.

    ``Bounded(0, None)`` is for densities that do not vanish at zero.
    """

    has_kernel: ClassVar[bool] = True
    logarithmic: ClassVar[bool] = True

    @property
    def ends(self) -> tuple[float, float]:
        return float(np.finfo(float).tiny), math.inf


class AbstractInterval(AbstractKind):
    """Numbers from ``low`` to ``high`` in data units; ``None`` leaves a side open."""

    low: float | None = eqx.field(static=True, default=None)
    high: float | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if not self.ends[0] < self.ends[1]:
            raise ValueError(f"the lower bound must be below the upper one, got {self!r}.")

    @property
    def ends(self) -> tuple[float, float]:
        return _ends(self.low, self.high)


class Bounded(AbstractInterval):
    """Numbers from ``low`` to ``high`` in data units; ``None`` leaves a side open."""

    has_kernel: ClassVar[bool] = True
    bounded: ClassVar[bool] = True


class Periodic(AbstractKind):
    """Numbers on a circle: x and x + period are the same."""

    period: float = eqx.field(static=True)
    family: ClassVar[str] = "circle"
    has_mean: ClassVar[bool] = False
    inputs: ClassVar[int] = 2 * INPUT_HARMONICS

    def __check_init__(self) -> None:
        if not 0.0 < self.period < math.inf:
            raise ValueError(f"a period must be positive and finite, got {self.period!r}.")

    def scaling(self, column: np.ndarray, **options: Any) -> Scaling:
        return _multiple(self.period / (2.0 * np.pi))

    def encoded(self, z: Float[AnyArray, " n"]) -> Float[AnyArray, "n e"]:
        return harmonics(z, np.ones(INPUT_HARMONICS))

    def centre(self, values: np.ndarray, masses: np.ndarray) -> np.ndarray:
        """Return the mean direction."""
        turn = 2.0 * np.pi / self.period
        return np.angle(np.sum(masses * np.exp(1j * turn * values), axis=1)) / turn % self.period


class Integer(AbstractInterval):
    """Whole numbers from ``low`` to ``high``; ``None`` leaves a side open.

    The short form ``"count"`` is ``Integer(0)``.
    """

    family: ClassVar[str] = "lattice"
    discrete: ClassVar[bool] = True

    def inside(self, values: np.ndarray) -> np.ndarray:
        return super().inside(values) & (np.isnan(values) | (values == np.round(values)))

    def scaling(self, column: np.ndarray, *, inputs: bool, **options: Any) -> Scaling:
        return super().scaling(column, inputs=inputs, **options) if inputs else _lattice_scaling(column)

    def cells(self, values: np.ndarray, *, whole: bool) -> np.ndarray:
        return values.astype(int) if whole and not np.isnan(values).any() else values


class Rounded(AbstractKind):
    """Numbers rounded to multiples of ``step`` from ``low`` to ``high``; ``None`` leaves a side open.

    A value stands for a real number within half a step of it. The density is the probability of this
    interval over its length, so that it is comparable with densities of real numbers. The step, if it is
    None, and the ``offset`` of all numbers are taken from the data.
    """

    step: float | None = eqx.field(static=True, default=None)
    low: float | None = eqx.field(static=True, default=None)
    high: float | None = eqx.field(static=True, default=None)
    offset: float | None = eqx.field(static=True, default=None)
    family: ClassVar[str] = "lattice"

    def __check_init__(self) -> None:
        if self.step is not None and not 0.0 < self.step < math.inf:
            raise ValueError(f"a rounding step must be positive and finite, got {self.step!r}.")

    @property
    def ends(self) -> tuple[float, float]:
        return _ends(self.low, self.high)

    @property
    def rounding(self) -> Rounding | None:
        return None if self.step is None else Rounding.of_step(self.step, self.offset or 0.0)

    @property
    def description(self) -> str:
        return f"rounded to {self.step:g}" if self.step is not None else "rounded"

    def fitted(self, column: np.ndarray, name: str) -> "Rounded":
        """Return the kind with the step and the offset of a column."""
        values = self.numbers(column, name, unknown=False)
        values = values[~np.isnan(values)]
        found = self.rounding or Rounding.found(values)
        if found is None:
            raise ValueError(f"column {name} is not rounded: no step of up to 8 decimals fits its values.")
        if self.offset is None and len(values):
            found = Rounding.of_step(found.size, float(values[0]))
        if not np.all(near := found.holds(values)):
            wrong = f"column {name} holds {values[0]:.12g} and {values[~near][0]:.12g}"
            raise ValueError(f"{wrong}, whose difference is no multiple of {found.size:g}.")
        return Rounded(found.size, self.low, self.high, found.offset / found.unit)

    def scaling(self, column: np.ndarray, *, inputs: bool, power: bool, weight: np.ndarray | None) -> Scaling:
        return super().scaling(column, inputs=inputs, power=power and inputs, weight=weight)


class Category(AbstractKind):
    """Labels; values are positions in ``levels``, which are taken from the data if empty."""

    levels: tuple[Label, ...] = eqx.field(static=True, default=())
    family: ClassVar[str] = "labels"
    discrete: ClassVar[bool] = True
    categorical: ClassVar[bool] = True
    has_mean: ClassVar[bool] = False

    @property
    def inputs(self) -> int:  # type: ignore[override]
        return len(self.levels)

    @property
    def ends(self) -> tuple[float, float]:
        return 0.0, len(self.levels) - 1.0

    @property
    def labels(self) -> list[str]:
        return [str(level) for level in self.levels]

    @property
    def description(self) -> str:
        return f"category of {len(self.levels)}"

    def fitted(self, column: np.ndarray, name: str) -> "Category":
        """Return the category with the labels of a column as its levels, unless it has levels."""
        if self.levels:
            return self
        present = [cell for cell in column.tolist() if not is_missing(cell)]
        try:
            levels = sorted(dict.fromkeys(present))
        except TypeError:  # labels of several types
            levels = sorted(dict.fromkeys(present), key=str)
        if len(levels) > max(FEW_LABELS, IDENTIFYING_SHARE * len(present)):
            many = f"{len(levels)} different labels in {len(present)} rows"
            raise ValueError(f"column {name} has {many}: it names rows; leave it out.")
        return Category(tuple(levels))

    def scaling(self, column: np.ndarray, **options: Any) -> Scaling:
        return _multiple(1.0)

    def encoded(self, z: Float[AnyArray, " n"]) -> Float[AnyArray, "n e"]:
        """Return the indicators of the labels; all are 0 for an unknown label, -1."""
        return (z[:, None] == np.arange(len(self.levels), dtype=z.dtype)).astype(z.dtype)

    def centre(self, values: np.ndarray, masses: np.ndarray) -> np.ndarray:
        """Return the most probable label."""
        each = [np.sum(masses * (values == code), axis=1) for code in range(len(self.levels))]
        return np.argmax(each, axis=0).astype(float)

    def numbers(self, column: np.ndarray, name: str, *, unknown: bool) -> np.ndarray:
        codes = {level: float(code) for code, level in enumerate(self.levels)}
        texts = {str(level): code for level, code in codes.items()}
        code = lambda cell: np.nan if is_missing(cell) else codes.get(cell, texts.get(str(cell), -1.0))
        found = np.array([code(cell) for cell in column.tolist()], float)
        if not unknown and np.any(found < 0.0):
            new = column.tolist()[int(np.flatnonzero(found < 0.0)[0])]
            known = ", ".join(self.labels)
            raise ValueError(f"column {name} holds {new!r}, which is none of its labels: {known}.")
        return found

    def cells(self, values: np.ndarray, *, whole: bool) -> np.ndarray:
        missing, types = ~(values >= 0.0), {type(level) for level in self.levels}
        levels = np.array(self.levels) if len(types) == 1 else np.array(self.levels, object)
        levels = levels.astype(object) if levels.dtype.kind in "UST" or missing.any() else levels
        cells = levels[np.where(missing, 0, values).astype(int)]
        if missing.any():
            cells[missing] = None
        return cells


class Atom(AbstractKind):
    """A value with a probability of its own, beside numbers of another kind.

    ``Atom(0, "positive")`` is an amount that may be zero.
    """

    value: float = eqx.field(static=True)
    rest: AbstractKind = eqx.field(static=True, converter=lambda kind: as_kind(kind), default="real")

    def __check_init__(self) -> None:
        rest = self.rest
        if rest.categorical or rest.atom is not None:
            raise ValueError("an atom is one of numbers: real, positive, bounded, periodic or integer.")
        if rest.discrete and self.value > rest.ends[0] and rest.inside(np.array([self.value], float))[0]:
            raise ValueError("an atom of whole numbers must be the lowest of them: Atom(0, 'count').")

    @property
    def atom(self) -> float:
        return self.value

    @property
    def others(self) -> AbstractKind:
        """Return the kind of the numbers beside the atom; whole numbers start above it."""
        if self.rest.discrete and self.rest.ends[0] == self.value:
            return type(self.rest)(int(self.value) + 1, self.rest.high)  # type: ignore[call-arg, attr-defined]
        return self.rest

    @property
    def merges_equal_rows(self) -> bool:
        return False

    def fitted(self, column: np.ndarray, name: str) -> "Atom":
        """Return the atom beside the kind that the other cells have."""
        values = self.numbers(column, name, unknown=False)
        return Atom(self.value, self.rest.fitted(values[values != self.value], name))

    def inside(self, values: np.ndarray) -> np.ndarray:
        return (values == self.value) | self.others.inside(values)

    def centre(self, values: np.ndarray, masses: np.ndarray) -> np.ndarray:
        return self.rest.centre(values, masses)

    def cells(self, values: np.ndarray, *, whole: bool) -> np.ndarray:
        return self.rest.cells(values, whole=whole)


# The names of kinds in texts.
KINDS: dict[str, Callable[..., AbstractKind]] = {
    "real": Real,
    "positive": Positive,
    "bounded": Bounded,
    "periodic": Periodic,
    "integer": Integer,
    "count": lambda: Integer(0),
    "rounded": Rounded,
    "category": lambda *levels: Category(tuple(map(str, levels))),
    "atom": Atom,
}


def as_kind(kind: object) -> AbstractKind:
    """Return a kind from itself, its class or a text such as "bounded:0:1" or "atom:0:positive"."""
    if isinstance(kind, AbstractKind):
        return kind
    if isinstance(kind, type) and issubclass(kind, AbstractKind):
        kind = kind.__name__.lower()
    if not isinstance(kind, str) or kind.split(":")[0] not in KINDS:
        known = f"use one of {', '.join(KINDS)}, or an object such as Bounded(0, 1)"
        raise ValueError(f"unknown kind of column {kind!r}: {known}.")
    name, *rest = kind.split(":")
    if name == "atom":
        rest = rest[:1] + ([":".join(rest[1:])] if rest[1:] else [])
    try:
        return KINDS[name](*(rest if name == "category" else map(_argument, rest)))
    except TypeError:
        ways = "write 'bounded:0:1', 'periodic:360', 'atom:0'"
        raise ValueError(f"{kind!r} lacks a number, or has too many: {ways}.") from None
    except ValueError as problem:
        raise ValueError(f"{kind!r} is no kind of column: {problem}") from None


def harmonics(angles: Float[AnyArray, "*n"], weights: Float[np.ndarray, " k"]) -> Float[AnyArray, "*n w"]:
    """Return the weighted cosines and sines of the first k multiples of angles, of width 2 k."""
    xp, orders = angles.__array_namespace__(), np.arange(1, len(weights) + 1)
    waves, own = angles[..., None] * orders.astype(angles.dtype), weights.astype(angles.dtype)
    both = xp.stack([own * xp.cos(waves), own * xp.sin(waves)], axis=-1)
    return both.reshape(*angles.shape, 2 * len(weights))


def merge_equal_rows(kinds: tuple[AbstractKind, ...]) -> bool:
    """Return whether equal rows of columns of these kinds may be merged."""
    return all(kind.merges_equal_rows for kind in kinds)


def is_missing(cell: Any) -> bool:
    """Return whether a cell of a table is missing."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, float | np.floating) and bool(np.isnan(cell))


def _argument(text: str) -> float | int | str | None:
    """Return the number in a text, None for an open side, or the text itself: the name of another kind."""
    if text in ("", "none"):
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _ends(low: float | None, high: float | None) -> tuple[float, float]:
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _multiple(unit: float) -> Scaling:
    """Return the scaling of one column ``z = x / unit``."""
    return Scaling.linear(np.zeros(1), np.array([unit]))


def _lattice_scaling(column: np.ndarray) -> Scaling:
    """Return the arcsinh scaling under which whole numbers are likeliest as rounded normals."""
    column = column if len(column) else np.arange(2.0)
    shift, found = float(column.min()), []
    for spacing in (*SPACINGS, 1e3 * max(float(np.ptp(column)), 1.0)):
        z = np.arcsinh((column - shift) / spacing)
        low, high = np.arcsinh((column[:, None] - shift + [-0.5, 0.5]) / spacing).T
        centre, spread = z.mean(), max(z.std(), 1e-3 * float((high - low).mean()))
        mass = ndtr((high - centre) / spread) - ndtr((low - centre) / spread)
        found.append((float(np.log(np.maximum(mass, 1e-12)).mean()), spacing, centre, spread))
    _, spacing, centre, spread = max(found)
    one = lambda number: np.array([number], float)
    return Scaling(one(shift), one(spacing), one(centre), one(spread), one(1.0), arcsinh=(True,))


def _as_float(cell: Any, name: str) -> float:
    try:
        return float(cell)
    except TypeError:
        words = "a cell must be a string or a number, and this argument is not"
        raise TypeError(f"column {name}: {words}: {cell!r}.") from None
    except ValueError:
        words = "which is not a number: use kind 'category' for texts"
        raise ValueError(f"column {name} holds {cell!r}, {words}.") from None
