r"""A chain of conditional laws: each column of a table given a condition and the columns before it,

.. math:: \log p(y | x) = \sum_j \log p(y_j | y_{<j}, x) .

A masked network of the condition and the columns gives every column the numbers that its family
(``model.families``) turns into a law. Inputs and outputs are in the order of the table; the order of the
chain determines the masks. A joint density is the case of a condition of width zero.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kexpfam.data.kinds import Real
from kexpfam.data.sample import AnyArray
from kexpfam.data.scaling import InputEncoding, Scaling
from kexpfam.model.families import BUMPS, FAMILIES, AbstractFamily, PiecewiseLaw
from kexpfam.model.networks import silu

__all__ = ["Chain", "ChainDraws", "Layout", "keep_all", "piecewise", "piecewise_knots"]

# Inputs with fewer distinct knots have no piecewise-linear encoding.
FEWEST_KNOTS = 4


def keep_all(units: Float[AnyArray, "n w"], layer: int) -> Float[AnyArray, "n w"]:
    """Return the units of a layer without dropout."""
    return units


class Layout(eqx.Module):
    """The columns of a chain: their encoding as inputs, their families and the outputs of each.

    Outputs are those of the families, one after the other, and then the logits of atoms.
    """

    encoding: InputEncoding
    families: tuple[AbstractFamily, ...]

    @staticmethod
    def of(scaling: Scaling, *, bumps: int = BUMPS) -> "Layout":
        """Return the layout of the columns of a scaling that has kinds."""
        groups: dict[tuple, list[int]] = {}
        for j, kind in enumerate(scaling.kinds):
            own = kind.others
            settings = FAMILIES[own.family].settings(own, arcsinh=scaling.arcsinh[j])
            groups.setdefault((own.family, *settings.items()), []).append(j)
        families = [
            FAMILIES[name].of(tuple(columns), scaling, bumps=bumps, **dict(settings))
            for (name, *settings), columns in groups.items()
        ]
        return Layout(InputEncoding.of(scaling), tuple(families))

    @staticmethod
    def real(dim: int, *, bumps: int = BUMPS) -> "Layout":
        """Return the layout of real columns that are in model units already."""
        scaling = Scaling.linear(np.zeros(dim), np.ones(dim), kinds=(Real(),) * dim, gaps=(False,) * dim)
        return Layout.of(scaling, bumps=bumps)

    @property
    def dim(self) -> int:
        """Return the number of columns."""
        return len(self.encoding.kinds)

    @property
    def atoms(self) -> tuple[int, ...]:
        """Return the columns with atoms."""
        return self.encoding.atoms

    @property
    def output_owners(self) -> np.ndarray:
        """Return the column of each output."""
        own = [np.repeat(family.columns, family.outputs) for family in self.families]
        return np.concatenate([*own, self.atoms]).astype(int)

    @property
    def corrected_owners(self) -> np.ndarray:
        """Return the column of each coefficient that the convex polish corrects."""
        own = [np.repeat(family.columns, family.corrections) for family in self.families]
        return np.concatenate(own).astype(int)

    @property
    def penalised(self) -> np.ndarray:
        """Return which outputs have penalised weights, as zeros and ones."""
        parts = []
        for family in self.families:
            own = np.zeros((len(family.columns), family.outputs), np.float32)
            own[:, family.penalised] = 1.0
            parts.append(own.ravel())
        return np.concatenate([*parts, np.ones(len(self.atoms), np.float32)])

    @property
    def integrated(self) -> list[int]:
        """Return the columns whose normaliser is an integral."""
        return [column for family in self.families if family.integrated for column in family.columns]

    @property
    def cells(self) -> int:
        """Return the largest number of cells that a family needs."""
        return max(family.cells for family in self.families)

    def start(self, z: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " o"]:
        """Return the outputs before training: labels and atoms have their frequencies."""
        present, at = (test(z[:, list(self.atoms)]).sum(axis=0) + 1.0 for test in (np.isfinite, np.isinf))
        own = [family.start(z[:, list(family.columns)]).ravel() for family in self.families]
        return np.concatenate([*own, np.log(at / present)])

    def split(
        self, outputs: Float[AnyArray, "n o"], added: Float[AnyArray, "n c"] | None = None
    ) -> tuple[list[AnyArray], AnyArray]:
        """Return the outputs of each family, (rows, columns, outputs), and the logits of atoms.

        Corrections of coefficients follow the outputs of a column.
        """
        xp, parts, start, begin = outputs.__array_namespace__(), [], 0, 0
        for family in self.families:
            size = len(family.columns)
            part = outputs[:, start : start + size * family.outputs].reshape(len(outputs), size, -1)
            start += size * family.outputs
            if added is not None and family.corrections:
                own = added[:, begin : begin + size * family.corrections].reshape(len(outputs), size, -1)
                part = xp.concatenate([part, own], axis=2)
                begin += size * family.corrections
            parts.append(part)
        return parts, outputs[:, start:]

    def log_densities(
        self, parts: list[AnyArray], logits: AnyArray, z: Float[AnyArray, "n d"], cells: int | None
    ) -> Float[AnyArray, "n d"]:
        """Return the log density of every cell; 0 where it is missing."""
        xp, marked = z.__array_namespace__(), bool(self.atoms or self.encoding.gaps)
        there = xp.isfinite(z) if marked else None
        safe = z if there is None else xp.where(there, z, 0.0)
        both = zip(self.families, parts, strict=True)
        found = [family.log_density(own, safe[:, list(family.columns)], cells) for family, own in both]
        columns = [column for family in self.families for column in family.columns]
        joined = found[0] if len(found) == 1 else xp.concatenate(found, axis=1)[:, np.argsort(columns)]
        if there is None:
            return joined
        joined = xp.where(there, joined, 0.0)
        if not self.atoms:
            return joined
        at = z[:, list(self.atoms)]
        chances = xp.where(xp.isnan(at), 0.0, _log_sigmoid(xp.where(xp.isinf(at), logits, -logits)))
        spread = np.asarray(np.asarray(self.atoms)[:, None] == np.arange(self.dim), z.dtype)
        return joined + chances.astype(z.dtype) @ spread

    def place(self, column: int) -> tuple[int, int]:
        """Return the position of a column's family, and that of the column in it."""
        return next(
            (f, family.columns.index(column))
            for f, family in enumerate(self.families)
            if column in family.columns
        )


