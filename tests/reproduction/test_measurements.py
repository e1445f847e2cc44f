"""Measurements against cases whose answer is known."""

import json

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats

from kexpfam.model.density import Tilt
from kexpfam.model.kernels import Gaussian as GaussianKernel
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan
from reproduction.competitors import ForestWithResiduals, LinearGaussian
from reproduction.measurements import MEASUREMENTS, benchmark, growth, neighbours, protocol, synthetic


def test_the_divergence_of_the_truth_from_itself_is_zero(monkeypatch):
    """f at the true centres with the true coefficients, in whitened coordinates."""

    def truth(x, key):
        centres = np.array(growth.TRUE_CENTRES)[:, None]
        span = KernelSpan.build(GaussianKernel(jnp.asarray(growth.TRUE_LENGTHSCALE)), centres)
        whitening = np.asarray(span.whitening)
        weights = np.linalg.pinv(whitening) @ np.array(growth.TRUE_WEIGHTS)
        return Tilt(FeatureSpace(Constant(), span), jnp.asarray(weights), Gaussian(jnp.zeros(1), jnp.eye(1)))

    monkeypatch.setitem(growth.RATED, "truth", truth)
    assert abs(growth.rate({"rows": 50, "method": "truth", "seed": 0})["kl"]) < 1e-9


def test_score_matching_comes_nearer_with_more_rows():
    few, many = (
        growth.rate({"rows": rows, "method": "score matching", "seed": 0})["kl"] for rows in (100, 5000)
    )
    assert 0.0 < many < 0.3 * few


def test_neighbours_are_averaged_and_their_absence_is_charged(monkeypatch):
    train = np.array([[0.0, 0.0], [0.1, 1.0], [5.0, 2.0], [5.1, 2.5], [0.2, 0.5], [5.2, 2.2]] * 5)
    train = train + 0.01 * np.random.default_rng(0).normal(size=train.shape)
    test = np.array([[0.1, 0.4], [100.0, 0.0]])
    monkeypatch.setattr(neighbours, "halves", lambda name, seed: (train, test))
    monkeypatch.setattr(neighbours, "CANDIDATES", np.array([0.7]))
    near = train[np.abs(train[:, 0] - 0.1) <= 0.7, 1]
    density = scipy.stats.norm.pdf(0.4, near, 0.7).mean()
    expected = 0.5 * (-np.log(density) - np.log(np.finfo(float).eps))
    found = neighbours.bare_neighbours({"dataset": "made up", "seed": 0})
    assert found["nll"] == pytest.approx(expected, rel=1e-6) and found["without_neighbours"] == 0.5


def test_the_released_score_of_the_base_is_the_base(monkeypatch):
    rng = np.random.default_rng(0)
    test = np.column_stack([rng.normal(size=300), 0.3 + 0.9 * rng.normal(size=300)])
    with jax.enable_x64(True):
        span = KernelSpan.build(GaussianKernel(jnp.asarray(1.0)), test[:20, :1])
        space = FeatureSpace(span, span)
        tilt = Tilt(space, jnp.zeros(space.size), Gaussian(jnp.zeros(1), jnp.eye(1)))
        found = np.array([protocol._test_nll(tilt, test, jr.key(seed)) for seed in range(5)])
    truth = -scipy.stats.norm.logpdf(test[:, 1]).mean()
    # 1,000 importance draws give log Z with an error of about 0.02 here.
    assert np.all(np.abs(found - truth) < 0.1)


