import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import normal

from kexpfam.data.sample import Sample, distinct_conditions
from kexpfam.fit import convex
from kexpfam.fit.convex import continuation, likelihood
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import grid_nodes
from kexpfam.model import kernels
from kexpfam.model.spaces import Constant, FeatureSpace, RandomFeatures

PENALTY = 1e-2
# Conditions that differ in one column only, out of order and in unequal numbers.
SHARED = np.array([[1.0, 0.5], [-1.0, 0.5], [1.0, -0.2], [1.0, 0.5], [-1.0, 0.5], [1.0, 0.5], [0.0, 0.0]])


def shared_conditions(count=40):
    """Return rows under four conditions."""
    target = np.random.default_rng(0).normal(0.5, 0.8, (count, 1))
    return Sample(jnp.asarray(target), jnp.asarray(np.resize(SHARED, (count, 2))))


def own_conditions(count=15):
    rng = np.random.default_rng(1)
    return Sample(jnp.asarray(rng.normal(size=(count, 1))), jnp.asarray(rng.normal(size=(count, 1))))


def no_conditions(count=40):
    return Sample.unconditional(np.random.default_rng(2).normal(0.5, 0.8, (count, 1)))


def kernel_space(sample):
    return FeatureSpace.of_kernels(kernels.Gaussian(0.9), kernels.Matern52(1.2), sample)


def random_space(sample):
    keys, dim = jr.split(jr.key(0)), sample.condition.shape[1]
    condition = RandomFeatures.draw(kernels.Gaussian(1.0), dim, count=3, key=keys[0]) if dim else Constant()
    return FeatureSpace(condition, RandomFeatures.draw(kernels.Gaussian(0.9), 1, count=4, key=keys[1]))


SAMPLES = {
    "shared conditions": shared_conditions,
    "conditions of their own": own_conditions,
    "no conditions": no_conditions,
}
SPACES = {"kernels": kernel_space, "random features": random_space}


@pytest.fixture(params=SAMPLES.values(), ids=SAMPLES)
def sample(request):
    return request.param()


@pytest.fixture(params=SPACES.values(), ids=SPACES)
def task(request, sample):
    return Problem(sample, normal(), request.param(sample), PENALTY, normal())


def nodes_of(task):
    # The data must not decide where the grid is: a few rows reach less far than the density.
    return grid_nodes(task.base, np.linspace(-5.0, 5.0, 30)[:, None], fineness=0.1)


def slow_objective(task, nodes, weights):
    """Return the penalised mean log likelihood of f, one row of the sample after the other."""
    total = 0.0
    for y, x in zip(np.asarray(task.sample.target), np.asarray(task.sample.condition), strict=True):
        values = (
            task.space.matrix(np.concatenate([y[None], nodes.points]), np.tile(x, (len(nodes.points) + 1, 1)))
            @ weights
        )
        total += values[0] - np.log(np.sum(np.exp(nodes.log_weights + values[1:])))
    return total / len(task.sample) - 0.5 * task.rkhs_penalty * weights @ weights


def random_weights(task):
    return 0.5 * np.random.default_rng(3).normal(size=task.space.size)


def test_every_row_has_its_condition_among_the_distinct_ones(sample):
    conditions, rows = distinct_conditions(sample), np.asarray(sample.condition)
    np.testing.assert_array_equal(conditions.values[conditions.membership], rows)
    # Rows of width zero are all alike.
    distinct = {tuple(row) for row in rows.tolist()}
    assert len(conditions.values) == len(distinct)
    assert {tuple(row) for row in conditions.values.tolist()} == distinct
    assert conditions.membership.shape == (len(sample),)


def test_a_sample_without_conditions_has_one_empty_condition():
    conditions = distinct_conditions(no_conditions())
    assert conditions.values.shape == (1, 0)
    np.testing.assert_array_equal(conditions.membership, np.zeros(40))
    np.testing.assert_array_equal(conditions.shares, [1.0])


def test_the_share_of_a_condition_is_that_of_its_rows():
    conditions = distinct_conditions(Sample(jnp.zeros((7, 1)), jnp.asarray(SHARED)))
    shares = {
        tuple(value): share
        for value, share in zip(conditions.values.tolist(), conditions.shares, strict=True)
    }
    assert shares == pytest.approx(
        {(1.0, 0.5): 3 / 7, (-1.0, 0.5): 2 / 7, (1.0, -0.2): 1 / 7, (0.0, 0.0): 1 / 7}
    )


def test_totals_are_the_sums_over_the_rows_of_each_condition(sample):
    conditions, rows = distinct_conditions(sample), np.random.default_rng(4).normal(size=(len(sample), 3))
    expected = np.zeros((len(conditions.values), 3))
    for row, x in zip(rows, np.asarray(sample.condition).tolist(), strict=True):
        expected[conditions.values.tolist().index(x)] += row
    np.testing.assert_allclose(conditions.totals(rows), expected, atol=1e-12)


def test_the_mean_feature_is_the_plain_mean_over_the_rows(task):
    mean = task.space.matrix(task.sample.target, task.sample.condition).mean(0)
    np.testing.assert_allclose(likelihood(task, nodes_of(task)).mean_feature, mean, atol=1e-12)


def test_the_exponents_are_the_nodes_weights_and_f_under_each_condition(task):
    nodes, weights = nodes_of(task), random_weights(task)
    problem, conditions = likelihood(task, nodes), distinct_conditions(task.sample).values
    exponents = problem.exponents(weights)
    assert exponents.shape == (len(conditions), len(nodes.points))
    for row, x in zip(exponents, conditions, strict=True):
        f = task.tilt(weights).values(nodes.points, np.tile(x, (len(nodes.points), 1)))
        np.testing.assert_allclose(row, nodes.log_weights + f, atol=1e-9)


def test_the_likelihood_is_the_mean_over_the_rows(task):
    nodes, weights = nodes_of(task), random_weights(task)
    # Without a step, the optimum is where it started.
    value = convex.maximise(likelihood(task, nodes), PENALTY, weights, most=0).value
    assert value == pytest.approx(slow_objective(task, nodes, weights), abs=1e-9)


def test_conditions_are_stored_once_and_nodes_once(task):
    nodes, conditions = nodes_of(task), distinct_conditions(task.sample)
    problem = likelihood(task, nodes)
    assert problem.node_features.shape == (len(nodes.points), task.space.target.size)
    assert problem.log_weights.shape == (1, len(nodes.points))
    assert problem.condition_features.shape == (len(conditions.values), task.space.condition.size)
    np.testing.assert_allclose(problem.shares, conditions.shares)


def test_continuation_ends_where_every_nudge_lowers_the_likelihood(task):
    nodes = nodes_of(task)
    optimum = continuation(likelihood(task, nodes), PENALTY)
    best = slow_objective(task, nodes, optimum.weights)
    assert optimum.converged
    assert optimum.value == pytest.approx(best, abs=1e-9)
    for seed in range(3):
        nudge = 1e-2 * np.random.default_rng(seed).normal(size=task.space.size)
        for sign in (-1.0, 1.0):
            assert slow_objective(task, nodes, optimum.weights + sign * nudge) < best


@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-4])
def test_continuation_ends_in_the_same_place_from_any_start(task, penalty):
    problem = likelihood(task, nodes_of(task))
    cold = continuation(problem, penalty)
    warm = convex.maximise(problem, penalty, random_weights(task))
    assert cold.converged
    assert warm.converged
    assert warm.value == pytest.approx(cold.value, abs=1e-8)
