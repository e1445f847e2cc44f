"""Conditional mixtures of normals: published formulas, quadrature, the least-squares objective, storage."""

import jax
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from oracles import midpoint_grid, with_constants
from scipy.integrate import quad
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

import kexpfam
from kexpfam.baselines import mixture_density
from kexpfam.baselines.grid_search import deal
from kexpfam.baselines.kernel_density import (
    ConditionalKernelDensity,
    LeastSquaresConditional,
    NeighbourDensity,
    ratio_moments,
    ratio_weights,
)
from kexpfam.baselines.mixture_density import KernelWeights, NeighbourWeights
from kexpfam.data.columns import TiesWarning
from kexpfam.data.sample import Sample
from kexpfam.integrate.nodes import choose_each

ROWS = 60
KINDS = {
    "squares": LeastSquaresConditional,
    "neighbours": NeighbourDensity,
    "kernel": ConditionalKernelDensity,
}
FITTED = sorted(KINDS)
PLACES = np.array([[-1.5], [0.2], [1.7]])
FAR = np.array([[50.0], [-1e6]])


@pytest.fixture(scope="module")
def data():
    """Return a sine with skewed noise."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (ROWS, 1))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.gamma(2.0, 1.0, ROWS)


@pytest.fixture(scope="module")
def models(data):
    return {name: kind(random_state=0).fit(*data) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def planes(data):
    x, y = data
    both = np.stack([y, x[:, 0] + np.random.default_rng(9).normal(size=ROWS)], 1)
    return {name: kind(random_state=0).fit(x, both) for name, kind in KINDS.items()}


def density_at(model, x, t):
    return np.exp(model.score_samples(np.repeat(np.atleast_2d(x), len(t), axis=0), t))


def slow_density(name, model, data, x, t):
    """Return p(t | x) in the data's units, term by term from the published formulas."""
    (inputs, targets), chosen = data, model.selection_.chosen
    u, v = (inputs[:, 0] - inputs.mean()) / inputs.std(), (targets - targets.mean()) / targets.std()
    a, z = (x - inputs.mean()) / inputs.std(), (t - targets.mean()) / targets.std()
    if name == "squares":
        centres = [int(np.argmin(np.abs(v - c))) for c in model.density_.centres[:, 0]]
        u, v, heights = u[centres], v[centres], model.density_.weights.heights
        weights = [
            h * np.exp(-((a - c) ** 2) / (2 * chosen["width"] ** 2)) for h, c in zip(heights, u, strict=True)
        ]
    elif name == "neighbours":
        weights = [float(abs(a - c) <= chosen["radius"]) for c in u]
    else:
        weights = [np.exp(-((a - c) ** 2) / (2 * chosen["condition_width"] ** 2)) for c in u]
    terms = [w * scipy.stats.norm.pdf(z, c, chosen["width"]) for w, c in zip(weights, v, strict=True)]
    wide = scipy.stats.norm.pdf(z, 0.0, 4.0)
    return (0.999 * sum(terms) / sum(weights) + 0.001 * wide) / targets.std()


@pytest.mark.parametrize("name", FITTED)
def test_the_density_is_the_published_formula(name, models, data):
    for x, t in [(-1.5, 0.3), (0.2, 1.1), (1.7, -0.4), (0.9, 4.0)]:
        expected = slow_density(name, models[name], data, x, t)
        assert models[name].score_samples([[x]], [t])[0] == pytest.approx(np.log(expected), rel=1e-6)


@pytest.mark.parametrize("name", FITTED)
def test_the_density_integrates_to_one(name, models):
    t, width = midpoint_grid([-20.0], [22.0], 8000)
    for x in [*PLACES, *FAR]:
        assert width * density_at(models[name], x, t[:, 0]).sum() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", FITTED)
