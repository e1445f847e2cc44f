import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam.data.sample import Sample
from kexpfam.fit.natural import (
    FStep,
    Groups,
    Metric,
    f_gradient,
    group_rows,
    sampler_lag,
)
from kexpfam.jax_settings import double_precision
from kexpfam.model.kernels import Gaussian
from kexpfam.model.spaces import FeatureSpace

PENALTY = 0.05
MOST_ROWS, MOST_GROUPS, METRIC_DRAWS = FStep().rows, FStep().groups, FStep().metric_draws


def sample(rows, condition_dim=0, seed=0):
    rng = np.random.default_rng(seed)
    return Sample(rng.normal(0.5, 1.0, (rows, 1)), rng.normal(size=(rows, condition_dim)))


def space(condition_dim=0):
    kernel, targets = Gaussian(0.8), np.linspace(-2.0, 2.0, 5)[:, None]
    conditions = np.random.default_rng(3).normal(size=(5, condition_dim))
    return FeatureSpace.of_kernels(kernel, kernel, Sample(targets, conditions))


@pytest.mark.parametrize(
    ("rows", "condition_dim"), [(50, 0), (MOST_ROWS + 10, 0), (50, 2), (MOST_GROUPS + 10, 2)]
)
def test_rows_are_grouped_by_condition(rows, condition_dim):
    data = sample(rows, condition_dim)
    groups = group_rows(data, key=jr.key(0))
    seen = min(rows, MOST_GROUPS if condition_dim else MOST_ROWS)
    assert groups.rows.shape == (seen, 1)
    assert groups.condition.shape == (seen if condition_dim else 1, condition_dim)
    assert groups.draw_conditions.shape[0] == groups.condition.shape[0] * groups.draws
    # No row comes twice, and each with the condition that it has in the sample.
    where = [int(np.argmin(np.abs(data.target[:, 0] - float(row)))) for row in groups.rows[:, 0]]
    assert len(set(where)) == seen
    np.testing.assert_allclose(groups.row_conditions, np.asarray(data.condition)[where], atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_lag_of_a_shifted_normal_is_its_divergence_and_its_weights_undo_it(seed):
    shift, count = 0.4, 20_000
    with double_precision():
        x = jr.normal(jr.key(seed), (count,))
        lag = sampler_lag(shift * x + 7.0, count, 1.0)
    # KL(N(0, 1) || N(shift, 1)), and the standard error of a mean with lognormal weights.
    error = np.sqrt(np.expm1(shift**2) / count)
    assert abs(float(lag.gap) - 0.5 * shift**2) < 5 * error
    assert abs(float(lag.weights @ x) - shift) < 5 * np.sqrt(np.exp(shift**2) * (1 + shift**2) / count)
    assert abs(float(lag.effective_share) - np.exp(-(shift**2))) < 0.05


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_constant_lag_has_even_weights(share):
    lag = sampler_lag(jnp.repeat(jnp.array([3.0, -20.0]), 8), 8, share)
    np.testing.assert_allclose(lag.weights, 1 / 16, rtol=1e-6)
    assert abs(float(lag.gap)) < 1e-6


def test_few_draws_in_a_group_do_not_make_the_gap_much_smaller():
    with double_precision():
        x = 0.3 * jr.normal(jr.key(0), (40_000,))
        few, many = sampler_lag(x, 8, 0.5), sampler_lag(x, 40_000, 0.5)
    assert float(few.gap) == pytest.approx(float(many.gap), rel=0.05)


@pytest.mark.parametrize("condition_dim", [0, 2])
def test_the_gradient_is_the_difference_of_mean_features_less_the_penalty(condition_dim):
    with double_precision():
        functions, groups = space(condition_dim), group_rows(sample(30, condition_dim), key=jr.key(0))
        moved = jr.normal(jr.key(1), (groups.draw_conditions.shape[0], 1))
        weights = jax.nn.softmax(jr.normal(jr.key(2), moved.shape[:1]))
        f = jr.normal(jr.key(3), (functions.size,))
        found = f_gradient(functions, PENALTY, f, groups, moved, weights)
        of_data = functions.features(groups.rows, groups.row_conditions).mean(0)
        expected = of_data - weights @ functions.features(moved, groups.draw_conditions) - PENALTY * f
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_metric_is_the_mean_of_two_second_moments():
    with double_precision():
        functions, data = space(), sample(METRIC_DRAWS, seed=1)
        draws = np.random.default_rng(2).normal(size=(METRIC_DRAWS, 1))
        groups = Groups(jnp.asarray(data.target)[None], jnp.zeros((1, 0)), METRIC_DRAWS)
        even = jnp.full(METRIC_DRAWS, 1 / METRIC_DRAWS)
        metric = Metric.start(functions.size).refreshed(functions, groups, jnp.asarray(draws), even, 0.1)
        of_draws, of_data = functions.target.matrix(draws), functions.target.matrix(data.target)
    around = of_data - of_draws.mean(0)
    expected = 0.5 * (np.cov(of_draws.T) + around.T @ around / METRIC_DRAWS)
    np.testing.assert_allclose(metric.moment, expected, atol=1e-12)
    np.testing.assert_allclose(
        metric.factor @ metric.factor.T, expected + 0.1 * np.eye(functions.size), atol=1e-12
    )
    gradient = jnp.arange(1.0, functions.size + 1)
    direction, length = metric.solved(gradient)
    np.testing.assert_allclose(
        direction, np.linalg.solve(expected + 0.1 * np.eye(functions.size), gradient), rtol=1e-5
    )
    assert float(length) == pytest.approx(float(jnp.sqrt(gradient @ direction)), rel=1e-5)


def test_under_a_condition_the_metric_leaves_out_what_differs_between_conditions():
    with double_precision():
        functions, data = space(2), sample(20, 2)
        groups = group_rows(data, key=jr.key(0))
        # Under each condition every draw and the datum are one point: there is nothing to tell apart.
        moved = jnp.repeat(groups.rows, groups.draws, axis=0)
        weights = jnp.full(moved.shape[0], 1 / moved.shape[0])
        metric = Metric.start(functions.size).refreshed(functions, groups, moved, weights, 1.0)
    np.testing.assert_allclose(metric.moment, 0.0, atol=1e-20)


def test_rows_come_as_often_as_their_weights_say():
    weight = np.r_[np.zeros(40), np.full(10, 3.0)]
    data = Sample(np.arange(50.0)[:, None], np.zeros((50, 0)), weight)
    assert float(group_rows(data, key=jr.key(0)).rows.min()) >= 40.0
