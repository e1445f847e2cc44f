"""Mutual information against the closed form of a normal law; level and power of the randomisation test."""

import numpy as np
import pytest

from kexpfam import KernelExpFamily

CORRELATION = 0.7


def rows(seed, count, direct=0.0):
    """Return a cause c and its effects a and b, which depend on each other directly too if asked for."""
    rng = np.random.default_rng(seed)
    c = rng.normal(size=count)
    a = CORRELATION * c + np.sqrt(1 - CORRELATION**2) * rng.normal(size=count)
    b = CORRELATION * c + np.sqrt(1 - CORRELATION**2) * rng.normal(size=count) + direct * a
    return np.stack([a, b, c], axis=1)


@pytest.fixture(scope="module", params=[0.0, 0.6], ids=["independent", "dependent"])
def model(request):
    own = KernelExpFamily(model="mixture", random_state=0).fit(rows(0, 1000, request.param))
    assert len(own.density_.law.means) == 1
    return own, request.param


def information(covariance, a, b, c=()):
    """Return the mutual information of normal columns."""
    log = lambda *sets: np.linalg.slogdet(covariance[np.ix_(*[sum(map(list, sets), [])] * 2)])[1]
    return 0.5 * (log(a, c) + log(b, c) - log(a, b, c) - (log(c) if c else 0.0))


def test_mutual_information_is_that_of_a_normal_law(model):
    own, _ = model
    factor = np.asarray(own.density_.law.choleskys[0])
    covariance = factor @ factor.T
    for sets in (((0,), (1,)), ((0,), (1,), (2,)), ((0, 1), (2,))):
        found = own.mutual_information(*map(list, sets), rows=1000, draws=4)
        error = max(found.standard_error, 1e-6)
        assert found.value == pytest.approx(information(covariance, *sets), abs=4.0 * error)


def test_the_randomisation_test_tells_direct_from_common_dependence(model):
    own, direct = model
    p_values = [
        own.independence_test(
            rows(seed, 150, direct), 0, 1, given=2, copies=19, draws=64, random_state=seed
        ).p_value
        for seed in range(1, 31)
    ]
    if direct:
        assert np.mean(np.array(p_values) <= 0.05) > 0.9
    else:
        # The rate of 1 of 20 ranks, over 30 independent tables.
        assert np.mean(np.array(p_values) <= 0.05) <= 0.05 + 4.0 * np.sqrt(0.05 * 0.95 / 30)
        marginal = own.independence_test(rows(1, 150), 0, 1, copies=39)
        assert marginal.p_value == pytest.approx(1.0 / 40.0) and "39" in str(marginal)


def test_columns_must_differ(model):
    with pytest.raises(ValueError, match="different columns"):
        model[0].mutual_information(0, 0)
    with pytest.raises(ValueError, match="different columns"):
        model[0].independence_test(rows(0, 10), 0, [], 1)
