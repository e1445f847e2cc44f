"""Classical penalised maximum likelihood: gradient ascent with the model's moments from draws of the model.

The gradient is ``E_data[features] - E_model[features] - eta f`` (paper, section 2). The methods differ in the
source of the draws. Steps are natural: the gradient is solved against the covariance of the model's features
plus eta, the curvature of the likelihood, and no step is longer than a trust radius in that metric. So one
step changes the density by a bounded number of nats on any data and in any units of f.
"""

import abc
from typing import Any, ClassVar, NamedTuple, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey, Sample
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.convex import best_sampler, shortfall
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import run
from kexpfam.fit.problem import Problem, Solution, Solver, Status, Watchers
from kexpfam.integrate.chains import HMC, hmc_start, hmc_step, jump, tempered
from kexpfam.jax_settings import double
from kexpfam.model.density import Tilt
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper.iterates import Averaged
from kexpfam.settings import SettingsRecord, at_least


class AscentProblem(eqx.Module):
    """The fixed part: every array is constant while a solver runs."""

    sample: Sample
    mean_feature: Float[Array, " r"]
    space: FeatureSpace
    base: AbstractMeasure
    proposal: AbstractMeasure
    rkhs_penalty: Float[Array, ""]

    @staticmethod
    def of(problem: Problem) -> "AscentProblem":
        """Return the fixed part of a problem without conditions."""
        sample, space = problem.sample, problem.space
        mean = jnp.asarray(weighted_mean(space.matrix(sample.target, sample.condition), sample.weight))
        penalty = jnp.asarray(problem.rkhs_penalty, mean.dtype)
        arrays = jax.tree.map(jnp.asarray, sample)
        return AscentProblem(arrays, mean, space, problem.base, problem.proposal, penalty)

    def tilt(self, weights: Float[Array, " r"]) -> Tilt:
        """Return the unnormalised density of f with these weights."""
        return Tilt(self.space, weights, self.base)

    def features(self, points: Float[Array, "b d"]) -> Float[AnyArray, "b r"]:
        """Return the features of each point."""
        return self.space.features(points, jnp.zeros((points.shape[0], 0)))


class AscentPoint(eqx.Module):
    """The weights of f."""

    f_weights: Float[Array, " r"]


class AscentState(eqx.Module):
    """The state between steps; ``drawing`` is the state of the source of draws."""

    point: AscentPoint
    curvature: Float[Array, "r r"]
    drawing: Any
    step: Int[Array, ""]


class AscentHealth(NamedTuple):
    """The length of the Newton step in the metric of the curvature, with noise, and the acceptance rate."""

    newton_length: Float[Array, ""]
    acceptance: Float[Array, ""]


class ModelDraws(NamedTuple):
    """The next state of the source, draws with normalised weights, and the acceptance rate."""

    drawing: Any
    points: Float[Array, "b d"]
    weights: Float[Array, " b"]
    acceptance: Float[Array, ""]


class AbstractDrawing(SettingsRecord):
    """A source of draws of the model."""

    def init(self, problem: AscentProblem, *, key: RandomKey) -> Any:
        """Return the state before the first step, None if there is none."""

    @abc.abstractmethod
    def draw(self, problem: AscentProblem, tilt: Tilt, drawing: Any, *, key: RandomKey) -> ModelDraws:
        """Return draws of the tilted density."""


