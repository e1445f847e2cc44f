import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import linear_space, midpoint_grid, normal

from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.fit.convex import Convex, best_sampler
from kexpfam.fit.distil import Distillation
from kexpfam.fit.problem import Problem, Status
from kexpfam.integrate.nodes import Integration
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace

PENALTY = 1e-3


DRAWS_ONLY = Integration(cells=(), conditional_cells=(), draws=8192)
QUICK = Convex(distillation=Distillation(components=8, draws=2000, candidates=6000))


def task_of(data, lengthscale, penalty=PENALTY, integration=None):
    sample, base, kernel = Sample.unconditional(data), Gaussian.fitted(data), kernels.Gaussian(lengthscale)
    space = FeatureSpace.of_kernels(kernel, kernel, sample)
    return Problem(sample, base, space, penalty, base, integration or Integration())


def line_data(count=80, seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.uniform(size=count) < 0.4, rng.normal(-1.5, 0.4, count), rng.normal(1.0, 0.6, count))[
        :, None
    ]


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
    solution = Convex().solve(task, key=jr.key(0))
    points, volume = midpoint_grid([-12.0], [12.0], 6000)
    assert solution.status is Status.CONVERGED
    assert np.linalg.norm(gradient(task, np.asarray(solution.tilt.weights), points, volume)) < 1e-3
    # At f = 0 it is far from vanishing.
    assert np.linalg.norm(gradient(task, np.zeros(task.space.size), points, volume)) > 0.1


def test_the_gradient_vanishes_at_the_solution_in_the_plane():
    task = task_of(plane_data(), 0.6)
    solution = Convex().solve(task, key=jr.key(0))
    points, volume = midpoint_grid([-6.0, -6.0], [6.0, 6.0], 200)
    assert solution.status is Status.CONVERGED
    assert np.linalg.norm(gradient(task, np.asarray(solution.tilt.weights), points, volume)) < 2e-3


def test_a_linear_f_over_a_normal_has_the_closed_form():
    # Maximising w mean - w^2 / 2 - penalty w^2 / 2 gives w = mean / (1 + penalty), and p = N(w, 1).
    data = np.random.default_rng(0).normal(0.8, 1.0, (60, 1))
    # Two distant points of no weight in the mean make the grid wide enough for all of the mass.
    data = np.concatenate([data, [[-9.0], [9.0]]])
    task = Problem(Sample.unconditional(data), normal(), linear_space(), 0.1, normal())
    solution = Convex().solve(task, key=jr.key(0))
    slope = float(solution.tilt.values(np.ones((1, 1)))[0])
    assert slope == pytest.approx(data.mean() / 1.1, abs=1e-4)


