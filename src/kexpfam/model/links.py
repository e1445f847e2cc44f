r"""How a link of a chain turns the outputs of a network into a law of its column, kind by kind.

A family holds several columns of one kind, so that they are computed together:

- lines: a tilted location-scale residual on cells (``model.chain``), cut at the support;
- lattices: whole numbers, each with the mass that such a residual has between its neighbours' halves;
- circles: :math:`p(\theta) \propto \exp(c \cdot \psi(\theta))` with Fourier features, continuous across the seam;
- labels: :math:`p(k) \propto \exp(c_k)`.

Values are in the units of ``data.units``.
"""

import abc
import dataclasses
from functools import lru_cache
from typing import NamedTuple, Self

import equinox as eqx
import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from kexpfam.data.sample import AnyArray
from kexpfam.model.chain import FEATURES, HEAD, Told
from kexpfam.model.measures import logsumexp

__all__ = ["AbstractFamily", "Circles", "Labels", "Lattices", "Lines", "Steps"]

# Harmonics of a density on the circle, the length scale (radians) of the kernel whose spectrum damps them, the largest weight
# of the first one, which bounds how narrow a peak is, and the norm in the RKHS that the others approach.
HARMONICS, ARC, LARGEST_CONCENTRATION, LARGEST_NORM = 8, 0.35, 500.0, 25.0
# Harmonics of an angle that a network sees.
SEEN_HARMONICS = 2
# Unit steps of whole numbers, in units of the arcsinh that spaces them, that are tried.
SPACINGS = (0.5, 1.0, 2.0, 5.0, 20.0, 100.0)
# Whole numbers whose probabilities are listed, at most; beyond them the law is that of its tails.
MOST_STEPS = 2048
# Beyond this, numbers have no halves.
LARGEST_WHOLE = 2.0**52
# Steps of whole numbers below this (in residuals) are lengths: there the mass is the density times the step.
SMALL_STEP = 0.05
# An open end of a support, in model units: at infinity, gradients would be infinity times zero.
FAR = 1e6

Bounds = tuple[float, ...]


class Steps(NamedTuple):
    """A distribution function in a column's units, row by row: the points where it bends or jumps, and its levels there."""

    points: np.ndarray  # (n, m)
    levels: np.ndarray  # (n, m)


class AbstractFamily(eqx.Module):
    """Links of one kind; ``columns`` are theirs, in the order of the table."""

    columns: tuple[int, ...] = eqx.field(static=True)

    @property
    @abc.abstractmethod
    def outputs(self) -> int:
        """Return how many numbers a link needs."""

    @property
    def penalised(self) -> slice:
        """Return those of them that a fit keeps small."""
        return slice(None)

    @property
    def inputs(self) -> int:
        """Return how many numbers stand for a value in a network."""
        return 1

    def embedded(self, z: Float[AnyArray, "n g"]) -> Float[AnyArray, "n g e"]:
        """Return the numbers that stand for values in a network."""
        return z[..., None]

    def only(self, place: int) -> Self:
        """Return the family of one of the columns alone."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own = {name: (part[place],) for name, part in parts.items() if isinstance(part, tuple)}
        return dataclasses.replace(self, **own)

    def start(self, z: Float[np.ndarray, "n g"]) -> Float[np.ndarray, "g o"]:
        """Return outputs to begin with, by values of which some are missing or atoms."""
        return np.zeros((len(self.columns), self.outputs))

    @abc.abstractmethod
    def log_density(
        self, told: Float[AnyArray, "n g o"], z: Float[AnyArray, "n g"], cells: int
    ) -> Float[AnyArray, "n g"]:
        """Return the log density of each value."""

    @abc.abstractmethod
    def drawn(
        self, told: Float[np.ndarray, "n o"], place: int, cells: int, levels: Float[np.ndarray, " n"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return values of one column at these levels of their distribution functions, and their log density as drawn."""

    @abc.abstractmethod
    def steps(self, told: Float[np.ndarray, "n o"], place: int, cells: int) -> Steps:
        """Return the distribution function of one column."""


