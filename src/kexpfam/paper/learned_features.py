"""f with learned features: adapted random features, and the last hidden layer of a deep network.

The features ascend the penalised likelihood, whose gradient is that of the saddle function at the optimal
sampler q = p_f; expectations under p_f are importance sums. The number of steps is chosen on held-out
training rows. Then f is the optimum of the convex problem in the space of the features.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey, Sample
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.convex import Optimum, best_sampler, continuation, likelihood
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import AdamState, Run, run
from kexpfam.fit.mixture import VALIDATION_SHARE
from kexpfam.fit.problem import Problem, Solution, Solver, Status, Watchers
from kexpfam.fit.task import Splits
from kexpfam.integrate.nodes import importance_nodes, seed_from
from kexpfam.jax_settings import double
from kexpfam.model.measures import Nodes, logsumexp
from kexpfam.model.networks import ACTIVATIONS
from kexpfam.model.spaces import AbstractSpan, Constant, FeatureSpace, NetworkSpan
from kexpfam.paper.functional import spectral_features
from kexpfam.progress import Listener
from kexpfam.settings import SettingsRecord, at_least, one_of

NO_CONDITION = np.zeros((1, 0))


class LearningProblem(NamedTuple):
    """Rows of data, weighted points for the partition function, and the penalty."""

    data: Float[AnyArray, "n d"]
    points: Float[AnyArray, "j d"]
    log_weights: Float[AnyArray, " j"]
    rkhs_penalty: Float[Array, ""]
    weight: Float[AnyArray, " n"] | None = None


class Linear(eqx.Module):
    """``f = weights . features`` with learned weights and features."""

    span: AbstractSpan
    weights: Float[Array, " r"]

    def __call__(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, " b"]:
        return self.span.evaluate(self.weights, points)


class LearningHealth(NamedTuple):
    """The penalised likelihood on a batch, before its step."""

    value: Float[Array, ""]


class Learning(SettingsRecord):
    r"""Adam on the penalised likelihood of features and weights,

    .. math::
        \hat E[f(x)] - \log \sum_j w_j e^{f(z_j)} - \tfrac{\eta}{2} |\beta|^2 - \tfrac{\delta}{2} |\theta|^2,

    with :math:`f = \beta^\top \phi_\theta` and new batches of rows and nodes at every step. The features are
    scored on held-out rows ``stages`` times. Equation ledger: ``KEF-FEATURES``.
    """

    rate: ScalarLike = eqx.field(default=3e-3, converter=double)
    decay: ScalarLike = eqx.field(default=0.0, converter=double)
    batch_size: int = at_least(1, 256, static=True)
    nodes_per_batch: int = at_least(1, 1024, static=True)
    stages: int = at_least(1, 8, static=True)

    def step(
        self, evidence: LearningProblem, state: AdamState, *, key: RandomKey
    ) -> tuple[AdamState, LearningHealth]:
        """Return the state after one step on a batch."""
        row_key, node_key = jr.split(key)
        sample = Sample.unconditional(evidence.data, evidence.weight)
        rows = evidence.data[sample.drawn(self.batch_size, key=row_key)]
        chosen = jr.randint(node_key, (self.nodes_per_batch,), 0, evidence.points.shape[0])
        share = np.log(evidence.points.shape[0] / self.nodes_per_batch)

        def cost(f: Linear) -> Float[Array, ""]:
            partition = logsumexp(f(evidence.points[chosen]) + evidence.log_weights[chosen]) + share
            parts = jax.tree.leaves(eqx.filter(f.span, eqx.is_inexact_array))
            squares = sum(jnp.sum(part**2) for part in parts)
            penalty = 0.5 * evidence.rkhs_penalty * jnp.sum(f.weights**2) + 0.5 * self.decay * squares
            return partition - jnp.mean(f(rows)) + penalty

        state, value = state.descend(cost, self.rate)
        return state, LearningHealth(-value)


def learn(
    problem: Problem,
    span: AbstractSpan,
    learning: Learning,
    *,
    steps: int,
    key: RandomKey,
    report: Listener | None,
) -> tuple[Run, float]:
    """Return the run with the best score on held-out rows, and the gain of its features there (nats).

    A first run learns from four fifths of the rows; at each of its stages f is optimised in the current
    features and scored on the other fifth, with the partition function on other nodes. A second run takes the
    best number of steps, which may be 0, on all rows. The trace is that of the first run, which takes all.
    """
    draws_key, nodes_key, check_key, seed_key, run_key = jr.split(key, 5)
    # Batches are draws, which lie where the mass is; most cells of a grid are nearly empty.
    draws = importance_nodes(problem.base, problem.proposal, problem.integration.draws, key=draws_key)
    nodes = problem.nodes(key=nodes_key)
    check = problem.nodes(fineness=problem.integration.finer, key=check_key)
    splits = Splits.draw(len(problem.sample), parts=1, share=VALIDATION_SHARE, seed=seed_from(seed_key))
    training, held_out = (problem.sample.rows(rows[0]) for rows in (splits.kept, splits.held))
    part = dataclasses.replace(problem, sample=training)
    score = lambda state: np.asarray(held_out_score(part, state.model.span, nodes, held_out, check))
    chunk = max(1, -(-steps // learning.stages))
    options: dict[str, Any] = {"key": run_key, "chunk": chunk, "report": report}
    first = _learned(part, span, learning, draws, steps=steps, watch=score, **options)
    best = max(first.watched, key=lambda step: float(first.watched[step]))
    gain = float(first.watched[best] - first.watched["0"])
    last = _learned(problem, span, learning, draws, steps=int(best), **options)
    return last._replace(trace=first.trace), gain


def held_out_score(
    problem: Problem, span: AbstractSpan, nodes: Nodes, held_out: Sample, check: Nodes
) -> float:
    """Return the mean of ``f - log Z`` over held-out rows, for f optimal on the problem's rows."""
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
    evidence = LearningProblem(sample.target, draws.points, draws.log_weights, penalty, sample.weight)
    state = AdamState.start(Linear(span, weights))
    return run(evidence, learning, state, stage="features", **options)


