"""The convex problem behind every f: penalised maximum likelihood with the partition function as a weighted sum.

The nodes of that sum are a quadrature grid or importance draws; the program is the same. Conditional and unconditional too:
there is one partition function per condition, and the unconditional problem has a single empty one. Features are products of
a function of the condition and one of the target, so that nothing is ever stored per condition, node *and* feature. All of it
in float64, on NumPy's BLAS. ``Convex`` is the default solver.
"""

import functools
from typing import ClassVar, Literal, NamedTuple

import jax.random as jr
import numpy as np
import scipy.linalg
from jaxtyping import Array, Key
from threadpoolctl import threadpool_limits

from kexpfam.data.sample import AnyArray, distinct_conditions
from kexpfam.fit.distil import Distillation, distil
from kexpfam.fit.newton import climb, factored
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, Status
from kexpfam.integrate.nodes import effective_share
from kexpfam.model.density import FEW_EFFECTIVE_DRAWS, Sampler, Tilt, TiltedCells
from kexpfam.model.measures import AbstractMeasure, Nodes
from kexpfam.model.networks import Identity
from kexpfam.progress import Listener

__all__ = [
    "Convex",
    "Likelihood",
    "Optimum",
    "Shortfall",
    "continuation",
    "likelihood",
    "log_partitions",
    "maximise",
    "polish",
    "shortfall",
]

# A node this much less probable than the likeliest one does not move a Hessian.
NEGLIGIBLE = 1e-8
# Numbers in the largest array of a Hessian's assembly: about 100 MB.
BLOCK_NUMBERS = 12_000_000
# The continuation in the penalty starts where two Newton steps solve the problem, and follows it down.
FIRST_PENALTY, PENALTY_FACTOR = 1e-2, 0.1
# Half of this bounds how far (nats) f is from the optimum on its nodes.
OPTIMAL_DECREMENT = 1e-6
# An integral may change by this much (nats) on a finer grid, or on fresh draws, before it is called too coarse.
INTEGRAL_TOLERANCE = 5e-3
# Threads pay for large products only; for small ones they wait for each other, above all on a busy machine.
THREADED_FEATURES = 600
# The grid on which the way to the optimum is found, as a share of the one that the optimum is on.
COARSE = 0.5


class Likelihood(NamedTuple):
    """``w . mean_feature - sum_c share_c log sum_j exp(log_weights[c, j] + features[c, j] . w)``.

    ``features[c, j]`` is the outer product of ``condition_features[c]`` and ``node_features[j]``, flattened. Log weights that
    are the same under every condition have a first axis of length 1. Without conditions there is one condition feature, 1.

    Problems that differ in their rows alone, such as those of folds, are one with a further first axis of ``mean_feature`` and
    ``shares``; their weights, values and gradients have it too, and the features of the nodes are read once for all of them.
    """

    mean_feature: np.ndarray  # (*k, a * b)
    node_features: np.ndarray  # (j, b)
    log_weights: np.ndarray  # (c or 1, j)
    shares: np.ndarray  # (*k, c)
    condition_features: np.ndarray  # (c, a)

    @staticmethod
    def unconditional(
        mean_feature: np.ndarray, node_features: np.ndarray, log_weights: np.ndarray
    ) -> "Likelihood":
        """Return the likelihood with a single, empty condition."""
        return Likelihood(mean_feature, node_features, log_weights[None], np.ones(1), np.ones((1, 1)))

    def exponents(self, weights: np.ndarray) -> np.ndarray:
        """Return ``log_weights + f`` at every condition and node, (*k, c, j)."""
        return self.log_weights + _product(self.coefficients(weights), self.node_features.T)

    def coefficients(self, weights: np.ndarray) -> np.ndarray:
        """Return the weights of the node features under each condition, (*k, c, b)."""
        return self.condition_features @ weights.reshape(
            *weights.shape[:-1], self.condition_features.shape[1], -1
        )


class Optimum(NamedTuple):
    """The maximiser, with what a reader needs to trust it."""

    weights: np.ndarray
    value: float
    log_partitions: np.ndarray  # (c,)
    decrement: float
    iterations: int
    factor: tuple
    converged: bool