class AtomLaw(NamedTuple):
    """The law of one column: that of a family, and an atom with a logit, which is infinite in model units."""

    family: AbstractFamily
    outputs: AnyArray
    logit: AnyArray | None

    def drawn(self, levels: Float[AnyArray, " n"], cells: int | None) -> tuple[AnyArray, AnyArray]:
        """Return the quantiles at these levels, atoms first, and their log density as drawn."""
        if self.logit is None:
            return self.family.drawn(self.outputs, levels, cells)
        xp, chance = levels.__array_namespace__(), _sigmoid(self.logit)
        rest = xp.clip((levels - chance) / xp.maximum(1.0 - chance, np.finfo(np.float32).tiny), 0.0, 1.0)
        value, log_density = self.family.drawn(self.outputs, rest.astype(levels.dtype), cells)
        there = levels < chance
        log_atom, log_rest = _log_sigmoid(self.logit), log_density + _log_sigmoid(-self.logit)
        return xp.where(there, np.inf, value), xp.where(there, log_atom, log_rest)

    def log_density(self, z: Float[np.ndarray, " n"], cells: int | None) -> np.ndarray:
        """Return the log density of values."""
        atom = np.isinf(z)
        found = self.family.log_density(
            self.outputs, np.where(atom, 0.0, z).astype(self.outputs.dtype), cells
        )
        if self.logit is None:
            return found
        return np.where(atom, _log_sigmoid(self.logit), found + _log_sigmoid(-self.logit))


