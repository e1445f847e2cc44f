"""Weights of rows, which mean repetition, and the statistics of weighted rows.

``None`` means that all weights are equal. A row of weight 2 counts as two equal rows, a row of weight 0 is
ignored. Whole weights are kept; other weights are relative and are scaled to mean 1.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

LARGEST_COUNT = 2.0**53


class Weighted(NamedTuple):
    """Positions of the rows to fit to, each once, and their weights; None if all are equal."""

    rows: np.ndarray
    weight: np.ndarray | None

    @staticmethod
    def of(values: np.ndarray, weight: np.ndarray | None, *, merged: bool = True) -> "Weighted":
        """Return the rows of positive weight; if ``merged``, equal weighted rows are one row with their sum.

        So a random split into folds treats a weight like repeated rows.
        """
        if weight is None:
            return Weighted(np.arange(len(values)), None)
        seen = np.flatnonzero(weight > 0.0)
        first, membership = _firsts(values[seen]) if merged else (np.arange(len(seen)),) * 2
        totals = np.bincount(membership, weight[seen])
        if np.all(totals == totals[0]):
            return Weighted(seen[first], None)
        return Weighted(seen[first], totals if is_whole(totals) else totals / totals.mean())


def checked_weights(given: ArrayLike | None, rows: int) -> np.ndarray | None:
    """Return the weights as numbers, one for each row; raise ValueError if they are invalid."""
    if given is None:
        return None
    try:
        weight = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("sample_weight must be numbers, one for each row.") from None
    if weight.shape != (rows,):
        wanted = f"one number for each of {rows} rows"
        raise ValueError(f"sample_weight must have {wanted}, got shape {weight.shape}.")
    for wrong, text in ((~np.isfinite(weight), "be finite"), (weight < 0.0, "not be negative")):
        if np.any(wrong):
            raise ValueError(f"sample_weight must {text}; row {np.argmax(wrong)} has {weight[wrong][0]:g}.")
    if not np.any(weight > 0.0):
        raise ValueError("sample_weight is zero in every row: at least one weight must be positive.")
    # Sums and squares of larger numbers overflow, and numbers above this are no counts.
    return weight if weight.max() < LARGEST_COUNT else weight / weight.max()


def counted_mean(values: np.ndarray, given: ArrayLike | None) -> float:
    """Return the mean of the rows of positive weight, by weights as a user gives them."""
    if not len(values):
        raise ValueError("score needs at least one row.")
    weight = checked_weights(given, len(values))
    seen = slice(None) if weight is None else weight > 0.0
    return float(np.average(values[seen], weights=part_of(weight, seen)))


def is_whole(weight: np.ndarray) -> bool:
    """Return whether the weights are counts."""
    return bool(np.all(weight == np.round(weight)))


def part_of(weight: np.ndarray | None, rows: np.ndarray | slice) -> np.ndarray | None:
    """Return the weights of some rows."""
    return None if weight is None else weight[rows]


def effective_rows(weight: np.ndarray | None, rows: int) -> float:
    r"""Return the effective sample size, :math:`(\sum_i w_i)^2 / \sum_i w_i^2`."""
    if weight is None:
        return float(rows)
    shares = weight / weight.max()  # squares of small weights would be zero
    return float(shares.sum() ** 2 / np.sum(shares**2))


def weighted_mean(values: np.ndarray, weight: np.ndarray | None) -> Any:
    """Return the mean over the rows."""
    return values.mean(axis=0) if weight is None else np.average(values, axis=0, weights=weight)


def weighted_variance(values: np.ndarray, weight: np.ndarray | None) -> Any:
    """Return the variance over the rows."""
    return weighted_mean((values - weighted_mean(values, weight)) ** 2, weight)


def weighted_covariance(values: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """Return the unbiased covariance of repeated rows, (d, d)."""
    if weight is None:
        return np.cov(values, rowvar=False).reshape(values.shape[1], -1)
    centred = values - weighted_mean(values, weight)
    return (centred.T * weight) @ centred / max(weight.sum() - 1.0, 1.0)


def standard_error(values: np.ndarray, weight: np.ndarray | None) -> float:
    """Return the standard error of the mean of one number per row."""
    return float(np.sqrt(weighted_variance(values, weight)) / np.sqrt(effective_rows(weight, len(values))))


def percentiles(values: np.ndarray, levels: list[int], weight: np.ndarray | None) -> np.ndarray:
    """Return the percentiles of each column, (levels, columns): as NumPy, of rows repeated by weight."""
    if weight is None:
        return np.percentile(values, levels, axis=0)
    found = np.empty((len(levels), values.shape[1]))
    for j, column in enumerate(values.T):
        # A value has the places from first to last among the sorted repeated rows; between values: linear.
        order = np.argsort(column)
        after = np.cumsum(weight[order])
        first, last = after - weight[order], np.maximum(after - 1.0, after - weight[order])
        places = np.asarray(levels, float) / 100.0 * last[-1]
        found[:, j] = np.interp(places, np.stack([first, last], 1).ravel(), np.repeat(column[order], 2))
    return found


def distinct_rows(*parts: np.ndarray) -> np.ndarray:
    """Return the positions at which each combination of rows appears first, in their own order."""
    return _firsts(np.concatenate(parts, axis=1))[0]


def _firsts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first position of each distinct row, in row order, and the number of each row's first."""
    # As bytes, so that rows with NaN in the same places are equal; adding 0 makes -0 equal to 0.
    whole = np.ascontiguousarray(rows + 0.0).view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, membership = np.unique(whole, return_index=True, return_inverse=True)
    order = np.argsort(first)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return first[order], places[membership.ravel()]
