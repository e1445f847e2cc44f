"""The search for settings, with and without conditions: what it keeps, what it tries, and what it finds."""

import numpy as np
import pytest
import scipy.stats
from oracles import midpoint_grid
from threadpoolctl import threadpool_limits

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily, Search
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.datasets import rings, two_moons
from kexpfam.estimators import KernelDensity
from kexpfam.fit import convex
from kexpfam.fit.bases import fit_base, optimism, tailed_gaussian
from kexpfam.fit.convex import likelihood
from kexpfam.fit.features import CENTRE_MARGIN, Features, build_space, centre_rows, covering_centres
from kexpfam.fit.folds import Folds, left_out_rows
from kexpfam.fit.problem import Problem
from kexpfam.fit.relevance import relevant_dimensions
from kexpfam.fit.select import Context, KernelSettings, Scaled, search
from kexpfam.fit.task import Splits
from kexpfam.integrate.nodes import Integration, grid_nodes
from kexpfam.model import kernels
from kexpfam.model.kernels import median_distance
from kexpfam.model.measures import Box, Gaussian, Mixture
from kexpfam.model.spaces import FeatureSpace

ROWS = 80
# Everything but the axis under test, so that a search is a handful of trials.
FIXED = {
    "power": False,
    "condition_lengthscale": 1.0,
    "lengthscale": 1.0,
    "base_width": 1.0,
    "rkhs_penalty": 1e-2,
}
GIVEN = {"lengthscale": 0.7, "rkhs_penalty": 3e-3}


def standardised(data):
    return (data - data.mean(0)) / data.std(0)


def two_bumps(count=100, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.choice([-1.5, 1.5], count)
    return standardised(rng.normal(centres, 0.4)[:, None])


def unconditional(data) -> dict[bool, Scaled]:
    return {False: Scaled(Sample.unconditional(data), np.zeros(len(data)))}


def scaled(x, y, powers=(False,)) -> dict[bool, Scaled]:
    condition = (x - x.mean(0)) / x.std(0)
    return {
        power: Scaled.of(Scaling.standardising(y[:, None], power=power), y[:, None], condition)
        for power in powers
    }


def curve(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, (rows, 1))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=rows)


def chosen(parts, *, seed=0, report=None, options=None, **fixed):
    """Return the selection for these rows with some settings fixed."""
    kernel = Kernel(**fixed, search=options or Search())
    splits = Splits.draw(len(next(iter(parts.values())).sample), parts=5, share=0.15, seed=seed)
    return search(parts, Context(kernel, splits, seed, report=report))


def searched(parts, *, seed=0, report=None, options=None, **changes):
    """Return the selection with all settings fixed but those that are changed."""
    return chosen(parts, seed=seed, report=report, options=options, **FIXED | changes)


@pytest.fixture(scope="module")
def plane():
    return unconditional(standardised(two_moons().sample(80, random_state=0)))


@pytest.fixture(scope="module")
def of_plane(plane):
    return chosen(plane)


@pytest.fixture(scope="module")
def parts():
    return scaled(*curve())


@pytest.fixture(scope="module")
def selection(parts):
    return searched(parts, condition_lengthscale=None, lengthscale=None, rkhs_penalty=None)


def test_the_chosen_length_scale_beats_the_extremes(plane, of_plane):
    unit = median_distance(plane[False].sample.target)
    for extreme in (Search().lengthscales[0], Search().lengthscales[-1]):
        trials = chosen(plane, lengthscale=extreme * unit).trials
        assert of_plane.chosen.score > max(trial.score for trial in trials)


@pytest.mark.parametrize("which", ["of_plane", "selection"])
def test_the_chosen_trial_is_the_best_one(which, request):
    found = request.getfixturevalue(which)
    assert found.chosen in found.trials
    assert found.chosen.score == max(trial.score for trial in found.trials)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_bimodal_sample_gets_a_better_score_than_its_base(seed):
    data = two_bumps(seed=seed)
    base = Gaussian.fitted(data).log_densities(data).mean()
    assert chosen(unconditional(data), seed=seed).chosen.score > base + 0.1


