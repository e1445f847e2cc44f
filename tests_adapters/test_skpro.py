"""skpro: its own checks of estimators and distributions, and its figures against the model's."""

import numpy as np
import pandas as pd
import pytest
from skpro.metrics import CRPS, LogLoss
from skpro.utils.estimator_checks import check_estimator

from kexpfam.adapters.skpro import KernelDistribution, KernelProbaRegressor, _quick


@pytest.fixture(scope="module")
def fitted(rows):
    x, y = pd.DataFrame(rows[0], columns=["x"]), pd.DataFrame(rows[1], columns=["y"])
    return KernelProbaRegressor(_quick()).fit(x[:150], y[:150]), x[150:160], y[150:160]


@pytest.mark.parametrize("member", [KernelProbaRegressor, KernelDistribution])
def test_it_passes_skpros_own_checks(member):
    results = check_estimator(member, raise_exceptions=False, verbose=False)
    failed = {name: outcome for name, outcome in results.items() if outcome != "PASSED"}
    assert len(results) > 30
    assert not failed


def test_log_loss_is_the_models_own(fitted):
    model, x, y = fitted
    own = -model.estimator_.score(x.to_numpy(), y["y"].to_numpy())
    assert LogLoss()(y, model.predict_proba(x)) == pytest.approx(own, abs=1e-9)


def test_crps_is_the_models_own(fitted):
    model, x, y = fitted
    own = model.estimator_.density_.crps(y.to_numpy(), x.to_numpy()).mean()
    assert CRPS()(y, model.predict_proba(x)) == pytest.approx(own, abs=1e-9)


def test_energy_is_that_of_draws(fitted):
    """``E|Y - Y'|`` of 40,000 pairs of draws, within 4 standard errors."""
    model, x, _ = fitted
    draws = np.abs(
        np.diff(model.estimator_.sample(x.to_numpy(), 80_000, random_state=0).reshape(10, -1, 2), axis=2)
    )[..., 0]
    error = draws.std(axis=1) / np.sqrt(draws.shape[1])
    assert np.all(
        np.abs(model.predict_proba(x).energy().to_numpy()[:, 0] - draws.mean(axis=1)) < 4.0 * error + 1e-3
    )


def test_quantiles_and_intervals_are_frames_with_the_models_numbers(fitted):
    model, x, _ = fitted
    own = model.estimator_.quantile(x.to_numpy(), [0.05, 0.5, 0.95])
    assert model.predict_quantiles(x, alpha=[0.05, 0.5, 0.95]).to_numpy() == pytest.approx(own, abs=1e-12)
    assert model.predict_interval(x, coverage=0.9).to_numpy() == pytest.approx(own[:, [0, 2]], abs=1e-9)
    assert model.predict(x).index.equals(x.index)


def test_rows_of_the_distribution_keep_their_condition(fitted):
    model, x, y = fitted
    law = model.predict_proba(x)
    assert law.iloc[3:5].log_pdf(y.iloc[3:5]).to_numpy() == pytest.approx(
        law.log_pdf(y).to_numpy()[3:5], abs=1e-12
    )
    assert law.iat[4, 0].mean() == pytest.approx(law.mean().to_numpy()[4, 0], abs=1e-12)
