"""Samples in model units: targets, their conditions and the weights of rows."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.sparse
from jaxtyping import Array, Float, Int, Key

from kexpfam.data.weights import effective_rows

# NumPy arrays on the host, tracers inside a compiled program. A union of both would be built at every
# annotation, a quarter of the library's own import time.
AnyArray = Any
RandomKey = Key[Array, ""]


class PlainModule(eqx.Module):
    """A module with plain bound methods: Equinox creates a module, in 30 microseconds, at every access.

    Its methods are not pytrees, and are closures in compiled functions.
    """

    __getattribute__ = object.__getattribute__


class Sample(eqx.Module):
    """Targets and their conditions in model units; ``weight`` is None if all rows have the same weight.

    An unconditional sample has conditions of width zero, so that ``p(x)`` and ``p(y | x)`` share all code.
    """

    target: Float[AnyArray, "n d"]
    condition: Float[AnyArray, "n p"]
    weight: Float[AnyArray, " n"] | None = None

    @staticmethod
    def unconditional(target: AnyArray, weight: AnyArray | None = None) -> "Sample":
        """Return a sample with conditions of width zero."""
        return Sample(target, np.zeros((target.shape[0], 0), target.dtype), weight)

    def __len__(self) -> int:
        return self.target.shape[0]

    @property
    def conditional(self) -> bool:
        """Return whether there is a condition at all."""
        return self.condition.shape[1] > 0

    @property
    def counts(self) -> Float[AnyArray, " n"]:
        """Return the weight of each row, ones if all are the same."""
        return np.ones(len(self)) if self.weight is None else self.weight

    @property
    def shares(self) -> Float[AnyArray, " n"]:
        """Return the weight of each row as a share of all."""
        return self.counts / self.counts.sum()

    @property
    def effective_rows(self) -> float:
        """Return the effective sample size."""
        return effective_rows(self.weight, len(self))

    def rows(self, index: AnyArray | slice) -> "Sample":
        """Return the rows at ``index``."""
        # A traced index needs a JAX array.
        convert = jnp.asarray if isinstance(index, jax.Array) else lambda part: part
        return jax.tree.map(lambda part: convert(part)[index], self)

    def drawn(self, count: int, *, key: Key[Array, ""]) -> Int[Array, " count"]:
        """Return positions of rows, drawn with replacement with probabilities proportional to the weights."""
        if self.weight is None:
            return jr.randint(key, (count,), 0, len(self))
        cumulative = jnp.cumsum(jnp.asarray(self.weight))
        levels = jr.uniform(key, (count,), cumulative.dtype) * cumulative[-1]
        return jnp.minimum(jnp.searchsorted(cumulative, levels, side="right"), len(cumulative) - 1)


def row_slices(count: int, size: int) -> list[slice]:
    """Return slices that cover ``count`` rows, ``size`` at a time; the last may reach beyond them."""
    return [slice(start, start + size) for start in range(0, count, size)]


class Conditions(NamedTuple):
    """The distinct conditions of a sample, the one of each row, and the weight of each row."""

    values: np.ndarray  # (c, p)
    membership: np.ndarray  # (n,)
    counts: np.ndarray  # (n,)

    @property
    def shares(self) -> np.ndarray:
        """Return the share of rows of each condition."""
        return np.bincount(self.membership, self.counts, minlength=len(self.values)) / self.counts.sum()

    def totals(self, rows: np.ndarray) -> np.ndarray:
        """Return the weighted sums of the rows of each condition, (c, r)."""
        shape = (len(self.values), len(rows))
        return scipy.sparse.csr_array((self.counts, (self.membership, np.arange(len(rows)))), shape) @ rows


def distinct_conditions(sample: Sample) -> Conditions:
    """Return the distinct conditions; rows without a condition all have the same, empty one."""
    counts = np.asarray(sample.counts)
    if not sample.conditional:
        return Conditions(np.zeros((1, 0)), np.zeros(len(sample), int), counts)
    values, membership = np.unique(np.asarray(sample.condition), axis=0, return_inverse=True)
    return Conditions(values, membership.ravel(), counts)
