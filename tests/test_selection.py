import jax.numpy as jnp
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from kexpfam import kernels
from kexpfam.datasets import rings, two_moons
from kexpfam.kernels import median_distance
from kexpfam.measures import Box, Gaussian
from kexpfam.nodes import grid_nodes
from kexpfam.potentials import FeatureSpace
from kexpfam.sample import Sample
from kexpfam.selection import (
    LENGTHSCALE_RANGE,
    PENALTIES,
    WORTHWHILE,
    Search,
    fit_base,
    fold_scores,
    optimism,
    relevant_dimensions,
)
from kexpfam.solvers import convex
from kexpfam.solvers.task import Task, likelihood


def standardised(data):
    return (data - data.mean(0)) / data.std(0)


def two_bumps(count=100, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.choice([-1.5, 1.5], count)
    return standardised(rng.normal(centres, 0.4)[:, None])


@pytest.fixture(scope="module")
def moons():
    return Sample.unconditional(standardised(two_moons().sample(80, random_state=0)))


@pytest.fixture(scope="module")
def selection(moons):
    return Search(seed=0).run(moons)


def test_the_chosen_length_scale_beats_the_extremes(moons, selection):
    unit = median_distance(np.asarray(moons.target))
    for extreme in LENGTHSCALE_RANGE:
        trials = Search(lengthscale=extreme * unit, seed=0).run(moons).trials
        assert selection.chosen.score > max(trial.score for trial in trials)


def test_the_settings_are_those_of_the_chosen_trial(selection):
    settings, chosen = selection.settings, selection.chosen
    assert chosen in selection.trials
    assert settings.rkhs_penalty == chosen.rkhs_penalty
    np.testing.assert_allclose(settings.lengthscale, chosen.lengthscale)
    assert settings.dims == chosen.dims == (0, 1)


def test_no_trial_is_better_than_the_chosen_one_by_what_a_step_is_worth(selection):
    assert selection.chosen.score >= max(trial.score for trial in selection.trials) - WORTHWHILE


def test_length_scales_are_tried_on_a_geometric_grid_around_the_chosen_one(selection):
    tried = sorted({trial.lengthscale for trial in selection.trials})
    np.testing.assert_allclose(np.diff(np.log(tried)), np.log(2.0) / 2, atol=1e-9)
    assert len(tried) >= 2
    assert selection.chosen.lengthscale in tried


def test_a_path_goes_down_the_penalties_and_past_its_best(selection):
    for scale in {trial.lengthscale for trial in selection.trials}:
        path = [trial for trial in selection.trials if trial.lengthscale == scale]
        np.testing.assert_allclose([trial.rkhs_penalty for trial in path], PENALTIES[: len(path)])
        scores = [trial.score for trial in path]
        assert np.argmax(scores) < len(path) - 1 or len(path) == len(PENALTIES)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_bimodal_sample_gets_a_better_score_than_its_base(seed):
    data = two_bumps(seed=seed)
    selection = Search(seed=seed).run(Sample.unconditional(data))
    base = Gaussian.fitted(data).log_densities(data).mean()
    assert selection.chosen.score > base + 0.1


def test_a_length_scale_that_is_given_stays(moons):
    selection = Search(lengthscale=0.7, seed=0).run(moons)
    np.testing.assert_array_equal(selection.settings.lengthscale, [0.7, 0.7])
    assert {trial.lengthscale for trial in selection.trials} == {0.7}


def test_a_penalty_that_is_given_stays(moons):
    selection = Search(rkhs_penalty=3e-3, seed=0).run(moons)
    assert selection.settings.rkhs_penalty == 3e-3
    assert {trial.rkhs_penalty for trial in selection.trials} == {3e-3}


def test_nothing_is_tried_where_everything_is_given(moons):
    selection = Search(lengthscale=0.7, rkhs_penalty=3e-3, seed=0).run(moons)
    assert selection.trials == []
    assert selection.chosen is None


def test_an_infinite_length_scale_leaves_its_dimension_out(moons):
    settings = Search(lengthscale=np.array([np.inf, 0.5]), rkhs_penalty=3e-3, seed=0).run(moons).settings
    assert settings.dims == (1,)
    np.testing.assert_array_equal(settings.lengthscale, [0.5])


def test_a_base_that_is_given_stays(moons):
    base = Box(jnp.full(2, -4.0), jnp.full(2, 4.0))
    assert Search(base=base, lengthscale=0.7, rkhs_penalty=3e-3, seed=0).run(moons).settings.base is base


@pytest.mark.parametrize("penalty", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_fold_scores_agree_with_fits_to_the_folds(penalty):
    data = two_bumps()
    sample, base, kernel = Sample.unconditional(data), Gaussian.fitted(data), kernels.Gaussian(0.5)
    space = FeatureSpace.of_kernels(kernel, kernel, sample)
    problem = likelihood(Task(sample, base, space, penalty, base), grid_nodes(base, data))
    features = space.matrix(data, np.zeros((len(data), 0)))
    optimum = convex.maximise(problem, penalty, np.zeros(space.size))
    folds = np.random.default_rng(0).permutation(len(data)) % 10
    together = fold_scores(problem, problem, optimum, penalty, features, folds)
    expected = np.empty(len(data))
    for fold in range(10):
        mean = features[folds != fold].mean(0)
        alone = convex.maximise(problem._replace(mean_feature=mean), penalty, optimum.weights, tolerance=1e-14)
        expected[folds == fold] = features[folds == fold] @ alone.weights - alone.log_partitions[0]
    # The mean is what settings are ranked by; a point far from its fold's fit may be off by more.
    assert together.mean() == pytest.approx(expected.mean(), abs=1e-3)
    if penalty >= 1e-2:
        np.testing.assert_allclose(together, expected, atol=1e-3)


@pytest.fixture
def one_thread():
    """Keep the boosted trees from waiting for one another on a busy machine."""
    with threadpool_limits(1):
        yield


@pytest.mark.usefixtures("one_thread")
def test_the_dimensions_of_the_rings_are_told_from_noise():
    found = []
    for seed in range(3):
        data = standardised(rings(dim=6).sample(1000, random_state=seed))
        found.append(set(relevant_dimensions(data, Gaussian.fitted(data), seed=seed)))
    assert all(dims >= {0, 1} for dims in found)
    # One noise dimension in twelve is let pass by chance: it costs a little time and no correctness.
    assert sum(len(dims - {0, 1}) for dims in found) <= 1


@pytest.mark.usefixtures("one_thread")
def test_hardly_any_dimension_of_a_normal_matters():
    found = []
    for seed in range(3):
        data = standardised(np.random.default_rng(seed).normal(size=(1000, 5)))
        found.append(relevant_dimensions(data, Gaussian.fitted(data), seed=seed))
    assert sum(map(len, found)) <= 2


def test_an_unknown_base_is_named_with_the_known_ones(moons):
    with pytest.raises(ValueError, match=r"unknown base 'guess'.*gaussian, box, mixture"):
        fit_base("guess", np.asarray(moons.target), seed=0)


def test_a_fitted_base_flatters_itself_by_its_parameters_over_the_rows():
    # A normal in 8 dimensions has 44 parameters: fitted to 80 rows it gains about 44 / 80 nats on those rows over others.
    gaps = [optimism("gaussian", np.random.default_rng(seed).normal(size=(100, 8)), seed=seed) for seed in range(20)]
    assert np.mean(gaps) == pytest.approx(44 / 80, abs=5 * np.std(gaps) / np.sqrt(20))


def test_the_same_seed_gives_the_same_choice(moons, selection):
    again = Search(seed=0).run(moons)
    assert again.trials == selection.trials
    assert again.chosen == selection.chosen


def test_an_interrupted_walk_goes_with_what_it_has(moons):
    reports = []

    def interrupt(report):
        reports.append(report)
        if len(reports) == 2:
            raise KeyboardInterrupt

    selection = Search(seed=0, report=interrupt).run(moons)
    assert len(reports) == 2
    assert selection.chosen in selection.trials