def test_two_targets_have_a_joint_density(name, planes):
    model = planes[name]
    points, volume = midpoint_grid([-12.0, -14.0], [14.0, 14.0], 140)
    masses = volume * density_at(model, PLACES[1], points)
    assert masses.sum() == pytest.approx(1.0, abs=2e-2)
    np.testing.assert_allclose(model.predict(PLACES[1:2])[0], masses @ points, atol=0.05)
    assert model.sample(PLACES, 5, random_state=0).shape == (3, 5, 2)
    for ask in (lambda: model.quantile(PLACES, 0.5), lambda: model.cdf(PLACES, np.zeros((3, 2)))):
        with pytest.raises(ValueError, match="one dimension"):
            ask()


@pytest.mark.parametrize("name", FITTED)
def test_mean_and_distribution_function_are_integrals_of_the_density(name, models):
    t, width = midpoint_grid([-20.0], [22.0], 20_000)
    for x in PLACES:
        masses = width * density_at(models[name], x, t[:, 0])
        assert models[name].predict(x[None])[0] == pytest.approx(masses @ t[:, 0], abs=1e-4)
        assert models[name].cdf(x[None], [0.7])[0] == pytest.approx(masses[t[:, 0] <= 0.7].sum(), abs=2e-3)


@pytest.mark.parametrize("name", FITTED)
def test_quantiles_invert_the_distribution_function(name, models):
    levels = np.array([1e-6, 0.05, 0.5, 0.95, 0.9999])
    found = models[name].quantile(PLACES, levels)
    assert np.all(np.diff(found, axis=1) > 0.0)
    for column, level in zip(found.T, levels, strict=True):
        np.testing.assert_allclose(models[name].cdf(PLACES, column), level, rtol=1e-6)
    assert models[name].interval(PLACES, 0.9).shape == (3, 2)


@pytest.mark.parametrize("name", FITTED)
def test_the_crps_is_the_integral_of_the_squared_distance_to_a_step(name, models):
    model, y = models[name], np.array([0.4, 3.0, -0.7])
    t, width = midpoint_grid([-20.0], [22.0], 42_000)
    found = model.density_.crps(y[:, None], PLACES)
    for x, target, score in zip(PLACES, y, found, strict=True):
        levels = model.cdf(np.repeat(x[None], len(t), axis=0), t[:, 0])
        # The step falls on an edge of the grid's cells.
        assert score == pytest.approx(width * np.sum((levels - (target <= t[:, 0])) ** 2), rel=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FITTED)
def test_draws_follow_the_distribution_function(name, models, seed):
    draws = models[name].sample(PLACES, 2000, random_state=seed)
    assert draws.shape == (3, 2000)
    for x, row in zip(PLACES, draws, strict=True):
        levels = models[name].cdf(np.repeat(x[None], len(row), axis=0), row)
        assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-4
    np.testing.assert_array_equal(draws, models[name].sample(PLACES, 2000, random_state=seed, refine=2))


@pytest.mark.parametrize("name", FITTED)
def test_one_condition_gives_the_same_density(name, models, data):
    for x in PLACES:
        given = models[name].given(x)
        np.testing.assert_allclose(
            given.score_samples(data[1]), np.log(density_at(models[name], x, data[1])), rtol=1e-12
        )
        levels = models[name].cdf(np.repeat(x[None], 500, axis=0), given.sample(500, random_state=0))
        assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-4
        assert given.sample(3, random_state=0, refine=1).shape == (3,)


def test_results_do_not_depend_on_the_chunks(models, data):
    x, y = data
    asked = lambda m: (
        m.score_samples(x, y),
        m.quantile(x, 0.3),
        m.cdf(x, y),
        m.predict(x),
        m.density_.crps(y[:, None], x),
    )
    for model in models.values():
        expected = asked(model)
        with with_constants(mixture_density, CHUNK_NUMBERS=7 * ROWS):
            for whole, parts in zip(expected, asked(model), strict=True):
                np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)