class LearnedFeatures(Solver):
    """Base class of the solvers with learned features; the number of steps is chosen on held-out rows."""

    steps: int = at_least(1, 400)  # at most
    learning: Learning = Learning()
    distillation: Distillation = Distillation()  # of the sampler, where there is no grid

    records: ClassVar[tuple[str, ...]] = LearningHealth._fields

    @abc.abstractmethod
    def initial_span(self, problem: Problem, *, key: RandomKey) -> AbstractSpan:
        """Return the features before the first step."""

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return the convex optimum in the space of the learned features, and a sampler."""
        draw_key, solve_key = jr.split(key)
        learn_key, nodes_key, check_key, sampler_key = jr.split(solve_key, 4)
        span, report = self.initial_span(problem, key=draw_key), watchers.get("report")
        learned, gain = learn(problem, span, self.learning, steps=self.steps, key=learn_key, report=report)
        problem = within(problem, learned.state.model.span)
        nodes = problem.nodes(key=nodes_key)
        check = problem.nodes(fineness=problem.integration.finer, key=check_key)
        optimum = _optimum(problem, nodes)
        tilt = problem.tilt(optimum.weights)
        error = tilt.log_partitions(check, NO_CONDITION)[0] - optimum.log_partitions[0]
        facts = {
            "newton_decrement": optimum.decrement,
            "integral_error": float(abs(error)),
            "learning_steps": float(learned.state.step),
            "held_out_gain": gain,
        }
        status = Status.CONVERGED if optimum.converged else Status.RAN_ALL_STEPS
        if learned.status is Status.DIVERGED:
            status = Status.DIVERGED
        sampler = best_sampler(problem, tilt, nodes, self.distillation, key=sampler_key)
        return Solution(tilt, sampler, status, learned.trace, facts)


class AdaptedFeatures(LearnedFeatures):
    r"""f as a two-layer network :math:`\beta^\top (\cos \omega x, \sin \omega x)` with learned frequencies.

    The frequencies start as ``count`` spectral draws of the problem's kernel (Algorithm 3). The penalty is
    :math:`\tfrac{\eta}{2} |\beta|^2` with the problem's :math:`\eta`; early stopping on held-out rows keeps
    the frequencies from overfitting.
    """

    count: int = at_least(1, 64)

    def initial_span(self, problem: Problem, *, key: RandomKey) -> AbstractSpan:
        """Return random features of the problem's kernel."""
        return spectral_features(problem, self.count, key=key)


class DeepNetwork(LearnedFeatures):
    r"""f as a network with ``depth`` hidden layers, all learned by back-propagation.

    The penalty is :math:`\tfrac{\eta}{2} |\beta|^2 + \tfrac{\delta}{2} |\theta|^2`: the problem's
    :math:`\eta` on the last layer, whose inputs are divided by the root of their number, and
    ``learning.decay`` on all other weights.
    """

    steps: int = at_least(1, 1000)
    learning: Learning = Learning(decay=1e-4)
    width: int = at_least(1, 64)
    depth: int = at_least(1, 2)
    activation: str = "silu"

    def __check_init__(self) -> None:
        one_of("activation", self.activation, ACTIVATIONS)

    def initial_span(self, problem: Problem, *, key: RandomKey) -> AbstractSpan:
        """Return the last hidden layer of a random network."""
        dim, shape = problem.sample.target.shape[1], {"width": self.width, "depth": self.depth}
        return NetworkSpan.draw(dim, **shape, activation=self.activation, key=key)
