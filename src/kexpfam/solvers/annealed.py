"""Maximum likelihood with annealed importance sampling: at every step, fresh draws of the base are tempered to the model."""

from collections.abc import Callable

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, Key

from kexpfam.chains import tempered
from kexpfam.solvers.ascent import AbstractDrawing, Drawn, NaturalAscent, climb
from kexpfam.solvers.iterates import Averaged, RandomIterate
from kexpfam.solvers.task import Solution, Task


class Annealing(AbstractDrawing):
    """Draws of the base, tempered to the model by sequential Monte Carlo; nothing is remembered from step to step."""

    particles: int = eqx.field(default=1024, static=True)
    stages: int = eqx.field(default=40, static=True)

    def __check_init__(self):
        for name in ("particles", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def init(self, problem, *, key):
        return None

    def draw(self, problem, tilt, drawing, *, key):
        base_key, temper_key = jr.split(key)
        starts = problem.base.sample(self.particles, key=base_key)
        outcome = tempered(tilt, starts, self.stages, key=temper_key)
        return Drawn(None, outcome.particles, outcome.weights, outcome.arrived.astype(starts.dtype))


class AnnealedLikelihood(eqx.Module):
    """Maximum likelihood by few, long natural-gradient steps with moments by annealed importance sampling.

    ``ascent`` holds the steps and the annealing; by default the answer is the mean of the later iterates.
    """

    steps: int = 32
    ascent: NaturalAscent | Averaged | RandomIterate | None = None

    def __check_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f, a mixture distilled from its density, and the trace of the steps."""
        ascent = self.ascent or Averaged(NaturalAscent(Annealing(), delay=5.0, memory=8.0))
        return climb(task, ascent, self.steps, key=key, report=report, checkpoint=checkpoint)
