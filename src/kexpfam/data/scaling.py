"""The map between data units and model units, column by column, with its log-Jacobian."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float

from kexpfam.data.rounding import Rounding
from kexpfam.data.sample import AnyArray, PlainModule
from kexpfam.data.weights import percentiles, weighted_mean, weighted_variance

# A column whose spread is below this share of its magnitude, a hundred times its rounding, is constant.
CONSTANT_TOLERANCE = 2e-14
# In interquartile ranges: the furthest of a million normal values is at 3.7, of exponential ones at 12.
HEAVY_TAIL = 10.0
# A shorter tail is heavy if it is so many interquartile ranges long and arcsinh raises the mean normal log
# density by so many nats: around the median, and from an end of the data (skewed columns) or after a power.
BOTH_TAILS, ONE_TAIL = (3.0, 0.05), (4.0, 0.4)
# So many rows in such a tail are a mode if their interquartile range is below this share of their distance.
MODE_ROWS, MODE_WIDTH = 20, 0.2
# Distances from the shift, as percentiles, that are compared as scales of arcsinh.
ARCSINH_SCALES = [1, 5, 25, 50, 75]
# Exponentials of larger numbers overflow.
LARGEST_LOGARITHM = 700.0
# A Yeo-Johnson power this close to 0 (or 2) is replaced by its limit, the logarithm.
SMALL_RATE = 1e-8
# Rows without a cell, from which a network learns the other cells of such rows. With 2 of them it lost 3.2
# nats per row, with 20 of them 0.3; more were not measured.
ENOUGH_GAPS = 100
ARRAYS = ("shift", "scale", "centre", "spread", "powers")


class Scaling(PlainModule):
    """The map between data units x and model units z, column by column.

    ``u = (x - shift) / scale`` and ``z = (w(u) - centre) / spread``. In the columns of ``arcsinh``, which
    have heavy tails, w is arcsinh. In the others w is the Yeo-Johnson transformation with the column's
    power; power 1 is the identity. In columns of ``logs``, x is replaced by its logarithm.

    ``kinds`` are the kinds of the columns; empty means that all are real. The value of an atom is infinity
    in model units, a missing cell is NaN. ``gaps`` marks the columns with missing cells in training, ``rare``
    those of them with too few to learn what they mean for other columns.

    The maps take NumPy or JAX arrays and return the same type.
    """

    shift: Float[AnyArray, " d"]
    scale: Float[AnyArray, " d"]
    centre: Float[AnyArray, " d"]
    spread: Float[AnyArray, " d"]
    powers: Float[AnyArray, " d"]
    arcsinh: tuple[bool, ...] = eqx.field(static=True)
    logs: tuple[bool, ...] = eqx.field(static=True, default=())
    kinds: tuple[Any, ...] = eqx.field(static=True, default=())
    gaps: tuple[bool, ...] = eqx.field(static=True, default=())
    rare: tuple[bool, ...] = eqx.field(static=True, default=())

    @staticmethod
    def standardising(
        values: np.ndarray,
        *,
        power: bool = False,
        weight: np.ndarray | None = None,
        logs: tuple[bool, ...] = (),
    ) -> "Scaling":
        """Return the scaling to mean 0 and standard deviation 1; constant columns keep scale 1.

        With ``power``, each column is first transformed by the Yeo-Johnson transformation of highest normal
        likelihood.
        """
        values = _logarithms(values, logs)
        constant = constant_columns(values)
        shift = weighted_mean(values, weight)
        scale = np.where(constant, 1.0, np.sqrt(weighted_variance(values, weight)))
        powers = np.ones(values.shape[1])
        if power:
            u = (values - shift) / scale
            free = np.flatnonzero(~constant)
            powers[free] = [most_normal_power(u[:, j], weight) for j in free]
        u = _yeo_johnson((values - shift) / scale, powers)
        heavy = heavy_tailed_columns(u, weight, ONE_TAIL if power else BOTH_TAILS)
        for j in np.flatnonzero(heavy):
            shift[j], scale[j], _ = most_normal_arcsinh(values[:, j], weight)
        powers = np.where(heavy, 1.0, powers)
        u = (values - shift) / scale
        u = np.where(heavy, np.arcsinh(u), _yeo_johnson(u, powers) if power else u)
        bent = heavy | (powers != 1.0)
        centre = np.where(bent, weighted_mean(u, weight), 0.0)
        spread = np.where(bent, np.sqrt(weighted_variance(u, weight)), 1.0)
        return Scaling(shift, scale, centre, spread, powers, arcsinh=tuple(map(bool, heavy)), logs=logs)

    @staticmethod
    def plain(values: np.ndarray, *, weight: np.ndarray | None = None) -> "Scaling":
        """Return the scaling by mean and standard deviation alone; constant columns keep scale 1."""
        scale = np.where(constant_columns(values), 1.0, np.sqrt(weighted_variance(values, weight)))
        return Scaling.linear(weighted_mean(values, weight), scale)

    @staticmethod
    def linear(shift: np.ndarray, scale: np.ndarray, **fields: Any) -> "Scaling":
        """Return ``z = (x - shift) / scale``."""
        zeros, ones = np.zeros(len(shift)), np.ones(len(shift))
        return Scaling(shift, scale, zeros, ones, ones, arcsinh=(False,) * len(shift), **fields)

    @classmethod
    def of(
        cls,
        values: np.ndarray,
        kinds: Sequence[Any],
        *,
        inputs: bool = False,
        power: bool = False,
        weight: np.ndarray | None = None,
    ) -> "Scaling":
        """Return the scaling of columns of these kinds, as targets or as inputs.

        The cells that are present and differ from the column's atom determine the scaling of each column.
        """
        parts = []
        for kind, column in zip(kinds, values.T, strict=True):
            seen = ~np.isnan(column) & (column != (np.nan if kind.atom is None else kind.atom))
            own = None if weight is None else weight[seen]
            parts.append(kind.others.scaling(column[seen], inputs=inputs, power=power, weight=own))
        missing = np.isnan(values).sum(axis=0)
        return cls(
            **{name: np.concatenate([[], *(getattr(part, name) for part in parts)]) for name in ARRAYS},
            arcsinh=tuple(flag for part in parts for flag in part.arcsinh),
            logs=tuple(flag for part in parts for flag in part.logs or (False,)),
            kinds=tuple(kinds),
            gaps=tuple(map(bool, missing > 0)),
            rare=tuple(map(bool, missing < ENOUGH_GAPS)),
        )

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.shift.shape[0]

    @np.errstate(over="ignore")  # values that are too far out are infinite in model units
    def to_model(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n e"]:
        """Return the rows in model units."""
        if not self._has_atoms:
            return self._scaled(values)
        xp, atoms = values.__array_namespace__(), self.atoms(values)
        return xp.where(atoms, np.inf, self._scaled(xp.where(atoms, np.nan, values)))

    def to_data(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        """Return the rows in data units, inside the support of their kinds."""
        xp = values.__array_namespace__()
        w = self.centre + self.spread * values
        u = _inverse_yeo_johnson(w, self.powers)
        u = xp.where(xp.asarray(self.arcsinh), xp.sinh(w), u) if any(self.arcsinh) else u
        x = self.shift + self.scale * u
        if any(self.logs):
            logs = xp.asarray(self.logs)
            x = xp.where(logs, xp.exp(xp.where(logs, xp.minimum(x, LARGEST_LOGARITHM), 0.0)), x)
        if not self.kinds:
            return x
        roundings = [kind.others.rounding for kind in self.kinds]
        if (on := np.array([one is not None for one in roundings])).any():
            lattices = Rounding(*np.array([one or Rounding(1.0) for one in roundings]).T)
            x = xp.where(on, lattices.nearest(x), x)
        low, high = self.ends
        x = xp.clip(x, low, high) if np.isfinite(self.ends).any() else x
        return xp.where(xp.isinf(values), self.atom_values, x) if self._has_atoms else x

    def log_jacobian(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
        """Return ``log |dz/dx|`` of each row: log density in data units minus that in model units."""
        return values.__array_namespace__().sum(self.log_jacobians(values), axis=1)

    def log_jacobians(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        """Return ``log |dz/dx|`` of each cell; 0 for atoms, missing cells and discrete columns."""
        xp = values.__array_namespace__()
        if not self.kinds:
            return self._log_slopes(values)
        counted = xp.isnan(values) | self.atoms(values) | self._discrete
        return xp.where(counted, 0.0, self._log_slopes(xp.where(counted, 1.0, values)))

    def atoms(self, values: Float[AnyArray, "n d"]) -> Bool[AnyArray, "n d"]:
        """Return which cells have the value of their column's atom."""
        return values == self.atom_values

    def inside(self, values: Float[AnyArray, "n d"]) -> Bool[AnyArray, " n"]:
        """Return which rows lie in the support; missing cells do."""
        xp, (low, high) = values.__array_namespace__(), self.ends
        cells = (values >= low) & (values <= high) & ~(self._discrete & (values != xp.round(values)))
        return xp.all(cells | xp.isnan(values) | self.atoms(values), axis=1)

    @property
    def ends(self) -> Float[np.ndarray, "2 d"]:
        """Return the ends of each column's support in data units; those of an atom are not part of it."""
        if not self.kinds:
            return np.tile([[-np.inf], [np.inf]], self.width)
        return np.array([kind.others.ends for kind in self.kinds]).T

    @property
    def model_ends(self) -> Float[np.ndarray, "2 d"]:
        """Return the ends of each column's support in model units."""
        ends, logs = self.ends, np.array(self.logs or (False,) * self.width)
        free = np.isinf(ends) | logs
        with np.errstate(all="ignore"):
            return np.where(free, [[-np.inf], [np.inf]], self._scaled(np.where(free, 1.0, ends)))

    @property
    def atom_values(self) -> np.ndarray:
        """Return the value of each column's atom, NaN where it has none."""
        return np.array([np.nan if kind.atom is None else kind.atom for kind in self.kinds] or np.nan, float)

    @property
    def _has_atoms(self) -> bool:
        return any(kind.atom is not None for kind in self.kinds)

    @property
    def _discrete(self) -> np.ndarray:
        return np.array([kind.others.discrete for kind in self.kinds] or False, bool)

    def _scaled(self, values: AnyArray) -> AnyArray:
        xp = values.__array_namespace__()
        scaled = (_logarithms(values, self.logs) - self.shift) / self.scale
        u = _yeo_johnson(scaled, self.powers)
        u = xp.where(xp.asarray(self.arcsinh), xp.arcsinh(scaled), u) if any(self.arcsinh) else u
        return (u - self.centre) / self.spread

    def _log_slopes(self, values: AnyArray) -> AnyArray:
        xp, x = values.__array_namespace__(), _logarithms(values, self.logs)
        u = (x - self.shift) / self.scale
        stretch = (_rates(u, self.powers) - 1.0) * xp.log1p(xp.abs(u))
        if any(self.arcsinh):
            # log of sqrt(1 + u^2) without the overflow of u^2.
            stretch = xp.where(xp.asarray(self.arcsinh), -xp.log(xp.hypot(xp.ones_like(u), u)), stretch)
        stretch = stretch - xp.log(self.scale) - xp.log(self.spread)
        return xp.where(xp.asarray(self.logs), stretch - x, stretch) if any(self.logs) else stretch


