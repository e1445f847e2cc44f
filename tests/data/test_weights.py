"""Weights mean repetition: every statistic of weighted rows is that of the rows repeated."""

import jax
import numpy as np
import pytest
from scipy.stats import chisquare
from sklearn.mixture import GaussianMixture

from kexpfam.data.sample import Sample, distinct_conditions
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import (
    Weighted,
    checked_weights,
    distinct_rows,
    effective_rows,
    percentiles,
    standard_error,
    weighted_covariance,
    weighted_mean,
    weighted_variance,
)
from kexpfam.fit.mixture import MixtureShape, best_mixture, best_shape, fit_mixture
from kexpfam.model.measures import Gaussian


@pytest.fixture(params=range(3))
def table(request):
    """Return rows, one of whose columns has heavy tails, and whole-number weights."""
    rng = np.random.default_rng(request.param)
    values = np.column_stack([rng.normal(size=80), rng.gamma(2.0, size=80), rng.standard_cauchy(80) * 30.0])
    return values, rng.integers(1, 6, 80).astype(float)


def repeated(values, weight):
    return np.repeat(values, weight.astype(int), axis=0)


def test_moments_and_percentiles_are_those_of_repeated_rows(table):
    values, weight = table
    rows = repeated(values, weight)
    np.testing.assert_allclose(weighted_mean(values, weight), rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(weighted_variance(values, weight), rows.var(0), rtol=1e-12)
    np.testing.assert_allclose(
        weighted_covariance(values, weight), np.cov(rows, rowvar=False), rtol=1e-12, atol=1e-12
    )
    levels = [0, 10, 25, 50, 75, 99, 100]
    np.testing.assert_allclose(
        percentiles(values, levels, weight), np.percentile(rows, levels, axis=0), rtol=1e-12
    )


@pytest.mark.parametrize("power", [False, True])
def test_a_scaling_is_that_of_repeated_rows_heavy_tails_and_skewness_included(table, power):
    values, weight = table
    mine = Scaling.standardising(values, power=power, weight=weight)
    theirs = Scaling.standardising(repeated(values, weight), power=power)
    assert mine.arcsinh == theirs.arcsinh and mine.arcsinh[2]
    np.testing.assert_allclose(
        mine.to_model(values), theirs.to_model(values), rtol=1e-6 if power else 1e-11, atol=1e-9
    )


def test_a_normal_base_is_that_of_repeated_rows(table):
    values, weight = table
    mine, theirs = Gaussian.fitted(values, weight=weight), Gaussian.fitted(repeated(values, weight))
    np.testing.assert_allclose(mine.cholesky, theirs.cholesky, rtol=1e-10, atol=1e-10)


def test_the_effective_sample_size_is_kishs():
    assert effective_rows(None, 7) == 7.0
    assert effective_rows(np.full(7, 3.0), 7) == pytest.approx(7.0)
    assert effective_rows(np.array([1.0, 1.0, 2.0]), 3) == pytest.approx(16.0 / 6.0)


def test_the_standard_error_is_that_of_repetitions_of_the_experiment():
    rng = np.random.default_rng(0)
    weight = rng.uniform(0.1, 3.0, 50)
    values = rng.normal(size=(4000, 50))
    spread = np.average(values, axis=1, weights=weight).std()
    stated = np.mean([standard_error(row, weight) for row in values[:400]])
    assert stated == pytest.approx(spread, rel=0.05)


def test_equal_rows_become_one_in_the_order_they_came_in():
    rows = np.array([[1.0], [0.0], [1.0], [2.0], [0.0], [5.0]])
    kept, weight = Weighted.of(rows, np.array([1.0, 2.0, 3.0, 0.0, 1.0, 1.0]))
    assert kept.tolist() == [0, 1, 5] and weight.tolist() == [4.0, 3.0, 1.0]


def test_rows_with_the_same_gaps_are_equal_and_so_are_both_zeros():
    rows = np.array([[np.nan, 0.0], [1.0, 2.0], [np.nan, -0.0]])
    kept, weight = Weighted.of(rows, np.ones(3))
    assert kept.tolist() == [0, 1] and weight.tolist() == [2.0, 1.0]
    kept, weight = Weighted.of(rows, np.array([1.0, 2.0, 0.0]), merged=False)
    assert kept.tolist() == [0, 1] and weight.tolist() == [1.0, 2.0]


def test_equal_weights_are_no_weights_and_others_are_scaled_unless_whole():
    rows = np.arange(3.0)[:, None]
    assert Weighted.of(rows, np.ones(3)).weight is None
    assert Weighted.of(rows, np.full(3, 0.5)).weight is None
    assert Weighted.of(rows, np.full(3, 2.0)).weight is None
    assert Weighted.of(rows, np.array([2.0, 2.0, 1.0])).weight.tolist() == [2.0, 2.0, 1.0]
    np.testing.assert_allclose(
        Weighted.of(rows, np.array([0.5, 1.0, 3.0])).weight, np.array([1.0, 2.0, 6.0]) / 3.0
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0, 2.0], "3 rows"),
        (np.ones((3, 1)), "shape"),
        (1.0, "shape"),
        ([1.0, -1.0, 1.0], "row 1 has -1"),
        ([1.0, 1.0, np.nan], "row 2 has nan"),
        ([np.inf, 1.0, 1.0], "row 0 has inf"),
        ([0.0, 0.0, 0.0], "zero"),
        (["a", "b", "c"], "numbers"),
    ],
)
def test_bad_weights_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        checked_weights(given, 3)


