"""What rows count: weights that mean repetition, and the statistics of weighted rows.

Everywhere in the library ``None`` stands for rows that all count one. A weight of two is a row that was seen
twice, a weight of zero a row that was not seen. Whole numbers are kept as they are; other weights say how
rows count beside each other, and are scaled to mean one."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import jax

__all__ = [
    "Weighted",
    "checked_weights",
    "counted_mean",
    "distinct_rows",
    "drawn_rows",
    "effective_rows",
    "is_whole",
    "part_of",
    "percentiles",
    "standard_error",
    "weighted_covariance",
    "weighted_mean",
    "weighted_variance",
]


class Weighted(NamedTuple):
    """Positions of the rows to fit to, each once, and what they count; None where all count one."""

    rows: np.ndarray
    weight: np.ndarray | None

    @staticmethod
    def of(values: np.ndarray, weight: np.ndarray | None, *, merged: bool = True) -> "Weighted":
        """Return the rows that count; where weights are given, equal rows are one row, whose weights add up,
        if ``merged``.

        So nothing random, such as a deal of rows into folds, can tell a weight from a repetition.
        """
        if weight is None:
            return Weighted(np.arange(len(values)), None)
        seen = np.flatnonzero(weight > 0.0)
        first, membership = _firsts(values[seen]) if merged else (np.arange(len(seen)),) * 2
        totals = np.bincount(membership, weight[seen])
        if not is_whole(totals):
            totals = totals / (totals[0] if np.all(totals == totals[0]) else totals.mean())
        return Weighted(seen[first], None if np.all(totals == 1.0) else totals)


def checked_weights(given: ArrayLike | None, rows: int, *, name: str = "sample_weight") -> np.ndarray | None:
    """Return the weights as numbers, one for each row, or raise and say what is wrong with them."""
    if given is None:
        return None
    try:
        weight = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, one for each row.") from None
    if weight.shape != (rows,):
        raise ValueError(
            f"{name} must have one number for each of the {rows} rows, got shape {weight.shape}."
        )
    for bad, rule in ((~np.isfinite(weight), "be finite"), (weight < 0.0, "not be negative")):
        if np.any(bad):
            row = int(np.argmax(bad))
            raise ValueError(f"{name} must {rule}; row {row} has {weight[row]:g}.")
    if not np.any(weight > 0.0):
        raise ValueError(f"{name} is zero in every row: at least one weight must be positive.")
    return weight


def counted_mean(values: np.ndarray, given: ArrayLike | None) -> float:
    """Return the mean of the rows that count, by weights as a user gives them."""
    weight = checked_weights(given, len(values))
    if weight is None:
        return float(np.mean(values))
    return float(np.average(values[weight > 0.0], weights=weight[weight > 0.0]))


def is_whole(weight: np.ndarray) -> bool:
    """Return whether the weights are counts."""
    return bool(np.all(weight == np.round(weight)))


def part_of(weight: np.ndarray | None, rows: np.ndarray | slice) -> np.ndarray | None:
    """Return the weights of some rows."""
    return None if weight is None else weight[rows]


def effective_rows(weight: np.ndarray | None, rows: int) -> float:
    r"""Return the effective sample size, :math:`(\sum_i w_i)^2 / \sum_i w_i^2`: how many equal rows say as
    much."""
    return float(rows) if weight is None else float(weight.sum() ** 2 / np.sum(weight**2))


def weighted_mean(values: np.ndarray, weight: np.ndarray | None) -> Any:
    """Return the mean over the rows."""
    return values.mean(axis=0) if weight is None else np.average(values, axis=0, weights=weight)


def weighted_variance(values: np.ndarray, weight: np.ndarray | None) -> Any:
    """Return the variance over the rows."""
    return (
        values.var(axis=0)
        if weight is None
        else weighted_mean((values - weighted_mean(values, weight)) ** 2, weight)
    )


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
    """Return the percentiles of each column, (levels, columns): NumPy's, of rows that are repeated as often
    as they count."""
    if weight is None:
        return np.percentile(values, levels, axis=0)
    columns = [_percentiles(column, np.asarray(levels, float), weight) for column in values.T]
    return np.reshape(columns, (values.shape[1], len(levels))).T


def _percentiles(column: np.ndarray, levels: np.ndarray, weight: np.ndarray) -> np.ndarray:
    # Of sorted repeated rows a value has the places from "first" to "last"; between two values the percentile
    # is linear.
    order = np.argsort(column)
    after = np.cumsum(weight[order])
    first, last = after - weight[order], np.maximum(after - 1.0, after - weight[order])
    places = levels / 100.0 * last[-1]
    return np.interp(places, np.stack([first, last], 1).ravel(), np.repeat(column[order], 2))


def distinct_rows(*parts: np.ndarray) -> np.ndarray:
    """Return the positions at which each combination of rows appears first, in their own order."""
    return _firsts(np.concatenate(parts, axis=1))[0]


def _firsts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each distinct row appears first, in the order of the rows, and which of these each row
    is."""
    # As bytes, so that rows with the same gaps are equal too; adding 0 makes the two zeros one.
    whole = np.ascontiguousarray(rows + 0.0).view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, membership = np.unique(whole, return_index=True, return_inverse=True)
    order = np.argsort(first)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return first[order], places[membership.ravel()]


def drawn_rows(weight: "jax.Array | np.ndarray", count: int, *, key: "jax.Array") -> "jax.Array":
    """Return positions drawn with replacement, each as often as its weight says."""
    import jax.numpy as jnp
    import jax.random as jr

    cumulative = jnp.cumsum(jnp.asarray(weight))
    levels = jr.uniform(key, (count,), cumulative.dtype) * cumulative[-1]
    return jnp.minimum(jnp.searchsorted(cumulative, levels, side="right"), len(cumulative) - 1)
