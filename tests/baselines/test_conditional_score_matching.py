import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import midpoint_grid
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

import kexpfam
from kexpfam.baselines.derivatives import (
    base_scores,
    derivative_gram,
    fitted_losses,
    full_weights,
    product_gram,
)
from kexpfam.baselines.score_matching import ConditionalScoreMatching
from kexpfam.baselines.score_search import folds_of, row_losses
from kexpfam.data.columns import TiesWarning
from kexpfam.data.sample import Sample
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian

CONDITION_KERNEL, KERNEL = kernels.Gaussian(np.array([0.9, 2.0])), kernels.Gaussian(0.7)
PENALTY = 1e-2
SETTINGS = {"condition_lengthscale": 0.8, "lengthscale": 1.0, "rkhs_penalty": 1e-3, "random_state": 0}
PLACES = np.array([[-1.0], [0.3], [1.2]])
CHECKED = ConditionalScoreMatching(
    condition_lengthscale=1.0, lengthscale=2.0, rkhs_penalty=0.1, random_state=0
)
EXPECTED = {
    "check_methods_sample_order_invariance": "calls score_samples without y; a conditional density has none",
    "check_methods_subset_invariance": "calls score_samples without y; a conditional density has none",
}


def wave(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, (count, 1))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=count)


@pytest.fixture(scope="module")
def data():
    return wave(60)


@pytest.fixture(scope="module")
def model(data):
    return ConditionalScoreMatching(**SETTINGS).fit(*data)


@pytest.fixture(scope="module")
def selected(data):
    return ConditionalScoreMatching(random_state=0).fit(*data)


@pytest.fixture(scope="module")
def small():
    """Return few rows with two inputs, a normal around the targets, and its scores."""
    rng = np.random.default_rng(0)
    sample = Sample(rng.normal(size=(8, 1)), rng.normal(size=(8, 2)))
    base = Gaussian.fitted(sample.target, width=1.5)
    return sample, base, base_scores(base, sample.target)


def slow_solution(sample, scores, penalty):
    """Return f as a function of (x, y): the minimiser over products of kernels and derivatives."""
    x, y = sample.condition, sample.target
    n = len(x)
    pairs = list(itertools.product(range(n), range(2)))
    k = lambda s, t: KERNEL(jnp.array([s]), jnp.array([t]))
    by_centre = (jax.grad(k, 1), jax.grad(jax.grad(k, 1), 1))
    slopes = [jax.jit(jax.vmap(jax.vmap(jax.grad(g), (None, 0)), (0, None))) for g in by_centre]
    bends = [jax.jit(jax.vmap(jax.vmap(jax.grad(jax.grad(g)), (None, 0)), (0, None))) for g in by_centre]
    kx = np.array([[float(CONDITION_KERNEL(a, b)) for b in sample.condition] for a in sample.condition])
    first = [kx * np.asarray(g(y[:, 0], y[:, 0])) for g in slopes]
    second = [kx * np.asarray(g(y[:, 0], y[:, 0])) for g in bends]
    # The derivative of feature (m, b) at row i; inner products are derivatives by the first argument too.
    norms = np.array([[(first, second)[a][b][i, m] for m, b in pairs] for i, a in pairs])
    matrix, slope = penalty * norms, np.zeros(2 * n)
    for i in range(n):
        row = np.array([first[b][i, m] for m, b in pairs])
        matrix = matrix + np.outer(row, row) / n
        slope += (row * scores[i, 0] + np.array([second[b][i, m] for m, b in pairs])) / n
    weights = -np.linalg.lstsq(matrix, slope, rcond=1e-15)[0]

    def f(condition, target):
        terms = [
            float(CONDITION_KERNEL(condition, x[m])) * float(by_centre[b](target, y[m, 0])) for m, b in pairs
        ]
        return float(np.dot(terms, weights))

    return f


