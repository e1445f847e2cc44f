r"""Families of laws of one column given numbers from a network, by kind of column.

- ``RealLine``: a residual :math:`r = (z - \mu) / \sigma` with the density

  .. math:: p(r) \propto b(r) \exp(c \cdot \psi(r)) ,

  where b is a fixed mixture of centred normals, psi are features on the line, and the network gives the
  location mu, the scale sigma and the coefficients c. The residual has unit scale, so that one fixed set of
  cells resolves it for every sigma. Bounds of the support cut the law.
- ``Lattice``: whole or rounded numbers; each has the mass that such a law has within half a step of it.
- ``Circle``: :math:`p(\theta) \propto \exp(c \cdot \psi(\theta))` with Fourier features.
- ``Labels``: :math:`p(k) \propto \exp(c_k)`.

A family has several columns, which are computed together. Its arrays have the columns as their last axis, so
that ``at(place)`` is the family of one column and every function serves one column or all of them. Values
are in model units (``data.scaling``). All functions take NumPy or JAX arrays.
"""

import abc
from functools import lru_cache
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from kexpfam.data.kinds import AbstractKind, harmonics
from kexpfam.data.sample import AnyArray, PlainModule
from kexpfam.data.scaling import Scaling
from kexpfam.model.measures import LOG_TWO_PI, logsumexp

# Gaussian bumps of the tilt by default, from -REACH to REACH; their length scale is OVERLAP times their
# distance. RIDGE is added to their Gram matrix.
BUMPS, REACH, OVERLAP, RIDGE = 20, 4.0, 1.3, 1e-4
# The linear feature is bounded by the first limit, the quadratic one where r^2 reaches the second. Both are
# smooth, because sums over cells are accurate for smooth functions only.
LINEAR_LIMIT, QUADRATIC_LIMIT = 6.0, 100.0
# Shares and widths of the centred normals of b; light tails have the first two alone.
TAIL_SHARES, TAIL_WIDTHS = (0.95, 0.035, 0.01, 0.005), (1.0, 3.0, 9.0, 27.0)
# Edges of cells are r = CORE t + TAIL sinh(STEEPNESS t) with even t from -1 to 1, up to r = LAST.
CORE, STEEPNESS, LAST = 6.4, 16.0, 150.0
TAIL = (LAST - CORE) / np.sinh(STEEPNESS)
# Range of log scales, in standard deviations of a column.
LOG_SCALES = (-7.0, 3.0)
# Bounds of location and log scale under light tails: model units are like logarithms there.
LIGHT_REACH, LIGHT_LOG_SCALE = 8.0, 0.0
# Upper bound of the norm of a tilt in its RKHS: its peaks are as wide as a cell then.
LARGEST_NORM = 25.0
# Length scales from its centre at which a bump is zero.
NEGLIGIBLE = 8.0
# Cells of a residual and per bump, at least: with twice as many, normalisers change by rounding alone. Draws
# and distribution functions, which are linear within cells, need all of them.
CELLS, CELLS_PER_BUMP = 192, 6
# Cells of a normaliser, at least. Its error is below 2e-6 for tilts of norm 5, and 2e-3 at the largest norm.
NODES = 128
# Cells of a lattice (at least) and of a circle.
FINE_CELLS = 288
# Cells whose masses are summed at once when a draw finds its cell.
BLOCK = 16
# Outputs of the network before the coefficients: location and log scale.
HEAD = 2
# Features besides the bumps: the linear and the quadratic one.
OTHERS = 2
# Harmonics of a density on the circle and the length scale (radians) of the kernel that damps them; upper
# bound of the weight of the first one, which bounds how narrow a peak is.
HARMONICS, ARC, LARGEST_CONCENTRATION = 8, 0.35, 500.0
# Most whole numbers whose probabilities are listed in a distribution function.
MOST_STEPS = 2048
# Larger numbers have no halves in float64.
LARGEST_WHOLE = 2.0**52
# An end of a support lies on a lattice if it is within this share of the step.
ON_LATTICE = 1e-6
# Below this distance of neighbours, in residuals, a mass is the density times the distance.
SMALL_STEP = 0.05
# Replacement of an open end of a support, in model units: gradients at infinity would be NaN.
FAR_END = 1e6


class ResidualCells(NamedTuple):
    """The cells of the residual, with the log masses of b and the features in their middles."""

    edges: np.ndarray  # (m + 1,)
    middles: np.ndarray  # (m,)
    log_widths: np.ndarray  # (m,)
    log_masses: np.ndarray  # (m,)
    features: np.ndarray  # (m, k)


