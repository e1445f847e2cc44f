"""The doubly dual embedding as a solver: Algorithm 1 of the paper, from f = 0 and q = p0.

A conditional density that is much narrower than its base starts at a regression instead (``fit.located``).

Two options are not in the paper. ``warm_start`` begins next to the solution: f solves the convex problem, the
sampler's noise is a distribution distilled from that density, and the saddle steps move all three players
from there. ``polish`` replaces the f of the saddle point by the convex optimum.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import AnyArray
from kexpfam.fit.convergence import Convergence, convergence
from kexpfam.fit.convex import continuation, is_optimal, likelihood, polish, shortfall
from kexpfam.fit.distil import Distillation, distil
from kexpfam.fit.located import log_ratio, narrow_law
from kexpfam.fit.loop import Run, run
from kexpfam.fit.problem import Problem, Solution, Solver, Status, Watchers
from kexpfam.fit.saddle import DoublyDual, SaddlePoint, SaddleProblem, SaddleState, SaddleTerms
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Sampler
from kexpfam.model.located import Located
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.networks import AbstractTransport, Identity
from kexpfam.model.spaces import AbstractFunctionSpace
from kexpfam.settings import check_at_least, shown


class SaddleSolver(Solver):
    """Base class of the solvers that look for f, nu and a transport.

    ``warm_start`` begins at the convex optimum and a distribution distilled from it; ``polish`` replaces the
    resulting f by the convex optimum. ``default_steps`` are the steps without and with a warm start.
    """

    steps: int | None = None  # of the outer player
    warm_start: bool = False
    polish: bool = False
    distillation: Distillation = Distillation()  # of the distribution of a warm start
    judged_draws: int = 4000  # that decide whether the transport trained from a warm start is kept

    default_steps: ClassVar[tuple[int, int]]

    def __check_init__(self) -> None:
        check_at_least(self, 1, "judged_draws")
        for name in ("warm_start", "polish"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {shown(getattr(self, name))}.")
        if self.steps is not None:
            check_at_least(self, 0, "steps")

    @property
    def uses_proposal(self) -> bool:
        return self.warm_start

    @property
    def step_count(self) -> int:
        """Return the number of steps."""
        return self.default_steps[self.warm_start] if self.steps is None else self.steps

    def start(self, problem: Problem, *, key: Key[Array, ""]) -> tuple[Float[Array, " r"], AbstractMeasure]:
        """Return f's weights and the distribution of the sampler's noise before the first step."""
        if not self.warm_start:
            return jnp.zeros(problem.space.size), problem.base
        nodes_key, distil_key = jr.split(key)
        optimum = continuation(likelihood(problem, problem.nodes(key=nodes_key)), problem.rkhs_penalty)
        reference = distil(problem, optimum.weights, settings=self.distillation, key=distil_key)
        return jnp.asarray(optimum.weights), reference

    def finish(
        self,
        problem: Problem,
        weights: AnyArray,
        transport: AbstractTransport,
        reference: AbstractMeasure,
        outcome: Run,
        *,
        keys: Iterable[Key[Array, ""]],
    ) -> Solution:
        """Return the solution after a run of saddle steps."""
        polish_key, judge_key = keys
        facts: dict[str, float] = {}
        if self.polish:
            near = self.warm_start and not problem.conditional
            nodes = problem.nodes(proposal=reference if near else None, key=polish_key)
            weights, facts = polish(problem, nodes, weights, near=self.warm_start)
        sampler = Sampler(reference, transport, problem.base)
        if self.warm_start:
            sampler, judged = _better_sampler(problem, weights, sampler, self.judged_draws, key=judge_key)
            facts |= judged
        status = end_status(outcome, facts)
        return Solution(problem.tilt(weights), sampler, status, outcome.trace, facts, outcome.watched)


def end_status(outcome: Run, facts: dict[str, float]) -> Status:
    """Return the status of a run: converged if it is finished and polished to the optimum."""
    finished = outcome.status in (Status.RAN_ALL_STEPS, Status.NO_STEPS)
    return Status.CONVERGED if finished and is_optimal(facts) else outcome.status


class DDE(SaddleSolver):
    """Doubly dual embedding: a nested stochastic search for the saddle point of f, nu and a transport.

    ``steps`` are updates of f. By default the schedules run over 400 steps, and the run continues until it
    has converged, up to ``extension`` times as many; from a warm start there are 50.

    Parameters
    ----------
    saddle : DoublyDual or None
        Rates, sizes and nesting of the players, or a wrapper of them from ``kexpfam.paper``.
    snapshots : bool
        Keep draws of the sampler during the run.
    tolerance : float
        The run has converged if f and the sampler's moments are within this many nats, f by the likelihood
        where there is a grid, else by draws of the sampler.
    extension : int
        Without ``steps``, the run takes at most this many times the steps of the schedules.
    check_every : int
        Steps between two checks of convergence.
    retries : int
        How often a diverged run continues from its last finite state.
    retry_factor : float
        The rates are multiplied by this factor each time.
    snapshot_draws : int
        Draws in a snapshot.
    """

    saddle: Any = None
    snapshots: bool = False
    tolerance: float = 0.02
    extension: int = 3
    check_every: int = 50
    retries: int = 2
    retry_factor: float = 1.0 / 3.0
    snapshot_draws: int = 1000

    supports_conditions: ClassVar[bool] = True
    default_steps: ClassVar[tuple[int, int]] = (400, 50)
    records: ClassVar[tuple[str, ...]] = (
        *(*SaddleTerms._fields, "value"),
        *("sampler_gap", "effective_share", "f_gradient"),
    )

    def __check_init__(self) -> None:
        check_at_least(self, 0, "tolerance", "retries", "retry_factor")
        check_at_least(self, 1, "extension", "check_every", "snapshot_draws")

    def solve(self, problem: Problem, *, key: Key[Array, ""], **watchers: Unpack[Watchers]) -> Solution:
        """Return f, the sampler and the trace of the saddle steps."""
        start_key, init_key, run_key, polish_key, judge_key = jr.split(key, 5)
        with double_precision():
            weights, reference = self.start(problem, key=start_key)
            saddle = self.saddle or self._default_saddle(reference)
            posed = saddle_problem(problem, reference, problem.space)
            state = saddle.init(posed, weights, key=init_key)
        options: dict[str, Any] = {**watchers, "stage": "saddle point", "steps": self.step_count}
        if self.snapshots:
            draws = self.snapshot_draws
            options["watch"] = lambda state: _snapshot(posed, saddle.answer(state), draws, judge_key)

        def measured(state: SaddleState, point: SaddlePoint) -> Convergence:
            key = jr.fold_in(judge_key, int(state.step))
            found = convergence(posed, point, state.metric, settings=saddle.f_step, key=key)
            if not problem.on_grid:
                return found
            exact = shortfall(problem, problem.tilt(point.f_weights), problem.base, 0, key=key)
            return found._replace(shortfall=exact.value, shortfall_error=exact.noise)

        def judged(state: SaddleState) -> SaddleState:
            if int(state.step) < self.step_count or int(state.step) % self.check_every:
                return state
            point = saddle.reached(state)
            return state.judged(point, measured(state, point).distance)

        if self.steps is None and self.saddle is None and not self.warm_start:
            options |= {"steps": self.step_count * self.extension, "judge": judged}
            options["stop"] = lambda state: state.distance < self.tolerance
        options |= {"retries": self.retries, "factor": self.retry_factor}
        outcome = run_with_retries(posed, saddle, state, key=run_key, **options)
        answer, keys = saddle.answer(outcome.state), (polish_key, judge_key)
        solution = self.finish(problem, answer.f_weights, answer.transport, reference, outcome, keys=keys)
        measurable = isinstance(outcome.state, SaddleState) and saddle.natural
        if self.polish or not measurable or outcome.status is Status.NO_STEPS:
            return solution
        found = measured(outcome.state, answer)
        within = solution.status is Status.RAN_ALL_STEPS and found.distance < self.tolerance
        status = Status.CONVERGED if within else solution.status
        return solution._replace(status=status, facts=solution.facts | found._asdict())

    def start(self, problem: Problem, *, key: Key[Array, ""]) -> tuple[Float[Array, " r"], AbstractMeasure]:
        """Return f's weights and the law of the noise; a cold start on a narrow ridge is at its location."""
        law = None if self.warm_start else narrow_law(problem)
        if law is None:
            return super().start(problem, key=key)
        return jnp.asarray(log_ratio(problem, law, key=key)), law

    def _default_saddle(self, reference: AbstractMeasure) -> DoublyDual:
        settings = DoublyDual.warm() if self.warm_start else DoublyDual()
        if isinstance(reference, Located):
            settings = DoublyDual.near()
        horizon = jnp.asarray(float(max(self.step_count, 1)))
        return eqx.tree_at(lambda players: players.horizon, settings, horizon)


