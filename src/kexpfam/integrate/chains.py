"""Markov chains that leave a tilted density invariant: moves by HMC, jumps to a proposal, and tempering from the base.

Every transition is BlackJAX's; here is only how many of them run side by side, under which condition and at which step size.
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

from kexpfam.data.sample import AnyArray
from kexpfam.integrate.nodes import effective_share, importance_nodes, resample, seed_from
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Sampler, Tilt, TiltedDensity
from kexpfam.model.measures import AbstractMeasure

__all__ = [
    "Tempered",
    "hmc_start",
    "hmc_step",
    "jump",
    "moved",
    "refine",
    "tempered",
    "tuned_step_size",
    "walked",
]

LEAPFROG_STEPS = 6
TARGET_ACCEPTANCE = 0.8
TUNING_STEPS, FIRST_STEP_SIZE = 40, 0.05
# Tempering keeps this share of the particles effective at each stage, and moves them so often.
TEMPERING_SHARE, TEMPERING_MOVES = 0.7, 5
# Importance resampling is used as long as this share of the weighted draws is effective.
RESAMPLING_SHARE = 0.05
# Weighted draws among which one is chosen: with few, the chance in their weights shows in the shares of the modes. Under
# conditions each has candidates of its own, and fewer have to do.
CANDIDATES_PER_DRAW, CANDIDATES_PER_CONDITION = 16, 4
TUNING_CHAINS = 200


def hmc_start(tilt: Tilt, starts: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"]) -> HMCState:
    """Return the states of chains at their starts, one per condition."""
    return jax.vmap(lambda x, c: blackjax.hmc.init(x, lambda y: tilt.log_unnormalised(y, c)))(
        starts, condition
    )


def hmc_step(
    tilt: Tilt,
    states: HMCState,
    condition: Float[AnyArray, "b p"],
    step_size: ScalarLike,
    key: Key[Array, ""],
) -> tuple[HMCState, HMCInfo]:
    """Return the states after one transition, and what BlackJAX says of it."""

    def step(
        row_key: Key[Array, ""], state: HMCState, row_condition: Float[Array, " p"]
    ) -> tuple[HMCState, HMCInfo]:
        log_density = lambda x: tilt.log_unnormalised(x, row_condition)
        mass = jnp.ones(state.position.size)
        algorithm = blackjax.hmc(log_density, step_size, mass, num_integration_steps=LEAPFROG_STEPS)
        return algorithm.step(row_key, state)

    return jax.vmap(step)(jr.split(key, states.position.shape[0]), states, condition)


def jump(
    tilt: Tilt, proposal: AbstractMeasure, positions: Float[Array, "b d"], key: Key[Array, ""]
) -> Float[Array, "b d"]:
    """Return the positions after each was offered an independent draw, of base or proposal, by Metropolis' rule.

    Draws of the base find what f has raised where no chain has been; those of the proposal are accepted the most.
    """
    log_density = lambda x: tilt.log_unnormalised(x, jnp.zeros(0))
    base_key, proposal_key, coin_key, accept_key = jr.split(key, 4)
    count = positions.shape[0]
    coins = jr.bernoulli(coin_key, shape=(count, 1))
    candidates = jnp.where(
        coins, tilt.base.sample(count, key=base_key), proposal.sample(count, key=proposal_key)
    )
    # The law of the candidates up to a factor of two, which cancels.
    log_law = lambda origin, target: jnp.logaddexp(
        tilt.base.log_density(target.position), proposal.log_density(target.position)
    )

    def step(
        row_key: Key[Array, ""], position: Float[Array, " d"], candidate: Float[Array, " d"]
    ) -> Float[Array, " d"]:
        algorithm = blackjax.irmh(log_density, lambda _: candidate, log_law)
        return algorithm.step(row_key, algorithm.init(position))[0].position

    return jax.vmap(step)(jr.split(accept_key, count), positions, candidates)


@eqx.filter_jit
def tuned_step_size(
    tilt: Tilt, starts: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"], key: Key[Array, ""]
) -> Float[Array, ""]:
    """Return the HMC step size whose mean acceptance over many chains is near its target (Robbins-Monro on its log)."""

    def body(carry: Any, inputs: Any) -> tuple[Any, None]:
        states, log_size = carry
        index, step_key = inputs
        states, info = hmc_step(tilt, states, condition, jnp.exp(log_size), step_key)
        gain = 2.0 / (1.0 + index) ** 0.6
        return (states, log_size + gain * (jnp.mean(info.acceptance_rate) - TARGET_ACCEPTANCE)), None

    inputs = (jnp.arange(TUNING_STEPS), jr.split(key, TUNING_STEPS))
    (_, log_size), _ = jax.lax.scan(
        body, (hmc_start(tilt, starts, condition), jnp.log(FIRST_STEP_SIZE)), inputs
    )
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

    def body(carry: Any, step_key: Key[Array, ""]) -> tuple[Any, None]:
        def move(carry: Any) -> Any:
            state, total = carry
            state, info = kernel(step_key, state, TEMPERING_MOVES, parameters)
            return state, total + info.log_likelihood_increment

        return jax.lax.cond(carry[0].tempering_param < 1.0, move, lambda carry: carry, carry), None

    (state, total), _ = jax.lax.scan(body, (start, jnp.asarray(0.0)), jr.split(key, stages))
    return Tempered(state.particles, state.weights, total, state.tempering_param >= 1.0)


def refine(
    density: TiltedDensity, count: int, steps: int, X: np.ndarray | None = None, *, key: Key[Array, ""]
) -> np.ndarray:
    """Return draws that follow the density itself: chosen by weight among the sampler's, then moved by ``steps`` of HMC.

    Of shape (count, dimensions), or under conditions (rows, count, dimensions), in the data's units.
    """
    refine_key, rest_key = jr.split(key)
    if not density.conditional or X is None:
        return density.in_data_units(
            refined(density.tilt, density.sampler, count, steps, key=refine_key), key=rest_key
        )
    condition = np.repeat(density.inputs.to_model(X), count, axis=0)
    draws = refined_each(density.tilt, density.sampler, condition, steps, key=refine_key)
    return density.in_data_units(draws.reshape(-1, count, draws.shape[1]), key=rest_key)


def refined(tilt: Tilt, sampler: Sampler, count: int, steps: int, *, key: Key[Array, ""]) -> np.ndarray:
    """Return draws of a tilted density without a condition, in model units.

    Weighted draws from base and reference are resampled where enough of them are effective, which is exact up to the
    number of draws; otherwise the sampler's draws are the start. Steps of tuned HMC then leave the density invariant.
    """
    nodes_key, draw_key, seed_key, tune_key, move_key = jr.split(key, 5)
    nodes = importance_nodes(tilt.base, sampler.reference, CANDIDATES_PER_DRAW * count, key=nodes_key)
    log_ratio = tilt.values(nodes.points)
    nothing = np.zeros((count, 0))
    if effective_share(nodes.log_weights + log_ratio) > RESAMPLING_SHARE:
        starts = resample(nodes, log_ratio, count, seed=seed_from(seed_key))
    else:
        starts = sampler.weighted_draws(nothing, key=draw_key).points
    return walked(tilt, starts, nothing, steps, tune_key, move_key)


def refined_each(
    tilt: Tilt, sampler: Sampler, condition: np.ndarray, steps: int, *, key: Key[Array, ""]
) -> np.ndarray:
    """Return one draw of the tilted density under each condition, in model units.

    Each starts at one of a few draws of the sampler, chosen by their weights, and is moved by tuned HMC.
    """
    draw_key, choose_key, tune_key, move_key = jr.split(key, 4)
    repeated = np.repeat(condition, CANDIDATES_PER_CONDITION, axis=0)
    draws = sampler.weighted_draws(repeated, key=draw_key)
    log_ratio = (tilt.log_values(draws.points, repeated) - draws.log_density).reshape(
        -1, CANDIDATES_PER_CONDITION
    )
    chosen = np.asarray(jr.categorical(choose_key, jnp.asarray(log_ratio)))
    starts = draws.points.reshape(len(condition), CANDIDATES_PER_CONDITION, -1)[
        np.arange(len(condition)), chosen
    ]
    return walked(tilt, starts, condition, steps, tune_key, move_key)


def walked(
    tilt: Tilt,
    starts: np.ndarray,
    condition: np.ndarray,
    steps: int,
    tune_key: Key[Array, ""],
    move_key: Key[Array, ""],
) -> np.ndarray:
    """Return where chains of tuned HMC are after so many steps, each under its condition, in model units."""
    if steps == 0:
        return starts
    spread = np.linspace(0, len(starts) - 1, min(TUNING_CHAINS, len(starts))).astype(int)
    with double_precision():
        tuned = tuned_step_size(tilt, starts[spread], condition[spread], tune_key)
        return np.asarray(moved(tilt, starts, condition, tuned, jr.split(move_key, steps)))
