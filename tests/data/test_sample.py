import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling, constant_columns, heavy_tailed_columns
from kexpfam.datasets import grid


@pytest.fixture
def mixed_columns():
    rng = np.random.default_rng(0)
    return np.column_stack([rng.normal(5.0, 2.0, 400), rng.standard_cauchy(400), rng.gamma(2.0, 3.0, 400)])


def test_only_heavy_tails_are_warped(mixed_columns):
    assert heavy_tailed_columns(mixed_columns).tolist() == [False, True, False]
    assert Scaling.standardising(mixed_columns).arcsinh == (False, True, False)


def test_model_units_are_standardised_and_lead_back(mixed_columns):
    scaling = Scaling.standardising(mixed_columns)
    z = np.asarray(scaling.to_model(mixed_columns))
    np.testing.assert_allclose(z.mean(0), 0.0, atol=1e-10)
    np.testing.assert_allclose(z.std(0), 1.0, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(scaling.to_data(z)), mixed_columns, rtol=1e-8, atol=1e-8)


def test_log_jacobian_is_that_of_autodiff(mixed_columns):
    scaling = Scaling.standardising(mixed_columns)
    rows = jnp.asarray(mixed_columns[:20])
    slow = jax.vmap(lambda x: jnp.linalg.slogdet(jax.jacfwd(lambda y: scaling.to_model(y[None])[0])(x))[1])(
        rows
    )
    np.testing.assert_allclose(np.asarray(scaling.log_jacobian(rows)), np.asarray(slow), rtol=1e-10)


def test_constant_columns_are_seen_and_do_not_divide_by_zero():
    values = np.column_stack([np.full(10, 3.0), np.arange(10.0), np.full(10, 0.1) + 1e-17])
    assert constant_columns(values).tolist() == [True, False, True]
    assert np.all(np.isfinite(np.asarray(Scaling.standardising(values).to_model(values))))


def test_an_unconditional_sample_has_conditions_of_width_zero():
    sample = Sample.unconditional(np.ones((4, 2)))
    assert sample.condition.shape == (4, 0)
    assert len(sample.rows(jnp.array([0, 2]))) == 2


@pytest.fixture
def skewed_columns():
    """Skewed to the right, to the left, not at all, and so heavy-tailed that arcsinh takes over."""
    rng = np.random.default_rng(1)
    right = rng.exponential(3.0, 400)
    return np.column_stack(
        [right, -np.sqrt(right) * 2.0 + 7.0, rng.normal(5.0, 2.0, 400), rng.standard_cauchy(400)]
    )


def test_powers_follow_the_skewness_and_are_scipys_best(skewed_columns):
    scaling = Scaling.standardising(skewed_columns[:, :3], power=True)
    assert scaling.powers[0] < 0.9
    assert scaling.powers[1] > 1.1
    assert scaling.powers[2] == pytest.approx(1.0, abs=0.15)
    z = (skewed_columns - skewed_columns.mean(0)) / skewed_columns.std(0)
    best = [scipy.stats.yeojohnson_normmax(column) for column in z[:, :3].T]
    np.testing.assert_allclose(scaling.powers, np.clip(best, 0.0, 2.0), atol=1e-3)


def test_powers_are_one_unless_asked_for(skewed_columns):
    np.testing.assert_array_equal(Scaling.standardising(skewed_columns).powers, 1.0)


def test_a_warped_column_has_no_power(skewed_columns):
    scaling = Scaling.standardising(skewed_columns, power=True)
    assert scaling.arcsinh == (False, False, False, True)
    assert scaling.powers[3] == 1.0


def test_a_power_is_scipys_transformation(skewed_columns):
    scaling = Scaling.standardising(skewed_columns[:, :2], power=True)
    z = (skewed_columns[:, :2] - skewed_columns[:, :2].mean(0)) / skewed_columns[:, :2].std(0)
    for j in range(2):
        moved = scipy.stats.yeojohnson(z[:, j], float(scaling.powers[j]))
        expected = (moved - moved.mean()) / moved.std()
        np.testing.assert_allclose(
            np.asarray(scaling.to_model(skewed_columns[:, :2]))[:, j], expected, atol=1e-9
        )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("strength", [1.0, 3.0, 10.0])
def test_powers_map_the_line_onto_itself_however_skewed_the_data(sign, strength):
    column = sign * np.exp(strength * np.random.default_rng(0).uniform(size=300))[:, None]
    scaling = Scaling.standardising(column, power=True)
    assert np.all((scaling.powers >= 0.0) & (scaling.powers <= 2.0))
    model_units = np.linspace(-20.0, 20.0, 101)[:, None]
    data_units = np.asarray(scaling.to_data(model_units))
    assert np.all(np.isfinite(data_units))
    assert np.all(np.diff(data_units[:, 0]) > 0.0)


