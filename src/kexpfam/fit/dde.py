"""The doubly dual embedding as a solver: Algorithm 1 of the paper, from f = 0 and q = p0.

The two options are not the paper's and are named for what they are. ``warm_start`` begins next to the solution: f solves the
convex problem, the sampler's noise is a law distilled from that density, and the saddle steps move all three players from
there. ``polish`` replaces the f of the saddle point by the convex optimum.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import AnyArray
from kexpfam.fit.convex import continuation, is_optimal, likelihood, polish
from kexpfam.fit.distil import Distillation, distil
from kexpfam.fit.loop import Run, run
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, Status, check_at_least
from kexpfam.fit.saddle import DoublyDual, Point, SaddleProblem
from kexpfam.model.density import Sampler
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.networks import AbstractTransport, Identity
from kexpfam.model.precision import double_precision
from kexpfam.model.spaces import AbstractFunctionSpace
from kexpfam.progress import Listener

__all__ = ["DDE", "begin", "finish", "pose"]

# Next to the solution the players need small steps, and f nothing that is let in gradually.
WARM = DoublyDual(f_rate=0.01, nu_rate=2e-3, transport_rate=2e-5, damping=0.0)
COLD = DoublyDual()
WARM_STEPS, COLD_STEPS = 50, 800
# Draws that decide, on common noise, whether a transport trained from a warm start is kept.
JUDGED_DRAWS = 4000
SNAPSHOT_DRAWS = 1000


class DDE(Solver):
    """Doubly dual embedding: f, nu and a transport, in a nested stochastic search for their saddle point.

    Parameters
    ----------
    steps : int or None
        Updates of f; by default 800, from a warm start 50.
    saddle : DoublyDual or None
        Rates, sizes and nesting of the players, or a wrapper of them from ``kexpfam.paper``.
    warm_start : bool
        Begin at the convex optimum and a law distilled from it.
    polish : bool
        Replace the f that was found by the convex optimum.
    snapshots : bool
        Keep draws of the sampler along the way.
    distillation : Distillation
        How a warm start's law is distilled.
    """

    steps: int | None = None
    saddle: Any = None
    warm_start: bool = False
    polish: bool = False
    snapshots: bool = False
    distillation: Distillation = Distillation()

    knows_conditions: ClassVar[bool] = True
    records: ClassVar[tuple[str, ...]] = (
        *("data_fit", "model_fit", "kl_dual", "penalty", "value"),
        *("sampler_gap", "effective_share", "f_gradient"),
    )

    def __check_init__(self) -> None:
        if self.steps is not None:
            check_at_least(self, 0, "steps")

    def solve(
        self, problem: Problem, *, key: Key[Array, ""], report: Listener | None = None, checkpoint: Checkpoint | None = None
    ) -> Solution:
        """Return f, the sampler and the trace of the saddle steps."""
        warm_key, init_key, run_key, polish_key, judge_key = jr.split(key, 5)
        with double_precision():
            weights, reference = begin(problem, warm_start=self.warm_start, distillation=self.distillation, key=warm_key)
            posed = pose(problem, reference, problem.space)
        saddle = self.saddle or eqx.tree_at(
            lambda players: players.horizon, WARM if self.warm_start else COLD, jnp.asarray(float(max(self._steps, 1)))
        )
        with double_precision():
            state = saddle.init(posed, weights, key=init_key)
        watch = (lambda state: _snapshot(posed, saddle.answer(state), judge_key)) if self.snapshots else None
        options: dict[str, Any] = {"report": report, "checkpoint": checkpoint, "watch": watch, "stage": "saddle point"}
        outcome = run(posed, saddle, state, steps=self._steps, key=run_key, **options)
        answer = saddle.answer(outcome.state)
        ends: dict[str, Any] = {"warm_start": self.warm_start, "polished": self.polish, "keys": (polish_key, judge_key)}
        return finish(problem, answer.f_weights, answer.transport, reference, outcome, **ends)

    @property
    def _steps(self) -> int:
        return (WARM_STEPS if self.warm_start else COLD_STEPS) if self.steps is None else self.steps


def begin(
    problem: Problem, *, warm_start: bool, distillation: Distillation | None = None, key: Key[Array, ""]
) -> tuple[Float[Array, " r"], AbstractMeasure]:
    """Return f's weights and the law of the sampler's noise before the first step."""
    if not warm_start:
        return jnp.zeros(problem.space.size), problem.base
    nodes_key, distil_key = jr.split(key)
    optimum = continuation(likelihood(problem, problem.nodes(key=nodes_key)), problem.rkhs_penalty)
    return jnp.asarray(optimum.weights), distil(problem, optimum.weights, settings=distillation, key=distil_key)


def finish(
    problem: Problem,
    weights: AnyArray,
    transport: AbstractTransport,
    reference: AbstractMeasure,
    outcome: Run,
    *,
    warm_start: bool,
    polished: bool,
    keys: Iterable[Key[Array, ""]],
) -> Solution:
    """Return the solution that a run of saddle steps led to; f is polished, and a warm start's transport judged, if asked."""
    polish_key, judge_key = keys
    facts: dict[str, float] = {}
    if polished:
        near = warm_start and not problem.conditional
        nodes = problem.nodes(proposal=reference if near else None, key=polish_key)
        weights, facts = polish(problem, nodes, weights, near=warm_start)
    sampler = Sampler(reference, transport, problem.base)
    if warm_start:
        sampler, judged = _better_sampler(problem, weights, sampler, key=judge_key)
        facts |= judged
    finished = outcome.status in (Status.RAN_ALL_STEPS, Status.NO_STEPS)
    status = Status.CONVERGED if finished and is_optimal(facts) else outcome.status
    return Solution(problem.tilt(weights), sampler, status, outcome.trace, facts, outcome.watched)


def _better_sampler(
    problem: Problem, weights: AnyArray, trained: Sampler, *, key: Key[Array, ""]
) -> tuple[Sampler, dict[str, float]]:
    """Keep the trained transport only if it brought its noise nearer to the density in KL(q || p_f)."""
    plain = Sampler(trained.reference, Identity(), problem.base)
    row_key, draw_key = jr.split(key)
    rows = np.asarray(problem.sample.drawn(JUDGED_DRAWS, key=row_key))
    conditions, tilt = np.asarray(problem.sample.condition)[rows], problem.tilt(weights)

    def divergence(sampler: Sampler) -> float:
        draws = sampler.weighted_draws(conditions, key=draw_key)
        return float(np.mean(draws.log_density - tilt.log_values(draws.points, conditions)))

    gain = divergence(plain) - divergence(trained)
    return (trained if gain >= 0.0 else plain), {"transport_gain": gain, "transport_kept": float(gain >= 0.0)}


def pose(problem: Problem, reference: AbstractMeasure, space: AbstractFunctionSpace) -> SaddleProblem:
    """Return the saddle-point problem with f in ``space``, anchored at the reference."""
    penalty, inverse_temperature = jnp.asarray(problem.rkhs_penalty), jnp.asarray(1.0)
    return SaddleProblem(problem.sample, problem.base, space, reference, penalty, inverse_temperature, anchored=True)


@eqx.filter_jit
def _snapshot(problem: SaddleProblem, point: Point, key: Key[Array, ""]) -> Float[Array, "b d"]:
    """Return sampler draws on noise that is the same at every step, in model units."""
    conditions = problem.sample.condition[jnp.arange(SNAPSHOT_DRAWS) % len(problem.sample)]
    return Sampler(problem.reference, point.transport, problem.base).draw(conditions, key=key)
