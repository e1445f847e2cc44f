"""Sums of regression trees as functions of the inputs, on NumPy arrays and inside compiled programs."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kexpfam.data.sample import AnyArray
from kexpfam.model.measures import in_blocks

__all__ = ["Trees"]


class Trees(eqx.Module):
    """Sums of complete binary trees, one sum per output.

    The splits of a tree are in breadth-first order: split ``i`` is followed by ``2 i + 1`` where its input is
    at most the threshold, and by ``2 i + 2`` elsewhere; the leaves follow the splits.
    """

    start: Float[AnyArray, " o"]
    inputs: Int[AnyArray, "o t s"]
    thresholds: Float[AnyArray, "o t s"]
    leaves: Float[AnyArray, "o t l"]

    def __call__(self, rows: Float[AnyArray, "n a"]) -> Float[AnyArray, "n o"]:
        """Return the outputs of rows."""
        if not isinstance(rows, np.ndarray):
            return self._sums(rows)
        return in_blocks(lambda block: _sums(self, block), rows)

    def _sums(self, rows: Float[Array, "n a"]) -> Float[Array, "n o"]:
        xp, (outputs, trees, splits) = rows.__array_namespace__(), self.inputs.shape
        offsets = xp.arange(outputs * trees, dtype=np.int32)
        inputs, thresholds, leaves = (
            xp.asarray(part).reshape(-1) for part in (self.inputs, self.thresholds, self.leaves)
        )
        node = xp.zeros((len(rows), outputs * trees), dtype=np.int32)
        for _ in range(int(np.log2(splits + 1))):
            place = node + offsets * splits
            value = xp.take_along_axis(rows, inputs[place], axis=1)
            node = 2 * node + 1 + (value > thresholds[place])
        found = leaves[node - splits + offsets * (splits + 1)].reshape(len(rows), outputs, trees)
        return xp.asarray(self.start) + found.sum(2)


@jax.jit
def _sums(trees: Trees, rows: Float[Array, "n a"]) -> Float[Array, "n o"]:
    return trees._sums(rows)
