"""Markov chains that leave a tilted density invariant: HMC, independent Metropolis jumps, and tempered SMC.

Every transition is BlackJAX's. This module sets the number of chains, their conditions and their step sizes.
"""

from typing import Any, NamedTuple

import blackjax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from blackjax.mcmc.hmc import HMCInfo, HMCState
from blackjax.smc import resampling
from jaxtyping import Array, Bool, Float, Key, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.integrate.nodes import (
    RESAMPLING_SHARE,
    Integration,
    effective_share,
    importance_nodes,
    resample,
    seed_from,
)
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Sampler, Tilt, TiltedDensity
from kexpfam.model.measures import AbstractMeasure
from kexpfam.settings import SettingsRecord, above, at_least, between

# Weighted draws per start of a chain, without and under conditions. With few of them, the noise of their
# weights changes the proportions of the modes.
CANDIDATES, CONDITIONAL_CANDIDATES = 16, 4


class HMC(SettingsRecord):
    """Settings of Hamiltonian Monte Carlo."""

    leapfrog_steps: int = at_least(1, 6)  # of a transition
    target_acceptance: float = between(0, 1, 0.8)  # mean acceptance rate that the step size is tuned to
    first_step_size: float = above(0, 0.05)  # before tuning
    tuning_steps: int = at_least(1, 40)  # transitions that the step size is tuned on
    tuning_chains: int = at_least(1, 200)  # chains that it is tuned on, at most
    least_chains: int = at_least(1, 64)  # of refined draws


