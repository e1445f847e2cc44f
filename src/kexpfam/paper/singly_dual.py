r"""The singly dual saddle point: q from a family with a density, whose KL term needs no nu.

.. math:: \min_{q \in Q} \max_f \; \hat E[f] - E_q[f] - \tfrac{\eta}{2} \|f\|_H^2 + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

f at its best is :math:`(\hat\mu - \mu_q) / \eta`, but 1 / eta is large and would multiply the noise of a batch. So f is a
player that moves by a share of its Newton step, whose Hessian is eta plus the *response*: how far the family's mean embedding
follows f. Where the family cannot follow, that is the closed form; where it can, noise is divided by the variance of a feature
and not by eta. The family sees f a part of a step ahead, which keeps the two from chasing each other (an augmented Lagrangian).

A family that does not hold the density of f leaves a gap: ``l(f, q)`` exceeds the penalised likelihood of f by exactly
``KL(q || p_f)``, which is reported.
"""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.convex import is_optimal, polish
from kexpfam.fit.dde import pose
from kexpfam.fit.loop import Run, averaged, optimiser, run, stepped
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, Status, check_at_least
from kexpfam.fit.saddle import SaddleProblem, SaddleTerms
from kexpfam.model.density import Sampler, Tilt
from kexpfam.model.measures import Nodes, logsumexp
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper.duals import FAMILIES, AbstractDual, DynamicsDual, PathwiseDraws, held
from kexpfam.paper.objective import singly_dual_terms
from kexpfam.progress import Listener

if TYPE_CHECKING:
    import optax

__all__ = [
    "SinglyDual",
    "approximation_gap",
    "averaging_share",
    "begin",
    "check_family",
    "dual_optimiser",
    "family_response",
    "finish",
]

# Draws that the response of a family is measured on, and parameters beyond which it is taken to follow any f.
RESPONSE_DRAWS, MOST_PARAMETERS = 8192, 1000
# Directions of a family's parameters that its density hardly depends on, as a share of the strongest.
FISHER_FLOOR = 1e-6
# Draws of KL(q || p_f).
JUDGED_DRAWS = 4096


class Posed(eqx.Module):
    """What is fixed while the players move: the problem, the data's mean embedding, and the metric of f's steps."""

    problem: SaddleProblem
    data_features: Float[Array, " r"]
    metric: Float[Array, "r r"]


class Pair(eqx.Module):
    """The two players."""

    f_weights: Float[Array, " r"]
    dual: AbstractDual


class State(eqx.Module):
    """What the next step needs; ``averaged`` is the moving average of the players, which is what is kept in the end."""

    pair: Pair
    averaged: Pair
    moments: Any
    step: Int[Array, ""]


class Health(NamedTuple):
    """How the saddle point looked before a step: a gap that stays is the family's approximation error."""

    terms: SaddleTerms
    approximation_gap: Float[Array, ""]
    f_step: Float[Array, ""]


