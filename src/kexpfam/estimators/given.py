"""One conditional density as an object of its own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from kexpfam.data.frames import as_table
from kexpfam.data.kinds import AbstractKind
from kexpfam.data.sample import AnyArray
from kexpfam.estimators.messages import Seed
from kexpfam.model.distributions import scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GivenDensity"]


class GivenDensity:
    """``p(y | x)`` at one x: score points, draw, and look at it; ``condition`` is x by the names of its columns."""

    condition: dict[str, Any] | None = None
    target_names: list[str] | None = None
    target_kinds: Sequence[AbstractKind] = ()

    def __init__(self, density: Any, flat: bool, draws: Callable[..., np.ndarray]) -> None:
        self.density, self._flat, self._draws = density, flat, draws

    def score_samples(self, y: ArrayLike) -> np.ndarray:
        """Return the log density at each y, given with shape (n,) or (n, p)."""
        points = check_array(as_table(y), dtype=np.float64, ensure_2d=False, input_name="y")
        width = self.density.scaling.width
        if points.size % width or (points.ndim > 1 and points.shape[-1] != width):
            raise ValueError(f"y has {points.shape[-1]} columns, but the model was fitted to {width}.")
        return scores(self.density, points.reshape(-1, width))

    def log_prob(self, y: Float[AnyArray, "*d"]) -> Float[Array, ""]:
        """Return the log density at one y as a pure function of JAX."""
        return self.density.log_prob(y)

    def sample(self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0) -> np.ndarray:
        """Return draws of y, of shape (n_samples,) or (n_samples, p)."""
        draws = self._draws(self.density, n_samples, random_state, refine)
        return draws[:, 0] if self._flat else draws

    def plot(self, **kwargs: Any) -> "Figure":
        """Return a figure: the density of a one-dimensional y, draws of the first two columns of a wider one."""
        from kexpfam import plot  # matplotlib is slow to import

        return plot.plot_given(self, **kwargs)
