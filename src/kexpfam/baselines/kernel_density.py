"""Gaussian kernel density estimation with a cross-validated bandwidth."""

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam.baselines.grid_search import GridSearch, deal, grid_of
from kexpfam.baselines.mixture_density import MixtureDensity, chunks, log_volume, squared_distances
from kexpfam.data.columns import check_columns
from kexpfam.data.scaling import Scaling
from kexpfam.estimators.base import Seed, key_from, remembered, whole
from kexpfam.estimators.density import DensityEstimator
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Diagnosis
from kexpfam.progress import Listener

__all__ = ["KernelDensity", "held_out_losses"]

# The default grid, in standard deviations. Neighbours differ by 10%, less than the error of a held-out
# likelihood.
BANDWIDTHS = np.geomspace(0.01, 3.0, 60)


class KernelDensity(DensityEstimator):
    r"""Density :math:`p(x) = \frac1n \sum_i N(x; x_i, h^2 I)` of the standardised data.

    Parameters
    ----------
    bandwidth : float, sequence of float or None
        h, in standard deviations of each column. One of several candidates, or of 60 values from 0.01 to 3
        for None, is chosen by cross-validation of the log likelihood.
    folds : int
        Folds of the cross-validation.
    held_out_rows : int
        Held-out rows at most; with more rows a random part of them is held out.
    random_state : int, RandomState or None
        Seed of the folds.

    Attributes
    ----------
    density_ : MixtureDensity
    selection_ : GridSearch
        The candidates and their held-out losses.
    n_features_in_ : int

    Examples
    --------
    >>> from kexpfam.estimators import KernelDensity
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(300, random_state=0)
    >>> density = KernelDensity(random_state=0).fit(X)
    >>> density.score_samples(X[:2]).shape
    (2,)
    >>> density.sample(5, random_state=1).shape
    (5, 2)
    """

    _stored = ("density_", "_training", "selection_")

    def __init__(
        self,
        *,
        bandwidth: ArrayLike | None = None,
        folds: int = 5,
        held_out_rows: int = 2000,
        random_state: Seed = None,
    ) -> None:
        self.bandwidth = bandwidth
        self.folds = folds
        self.held_out_rows = held_out_rows
        self.random_state = random_state

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        bandwidths = grid_of("bandwidth", self.bandwidth, BANDWIDTHS)
        folds, most = whole("folds", self.folds, 2), whole("held_out_rows", self.held_out_rows, 1)
        check_columns(X, self._names)
        rng = np.random.default_rng(seed_from(key_from(self.random_state)))
        scaling = Scaling.plain(X, weight=self._weight)
        self._training = points = scaling.to_model(X)
        fold, held = deal(len(points), folds, rng), rng.permutation(len(points))[:most]
        losses = held_out_losses(points, bandwidths, fold, held, self._weight)
        self.selection_ = GridSearch(("bandwidth",), (bandwidths,), losses)
        chosen = self.selection_.chosen["bandwidth"]
        self.density_ = MixtureDensity.unconditional(points, self._weight, chosen, scaling)
        return self

    @remembered
    def diagnose(self, random_state: Seed = 0) -> Diagnosis:
        """Return how the bandwidth was chosen; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        return Diagnosis(self.selection_.measurements())


def held_out_losses(
    points: np.ndarray,
    bandwidths: np.ndarray,
    fold: np.ndarray,
    held: np.ndarray,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """Return minus the mean log density of the rows ``held`` under the other folds, for each bandwidth."""
    counts, total = np.ones(len(points)) if weight is None else weight, np.zeros(len(bandwidths))
    for rows in (held[part] for part in chunks(len(held), len(points))):
        other = fold[rows, None] != fold
        squares = np.where(other, squared_distances(points[rows], points), np.inf)
        nearest = squares.min(axis=1)
        beyond = squares - nearest[:, None]
        for i, bandwidth in enumerate(bandwidths):
            log_sums = np.log(np.exp(beyond * (-0.5 / bandwidth**2)) @ counts) - 0.5 * nearest / bandwidth**2
            log_density = log_sums - np.log(other @ counts) - log_volume(bandwidth, points.shape[1])
            total[i] += counts[rows] @ log_density
    return -total / counts[held].sum()
