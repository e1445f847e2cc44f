import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import linear_space, midpoint_grid, normal, with_constants

from kexpfam import kernels
from kexpfam.datasets import two_moons
from kexpfam.measures import Gaussian
from kexpfam.potentials import FeatureSpace
from kexpfam.sample import Sample
from kexpfam.solvers import reference
from kexpfam.solvers.exact import Exact
from kexpfam.solvers.loop import Status
from kexpfam.solvers.task import Task

PENALTY = 1e-3


@pytest.fixture(scope="module", autouse=True)
def quick_distillation():
    """Shrink the mixture that serves as sampler: the tests are about f."""
    with with_constants(reference, COMPONENTS=8, DRAWS=2000, CANDIDATES=6000):
        yield


def task_of(data, lengthscale, penalty=PENALTY):
    sample, base, kernel = Sample.unconditional(data), Gaussian.fitted(data), kernels.Gaussian(lengthscale)
    return Task(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), penalty, base)


def line_data(count=80, seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.uniform(size=count) < 0.4, rng.normal(-1.5, 0.4, count), rng.normal(1.0, 0.6, count))[:, None]


def plane_data():
    data = two_moons().sample(60, random_state=0)
    return (data - data.mean(0)) / data.std(0)


def gradient(task, weights, points, volume):
    """Return the derivative of the penalised likelihood, with the expectation on a grid of the test's own."""
    features = task.space.matrix(points, np.zeros((len(points), 0)))
    masses = volume * np.exp(task.base.log_densities(points) + features @ weights)
    mean = task.space.matrix(task.sample.target, task.sample.condition).mean(0)
    return mean - (masses / masses.sum()) @ features - task.rkhs_penalty * weights


@pytest.mark.parametrize("penalty", [1e-1, 1e-3, 1e-5])
def test_the_gradient_vanishes_at_the_solution_on_the_line(penalty):
    task = task_of(line_data(), 0.5, penalty)
    solution = Exact().solve(task, key=jr.key(0))
    points, volume = midpoint_grid([-12.0], [12.0], 6000)
    assert solution.status is Status.CONVERGED
    assert np.linalg.norm(gradient(task, np.asarray(solution.tilt.weights), points, volume)) < 1e-3
    # At f = 0 it is far from vanishing.
    assert np.linalg.norm(gradient(task, np.zeros(task.space.size), points, volume)) > 0.1


def test_the_gradient_vanishes_at_the_solution_in_the_plane():
    task = task_of(plane_data(), 0.6)
    solution = Exact().solve(task, key=jr.key(0))
    points, volume = midpoint_grid([-6.0, -6.0], [6.0, 6.0], 200)
    assert solution.status is Status.CONVERGED
    assert np.linalg.norm(gradient(task, np.asarray(solution.tilt.weights), points, volume)) < 2e-3


def test_a_linear_f_over_a_normal_has_the_closed_form():
    # Maximising w mean - w^2 / 2 - penalty w^2 / 2 gives w = mean / (1 + penalty), and p = N(w, 1).
    data = np.random.default_rng(0).normal(0.8, 1.0, (60, 1))
    # Two distant points of no weight in the mean make the grid wide enough for all of the mass.
    data = np.concatenate([data, [[-9.0], [9.0]]])
    task = Task(Sample.unconditional(data), normal(), linear_space(), 0.1, normal())
    solution = Exact().solve(task, key=jr.key(0))
    slope = float(solution.tilt.values(np.ones((1, 1)))[0])
    assert slope == pytest.approx(data.mean() / 1.1, abs=1e-4)


def test_the_solution_does_not_depend_on_the_key_or_the_order_of_the_rows():
    data = line_data()
    task = task_of(data, 0.5)
    first, second = (Exact().solve(task, key=jr.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(first.tilt.weights, second.tilt.weights)
    shuffled = task_of(data[::-1].copy(), 0.5)
    third = Exact().solve(shuffled, key=jr.key(0))
    values = [solution.tilt.values(data) for solution in (first, third)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-4)


def test_a_grid_that_misses_the_structure_is_called_too_coarse():
    task = task_of(line_data(), 0.08)
    coarse, fine = (Exact(fineness=fineness).solve(task, key=jr.key(0)) for fineness in (0.03, 1.0))
    assert coarse.status is Status.GRID_TOO_COARSE
    assert fine.status is Status.CONVERGED
    assert fine.facts["grid_error"] < 1e-3 < coarse.facts["grid_error"]


def test_the_facts_say_that_newton_has_converged():
    solution = Exact().solve(task_of(line_data(), 0.5), key=jr.key(0))
    assert 0.0 <= solution.facts["newton_decrement"] < 1e-7
    assert solution.facts["newton_steps"] >= 1
    assert solution.trace == {}


def test_a_function_of_many_dimensions_is_referred_to_the_other_solver():
    data = np.random.default_rng(0).normal(size=(20, 4))
    with pytest.raises(ValueError, match=r"at most 3 dimensions.*depends on 4.*solver='dde'"):
        Exact().solve(task_of(data, 1.0), key=jr.key(0))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sampler_has_the_moments_of_the_density(seed):
    task = task_of(line_data(), 0.5)
    solution = Exact().solve(task, key=jr.key(seed))
    points, volume = midpoint_grid([-12.0], [12.0], 6000)
    masses = np.exp(task.base.log_densities(points) + solution.tilt.values(points))
    masses /= masses.sum()
    draws = np.asarray(solution.sampler.draw(jnp.zeros((4000, 0)), key=jr.key(seed)))[:, 0]
    for power in (1, 2):
        exact = masses @ points[:, 0] ** power
        error = (draws**power).std() * np.hypot(1 / np.sqrt(len(draws)), 1 / np.sqrt(reference.DRAWS))
        assert abs((draws**power).mean() - exact) < 5 * error
