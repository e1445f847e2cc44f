"""Steps and processor time until the saddle point is first within a tolerance of the exact solution."""

import time
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key

from kexpfam.fit.dde import DDE
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver
from kexpfam.integrate.partition import by_quadrature
from kexpfam.progress import Listener
from reproduction.measurements.synthetic import TEST_ROWS, synthetic
from reproduction.methods import DENSITIES, with_solver
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["Diary", "arrival"]

# Nats above the exact solution's NLL.
LEVEL = 0.02


class Diary:
    """A checkpoint that keeps f and the processor's clock at every look, and never gives anything back."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, float, np.ndarray]] = []

    def read(self, template: eqx.Module) -> eqx.Module:
        return template

    def write(self, state: Any) -> None:
        self.looks.append((int(state.step), time.process_time(), np.asarray(state.point.f_weights)))


class Watched(Solver):
    """The doubly dual embedding with its defaults, and a diary of it."""

    diary: Any = eqx.field(static=True)

    supports_conditions: ClassVar[bool] = True

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return what the doubly dual embedding does."""
        return DDE().solve(problem, key=key, report=report, checkpoint=self.diary)


def arrival(cell: Cell) -> Values:
    """Return the first check at which f is within the tolerance; time includes compilation."""
    truth, seed = synthetic(cell["dataset"], 2), cell["seed"]
    train = truth.sample(cell["rows"], random_state=seed)
    test = truth.sample(TEST_ROWS[cell["dataset"]], random_state=1000 + seed)
    exact = float(-DENSITIES["exact"](seed).fit(train).score_samples(test).mean())
    jax.clear_caches()
    diary, start = Diary(), time.process_time()
    model = with_solver(Watched(diary), seed).fit(train)
    spent = time.process_time() - start
    density, points = model.density_, model.density_.scaling.to_model(test)
    rows = density.scaling.to_model(train)
    units = float(np.mean(density.log_density(test) - density.tilt.log_values(points)))
    last = by_quadrature(density.tilt, rows).value

    def nll(weights: np.ndarray) -> float:
        tilt = eqx.tree_at(lambda tilt: tilt.weights, density.tilt, weights)
        return float(by_quadrature(tilt, rows).value - last - units - np.mean(tilt.log_values(points)))

    gaps = {step: (nll(weights) - exact, clock - start) for step, clock, weights in diary.looks}
    near = [step for step, (gap, _) in gaps.items() if gap <= LEVEL]
    found: Values = {
        "level": LEVEL,
        "exact_nll": exact,
        "processor_seconds": spent,
        "last_gap": list(gaps.values())[-1][0],
    }
    found["gaps"] = {str(step): round(gap, 4) for step, (gap, _) in gaps.items()}
    return found | ({"step": near[0], "arrival_processor_seconds": gaps[near[0]][1]} if near else {})
