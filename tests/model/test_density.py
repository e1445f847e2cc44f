"""Refined draws against draws that are exact up to a fine grid."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam import Kernel, KernelExpFamily
from kexpfam.datasets import two_moons
from kexpfam.integrate.chains import refined as refine
from kexpfam.integrate.nodes import grid_nodes
from kexpfam.judge.metrics import mmd_squared
from kexpfam.model.density import Sampler, TiltedCells
from kexpfam.model.networks import Identity

DRAWS, STEPS = 2000, 10
# The law of a squared distance under chance alone leans to the right: 5 errors are seldom passed.
ERRORS = 5.0


@pytest.fixture(scope="module")
def fitted():
    """A tilt of two dimensions, its sampler, and the cells of a grid that carry it."""
    settings = {
        "model": "kernel",
        "kernel": Kernel(lengthscale=0.4, rkhs_penalty=1e-3, base="gaussian", n_centres=60),
        "random_state": 0,
    }
    model = KernelExpFamily(solver="exact", **settings).fit(two_moons().sample(300, random_state=0))
    tilt = model.density_.tilt
    cells = TiltedCells.on(tilt, grid_nodes(tilt.base, model._problem.sample.target, fineness=2.0))
    return tilt, model.density_.sampler, cells


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_refined_draws_are_exact_draws_within_noise(fitted, seed):
    tilt, sampler, cells = fitted
    refined = refine(tilt, sampler, DRAWS, STEPS, key=jr.key(seed))
    distance = mmd_squared(refined, np.asarray(cells.sample(DRAWS, key=jr.key(100 + seed))))
    assert abs(distance.value) < ERRORS * distance.standard_error


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_refinement_repairs_a_sampler_that_has_lost_half_of_the_density(fitted, seed):
    tilt, _, cells = fitted
    poor = Sampler(tilt.base, Identity(), tilt.base)
    exact = np.asarray(cells.sample(DRAWS, key=jr.key(100 + seed)))
    before = mmd_squared(np.asarray(poor.draw(jnp.zeros((DRAWS, 0)), key=jr.key(seed))), exact)
    after = mmd_squared(refine(tilt, poor, DRAWS, STEPS, key=jr.key(seed)), exact)
    assert before.value > 20.0 * before.standard_error
    assert abs(after.value) < ERRORS * after.standard_error
