"""Weighted points that represent the base measure: ``sum_j exp(log_weights[j]) h(points[j])`` is ``E_p0[h]``.

In few dimensions the points are the cells of a grid, otherwise importance draws. ``uses_grid`` decides.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.random as jr
import numpy as np

from kexpfam.data.sample import RandomKey
from kexpfam.model.measures import AbstractMeasure, Nodes, grid_cells, logsumexp
from kexpfam.settings import SettingsRecord, above, at_least, between, shown

# Chains start at resampled draws if at least this share of the weighted draws is effective.
RESAMPLING_SHARE = 0.05


class Integration(SettingsRecord):
    """How integrals over the target are computed.

    Parameters
    ----------
    cells : tuple of int
        Cells of a grid per coordinate within the range of the data: the first entry for one coordinate, the
        second for two, and so on. f of more coordinates is integrated by importance draws.
    tail_cells : tuple of int
        Cells on each side beyond the range of the data.
    conditional_cells : tuple of int
        Cells per coordinate where there is one integral per condition.
    base_spread : float
        A grid reaches to this many standard deviations of the base.
    data_margin : float
        The fine cells reach beyond the data by this share of their range.
    draws : int
        Importance draws of a fit.
    partition_draws : int
        Importance draws of a normaliser.
    finer : float
        Fineness of a normaliser's grid relative to the fit's; the difference is the error estimate.
    smc_particles : int
        Particles of tempered sequential Monte Carlo, for normalisers with too few effective draws.
    smc_repeats : int
        Independent repetitions of it.
    smc_stages : int
        Temperatures, at most.
    smc_moves : int
        HMC transitions at each temperature.
    smc_share : float
        Share of the particles that stays effective from one temperature to the next.
    """

    cells: tuple[int, ...] = at_least(1, (800, 112, 44), whole=True)
    tail_cells: tuple[int, ...] = at_least(1, (40, 7, 3), whole=True)
    conditional_cells: tuple[int, ...] = at_least(1, (800, 67), whole=True)
    draws: int = at_least(2, 16384, whole=True)
    partition_draws: int = at_least(2, 32768, whole=True)
    finer: float = above(1, 1.4)
    smc_particles: int = at_least(2, 2000, whole=True)
    smc_repeats: int = at_least(2, 4, whole=True)
    smc_stages: int = at_least(2, 60, whole=True)
    smc_moves: int = at_least(1, 5, whole=True)
    smc_share: float = between(0, 1, 0.7)
    # The base has less than 1e-6 of its mass beyond five standard deviations.
    base_spread: float = above(0, 5.0)
    data_margin: float = above(0, 0.15)

    def __check_init__(self) -> None:
        for name in ("cells", "tail_cells", "conditional_cells"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"{name} must be a tuple of numbers, got {shown(getattr(self, name))}.")
        if len(self.tail_cells) < max(len(self.cells), len(self.conditional_cells)):
            raise ValueError("tail_cells must have an entry for every entry of cells and conditional_cells.")

    def grid_cells(self, *, conditional: bool) -> tuple[int, ...]:
        """Return the cells per coordinate of the grids, with or without conditions."""
        return self.conditional_cells if conditional else self.cells


def uses_grid(dims: int, *, conditional: bool, settings: Integration) -> bool:
    """Return whether integrals over ``dims`` coordinates are computed on a grid.

    All conditions share the same nodes, and importance draws that suit one condition are rare for another. So
    a grid is used under conditions too, with fewer cells.
    """
    return dims <= len(settings.grid_cells(conditional=conditional))


def grid_nodes(
    base: AbstractMeasure,
    data: np.ndarray,
    settings: Integration | None = None,
    *,
    conditional: bool = False,
    fineness: float = 1.0,
) -> Nodes:
    """Return the midpoints of a grid with fine cells around the data and coarse cells in the base's tails.

    The arrays are read-only: equal requests share one grid.
    """
    settings, index = settings or Integration(), data.shape[1] - 1
    cells = settings.grid_cells(conditional=conditional)
    leaves, structure = jax.tree.flatten(base)
    return _built(
        _GridRequest(
            low=tuple(data.min(axis=0).tolist()),
            high=tuple(data.max(axis=0).tolist()),
            fine=max(int(fineness * cells[index]), 1),
            tail=max(int(fineness * settings.tail_cells[index]), 1),
            spread=settings.base_spread,
            margin=settings.data_margin,
            structure=structure,
            leaves=tuple((str(leaf.dtype), leaf.shape, leaf.tobytes()) for leaf in map(np.asarray, leaves)),
            base=base,
        )
    )


@dataclasses.dataclass(frozen=True)
class _GridRequest:
    """Everything that a grid depends on; ``structure`` and ``leaves`` are the values of the base."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    fine: int
    tail: int
    spread: float
    margin: float
    structure: Any
    leaves: tuple[tuple[str, tuple[int, ...], bytes], ...]
    base: AbstractMeasure = dataclasses.field(compare=False)

    def edges(self, index: int) -> np.ndarray:
        """Return the borders of the cells along one coordinate."""
        wall_low, wall_high = (float(side[index]) for side in self.base.bounds(np.inf))
        low, high = (float(side[index]) for side in self.base.bounds(self.spread))
        margin = self.margin * (self.high[index] - self.low[index])
        inner_low = max(self.low[index] - margin, wall_low)
        inner_high = min(self.high[index] + margin, wall_high)
        # Cells grow with their distance from the data: the base is steepest near them.
        growth = np.linspace(0.0, 1.0, self.tail + 1) ** 2
        pieces = [
            inner_low - growth * max(inner_low - low, 0.0),
            np.linspace(inner_low, inner_high, self.fine + 1),
            inner_high + growth * max(high - inner_high, 0.0),
        ]
        return np.unique(np.concatenate(pieces))


