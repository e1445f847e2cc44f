"""Gaussian mixture by expectation maximisation; its size and covariance type are chosen on held-out rows."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from kexpfam.data.columns import check_columns
from kexpfam.data.sample import RandomKey
from kexpfam.data.scaling import Scaling
from kexpfam.estimators.base import Seed, key_from
from kexpfam.estimators.codec import FEWEST_ROWS
from kexpfam.estimators.density import DensityEstimator
from kexpfam.fit.mixture import best_mixture
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.model.ensemble import LawDensity
from kexpfam.progress import Listener


@dataclass(kw_only=True, eq=False, repr=False)
class GaussianMixtureDensity(DensityEstimator):
    r"""Density :math:`p(x) = \sum_k w_k N(x; m_k, C_k)` of the standardised data, by EM.

    The number of components and whether covariances are full or diagonal are chosen on a held-out fifth of
    the rows.

    Parameters
    ----------
    random_state : int, RandomState or None
        Seed of the initial components and of the held-out rows.

    Attributes
    ----------
    density_ : LawDensity
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

    random_state: Seed = None

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        check_columns(X, self._names)
        scaling = Scaling.plain(X, weight=self._weight)
        seed = seed_from(key_from(self.random_state))
        self._training = points = scaling.to_model(X)
        self.density_ = LawDensity(best_mixture(points, seed=seed, weight=self._weight), scaling)
        return self

    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        shares = np.exp(self.density_.law.log_weights)
        few = bool(shares.min() * self._effective_rows < FEWEST_ROWS)
        meaning = f"A component has fewer than {FEWEST_ROWS} rows: its height is unreliable."
        text, level = f"{len(shares)}, smallest share {shares.min():.2%}", "fair" if few else "good"
        components = Measurement("components", len(shares), label="components", text=text)
        smallest = Measurement("smallest_share", float(shares.min()), None, level, meaning)
        return Diagnosis([components, smallest, *calibration])