def test_the_solution_is_the_slow_one(small):
    sample, base, scores = small
    weights = full_weights(KERNEL, CONDITION_KERNEL, sample, scores, PENALTY)
    f, new = slow_solution(sample, scores, PENALTY), np.random.default_rng(1).normal(size=(4, 3))
    model = ConditionalScoreMatching(
        condition_lengthscale=CONDITION_KERNEL.lengthscale, lengthscale=0.7, rkhs_penalty=PENALTY, base=base
    )
    model.selection_ = model._select(sample, base, 0, None)
    problem, found = model._solved(sample, base, base)
    np.testing.assert_allclose(found.reshape(8, 8, 2)[np.arange(8), np.arange(8)], weights)
    values = problem.tilt(found).values(new[:, 2:], new[:, :2])
    np.testing.assert_allclose(values, [f(row[:2], row[2]) for row in new], rtol=1e-6)


def test_the_losses_of_folds_are_fits_without_them(small):
    sample, base, scores = small
    penalties, folds = np.array([1.0, PENALTY]), folds_of(sample.target, 4, seed=0)
    blocks = product_gram(KERNEL, CONDITION_KERNEL, sample, sample)
    table = row_losses(blocks, scores, folds, penalties)
    for place, penalty in enumerate(penalties):
        model = ConditionalScoreMatching(
            condition_lengthscale=CONDITION_KERNEL.lengthscale,
            lengthscale=0.7,
            rkhs_penalty=penalty,
            base=base,
        )
        rest = sample.rows(~folds[0])
        model.selection_ = model._select(rest, base, 0, None)
        problem, weights = model._solved(rest, base, base)
        expected = fitted_losses(problem.tilt(weights), sample.rows(folds[0]))
        np.testing.assert_allclose(table[folds[0], place], expected, rtol=1e-6)


def test_targets_of_two_columns_are_matched_jointly(small):
    sample, _, _ = small
    wide = Sample(sample.condition, sample.target)
    blocks = product_gram(KERNEL, kernels.Gaussian(1.0), wide, wide)
    products = (
        derivative_gram(KERNEL, wide.target, wide.target)
        * kernels.Gaussian(1.0).gram(wide.condition, wide.condition)[:, None, :, None]
    )
    assert blocks.shape == (8, 3, 8, 3)
    np.testing.assert_allclose(blocks, products)


def test_the_density_integrates_to_one_and_is_that_of_the_condition(model, data):
    points, width = midpoint_grid([-6.0], [6.0], 3000)
    for place in PLACES:
        given = model.given(place)
        assert width * np.exp(given.score_samples(points)).sum() == pytest.approx(1.0, abs=1e-3)
        rows = model.score_samples(np.repeat(place[None], 5, 0), points[::600, 0])
        np.testing.assert_allclose(given.score_samples(points[::600]), rows, atol=1e-9)
    assert model.score(*data) == pytest.approx(model.score_samples(*data).mean(), rel=1e-12)


def test_the_truth_is_found(selected):
    x, y = wave(400, seed=1)
    truth = -0.5 * ((y - np.sin(2.0 * x[:, 0])) / 0.3) ** 2 - np.log(0.3 * np.sqrt(2.0 * np.pi))
    # Sixty rows cost about a tenth of a nat; no condition at all costs 0.9.
    assert selected.score(x, y) > truth.mean() - 0.3
    np.testing.assert_allclose(selected.predict(PLACES), np.sin(2.0 * PLACES[:, 0]), atol=0.35)


def test_draws_have_the_mean_and_the_quantiles_of_the_density(model):
    draws = model.sample(PLACES, 2000, random_state=1)
    assert draws.shape == (3, 2000)
    error = draws.std(1) / np.sqrt(2000)
    assert np.all(np.abs(draws.mean(1) - model.predict(PLACES)) < 5 * error)
    below = (draws < model.quantile(PLACES, 0.2)[:, None]).mean(1)
    assert np.all(np.abs(below - 0.2) < 5 * np.sqrt(0.16 / 2000))


def test_selection_keeps_its_trials(selected):
    chosen, trials = selected.selection_.chosen, selected.selection_.trials
    assert chosen in trials and len(trials) > 100
    assert chosen.loss < 0.0
    assert selected.selection_.settings.rkhs_penalty == chosen.rkhs_penalty


