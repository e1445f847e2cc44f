"""Weighted points that stand for the base measure: ``sum_j exp(log_weights[j]) h(points[j])`` is ``E_p0[h]``.

A grid does it exactly in few dimensions, importance draws do it with an error bar in any. Which of the two an integral gets is
decided by ``uses_grid`` and nowhere else.
"""

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.model.measures import AbstractMeasure, Nodes, logsumexp, mesh
from kexpfam.settings import SettingsRecord, check_whole

__all__ = [
    "Integration",
    "effective_share",
    "grid_nodes",
    "importance_nodes",
    "integration_nodes",
    "resample",
    "seed_from",
    "uses_grid",
]

# The base beyond this many standard deviations holds less than 1e-6 of its mass.
BASE_SPREAD = 5.0
DATA_MARGIN = 0.15


class Integration(SettingsRecord):
    """How integrals over the target are done.

    Parameters
    ----------
    cells, tail_cells : tuple of int
        Cells of a grid along each coordinate where the data are, and beyond them on each side: one entry per number of
        coordinates. f of more coordinates than there are entries is integrated by importance draws.
    conditional_cells : tuple of int
        The same where there is one integral per condition.
    draws : int
        Importance draws of a fit.
    partition_draws : int
        Importance draws of a normaliser.
    finer : float
        How much finer the grid of a normaliser is than that of the fit, which is the check on it.
    smc_particles, smc_repeats, smc_stages : int
        Tempered sequential Monte Carlo, for normalisers that have too few effective draws.
    """

    cells: tuple[int, ...] = (800, 112, 44)
    tail_cells: tuple[int, ...] = (40, 7, 3)
    conditional_cells: tuple[int, ...] = (800, 67)
    draws: int = 16384
    partition_draws: int = 32768
    finer: float = 1.4
    smc_particles: int = 2000
    smc_repeats: int = 4
    smc_stages: int = 60

    def __check_init__(self) -> None:
        for name in ("cells", "tail_cells", "conditional_cells"):
            if not all(isinstance(count, int) and count >= 1 for count in getattr(self, name)):
                raise ValueError(f"{name} must be whole numbers of at least 1, got {getattr(self, name)!r}.")
        if len(self.tail_cells) < max(len(self.cells), len(self.conditional_cells)):
            raise ValueError("tail_cells must have an entry for every entry of cells and conditional_cells.")
        check_whole(self, 2, "draws", "partition_draws", "smc_particles", "smc_repeats", "smc_stages")
        if not self.finer > 1.0:
            raise ValueError(f"finer must be greater than 1, got {self.finer!r}.")


def uses_grid(dims: int, *, conditional: bool, settings: Integration) -> bool:
    """Return whether integrals over so many coordinates are done on a grid; the one place where that is decided.

    Under conditions the same nodes serve all of them, and draws that suit the one are rare for the other; so a grid is
    used wherever it can be afforded, with fewer cells.
    """
    return dims <= len(settings.conditional_cells if conditional else settings.cells)


def integration_nodes(
    base: AbstractMeasure,
    proposal: AbstractMeasure,
    data: np.ndarray,
    *,
    conditional: bool,
    settings: Integration,
    fineness: float = 1.0,
    draws: int | None = None,
    key: Key[Array, ""] | None,
) -> Nodes:
    """Return nodes for integrals under the base: the cells of a grid around the data, or draws from base and proposal."""
    if not uses_grid(data.shape[1], conditional=conditional, settings=settings):
        if key is None:
            raise TypeError("importance draws need a key.")
        return importance_nodes(base, proposal, draws or settings.draws, key=key)
    cells = settings.conditional_cells if conditional else settings.cells
    return grid_nodes(base, data, cells=cells, tail_cells=settings.tail_cells, fineness=fineness)


def grid_nodes(
    base: AbstractMeasure,
    data: np.ndarray,
    *,
    cells: tuple[int, ...] = Integration.cells,
    tail_cells: tuple[int, ...] = Integration.tail_cells,
    fineness: float = 1.0,
) -> Nodes:
    """Return the midpoints of a grid: fine where the data are, coarse in the base's tails."""
    dims = data.shape[1]
    fine, tail = max(int(fineness * cells[dims - 1]), 1), max(int(fineness * tail_cells[dims - 1]), 1)
    edges = tuple(_edges(base, j, data[:, j], fine, tail) for j in range(dims))
    points = mesh([0.5 * (edge[1:] + edge[:-1]) for edge in edges])
    log_volumes = np.log(mesh([np.diff(edge) for edge in edges])).sum(1)
    return Nodes(points, base.log_densities(points) + log_volumes, edges)


def importance_nodes(
    base: AbstractMeasure, proposal: AbstractMeasure, count: int, *, key: Key[Array, ""]
) -> Nodes:
    """Return draws from the half-and-half mixture of base and proposal, so that no weight exceeds ``2 / count``."""
    base_key, proposal_key = jr.split(key)
    points = np.concatenate(
        [base.draws(count // 2, key=base_key), proposal.draws(count - count // 2, key=proposal_key)]
    )
    log_base, log_proposal = base.log_densities(points), proposal.log_densities(points)
    log_weights = log_base - np.logaddexp(log_base, log_proposal) + np.log(2.0 / count)
    return Nodes(points, log_weights, ())


def resample(nodes: Nodes, log_ratio: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Return draws from the density proportional to ``p0 exp(log_ratio)``, spread uniformly within grid cells."""
    rng = np.random.default_rng(seed)
    log_masses = nodes.log_weights + log_ratio
    masses = np.exp(log_masses - log_masses.max())
    # Systematic resampling: each node appears its expected number of times, up to one.
    positions = (rng.uniform() + np.arange(count)) / count
    chosen = np.searchsorted(np.cumsum(masses) / masses.sum(), positions)
    chosen = rng.permutation(np.minimum(chosen, len(masses) - 1))
    return nodes.points[chosen] + nodes.widths[chosen] * rng.uniform(
        -0.5, 0.5, (count, nodes.points.shape[1])
    )


def seed_from(key: Key[Array, ""]) -> int:
    """Return the seed that stands for a key in NumPy and scikit-learn."""
    first, *_, last = np.asarray(jr.key_data(key)).tolist()
    return (first ^ last) % (2**31 - 1)


def effective_share(log_masses: np.ndarray) -> float:
    """Return the effective sample size of the weights as a share of their number."""
    return float(np.exp(2.0 * logsumexp(log_masses) - logsumexp(2.0 * log_masses)) / len(log_masses))


def _edges(base: AbstractMeasure, index: int, data: np.ndarray, fine: int, tail: int) -> np.ndarray:
    wall_low, wall_high = (
        float(side[index]) for side in base.bounds(np.inf)
    )  # infinite for an unbounded base
    low, high = (float(side[index]) for side in base.bounds(BASE_SPREAD))
    margin = DATA_MARGIN * np.ptp(data)
    inner_low, inner_high = max(data.min() - margin, wall_low), min(data.max() + margin, wall_high)
    # Cells grow with their distance from the data: the base is steepest near them.
    growth = np.linspace(0.0, 1.0, tail + 1) ** 2
    pieces = [
        inner_low - growth * max(inner_low - low, 0.0),
        np.linspace(inner_low, inner_high, fine + 1),
        inner_high + growth * max(high - inner_high, 0.0),
    ]
    return np.unique(np.concatenate(pieces))
