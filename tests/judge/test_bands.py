import numpy as np
import pytest
from scipy.stats import binom

from kexpfam.judge.metrics import simultaneous_limits

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