class SinglyDual(Solver):
    """The saddle point of f and a dual distribution with a density.

    ``family`` is one of "particles", "gaussian", "mixture", "flow", "dynamics", or a dual to start from. f moves by ``f_rate``
    of its Newton step, the family by Adam with ``rate`` while it sees f ``lookahead`` Newton steps ahead; both fall to a
    twentieth over ``steps``. With ``polish`` the f of the saddle point is replaced by the convex optimum.
    """

    family: str | AbstractDual = "mixture"
    steps: int = 1000
    f_rate: ScalarLike = eqx.field(default=0.05, converter=jnp.asarray)
    rate: ScalarLike = eqx.field(default=1e-2, converter=jnp.asarray)
    lookahead: ScalarLike = eqx.field(default=0.2, converter=jnp.asarray)
    batch_size: int = eqx.field(default=1024, static=True)
    polish: bool = False

    uses_proposal: ClassVar[bool] = False
    records: ClassVar[tuple[str, ...]] = (*SaddleTerms._fields, "value", "approximation_gap", "f_step")

    def __check_init__(self) -> None:
        check_family(self.family)
        check_at_least(self, 0, "steps")

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f, the trained dual as the sampler, and how far apart they are."""
        start_key, response_key, run_key, end_key = jr.split(key, 4)
        dual = begin(problem, self.family, key=start_key)
        data_features = jnp.asarray(
            weighted_mean(problem.space.target.matrix(problem.sample.target), problem.sample.weight)
        )
        response = family_response(problem, dual, key=response_key)
        metric = jnp.linalg.inv(response + problem.rkhs_penalty * jnp.eye(len(response)))
        posed = Posed(pose(problem, problem.base, problem.space), data_features, metric)
        options: dict[str, Any] = {"stage": "saddle point", "report": report, "checkpoint": checkpoint}
        state = self.init(Pair(jnp.zeros(problem.space.size), dual))
        outcome = run(posed, self, state, steps=self.steps, key=run_key, **options)
        pair = outcome.state.averaged
        dual = pair.dual.following(problem.tilt(pair.f_weights))
        return finish(problem, pair.f_weights, dual, outcome, polished=self.polish, key=end_key)

    def init(self, pair: Pair) -> State:
        """Return the start at given players."""
        moments = dual_optimiser().init(eqx.filter(pair.dual, eqx.is_inexact_array))
        return State(pair, pair, moments, jnp.array(0))

    def step(self, posed: Posed, state: State, *, key: Key[Array, ""]) -> tuple[State, Health]:
        """Return the players after one move of each, and how the saddle point looked before."""
        decay, pair = jnp.maximum(0.05, 1.0 - state.step / self.steps), state.pair
        cost = lambda dual: self._cost(posed, pair.f_weights, dual, key)
        (_, (newton_step, health)), gradient = eqx.filter_value_and_grad(cost, has_aux=True)(pair.dual)
        updates, moments = dual_optimiser().update(gradient, state.moments)
        moved = Pair(
            pair.f_weights + decay * self.f_rate * newton_step,
            stepped(pair.dual, updates, -decay * self.rate),
        )
        kept = averaged(state.averaged, moved, averaging_share(state.step))
        return State(moved, kept, moments, state.step + 1), health

    def _cost(
        self, posed: Posed, f_weights: Float[Array, " r"], dual: AbstractDual, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], tuple[Float[Array, " r"], Health]]:
        # Each half of the draws sees f ahead by the step that the other half asks for: a product of independent residuals.
        tilt = held(Tilt(cast(FeatureSpace, posed.problem.space), f_weights, posed.problem.base))
        dual = dual.following(tilt)
        halves = [dual.pathwise_draws(self.batch_size // 2, key=half) for half in jr.split(key)]
        value = lambda f_weights, draws: (
            singly_dual_terms(f_weights, posed.problem, posed.data_features, draws).value
        )
        steps = [posed.metric @ jax.lax.stop_gradient(jax.grad(value)(f_weights, draws)) for draws in halves]
        ahead = [f_weights + self.lookahead * step for step in reversed(steps)]
        cost = (value(ahead[0], halves[0]) + value(ahead[1], halves[1])) / 2
        newton_step = (steps[0] + steps[1]) / 2
        terms = singly_dual_terms(f_weights, posed.problem, posed.data_features, halves[0])
        return cost, (
            newton_step,
            Health(terms, approximation_gap(tilt, halves[0]), jnp.linalg.norm(newton_step)),
        )


def check_family(family: str | AbstractDual) -> None:
    """Raise unless it is the name of a family or a dual."""
    if not isinstance(family, AbstractDual) and family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, or a dual; got {family!r}.")


def begin(problem: Problem, family: str | AbstractDual, *, key: Key[Array, ""]) -> AbstractDual:
    """Return the dual at its start: the one given, or that of the family's name at the data."""
    if isinstance(family, AbstractDual):
        return family
    return FAMILIES[family](
        np.asarray(problem.sample.target), problem.tilt(np.zeros(problem.space.size)), key
    )


def dual_optimiser() -> "optax.GradientTransformation":
    """Return the optimiser of a dual: little momentum, as f's moves make old gradients stale."""
    return optimiser(clip=100.0, first=0.5, second=0.99)


def averaging_share(step: Int[Array, ""]) -> Float[Array, ""]:
    """Return the share that a moving average keeps: it spans a tenth of the steps so far, and a hundred steps at most."""
    return jnp.minimum(0.99, step / (step + 10.0))


