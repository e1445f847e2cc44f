"""Penalised maximum likelihood as a convex problem, with the partition function as a weighted sum over nodes.

The nodes are a quadrature grid or importance draws. There is one partition function per condition; the
unconditional problem has a single, empty condition. Features are products of a function of the condition and
a function of the target, so that no array has an axis for conditions, nodes *and* features. All computations
are in float64 on NumPy's BLAS. ``Convex`` is the default solver.
"""

import functools
from typing import ClassVar, Literal, NamedTuple, Unpack

import jax.random as jr
import numpy as np
import scipy.linalg
from threadpoolctl import threadpool_limits

from kexpfam.data.sample import AnyArray, RandomKey, distinct_conditions, row_slices
from kexpfam.fit.distil import Distillation, distil
from kexpfam.fit.newton import climb, factored
from kexpfam.fit.problem import Problem, Solution, Solver, Status, Watchers
from kexpfam.integrate.nodes import effective_share
from kexpfam.model.density import FEW_EFFECTIVE_DRAWS, LARGE_ERROR, Sampler, Tilt, TiltedCells
from kexpfam.model.measures import AbstractMeasure, Nodes
from kexpfam.model.networks import Identity
from kexpfam.settings import at_least, one_of

# Nodes with less than this share of the largest probability are left out of a Hessian: rounding is larger.
NEGLIGIBLE = 1e-8
# Numbers in the largest array of a Hessian's assembly: about 100 MB.
BLOCK_NUMBERS = 12_000_000
# Falling penalties on the way to a small one: the first, at which two Newton steps are enough, the factor to
# the next, and the squared decrement at which Newton's method goes on to the next.
FIRST_PENALTY, PENALTY_FACTOR, ROUGH_TOLERANCE = 1e-2, 0.1, 1e-2


class Likelihood(NamedTuple):
    """``w . mean_feature - sum_c share_c log sum_j exp(log_weights[c, j] + features[c, j] . w)``.

    ``features[c, j]`` is the flattened outer product of ``condition_features[c]`` and ``node_features[j]``.
    Log weights that are equal under every condition have a first axis of length 1. Without conditions the
    condition feature is 1.

    Problems that differ in their rows only, such as those of folds, are one record with a further first axis
    of ``mean_feature`` and ``shares``; their weights, values and gradients have that axis too.
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
        shape = (*weights.shape[:-1], self.condition_features.shape[1], -1)
        return self.condition_features @ weights.reshape(shape)


class Optimum(NamedTuple):
    """The maximiser, and measurements of its accuracy."""

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

    The gradient is :math:`\hat\mu - E_{p_f}[\phi] - \eta w`, the negative Hessian :math:`Cov_{p_f}[\phi] +
    \eta I`; half the squared decrement bounds the distance to the optimum in nats.
    Equation ledger: ``KEF-MLE``.
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
    point, value, state, decrement, iterations, factor = found
    converged = bool(decrement <= max(tolerance, 1e-7))
    return Optimum(point, value, state.log_partitions, decrement, iterations, factor, converged)


def likelihood(problem: Problem, nodes: Nodes) -> Likelihood:
    """Return the convex likelihood of the problem with its partition functions on the nodes."""
    sample, space = problem.sample, problem.space
    conditions = distinct_conditions(sample)
    phi, mean = space.condition.matrix(conditions.values), problem.mean_feature
    if mean is None:
        # The mean over rows of phi(x) psi(y)^T; no array has one such product per row.
        totals = conditions.totals(space.target.matrix(sample.target))
        mean = (totals.T @ phi / conditions.counts.sum()).T.ravel()
    features = space.target.node_matrix(nodes)
    return Likelihood(np.asarray(mean), features, nodes.log_weights[None], conditions.shares, phi)


def _product(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return ``rows @ matrix`` as one product; the rows may have several leading axes."""
    return (rows.reshape(-1, rows.shape[-1]) @ matrix).reshape(*rows.shape[:-1], -1)


class NodeMasses(NamedTuple):
    """The probabilities of the nodes by condition, (*k, c, j), and the log partition functions, (*k, c)."""

    probabilities: np.ndarray
    log_partitions: np.ndarray


def normalised(exponents: np.ndarray) -> NodeMasses:
    """Return the probabilities of the nodes and their normalisers; the argument is overwritten.

    This is the inner loop of every fit: it takes one exponential per node, a log-sum-exp would take two.
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
    """Return ``likelihood - penalty / 2 |w|^2`` (*k), and the node masses for its derivatives."""
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
    """Return the problem without the nodes of negligible mass at these weights under all conditions."""
    exponents = problem.exponents(weights)
    live = np.any(exponents - exponents.max(axis=1, keepdims=True) > np.log(share), axis=0)
    features, log_weights = problem.node_features[live], problem.log_weights[:, live]
    return problem._replace(node_features=features, log_weights=log_weights)


def moments(
    problem: Likelihood, penalty: float, weights: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean features under each condition (*k, c, b), and the gradient (*k, a * b)."""
    means = _product(probabilities, problem.node_features)
    expected = problem.condition_features.T @ (problem.shares[..., None] * means)
    return means, problem.mean_feature - expected.reshape(weights.shape) - penalty * weights


