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

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kexpfam.data.kinds import Real
from kexpfam.data.sample import AnyArray, PlainModule
from kexpfam.data.scaling import InputEncoding, Scaling
from kexpfam.model.families import BUMPS, FAMILIES, AbstractFamily
from kexpfam.model.networks import silu

# Inputs with fewer distinct knots have no piecewise-linear encoding.
FEWEST_KNOTS = 4


def keep_all(units: Float[AnyArray, "n w"], layer: int) -> Float[AnyArray, "n w"]:
    """Return the units of a layer without dropout."""
    return units


class Layout(PlainModule):
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

    def split(self, outputs: Float[AnyArray, "n o"]) -> tuple[list[AnyArray], AnyArray]:
        """Return the outputs of each family, (rows, columns, outputs), and the logits of atoms."""
        parts, start = [], 0
        for family in self.families:
            end = start + len(family.columns) * family.outputs
            parts.append(outputs[:, start:end].reshape(len(outputs), len(family.columns), -1))
            start = end
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

    def log_density(self, z: Float[AnyArray, " n"], cells: int | None) -> AnyArray:
        """Return the log density of values."""
        xp = z.__array_namespace__()
        atom = xp.isinf(z)
        safe = xp.where(atom, 0.0, z).astype(self.outputs.dtype)
        found = self.family.log_density(self.outputs, safe, cells)
        if self.logit is None:
            return found
        return xp.where(atom, _log_sigmoid(self.logit), found + _log_sigmoid(-self.logit))

    @property
    def chance(self) -> Float[AnyArray, " n"] | None:
        """Return the probability of the atom."""
        return None if self.logit is None else _sigmoid(self.logit)

    def completed(
        self, given: Float[np.ndarray, " n"], levels: Float[np.ndarray, " n"], cells: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the given values, drawn ones where they are NaN, and the log densities of drawn and of given
        values, 0 for the others."""
        values, log_drawn, log_known = given.astype(float), np.zeros(len(given)), np.zeros(len(given))
        missing = np.isnan(given)
        if missing.any():
            values[missing], log_drawn[missing] = self._of(missing).drawn(levels[missing], cells)
        if not missing.all():
            log_known[~missing] = self._of(~missing).log_density(values[~missing], cells)
        return values, log_drawn, log_known

    def _of(self, rows: Bool[np.ndarray, " n"]) -> "AtomLaw":
        """Return the law of some rows."""
        logit = None if self.logit is None else self.logit[rows]
        return AtomLaw(self.family, self.outputs[rows], logit)


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


class Chain(PlainModule):
    """A law of columns under a condition; one member of an ensemble, or several along a first axis.

    ``order`` are the columns in the order of the chain. Weights are inputs times outputs. ``layout`` is not
    learned, and is absent while the weights are. With ``knots`` each input has a piecewise-linear encoding
    too, whose weights in the first layer are ``pieces``. ``sees`` are factors of the condition, 0 for what a
    member does not use.
    """

    order: Int[AnyArray, "*m d"]
    first: Float[AnyArray, "*m a w"]
    hidden: Float[AnyArray, "*m l w w"]
    biases: Float[AnyArray, "*m layers w"]
    out: Float[AnyArray, "*m w o"]
    skip: Float[AnyArray, "*m a o"]
    shift: Float[AnyArray, "*m o"]
    layout: Layout | None = None
    pieces: Float[AnyArray, "*m at w"] | None = None
    knots: Float[AnyArray, "*m a k"] | None = None
    sees: Float[AnyArray, "*m p"] | None = None

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
        sees: Float[np.ndarray, "m p"] | None = None,
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
            sees=None if sees is None else sees.astype(np.float32),
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
        return y.__array_namespace__().concatenate([self.seen(x), self.columns.encoding(y)], axis=1)

    def seen(self, x: Float[AnyArray, "n p"]) -> Float[AnyArray, "n p"]:
        """Return the condition, zero where the member does not use it."""
        return x if self.sees is None else x * self.sees.astype(x.dtype)

    def masked(self) -> "MaskedChain":
        """Return the weights times their masks."""
        masks, parts = self.masks(), dict(vars(self))
        if self.pieces is not None:
            parts["pieces"] = self.pieces * masks.pieces
        for name in ("first", "hidden", "out", "skip"):
            parts[name] = parts[name] * getattr(masks, name)
        return MaskedChain(**parts)

    def outputs(
        self, rows: Float[AnyArray, "n a"], dropout: Callable = keep_all
    ) -> tuple[list[AnyArray], AnyArray]:
        """Return the outputs of each family and the logits of atoms, as ``Layout.split`` does.

        ``dropout(units, layer)`` may drop units of a layer.
        """
        return self.masked().outputs(rows, dropout)

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

    def single(self, x: Float[AnyArray, "n p"]) -> AtomLaw:
        """Return the law of a single column."""
        rows = x.__array_namespace__().concatenate(
            [self.seen(x), np.zeros((len(x), len(self.columns.encoding.owners)))], axis=1
        )
        (outputs,), logits = self.outputs(rows)
        logit = logits[:, 0] if self.columns.atoms else None
        return AtomLaw(self.columns.families[0].at(0), outputs[:, 0], logit)

    def sample(
        self,
        x: Float[np.ndarray, "n p"],
        levels: Float[np.ndarray, "n d"],
        *,
        cells: int | None = None,
        known: Float[np.ndarray, "n d"] | None = None,
    ) -> ChainDraws:
        """Return one row per condition, as ``ChainSampler.sample`` does."""
        return ChainSampler(self).sample(x, levels, cells=cells, known=known)

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


class MaskedChain(Chain):
    """A chain whose weights were multiplied by their masks."""

    def masked(self) -> "MaskedChain":
        return self

    def units(self, rows: Float[AnyArray, "n a"], dropout: Callable = keep_all) -> Float[AnyArray, "n w"]:
        """Return the last hidden layer."""
        dtype = rows.dtype
        entering = rows @ self.first.astype(dtype) + self.biases[0].astype(dtype)
        if self.pieces is not None:
            entering = entering + piecewise(rows, self.knots) @ self.pieces.astype(dtype)
        h = dropout(silu(entering), 0)
        for layer in range(1, len(self.biases)):
            entering = h @ self.hidden[layer - 1].astype(dtype) + self.biases[layer].astype(dtype)
            h = dropout(h + silu(entering), layer)
        return h

    def outputs(
        self, rows: Float[AnyArray, "n a"], dropout: Callable = keep_all
    ) -> tuple[list[AnyArray], AnyArray]:
        dtype, h = rows.dtype, self.units(rows, dropout)
        outputs = h @ self.out.astype(dtype) + rows @ self.skip.astype(dtype) + self.shift.astype(dtype)
        return self.columns.split(outputs)


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
    return xp.clip((rows[:, :, None] - knots[:, :-1]) * slopes, 0.0, 1.0).reshape(len(rows), widths.size)


class Link(NamedTuple):
    """One column of a chain as a sampler draws it: its law, its outputs and the inputs that it determines."""

    column: int
    family: AbstractFamily
    atom: bool  # the last output is the logit of the atom
    out: Float[np.ndarray, "u o"]
    skip: Float[np.ndarray, "a o"]
    shift: Float[np.ndarray, " o"]
    encoding: InputEncoding
    places: Int[np.ndarray, " i"]  # of its inputs

    @classmethod
    def of(cls, chain: Chain, column: int, units: Int[np.ndarray, " u"]) -> "Link":
        """Return the link of a column that depends on these units of a member."""
        layout, (f, place) = chain.columns, chain.columns.place(column)
        own = layout.output_owners == column
        out, skip, shift = chain.out[units][:, own], chain.skip[:, own], chain.shift[own]
        owners = layout.encoding.owners
        places = len(chain.skip) - len(owners) + np.flatnonzero(owners == column)
        out, skip, shift = (part.astype(np.float32) for part in (out, skip, shift))
        family, atom = layout.families[f].at(place), column in layout.atoms
        return cls(column, family, atom, out, skip, shift, layout.encoding.only(column), places)

    def law(self, units: Float[np.ndarray, "n u"], inputs: Float[np.ndarray, "n a"]) -> AtomLaw:
        """Return the law of the column in each row."""
        outputs = units @ self.out + inputs @ self.skip + self.shift
        if self.atom:
            return AtomLaw(self.family, outputs[:, :-1], outputs[:, -1])
        return AtomLaw(self.family, outputs, None)


class Pass(NamedTuple):
    """Inputs and hidden units of rows, as far as their columns are there."""

    inputs: Float[np.ndarray, "n a"]
    layers: Float[np.ndarray, "layers n w"]


class ChainSampler:
    """Draws of one member, whose weights are sorted once.

    Hidden units are sorted by degree: a unit of degree j needs j columns. Each is computed once, and needs no
    mask, because inputs that are not drawn yet are zero.
    """

    def __init__(self, chain: Chain):
        width, inputs = chain.first.shape[1], len(chain.first)
        degrees = _degrees(inputs - len(chain.columns.encoding.owners), chain.dim, width)
        order = np.argsort(degrees, kind="stable")
        self._knots, self._sees = chain.knots, chain.sees
        self._first = chain.first if chain.pieces is None else np.concatenate([chain.first, chain.pieces])
        self._first, self._biases = self._first[:, order], chain.biases[:, order]
        self._hidden = chain.hidden[:, order][:, :, order]
        self._ends = np.searchsorted(degrees[order], np.arange(chain.dim), side="right")
        both = zip(map(int, chain.order), self._ends, strict=True)
        self._links = [Link.of(chain, column, order[:end]) for column, end in both]

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
        unbiased estimate of the density of the known cells.
        """
        state = self._begun(x)
        targets, totals = np.zeros((len(x), len(self._links))), np.zeros((2, len(x)))
        for j, link in enumerate(self._links):
            law = self._law(state, j)
            if known is None:
                values, log_drawn = law.drawn(levels[:, j], cells)
            else:
                values, log_drawn, log_known = law.completed(known[:, link.column], levels[:, j], cells)
                totals[1] += log_known
            totals[0] += log_drawn
            targets[:, link.column] = values
            self._enter(state.inputs, link.encoding(values[:, None].astype(np.float32)), link.places)
        return ChainDraws(targets, *totals)

    def log_weights(
        self,
        x: Float[np.ndarray, "n p"],
        known: Float[np.ndarray, "n d"],
        levels: Float[np.ndarray, "count d"],
    ) -> Float[np.ndarray, "n weights"]:
        """Return the log density of the known cells of rows, each given the cells before it, when the unknown
        cells are their quantiles at these levels.

        All rows have the same known columns. Columns before the first unknown one are computed once per row,
        and those after the last known one are left out; where no unknown column is left, a row has the exact
        log density of its known cells, once.
        """
        missing = np.isnan(known[0])[[link.column for link in self._links]]
        end = len(missing) - int(np.argmin(missing[::-1]))
        state, total = self._begun(x), np.zeros(len(x))
        for j, link in enumerate(self._links[:end]):
            if missing[j] and len(total) == len(x):
                repeated = lambda part: np.repeat(part, len(levels), axis=-2)
                state, total = Pass(*map(repeated, state)), np.repeat(total, len(levels))
            law, each = self._law(state, j), len(total) // len(x)
            if missing[j]:
                values = law.drawn(np.tile(levels[:, j], len(x)), None)[0]
            else:
                values = np.repeat(known[:, link.column], each).astype(float)
                total += law.log_density(values, None)
            self._enter(state.inputs, link.encoding(values[:, None].astype(np.float32)), link.places)
        return total.reshape(len(x), -1)

    def _begun(self, x: Float[np.ndarray, "n p"]) -> Pass:
        """Return the pass before the first column, with the condition among the inputs."""
        inputs = np.zeros((len(x), len(self._first)), np.float32)
        layers = np.zeros((len(self._biases), len(x), self._first.shape[1]), np.float32)
        seen = x if self._sees is None else x * self._sees
        self._enter(inputs, seen.astype(np.float32), np.arange(x.shape[1]))
        return Pass(inputs, layers)

    def _law(self, state: Pass, place: int) -> AtomLaw:
        """Return the law of the column at this place of the chain."""
        link = self._links[place]
        return link.law(self._units(*state, place), state.inputs[:, : len(link.skip)])

    def _enter(
        self, inputs: np.ndarray, values: Float[np.ndarray, "n i"], places: Int[np.ndarray, " i"]
    ) -> None:
        """Write inputs and their piecewise-linear encoding in place."""
        inputs[:, places] = values
        if self._knots is not None and len(places):
            pieces, plain = self._knots.shape[1] - 1, len(self._knots)
            own = plain + pieces * places[:, None] + np.arange(pieces)
            inputs[:, own.ravel()] = piecewise(values, self._knots[places])

    def _units(self, inputs: np.ndarray, layers: np.ndarray, degree: int) -> Float[np.ndarray, "n u"]:
        """Return the last layer's units of at most this degree; compute those of this degree in place."""
        done = slice(self._ends[degree])
        new = slice(self._ends[degree - 1] if degree else 0, self._ends[degree])
        layers[0][:, new] = silu(inputs @ self._first[:, new] + self._biases[0][new])
        for layer in range(1, len(layers)):
            below = layers[layer - 1]
            entering = below[:, done] @ self._hidden[layer - 1][done, new] + self._biases[layer][new]
            layers[layer][:, new] = below[:, new] + silu(entering)
        return layers[-1][:, done]


def _log_sigmoid(x: AnyArray) -> AnyArray:
    return -x.__array_namespace__().logaddexp(x.__array_namespace__().zeros_like(x), -x)


def _sigmoid(x: AnyArray) -> AnyArray:
    return x.__array_namespace__().exp(_log_sigmoid(x))
