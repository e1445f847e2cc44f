import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from oracles import changed, midpoint_grid
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import kexpfam
from kexpfam import DDE, Convex, Integration, Judgement, Kernel, KernelExpFamily
from kexpfam.data.columns import TiesWarning
from kexpfam.datasets import two_moons
from kexpfam.estimators.base import UncertainNormaliserWarning
from kexpfam.fit import kernel as fit_kernel
from kexpfam.fit.bases import BASES
from kexpfam.fit.convex import continuation, likelihood
from kexpfam.fit.distil import Distillation
from kexpfam.fit.problem import Solution, Solver, Status
from kexpfam.fit.saddle import DoublyDual
from kexpfam.integrate.nodes import importance_nodes
from kexpfam.model.density import Estimate, Sampler
from kexpfam.model.kernels import KERNELS
from kexpfam.model.measures import COVARIANCE_FLOOR, Gaussian
from kexpfam.model.networks import Identity
from kexpfam.storage import StorageError

ROWS, DRAWS = 60, 1000
# Few centres keep the number of features, and with it the compiled programs, the same for all data.
COARSE = Integration(cells=(400, 56, 22), tail_cells=(20, 3, 2), draws=2048)
SETTINGS = {
    "model": "kernel",
    "kernel": Kernel(lengthscale=1.0, rkhs_penalty=1e-2, n_centres=15, integration=COARSE),
    "random_state": 0,
}
BRIEF = Judgement(draws=500, certifying_draws=2048)
SMALL = DDE(
    saddle=DoublyDual(
        width=8, transport_depth=1, nu_depth=1, batch_size=32, transport_updates=2, nu_updates=1
    ),
    steps=5,
    warm_start=True,
    polish=True,
    distillation=Distillation(components=6, draws=1000, candidates=3000),
)


class Quick(Solver):
    """The cheapest solver for any dimension: f from a few importance draws, and the base as sampler."""

    def solve(self, task, *, key, report=None, checkpoint=None):
        nodes = importance_nodes(task.base, task.proposal, 256, key=key)
        optimum = continuation(likelihood(task, nodes), task.rkhs_penalty)
        sampler = Sampler(task.base, Identity(), task.base)
        return Solution(task.tilt(optimum.weights), sampler, Status.CONVERGED, {}, {})


CHECKED = KernelExpFamily(
    model="kernel",
    kernel=Kernel(lengthscale=2.0, rkhs_penalty=0.1, base="gaussian", n_centres=10, normaliser="importance"),
    solver=Quick(),
    random_state=0,
)


@pytest.fixture(scope="module")
def moons():
    return two_moons().sample(ROWS, random_state=0)


@pytest.fixture(scope="module")
def model(moons):
    return exact().fit(moons)


@pytest.fixture(scope="module")
def saddle(moons):
    return KernelExpFamily(**SETTINGS | {"solver": SMALL}).fit(moons)


def exact(**changes) -> KernelExpFamily:
    return KernelExpFamily(**changed(SETTINGS | {"solver": "exact"}, **changes))


def bounds(data, spread=6.0):
    return data.mean(0) - spread * data.std(0), data.mean(0) + spread * data.std(0)


