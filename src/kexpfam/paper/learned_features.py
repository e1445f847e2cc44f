"""f with features that are learned: adapted random features (a two-layer network) and the last hidden layer of a deep one.

The features climb the penalised likelihood, whose gradient is that of the saddle function for f with the sampler at its best,
q = p_f: expectations under p_f are importance sums. How long they climb is decided on held-out training rows. Then the features
are a space like any other, in which f is the optimum of the convex problem.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.convex import Optimum, best_sampler, continuation, likelihood
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import Run, optimiser, run, stepped
from kexpfam.fit.mixture import VALIDATION_SHARE
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, Status, check_at_least
from kexpfam.fit.task import Splits
from kexpfam.integrate.nodes import importance_nodes, seed_from
from kexpfam.model.measures import Nodes, logsumexp
from kexpfam.model.networks import ACTIVATIONS
from kexpfam.model.spaces import AbstractSpan, Constant, FeatureSpace, NetworkSpan
from kexpfam.paper.random_features import spectral_features
from kexpfam.progress import Listener

__all__ = ["AdaptedFeatures", "DeepNetwork", "Evidence", "Learning", "Linear", "held_out_score", "learn"]

NO_CONDITION = np.zeros((1, 0))


class Evidence(NamedTuple):
    """What features are learned from: rows of data, weighted points for the partition function, and the penalty."""

    data: Float[AnyArray, "n d"]
    points: Float[AnyArray, "j d"]
    log_weights: Float[AnyArray, " j"]
    rkhs_penalty: Float[Array, ""]
    weight: Float[AnyArray, " n"] | None = None


class Linear(eqx.Module):
    """``f = weights . features`` with both to be learned."""

    span: AbstractSpan
    weights: Float[Array, " r"]

    def __call__(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, " b"]:
        return self.span.evaluate(self.weights, points)


class LearningState(eqx.Module):
    """The function and its optimiser's moments."""

    f: Linear
    moments: Any
    step: Int[Array, ""]


class LearningHealth(NamedTuple):
    """The penalised likelihood on a batch, before its step."""

    value: Float[Array, ""]


class Learning(eqx.Module):
    r"""Adam on the penalised likelihood of features and weights,

    .. math::
        \hat E[f(x)] - \log \sum_j w_j e^{f(z_j)} - \tfrac{\eta}{2} |\beta|^2 - \tfrac{\delta}{2} |\theta|^2,

    with :math:`f = \beta^\top \phi_\theta` and new batches of rows and nodes at every step. ``stages`` times the features are
    judged on held-out rows. Equation ledger: ``KEF-FEATURES``.
    """

    rate: ScalarLike = eqx.field(default=3e-3, converter=jnp.asarray)
    decay: ScalarLike = eqx.field(default=0.0, converter=jnp.asarray)
    batch_size: int = eqx.field(default=256, static=True)
    nodes_per_batch: int = eqx.field(default=1024, static=True)
    stages: int = eqx.field(default=8, static=True)

    def __check_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "nodes_per_batch", "stages")

    def init(self, f: Linear) -> LearningState:
        """Return the start at a given function."""
        return LearningState(f, optimiser().init(eqx.filter(f, eqx.is_inexact_array)), jnp.array(0))

    def step(
        self, evidence: Evidence, state: LearningState, *, key: Key[Array, ""]
    ) -> tuple[LearningState, LearningHealth]:
        """Return the state after one step on a batch."""
        row_key, node_key = jr.split(key)
        rows = evidence.data[
            Sample.unconditional(evidence.data, evidence.weight).drawn(self.batch_size, key=row_key)
        ]
        chosen = jr.randint(node_key, (self.nodes_per_batch,), 0, evidence.points.shape[0])
        share = np.log(evidence.points.shape[0] / self.nodes_per_batch)

        def cost(f: Linear) -> Float[Array, ""]:
            partition = logsumexp(f(evidence.points[chosen]) + evidence.log_weights[chosen]) + share
            squares = sum(
                jnp.sum(part**2) for part in jax.tree.leaves(eqx.filter(f.span, eqx.is_inexact_array))
            )
            penalty = 0.5 * evidence.rkhs_penalty * jnp.sum(f.weights**2) + 0.5 * self.decay * squares
            return partition - jnp.mean(f(rows)) + penalty

        value, gradient = eqx.filter_value_and_grad(cost)(state.f)
        updates, moments = optimiser().update(gradient, state.moments)
        f = stepped(state.f, updates, -jnp.asarray(self.rate))
        return LearningState(f, moments, state.step + 1), LearningHealth(-value)


