r"""The columns that make a row unusual.

The surprise of a column j of a row x is

.. math:: E[\log p(X_j, x_{-j})] - \log p(x), \qquad X_j \sim p(x_j | x_{-j}),

the log density that the row lacks because of this column: :math:`-\log p(x_j | x_{-j})` less its mean. It
does not depend on the units of the column. It is about 0 or negative for a usual cell.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from kexpfam.data.encoding import TableSchema
from kexpfam.data.sample import RandomKey
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.partial import completed

# Draws of a cell that the mean log density is taken over.
SCORED_DRAWS = 32


class ExplainedCells(NamedTuple):
    """The surprise of cells, their usual values, and the ends of an interval, each (rows, columns)."""

    surprise: Float[np.ndarray, "n d"]
    usual: Float[np.ndarray, "n d"]
    lower: Float[np.ndarray, "n d"]
    upper: Float[np.ndarray, "n d"]


def explain_cells(
    density: Any,
    columns: TableSchema,
    values: Float[np.ndarray, "n d"],
    score: Callable[[np.ndarray], np.ndarray],
    *,
    coverage: float,
    draws: int,
    key: RandomKey,
) -> ExplainedCells:
    """Return the surprise of each cell, given the other cells of its row, and its usual value.

    ``score`` returns the log density of rows. Cells outside the support count as missing for the others.
    """
    outside = np.stack([~kind.inside(values[:, j]) for j, kind in enumerate(columns.kinds)], axis=1)
    if (support := density.support()) is not None:
        beyond = (values < support[0]) | (values > support[1])
        outside |= beyond & np.isneginf(score(values))[:, None]  # the ends are rounded
    known = np.where(outside, np.nan, values)
    surprise, *others = (np.full(values.shape, np.nan) for _ in range(4))
    own, rng = score(known), np.random.default_rng(seed_from(key))
    levels = [0.5, 0.5 - 0.5 * coverage, 0.5 + 0.5 * coverage]
    for j, kind in enumerate(columns.kinds):
        hidden = known.copy()
        hidden[:, j] = np.nan
        found = completed(density, hidden, draws, key=key)
        drawn = np.repeat(known[:, None], SCORED_DRAWS, axis=1)
        drawn[:, :, j] = found.resampled(SCORED_DRAWS, rng)[:, :, j]
        usual = score(drawn.reshape(-1, drawn.shape[2])).reshape(len(values), -1).mean(axis=1)
        surprise[:, j] = np.where(np.isnan(known[:, j]), 0.0, usual - own)
        if kind.categorical:
            others[0][:, j] = found.likeliest(j)
        else:
            for part, quantile in zip(others, found.quantile(levels, j).T, strict=True):
                part[:, j] = quantile
    return ExplainedCells(np.where(outside, np.inf, surprise), *others)


def explain_target(
    quantile: Callable[[Sequence[float]], np.ndarray],
    score: Callable[[np.ndarray], np.ndarray],
    values: Float[np.ndarray, "n 1"],
    draws: Float[np.ndarray, "n m 1"],
    coverage: float,
) -> ExplainedCells:
    """Return surprise, usual value and the ends of its interval for a single target."""
    usual = np.stack([score(draws[:, k]) for k in range(draws.shape[1])]).mean(axis=0)
    found = quantile([0.5, 0.5 - 0.5 * coverage, 0.5 + 0.5 * coverage])
    return ExplainedCells((usual - score(values))[:, None], *(found[:, [k]] for k in range(3)))