EXPECTED = {
    "check_pipeline_consistency": "its columns are collinear and have no joint density",
    "check_estimators_pickle": "puts missing values into the rows, and model='kernel' refuses them",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::kexpfam.TiesWarning")  # rows are repeated to compare them with weights
@pytest.mark.filterwarnings("ignore::kexpfam.data.encoding.ColumnKindWarning")
@parametrize_with_checks([CHECKED], expected_failed_checks=lambda estimator: EXPECTED)
def test_scikit_learns_contract(estimator, check):
    check(estimator)


def test_the_score_is_the_mean_log_density(model, moons):
    log_density = model.score_samples(moons)
    assert log_density.shape == (ROWS,)
    assert model.score(moons) == pytest.approx(log_density.mean(), rel=1e-12)


@pytest.mark.parametrize("base", BASES)
def test_the_density_integrates_to_one_over_every_base(moons, base):
    model = exact(base=base).fit(moons)
    points, volume = midpoint_grid(*bounds(moons, 8.0), 900)
    mass = volume * np.exp(model.score_samples(points)).sum()
    # A box ends inside a cell of the test's grid; otherwise the reported error is all there is.
    assert abs(np.log(mass)) < (2e-2 if base == "box" else 5 * model.density_.log_partition.standard_error)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_kernel_fits_better_than_the_base(moons, kernel):
    base = scipy.stats.multivariate_normal(moons.mean(0), np.cov(moons.T)).logpdf(moons).mean()
    assert exact(kernel=kernel).fit(moons).score(moons) > base + 0.1


@pytest.mark.slow
def test_every_space_gives_nearly_the_density_of_the_full_one(moons):
    full = exact(space="full", lengthscale=[0.9, 1.1]).fit(moons)
    for space, n_centres in {"nystrom": 40, "random_features": 300}.items():
        other = exact(space=space, lengthscale=[0.9, 1.1], n_centres=n_centres).fit(moons)
        assert other.score(moons) == pytest.approx(full.score(moons), abs=0.05), space


@pytest.mark.slow
def test_dimensions_with_an_infinite_length_scale_follow_the_base():
    rng = np.random.default_rng(0)
    first = np.concatenate([rng.normal(-2.0, 0.5, 30), rng.normal(2.0, 0.5, 30)])
    data = np.stack([rng.normal(1.0, 2.0, ROWS), first, 0.5 * first + rng.normal(size=ROWS)], 1)
    model = exact(lengthscale=[np.inf, 1.0, np.inf], space="full").fit(data)
    alone = exact(space="full").fit(data[:, [1]])
    # In standardised units the base is a normal with the data's covariance.
    z = (data - data.mean(0)) / data.std(0)
    covariance = np.cov(z.T) + COVARIANCE_FLOOR * np.eye(3)
    joint = scipy.stats.multivariate_normal(np.zeros(3), covariance)
    marginal = scipy.stats.norm(0.0, np.sqrt(covariance[1, 1]))
    others = joint.logpdf(z) - marginal.logpdf(z[:, 1]) - np.log(data.std(0)[[0, 2]]).sum()
    np.testing.assert_allclose(
        model.score_samples(data), alone.score_samples(data[:, [1]]) + others, atol=1e-6
    )
    draws = (model.sample(4000, random_state=0) - data.mean(0)) / data.std(0)
    slope = covariance[2, 1] / covariance[1, 1]
    residual = draws[:, 2] - slope * draws[:, 1]
    deviation = np.sqrt(covariance[2, 2] - slope * covariance[2, 1])
    assert abs(residual.mean()) < 5 * deviation / np.sqrt(4000)
    assert residual.var() == pytest.approx(deviation**2, rel=5 * np.sqrt(2 / 4000))


def test_a_pipeline_scores_in_the_units_of_its_last_step(model, moons):
    pipeline = make_pipeline(StandardScaler(), exact()).fit(moons)
    shift = np.log(moons.std(0)).sum()
    assert pipeline.score(moons) == pytest.approx(model.score(moons) + shift, abs=1e-6)


def test_a_grid_search_prefers_the_better_penalty(moons):
    search = GridSearchCV(exact(), {"kernel__rkhs_penalty": [1e-2, 1e4]}, cv=3).fit(moons)
    assert search.best_params_ == {"kernel__rkhs_penalty": 1e-2}
    assert search.best_estimator_.get_params()["kernel__rkhs_penalty"] == 1e-2
    assert np.all(np.isfinite(search.cv_results_["mean_test_score"]))


def test_cross_validation_is_fits_to_the_folds(moons):
    folds = KFold(3)
    by_hand = [exact().fit(moons[train]).score(moons[test]) for train, test in folds.split(moons)]
    np.testing.assert_allclose(cross_val_score(exact(), moons, cv=folds), by_hand, rtol=1e-9)


def test_a_clone_has_the_settings_and_no_fit(model, moons):
    copy = clone(model)
    assert copy.get_params()["kernel__lengthscale"] == 1.0
    with pytest.raises(NotFittedError):
        copy.score(moons)
    np.testing.assert_array_equal(copy.fit(moons).score_samples(moons), model.score_samples(moons))


def test_frames_are_read_by_name(model, moons):
    frame = pd.DataFrame(moons, columns=["left", "right"])
    named = exact().fit(frame)
    np.testing.assert_array_equal(named.feature_names_in_, ["left", "right"])
    # A frame's columns lie apart in memory, so that its sums are rounded in another order.
    np.testing.assert_allclose(named.score_samples(frame), model.score_samples(moons), atol=1e-9)
    with pytest.raises(ValueError, match="feature names"):
        named.score_samples(frame[["right", "left"]])


def test_frames_of_integers_and_single_precision_are_as_good(moons):
    rounded = np.round(10 * moons)
    scores = [exact().fit(rounded.astype(kind)).score(rounded) for kind in (np.float64, np.float32, np.int64)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-12)


def with_cell(data, value):
    changed = data.astype(object if isinstance(value, str) else float)
    changed[3, 1] = value
    return changed


BAD_DATA = {
    "nan": (lambda X: with_cell(X, np.nan), "without missing values"),
    "infinity": (lambda X: with_cell(X, np.inf), "infinity"),
    "text": (lambda X: with_cell(X, "blue"), "60 different labels in 60 rows"),
    "too few rows": (lambda X: X[:9], r"9 sample\(s\).*minimum of 10"),
    "no rows": (lambda X: X[:0], r"0 sample\(s\)"),
    "no columns": (lambda X: X[:, :0], r"0 feature\(s\)"),
    "one dimension": (lambda X: X[:, 0], "Expected 2D array"),
    "constant column": (lambda X: np.insert(X, 1, 5.0, axis=1), r"constant column\(s\) 1.*remove"),
    "constant up to rounding": (
        lambda X: np.insert(X, 2, 1e6 + 1e-9 * X[:, 0], axis=1),
        r"constant column\(s\) 2",
    ),
    "complex": (lambda X: X + 1j, "Complex data not supported"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_DATA.values(), ids=BAD_DATA)
def test_bad_data_are_refused_with_the_reason(moons, spoil, message):
    with pytest.raises(ValueError, match=message):
        exact().fit(spoil(moons))


def test_a_constant_column_of_a_frame_is_named(moons):
    frame = pd.DataFrame(moons, columns=["left", "right"]).assign(colour=3.0)
    with pytest.raises(ValueError, match=r"constant column\(s\) colour"):
        exact().fit(frame)


BAD_SETTINGS = {
    "solver": ({"solver": "guess"}, r"unknown solver 'guess'.*auto, exact, dde"),
    "kernel": ({"kernel": "guess"}, r"unknown kernel 'guess'.*gaussian, laplace"),
    "base": ({"base": "guess"}, r"unknown base 'guess'.*gaussian, box, mixture"),
    "space": ({"space": "guess"}, r"unknown space 'guess'.*nystrom, full, random_features"),
    "normaliser": ({"normaliser": "guess"}, r"unknown normaliser 'guess'.*quadrature"),
    "negative penalty": ({"rkhs_penalty": -1.0}, r"rkhs_penalty must be positive.*got -1\.0"),
    "penalty of zero": ({"rkhs_penalty": 0.0}, r"rkhs_penalty must be positive.*got 0\.0"),
    "negative length scale": ({"lengthscale": -1.0}, r"lengthscale must be positive.*got -1\.0"),
    "length scale of zero": ({"lengthscale": [1.0, 0.0]}, "lengthscale must be positive"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_refused_with_the_known_ones(moons, changes, message):
    with pytest.raises(ValueError, match=message):
        exact(**changes).fit(moons)


SENSELESS_SETTINGS = {
    "length scales of another width": ({"lengthscale": [1.0, 1.0, 1.0]}, "lengthscale"),
    "length scale of nan": ({"lengthscale": np.nan}, "lengthscale"),
    "only infinite length scales": ({"lengthscale": np.inf}, "lengthscale"),
    "penalty of nan": ({"rkhs_penalty": np.nan}, "rkhs_penalty"),
    "infinite penalty": ({"rkhs_penalty": np.inf}, "rkhs_penalty"),
    "no centres": ({"n_centres": 0}, "n_centres"),
}
WRONG_TYPES = {
    "no solver": ({"solver": None}, r"solver must be one of auto"),
    "a class for a solver": (
        {"solver": Convex},
        r"Convex is a class: pass an object, as in solver=Convex\(\)",
    ),
    "a number for a base": ({"base": 3.0}, "base must be one of gaussian"),
    "a dictionary for a record": (
        {"integration": {"draws": 10}},
        "integration must be a Integration, got",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_settings_of_the_wrong_type_are_named_before_any_work(moons, changes, message):
    reports = []
    with pytest.raises(TypeError, match=message):
        exact(**{"lengthscale": None, "progress": reports.append} | changes).fit(moons)
    assert reports == []


@pytest.mark.parametrize(("changes", "message"), SENSELESS_SETTINGS.values(), ids=SENSELESS_SETTINGS)
def test_senseless_settings_are_refused_by_name(moons, changes, message):
    with pytest.raises(ValueError, match=message):
        exact(**changes).fit(moons)


@pytest.mark.parametrize("method", ["score_samples", "score", "potential"])
@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.zeros((4, 3)), "3 features, but KernelExpFamily is expecting 2"),
        (np.full((4, 2), np.inf), "infinity"),
    ],
    ids=["width", "infinity"],
)
def test_bad_points_are_refused(model, method, points, message):
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(points)


@pytest.mark.parametrize(
    ("arguments", "message"), [((0,), "n_samples"), ((-3,), "n_samples"), ((2.5,), "n_samples")]
)
def test_a_senseless_number_of_draws_is_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.sample(*arguments)


def test_a_negative_number_of_refining_steps_is_refused(model):
    with pytest.raises(ValueError, match="refine"):
        model.sample(3, refine=-1)


def test_nothing_can_be_asked_before_the_fit(moons, tmp_path):
    new = exact()
    for ask in (new.score_samples, new.score, new.potential):
        with pytest.raises(NotFittedError):
            ask(moons)
    for ask in (new.sample, new.diagnose, lambda: new.save(tmp_path / "model.kexpfam")):
        with pytest.raises(NotFittedError):
            ask()


def test_a_box_has_no_density_outside_and_no_nan_anywhere(moons):
    model = exact(base="box").fit(moons)
    points, _ = midpoint_grid(*bounds(moons), 40)
    log_density = model.score_samples(np.concatenate([points, [[1e6, 0.0], [0.0, -1e6]]]))
    assert not np.any(np.isnan(log_density))
    assert not np.any(log_density == np.inf)
    low, high = moons.min(0) - 0.2 * np.ptp(moons, axis=0), moons.max(0) + 0.2 * np.ptp(moons, axis=0)
    inside = np.all((points >= low) & (points <= high), axis=1)
    np.testing.assert_array_equal(np.isfinite(log_density[:-2]), inside)
    assert np.all(np.isneginf(log_density[-2:]))
    draws = model.sample(500, random_state=0)
    assert np.all((draws >= low) & (draws <= high))


def test_bounds_are_in_the_units_of_the_data():
    data = np.random.default_rng(0).beta(1.0, 3.0, (ROWS, 1)) * 100.0 + 20.0
    model = exact(bounds=(20.0, 120.0)).fit(data)
    points, width = midpoint_grid([20.0], [120.0], 4000)
    assert width * np.exp(model.score_samples(points)).sum() == pytest.approx(1.0, abs=1e-3)
    assert np.all(np.isneginf(model.score_samples([[19.99], [120.01]])))
    draws = model.sample(2000, random_state=0)
    assert np.all((draws >= 20.0) & (draws <= 120.0))


BAD_BOUNDS = {
    "outside": ((-0.1, 0.1), "outside the bounds"),
    "crossed": ((5.0, -5.0), "lower below the upper"),
    "open": ((-np.inf, 5.0), "must be finite"),
}


@pytest.mark.parametrize(("bounds", "message"), BAD_BOUNDS.values(), ids=BAD_BOUNDS)
def test_bounds_that_cannot_be_are_refused(moons, bounds, message):
    with pytest.raises(ValueError, match=message):
        exact(bounds=bounds).fit(moons)


def test_points_far_away_have_a_low_log_density_and_no_nan(model):
    log_density = model.score_samples([[1e3, 0.0], [1e6, 1e6]])
    assert np.all(log_density < -1e3)
    assert np.all(np.isfinite(log_density))


def test_the_same_seed_gives_the_same_model(saddle, moons):
    again = clone(saddle).fit(moons)
    np.testing.assert_array_equal(again.score_samples(moons), saddle.score_samples(moons))
    np.testing.assert_array_equal(again.sample(20, random_state=1), saddle.sample(20, random_state=1))


def test_another_seed_gives_another_model_of_nearly_the_same_score(saddle, moons):
    other = clone(saddle).set_params(random_state=1).fit(moons)
    assert not np.array_equal(other.score_samples(moons), saddle.score_samples(moons))
    assert other.score(moons) == pytest.approx(saddle.score(moons), abs=0.1)


@pytest.mark.parametrize("factor", [10.0, 1e-3, -2.0])
def test_the_score_follows_the_units(model, moons, factor):
    scaled = exact().fit(factor * moons + 5.0)
    expected = model.score(moons) - 2 * np.log(abs(factor))
    if factor > 0:
        assert scaled.score(factor * moons + 5.0) == pytest.approx(expected, abs=1e-6)
    else:  # a reflection, too, is a change of units; which points become centres is a matter of rounding
        assert scaled.score(factor * moons + 5.0) == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_the_rows_does_not_matter(moons, seed):
    order = np.random.default_rng(seed).permutation(ROWS)
    scores = [exact(space="full").fit(data).score(moons) for data in (moons, moons[order])]
    assert abs(scores[0] - scores[1]) < 1e-2


def test_the_order_of_the_columns_does_not_matter(moons):
    first = exact(space="full").fit(moons).score_samples(moons)
    second = exact(space="full").fit(moons[:, ::-1]).score_samples(moons[:, ::-1])
    np.testing.assert_allclose(
        first, second, atol=1e-3
    )  # the grid is the same up to rounding, Newton's end is not


@pytest.mark.parametrize(("count", "refine"), [(1, 0), (7, 0), (DRAWS, 0), (DRAWS, 2)])
def test_draws_have_the_shape_asked_for_and_follow_the_seed(model, count, refine):
    draws = model.sample(count, random_state=3, refine=refine)
    assert draws.shape == (count, 2)
    assert np.all(np.isfinite(draws))
    np.testing.assert_array_equal(draws, model.sample(count, random_state=3, refine=refine))
    assert not np.array_equal(draws, model.sample(count, random_state=4, refine=refine))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_refined_draws_have_the_moments_of_the_density(model, moons, seed):
    points, volume = midpoint_grid(*bounds(moons), 200)
    masses = volume * np.exp(model.score_samples(points))
    draws = model.sample(DRAWS, random_state=seed, refine=2)
    for power in (1, 2):
        exact_moment = masses @ points**power
        # Resampled from candidates of which at least one per draw is effective.
        error = (draws**power).std(0) * np.sqrt(2 / DRAWS)
        assert np.all(np.abs((draws**power).mean(0) - exact_moment) < 5 * error)


def test_a_random_state_object_is_used_up(model):
    state = np.random.RandomState(0)
    assert not np.array_equal(model.sample(5, random_state=state), model.sample(5, random_state=state))


@pytest.mark.parametrize("fitted", ["model", "saddle"])
def test_a_stored_model_is_the_same_to_the_last_bit(fitted, moons, tmp_path, request):
    model, file = request.getfixturevalue(fitted), tmp_path / "model.kexpfam"
    model.save(file)
    stored = kexpfam.load(file)
    np.testing.assert_array_equal(stored.score_samples(moons), model.score_samples(moons))
    np.testing.assert_array_equal(stored.sample(DRAWS, random_state=1), model.sample(DRAWS, random_state=1))
    refined = [m.sample(DRAWS, random_state=1, refine=2) for m in (stored, model)]
    np.testing.assert_array_equal(*refined)
    assert stored.solution_.status is model.solution_.status
    np.testing.assert_allclose(stored.training_data_, moons, rtol=1e-12)


def test_a_stored_model_can_be_fitted_again(model, moons, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    again = kexpfam.load(tmp_path / "model.kexpfam").set_params(random_state=0).fit(moons)
    np.testing.assert_array_equal(again.score_samples(moons), model.score_samples(moons))


def test_a_stored_model_knows_the_names_of_its_columns(moons, tmp_path):
    frame = pd.DataFrame(moons, columns=["left", "right"])
    exact().fit(frame).save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    assert np.all(np.isfinite(stored.score_samples(frame)))
    with pytest.raises(ValueError, match="feature names"):
        stored.score_samples(frame[["right", "left"]])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_refused(model, tmp_path, share):
    file = tmp_path / "model.kexpfam"
    model.save(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(StorageError, match="cut short|damaged"):
        kexpfam.load(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StorageError, match="no file"):
        kexpfam.load(tmp_path / "nothing.kexpfam")


@pytest.mark.parametrize("fitted", ["model", "saddle"])
def test_a_model_can_be_pickled(fitted, moons, request):
    model = request.getfixturevalue(fitted)
    with jax.enable_x64(False):  # as in a worker of joblib
        copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.score_samples(moons), model.score_samples(moons))


def test_a_checkpoint_resumes_a_fit(saddle, moons, tmp_path):
    file = tmp_path / "state.kexpfam"
    first = clone(saddle).set_params(checkpoint=file).fit(moons)
    assert file.is_file()
    second = clone(first).fit(moons)
    for model in (first, second):
        np.testing.assert_array_equal(model.score_samples(moons), saddle.score_samples(moons))
    with pytest.raises(StorageError, match="other data, settings or solver"):
        clone(first).set_params(kernel__rkhs_penalty=2e-2).fit(moons)
    with pytest.raises(StorageError, match="other data, settings or solver"):
        other = DDE(saddle=SMALL.saddle, steps=6, warm_start=True, distillation=SMALL.distillation)
        clone(first).set_params(solver=other).fit(moons)


HUGE = {"overflow": 1e300, "underflow": 1e-300}


@pytest.mark.parametrize("factor", HUGE.values(), ids=HUGE)
def test_a_spread_beyond_double_precision_is_refused(moons, factor):
    with pytest.raises(ValueError, match="beyond double precision: rescale"):
        exact().fit(moons * factor)


def test_the_sampler_of_a_grid_follows_the_density(model):
    diagnosis = model.diagnose(settings=BRIEF)
    assert diagnosis.sampler_kl < 4 * diagnosis["sampler_kl"].error + 0.01
    assert not diagnosis.sampler_folds
    assert diagnosis.dual >= diagnosis.primal - 4 * diagnosis["dual"].error


def test_what_was_chosen_is_visible(model):
    np.testing.assert_array_equal(model.lengthscale_, [1.0, 1.0])
    assert model.rkhs_penalty_ == 1e-2
    assert isinstance(model.base_, Gaussian)


@pytest.mark.slow
def test_three_coordinates_are_integrated_on_a_grid_and_certified():
    data = np.random.default_rng(0).normal(size=(80, 3))
    data[:, 2] += np.sin(2 * data[:, 0])
    model = exact(integration=Integration(cells=(60, 30, 20), tail_cells=(4, 3, 2))).fit(data)
    diagnosis = model.diagnose(settings=BRIEF)
    assert model.density_.nodes.is_grid
    error = np.hypot(diagnosis["primal"].error, diagnosis["dual"].error)
    assert -1e-6 <= diagnosis.dual - diagnosis.primal < 4 * error + 1e-3


@pytest.mark.slow
def test_four_columns_are_fitted_on_draws():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(300, 4))
    data[:, 0] = np.where(rng.uniform(size=300) < 0.5, -2.0, 2.0) + 0.3 * data[:, 0]
    model = KernelExpFamily(model="kernel", random_state=0).fit(data)
    normal = scipy.stats.multivariate_normal(data.mean(0), np.cov(data.T)).logpdf(data).mean()
    assert model.score(data) > normal + 0.3
    assert model.density_.log_partition.trustworthy


def test_the_callers_jax_is_left_as_it_was(model, moons):
    with jax.enable_x64(False):
        fitted = exact().fit(moons)
        assert jnp.ones(1).dtype == jnp.float32
        np.testing.assert_array_equal(fitted.score_samples(moons), model.score_samples(moons))
        assert jnp.ones(1).dtype == jnp.float32


def test_an_uncertain_normaliser_is_said_aloud(moons, monkeypatch):
    monkeypatch.setattr(fit_kernel, "log_partition", lambda *args, **kwargs: Estimate(0.0, 1.0, 5.0))
    with pytest.warns(UncertainNormaliserWarning, match="log densities share this error"):
        exact().fit(moons)


def test_repeated_rows_are_said_aloud(moons):
    with pytest.warns(TiesWarning, match="repeats in 50% of the rows"):
        exact().fit(np.repeat(moons[: ROWS // 2], 2, axis=0))


def test_the_density_of_heavy_tailed_data_integrates_to_one():
    data = np.random.default_rng(0).standard_t(1.2, (ROWS, 1))
    model = exact().fit(data)
    assert model.density_.scaling.arcsinh == (True,)
    # The grid is even in arcsinh(x), so that it reaches as far as the tails do.
    t, width = midpoint_grid([-25.0], [25.0], 20_000)
    mass = width * np.sum(np.exp(model.score_samples(np.sinh(t))) * np.cosh(t[:, 0]))
    assert abs(np.log(mass)) < 5 * model.density_.log_partition.standard_error + 1e-6


def test_a_base_may_be_a_measure(model, moons):
    standardised = (moons - moons.mean(0)) / moons.std(0)
    same = exact(base=Gaussian.fitted(standardised)).fit(moons)
    np.testing.assert_allclose(same.score_samples(moons), model.score_samples(moons), atol=1e-8)


def test_f_is_the_log_ratio_of_density_and_base(model, moons):
    standardised = (moons - moons.mean(0)) / moons.std(0)
    base = scipy.stats.multivariate_normal(np.zeros(2), np.cov(standardised.T) + COVARIANCE_FLOOR * np.eye(2))
    log_ratio = model.score_samples(moons) + np.log(moons.std(0)).sum() - base.logpdf(standardised)
    np.testing.assert_allclose(
        model.potential(moons) - model.density_.log_partition.value, log_ratio, atol=1e-8
    )


def test_the_diagnosis_reads_as_a_verdict_with_numbers(model, tmp_path):
    diagnosis = model.diagnose(settings=BRIEF)
    assert diagnosis.verdict in ("good", "fair", "poor")
    assert diagnosis.duality_gap >= 0.0
    assert diagnosis.f_gap < 0.05
    text = str(diagnosis)
    assert text.startswith("verdict:")
    model.save(tmp_path / "model.kexpfam")
    assert str(kexpfam.load(tmp_path / "model.kexpfam").diagnose(settings=BRIEF)) == text
    assert all(name in text for name in ("log Z", "duality gap", "KL(sampler || density)", "effective share"))


def test_the_listener_hears_of_selection(moons):
    reports = []
    model = exact(lengthscale=None, rkhs_penalty=None, progress=reports.append).fit(moons)
    assert {report.stage for report in reports} == {"selection"}
    assert reports[-1].step == len(model.selection_.trials)
