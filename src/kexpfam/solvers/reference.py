"""Mixtures distilled from a fitted density: where the sampler starts, and the proposal of every importance sum.

Fitting the mixture to draws *of the density*, not to the data, has no overfitting to fear: draws are free. Without conditions,
weighted draws from the best proposal so far are resampled, a mixture is fitted to them, and it becomes the next
proposal, until the proposals are good. With conditions, a mixture network is fitted to draws at the training conditions
and between them.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.measures import AbstractMeasure, Mixture
from kexpfam.nodes import effective_share, importance_nodes, resample
from kexpfam.references import MixtureNetwork
from kexpfam.solvers.loop import run
from kexpfam.solvers.task import Task, conditional_probabilities, integration_nodes
from kexpfam.transports import log_density_each

COMPONENTS = 64
DRAWS = 20_000
CANDIDATES = 60_000
ROUNDS = 3
# Half of the candidates come from the base on purpose, so a perfect proposal gives about one half.
GOOD_SHARE = 0.45
# Beyond this many coordinates a full covariance per component costs more time and draws than it is worth.
FULL_COVARIANCE_DIMS = 5

NETWORK = {"components": 16, "width": 64, "depth": 2}
# Conditions of the network's draws, and draws under each; the nodes they are drawn from where there is no grid.
CONDITIONS, DRAWS_PER_CONDITION, NETWORK_NODES = 2048, 8, 4096
# Conditions are moved towards another one by up to this share of the way, so that the network knows the space between them.
FARTHEST = 0.5
NETWORK_STEPS = 800


def distil(task: Task, weights, *, key: Key[Array, ""]) -> AbstractMeasure:
    """Return a measure close to ``p0 exp(f)``, under each condition if there are any."""
    return _distil_mixture(task, weights, key) if task.sample.condition.shape[1] == 0 else _distil_network(task, weights, key)


def _distil_mixture(task: Task, weights, key) -> Mixture:
    tilt = task.tilt(weights)
    proposal: AbstractMeasure = task.proposal
    diagonal = task.sample.target.shape[1] > FULL_COVARIANCE_DIMS
    for round_key in jr.split(key, ROUNDS):
        nodes_key, seed_key = jr.split(round_key)
        nodes = importance_nodes(task.base, proposal, CANDIDATES, key=nodes_key)
        log_ratio = tilt.values(nodes.points)
        seed = int(jr.randint(seed_key, (), 0, 2**31 - 1))
        draws = resample(nodes, log_ratio, DRAWS, seed=seed)
        proposal = mixture = Mixture.fitted(draws, components=COMPONENTS, diagonal=diagonal, seed=seed)
        if effective_share(nodes.log_weights + log_ratio) > GOOD_SHARE:
            break
    return mixture


def _distil_network(task: Task, weights, key) -> MixtureNetwork:
    nodes_key, seed_key, start_key, run_key = jr.split(key, 4)
    rng = np.random.default_rng(int(jr.randint(seed_key, (), 0, 2**31 - 1)))
    seen = np.asarray(task.sample.condition)
    here, there = (seen[rng.integers(len(seen), size=CONDITIONS)] for _ in range(2))
    conditions = here + rng.uniform(0.0, FARTHEST, (CONDITIONS, 1)) * (there - here)
    conditions[: CONDITIONS // 2] = here[: CONDITIONS // 2]
    nodes = integration_nodes(task, task.proposal, NETWORK_NODES, key=nodes_key)
    cumulative = np.cumsum(conditional_probabilities(task, weights, nodes, conditions), axis=1)
    levels = rng.uniform(size=(CONDITIONS, DRAWS_PER_CONDITION)) * cumulative[:, -1:]
    # One sorted search for all rows: row i's masses are shifted to the interval [i, i + 1).
    shifted = (cumulative / cumulative[:, -1:] + np.arange(CONDITIONS)[:, None]).ravel()
    wanted = (levels / cumulative[:, -1:] + np.arange(CONDITIONS)[:, None]).ravel()
    chosen = np.clip(np.searchsorted(shifted, wanted) % len(nodes.points), 0, len(nodes.points) - 1)
    targets = nodes.points[chosen] + nodes.widths[chosen] * rng.uniform(-0.5, 0.5, (len(chosen), nodes.points.shape[1]))
    draws = Draws(jnp.asarray(np.repeat(conditions, DRAWS_PER_CONDITION, 0), jnp.float32), jnp.asarray(targets, jnp.float32))
    start = MixtureNetwork.draw(seen.shape[1], targets, key=start_key, **NETWORK)
    distillation = Distillation()
    return run(draws, distillation, distillation.init(start), steps=NETWORK_STEPS, key=run_key, chunk=200).state.measure


class Draws(NamedTuple):
    """Draws of a conditional density and their conditions."""

    condition: Float[Array, "n p"]
    target: Float[Array, "n d"]


class DistillationState(eqx.Module):
    """The measure and its optimiser's moments."""

    measure: MixtureNetwork
    moments: optax.OptState
    step: Int[Array, ""]


class DistillationHealth(NamedTuple):
    """The mean negative log density of a batch of draws."""

    cross_entropy: Float[Array, ""]


class Distillation(eqx.Module):
    """Maximum likelihood of a measure on free draws, by Adam with a falling rate."""

    rate: ScalarLike = eqx.field(default=5e-3, converter=jnp.asarray)
    batch_size: int = eqx.field(default=512, static=True)

    def init(self, measure: MixtureNetwork) -> DistillationState:
        return DistillationState(measure, self._optimiser().init(eqx.filter(measure, eqx.is_array)), jnp.array(0))

    def step(
        self, draws: Draws, state: DistillationState, *, key: Key[Array, ""]
    ) -> tuple[DistillationState, DistillationHealth]:
        """Return the state after one step on a batch of the draws."""
        rows = jr.randint(key, (self.batch_size,), 0, draws.target.shape[0])
        condition, target = draws.condition[rows], draws.target[rows]
        cost = lambda measure: -jnp.mean(log_density_each(measure, target, condition))
        value, gradient = eqx.filter_value_and_grad(cost)(state.measure)
        updates, moments = self._optimiser().update(gradient, state.moments)
        rate = self.rate * jnp.maximum(0.02, 1.0 - state.step / NETWORK_STEPS)
        updates = jax.tree.map(lambda update: (-rate * update).astype(update.dtype), updates)
        return DistillationState(eqx.apply_updates(state.measure, updates), moments, state.step + 1), DistillationHealth(value)

    def _optimiser(self):
        return optax.chain(optax.clip_by_global_norm(5.0), optax.scale_by_adam())
