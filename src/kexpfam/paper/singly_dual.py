r"""The singly dual saddle point: q from a family with a density, so that the KL term needs no nu.

.. math::
    \min_{q \in Q} \max_f \; \hat E[f] - E_q[f] - \tfrac{\eta}{2} \|f\|_H^2
        + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

The optimal f is :math:`(\hat\mu - \mu_q) / \eta`, but 1 / eta is large and would multiply the noise of a
batch. So f moves by a share of its Newton step, whose Hessian is eta plus the *response*: the derivative of
the family's mean embedding with respect to f. Where the family does not respond to f, this is the closed
form; where it does, noise is divided by the variance of a feature instead of eta. The family sees f a part of
a step ahead, which damps the oscillation of the two players (an augmented Lagrangian).

If the density of f is not in the family, ``l(f, q)`` exceeds the penalised likelihood of f by the reported
``KL(q || p_f)``.
"""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Unpack, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.convex import polish
from kexpfam.fit.dde import end_status, saddle_problem
from kexpfam.fit.loop import Run, averaged, descended, moments_of, optimiser, run
from kexpfam.fit.problem import Problem, Solution, Solver, Watchers
from kexpfam.fit.saddle import SaddleProblem, SaddleTerms
from kexpfam.jax_settings import double
from kexpfam.model.density import Sampler, Tilt
from kexpfam.model.measures import AbstractMeasure, Nodes, logsumexp
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper.duals import FAMILIES, AbstractDual, DynamicsDual, PathwiseDraws, stop_gradients
from kexpfam.settings import at_least

if TYPE_CHECKING:
    import optax


Weights = Float[Array, " r"]


def divergence(base: AbstractMeasure, draws: PathwiseDraws) -> Float[Array, ""]:
    """Return KL(q || p0) from weighted draws; in an augmented space the joint KL, an upper bound."""
    return draws.shares @ (draws.log_density - base.log_density(base.fold(draws.points)))


def singly_dual_terms(
    f_weights: Weights, problem: SaddleProblem, data_features: Weights, draws: PathwiseDraws
) -> SaddleTerms:
    r"""Return the terms of the saddle function for a q with a density, on weighted draws of q.

    .. math::
        \ell(f, q) = \hat E[f(x)] - E_q[f(x)] - \tfrac{\eta}{2} \|f\|_H^2
            + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

    Max over f, min over q. ``data_features`` is the data's mean embedding. Equation ledger: ``DUAL-SADDLE``.
    """
    points = problem.base.fold(draws.points)
    return SaddleTerms(
        data_fit=data_features @ f_weights,
        model_fit=draws.shares @ problem.space.evaluate(f_weights, points, jnp.zeros((len(points), 0))),
        kl_dual=divergence(problem.base, draws) / problem.inverse_temperature,
        penalty=0.5 * problem.rkhs_penalty * jnp.sum(f_weights**2),
    )


class DualState(eqx.Module):
    """The state between steps; the result is ``averaged``, the exponential moving average of the players."""

    players: Any
    averaged: Any
    moments: Any
    step: Int[Array, ""]

    def moved(self, players: Any, moments: Any) -> "DualState":
        """Return the next state; the average spans a tenth of the steps so far, at most a hundred."""
        share = jnp.minimum(0.99, self.step / (self.step + 10.0))
        return DualState(players, averaged(self.averaged, players, share), moments, self.step + 1)


