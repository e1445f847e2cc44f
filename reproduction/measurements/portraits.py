"""Data of the figures: draws and f of a fit, and draws along the saddle steps from a cold start."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kexpfam.fit.dde import DDE
from reproduction.cost import Cost
from reproduction.measurements.synthetic import synthetic
from reproduction.methods import DENSITIES, with_solver
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["convergence", "portrait"]

PICTURED_DRAWS, PICTURED_CELLS, MARGIN = 1000, 60, 0.15
# Enough for a picture, at a fraction of the size.
DECIMALS = 3


def portrait(cell: Cell) -> Values:
    """Return training rows, draws of the sampler, and f and the log density on a grid around them."""
    train = synthetic(cell["dataset"], 2).sample(cell["rows"], random_state=cell["seed"])
    model = DENSITIES[cell["method"]](cell["seed"]).fit(train)
    axes = [np.linspace(low, high, PICTURED_CELLS) for low, high in map(_limits, train.T)]
    grid = np.stack(np.meshgrid(*axes), -1).reshape(-1, 2)
    return {
        "data": _rounded(train),
        "draws": _rounded(model.sample(PICTURED_DRAWS, random_state=cell["seed"])),
        "limits": [_rounded(_limits(column)) for column in train.T],
        "f": _rounded(model.potential(grid)),
        "log_density": _rounded(model.score_samples(grid)),
    }


def convergence(cell: Cell) -> Values:
    """Return draws of the sampler at the given steps of the saddle point, starting at f = 0 and the base."""
    train = synthetic(cell["dataset"], 2).sample(cell["rows"], random_state=cell["seed"])
    solver = DDE(steps=max(cell["steps"]), snapshots=True)
    with Cost() as cost:
        model = with_solver(solver, cell["seed"]).fit(train)
    solution: Any = model.solution_
    kept, scaling = solution.snapshots or {}, model.density_.scaling
    wanted = [str(step) for step in cell["steps"] if str(step) in kept]
    return {
        "data": _rounded(train),
        "draws": {step: _rounded(scaling.to_data(np.asarray(kept[step]))) for step in wanted},
        "seconds": cost.seconds,
        "processor_seconds": cost.processor_seconds,
        "status": solution.status.name,
    }


def _limits(column: np.ndarray) -> tuple[float, float]:
    pad = MARGIN * np.ptp(column)
    return float(column.min() - pad), float(column.max() + pad)


def _rounded(values: ArrayLike) -> list:
    return np.round(np.asarray(values, float), DECIMALS).tolist()
