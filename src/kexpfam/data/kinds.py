"""What a column is: its support, and the measure that its density is with respect to.

Real, positive, bounded and periodic columns have densities with respect to length; integers, labels and atoms have
probabilities.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import numpy as np

__all__ = [
    "KINDS",
    "AbstractKind",
    "Atom",
    "Bounded",
    "Category",
    "Integer",
    "Periodic",
    "Positive",
    "Real",
    "as_kind",
]

Label = str | int | float | bool


class AbstractKind(eqx.Module):
    """The kind of a column; values are numbers in the data's own units, NaN where a cell is missing."""

    discrete: ClassVar[bool] = False

    def inside(self, values: np.ndarray) -> np.ndarray:
        """Return which values lie in the support; missing ones do."""
        low, high = self.ends
        return np.isnan(values) | ((values >= low) & (values <= high))

    @property
    def ends(self) -> tuple[float, float]:
        """Return the lower and the upper end of the support."""
        return -math.inf, math.inf


class Real(AbstractKind):
    """Any number."""


class Positive(AbstractKind):
    """Numbers above zero, modelled by their logarithms; ``Bounded(0, None)`` is for densities that do not vanish at zero."""

    @property
    def ends(self) -> tuple[float, float]:
        return float(np.finfo(float).tiny), math.inf


class Bounded(AbstractKind):
    """Numbers from ``low`` to ``high``, in the data's own units; ``None`` leaves a side open."""

    low: float | None = eqx.field(static=True, default=None)
    high: float | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        _check_order(self)

    @property
    def ends(self) -> tuple[float, float]:
        return _ends(self.low, self.high)


class Periodic(AbstractKind):
    """Numbers on a circle: x and x + period are the same."""

    period: float = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not 0.0 < self.period < math.inf:
            raise ValueError(f"a period must be positive and finite, got {self.period!r}.")


class Integer(AbstractKind):
    """Whole numbers from ``low`` to ``high``; ``None`` leaves a side open. The short form ``"count"`` is ``Integer(0)``."""

    low: int | None = eqx.field(static=True, default=None)
    high: int | None = eqx.field(static=True, default=None)
    discrete: ClassVar[bool] = True

    def __check_init__(self) -> None:
        _check_order(self)

    @property
    def ends(self) -> tuple[float, float]:
        return _ends(self.low, self.high)

    def inside(self, values: np.ndarray) -> np.ndarray:
        return super().inside(values) & (np.isnan(values) | (values == np.round(values)))


class Category(AbstractKind):
    """Labels; values are their places in ``levels``, which a fit fills in where there are none."""

    levels: tuple[Label, ...] = eqx.field(static=True, default=())
    discrete: ClassVar[bool] = True

    @property
    def ends(self) -> tuple[float, float]:
        return 0.0, len(self.levels) - 1.0


class Atom(AbstractKind):
    """A value with a probability of its own, beside numbers of another kind: ``Atom(0, "positive")`` is an amount or none."""

    value: float = eqx.field(static=True)
    rest: AbstractKind = eqx.field(static=True, converter=lambda kind: as_kind(kind), default="real")

    def __check_init__(self) -> None:
        if isinstance(self.rest, Category | Atom):
            raise ValueError("an atom stands beside numbers: real, positive, bounded, periodic or integer.")
        if (
            isinstance(self.rest, Integer)
            and self.rest.inside(np.array([self.value]))[0]
            and self.value != self.rest.low
        ):
            raise ValueError("an atom of whole numbers must be the lowest of them: Atom(0, 'count'), say.")

    @property
    def others(self) -> AbstractKind:
        """Return the kind of the numbers beside the atom; whole numbers start above it."""
        if isinstance(self.rest, Integer) and self.rest.low == self.value:
            return Integer(self.rest.low + 1, self.rest.high)
        return self.rest

    def inside(self, values: np.ndarray) -> np.ndarray:
        return (values == self.value) | self.others.inside(values)


# The one place where a short form becomes a kind.
KINDS: dict[str, Callable[..., AbstractKind]] = {
    "real": Real,
    "positive": Positive,
    "bounded": Bounded,
    "periodic": Periodic,
    "integer": Integer,
    "count": lambda: Integer(0),
    "category": lambda *levels: Category(tuple(map(str, levels))),
    "atom": Atom,
}


def as_kind(kind: object) -> AbstractKind:
    """Return the kind that an object or a text stands for, such as "positive", "bounded:0:1" or "atom:0:positive"."""
    if isinstance(kind, AbstractKind):
        return kind
    if isinstance(kind, type) and issubclass(kind, AbstractKind):
        kind = kind.__name__.lower()
    if not isinstance(kind, str) or kind.split(":")[0] not in KINDS:
        raise ValueError(
            f"unknown kind of column {kind!r}: use one of {', '.join(KINDS)}, or an object such as Bounded(0, 1)."
        )
    name, *rest = kind.split(":")
    if name == "atom":
        rest = rest[:1] + ([":".join(rest[1:])] if rest[1:] else [])
    try:
        return KINDS[name](*(rest if name == "category" else map(_number, rest)))
    except TypeError:
        raise ValueError(
            f"{kind!r} lacks a number, or has too many: write 'bounded:0:1', 'periodic:360', 'atom:0'."
        ) from None


def _number(text: str) -> float | int | str | None:
    """Return the number a text stands for; nothing leaves a side open, and a word is another kind's name."""
    if text in ("", "none"):
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _ends(low: float | None, high: float | None) -> tuple[float, float]:
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _check_order(kind: Bounded | Integer) -> None:
    low, high = kind.ends
    if not low < high:
        raise ValueError(f"the lower bound must be below the upper one, got {kind.low!r} and {kind.high!r}.")