class NaturalAscent(SettingsRecord):
    r"""Stochastic natural gradients.

    .. math:: w \leftarrow w + \gamma_t (\widehat{Cov}_{p_f}[\phi] + \eta I)^{-1} \hat g.

    ``trust`` is the longest step in the metric of the curvature (nats of KL are half its square). The gains
    are ``(1 + t / delay)^-0.6``: they average out the noise, and the mean of the iterates is efficient. The
    curvature is an exponential moving average over about ``memory`` steps, since the draws of one step are
    too few to invert. It starts as the curvature at f = 0 on ``first_draws`` draws of the base.
    """

    drawing: AbstractDrawing
    trust: ScalarLike = eqx.field(default=0.5, converter=double)
    delay: ScalarLike = eqx.field(default=20.0, converter=double)
    memory: ScalarLike = eqx.field(default=20.0, converter=double)
    first_draws: int = at_least(2, 8192, static=True)

    def init(self, problem: AscentProblem, f_weights: Float[Array, " r"], *, key: RandomKey) -> AscentState:
        """Return the start at a given f, with the curvature at f = 0."""
        base_key, drawing_key = jr.split(key)
        features = problem.features(problem.base.sample(self.first_draws, key=base_key))
        drawing = self.drawing.init(problem, key=drawing_key)
        _, curvature = _moments(features, jnp.full(self.first_draws, 1.0 / self.first_draws))
        return AscentState(AscentPoint(f_weights), curvature, drawing, jnp.array(0))

    def step(
        self, problem: AscentProblem, state: AscentState, *, key: RandomKey
    ) -> tuple[AscentState, AscentHealth]:
        """Return the state after one step of f."""
        weights = state.point.f_weights
        drawn = self.drawing.draw(problem, problem.tilt(weights), state.drawing, key=key)
        expected, covariance = _moments(problem.features(drawn.points), drawn.weights)
        curvature = state.curvature + (covariance - state.curvature) / self.memory
        gradient = problem.mean_feature - expected - problem.rkhs_penalty * weights
        metric = curvature + problem.rkhs_penalty * jnp.eye(weights.size)
        direction = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(metric), gradient)
        length = jnp.sqrt(gradient @ direction)
        stride = self.schedule(state.step) * jnp.minimum(1.0, self.trust / length)
        point = AscentPoint(weights + stride * direction)
        state = AscentState(point, curvature, drawn.drawing, state.step + 1)
        return state, AscentHealth(length, drawn.acceptance)

    def schedule(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the relative size of a step."""
        return (1.0 + step / self.delay) ** -0.6

    def answer(self, state: AscentState) -> AscentPoint:
        """Return the result of a run."""
        return state.point


class LikelihoodAscent(Solver):
    """Base class of the classical solvers; by default the result is the mean of the later iterates.

    It has converged if the shortfall of f is below ``tolerance`` and its noise below ``most_noise`` nats.
    """

    steps: int = at_least(0, 128)
    ascent: Any = None  # a NaturalAscent, Averaged or RandomIterate: the steps and the source of draws
    distillation: Distillation = Distillation()  # of the sampler, where there is no grid
    tolerance: float = at_least(0, 0.01)
    most_noise: float = at_least(0, 0.1)
    judging_draws: int = at_least(2, 16384)  # importance draws that the shortfall is measured on

    records: ClassVar[tuple[str, ...]] = AscentHealth._fields

    @abc.abstractmethod
    def default_ascent(self) -> Any:
        """Return the steps and the source of draws where none are given."""

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return f after all steps from f = 0, a sampler, and the trace of the steps."""
        init_key, run_key, nodes_key, sampler_key, judge_key = jr.split(key, 5)
        ascent, posed = self.ascent or self.default_ascent(), AscentProblem.of(problem)
        state = ascent.init(posed, jnp.zeros(problem.space.size), key=init_key)
        # Numbers of steps that are multiples of the chunk need one compiled program.
        options: Any = {"stage": "likelihood", "chunk": 8, **watchers}
        outcome = run(posed, ascent, state, steps=self.steps, key=run_key, **options)
        tilt = problem.tilt(ascent.answer(outcome.state).f_weights)
        nodes = problem.nodes(key=nodes_key)
        sampler = best_sampler(problem, tilt, nodes, self.distillation, key=sampler_key)
        gap = shortfall(problem, tilt, sampler.reference, self.judging_draws, key=judge_key)
        optimal = gap.value < self.tolerance and gap.noise < self.most_noise
        status = Status.CONVERGED if outcome.status is Status.RAN_ALL_STEPS and optimal else outcome.status
        facts = {"shortfall": gap.value, "shortfall_noise": gap.noise}
        return Solution(tilt, sampler, status, outcome.trace, facts)


def _moments(
    features: Float[AnyArray, "b r"], weights: Float[Array, " b"]
) -> tuple[Float[Array, " r"], Float[Array, "r r"]]:
    """Return the weighted mean and covariance of features."""
    mean = weights @ features
    centred = features - mean
    return mean, centred.T @ (weights[:, None] * centred)


class ChainStates(eqx.Module):
    """The positions of the chains, and the logarithm of their step size."""

    positions: Float[Array, "b d"]
    log_step_size: Float[Array, ""]


class Chains(AbstractDrawing):
    """HMC chains that start at data rows; persistent chains continue, others restart at every step.

    With ``jumps`` each transition is followed by an independent Metropolis step with draws of the proposal:
    HMC alone does not move mass between modes, so that their weights would not be learned. The gain
    ``adaptation`` of the step size is constant, because the density changes from step to step.
    """

    persistent: bool = eqx.field(default=True, static=True)
    count: int = at_least(1, 256, static=True)
    transitions: int = at_least(1, 4, static=True)
    jumps: bool = eqx.field(default=True, static=True)
    adaptation: float = at_least(0, 0.3, static=True)
    hmc: HMC = HMC()

    def init(self, problem: AscentProblem, *, key: RandomKey) -> ChainStates:
        step_size = jnp.asarray(self.hmc.first_step_size, problem.mean_feature.dtype)
        return ChainStates(self._rows(problem, key), jnp.log(step_size))

    def draw(self, problem: AscentProblem, tilt: Tilt, drawing: ChainStates, *, key: RandomKey) -> ModelDraws:
        start_key, move_key = jr.split(key)
        positions = drawing.positions if self.persistent else self._rows(problem, start_key)
        condition = jnp.zeros((self.count, 0))

        def transition(carry: Any, transition_key: RandomKey) -> tuple[Any, Any]:
            positions, log_size = carry
            hmc_key, jump_key = jr.split(transition_key)
            states = hmc_start(tilt, positions, condition)
            states, info = hmc_step(tilt, states, condition, jnp.exp(log_size), hmc_key, self.hmc)
            acceptance = jnp.mean(info.acceptance_rate)
            positions = states.position
            if self.jumps:
                positions = jump(tilt, problem.proposal, positions, jump_key)
            log_size = log_size + self.adaptation * (acceptance - self.hmc.target_acceptance)
            return (positions, log_size), (positions, acceptance)

        start, keys = (positions, drawing.log_step_size), jr.split(move_key, self.transitions)
        (positions, log_size), (path, acceptance) = jax.lax.scan(transition, start, keys)
        # Persistent chains contribute all their positions; restarted ones the last, farthest from the data.
        draws = path.reshape(-1, positions.shape[1]) if self.persistent else positions
        weights = jnp.full(len(draws), 1.0 / len(draws))
        return ModelDraws(ChainStates(positions, log_size), draws, weights, jnp.mean(acceptance))

    def _rows(self, problem: AscentProblem, key: RandomKey) -> Float[Array, "b d"]:
        return problem.sample.target[problem.sample.drawn(self.count, key=key)]


class ContrastiveDivergence(LikelihoodAscent):
    """Maximum likelihood by stochastic gradients with model moments from persistent or short-run chains.

    Short runs are biased: their draws are part data, part model, so that mass of f where no chain arrives is
    not seen. With few steps and no jumps they can lose a distant mode. The table of solvers in
    ``reproduction`` has the results of the defaults.
    """

    persistent: bool = True

    def default_ascent(self) -> Averaged:
        """Return the mean of the later iterates of steps with draws of chains."""
        return Averaged(NaturalAscent(Chains(persistent=self.persistent)))


class Annealing(AbstractDrawing):
    """Draws of the base, tempered to the model by sequential Monte Carlo; it has no state."""

    particles: int = at_least(1, 1024, static=True)
    stages: int = at_least(1, 40, static=True)

    def draw(self, problem: AscentProblem, tilt: Tilt, drawing: None, *, key: RandomKey) -> ModelDraws:
        base_key, temper_key = jr.split(key)
        starts = problem.base.sample(self.particles, key=base_key)
        outcome = tempered(tilt, starts, self.stages, key=temper_key)
        return ModelDraws(None, outcome.particles, outcome.weights, outcome.arrived.astype(starts.dtype))


class AnnealedLikelihood(LikelihoodAscent):
    """Maximum likelihood by few, long natural-gradient steps with moments by annealed importance sampling."""

    steps: int = at_least(0, 32)

    @property
    def uses_proposal(self) -> bool:
        return False

    def default_ascent(self) -> Averaged:
        """Return the mean of the later iterates of steps with annealed draws."""
        return Averaged(NaturalAscent(Annealing(), delay=5.0, memory=8.0))
