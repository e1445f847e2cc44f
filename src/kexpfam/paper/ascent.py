"""The classical way to the penalised maximum likelihood: climb its gradient, with the model's moments from draws of the model.

The gradient is ``E_data[features] - E_model[features] - eta f`` (paper, section 2). Where the draws come from is what the
classical methods differ in; here is what they share. Steps are natural: the gradient is solved against the covariance of
the model's features plus eta, which is the curvature of the likelihood, and no step is longer than a trust radius in
the same metric, so that one step changes the density by a bounded number of nats on any data and in any units of f.
"""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.convex import best_sampler, shortfall
from kexpfam.fit.loop import run
from kexpfam.fit.problem import Problem, Solution, Status
from kexpfam.model.density import Tilt
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.spaces import FeatureSpace

__all__ = ["AbstractDrawing", "AscentProblem", "Drawn", "Health", "NaturalAscent", "Point", "State", "ascend"]

# Draws of the base for the curvature at f = 0.
FIRST_DRAWS = 8192
# Steps between reports and checkpoints; multiples of it need one compiled program.
CHUNK = 8
# A run whose f is this close (nats) to its optimum has converged, if there are draws enough to judge it so closely.
OPTIMAL_SHORTFALL, MOST_NOISE, JUDGING_DRAWS = 0.01, 0.1, 16384


class AscentProblem(eqx.Module):
    """What is climbed; every array in here is fixed while a solver runs."""

    data: Float[Array, "n d"]
    mean_feature: Float[Array, " r"]
    space: FeatureSpace
    base: AbstractMeasure
    proposal: AbstractMeasure
    rkhs_penalty: Float[Array, ""]
    weight: Float[Array, " n"] | None = None

    @staticmethod
    def of(problem: Problem) -> "AscentProblem":
        """Return what is climbed for a problem without conditions."""
        sample, space = problem.sample, problem.space
        mean = jnp.asarray(weighted_mean(space.matrix(sample.target, sample.condition), sample.weight))
        penalty = jnp.asarray(problem.rkhs_penalty, mean.dtype)
        weight = None if sample.weight is None else jnp.asarray(sample.weight)
        return AscentProblem(
            jnp.asarray(sample.target), mean, space, problem.base, problem.proposal, penalty, weight
        )

    def tilt(self, weights: Float[Array, " r"]) -> Tilt:
        """Return the unnormalised density of f with these weights."""
        return Tilt(self.space, weights, self.base)

    def features(self, points: Float[Array, "b d"]) -> Float[AnyArray, "b r"]:
        """Return the features of each point."""
        return self.space.features(points, jnp.zeros((points.shape[0], 0)))


class Point(eqx.Module):
    """What is sought."""

    f_weights: Float[Array, " r"]


class State(eqx.Module):
    """What the next step needs; ``drawing`` is whatever the source of draws carries on."""

    point: Point
    curvature: Float[Array, "r r"]
    drawing: Any
    step: Int[Array, ""]


class Health(NamedTuple):
    """The length of the Newton step in the metric of the curvature (its draws' noise included), and the chains' acceptance."""

    newton_length: Float[Array, ""]
    acceptance: Float[Array, ""]


class Drawn(NamedTuple):
    """What the next step needs, draws with weights that sum to one, and the share of moves that were accepted."""

    drawing: Any
    points: Float[Array, "b d"]
    weights: Float[Array, " b"]
    acceptance: Float[Array, ""]


class AbstractDrawing(eqx.Module):
    """Where draws of the model come from."""

    @abc.abstractmethod
    def init(self, problem: AscentProblem, *, key: Key[Array, ""]) -> Any:
        """Return what the first step needs."""

    @abc.abstractmethod
    def draw(self, problem: AscentProblem, tilt: Tilt, drawing: Any, *, key: Key[Array, ""]) -> Drawn:
        """Return draws of the tilted density."""


class NaturalAscent(eqx.Module):
    r"""Stochastic natural gradients: :math:`w \leftarrow w + \gamma_t (\widehat{Cov}_{p_f}[\phi] + \eta I)^{-1} \hat g`.

    ``trust`` is the longest step, in the metric of the curvature (nats of KL are half its square). The gains fall as
    ``(1 + t / delay)^-0.6``: fast enough to work off the noise, slow enough for the mean of the iterates to be efficient.
    The curvature is an exponential moving average over about ``memory`` steps: the draws of one are too few to invert.
    """

    drawing: AbstractDrawing
    trust: ScalarLike = eqx.field(default=0.5, converter=jnp.asarray)
    delay: ScalarLike = eqx.field(default=20.0, converter=jnp.asarray)
    memory: ScalarLike = eqx.field(default=20.0, converter=jnp.asarray)

    def init(self, problem: AscentProblem, f_weights: Float[Array, " r"], *, key: Key[Array, ""]) -> State:
        """Return the start at a given f, with the curvature of f = 0."""
        base_key, drawing_key = jr.split(key)
        features = problem.features(problem.base.sample(FIRST_DRAWS, key=base_key))
        drawing = self.drawing.init(problem, key=drawing_key)
        _, curvature = _moments(features, jnp.full(FIRST_DRAWS, 1.0 / FIRST_DRAWS))
        return State(Point(f_weights), curvature, drawing, jnp.array(0))

    def step(self, problem: AscentProblem, state: State, *, key: Key[Array, ""]) -> tuple[State, Health]:
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
        state = State(Point(weights + stride * direction), curvature, drawn.drawing, state.step + 1)
        return state, Health(length, drawn.acceptance)

    def schedule(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the relative size of a step."""
        return (1.0 + step / self.delay) ** -0.6

    def answer(self, state: State) -> Point:
        """Return the point that a run hands back."""
        return state.point


def ascend(problem: Problem, solver: Any, ascent: Any, *, key: Key[Array, ""], **watchers: Any) -> Solution:
    """Return the end of ``solver.steps`` of the ascent from f = 0, with the best sampler at hand.

    ``watchers`` are the solver's report and checkpoint.
    """
    init_key, run_key, nodes_key, sampler_key, judge_key = jr.split(key, 5)
    posed = AscentProblem.of(problem)
    state = ascent.init(posed, jnp.zeros(problem.space.size), key=init_key)
    outcome = run(
        posed, ascent, state, steps=solver.steps, key=run_key, stage="likelihood", chunk=CHUNK, **watchers
    )
    tilt = problem.tilt(ascent.answer(outcome.state).f_weights)
    sampler = best_sampler(problem, tilt, problem.nodes(key=nodes_key), solver.distillation, key=sampler_key)
    gap = shortfall(problem, tilt, sampler.reference, JUDGING_DRAWS, key=judge_key)
    optimal = gap.value < OPTIMAL_SHORTFALL and gap.noise < MOST_NOISE
    status = Status.CONVERGED if outcome.status is Status.RAN_ALL_STEPS and optimal else outcome.status
    return Solution(
        tilt, sampler, status, outcome.trace, {"shortfall": gap.value, "shortfall_noise": gap.noise}
    )


def _moments(
    features: Float[AnyArray, "b r"], weights: Float[Array, " b"]
) -> tuple[Float[Array, " r"], Float[Array, "r r"]]:
    """Return the weighted mean and covariance of features."""
    mean = weights @ features
    centred = features - mean
    return mean, centred.T @ (weights[:, None] * centred)