def test_an_input_without_neighbours_has_those_of_the_nearest():
    weights = NeighbourWeights(np.array([[0.0], [1.0], [5.0], [5.0]]), 0.5)
    found = np.exp(weights.log_weights(np.array([[0.1], [3.9], [-80.0], [0.5]])))
    np.testing.assert_array_equal(found, [[1, 0, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])


@pytest.mark.parametrize("background", [0.0, 1e-3])
@pytest.mark.parametrize("name", FITTED)
def test_far_inputs_and_targets_have_finite_log_densities(name, data, background):
    model = KINDS[name](background=background, width=0.1, random_state=0).fit(*data)
    for targets in ([0.0, 1.0], [1e6, -1e6]):
        log_density = model.score_samples(FAR, targets)
        assert np.all(np.isfinite(log_density))
    assert np.all(np.isfinite(model.quantile(FAR, [0.01, 0.99])))
    assert np.all(np.isfinite(model.sample(FAR, 10, random_state=0)))


def test_the_moments_of_least_squares_are_integrals(data):
    x, y = data[0][:8], data[1][:8, None]
    H, h = ratio_moments(Sample(y, x), Sample(y[:3], x[:3]), 0.6)
    basis = lambda j, a, t: np.exp(-((a - x[j, 0]) ** 2 + (t - y[j, 0]) ** 2) / (2 * 0.6**2))
    for j in range(3):
        assert h[j] == pytest.approx(
            np.mean([basis(j, a, t) for a, t in zip(x[:, 0], y[:, 0], strict=True)]), rel=1e-6
        )
        for k in range(3):
            slow = np.mean(
                [
                    quad(lambda t, a=a, j=j, k=k: basis(j, a, t) * basis(k, a, t), -15, 15, points=[0, 1])[0]
                    for a in x[:, 0]
                ]
            )
            assert H[j, k] == pytest.approx(slow, rel=1e-6)


def test_the_weights_minimise_the_least_squares_objective(data):
    x, y = data[0], data[1][:, None]
    H, h = ratio_moments(Sample(y, x), Sample(y[:15], x[:15]), 0.5)
    penalties = np.array([1e-3, 0.1, 10.0])
    clipped = ratio_weights(H, h, penalties)
    rng = np.random.default_rng(0)
    for column, penalty in zip(clipped.T, penalties, strict=True):
        objective = lambda a, penalty=penalty: 0.5 * a @ H @ a - h @ a + 0.5 * penalty * a @ a
        slow = scipy.optimize.minimize(
            objective, np.zeros(15), jac=lambda a, p=penalty: H @ a - h + p * a, tol=1e-12
        ).x
        np.testing.assert_allclose(column, np.maximum(slow, 0.0), atol=1e-5)
        best = np.linalg.solve(H + penalty * np.eye(15), h)
        assert all(objective(best) < objective(best + 0.1 * rng.normal(size=15)) for _ in range(50))


def test_centres_that_no_row_is_near_have_equal_weights():
    np.testing.assert_array_equal(
        ratio_weights(np.eye(2), np.zeros(2), np.array([0.1, 1.0])), np.ones((2, 2))
    )


@pytest.mark.slow
def test_the_search_of_least_squares_is_that_of_fits_to_the_folds(data):
    x, y = ((part - part.mean(0)) / part.std(0) for part in (data[0], data[1][:, None]))
    found = LeastSquaresConditional(width=0.4, background=0.01)._chosen(
        Sample(y, x), np.random.default_rng(1)
    )[0]
    rng = np.random.default_rng(1)
    centres, fold = rng.permutation(ROWS)[:100], deal(ROWS, 5, rng)
    for column, penalty in enumerate(found.grids[1]):
        total = 0.0
        for i in range(ROWS):
            rest = fold != fold[i]
            heights = ratio_weights(
                *ratio_moments(Sample(y[rest], x[rest]), Sample(y[centres], x[centres]), 0.4),
                np.array([penalty]),
            )[:, 0]
            w = heights * np.exp(-((x[i] - x[centres, 0]) ** 2) / (2 * 0.4**2))
            p = w @ scipy.stats.norm.pdf(y[i], y[centres, 0], 0.4) / w.sum()
            total += np.log(0.99 * p + 0.01 * scipy.stats.norm.pdf(y[i, 0], 0.0, 4.0))
        assert found.losses[0, column] == pytest.approx(-total / ROWS, rel=1e-6)


@pytest.mark.parametrize("background", [0.0, 0.01])
@pytest.mark.parametrize("name", ["neighbours", "kernel"])
def test_the_search_of_widths_is_that_of_fits_to_the_folds(name, data, background):
    x, y = ((part - part.mean(0)) / part.std(0) for part in (data[0], data[1][:, None]))
    grid, widths = np.array([0.3, 1.0]), np.array([0.2, 0.7])
    make = lambda points, s: (
        NeighbourWeights(points, s)
        if name == "neighbours"
        else KernelWeights(points, np.ones(len(points)), s)
    )
    setting = "radius" if name == "neighbours" else "condition_width"
    model = KINDS[name](background=background, width=widths, **{setting: grid})
    found = model._chosen(Sample(y, x), np.random.default_rng(2))[0]
    fold = deal(ROWS, 5, np.random.default_rng(2))
    for i, s in enumerate(grid):
        for j, width in enumerate(widths):
            total = 0.0
            for row in range(ROWS):
                rest = fold != fold[row]
                w = np.exp(make(x[rest], s).log_weights(x[[row]])[0])
                p = w @ scipy.stats.norm.pdf(y[row], y[rest, 0], width) / w.sum()
                total += np.log((1 - background) * p + background * scipy.stats.norm.pdf(y[row, 0], 0.0, 4.0))
            assert found.losses[i, j] == pytest.approx(-total / ROWS, rel=1e-6)


@pytest.mark.parametrize("name", FITTED)
def test_the_chosen_settings_predict_better_than_the_marginal(name, models, data):
    rng = np.random.default_rng(5)
    x = rng.uniform(-2.0, 2.0, (200, 1))
    y = np.sin(2.0 * x[:, 0]) + 0.3 * rng.gamma(2.0, 1.0, 200)
    marginal = scipy.stats.gaussian_kde(data[1]).logpdf(y).mean()
    assert models[name].score(x, y) > marginal + 0.1
    assert models[name].selection_.losses.min() < models[name].selection_.losses.mean()


@pytest.mark.parametrize("name", FITTED)
def test_held_out_data_calibrate_the_model(name, models):
    rng = np.random.default_rng(6)
    x = rng.uniform(-2.0, 2.0, (100, 1))
    own = models[name].sample(x, random_state=3)[:, 0]
    diagnosis = models[name].diagnose(x, own)
    assert diagnosis.pit_p_value > 1e-3
    assert diagnosis.sampler_pit_p_value > 1e-3
    assert models[name].diagnose(x, own + 2.0).pit_p_value < 1e-6
    assert "CRPS" in str(diagnosis)
    assert "CRPS" not in str(models[name].diagnose())


@pytest.mark.parametrize("name", FITTED)
def test_a_stored_model_is_the_same_to_the_last_bit(name, models, data, tmp_path):
    model = models[name]
    model.save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    for ask in (
        lambda m: m.score_samples(*data),
        lambda m: m.sample(data[0], 3, random_state=1),
        lambda m: m.quantile(PLACES, 0.4),
    ):
        np.testing.assert_array_equal(ask(stored), ask(model))
    assert str(stored.diagnose()) == str(model.diagnose())
    again = clone(stored).set_params(random_state=0).fit(*data)
    np.testing.assert_array_equal(again.score_samples(*data), model.score_samples(*data))


@pytest.mark.parametrize("name", FITTED)
def test_the_score_follows_the_units(name, models, data):
    x, y = data
    scaled = KINDS[name](random_state=0).fit(3.0 * x - 1.0, 10.0 * y + 5.0)
    expected = models[name].score_samples(x, y) - np.log(10.0)
    np.testing.assert_allclose(scaled.score_samples(3.0 * x - 1.0, 10.0 * y + 5.0), expected, rtol=1e-6)


@pytest.mark.parametrize("name", FITTED)
def test_a_constant_input_is_named_and_ignored(name, models, data):
    x, y = data
    with pytest.warns(UserWarning, match="constant input"):
        model = KINDS[name](random_state=0).fit(np.column_stack([x, np.full(ROWS, 3.0)]), y)
    other = np.column_stack([x, np.full(ROWS, -7.0)])
    np.testing.assert_allclose(model.score_samples(other, y), models[name].score_samples(x, y), rtol=1e-10)


@pytest.mark.parametrize("name", FITTED)
def test_inputs_that_say_nothing_leave_the_marginal(name, data):
    with pytest.warns(UserWarning, match="constant input"):
        model = KINDS[name](random_state=0).fit(np.zeros((ROWS, 1)), data[1])
    assert np.ptp(model.score_samples(PLACES, np.ones(3))) < 1e-12


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (LeastSquaresConditional, {"width": 0.0}, "width must be a positive"),
        (LeastSquaresConditional, {"penalty": -1.0}, "penalty must be a positive"),
        (LeastSquaresConditional, {"n_centres": 0}, "n_centres must be a whole number"),
        (NeighbourDensity, {"radius": np.inf}, "radius must be a positive"),
        (ConditionalKernelDensity, {"condition_width": np.nan}, "condition_width must be a positive"),
        (ConditionalKernelDensity, {"background": 1.0}, "background must be at least 0"),
    ],
)
def test_senseless_settings_are_refused_by_name(data, kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**changes).fit(*data)


