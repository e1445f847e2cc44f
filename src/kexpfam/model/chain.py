r"""A learned conditional law: each column given the ones before it, a location-scale residual under a kernel tilt.

A masked network sees a condition x and targets y, column by column in some order, and gives each target a location, a scale
and the coefficients c of a tilt that depend on x and on the targets before it alone. With the residual
:math:`r = (y_j - \mu_j) / \sigma_j`,

.. math:: \log p(y_j | y_{<j}, x) = \log b(r) - \log \sigma_j + c_j \cdot \psi(r) - \log \int b(u) e^{c_j \cdot \psi(u)} du .

The residual has unit scale, so that one fixed set of cells resolves it however narrow the conditional is. A joint density is
the case of a condition of width zero, and :math:`p(y | x)` of a single target the chain of one link.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kexpfam.data.sample import AnyArray
from kexpfam.model.filling import Filling
from kexpfam.model.measures import LOG_TWO_PI, logsumexp
from kexpfam.model.networks import silu

__all__ = [
    "FEATURES",
    "HEAD",
    "OTHERS",
    "AbstractChain",
    "Chain",
    "Draws",
    "Residuals",
    "Told",
    "keep_all",
    "residuals",
]

# Gaussian bumps of the tilt if nothing else is said, from -REACH to REACH, wider than their distance by OVERLAP; RIDGE keeps
# their whitening finite.
BUMPS, REACH, OVERLAP, RIDGE = 20, 4.0, 1.3, 1e-4
# The linear function of the tilt levels off at this residual, the quadratic one where its square reaches this limit; both are
# smooth, because sums over cells are accurate for smooth functions only.
LINEAR_LIMIT, QUADRATIC_LIMIT = 6.0, 100.0
# The law b of residuals without a tilt: shares and widths of centred normals, so that far targets are improbable, no more.
TAIL_SHARES, TAIL_WIDTHS = (0.95, 0.035, 0.01, 0.005), (1.0, 3.0, 9.0, 27.0)
# Cells of the residual are even in t between -1 and 1, where r = CORE t + TAIL sinh(STEEPNESS t): alike where the bumps are,
# and from there wider and wider, up to LAST.
CORE, STEEPNESS, LAST = 6.4, 16.0, 150.0
TAIL = (LAST - CORE) / np.sinh(STEEPNESS)
# Logarithms of scales, in standard deviations of a column, are kept in this range: ties have no limit of their own.
LOG_SCALES = (-7.0, 3.0)
# Locations and logarithms of scales of columns whose units are like logarithms stay within these.
WARPED_REACH, WARPED_LOG_SCALE = 8.0, 0.0
# Norms of a tilt in its RKHS approach this one: its peaks are as wide as a cell then, and none can hide between two.
LARGEST_NORM = 25.0
# Cells of the residual, and cells per bump, at least: twice as many change log densities by less than rounding shows.
CELLS, CELLS_PER_BUMP = 192, 6
# Cells whose masses are added up at once when a draw looks for its own.
BLOCK = 16
# What a link of the chain is told besides the tilt's coefficients: location, log scale.
HEAD = 2
# Functions in psi besides the bumps, a linear and a quadratic one; and all of them.
OTHERS = 2
FEATURES = BUMPS + OTHERS


# Whether residuals have thin tails: all of them or none, or some links.
Thin = bool | Bool[AnyArray, "..."]


class Residuals(NamedTuple):
    """The cells of the residual, with the base's log masses and the tilt's features in their middles."""

    edges: np.ndarray  # (m + 1,)
    log_masses: np.ndarray  # (m,)
    features: np.ndarray  # (m, k)


@lru_cache
def residuals(cells: int, dtype: str = "float64", thin: bool = False, count: int = FEATURES) -> Residuals:
    """Return so many cells of the residual; sums over them are integrals to an accuracy that grows exponentially with them.

    ``count`` is the number of the tilt's features.
    """
    t = np.linspace(-1.0, 1.0, 2 * cells + 1)
    points = CORE * t + TAIL * np.sinh(STEEPNESS * t)
    widths = (CORE + TAIL * STEEPNESS * np.cosh(STEEPNESS * t[1::2])) * (2.0 / cells)
    log_masses = log_base(points[1::2], thin=thin) + np.log(widths)
    return Residuals(
        *(part.astype(dtype) for part in (points[::2], log_masses, features(points[1::2], count)))
    )


@lru_cache
def _bumps(count: int) -> tuple[np.ndarray, float, np.ndarray]:
    """Return the centres of the bumps, their length scale and the matrix that makes them orthonormal in the RKHS."""
    centres = np.linspace(-REACH, REACH, count)
    lengthscale = OVERLAP * (centres[1] - centres[0])
    gram = np.exp(-0.5 * ((centres[:, None] - centres) / lengthscale) ** 2) + RIDGE * np.eye(count)
    return centres, lengthscale, np.linalg.inv(np.linalg.cholesky(gram)).T


def features(r: Float[AnyArray, "*n"], count: int = FEATURES) -> Float[AnyArray, "*n k"]:
    """Return psi: a bounded linear and a bounded quadratic function, and bumps; the more there are, the narrower they are."""
    xp = r.__array_namespace__()
    centres, lengthscale, whitener = (np.asarray(part, r.dtype) for part in _bumps(count - OTHERS))
    linear = LINEAR_LIMIT * xp.tanh(r / LINEAR_LIMIT)
    quadratic = 0.125 * QUADRATIC_LIMIT * xp.expm1(-(r**2) / QUADRATIC_LIMIT)
    bumps = xp.exp(-0.5 * ((r[..., None] - centres) / lengthscale) ** 2) @ whitener
    return xp.concatenate([xp.stack([linear, quadratic], axis=-1), bumps], axis=-1)


def log_base(r: Float[AnyArray, "*n"], *, thin: Thin = False) -> Float[AnyArray, "*n"]:
    """Return ``log b(r)``; with thin tails it has the two narrow normals alone."""
    widths = np.asarray(TAIL_WIDTHS, r.dtype)
    heights = _either(thin, lambda thin: np.asarray(_log_heights(thin), r.dtype))
    return logsumexp(heights - 0.5 * (r[..., None] / widths) ** 2) - 0.5 * LOG_TWO_PI


@lru_cache
def _log_heights(thin: bool) -> np.ndarray:
    """Return the logarithms of shares over widths, minus infinity for what thin tails do without."""
    shares = np.array(TAIL_SHARES) * ([1.0, 1.0, 0.0, 0.0] if thin else 1.0)
    with np.errstate(divide="ignore"):
        return np.log(shares / shares.sum() / TAIL_WIDTHS)


def _either(thin: Thin, of: Callable[[bool], np.ndarray]) -> AnyArray:
    """Return what is of thin tails or of others, link by link where they differ."""
    if isinstance(thin, bool):
        return of(thin)
    return thin.__array_namespace__().where(thin[..., None], of(True), of(False))


class Told(NamedTuple):
    """What links are told: location, log scale and coefficients of the tilt; and the bounds of the residual, if any."""

    location: Float[AnyArray, "*n"]
    log_scale: Float[AnyArray, "*n"]
    coefficients: Float[AnyArray, "*n k"]
    low: Float[AnyArray, "*n"] | None
    high: Float[AnyArray, "*n"] | None
    thin: Thin = False

    @classmethod
    def of(
        cls, outputs: Float[AnyArray, "*n o"], support: Float[AnyArray, "2 ..."] | None, *, thin: Thin = False
    ) -> "Told":
        """Return what the outputs of a network say; a location outside the support is moved to its border.

        Residuals of logarithms and the like have ``thin`` tails: others would be astronomic in the data's units.
        """
        xp = outputs.__array_namespace__()
        location, log_scale, free = (
            outputs[..., 0],
            xp.clip(outputs[..., 1], *LOG_SCALES),
            outputs[..., HEAD:],
        )
        coefficients = free / xp.sqrt(1.0 + xp.sum(free**2, axis=-1, keepdims=True) / LARGEST_NORM**2)
        if support is None:
            return cls(location, log_scale, coefficients, None, None, thin)
        low, high = support.astype(outputs.dtype)
        location, shrink = xp.clip(location, low, high), xp.exp(-log_scale)
        return cls(
            location, log_scale, coefficients, (low - location) * shrink, (high - location) * shrink, thin
        )

    def tilted(self, added: Float[AnyArray, "*n k"]) -> "Told":
        """Return the same with this added to the coefficients of the tilt."""
        return self._replace(coefficients=self.coefficients + added)

    def log_density(self, y: Float[AnyArray, "*n"], cells: int) -> Float[AnyArray, "*n"]:
        """Return the log density of each target, which must lie in the support."""
        r = (y - self.location) * y.__array_namespace__().exp(-self.log_scale)
        tilt = (self.coefficients * features(r, self.coefficients.shape[-1])).sum(axis=-1)
        return log_base(r, thin=self.thin) - self.log_scale + tilt - logsumexp(self.exponents(cells))

    def exponents(self, cells: int) -> Float[AnyArray, "*n m"]:
        """Return the log masses of the cells before they are normalised; a cell across a bound has the share that is inside."""
        dtype = self.coefficients.dtype
        of = lambda thin: residuals(cells, np.dtype(dtype).name, thin, self.coefficients.shape[-1])
        grid = of(False)
        exponents = self.coefficients @ grid.features.T
        # In place: new pages of memory would cost more than the product.
        exponents += _either(self.thin, lambda thin: of(thin).log_masses)
        if self.low is None or self.high is None:
            return exponents
        xp = exponents.__array_namespace__()
        inside = xp.minimum(grid.edges[1:], self.high[..., None]) - xp.maximum(
            grid.edges[:-1], self.low[..., None]
        )
        return exponents + xp.log(xp.clip(inside / np.diff(grid.edges), np.finfo(dtype).tiny, 1.0))

    def link(self, j: int) -> "Told":
        """Return what the j-th of several links is told."""
        low, high = (None if side is None else side[:, j] for side in (self.low, self.high))
        thin = self.thin if isinstance(self.thin, bool) else self.thin[j]
        return Told(self.location[:, j], self.log_scale[:, j], self.coefficients[:, j], low, high, thin)

    def cells(self, cells: int) -> tuple[Float[AnyArray, "n edges"], Float[AnyArray, "n m"]]:
        """Return the edges of each row's cells, in residuals and within the bounds, and the cells' masses up to a factor."""
        masses = self.exponents(cells)
        masses -= masses.max(axis=1, keepdims=True)
        xp = masses.__array_namespace__()
        masses = np.exp(masses, out=masses) if isinstance(masses, np.ndarray) else xp.exp(masses)
        edges = xp.broadcast_to(residuals(cells, masses.dtype.name).edges, (len(masses), cells + 1))
        if self.low is not None and self.high is not None:
            edges = xp.clip(edges, self.low[:, None], self.high[:, None])
        return edges, masses

    def in_units(self, r: Float[AnyArray, "n m"]) -> Float[AnyArray, "n m"]:
        """Return residuals in units of the target."""
        return self.location[:, None] + r.__array_namespace__().exp(self.log_scale)[:, None] * r

    def drawn(
        self, cells: int, levels: Float[AnyArray, " n"]
    ) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
        """Return the targets at these levels of their distribution functions, and the log density of their cells there."""
        edges, masses = self.cells(cells)
        xp, rows, size = (
            masses.__array_namespace__(),
            np.arange(len(masses)),
            BLOCK if cells % BLOCK == 0 else 1,
        )
        # Running sums wait for one another: first over blocks of cells, then within the block that is wanted.
        blocks = xp.cumsum(masses @ _block_of(cells, size, masses.dtype.name), axis=1)
        total = blocks[:, -1]
        wanted = levels * total
        block, wanted = _found(blocks, wanted)
        inner, share = _found(xp.cumsum(masses.reshape(len(masses), -1, size)[rows, block], axis=1), wanted)
        tiny, place = np.finfo(masses.dtype).tiny, block * size + inner
        mass, left = xp.maximum(masses[rows, place], tiny), edges[rows, place]
        width = xp.maximum(edges[rows, place + 1] - left, tiny)
        drawn = left + xp.clip(share / mass, 0.0, 1.0) * width
        return self.in_units(drawn[:, None])[:, 0], xp.log(mass / total / width) - self.log_scale


@lru_cache
def _block_of(cells: int, size: int, dtype: str) -> Float[np.ndarray, "m blocks"]:
    """Return which block of so many cells each cell belongs to, as zeros and ones."""
    return np.repeat(np.eye(cells // size, dtype=dtype), size, axis=0)


def _found(running: Float[AnyArray, "n m"], wanted: Float[AnyArray, " n"]) -> tuple[AnyArray, AnyArray]:
    """Return the place at which each row's running sums pass what is wanted, and what is left of it there."""
    xp = running.__array_namespace__()
    place = xp.minimum((running < wanted[:, None]).sum(axis=1), running.shape[1] - 1)
    before = running[np.arange(len(running)), place - 1]
    return place, wanted - xp.where(place > 0, before, 0.0)


