"""Simultaneous limits of the counts of a calibrated model."""

import numpy as np
from jaxtyping import Float

SIMULATIONS = 4000
# Relative slack, so that a count on the limit lies within it.
ROUNDING = 1e-9


def simultaneous_limits(
    rows: int, shares: Float[np.ndarray, " k"], *, cumulative: bool, coverage: float = 0.95, seed: int = 0
) -> tuple[Float[np.ndarray, " j"], Float[np.ndarray, " j"]]:
    r"""Return the lower and upper limits that contain all counts at once with probability ``coverage``.

    ``rows`` fall into bins with these shares, which sum to one. The counts are those of the bins or, if
    cumulative, those of all bins up to each edge but the last: the empirical distribution function. Each
    count has limits at the tails :math:`\gamma / 2` of its binomial distribution; simulation finds the
    :math:`\gamma` of joint coverage (Säilynoja, Bürkner and Vehtari 2022, Statistics and Computing 32, 32).
    """
    from scipy.stats import binom  # slow to import

    counts = np.random.default_rng(seed).multinomial(rows, shares, size=SIMULATIONS)
    if cumulative:
        counts, shares = np.cumsum(counts, axis=1)[:, :-1], np.minimum(np.cumsum(shares)[:-1], 1.0)
    smallest = np.ones(SIMULATIONS)
    for column, share in zip(counts.T, shares, strict=True):
        values, where = np.unique(column, return_inverse=True)
        tails = 2.0 * np.minimum(binom.cdf(values, rows, share), binom.sf(values - 1, rows, share))
        smallest = np.minimum(smallest, tails[where])
    tail = 0.5 * np.quantile(smallest, 1.0 - coverage, method="lower") * (1.0 - ROUNDING)
    return np.maximum(binom.ppf(tail, rows, shares), 0.0), binom.ppf(1.0 - tail, rows, shares)
