"""The conditional estimator: p(y | x) held against integrals, slow twins and closed forms; warnings, storage,
scikit-learn."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from oracles import changed, midpoint_grid
from scipy.integrate import quad
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import kexpfam
from kexpfam import DDE, ConditionalKernelExpFamily, Convex, Integration, Judgement, Kernel
from kexpfam.data.columns import TiesWarning
from kexpfam.data.encoding import ColumnKindWarning
from kexpfam.estimators import base
from kexpfam.estimators.base import UncertainNormaliserWarning
from kexpfam.estimators.kernel_exp_family import NearlyDeterministicWarning
from kexpfam.fit.bases import BASES, TAIL_SHARE, TAIL_WIDTH, tailed_gaussian
from kexpfam.fit.distil import Distillation
from kexpfam.fit.problem import SOLVERS, Status
from kexpfam.fit.saddle import DoublyDual
from kexpfam.model.density import CONDITION_MARGIN
from kexpfam.model.kernels import KERNELS
from kexpfam.model.measures import COVARIANCE_FLOOR
from kexpfam.paper import MMDGAN
from kexpfam.storage import StorageError

ROWS, DRAWS = 60, 400
SETTINGS = {
    "model": "kernel",
    "kernel": Kernel(
        condition_lengthscale=1.0,
        lengthscale=1.0,
        rkhs_penalty=1e-2,
        base_width=1.0,
        power=False,
        n_centres=10,
        integration=Integration(draws=2048),
    ),
    "solver": "exact",
    "random_state": 0,
}
SADDLE = DoublyDual(width=8, transport_depth=1, nu_depth=1, batch_size=32, transport_updates=2, nu_updates=1)
NETWORK = Distillation(network_components=6, width=16, depth=1, steps=400, conditions=512)
SMALL = DDE(saddle=SADDLE, steps=5, warm_start=True, polish=True, distillation=NETWORK)
BRIEF = Judgement(draws=500, certifying_draws=2048)
PLACES = np.array([[-1.5], [0.2], [1.7]])


def exact(**changes) -> ConditionalKernelExpFamily:
    return ConditionalKernelExpFamily(**changed(SETTINGS, **changes))


def curve(rows=ROWS, seed=0, noise=0.3):
    """Return a sine with skewed noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, (rows, 1))
    return x, np.sin(2.0 * x[:, 0]) + noise * rng.gamma(2.0, 1.0, rows)


@pytest.fixture(scope="module")
def data():
    return curve()


@pytest.fixture(scope="module")
def model(data):
    return exact().fit(*data)


@pytest.fixture(scope="module")
def powered(data):
    return exact(power=True).fit(*data)


@pytest.fixture(scope="module")
def boxed(data):
    return exact(base="box").fit(*data)


@pytest.fixture(scope="module")
def saddle(data):
    return exact(solver=SMALL).fit(*data)


@pytest.fixture(scope="module")
def plane_data(data):
    x, y = data
    return x, np.stack([y, x[:, 0] + np.random.default_rng(9).normal(size=ROWS)], 1)


@pytest.fixture(scope="module")
def plane(plane_data):
    return exact().fit(*plane_data)


def density_at(model, x, t):
    """Return p(t | x) at every t."""
    return np.exp(model.score_samples(np.repeat(np.atleast_2d(x), len(t), axis=0), t))


def line(model, count=4000):
    """Return midpoints and widths of cells in data units that cover all the mass, even in model units."""
    scaling = model.density_.scaling
    edges = scaling.to_data(np.linspace(-25.0, 25.0, count + 1)[:, None])[:, 0]
    return 0.5 * (edges[1:] + edges[:-1]), np.diff(edges)


FITTED = ["model", "powered", "boxed"]


