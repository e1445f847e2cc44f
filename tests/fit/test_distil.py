"""Laws distilled from a density: against the density itself on a grid."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import midpoint_grid

from kexpfam.data.sample import Sample
from kexpfam.fit.distil import Distillation, conditional_draws, distil, nearest
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import importance_nodes
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace

QUICK = Distillation(
    components=8,
    draws=3000,
    candidates=8000,
    network_components=4,
    width=16,
    depth=1,
    steps=400,
    conditions=256,
)


def problem(conditional: bool) -> Problem:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1.5, 1.5, (60, int(conditional)))
    y = (
        np.where(rng.uniform(size=60) < 0.5, -1.0, 1.0)[:, None]
        + 0.4 * rng.normal(size=(60, 1))
        + 0.5 * x.sum(1)[:, None]
    )
    sample, base, kernel = Sample(y, x), Gaussian.fitted(y, width=1.2), kernels.Gaussian(0.8)
    centres = sample.rows(np.arange(0, 60, 4))
    return Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, centres), 1e-2, base)


def random_weights(task: Problem) -> np.ndarray:
    return np.random.default_rng(1).normal(size=task.space.size)


def divergence(task: Problem, weights, law, condition) -> float:
    """Return KL(p_f || law) under a condition, on a grid."""
    points, width = midpoint_grid([-9.0], [9.0], 4000)
    log_p = task.tilt(weights).log_values(points, np.repeat(condition[None], len(points), 0))
    log_p -= np.log(width * np.exp(log_p).sum())
    log_q = np.asarray(law.given(jnp.asarray(condition)).log_densities(points))
    return float(width * np.sum(np.exp(log_p) * (log_p - log_q)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_distilled_mixture_is_near_its_density(seed):
    task = problem(False)
    weights = random_weights(task)
    law = distil(task, weights, settings=QUICK, key=jr.key(seed))
    # Eight components fitted to 3,000 draws: about 23 parameters / (2 * 3,000) nats, and what eight bumps
    # cannot hold.
    assert 0.0 <= divergence(task, weights, law, np.zeros(0)) < 0.03


def test_the_law_that_is_nearest_is_kept():
    task = problem(False)
    nodes = importance_nodes(task.base, task.base, 4000, key=jr.key(0))
    far = Gaussian(np.array([3.0]), np.eye(1))
    assert nearest([far, task.base], nodes, np.zeros(len(nodes.points))) is task.base


def test_where_f_is_zero_nothing_is_worse_than_the_base():
    task = problem(False)
    zeros = np.zeros(task.space.size)
    law = distil(task, zeros, settings=QUICK, key=jr.key(0))
    assert divergence(task, zeros, law, np.zeros(0)) < 1e-3


@pytest.mark.slow
def test_a_distilled_network_is_near_its_density_under_every_condition():
    task = problem(True)
    weights = random_weights(task)
    law = distil(task, weights, settings=QUICK, key=jr.key(0))
    apart = [divergence(task, weights, law, np.array([x])) for x in (-1.0, 0.0, 1.0)]
    plain = [divergence(task, weights, task.base, np.array([x])) for x in (-1.0, 0.0, 1.0)]
    assert np.mean(apart) < 0.5 * np.mean(plain)


def test_draws_under_conditions_follow_the_density():
    task = problem(True)
    weights = random_weights(task)
    draws = conditional_draws(
        task, weights, Distillation(conditions=400, draws_per_condition=50), key=jr.key(0)
    )
    assert draws.target.shape == (20_000, 1)
    points, width = midpoint_grid([-9.0], [9.0], 1500)
    for row in (0, 399):
        mine = draws.target[50 * row : 50 * (row + 1), 0]
        condition = np.repeat(draws.condition[50 * row][None].astype(float), len(points), 0)
        masses = np.exp(task.tilt(weights).log_values(points, condition))
        masses /= masses.sum()
        mean = masses @ points[:, 0]
        deviation = np.sqrt(masses @ (points[:, 0] - mean) ** 2)
        assert abs(mine.mean() - mean) < 5 * deviation / np.sqrt(50)


def test_settings_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        Distillation(rounds=0)