class Learned(NamedTuple):
    """The features as the last run of learning left them, what held-out rows gained by their steps (nats), and the trace.

    The trace is that of the first run, which takes all steps: the best number of them may be none.
    """

    run: Run
    gain: float
    trace: dict[str, np.ndarray]


def learn(
    problem: Problem,
    span: AbstractSpan,
    learning: Learning,
    *,
    steps: int,
    key: Key[Array, ""],
    report: Listener | None,
) -> Learned:
    """Return the features after as many steps as help rows that did not take part.

    A first run learns from four fifths of the rows; at each of its stages f is found anew in the features of the moment and
    scored on the other fifth, with its partition function on other nodes. A second run repeats the best number of steps on all.
    """
    draws_key, nodes_key, check_key, seed_key, run_key = jr.split(key, 5)
    # Batches are taken from draws, which are where the mass is; of a grid most cells are next to empty.
    draws = importance_nodes(problem.base, problem.proposal, problem.integration.draws, key=draws_key)
    nodes, check = (
        problem.nodes(key=nodes_key),
        problem.nodes(fineness=problem.integration.finer, key=check_key),
    )
    splits = Splits.draw(len(problem.sample), parts=1, share=VALIDATION_SHARE, seed=seed_from(seed_key))
    training, held_out = (problem.sample.rows(rows[0]) for rows in (splits.kept, splits.held))
    part = dataclasses.replace(problem, sample=training)
    scores = lambda state: np.asarray(held_out_score(part, state.f.span, nodes, held_out, check))
    options: dict[str, Any] = {
        "key": run_key,
        "chunk": max(1, -(-steps // learning.stages)),
        "report": report,
    }
    first = _learned(part, span, learning, draws, steps=steps, watch=scores, **options)
    best = max(first.watched, key=lambda step: float(first.watched[step]))
    gain = float(first.watched[best] - first.watched["0"])
    if first.status is Status.INTERRUPTED:
        return Learned(first, gain, first.trace)
    return Learned(_learned(problem, span, learning, draws, steps=int(best), **options), gain, first.trace)


def held_out_score(
    problem: Problem, span: AbstractSpan, nodes: Nodes, held_out: Sample, check: Nodes
) -> float:
    """Return the mean of ``f - log Z`` over held-out rows, with f at its optimum in the span for the problem's own rows."""
    problem = within(problem, span)
    tilt = problem.tilt(_optimum(problem, nodes).weights)
    mean = weighted_mean(tilt.values(held_out.target), held_out.weight)
    return float(mean - tilt.log_partitions(check, NO_CONDITION)[0])


def within(problem: Problem, span: AbstractSpan) -> Problem:
    """Return the problem with f in the span."""
    return problem.within(FeatureSpace(Constant(), span))


def _optimum(problem: Problem, nodes: Nodes) -> Optimum:
    return continuation(likelihood(problem, nodes), problem.rkhs_penalty)


def _learned(problem: Problem, span: AbstractSpan, learning: Learning, draws: Nodes, **options: Any) -> Run:
    """Return the run of learning steps that starts at the span's convex optimum."""
    weights = jnp.asarray(_optimum(within(problem, span), draws).weights)
    sample, penalty = problem.sample, jnp.asarray(problem.rkhs_penalty)
    evidence = Evidence(sample.target, draws.points, draws.log_weights, penalty, sample.weight)
    return run(evidence, learning, learning.init(Linear(span, weights)), stage="features", **options)


def solve_in_learned(
    problem: Problem,
    span: AbstractSpan,
    solver: "AdaptedFeatures | DeepNetwork",
    *,
    key: Key[Array, ""],
    report: Listener | None,
) -> Solution:
    """Return the convex optimum in the span after ``solver.learning`` has learned it, and the best sampler at hand."""
    learn_key, nodes_key, check_key, sampler_key = jr.split(key, 4)
    learned = learn(problem, span, solver.learning, steps=solver.steps, key=learn_key, report=report)
    problem = within(problem, learned.run.state.f.span)
    nodes, check = (
        problem.nodes(key=nodes_key),
        problem.nodes(fineness=problem.integration.finer, key=check_key),
    )
    optimum = _optimum(problem, nodes)
    tilt = problem.tilt(optimum.weights)
    facts = {
        "newton_decrement": optimum.decrement,
        "integral_error": float(abs(tilt.log_partitions(check, NO_CONDITION)[0] - optimum.log_partitions[0])),
        "learning_steps": float(learned.run.state.step),
        "held_out_gain": learned.gain,
    }
    status = Status.CONVERGED if optimum.converged else Status.RAN_ALL_STEPS
    status = learned.run.status if learned.run.status in (Status.INTERRUPTED, Status.DIVERGED) else status
    sampler = best_sampler(problem, tilt, nodes, solver.distillation, key=sampler_key)
    return Solution(tilt, sampler, status, learned.trace, facts)


class AdaptedFeatures(Solver):
    r"""f as a two-layer network :math:`\beta^\top (\cos \omega x, \sin \omega x)`, frequencies learned by back-propagation.

    The frequencies start as ``count`` spectral draws of the problem's kernel (Algorithm 3), so that steps of learning have to
    earn their place. The penalty is :math:`\tfrac{\eta}{2} |\beta|^2` with the problem's :math:`\eta`; what keeps the
    frequencies from overfitting is the number of steps, at most ``steps``, chosen on held-out rows.
    """

    count: int = 64
    steps: int = 400
    learning: Learning = Learning()
    distillation: Distillation = Distillation()

    records: ClassVar[tuple[str, ...]] = LearningHealth._fields

    def __check_init__(self) -> None:
        check_at_least(self, 1, "count", "steps")

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f in the space of the adapted features, and a sampler."""
        draw_key, solve_key = jr.split(key)
        span = spectral_features(problem, self.count, key=draw_key)
        return solve_in_learned(problem, span, self, key=solve_key, report=report)


class DeepNetwork(Solver):
    r"""f as a network with ``depth`` hidden layers, all learned by back-propagation.

    The penalty is :math:`\tfrac{\eta}{2} |\beta|^2 + \tfrac{\delta}{2} |\theta|^2`: the problem's :math:`\eta` on the last
    layer, whose inputs are divided by the root of their number, and ``learning.decay`` on all other weights. The number of
    steps, at most ``steps``, is chosen on held-out rows.
    """

    width: int = 64
    depth: int = 2
    activation: str = "silu"
    steps: int = 1000
    learning: Learning = Learning(decay=1e-4)
    distillation: Distillation = Distillation()

    records: ClassVar[tuple[str, ...]] = LearningHealth._fields

    def __check_init__(self) -> None:
        check_at_least(self, 1, "width", "depth", "steps")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}.")

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f in the space of the last hidden layer, and a sampler."""
        draw_key, solve_key = jr.split(key)
        shape = {"width": self.width, "depth": self.depth}
        span = NetworkSpan.draw(
            problem.sample.target.shape[1], **shape, activation=self.activation, key=draw_key
        )
        return solve_in_learned(problem, span, self, key=solve_key, report=report)
