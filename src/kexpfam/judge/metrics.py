"""Numbers from samples: distances, densities of draws, limits of counts and permutation importance."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import row_slices
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
    within_x, _ = _kernel_sums(xs, xs, lengthscale, rows_per_chunk)
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
    for chunk in row_slices(len(xs), rows):
        part = xs[chunk] / lengthscale
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


def simultaneous_limits(
    rows: int,
    shares: Float[np.ndarray, " k"],
    *,
    cumulative: bool,
    coverage: float = 0.95,
    simulations: int = 4000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, " j"], Float[np.ndarray, " j"]]:
    r"""Return the lower and upper limits that contain all counts at once with probability ``coverage``.

    ``rows`` fall into bins with these shares, which sum to one. The counts are those of the bins or, if
    cumulative, those of all bins up to each edge but the last: the empirical distribution function. Each
    count has limits at the tails :math:`\gamma / 2` of its binomial distribution; simulation finds the
    :math:`\gamma` of joint coverage (Säilynoja, Bürkner and Vehtari 2022, Statistics and Computing 32, 32).
    """
    from scipy.stats import binom  # slow to import

    counts = np.random.default_rng(seed).multinomial(rows, shares, size=simulations)
    if cumulative:
        counts, shares = np.cumsum(counts, axis=1)[:, :-1], np.minimum(np.cumsum(shares)[:-1], 1.0)
    smallest = np.ones(simulations)
    for column, share in zip(counts.T, shares, strict=True):
        values, where = np.unique(column, return_inverse=True)
        tails = 2.0 * np.minimum(binom.cdf(values, rows, share), binom.sf(values - 1, rows, share))
        smallest = np.minimum(smallest, tails[where])
    # The relative slack keeps a count on the limit within it.
    tail = 0.5 * np.quantile(smallest, 1.0 - coverage, method="lower") * (1.0 - 1e-9)
    return np.maximum(binom.ppf(tail, rows, shares), 0.0), binom.ppf(1.0 - tail, rows, shares)


def permutation_losses(
    log_density: Callable[[np.ndarray], np.ndarray],
    columns: np.ndarray,
    *,
    rng: np.random.Generator,
    repeats: int = 3,
) -> list[Estimate]:
    r"""Return :math:`E[\log p(r)] - E[\log p(r_{\pi j})]` (nats) for each column j, permuted over the rows.

    ``log_density`` maps columns to a log density for each row. For a conditional density, with features as
    columns, the loss is the information of a feature about the target; for a joint density, the dependence of
    a column on the others. Rows that leave the support have the lowest finite log density of all rows, so
    that their loss is a lower bound. The standard error is that of the mean over rows.
    """
    plain = log_density(columns)
    shuffled = np.empty((columns.shape[1], repeats, len(columns)))
    for j in range(columns.shape[1]):
        for k in range(repeats):
            other = columns.copy()
            other[:, j] = rng.permutation(other[:, j])
            shuffled[j, k] = log_density(other)
    seen = np.concatenate([plain, shuffled.ravel()])
    lowest = seen[np.isfinite(seen)].min(initial=0.0)
    losses = np.maximum(plain, lowest) - np.maximum(shuffled, lowest).mean(axis=1)
    rows = len(columns)
    return [Estimate(float(one.mean()), float(one.std() / np.sqrt(rows)), float(rows)) for one in losses]
