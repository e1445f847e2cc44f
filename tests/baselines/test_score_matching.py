import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from oracles import gram, midpoint_grid
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

import kexpfam
from kexpfam.baselines.derivatives import (
    Basis,
    DerivativeSpan,
    ValueSpan,
    base_scores,
    derivative_gram,
    fitted_losses,
    full_path,
    full_weights,
    value_derivatives,
)
from kexpfam.baselines.score_matching import SCORE_BASES, ScoreMatchingExpFamily
from kexpfam.baselines.score_search import fold_losses, folds_of, one_standard_error
from kexpfam.data.sample import Sample
from kexpfam.datasets import rings, two_moons
from kexpfam.judge.metrics import mmd_squared
from kexpfam.model import kernels
from kexpfam.model.density import Tilt
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import Constant, FeatureSpace

SCALES = np.array([0.7, 1.3])
KERNEL = kernels.Gaussian(SCALES)
UNCONDITIONAL = kernels.Gaussian(1.0)
PENALTY, DRAWS = 1e-2, 500
# A normal base: there is something left for f to do.
SETTINGS = {"base": "gaussian", "lengthscale": 0.8, "rkhs_penalty": PENALTY, "random_state": 0}
CHECKED = ScoreMatchingExpFamily(
    lengthscale=2.0, rkhs_penalty=0.1, n_centres=5, normaliser="importance", random_state=0
)


def plane(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 2)) * [1.0, 0.6]


def operators(function):
    """Return ``x -> (gradient, Laplacian)`` of a function of one point, by automatic differentiation."""
    return lambda x: jnp.append(jax.grad(function)(x), jnp.trace(jax.hessian(function)(x)))


def twin_of(span, weights, base):
    """Return the tilted base of these weights."""
    return Tilt(FeatureSpace(Constant(), span), weights.ravel(), base)


@pytest.fixture(scope="module")
def moons():
    return two_moons().sample(60, random_state=0)


