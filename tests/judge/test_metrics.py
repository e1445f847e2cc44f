import numpy as np
import pytest

from kexpfam.judge.metrics import mmd_squared
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