def test_a_length_scale_that_is_given_stays(plane):
    found = chosen(plane, lengthscale=0.7)
    np.testing.assert_array_equal(found.settings.lengthscale, [0.7, 0.7])
    assert {tuple(trial.settings.lengthscale) for trial in found.trials} == {(0.7, 0.7)}


def test_a_penalty_that_is_given_stays(plane):
    found = chosen(plane, rkhs_penalty=3e-3)
    assert found.settings.rkhs_penalty == 3e-3
    assert {trial.settings.rkhs_penalty for trial in found.trials} == {3e-3}


def test_nothing_is_tried_where_everything_is_given(plane, parts):
    for found in (chosen(plane, **GIVEN), searched(parts)):
        assert found.trials == []
        assert found.chosen is None
    settings = searched(parts).settings
    assert (settings.power, settings.base_width, settings.rkhs_penalty) == (False, 1.0, 1e-2)
    np.testing.assert_array_equal(settings.lengthscale, [1.0])
    np.testing.assert_array_equal(settings.condition_lengthscale, [1.0])


def test_an_infinite_length_scale_leaves_its_dimension_out(plane):
    settings = chosen(plane, lengthscale=np.array([np.inf, 0.5]), rkhs_penalty=3e-3).settings
    assert settings.dims == (1,)
    np.testing.assert_array_equal(settings.lengthscale, [0.5])


def test_a_base_that_is_given_stays(plane):
    base = Box(np.full(2, -4.0), np.full(2, 4.0))
    assert chosen(plane, base=base, **GIVEN).base is base


@pytest.mark.parametrize("free", ["condition_lengthscale", "lengthscale", "base_width", "rkhs_penalty"])
def test_what_the_user_fixed_is_kept(parts, free):
    values = {"condition_lengthscale": 0.7, "lengthscale": 1.3, "base_width": 1.1, "rkhs_penalty": 3e-3}
    found = searched(parts, **values | {free: None})
    assert found.trials
    for name, value in values.items():
        if name != free:
            np.testing.assert_allclose(getattr(found.settings, name), value, rtol=1e-12)
            assert {np.ravel(getattr(trial.settings, name))[0] for trial in found.trials} == {value}
    tried = {np.ravel(getattr(trial.settings, free))[0] for trial in found.trials}
    assert len(tried) > 1
    assert min(tried) * (1 - 1e-9) <= np.ravel(getattr(found.settings, free))[0] <= max(tried) * (1 + 1e-9)


def test_a_width_is_chosen_for_gaussian_bases_only(parts):
    assert searched(parts, base_width=None, base="box").trials == []


def test_trials_are_on_the_lattice(parts, selection):
    options, unit = Search(), median_distance(parts[False].sample.condition)
    penalties = np.outer(options.penalties, [1.0, np.sqrt(10.0), 1.0 / np.sqrt(10.0)])
    for trial in selection.trials:
        assert np.isclose(
            trial.settings.condition_lengthscale[0] / unit, options.condition_lengthscales
        ).any()
        assert np.isclose(trial.settings.lengthscale, options.lengthscales).any()
        assert np.isclose(trial.settings.rkhs_penalty, penalties).any()
        assert np.isfinite(trial.score)
        assert trial.standard_error > 0.0


@pytest.mark.parametrize("which", ["of_plane", "selection"])
def test_no_setting_is_tried_twice(which, request):
    trials = request.getfixturevalue(which).trials
    values = lambda s: (*s.condition_lengthscale, *s.lengthscale, s.rkhs_penalty)
    places = [tuple(np.round(np.log(values(trial.settings)), 9)) for trial in trials]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(("which", "rows"), [("of_plane", 80), ("selection", ROWS)])
