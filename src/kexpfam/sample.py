"""The data as the library sees them: targets, their conditions, and the units they are in."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# A column whose spread is below this share of its magnitude is constant up to rounding.
CONSTANT_TOLERANCE = 1e-10
# In interquartile ranges; of a million normal values the furthest is at 3.7, of a million exponential ones at 12.
HEAVY_TAIL = 10.0


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

    ``u = (x - shift) / scale`` and ``z = (u - centre) / spread``, with ``arcsinh(u)`` for ``u`` in the columns that are
    ``warped``: heavy tails become ordinary ones, so that a few far points neither set the scale nor fall off the base measure.
    """

    shift: Float[Array, " d"]
    scale: Float[Array, " d"]
    centre: Float[Array, " d"]
    spread: Float[Array, " d"]
    warped: tuple[bool, ...] = eqx.field(static=True)

    @staticmethod
    def standardising(values: np.ndarray) -> "Scaling":
        """Return the scaling that gives every column mean 0 and standard deviation 1; constant columns keep scale 1."""
        warped = heavy_tailed_columns(values)
        low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
        constant = constant_columns(values)
        shift = np.where(warped, middle, values.mean(axis=0))
        scale = np.where(warped, high - low, np.where(constant, 1.0, values.std(axis=0)))
        u = (values - shift) / scale
        u = np.where(warped, np.arcsinh(u), u)
        centre = np.where(warped, u.mean(axis=0), 0.0)
        spread = np.where(warped, u.std(axis=0), 1.0)
        numbers = [jnp.asarray(part) for part in (shift, scale, centre, spread)]
        return Scaling(numbers[0], numbers[1], numbers[2], numbers[3], tuple(bool(column) for column in warped))

    def to_model(self, values):
        u = (values - self.shift) / self.scale
        u = jnp.where(jnp.asarray(self.warped), jnp.arcsinh(u), u) if any(self.warped) else u
        return (u - self.centre) / self.spread

    def to_data(self, values):
        u = self.centre + self.spread * values
        u = jnp.where(jnp.asarray(self.warped), jnp.sinh(u), u) if any(self.warped) else u
        return self.shift + self.scale * u

    def log_jacobian(self, values) -> Float[Array, " n"]:
        """Return ``log |dz/dx|`` at each row of data: a log density in model units plus this is one in data units."""
        u = (values - self.shift) / self.scale
        stretch = jnp.where(jnp.asarray(self.warped), 0.5 * jnp.log1p(u**2), 0.0)
        return -jnp.sum(stretch + jnp.log(self.scale) + jnp.log(self.spread), axis=1)


def heavy_tailed_columns(values: np.ndarray) -> np.ndarray:
    """Return a mask of the columns with a value further from the median than any light tail would put it."""
    low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
    furthest = np.abs(values - middle).max(axis=0)
    return (high > low) & (furthest > HEAVY_TAIL * (high - low))


def constant_columns(values: np.ndarray) -> np.ndarray:
    """Return a mask of the columns that hold a single value up to rounding."""
    magnitude = np.maximum(np.abs(values).max(axis=0), np.finfo(float).tiny)
    return np.ptp(values, axis=0) <= CONSTANT_TOLERANCE * magnitude
