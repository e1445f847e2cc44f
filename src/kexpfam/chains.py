"""Markov chains that leave a tilted density invariant: moves by HMC, jumps to a proposal, and tempering from the base.

Every transition is BlackJAX's; here is only how many of them run side by side, under which condition and at which step size.
"""

from typing import NamedTuple

import blackjax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from blackjax.smc import resampling
from jaxtyping import Array, Bool, Float, Key

from kexpfam.measures import AbstractMeasure
from kexpfam.potentials import Tilt

LEAPFROG_STEPS = 6
TARGET_ACCEPTANCE = 0.8
TUNING_STEPS, FIRST_STEP_SIZE = 40, 0.05
# Tempering keeps this share of the particles effective at each stage, and moves them so often.
TEMPERING_SHARE, TEMPERING_MOVES = 0.7, 5


def hmc_start(tilt: Tilt, starts: Float[Array, "b d"], condition: Float[Array, "b p"]):
    """Return the states of chains at their starts, one per condition."""
    return jax.vmap(lambda x, c: blackjax.hmc.init(x, lambda y: tilt.log_unnormalised(y, c)))(starts, condition)


def hmc_step(tilt: Tilt, states, condition: Float[Array, "b p"], step_size, key: Key[Array, ""]):
    """Return the states after one transition, and what BlackJAX says of it."""

    def step(row_key, state, row_condition):
        log_density = lambda x: tilt.log_unnormalised(x, row_condition)
        mass = jnp.ones(state.position.size)
        algorithm = blackjax.hmc(log_density, step_size, mass, num_integration_steps=LEAPFROG_STEPS)
        return algorithm.step(row_key, state)

    return jax.vmap(step)(jr.split(key, states.position.shape[0]), states, condition)


def jump(tilt: Tilt, proposal: AbstractMeasure, positions: Float[Array, "b d"], key: Key[Array, ""]) -> Float[Array, "b d"]:
    """Return the positions after each was offered an independent draw, of base or proposal, by Metropolis' rule.

    Draws of the base find what f has raised where no chain has been; those of the proposal are accepted the most.
    """
    log_density = lambda x: tilt.log_unnormalised(x, jnp.zeros(0))
    base_key, proposal_key, coin_key, accept_key = jr.split(key, 4)
    count = positions.shape[0]
    coins = jr.bernoulli(coin_key, shape=(count, 1))
    candidates = jnp.where(coins, tilt.base.sample(count, key=base_key), proposal.sample(count, key=proposal_key))
    # The law of the candidates up to a factor of two, which cancels.
    log_law = lambda origin, target: jnp.logaddexp(
        tilt.base.log_density(target.position), proposal.log_density(target.position)
    )

    def step(row_key, position, candidate):
        algorithm = blackjax.irmh(log_density, lambda _: candidate, log_law)
        return algorithm.step(row_key, algorithm.init(position))[0].position

    return jax.vmap(step)(jr.split(accept_key, count), positions, candidates)


@eqx.filter_jit
def tuned_step_size(tilt: Tilt, starts, condition, key):
    """Return the HMC step size whose mean acceptance over many chains is near its target (Robbins-Monro on its log)."""

    def body(carry, inputs):
        states, log_size = carry
        index, step_key = inputs
        states, info = hmc_step(tilt, states, condition, jnp.exp(log_size), step_key)
        gain = 2.0 / (1.0 + index) ** 0.6
        return (states, log_size + gain * (jnp.mean(info.acceptance_rate) - TARGET_ACCEPTANCE)), None

    inputs = (jnp.arange(TUNING_STEPS), jr.split(key, TUNING_STEPS))
    (_, log_size), _ = jax.lax.scan(body, (hmc_start(tilt, starts, condition), jnp.log(FIRST_STEP_SIZE)), inputs)
    return jnp.exp(log_size)


@eqx.filter_jit
def moved(tilt: Tilt, starts, condition, step_size, keys):
    """Return the positions after one transition per key."""
    states, _ = jax.lax.scan(
        lambda states, key: (hmc_step(tilt, states, condition, step_size, key)[0], None),
        hmc_start(tilt, starts, condition),
        keys,
    )
    return states.position


class Tempered(NamedTuple):
    """Particles, their weights (the last stage's, which sum to one), ``log Z``, and whether temperature 1 was reached."""

    particles: Float[Array, "b d"]
    weights: Float[Array, " b"]
    log_partition: Float[Array, ""]
    arrived: Bool[Array, ""]


def tempered(tilt: Tilt, starts: Float[Array, "b d"], stages: int, *, key: Key[Array, ""]) -> Tempered:
    """Return draws of the base carried to the density by tempered SMC.

    This is annealed importance sampling with temperatures as needed and with resampling between them.
    """
    empty = jnp.zeros(0)
    # HMC in units of the base measure's spread, shrunk so that narrow structure is not jumped over.
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
        target_ess=TEMPERING_SHARE,
    )
    start = blackjax.smc.tempered.init(starts)._replace(tempering_param=jnp.asarray(0.0))

    def body(carry, step_key):
        def move(carry):
            state, total = carry
            state, info = kernel(step_key, state, TEMPERING_MOVES, parameters)
            return state, total + info.log_likelihood_increment

        return jax.lax.cond(carry[0].tempering_param < 1.0, move, lambda carry: carry, carry), None

    (state, total), _ = jax.lax.scan(body, (start, jnp.asarray(0.0)), jr.split(key, stages))
    return Tempered(state.particles, state.weights, total, state.tempering_param >= 1.0)