def test_what_is_given_is_kept(model, data):
    assert model.selection_.trials == [] and model.selection_.chosen is None
    fitted = ConditionalScoreMatching(lengthscale=0.9, condition_lengthscale=[0.6], random_state=0).fit(*data)
    assert {trial.lengthscale for trial in fitted.selection_.trials} == {0.9}
    assert {trial.condition_lengthscale for trial in fitted.selection_.trials} == {(0.6,)}


def test_an_input_that_says_nothing_gets_a_longer_length_scale():
    # With sixty rows it depends on the folds, and holds for less than half of all seeds.
    x, y = wave(200)
    noisy = np.column_stack([x, np.random.default_rng(5).normal(size=(200, 1))])
    fits = [ConditionalScoreMatching(random_state=seed).fit(noisy, y) for seed in range(3)]
    relevant, irrelevant = np.median([fit.selection_.settings.condition_lengthscale for fit in fits], 0)
    assert irrelevant >= 4.0 * relevant


@pytest.mark.slow
def test_targets_of_two_columns_have_draws_of_two_columns(data):
    x, y = data
    both = np.column_stack([y, y + 0.5 * np.random.default_rng(3).normal(size=60)])
    model = ConditionalScoreMatching(**SETTINGS | {"lengthscale": 1.5}).fit(x, both)
    assert model.sample(PLACES, 4, random_state=0).shape == (3, 4, 2)
    points, volume = midpoint_grid([-6.0, -6.0], [6.0, 6.0], 150)
    assert volume * np.exp(model.given(PLACES[0]).score_samples(points)).sum() == pytest.approx(1.0, abs=2e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::kexpfam.data.columns.TiesWarning", "ignore:constant input column")
@parametrize_with_checks([CHECKED], expected_failed_checks=lambda estimator: EXPECTED)
def test_scikit_learns_contract(estimator, check):
    check(estimator)


def test_tied_targets_are_warned_of_and_survived():
    x, y = wave(60)
    with pytest.warns(TiesWarning):
        model = ConditionalScoreMatching(random_state=0).fit(x, np.round(y))
    assert np.all(np.isfinite(model.score_samples(x, np.round(y))))
    assert model.score(x, np.round(y)) > -3.0


def test_the_diagnosis_reads_as_a_report(model):
    diagnosis = model.diagnose(*wave(100, seed=2))
    assert diagnosis.verdict in ("good", "fair")
    assert diagnosis.held_out_rows == 100
    assert diagnosis.effective_share > 0.9
    assert "KL(sampler || density)" in str(diagnosis)


def test_a_stored_model_is_the_same_to_the_last_bit(model, data, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    assert isinstance(stored, ConditionalScoreMatching)
    np.testing.assert_array_equal(stored.score_samples(*data), model.score_samples(*data))
    np.testing.assert_array_equal(
        stored.sample(PLACES, 2000, random_state=1), model.sample(PLACES, 2000, random_state=1)
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lengthscale": -1.0}, "lengthscale must be positive"),
        ({"condition_lengthscale": [1.0, 1.0]}, "condition_lengthscale must be positive"),
        ({"rkhs_penalty": np.inf}, "rkhs_penalty must be positive"),
        ({"base": "box"}, "unknown base 'box'"),
    ],
)
def test_settings_without_sense_are_refused(data, settings, message):
    with pytest.raises(ValueError, match=message):
        clone(ConditionalScoreMatching(**SETTINGS)).set_params(**settings).fit(*data)


def test_a_system_that_is_too_large_is_refused(data):
    with pytest.raises(ValueError, match="60 equations.*fewer rows"):
        ConditionalScoreMatching(**SETTINGS, max_equations=59).fit(*data)


def test_no_prediction_before_the_fit(data):
    for ask in (lambda new: new.predict(data[0]), lambda new: new.diagnose()):
        with pytest.raises(NotFittedError):
            ask(ConditionalScoreMatching())