def test_the_settings_are_the_mean_of_the_trials_by_exponential_weights(which, rows, request):
    found = request.getfixturevalue(which)
    weights = np.exp(0.5 * rows * (np.array([trial.score for trial in found.trials]) - found.chosen.score))
    for name in ("lengthscale", "rkhs_penalty"):
        logs = np.log([np.ravel(getattr(trial.settings, name))[0] for trial in found.trials])
        expected = np.exp(np.sum(weights * logs) / weights.sum())
        np.testing.assert_allclose(np.ravel(getattr(found.settings, name))[0], expected, rtol=1e-9)


def test_a_score_is_the_mean_log_density_of_rows_left_out(parts):
    # A hopeless penalty leaves the base, whose score needs no fold.
    found = searched(parts, rkhs_penalty=1e8, lengthscale=None)
    y = curve()[1]
    z = ((y - y.mean()) / y.std())[:, None]
    base = tailed_gaussian(z, width=1.0).log_densities(z) - np.log(y.std())
    for trial in found.trials:
        assert trial.score == pytest.approx(base.mean(), abs=2e-3)
        assert trial.standard_error == pytest.approx(base.std() / np.sqrt(ROWS), rel=2e-2)


def test_a_score_is_close_to_that_of_refitting_by_hand(parts):
    x, y = curve()
    options = Search(folds=5, repeats=1)
    trials = searched(parts, options=options, rkhs_penalty=None).trials
    trial = min(trials, key=lambda trial: abs(np.log10(trial.settings.rkhs_penalty) + 2.0))
    scores = np.zeros(ROWS)
    for out in left_out_rows(parts[False].sample, 5, 1, seed=0):
        model = ConditionalKernelExpFamily(
            model="kernel",
            kernel=Kernel(
                condition_lengthscale=1.0,
                lengthscale=1.0,
                rkhs_penalty=1e-2,
                base_width=1.0,
                power=False,
                n_centres=24,
            ),
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
    found = searched(scaled(x, np.exp(y) if skewed else y, powers=(False, True)), power=None)
    scores = {trial.settings.power: trial.score for trial in found.trials}
    assert set(scores) == {False, True}
    assert found.settings.power == (scores[True] > scores[False])
    if skewed:
        assert found.settings.power


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
    found = searched(
        scaled(x, x[:, 0] + rng.normal(size=ROWS)), condition_lengthscale=[0.5, 4.0], rkhs_penalty=None
    )
    np.testing.assert_allclose(found.settings.condition_lengthscale, [0.5, 4.0], rtol=1e-12)


def test_a_wavy_curve_gets_a_shorter_length_scale_than_a_straight_line():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (120, 1))
    noise = 0.3 * rng.normal(size=120)
    wavy, straight = (
        searched(
            scaled(x, f + noise), condition_lengthscale=None, rkhs_penalty=None
        ).settings.condition_lengthscale[0]
        for f in (np.sin(5.0 * x[:, 0]), 0.7 * x[:, 0])
    )
    assert wavy < 0.7 * straight


def test_the_listener_hears_the_number_of_trials_and_the_best_score(parts):
    reports = []
    found = searched(parts, rkhs_penalty=None, report=reports.append)
    assert {report.stage for report in reports} == {"selection"}
    assert reports[-1].step == len(found.trials)
    assert reports[-1].health["score"] == found.chosen.score


@pytest.mark.parametrize("which", ["plane", "parts"])
def test_the_same_seed_makes_the_same_choice(which, request):
    rows = request.getfixturevalue(which)
    scores = [
        [trial.score for trial in searched(rows, rkhs_penalty=None, seed=seed).trials] for seed in (0, 0, 1)
    ]
    assert scores[1] == scores[0]
    assert scores[2] != scores[0]