def test_the_solution_does_not_depend_on_the_key_or_the_order_of_the_rows():
    data = line_data()
    task = task_of(data, 0.5)
    first, second = (Convex().solve(task, key=jr.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(first.tilt.weights, second.tilt.weights)
    shuffled = task_of(data[::-1].copy(), 0.5)
    third = Convex().solve(shuffled, key=jr.key(0))
    values = [solution.tilt.values(data) for solution in (first, third)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-4)


def test_a_grid_that_misses_the_structure_is_called_too_coarse():
    grids = Integration(cells=(24,), tail_cells=(2,), conditional_cells=()), Integration()
    coarse, fine = (
        Convex().solve(task_of(line_data(), 0.08, integration=grid), key=jr.key(0)) for grid in grids
    )
    assert coarse.status is Status.GRID_TOO_COARSE
    assert fine.status is Status.CONVERGED
    assert fine.facts["integral_error"] < 1e-3 < coarse.facts["integral_error"]


def test_the_facts_say_that_newton_has_converged():
    solution = Convex().solve(task_of(line_data(), 0.5), key=jr.key(0))
    assert 0.0 <= solution.facts["newton_decrement"] < 1e-7
    assert solution.facts["newton_steps"] >= 1
    assert solution.trace == {}


def test_a_function_of_many_dimensions_is_referred_to_the_other_solver():
    data = np.random.default_rng(0).normal(size=(20, 4))
    with pytest.raises(ValueError, match=r"at most 3 dimensions.*depends on 4.*solver='auto'"):
        Convex(integral="grid").solve(task_of(data, 1.0), key=jr.key(0))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_on_draws_the_solution_is_that_on_a_grid_within_their_noise(seed):
    data = line_data()
    exact = Convex().solve(task_of(data, 0.5, 1e-2), key=jr.key(0))
    drawn = QUICK.solve(task_of(data, 0.5, 1e-2, DRAWS_ONLY), key=jr.key(seed))
    points, volume = midpoint_grid([-12.0], [12.0], 6000)
    log_p, log_q = (s.tilt.log_values(points) for s in (exact, drawn))
    log_p, log_q = (log - np.log(volume * np.exp(log).sum()) for log in (log_p, log_q))
    assert drawn.status is Status.CONVERGED
    # Draws leave about rank / (2 draws) nats.
    assert 0.0 <= volume * np.sum(np.exp(log_p) * (log_p - log_q)) < 0.01


def test_a_density_is_its_base_where_draws_cannot_bear_out_anything_else():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(60, 15))
    sample, kernel = Sample.unconditional(data), kernels.Gaussian(0.5)
    space, far = FeatureSpace.of_kernels(kernel, kernel, sample), Gaussian(np.full(15, 3.0), np.eye(15))
    task = Problem(sample, far, space, 1e-9, far, Integration(draws=1024))
    solution = QUICK.solve(task, key=jr.key(0))
    weights = np.exp(solution.tilt.values(far.draws(4096, key=jr.key(1))))
    assert solution.status in (Status.FEW_EFFECTIVE_DRAWS, Status.CONVERGED)
    assert weights.sum() ** 2 / np.sum(weights**2) > 200.0


@pytest.mark.parametrize("integration", [None, DRAWS_ONLY], ids=["grid", "draws"])
def test_where_f_is_zero_the_sampler_is_the_base(integration):
    data = line_data()
    task = task_of(data, 0.5, np.inf, integration)
    sampler = best_sampler(
        task, task.tilt(np.zeros(task.space.size)), task.nodes(key=jr.key(0)), Distillation(), key=jr.key(0)
    )
    assert sampler.reference is task.base


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sampler_has_the_moments_of_the_density(seed):
    task = task_of(line_data(), 0.5)
    solution = Convex().solve(task, key=jr.key(seed))
    points, volume = midpoint_grid([-12.0], [12.0], 6000)
    masses = np.exp(task.base.log_densities(points) + solution.tilt.values(points))
    masses /= masses.sum()
    draws = np.asarray(solution.sampler.draw(jnp.zeros((4000, 0)), key=jr.key(seed)))[:, 0]
    for power in (1, 2):
        exact = masses @ points[:, 0] ** power
        error = (draws**power).std() / np.sqrt(len(draws))
        assert abs((draws**power).mean() - exact) < 5 * error


@pytest.mark.parametrize("lengthscale", [0.01, 0.05])
def test_where_a_grid_does_not_resolve_f_the_fit_is_no_worse_than_its_base(lengthscale):
    data = line_data()
    coarse = Integration(cells=(24,), tail_cells=(2,), conditional_cells=())
    solution = Convex().solve(task_of(data, lengthscale, 1e-7, coarse), key=jr.key(0))
    points, volume = midpoint_grid([-12.0], [12.0], 20_000)
    log_partition = np.log(volume * np.exp(solution.tilt.log_values(points)).sum())
    # f = 0 is feasible, so that the mean of f minus log Z is at least 0 up to the error of the integral.
    assert solution.tilt.values(data).mean() - log_partition > -0.05
    assert solution.status is Status.GRID_TOO_COARSE
