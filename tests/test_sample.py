import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kexpfam.sample import Sample, Scaling, constant_columns, heavy_tailed_columns


@pytest.fixture
def mixed_columns():
    rng = np.random.default_rng(0)
    return np.column_stack([rng.normal(5.0, 2.0, 400), rng.standard_cauchy(400), rng.exponential(3.0, 400)])


def test_only_heavy_tails_are_warped(mixed_columns):
    assert heavy_tailed_columns(mixed_columns).tolist() == [False, True, False]
    assert Scaling.standardising(mixed_columns).warped == (False, True, False)


def test_model_units_are_standardised_and_lead_back(mixed_columns):
    scaling = Scaling.standardising(mixed_columns)
    z = np.asarray(scaling.to_model(mixed_columns))
    np.testing.assert_allclose(z.mean(0), 0.0, atol=1e-10)
    np.testing.assert_allclose(z.std(0), 1.0, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(scaling.to_data(z)), mixed_columns, rtol=1e-8, atol=1e-8)


def test_log_jacobian_is_that_of_autodiff(mixed_columns):
    scaling = Scaling.standardising(mixed_columns)
    rows = jnp.asarray(mixed_columns[:20])
    slow = jax.vmap(lambda x: jnp.linalg.slogdet(jax.jacfwd(lambda y: scaling.to_model(y[None])[0])(x))[1])(rows)
    np.testing.assert_allclose(np.asarray(scaling.log_jacobian(rows)), np.asarray(slow), rtol=1e-10)


def test_constant_columns_are_seen_and_do_not_divide_by_zero():
    values = np.column_stack([np.full(10, 3.0), np.arange(10.0), np.full(10, 0.1) + 1e-17])
    assert constant_columns(values).tolist() == [True, False, True]
    assert np.all(np.isfinite(np.asarray(Scaling.standardising(values).to_model(values))))


def test_an_unconditional_sample_has_conditions_of_width_zero():
    sample = Sample.unconditional(np.ones((4, 2)))
    assert sample.condition.shape == (4, 0)
    assert len(sample.rows(jnp.array([0, 2]))) == 2