def family_response(problem: Problem, dual: AbstractDual, *, key: Key[Array, ""]) -> np.ndarray:
    r"""Return how the family's mean embedding follows f.

    .. math:: J F^{-1} J^\top, \qquad J = E_q[\psi s^\top], \quad F = E_q[s s^\top]

    with the score s of its parameters. A family of many parameters is taken to hold every density nearby, for which it
    is the covariance of the features.
    """
    points = np.asarray(problem.base.fold(dual.draws(RESPONSE_DRAWS, key=key)))
    features = problem.space.target.matrix(points)
    features = (features - features.mean(0)) / np.sqrt(len(points))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(dual, eqx.is_inexact_array)))
    if parameters > MOST_PARAMETERS or isinstance(dual, DynamicsDual):
        return features.T @ features
    scores = np.asarray(_scores(dual, points))
    left, strengths, _ = np.linalg.svd(scores - scores.mean(0), full_matrices=False)
    projected = left[:, strengths**2 > FISHER_FLOOR * strengths[0] ** 2].T @ features
    return projected.T @ projected


@eqx.filter_jit
def _scores(dual: AbstractDual, points: Float[AnyArray, "n d"]) -> Float[Array, "n t"]:
    moving, rest = eqx.partition(dual, eqx.is_inexact_array)
    flat, unflatten = jax.flatten_util.ravel_pytree(moving)
    log_density = lambda flat, x: eqx.combine(unflatten(flat), rest).log_density(x)
    return jax.lax.map(lambda x: jax.grad(log_density)(flat, x), points, batch_size=256)


def approximation_gap(tilt: Tilt, draws: PathwiseDraws) -> Float[AnyArray, ""]:
    """Return KL(q || p_f) with log Z from the same draws: a lower bound, tight where q is close to p_f."""
    x = tilt.base.fold(draws.points)
    log_ratio = tilt.f(x, jnp.zeros((x.shape[0], 0))) + tilt.base.log_density(x) - draws.log_density
    return logsumexp(log_ratio + jnp.log(draws.shares)) - draws.shares @ log_ratio


def finish(
    problem: Problem,
    f_weights: AnyArray,
    dual: AbstractDual,
    outcome: Run,
    *,
    polished: bool,
    key: Key[Array, ""],
) -> Solution:
    """Return the solution: f polished if asked for, the dual as sampler, and the divergences between them."""
    polish_key, nodes_key, judge_key, joint_key = jr.split(key, 4)
    nodes = problem.nodes(key=nodes_key)
    facts = {"saddle_kl": measured_divergence(problem, f_weights, dual, nodes, key=judge_key)}
    facts["sampler_kl"] = facts["saddle_kl"]
    if polished:
        f_weights, polish_facts = polish(problem, problem.nodes(key=polish_key), f_weights, near=False)
        facts |= polish_facts | {
            "sampler_kl": measured_divergence(problem, f_weights, dual, nodes, key=judge_key)
        }
    if isinstance(dual, DynamicsDual):
        facts["joint_kl"] = facts["sampler_kl"] + _joint_excess(dual, key=joint_key)
    finished = outcome.status in (Status.RAN_ALL_STEPS, Status.NO_STEPS)
    status = Status.CONVERGED if finished and is_optimal(facts) else outcome.status
    return Solution(
        problem.tilt(f_weights), Sampler(dual, Identity(), problem.base), status, outcome.trace, facts
    )


def measured_divergence(
    problem: Problem, f_weights: AnyArray, dual: AbstractDual, nodes: Nodes, *, key: Key[Array, ""]
) -> float:
    """Return KL(q || p_f), with log Z on the nodes."""
    tilt, nothing = problem.tilt(f_weights), np.zeros((JUDGED_DRAWS, 0))
    draws = Sampler(dual, Identity(), problem.base).weighted_draws(nothing, key=key)
    log_ratio = draws.log_density - tilt.log_values(draws.points)
    return float(np.mean(log_ratio) + tilt.log_partitions(nodes, nothing[:1])[0])


@eqx.filter_jit
def _pathwise_draws(dual: AbstractDual, count: int, key: Key[Array, ""]) -> PathwiseDraws:
    return dual.pathwise_draws(count, key=key)


def _joint_excess(dual: DynamicsDual, *, key: Key[Array, ""]) -> float:
    """Return what the joint KL of positions and momenta has more than that of positions: E[KL(q(v | x) || N(v))]."""
    draws = _pathwise_draws(dual, JUDGED_DRAWS, key)
    return float(
        np.asarray(draws.shares)
        @ (np.asarray(draws.log_density) - dual.log_densities(np.asarray(draws.points)))
    )
