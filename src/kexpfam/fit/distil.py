"""Distillation of a fitted density into a fast sampler or importance proposal, where there is no grid.

A mixture is fitted to draws *of the density*; these are free, so that it does not overfit. Without
conditions, weighted draws from the best proposal so far are resampled and a mixture fitted to them is the
next proposal. With conditions, a mixture network is fitted to draws at and between the training conditions.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.fit.loop import AdamState, run
from kexpfam.fit.mixture import MixtureShape, fit_mixture
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import choose_each, effective_share, importance_nodes, resample, seed_from
from kexpfam.jax_settings import double, double_precision
from kexpfam.model.measures import AbstractMeasure, MixtureNetwork, Nodes, log_density_each, logsumexp
from kexpfam.settings import SettingsRecord, at_least


class Distillation(SettingsRecord):
    """Settings of the distillation of a density.

    Parameters
    ----------
    components : int
        Components of the mixture, without conditions.
    draws : int
        Draws that the mixture is fitted to.
    candidates : int
        Weighted draws that these are resampled from.
    rounds : int
        Rounds of improved proposals, at most.
    good_share : float
        Rounds end when this share of the candidates is effective. Half of them come from the base, so that a
        perfect proposal has a share of about one half.
    full_covariance_dims : int
        Components have full covariances up to this number of coordinates, diagonal ones beyond.
    network_components : int
        Components of the mixture network, which is used under conditions.
    width : int
        Units of each of its hidden layers.
    depth : int
        Its hidden layers.
    steps : int
        Steps of its training.
    batch_size : int
        Draws in a step.
    rate : float
        Adam's initial rate.
    conditions : int
        Conditions in the training set of the network.
    draws_per_condition : int
        Draws under each of them.
    nodes : int
        Importance draws that these are chosen from.
    interpolation : float
        Half of the conditions are moved towards another one by up to this share of the distance.
    """

    components: int = at_least(1, 64)
    draws: int = at_least(1, 20_000)
    candidates: int = at_least(1, 60_000)
    rounds: int = at_least(1, 3)
    network_components: int = at_least(1, 16)
    width: int = at_least(1, 64)
    depth: int = at_least(1, 2)
    steps: int = at_least(1, 800)
    conditions: int = at_least(1, 2048)
    draws_per_condition: int = at_least(1, 8)
    nodes: int = at_least(1, 4096)
    good_share: float = at_least(0, 0.45)
    full_covariance_dims: int = at_least(0, 5)
    interpolation: float = at_least(0, 0.5)
    rate: float = at_least(0, 5e-3)
    batch_size: int = at_least(1, 512)


def distil(problem: Problem, weights: AnyArray, *, settings: Distillation, key: RandomKey) -> AbstractMeasure:
    """Return a distribution close to ``p0 exp(f)``, under each condition if there are any."""
    distilled = _distil_network if problem.conditional else _distil_mixture
    return distilled(problem, np.asarray(weights), settings, key)


def _distil_mixture(
    problem: Problem, weights: np.ndarray, settings: Distillation, key: RandomKey
) -> AbstractMeasure:
    """Return the closest to the density among base, proposal and the distilled mixtures."""
    tilt, proposal = problem.tilt(weights), problem.proposal
    laws = [problem.base, proposal]
    diagonal = problem.sample.target.shape[1] > settings.full_covariance_dims
    for round_key in jr.split(key, settings.rounds):
        nodes_key, seed_key = jr.split(round_key)
        nodes = importance_nodes(problem.base, proposal, settings.candidates, key=nodes_key)
        log_ratio = tilt.values(nodes.points)
        seed = seed_from(seed_key)
        draws = resample(nodes, log_ratio, settings.draws, seed=seed)
        proposal = fit_mixture(draws, MixtureShape(settings.components, diagonal), seed=seed)
        laws.append(proposal)
        if effective_share(nodes.log_weights + log_ratio) > settings.good_share:
            break
    return nearest(laws, nodes, log_ratio)


def nearest(laws: list[AbstractMeasure], nodes: Nodes, log_ratio: np.ndarray) -> AbstractMeasure:
    """Return the law q of smallest ``KL(p || q)``, with p proportional to ``p0 exp(log_ratio)``."""
    exponents = nodes.log_weights + log_ratio
    masses = np.exp(exponents - logsumexp(exponents))
    live = masses > 0.0
    return max(laws, key=lambda law: float(masses[live] @ law.log_densities(nodes.points[live])))


def _distil_network(
    problem: Problem, weights: np.ndarray, settings: Distillation, key: RandomKey
) -> MixtureNetwork:
    draw_key, start_key, run_key = jr.split(key, 3)
    draws = conditional_draws(problem, weights, settings, key=draw_key)
    shape = {"components": settings.network_components, "width": settings.width, "depth": settings.depth}
    with double_precision():
        targets = draws.target.astype(float)
        start = MixtureNetwork.draw(draws.condition.shape[1], targets, key=start_key, **shape)
        state = AdamState.start(start)
    fitting = NetworkFit(settings.rate, settings.steps, settings.batch_size)
    options = {"steps": settings.steps, "key": run_key, "chunk": 200, "stage": "sampler"}
    return run(draws, fitting, state, **options).state.model


class ConditionalDraws(NamedTuple):
    """Draws of a conditional density and their conditions, in the network's precision."""

    condition: Float[np.ndarray, "n p"]
    target: Float[np.ndarray, "n d"]


