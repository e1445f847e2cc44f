r"""The singly dual saddle point: q from a family with a density, whose KL term needs no nu.

.. math:: \min_{q \in Q} \max_f \; \hat E[f] - E_q[f] - \tfrac{\eta}{2} \|f\|_H^2 + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

f at its best is :math:`(\hat\mu - \mu_q) / \eta`, but 1 / eta is large and would multiply the noise of a batch. So f is a
player that moves by a share of its Newton step, whose Hessian is eta plus the *response*: how far the family's mean embedding
follows f. Where the family cannot follow, that is the closed form; where it can, noise is divided by the variance of a feature
and not by eta. The family sees f a part of a step ahead, which keeps the two from chasing each other (an augmented Lagrangian).

A family that does not hold the density of f leaves a gap: ``l(f, q)`` exceeds the penalised likelihood of f by exactly
``KL(q || p_f)``, which is reported.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.duals import FAMILIES, AbstractDual, DynamicsDual, start_dual
from kexpfam.measures import AbstractMeasure
from kexpfam.nodes import Nodes, grid_nodes
from kexpfam.objective import Problem, SaddleTerms, singly_dual_terms
from kexpfam.potentials import Tilt
from kexpfam.solvers import convex
from kexpfam.solvers.doubly_dual import averaged, stepped
from kexpfam.solvers.loop import Status, run
from kexpfam.solvers.task import Solution, Task, integration_nodes, is_optimal, likelihood, polish
from kexpfam.transports import Identity, Sampler

# Draws that the response of a family is measured on, and parameters beyond which it is taken to follow any f.
RESPONSE_DRAWS, MOST_PARAMETERS = 8192, 1000
# Directions of a family's parameters that its density hardly depends on, as a share of the strongest.
FISHER_FLOOR = 1e-6
# Draws of KL(q || p_f); dimensions up to which its log Z is a sum over a grid.
JUDGED_DRAWS, GRID_DIMS = 4096, 2


class Match(eqx.Module):
    """What is fixed while the players move: the problem, the data's mean embedding, and the metric of f's steps."""

    problem: Problem
    data_features: Float[Array, " r"]
    metric: Float[Array, "r r"]


class Pair(eqx.Module):
    """The two players."""

    f_weights: Float[Array, " r"]
    dual: AbstractDual


class State(eqx.Module):
    """What the next step needs; ``averaged`` is the running mean of the players, which is what is kept in the end."""

    pair: Pair
    averaged: Pair
    moments: optax.OptState
    step: Int[Array, ""]


class Health(NamedTuple):
    """How the saddle point looked before a step: a gap that stays is the family's approximation error."""

    terms: SaddleTerms
    approximation_gap: Float[Array, ""]
    f_step: Float[Array, ""]


