"""The data as the library sees them: targets, their conditions, and the units they are in."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# A column whose spread is below this share of its magnitude is constant up to rounding.
CONSTANT_TOLERANCE = 1e-10


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
    """The affine map ``x = shift + scale * z`` between data units ``x`` and model units ``z``."""

    shift: Float[Array, " d"]
    scale: Float[Array, " d"]

    @staticmethod
    def standardising(values: np.ndarray) -> "Scaling":
        """Return the scaling that gives every column mean 0 and standard deviation 1; constant columns keep scale 1."""
        shift, scale = values.mean(axis=0), values.std(axis=0)
        return Scaling(jnp.asarray(shift), jnp.asarray(np.where(constant_columns(values), 1.0, scale)))

    def to_model(self, values):
        return (values - self.shift) / self.scale

    def to_data(self, values):
        return self.shift + self.scale * values

    @property
    def log_determinant(self) -> Float[Array, ""]:
        """Return ``log |dx/dz|``: a log density in model units minus this is one in data units."""
        return jnp.sum(jnp.log(self.scale))


def constant_columns(values: np.ndarray) -> np.ndarray:
    """Return a mask of the columns that hold a single value up to rounding."""
    magnitude = np.maximum(np.abs(values).max(axis=0), np.finfo(float).tiny)
    return np.ptp(values, axis=0) <= CONSTANT_TOLERANCE * magnitude