class InputEncoding(PlainModule):
    """The encoding of columns in model units as inputs of a network.

    Each column is encoded by its kind; columns with atoms and with missing cells have one more input each,
    which is 1 at the atom or where the cell is missing.
    """

    kinds: tuple[Any, ...] = eqx.field(static=True)
    atoms: tuple[int, ...] = eqx.field(static=True, default=())
    gaps: tuple[int, ...] = eqx.field(static=True, default=())

    @staticmethod
    def of(scaling: Scaling) -> "InputEncoding":
        """Return the encoding of the columns of a scaling."""
        atoms = tuple(j for j, kind in enumerate(scaling.kinds) if kind.atom is not None)
        gaps = tuple(j for j, gap in enumerate(scaling.gaps) if gap)
        return InputEncoding(tuple(kind.others for kind in scaling.kinds), atoms, gaps)

    @property
    def owners(self) -> np.ndarray:
        """Return the column of each input."""
        own = np.repeat(np.arange(len(self.kinds)), [kind.inputs for kind in self.kinds])
        return np.concatenate([own, self.atoms, self.gaps]).astype(int)

    def only(self, column: int) -> "InputEncoding":
        """Return the encoding of one column."""
        flag = lambda columns: (0,) if column in columns else ()
        return InputEncoding((self.kinds[column],), flag(self.atoms), flag(self.gaps))

    def __call__(self, z: Float[AnyArray, "n d"]) -> Float[AnyArray, "n a"]:
        """Return the inputs; those of an absent value are zero."""
        plain = all(kind.inputs == 1 for kind in self.kinds)
        if plain and not self.atoms and not self.gaps:
            return z
        xp = z.__array_namespace__()
        there = xp.isfinite(z)
        safe = xp.where(there, z, 0.0)
        parts = [safe]
        if not plain:
            parts = [kind.encoded(safe[:, j]) * there[:, j, None] for j, kind in enumerate(self.kinds)]
        flags = [xp.isinf(z[:, list(self.atoms)]), xp.isnan(z[:, list(self.gaps)])]
        return xp.concatenate([*parts, *flags], axis=1).astype(z.dtype)


