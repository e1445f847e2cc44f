"""A mixture of normals by expectation maximisation, its size and shape chosen on held-out points, behind the library's face."""

from dataclasses import dataclass

import equinox as eqx
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key
from sklearn.utils.validation import check_is_fitted

from kexpfam.face import FEWEST_ROWS, DensityFace, check_columns, key_from
from kexpfam.measures import Mixture, best_mixture
from kexpfam.progress import Listener
from kexpfam.sample import Scaling


class ScaledMixture(eqx.Module):
    """A mixture of the standardised data, in the data's own units."""

    mixture: Mixture
    scaling: Scaling

    def log_density(self, points: np.ndarray) -> np.ndarray:
        """Return the log density of each row, in the data's own units."""
        z = np.asarray(self.scaling.to_model(points))
        return self.mixture.log_densities(z) + np.asarray(self.scaling.log_jacobian(points))

    def sample(self, count: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws."""
        return np.asarray(self.scaling.to_data(self.mixture.draws(count, key=key)))

    def refined_sample(self, count: int, steps: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws: the plain ones, which follow the density already."""
        return self.sample(count, key=key)


@dataclass(frozen=True)
class MixtureDiagnosis:
    """What can be known about a mixture: its size, and whether one component has shrunk onto few points."""

    verdict: str
    components: int
    smallest_share: float
    advice: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict.upper()}", f"components: {self.components}, smallest share {self.smallest_share:.2%}"]
        return "\n".join(lines + [f"- {line}" for line in self.advice])


class GaussianMixtureDensity(DensityFace):
    r"""Density :math:`p(x) = \sum_k w_k N(x; m_k, C_k)` of the standardised data, by expectation maximisation.

    The number of components and whether covariances are full or diagonal are chosen on a held-out fifth of the rows.

    Parameters
    ----------
    random_state : int, RandomState or None
        Starts the components and chooses the held-out rows.

    Attributes
    ----------
    density_ : ScaledMixture
    n_features_in_ : int

    Examples
    --------
    >>> from kexpfam.baselines.gaussian_mixture import GaussianMixtureDensity
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(300, random_state=0)
    >>> GaussianMixtureDensity(random_state=0).fit(X).sample(5, random_state=1).shape
    (5, 2)
    """

    _stored = ("density_", "_training")

    def __init__(self, *, random_state=None):
        self.random_state = random_state

    def _fit(self, X: np.ndarray, listener: Listener | None):
        check_columns(X, self)
        scaling = Scaling.plain(X)
        points = np.asarray(scaling.to_model(X))
        seed = int(jr.randint(key_from(self.random_state), (), 0, 2**31 - 1))
        self.density_ = ScaledMixture(best_mixture(points, seed=seed), scaling)
        self._training = points
        return self

    def diagnose(self, random_state=0) -> MixtureDiagnosis:
        """Return the size of the mixture; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        shares = np.exp(np.asarray(self.density_.mixture.log_weights))
        few = bool(shares.min() * len(self._training) < FEWEST_ROWS)
        advice = ("A component rests on fewer than ten rows: its height is not to be trusted.",) if few else ()
        return MixtureDiagnosis("fair" if few else "good", len(shares), float(shares.min()), advice)
