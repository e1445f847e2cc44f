"""The penalised maximum-likelihood problem solved outright, for functions of at most three target coordinates."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from kexpfam.nodes import GRID_DIMS, grid_nodes
from kexpfam.solvers import convex
from kexpfam.solvers.loop import Status
from kexpfam.solvers.reference import distil
from kexpfam.solvers.task import Solution, Task, continuation, likelihood, node_features
from kexpfam.transports import Identity, Sampler

# The integral on a finer grid may differ by this much (nats) before the grid is called too coarse.
GRID_TOLERANCE = 5e-3
FINER = 1.4


class Exact(eqx.Module):
    """Newton's method on the convex problem, with the integral on a grid, checked on a finer one."""

    fineness: float = 1.0

    def solve(self, task: Task, *, key: Key[Array, ""], report=None, checkpoint=None) -> Solution:
        """Return the maximiser of the penalised likelihood, and a mixture distilled from it as sampler."""
        data = np.asarray(task.sample.target)
        if data.shape[1] > GRID_DIMS:
            raise ValueError(
                f"solver='exact' integrates over at most {GRID_DIMS} dimensions and f depends on {data.shape[1]}: "
                "use solver='dde'."
            )
        nodes = grid_nodes(task.base, data, fineness=self.fineness)
        optimum = continuation(likelihood(task, nodes), task.rkhs_penalty)
        error = self._grid_error(task, optimum, data)
        reference = distil(task, optimum.weights, key=key)
        return Solution(
            weights=jnp.asarray(optimum.weights),
            sampler=Sampler(reference, Identity(), task.base),
            status=_status(optimum.converged, error),
            trace={},
            facts={
                "newton_decrement": optimum.decrement,
                "grid_error": error,
                "newton_steps": float(optimum.iterations),
            },
        )

    def _grid_error(self, task: Task, optimum: convex.Optimum, data: np.ndarray) -> float:
        nodes = grid_nodes(task.base, data, fineness=FINER * self.fineness)
        features, shares = node_features(task.space, task.sample.condition, nodes)
        finer = convex.Likelihood(
            np.zeros(task.space.size), features, np.broadcast_to(nodes.log_weights, features.shape[:2]), shares
        )
        return float(np.max(np.abs(convex.log_partitions(finer, optimum.weights) - optimum.log_partitions)))


def _status(converged: bool, grid_error: float) -> Status:
    if not converged:
        return Status.RAN_ALL_STEPS
    return Status.CONVERGED if grid_error < GRID_TOLERANCE else Status.GRID_TOO_COARSE
