import numpy as np
import pytest
from scipy.stats import binom, kstest, multivariate_normal

from kexpfam.judge.metrics import mmd_squared, permutation_losses, simultaneous_limits
from kexpfam.judge.pit import region_levels
from kexpfam.model.kernels import median_distance


def slow_mmd_squared(xs, ys, lengthscale):
    """Return the unbiased estimate by its double sums, one pair at a time."""
    kernel = lambda x, z: np.exp(-np.sum((x - z) ** 2) / (2 * lengthscale**2))
    n, m = len(xs), len(ys)
    within_x = sum(kernel(xs[i], xs[j]) for i in range(n) for j in range(n) if i != j)
    within_y = sum(kernel(ys[i], ys[j]) for i in range(m) for j in range(m) if i != j)
    across = sum(kernel(x, y) for x in xs for y in ys)
    return within_x / (n * (n - 1)) + within_y / (m * (m - 1)) - 2 * across / (n * m)


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    return rng.normal(size=(31, 3)), rng.normal(size=(47, 3)) + 0.5


def test_agrees_with_the_slow_twin(samples):
    assert mmd_squared(*samples, lengthscale=0.9).value == pytest.approx(
        slow_mmd_squared(*samples, 0.9), abs=1e-12
    )


def test_the_default_lengthscale_comes_from_the_second_sample(samples):
    lengthscale = np.sqrt(0.1) * median_distance(samples[1])
    assert mmd_squared(*samples).value == pytest.approx(slow_mmd_squared(*samples, lengthscale), abs=1e-12)


def test_is_symmetric_for_a_given_lengthscale(samples):
    xs, ys = samples
    assert mmd_squared(xs, ys, lengthscale=1.1).value == pytest.approx(
        mmd_squared(ys, xs, lengthscale=1.1).value
    )


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 31])
def test_chunking_does_not_change_it(samples, rows_per_chunk):
    whole, chunked = mmd_squared(*samples), mmd_squared(*samples, rows_per_chunk=rows_per_chunk)
    assert chunked == pytest.approx(whole, rel=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_equal_distributions_are_near_zero(seed):
    rng = np.random.default_rng(seed)
    distance = mmd_squared(rng.normal(size=(500, 2)), rng.normal(size=(700, 2)))
    assert abs(distance.value) < 4 * distance.standard_error


def test_the_standard_error_is_that_of_repetitions():
    # Forty repetitions know their own spread to about a ninth; the reported error is a bound, if not a loose
    # one.
    repetitions = [
        mmd_squared(*np.random.default_rng(seed).normal(size=(2, 200, 2)), lengthscale=0.5)
        for seed in range(40)
    ]
    spread = np.std([r.value for r in repetitions])
    reported = np.mean([r.standard_error for r in repetitions])
    assert 0.7 * spread < reported < 2.0 * spread


@pytest.mark.parametrize("seed", range(3))
def test_shifted_distributions_are_clearly_apart(seed):
    rng = np.random.default_rng(seed)
    distance = mmd_squared(rng.normal(size=(500, 2)) + 0.5, rng.normal(size=(500, 2)))
    assert distance.value > 10 * distance.standard_error


CASES = {
    "bars of few rows": (30, 10, False),
    "bars": (500, 10, False),
    "curve of few rows": (30, 50, True),
    "curve": (2000, 50, True),
}
FRESH = 4000


@pytest.mark.parametrize(("rows", "bins", "cumulative"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_the_counts_of_a_calibrated_model_stay_within_with_the_stated_probability(
    rows, bins, cumulative, coverage
):
    shares = np.full(bins, 1.0 / bins)
    low, high = simultaneous_limits(rows, shares, cumulative=cumulative, coverage=coverage)
    values = np.random.default_rng(7).uniform(size=(FRESH, rows))
    counts = np.stack([np.histogram(one, bins, (0.0, 1.0))[0] for one in values])
    counts = np.cumsum(counts, axis=1)[:, :-1] if cumulative else counts
    inside = np.mean(np.all((counts >= low) & (counts <= high), axis=1))
    # Both the limits and this check are of 4,000 simulations; counts of few rows are too coarse to meet the
    # level.
    error = np.sqrt(2.0 * coverage * (1.0 - coverage) / FRESH)
    assert inside > coverage - 4.0 * error
    assert inside < coverage + 4.0 * error + (0.1 if rows < 100 else 0.01)


def test_a_single_count_has_the_limits_of_its_binomial_law():
    low, high = simultaneous_limits(100, np.array([0.3, 0.7]), cumulative=True)
    inside = lambda a, b: binom.cdf(b, 100, 0.3) - binom.cdf(a - 1, 100, 0.3)
    assert inside(low[0], high[0]) >= 0.95
    assert inside(low[0] + 1, high[0] - 1) < 0.95


def test_limits_are_wider_than_those_of_each_count_alone():
    low, high = simultaneous_limits(200, np.full(10, 0.1), cumulative=False)
    alone = binom.interval(0.95, 200, 0.1)
    assert low[0] < alone[0] and high[0] > alone[1]


def test_the_limits_are_the_seeds_own():
    first, second = (simultaneous_limits(80, np.full(5, 0.2), cumulative=True) for _ in range(2))
    np.testing.assert_array_equal(first, second)


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
