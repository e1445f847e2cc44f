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
from kexpfam.fit.saddle import DoublyDual, Point, SaddleProblem, State
from kexpfam.fit.standing import Standing, standing
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Sampler
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.networks import AbstractTransport, Identity
from kexpfam.model.spaces import AbstractFunctionSpace
from kexpfam.progress import Listener

__all__ = ["DDE", "begin", "finish", "persistent", "pose"]

# Next to the solution the players need small steps, and f nothing that is let in gradually.
WARM = DoublyDual(f_rate=0.01, nu_rate=2e-3, transport_rate=2e-5, damping=0.0)
COLD = DoublyDual()
WARM_STEPS, COLD_STEPS = 50, 800
# Without a number of steps a run may go on at its lowest rates, up to this many times as long, and is judged every so often.
EXTENSION, JUDGED_EVERY = 2, 200
# A run-away is rolled back and gone on with at a third of the rates, so many times.
RETREATS, RETREAT = 2, 1.0 / 3.0
# Draws that decide, on common noise, whether a transport trained from a warm start is kept.
JUDGED_DRAWS = 4000
SNAPSHOT_DRAWS = 1000


class DDE(Solver):
    """Doubly dual embedding: f, nu and a transport, in a nested stochastic search for their saddle point.

    Parameters
    ----------
    steps : int or None
        Updates of f. By default the schedules run over 800, and the run goes on until it has converged, to 1,600 at most;
        from a warm start 50.
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
    tolerance : float
        Nats within which f and the sampler's moments have to be, by the sampler's own draws, to be called converged.
    """

    steps: int | None = None
    saddle: Any = None
    warm_start: bool = False
    polish: bool = False
    snapshots: bool = False
    distillation: Distillation = Distillation()
    tolerance: float = 0.02

    knows_conditions: ClassVar[bool] = True
    records: ClassVar[tuple[str, ...]] = (
        *("data_fit", "model_fit", "kl_dual", "penalty", "value"),
        *("sampler_gap", "effective_share", "f_gradient"),
    )

    def __check_init__(self) -> None:
        if self.steps is not None:
            check_at_least(self, 0, "steps")

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f, the sampler and the trace of the saddle steps."""
        warm_key, init_key, run_key, polish_key, judge_key = jr.split(key, 5)
        with double_precision():
            weights, reference = begin(
                problem, warm_start=self.warm_start, distillation=self.distillation, key=warm_key
            )
            posed = pose(problem, reference, problem.space)
        saddle = self.saddle or eqx.tree_at(
            lambda players: players.horizon,
            WARM if self.warm_start else COLD,
            jnp.asarray(float(max(self._steps, 1))),
        )
        with double_precision():
            state = saddle.init(posed, weights, key=init_key)
        watch = (lambda state: _snapshot(posed, saddle.answer(state), judge_key)) if self.snapshots else None
        options: dict[str, Any] = {
            "report": report,
            "checkpoint": checkpoint,
            "watch": watch,
            "stage": "saddle point",
        }
        judge = lambda state: standing(
            posed, saddle.answer(state), state.metric, key=jr.fold_in(judge_key, int(state.step))
        )
        if self.steps is None and self.saddle is None and not self.warm_start:
            options["stop"] = lambda state: self._is_due(state) and judge(state).within(self.tolerance)
        steps = self._steps * (EXTENSION if "stop" in options else 1)
        outcome = persistent(posed, saddle, state, steps=steps, key=run_key, **options)
        answer = saddle.answer(outcome.state)
        ends: dict[str, Any] = {
            "warm_start": self.warm_start,
            "polished": self.polish,
            "keys": (polish_key, judge_key),
        }
        solution = finish(problem, answer.f_weights, answer.transport, reference, outcome, **ends)
        measurable = isinstance(outcome.state, State) and saddle.natural
        if self.polish or not measurable or outcome.status is Status.NO_STEPS:
            return solution
        return self._judged(solution, judge(outcome.state))

    def _is_due(self, state: State) -> bool:
        return int(state.step) >= self._steps and int(state.step) % JUDGED_EVERY == 0

    def _judged(self, solution: Solution, found: Standing) -> Solution:
        """Return the solution with where it stands among its facts; it has converged if that is near enough."""
        converged = solution.status is Status.RAN_ALL_STEPS and found.within(self.tolerance)
        status = Status.CONVERGED if converged else solution.status
        return solution._replace(status=status, facts=solution.facts | found._asdict())

    @property
    def _steps(self) -> int:
        return (WARM_STEPS if self.warm_start else COLD_STEPS) if self.steps is None else self.steps


def persistent(posed: SaddleProblem, saddle: Any, state: Any, *, key: Key[Array, ""], **options: Any) -> Run:
    """Return a run that goes on from its last healthy state at lower rates if it runs away."""
    outcome = run(posed, saddle, state, key=key, **options)
    for again in jr.split(key, RETREATS):
        if outcome.status is not Status.DIVERGED or not isinstance(saddle, DoublyDual):
            break
        rates = lambda players: (players.f_rate, players.nu_rate, players.transport_rate)
        saddle = eqx.tree_at(rates, saddle, tuple(RETREAT * rate for rate in rates(saddle)))
        before, outcome = outcome, run(posed, saddle, outcome.state, key=again, **options)
        names = before.trace.keys() & outcome.trace.keys()
        trace = {name: np.concatenate([before.trace[name], outcome.trace[name]]) for name in names}
        outcome = outcome._replace(
            trace=trace or before.trace or outcome.trace, watched=before.watched | outcome.watched
        )
    return outcome


def begin(
    problem: Problem, *, warm_start: bool, distillation: Distillation | None = None, key: Key[Array, ""]
) -> tuple[Float[Array, " r"], AbstractMeasure]:
    """Return f's weights and the law of the sampler's noise before the first step."""
    if not warm_start:
        return jnp.zeros(problem.space.size), problem.base
    nodes_key, distil_key = jr.split(key)
    optimum = continuation(likelihood(problem, problem.nodes(key=nodes_key)), problem.rkhs_penalty)
    return jnp.asarray(optimum.weights), distil(
        problem, optimum.weights, settings=distillation, key=distil_key
    )


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
    return SaddleProblem(
        problem.sample, problem.base, space, reference, penalty, inverse_temperature, anchored=True
    )


@eqx.filter_jit
def _snapshot(problem: SaddleProblem, point: Point, key: Key[Array, ""]) -> Float[Array, "b d"]:
    """Return sampler draws on noise that is the same at every step, in model units."""
    conditions = problem.sample.condition[jnp.arange(SNAPSHOT_DRAWS) % len(problem.sample)]
    return Sampler(problem.reference, point.transport, problem.base).draw(conditions, key=key)
