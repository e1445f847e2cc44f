"""Exact draws follow the density where the sampler does not."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest
import scipy.stats
from oracles import normal, tilted_normal, tilted_normal_log_partition

from kexpfam.data.scaling import Scaling
from kexpfam.integrate.exact import exact_draws
from kexpfam.integrate.nodes import grid_nodes
from kexpfam.model.density import Estimate, Inputs, Sampler, TiltedDensity
from kexpfam.model.ensemble import Stack
from kexpfam.model.networks import Identity

SLOPE, COUNT = 0.7, 4000
DATA = np.linspace(-6.0, 6.0, 50)[:, None]


def density(*, grid: bool) -> TiltedDensity:
    """Return N(0.7, 1) as a tilt of N(0, 1), with N(0, 1) as its sampler."""
    tilt, inputs = tilted_normal(SLOPE), Inputs.of(Scaling.plain(np.zeros((1, 0))), np.zeros((1, 0)))
    estimate = Estimate(tilted_normal_log_partition(SLOPE), 0.0, np.inf)
    scaling = Scaling.linear(np.zeros(1), np.ones(1))
    nodes = grid_nodes(tilt.base, DATA) if grid else None
    sampler = Sampler(normal(), Identity(), normal())
    return TiltedDensity(tilt, sampler, scaling, inputs, estimate, nodes, None, None)


def p_value(draws: np.ndarray, law) -> float:
    return scipy.stats.kstest(draws[:, 0], law.cdf).pvalue


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("grid", [True, False])
def test_draws_of_a_wrong_sampler_fail_and_exact_draws_pass(grid, seed):
    one, law = density(grid=grid), scipy.stats.norm(SLOPE)
    assert p_value(one.sample(COUNT, key=jr.key(seed)), law) < 2e-5
    assert p_value(exact_draws(one, COUNT, key=jr.key(seed)), law) > 2e-5


def test_exact_draws_of_a_stack_are_those_of_its_parts():
    parts = density(grid=True), density(grid=True)
    shifted = Scaling.linear(np.full(1, 5.0), np.ones(1))
    far = dataclasses.replace(parts[1], scaling=shifted)
    stack = Stack((parts[0], far), np.array([0.3, 0.7]), parts[0].scaling)
    draws = exact_draws(stack, COUNT, key=jr.key(0))
    share = np.mean(draws > 3.2)
    assert share == pytest.approx(0.7, abs=4 * np.sqrt(0.3 * 0.7 / COUNT) + 0.01)
