"""f with features that are learned: adapted random features (a two-layer network) and the last hidden layer of a deep one.

The features climb the penalised likelihood, whose gradient is that of the saddle function for f with the sampler at its best,
q = p_f: expectations under p_f are importance sums. How long they climb is decided on held-out training rows. Then the features
are a space like any other, in which f is found by a solver of the convex problem.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.measures import held_out_split
from kexpfam.nodes import Nodes, importance_nodes
from kexpfam.potentials import ACTIVATIONS, AbstractSpan, Constant, FeatureSpace, NetworkSpan
from kexpfam.sample import Sample
from kexpfam.solvers import convex
from kexpfam.solvers.dde import DDE
from kexpfam.solvers.doubly_dual import stepped
from kexpfam.solvers.loop import Run, Status, run
from kexpfam.solvers.random_features import spectral_features
from kexpfam.solvers.task import Solution, Task, continuation, likelihood

# How often learned features are judged on held-out rows.
STAGES = 8


class Evidence(NamedTuple):
    """What features are learned from: rows of data, weighted points for the partition function, and penalties."""

    data: Float[Array, "n d"]
    points: Float[Array, "j d"]
    log_weights: Float[Array, " j"]
    rkhs_penalty: Float[Array, ""]


class Linear(eqx.Module):
    """``f = weights . features`` with both to be learned."""

    span: AbstractSpan
    weights: Float[Array, " r"]

    def __call__(self, points: Float[Array, "b d"]) -> Float[Array, " b"]:
        return self.span.evaluate(self.weights, points)


class LearningState(eqx.Module):
    """The function and its optimiser's moments."""

    f: Linear
    moments: optax.OptState
    step: Int[Array, ""]


class LearningHealth(NamedTuple):
    """The penalised likelihood on a batch, before its step."""

    value: Float[Array, ""]


class Learning(eqx.Module):
    r"""Adam on the penalised likelihood of features and weights,

    .. math::
        \hat E[f(x)] - \log \sum_j w_j e^{f(z_j)} - \tfrac{\eta}{2} |\beta|^2 - \tfrac{\delta}{2} |\theta|^2,

    with :math:`f = \beta^\top \phi_\theta` and new batches of rows and nodes at every step. Equation ledger: ``KEF-FEATURES``.
    """

    rate: ScalarLike = eqx.field(default=3e-3, converter=jnp.asarray)
    decay: ScalarLike = eqx.field(default=0.0, converter=jnp.asarray)
    batch_size: int = eqx.field(default=256, static=True)
    nodes_per_batch: int = eqx.field(default=1024, static=True)

    def init(self, f: Linear) -> LearningState:
        return LearningState(f, self._optimiser().init(eqx.filter(f, eqx.is_inexact_array)), jnp.array(0))

    def step(self, evidence: Evidence, state: LearningState, *, key: Key[Array, ""]) -> tuple[LearningState, LearningHealth]:
        """Return the state after one step on a batch."""
        row_key, node_key = jr.split(key)
        rows = evidence.data[jr.randint(row_key, (self.batch_size,), 0, evidence.data.shape[0])]
        chosen = jr.randint(node_key, (self.nodes_per_batch,), 0, evidence.points.shape[0])
        share = np.log(evidence.points.shape[0] / self.nodes_per_batch)

        def cost(f):
            partition = jax.nn.logsumexp(f(evidence.points[chosen]) + evidence.log_weights[chosen]) + share
            squares = optax.tree.sum(jax.tree.map(lambda part: jnp.sum(part**2), eqx.filter(f.span, eqx.is_inexact_array)))
            penalty = 0.5 * evidence.rkhs_penalty * jnp.sum(f.weights**2) + 0.5 * self.decay * squares
            return partition - jnp.mean(f(rows)) + penalty

        value, gradient = eqx.filter_value_and_grad(cost)(state.f)
        updates, moments = self._optimiser().update(gradient, state.moments)
        f = stepped(state.f, updates, -jnp.asarray(self.rate))
        return LearningState(f, moments, state.step + 1), LearningHealth(-value)

    def _optimiser(self):
        return optax.chain(optax.clip_by_global_norm(5.0), optax.scale_by_adam())


class Learned(NamedTuple):
    """The features as the last run of learning left them, and what held-out rows gained by their steps (nats)."""

    run: Run
    gain: float


