"""Maximum likelihood with annealed importance sampling: at every step, fresh draws of the base are tempered to the model."""

from typing import ClassVar

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, Key

from kexpfam.fit.distil import Distillation
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, check_at_least
from kexpfam.integrate.chains import tempered
from kexpfam.model.density import Tilt
from kexpfam.paper.ascent import AbstractDrawing, AscentProblem, Drawn, Health, NaturalAscent, ascend
from kexpfam.paper.iterates import Averaged, RandomIterate
from kexpfam.progress import Listener

__all__ = ["AnnealedLikelihood", "Annealing"]


class Annealing(AbstractDrawing):
    """Draws of the base, tempered to the model by sequential Monte Carlo; nothing is kept from step to step."""

    particles: int = eqx.field(default=1024, static=True)
    stages: int = eqx.field(default=40, static=True)

    def __check_init__(self) -> None:
        check_at_least(self, 1, "particles", "stages")

    def init(self, problem: AscentProblem, *, key: Key[Array, ""]) -> None:
        return None

    def draw(self, problem: AscentProblem, tilt: Tilt, drawing: None, *, key: Key[Array, ""]) -> Drawn:
        base_key, temper_key = jr.split(key)
        starts = problem.base.sample(self.particles, key=base_key)
        outcome = tempered(tilt, starts, self.stages, key=temper_key)
        return Drawn(None, outcome.particles, outcome.weights, outcome.arrived.astype(starts.dtype))


class AnnealedLikelihood(Solver):
    """Maximum likelihood by few, long natural-gradient steps with moments by annealed importance sampling.

    ``ascent`` holds the steps and the annealing; by default the answer is the mean of the later iterates.
    """

    steps: int = 32
    ascent: NaturalAscent | Averaged | RandomIterate | None = None
    distillation: Distillation = Distillation()

    records: ClassVar[tuple[str, ...]] = Health._fields

    def __check_init__(self) -> None:
        check_at_least(self, 0, "steps")

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f, the best sampler at hand, and the trace of the steps."""
        ascent = self.ascent or Averaged(NaturalAscent(Annealing(), delay=5.0, memory=8.0))
        return ascend(problem, self, ascent, key=key, report=report, checkpoint=checkpoint)
