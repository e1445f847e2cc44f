"""Plain references of a density of real columns: the held-out score that any useful fit reaches."""

import numpy as np
from scipy.spatial.distance import cdist

from kexpfam.data.weights import part_of, weighted_mean
from kexpfam.fit.mixture import best_shape, mixture_held_out
from kexpfam.fit.task import Splits
from kexpfam.model.measures import LOG_TWO_PI, logsumexp

__all__ = ["reference_scores"]

# Rows of the comparison at most, and bandwidths in units of Scott's rule.
MOST_ROWS, BANDWIDTHS = 1000, (0.25, 0.5, 0.75, 1.0)


def reference_scores(z: np.ndarray, weight: np.ndarray | None, *, seed: int) -> dict[str, float]:
    """Return the mean held-out log density of rows in model units under a kernel density estimate, each row
    left out in turn, and under a mixture of normals that did not see the row."""
    splits = Splits.draw(len(z), parts=5, share=0.2, seed=seed)
    shape = best_shape(z, counts=(1, 2, 4, 8), seed=seed, weight=weight, splits=splits)
    mixed = mixture_held_out(z, shape, splits, seed=seed, weight=weight)
    seen = np.isfinite(mixed)
    mixture = float(weighted_mean(mixed[seen], part_of(weight, seen)))
    return {"mixture": mixture, "kernel density": _left_one_out(z, weight)}


def _left_one_out(z: np.ndarray, weight: np.ndarray | None) -> float:
    """Return the mean leave-one-out score of the best bandwidth."""
    (rows, dim), counts = z.shape, np.ones(len(z)) if weight is None else weight
    scale = rows ** (-1.0 / (dim + 4)) * z.std(axis=0)
    squares = cdist(z / scale, z / scale, "sqeuclidean")
    np.fill_diagonal(squares, np.inf)
    log_total = np.log(counts.sum() - counts)
    scores = []
    for width in BANDWIDTHS:
        logs = np.log(counts) - 0.5 * squares / width**2
        logs = logsumexp(logs, axis=1) - log_total - 0.5 * dim * LOG_TWO_PI - np.log(width * scale).sum()
        scores.append(float(np.average(logs, weights=counts)))
    return max(scores)