def test_distinct_rows_are_those_that_appear_first():
    assert distinct_rows(np.array([[3.0], [1.0], [3.0]]), np.array([[0.0], [0.0], [1.0]])).tolist() == [
        0,
        1,
        2,
    ]
    assert distinct_rows(np.array([[3.0], [1.0], [3.0]])).tolist() == [0, 1]


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_drawn_as_often_as_they_count(weighted):
    weight = np.array([1.0, 0.5, 4.0, 2.5])
    sample = Sample.unconditional(np.arange(4.0)[:, None], weight if weighted else None)
    drawn = np.asarray(sample.drawn(20_000, key=jax.random.key(0)))
    expected = (weight / weight.sum() if weighted else np.full(4, 0.25)) * 20_000
    assert chisquare(np.bincount(drawn, minlength=4), expected).pvalue > 1e-3


def test_shares_and_totals_of_conditions_count_their_rows():
    sample = Sample(
        np.array([[1.0], [2.0], [4.0]]), np.array([[0.0], [1.0], [0.0]]), np.array([1.0, 2.0, 5.0])
    )
    conditions = distinct_conditions(sample)
    np.testing.assert_allclose(conditions.shares, [6.0 / 8.0, 2.0 / 8.0])
    np.testing.assert_allclose(conditions.totals(sample.target), [[21.0], [4.0]])
    assert sample.rows(np.array([2])).weight.tolist() == [5.0]


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_weighted_mixture_is_scikit_learns_of_repeated_rows(diagonal):
    rng = np.random.default_rng(0)
    points = np.concatenate(
        [rng.normal(size=(150, 2)) @ [[1.0, 0.8], [0.0, 0.5]] - 4.0, rng.normal(size=(100, 2)) + 4.0]
    )
    weight = rng.integers(1, 5, 250).astype(float)
    theirs = GaussianMixture(
        2, covariance_type="diag" if diagonal else "full", reg_covar=1e-6, tol=1e-10, random_state=0
    )
    theirs.fit(repeated(points, weight))
    mine = fit_mixture(points, MixtureShape(2, diagonal), seed=0, weight=weight)
    np.testing.assert_allclose(mine.log_densities(points), theirs.score_samples(points), atol=1e-3)


def test_the_shape_of_a_weighted_mixture_is_chosen_by_the_rows_that_count():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(200, 1)) - 6.0, rng.normal(size=(200, 1)) + 6.0
    points, weight = np.concatenate([left, right]), np.r_[np.full(200, 2.0), np.ones(200)]
    assert best_shape(points, counts=(1, 2), seed=0, weight=weight).components == 2
    one_sided = best_mixture(points, counts=(1, 2), seed=0, weight=np.r_[np.ones(200), np.full(200, 1e-9)])
    assert one_sided.log_densities(left).mean() == pytest.approx(-0.5 * np.log(2.0 * np.pi) - 0.5, abs=0.1)
    assert one_sided.log_densities(right).max() < -8.0
