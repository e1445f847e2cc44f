import numpy as np
import pytest
from scipy.stats import kstest, multivariate_normal

from kexpfam.judge.metrics import permutation_losses
from kexpfam.judge.pit import region_levels

CORRELATION = 0.8


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_a_correlated_pair_has_its_closed_form(seed):
    """The loss of a normal pair with correlation r is r^2 / (1 - r^2), the mean of ``r x y / (1 - r^2)``."""
    law = multivariate_normal([0.0, 0.0], [[1.0, CORRELATION], [CORRELATION, 1.0]])
    rows = law.rvs(4000, random_state=seed)
    losses = permutation_losses(law.logpdf, rows, rng=np.random.default_rng(seed))
    for loss in losses:
        assert abs(loss.value - CORRELATION**2 / (1.0 - CORRELATION**2)) < 5.0 * loss.standard_error


def test_a_column_that_says_nothing_loses_nothing():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 2))
    y = X[:, 0] + rng.normal(size=500)
    telling, idle = permutation_losses(lambda x: -0.5 * (y - x[:, 0]) ** 2, X, rng=rng)
    # E[(y - x')^2 - (y - x)^2] / 2 is the variance of x.
    assert abs(telling.value - 1.0) < 5.0 * telling.standard_error
    assert abs(idle.value) < 1e-12


def test_rows_beyond_the_support_count_with_the_lowest_log_density_seen():
    columns = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    inside = lambda x: np.where(x[:, 0] == x[:, 1], -1.0 - x[:, 0], -np.inf)
    first, _ = permutation_losses(inside, columns, rng=np.random.default_rng(0), repeats=20)
    assert 0.0 < first.value <= 3.0


@pytest.mark.parametrize("seed", range(3))
def test_levels_are_uniform_if_rows_are_draws_and_are_the_law_of_the_regions(seed):
    rng = np.random.default_rng(seed)
    radius = rng.chisquare(3, size=(2000, 301))
    levels = region_levels(-0.5 * radius[:, 0], -0.5 * radius[:, 1:], rng=rng)
    assert kstest(levels, "uniform").pvalue > 0.001
    wide = region_levels(-0.5 * radius[:, 0] / 4.0, -0.5 * radius[:, 1:], rng=rng)
    assert wide.mean() < levels.mean() - 0.2


def test_ties_are_broken_by_chance():
    levels = region_levels(np.zeros(4000), np.zeros((4000, 10)), rng=np.random.default_rng(0))
    assert kstest(levels, "uniform").pvalue > 0.001
