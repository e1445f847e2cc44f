"""The data as the library sees them: targets, and the conditions they were seen under."""

from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Float

__all__ = ["AnyArray", "Conditions", "Sample", "distinct_conditions"]

# Data live on the host as NumPy arrays; inside a compiled program the same fields are traced. A type checker cannot know which.
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = Array | np.ndarray | np.floating  # a NumPy function of a single point gives a scalar


class Sample(eqx.Module):
    """Targets and the conditions they were seen under, in model units.

    An unconditional sample is one whose conditions have width zero, so that ``p(x)`` and ``p(y | x)`` share every
    line of code behind this class.
    """

    target: Float[AnyArray, "n d"]
    condition: Float[AnyArray, "n p"]

    @staticmethod
    def unconditional(target: Float[AnyArray, "n d"]) -> "Sample":
        """Return a sample with conditions of width zero."""
        return Sample(target, np.zeros((target.shape[0], 0), target.dtype))

    def __len__(self) -> int:
        return self.target.shape[0]

    @property
    def conditional(self) -> bool:
        """Return whether there is a condition at all."""
        return self.condition.shape[1] > 0

    def rows(self, index: AnyArray | slice) -> "Sample":
        """Return the rows at ``index``."""
        if isinstance(index, jax.Array):  # a traced index does not reach into a NumPy array
            return Sample(jnp.asarray(self.target)[index], jnp.asarray(self.condition)[index])
        return Sample(self.target[index], self.condition[index])


class Conditions(NamedTuple):
    """The distinct conditions of a sample, and which of them each row has."""

    values: np.ndarray  # (c, p)
    membership: np.ndarray  # (n,)

    @property
    def shares(self) -> np.ndarray:
        """Return the share of the rows that each condition has."""
        return np.bincount(self.membership, minlength=len(self.values)) / len(self.membership)

    def totals(self, rows: np.ndarray) -> np.ndarray:
        """Return the sums of the rows of each condition, (c, r)."""
        shape = (len(self.values), len(rows))
        return scipy.sparse.csr_array((np.ones(len(rows)), (self.membership, np.arange(len(rows)))), shape) @ rows


def distinct_conditions(sample: Sample) -> Conditions:
    """Return the distinct conditions; rows without a condition all have the same, empty one."""
    if not sample.conditional:
        return Conditions(np.zeros((1, 0)), np.zeros(len(sample), int))
    values, membership = np.unique(np.asarray(sample.condition), axis=0, return_inverse=True)
    return Conditions(values, membership.ravel())
