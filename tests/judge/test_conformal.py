"""Conformal repair covers what it says for any density, and TARP tells right from wrong joint densities."""

import warnings

import jax
import numpy as np
import pytest
from scipy.stats import beta, betabinom, binom, kstest, norm

import kexpfam
from kexpfam.estimators import NeighbourDensity
from kexpfam.estimators.conditional import SeenRowsWarning
from kexpfam.judge.conformal import Conformal, UnboundedWarning, conformalise
from kexpfam.judge.diagnosis import Diagnosis
from kexpfam.judge.pit import density_ranks, pit_measurements, tarp
from kexpfam.plot import plot_calibration


class Normals:
    """``N(x, covariance)`` for targets as wide as x: a density whose every number is known."""

    def __init__(self, covariance):
        self.factor = np.linalg.cholesky(np.atleast_2d(covariance))

    def log_density(self, targets, X):
        whitened = np.linalg.solve(self.factor, (targets - X).T)
        return norm.logpdf(whitened).sum(0) - np.log(np.diag(self.factor)).sum()

    def sample(self, count, X, *, key):
        noise = np.random.default_rng(np.asarray(jax.random.key_data(key))).normal(
            size=(len(X), count, X.shape[1])
        )
        return X[:, None] + noise @ self.factor.T

    def cdf(self, targets, X):
        return norm.cdf((targets - X)[:, 0] / self.factor[0, 0])


def rows_of(covariance, count, seed):
    rng, width = np.random.default_rng(seed), len(np.atleast_2d(covariance))
    X = rng.normal(size=(count, width))
    return X, X + rng.normal(size=(count, width)) @ np.linalg.cholesky(np.atleast_2d(covariance)).T


def repair_of(levels):
    nothing = np.zeros(1)
    return Conformal(np.sort(levels), np.sort(levels), 10, nothing, nothing, nothing)


def calibration(*arguments, key):
    return Diagnosis(pit_measurements(*arguments, key=key))


def test_ends_and_distribution_functions_are_what_ranks_say():
    repetitions, inside, values = 1500, [], []
    for levels in beta(0.4, 0.6).rvs((repetitions, 20), random_state=np.random.default_rng(0)):
        repair = repair_of(levels[:19])
        low, high = repair.ends(0.8)
        inside.append(low <= levels[19] <= high)
        values.append(repair.cdf(levels[19:])[0])
    # 20 positions, 2 of them beyond either end.
    assert np.mean(inside) == pytest.approx(0.8, abs=4.0 * np.sqrt(0.16 / repetitions))
    for t in (0.05, 0.32, 0.5, 0.93):
        assert abs(np.mean(np.array(values) <= t) - t) < 1.0 / 20.0 + 4.0 * np.sqrt(
            t * (1.0 - t) / repetitions
        )


def test_levels_and_probabilities_are_inverse_to_each_other():
    repair = repair_of(np.random.default_rng(0).uniform(size=30) ** 2)
    t = np.linspace(0.0, 1.0, 41)
    np.testing.assert_allclose(repair.cdf(repair.level(t)), t, atol=1e-12)


def test_too_few_rows_give_no_bound_and_say_how_many_it_takes():
    repair = repair_of(np.linspace(0.1, 0.9, 18))
    with pytest.warns(UnboundedWarning, match="takes 19"):
        assert repair.ends(0.9) == (0.0, 1.0)
    with pytest.warns(UnboundedWarning, match="takes 19"):
        assert repair.threshold(0.95) == np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repair_of(np.linspace(0.1, 0.9, 19)).ends(0.9)[0] > 0.0


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2])
def test_any_density_covers_what_it_says_once_repaired(width, scale):
    truth, model = np.eye(width), Normals(scale**2 * np.eye(width))
    repair = conformalise(model, *rows_of(truth, 199, 0), draws=200, key=jax.random.key(0))
    X, y = rows_of(truth, 1000, 1)
    covered = repair.coverage(model, X, y, key=jax.random.key(1))
    for level, share in covered.items():
        # What 199 rows leave uncertain, and 1,000 more: beta-binomial.
        count = round(200 * level)
        low, high = betabinom(1000, count, 200 - count).ppf([1e-4, 1.0 - 1e-4]) / 1000
        assert low <= share <= high
    # Before, a density twice too wide or too narrow is far off; the report knows, and says what the repair
    # does.
    assert (abs(repair.before[2] - 0.9) < 0.07) == (scale == 1.0)
    assert repair.after == pytest.approx(repair.coverages, abs=4.0 * np.sqrt(0.25 / 199))