@pytest.mark.slow
@pytest.mark.parametrize("fitted", [*FITTED, "saddle"])
def test_the_density_integrates_to_one_in_data_units(fitted, request):
    model = request.getfixturevalue(fitted)
    t, widths = line(model)
    for x in PLACES:
        # A box ends inside a cell of the test's grid.
        assert density_at(model, x, t) @ widths == pytest.approx(1.0, abs=5e-3 if fitted == "boxed" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_the_density_integrates_to_one_over_every_base(data, base):
    model = exact(base=base).fit(*data)
    # A component of a mixture may be as narrow as a single row.
    t, widths = line(model, 40_000 if base == "mixture" else 4000)
    assert density_at(model, PLACES[0], t) @ widths == pytest.approx(1.0, abs=5e-3 if base == "box" else 1e-3)


def test_the_density_of_heavy_tailed_targets_integrates_to_one(data):
    x, _ = data
    y = x[:, 0] + np.random.default_rng(3).standard_t(1.0, ROWS)
    model = exact().fit(x, y)
    assert model.density_.scaling.arcsinh == (True,)
    t, widths = line(model)
    for place in PLACES:
        assert density_at(model, place, t) @ widths == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("fitted", [*FITTED, pytest.param("saddle", marks=pytest.mark.slow)])
def test_one_condition_gives_the_same_density(fitted, data, request):
    model, (_, y) = request.getfixturevalue(fitted), data
    for x in PLACES:
        given = model.given(x)
        np.testing.assert_allclose(given.score_samples(y), np.log(density_at(model, x, y)), atol=1e-8)
        np.testing.assert_allclose(given.score_samples(y[:, None]), given.score_samples(y))


def test_the_log_density_is_the_formula(model, data):
    x, y = data
    u = (x[:, 0] - x.mean()) / x.std()
    w = scipy.stats.yeojohnson(u, float(model.density_.inputs.scaling.powers[0]))
    x_units = lambda points: (np.interp(points, np.sort(x[:, 0]), np.sort(w)) - w.mean()) / w.std()
    z = (y - y.mean()) / y.std()
    space, scale = model.density_.tilt.space, np.sqrt(np.var(z, ddof=1) + COVARIANCE_FLOOR)
    gaussian = lambda a, b: np.exp(-0.5 * (a[:, None] - b[None, :]) ** 2)
    spans = [
        (np.asarray(span.centres)[:, 0], np.asarray(span.whitening))
        for span in (space.condition, space.target)
    ]
    weights = np.asarray(model.density_.tilt.weights).reshape(space.condition.size, space.target.size)

    def unnormalised(row, targets):
        phi = gaussian(x_units(row), spans[0][0]) @ spans[0][1]
        psi = gaussian(targets, spans[1][0]) @ spans[1][1]
        wide = scipy.stats.norm.pdf(targets, 0.0, TAIL_WIDTH * scale)
        base = (1.0 - TAIL_SHARE) * scipy.stats.norm.pdf(targets, 0.0, scale) + TAIL_SHARE * wide
        return base * np.exp(psi @ (phi[0] @ weights))

    for i in range(0, ROWS, 12):
        p = lambda t, row=x[i]: unnormalised(row, np.array([t]))[0]
        mass = quad(p, -25.0, 25.0, points=[-3.0, 0.0, 3.0], limit=300, epsabs=1e-10)[0]
        assert model.score_samples(x[[i]], y[[i]])[0] == pytest.approx(
            np.log(p(z[i]) / mass / y.std()), abs=1e-4
        )


def test_f_is_where_the_penalised_likelihood_is_stationary(model, data):
    # The gradient: mean feature of the data, minus that of the model under the same conditions, minus penalty
    # times weights.
    x, _ = data
    density, task = model.density_, model._problem
    points, width = midpoint_grid([-22.0], [22.0], 6000)
    psi = density.tilt.space.target.matrix(points)
    phi = density.tilt.space.condition.matrix(task.sample.condition)
    weights = np.asarray(density.tilt.weights).reshape(phi.shape[1], psi.shape[1])
    exponents = density.tilt.base.log_densities(points) + (phi @ weights) @ psi.T
    masses = np.exp(exponents - exponents.max(1, keepdims=True))
    masses /= masses.sum(1, keepdims=True)
    seen = phi.T @ density.tilt.space.target.matrix(task.sample.target) / ROWS
    expected = phi.T @ (masses @ psi) / ROWS
    np.testing.assert_allclose(seen - expected, 1e-2 * weights, atol=2e-4)


def test_the_score_is_the_mean_log_density(model, data):
    log_density = model.score_samples(*data)
    assert log_density.shape == (ROWS,)
    assert model.score(*data) == pytest.approx(log_density.mean(), rel=1e-12)


@pytest.mark.parametrize("fitted", FITTED)
def test_the_distribution_function_is_the_integral_of_the_density(fitted, request):
    model = request.getfixturevalue(fitted)
    t, widths = line(model)
    for x in PLACES:
        slow = np.cumsum(density_at(model, x, t) * widths)
        for place in np.searchsorted(slow, [0.05, 0.3, 0.5, 0.9, 0.99]):
            found = model.cdf(x[None], [t[place] + 0.5 * widths[place]])
            assert found[0] == pytest.approx(slow[place], abs=5e-3 if fitted == "boxed" else 1e-3)


@pytest.mark.parametrize("fitted", FITTED)
def test_quantiles_invert_the_distribution_function(fitted, request):
    model, levels = request.getfixturevalue(fitted), np.array([0.001, 0.05, 0.5, 0.75, 0.95, 0.999])
    quantiles = model.quantile(PLACES, levels)
    assert quantiles.shape == (3, 6)
    assert np.all(np.diff(quantiles, axis=1) > 0.0)
    for column, level in zip(quantiles.T, levels, strict=True):
        np.testing.assert_allclose(model.cdf(PLACES, column), level, atol=1e-9)
        np.testing.assert_array_equal(model.quantile(PLACES, level), column)


def test_the_distribution_function_goes_from_zero_to_one(model, boxed):
    for fitted in (model, boxed):
        np.testing.assert_allclose(fitted.cdf(PLACES, [-1e6, -1e6, -1e6]), 0.0, atol=1e-12)
        np.testing.assert_allclose(fitted.cdf(PLACES, [1e6, 1e6, 1e6]), 1.0, atol=1e-12)


@pytest.mark.parametrize("fitted", FITTED)
def test_the_prediction_is_the_mean_of_the_density(fitted, request):
    model = request.getfixturevalue(fitted)
    t, widths = line(model)
    slow = [density_at(model, x, t) * t @ widths for x in PLACES]
    deviation = np.std(model.training_data_[1])
    np.testing.assert_allclose(
        model.predict(PLACES), slow, atol=(2e-2 if fitted == "boxed" else 1e-3) * deviation
    )


def test_intervals_are_central_and_hold_what_they_say(model):
    interval = model.interval(PLACES, 0.8)
    np.testing.assert_allclose(interval, model.quantile(PLACES, [0.1, 0.9]), rtol=1e-9)
    t, widths = line(model)
    for x, (low, high) in zip(PLACES, interval, strict=True):
        # The interval's ends lie inside cells of the test's grid.
        inside = np.clip((high - t) / widths + 0.5, 0.0, 1.0) - np.clip((low - t) / widths + 0.5, 0.0, 1.0)
        assert density_at(model, x, t) * inside @ widths == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("fitted", FITTED)
def test_the_crps_is_the_integral_of_the_squared_distance_to_a_step(fitted, data, request):
    model, (x, y) = request.getfixturevalue(fitted), data
    rows = [0, 7, 33]
    fast = model.density_.crps(y[rows, None], x[rows])
    for i, score in zip(rows, fast, strict=True):
        low, high = model.quantile(x[[i]], [1e-9, 1.0 - 1e-9])[0] + np.array([-1.0, 1.0])
        t, width = midpoint_grid([min(low, y[i])], [max(high, y[i])], 4000)
        levels = model.cdf(np.repeat(x[[i]], len(t), axis=0), t[:, 0])
        assert score == pytest.approx(width * np.sum((levels - (t[:, 0] >= y[i])) ** 2), rel=5e-3)


def test_the_crps_is_gneitings_expectation(model, data):
    # E|Y - y| - E|Y - Y'| / 2 by masses on a coarse grid.
    x, y = data
    t, width = midpoint_grid([y.min() - 6.0], [y.max() + 6.0], 1500)
    masses = width * density_at(model, x[4], t[:, 0])
    expected = masses @ np.abs(t[:, 0] - y[4]) - 0.5 * masses @ np.abs(t - t.T) @ masses
    assert model.density_.crps(y[[4], None], x[[4]])[0] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("fitted", ["model", "boxed"])
@pytest.mark.parametrize("target", [-50.0, 50.0])
def test_a_target_beyond_the_grid_pays_for_its_whole_distance(fitted, target, request):
    model = request.getfixturevalue(fitted)
    # E|Y - y| - E|Y - Y'| / 2, and the first is the distance to the mean if all of Y is on one side of y.
    density = model.density_
    masses = next(density.probabilities(PLACES[:1]))[0]
    t = density.scaling.to_data(density.nodes.points)
    found = density.crps(np.array([[target]]), PLACES[:1])[0]
    expected = abs(target - masses @ t[:, 0]) - 0.5 * masses @ np.abs(t - t.T) @ masses
    assert found == pytest.approx(expected, abs=0.02)


def test_a_box_has_no_density_outside(boxed, data):
    _, y = data
    low, high = y.min() - 0.2 * np.ptp(y), y.max() + 0.2 * np.ptp(y)
    outside = boxed.score_samples(PLACES[[0, 0, 0]], [low - 1e-3, high + 1e-3, 1e6])
    assert np.all(np.isneginf(outside))
    assert np.all(np.isfinite(boxed.score_samples(PLACES[[0, 0]], [low + 1e-3, high - 1e-3])))
    draws = boxed.sample(PLACES, DRAWS, random_state=0)
    assert np.all((draws >= low) & (draws <= high))


@pytest.mark.parametrize("power", [False, True])
def test_bounds_of_the_target_are_in_its_own_units(data, power):
    x, y = data
    model = exact(bounds=(y.min() - 0.01, 10.0), power=power).fit(x, y)
    assert np.all(np.isneginf(model.score_samples(PLACES[:2], [y.min() - 0.02, 10.01])))
    draws = model.sample(PLACES, DRAWS, random_state=0)
    assert np.all((draws >= y.min() - 0.01) & (draws <= 10.0))
    t, width = midpoint_grid([y.min() - 0.01], [10.0], 4000)
    assert width * density_at(model, PLACES[1], t[:, 0]).sum() == pytest.approx(1.0, abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("fitted", "refine"), [("model", 0), ("powered", 0), ("model", 2), ("saddle", 2), ("saddle", 0)]
)
def test_draws_have_the_mean_and_the_quantiles_of_the_density(fitted, refine, seed, request):
    model = request.getfixturevalue(fitted)
    draws = model.sample(PLACES, DRAWS, random_state=seed, refine=refine)
    assert draws.shape == (3, DRAWS)
    # A plain sampler that was learned is allowed to be off by a tenth of a standard deviation and by 5 % of
    # mass on top.
    slack = 1.0 if fitted == "saddle" and refine == 0 else 0.0
    errors = draws.std(1) / np.sqrt(DRAWS)
    assert np.all(np.abs(draws.mean(1) - model.predict(PLACES)) < 4 * errors + 0.1 * slack * draws.std(1))
    for level in (0.1, 0.5, 0.9):
        below = (draws <= model.quantile(PLACES, level)[:, None]).mean(1)
        assert np.all(np.abs(below - level) < 4 * np.sqrt(level * (1.0 - level) / DRAWS) + 0.05 * slack)


@pytest.mark.slow
def test_draws_under_one_condition_follow_the_same_density(model):
    draws = model.given(PLACES[0]).sample(DRAWS, random_state=0)
    assert draws.shape == (DRAWS,)
    levels = model.cdf(np.repeat(PLACES[:1], DRAWS, axis=0), draws)
    assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-4


def test_draws_follow_the_seed(model):
    draws = model.sample(PLACES, DRAWS, random_state=3)
    np.testing.assert_array_equal(draws, model.sample(PLACES, DRAWS, random_state=3))
    assert not np.array_equal(draws, model.sample(PLACES, DRAWS, random_state=4))
    state = np.random.RandomState(0)
    assert not np.array_equal(
        model.sample(PLACES, DRAWS, random_state=state), model.sample(PLACES, DRAWS, random_state=state)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_linear_gaussian_data_are_described_nearly_as_well_as_by_the_truth(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1200, 1))
    y = 0.8 * x[:, 0] + 0.6 * rng.normal(size=1200)
    # Smooth enough for a line; 200 rows and a handful of parameters cost a few hundredths of a nat, p / (2 n)
    # each.
    model = exact(condition_lengthscale=3.0, lengthscale=2.0, rkhs_penalty=1e-4).fit(x[:200], y[:200])
    losses = scipy.stats.norm.logpdf(y[200:], 0.8 * x[200:, 0], 0.6) - model.score_samples(x[200:], y[200:])
    error = losses.std() / np.sqrt(len(losses))
    assert -4 * error < losses.mean() < 0.05 + 4 * error


def test_the_saddle_has_nearly_the_exact_density(model, saddle, data):
    difference = saddle.score_samples(*data) - model.score_samples(*data)
    assert np.abs(difference).max() < 0.05
    assert saddle.solution_.status is Status.CONVERGED


def test_conditions_beyond_the_margin_are_those_at_the_margin(model):
    far = model.score_samples([[1e3], [1e6]], [0.0, 0.0])
    assert np.all(np.isfinite(far))
    assert far[0] == far[1]
    inputs = model.density_.inputs
    end = inputs.scaling.to_data(inputs.high[None] + CONDITION_MARGIN)
    assert model.score_samples(end, [0.0])[0] == pytest.approx(far[0], abs=1e-9)


def test_far_targets_have_a_low_log_density_and_no_nan(model):
    log_density = model.score_samples(PLACES[[0, 0]], [1e3, -1e6])
    assert np.all(log_density < -1e2)
    assert np.all(np.isfinite(log_density))


@pytest.mark.parametrize("factor", [10.0, 1e-3])
def test_the_score_follows_the_units(model, data, factor):
    x, y = data
    scaled = exact().fit(factor * x - 3.0, factor * y + 5.0)
    assert scaled.score(factor * x - 3.0, factor * y + 5.0) == pytest.approx(
        model.score(x, y) - np.log(factor), abs=1e-5
    )
    np.testing.assert_allclose(
        scaled.predict(factor * PLACES - 3.0), factor * model.predict(PLACES) + 5.0, rtol=1e-4
    )


def test_the_order_of_the_rows_does_not_matter(model, data):
    x, y = data
    order = np.random.default_rng(0).permutation(ROWS)
    assert exact().fit(x[order], y[order]).score(x, y) == pytest.approx(model.score(x, y), abs=1e-6)


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_kernel_fits_better_than_the_marginal(data, kernel):
    x, y = data
    marginal = scipy.stats.norm(y.mean(), y.std()).logpdf(y).mean()
    assert exact(kernel=kernel).fit(x, y).score(x, y) > marginal + 0.2


def test_an_infinite_penalty_in_the_limit_leaves_the_base(data):
    x, y = data
    z = ((y - y.mean()) / y.std())[:, None]
    base = tailed_gaussian(z, width=1.0).log_densities(z) - np.log(y.std())
    np.testing.assert_allclose(exact(rkhs_penalty=1e8).fit(x, y).score_samples(x, y), base, atol=1e-4)


def test_a_base_may_be_a_measure(model, data):
    x, y = data
    base = tailed_gaussian(((y - y.mean()) / y.std())[:, None], width=1.0)
    same = exact(base=base, base_width=None).fit(x, y)
    np.testing.assert_allclose(same.score_samples(x, y), model.score_samples(x, y), atol=1e-8)


@pytest.mark.slow
def test_two_targets_have_a_joint_density(plane, plane_data):
    x, y = plane_data
    assert plane.score_samples(x, y).shape == (ROWS,)
    assert plane.predict(PLACES).shape == (3, 2)
    points, volume = midpoint_grid(y.mean(0) - 8 * y.std(0), y.mean(0) + 8 * y.std(0), 120)
    masses = volume * density_at(plane, PLACES[1], points)
    assert masses.sum() == pytest.approx(1.0, abs=2e-2)
    np.testing.assert_allclose(masses @ points / masses.sum(), plane.predict(PLACES[[1]])[0], atol=2e-2)
    np.testing.assert_allclose(
        plane.given(PLACES[1]).score_samples(y), np.log(density_at(plane, PLACES[1], y)), atol=1e-8
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_of_two_targets_have_the_mean_of_the_density(plane, seed):
    draws = plane.sample(PLACES, DRAWS, random_state=seed)
    assert draws.shape == (3, DRAWS, 2)
    assert np.all(np.abs(draws.mean(1) - plane.predict(PLACES)) < 4 * draws.std(1) / np.sqrt(DRAWS))


QUANTILE_LIKE = {
    "quantile": lambda model, x, y: model.quantile(x, 0.5),
    "interval": lambda model, x, y: model.interval(x),
    "cdf": lambda model, x, y: model.cdf(x, y),
}


@pytest.mark.parametrize("ask", QUANTILE_LIKE.values(), ids=QUANTILE_LIKE)
def test_quantiles_of_two_targets_are_refused(plane, plane_data, ask):
    with pytest.raises(ValueError, match="need a single target"):
        ask(plane, *plane_data)


@pytest.mark.slow
def test_three_targets_have_no_grid(data):
    x, y = data
    rng = np.random.default_rng(0)
    y = np.stack([y, x[:, 0] + rng.normal(size=ROWS), rng.normal(size=ROWS)], 1)
    with pytest.raises(ValueError, match=r"needs a grid, and y has 3 columns: use solver='auto'"):
        exact().fit(x, y)
    model = exact(solver=Convex(distillation=NETWORK)).fit(x, y)
    assert model.score_samples(x, y).shape == (ROWS,)
    assert np.all(np.isfinite(model.score_samples(x, y)))
    assert model.predict(PLACES).shape == (3, 3)
    assert model.sample(PLACES, 5, random_state=0).shape == (3, 5, 3)
    with pytest.raises(ValueError, match="need a single target"):
        model.quantile(PLACES, 0.5)


def test_targets_keep_the_shape_they_came_with(data, model):
    x, y = data
    column = exact().fit(x, y[:, None])
    assert column.predict(PLACES).shape == (3, 1)
    assert column.sample(PLACES, DRAWS, random_state=0).shape == (3, DRAWS, 1)
    assert column.training_data_[1].shape == (ROWS, 1)
    np.testing.assert_array_equal(column.score_samples(x, y), model.score_samples(x, y[:, None]))
    np.testing.assert_array_equal(model.training_data_[1], y)


def test_the_diagnosis_reads_as_a_verdict_with_numbers(model):
    diagnosis = model.diagnose(settings=BRIEF)
    assert diagnosis.verdict == "good"
    assert diagnosis.converged
    assert "pit" not in diagnosis
    assert 0.0 <= diagnosis.f_gap < 1e-3
    assert diagnosis.duality_gap == pytest.approx(diagnosis.f_gap + max(diagnosis.sampler_kl, 0.0))
    # The sampler draws from cells of the density's own grid.
    assert abs(diagnosis.sampler_kl) < 4 * diagnosis["sampler_kl"].error + 1e-3
    assert diagnosis.effective_share > 0.95
    text = str(diagnosis)
    assert text.startswith("verdict:")
    assert all(
        name in text
        for name in (
            "duality gap",
            "KL(sampler || density)",
            "effective share",
            "log Z(x)",
            "held-out X and y",
        )
    )


def test_the_calibration_is_that_of_slow_counting(model):
    x, y = curve(seed=5)
    calibration = model.diagnose(x, y, settings=BRIEF)
    np.testing.assert_allclose(calibration.pit, model.cdf(x, y), atol=1e-9)
    assert not calibration.randomised
    for level, share in calibration.coverage.items():
        low, high = model.interval(x, level).T
        assert share == pytest.approx(np.mean((y >= low) & (y <= high)))
    assert calibration.crps == pytest.approx(model.density_.crps(y[:, None], x).mean())
    assert calibration.held_out_score == pytest.approx(model.score(x, y))
    levels = model.cdf(x, y)
    tests = [scipy.stats.kstest(ranks, "uniform").pvalue for ranks in (levels, np.abs(2.0 * levels - 1.0))]
    assert calibration.pit_p_value == pytest.approx(min(2.0 * min(tests), 1.0))
    # Ranks among 200 draws: each off by its binomial error.
    assert np.all(
        np.abs(calibration.sampler_pit - calibration.pit) < 5 * 0.5 / np.sqrt(BRIEF.pit_draws) + 1e-2
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_targets_drawn_from_the_model_are_calibrated(model, seed):
    x = np.repeat(np.linspace(-1.8, 1.8, 20), 3)[:, None]
    y = model.sample(x, 1, random_state=seed)[:, 0]
    calibration = model.diagnose(x, y, random_state=seed, settings=BRIEF)
    assert calibration.pit_p_value > 1e-3
    assert calibration.sampler_pit_p_value > 1e-3
    for level, share in calibration.coverage.items():
        assert abs(share - level) < 4 * np.sqrt(level * (1.0 - level) / len(y))


def test_targets_from_elsewhere_are_called_uncalibrated(model, data):
    x, y = data
    diagnosis = model.diagnose(x, y + 1.0, settings=BRIEF)
    assert diagnosis.pit_p_value < 1e-6
    assert diagnosis.fits == diagnosis.verdict == "poor"
    assert "do not look like draws" in str(diagnosis)


def test_rounded_targets_are_judged_by_a_randomised_pit(model):
    x = np.repeat(np.linspace(-1.8, 1.8, 20), 3)[:, None]
    y = np.round(model.sample(x, 1, random_state=0)[:, 0])
    calibration = model.diagnose(x, y, settings=BRIEF)
    assert calibration.randomised
    assert calibration.pit_p_value > 1e-3
    assert np.all(calibration.pit >= model.cdf(x, y - 0.5) - 1e-9)
    assert np.all(calibration.pit <= model.cdf(x, y + 0.5) + 1e-9)


def test_a_calibration_needs_both_inputs_and_targets(model, data):
    with pytest.raises(ValueError, match="requires y"):
        model.diagnose(data[0])


def test_binary_targets_are_said_aloud(data):
    x, y = data
    with (
        pytest.warns(TiesWarning, match=r"takes only 2 values.*'category'"),
        pytest.warns(ColumnKindWarning, match="few whole numbers"),
    ):
        model = exact().fit(x, (y > y.mean()).astype(float))
    assert np.isfinite(model.score(x, (y > y.mean()).astype(float)))


def test_repeated_targets_are_said_aloud(data):
    x, y = data
    with pytest.warns(TiesWarning, match=r"repeats in \d\d% of the rows.*'rounded'"):
        exact().fit(x, np.round(y, 1))


def test_targets_that_are_a_function_of_the_inputs_are_said_aloud(data):
    x, _ = data
    y = x[:, 0] ** 3
    # No length scale is long enough to make the smallest penalty too small.
    with pytest.warns(NearlyDeterministicWarning, match="function of the inputs"):
        model = exact(rkhs_penalty=None, lengthscale=0.2, condition_lengthscale=0.5).fit(x, y)
    assert np.all(np.isfinite(model.score_samples(x, y)))
    assert model.score(x, y) > exact().fit(x, y).score(x, y)


def test_an_uncertain_normaliser_is_said_aloud(data, monkeypatch):
    monkeypatch.setattr(base, "LARGE_ERROR", -1.0)
    with pytest.warns(UncertainNormaliserWarning, match="diagnose"):
        exact().fit(*data)


def test_a_constant_input_is_named_and_changes_nothing(model, data):
    x, y = data
    wider = np.insert(x, 0, 3.0, axis=1)
    with pytest.warns(UserWarning, match=r"constant input column\(s\) 0 contain no information"):
        other = exact().fit(wider, y)
    np.testing.assert_allclose(other.score_samples(wider, y), model.score_samples(x, y), atol=1e-6)
    with pytest.warns(UserWarning, match=r"constant input column\(s\) colour"):
        exact().fit(pd.DataFrame({"x": x[:, 0], "colour": 1.0}), y)


def test_a_constant_input_is_ignored_whatever_its_value_later(data):
    x, y = data
    with pytest.warns(UserWarning, match="constant input"):
        model = exact().fit(np.insert(x, 1, 3.0, axis=1), y)
    same, other = (model.predict(np.insert(PLACES, 1, value, axis=1)) for value in (3.0, 4.0))
    np.testing.assert_allclose(same, other, atol=1e-9)


def test_inputs_that_say_nothing_at_all_leave_one_density(data):
    _, y = data
    with pytest.warns(UserWarning, match="constant input"):
        model = exact().fit(np.ones((ROWS, 1)), y)
    t, widths = line(model)
    assert density_at(model, [1.0], t) @ widths == pytest.approx(1.0, abs=1e-4)


def with_cell(values, value):
    changed = values.astype(object if isinstance(value, str) else float)
    changed.flat[3] = value
    return changed


BAD_DATA = {
    "nan in y": (lambda x, y: (x, with_cell(y, np.nan)), "without missing values"),
    "infinity in x": (lambda x, y: (with_cell(x, np.inf), y), "infinity"),
    "infinity in y": (lambda x, y: (x, with_cell(y, np.inf)), "infinity"),
    "text in x": (lambda x, y: (with_cell(x, "blue"), y), "60 different labels in 60 rows"),
    "text in y": (lambda x, y: (x, with_cell(y, "blue")), "60 different labels in 60 rows"),
    "too few rows": (lambda x, y: (x[:9], y[:9]), r"9 sample\(s\).*minimum of 10"),
    "other lengths": (lambda x, y: (x, y[:-1]), "inconsistent numbers of samples"),
    "no columns": (lambda x, y: (x[:, :0], y), r"0 feature\(s\)"),
    "flat x": (lambda x, y: (x[:, 0], y), "Expected 2D array"),
    "no y": (lambda x, y: (x, None), "requires y"),
    "deep y": (lambda x, y: (x, y[:, None, None]), "dim"),
    "constant y": (lambda x, y: (x, np.full(ROWS, 2.0)), "y is constant: a constant has no density"),
    "one constant column of y": (lambda x, y: (x, np.stack([y, np.ones(ROWS)], 1)), "constant"),
    "complex x": (lambda x, y: (x + 1j, y), "Complex data not supported"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_DATA.values(), ids=BAD_DATA)
def test_bad_data_are_refused_with_the_reason(data, spoil, message):
    with pytest.raises(ValueError, match=message):
        exact().fit(*spoil(*data))


BAD_SETTINGS = {
    "solver": ({"solver": "guess"}, r"unknown solver 'guess'.*auto, exact, dde"),
    "kernel": ({"kernel": "guess"}, r"unknown kernel 'guess'.*gaussian, laplace"),
    "base": ({"base": "guess"}, r"unknown base 'guess'.*gaussian, box, mixture"),
    "penalty of zero": ({"rkhs_penalty": 0.0}, "rkhs_penalty must be positive"),
    "penalty of nan": ({"rkhs_penalty": np.nan}, "rkhs_penalty must be positive"),
    "no centres": ({"n_centres": 0}, "n_centres must be a whole number of at least 1"),
    "negative length scale": ({"lengthscale": -1.0}, r"lengthscale must be positive.*got -1\.0"),
    "length scales of y": ({"lengthscale": [1.0, 2.0]}, "lengthscale must be positive and of shape"),
    "length scale of nan": ({"condition_lengthscale": np.nan}, "condition_lengthscale must be positive"),
    "length scales of another width": (
        {"condition_lengthscale": [1.0, 1.0]},
        r"condition_lengthscale.*shape \(\) or \(1,\)",
    ),
    "width of zero": ({"base_width": 0.0}, "base_width must be positive"),
    "solver object": ({"solver": MMDGAN()}, r"MMDGAN does not support conditions.*'auto', 'exact' or 'dde'"),
    **{
        name: ({"solver": name}, "does not support conditions")
        for name in SOLVERS
        if name not in ("auto", "exact", "dde")
    },
}


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_refused_by_name(data, changes, message):
    with pytest.raises(ValueError, match=message):
        exact(**changes).fit(*data)


BAD_QUESTIONS = {
    "width of x": (
        lambda m: m.predict(np.zeros((3, 2))),
        "2 features, but ConditionalKernelExpFamily is expecting 1",
    ),
    "nan": (lambda m: m.predict([[np.nan]]), "NaN"),
    "width of y": (
        lambda m: m.score_samples(PLACES, np.zeros((3, 2))),
        "y has 2 columns, but the model was fitted to 1",
    ),
    "lengths": (lambda m: m.score_samples(PLACES, np.zeros(2)), "inconsistent numbers of samples"),
    "nan in y": (lambda m: m.score_samples(PLACES, [0.0, np.nan, 0.0]), "NaN"),
    "level of one": (
        lambda m: m.quantile(PLACES, 1.0),
        "levels must be one or more numbers strictly between 0 and 1",
    ),
    "level of nan": (
        lambda m: m.quantile(PLACES, [0.5, np.nan]),
        "levels must be one or more numbers strictly between 0 and 1",
    ),
    "coverage": (lambda m: m.interval(PLACES, 1.0), "coverage must lie strictly between 0 and 1"),
    "two conditions": (lambda m: m.given(PLACES), "one condition of 1 numbers, got 3"),
    "no draws": (lambda m: m.sample(PLACES, 0), "n_samples must be a whole number of at least 1"),
    "half a draw": (lambda m: m.sample(PLACES, 2.5), "n_samples must be a whole number"),
    "negative refining": (
        lambda m: m.sample(PLACES, 2, refine=-1),
        "refine must be a whole number of at least 0",
    ),
}


@pytest.mark.parametrize(("ask", "message"), BAD_QUESTIONS.values(), ids=BAD_QUESTIONS)
def test_bad_questions_are_refused_with_the_reason(model, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(model)


def test_nothing_can_be_asked_before_the_fit(data, tmp_path):
    new, (x, y) = exact(), data
    for ask in (new.score_samples, new.score, new.cdf):
        with pytest.raises(NotFittedError):
            ask(x, y)
    for ask in (new.sample, new.interval, new.given, lambda x: new.quantile(x, 0.5)):
        with pytest.raises(NotFittedError):
            ask(x)
    for ask in (new.diagnose, lambda: new.save(tmp_path / "model.kexpfam"), lambda: new.training_data_):
        with pytest.raises(NotFittedError):
            ask()


def test_no_prediction_before_the_fit(data):
    with pytest.raises(NotFittedError):
        exact().predict(data[0])


CHECKED = exact(lengthscale=2.0, rkhs_penalty=0.1)
EXPECTED = {
    "check_methods_sample_order_invariance": "calls score_samples without y; a conditional density has none",
    "check_methods_subset_invariance": "calls score_samples without y; a conditional density has none",
    "check_regressor_multioutput": "has five targets, and solver='exact' needs a grid",
}


# The checks fit labels and constant inputs, too.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::kexpfam.TiesWarning", "ignore:constant input column")
@pytest.mark.filterwarnings("ignore::kexpfam.data.encoding.ColumnKindWarning")
@parametrize_with_checks([CHECKED], expected_failed_checks=lambda estimator: EXPECTED)
def test_scikit_learns_contract(estimator, check):
    check(estimator)


def test_a_clone_has_the_settings_and_no_fit(model, data):
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        copy.score(*data)
    np.testing.assert_array_equal(copy.fit(*data).score_samples(*data), model.score_samples(*data))


def test_a_pipeline_scores_and_predicts(model, data):
    x, y = data
    pipeline = make_pipeline(StandardScaler(), exact()).fit(10.0 * x + 3.0, y)
    assert pipeline.score(10.0 * x + 3.0, y) == pytest.approx(model.score(x, y), abs=1e-6)
    np.testing.assert_allclose(pipeline.predict(10.0 * PLACES + 3.0), model.predict(PLACES), atol=1e-5)


def test_a_grid_search_prefers_the_better_penalty(data):
    search = GridSearchCV(exact(), {"kernel__rkhs_penalty": [1e-2, 1e4]}, cv=3).fit(*data)
    assert search.best_params_ == {"kernel__rkhs_penalty": 1e-2}
    assert np.all(np.isfinite(search.cv_results_["mean_test_score"]))


def test_cross_validation_is_fits_to_the_folds(data):
    x, y = data
    folds = KFold(3)
    by_hand = [exact().fit(x[train], y[train]).score(x[test], y[test]) for train, test in folds.split(x)]
    np.testing.assert_allclose(cross_val_score(exact(), x, y, cv=folds), by_hand, rtol=1e-9)


def test_frames_are_read_by_name(model, data):
    x, y = data
    frame, series = pd.DataFrame(x, columns=["dose"]), pd.Series(y, name="response")
    named = exact().fit(frame, series)
    np.testing.assert_array_equal(named.feature_names_in_, ["dose"])
    np.testing.assert_allclose(named.score_samples(frame, series), model.score_samples(x, y), atol=1e-9)
    with pytest.raises(ValueError, match="feature names"):
        named.predict(frame.rename(columns={"dose": "other"}))
    assert exact().fit(frame, series.to_frame()).predict(frame[:2]).shape == (2, 1)


def test_one_row_of_a_frame_is_a_condition(data):
    x, y = data
    frame = pd.DataFrame(x, columns=["dose"])
    named = exact().fit(frame, y)
    np.testing.assert_allclose(
        named.given(frame[:1]).score_samples(y[:1]), named.score_samples(frame[:1], y[:1]), atol=1e-9
    )


def test_the_callers_jax_is_left_as_it_was(model, data):
    with jax.enable_x64(False):
        fitted = exact().fit(*data)
        assert jnp.ones(1).dtype == jnp.float32
        np.testing.assert_array_equal(fitted.score_samples(*data), model.score_samples(*data))
        assert fitted.predict(PLACES).dtype == np.float64


def test_the_same_seed_gives_the_same_model(saddle, data):
    again = clone(saddle).fit(*data)
    np.testing.assert_array_equal(again.score_samples(*data), saddle.score_samples(*data))
    np.testing.assert_array_equal(
        again.sample(PLACES, DRAWS, random_state=1), saddle.sample(PLACES, DRAWS, random_state=1)
    )


def test_another_seed_gives_another_sampler_of_nearly_the_same_density(saddle, data):
    other = clone(saddle).set_params(random_state=1).fit(*data)
    assert not np.array_equal(
        other.sample(PLACES, DRAWS, random_state=1), saddle.sample(PLACES, DRAWS, random_state=1)
    )
    assert other.score(*data) == pytest.approx(saddle.score(*data), abs=0.05)


@pytest.mark.parametrize("fitted", ["model", "powered", "saddle"])
def test_a_stored_model_is_the_same_to_the_last_bit(fitted, data, tmp_path, request):
    model, file = request.getfixturevalue(fitted), tmp_path / "model.kexpfam"
    model.save(file)
    stored = kexpfam.load(file)
    assert isinstance(stored, ConditionalKernelExpFamily)
    np.testing.assert_array_equal(stored.score_samples(*data), model.score_samples(*data))
    for refine in (0, 2):
        draws = [m.sample(PLACES, DRAWS, random_state=1, refine=refine) for m in (stored, model)]
        np.testing.assert_array_equal(*draws)
    np.testing.assert_array_equal(stored.quantile(PLACES, [0.1, 0.9]), model.quantile(PLACES, [0.1, 0.9]))
    assert stored.solution_.status is model.solution_.status
    assert stored.predict(PLACES).shape == (3,)
    np.testing.assert_array_equal(stored.training_data_[0], data[0])
    np.testing.assert_array_equal(stored.training_data_[1], data[1])


def test_a_stored_model_diagnoses_itself_alike(model, data, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    assert str(kexpfam.load(tmp_path / "model.kexpfam").diagnose(*data, settings=BRIEF)) == str(
        model.diagnose(*data, settings=BRIEF)
    )


def test_a_stored_model_can_be_fitted_again(model, data, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    again = kexpfam.load(tmp_path / "model.kexpfam").set_params(random_state=0).fit(*data)
    np.testing.assert_array_equal(again.score_samples(*data), model.score_samples(*data))


@pytest.mark.parametrize("scales", [[1.0], np.array([1.0]), (1.0,)], ids=["list", "array", "tuple"])
def test_length_scales_of_any_kind_can_be_stored(scales, model, data, tmp_path):
    exact(condition_lengthscale=scales).fit(*data).save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(stored.score_samples(*data), model.score_samples(*data))


@pytest.mark.parametrize("fitted", ["model", "saddle"])
def test_a_model_can_be_pickled(fitted, data, request):
    model = request.getfixturevalue(fitted)
    with jax.enable_x64(False):  # as in a worker of joblib
        copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.score_samples(*data), model.score_samples(*data))


def test_a_checkpoint_resumes_a_fit(saddle, data, tmp_path):
    file = tmp_path / "state.kexpfam"
    first = clone(saddle).set_params(checkpoint=file).fit(*data)
    assert file.is_file()
    second = clone(first).fit(*data)
    for model in (first, second):
        np.testing.assert_array_equal(model.score_samples(*data), saddle.score_samples(*data))
    with pytest.raises(StorageError, match="other data, settings or solver"):
        clone(first).set_params(kernel__rkhs_penalty=2e-2).fit(*data)


def test_the_listener_hears_of_selection_and_of_steps(saddle, data):
    reports = []
    clone(saddle).set_params(progress=reports.append, kernel__rkhs_penalty=None).fit(*data)
    stages = {report.stage for report in reports}
    assert "selection" in stages
    assert len(stages) == 2
    assert reports[-1].step == reports[-1].steps == SMALL.steps