@lru_cache
def residual_cells(
    cells: int, dtype: str = "float64", light_tails: bool = False, count: int = BUMPS + OTHERS
) -> ResidualCells:
    """Return the cells of the residual for ``count`` features.

    Sums over the cells are integrals with an error that falls exponentially with their number.
    """
    t = np.linspace(-1.0, 1.0, 2 * cells + 1)
    points = CORE * t + TAIL * np.sinh(STEEPNESS * t)
    middles, log_widths = points[1::2], np.log(_cell_widths(t[1::2], cells))
    log_masses = log_base(middles, light_tails=light_tails) + log_widths
    parts = points[::2], middles, log_widths, log_masses, features(middles, count)
    return ResidualCells(*(part.astype(dtype) for part in parts))


def _cell_widths(t: Float[np.ndarray, " m"], cells: int) -> Float[np.ndarray, " m"]:
    return (CORE + TAIL * STEEPNESS * np.cosh(STEEPNESS * t)) * (2.0 / cells)


@lru_cache
def _bumps(count: int) -> tuple[np.ndarray, float, np.ndarray]:
    """Return the centres of the bumps, their length scale and the matrix that whitens them in the RKHS."""
    centres = np.linspace(-REACH, REACH, count)
    lengthscale = OVERLAP * (centres[1] - centres[0])
    gram = np.exp(-0.5 * ((centres[:, None] - centres) / lengthscale) ** 2) + RIDGE * np.eye(count)
    return centres, lengthscale, np.linalg.inv(np.linalg.cholesky(gram)).T


def features(r: Float[AnyArray, "*n"], count: int = BUMPS + OTHERS) -> Float[AnyArray, "*n k"]:
    """Return psi(r): a bounded linear function, a bounded quadratic function, and bumps."""
    xp = r.__array_namespace__()
    centres, lengthscale, whitener = (np.asarray(part, r.dtype) for part in _bumps(count - OTHERS))
    linear = LINEAR_LIMIT * xp.tanh(r / LINEAR_LIMIT)
    quadratic = 0.125 * QUADRATIC_LIMIT * xp.expm1(-(r**2) / QUADRATIC_LIMIT)
    bumps = xp.exp(-0.5 * ((r[..., None] - centres) / lengthscale) ** 2) @ whitener
    return xp.concatenate([xp.stack([linear, quadratic], axis=-1), bumps], axis=-1)


def tilts(r: Float[AnyArray, "*n m"], coefficients: Float[AnyArray, "*n k"]) -> Float[AnyArray, "*n m"]:
    """Return ``c . psi(r)`` at several residuals per row, without an array of the features."""
    xp, count = r.__array_namespace__(), coefficients.shape[-1]
    linear = LINEAR_LIMIT * xp.tanh(r / LINEAR_LIMIT)
    quadratic = 0.125 * QUADRATIC_LIMIT * xp.expm1(-(r**2) / QUADRATIC_LIMIT)
    whitened = coefficients[..., OTHERS:] @ _bumps(count - OTHERS)[2].T.astype(r.dtype)
    bumps = _bump_sums(r, xp.moveaxis(whitened, -1, 0)[..., None])
    return coefficients[..., :1] * linear + coefficients[..., 1:OTHERS] * quadratic + bumps


def _bump_sums(r: Float[AnyArray, "*n m"], weights: Float[AnyArray, "k *n 1"]) -> Float[AnyArray, "*n m"]:
    """Return the weighted sums of bumps, by Horner's rule where the numbers are not too large.

    With even centres the bumps are powers of a single exponential, counted from the middle one.
    """
    xp, count = r.__array_namespace__(), len(weights)
    centres, lengthscale, _ = _bumps(count)
    step, farthest = (centres[1] - centres[0]) / lengthscale, REACH / lengthscale + NEGLIGIBLE
    if 0.5 * farthest**2 > np.log(np.finfo(r.dtype).max):
        return sum(weights[j] * xp.exp(-0.5 * ((r - centres[j]) / lengthscale) ** 2) for j in range(count))
    middle, heights = count // 2, np.exp(-0.5 * (step * np.arange(count)) ** 2).astype(r.dtype)
    away = xp.clip((r - centres[middle]) / lengthscale, -farthest, farthest)
    right, left = xp.exp(step * away), xp.exp(-step * away)
    above, below = xp.zeros_like(r), xp.zeros_like(r)
    for j in range(count - 1, middle, -1):
        above = (above + heights[j - middle] * weights[j]) * right
    for j in range(middle):
        below = (below + heights[middle - j] * weights[j]) * left
    return xp.exp(-0.5 * away**2) * (above + weights[middle] + below)


