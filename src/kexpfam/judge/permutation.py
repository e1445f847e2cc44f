"""Permutation importance: how much each input matters to a density."""

from collections.abc import Callable

import numpy as np

from kexpfam.model.density import Estimate


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
