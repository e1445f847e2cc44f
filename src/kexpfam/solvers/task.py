"""What is asked of a solver and what it answers; the convex likelihood of a task on given nodes."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kexpfam.measures import AbstractMeasure
from kexpfam.nodes import Nodes
from kexpfam.potentials import AbstractFeatureSpace, Tilt
from kexpfam.sample import Sample
from kexpfam.solvers import convex
from kexpfam.solvers.loop import Status
from kexpfam.transports import Sampler

# The continuation in the penalty starts where two Newton steps solve the problem, and follows it down.
FIRST_PENALTY, PENALTY_FACTOR = 1e-2, 0.1


class Task(eqx.Module):
    """The sample, the base measure, the space of f and the penalty ``eta / 2 |f|^2``.

    ``proposal`` is any guess of the density: importance draws come from it and the base. Only the coordinates that f
    depends on are in a task; what the base says about the others is put back in ``density.Completion``.
    """

    sample: Sample
    base: AbstractMeasure
    space: AbstractFeatureSpace
    rkhs_penalty: float
    proposal: AbstractMeasure

    def tilt(self, weights) -> Tilt:
        """Return the unnormalised density of f with these weights."""
        return Tilt(self.space, jnp.asarray(weights), self.base)


class Solution(NamedTuple):
    """The answer of any solver: f, a sampler, why it stopped, its trace, facts about its end, and snapshots by step."""

    weights: Float[Array, " r"]
    sampler: Sampler
    status: Status
    trace: dict[str, np.ndarray]
    facts: dict[str, float]
    snapshots: dict[str, np.ndarray] | None = None


def likelihood(task: Task, nodes: Nodes) -> convex.Likelihood:
    """Return the convex likelihood of the task with its partition functions on the nodes."""
    sample = task.sample
    mean = task.space.matrix(sample.target, sample.condition).mean(0)
    features, shares = node_features(task.space, sample.condition, nodes)
    return convex.Likelihood(mean, features, np.broadcast_to(nodes.log_weights, features.shape[:2]), shares)


def node_features(space: AbstractFeatureSpace, condition, nodes: Nodes) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (c, j, r) of every node under every distinct condition, and each condition's share (c,)."""
    distinct, counts = np.unique(np.asarray(condition), axis=0, return_counts=True)
    if condition.shape[1] == 0:
        distinct, counts = np.zeros((1, 0)), np.array([len(condition)])
    c, j = len(distinct), len(nodes.points)
    return space.matrix(np.tile(nodes.points, (c, 1)), np.repeat(distinct, j, axis=0)).reshape(
        c, j, space.size
    ), counts / counts.sum()


def continuation(problem: convex.Likelihood, penalty: float, *, start: np.ndarray | None = None) -> convex.Optimum:
    """Return the optimum at ``penalty``: from ``start`` if given, else along falling penalties from f = 0."""
    if start is not None:
        return convex.maximise(problem, penalty, start)
    weights, stage = np.zeros(problem.mean_feature.size), FIRST_PENALTY
    while stage > penalty:
        weights = convex.maximise(problem, stage, weights, tolerance=1e-2).weights
        stage *= PENALTY_FACTOR
    return convex.maximise(problem, penalty, weights)