def run_with_retries(
    posed: SaddleProblem,
    saddle: Any,
    state: Any,
    *,
    retries: int = 2,
    factor: float = 1.0 / 3.0,
    key: Key[Array, ""],
    **options: Any,
) -> Run:
    """Return a run that continues from its last healthy state at lower rates if it diverges."""
    outcome = run(posed, saddle, state, key=key, **options)
    for again in jr.split(key, retries):
        if outcome.status is not Status.DIVERGED or not isinstance(saddle, DoublyDual):
            break
        rates = lambda players: (players.f_rate, players.nu_rate, players.transport_rate)
        saddle = eqx.tree_at(rates, saddle, tuple(factor * rate for rate in rates(saddle)))
        before, outcome = outcome, run(posed, saddle, outcome.state, key=again, **options)
        names = before.trace.keys() & outcome.trace.keys()
        trace = {name: np.concatenate([before.trace[name], outcome.trace[name]]) for name in names}
        trace = trace or before.trace or outcome.trace
        outcome = outcome._replace(trace=trace, watched=before.watched | outcome.watched)
    return outcome


def _better_sampler(
    problem: Problem, weights: AnyArray, trained: Sampler, count: int, *, key: Key[Array, ""]
) -> tuple[Sampler, dict[str, float]]:
    """Return the trained sampler if its transport lowers KL(q || p_f), else the sampler without transport."""
    plain = Sampler(trained.reference, Identity(), problem.base)
    row_key, draw_key = jr.split(key)
    rows = np.asarray(problem.sample.drawn(count, key=row_key))
    conditions, tilt = np.asarray(problem.sample.condition)[rows], problem.tilt(weights)

    def divergence(sampler: Sampler) -> float:
        draws = sampler.weighted_draws(conditions, key=draw_key)
        return float(np.mean(draws.log_density - tilt.log_values(draws.points, conditions)))

    gain = divergence(plain) - divergence(trained)
    return (trained if gain >= 0.0 else plain), {"transport_gain": gain, "transport_kept": float(gain >= 0.0)}


def saddle_problem(
    problem: Problem, reference: AbstractMeasure, space: AbstractFunctionSpace
) -> SaddleProblem:
    """Return the saddle-point problem with f in ``space``, anchored at the reference."""
    numbers = jnp.asarray(problem.rkhs_penalty), jnp.asarray(1.0)
    return SaddleProblem(problem.sample, problem.base, space, reference, *numbers, anchored=True)


@eqx.filter_jit
def _snapshot(
    problem: SaddleProblem, point: SaddlePoint, count: int, key: Key[Array, ""]
) -> Float[Array, "b d"]:
    """Return draws of the sampler from fixed noise, in model units."""
    conditions = problem.sample.condition[jnp.arange(count) % len(problem.sample)]
    return Sampler(problem.reference, point.transport, problem.base).draw(conditions, key=key)
