import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from oracles import normal, tilted_normal

from kexpfam.integrate.chains import hmc_start, hmc_step, jump, tempered
from kexpfam.model.measures import Gaussian

SLOPE, COUNT = 0.8, 4000
TILT = tilted_normal(SLOPE)


def check_moments(draws, weights=None):
    """Compare mean and variance with those of N(slope, 1), at five standard errors of independent draws."""
    weights = jnp.full(COUNT, 1.0 / COUNT) if weights is None else weights
    error = float(jnp.sum(weights**2)) ** 0.5
    mean = float(weights @ draws[:, 0])
    assert abs(mean - SLOPE) < 5 * error
    assert abs(float(weights @ (draws[:, 0] - mean) ** 2) - 1.0) < 5 * 2**0.5 * error


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_jumps_and_moves_leave_the_density_invariant(seed):
    tilt, proposal = TILT, Gaussian(jnp.array([-0.5]), 0.7 * jnp.eye(1))

    @jax.jit
    def moved(key):
        start_key, jump_key, move_key = jr.split(key, 3)
        positions = normal(SLOPE).sample(COUNT, key=start_key)
        positions = jump(tilt, proposal, positions, jump_key)
        condition = jnp.zeros((COUNT, 0))
        return hmc_step(tilt, hmc_start(tilt, positions, condition), condition, 0.4, move_key)[0].position

    check_moments(moved(jr.key(seed)))


def test_jumps_bring_a_wrong_start_to_the_density():
    proposal = normal(1.0)
    step = lambda positions, key: (jump(TILT, proposal, positions, key), None)
    positions, _ = jax.jit(lambda keys: jax.lax.scan(step, jnp.full((COUNT, 1), -3.0), keys))(
        jr.split(jr.key(0), 25)
    )
    check_moments(positions)


def test_tempering_arrives_at_the_density_and_its_normaliser():
    starts = normal().sample(COUNT, key=jr.key(1))
    outcome = jax.jit(lambda: tempered(TILT, starts, 20, key=jr.key(0)))()
    assert bool(outcome.arrived)
    check_moments(outcome.particles, outcome.weights)
    assert abs(float(outcome.log_partition) - 0.5 * SLOPE**2) < 0.05
