"""What chance does to the counts of a perfectly calibrated model: limits that hold all of them at once."""

import numpy as np
from jaxtyping import Float

__all__ = ["simultaneous_limits"]

SIMULATIONS = 4000
# A count whose tail is the limit itself lies within it, whatever the rounding.
ROUNDING = 1e-9


def simultaneous_limits(
    rows: int, shares: Float[np.ndarray, " k"], *, cumulative: bool, coverage: float = 0.95, seed: int = 0
) -> tuple[Float[np.ndarray, " j"], Float[np.ndarray, " j"]]:
    r"""Return the limits, low and high, between which all counts lie at once with probability ``coverage``.

    ``rows`` fall into bins with these shares, which sum to one. The counts are those of the bins or, if cumulative, those of
    all bins up to each edge but the last: the empirical distribution function. Every count is held between the same tails
    :math:`\gamma / 2` of its binomial law, with :math:`\gamma` such that they all hold together, by simulation (Säilynoja,
    Bürkner and Vehtari 2022, Statistics and Computing 32, 32).
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
