"""The default solver: a convex warm start, the doubly dual saddle point, and a convex polish of f.

The saddle point alone is slow and fragile from a cold start (f runs ahead of a sampler that lags, and lost modes do not come
back). Started next to its solution it is neither: f solves the convex problem on importance draws, the sampler's noise
is a mixture distilled from that density, and the transport starts as the identity. The saddle steps then move all three
players; the polish removes what stochastic steps left in f. ``start="cold"`` is the paper's own scheme from f = 0 and q = p0.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.measures import AbstractMeasure
from kexpfam.objective import Point, Problem
from kexpfam.potentials import AbstractFunctionSpace
from kexpfam.solvers.doubly_dual import DoublyDual
from kexpfam.solvers.iterates import Averaged, RandomIterate
from kexpfam.solvers.loop import Run, Status, run
from kexpfam.solvers.reference import distil
from kexpfam.solvers.task import Solution, Task, continuation, integration_nodes, is_optimal, likelihood, polish
from kexpfam.transports import Identity, Sampler

# Next to the solution the players need small steps; far from it they need the paper's order of magnitude.
STARTS = {
    "warm": DoublyDual(f_rate=0.1, nu_rate=2e-3, transport_rate=2e-5),
    "cold": DoublyDual(f_rate=1.0, nu_rate=1e-3, transport_rate=5e-4),
}
# Draws that decide, on common noise, whether the trained transport is kept.
JUDGED_DRAWS = 4000
SNAPSHOT_DRAWS = 1000


class DDE(eqx.Module):
    """Doubly dual embedding with defaults that need no tuning.

    ``steps`` counts updates of f in the saddle point; ``saddle`` holds its rates and sizes (default: by ``start``);
    ``nodes`` are the importance draws of warm start and polish; ``snapshots`` keeps sampler draws along the way.
    """

    start: str = "warm"
    steps: int = 50
    saddle: DoublyDual | Averaged | RandomIterate | None = None
    polish: bool = True
    nodes: int = 16384
    snapshots: bool = False

    def __check_init__(self):
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}; got {self.start!r}.")
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f, the sampler and the trace of the saddle steps."""
        warm_key, init_key, run_key, polish_key, judge_key = jr.split(key, 5)
        weights, reference = self.begin(task, key=warm_key)
        problem = pose(task, reference, task.space)
        saddle = self.saddle or STARTS[self.start]
        state = saddle.init(problem, weights, key=init_key)
        watch = (lambda state: _snapshot(problem, saddle.answer(state), judge_key)) if self.snapshots else None
        outcome = run(problem, saddle, state, steps=self.steps, key=run_key, report=report, checkpoint=checkpoint, watch=watch)
        answer = saddle.answer(outcome.state)
        keys = polish_key, judge_key
        return self.finish(task, answer.f_weights, answer.transport, reference, outcome, keys=keys)

    def begin(self, task: Task, *, key: Key[Array, ""]) -> tuple[Float[Array, " r"], AbstractMeasure]:
        """Return f's weights and the law of the sampler's noise before the first step."""
        if self.start == "cold":
            return jnp.zeros(task.space.size), task.base
        nodes_key, distil_key = jr.split(key)
        nodes = integration_nodes(task, task.proposal, self.nodes, key=nodes_key)
        optimum = continuation(likelihood(task, nodes), task.rkhs_penalty)
        return jnp.asarray(optimum.weights), distil(task, optimum.weights, key=distil_key)

    def finish(self, task: Task, weights, transport, reference: AbstractMeasure, outcome: Run, *, keys) -> Solution:
        """Return the solution that a run of saddle steps led to: f polished, and the better of two samplers."""
        polish_key, judge_key = keys
        facts: dict[str, float] = {}
        if self.polish:
            near = self.start == "warm" and task.sample.condition.shape[1] == 0
            nodes = integration_nodes(task, reference if near else task.proposal, self.nodes, key=polish_key)
            weights, facts = polish(task, nodes, weights, near=self.start == "warm")
        sampler, judged = self._choose_sampler(task, weights, reference, transport, key=judge_key)
        finished = outcome.status in (Status.RAN_ALL_STEPS, Status.NO_STEPS)
        status = Status.CONVERGED if finished and is_optimal(facts) else outcome.status
        return Solution(task.tilt(weights), sampler, status, outcome.trace, facts | judged, outcome.watched)

    def _choose_sampler(self, task, weights, reference, transport, *, key):
        """Keep the trained transport only if it brought its noise nearer to the density in KL(q || p_f)."""
        trained, plain = Sampler(reference, transport, task.base), Sampler(reference, Identity(), task.base)
        row_key, draw_key = jr.split(key)
        conditions = np.asarray(task.sample.condition)[jr.randint(row_key, (JUDGED_DRAWS,), 0, len(task.sample))]
        divergences = {}
        for name, sampler in {"trained": trained, "reference": plain}.items():
            draws = sampler.weighted_draws(conditions, key=draw_key)
            log_p = task.tilt(weights).values(draws.points, conditions) + task.base.log_densities(draws.points)
            divergences[name] = float(np.mean(draws.log_density - log_p))
        gain = divergences["reference"] - divergences["trained"]
        keep = self.start == "cold" or gain >= 0.0
        return (trained if keep else plain), {"transport_gain": gain, "transport_kept": float(keep)}


def pose(task: Task, reference: AbstractMeasure, space: AbstractFunctionSpace) -> Problem:
    """Return the saddle-point problem of the task with f in ``space``, anchored at the reference."""
    penalty, inverse_temperature = jnp.asarray(task.rkhs_penalty), jnp.asarray(1.0)
    return Problem(task.sample, task.base, space, reference, penalty, inverse_temperature, anchored=True)


@eqx.filter_jit
def _snapshot(problem: Problem, point: Point, key):
    """Return sampler draws on noise that is the same at every step, in model units."""
    conditions = problem.sample.condition[jnp.arange(SNAPSHOT_DRAWS) % len(problem.sample)]
    return Sampler(problem.reference, point.transport, problem.base).draw(conditions, key=key)