@functools.lru_cache(maxsize=4)
def _built(request: _GridRequest) -> Nodes:
    """Return the grid of a request; a fit asks for each of its few grids several times."""
    edges = tuple(request.edges(index) for index in range(len(request.low)))
    points, widths = grid_cells(edges)
    nodes = Nodes(points, request.base.log_densities(points) + np.log(widths).sum(1), edges)
    for array in (nodes.points, nodes.log_weights, *edges):
        array.setflags(write=False)
    return nodes


def importance_nodes(
    base: AbstractMeasure, proposal: AbstractMeasure, count: int, *, key: RandomKey
) -> Nodes:
    """Return draws from the equal mixture of base and proposal; no weight exceeds ``2 / count``."""
    base_key, proposal_key = jr.split(key)
    points = np.concatenate(
        [base.draws(count // 2, key=base_key), proposal.draws(count - count // 2, key=proposal_key)]
    )
    log_base, log_proposal = base.log_densities(points), proposal.log_densities(points)
    log_weights = log_base - np.logaddexp(log_base, log_proposal) + np.log(2.0 / count)
    return Nodes(points, log_weights, ())


def resample(nodes: Nodes, log_ratio: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Return draws of the density proportional to ``p0 exp(log_ratio)``, uniform within grid cells."""
    rng = np.random.default_rng(seed)
    log_masses = nodes.log_weights + log_ratio
    masses = np.exp(log_masses - log_masses.max())
    # Systematic resampling: the number of copies of a node differs from its expectation by less than one.
    positions = (rng.uniform() + np.arange(count)) / count
    chosen = np.searchsorted(np.cumsum(masses) / masses.sum(), positions)
    chosen = rng.permutation(np.minimum(chosen, len(masses) - 1))
    within = rng.uniform(-0.5, 0.5, (count, nodes.points.shape[1]))
    return nodes.points[chosen] + nodes.widths[chosen] * within


def choose_each(masses: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return a column of the masses, (n, m), for each number in [0, 1), (n, k), by the masses of its row."""
    levels = np.cumsum(masses, axis=1)
    levels /= levels[:, -1:]
    offsets = np.arange(len(masses))[:, None]
    # The levels of row i lie in (i, i + 1], so that one sorted list serves all rows.
    places = np.searchsorted((levels + offsets).ravel(), uniforms + offsets, side="right")
    return np.clip(places - offsets * masses.shape[1], 0, masses.shape[1] - 1)


def seed_from(key: RandomKey) -> int:
    """Return a seed for NumPy and scikit-learn that is derived from a JAX key."""
    first, *_, last = np.asarray(jr.key_data(key)).tolist()
    return (first ^ last) % (2**31 - 1)


def effective_share(log_masses: np.ndarray) -> float:
    """Return the effective sample size of the weights, divided by their number."""
    return float(np.exp(2.0 * logsumexp(log_masses) - logsumexp(2.0 * log_masses)) / len(log_masses))
