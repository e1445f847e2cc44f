"""Base measures by name: how each is fitted, and its optimism on the points it was fitted to."""

from collections.abc import Callable

import numpy as np

from kexpfam.data.weights import part_of, weighted_mean
from kexpfam.fit.mixture import best_mixture
from kexpfam.fit.task import Splits
from kexpfam.model.measures import AbstractMeasure, Box, Gaussian, Mixture

__all__ = ["BASES", "fit_base", "optimism", "tailed_gaussian"]

# Weight and relative width of the wide component of a Gaussian base under a condition, so that distant
# targets have positive density.
TAIL_SHARE, TAIL_WIDTH = 0.02, 4.0


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