def test_the_region_of_a_known_density_is_the_ellipse():
    model, (X, y) = Normals(np.eye(2)), rows_of(np.eye(2), 300, 0)
    ranks = density_ranks(model, X, y, draws=2000, key=jax.random.key(0))
    expected = 1.0 - np.exp(-0.5 * np.sum((y - X) ** 2, axis=1))
    assert np.abs(ranks - expected).max() < 5.0 * np.sqrt(0.25 / 2000)


RIGHT = np.array([[1.0, 0.8], [0.8, 1.0]])


@pytest.mark.parametrize("seed", range(5))
def test_tarp_passes_the_true_density(seed):
    X, y = rows_of(RIGHT, 400, seed)
    values = tarp(Normals(RIGHT), X, y, draws=100, key=jax.random.key(seed))
    assert kstest(values, "uniform").pvalue > 1e-3
    assert calibration(Normals(RIGHT), X, y, key=jax.random.key(seed)).pit_p_value > 1e-3


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "wrong",
    [2.5 * RIGHT, 0.3 * RIGHT, np.array([[1.0, -0.8], [-0.8, 1.0]])],
    ids=["wide", "narrow", "sign of the correlation"],
)
def test_tarp_fails_densities_that_are_wrong_together(wrong, seed):
    X, y = rows_of(RIGHT, 600, seed)
    assert kstest(tarp(Normals(wrong), X, y, draws=100, key=jax.random.key(seed)), "uniform").pvalue < 1e-3
    found = calibration(Normals(wrong), X, y, key=jax.random.key(seed))
    assert found.pit_p_value < 1e-3 and found.verdict == "poor"
    assert "TARP" in str(found)


def test_a_biased_density_fails():
    X, y = rows_of(RIGHT, 400, 0)
    assert calibration(Normals(RIGHT), X, y + 0.5, key=jax.random.key(0)).pit_p_value < 1e-4


def moon(rows, seed, targets=1):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, (rows, 1))
    y = np.sin(2.0 * x) + (0.1 + 0.3 * np.abs(x)) * rng.normal(size=(rows, targets))
    return x, y[:, 0] if targets == 1 else y


@pytest.fixture
def narrow():
    """Return a model whose intervals are far too narrow."""
    return NeighbourDensity(radius=0.01, width=0.02, random_state=0).fit(*moon(150, 0))


def test_a_model_is_repaired_and_the_repair_undone(narrow, tmp_path):
    x, y = moon(1000, 1)
    own = narrow.interval(x, 0.9), narrow.quantile(x, 0.3), narrow.cdf(x, y)
    log_density, draws = narrow.score_samples(x, y), narrow.sample(x[:5], 4, random_state=0)
    assert narrow.calibrate(*moon(199, 2)) is narrow
    low, high = narrow.interval(x, 0.9).T
    inside = np.sum((low <= y) & (y <= high))
    assert np.mean((own[0][:, 0] <= y) & (y <= own[0][:, 1])) < 0.85
    assert betabinom(1000, 180, 20).ppf(1e-4) <= inside <= betabinom(1000, 180, 20).ppf(1.0 - 1e-4)
    assert (
        binom(1000, 0.3).ppf(1e-6) - 60
        <= np.sum(y <= narrow.quantile(x, 0.3))
        <= binom(1000, 0.3).ppf(1.0 - 1e-6) + 60
    )
    np.testing.assert_allclose(narrow.cdf(x, narrow.quantile(x, 0.3)), 0.3, atol=1e-6)
    # The density, and draws of it, stay what they are.
    np.testing.assert_array_equal(narrow.score_samples(x, y), log_density)
    np.testing.assert_array_equal(narrow.sample(x[:5], 4, random_state=0), draws)
    narrow.save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(stored.interval(x, 0.8), narrow.interval(x, 0.8))
    assert str(stored.conformal_) == str(narrow.conformal_)
    narrow.calibrate(None)
    np.testing.assert_array_equal(narrow.interval(x, 0.9), own[0])
    np.testing.assert_array_equal(narrow.cdf(x, y), own[2])


