"""The certificate: values of primal and dual between which the optimum lies."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam import ConditionalKernelExpFamily, Kernel
from kexpfam.data.sample import Sample
from kexpfam.fit import convex
from kexpfam.fit.certificate import certify, dual_value, primal_value, sampler_dual_value
from kexpfam.fit.convex import continuation, likelihood
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import Integration, grid_nodes, importance_nodes
from kexpfam.integrate.partition import by_quadrature
from kexpfam.model import kernels
from kexpfam.model.density import Estimate, Sampler, WeightedDraws
from kexpfam.model.measures import Gaussian
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import FeatureSpace

PENALTY, SEEDS = 0.05, range(5)


@pytest.fixture(scope="module")
def task():
    rng = np.random.default_rng(0)
    data = np.concatenate([rng.normal(-1.0, 0.5, 40), rng.normal(1.2, 0.6, 40)])[:, None]
    sample, base, kernel = Sample.unconditional(data), Gaussian.fitted(data, width=1.5), kernels.Gaussian(0.7)
    return Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), PENALTY, base)


@pytest.fixture(scope="module")
def problem(task):
    return likelihood(task, grid_nodes(task.base, np.asarray(task.sample.target), fineness=3.0))


@pytest.fixture(scope="module")
def optimum(problem):
    """The optimum of the problem by Newton's method on a fine grid."""
    return continuation(problem, PENALTY)


def certificate(task, weights, sampler, seed=0, draws=32768):
    tilt, nothing = task.tilt(weights), np.zeros((draws, 0))
    log_partition = by_quadrature(tilt, np.asarray(task.sample.target))
    found = sampler.weighted_draws(nothing, key=jr.key(1000 + seed))
    return certify(task, tilt, log_partition, sampler.reference, found, nothing, key=jr.key(seed))


def sampler_at(task, mean=0.0, width=1.4):
    return Sampler(Gaussian(jnp.array([mean]), jnp.array([[width]])), Identity(), task.base)


@pytest.mark.parametrize("scale", [0.0, 0.5, 0.9, 1.0, 1.3])
def test_both_values_bracket_the_optimum_whatever_f_is(task, optimum, scale):
    found = certificate(task, scale * optimum.weights, sampler_at(task))
    assert found.primal.value <= optimum.value + 4 * found.primal.standard_error + 1e-6
    assert found.dual.value >= optimum.value - 4 * found.dual.standard_error - 1e-6
    # Near f there is a density that certifies the optimum itself, so that all of the gap is f's own.
    assert found.dual.value == pytest.approx(optimum.value, abs=4 * found.dual.standard_error + 1e-6)
    assert (found.gap.value < 1e-5) == (scale == 1.0)


def grid_dual(problem, tilt, primal):
    """Return the dual at f on a grid: the penalised likelihood and its squared gradient."""
    slope = convex.gradient(problem, PENALTY, np.asarray(tilt.weights))
    return primal.value + 0.5 * slope @ slope / PENALTY


@pytest.mark.parametrize("seed", SEEDS)
def test_the_dual_on_draws_has_the_value_of_the_dual_on_a_grid(task, problem, optimum, seed):
    for scale in (0.7, 1.0):
        tilt = task.tilt(scale * optimum.weights)
        log_partition = by_quadrature(tilt, np.asarray(task.sample.target))
        exact = grid_dual(problem, tilt, primal_value(problem, PENALTY, tilt, log_partition))
        drawn = likelihood(
            task, importance_nodes(task.base, sampler_at(task).reference, 4000, key=jr.key(seed))
        )
        found = dual_value(drawn, PENALTY, tilt, primal_value(drawn, PENALTY, tilt, log_partition))
        assert abs(found.value - exact) < 4 * found.standard_error
        assert 0.0 < found.standard_error < 0.05


def test_the_dual_at_the_density_is_its_divergence_plus_its_mismatch(task, problem, optimum):
    weights = 0.7 * optimum.weights
    tilt = task.tilt(weights)
    exponents = problem.exponents(weights)[0]
    log_partition = np.logaddexp.reduce(exponents)
    masses = np.exp(exponents - log_partition)
    mismatch = problem.mean_feature - masses @ problem.node_features
    twin = masses @ (exponents - problem.log_weights[0] - log_partition) + 0.5 * mismatch @ mismatch / PENALTY
    primal = primal_value(problem, PENALTY, tilt, Estimate(log_partition, 0.0, np.inf))
    assert grid_dual(problem, tilt, primal) == pytest.approx(twin, rel=1e-8)
    assert primal.value == pytest.approx(convex.maximise(problem, PENALTY, weights, most=0).value, rel=1e-10)


