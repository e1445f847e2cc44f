"""The mixture of normals behind the library's face."""

import numpy as np
import pytest
import scipy.stats

import kexpfam
from kexpfam.baselines.gaussian_mixture import GaussianMixtureDensity

CENTRES = np.array([[-3.0, 0.0], [3.0, 1.0]])


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return 100.0 + 10.0 * (CENTRES[rng.integers(2, size=400)] + rng.normal(size=(400, 2)))


@pytest.fixture(scope="module")
def model(data):
    return GaussianMixtureDensity(random_state=0).fit(data)


def test_two_normals_are_recovered(model):
    test = 100.0 + 10.0 * (CENTRES[np.arange(2000) % 2] + np.random.default_rng(1).normal(size=(2000, 2)))
    parts = [scipy.stats.multivariate_normal(100.0 + 10.0 * centre, 100.0).logpdf(test) for centre in CENTRES]
    truth = np.logaddexp(*parts) - np.log(2.0)
    excess = truth - model.score_samples(test)
    # 11 parameters from 400 rows cost about 11 / 800 nats.
    assert -0.01 < excess.mean() < 4.0 * 11 / 800


def test_it_integrates_to_one_and_its_draws_follow_it(model):
    axes = [np.linspace(40.0, 160.0, 301), np.linspace(40.0, 170.0, 301)]
    grid = np.stack(np.meshgrid(*axes), -1).reshape(-1, 2)
    cell = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
    density = np.exp(model.score_samples(grid))
    assert abs(density.sum() * cell - 1.0) < 1e-3
    draws = model.sample(4000, random_state=0)
    mean = density @ grid * cell
    assert np.all(np.abs(draws.mean(0) - mean) < 4.0 * draws.std(0) / np.sqrt(4000))
    np.testing.assert_array_equal(draws, model.sample(4000, random_state=0, refine=3))


def test_a_stored_model_is_the_same(model, data, tmp_path):
    model.save(tmp_path / "mixture.kexpfam")
    again = kexpfam.load(tmp_path / "mixture.kexpfam")
    np.testing.assert_array_equal(again.score_samples(data), model.score_samples(data))
    np.testing.assert_array_equal(again.sample(9, random_state=2), model.sample(9, random_state=2))
    np.testing.assert_allclose(again.training_data_, data)


def test_the_verdict_names_components_on_few_rows(model):
    assert "GOOD" in str(model.diagnose()) and model.diagnose().components >= 2
    spiky = np.concatenate(
        [np.random.default_rng(0).normal(size=(60, 1)), 9.0 + 1e-3 * np.arange(4)[:, None]]
    )
    assert GaussianMixtureDensity(random_state=0).fit(spiky).diagnose().verdict == "fair"


def test_a_constant_column_is_refused(data):
    with pytest.raises(ValueError, match="constant column"):
        GaussianMixtureDensity().fit(np.column_stack([data, np.ones(len(data))]))