class InputScaling(Scaling):
    """The scaling of conditions, whose rows in model units are the inputs of a network.

    An unknown label, -1, is encoded as a missing cell in columns with enough of them in training.
    """

    def to_model(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n e"]:
        rare = self.rare or (False,) * len(self.gaps)
        columns = zip(self.kinds, self.gaps, rare, strict=True)
        learned = [kind.categorical and gap and not few for kind, gap, few in columns]
        if any(learned):
            values = values.__array_namespace__().where(np.array(learned) & (values < 0.0), np.nan, values)
        return InputEncoding.of(self)(super().to_model(values))


def _logarithms(values: Float[AnyArray, "n d"], logs: tuple[bool, ...]) -> Float[AnyArray, "n d"]:
    """Return the values, some columns as their logarithms."""
    if not any(logs):
        return values
    xp, chosen = values.__array_namespace__(), np.asarray(logs)
    return xp.where(chosen, xp.log(xp.where(chosen, values, 1.0)), values)


def most_normal_power(column: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Return the Yeo-Johnson power of highest normal likelihood among those that map the line onto itself."""
    import scipy.optimize

    # The normal log likelihood of the transformed column at its own mean and variance, Jacobian included.
    counts = np.ones(len(column)) if weight is None else weight
    log_stretch = np.sum(counts * np.sign(column) * np.log1p(np.abs(column)))
    total = counts.sum()

    def cost(power: float) -> float:
        variance = weighted_variance(_yeo_johnson(column, np.asarray(power)), weight)
        return 0.5 * total * np.log(variance) - (power - 1.0) * log_stretch

    return float(scipy.optimize.minimize_scalar(cost, bounds=(0.0, 2.0), method="bounded").x)


def _rates(u: AnyArray, powers: AnyArray) -> AnyArray:
    """Return the exponents of ``1 + |u|``: the power on the right side, two minus the power on the left."""
    xp = u.__array_namespace__()
    return xp.where(u >= 0.0, powers, 2.0 - powers)


def _yeo_johnson(u: AnyArray, powers: AnyArray) -> AnyArray:
    xp, rates = u.__array_namespace__(), _rates(u, powers)
    logs, small = xp.log1p(xp.abs(u)), rates < SMALL_RATE
    size = xp.where(small, logs, xp.expm1(rates * logs) / xp.where(small, 1.0, rates))
    return xp.where(rates == 1.0, u, xp.sign(u) * size)


def _inverse_yeo_johnson(w: AnyArray, powers: AnyArray) -> AnyArray:
    xp, rates = w.__array_namespace__(), _rates(w, powers)
    small = rates < SMALL_RATE
    logs = xp.where(small, xp.abs(w), xp.log1p(rates * xp.abs(w)) / xp.where(small, 1.0, rates))
    return xp.where(rates == 1.0, w, xp.sign(w) * xp.expm1(logs))


def heavy_tailed_columns(
    values: np.ndarray, weight: np.ndarray | None = None, around: tuple[float, float] = BOTH_TAILS
) -> np.ndarray:
    """Return a mask of the heavy-tailed columns.

    These are the columns with a value too far from the median for any light tail, and those with a long tail
    that are closer to normal on the scale of arcsinh. ``around`` has the length of the tail and the gain that
    are needed around the median. Distant rows that are close together are a mode, not a tail.
    """
    low, middle, high = percentiles(values, [25, 50, 75], weight)
    distances = np.abs(values - middle) / np.where(high > low, high - low, np.inf)
    heavy = distances.max(axis=0) > HEAVY_TAIL
    for j in np.flatnonzero((distances.max(axis=0) > around[0]) & ~heavy):
        shift, _, found = most_normal_arcsinh(values[:, j], weight)
        length, gain = around if shift == middle[j] else ONE_TAIL
        tail = distances[distances[:, j] > length, j]
        heavy[j] = len(tail) > 0 and found > gain and not _is_mode(tail)
    return heavy


def _is_mode(distances: Float[np.ndarray, " n"]) -> bool:
    """Return whether distant rows are close together."""
    left, middle, right = np.percentile(distances, [25, 50, 75])
    return len(distances) >= MODE_ROWS and bool(right - left < MODE_WIDTH * middle)


def most_normal_arcsinh(column: np.ndarray, weight: np.ndarray | None = None) -> tuple[float, float, float]:
    """Return shift and scale of ``arcsinh((x - shift) / scale)`` of highest normal likelihood.

    The third number is the gain in mean log density over the normal of x itself (nats). The shifts are the
    median, with the interquartile range as its scale, and the ends of the data, and 0 if it is not between
    them. There a small scale makes arcsinh a logarithm; at the median it would make both tails too long.
    """
    low, high = column.min(), column.max()
    left, middle, right = percentiles(column[:, None], [25, 50, 75], weight)[:, 0]
    best = middle, 1.0, -np.inf
    for shift in (middle, low, high, *([] if low <= 0.0 <= high else [0.0])):
        scales = percentiles(np.abs(column - shift)[:, None], ARCSINH_SCALES, weight)[:, 0]
        for scale in [right - left] if shift == middle else scales:
            if scale > 0.0:
                u = (column - shift) / scale
                slopes = weighted_mean(np.log(np.hypot(1.0, u)), weight)
                spread = 0.5 * np.log(weighted_variance(np.arcsinh(u), weight))
                best = max(best, (shift, scale, -np.log(scale) - slopes - spread), key=lambda one: one[2])
    shift, scale, score = best
    return float(shift), float(scale), float(score + 0.5 * np.log(weighted_variance(column, weight)))


def constant_columns(values: np.ndarray) -> np.ndarray:
    """Return a mask of the columns that hold a single value up to rounding."""
    with np.errstate(over="ignore"):
        return np.ptp(values, axis=0) <= CONSTANT_TOLERANCE * np.abs(values).max(axis=0)
