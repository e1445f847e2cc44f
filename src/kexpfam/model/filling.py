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
        rows: int,
    ):
        """Begin with nothing; the weights may be those of a network that does without the masks."""
        self.order = np.argsort(degrees, kind="stable")
        self._degrees, self._first, self._biases = (
            degrees[self.order],
            first[:, self.order],
            biases[:, self.order],
        )
        self._hidden = hidden[:, self.order][:, :, self.order]
        self._layers = np.zeros((len(biases), rows, len(degrees)), np.float32)
        self._there = 0

    def ready(self, degree: int, inputs: Float[np.ndarray, "n a"]) -> Float[np.ndarray, "n u"]:
        """Return the last layer's units of this and lower degrees, in their order, once those of this one are computed.

        ``inputs`` are zero where they are not known yet.
        """
        old, self._there = self._there, int(np.searchsorted(self._degrees, degree, side="right"))
        there, new = slice(self._there), slice(old, self._there)
        self._layers[0][:, new] = silu(inputs @ self._first[:, new] + self._biases[0][new])
        for layer in range(1, len(self._layers)):
            below = self._layers[layer - 1]
            entering = below[:, there] @ self._hidden[layer - 1][there, new] + self._biases[layer][new]
            self._layers[layer][:, new] = below[:, new] + silu(entering)
        return self._layers[-1][:, there]