def learn(
    task: Task, span: AbstractSpan, learning: Learning, *, steps: int, nodes: int, key: Key[Array, ""], report: Callable | None
) -> Learned:
    """Return the features after as many steps as help rows that did not take part.

    A first run learns from four fifths of the rows; at each of its stages f is found anew in the features of the moment and
    scored on the other fifth, with its partition function on fresh nodes. A second run repeats the best number of steps on all.
    """
    nodes_key, check_key, seed_key, run_key = jr.split(key, 4)
    fitting, check = (importance_nodes(task.base, task.proposal, nodes, key=k) for k in (nodes_key, check_key))
    seed = int(jr.randint(seed_key, (), 0, 2**31 - 1))
    training, held_out = (Sample.unconditional(rows) for rows in held_out_split(np.asarray(task.sample.target), seed=seed))
    part = Task(training, task.base, task.space, task.rkhs_penalty, task.proposal)
    scores = lambda state: np.asarray(held_out_score(part, state.f.span, fitting, held_out, check))
    chunk = max(1, -(-steps // STAGES))
    first = _climb(part, span, learning, fitting, steps, key=run_key, chunk=chunk, report=report, watch=scores)
    best = max(first.watched, key=lambda step: float(first.watched[step]))
    gain = float(first.watched[best] - first.watched["0"])
    if first.status is Status.INTERRUPTED:
        return Learned(first, gain)
    return Learned(_climb(task, span, learning, fitting, int(best), key=run_key, chunk=chunk, report=report), gain)


def held_out_score(task: Task, span: AbstractSpan, nodes: Nodes, held_out: Sample, check: Nodes) -> float:
    """Return the mean of ``f - log Z`` over held-out rows, with f at its optimum in the span for the task's own rows."""
    task = task.within(FeatureSpace(Constant(), span))
    weights = continuation(likelihood(task, nodes), task.rkhs_penalty).weights
    log_partition = convex.log_partitions(likelihood(task, check), weights)[0]
    return float(np.mean(span.matrix(held_out.target) @ weights) - log_partition)


def _climb(task: Task, span: AbstractSpan, learning: Learning, nodes: Nodes, steps: int, *, key, **options) -> Run:
    """Return the run of learning steps that starts at the span's convex optimum."""
    weights = continuation(likelihood(task.within(FeatureSpace(Constant(), span)), nodes), task.rkhs_penalty).weights
    points, log_weights, penalty = map(jnp.asarray, (nodes.points, nodes.log_weights, task.rkhs_penalty))
    start = learning.init(Linear(span, jnp.asarray(weights)))
    return run(Evidence(task.sample.target, points, log_weights, penalty), learning, start, steps=steps, key=key, **options)


def solve_in_learned(task: Task, span: AbstractSpan, solver, *, key, report, checkpoint) -> Solution:
    """Return the answer of ``solver.then`` with f in the span after ``solver.learning`` has learned it."""
    learn_key, then_key = jr.split(key)
    learned = learn(task, span, solver.learning, steps=solver.steps, nodes=solver.nodes, key=learn_key, report=report)
    space = FeatureSpace(Constant(), learned.run.state.f.span)
    found = solver.then.solve(task.within(space), key=then_key, report=report, checkpoint=checkpoint)
    facts = found.facts | {"learning_steps": float(learned.run.state.step), "held_out_gain": learned.gain}
    status = learned.run.status if learned.run.status in (Status.INTERRUPTED, Status.DIVERGED) else found.status
    trace = {f"learning_{name}": series for name, series in learned.run.trace.items()}
    return found._replace(status=status, trace=trace | found.trace, facts=facts)


class AdaptedFeatures(eqx.Module):
    r"""f as a two-layer network :math:`\beta^\top (\cos \omega x, \sin \omega x)`, frequencies learned by back-propagation.

    The frequencies start as ``count`` spectral draws of the task's kernel (Algorithm 3), so that steps of learning have to earn
    their place. The penalty is :math:`\tfrac{\eta}{2} |\beta|^2` with the task's :math:`\eta`; what keeps the frequencies
    from overfitting is the number of steps, chosen on held-out rows. ``then`` solves for :math:`\beta` and the sampler.
    """

    count: int = 64
    steps: int = 400
    learning: Learning = Learning()
    then: Any = DDE(steps=0)
    nodes: int = 8192

    def __check_init__(self):
        _check_counts(self, "count", "steps")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f in the space of the adapted features, and a sampler."""
        draw_key, solve_key = jr.split(key)
        span = spectral_features(task, self.count, key=draw_key)
        return solve_in_learned(task, span, self, key=solve_key, report=report, checkpoint=checkpoint)


class DeepNetwork(eqx.Module):
    r"""f as a network with ``depth`` hidden layers, all learned by back-propagation.

    The penalty is :math:`\tfrac{\eta}{2} |\beta|^2 + \tfrac{\delta}{2} |\theta|^2`: the task's :math:`\eta` on the last layer,
    whose inputs are divided by the root of their number, and ``learning.decay`` on all other weights. The number of steps is
    chosen on held-out rows. ``then`` solves for :math:`\beta` and the sampler.
    """

    width: int = 64
    depth: int = 2
    activation: str = "silu"
    steps: int = 1000
    learning: Learning = Learning(decay=1e-4)
    then: Any = DDE(steps=0)
    nodes: int = 8192

    def __check_init__(self):
        _check_counts(self, "width", "depth", "steps")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f in the space of the last hidden layer, and a sampler."""
        draw_key, solve_key = jr.split(key)
        shape = {"width": self.width, "depth": self.depth}
        span = NetworkSpan.draw(task.sample.target.shape[1], **shape, activation=self.activation, key=draw_key)
        return solve_in_learned(task, span, self, key=solve_key, report=report, checkpoint=checkpoint)


def _check_counts(solver, *names: str) -> None:
    for name in names:
        if getattr(solver, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(solver, name)}.")
