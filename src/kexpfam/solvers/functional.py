"""Algorithms 1, 2 and 3 of the paper as printed: stochastic functional gradients for f and nu inside descent of the transport.

A function is held as its space holds it. In the space of kernel expansions a step adds one term per draw (Algorithm 2); in
a space of random features the same step moves the weights (Algorithm 3, `solvers.random_features`).
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

from kexpfam.objective import Batch, Point, Problem, carry, draw_batch, evaluate_nu, player_gradient, saddle_terms
from kexpfam.potentials import Constant, Expansion, Expansions, FeatureSpace, KernelSpan, Member, Tilt
from kexpfam.solvers.dde import DDE, pose
from kexpfam.solvers.doubly_dual import stepped
from kexpfam.solvers.loop import run, scan
from kexpfam.solvers.task import Solution, Task
from kexpfam.transports import Residual


class AscentHealth(NamedTuple):
    """The terms of the saddle function that cost no more than a batch, after a step."""

    data_fit: Float[Array, ""]
    model_fit: Float[Array, ""]
    kl_dual: Float[Array, ""]


class AscentState(eqx.Module):
    """The players; ``step`` counts updates of the transport."""

    point: Point
    step: Int[Array, ""]


class Ascent(eqx.Module):
    r"""Settings of Algorithm 1: for each step of the transport, ``ascents`` steps of f and nu.

    The step sizes are :math:`\tau_k = \tau / \sqrt{1 + k / h}` for f and :math:`\rho_l = \rho / \sqrt{1 + l / h}` for the
    transport, with :math:`\tau` = ``rate``, :math:`\rho` = ``transport_rate`` and h = ``horizon``; those of nu are ``nu_speed``
    times f's, in the paper 1. f and nu go on from where they were when the transport has moved. Gradients of the transport
    are clipped by their norm.
    """

    rate: ScalarLike = eqx.field(default=0.1, converter=jnp.asarray)
    nu_speed: ScalarLike = eqx.field(default=1.0, converter=jnp.asarray)
    transport_rate: ScalarLike = eqx.field(default=1e-3, converter=jnp.asarray)
    horizon: ScalarLike = eqx.field(default=100.0, converter=jnp.asarray)
    clip: ScalarLike = eqx.field(default=5.0, converter=jnp.asarray)
    ascents: int = eqx.field(default=5, static=True)
    batch_size: int = eqx.field(default=128, static=True)
    width: int = eqx.field(default=64, static=True)
    depth: int = eqx.field(default=3, static=True)

    def __check_init__(self):
        for name in ("ascents", "batch_size", "width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def init(self, problem: Problem, f, nu: Member, *, key: Key[Array, ""]) -> AscentState:
        """Return the start: given f and nu, and a transport that carries noise to itself."""
        dim, condition_dim = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        transport = Residual.draw(dim, condition_dim, width=self.width, depth=self.depth, key=key)
        return AscentState(Point(f, nu, transport), jnp.array(0))

    def answer(self, state: AscentState) -> Point:
        """Return the players that are kept: the last ones, as printed."""
        return state.point

    def step(self, problem: Problem, state: AscentState, *, key: Key[Array, ""]) -> tuple[AscentState, AscentHealth]:
        """Return the state after ``ascents`` steps of f and nu and one step of the transport."""
        draw = jax.vmap(lambda key: draw_batch(problem, self.batch_size, key=key))
        batches = draw(jr.split(key, self.ascents + 1))
        first = state.step * self.ascents
        rates = self.rate / jnp.sqrt(1.0 + (first + jnp.arange(self.ascents)) / self.horizon)
        climb = lambda point, inputs: (climbed(problem, point, *inputs, nu_speed=self.nu_speed), None)
        point, _ = scan(climb, state.point, (jax.tree.map(lambda rows: rows[:-1], batches), rates))
        last = jax.tree.map(lambda rows: rows[-1], batches)
        gradient = player_gradient(problem, point, last, lambda point: point.transport)
        stride = self.transport_rate / jnp.sqrt(1.0 + state.step / self.horizon)
        stride = stride * jnp.minimum(1.0, self.clip / jnp.maximum(optax.tree.norm(gradient), 1e-12))
        point = eqx.tree_at(lambda p: p.transport, point, stepped(point.transport, gradient, -stride))
        terms = saddle_terms(point, problem, last)
        return AscentState(point, state.step + 1), AscentHealth(terms.data_fit, terms.model_fit, terms.kl_dual)


def climbed(problem: Problem, point: Point, batch: Batch, rate: Float[Array, ""], *, nu_speed: ScalarLike = 1.0) -> Point:
    r"""Return the players after one stochastic functional gradient step of f and nu.

    .. math::
        f_{k+1} = (1 - \eta \tau_k) f_k + \tau_k \bigl( k(x, \cdot) - k(g(\xi), \cdot) \bigr), \quad
        \nu_{k+1} = \nu_k + \tfrac{\tau_k}{\lambda} \bigl( k(g(\xi), \cdot) - e^{\nu_k(x')} k(x', \cdot) \bigr),

    as means over the batch, with the steps of nu ``nu_speed`` times as long. Equation ledger: ``DDE-FUNCTIONAL``.
    """
    condition = batch.data.condition
    moved = carry(problem, point.transport, batch.noise, condition)
    share = jnp.full(condition.shape[0], rate / condition.shape[0])
    both = jnp.concatenate([condition, condition])
    rows, signed = jnp.concatenate([batch.data.target, moved]), jnp.concatenate([share, -share])
    f = problem.space.stepped(point.f_weights, 1.0 - problem.rkhs_penalty * rate, rows, both, signed)
    masses = jnp.exp(evaluate_nu(problem, point.nu, batch.base, condition) + batch.base_log_weights)
    rows, weighted = jnp.concatenate([moved, batch.base]), jnp.concatenate([share, -share * masses])
    nu = point.nu.stepped(1.0, rows, both, jnp.asarray(nu_speed) / problem.inverse_temperature * weighted)
    return Point(f, nu, point.transport)


# Next to the solution steps are small. From f = 0, f must be slow enough for the sampler to follow, and nu fast enough to hold
# the sampler back: with the paper's single step size f runs ahead of the sampler and does not return.
STARTS = {"warm": Ascent(), "cold": Ascent(rate=0.03, nu_speed=100.0, transport_rate=0.3, horizon=10_000.0)}


class FunctionalGradient(eqx.Module):
    """Algorithms 1 and 2: f and nu as kernel expansions that grow by the draws of every step.

    The expansions have room for ``budget`` terms each; when it is full the oldest are overwritten, but never the warm
    start's. ``None`` is room for all of them. In the end f is projected onto at most ``centres`` of its own centres (fact
    ``projection_error``: the largest change at a training point, in nats) and polished there. ``start="cold"`` with
    ``polish=False`` and ``budget=None`` is the paper's scheme from f = 0 and q = p0; with ``Ascent(nu_speed=1.0)``, verbatim.
    """

    start: str = "warm"
    steps: int = 50
    ascent: Ascent | None = None
    budget: int | None = 8192
    centres: int = 400
    polish: bool = True
    nodes: int = 16384

    def __check_init__(self):
        DDE(start=self.start, steps=self.steps)  # its checks are these
        fewest = 2 * self._ascent.batch_size
        if self.budget is not None and self.budget < fewest:
            raise ValueError(f"budget must be at least twice the batch size ({fewest}), got {self.budget}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f on some of its centres, the sampler, and the trace of the steps."""
        span = kernel_span(task)
        space = Expansions(span.kernel)
        frame = DDE(start=self.start, steps=self.steps, polish=self.polish, nodes=self.nodes)
        start_key, init_key, run_key, seed_key, *keys = jr.split(key, 6)
        weights, reference = frame.begin(task, key=start_key)
        ascent, slots = self._ascent, self._slots
        empty = jnp.zeros((0, task.sample.target.shape[1])), jnp.zeros(0)
        terms = (span.centres, span.whitening @ weights) if self.start == "warm" else empty
        f, nu = Expansion.starting(*terms, slots=slots), Member(space, Expansion.starting(*empty, slots=slots))
        problem = pose(task, reference, space)
        state = ascent.init(problem, f, nu, key=init_key)
        outcome = run(problem, ascent, state, steps=self.steps, key=run_key, report=report, checkpoint=checkpoint)
        answer = ascent.answer(outcome.state)
        found_space, weights, error = self._projected(task, space, answer.f_weights, key=seed_key)
        found = frame.finish(task.within(found_space), weights, answer.transport, reference, outcome, keys=keys)
        return found._replace(facts=found.facts | {"projection_error": error})

    @property
    def _ascent(self) -> Ascent:
        return self.ascent or STARTS[self.start]

    @property
    def _slots(self) -> int:
        grown = 2 * self._ascent.batch_size * self._ascent.ascents * max(self.steps, 1)
        return grown if self.budget is None else min(self.budget, grown)

    def _projected(self, task: Task, space: Expansions, f: Expansion, *, key):
        span, weights = space.projected(f, most=self.centres, seed=int(jr.randint(key, (), 0, 2**31 - 1)))
        tilt = Tilt(FeatureSpace(Constant(), span), weights, task.base)
        error = np.abs(space.values(f, task.sample.target) - tilt.values(np.asarray(task.sample.target)))
        return tilt.space, weights, float(error.max())


def kernel_span(task: Task) -> KernelSpan:
    """Return the task's space of f as the span of a kernel, for solvers that have other plans with that kernel."""
    if not isinstance(task.space.target, KernelSpan):
        raise ValueError("this solver chooses the features of f itself: leave space at 'nystrom' or 'full'.")
    return task.space.target
