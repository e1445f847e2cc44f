"""Kernel density estimation: the formula, scikit-learn's search, quadrature, storage, the contract."""

import jax.random as jr
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from oracles import midpoint_grid, with_constants
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.neighbors import KernelDensity as PlainKernelDensity
from sklearn.utils.estimator_checks import parametrize_with_checks

import kexpfam
from kexpfam.baselines import mixture_density
from kexpfam.baselines.grid_search import GridSearch, deal
from kexpfam.baselines.kernel_density import BANDWIDTHS, KernelDensity, held_out_losses
from kexpfam.data.columns import TiesWarning
from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.judge.diagnosis import verdict_of

ROWS, DRAWS = 120, 4000


@pytest.fixture(scope="module")
def moons():
    return two_moons().sample(ROWS, random_state=0)


@pytest.fixture(scope="module")
def model(moons):
    return KernelDensity(random_state=0).fit(moons)


@pytest.mark.filterwarnings("ignore::kexpfam.TiesWarning")  # rows are repeated to compare them with weights
@parametrize_with_checks([KernelDensity(random_state=0)])
def test_scikit_learns_contract(estimator, check):
    check(estimator)


def test_the_density_is_the_mean_of_kernels_in_data_units(model, moons):
    widths = model.selection_.chosen["bandwidth"] * moons.std(0)
    points = two_moons().sample(7, random_state=1)
    slow = [np.mean([np.prod(scipy.stats.norm.pdf(point, row, widths)) for row in moons]) for point in points]
    np.testing.assert_allclose(model.score_samples(points), np.log(slow), rtol=1e-6)
    assert model.score(points) == pytest.approx(np.mean(np.log(slow)), rel=1e-6)


def test_the_density_integrates_to_one(model, moons):
    points, volume = midpoint_grid(moons.min(0) - 2.0 * moons.std(0), moons.max(0) + 2.0 * moons.std(0), 300)
    assert volume * np.exp(model.score_samples(points)).sum() == pytest.approx(1.0, abs=1e-4)


def test_the_search_is_scikit_learns(moons):
    z, grid = (moons - moons.mean(0)) / moons.std(0), BANDWIDTHS[20:50:6]
    fold = deal(ROWS, 5, np.random.default_rng(3))
    losses = held_out_losses(Sample.unconditional(z), grid, fold, np.arange(ROWS))
    search = GridSearchCV(PlainKernelDensity(), {"bandwidth": grid}, cv=PredefinedSplit(fold)).fit(z)
    # scikit-learn's score is a sum over the rows of a fold, and all folds have the same size.
    np.testing.assert_allclose(losses, -search.cv_results_["mean_test_score"] * 5 / ROWS, rtol=1e-6)


def test_the_search_does_not_depend_on_the_chunks(moons):
    fold = deal(ROWS, 5, np.random.default_rng(0))
    losses = held_out_losses(Sample.unconditional(moons), BANDWIDTHS[::10], fold, np.arange(ROWS))
    with with_constants(mixture_density, CHUNK_NUMBERS=7 * ROWS):
        again = held_out_losses(Sample.unconditional(moons), BANDWIDTHS[::10], fold, np.arange(ROWS))
    np.testing.assert_allclose(losses, again, rtol=1e-12)


def test_a_part_of_many_rows_is_held_out(moons):
    losses = lambda most: (
        KernelDensity(bandwidth=BANDWIDTHS[36:46], held_out_rows=most, random_state=0)
        .fit(moons)
        .selection_.losses
    )
    assert not np.array_equal(losses(30), losses(ROWS))
    # The spread of a log density over rows is about 1 nat.
    np.testing.assert_allclose(losses(30), losses(ROWS), atol=4 / np.sqrt(30))


def test_the_chosen_bandwidth_has_the_smallest_loss(model):
    search = model.selection_
    assert search.losses.shape == BANDWIDTHS.shape
    assert search.chosen["bandwidth"] == BANDWIDTHS[np.argmin(search.losses)]
    assert model.density_.width == search.chosen["bandwidth"]


@pytest.mark.parametrize(
    ("losses", "edge", "verdict"), [([1.0, 2.0, 3.0], ("h",), "fair"), ([2.0, 1.0, 3.0], (), "good")]
)
def test_a_choice_at_the_end_of_the_grid_is_said(losses, edge, verdict):
    search = GridSearch(("h",), (np.array([1.0, 2.0, 3.0]),), np.array(losses))
    assert search.on_edge == edge
    assert verdict_of(search.measurements()) == verdict


