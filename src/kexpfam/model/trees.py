"""Sums of regression trees as functions of the inputs, on NumPy arrays and inside compiled programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kexpfam.data.sample import AnyArray
from kexpfam.model.measures import in_blocks


class Trees(eqx.Module):
    """Sums of binary trees, one sum per output.

    Nodes are in depth-first order: node ``i`` is followed by ``i + 1`` where its input is at most its number,
    and by ``right[i]`` elsewhere. A leaf has input -1, and its number is its value. ``depth`` is the largest
    number of splits above a leaf.
    """

    start: Float[AnyArray, " o"]
    inputs: Int[AnyArray, "o t n"]
    numbers: Float[AnyArray, "o t n"]
    right: Int[AnyArray, "o t n"]
    depth: Int[AnyArray, ""]

    def __call__(self, rows: Float[AnyArray, "n a"]) -> Float[AnyArray, "n o"]:
        """Return the outputs of rows."""
        if isinstance(rows, np.ndarray):
            return in_blocks(lambda block: _sums(self, block), rows)
        return _sums(self, rows)


@jax.jit
def _sums(trees: Trees, rows: Float[Array, "n a"]) -> Float[Array, "n o"]:
    """Return the outputs of rows. They are piecewise constant in the rows: their derivative is 0."""
    rows, (outputs, count, size) = jax.lax.stop_gradient(rows), trees.inputs.shape
    inputs, numbers, right = (jnp.reshape(part, -1) for part in (trees.inputs, trees.numbers, trees.right))
    first = size * jnp.arange(outputs * count, dtype=inputs.dtype)

    def descended(_: Int[Array, ""], node: Int[Array, "n trees"]) -> Int[Array, "n trees"]:
        value = jnp.take_along_axis(rows, inputs[node], axis=1)
        below = jnp.where(value <= numbers[node], node + 1, first + right[node])
        return jnp.where(inputs[node] < 0, node, below)

    node = jax.lax.fori_loop(0, trees.depth, descended, jnp.tile(first, (len(rows), 1)))
    return trees.start + numbers[node].reshape(len(rows), outputs, count).sum(2)