class DualSolver(Solver):
    """Base class of the solvers with a dual distribution that has a density.

    ``family`` is one of "particles", "gaussian", "mixture", "flow", "dynamics", or an initial dual. Rates
    fall to a twentieth over ``steps``. With ``polish`` the resulting f is replaced by the convex optimum.
    """

    family: str | AbstractDual = "mixture"
    steps: int = at_least(0, 1000)
    rate: ScalarLike = eqx.field(default=1e-2, converter=double)  # Adam's rate of the family
    batch_size: int = at_least(2, 1024, static=True)
    polish: bool = False
    judged_draws: int = at_least(2, 4096, static=True)  # draws that KL(q || p_f) is measured on

    def __check_init__(self) -> None:
        if not isinstance(self.family, AbstractDual) and self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, or a dual; got {self.family!r}.")

    @property
    def uses_proposal(self) -> bool:
        return False

    def initial_dual(self, problem: Problem, *, key: RandomKey) -> AbstractDual:
        """Return the initial dual: the given one, or that of the named family at the data."""
        if isinstance(self.family, AbstractDual):
            return self.family
        tilt = problem.tilt(np.zeros(problem.space.size))
        return FAMILIES[self.family](np.asarray(problem.sample.target), tilt, key)

    def schedule(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the factor of the rates at a step."""
        return jnp.maximum(0.05, 1.0 - step / self.steps)

    def finish(
        self, problem: Problem, f_weights: AnyArray, dual: AbstractDual, outcome: Run, *, key: RandomKey
    ) -> Solution:
        """Return the solution: f, polished if asked for, the dual as sampler, and KL(q || p_f)."""
        polish_key, nodes_key, judge_key, joint_key = jr.split(key, 4)
        nodes, count = problem.nodes(key=nodes_key), self.judged_draws
        divergence = lambda weights: measured_divergence(problem, weights, dual, nodes, count, key=judge_key)
        facts = {"saddle_kl": divergence(f_weights)}
        facts["sampler_kl"] = facts["saddle_kl"]
        if self.polish:
            f_weights, polish_facts = polish(problem, problem.nodes(key=polish_key), f_weights, near=False)
            facts |= polish_facts | {"sampler_kl": divergence(f_weights)}
        if isinstance(dual, DynamicsDual):
            facts["joint_kl"] = facts["sampler_kl"] + _joint_excess(dual, count, key=joint_key)
        tilt, sampler = problem.tilt(f_weights), Sampler(dual, Identity(), problem.base)
        return Solution(tilt, sampler, end_status(outcome, facts), outcome.trace, facts)


class SinglyDualProblem(eqx.Module):
    """The fixed part: the problem, the data's mean embedding, and the metric of f's steps."""

    problem: SaddleProblem
    data_features: Float[Array, " r"]
    metric: Float[Array, "r r"]


class SinglyDualPlayers(eqx.Module):
    """f and the dual."""

    f_weights: Float[Array, " r"]
    dual: AbstractDual


class SinglyDualHealth(NamedTuple):
    """Measurements before a step; the gap converges to the approximation error of the family."""

    terms: SaddleTerms
    approximation_gap: Float[Array, ""]
    f_step: Float[Array, ""]


class SinglyDual(DualSolver):
    """The saddle point of f and a dual distribution with a density.

    f moves by ``f_rate`` of its Newton step, and the family sees f ``lookahead`` Newton steps ahead. The
    response of the family is measured on ``response_draws`` draws; a family with more than
    ``most_parameters`` parameters is assumed to follow any f.
    """

    f_rate: ScalarLike = eqx.field(default=0.05, converter=double)
    lookahead: ScalarLike = eqx.field(default=0.2, converter=double)
    response_draws: int = at_least(2, 8192, static=True)
    most_parameters: int = at_least(0, 1000, static=True)

    records: ClassVar[tuple[str, ...]] = (*SaddleTerms._fields, "value", "approximation_gap", "f_step")

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return f, the trained dual as the sampler, and their divergence."""
        start_key, response_key, run_key, end_key = jr.split(key, 4)
        dual, sample = self.initial_dual(problem, key=start_key), problem.sample
        data_features = weighted_mean(problem.space.target.matrix(sample.target), sample.weight)
        sizes = {"draws": self.response_draws, "most_parameters": self.most_parameters}
        response = family_response(problem, dual, **sizes, key=response_key)
        metric = jnp.linalg.inv(response + problem.rkhs_penalty * jnp.eye(len(response)))
        fixed = saddle_problem(problem, problem.base, problem.space)
        posed = SinglyDualProblem(fixed, jnp.asarray(data_features), metric)
        state = self.init(SinglyDualPlayers(jnp.zeros(problem.space.size), dual))
        outcome = run(posed, self, state, steps=self.steps, stage="saddle point", key=run_key, **watchers)
        players = outcome.state.averaged
        dual = players.dual.following(problem.tilt(players.f_weights))
        return self.finish(problem, players.f_weights, dual, outcome, key=end_key)

    def init(self, players: SinglyDualPlayers) -> DualState:
        """Return the start at given players."""
        return DualState(players, players, moments_of(players.dual, dual_optimiser()), jnp.array(0))

    def step(
        self, posed: SinglyDualProblem, state: DualState, *, key: RandomKey
    ) -> tuple[DualState, SinglyDualHealth]:
        """Return the state after one move of each player, and measurements before it."""
        decay, players = self.schedule(state.step), state.players
        cost = lambda dual: self._cost(posed, players.f_weights, dual, key)
        (_, (newton_step, health)), gradient = eqx.filter_value_and_grad(cost, has_aux=True)(players.dual)
        f_weights = players.f_weights + decay * self.f_rate * newton_step
        dual, moments = descended(players.dual, gradient, state.moments, decay * self.rate, dual_optimiser())
        return state.moved(SinglyDualPlayers(f_weights, dual), moments), health

    def _cost(
        self, posed: SinglyDualProblem, f_weights: Float[Array, " r"], dual: AbstractDual, key: RandomKey
    ) -> tuple[Float[Array, ""], tuple[Float[Array, " r"], SinglyDualHealth]]:
        # Each half of the draws sees f ahead by the step of the other half: the residuals are independent.
        tilt = stop_gradients(Tilt(cast(FeatureSpace, posed.problem.space), f_weights, posed.problem.base))
        dual = dual.following(tilt)
        halves = [dual.pathwise_draws(self.batch_size // 2, key=half) for half in jr.split(key)]
        terms = lambda f, draws: singly_dual_terms(f, posed.problem, posed.data_features, draws)
        value = lambda f, draws: terms(f, draws).value
        steps = [posed.metric @ jax.lax.stop_gradient(jax.grad(value)(f_weights, draws)) for draws in halves]
        ahead = [f_weights + self.lookahead * step for step in reversed(steps)]
        cost = (value(ahead[0], halves[0]) + value(ahead[1], halves[1])) / 2
        newton_step = (steps[0] + steps[1]) / 2
        gap = approximation_gap(tilt, halves[0])
        health = SinglyDualHealth(terms(f_weights, halves[0]), gap, jnp.linalg.norm(newton_step))
        return cost, (newton_step, health)


def dual_optimiser() -> "optax.GradientTransformation":
    """Return the optimiser of a dual, with little momentum: the moves of f make old gradients stale."""
    return optimiser(clip=100.0, first=0.5, second=0.99)


def family_response(
    problem: Problem,
    dual: AbstractDual,
    *,
    draws: int = 8192,
    most_parameters: int = 1000,
    fisher_floor: float = 1e-6,
    key: RandomKey,
) -> np.ndarray:
    r"""Return the derivative of the family's mean embedding with respect to f.

    .. math:: J F^{-1} J^\top, \qquad J = E_q[\psi s^\top], \quad F = E_q[s s^\top]

    with the score s of its parameters. A family of many parameters is assumed to contain all near densities;
    then the response is the covariance of the features. Directions of the parameters with less than
    ``fisher_floor`` of the largest Fisher information are left out.
    """
    points = np.asarray(problem.base.fold(dual.draws(draws, key=key)))
    features = problem.space.target.matrix(points)
    features = (features - features.mean(0)) / np.sqrt(len(points))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(dual, eqx.is_inexact_array)))
    if parameters > most_parameters or isinstance(dual, DynamicsDual):
        return features.T @ features
    scores = np.asarray(_scores(dual, points))
    left, strengths, _ = np.linalg.svd(scores - scores.mean(0), full_matrices=False)
    projected = left[:, strengths**2 > fisher_floor * strengths[0] ** 2].T @ features
    return projected.T @ projected


@eqx.filter_jit
def _scores(dual: AbstractDual, points: Float[AnyArray, "n d"]) -> Float[Array, "n t"]:
    moving, rest = eqx.partition(dual, eqx.is_inexact_array)
    flat, unflatten = jax.flatten_util.ravel_pytree(moving)
    log_density = lambda flat, x: eqx.combine(unflatten(flat), rest).log_density(x)
    return jax.lax.map(lambda x: jax.grad(log_density)(flat, x), points, batch_size=256)


def approximation_gap(tilt: Tilt, draws: PathwiseDraws) -> Float[AnyArray, ""]:
    """Return KL(q || p_f) with log Z from the same draws: a lower bound, tight if q is close to p_f."""
    x = tilt.base.fold(draws.points)
    log_ratio = tilt.f(x, jnp.zeros((x.shape[0], 0))) + tilt.base.log_density(x) - draws.log_density
    return logsumexp(log_ratio + jnp.log(draws.shares)) - draws.shares @ log_ratio


def measured_divergence(
    problem: Problem, weights: AnyArray, dual: AbstractDual, nodes: Nodes, count: int, key: RandomKey
) -> float:
    """Return KL(q || p_f), with log Z on the nodes."""
    tilt, nothing = problem.tilt(weights), np.zeros((count, 0))
    draws = Sampler(dual, Identity(), problem.base).weighted_draws(nothing, key=key)
    log_ratio = draws.log_density - tilt.log_values(draws.points)
    return float(np.mean(log_ratio) + tilt.log_partitions(nodes, nothing[:1])[0])


def _joint_excess(dual: DynamicsDual, count: int, *, key: RandomKey) -> float:
    """Return the joint KL of positions and momenta less that of positions, E[KL(q(v | x) || N(v))]."""
    draws = eqx.filter_jit(lambda dual, key: dual.pathwise_draws(count, key=key))(dual, key)
    excess = np.asarray(draws.log_density) - dual.log_densities(np.asarray(draws.points))
    return float(np.asarray(draws.shares) @ excess)
