"""Base measures by name: how each is fitted, and its optimism on the points it was fitted to; kernel density
estimates, which fits are compared with."""

from collections.abc import Callable

import numpy as np
from scipy.spatial.distance import cdist

from kexpfam.data.weights import part_of, weighted_mean
from kexpfam.fit.mixture import best_mixture
from kexpfam.fit.task import Splits
from kexpfam.model.measures import LOG_TWO_PI, AbstractMeasure, Box, Gaussian, Mixture, logsumexp

# Weight and relative width of the wide component of a Gaussian base under a condition, so that distant
# targets have positive density.
TAIL_SHARE, TAIL_WIDTH = 0.02, 4.0
# Rows of a mixture and of a kernel density estimate, and bandwidths of the latter in units of Scott's rule.
MOST_CENTRES, BANDWIDTHS = 2000, (0.25, 0.5, 0.75, 1.0)


def tailed_gaussian(points: np.ndarray, *, width: float, weight: np.ndarray | None = None) -> Mixture:
    """Return the normal with ``width**2`` times the points' covariance, plus a small share of a wider one."""
    narrow = Gaussian.fitted(points, width=width, weight=weight)
    choleskys = np.stack([narrow.cholesky, TAIL_WIDTH * narrow.cholesky])
    return Mixture.of(np.log([1.0 - TAIL_SHARE, TAIL_SHARE]), np.stack([narrow.mean] * 2), choleskys)


BASES: dict[str, Callable[[np.ndarray, int, np.ndarray | None], AbstractMeasure]] = {
    "gaussian": lambda points, seed, weight: Gaussian.fitted(points, weight=weight),
    "box": lambda points, seed, weight: Box.fitted(points),
    "mixture": lambda points, seed, weight: best_mixture(points, seed=seed, weight=weight),
}


def fit_base(kind: str, data: np.ndarray, *, seed: int, weight: np.ndarray | None = None) -> AbstractMeasure:
    """Return the base measure of that name, fitted to data in model units."""
    if kind not in BASES:
        raise ValueError(f"unknown base {kind!r}: choose one of {', '.join(BASES)}, or pass a measure.")
    return BASES[kind](data, seed, weight)


def optimism(
    kind: str, data: np.ndarray, splits: Splits, *, seed: int, weight: np.ndarray | None = None
) -> float:
    """Return the mean log density of the points a base was fitted to, minus that of the first held-out part
    (nats)."""
    kept, held = splits.kept[0], splits.held[0]
    base = fit_base(kind, data[kept], seed=seed, weight=part_of(weight, kept))
    means = [weighted_mean(base.log_densities(data[rows]), part_of(weight, rows)) for rows in (kept, held)]
    return float(means[0] - means[1])


def kernel_density_scores(
    data: np.ndarray, weight: np.ndarray | None, kept: np.ndarray, held: np.ndarray
) -> np.ndarray:
    """Return the log density of the rows ``held`` under the estimate from those ``kept``; the bandwidth is
    the best of a few."""
    kept, dim = kept[:MOST_CENTRES], data.shape[1]
    counts = np.ones(len(kept)) if weight is None else weight[kept]
    scale = len(kept) ** (-1.0 / (dim + 4)) * np.maximum(data[kept].std(axis=0), np.finfo(float).eps)
    squares = cdist(data[held] / scale, data[kept] / scale, "sqeuclidean")
    best = np.full(len(held), -np.inf)
    for width in BANDWIDTHS:
        logs = logsumexp(np.log(counts) - 0.5 * squares / width**2, axis=1) - np.log(counts.sum())
        logs = logs - 0.5 * dim * LOG_TWO_PI - np.log(width * scale).sum()
        best = max(best, logs, key=lambda one: weighted_mean(one, part_of(weight, held)))
    return best