def test_of_given_candidates_one_is_chosen(moons):
    search = KernelDensity(bandwidth=[0.1, 0.3, 2.0], folds=3, random_state=0).fit(moons).selection_
    assert search.losses.shape == (3,)
    assert search.chosen["bandwidth"] == [0.1, 0.3, 2.0][search.losses.argmin()]


def test_a_given_bandwidth_is_used(moons):
    model = KernelDensity(bandwidth=0.3).fit(moons)
    assert model.density_.width == 0.3
    assert model.selection_.on_edge == ()


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_have_the_moments_of_the_density(model, moons, seed):
    draws = model.sample(DRAWS, random_state=seed)
    assert draws.shape == (DRAWS, 2)
    spread = 1.0 + model.density_.width**2
    error = np.sqrt(spread) * moons.std(0) / np.sqrt(DRAWS)
    assert np.all(np.abs(draws.mean(0) - moons.mean(0)) < 5 * error)
    np.testing.assert_allclose(draws.var(0), spread * moons.var(0), rtol=5 * np.sqrt(2 / DRAWS))
    np.testing.assert_array_equal(draws, model.sample(DRAWS, random_state=seed, refine=3))
    assert not np.array_equal(draws, model.sample(DRAWS, random_state=seed + 7))


def test_far_points_have_a_low_finite_log_density(model):
    log_density = model.score_samples([[1e3, 0.0], [1e8, -1e8]])
    assert np.all(np.isfinite(log_density))
    assert np.all(log_density < -1e3)


def test_units_and_order_of_rows_are_those_of_the_data(model, moons):
    scaled = KernelDensity(bandwidth=model.density_.width).fit(10.0 * moons[::-1] + 5.0)
    np.testing.assert_allclose(
        scaled.score_samples(10.0 * moons + 5.0), model.score_samples(moons) - 2 * np.log(10.0)
    )
    np.testing.assert_allclose(model.training_data_, moons, rtol=1e-12)


def test_heavy_tails_are_scaled_like_any_column():
    data = np.random.default_rng(0).standard_t(1.2, (ROWS, 1))
    scaling = KernelDensity(bandwidth=0.3).fit(data).density_.scaling
    np.testing.assert_allclose(scaling.to_model(data), (data - data.mean()) / data.std(), rtol=1e-12)


def test_a_stored_model_is_the_same_to_the_last_bit(model, moons, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(stored.score_samples(moons), model.score_samples(moons))
    np.testing.assert_array_equal(stored.sample(9, random_state=1), model.sample(9, random_state=1))
    assert str(stored.diagnose()) == str(model.diagnose())
    again = clone(stored).set_params(random_state=0).fit(moons)
    np.testing.assert_array_equal(again.score_samples(moons), model.score_samples(moons))


def test_the_diagnosis_reads_as_a_verdict(model):
    text = str(model.diagnose())
    assert text.startswith("verdict:       GOOD\nsolved:        good")
    assert "bandwidth" in text


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, np.inf, np.nan, [], [0.1, -0.2], [[0.1]], "wide"])
def test_senseless_bandwidths_are_refused(moons, bandwidth):
    with pytest.raises(ValueError, match="bandwidth must be a positive finite number"):
        KernelDensity(bandwidth=bandwidth).fit(moons)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x[:5], "minimum of 10"),
        (lambda x: np.where(x == x[3], np.nan, x), "NaN"),
        (lambda x: np.column_stack([x, np.ones(ROWS)]), "constant column"),
    ],
)
def test_bad_data_are_refused(moons, spoil, message):
    with pytest.raises(ValueError, match=message):
        KernelDensity().fit(spoil(moons))


def test_a_frame_is_read_by_name_and_ties_are_said_aloud(moons):
    frame = pd.DataFrame(moons, columns=["left", "right"])
    model = KernelDensity(bandwidth=0.2).fit(frame)
    with pytest.raises(ValueError, match="feature names"):
        model.score_samples(frame[["right", "left"]])
    with pytest.warns(TiesWarning):
        KernelDensity(bandwidth=0.2).fit(np.repeat(moons[:20], 2, axis=0))


def test_nothing_can_be_asked_before_the_fit(moons, tmp_path):
    new = KernelDensity()
    for ask in (lambda: new.score(moons), new.sample, new.diagnose, lambda: new.save(tmp_path / "m.kexpfam")):
        with pytest.raises(NotFittedError):
            ask()


def test_draws_follow_the_key(model):
    draws = model.density_.sample(5, key=jr.key(0))
    np.testing.assert_array_equal(draws, model.density_.sample(5, key=jr.key(0)))
    assert not np.array_equal(draws, model.density_.sample(5, key=jr.key(1)))
