"""Laws distilled from a fitted density: fast samplers, and proposals for importance sums, where there is no grid.

Fitting a mixture to draws *of the density*, not to the data, has no overfitting to fear: draws are free. Without conditions,
weighted draws from the best proposal so far are resampled, a mixture is fitted to them, and it becomes the next
proposal, until the proposals are good. With conditions, a mixture network is fitted to draws at the training conditions
and between them.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray
from kexpfam.fit.loop import optimiser, run, stepped
from kexpfam.fit.mixture import MixtureShape, fit_mixture
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import effective_share, importance_nodes, resample, seed_from
from kexpfam.jax_settings import double_precision
from kexpfam.model.measures import AbstractMeasure, MixtureNetwork, Nodes, log_density_each, logsumexp
from kexpfam.settings import SettingsRecord, check_at_least

__all__ = ["Distillation", "distil"]

# Half of the candidates come from the base on purpose, so a perfect proposal gives about one half.
GOOD_SHARE = 0.45
# Beyond this many coordinates a full covariance per component costs more time and draws than it is worth.
FULL_COVARIANCE_DIMS = 5
# Conditions are moved towards another one by up to this share of the way, so that the network knows the space between them.
FARTHEST = 0.5


class Distillation(SettingsRecord):
    """How a law is distilled from a density.

    Parameters
    ----------
    components, draws, candidates, rounds : int
        Without conditions: components of the mixture, draws it is fitted to, weighted candidates these are chosen
        from, and rounds of better and better proposals at most.
    network_components, width, depth, steps : int
        Under conditions: components of the mixture network, its hidden layers, and the steps of its training.
    conditions, draws_per_condition, nodes : int
        Conditions that the network learns from, draws under each, and the importance draws they are chosen from.
    """

    components: int = 64
    draws: int = 20_000
    candidates: int = 60_000
    rounds: int = 3
    network_components: int = 16
    width: int = 64
    depth: int = 2
    steps: int = 800
    conditions: int = 2048
    draws_per_condition: int = 8
    nodes: int = 4096

    def __check_init__(self) -> None:
        check_at_least(self, 1, *self.__dataclass_fields__)


def distil(
    problem: Problem, weights: AnyArray, *, settings: Distillation | None = None, key: Key[Array, ""]
) -> AbstractMeasure:
    """Return a law close to ``p0 exp(f)``, under each condition if there are any."""
    settings = settings or Distillation()
    return (_distil_network if problem.conditional else _distil_mixture)(
        problem, np.asarray(weights), settings, key
    )


def _distil_mixture(
    problem: Problem, weights: np.ndarray, settings: Distillation, key: Key[Array, ""]
) -> AbstractMeasure:
    """Return the nearest to the density of base, proposal and the mixtures distilled from it."""
    tilt, proposal, laws = problem.tilt(weights), problem.proposal, [problem.base, problem.proposal]
    diagonal = problem.sample.target.shape[1] > FULL_COVARIANCE_DIMS
    for round_key in jr.split(key, settings.rounds):
        nodes_key, seed_key = jr.split(round_key)
        nodes = importance_nodes(problem.base, proposal, settings.candidates, key=nodes_key)
        log_ratio = tilt.values(nodes.points)
        seed = seed_from(seed_key)
        draws = resample(nodes, log_ratio, settings.draws, seed=seed)
        proposal = fit_mixture(draws, MixtureShape(settings.components, diagonal), seed=seed)
        laws.append(proposal)
        if effective_share(nodes.log_weights + log_ratio) > GOOD_SHARE:
            break
    return nearest(laws, nodes, log_ratio)


def nearest(laws: list[AbstractMeasure], nodes: Nodes, log_ratio: np.ndarray) -> AbstractMeasure:
    """Return the law q of smallest ``KL(p || q)`` for p proportional to ``p0 exp(log_ratio)``: of highest ``E_p[log q]``."""
    exponents = nodes.log_weights + log_ratio
    masses = np.exp(exponents - logsumexp(exponents))
    live = masses > 0.0
    return max(laws, key=lambda law: float(masses[live] @ law.log_densities(nodes.points[live])))


def _distil_network(
    problem: Problem, weights: np.ndarray, settings: Distillation, key: Key[Array, ""]
) -> MixtureNetwork:
    draw_key, start_key, run_key = jr.split(key, 3)
    draws = conditional_draws(problem, weights, settings, key=draw_key)
    shape = {"components": settings.network_components, "width": settings.width, "depth": settings.depth}
    with double_precision():
        start = MixtureNetwork.draw(
            draws.condition.shape[1], draws.target.astype(float), key=start_key, **shape
        )
        fitting = NetworkFit(steps=settings.steps)
        state = fitting.init(start)
    options = {"steps": settings.steps, "key": run_key, "chunk": 200, "stage": "sampler"}
    return run(draws, fitting, state, **options).state.measure


class Draws(NamedTuple):
    """Draws of a conditional density and their conditions, in the network's precision."""

    condition: Float[np.ndarray, "n p"]
    target: Float[np.ndarray, "n d"]