def _told(outputs: Float[AnyArray, "*n o"], support: Float[AnyArray, "2 ..."] | None, warped: Thin) -> Told:
    """Return what the outputs of a network say to links, of which the warped ones have thin tails and know no extremes.

    A network that has never seen a row like this one may say anything, and an arcsinh of 30 is astronomic in the data's units.
    """
    if warped is False:
        return Told.of(outputs, support)
    xp = outputs.__array_namespace__()
    location = xp.where(warped, xp.clip(outputs[..., 0], -WARPED_REACH, WARPED_REACH), outputs[..., 0])
    log_scale = xp.where(warped, xp.minimum(outputs[..., 1], WARPED_LOG_SCALE), outputs[..., 1])
    head = xp.stack([location, log_scale], axis=-1)
    return Told.of(xp.concatenate([head, outputs[..., HEAD:]], axis=-1), support, thin=warped)


class Masks(NamedTuple):
    """Which inputs a hidden unit, and which units and inputs a link of the chain, may look at; and the units' degrees."""

    degrees: np.ndarray  # (width,)
    first: np.ndarray  # (inputs, width)
    hidden: np.ndarray  # (width, width)
    out: np.ndarray  # (width, links)
    skip: np.ndarray  # (inputs, links)


@lru_cache
def masks(condition_dim: int, dim: int, width: int) -> Masks:
    """Return the masks of a network whose j-th link sees the condition and the targets before j.

    A unit of degree j sees the condition and the first j targets; units of all degrees are equally many.
    """
    least = 0 if condition_dim or dim == 1 else 1
    inputs = np.concatenate([np.zeros(condition_dim, int), np.arange(1, dim + 1)])
    units, links = least + np.arange(width) % (dim - least), np.arange(dim)
    sees = lambda low, high: (low[:, None] <= high[None]).astype(np.float32)
    return Masks(units, sees(inputs, units), sees(units, units), sees(units, links), sees(inputs, links))


