"""Posteriors of four tasks of the simulation-based-inference benchmark (Lueckmann et al. 2021) and its C2ST.

A density of the parameters given the simulated data is fitted to pairs, and its draws at each observation are
told apart from reference draws of the posterior, if they can be.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from reproduction import real_data
from reproduction.c2st import c2st
from reproduction.cost import Cost, timed
from reproduction.methods import CONDITIONALS
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["TASKS", "Task", "posterior", "references"]

# Variance of the prior and of the noise of the linear tasks.
LINEAR_VARIANCE = 0.1
# The crescent of the two moons: its radius, how much that varies, and its shift; and the two widths of the
# mixture.
RADIUS, RADIUS_SPREAD, SHIFT, WIDE, NARROW = 0.1, 0.01, 0.25, 1.0, 0.1
REPEATS = 3

Simulator = Callable[[np.ndarray, np.random.Generator], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """A prior and a simulator; ``edge`` is the bound of a uniform prior on a cube around 0, else None."""

    dims: int
    simulate: Simulator
    edge: float | None = None

    def prior(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return draws of the parameters."""
        if self.edge is None:
            return rng.normal(scale=np.sqrt(LINEAR_VARIANCE), size=(count, self.dims))
        return rng.uniform(-self.edge, self.edge, size=(count, self.dims))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the estimator's settings for the support of the parameters."""
        return {} if self.edge is None else {"bounds": (-self.edge, self.edge)}


def _noisy(theta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(theta, np.sqrt(LINEAR_VARIANCE))


def _wide_or_narrow(theta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(theta, rng.choice([WIDE, NARROW], size=(len(theta), 1)))


def _crescents(theta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    angle, radius = (
        rng.uniform(-np.pi / 2, np.pi / 2, len(theta)),
        rng.normal(RADIUS, RADIUS_SPREAD, len(theta)),
    )
    first, second = theta.T
    along = radius * np.cos(angle) + SHIFT - np.abs(first + second) / np.sqrt(2.0)
    across = radius * np.sin(angle) + (second - first) / np.sqrt(2.0)
    return np.column_stack([along, across])


# The first has a posterior in closed form, needs no folder, and is for quick runs.
TASKS = {
    "conjugate": Task(2, _noisy),
    "two_moons": Task(2, _crescents, edge=1.0),
    "gaussian_mixture": Task(2, _wide_or_narrow, edge=10.0),
    "gaussian_linear": Task(10, _noisy),
    "gaussian_linear_uniform": Task(10, _noisy, edge=1.0),
}


def posterior(cell: Cell) -> Values:
    """Return the mean C2ST over observations, the draws outside the prior, and the cost of the fit."""
    task, rng = TASKS[cell["dataset"]], np.random.default_rng(cell["seed"])
    theta = task.prior(cell["rows"], rng)
    x = task.simulate(theta, rng)
    observations, reference = references(cell["dataset"], cell["observations"], cell["draws"])
    method = CONDITIONALS[cell["method"]]
    model = dataclasses.replace(method, settings=method.settings | task.settings)(cell["seed"])
    jax.clear_caches()
    with Cost() as cost:
        model.fit(x, theta)
    draws = model.sample(observations, n_samples=cell["draws"], random_state=cell["seed"])
    found = [c2st(*pair) for pair in zip(reference, draws, strict=True)]
    edge = np.inf if task.edge is None else task.edge
    return {
        "c2st": float(np.mean(found)),
        "c2st_each": found,
        "outside": float(np.mean(np.any(np.abs(draws) > edge, axis=2))),
        "seconds": cost.seconds,
        "megabytes": cost.megabytes,
        "sampling_seconds": timed(
            lambda: model.sample(observations[:1], n_samples=cell["draws"]), repeats=REPEATS
        ),
    }


def references(task: str, observations: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first observations, and that many draws of the posterior at each."""
    if task == "conjugate":
        rng = np.random.default_rng(0)
        x = _noisy(TASKS[task].prior(observations, rng), rng)
        spread = np.sqrt(LINEAR_VARIANCE / 2.0)
        return x, rng.normal(x[:, None] / 2.0, spread, size=(observations, draws, TASKS[task].dims))
    content = real_data.stored("sbibm", task)
    return content["observations"][:observations], content["reference_posterior"][
        :observations, :draws
    ].astype(float)
