"""The penalised maximum-likelihood problem solved outright, for functions of at most three target coordinates."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from kexpfam.nodes import GRID_DIMS, grid_nodes
from kexpfam.references import TiltedCells
from kexpfam.solvers import convex
from kexpfam.solvers.loop import Status
from kexpfam.solvers.reference import distil
from kexpfam.solvers.task import CONDITIONAL_FINENESS, Solution, Task, continuation, likelihood
from kexpfam.transports import Identity, Sampler

# The integral on a finer grid may differ by this much (nats) before the grid is called too coarse.
GRID_TOLERANCE = 5e-3
FINER = 1.4


class Exact(eqx.Module):
    """Newton's method on the convex problem, with the integral on a grid, checked on a finer one."""

    fineness: float = 1.0

    def solve(self, task: Task, *, key: Key[Array, ""], report=None, checkpoint=None) -> Solution:
        """Return the maximiser of the penalised likelihood, and a sampler that follows it.

        The sampler is a distilled mixture, or under conditions the grid's own cells.
        """
        data, conditional = np.asarray(task.sample.target), task.sample.condition.shape[1] > 0
        most = max(CONDITIONAL_FINENESS) if conditional else GRID_DIMS
        if data.shape[1] > most:
            raise ValueError(
                f"solver='exact' integrates over at most {most} dimensions and f depends on {data.shape[1]}: use solver='dde'."
            )
        fineness = self.fineness * (CONDITIONAL_FINENESS[data.shape[1]] if conditional else 1.0)
        optimum = continuation(likelihood(task, grid_nodes(task.base, data, fineness=fineness)), task.rkhs_penalty)
        error = self._grid_error(task, optimum, data, fineness)
        weights = jnp.asarray(optimum.weights)
        reference = (
            TiltedCells.on_grid(task.tilt(weights), data, fineness=fineness) if conditional else distil(task, weights, key=key)
        )
        return Solution(
            tilt=task.tilt(weights),
            sampler=Sampler(reference, Identity(), task.base),
            status=_status(optimum.converged, error),
            trace={},
            facts={
                "newton_decrement": optimum.decrement,
                "grid_error": error,
                "newton_steps": float(optimum.iterations),
            },
        )

    def _grid_error(self, task: Task, optimum: convex.Optimum, data: np.ndarray, fineness: float) -> float:
        finer = likelihood(task, grid_nodes(task.base, data, fineness=FINER * fineness))
        return float(np.max(np.abs(convex.log_partitions(finer, optimum.weights) - optimum.log_partitions)))


def _status(converged: bool, grid_error: float) -> Status:
    if not converged:
        return Status.RAN_ALL_STEPS
    return Status.CONVERGED if grid_error < GRID_TOLERANCE else Status.GRID_TOO_COARSE
