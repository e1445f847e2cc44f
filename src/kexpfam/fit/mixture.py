"""Expectation maximisation for mixtures of normals whose rows have weights, which scikit-learn's does not know."""

import numpy as np
from scipy.spatial.distance import cdist
from threadpoolctl import threadpool_limits

from kexpfam.model.measures import COVARIANCE_FLOOR, LOG_TWO_PI, Mixture, logsumexp

__all__ = ["weighted_mixture"]

# The mean log density has to rise by this much (nats) for another step.
PROGRESS = 1e-4
# A component that no row speaks for keeps this share of one row, so that its moments stay finite.
LEAST_ROWS = 1e-12


def weighted_mixture(
    points: np.ndarray, weight: np.ndarray, *, components: int, diagonal: bool, steps: int, seed: int
) -> Mixture:
    r"""Return the mixture that maximises :math:`\sum_i w_i \log \sum_k \pi_k N(x_i; m_k, C_k)`, from a k-means++ start."""
    from sklearn.cluster import kmeans_plusplus  # slow to import

    # One BLAS thread: EM multiplies many tiny matrices, and waking threads for each costs ten times the work.
    with threadpool_limits(limits=1, user_api="blas"):
        start, _ = kmeans_plusplus(points, components, sample_weight=weight, random_state=seed)
        nearest = np.argmin(cdist(points, start), axis=1)
        mixture, last = _maximised(points, weight, np.eye(components)[nearest], diagonal), -np.inf
        for _ in range(steps):
            log_parts = _log_parts(mixture, points)
            log_density = logsumexp(log_parts)
            value = float(np.average(log_density, weights=weight))
            if value < last + PROGRESS:
                break
            mixture, last = (
                _maximised(points, weight, np.exp(log_parts - log_density[:, None]), diagonal),
                value,
            )
    return mixture


def _maximised(points: np.ndarray, weight: np.ndarray, membership: np.ndarray, diagonal: bool) -> Mixture:
    """Return the mixture with the moments of the rows, each shared out among the components by its membership."""
    counts, identity = membership * weight[:, None], np.eye(points.shape[1])
    totals = counts.sum(axis=0) + LEAST_ROWS
    means = counts.T @ points / totals[:, None]
    covariances = np.stack(
        [(points - mean).T * c @ (points - mean) for mean, c in zip(means, counts.T, strict=True)]
    )
    covariances = covariances * identity if diagonal else covariances
    choleskys = np.linalg.cholesky(covariances / totals[:, None, None] + COVARIANCE_FLOOR * identity)
    return Mixture.of(np.log(totals / totals.sum()), means, choleskys)


def _log_parts(mixture: Mixture, points: np.ndarray) -> np.ndarray:
    """Return the log of each component's share of the density at each row, (rows, components)."""
    parts = zip(mixture.whiteners, mixture.means, strict=True)
    squares = np.stack(
        [np.sum(((points - mean) @ whitener.T) ** 2, axis=1) for whitener, mean in parts], axis=1
    )
    log_determinants = np.log(np.abs(np.diagonal(mixture.whiteners, axis1=1, axis2=2))).sum(axis=1)
    return mixture.log_weights + log_determinants - 0.5 * squares - 0.5 * points.shape[1] * LOG_TWO_PI