def covariances(problem: Likelihood, probabilities: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return the upper triangle of the features' covariance under each condition, (c, b (b + 1) / 2)."""
    psi = problem.node_features
    first, second = np.triu_indices(psi.shape[1])
    if len(probabilities) == 1:
        live = probabilities[0] > NEGLIGIBLE * probabilities[0].max()
        scaled = psi[live] * np.sqrt(probabilities[0, live])[:, None]
        products = (scaled.T @ scaled)[first, second][None]
    else:
        # One product serves all conditions: with few features the array of products of features is small.
        products = probabilities @ (psi[:, first] * psi[:, second])
    return products - means[:, first] * means[:, second]


def information(problem: Likelihood, triangles: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the matrix ``sum_c share_c (phi_c phi_c^T) x Cov_c[psi]`` from the triangles of its factors."""
    phi, b = problem.condition_features, problem.node_features.shape[1]
    a = phi.shape[1]
    if a == 1:
        return _square(((shares * phi[:, 0] ** 2) @ triangles)[None], 1, b)
    first, second = np.triu_indices(a)
    blocks = np.zeros((len(first), triangles.shape[1]))
    for rows in row_slices(len(phi), max(1, BLOCK_NUMBERS // len(first))):
        outer = phi[rows, first] * phi[rows, second]
        blocks += outer.T @ (triangles[rows] * shares[rows, None])
    return _square(blocks, a, b)


def _square(blocks: np.ndarray, a: int, b: int) -> np.ndarray:
    """Return the matrix with (a b) rows from the upper triangles of its blocks and within its blocks."""
    full = blocks[_places(a)][:, :, _places(b)]
    return full.transpose(0, 2, 1, 3).reshape(a * b, a * b)


@functools.cache
def _places(size: int) -> np.ndarray:
    """Return the index of each entry of a symmetric matrix in its upper triangle, (size, size)."""
    places = np.zeros((size, size), int)
    places[np.triu_indices(size)] = np.arange(size * (size + 1) // 2)
    return np.maximum(places, places.T)


def continuation(problem: Likelihood, penalty: float) -> Optimum:
    """Return the optimum at ``penalty``, along falling penalties from f = 0."""
    weights, stage = np.zeros(problem.mean_feature.size), FIRST_PENALTY
    while stage > penalty:
        weights = maximise(problem, stage, weights, tolerance=ROUGH_TOLERANCE).weights
        stage *= PENALTY_FACTOR
    return maximise(problem, penalty, weights)


class Shortfall(NamedTuple):
    """The distance of the penalised likelihood from its maximum, and the part of it due to noise (nats)."""

    value: float
    noise: float


def shortfall(
    problem: Problem, tilt: Tilt, proposal: AbstractMeasure, count: int, *, key: RandomKey
) -> Shortfall:
    """Return half the squared Newton decrement on fresh nodes: a finer grid, or ``count`` importance draws.

    The noise of fresh draws adds about rank / (2 effective draws), which is subtracted. Where it is large,
    there are too few draws near the density, and the value is not informative.
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
    """Return the weights of the convex optimum on the nodes, and facts about its accuracy.

    Newton's method starts at weights that are ``near``; otherwise it follows falling penalties.
    """
    posed, start = likelihood(problem, nodes), np.asarray(weights)
    penalty = problem.rkhs_penalty
    optimum = maximise(posed, penalty, start) if near else continuation(posed, penalty)
    facts = {
        "newton_decrement": optimum.decrement,
        "polish_gain": optimum.value - maximise(posed, penalty, start, most=0).value,
        "polish_effective_share": effective_share(posed.exponents(optimum.weights)[0]),
    }
    return optimum.weights, facts


def is_optimal(facts: dict[str, float], *, tolerance: float = 1e-6) -> bool:
    """Return whether the facts of a polish have a squared decrement below ``tolerance``."""
    return facts.get("newton_decrement", np.inf) < tolerance


class Convex(Solver):
    """Penalised maximum likelihood by Newton's method.

    In few coordinates the partition function is a sum over a grid, checked on a finer grid. Otherwise it is a
    sum over importance draws, checked on fresh draws. If the grid is too coarse or too few draws are
    effective, the penalty is raised, in the end to f = 0, the base. The sampler is the cells of the grid, the
    base where f is zero, or a distilled distribution. ``integral="grid"`` raises if there are too many
    coordinates for a grid.
    """

    integral: Literal["auto", "grid"] = "auto"
    distillation: Distillation = Distillation()  # of the sampler, where there is no grid
    integral_tolerance: float = at_least(0, 5e-3)  # largest change of an integral (nats) on the finer grid
    coarse_fineness: float = at_least(0, 0.5)  # of the grid on which Newton's method finds its start
    # From here BLAS may use threads; on small matrices they wait for each other.
    threaded_features: int = at_least(0, 600)

    supports_conditions: ClassVar[bool] = True

    def __check_init__(self) -> None:
        one_of("integral", self.integral, ("auto", "grid"))

    @property
    def grid_only(self) -> bool:
        return self.integral == "grid"

    @property
    def uses_proposal(self) -> bool:
        return False

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return the maximiser of the penalised likelihood, and a sampler."""
        require_grid(self, problem)
        # On a grid nothing is drawn, and compiling the split of a key would take time.
        nodes_key, check_key, sampler_key = (key,) * 3 if problem.on_grid else jr.split(key, 3)
        nodes = problem.nodes(key=nodes_key)
        check = problem.nodes(fineness=problem.integration.finer, key=check_key)
        threads = 1 if problem.space.size < self.threaded_features else None
        with threadpool_limits(limits=threads, user_api="blas"):
            optimum, penalty, error = self._trusted(problem, nodes, check)
        tilt = problem.tilt(optimum.weights)
        facts = {
            "newton_decrement": optimum.decrement,
            "integral_error": error,
            "newton_steps": float(optimum.iterations),
            "rkhs_penalty": float(penalty),
        }
        sampler = best_sampler(problem, tilt, nodes, self.distillation, key=sampler_key)
        return Solution(tilt, sampler, self._status(problem, optimum, error, penalty, nodes), {}, facts)

    def _trusted(self, problem: Problem, nodes: Nodes, check: Nodes) -> tuple[Optimum, float, float]:
        """Return the optimum at the smallest penalty, from the problem's own, whose integrals are reliable on
        the nodes of a check; the penalty, and the largest change of an integral on these nodes (nats)."""
        posed, penalty = likelihood(problem, nodes), problem.rkhs_penalty
        fresh = None if nodes.is_grid else likelihood(problem, check)
        conditions, first = distinct_conditions(problem.sample).values, None
        change = lambda found: np.abs(
            problem.tilt(found.weights).log_partitions(check, conditions) - found.log_partitions
        )
        while penalty <= max(problem.rkhs_penalty, 1.0):
            optimum = self._optimum(problem, posed, penalty, on_grid=nodes.is_grid)
            errors = change(optimum)
            first = first or (optimum, penalty, float(errors.max()))
            if fresh is None:
                reliable = errors.mean() < LARGE_ERROR
            else:
                exponents = fresh.exponents(optimum.weights)
                draws = min(effective_share(row) for row in exponents) * exponents.shape[1]
                reliable = draws > FEW_EFFECTIVE_DRAWS
            if reliable:
                return optimum, penalty, float(errors.max())
            penalty *= 10.0
        nothing = maximise(posed, problem.rkhs_penalty, np.zeros(posed.mean_feature.size), most=0)
        if first is not None and fresh is None and change(nothing).mean() >= LARGE_ERROR:
            return first  # the grid does not resolve the base either
        return nothing, np.inf, 0.0

    def _optimum(self, problem: Problem, posed: Likelihood, penalty: float, *, on_grid: bool) -> Optimum:
        """Return the optimum at a penalty."""
        if not on_grid:
            return continuation(posed, penalty)
        # Steps on a coarse grid are cheap, and its optimum is a step or two from that on the fine grid.
        nodes = problem.nodes(fineness=self.coarse_fineness, key=None)
        return maximise(posed, penalty, continuation(likelihood(problem, nodes), penalty).weights)

    def _status(
        self, problem: Problem, optimum: Optimum, error: float, penalty: float, nodes: Nodes
    ) -> Status:
        raised = penalty != problem.rkhs_penalty
        if raised and not nodes.is_grid:
            return Status.FEW_EFFECTIVE_DRAWS
        if raised or (nodes.is_grid and optimum.converged and error > self.integral_tolerance):
            return Status.GRID_TOO_COARSE
        return Status.CONVERGED if optimum.converged else Status.RAN_ALL_STEPS


def require_grid(solver: Solver, problem: Problem) -> None:
    """Raise if the solver needs a grid over the target and f has too many coordinates for one."""
    if not solver.grid_only or problem.on_grid:
        return
    name, dims = type(solver).__name__, problem.sample.target.shape[1]
    most = len(problem.integration.grid_cells(conditional=problem.conditional))
    raise ValueError(
        f"{name} integrates over at most {most} dimensions and f depends on {dims}: use solver='auto'."
    )


def best_sampler(
    problem: Problem, tilt: Tilt, nodes: Nodes, settings: Distillation, *, key: RandomKey
) -> Sampler:
    """Return a sampler of the density: the base if f = 0, cells of a grid, or a distilled distribution."""
    if not np.any(tilt.weights):
        law = problem.base
    elif nodes.is_grid:
        law = TiltedCells.on(tilt, nodes)
    else:
        law = distil(problem, tilt.weights, settings=settings, key=key)
    return Sampler(law, Identity(), problem.base)