def log_base(r: Float[AnyArray, "*n"], *, light_tails: bool = False) -> Float[AnyArray, "*n"]:
    """Return ``log b(r)``; the widest normal is a factor, so that the sum cannot underflow."""
    xp, (heights, widths) = r.__array_namespace__(), _normals(light_tails)
    half_square = 0.5 * r * r
    rest = (
        height * xp.exp(-half_square * (width**-2 - widths[-1] ** -2))
        for height, width in zip(heights[:-1], widths[:-1], strict=True)
    )
    return xp.log(sum(rest, heights[-1])) - half_square * widths[-1] ** -2 - 0.5 * LOG_TWO_PI


@lru_cache
def _normals(light_tails: bool) -> tuple[list[float], list[float]]:
    """Return share / width and width of the normals of b; light tails have the first two alone."""
    count = 2 if light_tails else len(TAIL_SHARES)
    shares, widths = np.array(TAIL_SHARES[:count]), np.array(TAIL_WIDTHS[:count])
    return (shares / shares.sum() / widths).tolist(), widths.tolist()


class ConditionalParams(NamedTuple):
    """Parameters of laws on the real line, one per row and column; bounds are of the residual, if any.

    With ``members``, laws along a last axis, the log density is the sum of theirs times ``weights`` up to a
    constant. Location and scale are those of the cells then.
    """

    location: Float[AnyArray, "*n"]
    log_scale: Float[AnyArray, "*n"]
    coefficients: Float[AnyArray, "*n k"]
    low: Float[AnyArray, "*n"] | None
    high: Float[AnyArray, "*n"] | None
    light_tails: bool = False
    members: "ConditionalParams | None" = None
    weights: Float[AnyArray, " m"] | None = None

    @classmethod
    def of(
        cls,
        outputs: Float[AnyArray, "*n o"],
        bounds: Float[AnyArray, "2 ..."] | None = None,
        *,
        light_tails: bool = False,
    ) -> "ConditionalParams":
        """Return the parameters from outputs of a network; a location outside the bounds moves to them.

        Outputs are location, log scale and the coefficients before their norm is bounded.
        """
        xp = outputs.__array_namespace__()
        location, log_scale, free = outputs[..., 0], outputs[..., 1], outputs[..., HEAD:]
        if light_tails:
            location = xp.clip(location, -LIGHT_REACH, LIGHT_REACH)
            log_scale = xp.minimum(log_scale, LIGHT_LOG_SCALE)
        log_scale = xp.clip(log_scale, *LOG_SCALES)
        coefficients = _bounded(free, LARGEST_NORM)
        if bounds is None:
            return cls(location, log_scale, coefficients, None, None, light_tails)
        low, high = bounds.astype(outputs.dtype)
        location, shrink = xp.clip(location, low, high), xp.exp(-log_scale)
        low, high = (low - location) * shrink, (high - location) * shrink
        return cls(location, log_scale, coefficients, low, high, light_tails)

    def pooled(self, weights: Float[AnyArray, " m"]) -> "ConditionalParams":
        """Return the law whose log density is the weighted sum of those along the last axis plus a constant.

        The geometric mean of exponential families is one: the potentials are averaged. Its cells are centred
        where the members are precise, and wide enough for locations that differ.
        """
        xp = self.location.__array_namespace__()
        weights = weights.astype(self.location.dtype)
        precision = weights * xp.exp(-2.0 * self.log_scale)
        total = precision.sum(axis=-1)
        location = (precision * self.location).sum(axis=-1) / total
        away = (precision * (self.location - location[..., None]) ** 2).sum(axis=-1)
        scale = xp.sqrt((1.0 + away) / total)
        ends = (
            None if end is None else (self.location + xp.exp(self.log_scale) * end)[..., 0]
            for end in (self.low, self.high)
        )
        low, high = (None if end is None else (end - location) / scale for end in ends)
        return self._replace(
            location=location, log_scale=xp.log(scale), low=low, high=high, members=self, weights=weights
        )

    def residuals(self, z: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """Return ``(z - location) / scale``."""
        return (z - self.location) * z.__array_namespace__().exp(-self.log_scale)

    def log_density(self, z: Float[AnyArray, "*n"], cells: int) -> Float[AnyArray, "*n"]:
        """Return the log density of each value, which must lie within the bounds."""
        return self.exponents(self.residuals(z)) - self.log_scale - logsumexp(self.log_masses(cells))

    def exponents(self, r: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """Return the log density at residuals, up to a constant."""
        if self.members is None:
            tilt = (self.coefficients * features(r, self.coefficients.shape[-1])).sum(axis=-1)
            return log_base(r, light_tails=self.light_tails) + tilt
        return self._pooled_exponents(r[..., None])[..., 0]

    def _pooled_exponents(self, r: Float[AnyArray, "*n m"]) -> Float[AnyArray, "*n m"]:
        """Return the weighted sums of the members' log densities at residuals, up to a constant."""
        own: Any = self.members
        weights: Any = self.weights
        xp, several = r.__array_namespace__(), lambda part: part[..., None]
        z = several(self.location) + xp.exp(several(self.log_scale)) * r
        found = (z[..., None, :] - several(own.location)) * xp.exp(-several(own.log_scale))
        base = log_base(found, light_tails=self.light_tails)
        # A product with the weights is several times faster than a sum, which would not be vectorised.
        return weights @ (base + tilts(found, own.coefficients))

    def log_masses(self, cells: int) -> Float[AnyArray, "*n m"]:
        """Return the log masses of the cells before they are normalised.

        A cell across a bound has the share of its width that is inside.
        """
        dtype, count = self.coefficients.dtype, self.coefficients.shape[-1]
        grid = residual_cells(cells, np.dtype(dtype).name, self.light_tails, count)
        if self.members is None:
            exponents = self.coefficients @ grid.features.T
            exponents += grid.log_masses  # in place: new memory would cost more than the product
        else:
            middles = grid.middles + 0.0 * self.location[..., None]
            exponents = self._pooled_exponents(middles) + grid.log_widths
        if self.low is None or self.high is None:
            return exponents
        xp = exponents.__array_namespace__()
        right = xp.minimum(grid.edges[1:], self.high[..., None])
        inside = right - xp.maximum(grid.edges[:-1], self.low[..., None])
        return exponents + xp.log(xp.clip(inside / np.diff(grid.edges), np.finfo(dtype).tiny, 1.0))

    def cells(self, cells: int) -> tuple[Float[AnyArray, "n edges"], Float[AnyArray, "n m"]]:
        """Return the edges of each row's cells as residuals, and the masses up to a factor."""
        masses = self.log_masses(cells)
        masses -= masses.max(axis=1, keepdims=True)
        xp = masses.__array_namespace__()
        masses = np.exp(masses, out=masses) if isinstance(masses, np.ndarray) else xp.exp(masses)
        edges = xp.broadcast_to(residual_cells(cells, masses.dtype.name).edges, (len(masses), cells + 1))
        if self.low is not None and self.high is not None:
            edges = xp.clip(edges, self.low[:, None], self.high[:, None])
        return edges, masses

    def law(self, cells: int) -> "PiecewiseLaw":
        """Return the distribution function of each row."""
        edges, masses = self.cells(cells)
        return PiecewiseLaw(self.in_units(edges), _cumulative(masses))

    def in_units(self, r: Float[AnyArray, "n m"]) -> Float[AnyArray, "n m"]:
        """Return ``location + scale r``."""
        return self.location[:, None] + r.__array_namespace__().exp(self.log_scale)[:, None] * r

    def drawn(
        self, cells: int, levels: Float[AnyArray, " n"]
    ) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
        """Return the quantiles at these levels, and the log density of their cells."""
        edges, masses = self.cells(cells)
        xp, rows = masses.__array_namespace__(), np.arange(len(masses))
        size = BLOCK if cells % BLOCK == 0 else 1
        # Cumulative sums are sequential: first over blocks of cells, then within the block of the level.
        blocks = xp.cumsum(masses @ _block_of(cells, size, masses.dtype.name), axis=1)
        total = blocks[:, -1]
        block, rest = _found(blocks, levels * total)
        inner, share = _found(xp.cumsum(masses.reshape(len(masses), -1, size)[rows, block], axis=1), rest)
        tiny, place = np.finfo(masses.dtype).tiny, block * size + inner
        mass, left = xp.maximum(masses[rows, place], tiny), edges[rows, place]
        width = xp.maximum(edges[rows, place + 1] - left, tiny)
        drawn = left + xp.clip(share / mass, 0.0, 1.0) * width
        return self.in_units(drawn[:, None])[:, 0], xp.log(mass / total / width) - self.log_scale


class PiecewiseLaw(NamedTuple):
    """A distribution function of each row: the points where it bends or jumps, and its levels there."""

    points: np.ndarray  # (n, m)
    levels: np.ndarray  # (n, m)


class AbstractFamily(PlainModule):
    """The laws of some columns, given by their positions in the table."""

    columns: tuple[int, ...] = eqx.field(static=True)

    @classmethod
    @abc.abstractmethod
    def settings(cls, kind: AbstractKind, *, arcsinh: bool) -> dict[str, Any]:
        """Return the static fields for a column; columns that share them are in one family."""

    @classmethod
    @abc.abstractmethod
    def of(cls, columns: tuple[int, ...], scaling: Scaling, *, bumps: int, **settings: Any) -> Self:
        """Return the family of these columns of a table."""

    @property
    @abc.abstractmethod
    def outputs(self) -> int:
        """Return the number of outputs of a network per column."""

    @property
    def penalised(self) -> slice:
        """Return the outputs whose weights are penalised."""
        return slice(None)

    @property
    def integrated(self) -> bool:
        """Return whether the normaliser is an integral, which depends on the number of cells."""
        return True

    @property
    def cells(self) -> int:
        """Return the number of cells that the laws need."""
        return FINE_CELLS

    def at(self, place: int | Int[AnyArray, ""]) -> Self:
        """Return the family of one of the columns."""
        return jax.tree.map(lambda leaf: leaf[..., place], self)

    def start(self, z: Float[np.ndarray, "n g"]) -> Float[np.ndarray, "g o"]:
        """Return the outputs before training, given the training values."""
        return np.zeros((len(self.columns), self.outputs))

    @abc.abstractmethod
    def log_density(
        self, outputs: Float[AnyArray, "*n o"], z: Float[AnyArray, "*n"], cells: int | None
    ) -> Float[AnyArray, "*n"]:
        """Return the log density of each value."""

    @abc.abstractmethod
    def drawn(
        self, outputs: Float[AnyArray, "n o"], levels: Float[AnyArray, " n"], cells: int | None
    ) -> tuple[AnyArray, AnyArray]:
        """Return the quantiles of one column at these levels, and their log density as drawn."""

    @abc.abstractmethod
    def law(self, outputs: Float[np.ndarray, "n o"], cells: int | None) -> PiecewiseLaw:
        """Return the distribution function of one column."""


class AbstractTilted(AbstractFamily):
    """A family with the outputs of ``ConditionalParams``."""

    bumps: int = eqx.field(static=True)

    @property
    def outputs(self) -> int:
        return HEAD + OTHERS + self.bumps

    @property
    def penalised(self) -> slice:
        return slice(HEAD, None)

    @abc.abstractmethod
    def params(self, outputs: Float[AnyArray, "*n o"]) -> ConditionalParams:
        """Return the parameters of the laws.

        With ``pool`` the axis before the last is that of members, whose potentials have these weights.
        """

    def settled(self, z: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """Return the values that the column has for draws of the laws on the real line."""
        return z

    def steps(self, points: Float[np.ndarray, "n m"], levels: Float[np.ndarray, "n m"]) -> PiecewiseLaw:
        """Return the distribution function of the column for one on the real line."""
        return PiecewiseLaw(points, levels)


class RealLine(AbstractTilted):
    """Real numbers; ``bounds`` are the ends of the supports in model units, None if all are open.

    Light tails and bounded locations and scales are for columns whose model units are like logarithms:
    heavier tails would be astronomic in data units.
    """

    light_tails: bool = eqx.field(static=True, default=False)
    bounds: Float[AnyArray, "2 ..."] | None = None
    least_nodes: int = eqx.field(static=True, default=CELLS)  # files of older versions do not store it
    pool: Float[AnyArray, " m"] | None = None

    @classmethod
    def settings(cls, kind: AbstractKind, *, arcsinh: bool) -> dict[str, Any]:
        return {"light_tails": kind.logarithmic or arcsinh}

    @classmethod
    def of(cls, columns: tuple[int, ...], scaling: Scaling, *, bumps: int, **settings: Any) -> "RealLine":
        ends = scaling.model_ends[:, list(columns)]
        bounds = np.clip(ends, -FAR_END, FAR_END) if np.any(np.isfinite(ends)) else None
        return cls(columns, bumps, bounds=bounds, least_nodes=NODES, **settings)

    @property
    def cells(self) -> int:
        return max(CELLS, CELLS_PER_BUMP * self.bumps)

    @property
    def nodes(self) -> int:
        """Return the number of cells that the normaliser needs; members that disagree need more."""
        return self.cells if self.pool is not None else max(self.least_nodes, CELLS_PER_BUMP * self.bumps)

    def params(self, outputs: Float[AnyArray, "*n o"]) -> ConditionalParams:
        own = ConditionalParams.of(outputs, self.bounds, light_tails=self.light_tails)
        return own if self.pool is None else own.pooled(self.pool)

    def log_density(self, outputs: AnyArray, z: AnyArray, cells: int | None) -> AnyArray:
        return self.params(outputs).log_density(z, cells or self.nodes)

    def drawn(self, outputs: AnyArray, levels: AnyArray, cells: int | None) -> tuple[AnyArray, AnyArray]:
        return self.params(outputs).drawn(cells or self.cells, levels)

    def law(self, outputs: np.ndarray, cells: int | None) -> PiecewiseLaw:
        return self.params(outputs).law(cells or self.cells)


class Lattice(AbstractTilted):
    """Numbers of a lattice, given by their whole multiples k of the step.

    ``z = (arcsinh(u) - centre) / spread`` with ``u = (k - shift) / spacing``; u itself takes the place of its
    arcsinh unless the law is ``curved``. With ``per_unit`` the density is the mass over the step, in model
    units.
    """

    low: Float[AnyArray, "*g"]
    high: Float[AnyArray, "*g"]
    shift: Float[AnyArray, "*g"]
    spacing: Float[AnyArray, "*g"]
    centre: Float[AnyArray, "*g"]
    spread: Float[AnyArray, "*g"]
    curved: bool = eqx.field(static=True, default=True)
    per_unit: bool = eqx.field(static=True, default=False)
    pool: Float[AnyArray, " m"] | None = None

    @classmethod
    def settings(cls, kind: AbstractKind, *, arcsinh: bool) -> dict[str, Any]:
        return {"curved": arcsinh, "per_unit": not kind.discrete}

    @classmethod
    def of(cls, columns: tuple[int, ...], scaling: Scaling, *, bumps: int, **settings: Any) -> "Lattice":
        own = list(columns)
        step, offset, unit = np.array([scaling.kinds[j].others.rounding for j in own]).T
        multiples = lambda values: (values * unit - offset) / step
        low, high = np.clip(multiples(scaling.ends[:, own]), -LARGEST_WHOLE, LARGEST_WHOLE)
        low, high = np.ceil(low - ON_LATTICE), np.floor(high + ON_LATTICE)
        shift, spacing = multiples(scaling.shift[own]), scaling.scale[own] * unit / step
        return cls(
            columns, bumps, low, high, shift, spacing, scaling.centre[own], scaling.spread[own], **settings
        )

    @property
    def integrated(self) -> bool:
        return False

    @property
    def cells(self) -> int:
        return max(FINE_CELLS, CELLS_PER_BUMP * self.bumps)

    def log_density(self, outputs: AnyArray, z: AnyArray, cells: int | None) -> AnyArray:
        """Return the log mass of the law between ``k - 1/2`` and ``k + 1/2``, or its log density."""
        xp, cells = z.__array_namespace__(), cells or self.cells
        multiple, whole = self._multiple(z), self.params(outputs)
        k, shrink, step = xp.round(multiple), xp.exp(-whole.log_scale), self._step(multiple)
        low = xp.maximum(whole.residuals(self._spaced(k - 0.5)), whole.low)
        high = xp.minimum(whole.residuals(self._spaced(k + 0.5)), whole.high)
        between = whole._replace(low=low, high=high)
        masses = logsumexp(between.log_masses(cells)) - logsumexp(whole.log_masses(cells))
        fine = whole.log_density(z, cells)
        if self.per_unit:
            return xp.where(step * shrink < SMALL_STEP, fine, masses - xp.log(step))
        return xp.where(step * shrink < SMALL_STEP, fine + xp.log(step), masses)

    def drawn(self, outputs: AnyArray, levels: AnyArray, cells: int | None) -> tuple[AnyArray, AnyArray]:
        z = self.settled(self.params(outputs).drawn(cells or self.cells, levels)[0])
        return z, self.log_density(outputs, z.astype(outputs.dtype), cells)

    def settled(self, z: AnyArray) -> AnyArray:
        # On the host in float64, in which large whole numbers are exact.
        z = z.astype(float) if isinstance(z, np.ndarray) else z
        return self._spaced(z.__array_namespace__().clip(self._whole(z), self.low, self.high))

    def law(self, outputs: np.ndarray, cells: int | None) -> PiecewiseLaw:
        return self.steps(*self.params(outputs).law(cells or self.cells))

    def steps(self, points: Float[np.ndarray, "n m"], levels: Float[np.ndarray, "n m"]) -> PiecewiseLaw:
        # Numbers that have mass in some row, evenly in model units where they are many.
        central = (levels > 1e-9) & (levels < 1.0 - 1e-9)
        ends = (points[central].min(), points[central].max()) if central.any() else (0.0, 0.0)
        values = self._whole(np.linspace(ends[0], ends[1], MOST_STEPS))
        values = np.unique(np.clip(np.concatenate([values, values[-1:] + 1.0]), self.low, self.high))
        edges = self._spaced(values + 0.5)
        upto = np.stack([np.interp(edges, *row) for row in zip(points, levels, strict=True)])
        upto[:, -1] = 1.0
        return _steps(np.concatenate([np.zeros((len(upto), 1)), upto], axis=1), self._spaced(values))

    def params(self, outputs: Float[AnyArray, "*n o"]) -> ConditionalParams:
        ends = self._spaced(self.low - 0.5), self._spaced(self.high + 0.5)
        bounds = outputs.__array_namespace__().stack(ends).clip(-FAR_END, FAR_END)
        own = ConditionalParams.of(outputs, bounds, light_tails=self.curved)
        return own if self.pool is None else own.pooled(self.pool)

    def _spaced(self, k: AnyArray) -> AnyArray:
        shift, spacing, centre, spread = self._map(k)
        u = (k - shift) / spacing
        return ((k.__array_namespace__().arcsinh(u) if self.curved else u) - centre) / spread

    def _whole(self, z: AnyArray) -> AnyArray:
        """Return the whole number nearest to a value in model units."""
        return z.__array_namespace__().round(self._multiple(z))

    def _multiple(self, z: AnyArray) -> AnyArray:
        """Return a value in model units as a multiple of the step."""
        shift, spacing, centre, spread = self._map(z)
        w = centre + spread * z
        return shift + spacing * (z.__array_namespace__().sinh(w) if self.curved else w)

    def _step(self, k: AnyArray) -> AnyArray:
        """Return the distance of neighbours in model units where they are close: dz/dk."""
        shift, spacing, _, spread = self._map(k)
        u = (k - shift) / spacing if self.curved else 0.0 * k
        return 1.0 / (spacing * spread * k.__array_namespace__().hypot(k * 0.0 + 1.0, u))

    def _map(self, like: AnyArray) -> list[AnyArray]:
        return [part.astype(like.dtype) for part in (self.shift, self.spacing, self.centre, self.spread)]


class Circle(AbstractFamily):
    """Angles in radians; the first harmonic has a scale of its own, so that peaks can be narrow."""

    @classmethod
    def settings(cls, kind: AbstractKind, *, arcsinh: bool) -> dict[str, Any]:
        return {}

    @classmethod
    def of(cls, columns: tuple[int, ...], scaling: Scaling, *, bumps: int, **settings: Any) -> "Circle":
        return cls(columns)

    @property
    def outputs(self) -> int:
        return 1 + 2 * HARMONICS

    @property
    def penalised(self) -> slice:
        return slice(3, None)

    def log_density(self, outputs: AnyArray, z: AnyArray, cells: int | None) -> AnyArray:
        weights, cells = self._weights(outputs), cells or self.cells
        log_width = np.asarray(np.log(2.0 * np.pi / cells), outputs.dtype)
        log_volume = logsumexp(weights @ _grid(cells).astype(outputs.dtype).T) + log_width
        return (weights * harmonics(z, _damping())).sum(axis=-1) - log_volume

    def drawn(self, outputs: AnyArray, levels: AnyArray, cells: int | None) -> tuple[AnyArray, AnyArray]:
        cells, rows = cells or self.cells, np.arange(len(outputs))
        upto = self._levels(outputs, cells)
        xp = upto.__array_namespace__()
        cell = xp.clip((upto <= levels[:, None]).sum(axis=1) - 1, 0, cells - 1)
        left, step = upto[rows, cell], 2.0 * np.pi / cells
        mass = xp.maximum(upto[rows, cell + 1] - left, np.finfo(upto.dtype).tiny)
        angle = step * (cell + xp.clip((levels - left) / mass, 0.0, 1.0))
        return xp.where(angle < 2.0 * np.pi, angle, 0.0), xp.log(mass / step)

    def law(self, outputs: np.ndarray, cells: int | None) -> PiecewiseLaw:
        levels = self._levels(outputs, cells or self.cells)
        angles = np.linspace(0.0, 2.0 * np.pi, levels.shape[1])
        return PiecewiseLaw(np.broadcast_to(angles, levels.shape), levels)

    def _levels(self, outputs: AnyArray, cells: int) -> AnyArray:
        outputs = outputs.astype(float) if isinstance(outputs, np.ndarray) else outputs
        exponents = self._weights(outputs) @ _grid(cells).astype(outputs.dtype).T
        exponents = exponents - exponents.max(axis=1, keepdims=True)
        return _cumulative(exponents.__array_namespace__().exp(exponents))

    @staticmethod
    def _weights(outputs: AnyArray) -> AnyArray:
        """Return the weights of the harmonics, whose norms are bounded: peaks are wider than a cell."""
        xp = outputs.__array_namespace__()
        first = outputs[..., :2] * xp.exp(xp.clip(outputs[..., 2:3], -5.0, 7.0))
        parts = _bounded(first, LARGEST_CONCENTRATION), _bounded(outputs[..., 3:], LARGEST_NORM)
        return xp.concatenate(parts, axis=-1)


class Labels(AbstractFamily):
    """Codes of labels, of which every column has ``count``."""

    count: int = eqx.field(static=True)

    @classmethod
    def settings(cls, kind: AbstractKind, *, arcsinh: bool) -> dict[str, Any]:
        return {"count": int(kind.ends[1]) + 1}

    @classmethod
    def of(cls, columns: tuple[int, ...], scaling: Scaling, *, bumps: int, **settings: Any) -> "Labels":
        return cls(columns, **settings)

    @property
    def outputs(self) -> int:
        return self.count

    @property
    def integrated(self) -> bool:
        return False

    def start(self, z: Float[np.ndarray, "n g"]) -> Float[np.ndarray, "g o"]:
        """Return log frequencies, with one more of each label."""
        counts = (z[..., None] == np.arange(self.count)).sum(axis=0) + 1.0
        return np.log(counts / counts.sum(axis=1, keepdims=True))

    def log_density(self, outputs: AnyArray, z: AnyArray, cells: int | None) -> AnyArray:
        chosen = (z[..., None] == np.arange(self.count, dtype=z.dtype)).astype(z.dtype)
        return (chosen * outputs).sum(axis=-1) - logsumexp(outputs)

    def drawn(self, outputs: AnyArray, levels: AnyArray, cells: int | None) -> tuple[AnyArray, AnyArray]:
        xp, log_masses = outputs.__array_namespace__(), outputs - logsumexp(outputs)[:, None]
        upto = xp.cumsum(xp.exp(log_masses), axis=1)
        label = xp.minimum((upto <= levels[:, None]).sum(axis=1), self.count - 1)
        return label.astype(levels.dtype), log_masses[np.arange(len(outputs)), label]

    def law(self, outputs: np.ndarray, cells: int | None) -> PiecewiseLaw:
        upto = _cumulative(np.exp(outputs - logsumexp(outputs)[:, None]))
        return _steps(upto, np.arange(self.count, dtype=float))


# The families by the name that a kind has in its field ``family``.
FAMILIES: dict[str, type[AbstractFamily]] = {
    "real": RealLine,
    "lattice": Lattice,
    "circle": Circle,
    "labels": Labels,
}


def _bounded(free: Float[AnyArray, "*n k"], limit: float) -> Float[AnyArray, "*n k"]:
    """Return vectors whose norms approach a limit: ``v / sqrt(1 + |v|^2 / limit^2)``."""
    xp = free.__array_namespace__()
    return free / xp.sqrt(1.0 + xp.sum(free**2, axis=-1, keepdims=True) / limit**2)


@lru_cache
def _block_of(cells: int, size: int, dtype: str) -> Float[np.ndarray, "m blocks"]:
    """Return the indicator matrix of blocks of ``size`` cells."""
    return np.repeat(np.eye(cells // size, dtype=dtype), size, axis=0)


def _found(running: Float[AnyArray, "n m"], wanted: Float[AnyArray, " n"]) -> tuple[AnyArray, AnyArray]:
    """Return where each row of cumulative sums passes a value, and the rest of the value there."""
    xp = running.__array_namespace__()
    place = xp.minimum((running < wanted[:, None]).sum(axis=1), running.shape[1] - 1)
    before = running[np.arange(len(running)), place - 1]
    return place, wanted - xp.where(place > 0, before, 0.0)


def _cumulative(masses: Float[AnyArray, "n m"]) -> Float[AnyArray, "n k"]:
    """Return the levels of a distribution function at the edges of cells with these masses."""
    xp = masses.__array_namespace__()
    masses = masses.astype(float) if isinstance(masses, np.ndarray) else masses
    levels = xp.concatenate([xp.zeros_like(masses[:, :1]), xp.cumsum(masses, axis=1)], axis=1)
    return levels / levels[:, -1:]


def _steps(upto: Float[np.ndarray, "n m"], values: Float[np.ndarray, " k"]) -> PiecewiseLaw:
    """Return the distribution function that jumps at these values."""
    levels = np.stack([upto[:, :-1], upto[:, 1:]], axis=2).reshape(len(upto), -1)
    return PiecewiseLaw(np.broadcast_to(np.repeat(values, 2), levels.shape), levels)


@lru_cache
def _damping() -> np.ndarray:
    """Return the weights of the harmonics: 1 for the first, the spectrum of a kernel for the others."""
    orders = np.arange(1, HARMONICS + 1)
    return np.where(orders > 1, np.exp(-0.25 * (ARC * orders) ** 2), 1.0)


@lru_cache
def _grid(cells: int) -> np.ndarray:
    """Return the harmonics in the middles of even cells of the circle."""
    return harmonics((np.arange(cells) + 0.5) * (2.0 * np.pi / cells), _damping())