def test_a_new_fit_forgets_the_repair(narrow):
    narrow.calibrate(*moon(50, 2)).fit(*moon(150, 0))
    with pytest.raises(AttributeError, match="call calibrate"):
        _ = narrow.conformal_


def test_the_diagnosis_shows_the_repair(narrow):
    narrow.calibrate(*moon(199, 2))
    alone, judged = narrow.diagnose(), narrow.diagnose(*moon(300, 3))
    assert str(narrow.conformal_).split() == str(alone)[str(alone).index("conformal") :].split()
    assert alone.coverage_after_repair == dict(
        zip(narrow.conformal_.coverages, narrow.conformal_.after, strict=True)
    )
    assert judged.coverage[0.9] < 0.8 and "once repaired" in str(judged)
    assert judged.repaired_coverage[0.9] == pytest.approx(0.9, abs=0.1)


def test_intervals_are_unbounded_where_rows_are_too_few(narrow):
    narrow.calibrate(*moon(12, 2))
    with pytest.warns(UnboundedWarning):
        np.testing.assert_array_equal(narrow.interval(np.zeros((2, 1)), 0.95), [[-np.inf, np.inf]] * 2)
    with pytest.warns(UnboundedWarning):
        assert narrow.in_region(np.zeros((1, 1)), np.array([50.0]), 0.95).all()


def test_regions_of_several_targets_are_repaired():
    model = NeighbourDensity(radius=0.05, width=0.02, random_state=0).fit(*moon(150, 0, targets=2))
    x, y = moon(250, 1, targets=2)
    before = model.in_region(x, y, 0.9)
    assert before.dtype == bool and before.mean() < 0.8
    model.calibrate(*moon(199, 2, targets=2))
    inside = model.in_region(x, y, 0.9).sum()
    assert betabinom(250, 180, 20).ppf(1e-4) <= inside <= betabinom(250, 180, 20).ppf(1.0 - 1e-4)
    assert model.conformal_.levels is None
    found = model.diagnose(x, y)
    assert found.pit_p_value < 1e-3
    assert found.repaired_coverage[0.9] == pytest.approx(inside / 250, abs=0.04)
    assert "TARP" in str(found)
    assert len(plot_calibration(found).axes) == 2
    with pytest.raises(ValueError, match="one dimension"):
        model.interval(x)


def test_rows_of_the_fit_are_not_to_be_repaired_with(narrow):
    with pytest.warns(SeenRowsWarning, match="100%"):
        narrow.calibrate(*moon(150, 0))


@pytest.mark.parametrize(("settings", "said"), [({"draws": 0}, "draws"), ({"draws": 1.5}, "draws")])
def test_senseless_settings_are_named(narrow, settings, said):
    with pytest.raises(ValueError, match=said):
        narrow.calibrate(*moon(50, 2), **settings)
    with pytest.raises(ValueError, match="10 rows"):
        narrow.calibrate(*moon(5, 2))
    with pytest.raises(ValueError, match="level"):
        narrow.in_region(*moon(5, 2), 1.0)