@pytest.fixture(scope="module")
def model(moons):
    return ScoreMatchingExpFamily(**SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def small():
    """Return few points of the plane, a normal around them, and its scores."""
    points = plane(9)
    base = Gaussian.fitted(points, width=1.3)
    return points, base, base_scores(base, points)


# The derivatives


def test_the_gram_of_derivatives_is_automatic_differentiation_of_the_kernel():
    xs, zs = plane(2), plane(3, seed=1)
    found = derivative_gram(KERNEL, xs, zs)
    assert found.shape == (2, 3, 3, 3)
    of_centre = lambda x, z, b: operators(lambda centre: KERNEL(x, centre))(z)[b]
    slow = jax.jit(
        lambda x, z: jnp.stack([operators(lambda point, b=b: of_centre(point, z, b))(x) for b in range(3)], 1)
    )
    for i, m in itertools.product(range(2), range(3)):
        np.testing.assert_allclose(found[i, :, m], slow(xs[i], zs[m]), rtol=1e-6, atol=1e-12)


def test_features_are_derivatives_by_the_centre_and_sum_up_to_the_function():
    centres, points = plane(3), plane(4, seed=1)
    span = DerivativeSpan(KERNEL, centres)
    features = span.features(points).reshape(4, 3, 3)
    slow = jax.jit(lambda x, z: operators(lambda centre: KERNEL(x, centre))(z))
    for i, m in itertools.product(range(4), range(3)):
        np.testing.assert_allclose(features[i, m], slow(points[i], span.centres[m]), rtol=1e-6)
    weights = np.random.default_rng(0).normal(size=span.size)
    np.testing.assert_allclose(span.evaluate(weights, points), span.features(points) @ weights, rtol=1e-10)
    assert span.features(points).shape == (4, span.size)


def test_a_span_gives_arrays_of_the_kind_it_is_given():
    points, weights = plane(4, seed=1), np.random.default_rng(0).normal(size=9)
    for span in (DerivativeSpan(KERNEL, plane(3)), ValueSpan(KERNEL, plane(9))):
        for compute in (span.features, lambda x, span=span: span.evaluate(weights, x)):
            assert isinstance(compute(points), np.ndarray)
            np.testing.assert_allclose(
                jax.jit(lambda x, compute=compute: compute(x))(points), compute(points), rtol=1e-9
            )


@pytest.mark.parametrize("lengthscale", [0.05, 10.0])
def test_the_sums_over_centres_lose_no_digits_that_matter(lengthscale):
    span = DerivativeSpan(kernels.Gaussian(lengthscale), plane(200))
    points, weights = plane(50, seed=1), np.random.default_rng(0).normal(size=span.size)
    slow = span.features(points) * weights
    error = np.abs(span.evaluate(weights, points) - slow.sum(1))
    assert np.all(error <= 1e-9 * np.abs(slow).sum(1))


def test_derivatives_of_kernel_values_are_automatic_differentiation():
    points, centres = plane(3), plane(2, seed=1)
    found = value_derivatives(KERNEL, points, centres)
    slow = jax.jit(lambda x, z: operators(lambda point: KERNEL(point, z))(x))
    for i, m in itertools.product(range(3), range(2)):
        np.testing.assert_allclose(found[i, :, m], slow(points[i], centres[m]), rtol=1e-6)
    np.testing.assert_allclose(ValueSpan(KERNEL, centres).features(points), gram(KERNEL, points, centres))


def test_the_scores_of_a_normal_have_the_closed_form(small):
    points, base, scores = small
    covariance = base.cholesky @ base.cholesky.T
    np.testing.assert_allclose(scores, -(points - base.mean) @ np.linalg.inv(covariance), rtol=1e-9)


# The solutions


def slow_solution(points, scores, penalty):
    """Return the weights of all derivatives at the points that minimise the loss, by least squares."""
    n, dim = points.shape
    pairs = list(itertools.product(range(n), range(dim + 1)))
    blocks = derivative_gram(KERNEL, points, points)
    norms = np.array([[blocks[i, a, m, b] for m, b in pairs] for i, a in pairs])
    matrix, slope = penalty * norms, np.zeros(len(pairs))
    for i in range(n):
        for j in range(dim):
            row = np.array([blocks[i, j, m, b] for m, b in pairs])
            matrix = matrix + np.outer(row, row) / n
            slope += row * scores[i, j] / n
        slope += np.array([blocks[i, dim, m, b] for m, b in pairs]) / n
    return -np.linalg.lstsq(matrix, slope, rcond=1e-15)[0]


def test_the_full_solution_is_the_slow_one(small):
    points, base, scores = small
    weights = full_weights(KERNEL, UNCONDITIONAL, Sample.unconditional(points), scores, PENALTY)
    span, new = DerivativeSpan(KERNEL, points), plane(20, seed=2)
    slow = slow_solution(points, scores, PENALTY)
    np.testing.assert_allclose(
        span.evaluate(weights.ravel(), new), span.features(new) @ slow, rtol=1e-6, atol=1e-7
    )


def test_no_nearby_function_has_a_lower_penalised_loss(small):
    points, base, scores = small
    span, sample = DerivativeSpan(KERNEL, points), Sample.unconditional(points)
    size = span.size
    norms = derivative_gram(KERNEL, sample.target, sample.target).reshape(size, size)
    weights = full_weights(KERNEL, UNCONDITIONAL, sample, scores, PENALTY).ravel()

    def objective(weights):
        loss = fitted_losses(twin_of(span, weights, base), sample).mean()
        return loss + 0.5 * PENALTY * weights @ norms @ weights

    best = objective(weights)
    for seed in range(5):
        step = np.random.default_rng(seed).normal(size=size)
        rise = [objective(weights + sign * 1e-2 * step) - best for sign in (1, -1)]
        assert min(rise) > 0.0
        # A minimum of a quadratic function: the same rise on both sides.
        assert rise[0] == pytest.approx(rise[1], rel=1e-5)


def test_a_path_of_penalties_is_the_solutions_one_by_one(small):
    points, _, scores = small
    sample, penalties = Sample.unconditional(points), np.array([1.0, 1e-2, 1e-4])
    blocks = derivative_gram(KERNEL, sample.target, sample.target)
    path = full_path(blocks, scores, penalties)
    for place, penalty in enumerate(penalties):
        one = full_weights(KERNEL, UNCONDITIONAL, sample, scores, penalty)
        np.testing.assert_allclose(path[:, :, place], one, rtol=1e-6, atol=1e-9)


def test_chunks_do_not_change_the_solution(small, monkeypatch):
    points, _, scores = small
    sample = Sample.unconditional(points)
    whole = full_weights(KERNEL, UNCONDITIONAL, sample, scores, PENALTY)
    basis = Basis.of_derivatives(KERNEL, points[:3])
    quadratic = basis.quadratic(points, scores)
    monkeypatch.setattr("kexpfam.baselines.derivatives.CHUNK_NUMBERS", 100)
    np.testing.assert_allclose(full_weights(KERNEL, UNCONDITIONAL, sample, scores, PENALTY), whole, rtol=1e-9)
    np.testing.assert_allclose(basis.quadratic(points, scores).matrix, quadratic.matrix, rtol=1e-9, atol=1e-9)


def test_derivatives_at_all_points_give_the_full_solution(moons):
    full, nystrom = (
        ScoreMatchingExpFamily(variant=v, n_centres=60, **SETTINGS).fit(moons) for v in ("full", "nystrom")
    )
    np.testing.assert_allclose(nystrom.score_samples(moons), full.score_samples(moons), atol=1e-5)


@pytest.mark.parametrize("build", [Basis.of_derivatives, Basis.of_values])
def test_the_quadratic_form_is_the_loss_by_automatic_differentiation(small, build):
    points, base, scores = small
    basis, new = build(KERNEL, points[:4]), plane(7, seed=3)
    weights = basis.quadratic(points, scores).path(np.array([1.0, PENALTY]))
    held_out = basis.quadratic(new, base_scores(base, new)).losses(weights)

    def slow(x, f):
        derivatives, score = operators(f)(x), jax.grad(base.log_density)(x)
        return 0.5 * jnp.sum(derivatives[:-1] ** 2) + derivatives[:-1] @ score + derivatives[-1]

    for place in range(2):
        tilt = twin_of(basis.span, basis.weights(weights[:, place]), base)
        f = lambda x, tilt=tilt: tilt.f(x[None], jnp.zeros((1, 0)))[0]
        expected = float(jnp.mean(jax.jit(jax.vmap(lambda x, f=f: slow(x, f)))(new)))
        assert held_out[place] == pytest.approx(expected, rel=1e-6)
        assert fitted_losses(tilt, Sample.unconditional(new)).mean() == pytest.approx(expected, rel=1e-6)


def test_the_losses_of_folds_are_fits_without_them(small):
    points, _, scores = small
    basis, penalties = Basis.of_derivatives(KERNEL, points[:4]), np.array([1.0, PENALTY])
    folds = folds_of(points, 3, seed=0)
    table = fold_losses(basis, Sample.unconditional(points), scores, folds, penalties)
    for row, fold in zip(table, folds, strict=True):
        weights = basis.quadratic(points[~fold], scores[~fold]).path(penalties)
        np.testing.assert_allclose(
            row, basis.quadratic(points[fold], scores[fold]).losses(weights), rtol=1e-6
        )


def test_equal_rows_share_a_fold():
    rows = np.repeat(np.arange(12.0), 3)[:, None]
    folds = folds_of(rows, 4, seed=0)
    np.testing.assert_array_equal(np.sum(folds, 0), 1)
    for fold in folds:
        assert fold.sum() == 9
        assert not set(rows[fold, 0]) & set(rows[~fold, 0])


@pytest.mark.parametrize(
    "means, chosen",
    [
        ([3.0, 1.0, 0.0], 2),
        ([3.0, 0.1, 0.0], 1),
        ([0.1, 3.0, 0.0], 2),
        ([0.1, 0.1, 0.0], 0),
        ([0.0, 1.0, 2.0], 0),
    ],
)
def test_the_one_standard_error_rule_takes_the_first_that_chance_explains(means, chosen):
    # Each excess over the best is its mean plus or minus 1 over four units: its standard error is 1/2.
    noise = np.array([1.0, -1.0, 1.0, -1.0])[:, None] * (np.array(means) > 0.0)
    assert one_standard_error(np.array(means) + noise) == chosen


def test_the_score_of_a_normal_is_found_where_there_are_data():
    # With base N(0, 2^2) and data of N(0, 1) the loss of f = -a x^2 / 2 has its minimum at a = 1 - 1/4.
    levels = (np.arange(400) + 0.5) / 400
    points = np.sqrt(2.0) * scipy.special.erfinv(2.0 * levels - 1.0)[:, None]
    base = Gaussian(np.zeros(1), 2.0 * np.eye(1))
    basis = Basis.of_derivatives(kernels.Gaussian(3.0), points[::40])
    weights = basis.quadratic(points, base_scores(base, points)).path(np.array([1e-6]))[:, 0]
    tilt = twin_of(basis.span, basis.weights(weights), base)
    x = jnp.linspace(-1.5, 1.5, 7)
    found = jax.vmap(jax.grad(lambda value: tilt.log_unnormalised(value[None], jnp.zeros(0))))(x)
    np.testing.assert_allclose(found, -x, atol=0.05)
    # The closed form of the loss there: E[(0.75 x)^2 / 2 + 0.75 x^2 / 4 - 0.75].
    assert fitted_losses(tilt, Sample.unconditional(points)).mean() == pytest.approx(
        0.75**2 / 2 + 0.75 / 4 - 0.75, abs=0.01
    )


# The estimator


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::kexpfam.TiesWarning")  # rows are repeated to compare them with weights
@parametrize_with_checks([CHECKED])
def test_scikit_learns_contract(estimator, check):
    check(estimator)


@pytest.mark.parametrize("variant", ["nystrom", "lite", "full"])
def test_every_variant_is_a_normalised_density_better_than_the_base(moons, variant):
    model = ScoreMatchingExpFamily(variant=variant, **SETTINGS).fit(moons)
    low, high = moons.mean(0) - 7 * moons.std(0), moons.mean(0) + 7 * moons.std(0)
    points, volume = midpoint_grid(low, high, 250)
    mass = volume * np.exp(model.score_samples(points)).sum()
    assert abs(np.log(mass)) < max(5 * model.density_.log_partition.standard_error, 1e-3)
    base = model.density_.tilt.base.log_densities(model._training).mean() - np.log(moons.std(0)).sum()
    assert model.score(moons) > base + 0.3


def test_settings_that_are_given_are_not_selected(model):
    assert model.selection_.chosen is None
    assert model.selection_.trials == []


def test_selection_takes_a_trial_that_is_no_worse_than_chance_allows(moons):
    model = ScoreMatchingExpFamily(base="gaussian", random_state=0, n_centres=20).fit(moons)
    chosen, trials = model.selection_.chosen, model.selection_.trials
    assert chosen in trials
    assert model.selection_.settings.rkhs_penalty == chosen.rkhs_penalty
    np.testing.assert_array_equal(model.selection_.settings.lengthscale, chosen.lengthscale)
    best = min(trials, key=lambda trial: trial.loss)
    assert best.loss <= chosen.loss < 0.0
    # A setting at the border of what is tried is far worse than the chosen one.
    assert max(trial.loss for trial in trials) > chosen.loss + 1.0


@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_as_base_settles_the_shares_that_the_loss_does_not_see(seed):
    train, test = (
        rings().sample(rows, random_state=seed + offset) for rows, offset in ((500, 0), (2000, 100))
    )
    settings = {"lengthscale": 0.3, "rkhs_penalty": 0.3, "random_state": 0}
    scores = {
        base: ScoreMatchingExpFamily(base=base, **settings).fit(train).score_samples(test)
        for base in SCORE_BASES
    }
    gain = scores["mixture"] - scores["gaussian"]
    assert gain.mean() > 5 * gain.std() / np.sqrt(len(gain))
    assert ScoreMatchingExpFamily().base == "mixture"


@pytest.mark.slow
@pytest.mark.parametrize("refine", [0, 3])
def test_draws_follow_the_density(model, refine):
    draws = model.sample(DRAWS, random_state=1, refine=refine)
    assert draws.shape == (DRAWS, 2)
    points, _ = midpoint_grid(model.training_data_.min(0) - 1.0, model.training_data_.max(0) + 1.0, 120)
    masses = np.exp(model.score_samples(points))
    chosen = np.random.default_rng(0).choice(len(points), DRAWS, p=masses / masses.sum())
    distance = mmd_squared(draws, points[chosen])
    # Plain chains keep the shares of sixty training points in the two moons, an error of about 1 / 60.
    assert distance.value < 5 * distance.standard_error + (1 / 60 if refine == 0 else 0.0)


def test_draws_are_the_seeds_own(model):
    first, again, other = (model.sample(DRAWS, random_state=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_diagnosis_reads_as_a_report(model, moons):
    diagnosis = model.diagnose()
    assert diagnosis.verdict == "good"
    assert diagnosis.loss == pytest.approx(
        fitted_losses(model.density_.tilt, Sample.unconditional(model._training)).mean()
    )
    assert "score-matching loss" in str(diagnosis) and "no selection ran" in str(diagnosis)


def test_a_stored_model_is_the_same_to_the_last_bit(model, moons, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    assert isinstance(stored, ScoreMatchingExpFamily)
    np.testing.assert_array_equal(stored.score_samples(moons), model.score_samples(moons))
    np.testing.assert_array_equal(stored.sample(DRAWS, random_state=1), model.sample(DRAWS, random_state=1))
    assert str(stored.diagnose()) == str(model.diagnose())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"variant": "half"}, "unknown variant 'half'.*nystrom, full, lite"),
        ({"base": "box"}, "unknown base 'box'"),
        ({"normaliser": "guess"}, "unknown normaliser"),
        ({"lengthscale": 0.0}, "lengthscale must be positive"),
        ({"lengthscale": [1.0, 1.0, 1.0]}, "lengthscale must be positive"),
        ({"rkhs_penalty": -1.0}, "rkhs_penalty must be positive"),
        ({"n_centres": 0}, "n_centres must be a whole number of at least 1"),
    ],
)
def test_settings_without_sense_are_refused(moons, settings, message):
    with pytest.raises(ValueError, match=message):
        clone(ScoreMatchingExpFamily(**SETTINGS)).set_params(**settings).fit(moons)


def test_a_system_that_is_too_large_is_referred_to_the_other_variant():
    X = np.random.default_rng(0).normal(size=(30, 2))
    with pytest.raises(ValueError, match="60 equations.*variant='nystrom'"):
        ScoreMatchingExpFamily(variant="full", max_equations=59).fit(X)


def test_constant_columns_are_named_and_no_draw_comes_before_the_fit(moons):
    with pytest.raises(ValueError, match="constant column.*1"):
        ScoreMatchingExpFamily().fit(np.column_stack([moons[:, 0], np.ones(60)]))
    for ask in (ScoreMatchingExpFamily().sample, ScoreMatchingExpFamily().diagnose):
        with pytest.raises(NotFittedError):
            ask()
