"""Algorithm 3 of the paper: f and nu linear in random features, so that memory does not grow with the steps."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Key

from kexpfam.kernels import AbstractStationary
from kexpfam.potentials import FeatureSpace, Member, RandomFeatures
from kexpfam.solvers.dde import DDE, pose
from kexpfam.solvers.functional import STARTS, Ascent, kernel_span
from kexpfam.solvers.loop import run
from kexpfam.solvers.task import Solution, Task


class RandomFeatureGradient(eqx.Module):
    r"""Algorithms 1 and 3: :math:`f = \beta_f^\top \Phi`, :math:`\nu = \beta_\nu^\top \Phi`, penalty
    :math:`\tfrac{\eta}{2} |\beta_f|^2`, stochastic gradients with decaying steps.

    :math:`\Phi` are ``2 * count`` random features of the task's kernel. ``start="cold"`` with ``polish=False`` is
    the paper's scheme, with ``Ascent(nu_speed=1.0)`` to the letter.
    """

    start: str = "warm"
    steps: int = 50
    count: int = 300
    ascent: Ascent | None = None
    polish: bool = True
    nodes: int = 16384

    def __check_init__(self):
        DDE(start=self.start, steps=self.steps)  # its checks are these
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f in a space of random features, the sampler, and the trace of the steps."""
        features_key, start_key, init_key, run_key, *keys = jr.split(key, 6)
        span = spectral_features(task, self.count, key=features_key)
        task = task.within(FeatureSpace(task.space.condition, span))
        frame = DDE(start=self.start, steps=self.steps, polish=self.polish, nodes=self.nodes)
        weights, reference = frame.begin(task, key=start_key)
        problem, ascent = pose(task, reference, task.space), self.ascent or STARTS[self.start]
        state = ascent.init(problem, weights, Member(task.space, jnp.zeros_like(weights)), key=init_key)
        outcome = run(problem, ascent, state, steps=self.steps, key=run_key, report=report, checkpoint=checkpoint)
        answer = ascent.answer(outcome.state)
        return frame.finish(task, answer.f_weights, answer.transport, reference, outcome, keys=keys)


def spectral_features(task: Task, count: int, *, key: Key[Array, ""]) -> RandomFeatures:
    """Return ``2 * count`` random features of the task's kernel."""
    kernel = kernel_span(task).kernel
    if not isinstance(kernel, AbstractStationary):
        raise ValueError(
            f"random features are drawn from the spectrum of a stationary kernel; a {type(kernel).__name__} has none."
        )
    return RandomFeatures.draw(kernel, task.sample.target.shape[1], count=count, key=key)