def quadrature_dual(task, problem, mean, width):
    """Return the dual value of N(mean, width^2), on the grid."""
    points = grid_nodes(task.base, np.asarray(task.sample.target), fineness=3.0)
    masses = (
        np.exp(Gaussian(jnp.array([mean]), jnp.array([[width]])).log_densities(points.points))
        * points.widths[:, 0]
    )
    masses /= masses.sum()
    mismatch = problem.mean_feature - masses @ problem.node_features
    return masses @ (np.log(masses) - points.log_weights) + 0.5 * mismatch @ mismatch / PENALTY


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mean", "width"), [(0.1, 1.2), (0.5, 0.8)])
def test_the_dual_value_of_a_sampler_is_unbiased_and_above_the_optimum(
    task, problem, optimum, seed, mean, width
):
    found = certificate(task, optimum.weights, sampler_at(task, mean, width), seed).sampler_dual
    assert abs(found.value - quadrature_dual(task, problem, mean, width)) < 4 * found.standard_error
    assert found.value > optimum.value - 4 * found.standard_error


def test_the_error_of_the_dual_value_of_a_sampler_is_its_spread(task):
    values, errors = [], []
    condition, sampler = np.zeros((300, 0)), sampler_at(task, 0.1, 1.2)
    mean = task.space.matrix(task.sample.target, task.sample.condition).mean(0)
    for key in jr.split(jr.key(0), 100):
        found = sampler_dual_value(task, mean, sampler.weighted_draws(condition, key=key), condition)
        values.append(found.value)
        errors.append(found.standard_error)
    # A spread from 100 values is known to 7 per cent.
    assert np.std(values) == pytest.approx(np.mean(errors), rel=0.25)


def test_a_bad_sampler_raises_the_upper_value_and_a_wrong_f_lowers_the_lower_one(task, optimum):
    good, bad = (
        certificate(task, optimum.weights, sampler_at(task, *law)) for law in ((0.1, 1.2), (2.0, 0.5))
    )
    assert bad.sampler_dual.value > good.sampler_dual.value + 4 * bad.sampler_dual.standard_error
    wrong = certificate(task, -optimum.weights, sampler_at(task))
    assert wrong.primal.value < good.primal.value - 0.1


def test_with_too_few_effective_draws_the_dual_is_that_of_the_sampler(task, optimum):
    draws_only = Integration(cells=(), conditional_cells=())
    task = Problem(task.sample, task.base, task.space, task.rkhs_penalty, task.proposal, draws_only)
    found = certificate(task, optimum.weights, sampler_at(task))
    assert found.dual != found.sampler_dual
    found = certificate(task, optimum.weights, sampler_at(task), draws=100)
    assert found.dual == found.sampler_dual


def test_draws_that_agree_with_the_data_have_no_mismatch(task):
    # The data themselves as draws, with the base's own density: no divergence, and no mismatch but for the
    # missing diagonal.
    rows = np.asarray(task.sample.target)
    features = task.space.matrix(rows, task.sample.condition)
    draws = WeightedDraws(rows, task.base.log_densities(rows), folds=False)
    found = sampler_dual_value(task, features.mean(0), draws, np.zeros((len(rows), 0)))
    spread = np.trace(np.cov(features.T)) / len(rows)
    assert found.value == pytest.approx(-0.5 * spread / PENALTY, rel=1e-8)


@pytest.mark.slow
def test_the_certificate_of_a_conditional_fit_is_in_its_report():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (60, 1))
    y = np.sin(x[:, 0]) + 0.3 * rng.normal(size=60)
    settings = {
        "lengthscale": 1.0,
        "condition_lengthscale": 1.0,
        "rkhs_penalty": 0.1,
        "base_width": 1.5,
        "power": False,
    }
    model = ConditionalKernelExpFamily(
        model="kernel", kernel=Kernel(n_centres=10, **settings), solver="exact", random_state=0
    ).fit(x, y)
    diagnosis = model.diagnose()
    assert "certified" in str(diagnosis)
    assert -1e-6 <= diagnosis.dual - diagnosis.primal < 1e-3
    bound = diagnosis["sampler_dual"]
    # The cells of the grid are the density up to their width.
    assert abs(bound.value - diagnosis.dual) < 4 * bound.error + 0.01
