"""ArviZ: its summaries of draws are the model's own figures."""

import arviz as az
import numpy as np
import pandas as pd
import pytest

from kexpfam import Kernel, KernelExpFamily
from kexpfam.adapters.arviz import to_inference_data


def test_a_density_is_a_posterior_with_a_variable_per_column(joint):
    data = to_inference_data(joint, draws=500, chains=4, random_state=0)
    summary = az.summary(data)
    assert list(summary.index) == ["x0", "x1"]
    assert np.all(summary["r_hat"] < 1.01)  # independent draws
    other = joint.sample(4000, random_state=1)
    error = np.sqrt(other.var(axis=0) * (1 / 2000 + 1 / 4000))
    assert np.all(np.abs(summary["mean"] - other.mean(axis=0)) < 4.0 * error + 1e-3)  # the summary is rounded


def test_columns_keep_their_names():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["mass", "spin"])
    model = KernelExpFamily(
        model="kernel", kernel=Kernel(lengthscale=1.0, rkhs_penalty=0.1), random_state=0
    ).fit(frame)
    assert set(to_inference_data(model, draws=10, chains=1).posterior.data_vars) == {"mass", "spin"}


def test_a_density_under_one_condition_is_a_posterior(conditional):
    data = to_inference_data(conditional.given([0.3]), draws=20, chains=2, names=["theta"], random_state=0)
    assert data.posterior["theta"].shape == (2, 20)


def test_a_conditional_model_has_predictive_draws_of_every_row(conditional, rows):
    x, y = (part[200:230] for part in rows)
    data = to_inference_data(conditional, x, y, draws=400, chains=2, random_state=0)
    drawn = data.posterior_predictive["y"].values
    assert drawn.shape == (2, 400, 30)
    flat = drawn.reshape(800, 30)
    assert np.all(np.abs(flat.mean(axis=0) - conditional.predict(x)) < 4.5 * flat.std(axis=0) / np.sqrt(800))
    assert np.array_equal(data.observed_data["y"].values, y)
    assert np.array_equal(data.constant_data["X"].values, x)
    assert az.plot_ppc(data, show=False) is not None


def test_what_is_missing_is_named(conditional, joint):
    with pytest.raises(ValueError, match="pass X"):
        to_inference_data(conditional)
    with pytest.raises(ValueError, match="2 names"):
        to_inference_data(joint, names=["one"])
