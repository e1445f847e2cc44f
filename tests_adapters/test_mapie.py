"""MAPIE: conformal intervals around a fitted model cover as often as they say."""

import numpy as np
import pytest
from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor
from sklearn.frozen import FrozenEstimator

from kexpfam import ConditionalKernelExpFamily
from kexpfam.adapters.mapie import quantile_regressors

ROWS, LEVEL = 400, 0.9


@pytest.fixture(scope="module")
def poor():
    """A model whose own intervals are far too narrow: fitted to targets with a tenth of the noise."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(200, 1))
    settings = {
        "lengthscale": 0.8,
        "condition_lengthscale": 0.8,
        "rkhs_penalty": 1e-2,
        "base_width": 1.0,
        "power": False,
    }
    return ConditionalKernelExpFamily(**settings, random_state=0).fit(
        x, np.sin(2.0 * x[:, 0]) + 0.1 * rng.normal(size=200)
    )


def fresh(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 1))
    return x, np.sin(2.0 * x[:, 0]) + rng.normal(size=ROWS)


def covered(regressor, seed):
    x, y = fresh(seed)
    low, high = regressor.predict_interval(x)[1][:, :, 0].T
    return np.mean((low <= y) & (y <= high))


# Coverage given the calibration rows is a beta variable, that of new rows binomial around it.
ERROR = np.sqrt(2.0 * LEVEL * (1.0 - LEVEL) / ROWS)


@pytest.mark.parametrize("seed", [10, 20, 30])
def test_conformalized_quantiles_repair_a_model_that_is_too_sure(poor, seed):
    regressor = ConformalizedQuantileRegressor(
        quantile_regressors(poor, LEVEL), confidence_level=LEVEL, prefit=True
    )
    regressor.conformalize(*fresh(seed))
    own = poor.interval(fresh(seed + 1)[0], LEVEL)
    assert (
        np.mean((own[:, 0] <= fresh(seed + 1)[1]) & (fresh(seed + 1)[1] <= own[:, 1])) < LEVEL - 10.0 * ERROR
    )
    assert abs(covered(regressor, seed + 1) - LEVEL) < 4.0 * ERROR


@pytest.mark.parametrize("seed", [10, 20])
def test_a_model_is_conformalized_around_its_mean(poor, seed):
    regressor = SplitConformalRegressor(FrozenEstimator(poor), confidence_level=LEVEL, prefit=True)
    regressor.conformalize(*fresh(seed))
    assert abs(covered(regressor, seed + 1) - LEVEL) < 4.0 * ERROR


def test_a_level_is_checked(poor):
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile_regressors(poor, 1.0)