def conditional_draws(
    problem: Problem, weights: np.ndarray, settings: Distillation, *, key: RandomKey
) -> ConditionalDraws:
    """Return draws of the density at and between training conditions, chosen among nodes by their mass."""
    nodes_key, seed_key = jr.split(key)
    rng = np.random.default_rng(seed_from(seed_key))
    sample, count, each = problem.sample, settings.conditions, settings.draws_per_condition
    seen, equal = np.asarray(sample.condition), sample.weight is None
    shares = None if equal else sample.shares
    # Equal weights keep the integer generator, whose stream differs from that of ``choice``.
    pick = lambda: rng.integers(len(seen), size=count) if equal else rng.choice(len(seen), count, p=shares)
    here, there = (seen[pick()] for _ in range(2))
    conditions = here + rng.uniform(0.0, settings.interpolation, (count, 1)) * (there - here)
    conditions[: count // 2] = here[: count // 2]
    nodes = problem.nodes(draws=settings.nodes, key=nodes_key)
    coefficients = problem.space.coefficients(weights, conditions)
    exponents = nodes.log_weights + coefficients @ problem.space.target.matrix(nodes.points).T
    masses = np.exp(exponents - logsumexp(exponents, axis=1)[:, None])
    chosen = choose_each(masses, rng.uniform(size=(count, each))).ravel()
    within = rng.uniform(-0.5, 0.5, (len(chosen), nodes.points.shape[1]))
    targets = nodes.points[chosen] + nodes.widths[chosen] * within
    return ConditionalDraws(np.repeat(conditions, each, 0).astype(np.float32), targets.astype(np.float32))


class NetworkFitHealth(NamedTuple):
    """The mean negative log density of a batch of draws."""

    cross_entropy: Float[Array, ""]


class NetworkFit(eqx.Module):
    """Maximum likelihood of a mixture network on draws, by Adam with a rate that falls over ``steps``."""

    rate: ScalarLike = eqx.field(converter=double)
    steps: ScalarLike = eqx.field(converter=lambda steps: jnp.asarray(float(steps)))
    batch_size: int = eqx.field(static=True)

    def step(
        self, draws: ConditionalDraws, state: AdamState, *, key: RandomKey
    ) -> tuple[AdamState, NetworkFitHealth]:
        """Return the state after one step on a batch of the draws."""
        rows = jr.randint(key, (self.batch_size,), 0, draws.target.shape[0])
        condition, target = draws.condition[rows], draws.target[rows]
        cost = lambda measure: -jnp.mean(log_density_each(measure, target, condition))
        state, value = state.descend(cost, self.rate * jnp.maximum(0.02, 1.0 - state.step / self.steps))
        return state, NetworkFitHealth(value)
