"""Algorithm 3 of the paper: f and nu linear in random features, so that memory does not grow with the steps."""

from typing import Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Key

from kexpfam.fit.dde import begin, finish, pose
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import run
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, check_at_least
from kexpfam.model.kernels import AbstractStationary
from kexpfam.model.spaces import FeatureSpace, RandomFeatures
from kexpfam.paper.expansions import Member, kernel_span
from kexpfam.paper.functional import COLD, WARM, WARM_STEPS, AscentHealth, FunctionalAscent
from kexpfam.progress import Listener

__all__ = ["RandomFeatureGradient", "spectral_features"]

# Here steps do not grow dearer, so that there are more of them than for kernel expansions.
COLD_STEPS = 3000


class RandomFeatureGradient(Solver):
    r"""Algorithms 1 and 3: :math:`f = \beta_f^\top \Phi`, :math:`\nu = \beta_\nu^\top \Phi`, penalty
    :math:`\tfrac{\eta}{2} |\beta_f|^2`, stochastic gradients with decaying steps.

    :math:`\Phi` are ``2 * count`` random features of the problem's kernel. The other settings are those of
    ``FunctionalGradient``; by default there are 3,000 steps, from a warm start 50.
    """

    steps: int | None = None
    ascent: FunctionalAscent | None = None
    count: int = 300
    warm_start: bool = False
    polish: bool = False
    distillation: Distillation = Distillation()

    records: ClassVar[tuple[str, ...]] = AscentHealth._fields

    def __check_init__(self) -> None:
        check_at_least(self, 1, "count")
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
        """Return f in a space of random features, the sampler, and the trace of the steps."""
        features_key, start_key, init_key, run_key, *keys = jr.split(key, 6)
        span = spectral_features(problem, self.count, key=features_key)
        problem = problem.within(FeatureSpace(problem.space.condition, span))
        weights, reference = begin(
            problem, warm_start=self.warm_start, distillation=self.distillation, key=start_key
        )
        ascent, steps = (WARM, WARM_STEPS) if self.warm_start else (COLD, COLD_STEPS)
        ascent, steps = self.ascent or ascent, steps if self.steps is None else self.steps
        posed = pose(problem, reference, problem.space)
        state = ascent.init(posed, weights, Member(problem.space, jnp.zeros_like(weights)), key=init_key)
        options: dict[str, Any] = {"stage": "saddle point", "report": report, "checkpoint": checkpoint}
        outcome = run(posed, ascent, state, steps=steps, key=run_key, **options)
        answer = ascent.answer(outcome.state)
        flags = {"warm_start": self.warm_start, "polished": self.polish}
        return finish(problem, answer.f_weights, answer.transport, reference, outcome, **flags, keys=keys)


def spectral_features(problem: Problem, count: int, *, key: Key[Array, ""]) -> RandomFeatures:
    """Return ``2 * count`` random features of the problem's kernel."""
    kernel = kernel_span(problem).kernel
    if not isinstance(kernel, AbstractStationary):
        raise ValueError(
            f"random features are drawn from the spectrum of a stationary kernel; a {type(kernel).__name__} has none."
        )
    return RandomFeatures.draw(kernel, problem.sample.target.shape[1], count=count, key=key)
