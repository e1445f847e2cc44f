"""What is asked of a solver and what it answers; the convex likelihood of a task on given nodes."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Key

from kexpfam.measures import AbstractMeasure
from kexpfam.nodes import Nodes, effective_share, grid_nodes, importance_nodes
from kexpfam.potentials import FeatureSpace, Tilt
from kexpfam.sample import Sample
from kexpfam.solvers import convex
from kexpfam.solvers.loop import Status
from kexpfam.transports import Sampler

# The continuation in the penalty starts where two Newton steps solve the problem, and follows it down.
FIRST_PENALTY, PENALTY_FACTOR = 1e-2, 0.1
# Grids of the target that are fine enough for densities under a condition, by its dimensions: as shares of the finest.
CONDITIONAL_FINENESS = {1: 1.0, 2: 0.6}
# Half of this bounds how far (nats) the polished f is from the optimum on its nodes.
OPTIMAL_DECREMENT = 1e-6


class Task(eqx.Module):
    """The sample, the base measure, the space of f and the penalty ``eta / 2 |f|^2``.

    ``proposal`` is any guess of the density: importance draws come from it and the base. Only the coordinates that f
    depends on are in a task; what the base says about the others is put back in ``density.Completion``.
    """

    sample: Sample
    base: AbstractMeasure
    space: FeatureSpace
    rkhs_penalty: float
    proposal: AbstractMeasure

    def tilt(self, weights) -> Tilt:
        """Return the unnormalised density of f with these weights."""
        return Tilt(self.space, jnp.asarray(weights), self.base)

    def within(self, space: FeatureSpace) -> "Task":
        """Return the task with f in another space: some solvers choose the space as they go."""
        return Task(self.sample, self.base, space, self.rkhs_penalty, self.proposal)


class Solution(NamedTuple):
    """The answer of any solver: f, a sampler, why it stopped, its trace, facts about its end, and snapshots by step."""

    tilt: Tilt
    sampler: Sampler
    status: Status
    trace: dict[str, np.ndarray]
    facts: dict[str, float]
    snapshots: dict[str, np.ndarray] | None = None


def likelihood(task: Task, nodes: Nodes) -> convex.Likelihood:
    """Return the convex likelihood of the task with its partition functions on the nodes."""
    sample, space = task.sample, task.space
    conditions = distinct_conditions(sample)
    psi = space.target.matrix(sample.target)
    phi = space.condition.matrix(conditions.values)
    # The mean over rows of phi(x) psi(y)^T, without ever holding one such product per row.
    mean = conditions.totals(psi).T @ phi / len(sample)
    return convex.Likelihood(mean.T.ravel(), space.target.matrix(nodes.points), nodes.log_weights[None], conditions.shares, phi)


class Conditions(NamedTuple):
    """The distinct conditions of a sample, and which of them each row has."""

    values: np.ndarray  # (c, p)
    membership: np.ndarray  # (n,)

    @property
    def shares(self) -> np.ndarray:
        return np.bincount(self.membership, minlength=len(self.values)) / len(self.membership)

    def totals(self, rows: np.ndarray) -> np.ndarray:
        """Return the sums of the rows of each condition, (c, r)."""
        shape = (len(self.values), len(rows))
        return scipy.sparse.csr_array((np.ones(len(rows)), (self.membership, np.arange(len(rows)))), shape) @ rows


def distinct_conditions(sample: Sample) -> Conditions:
    """Return the distinct conditions; rows without a condition all have the same, empty one."""
    if sample.condition.shape[1] == 0:
        return Conditions(np.zeros((1, 0)), np.zeros(len(sample), int))
    values, membership = np.unique(np.asarray(sample.condition), axis=0, return_inverse=True)
    return Conditions(values, membership.ravel())


def integration_nodes(
    task: Task, proposal: AbstractMeasure, count: int, *, fineness: float = 1.0, key: Key[Array, ""]
) -> Nodes:
    """Return nodes for the task's partition functions: draws from base and proposal.

    With conditions the same nodes serve all of them, and draws that suit the one are rare for the other; so a grid is
    used wherever the target has few enough dimensions for one.
    """
    dim = task.sample.target.shape[1]
    if task.sample.condition.shape[1] and dim in CONDITIONAL_FINENESS:
        data = np.asarray(task.sample.target)
        return grid_nodes(task.base, data, fineness=fineness * CONDITIONAL_FINENESS[dim])
    return importance_nodes(task.base, proposal, count, key=key)


def conditional_probabilities(task: Task, weights, nodes: Nodes, conditions: np.ndarray) -> np.ndarray:
    """Return the probabilities of the nodes under each condition, (c, j)."""
    phi, psi = task.space.condition.matrix(conditions), task.space.target.matrix(nodes.points)
    shares = np.full(len(phi), 1.0 / len(phi))
    exponents = convex.Likelihood(np.zeros(0), psi, nodes.log_weights[None], shares, phi).exponents(np.asarray(weights))
    exponents -= exponents.max(axis=1, keepdims=True)
    masses = np.exp(exponents)
    return masses / masses.sum(axis=1, keepdims=True)


def continuation(problem: convex.Likelihood, penalty: float, *, start: np.ndarray | None = None) -> convex.Optimum:
    """Return the optimum at ``penalty``: from ``start`` if given, else along falling penalties from f = 0."""
    if start is not None:
        return convex.maximise(problem, penalty, start)
    weights, stage = np.zeros(problem.mean_feature.size), FIRST_PENALTY
    while stage > penalty:
        weights = convex.maximise(problem, stage, weights, tolerance=1e-2).weights
        stage *= PENALTY_FACTOR
    return convex.maximise(problem, penalty, weights)


class Shortfall(NamedTuple):
    """How much higher the penalised likelihood could be, and how much of that draws alone would show (nats)."""

    value: float
    noise: float


def shortfall(task: Task, tilt: Tilt, proposal: AbstractMeasure, count: int, *, key: Key[Array, ""]) -> Shortfall:
    """Return half the squared Newton decrement on ``count`` fresh draws from base and proposal.

    The part that fresh draws put there by chance, about rank / (2 effective draws), is taken off: where it is large there
    are too few draws near the density to judge it, and the value says nothing.
    """
    problem = likelihood(task.within(tilt.space), importance_nodes(task.base, proposal, count, key=key))
    optimum = convex.maximise(problem, task.rkhs_penalty, np.asarray(tilt.weights), most=0)
    exponents = problem.exponents(np.asarray(tilt.weights))[0]
    noise = 0.5 * tilt.space.size / (effective_share(exponents) * count)
    return Shortfall(max(0.5 * optimum.decrement - noise, 0.0), noise)


def polish(task: Task, nodes: Nodes, weights, *, near: bool) -> tuple[Array, dict[str, float]]:
    """Return the weights of the convex optimum on the nodes, and the facts that say how well it was reached.

    From weights that are near it Newton's method starts there; otherwise it comes down from large penalties.
    """
    problem, start = likelihood(task, nodes), np.asarray(weights)
    optimum = continuation(problem, task.rkhs_penalty, start=start if near else None)
    facts = {
        "newton_decrement": optimum.decrement,
        "polish_gain": optimum.value - convex.maximise(problem, task.rkhs_penalty, start, most=0).value,
        "polish_effective_share": effective_share(problem.exponents(optimum.weights)[0]),
    }
    return jnp.asarray(optimum.weights), facts


def is_optimal(facts: dict[str, float]) -> bool:
    """Return whether the facts are those of a polish that reached its optimum."""
    return facts.get("newton_decrement", np.inf) < OPTIMAL_DECREMENT