def keep_all(units: Float[AnyArray, "n w"], layer: int) -> Float[AnyArray, "n w"]:
    """Return the units of a layer as they are."""
    return units


class Draws(NamedTuple):
    """Targets drawn link by link, their log density under the cells they were drawn from, and that of those known before."""

    targets: np.ndarray
    log_density: np.ndarray
    log_weight: np.ndarray


class AbstractChain(eqx.Module):
    """A law of targets under a condition, link by link: what a fit learns and a density is made of."""

    order: eqx.AbstractVar[Int[AnyArray, "*m d"]]
    first: eqx.AbstractVar[Float[AnyArray, "*m a w"]]
    hidden: eqx.AbstractVar[Float[AnyArray, "*m l w w"]]
    biases: eqx.AbstractVar[Float[AnyArray, "*m layers w"]]

    def last_units(
        self,
        rows: Float[AnyArray, "n a"],
        seen: Float[AnyArray, "a w"],
        passed: Float[AnyArray, "w w"],
        thin: Callable,
    ) -> Float[AnyArray, "n w"]:
        """Return the last hidden layer under rows of inputs, of which units look at ``seen`` and at units ``passed`` on."""
        dtype = rows.dtype
        h = thin(silu(rows @ (self.first * seen).astype(dtype) + self.biases[0].astype(dtype)), 0)
        for layer in range(1, len(self.biases)):
            weight = (self.hidden[layer - 1] * passed).astype(dtype)
            h = thin(h + silu(h @ weight + self.biases[layer].astype(dtype)), layer)
        return h

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Return the number of targets."""

    @abc.abstractmethod
    def member(self, k: int) -> "AbstractChain":
        """Return one of several stacked members."""

    @abc.abstractmethod
    def penalty(self) -> Float[AnyArray, ""]:
        """Return the sum of squares of what a fit keeps small: the weights of the coefficients of tilts."""

    def within(self, support: Float[AnyArray, "*m 2 d"] | None) -> "AbstractChain":
        """Return the chain with these bounds of its targets, in its own order; they are no weights, and are not learned.

        Chains that know bounds already stay as they are.
        """
        return self

    @property
    @abc.abstractmethod
    def cells(self) -> int:
        """Return how many cells of the residual its tilts need."""

    @property
    def integrated(self) -> slice | list[int]:
        """Return the links whose normaliser is an integral: sums over cells of whole numbers and labels are what they are."""
        return slice(None)

    @abc.abstractmethod
    def log_densities(
        self, y: Float[AnyArray, "n d"], x: Float[AnyArray, "n p"], *, cells: int, thin: Callable = keep_all
    ) -> Float[AnyArray, "n d"]:
        """Return the log density of every link, which sum to that of the row."""

    @abc.abstractmethod
    def sample(
        self,
        x: Float[np.ndarray, "n p"],
        *,
        cells: int,
        rng: np.random.Generator,
        known: Float[np.ndarray, "n d"] | None = None,
    ) -> Draws:
        """Return one row of targets per condition, link by link; those that are ``known`` (not NaN) weigh the others.

        ``log_weight`` is the log density of the known cells, each given what was drawn or known before it: its exponential
        is an unbiased estimate of the density of the known part.
        """


class Chain(AbstractChain):
    """A law of targets under a condition, link by link; one member of an ensemble, or several stacked along a first axis.

    ``order`` says which column of the targets each link is about. The weights lie as inputs times outputs; those of the links
    are (inputs, links, outputs per link). ``support`` are the lower and upper bounds of the targets, in the order of the chain.
    ``correction`` maps a one and the last hidden units to what is added to the tilts' coefficients, (1 + units, links, k).
    ``warped`` are the links whose units are like logarithms, in the order of the chain too; none of them if left out.
    """

    order: Int[AnyArray, "*m d"]
    first: Float[AnyArray, "*m a w"]
    hidden: Float[AnyArray, "*m l w w"]
    biases: Float[AnyArray, "*m layers w"]
    out: Float[AnyArray, "*m w d o"]
    skip: Float[AnyArray, "*m a d o"]
    shift: Float[AnyArray, "*m d o"]
    support: Float[AnyArray, "*m 2 d"] | None = None
    correction: Float[AnyArray, "*m u d k"] | None = None
    warped: Bool[AnyArray, "*m d"] | None = None

    @classmethod
    def draw(
        cls,
        condition_dim: int,
        orders: Int[np.ndarray, "m d"],
        *,
        width: int,
        depth: int,
        seed: int,
        bumps: int = BUMPS,
        warped: Bool[np.ndarray, " d"] | None = None,
    ) -> "Chain":
        """Return stacked members with these orders of the targets, whose links are all close to the standard normal law.

        ``warped`` says of every column whether its units are like logarithms.
        """
        (members, dim), rng = orders.shape, np.random.default_rng(seed)
        inputs, outputs = condition_dim + dim, HEAD + OTHERS + bumps
        normal = lambda scale, *shape: (scale * rng.standard_normal((members, *shape))).astype(np.float32)
        zeros = lambda *shape: np.zeros((members, *shape), np.float32)
        return cls(
            orders,
            normal(np.sqrt(2.0 / inputs), inputs, width),
            normal(np.sqrt(2.0 / width), depth - 1, width, width),
            zeros(depth, width),
            normal(0.01, width, dim, outputs),
            zeros(inputs, dim, outputs),
            zeros(dim, outputs),
            warped=None if warped is None else warped[orders],
        )

    @property
    def dim(self) -> int:
        """Return the number of targets."""
        return self.shift.shape[-2]

    @property
    def cells(self) -> int:
        return max(CELLS, CELLS_PER_BUMP * (self.out.shape[-1] - HEAD - OTHERS))

    @property
    def masks(self) -> Masks:
        """Return what may look at what."""
        return masks(self.first.shape[-2] - self.dim, self.dim, self.first.shape[-1])

    def member(self, k: int) -> "Chain":
        """Return one of several stacked members."""
        parts = (getattr(self, name) for name in self.__dataclass_fields__)
        return Chain(*(None if part is None else part[k] for part in parts))

    def within(self, support: Float[AnyArray, "*m 2 d"] | None) -> "Chain":
        return dataclasses.replace(self, support=support)

    def corrected(self, correction: Float[AnyArray, "*m u d k"]) -> "Chain":
        """Return the chain with this correction of its tilts."""
        return dataclasses.replace(self, correction=correction)

    def penalty(self) -> Float[AnyArray, ""]:
        return (self.out[..., HEAD:] ** 2).sum()

    def rows(self, y: Float[AnyArray, "n d"], x: Float[AnyArray, "n p"]) -> Float[AnyArray, "n a"]:
        """Return what the network sees: the condition, and the targets in the chain's order."""
        return y.__array_namespace__().concatenate([x, y[:, self.order]], axis=1)

    def units(self, rows: Float[AnyArray, "n a"], thin: Callable = keep_all) -> Float[AnyArray, "n w"]:
        """Return the last hidden layer under rows of condition and ordered targets; ``thin(units, layer)`` may drop some."""
        return self.last_units(rows, self.masks.first, self.masks.hidden, thin)

    def told(self, rows: Float[AnyArray, "n a"], units: Float[AnyArray, "n w"]) -> "Told":
        """Return what every link is told: location, log scale and the coefficients of the tilt."""
        flat = lambda part, mask: (part * mask[:, :, None]).astype(rows.dtype).reshape(part.shape[0], -1)
        outputs = units @ flat(self.out, self.masks.out) + rows @ flat(self.skip, self.masks.skip)
        outputs = outputs.reshape(len(rows), self.dim, -1) + self.shift.astype(rows.dtype)
        told = _told(outputs, self.support, False if self.warped is None else self.warped)
        if self.correction is None:
            return told
        added = units @ flat(self.correction[1:], self.masks.out)
        return told.tilted(added.reshape(told.coefficients.shape) + self.correction[0].astype(rows.dtype))

    def log_densities(
        self, y: Float[AnyArray, "n d"], x: Float[AnyArray, "n p"], *, cells: int, thin: Callable = keep_all
    ) -> Float[AnyArray, "n d"]:
        """Return ``log p(y_j | y_<j, x)`` of every link, in the order of the chain."""
        rows = self.rows(y, x)
        return self.told(rows, self.units(rows, thin)).log_density(rows[:, x.shape[1] :], cells)

    def sample(
        self,
        x: Float[np.ndarray, "n p"],
        *,
        cells: int,
        rng: np.random.Generator,
        known: Float[np.ndarray, "n d"] | None = None,
    ) -> Draws:
        """Return one row of targets per condition: a single pass, in which each link inverts its distribution function.

        A unit of degree j is known as soon as j targets are, so that every unit is computed once.
        """
        (count, p), skip, shift = x.shape, self.skip, self.shift
        filling = Filling(self.masks.degrees, self.first, self.hidden, self.biases, count)
        out = self.out[filling.order]
        correction = None if self.correction is None else self.correction[1:][filling.order]
        rows = np.concatenate([x, np.zeros((count, self.dim))], axis=1).astype(np.float32)
        log_density, log_weight = np.zeros(count), np.zeros(count)
        for j, column in enumerate(self.order):
            units = filling.ready(j, rows)
            outputs = units @ out[: units.shape[1], j] + rows @ skip[:, j] + shift[j]
            warped = self.warped is not None and bool(self.warped[j])
            told = _told(outputs, None if self.support is None else self.support[:, j], warped)
            if self.correction is not None and correction is not None:
                told = told.tilted(units @ correction[: units.shape[1], j] + self.correction[0, j])
            values, log_link = told.drawn(cells, rng.random(count, np.float32))
            if known is not None and not np.all(np.isnan(given := known[:, column].astype(np.float32))):
                there = ~np.isnan(given)
                values = np.where(there, given, values)
                log_weight += np.where(there, told.log_density(values, cells), 0.0)
                log_link = np.where(there, 0.0, log_link)
            log_density += log_link
            rows[:, p + j] = values
        targets = rows[:, p:][:, np.argsort(self.order)]
        return Draws(targets.astype(np.float64), log_density, log_weight)

    def drawn(
        self, x: Float[Array, "n p"], levels: Float[Array, "n d"], *, cells: int
    ) -> Float[Array, "n d"]:
        """Return the targets at these levels of their links' distribution functions, as a pure function of traced arrays.

        The network is run once per link, where ``sample`` fills in the units of one that is already there.
        """
        targets = jnp.zeros_like(levels)
        for j in range(self.dim):
            rows = jnp.concatenate([x, targets], axis=1)
            told = self.told(rows, self.units(rows)).link(j)
            targets = targets.at[:, j].set(told.drawn(cells, levels[:, j])[0])
        return targets[:, jnp.argsort(self.order)]