def test_powers_lead_to_standardised_units_and_back(skewed_columns):
    scaling = Scaling.standardising(skewed_columns, power=True)
    z = np.asarray(scaling.to_model(skewed_columns))
    np.testing.assert_allclose(z.mean(0), 0.0, atol=1e-10)
    np.testing.assert_allclose(z.std(0), 1.0, rtol=1e-10)
    far = np.concatenate(
        [skewed_columns, skewed_columns.mean(0) + 30.0 * np.array([[-1.0], [1.0]]) * skewed_columns.std(0)]
    )
    np.testing.assert_allclose(np.asarray(scaling.to_data(scaling.to_model(far))), far, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("power", [0.0, 1e-12, 1e-4, 0.5, 1.0, 1.5, 2.0 - 1e-12, 2.0])
def test_every_power_is_inverted_up_to_its_logarithmic_limits(power):
    one, x = jnp.ones(1), np.array([-40.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 40.0])[:, None]
    scaling = Scaling(0.5 * one, 2.0 * one, 0.1 * one, 1.5 * one, power * one, arcsinh=(False,))
    np.testing.assert_allclose(np.asarray(scaling.to_data(scaling.to_model(x))), x, rtol=1e-9, atol=1e-9)
    expected = (scipy.stats.yeojohnson((x[:, 0] - 0.5) / 2.0, power) - 0.1) / 1.5
    np.testing.assert_allclose(np.asarray(scaling.to_model(x))[:, 0], expected, rtol=1e-6, atol=1e-9)


def test_the_log_jacobian_of_powers_is_the_numerical_derivative(skewed_columns):
    rows = skewed_columns[:50]
    scaling = Scaling.standardising(skewed_columns, power=True)
    h = 1e-6 * skewed_columns.std(0) * np.array([1.0, 1.0, 1.0, 0.01])
    slopes = (np.asarray(scaling.to_model(rows + h)) - np.asarray(scaling.to_model(rows - h))) / (2.0 * h)
    np.testing.assert_allclose(np.asarray(scaling.log_jacobian(rows)), np.log(slopes).sum(1), atol=1e-5)


@pytest.mark.parametrize("column", range(4))
def test_the_integral_of_a_density_survives_the_change_of_units(skewed_columns, column):
    values = skewed_columns[:, [column]]
    scaling = Scaling.standardising(values, power=True)
    # The grid is even in model units, but its lengths are those of the data: the Jacobian is on trial.
    x = np.asarray(scaling.to_data(np.linspace(-9.0, 9.0, 40_001)[:, None]))
    log_density = scipy.stats.norm.logpdf(np.asarray(scaling.to_model(x))[:, 0]) + np.asarray(
        scaling.log_jacobian(x)
    )
    mass = scipy.integrate.trapezoid(np.exp(log_density), x[:, 0])
    assert mass == pytest.approx(1.0, abs=1e-6)
    assert float(scaling.shift[0]) == pytest.approx(np.median(values) if column == 3 else values.mean())


def test_a_constant_column_has_no_power_and_says_nothing():
    values = np.column_stack([np.full(10, 3.0), np.arange(10.0) ** 2])
    scaling = Scaling.standardising(values, power=True)
    assert scaling.powers[0] == 1.0
    assert np.all(np.isfinite(np.asarray(scaling.to_model(values))))


def test_long_tails_on_both_sides_are_warped_and_normal_or_skewed_columns_are_not():
    rng = np.random.default_rng(2)
    laws = scipy.stats.t(3), scipy.stats.norm(), scipy.stats.gamma(2.0), scipy.stats.uniform()
    found = np.array([[heavy_tailed_columns(law.rvs((200, 1), rng))[0] for law in laws] for _ in range(50)])
    assert found.mean(axis=0)[0] > 0.8
    assert not found[:, 1:].any()


@pytest.mark.parametrize("dim", [10, 20])
def test_distant_modes_are_not_a_tail(dim):
    """Most rows of a column of this grid are in one narrow mode, and a few in one that is nine interquartile
    ranges away: on the scale of arcsinh the default lost 0.2 to 0.3 nats."""
    rows = grid(dim).sample(2000, random_state=0)
    assert not heavy_tailed_columns(rows).any()
    far = np.abs(rows - np.median(rows, axis=0)).max(axis=0)
    assert np.all(far > 6.0 * scipy.stats.iqr(rows, axis=0))
