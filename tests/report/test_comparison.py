"""Models side by side: against means and errors computed by hand, and where models cannot be compared."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

import kexpfam
from kexpfam.estimators import ConditionalKernelDensity, GaussianMixtureDensity, KernelDensity

ROWS = 300


def pair(seed, rows=ROWS):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, (rows, 1))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=rows)


@pytest.fixture(scope="module")
def densities():
    data = np.random.default_rng(0).normal(size=(ROWS, 2))
    return GaussianMixtureDensity(random_state=0).fit(data), KernelDensity(bandwidth=0.1, random_state=0).fit(
        data
    )


@pytest.fixture(scope="module")
def conditionals():
    settings = [{"condition_width": 0.1, "width": 0.1}, {"condition_width": 5.0, "width": 1.0}]
    return [ConditionalKernelDensity(**one, random_state=0).fit(*pair(0)) for one in settings]


@pytest.fixture(scope="module")
def compared(conditionals):
    return kexpfam.compare(*conditionals, X=pair(1)[0], y=pair(1)[1], names=["narrow", "wide"])


def test_scores_and_paired_errors_are_those_of_the_rows(densities):
    new = np.random.default_rng(1).normal(size=(ROWS, 2))
    comparison = kexpfam.compare(*densities[::-1], X=new)
    assert [one.name for one in comparison.entries] == ["GaussianMixtureDensity", "KernelDensity"]
    mine = [model.score_samples(new) for model in densities]
    for entry, scores in zip(comparison.entries, mine, strict=True):
        assert entry.score == pytest.approx(scores.mean())
        assert entry.standard_error == pytest.approx(scores.std() / np.sqrt(ROWS))
        assert entry.behind == pytest.approx((mine[0] - scores).mean())
        assert entry.behind_error == pytest.approx((mine[0] - scores).std() / np.sqrt(ROWS))
        assert entry.crps is None and entry.off_support == 0
        assert entry.milliseconds_per_1000_draws > 0.0
    assert comparison.best == "GaussianMixtureDensity"
    assert comparison.verdict.startswith(
        f"GaussianMixtureDensity is best on {ROWS} rows, ahead of KernelDensity by"
    )


def test_a_right_model_is_calibrated_and_a_wrong_one_is_not(densities):
    new = np.random.default_rng(1).normal(size=(ROWS, 2))
    right, wrong = (
        kexpfam.compare(*densities, X=3.0 * new).entries,
        kexpfam.compare(*densities, X=new).entries,
    )
    assert wrong[0].pit_p_value > 0.01 > right[0].pit_p_value
    low, high = 0.9 + np.array([-4.0, 4.0]) * np.sqrt(0.09 / ROWS)
    assert low - 0.02 < wrong[0].covered < high + 0.02
    assert right[0].covered < low


def test_one_target_has_calibration_and_crps(compared, conditionals):
    x, y = pair(1)
    narrow, wide = compared.entries
    assert (narrow.name, wide.name) == ("narrow", "wide")
    found = conditionals[0].diagnose(x, y)
    assert narrow.crps == pytest.approx(found.crps)
    assert narrow.pit_p_value == pytest.approx(found.pit_p_value)
    assert narrow.crps < wide.crps


def test_models_that_do_not_differ_are_said_not_to(densities):
    same = kexpfam.compare(
        densities[0], densities[0], X=np.zeros((20, 2)) + np.random.default_rng(2).normal(size=(20, 2))
    )
    assert [one.name for one in same.entries] == ["GaussianMixtureDensity 1", "GaussianMixtureDensity 2"]
    assert "do not differ significantly" in same.verdict


def test_the_table_prints_and_is_shown_and_written(compared, tmp_path):
    shown = str(compared)
    lines = shown.splitlines()
    assert lines[0].split()[:3] == ["model", "log", "density"]
    assert lines[1].startswith("narrow ") and lines[2].startswith("wide ") and lines[3] == compared.verdict
    assert compared._repr_html_().count("<tr>") == 3
    page = compared.page()
    assert page.html.count("<figure") == 3
    assert page.save(tmp_path / "page.html").read_text("utf-8") == page.html


def test_machines_get_plain_numbers(compared):
    told = json.loads(json.dumps(compared.as_dict(), allow_nan=False))
    assert told["rows"] == ROWS
    assert told["models"][0]["name"] == "narrow"
    assert told["models"][0]["score"] == compared.entries[0].score


class Uniform:
    """A density of one column that is zero beyond [0, 1], as far as a comparison looks."""

    conditional, n_features_in_, density_ = False, 1, None

    def _scored_rows(self, X, y):
        return (np.asarray(X, float),)

    def _log_density(self, density, X):
        return np.where(np.abs(X[:, 0] - 0.5) <= 0.5, 0.0, -np.inf)

    def _draws(self, density, count, seed, refine):
        return np.random.default_rng(seed).uniform(size=(count, 1))


class Normal(Uniform):
    def _log_density(self, density, X):
        return norm.logpdf(X[:, 0])

    def _draws(self, density, count, seed, refine):
        return np.random.default_rng(seed).normal(size=(count, 1))


def test_rows_off_the_support_are_counted_and_put_a_model_last():
    comparison = kexpfam.compare(Uniform(), Normal(), X=np.linspace(-1.0, 1.0, 11)[:, None])
    assert comparison.best == "Normal"
    last = comparison.entries[1]
    assert last.off_support == 5 and last.score == -np.inf and last.behind == np.inf
    assert "-inf: 5 rows" in str(comparison)
    assert json.loads(json.dumps(comparison.as_dict(), allow_nan=False))["models"][1]["score"] is None


def test_what_cannot_be_compared_is_refused(densities, conditionals):
    X = np.zeros((5, 2))
    with pytest.raises(ValueError, match="two models at least, got 1"):
        kexpfam.compare(densities[0], X=X)
    with pytest.raises(ValueError, match="cannot be compared"):
        kexpfam.compare(densities[0], conditionals[0], X=X)
    with pytest.raises(ValueError, match="names must be 2 different names"):
        kexpfam.compare(*densities, X=X, names=["a", "a"])
    with pytest.raises(ValueError, match="y is for conditional models"):
        kexpfam.compare(*densities, X=X, y=np.zeros(5))


def test_frames_are_taken_by_name():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["a", "b"])
    models = [GaussianMixtureDensity(random_state=seed).fit(frame) for seed in range(2)]
    assert kexpfam.compare(*models, X=frame).rows == 60
    with pytest.raises(ValueError, match="feature names should match"):
        kexpfam.compare(*models, X=frame[["b", "a"]])
