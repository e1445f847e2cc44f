"""What matters to a density: what is lost where a column is shuffled, and which rows lie in regions of highest density."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

__all__ = ["Loss", "permutation_losses", "region_levels"]


class Loss(NamedTuple):
    """The mean log density that is lost where a column is shuffled (nats), and its standard error over rows."""

    value: float
    standard_error: float


def permutation_losses(
    log_density: Callable[[np.ndarray], np.ndarray],
    columns: np.ndarray,
    *,
    rng: np.random.Generator,
    repeats: int = 3,
) -> list[Loss]:
    r"""Return :math:`E[\log p(r)] - E[\log p(r_{\pi j})]` for each column j, where its values have changed rows.

    ``log_density`` takes columns and returns a log density for each row. Of a conditional density, with features as columns,
    the loss is what a feature tells of the target; of a joint one, what a column has to do with the others. Rows that leave
    the support count with the lowest finite log density that was seen, so that their loss is a lower bound.
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
    return [Loss(float(one.mean()), float(one.std() / np.sqrt(len(one)))) for one in losses]


def region_levels(
    rows: Float[np.ndarray, " n"], draws: Float[np.ndarray, "n m"], *, rng: np.random.Generator
) -> Float[np.ndarray, " n"]:
    r"""Return, for each row, the probability of the smallest region of highest density that holds it.

    ``rows`` and ``draws`` are log densities, of each row and of draws of the model (under its condition). The level is the
    share of draws that are more likely than the row, ranks randomised among m + 1 places: uniform if rows are draws too.
    """
    above, equal = (draws > rows[:, None]).sum(axis=1), (draws == rows[:, None]).sum(axis=1)
    return (above + rng.uniform(size=len(rows)) * (equal + 1)) / (draws.shape[1] + 1)