@pytest.mark.parametrize("name", FITTED)
def test_bad_data_are_refused(name, data):
    x, y = data
    with pytest.raises(ValueError, match="y is constant"):
        KINDS[name]().fit(x, np.ones(ROWS))
    with pytest.raises(ValueError, match="NaN"):
        KINDS[name]().fit(x, np.where(y > y.mean(), np.nan, y))
    with pytest.raises(ValueError, match="minimum of 10"):
        KINDS[name]().fit(x[:5], y[:5])
    with pytest.warns(TiesWarning):
        KINDS[name](random_state=0).fit(x, np.round(y))
    with pytest.raises(NotFittedError):
        KINDS[name]().score(x, y)


EXPECTED = {
    "check_methods_sample_order_invariance": "calls score_samples without y; a conditional density has none",
    "check_methods_subset_invariance": "calls score_samples without y; a conditional density has none",
    "check_sample_weight_equivalence_on_dense_data": "the folds of repeated rows differ",
}


# The checks fit labels and constant inputs, too.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::kexpfam.data.columns.TiesWarning", "ignore:constant input column")
@parametrize_with_checks(
    [kind(random_state=0) for kind in KINDS.values()], expected_failed_checks=lambda estimator: EXPECTED
)
def test_scikit_learns_contract(estimator, check):
    check(estimator)


def test_the_callers_jax_is_left_as_it_was(models, data):
    with jax.enable_x64(False):
        fitted = ConditionalKernelDensity(random_state=0).fit(*data)
        np.testing.assert_array_equal(fitted.score_samples(*data), models["kernel"].score_samples(*data))
        assert jax.numpy.ones(1).dtype == jax.numpy.float32


def test_components_are_chosen_by_their_masses():
    masses = np.array([[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]])
    uniforms = np.array([[0.0, 0.2499, 0.25, 0.9999], [0.0, 0.3, 0.6, 0.9999]])
    np.testing.assert_array_equal(choose_each(masses, uniforms), [[0, 0, 2, 2], [1, 1, 1, 1]])
