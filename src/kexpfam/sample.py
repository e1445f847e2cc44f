"""The data as the library sees them: targets, their conditions, and the units they are in."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.stats
from jaxtyping import Array, Float

# A column whose spread is below this share of its magnitude is constant up to rounding.
CONSTANT_TOLERANCE = 1e-10
# In interquartile ranges; of a million normal values the furthest is at 3.7, of a million exponential ones at 12.
HEAVY_TAIL = 10.0
# A power this close to 0 (or 2) is taken for its limit, the logarithm.
SMALL_RATE = 1e-8


class Sample(eqx.Module):
    """Targets and the conditions they were seen under.

    An unconditional sample is one whose conditions have width zero, so that ``p(x)`` and ``p(y | x)`` share every
    line of code behind this class.
    """

    target: Float[Array, "n d"]
    condition: Float[Array, "n p"]

    @staticmethod
    def unconditional(target) -> "Sample":
        """Return a sample with conditions of width zero."""
        target = jnp.asarray(target)
        return Sample(target, jnp.zeros((target.shape[0], 0), target.dtype))

    def __len__(self) -> int:
        return self.target.shape[0]

    def rows(self, index) -> "Sample":
        """Return the rows at ``index``."""
        return Sample(self.target[index], self.condition[index])


class Scaling(eqx.Module):
    """The map between data units x and model units z, column by column.

    ``u = (x - shift) / scale`` and ``z = (w(u) - centre) / spread``. In columns that are ``warped``, w is arcsinh: heavy tails
    become ordinary ones, so that a few far points neither set the scale nor fall off the base measure. In the others w is the
    Yeo-Johnson transformation of that power, which takes out skewness; power 1, the default, is the identity.
    """

    shift: Float[Array, " d"]
    scale: Float[Array, " d"]
    centre: Float[Array, " d"]
    spread: Float[Array, " d"]
    powers: Float[Array, " d"]
    warped: tuple[bool, ...] = eqx.field(static=True)

    @staticmethod
    def standardising(values: np.ndarray, *, power: bool = False) -> "Scaling":
        """Return the scaling that gives every column mean 0 and standard deviation 1; constant columns keep scale 1.

        With ``power``, each column is first made as close to normal as a Yeo-Johnson transformation can make it.
        """
        constant = constant_columns(values)
        shift, scale = values.mean(axis=0), np.where(constant, 1.0, values.std(axis=0))
        powers = np.ones(values.shape[1])
        if power:
            columns = ((values - shift) / scale).T
            powers = np.array([1.0 if constant[j] else most_normal_power(column) for j, column in enumerate(columns)])
        warped = heavy_tailed_columns(np.asarray(_yeo_johnson((values - shift) / scale, powers)))
        low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
        shift, scale = np.where(warped, middle, shift), np.where(warped, high - low, scale)
        powers = np.where(warped, 1.0, powers)
        u = (values - shift) / scale
        u = np.where(warped, np.arcsinh(u), np.asarray(_yeo_johnson(u, powers)) if power else u)
        moved = warped | (powers != 1.0)
        centre, spread = np.where(moved, u.mean(axis=0), 0.0), np.where(moved, u.std(axis=0), 1.0)
        parts = {"shift": shift, "scale": scale, "centre": centre, "spread": spread, "powers": powers}
        numbers = {name: jnp.asarray(part) for name, part in parts.items()}
        return Scaling(**numbers, warped=tuple(bool(column) for column in warped))

    @staticmethod
    def plain(values: np.ndarray) -> "Scaling":
        """Return the scaling by mean and standard deviation alone; constant columns keep scale 1."""
        scale = np.where(constant_columns(values), 1.0, values.std(axis=0))
        zeros, ones = jnp.zeros(values.shape[1]), jnp.ones(values.shape[1])
        shift = jnp.asarray(values.mean(axis=0))
        return Scaling(shift, jnp.asarray(scale), zeros, ones, ones, warped=(False,) * values.shape[1])

    def to_model(self, values):
        u = _yeo_johnson((values - self.shift) / self.scale, self.powers)
        u = jnp.where(jnp.asarray(self.warped), jnp.arcsinh((values - self.shift) / self.scale), u) if any(self.warped) else u
        return (u - self.centre) / self.spread

    def to_data(self, values):
        w = self.centre + self.spread * values
        u = _inverse_yeo_johnson(w, self.powers)
        u = jnp.where(jnp.asarray(self.warped), jnp.sinh(w), u) if any(self.warped) else u
        return self.shift + self.scale * u

    def log_jacobian(self, values) -> Float[Array, " n"]:
        """Return ``log |dz/dx|`` at each row of data: a log density in model units plus this is one in data units."""
        u = (values - self.shift) / self.scale
        power_stretch = (_rates(u, self.powers) - 1.0) * jnp.log1p(jnp.abs(u))
        stretch = jnp.where(jnp.asarray(self.warped), -0.5 * jnp.log1p(u**2), power_stretch)
        return jnp.sum(stretch - jnp.log(self.scale) - jnp.log(self.spread), axis=1)


def most_normal_power(column: np.ndarray) -> float:
    """Return the Yeo-Johnson power of highest normal likelihood among those that map the line onto itself."""
    cost = lambda power: -scipy.stats.yeojohnson_llf(power, column)
    return float(scipy.optimize.minimize_scalar(cost, bounds=(0.0, 2.0), method="bounded").x)


def _rates(u, powers):
    """Return the exponents of ``1 + |u|``: the power on the right side, two minus the power on the left."""
    return jnp.where(u >= 0.0, powers, 2.0 - powers)


def _yeo_johnson(u, powers):
    rates = _rates(u, powers)
    logs, small = jnp.log1p(jnp.abs(u)), rates < SMALL_RATE
    size = jnp.where(small, logs, jnp.expm1(rates * logs) / jnp.where(small, 1.0, rates))
    return jnp.where(rates == 1.0, u, jnp.sign(u) * size)


def _inverse_yeo_johnson(w, powers):
    rates = _rates(w, powers)
    small = rates < SMALL_RATE
    logs = jnp.where(small, jnp.abs(w), jnp.log1p(rates * jnp.abs(w)) / jnp.where(small, 1.0, rates))
    return jnp.where(rates == 1.0, w, jnp.sign(w) * jnp.expm1(logs))


def heavy_tailed_columns(values: np.ndarray) -> np.ndarray:
    """Return a mask of the columns with a value further from the median than any light tail would put it."""
    low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
    furthest = np.abs(values - middle).max(axis=0)
    return (high > low) & (furthest > HEAVY_TAIL * (high - low))


def constant_columns(values: np.ndarray) -> np.ndarray:
    """Return a mask of the columns that hold a single value up to rounding."""
    magnitude = np.maximum(np.abs(values).max(axis=0), np.finfo(float).tiny)
    return np.ptp(values, axis=0) <= CONSTANT_TOLERANCE * magnitude