class SinglyDual(eqx.Module):
    """The saddle point of f and a dual distribution with a density; unconditional.

    ``family`` is one of "particles", "gaussian", "mixture", "flow", "dynamics", or a dual to start from. f moves by ``f_rate``
    of its Newton step, the family by Adam with ``rate`` while it sees f ``lookahead`` Newton steps ahead; both fall to a
    twentieth over ``steps``. With ``polish=False`` the f of the saddle point itself is the result.
    """

    family: str | AbstractDual = "mixture"
    steps: int = 1000
    f_rate: ScalarLike = eqx.field(default=0.05, converter=jnp.asarray)
    rate: ScalarLike = eqx.field(default=1e-2, converter=jnp.asarray)
    lookahead: ScalarLike = eqx.field(default=0.2, converter=jnp.asarray)
    batch_size: int = eqx.field(default=1024, static=True)
    polish: bool = True
    nodes: int = 16384

    def __check_init__(self):
        check_family(self.family)
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f, the trained dual as the sampler, and how far apart they are."""
        start_key, response_key, run_key, end_key = jr.split(key, 4)
        dual, problem = begin(task, self.family, key=start_key)
        data_features = jnp.asarray(task.space.target.matrix(task.sample.target).mean(0))
        response = family_response(task, dual, key=response_key)
        metric = jnp.linalg.inv(response + task.rkhs_penalty * jnp.eye(len(response)))
        match = Match(problem, data_features, metric)
        settings = Moves(self.f_rate, self.rate, self.lookahead, jnp.asarray(float(self.steps)), self.batch_size)
        state = settings.init(Pair(jnp.zeros(task.space.size), dual))
        outcome = run(match, settings, state, steps=self.steps, key=run_key, report=report, checkpoint=checkpoint)
        pair = outcome.state.averaged
        dual = pair.dual.following(task.tilt(pair.f_weights))
        return finish(task, pair.f_weights, dual, outcome, polished=self.polish, nodes=self.nodes, key=end_key)


class Moves(eqx.Module):
    """The settings of one step."""

    f_rate: ScalarLike
    rate: ScalarLike
    lookahead: ScalarLike
    horizon: ScalarLike
    batch_size: int = eqx.field(static=True)

    def init(self, pair: Pair) -> State:
        moments = dual_optimiser().init(eqx.filter(pair.dual, eqx.is_inexact_array))
        return State(pair, pair, moments, jnp.array(0))

    def step(self, match: Match, state: State, *, key: Key[Array, ""]) -> tuple[State, Health]:
        """Return the players after one move of each, and how the saddle point looked before."""
        decay = jnp.maximum(0.05, 1.0 - state.step / self.horizon)
        pair = state.pair
        cost = lambda dual: self._cost(match, pair.f_weights, dual, key)
        (_, (newton_step, health)), gradient = eqx.filter_value_and_grad(cost, has_aux=True)(pair.dual)
        updates, moments = dual_optimiser().update(gradient, state.moments)
        moved = Pair(pair.f_weights + decay * self.f_rate * newton_step, stepped(pair.dual, updates, -decay * self.rate))
        return State(moved, averaged(state.averaged, moved, remembered(state.step)), moments, state.step + 1), health

    def _cost(self, match, f_weights, dual, key):
        # Each half of the draws sees f ahead by the step that the other half asks for: a product of independent residuals.
        tilt = held(Tilt(match.problem.space, f_weights, match.problem.base))
        dual = dual.following(tilt)
        halves = [dual.draws(self.batch_size // 2, key=half) for half in jr.split(key)]
        value = lambda f_weights, draws: singly_dual_terms(f_weights, match.problem, match.data_features, draws).value
        steps = [match.metric @ jax.lax.stop_gradient(jax.grad(value)(f_weights, draws)) for draws in halves]
        ahead = [f_weights + self.lookahead * step for step in reversed(steps)]
        cost = sum(value(f, draws) for f, draws in zip(ahead, halves, strict=True)) / 2
        newton_step = (steps[0] + steps[1]) / 2
        terms = singly_dual_terms(f_weights, match.problem, match.data_features, halves[0])
        gap = approximation_gap(tilt, halves[0])
        return cost, (newton_step, Health(terms, gap, jnp.linalg.norm(newton_step)))


def check_family(family) -> None:
    """Raise unless it is the name of a family or a dual."""
    if not isinstance(family, AbstractDual) and family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, or a dual; got {family!r}.")


def begin(task: Task, family: str | AbstractDual, *, key: Key[Array, ""]) -> tuple[AbstractDual, Problem]:
    """Return the dual at its start and the problem of the task."""
    eta, lam = jnp.asarray(task.rkhs_penalty), jnp.asarray(1.0)
    problem = Problem(task.sample, task.base, task.space, task.base, eta, lam, anchored=False)
    if isinstance(family, AbstractDual):
        return family, problem
    return start_dual(family, np.asarray(task.sample.target), task.tilt(jnp.zeros(task.space.size)), key=key), problem


def dual_optimiser():
    # Little momentum: f's moves make old gradients stale.
    return optax.chain(optax.clip_by_global_norm(100.0), optax.scale_by_adam(b1=0.5, b2=0.99))


def held(tree):
    """Return the tree with arrays that no gradient flows through."""
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_array(leaf) else leaf, tree)


def remembered(step):
    """Return the share that a running mean keeps: the last tenth of the steps so far, and a hundred steps at most."""
    return jnp.minimum(0.99, step / (step + 10.0))


def family_response(task: Task, dual: AbstractDual, *, key: Key[Array, ""]) -> np.ndarray:
    r"""Return how the family's mean embedding follows f.

    .. math:: J F^{-1} J^\top, \qquad J = E_q[\psi s^\top], \quad F = E_q[s s^\top]

    with the score s of its parameters. A family of many parameters is taken to hold every density nearby, for which it
    is the covariance of the features.
    """
    measure = dual.measure()
    points = np.asarray(task.base.fold(jnp.asarray(measure.draws(RESPONSE_DRAWS, key=key))))
    features = task.space.target.matrix(points)
    features = (features - features.mean(0)) / np.sqrt(len(points))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(dual, eqx.is_inexact_array)))
    if parameters > MOST_PARAMETERS or isinstance(dual, DynamicsDual):
        return features.T @ features
    scores = np.asarray(_scores(dual, jnp.asarray(points)))
    left, strengths, _ = np.linalg.svd(scores - scores.mean(0), full_matrices=False)
    projected = left[:, strengths**2 > FISHER_FLOOR * strengths[0] ** 2].T @ features
    return projected.T @ projected


@eqx.filter_jit
def _scores(dual, points):
    moving, rest = eqx.partition(dual, eqx.is_inexact_array)
    flat, unflatten = jax.flatten_util.ravel_pytree(moving)
    log_density = lambda flat, x: eqx.combine(unflatten(flat), rest).measure().log_density(x)
    return jax.lax.map(lambda x: jax.grad(log_density)(flat, x), points, batch_size=256)


def approximation_gap(tilt: Tilt, draws) -> Float[Array, ""]:
    """Return KL(q || p_f) with log Z from the same draws: a lower bound, tight where q is close to p_f."""
    x = tilt.base.fold(draws.points)
    log_ratio = tilt.f(x, jnp.zeros((x.shape[0], 0))) + jax.vmap(tilt.base.log_density)(x) - draws.log_density
    return jax.nn.logsumexp(log_ratio, b=draws.shares) - draws.shares @ log_ratio


def finish(task: Task, f_weights, dual: AbstractDual, outcome, *, polished: bool, nodes: int, key) -> Solution:
    """Return the solution: f polished if asked for, the dual as sampler, and the divergences between them."""
    polish_key, judge_key, joint_key = jr.split(key, 3)
    measure = dual.measure()
    near = judging_nodes(task, nodes, key=judge_key)
    facts = {"saddle_kl": measured_divergence(task, f_weights, measure, near, key=judge_key)}
    if polished:
        drawn = integration_nodes(task, task.proposal, nodes, key=polish_key)
        f_weights, polish_facts = polish(task, drawn, f_weights, near=False)
        facts |= polish_facts
    facts["sampler_kl"] = measured_divergence(task, f_weights, measure, near, key=judge_key) if polished else facts["saddle_kl"]
    if isinstance(dual, DynamicsDual):
        facts["joint_kl"] = facts["sampler_kl"] + _joint_excess(task, dual, measure, joint_key)
    finished = outcome.status in (Status.RAN_ALL_STEPS, Status.NO_STEPS)
    status = Status.CONVERGED if finished and is_optimal(facts) else outcome.status
    return Solution(task.tilt(f_weights), Sampler(measure, Identity(), task.base), status, outcome.trace, facts)


def judging_nodes(task: Task, count: int, *, key) -> Nodes:
    """Return nodes for log Z: a grid of few dimensions, or draws from base and proposal."""
    data = np.asarray(task.sample.target)
    return grid_nodes(task.base, data) if data.shape[1] <= GRID_DIMS else integration_nodes(task, task.proposal, count, key=key)


def measured_divergence(task: Task, f_weights, measure: AbstractMeasure, nodes: Nodes, *, key) -> float:
    """Return KL(q || p_f), with log Z on the nodes."""
    draws = Sampler(measure, Identity(), task.base).weighted_draws(np.zeros((JUDGED_DRAWS, 0)), key=key)
    log_p = task.tilt(f_weights).values(draws.points) + task.base.log_densities(draws.points)
    log_partition = convex.log_partitions(likelihood(task, nodes), np.asarray(f_weights))[0]
    return float(np.mean(draws.log_density - log_p) + log_partition)


@eqx.filter_jit
def _joint_draws(dual, count, key):
    return dual.draws(count, key=key)


def _joint_excess(task, dual, measure, key):
    """Return what the joint KL of positions and momenta has more than that of positions: E[KL(q(v | x) || N(v))]."""
    draws = _joint_draws(dual, JUDGED_DRAWS, key)
    marginal = measure.log_densities(draws.points)
    return float(np.asarray(draws.shares) @ (np.asarray(draws.log_density) - marginal))
