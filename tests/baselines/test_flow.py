"""The neural spline flow behind the face: quadrature, draws, early stopping, storage without pickle."""

import sys

import numpy as np
import pytest
import scipy.stats
from oracles import midpoint_grid
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import kexpfam
from kexpfam.baselines.flow import FlowLosses, SplineFlow
from kexpfam.datasets import two_moons

ROWS = 80
SMALL = {
    "n_layers": 2,
    "n_knots": 4,
    "width": 8,
    "max_epochs": 12,
    "patience": 3,
    "learning_rate": 1e-2,
    "random_state": 0,
}


@pytest.fixture(scope="module")
def moons():
    pytest.importorskip("flowjax")
    return two_moons().sample(ROWS, random_state=0)


@pytest.fixture(scope="module")
def model(moons):
    return SplineFlow(**SMALL).fit(moons)


@pytest.mark.slow
def test_the_density_integrates_to_one_in_data_units(model, moons):
    points, volume = midpoint_grid(
        moons.mean(0) - 8.0 * moons.std(0), moons.mean(0) + 8.0 * moons.std(0), 250
    )
    # Splines have kinks in their second derivative, which the midpoint rule feels.
    assert volume * np.exp(model.score_samples(points)).sum() == pytest.approx(1.0, abs=5e-3)


@pytest.mark.slow
def test_training_raises_the_likelihood(model, moons):
    normal = scipy.stats.multivariate_normal(moons.mean(0), np.diag(moons.var(0))).logpdf(moons).mean()
    assert model.score(moons) > normal + 0.05
    assert model.training_.validation.min() < model.training_.validation[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_draws_follow_the_density(model, moons, seed):
    draws = model.sample(1000, random_state=seed)
    assert draws.shape == (1000, 2)
    points, volume = midpoint_grid(
        moons.mean(0) - 8.0 * moons.std(0), moons.mean(0) + 8.0 * moons.std(0), 250
    )
    masses = volume * np.exp(model.score_samples(points))
    for power in (1, 2):
        error = (draws**power).std(0) / np.sqrt(1000)
        assert np.all(
            np.abs((draws**power).mean(0) - masses @ points**power) < 5 * error + 0.01 * moons.std(0) ** power
        )
    np.testing.assert_array_equal(draws, model.sample(1000, random_state=seed, refine=2))


@pytest.mark.slow
def test_a_stored_model_is_the_same_to_the_last_bit(model, moons, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(stored.score_samples(moons), model.score_samples(moons))
    np.testing.assert_array_equal(stored.sample(1000, random_state=1), model.sample(1000, random_state=1))
    assert str(stored.diagnose()) == str(model.diagnose())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_model(model, moons):
    again = clone(model).fit(moons)
    np.testing.assert_array_equal(again.score_samples(moons), model.score_samples(moons))
    assert not np.array_equal(
        clone(model).set_params(random_state=1).fit(moons).score_samples(moons), again.score_samples(moons)
    )


@pytest.mark.slow
def test_far_points_have_a_low_finite_log_density(model):
    log_density = model.score_samples([[1e3, 0.0], [1e8, -1e8]])
    assert np.all(np.isfinite(log_density))
    assert np.all(log_density < -1e3)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 3])
def test_any_number_of_columns_will_do(moons, dims):
    data = np.random.default_rng(0).normal(size=(40, dims))
    fitted = SplineFlow(**SMALL | {"max_epochs": 2}).fit(data)
    assert fitted.score_samples(data).shape == (40,)
    assert np.all(np.isfinite(fitted.sample(5, random_state=0)))
    assert fitted.diagnose().verdict == "fair"


@pytest.mark.slow
@pytest.mark.parametrize(("finished", "verdict"), [(True, "good"), (False, "fair")])
def test_the_diagnosis_says_whether_training_had_ended(model, finished, verdict):
    copy = clone(model)
    copy.density_, copy.training_ = (
        model.density_,
        FlowLosses(np.array([2.0, 1.0]), np.array([2.5, 1.5]), finished),
    )
    assert copy.diagnose().verdict == verdict
    assert "kept epoch:      2 of 2" in str(copy.diagnose())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 0}, "n_layers must be"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"patience": 1.5}, "patience must"),
        ({"validation_share": 1.0}, "validation_share must"),
    ],
)
def test_senseless_settings_are_refused(moons, changes, message):
    with pytest.raises(ValueError, match=message):
        SplineFlow(**SMALL | changes).fit(moons)


def test_bad_data_are_refused(moons):
    with pytest.raises(ValueError, match="constant column"):
        SplineFlow(**SMALL).fit(np.column_stack([moons, np.ones(ROWS)]))
    with pytest.raises(ValueError, match="minimum of 10"):
        SplineFlow(**SMALL).fit(moons[:4])
    with pytest.raises(NotFittedError):
        SplineFlow().score_samples(moons)


def test_a_missing_package_is_named(monkeypatch):
    known = [name for name in sys.modules if name.partition(".")[0] == "flowjax"]
    for name in ("flowjax", *known):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "kexpfam\[flows\]"'):
        SplineFlow(**SMALL).fit(two_moons().sample(ROWS, random_state=0))
