"""Contrastive divergence: the gradient's model expectation from Markov chains that follow the model as it changes."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import Sample
from kexpfam.fit.distil import Distillation
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, check_at_least
from kexpfam.integrate.chains import FIRST_STEP_SIZE, TARGET_ACCEPTANCE, hmc_start, hmc_step, jump
from kexpfam.model.density import Tilt
from kexpfam.paper.ascent import AbstractDrawing, AscentProblem, Drawn, Health, NaturalAscent, ascend
from kexpfam.paper.iterates import Averaged, RandomIterate
from kexpfam.progress import Listener

__all__ = ["ChainStates", "Chains", "ContrastiveDivergence"]

# The step size follows a density that keeps changing, so its gain does not fall.
ADAPTATION = 0.3


class ChainStates(eqx.Module):
    """Where the chains are, and the logarithm of their step size."""

    positions: Float[Array, "b d"]
    log_step_size: Float[Array, ""]


class Chains(AbstractDrawing):
    """Chains of HMC that start at data rows; persistent ones go on from where they were, others start again each time.

    With ``jumps`` each transition is followed by an offer to jump to a draw of the proposal: HMC alone does not carry mass
    from one mode to another, so that their weights would never be learned.
    """

    persistent: bool = eqx.field(default=True, static=True)
    count: int = eqx.field(default=256, static=True)
    transitions: int = eqx.field(default=4, static=True)
    jumps: bool = eqx.field(default=True, static=True)

    def __check_init__(self) -> None:
        check_at_least(self, 1, "count", "transitions")

    def init(self, problem: AscentProblem, *, key: Key[Array, ""]) -> ChainStates:
        return ChainStates(
            self._rows(problem, key), jnp.log(jnp.asarray(FIRST_STEP_SIZE, problem.mean_feature.dtype))
        )

    def draw(self, problem: AscentProblem, tilt: Tilt, drawing: ChainStates, *, key: Key[Array, ""]) -> Drawn:
        start_key, move_key = jr.split(key)
        positions = drawing.positions if self.persistent else self._rows(problem, start_key)
        condition = jnp.zeros((self.count, 0))

        def transition(carry: Any, transition_key: Key[Array, ""]) -> tuple[Any, Any]:
            positions, log_size = carry
            hmc_key, jump_key = jr.split(transition_key)
            states = hmc_start(tilt, positions, condition)
            states, info = hmc_step(tilt, states, condition, jnp.exp(log_size), hmc_key)
            acceptance = jnp.mean(info.acceptance_rate)
            positions = (
                jump(tilt, problem.proposal, states.position, jump_key) if self.jumps else states.position
            )
            return (positions, log_size + ADAPTATION * (acceptance - TARGET_ACCEPTANCE)), (
                positions,
                acceptance,
            )

        start = (positions, drawing.log_step_size)
        (positions, log_size), (path, acceptance) = jax.lax.scan(
            transition, start, jr.split(move_key, self.transitions)
        )
        # The way there counts as well as its end, unless it starts at data that the model has not yet changed.
        draws = path.reshape(-1, positions.shape[1]) if self.persistent else positions
        return Drawn(
            ChainStates(positions, log_size),
            draws,
            jnp.full(len(draws), 1.0 / len(draws)),
            jnp.mean(acceptance),
        )

    def _rows(self, problem: AscentProblem, key: Key[Array, ""]) -> Float[Array, "b d"]:
        return problem.data[Sample.unconditional(problem.data, problem.weight).drawn(self.count, key=key)]


class ContrastiveDivergence(Solver):
    """Maximum likelihood by stochastic gradients whose model moments come from persistent or short-run chains.

    Short runs are biased in principle: their draws are part data, part model, so that what f raises where no chain gets to is
    not seen. With few steps and no jumps, short runs can lose a far mode altogether; the table of solvers in ``reproduction``
    has what the defaults reach.

    ``ascent`` holds the steps and the chains; by default the answer is the mean of the later iterates.
    """

    persistent: bool = True
    steps: int = 128
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
        ascent = self.ascent or Averaged(NaturalAscent(Chains(persistent=self.persistent)))
        return ascend(problem, self, ascent, key=key, report=report, checkpoint=checkpoint)
