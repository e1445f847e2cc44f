"""Algorithms 1, 2 and 3 of the paper as printed: stochastic functional gradients for f and nu inside descent of the transport.

A function is held as its space holds it. In the space of kernel expansions a step adds one term per draw (Algorithm 2); in
a space of random features the same step moves the weights (Algorithm 3, ``paper.random_features``).
"""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.fit.dde import begin, finish, pose
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import run, scan, stepped
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, check_at_least
from kexpfam.fit.saddle import (
    Batch,
    Point,
    SaddleProblem,
    carry,
    draw_batch,
    evaluate_nu,
    player_gradient,
    saddle_terms,
)
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.networks import Residual
from kexpfam.model.spaces import Constant, FeatureSpace
from kexpfam.paper.expansions import Expansion, Expansions, Member, kernel_span
from kexpfam.progress import Listener

__all__ = ["AscentHealth", "AscentState", "FunctionalAscent", "FunctionalGradient", "climbed"]


class AscentHealth(NamedTuple):
    """The terms of the saddle function that cost no more than a batch, after a step."""

    data_fit: Float[Array, ""]
    model_fit: Float[Array, ""]
    kl_dual: Float[Array, ""]


class AscentState(eqx.Module):
    """The players; ``step`` counts updates of the transport."""

    point: Point
    step: Int[Array, ""]


class FunctionalAscent(eqx.Module):
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
    batch_size: int = eqx.field(default=64, static=True)
    width: int = eqx.field(default=64, static=True)
    depth: int = eqx.field(default=3, static=True)

    def __check_init__(self) -> None:
        check_at_least(self, 1, "ascents", "batch_size", "width", "depth")

    def init(self, problem: SaddleProblem, f: Any, nu: Member, *, key: Key[Array, ""]) -> AscentState:
        """Return the start: given f and nu, and a transport that carries noise to itself."""
        dim, condition_dim = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        transport = Residual.draw(dim, condition_dim, width=self.width, depth=self.depth, key=key)
        return AscentState(Point(f, nu, transport), jnp.array(0))

    def answer(self, state: AscentState) -> Point:
        """Return the players that are kept: the last ones, as printed."""
        return state.point

    def step(
        self, problem: SaddleProblem, state: AscentState, *, key: Key[Array, ""]
    ) -> tuple[AscentState, AscentHealth]:
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
        return AscentState(point, state.step + 1), AscentHealth(
            terms.data_fit, terms.model_fit, terms.kl_dual
        )


def climbed(
    problem: SaddleProblem, point: Point, batch: Batch, rate: Float[Array, ""], *, nu_speed: ScalarLike = 1.0
) -> Point:
    r"""Return the players after one stochastic functional gradient step of f and nu.

    .. math::
        f_{k+1} = (1 - \eta \tau_k) f_k + \tau_k \bigl( k(x, \cdot) - k(g(\xi), \cdot) \bigr), \quad
        \nu_{k+1} = \nu_k + \tfrac{\tau_k}{\lambda} \bigl( k(g(\xi), \cdot) - e^{\nu_k(x')} k(x', \cdot) \bigr),

    as means over the batch, with the steps of nu ``nu_speed`` times as long. Equation ledger: ``DDE-FUNCTIONAL``.
    """
    condition = jnp.asarray(batch.data.condition)
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
WARM = FunctionalAscent()
COLD = FunctionalAscent(
    rate=0.03, nu_speed=30.0, transport_rate=0.1, horizon=10_000.0, batch_size=32, ascents=2
)
# All steps together cost as much as the square of their number.
WARM_STEPS, COLD_STEPS = 50, 500


class FunctionalGradient(Solver):
    """Algorithms 1 and 2: f and nu as kernel expansions that grow by the draws of every step.

    In the end f is projected onto some of its own centres; the fact ``projection_error`` is the largest change at a training
    point, in nats. ``ascent=FunctionalAscent(nu_speed=1.0)`` is the paper's scheme verbatim.

    Parameters
    ----------
    steps : int or None
        Updates of the transport; by default 500, from a warm start 50.
    ascent : FunctionalAscent or None
        Step sizes, batches, and steps of f and nu for each of the transport.
    budget : int or None
        Terms that an expansion has room for; when it is full the oldest are overwritten, but never the warm start's. None
        is room for all of them.
    centres : int
        Centres that f is projected onto in the end, at most.
    warm_start : bool
        Begin at the convex optimum and a law distilled from it.
    polish : bool
        Replace the f that was found by the convex optimum on its centres.
    distillation : Distillation
        How a warm start's law is distilled.
    """

    steps: int | None = None
    ascent: FunctionalAscent | None = None
    budget: int | None = None
    centres: int = 400
    warm_start: bool = False
    polish: bool = False
    distillation: Distillation = Distillation()

    records: ClassVar[tuple[str, ...]] = AscentHealth._fields

    def __check_init__(self) -> None:
        check_at_least(self, 1, "centres")
        if self.steps is not None:
            check_at_least(self, 0, "steps")
        fewest = 2 * self._ascent.batch_size
        if self.budget is not None and self.budget < fewest:
            raise ValueError(f"budget must be at least twice the batch size ({fewest}), got {self.budget}.")

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f on some of its centres, the sampler, and the trace of the steps."""
        start_key, init_key, run_key, seed_key, *keys = jr.split(key, 6)
        span, ascent = kernel_span(problem), self._ascent
        space = Expansions(span.kernel)
        weights, reference = begin(
            problem, warm_start=self.warm_start, distillation=self.distillation, key=start_key
        )
        empty = jnp.zeros((0, problem.sample.target.shape[1])), jnp.zeros(0)
        terms = (span.centres, span.whitening @ weights) if self.warm_start else empty
        f, nu = (Expansion.starting(*start, slots=self._slots) for start in (terms, empty))
        posed = pose(problem, reference, space)
        state = ascent.init(posed, f, Member(space, nu), key=init_key)
        options: dict[str, Any] = {"stage": "saddle point", "report": report, "checkpoint": checkpoint}
        outcome = run(posed, ascent, state, steps=self._steps, key=run_key, **options)
        answer = ascent.answer(outcome.state)
        found, projected, error = self._projected(problem, space, answer.f_weights, seed=seed_from(seed_key))
        flags = {"warm_start": self.warm_start, "polished": self.polish}
        solution = finish(found, projected, answer.transport, reference, outcome, **flags, keys=keys)
        return solution._replace(facts=solution.facts | {"projection_error": error})

    @property
    def _ascent(self) -> FunctionalAscent:
        return self.ascent or (WARM if self.warm_start else COLD)

    @property
    def _steps(self) -> int:
        return (WARM_STEPS if self.warm_start else COLD_STEPS) if self.steps is None else self.steps

    @property
    def _slots(self) -> int:
        grown = 2 * self._ascent.batch_size * self._ascent.ascents * max(self._steps, 1)
        return grown if self.budget is None else min(self.budget, grown)

    def _projected(
        self, problem: Problem, space: Expansions, f: Expansion, *, seed: int
    ) -> tuple[Problem, np.ndarray, float]:
        """Return the problem on some of f's centres, f's weights there, and how far they are from f at the data."""
        span, weights = space.projected(f, most=self.centres, seed=seed)
        found, data = problem.within(FeatureSpace(Constant(), span)), np.asarray(problem.sample.target)
        error = np.abs(space.values(f, data) - found.tilt(weights).values(data))
        return found, weights, float(error.max())