def conditional_draws(
    problem: Problem, weights: np.ndarray, settings: Distillation, *, key: Key[Array, ""]
) -> Draws:
    """Return draws of the density under training conditions and conditions between them, chosen among nodes by their mass."""
    nodes_key, seed_key = jr.split(key)
    rng = np.random.default_rng(seed_from(seed_key))
    sample, count, each = problem.sample, settings.conditions, settings.draws_per_condition
    seen, equal = np.asarray(sample.condition), sample.weight is None
    pick = lambda: (
        rng.integers(len(seen), size=count) if equal else rng.choice(len(seen), count, p=sample.shares)
    )
    here, there = (seen[pick()] for _ in range(2))
    conditions = here + rng.uniform(0.0, FARTHEST, (count, 1)) * (there - here)
    conditions[: count // 2] = here[: count // 2]
    nodes = problem.nodes(draws=settings.nodes, key=nodes_key)
    coefficients = problem.space.coefficients(weights, conditions)
    exponents = nodes.log_weights + coefficients @ problem.space.target.matrix(nodes.points).T
    cumulative = np.cumsum(np.exp(exponents - logsumexp(exponents, axis=1)[:, None]), axis=1)
    # One sorted search for all rows: row i's masses are shifted to the interval [i, i + 1).
    rows = np.arange(count)[:, None]
    shifted = (cumulative / cumulative[:, -1:] + rows).ravel()
    wanted = (rng.uniform(size=(count, each)) + rows).ravel()
    chosen = np.searchsorted(shifted, wanted) % len(nodes.points)
    targets = nodes.points[chosen] + nodes.widths[chosen] * rng.uniform(
        -0.5, 0.5, (len(chosen), nodes.points.shape[1])
    )
    return Draws(np.repeat(conditions, each, 0).astype(np.float32), targets.astype(np.float32))


class NetworkFitState(eqx.Module):
    """The law and its optimiser's moments."""

    measure: MixtureNetwork
    moments: Any
    step: Int[Array, ""]


class NetworkFitHealth(NamedTuple):
    """The mean negative log density of a batch of draws."""

    cross_entropy: Float[Array, ""]


class NetworkFit(eqx.Module):
    """Maximum likelihood of a law on free draws, by Adam with a rate that falls over ``steps``."""

    rate: ScalarLike = eqx.field(default=5e-3, converter=jnp.asarray)
    steps: ScalarLike = eqx.field(default=800.0, converter=jnp.asarray)
    batch_size: int = eqx.field(default=512, static=True)

    def init(self, measure: MixtureNetwork) -> NetworkFitState:
        """Return the start at a given law."""
        return NetworkFitState(measure, optimiser().init(eqx.filter(measure, eqx.is_array)), jnp.array(0))

    def step(
        self, draws: Draws, state: NetworkFitState, *, key: Key[Array, ""]
    ) -> tuple[NetworkFitState, NetworkFitHealth]:
        """Return the state after one step on a batch of the draws."""
        rows = jr.randint(key, (self.batch_size,), 0, draws.target.shape[0])
        condition, target = draws.condition[rows], draws.target[rows]
        cost = lambda measure: -jnp.mean(log_density_each(measure, target, condition))
        value, gradient = eqx.filter_value_and_grad(cost)(state.measure)
        updates, moments = optimiser().update(gradient, state.moments)
        rate = self.rate * jnp.maximum(0.02, 1.0 - state.step / self.steps)
        return NetworkFitState(
            stepped(state.measure, updates, -rate), moments, state.step + 1
        ), NetworkFitHealth(value)