def test_halves_are_disjoint_and_in_units_of_the_first(monkeypatch):
    rows = np.random.default_rng(0).normal(3.0, 2.0, size=(41, 3))
    fake = type("Fake", (), {"features": rows[:, :2], "target": rows[:, 2]})
    monkeypatch.setattr(benchmark.datasets, "load_benchmark", lambda name: fake)
    train, test = benchmark.halves("made up", 3)
    assert len(train) == 20 and len(test) == 21
    np.testing.assert_allclose(train.mean(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(train.std(0), 1.0)
    order = np.random.default_rng(3).permutation(41)
    np.testing.assert_allclose(test, (rows[order[20:]] - rows[order[:20]].mean(0)) / rows[order[:20]].std(0))


def test_shares_of_the_rings_are_those_of_their_lengths():
    draws = synthetic.synthetic("rings", 2).sample(20_000, random_state=0)
    errors = np.sqrt(np.array([1, 3, 5]) / 9 * (1 - np.array([1, 3, 5]) / 9) / 20_000)
    assert np.all(np.abs(np.array(synthetic.ring_shares(draws)) - np.array([1, 3, 5]) / 9) < 4.0 * errors)


@pytest.mark.parametrize("competitor", [LinearGaussian(), ForestWithResiduals(0)], ids=["linear", "forest"])
def test_a_competitor_scores_by_a_density_that_integrates_to_one(competitor):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    y = X[:, 0] + 0.5 * rng.normal(size=200)
    competitor.fit(X, y)
    grid = np.linspace(-12.0, 12.0, 2001)
    density = np.exp(competitor.score_samples(np.repeat(X[:1], len(grid), axis=0), grid))
    assert density.sum() * (grid[1] - grid[0]) == pytest.approx(1.0, abs=1e-3)
    # The best possible score is that of the normal errors; a forest of 200 rows is not far below.
    assert competitor.score_samples(X, y).mean() > scipy.stats.norm(0.0, 0.5).entropy() * -1.0 - 0.3


def test_a_solver_is_measured_by_its_density_its_sampler_and_its_facts():
    cell = {"measure": "algorithm", "dataset": "rings", "dim": 2, "rows": 100, "method": "exact", "seed": 0}
    values = MEASUREMENTS["algorithm"](cell)
    json.dumps(values, allow_nan=False)
    assert values["nll"] > values["truth_nll"] and values["megabytes"] > 0.0 and values["seconds"] > 0.0
    # The sampler of the exact solution are the cells of its grid.
    assert abs(values["sampler_kl"]) < 0.05 and values["sampler_folds"] is False
    assert sum(values["shares"]) == pytest.approx(1.0) and values["facts"]["newton_decrement"] < 1e-6


def test_a_portrait_has_rows_draws_and_f_on_a_square_grid():
    cell = {"measure": "portrait", "dataset": "two-moons", "rows": 100, "method": "auto", "seed": 0}
    values = MEASUREMENTS["portrait"](cell)
    json.dumps(values, allow_nan=False)
    assert np.shape(values["data"]) == (100, 2) and np.shape(values["draws"]) == (1000, 2)
    assert len(values["f"]) == len(values["log_density"]) == 60**2
    for column, (low, high) in zip(np.transpose(values["data"]), values["limits"], strict=True):
        assert low < column.min() and column.max() < high


@pytest.mark.slow
def test_convergence_is_shown_at_the_wanted_steps_and_begins_at_the_base():
    cell = {"measure": "convergence", "dataset": "two-moons", "rows": 100, "steps": [0, 25, 50], "seed": 0}
    values = MEASUREMENTS["convergence"](cell)
    assert list(values["draws"]) == ["0", "25", "50"] and np.isfinite(values["draws"]["50"]).all()
    assert not np.allclose(values["draws"]["0"], values["draws"]["50"])


@pytest.mark.slow
def test_the_best_look_is_not_above_the_last(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 1))
    rows = np.column_stack([x, np.sin(x) + 0.3 * rng.normal(size=(60, 1))])
    monkeypatch.setattr(protocol, "halves", lambda name, seed: (rows[:30], rows[30:]))
    monkeypatch.setattr(protocol, "STEPS_BETWEEN_LOOKS", 2)
    values = protocol.released_protocol({"dataset": "made up", "steps": 4, "seed": 0})
    assert values["looks"] == 3 and values["nll"] <= values["last_nll"] and np.isfinite(values["nll"])
