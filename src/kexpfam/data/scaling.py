"""The map between data units and model units, column by column, with its log-Jacobian."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import AnyArray
from kexpfam.data.weights import percentiles, weighted_mean, weighted_variance

__all__ = ["Scaling", "constant_columns", "heavy_tailed_columns", "most_normal_power"]

# A column whose spread is below this share of its magnitude, some hundred times its rounding, is constant: 1e9 + 1e-3 z is not.
CONSTANT_TOLERANCE = 2e-14
# In interquartile ranges; of a million normal values the furthest is at 3.7, of a million exponential ones at 12.
HEAVY_TAIL = 10.0
# Exponentials of larger numbers overflow.
LARGEST_LOGARITHM = 700.0
# A power this close to 0 (or 2) is taken for its limit, the logarithm.
SMALL_RATE = 1e-8


class Scaling(eqx.Module):
    """The map between data units x and model units z, column by column.

    ``u = (x - shift) / scale`` and ``z = (w(u) - centre) / spread``. In columns that are ``warped``, w is arcsinh: heavy tails
    become ordinary ones, so that a few far points neither set the scale nor fall off the base measure. In the others w is the
    Yeo-Johnson transformation of that power, which takes out skewness; power 1, the default, is the identity. In columns of
    ``logs`` x stands for its logarithm.

    The maps take NumPy arrays or JAX arrays and give back what they were given.
    """

    shift: Float[AnyArray, " d"]
    scale: Float[AnyArray, " d"]
    centre: Float[AnyArray, " d"]
    spread: Float[AnyArray, " d"]
    powers: Float[AnyArray, " d"]
    warped: tuple[bool, ...] = eqx.field(static=True)
    logs: tuple[bool, ...] = eqx.field(static=True, default=())

    @staticmethod
    def standardising(
        values: np.ndarray,
        *,
        power: bool = False,
        weight: np.ndarray | None = None,
        logs: tuple[bool, ...] = (),
    ) -> "Scaling":
        """Return the scaling that gives every column mean 0 and standard deviation 1; constant columns keep scale 1.

        With ``power``, each column is first made as close to normal as a Yeo-Johnson transformation can make it. Those of
        ``logs`` stand for their logarithms.
        """
        values = _logarithms(values, logs)
        constant = constant_columns(values)
        shift, scale = (
            weighted_mean(values, weight),
            np.where(constant, 1.0, np.sqrt(weighted_variance(values, weight))),
        )
        powers = np.ones(values.shape[1])
        if power:
            columns = ((values - shift) / scale).T
            powers = np.array(
                [
                    1.0 if constant[j] else most_normal_power(column, weight)
                    for j, column in enumerate(columns)
                ]
            )
        warped = heavy_tailed_columns(_yeo_johnson((values - shift) / scale, powers), weight)
        low, middle, high = percentiles(values, [25, 50, 75], weight)
        shift, scale = np.where(warped, middle, shift), np.where(warped, high - low, scale)
        powers = np.where(warped, 1.0, powers)
        u = (values - shift) / scale
        u = np.where(warped, np.arcsinh(u), _yeo_johnson(u, powers) if power else u)
        moved = warped | (powers != 1.0)
        centre = np.where(moved, weighted_mean(u, weight), 0.0)
        spread = np.where(moved, np.sqrt(weighted_variance(u, weight)), 1.0)
        return Scaling(shift, scale, centre, spread, powers, warped=tuple(map(bool, warped)), logs=logs)

    @staticmethod
    def plain(values: np.ndarray, *, weight: np.ndarray | None = None) -> "Scaling":
        """Return the scaling by mean and standard deviation alone; constant columns keep scale 1."""
        scale = np.where(constant_columns(values), 1.0, np.sqrt(weighted_variance(values, weight)))
        zeros, ones = np.zeros(values.shape[1]), np.ones(values.shape[1])
        return Scaling(
            weighted_mean(values, weight), scale, zeros, ones, ones, warped=(False,) * values.shape[1]
        )

    @staticmethod
    def joined(parts: "Sequence[Scaling]") -> "Scaling":
        """Return one scaling of the columns of several."""
        names = ("shift", "scale", "centre", "spread", "powers")
        arrays: Any = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        warped = tuple(column for part in parts for column in part.warped)
        return Scaling(
            **arrays, warped=warped, logs=tuple(column for part in parts for column in part.log_columns)
        )

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.shift.shape[0]

    @property
    def log_columns(self) -> tuple[bool, ...]:
        """Return of each column whether its logarithm is scaled."""
        return self.logs or (False,) * self.width

    @np.errstate(over="ignore")  # infinity is the right place for what is too far out
    def to_model(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        """Return the rows in model units."""
        xp = values.__array_namespace__()
        scaled = (_logarithms(values, self.logs) - self.shift) / self.scale
        u = _yeo_johnson(scaled, self.powers)
        u = xp.where(xp.asarray(self.warped), xp.arcsinh(scaled), u) if any(self.warped) else u
        return (u - self.centre) / self.spread

    def to_data(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        """Return the rows in data units."""
        xp = values.__array_namespace__()
        w = self.centre + self.spread * values
        u = _inverse_yeo_johnson(w, self.powers)
        u = xp.where(xp.asarray(self.warped), xp.sinh(w), u) if any(self.warped) else u
        x = self.shift + self.scale * u
        if not any(self.logs):
            return x
        logs = xp.asarray(self.logs)
        return xp.where(logs, xp.exp(xp.where(logs, xp.minimum(x, LARGEST_LOGARITHM), 0.0)), x)

    def log_jacobian(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
        """Return ``log |dz/dx|`` at each row of data: a log density in model units plus this is one in data units."""
        xp = values.__array_namespace__()
        return xp.sum(self.log_jacobians(values), axis=1)

    def log_jacobians(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        """Return ``log |dz/dx|`` of each column of each row."""
        xp, x = values.__array_namespace__(), _logarithms(values, self.logs)
        u = (x - self.shift) / self.scale
        stretch = (_rates(u, self.powers) - 1.0) * xp.log1p(xp.abs(u))
        if any(self.warped):
            # log of sqrt(1 + u^2), which u^2 must not overflow.
            stretch = xp.where(xp.asarray(self.warped), -xp.log(xp.hypot(xp.ones_like(u), u)), stretch)
        stretch = stretch - xp.log(self.scale) - xp.log(self.spread)
        return xp.where(xp.asarray(self.logs), stretch - x, stretch) if any(self.logs) else stretch


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
    log_stretches, counts = (
        np.sign(column) * np.log1p(np.abs(column)),
        np.ones(len(column)) if weight is None else weight,
    )
    log_stretch, total = np.sum(counts * log_stretches), counts.sum()

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


def heavy_tailed_columns(values: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Return a mask of the columns with a value further from the median than any light tail would put it."""
    low, middle, high = percentiles(values, [25, 50, 75], weight)
    furthest = np.abs(values - middle).max(axis=0)
    return (high > low) & (furthest > HEAVY_TAIL * (high - low))


def constant_columns(values: np.ndarray) -> np.ndarray:
    """Return a mask of the columns that hold a single value up to rounding."""
    with np.errstate(over="ignore"):
        return np.ptp(values, axis=0) <= CONSTANT_TOLERANCE * np.abs(values).max(axis=0)
