"""Distances between samples, and densities estimated from draws."""

import numpy as np

from kexpfam.model.density import Estimate
from kexpfam.model.kernels import median_distance


def mmd_squared(
    xs: np.ndarray, ys: np.ndarray, *, lengthscale: float | None = None, rows_per_chunk: int = 2048
) -> Estimate:
    r"""Return the unbiased estimate of the squared maximum mean discrepancy, which can be negative.

    .. math:: \frac{\sum_{i \ne j} k(x_i, x_j)}{n (n-1)} + \frac{\sum_{i \ne j} k(y_i, y_j)}{m (m-1)}
        - \frac{2 \sum_{ij} k(x_i, y_j)}{n m}

    with the Gaussian kernel of ``lengthscale`` (default: the paper's ``sqrt(0.1)`` times the median distance
    of ``ys``). Memory is ``rows_per_chunk * n``. The standard error is that of two samples of one
    distribution.
    """
    xs, ys = np.asarray(xs, float), np.asarray(ys, float)
    if lengthscale is None:
        lengthscale = np.sqrt(0.1) * median_distance(ys)
    n, m = len(xs), len(ys)
    within_x, square_x = _kernel_sums(xs, xs, lengthscale, rows_per_chunk)
    within_y, square_y = _kernel_sums(ys, ys, lengthscale, rows_per_chunk)
    across, _ = _kernel_sums(xs, ys, lengthscale, rows_per_chunk)
    value = (within_x - n) / (n * (n - 1)) + (within_y - m) / (m * (m - 1)) - 2 * across / (n * m)
    # Var = 2 (1/n(n-1) + 1/m(m-1) + 2/nm) E[k_c^2] for the centred kernel k_c, bounded by Var of the kernel.
    spread = max(square_y / m**2 - (within_y / m**2) ** 2, 0.0)
    error = np.sqrt(2.0 * spread * (1.0 / (n * (n - 1)) + 1.0 / (m * (m - 1)) + 2.0 / (n * m)))
    return Estimate(float(value), float(error), float(min(n, m)))


def _kernel_sums(xs: np.ndarray, ys: np.ndarray, lengthscale: float, rows: int) -> tuple[float, float]:
    total = squares = 0.0
    ys = ys / lengthscale
    norms = np.sum(ys**2, 1)
    for first in range(0, len(xs), rows):
        part = xs[first : first + rows] / lengthscale
        squared = np.sum(part**2, 1)[:, None] + norms - 2.0 * part @ ys.T
        kernel = np.exp(-0.5 * np.maximum(squared, 0.0))
        total += kernel.sum()
        squares += (kernel**2).sum()
    return total, squares


def neighbour_log_density(points: np.ndarray, draws: np.ndarray, *, neighbours: int = 8) -> np.ndarray:
    r"""Return the log density of a distribution at points, estimated from independent draws.

    With r the distance to the k-th of n neighbours in d dimensions and :math:`V_d` the volume of the unit
    ball, it is :math:`\psi(k) - \log n - \log V_d - d \log r` (Kozachenko and Leonenko). Its mean is the
    negative entropy up to the change of the density within r, which is small in few dimensions only. At one
    point its standard deviation is about :math:`1 / \sqrt k`.
    """
    from scipy.spatial import cKDTree
    from scipy.special import digamma, gammaln

    dim = points.shape[1]
    radius = cKDTree(draws).query(points, k=[neighbours])[0][:, 0]
    log_ball = 0.5 * dim * np.log(np.pi) - gammaln(0.5 * dim + 1.0)
    return digamma(neighbours) - np.log(len(draws)) - log_ball - dim * np.log(np.maximum(radius, 1e-300))