class Masks(NamedTuple):
    """What a unit and an output depend on, degrees of units, and places of columns in the chain."""

    places: AnyArray  # (d,)
    degrees: np.ndarray  # (width,)
    first: AnyArray  # (inputs, width)
    pieces: AnyArray | None  # (inputs times pieces, width)
    hidden: np.ndarray  # (width, width)
    out: AnyArray  # (width, outputs)
    skip: AnyArray  # (inputs, outputs)


@lru_cache
def _degrees(condition_dim: int, dim: int, width: int) -> np.ndarray:
    """Return the number of columns that each unit depends on; all numbers are equally frequent."""
    least = 0 if condition_dim or dim == 1 else 1
    return least + np.arange(width) % (dim - least)


class ChainDraws(NamedTuple):
    """Rows in model units, their log density as drawn, and the log density of their known cells."""

    targets: np.ndarray
    log_density: np.ndarray
    log_weight: np.ndarray


class Chain(eqx.Module):
    """A law of columns under a condition; one member of an ensemble, or several along a first axis.

    ``order`` are the columns in the order of the chain. Weights are inputs times outputs. ``correction``
    maps a one and the last hidden units to what is added to the coefficients of the real line, in the order
    of ``layout.corrected_owners``. ``layout`` is not learned, and is absent while the weights are. With
    ``knots`` each input has a piecewise-linear encoding too, whose weights in the first layer are ``pieces``.
    """

    order: Int[AnyArray, "*m d"]
    first: Float[AnyArray, "*m a w"]
    hidden: Float[AnyArray, "*m l w w"]
    biases: Float[AnyArray, "*m layers w"]
    out: Float[AnyArray, "*m w o"]
    skip: Float[AnyArray, "*m a o"]
    shift: Float[AnyArray, "*m o"]
    layout: Layout | None = None
    correction: Float[AnyArray, "*m u c"] | None = None
    pieces: Float[AnyArray, "*m at w"] | None = None
    knots: Float[AnyArray, "*m a k"] | None = None

    @classmethod
    def draw(
        cls,
        condition_dim: int,
        orders: Int[np.ndarray, "m d"],
        layout: Layout,
        *,
        width: int,
        depth: int,
        seed: int,
        z: Float[np.ndarray, "n d"] | None = None,
        knots: Float[np.ndarray, "m a k"] | None = None,
    ) -> "Chain":
        """Return stacked members with random weights, whose laws hardly depend on the condition.

        Labels and atoms have their frequencies among the rows z. Random numbers are drawn in the order of
        the chain. ``knots`` are those of ``piecewise_knots`` of every member.
        """
        members, rng = len(orders), np.random.default_rng(seed)
        owners, own = layout.encoding.owners, layout.output_owners
        inputs = condition_dim + len(owners)
        normal = lambda scale, *shape: (scale * rng.standard_normal((members, *shape))).astype(np.float32)
        zeros = lambda *shape: np.zeros((members, *shape), np.float32)
        drawn, hidden = normal(np.sqrt(2.0 / inputs), inputs, width), (depth - 1, width, width)
        hidden_weights, out = normal(np.sqrt(2.0 / width), *hidden), normal(0.01, width, len(own))
        first = drawn.copy()
        for k, places in enumerate(np.argsort(orders, axis=1)):
            first[k, condition_dim + np.argsort(places[owners], kind="stable")] = drawn[k, condition_dim:]
            out[k][:, np.argsort(places[own], kind="stable")] = out[k].copy()
        start = layout.start(np.zeros((0, layout.dim)) if z is None else z).astype(np.float32)
        encoded = 0 if knots is None else inputs * (knots.shape[2] - 1)
        return cls(
            orders,
            first,
            hidden_weights,
            zeros(depth, width),
            out,
            zeros(inputs, len(own)),
            zeros(len(own)) + start,
            layout,
            pieces=normal(np.sqrt(2.0 / encoded), encoded, width) if encoded else None,
            knots=None if knots is None else knots.astype(np.float32),
        )

    @property
    def dim(self) -> int:
        """Return the number of columns."""
        return self.order.shape[-1]

    @property
    def columns(self) -> Layout:
        """Return the layout of the columns."""
        if self.layout is None:
            raise ValueError("these are weights without a layout: use within(layout).")
        return self.layout

    def within(self, layout: Layout | None) -> "Chain":
        """Return the weights with this layout."""
        return dataclasses.replace(self, layout=layout)

    def member(self, k: int | Int[AnyArray, "*k"]) -> "Chain":
        """Return one or some of several stacked members."""
        return jax.tree.map(lambda leaf: leaf[k], self.within(None)).within(self.layout)

    def penalty(self) -> Float[AnyArray, ""]:
        """Return the sum of squares of the penalised weights."""
        return (self.columns.penalised * self.out**2).sum()

    def masks(self) -> Masks:
        """Return the masks of the network."""
        xp, owners = self.order.__array_namespace__(), self.columns.encoding.owners
        p, places = self.first.shape[0] - len(owners), xp.argsort(self.order)
        inputs = xp.concatenate([np.zeros(p, int), places[owners] + 1])
        degrees = _degrees(p, self.dim, self.first.shape[1])
        outputs = places[self.columns.output_owners]
        sees = lambda low, high: (low[:, None] <= high[None]).astype(np.float32)
        hidden, out, first = sees(degrees, degrees), sees(degrees, outputs), sees(inputs, degrees)
        pieces = None if self.knots is None else xp.repeat(first, self.knots.shape[1] - 1, axis=0)
        return Masks(places, degrees, first, pieces, hidden, out, sees(inputs, outputs))

    def rows(self, y: Float[AnyArray, "n d"], x: Float[AnyArray, "n p"]) -> Float[AnyArray, "n a"]:
        """Return the inputs of the network: the condition and the encoded columns."""
        return y.__array_namespace__().concatenate([x, self.columns.encoding(y)], axis=1)

    def units(
        self, rows: Float[AnyArray, "n a"], masks: Masks, dropout: Callable = keep_all
    ) -> Float[AnyArray, "n w"]:
        """Return the last hidden layer; ``dropout(units, layer)`` may drop units of a layer."""
        dtype = rows.dtype
        entering = rows @ (self.first * masks.first).astype(dtype) + self.biases[0].astype(dtype)
        if self.pieces is not None:
            entering = entering + piecewise(rows, self.knots) @ (self.pieces * masks.pieces).astype(dtype)
        h = dropout(silu(entering), 0)
        for layer in range(1, len(self.biases)):
            weight = (self.hidden[layer - 1] * masks.hidden).astype(dtype)
            h = dropout(h + silu(h @ weight + self.biases[layer].astype(dtype)), layer)
        return h

    def outputs(
        self, rows: Float[AnyArray, "n a"], dropout: Callable = keep_all
    ) -> tuple[list[AnyArray], AnyArray]:
        """Return the outputs of each family and the logits of atoms, as ``Layout.split`` does."""
        masks, dtype = self.masks(), rows.dtype
        h = self.units(rows, masks, dropout)
        outputs = h @ (self.out * masks.out).astype(dtype) + rows @ (self.skip * masks.skip).astype(dtype)
        outputs = outputs + self.shift.astype(dtype)
        if self.correction is None:
            return self.columns.split(outputs)
        seen = masks.degrees[:, None] <= masks.places[self.columns.corrected_owners]
        added = h @ (self.correction[1:] * seen).astype(dtype) + self.correction[0].astype(dtype)
        return self.columns.split(outputs, added)

    def log_densities(
        self,
        y: Float[AnyArray, "n d"],
        x: Float[AnyArray, "n p"],
        *,
        cells: int | None = None,
        dropout: Callable = keep_all,
    ) -> Float[AnyArray, "n d"]:
        """Return ``log p(y_j | columns before, x)`` of every column; 0 where a cell is missing.

        By default each family has as many cells as it needs.
        """
        return self.columns.log_densities(*self.outputs(self.rows(y, x), dropout), y, cells)

    def single(self, x: Float[AnyArray, "n p"]) -> tuple[AnyArray, Float[AnyArray, " n"] | None]:
        """Return the outputs for a single column, and the probability of its atom."""
        rows = x.__array_namespace__().concatenate(
            [x, np.zeros((len(x), len(self.columns.encoding.owners)))], axis=1
        )
        (outputs,), logits = self.outputs(rows)
        return outputs[:, 0], _sigmoid(logits[:, 0]) if self.columns.atoms else None

    def law(self, x: Float[np.ndarray, "n p"]) -> tuple[PiecewiseLaw, np.ndarray | None]:
        """Return the law of a single column without its atom, and the probability of the atom."""
        outputs, chance = self.single(x)
        return self.columns.families[0].at(0).law(outputs, None), chance

    def sample(
        self,
        x: Float[np.ndarray, "n p"],
        levels: Float[np.ndarray, "n d"],
        *,
        cells: int | None = None,
        known: Float[np.ndarray, "n d"] | None = None,
    ) -> ChainDraws:
        """Return one row per condition: each column's quantile at its level, given the columns before it.

        The j-th column of ``levels`` is for the j-th column of the chain. Cells that are ``known`` (not NaN)
        are kept. ``log_weight`` is their log density, each given the cells before it: its exponential is an
        unbiased estimate of the density of the known cells. Every hidden unit is computed once.
        """
        layout, (count, p) = self.columns, x.shape
        encoding, owners = layout.encoding, layout.encoding.owners
        rows = np.concatenate([x, np.zeros((count, len(owners)))], axis=1).astype(np.float32)
        units = UnitsByDegree(self, _degrees(p, self.dim, self.first.shape[1]), count)
        targets, totals = np.zeros((count, self.dim)), np.zeros((2, count))
        for j, column in enumerate(map(int, self.order)):
            law = self._column_law(column, units, units.up_to(j, rows), rows)
            values, log_drawn = law.drawn(levels[:, j], cells)
            if known is not None and not np.all(np.isnan(given := known[:, column])):
                there = ~np.isnan(given)
                values = np.where(there, given, values)
                totals[1] += np.where(there, law.log_density(values, cells), 0.0)
                log_drawn = np.where(there, 0.0, log_drawn)
            totals[0] += log_drawn
            targets[:, column] = values
            inputs = encoding.only(column)(targets[:, [column]].astype(np.float32))
            rows[:, p + np.flatnonzero(owners == column)] = inputs
        return ChainDraws(targets, *totals)

    def _column_law(self, column: int, units: "UnitsByDegree", h: np.ndarray, rows: np.ndarray) -> AtomLaw:
        """Return the law of one column, given the units that it depends on."""
        layout, (f, place) = self.columns, self.columns.place(column)
        linear = lambda part: h @ units.out[: h.shape[1], part] + rows @ self.skip[:, part] + self.shift[part]
        *own, last = np.flatnonzero(layout.output_owners == column)
        logit = linear(slice(last, last + 1))[:, 0] if column in layout.atoms else None
        outputs = linear(slice(own[0], own[0] + layout.families[f].outputs))
        if self.correction is not None and units.correction is not None and layout.families[f].corrections:
            part = layout.corrected_owners == column
            added = h @ units.correction[: h.shape[1], part] + self.correction[0, part]
            outputs = np.concatenate([outputs, added], axis=1)
        return AtomLaw(layout.families[f].at(place), outputs, logit)

    def drawn(
        self, x: Float[Array, "n p"], levels: Float[Array, "n d"], *, cells: int | None = None
    ) -> Float[Array, "n d"]:
        """Return rows as ``sample`` does, as a pure function of traced arrays, the order included.

        The network is evaluated once per column.
        """
        layout = jax.tree.map(jnp.asarray, self.columns)
        traced, targets = self.within(layout), jnp.zeros_like(levels)
        for j in range(self.dim):
            column = jnp.asarray(self.order)[j]
            parts, logits = traced.outputs(traced.rows(targets, x))
            value = jnp.zeros_like(levels[:, j])
            for family, outputs in zip(layout.families, parts, strict=True):
                own = jnp.asarray(family.columns) == column
                place, logit = jnp.argmax(own), None
                if set(family.columns) & set(layout.atoms):
                    at = jnp.asarray(layout.atoms) == column
                    logit = jnp.where(at.any(), logits[:, jnp.argmax(at)], -jnp.inf)
                found = AtomLaw(family.at(place), outputs[:, place], logit).drawn(levels[:, j], cells)[0]
                value = jnp.where(own.any(), found, value)
            targets = targets.at[:, column].set(value)
        return targets