@pytest.mark.parametrize("rows", [10, 59, 60, 500])
def test_every_row_is_left_out_once_per_repetition(rows):
    folds = left_out_rows(Sample.unconditional(np.zeros((rows, 1))), 5, 2, seed=0)
    assert folds.shape == (10, rows)
    np.testing.assert_array_equal(folds.sum(0), 2)
    assert np.ptp(folds.sum(1)) <= 1


def fold_problem(kind: str) -> Problem:
    if kind == "unconditional":
        sample = Sample.unconditional(two_bumps())
    else:
        x, y = curve(100)
        # Every other condition is seen twice.
        sample = Sample(standardised(y[:, None]), np.repeat(x[:50], 2, axis=0) if kind == "shared" else x)
    base, kernel = Gaussian.fitted(sample.target), kernels.Gaussian(0.5)
    centres = Sample(sample.target[::5], sample.condition[::5])
    return Problem(sample, base, FeatureSpace.of_kernels(kernel, kernels.Gaussian(0.8), centres), 1.0, base)


@pytest.mark.parametrize("penalty", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("kind", ["unconditional", "conditional", "shared"])
def test_fold_scores_agree_with_fits_to_the_folds(kind, penalty):
    problem = fold_problem(kind)
    sample, space = problem.sample, problem.space
    nodes, out = (
        grid_nodes(problem.base, sample.target, fineness=0.25),
        left_out_rows(problem.sample, 10, 1, seed=0),
    )
    together = Folds(problem, nodes, nodes, out).scores(penalty)
    expected = np.empty(len(sample))
    for left in out:
        kept = likelihood(Problem(sample.rows(~left), problem.base, space, penalty, problem.base), nodes)
        weights = convex.maximise(kept, penalty, np.zeros(space.size), tolerance=1e-12).weights
        tilt = problem.tilt(weights)
        expected[left] = tilt.values(sample.target[left], sample.condition[left])
        expected[left] -= tilt.log_partitions(nodes, sample.condition[left])
    # The mean is what settings are ranked by; a point far from its fold's fit may be off by more.
    assert together.mean() == pytest.approx(expected.mean(), abs=2e-3 if penalty >= 1e-3 else 2e-2)


@pytest.mark.parametrize("lengthscale", [0.05, 0.5, 5.0])
def test_centres_of_one_target_cover_its_range_evenly(lengthscale):
    targets = np.random.default_rng(0).normal(size=(50, 1))
    centres = covering_centres(targets, lengthscale)[:, 0]
    assert centres[0] == pytest.approx(targets.min() - CENTRE_MARGIN)
    assert centres[-1] == pytest.approx(targets.max() + CENTRE_MARGIN)
    np.testing.assert_allclose(np.diff(centres), np.diff(centres)[0])
    assert 6 <= len(centres) <= 100


def test_centres_of_several_targets_are_some_of_them():
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(150, 2))
    centres = centre_rows(Sample(targets, rng.normal(size=(150, 1))), Features(), seed=0).target
    assert len(centres) == 100
    assert {tuple(row) for row in centres} <= {tuple(row) for row in targets}
    np.testing.assert_array_equal(covering_centres(centres, 1.0), centres)


def test_a_space_has_no_more_features_than_asked_for():
    rng = np.random.default_rng(0)
    settings = KernelSettings("gaussian", (0,), False, np.array([0.5, 2.0]), np.array([0.5]), 1.0, 1e-2)
    features = Features(condition_rank=(7, 7), target_rank=4, rank=5, floor=1e-8)
    for sample, sizes in (
        (Sample(rng.normal(size=(50, 1)), rng.normal(size=(50, 2))), (7, 4)),
        (Sample.unconditional(rng.normal(size=(50, 1))), (1, 5)),
    ):
        space = build_space(
            "gaussian", sample, centre_rows(sample, features, seed=0), settings.lengthscales, features
        )
        assert (space.condition.size, space.target.size) == sizes
        np.testing.assert_array_equal(space.target.kernel.lengthscale, [0.5])