def maximise(
    problem: Likelihood, penalty: float, start: np.ndarray, *, tolerance: float = 1e-9, most: int = 100
) -> Optimum:
    r"""Return the maximiser of ``likelihood - penalty / 2 |w|^2`` by damped Newton steps.

    The gradient is :math:`\hat\mu - E_{p_f}[\phi] - \eta w`, the negative Hessian :math:`Cov_{p_f}[\phi] + \eta I`; half the
    squared Newton decrement bounds the distance to the optimum in nats. Equation ledger: ``KEF-MLE``.
    """

    def evaluate(weights: np.ndarray) -> tuple[float, NodeMasses]:
        value, masses = objective(problem, penalty, weights)
        return float(value), masses

    def direction(weights: np.ndarray, state: NodeMasses) -> tuple[np.ndarray, float, tuple]:
        means, gradient = moments(problem, penalty, weights, state.probabilities)
        hessian = information(problem, covariances(problem, state.probabilities, means), problem.shares)
        hessian.flat[:: weights.size + 1] += penalty
        factor = factored(hessian)
        step = scipy.linalg.cho_solve(factor, gradient, check_finite=False)
        return step, float(gradient @ step), factor

    start = np.array(start, dtype=np.float64)
    found = climb(start, evaluate, direction, tolerance=tolerance, most=most)
    converged = bool(found.decrement <= max(tolerance, 1e-7))
    partitions = found.state.log_partitions
    return Optimum(
        found.point, found.value, partitions, found.decrement, found.iterations, found.curvature, converged
    )


def likelihood(problem: Problem, nodes: Nodes) -> Likelihood:
    """Return the convex likelihood of the problem with its partition functions on the nodes."""
    sample, space = problem.sample, problem.space
    conditions = distinct_conditions(sample)
    phi, mean = space.condition.matrix(conditions.values), problem.mean_feature
    if mean is None:
        # The mean over rows of phi(x) psi(y)^T, without ever holding one such product per row.
        mean = (
            conditions.totals(space.target.matrix(sample.target)).T @ phi / conditions.counts.sum()
        ).T.ravel()
    features = space.target.node_matrix(nodes)
    return Likelihood(np.asarray(mean), features, nodes.log_weights[None], conditions.shares, phi)