def hmc_start(tilt: Tilt, starts: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"]) -> HMCState:
    """Return the states of chains at their starts, one per condition."""
    start = lambda x, row: blackjax.hmc.init(x, lambda y: tilt.log_unnormalised(y, row))
    return jax.vmap(start)(starts, condition)


def hmc_step(
    tilt: Tilt,
    states: HMCState,
    condition: Float[AnyArray, "b p"],
    step_size: ScalarLike,
    key: RandomKey,
    settings: HMC | None = None,
) -> tuple[HMCState, HMCInfo]:
    """Return the states after one transition, and BlackJAX's information about it."""
    leapfrog_steps = (settings or HMC()).leapfrog_steps

    def step(row_key: RandomKey, state: HMCState, row: Float[Array, " p"]) -> tuple[HMCState, HMCInfo]:
        log_density = lambda x: tilt.log_unnormalised(x, row)
        mass = jnp.ones(state.position.size)
        algorithm = blackjax.hmc(log_density, step_size, mass, num_integration_steps=leapfrog_steps)
        return algorithm.step(row_key, state)

    return jax.vmap(step)(jr.split(key, states.position.shape[0]), states, condition)


def jump(
    tilt: Tilt, proposal: AbstractMeasure, positions: Float[Array, "b d"], key: RandomKey
) -> Float[Array, "b d"]:
    """Return the positions after one independent Metropolis step with draws of the base or the proposal.

    Draws of the base reach regions that no chain has visited; those of the proposal are accepted more often.
    """
    log_density = lambda x: tilt.log_unnormalised(x, jnp.zeros(0))
    base_key, proposal_key, coin_key, accept_key = jr.split(key, 4)
    count = positions.shape[0]
    draws = tilt.base.sample(count, key=base_key), proposal.sample(count, key=proposal_key)
    candidates = jnp.where(jr.bernoulli(coin_key, shape=(count, 1)), *draws)
    # The density of the candidates up to a factor of two, which cancels.
    log_candidate_density = lambda origin, target: jnp.logaddexp(
        tilt.base.log_density(target.position), proposal.log_density(target.position)
    )

    def step(
        row_key: RandomKey, position: Float[Array, " d"], candidate: Float[Array, " d"]
    ) -> Float[Array, " d"]:
        algorithm = blackjax.irmh(log_density, lambda _: candidate, log_candidate_density)
        return algorithm.step(row_key, algorithm.init(position))[0].position

    return jax.vmap(step)(jr.split(accept_key, count), positions, candidates)


@eqx.filter_jit
def tuned_step_size(
    tilt: Tilt, starts: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"], key: RandomKey
) -> Float[Array, ""]:
    """Return the HMC step size with the target acceptance rate, by Robbins-Monro steps on its logarithm."""
    settings = HMC()

    def body(carry: Any, inputs: Any) -> tuple[Any, None]:
        states, log_size = carry
        index, step_key = inputs
        states, info = hmc_step(tilt, states, condition, jnp.exp(log_size), step_key, settings)
        excess = jnp.mean(info.acceptance_rate) - settings.target_acceptance
        return (states, log_size + 2.0 / (1.0 + index) ** 0.6 * excess), None

    inputs = (jnp.arange(settings.tuning_steps), jr.split(key, settings.tuning_steps))
    start = (hmc_start(tilt, starts, condition), jnp.log(settings.first_step_size))
    (_, log_size), _ = jax.lax.scan(body, start, inputs)
    return jnp.exp(log_size)


@eqx.filter_jit
def moved(
    tilt: Tilt,
    starts: Float[AnyArray, "b d"],
    condition: Float[AnyArray, "b p"],
    step_size: ScalarLike,
    keys: Key[Array, " n"],
) -> Float[Array, "b d"]:
    """Return the positions after one transition per key."""
    step = lambda states, key: (hmc_step(tilt, states, condition, step_size, key)[0], None)
    return jax.lax.scan(step, hmc_start(tilt, starts, condition), keys)[0].position


class Tempered(NamedTuple):
    """Particles, their normalised weights, ``log Z``, and whether temperature 1 was reached."""

    particles: Float[Array, "b d"]
    weights: Float[Array, " b"]
    log_partition: Float[Array, ""]
    arrived: Bool[Array, ""]


def tempered(
    tilt: Tilt,
    starts: Float[Array, "b d"],
    stages: int,
    *,
    settings: Integration | None = None,
    key: RandomKey,
) -> Tempered:
    """Return draws of the base carried to the density by tempered SMC.

    This is annealed importance sampling with adaptive temperatures and resampling between them.
    """
    settings, empty = settings or Integration(), jnp.zeros(0)
    # Step sizes are in units of the base's spread, and small against narrow structure of the density.
    parameters = {
        "step_size": jnp.full((1,), 0.1),
        "inverse_mass_matrix": jnp.ones((1, starts.shape[1])),
        "num_integration_steps": jnp.full((1,), 5),
    }
    kernel = blackjax.smc.adaptive_tempered.build_kernel(
        logprior_fn=tilt.base.log_density,
        loglikelihood_fn=lambda x: tilt.f(x[None], empty[None])[0],
        mcmc_step_fn=blackjax.hmc.build_kernel(),
        mcmc_init_fn=blackjax.hmc.init,
        resampling_fn=resampling.systematic,
        target_ess=settings.smc_share,
    )
    start = blackjax.smc.tempered.init(starts)._replace(tempering_param=jnp.asarray(0.0))

    def body(carry: Any, step_key: RandomKey) -> tuple[Any, None]:
        def move(carry: Any) -> Any:
            state, total = carry
            state, info = kernel(step_key, state, settings.smc_moves, parameters)
            return state, total + info.log_likelihood_increment

        return jax.lax.cond(carry[0].tempering_param < 1.0, move, lambda carry: carry, carry), None

    (state, total), _ = jax.lax.scan(body, (start, jnp.asarray(0.0)), jr.split(key, stages))
    return Tempered(state.particles, state.weights, total, state.tempering_param >= 1.0)


def refine(
    density: TiltedDensity, count: int, steps: int, X: np.ndarray | None = None, *, key: RandomKey
) -> np.ndarray:
    """Return draws of the density: the sampler's, resampled by their weights and moved by ``steps`` of HMC.

    The shape is (count, d), or (rows of X, count, d) under conditions, in data units.
    """
    refine_key, rest_key = jr.split(key)
    # The number of chains is rounded up to a power of two, so that few programs are compiled.
    rounded = lambda count: 1 << (max(count, HMC().least_chains) - 1).bit_length()
    if not density.conditional or X is None:
        draws = refined(density.tilt, density.sampler, rounded(count), steps, key=refine_key)
        return density.in_data_units(draws[:count], key=rest_key)
    condition = np.repeat(density.inputs.to_model(X), count, axis=0)
    chains = np.minimum(np.arange(rounded(len(condition))), len(condition) - 1)
    draws = refined_each(density.tilt, density.sampler, condition[chains], steps, key=refine_key)
    draws = draws[: len(condition)]
    return density.in_data_units(draws.reshape(-1, count, draws.shape[1]), key=rest_key)


def refined(tilt: Tilt, sampler: Sampler, count: int, steps: int, *, key: RandomKey) -> np.ndarray:
    """Return draws of a tilted density without conditions, in model units.

    Weighted draws of base and reference are resampled if enough of them are effective; otherwise the chains
    start at draws of the sampler. Then ``steps`` transitions of tuned HMC leave the density invariant.
    """
    nothing = np.zeros((count, 0))
    nodes_key, draw_key, seed_key, tune_key, move_key = jr.split(key, 5)
    nodes = importance_nodes(tilt.base, sampler.reference, CANDIDATES * count, key=nodes_key)
    log_ratio = tilt.values(nodes.points)
    if effective_share(nodes.log_weights + log_ratio) > RESAMPLING_SHARE:
        starts = resample(nodes, log_ratio, count, seed=seed_from(seed_key))
    else:
        starts = sampler.weighted_draws(nothing, key=draw_key).points
    return walked(tilt, starts, nothing, steps, tune_key, move_key)


def refined_each(
    tilt: Tilt, sampler: Sampler, condition: np.ndarray, steps: int, *, key: RandomKey
) -> np.ndarray:
    """Return one draw of the tilted density under each condition, in model units.

    Each chain starts at a draw of the sampler, chosen among a few by weight, and is moved by tuned HMC.
    """
    draw_key, choose_key, tune_key, move_key = jr.split(key, 4)
    repeated = np.repeat(condition, CONDITIONAL_CANDIDATES, axis=0)
    draws = sampler.weighted_draws(repeated, key=draw_key)
    log_ratio = tilt.log_values(draws.points, repeated) - draws.log_density
    chosen = np.asarray(jr.categorical(choose_key, jnp.asarray(log_ratio.reshape(len(condition), -1))))
    points = draws.points.reshape(len(condition), CONDITIONAL_CANDIDATES, -1)
    return walked(tilt, points[np.arange(len(condition)), chosen], condition, steps, tune_key, move_key)


def walked(
    tilt: Tilt,
    starts: np.ndarray,
    condition: np.ndarray,
    steps: int,
    tune_key: RandomKey,
    move_key: RandomKey,
) -> np.ndarray:
    """Return the positions of chains after ``steps`` transitions of tuned HMC, each under its condition."""
    if steps == 0:
        return starts
    rows = np.linspace(0, len(starts) - 1, min(HMC().tuning_chains, len(starts))).astype(int)
    with double_precision():
        step_size = tuned_step_size(tilt, starts[rows], condition[rows], tune_key)
        return np.asarray(moved(tilt, starts, condition, step_size, jr.split(move_key, steps)))