class Lines(AbstractFamily):
    """Real numbers between bounds, which may be infinite; the tails of logarithms are ``thin``."""

    low: Bounds = eqx.field(static=True)
    high: Bounds = eqx.field(static=True)
    thin: bool = eqx.field(static=True, default=False)

    @property
    def outputs(self) -> int:
        return HEAD + FEATURES

    @property
    def penalised(self) -> slice:
        return slice(HEAD, None)

    def support(self) -> Float[np.ndarray, "2 g"] | None:
        """Return the ends of the supports, if there are any."""
        ends = np.array([self.low, self.high])
        return np.clip(ends, -FAR, FAR) if np.any(np.isfinite(ends)) else None

    def log_density(
        self, told: Float[AnyArray, "n g o"], z: Float[AnyArray, "n g"], cells: int
    ) -> Float[AnyArray, "n g"]:
        return Told.of(told, self.support(), thin=self.thin).log_density(z, cells)

    def drawn(
        self, told: Float[np.ndarray, "n o"], place: int, cells: int, levels: Float[np.ndarray, " n"]
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._one(told, place).drawn(cells, levels)

    def steps(self, told: Float[np.ndarray, "n o"], place: int, cells: int) -> Steps:
        one = self._one(told, place)
        edges, masses = one.cells(cells)
        return Steps(one.in_units(edges), _cumulative(masses))

    def _one(self, told: Float[np.ndarray, "n o"], place: int) -> Told:
        support = self.support()
        return Told.of(told, None if support is None else support[:, place], thin=self.thin)


class Lattices(AbstractFamily):
    """Whole numbers k between bounds; residuals are of ``z = (arcsinh((k - shift) / spacing) - centre) / spread``."""

    low: Bounds = eqx.field(static=True)
    high: Bounds = eqx.field(static=True)
    shift: Bounds = eqx.field(static=True)
    spacing: Bounds = eqx.field(static=True)
    centre: Bounds = eqx.field(static=True)
    spread: Bounds = eqx.field(static=True)
    seen: tuple[tuple[float, float], ...] = eqx.field(static=True)

    @classmethod
    def of(
        cls, columns: tuple[int, ...], values: Float[np.ndarray, "n g"], support: Float[np.ndarray, "2 g"]
    ) -> "Lattices":
        """Return the family of these columns, spaced so that their values are as close to rounded normals as can be."""
        seen = [column[np.isfinite(column)] for column in values.T]
        ends = tuple(
            (float(column.min()), float(column.max())) if len(column) else (0.0, 1.0) for column in seen
        )
        fitted = [_spaced(column if len(column) else np.arange(2.0)) for column in seen]
        low, high = (tuple(map(float, side)) for side in np.clip(support, -LARGEST_WHOLE, LARGEST_WHOLE))
        shift, spacing, centre, spread = (tuple(part) for part in zip(*fitted, strict=True))
        return cls(columns, low, high, shift, spacing, centre, spread, ends)

    @property
    def outputs(self) -> int:
        return HEAD + FEATURES

    @property
    def penalised(self) -> slice:
        return slice(HEAD, None)

    def embedded(self, z: Float[AnyArray, "n g"]) -> Float[AnyArray, "n g e"]:
        return self.spaced(z)[..., None]

    def log_density(
        self, told: Float[AnyArray, "n g o"], z: Float[AnyArray, "n g"], cells: int
    ) -> Float[AnyArray, "n g"]:
        return self._log_masses(told, z, slice(None), cells)

    def drawn(
        self, told: Float[np.ndarray, "n o"], place: int, cells: int, levels: Float[np.ndarray, " n"]
    ) -> tuple[np.ndarray, np.ndarray]:
        found = Told.of(told, self._support(place), thin=True).drawn(cells, levels)[0].astype(float)
        whole = np.clip(np.round(self._unspaced(found, place)), self.low[place], self.high[place])
        return whole, self._log_masses(told, whole.astype(told.dtype), place, cells)

    def steps(self, told: Float[np.ndarray, "n o"], place: int, cells: int) -> Steps:
        (least, most), reach = self.seen[place], min(max(np.ptp(self.seen[place]), 10.0), MOST_STEPS)
        ends = max(self.low[place], least - reach), min(self.high[place], most + reach)
        values = np.unique(np.round(np.linspace(*ends, int(min(ends[1] - ends[0] + 1, MOST_STEPS)))))
        one = Told.of(told, self._support(place), thin=True)
        edges, masses = one.cells(cells)
        rows = np.broadcast_to(self.spaced(values + 0.5, place), (len(told), len(values)))
        each = zip(rows, one.in_units(edges), _cumulative(masses), strict=True)
        upto = [np.interp(row, points, level) for row, points, level in each]
        levels = np.clip(np.stack(upto), 0.0, 1.0)
        levels[:, -1] = 1.0
        below = np.concatenate([np.zeros((len(told), 1)), levels[:, :-1]], axis=1)
        doubled = np.stack([below, levels], axis=2).reshape(len(told), -1)
        return Steps(np.broadcast_to(np.repeat(values, 2), doubled.shape), doubled)

    def spaced(self, k: Float[AnyArray, "..."], place: int | slice = slice(None)) -> Float[AnyArray, "..."]:
        """Return z of whole numbers, or of their halves."""
        shift, spacing, centre, spread = (np.asarray(part, k.dtype)[place] for part in self._map)
        return (k.__array_namespace__().arcsinh((k - shift) / spacing) - centre) / spread

    def _unspaced(self, z: np.ndarray, place: int) -> np.ndarray:
        shift, spacing, centre, spread = (part[place] for part in self._map)
        return shift + spacing * np.sinh(centre + spread * z)

    @property
    def _map(self) -> tuple[Bounds, Bounds, Bounds, Bounds]:
        return self.shift, self.spacing, self.centre, self.spread

    def _support(self, place: int | slice) -> Float[np.ndarray, "2 ..."]:
        ends = np.array([self.low, self.high])[:, place] + np.array([-0.5, 0.5]).reshape(
            2, *[1] * isinstance(place, slice)
        )
        return np.clip(np.stack([self.spaced(side, place) for side in ends]), -FAR, FAR)

    def _log_masses(self, told: AnyArray, k: AnyArray, place: int | slice, cells: int) -> AnyArray:
        """Return the log mass that the residual has from ``k - 1/2`` to ``k + 1/2``."""
        xp, whole = k.__array_namespace__(), Told.of(told, self._support(place), thin=True)
        shrink, z, step = xp.exp(-whole.log_scale), self.spaced(k, place), self._step(k, place)
        low, high = ((self.spaced(k + half, place) - whole.location) * shrink for half in (-0.5, 0.5))
        low, high = xp.maximum(low, whole.low), xp.minimum(high, whole.high)
        between = whole._replace(low=low, high=high)
        masses = logsumexp(between.exponents(cells)) - logsumexp(whole.exponents(cells))
        return xp.where(step * shrink < SMALL_STEP, whole.log_density(z, cells) + xp.log(step), masses)

    def _step(self, k: AnyArray, place: int | slice) -> AnyArray:
        """Return the distance of neighbours, in units of z, where they are close."""
        shift, spacing, _, spread = (np.asarray(part, k.dtype)[place] for part in self._map)
        return 1.0 / (spacing * spread * k.__array_namespace__().hypot(k * 0.0 + 1.0, (k - shift) / spacing))


class Circles(AbstractFamily):
    """Angles in radians. The first harmonic has a scale of its own, so that peaks can be narrow."""

    @property
    def outputs(self) -> int:
        return 1 + 2 * HARMONICS

    @property
    def penalised(self) -> slice:
        return slice(3, None)

    @property
    def inputs(self) -> int:
        return 2 * SEEN_HARMONICS

    def embedded(self, z: Float[AnyArray, "n g"]) -> Float[AnyArray, "n g e"]:
        return _harmonics(z, SEEN_HARMONICS)

    def log_density(
        self, told: Float[AnyArray, "n g o"], z: Float[AnyArray, "n g"], cells: int
    ) -> Float[AnyArray, "n g"]:
        weights = _weights(told)
        log_volume = logsumexp(weights @ _grid(cells).astype(told.dtype).T) + np.asarray(
            np.log(2.0 * np.pi / cells), told.dtype
        )
        return (weights * _harmonics(z, HARMONICS)).sum(axis=-1) - log_volume

    def drawn(
        self, told: Float[np.ndarray, "n o"], place: int, cells: int, levels: Float[np.ndarray, " n"]
    ) -> tuple[np.ndarray, np.ndarray]:
        cumulative, rows = self.steps(told, place, cells).levels, np.arange(len(told))
        cell = np.clip((cumulative <= levels[:, None]).sum(axis=1) - 1, 0, cells - 1)
        left = cumulative[rows, cell]
        mass = np.maximum(cumulative[rows, cell + 1] - left, np.finfo(float).tiny)
        step = 2.0 * np.pi / cells
        angle = step * (cell + np.clip((levels - left) / mass, 0.0, 1.0))
        return np.where(angle < 2.0 * np.pi, angle, 0.0), np.log(mass / step)

    def steps(self, told: Float[np.ndarray, "n o"], place: int, cells: int) -> Steps:
        exponents = _weights(told.astype(float)) @ _grid(cells).T
        masses = np.exp(exponents - exponents.max(axis=1, keepdims=True))
        return Steps(
            np.broadcast_to(np.linspace(0.0, 2.0 * np.pi, cells + 1), (len(told), cells + 1)),
            _cumulative(masses),
        )


class Labels(AbstractFamily):
    """Places of labels, of which every column has so many."""

    count: int = eqx.field(static=True)

    @property
    def outputs(self) -> int:
        return self.count

    @property
    def inputs(self) -> int:
        return self.count

    def embedded(self, z: Float[AnyArray, "n g"]) -> Float[AnyArray, "n g e"]:
        return (z[..., None] == np.arange(self.count, dtype=z.dtype)).astype(z.dtype)

    def start(self, z: Float[np.ndarray, "n g"]) -> Float[np.ndarray, "g o"]:
        counts = (z[..., None] == np.arange(self.count)).sum(axis=0) + 1.0
        return np.log(counts / counts.sum(axis=1, keepdims=True))

    def log_density(
        self, told: Float[AnyArray, "n g o"], z: Float[AnyArray, "n g"], cells: int
    ) -> Float[AnyArray, "n g"]:
        return (self.embedded(z) * told).sum(axis=-1) - logsumexp(told)

    def drawn(
        self, told: Float[np.ndarray, "n o"], place: int, cells: int, levels: Float[np.ndarray, " n"]
    ) -> tuple[np.ndarray, np.ndarray]:
        log_masses = told - logsumexp(told)[:, None]
        label = np.minimum(
            (np.cumsum(np.exp(log_masses), axis=1) <= levels[:, None]).sum(axis=1), self.count - 1
        )
        return label.astype(float), log_masses[np.arange(len(told)), label]

    def steps(self, told: Float[np.ndarray, "n o"], place: int, cells: int) -> Steps:
        upto = _cumulative(np.exp(told - logsumexp(told)[:, None]))
        doubled = np.stack([upto[:, :-1], upto[:, 1:]], axis=2).reshape(len(told), -1)
        return Steps(
            np.broadcast_to(np.repeat(np.arange(self.count, dtype=float), 2), doubled.shape), doubled
        )


def _cumulative(masses: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n k"]:
    """Return the levels of a distribution function at the edges of cells with these masses."""
    levels = np.concatenate([np.zeros((len(masses), 1)), np.cumsum(masses.astype(float), axis=1)], axis=1)
    return levels / levels[:, -1:]


def _harmonics(angles: Float[AnyArray, "*n"], count: int) -> Float[AnyArray, "*n k"]:
    """Return cosines and sines of the first multiples of angles, damped by the spectrum of a kernel from the second on."""
    xp, orders = angles.__array_namespace__(), np.arange(1, count + 1)
    damping = np.where(orders > 1, np.exp(-0.25 * (ARC * orders) ** 2), 1.0).astype(angles.dtype)
    waves = angles[..., None] * orders.astype(angles.dtype)
    both = xp.stack([damping * xp.cos(waves), damping * xp.sin(waves)], axis=-1)
    return both.reshape(*angles.shape, 2 * count)


@lru_cache
def _grid(cells: int) -> np.ndarray:
    """Return the harmonics in the middles of even cells of the circle; sums over them are integrals to rounding."""
    return _harmonics((np.arange(cells) + 0.5) * (2.0 * np.pi / cells), HARMONICS)


def _weights(told: Float[AnyArray, "*n o"]) -> Float[AnyArray, "*n k"]:
    """Return the weights of the harmonics: bounded, so that no peak can hide between two cells."""
    xp = told.__array_namespace__()
    first, free = told[..., :2] * xp.exp(xp.clip(told[..., 2:3], -5.0, 7.0)), told[..., 3:]
    bounded = lambda part, limit: part / xp.sqrt(1.0 + xp.sum(part**2, axis=-1, keepdims=True) / limit**2)
    return xp.concatenate([bounded(first, LARGEST_CONCENTRATION), bounded(free, LARGEST_NORM)], axis=-1)


def _spaced(column: np.ndarray) -> tuple[float, float, float, float]:
    """Return shift, spacing, centre and spread under which whole numbers are likeliest as rounded normals."""
    shift, found = float(column.min()), []
    for spacing in (*SPACINGS, 1e3 * max(float(np.ptp(column)), 1.0)):
        z, (low, high) = (
            np.arcsinh((column - shift) / spacing),
            np.arcsinh((column[:, None] - shift + [-0.5, 0.5]) / spacing).T,
        )
        centre, spread = z.mean(), max(z.std(), 1e-3 * float((high - low).mean()))
        mass = ndtr((high - centre) / spread) - ndtr((low - centre) / spread)
        found.append((float(np.log(np.maximum(mass, 1e-12)).mean()), spacing, float(centre), float(spread)))
    _, spacing, centre, spread = max(found)
    return shift, spacing, centre, spread