def _product(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return ``rows @ matrix`` as one product, whatever axes the rows are arranged along."""
    return (rows.reshape(-1, rows.shape[-1]) @ matrix).reshape(*rows.shape[:-1], -1)


class NodeMasses(NamedTuple):
    """The probabilities of the nodes under each condition (*k, c, j), and the log partition functions (*k, c)."""

    probabilities: np.ndarray
    log_partitions: np.ndarray


def normalised(exponents: np.ndarray) -> NodeMasses:
    """Return the probabilities of the nodes and their normalisers, by one exponential per node.

    This is the inner loop of every fit: a log-sum-exp and then the probabilities would take two exponentials. The array given
    is overwritten.
    """
    top = exponents.max(axis=-1)
    exponents -= top[..., None]
    masses = np.exp(exponents, out=exponents)
    totals = masses.sum(axis=-1)
    masses /= totals[..., None]
    return NodeMasses(masses, top + np.log(totals))


def objective(
    problem: Likelihood, penalty: float, weights: np.ndarray
) -> tuple[np.ndarray | np.floating, NodeMasses]:
    """Return ``likelihood - penalty / 2 |w|^2`` (*k), and the masses that its derivatives are made of."""
    masses = normalised(problem.exponents(weights))
    linear = np.sum(weights * (problem.mean_feature - 0.5 * penalty * weights), axis=-1)
    return linear - np.sum(problem.shares * masses.log_partitions, axis=-1), masses


def log_partitions(problem: Likelihood, weights: np.ndarray) -> np.ndarray:
    """Return ``log Z`` per condition for one weight vector (c,), or for several (k, c)."""
    return normalised(problem.exponents(weights)).log_partitions


def gradient(problem: Likelihood, penalty: float, weights: np.ndarray) -> np.ndarray:
    """Return the gradient of ``likelihood - penalty / 2 |w|^2``."""
    return moments(problem, penalty, weights, normalised(problem.exponents(weights)).probabilities)[1]


def without_negligible_nodes(problem: Likelihood, weights: np.ndarray, *, share: float = 1e-10) -> Likelihood:
    """Return the problem without the nodes that carry no mass at these weights under any condition."""
    exponents = problem.exponents(weights)
    live = np.any(exponents - exponents.max(axis=1, keepdims=True) > np.log(share), axis=0)
    return problem._replace(
        node_features=problem.node_features[live], log_weights=problem.log_weights[:, live]
    )


def moments(
    problem: Likelihood, penalty: float, weights: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean features under each condition (*k, c, b), and the gradient (*k, a * b)."""
    means = _product(probabilities, problem.node_features)
    expected = problem.condition_features.T @ (problem.shares[..., None] * means)
    return means, problem.mean_feature - expected.reshape(weights.shape) - penalty * weights


def covariances(problem: Likelihood, probabilities: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return the covariance of the node features under each condition: upper triangles, (c, b (b + 1) / 2)."""
    psi = problem.node_features
    first, second = np.triu_indices(psi.shape[1])
    if len(probabilities) == 1:
        live = probabilities[0] > NEGLIGIBLE * probabilities[0].max()
        scaled = psi[live] * np.sqrt(probabilities[0, live])[:, None]
        products = (scaled.T @ scaled)[first, second][None]
    else:
        # One product for all conditions: their features are few, so that the squares of all nodes' features are small.
        products = probabilities @ (psi[:, first] * psi[:, second])
    return products - means[:, first] * means[:, second]


def information(problem: Likelihood, triangles: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return ``sum_c share_c (phi_c phi_c^T) x Cov_c[psi]`` as a matrix; the factors are symmetric, so triangles are enough."""
    phi, b = problem.condition_features, problem.node_features.shape[1]
    a = phi.shape[1]
    if a == 1:
        return _square(((shares * phi[:, 0] ** 2) @ triangles)[None], 1, b)
    first, second = np.triu_indices(a)
    blocks = np.zeros((len(first), triangles.shape[1]))
    size = max(1, BLOCK_NUMBERS // len(first))
    for start in range(0, len(phi), size):
        rows = slice(start, start + size)
        outer = phi[rows, first] * phi[rows, second]
        blocks += outer.T @ (triangles[rows] * shares[rows, None])
    return _square(blocks, a, b)


def _square(blocks: np.ndarray, a: int, b: int) -> np.ndarray:
    """Return the matrix of (a b) rows whose upper triangles of upper triangles are given."""
    full = blocks[_places(a)][:, :, _places(b)]
    return full.transpose(0, 2, 1, 3).reshape(a * b, a * b)


@functools.cache
def _places(size: int) -> np.ndarray:
    """Return where each entry of a symmetric matrix is in its upper triangle, (size, size)."""
    places = np.zeros((size, size), int)
    places[np.triu_indices(size)] = np.arange(size * (size + 1) // 2)
    return np.maximum(places, places.T)


def continuation(problem: Likelihood, penalty: float, *, start: np.ndarray | None = None) -> Optimum:
    """Return the optimum at ``penalty``: from ``start`` if given, else along falling penalties from f = 0."""
    if start is not None:
        return maximise(problem, penalty, start)
    weights, stage = np.zeros(problem.mean_feature.size), FIRST_PENALTY
    while stage > penalty:
        weights = maximise(problem, stage, weights, tolerance=1e-2).weights
        stage *= PENALTY_FACTOR
    return maximise(problem, penalty, weights)


class Shortfall(NamedTuple):
    """How much higher the penalised likelihood could be, and how much of that draws alone would show (nats)."""

    value: float
    noise: float


def shortfall(
    problem: Problem, tilt: Tilt, proposal: AbstractMeasure, count: int, *, key: Key[Array, ""]
) -> Shortfall:
    """Return half the squared Newton decrement on fresh nodes: a finer grid, or ``count`` draws from base and proposal.

    The part that fresh draws put there by chance, about rank / (2 effective draws), is taken off: where it is large there
    are too few draws near the density to judge it, and the value says nothing.
    """
    problem = problem.within(tilt.space)
    proposal = problem.proposal if problem.conditional else proposal
    nodes = problem.nodes(proposal=proposal, fineness=problem.integration.finer, draws=count, key=key)
    fresh = likelihood(problem, nodes)
    optimum = maximise(fresh, problem.rkhs_penalty, np.asarray(tilt.weights), most=0)
    if nodes.is_grid:
        return Shortfall(max(0.5 * optimum.decrement, 0.0), 0.0)
    exponents = fresh.exponents(np.asarray(tilt.weights))[0]
    noise = 0.5 * tilt.space.size / (effective_share(exponents) * count)
    return Shortfall(max(0.5 * optimum.decrement - noise, 0.0), noise)


def polish(
    problem: Problem, nodes: Nodes, weights: AnyArray, *, near: bool
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the weights of the convex optimum on the nodes, and the facts that say how well it was reached.

    From weights that are near it Newton's method starts there; otherwise it comes down from large penalties.
    """
    posed, start = likelihood(problem, nodes), np.asarray(weights)
    optimum = continuation(posed, problem.rkhs_penalty, start=start if near else None)
    facts = {
        "newton_decrement": optimum.decrement,
        "polish_gain": optimum.value - maximise(posed, problem.rkhs_penalty, start, most=0).value,
        "polish_effective_share": effective_share(posed.exponents(optimum.weights)[0]),
    }
    return optimum.weights, facts


def is_optimal(facts: dict[str, float]) -> bool:
    """Return whether the facts are those of a polish that reached its optimum."""
    return facts.get("newton_decrement", np.inf) < OPTIMAL_DECREMENT


class Convex(Solver):
    """The penalised maximum-likelihood problem solved outright, by Newton's method.

    The partition function is a sum over a grid where f has few coordinates, checked on a finer one, and over importance draws
    elsewhere, checked on fresh ones. If too few draws are effective the penalty is raised until enough are, and in the end f
    is 0 and the density its base: no answer rests on a handful of draws. The sampler is the grid's own cells, the base where f
    is zero, or a distilled law. ``integral="grid"`` refuses what no grid can do.
    """

    integral: Literal["auto", "grid"] = "auto"
    distillation: Distillation = Distillation()

    knows_conditions: ClassVar[bool] = True
    uses_proposal: ClassVar[bool] = False

    def __check_init__(self) -> None:
        if self.integral not in ("auto", "grid"):
            raise ValueError(f"integral must be 'auto' or 'grid', got {self.integral!r}.")

    @property
    def grid_only(self) -> bool:
        return self.integral == "grid"

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return the maximiser of the penalised likelihood, and the best sampler at hand."""
        require_grid(self, problem)
        # On a grid nothing is drawn, and no one waits for a program that splits keys.
        nodes_key, check_key, sampler_key = (key,) * 3 if problem.on_grid else jr.split(key, 3)
        nodes = problem.nodes(key=nodes_key)
        check = problem.nodes(fineness=problem.integration.finer, key=check_key)
        with threadpool_limits(limits=1 if problem.space.size < THREADED_FEATURES else None, user_api="blas"):
            optimum, penalty = self._trusted(problem, nodes, check)
        tilt, conditions = problem.tilt(optimum.weights), distinct_conditions(problem.sample).values
        error = float(np.max(np.abs(tilt.log_partitions(check, conditions) - optimum.log_partitions)))
        facts = {
            "newton_decrement": optimum.decrement,
            "integral_error": error,
            "newton_steps": float(optimum.iterations),
            "rkhs_penalty": float(penalty),
        }
        sampler = best_sampler(problem, tilt, nodes, self.distillation, key=sampler_key)
        return Solution(tilt, sampler, self._status(problem, optimum, error, penalty, nodes), {}, facts)

    def _trusted(self, problem: Problem, nodes: Nodes, check: Nodes) -> tuple[Optimum, float]:
        """Return the optimum at the smallest penalty, from the problem's own upwards, that enough draws bear out."""
        posed, penalty = likelihood(problem, nodes), problem.rkhs_penalty
        if nodes.is_grid:
            # On a coarse grid a step costs little, and its optimum is a step or two away from that on the fine one.
            coarse = continuation(likelihood(problem, problem.nodes(fineness=COARSE, key=None)), penalty)
            return maximise(posed, penalty, coarse.weights), penalty
        fresh = likelihood(problem, check)
        while penalty < 1.0:
            optimum = continuation(posed, penalty)
            exponents = fresh.exponents(optimum.weights)
            if min(effective_share(row) for row in exponents) * exponents.shape[1] > FEW_EFFECTIVE_DRAWS:
                return optimum, penalty
            penalty *= 10.0
        nothing = np.zeros(posed.mean_feature.size)
        return maximise(posed, problem.rkhs_penalty, nothing, most=0), np.inf

    def _status(
        self, problem: Problem, optimum: Optimum, error: float, penalty: float, nodes: Nodes
    ) -> Status:
        if penalty != problem.rkhs_penalty:
            return Status.FEW_EFFECTIVE_DRAWS
        if not optimum.converged:
            return Status.RAN_ALL_STEPS
        return Status.GRID_TOO_COARSE if nodes.is_grid and error > INTEGRAL_TOLERANCE else Status.CONVERGED


def require_grid(solver: Solver, problem: Problem) -> None:
    """Raise if the solver needs a grid over the target and f has too many coordinates for one."""
    dims, settings = problem.sample.target.shape[1], problem.integration
    if solver.grid_only and not problem.on_grid:
        most = len(settings.conditional_cells if problem.conditional else settings.cells)
        name = type(solver).__name__
        raise ValueError(
            f"{name} integrates over at most {most} dimensions and f depends on {dims}: use solver='auto'."
        )


def best_sampler(
    problem: Problem, tilt: Tilt, nodes: Nodes, settings: Distillation, *, key: Key[Array, ""]
) -> Sampler:
    """Return a sampler of the tilted density: the base where f is 0, the cells of a grid, else a distilled law."""
    if not np.any(tilt.weights):
        return Sampler(problem.base, Identity(), problem.base)
    law = (
        TiltedCells.on(tilt, nodes)
        if nodes.is_grid
        else distil(problem, tilt.weights, settings=settings, key=key)
    )
    return Sampler(law, Identity(), problem.base)
