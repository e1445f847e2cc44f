"""How draws go through a masked network: every hidden unit is computed once, when the targets that it looks at are there."""

import numpy as np
from jaxtyping import Float, Int

from kexpfam.model.networks import silu

__all__ = ["Filling"]


class Filling:
    """The hidden layers of a masked network under some rows, filled in by degree: a unit of degree j waits for j targets.

    Units lie in the order of their degrees. Those that are there are the first ones then, and no mask is needed: what a unit
    or a link may not look at is not there yet.
    """

    def __init__(
        self,
        degrees: Int[np.ndarray, " w"],
        first: Float[np.ndarray, "a w"],
        hidden: Float[np.ndarray, "l w w"],
        biases: Float[np.ndarray, "layers w"],
        x: Float[np.ndarray, "n p"],
    ):
        """Begin with the condition alone; the targets are the inputs after it."""
        self.order = np.argsort(degrees, kind="stable")
        self._degrees, self._first, self._biases = degrees[self.order], first[:, self.order], biases[:, self.order]
        self._hidden = hidden[:, self.order][:, :, self.order]
        self._entering = x @ self._first[: x.shape[1]] + self._biases[0]
        self._layers = np.zeros((len(biases), *self._entering.shape), np.float32)
        self._there = 0

    def ready(self, degree: int) -> Float[np.ndarray, "n u"]:
        """Compute the units of this degree, and return the last layer's units of this and lower ones, in their order."""
        old, self._there = self._there, int(np.searchsorted(self._degrees, degree, side="right"))
        there, new = slice(self._there), slice(old, self._there)
        self._layers[0][:, new] = silu(self._entering[:, new])
        for layer in range(1, len(self._layers)):
            below = self._layers[layer - 1]
            entering = below[:, there] @ self._hidden[layer - 1][there, new]
            entering += self._biases[layer][new]
            self._layers[layer][:, new] = below[:, new] + silu(entering)
        return self._layers[-1][:, there]

    def enter(self, inputs: slice | Int[np.ndarray, " k"], values: Float[np.ndarray, "n k"]) -> None:
        """Show the values of these inputs to all units that are still to come."""
        self._entering[:, self._there :] += values @ self._first[inputs, self._there :]
