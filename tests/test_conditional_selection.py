"""The search for the settings of a conditional density: what it keeps, what it tries, and what it finds."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from oracles import midpoint_grid, with_constants

from kexpfam import ConditionalKernelExpFamily, conditional_selection
from kexpfam.conditional_selection import (
    CENTRE_MARGIN,
    FOLDS,
    LATTICE,
    PENALTIES,
    REPEATS,
    ConditionalSearch,
    ConditionalSettings,
    Scaled,
    _folds,
    conditional_base,
    product_space,
    target_centres,
)
from kexpfam.kernels import median_distance
from kexpfam.measures import Box, Gaussian, Mixture
from kexpfam.sample import Sample, Scaling

ROWS = 80
# Everything but the axis under test, so that a search is a handful of trials.
FIXED = {"power": False, "condition_lengthscale": 1.0, "lengthscale": 1.0, "width": 1.0, "rkhs_penalty": 1e-2}


def scaled(x, y, powers=(False,)) -> dict[bool, Scaled]:
    condition = (x - x.mean(0)) / x.std(0)
    return {power: Scaled.of(Scaling.standardising(y[:, None], power=power), y[:, None], condition) for power in powers}


def curve(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, (rows, 1))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=rows)


def searched(parts, **changes):
    return ConditionalSearch(**FIXED | changes).run(parts)


@pytest.fixture(scope="module")
def parts():
    return scaled(*curve())


@pytest.fixture(scope="module")
def selection(parts):
    return searched(parts, condition_lengthscale=None, lengthscale=None, rkhs_penalty=None)


def test_everything_fixed_means_no_trial(parts):
    selection = searched(parts)
    assert selection.trials == []
    assert selection.chosen is None
    settings = selection.settings
    assert (settings.power, settings.lengthscale, settings.width, settings.rkhs_penalty) == (False, 1.0, 1.0, 1e-2)
    np.testing.assert_array_equal(settings.condition_lengthscale, [1.0])


@pytest.mark.parametrize("free", ["condition_lengthscale", "lengthscale", "width", "rkhs_penalty"])
def test_what_the_user_fixed_is_kept(parts, free):
    values = {"condition_lengthscale": 0.7, "lengthscale": 1.3, "width": 1.1, "rkhs_penalty": 3e-3}
    selection = searched(parts, **values | {free: None})
    assert selection.trials
    for name, value in values.items():
        if name != free:
            np.testing.assert_allclose(getattr(selection.settings, name), value, rtol=1e-12)
            assert {np.ravel(getattr(trial, name))[0] for trial in selection.trials} == {value}
    tried = {np.ravel(getattr(trial, free))[0] for trial in selection.trials}
    assert len(tried) > 1
    assert min(tried) * (1 - 1e-9) <= np.ravel(getattr(selection.settings, free))[0] <= max(tried) * (1 + 1e-9)


def test_a_width_is_chosen_for_gaussian_bases_only(parts):
    selection = searched(parts, width=None, base="box")
    assert selection.trials == []


def test_trials_can_be_looked_at(parts, selection):
    unit = median_distance(np.asarray(parts[False].sample.condition))
    for trial in selection.trials:
        assert np.isclose(trial.condition_lengthscale[0] / unit, LATTICE["condition_lengthscale"]).any()
        assert np.isclose(trial.lengthscale, LATTICE["lengthscale"]).any()
        assert np.isclose(trial.rkhs_penalty, PENALTIES).any()
        assert np.isfinite(trial.score)
        assert trial.standard_error > 0.0
    assert selection.chosen in selection.trials
    assert selection.chosen.score == max(trial.score for trial in selection.trials)


def test_no_setting_is_tried_twice(selection):
    places = [(trial.condition_lengthscale, trial.lengthscale, trial.rkhs_penalty) for trial in selection.trials]
    assert len(set(places)) == len(places)


def test_the_settings_are_the_mean_of_the_trials_by_desert(selection):
    trials = selection.trials
    weights = np.exp(0.5 * ROWS * (np.array([trial.score for trial in trials]) - selection.chosen.score))
    for name in ("condition_lengthscale", "lengthscale", "rkhs_penalty"):
        logs = np.log([np.ravel(getattr(trial, name))[0] for trial in trials])
        expected = np.exp(np.sum(weights * logs) / weights.sum())
        np.testing.assert_allclose(np.ravel(getattr(selection.settings, name))[0], expected, rtol=1e-9)


def test_a_score_is_the_mean_log_density_of_rows_left_out(parts):
    # A hopeless penalty leaves the base, whose score needs no fold.
    selection = searched(parts, rkhs_penalty=1e8, lengthscale=None)
    y = curve()[1]
    z = ((y - y.mean()) / y.std())[:, None]
    base = conditional_base(None, z, 1.0, seed=0).log_densities(z) - np.log(y.std())
    for trial in selection.trials:
        assert trial.score == pytest.approx(base.mean(), abs=2e-3)
        assert trial.standard_error == pytest.approx(base.std() / np.sqrt(ROWS), rel=2e-2)


def test_a_score_is_close_to_that_of_refitting_by_hand(parts):
    x, y = curve()
    with with_constants(conditional_selection, REPEATS=1):
        trials, folds = searched(parts, rkhs_penalty=None).trials, _folds(ROWS, 0)
    trial = min(trials, key=lambda trial: abs(np.log10(trial.rkhs_penalty) + 2.0))
    scores = np.zeros(ROWS)
    for out in folds:
        model = ConditionalKernelExpFamily(
            condition_lengthscale=1.0,
            lengthscale=1.0,
            rkhs_penalty=1e-2,
            base_width=1.0,
            power=False,
            n_centres=24,
            solver="exact",
            random_state=0,
        ).fit(x[~out], y[~out])
        scores[out] = model.score_samples(x[out], y[out])
    # The folds standardise x and y anew, and keep more features.
    assert trial.score == pytest.approx(scores.mean(), abs=0.03)


def test_scores_follow_the_units(parts):
    x, y = curve()
    first, second = (searched(each, rkhs_penalty=None).trials for each in (parts, scaled(x, 10.0 * y)))
    for a, b in zip(first, second, strict=True):
        assert b.score == pytest.approx(a.score - np.log(10.0), abs=1e-6)


@pytest.mark.parametrize("skewed", [True, False])
def test_a_power_is_taken_for_skewed_targets(skewed):
    x, y = curve(rows=150)
    parts = scaled(x, np.exp(y) if skewed else y, powers=(False, True))
    selection = searched(parts, power=None)
    assert {trial.power for trial in selection.trials} == {False, True}
    scores = {trial.power: trial.score for trial in selection.trials}
    assert selection.settings.power == (scores[True] > scores[False])
    if skewed:
        assert selection.settings.power


def test_an_input_that_says_nothing_gets_a_longer_length_scale():
    longer = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = rng.uniform(-2.0, 2.0, (ROWS, 2))
        y = np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=ROWS)
        scales = searched(scaled(x, y), condition_lengthscale=None).settings.condition_lengthscale
        longer.append(scales[1] > scales[0])
    assert sum(longer) >= 2


def test_a_given_length_scale_per_input_is_kept():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 2))
    selection = searched(scaled(x, x[:, 0] + rng.normal(size=ROWS)), condition_lengthscale=[0.5, 4.0], rkhs_penalty=None)
    np.testing.assert_allclose(selection.settings.condition_lengthscale, [0.5, 4.0], rtol=1e-12)


def test_a_wavy_curve_gets_a_shorter_length_scale_than_a_straight_line():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (120, 1))
    noise = 0.3 * rng.normal(size=120)
    wavy, straight = (
        searched(scaled(x, f + noise), condition_lengthscale=None, rkhs_penalty=None).settings.condition_lengthscale[0]
        for f in (np.sin(5.0 * x[:, 0]), 0.7 * x[:, 0])
    )
    assert wavy < 0.7 * straight


def test_an_interruption_keeps_the_best_so_far(parts):
    reports = []

    def impatient(report):
        reports.append(report)
        if len(reports) == 2:
            raise KeyboardInterrupt

    selection = searched(parts, condition_lengthscale=None, lengthscale=None, rkhs_penalty=None, report=impatient)
    assert len(reports) == 2
    assert len(selection.trials) == reports[-1].step
    assert selection.chosen.score == max(trial.score for trial in selection.trials) == reports[-1].health["score"]


def test_an_interruption_while_inputs_are_told_apart_keeps_the_walk():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (ROWS, 2))
    parts = scaled(x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=ROWS))
    counts = []
    with with_constants(conditional_selection, RELEVANCE_FACTORS=()):
        walked = searched(parts, condition_lengthscale=None, report=counts.append)

    def impatient(report):
        if report.step > len(walked.trials):
            raise KeyboardInterrupt

    interrupted = searched(parts, condition_lengthscale=None, report=impatient)
    np.testing.assert_allclose(interrupted.settings.condition_lengthscale, walked.settings.condition_lengthscale)


def test_the_listener_hears_the_number_of_trials_and_the_best_score(parts):
    reports = []
    selection = searched(parts, rkhs_penalty=None, report=reports.append)
    assert {report.stage for report in reports} == {"selection"}
    assert reports[-1].step == len(selection.trials)
    assert reports[-1].health["score"] == selection.chosen.score


def test_the_same_seed_makes_the_same_choice(parts):
    first, again, other = (searched(parts, rkhs_penalty=None, seed=seed).trials for seed in (0, 0, 1))
    assert again == first
    assert other != first


def test_a_path_stops_soon_after_its_best(selection):
    for place in {(trial.condition_lengthscale, trial.lengthscale) for trial in selection.trials}:
        path = [trial for trial in selection.trials if (trial.condition_lengthscale, trial.lengthscale) == place]
        np.testing.assert_allclose([trial.rkhs_penalty for trial in path], PENALTIES[: len(path)])


@pytest.mark.parametrize("rows", [10, 59, 60, 500])
def test_every_row_is_left_out_once_per_repetition(rows):
    folds = _folds(rows, seed=0)
    assert folds.shape == (REPEATS * FOLDS, rows)
    np.testing.assert_array_equal(folds.sum(0), REPEATS)
    assert np.ptp(folds.sum(1)) <= 1


@pytest.mark.parametrize("lengthscale", [0.05, 0.5, 5.0])
def test_centres_of_one_target_cover_its_range_evenly(lengthscale):
    targets = np.random.default_rng(0).normal(size=(50, 1))
    centres = target_centres(targets, lengthscale, seed=0)[:, 0]
    assert centres[0] == pytest.approx(targets.min() - CENTRE_MARGIN)
    assert centres[-1] == pytest.approx(targets.max() + CENTRE_MARGIN)
    np.testing.assert_allclose(np.diff(centres), np.diff(centres)[0])
    assert 6 <= len(centres) <= 100


def test_centres_of_several_targets_are_some_of_them():
    targets = np.random.default_rng(0).normal(size=(150, 2))
    centres = target_centres(targets, 1.0, seed=0)
    assert len(centres) == 100
    assert {tuple(row) for row in centres} <= {tuple(row) for row in targets}


def test_the_product_space_has_no_more_features_than_asked_for():
    rng = np.random.default_rng(0)
    sample = Sample(jnp.asarray(rng.normal(size=(50, 1))), jnp.asarray(rng.normal(size=(50, 2))))
    settings = ConditionalSettings(False, np.array([0.5, 2.0]), 0.5, 1.0, 1e-2)
    space = product_space("gaussian", sample, settings, 7, 4, floor=1e-8, seed=0)
    assert (space.condition.size, space.target.size) == (7, 4)
    np.testing.assert_array_equal(space.condition.kernel.lengthscale, [0.5, 2.0])


@pytest.mark.parametrize("width", [0.6, 1.0, 1.6])
def test_the_default_base_is_a_normal_with_a_share_of_a_wider_one(width):
    targets = np.random.default_rng(0).normal(size=(200, 1))
    base = conditional_base(None, targets, width, seed=0)
    points, cell = midpoint_grid([-60.0], [60.0], 20_000)
    density = np.exp(base.log_densities(points))
    assert cell * density.sum() == pytest.approx(1.0, abs=1e-6)
    scale = width * targets.std(ddof=1)
    middle = 0.98 * scipy.stats.norm.pdf(0.0, 0.0, scale) + 0.02 * scipy.stats.norm.pdf(0.0, 0.0, 4 * scale)
    assert density.max() == pytest.approx(middle, rel=1e-3)


def test_bases_by_name_and_by_object():
    targets = np.random.default_rng(0).normal(size=(60, 1))
    assert isinstance(conditional_base("box", targets, 1.0, seed=0), Box)
    assert isinstance(conditional_base("mixture", targets, 1.0, seed=0), Mixture)
    own = Gaussian.fitted(targets)
    assert conditional_base(own, targets, 1.0, seed=0) is own
