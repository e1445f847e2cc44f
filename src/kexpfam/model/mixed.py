"""Chains of columns of several kinds: one masked network, and links that read its outputs kind by kind.

The columns lie in the order of the table; which of them a unit or a link may look at follows from the order of the chain.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit

from kexpfam.data.kinds import AbstractKind, Atom, Category, Integer, Periodic, Positive, Real
from kexpfam.data.sample import AnyArray
from kexpfam.data.units import Units
from kexpfam.model.chain import AbstractChain, Draws, keep_all
from kexpfam.model.filling import Filling
from kexpfam.model.links import AbstractFamily, Circles, Labels, Lattices, Lines

__all__ = ["Embedding", "MixedChain", "Wiring"]

# Cells of a residual or of a circle.
CELLS = 288


class Wiring(eqx.Module):
    """Which inputs and outputs of a network belong to which column; those with ``atoms`` or ``gaps`` have a sign of them.

    Inputs of the network are those of the families one after the other, then the signs of atoms and of gaps; outputs are those
    of the families and then the logits of atoms.
    """

    families: tuple[AbstractFamily, ...] = eqx.field(static=True)
    atoms: tuple[int, ...] = eqx.field(static=True, default=())
    gaps: tuple[int, ...] = eqx.field(static=True, default=())

    @staticmethod
    def of(units: Units, z: Float[np.ndarray, "n d"]) -> "Wiring":
        """Return the wiring for columns in these units, of which z are the training rows."""
        support = units.support()
        groups: dict[tuple[type[AbstractKind], int], list[int]] = {}
        for j, kind in enumerate(units.kinds):
            kind = kind.others if isinstance(kind, Atom) else kind
            lattice = isinstance(kind, Integer) and units.whole
            family = (
                Integer
                if lattice
                else next((k for k in (Category, Periodic, Positive) if isinstance(kind, k)), Real)
            )
            groups.setdefault((family, len(kind.levels) if isinstance(kind, Category) else 0), []).append(j)
        families = [_family(kind, count, columns, z, support) for (kind, count), columns in groups.items()]
        atoms = tuple(j for j, kind in enumerate(units.kinds) if isinstance(kind, Atom))
        return Wiring(tuple(families), atoms, tuple(j for j, gap in enumerate(units.gaps) if gap))

    @property
    def columns(self) -> tuple[int, ...]:
        """Return the columns in the order of the families."""
        return tuple(column for family in self.families for column in family.columns)

    @property
    def input_owners(self) -> np.ndarray:
        """Return the column that each input of the network is about."""
        own = [np.repeat(family.columns, family.inputs) for family in self.families]
        return np.concatenate([*own, self.atoms, self.gaps]).astype(int)

    @property
    def output_owners(self) -> np.ndarray:
        """Return the column that each output of the network is about."""
        return np.concatenate(
            [*(np.repeat(family.columns, family.outputs) for family in self.families), self.atoms]
        ).astype(int)

    @property
    def penalised(self) -> np.ndarray:
        """Return which outputs a fit keeps small."""
        signs = []
        for family in self.families:
            own = np.zeros((len(family.columns), family.outputs))
            own[:, family.penalised] = 1.0
            signs.append(own.ravel())
        return np.concatenate([*signs, np.ones(len(self.atoms))])

    def start(self, z: Float[np.ndarray, "n d"]) -> np.ndarray:
        """Return the outputs that a network begins with: labels and atoms as often as among the rows."""
        seen = np.isfinite(z[:, self.atoms]).sum(0) + 1.0, np.isinf(z[:, self.atoms]).sum(0) + 1.0
        own = [family.start(z[:, family.columns]).ravel() for family in self.families]
        return np.concatenate([*own, np.log(seen[1] / seen[0])])

    def embedded(self, z: Float[AnyArray, "n d"]) -> Float[AnyArray, "n a"]:
        """Return what the network sees of rows; gaps and atoms are zeros with a sign."""
        xp = z.__array_namespace__()
        there = xp.isfinite(z)
        safe, parts = xp.where(there, z, 0.0).astype(z.dtype), []
        for family in self.families:
            own = family.embedded(safe[:, family.columns]) * there[:, family.columns, None]
            parts.append(own.reshape(len(z), -1))
        signs = [xp.isinf(z[:, self.atoms]), xp.isnan(z[:, self.gaps])]
        return xp.concatenate([*parts, *signs], axis=1).astype(z.dtype)

    def told(self, outputs: Float[AnyArray, "n o"]) -> list[AnyArray]:
        """Return the outputs by families, each (rows, columns of the family, outputs), and the logits of atoms."""
        parts, start = [], 0
        for family in self.families:
            width = len(family.columns) * family.outputs
            parts.append(
                outputs[:, start : start + width].reshape(len(outputs), len(family.columns), family.outputs)
            )
            start += width
        return [*parts, outputs[:, start:]]

    def log_densities(
        self, outputs: Float[AnyArray, "n o"], z: Float[AnyArray, "n d"], cells: int
    ) -> Float[AnyArray, "n d"]:
        """Return the log density of every cell; 0 of a missing one."""
        xp, (*told, logits) = z.__array_namespace__(), self.told(outputs)
        there = xp.isfinite(z)
        safe = xp.where(there, z, np.asarray(self.fillers, z.dtype))
        both = zip(self.families, told, strict=True)
        parts = [family.log_density(own, safe[:, family.columns], cells) for family, own in both]
        back = np.argsort(self.columns)
        found = xp.where(there, xp.concatenate(parts, axis=1)[:, back], 0.0)
        if not self.atoms:
            return found
        signs = xp.where(xp.isinf(z[:, self.atoms]), logits, -logits)
        chances = xp.where(xp.isnan(z[:, self.atoms]), 0.0, -xp.logaddexp(0.0 * signs, -signs))
        spread = np.asarray(np.asarray(self.atoms)[:, None] == np.arange(z.shape[1]), z.dtype)
        return found + chances.astype(z.dtype) @ spread

    @property
    def fillers(self) -> np.ndarray:
        """Return a value of each column that stands where there is none; it lies in the support."""
        found = np.zeros(len(self.columns))
        for family in self.families:
            if isinstance(family, Lines):
                found[list(family.columns)] = np.clip(0.0, family.low, family.high)
            if isinstance(family, Lattices):
                found[list(family.columns)] = [low for low, _ in family.seen]
        return found

    def place(self, column: int) -> tuple[int, int]:
        """Return the family of a column, and its place there."""
        return next(
            (f, family.columns.index(column))
            for f, family in enumerate(self.families)
            if column in family.columns
        )

    def drawn(
        self, told: list[np.ndarray], column: int, cells: int, levels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return values of one column at these levels, an atom first, and their log density as drawn."""
        f, place = self.place(column)
        if column not in self.atoms:
            return self.families[f].drawn(told[f][:, place], place, cells, levels)
        logit = told[-1][:, self.atoms.index(column)]
        chance = expit(logit)
        within = np.clip((levels - chance) / np.maximum(1.0 - chance, np.finfo(np.float32).tiny), 0.0, 1.0)
        value, log_density = self.families[f].drawn(
            told[f][:, place], place, cells, within.astype(told[f].dtype)
        )
        there = levels < chance
        log_density = np.where(there, -np.logaddexp(0.0, -logit), log_density - np.logaddexp(0.0, logit))
        return np.where(there, np.inf, value), log_density

    def log_link(self, told: list[np.ndarray], column: int, z: np.ndarray, cells: int) -> np.ndarray:
        """Return the log density of values of one column; infinity is its atom."""
        f, place = self.place(column)
        atom = np.isinf(z)
        safe = np.where(atom, self.fillers[column], z).astype(told[f].dtype)[:, None]
        found = self.families[f].only(place).log_density(told[f][:, place : place + 1], safe, cells)[:, 0]
        if column not in self.atoms:
            return found
        logit = told[-1][:, self.atoms.index(column)]
        return np.where(atom, -np.logaddexp(0.0, -logit), found - np.logaddexp(0.0, logit))

    def steps(
        self, told: list[np.ndarray], column: int, cells: int, *, atom: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the points where the distribution function of one column bends or jumps, and its levels there."""
        f, place = self.place(column)
        points, levels = self.families[f].steps(told[f][:, place], place, cells)
        if atom is None:
            return points, levels
        chance = expit(told[-1][:, self.atoms.index(column), None])
        at = np.array([np.interp(atom, p, q) for p, q in zip(points, levels, strict=True)])[:, None] * (
            1.0 - chance
        )
        points = np.concatenate([points, np.full((len(points), 2), atom)], axis=1)
        levels = np.concatenate(
            [levels * (1.0 - chance) + chance * (points[:, :-2] > atom), at, at + chance], axis=1
        )
        order = np.lexsort((levels, points), axis=1)
        return np.take_along_axis(points, order, axis=1), np.take_along_axis(levels, order, axis=1)


def _family(
    kind: type[AbstractKind],
    labels: int,
    columns: list[int],
    z: Float[np.ndarray, "n d"],
    support: Float[np.ndarray, "2 d"],
) -> AbstractFamily:
    """Return the links of columns of one kind."""
    if kind is Category:
        return Labels(tuple(columns), labels)
    if kind is Periodic:
        return Circles(tuple(columns))
    if kind is Integer:
        return Lattices.of(tuple(columns), z[:, columns], support[:, columns])
    low, high = (tuple(map(float, side)) for side in support[:, columns])
    return Lines(tuple(columns), low, high, thin=kind is Positive)


class Embedding(Units):
    """The map from conditions of several kinds to what a network sees: indicators of labels, sines of angles, signs of gaps."""

    wiring: Wiring = eqx.field(static=True, default=Wiring(()))

    @staticmethod
    def fitted(
        values: np.ndarray, kinds: tuple[AbstractKind, ...], *, weight: np.ndarray | None = None
    ) -> "Embedding":
        """Return the embedding of these columns; whole numbers are numbers here."""
        units = Units.of(values, kinds, whole=False, power=True, weight=weight)
        fields = {field.name: getattr(units, field.name) for field in dataclasses.fields(units)}
        return Embedding(**fields, wiring=Wiring.of(units, Units.to_model(units, values)))

    def to_model(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n a"]:
        return self.wiring.embedded(super().to_model(values))


class Sight(NamedTuple):
    """Which inputs a hidden unit, and which units and inputs an output, may look at; and the degrees of units."""

    degrees: np.ndarray
    first: AnyArray
    hidden: np.ndarray
    out: AnyArray
    skip: AnyArray


@lru_cache
def _degrees(condition_dim: int, dim: int, width: int) -> np.ndarray:
    """Return of each unit how many columns of the chain it may look at; units of all degrees are equally many."""
    least = 0 if condition_dim or dim == 1 else 1
    return least + np.arange(width) % (dim - least)


class MixedChain(AbstractChain):
    """A law of columns of several kinds under a condition; one member of an ensemble, or several stacked along a first axis.

    ``order`` says which column each link is about. Weights lie as inputs times outputs.
    """

    order: Int[AnyArray, "*m d"]
    first: Float[AnyArray, "*m a w"]
    hidden: Float[AnyArray, "*m l w w"]
    biases: Float[AnyArray, "*m layers w"]
    out: Float[AnyArray, "*m w o"]
    skip: Float[AnyArray, "*m a o"]
    shift: Float[AnyArray, "*m o"]
    wiring: Wiring = eqx.field(static=True)

    @classmethod
    def draw(
        cls,
        condition_dim: int,
        orders: Int[np.ndarray, "m d"],
        wiring: Wiring,
        z: Float[np.ndarray, "n d"],
        *,
        width: int,
        depth: int,
        seed: int,
    ) -> "MixedChain":
        """Return stacked members with these orders whose links begin as they would without a condition."""
        members, rng = len(orders), np.random.default_rng(seed)
        inputs, outputs = condition_dim + len(wiring.input_owners), len(wiring.output_owners)
        normal = lambda scale, *shape: (scale * rng.standard_normal((members, *shape))).astype(np.float32)
        zeros = lambda *shape: np.zeros((members, *shape), np.float32)
        return cls(
            orders,
            normal(np.sqrt(2.0 / inputs), inputs, width),
            normal(np.sqrt(2.0 / width), depth - 1, width, width),
            zeros(depth, width),
            normal(0.01, width, outputs),
            zeros(inputs, outputs),
            zeros(outputs) + wiring.start(z).astype(np.float32),
            wiring,
        )

    @property
    def dim(self) -> int:
        return self.order.shape[-1]

    @property
    def support(self) -> None:
        """Return nothing: the wiring knows the bounds."""

    def member(self, k: int) -> "MixedChain":
        names = ("order", "first", "hidden", "biases", "out", "skip", "shift")
        return dataclasses.replace(self, **{name: getattr(self, name)[k] for name in names})

    @property
    def integrated(self) -> list[int]:
        return [
            column
            for family in self.wiring.families
            for column in family.columns
            if isinstance(family, Lines | Circles)
        ]

    @property
    def cells(self) -> int:
        return CELLS

    def penalty(self) -> Float[AnyArray, ""]:
        return (self.wiring.penalised * self.out**2).sum()

    def sight(self) -> Sight:
        """Return what may look at what."""
        xp, owners = self.order.__array_namespace__(), self.wiring.input_owners
        p, places = self.first.shape[0] - len(owners), xp.argsort(self.order)
        inputs = xp.concatenate([np.zeros(p, int), places[owners] + 1])
        degrees, links = _degrees(p, self.dim, self.first.shape[1]), places[self.wiring.output_owners]
        sees = lambda low, high: (low[:, None] <= high[None]).astype(np.float32)
        return Sight(
            degrees, sees(inputs, degrees), sees(degrees, degrees), sees(degrees, links), sees(inputs, links)
        )

    def outputs(self, rows: Float[AnyArray, "n a"], thin: Callable = keep_all) -> Float[AnyArray, "n o"]:
        """Return what all links are told under rows of condition and embedded columns."""
        sight, dtype = self.sight(), rows.dtype
        h = self.last_units(rows, sight.first, sight.hidden, thin)
        told = h @ (self.out * sight.out).astype(dtype) + rows @ (self.skip * sight.skip).astype(dtype)
        return told + self.shift.astype(dtype)

    def log_densities(
        self, y: Float[AnyArray, "n d"], x: Float[AnyArray, "n p"], *, cells: int, thin: Callable = keep_all
    ) -> Float[AnyArray, "n d"]:
        """Return ``log p(y_j | columns before, x)`` of every column, in the order of the table; 0 where a cell is missing."""
        rows = y.__array_namespace__().concatenate([x, self.wiring.embedded(y)], axis=1)
        return self.wiring.log_densities(self.outputs(rows, thin), y, cells)

    def sample(
        self,
        x: Float[np.ndarray, "n p"],
        *,
        cells: int,
        rng: np.random.Generator,
        known: Float[np.ndarray, "n d"] | None = None,
    ) -> Draws:
        sight, wiring, (count, p) = self.sight(), self.wiring, x.shape
        rows = np.concatenate([x, np.zeros((count, len(wiring.input_owners)))], axis=1).astype(np.float32)
        filling = Filling(sight.degrees, self.first, self.hidden, self.biases, count)
        out, totals = self.out[filling.order], np.zeros((2, count))
        targets = np.full((count, self.dim), np.nan)
        for j, column in enumerate(self.order):
            units, own = filling.ready(j, rows), wiring.output_owners == column
            outputs = np.zeros((count, len(own)), np.float32)
            outputs[:, own] = units @ out[: units.shape[1], own] + rows @ self.skip[:, own] + self.shift[own]
            given = None if known is None else known[:, column]
            targets[:, column], logs = self._link(outputs, int(column), given, cells, rng)
            totals += logs
            seen = p + np.flatnonzero(wiring.input_owners == column)
            alone = np.where(np.arange(self.dim) == column, targets, 0.0).astype(np.float32)
            rows[:, seen] = wiring.embedded(alone)[:, seen - p]
        return Draws(targets, *totals)

    def _link(
        self, outputs: np.ndarray, column: int, given: np.ndarray | None, cells: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of one column, drawn or given, and the log densities of the drawn and of the given ones."""
        told, count = self.wiring.told(outputs), len(outputs)
        values, log_drawn = self.wiring.drawn(told, column, cells, rng.random(count, np.float32))
        if given is None or np.all(np.isnan(given)):
            return values, np.stack([log_drawn, np.zeros(count)])
        there = ~np.isnan(given)
        log_given = self.wiring.log_link(told, column, np.where(there, given, values), cells)
        return np.where(there, given, values), np.where([~there, there], [log_drawn, log_given], 0.0)