def piecewise_knots(rows: Float[np.ndarray, "n a"], pieces: int) -> Float[np.ndarray, "a k"]:
    """Return quantiles of each input, between which ``piecewise`` is linear.

    Inputs with few values, such as indicators of labels, have equal knots: their encoding is zero.
    """
    levels = np.linspace(0.0, 1.0, pieces + 1)
    found = [np.quantile(column[np.isfinite(column)], levels) for column in rows.T]
    few = [len(np.unique(knots)) < min(pieces, FEWEST_KNOTS) for knots in found]
    return np.where(np.array(few, bool)[:, None], 0.0, np.reshape(found, (-1, pieces + 1)))


def piecewise(rows: Float[AnyArray, "n a"], knots: Float[AnyArray, "a k"]) -> Float[AnyArray, "n at"]:
    """Return the share of each interval between knots that lies below an input, 0 where knots are equal.

    This is the piecewise-linear encoding of Gorishniy, Rubachev and Babenko (2022).
    """
    xp = rows.__array_namespace__()
    knots = knots.astype(rows.dtype)
    widths = knots[:, 1:] - knots[:, :-1]
    slopes = xp.where(widths > 0.0, 1.0 / xp.where(widths > 0.0, widths, 1.0), 0.0)
    return xp.clip((rows[:, :, None] - knots[:, :-1]) * slopes, 0.0, 1.0).reshape(len(rows), -1)


