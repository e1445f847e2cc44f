"""A mixture of normals by expectation maximisation, its size and shape chosen on held-out points, behind the library's face."""

from dataclasses import dataclass
from typing import Self

import equinox as eqx
import numpy as np
from jaxtyping import Array, Key
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.columns import check_columns
from kexpfam.data.scaling import Scaling
from kexpfam.estimators.base import FEWEST_ROWS, DensityEstimator, Seed, key_from
from kexpfam.estimators.showing import remembered
from kexpfam.fit.bases import best_mixture
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import AbstractDiagnosis
from kexpfam.model.measures import Mixture
from kexpfam.progress import Listener

__all__ = ["GaussianMixtureDensity", "MixtureDiagnosis", "ScaledMixture"]


class ScaledMixture(eqx.Module):
    """A mixture of the standardised data, in the data's own units."""

    mixture: Mixture
    scaling: Scaling

    def log_density(self, targets: np.ndarray, X: None = None) -> np.ndarray:
        """Return the log density of each row, in the data's own units."""
        return self.mixture.log_densities(self.scaling.to_model(targets)) + self.scaling.log_jacobian(targets)

    def sample(self, count: int, X: None = None, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws."""
        return self.scaling.to_data(self.mixture.draws(count, key=key))


@dataclass(frozen=True)
class MixtureDiagnosis(AbstractDiagnosis):
    """What can be known about a mixture: its size, and whether one component has shrunk onto few points."""

    verdict: str
    components: int
    smallest_share: float
    advice: tuple[str, ...]

    def lines(self) -> list[tuple[str, str]]:
        return [("components", f"{self.components}, smallest share {self.smallest_share:.2%}")]


class GaussianMixtureDensity(DensityEstimator):
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
    >>> from kexpfam.estimators import GaussianMixtureDensity
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(300, random_state=0)
    >>> GaussianMixtureDensity(random_state=0).fit(X).sample(5, random_state=1).shape
    (5, 2)
    """

    _stored = ("density_", "_training")

    def __init__(self, *, random_state: Seed = None) -> None:
        self.random_state = random_state

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        check_columns(X, self._names)
        scaling, seed = Scaling.plain(X, weight=self._weight), seed_from(key_from(self.random_state))
        self._training = points = scaling.to_model(X)
        self.density_ = ScaledMixture(best_mixture(points, seed=seed, weight=self._weight), scaling)
        return self

    @remembered
    def diagnose(self, random_state: Seed = 0) -> MixtureDiagnosis:
        """Return the size of the mixture; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        shares = np.exp(self.density_.mixture.log_weights)
        few = bool(shares.min() * self._effective_rows < FEWEST_ROWS)
        advice = (
            ("A component rests on fewer than ten rows: its height is not to be trusted.",) if few else ()
        )
        return MixtureDiagnosis("fair" if few else "good", len(shares), float(shares.min()), advice)
