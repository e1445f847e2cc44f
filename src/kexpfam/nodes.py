"""Weighted points that stand for the base measure: ``sum_j exp(log_weights[j]) h(points[j])`` is ``E_p0[h]``.

A grid does it exactly in few dimensions, importance draws do it with an error bar in any.
"""

from typing import NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.measures import AbstractMeasure

# Cells per dimension where the data are, and beyond them on each side, by the number of dimensions.
FINE_CELLS = {1: 800, 2: 112, 3: 44}
TAIL_CELLS = {1: 40, 2: 7, 3: 3}
GRID_DIMS = max(FINE_CELLS)
# The base beyond this many standard deviations holds less than 1e-6 of its mass.
BASE_SPREAD = 5.0
DATA_MARGIN = 0.15


class Nodes(NamedTuple):
    """Points and log weights; ``widths`` are the cell sizes of a grid, 0 for draws."""

    points: np.ndarray  # (j, d)
    log_weights: np.ndarray  # (j,)
    widths: np.ndarray  # (j, d)


def grid_nodes(base: AbstractMeasure, data: np.ndarray, *, fineness: float = 1.0) -> Nodes:
    """Return the midpoints of a grid: fine where the data are, coarse in the base's tails."""
    edges = grid_edges(base, data, fineness=fineness)
    points = _mesh([0.5 * (e[1:] + e[:-1]) for e in edges])
    widths = _mesh([np.diff(e) for e in edges])
    return Nodes(points, base.log_densities(points) + np.log(widths).sum(1), widths)


def grid_edges(base: AbstractMeasure, data: np.ndarray, *, fineness: float = 1.0) -> list[np.ndarray]:
    """Return the borders of the grid's cells along each dimension."""
    return [_edges(base, j, data[:, j], data.shape[1], fineness) for j in range(data.shape[1])]


def importance_nodes(base: AbstractMeasure, proposal: AbstractMeasure, count: int, *, key: Key[Array, ""]) -> Nodes:
    """Return draws from the half-and-half mixture of base and proposal, so that no weight exceeds ``2 / count``."""
    base_key, proposal_key = jr.split(key)
    points = np.concatenate([base.draws(count // 2, key=base_key), proposal.draws(count - count // 2, key=proposal_key)])
    log_base, log_proposal = base.log_densities(points), proposal.log_densities(points)
    log_weights = log_base - np.logaddexp(log_base, log_proposal) + np.log(2.0 / count)
    return Nodes(points, log_weights, np.zeros_like(points))


def resample(nodes: Nodes, log_ratio: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Return draws from the density proportional to ``p0 exp(log_ratio)``, spread uniformly within grid cells."""
    rng = np.random.default_rng(seed)
    log_masses = nodes.log_weights + log_ratio
    masses = np.exp(log_masses - log_masses.max())
    # Systematic resampling: each node appears its expected number of times, up to one.
    positions = (rng.uniform() + np.arange(count)) / count
    chosen = np.searchsorted(np.cumsum(masses) / masses.sum(), positions)
    chosen = rng.permutation(np.minimum(chosen, len(masses) - 1))
    return nodes.points[chosen] + nodes.widths[chosen] * rng.uniform(-0.5, 0.5, (count, nodes.points.shape[1]))


def effective_share(log_masses: np.ndarray) -> float:
    """Return the effective sample size of the weights as a share of their number."""
    masses = np.exp(log_masses - log_masses.max())
    return float(masses.sum() ** 2 / (masses**2).sum() / len(masses))


def _mesh(axes: list[np.ndarray]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def _edges(base: AbstractMeasure, index: int, data: np.ndarray, dims: int, fineness: float) -> np.ndarray:
    wall_low, wall_high = (float(side[index]) for side in base.bounds(np.inf))  # infinite for an unbounded base
    low, high = (float(side[index]) for side in base.bounds(BASE_SPREAD))
    margin = DATA_MARGIN * np.ptp(data)
    inner_low, inner_high = max(data.min() - margin, wall_low), min(data.max() + margin, wall_high)
    fine, tail = int(fineness * FINE_CELLS[dims]), int(fineness * TAIL_CELLS[dims])
    # Cells grow with their distance from the data: the base is steepest near them.
    growth = np.linspace(0.0, 1.0, tail + 1) ** 2
    pieces = [
        inner_low - growth * max(inner_low - low, 0.0),
        np.linspace(inner_low, inner_high, fine + 1),
        inner_high + growth * max(high - inner_high, 0.0),
    ]
    return np.unique(np.concatenate(pieces))