class UnitsByDegree:
    """The hidden layers of a chain under some rows, computed by degree: a unit of degree j needs j columns.

    Units are sorted by degree, so that those that are computed come first and no mask is needed: inputs that
    a unit or an output does not depend on are not computed yet. ``out`` and ``correction`` are the weights
    of the chain in this order.
    """

    def __init__(self, chain: Chain, degrees: Int[np.ndarray, " w"], rows: int):
        order = np.argsort(degrees, kind="stable")
        self.out = chain.out[order]
        self.correction = None if chain.correction is None else chain.correction[1:][order]
        self._degrees = degrees[order]
        self._first, self._pieces, self._knots = chain.first[:, order], None, chain.knots
        if chain.pieces is not None:
            self._pieces = (chain.pieces * chain.masks().pieces)[:, order]
        self._biases = chain.biases[:, order]
        self._hidden = chain.hidden[:, order][:, :, order]
        self._layers = np.zeros((len(chain.biases), rows, len(degrees)), np.float32)
        self._done = 0

    def up_to(self, degree: int, inputs: Float[np.ndarray, "n a"]) -> Float[np.ndarray, "n u"]:
        """Return the last layer's units of at most this degree; inputs are zero where they are not known."""
        old, self._done = self._done, int(np.searchsorted(self._degrees, degree, side="right"))
        done, new = slice(self._done), slice(old, self._done)
        entering = inputs @ self._first[:, new] + self._biases[0][new]
        if self._knots is not None and self._pieces is not None:
            entering = entering + piecewise(inputs, self._knots) @ self._pieces[:, new]
        self._layers[0][:, new] = silu(entering)
        for layer in range(1, len(self._layers)):
            below = self._layers[layer - 1]
            entering = below[:, done] @ self._hidden[layer - 1][done, new] + self._biases[layer][new]
            self._layers[layer][:, new] = below[:, new] + silu(entering)
        return self._layers[-1][:, done]


def _log_sigmoid(x: AnyArray) -> AnyArray:
    return -x.__array_namespace__().logaddexp(x.__array_namespace__().zeros_like(x), -x)


def _sigmoid(x: AnyArray) -> AnyArray:
    return x.__array_namespace__().exp(_log_sigmoid(x))