@pytest.mark.parametrize("width", [0.6, 1.0, 1.6])
def test_the_base_under_a_condition_is_a_normal_with_a_share_of_a_wider_one(width):
    targets = np.random.default_rng(0).normal(size=(200, 1))
    base = tailed_gaussian(targets, width=width)
    points, cell = midpoint_grid([-60.0], [60.0], 20_000)
    density = np.exp(base.log_densities(points))
    assert cell * density.sum() == pytest.approx(1.0, abs=1e-6)
    scale = width * targets.std(ddof=1)
    middle = 0.98 * scipy.stats.norm.pdf(0.0, 0.0, scale) + 0.02 * scipy.stats.norm.pdf(0.0, 0.0, 4 * scale)
    assert density.max() == pytest.approx(middle, rel=1e-3)


def test_bases_by_name(parts):
    assert isinstance(searched(parts, base="box").base, Box)
    assert isinstance(searched(parts, base="mixture").base, Mixture)


@pytest.fixture
def one_thread():
    """Keep the boosted trees from waiting for one another on a busy machine."""
    with threadpool_limits(1):
        yield


@pytest.mark.usefixtures("one_thread")
def test_the_dimensions_of_the_rings_are_told_from_noise():
    for seed in range(5):
        data = standardised(rings(dim=6).sample(1000, random_state=seed))
        assert relevant_dimensions(data, Gaussian.fitted(data), seed=seed) == (0, 1)


@pytest.mark.usefixtures("one_thread")
def test_no_dimension_of_a_normal_matters():
    """With the error of the permutations alone, without that of the rows, two of six such sets had some."""
    for seed in range(6):
        data = standardised(np.random.default_rng(seed).normal(size=(1000, 10)))
        assert relevant_dimensions(data, fit_base("mixture", data, seed=seed), seed=seed) == ()


def test_an_unknown_base_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown base 'guess'.*gaussian, box, mixture"):
        fit_base("guess", np.zeros((10, 1)), seed=0)


def test_a_fitted_base_gains_its_parameters_over_the_rows():
    # A normal in 8 dimensions has 44 parameters: fitted to 80 rows it gains about 44 / 80 nats on those rows
    # over others.
    gaps = [
        optimism(
            "gaussian",
            np.random.default_rng(seed).normal(size=(100, 8)),
            Splits.draw(100, parts=1, share=0.2, seed=seed),
            seed=seed,
        )
        for seed in range(20)
    ]
    assert np.mean(gaps) == pytest.approx(44 / 80, abs=5 * np.std(gaps) / np.sqrt(20))


@pytest.mark.parametrize(
    ("record", "setting", "message"),
    [
        (Search, {"folds": 1}, "folds must be a whole number of at least 2"),
        (Search, {"penalties": ()}, "penalties must be positive"),
        (Search, {"lengthscales": (-1.0,)}, "lengthscales must be positive"),
        (Features, {"centres": 0}, "centres must be at least 1"),
        (Features, {"condition_rank": (5, 2)}, "condition_rank must be two rising numbers"),
        (Integration, {"draws": 1}, "draws must be a whole number"),
        (Integration, {"finer": 1.0}, "finer must be greater than 1"),
    ],
)
def test_settings_that_make_no_sense_are_named(record, setting, message):
    with pytest.raises(ValueError, match=message):
        record(**setting)


def test_a_second_climb_finds_short_length_scales_that_a_plain_density_shows():
    # The cross-validated score of these rows has two maxima; the climb from the middle finds the long one.
    X, fresh = (rings().sample(rows, random_state=seed) for rows, seed in ((100, 10), (500, 99)))
    model = KernelExpFamily(model="kernel", kernel=Kernel(search=Search(folds=3)), random_state=0).fit(X)
    tried = [float(trial.settings.lengthscale[0]) for trial in model.selection_.trials]
    assert max(tried) > 1.0  # the first climb
    assert model.lengthscale_[0] < 0.2
    assert model.score(fresh) > KernelDensity().fit(X).score(fresh)
