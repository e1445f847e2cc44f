"""What every estimator of the library keeps, whoever it is: one dictionary of settings, and every name must be in it."""

import pickle
import subprocess
import sys

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from sklearn.base import clone

import kexpfam
from kexpfam import Integration, estimators
from kexpfam.datasets import two_moons
from kexpfam.judge.diagnosis import Diagnosis

ROWS, DRAWS = 40, 30
GIVEN = {"lengthscale": 0.8, "rkhs_penalty": 1e-2}
COARSE = Integration(cells=(80, 24), tail_cells=(8, 3), conditional_cells=(80,))
# Small and fast; where settings could be searched for, they are given.
SETTINGS = {
    "KernelExpFamily": GIVEN | {"n_centres": 20, "integration": COARSE},
    "ConditionalKernelExpFamily": GIVEN
    | {
        "condition_lengthscale": 0.8,
        "base_width": 1.0,
        "power": False,
        "n_centres": 10,
        "integration": COARSE,
    },
    "ScoreMatchingExpFamily": GIVEN | {"n_centres": 10},
    "ConditionalScoreMatching": GIVEN | {"condition_lengthscale": 0.8},
    "KernelDensity": {"bandwidth": 0.3},
    "GaussianMixtureDensity": {},
    "LeastSquaresConditional": {"width": 0.5, "penalty": 0.1, "n_centres": 20},
    "NeighbourDensity": {"radius": 0.5, "width": 0.3},
    "ConditionalKernelDensity": {"condition_width": 0.3, "width": 0.3},
    "SplineFlow": {"n_layers": 1, "n_knots": 3, "width": 4, "max_epochs": 2},
}


# Fits that warn, in the order of their warnings; all of them are called from the script's own lines.
WARNED = """
import warnings
import numpy as np
from kexpfam import Integration, Search
from kexpfam.estimators import ConditionalKernelExpFamily, KernelDensity, KernelExpFamily, ScoreMatchingExpFamily

rng = np.random.default_rng(0)
wide, constant = rng.normal(size=(40, 5)), np.column_stack([rng.normal(size=40), np.ones(40)])
given = {"lengthscale": 0.3, "random_state": 0}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    KernelDensity(bandwidth=0.3).fit(np.repeat(wide, 2, axis=0))
    few = Integration(partition_draws=20)
    KernelExpFamily(rkhs_penalty=0.1, normaliser="importance", integration=few, **given).fit(wide[:, :2])
    ScoreMatchingExpFamily(rkhs_penalty=1e-6, normaliser="importance", base="gaussian", **given).fit(wide)
    settings = given | {"condition_lengthscale": 0.5, "base_width": 1.0, "power": False}
    ConditionalKernelExpFamily(search=Search(penalties=(0.1,)), **settings).fit(constant, wide[:, 0])
assert all(warning.filename == __file__ for warning in caught), [str(warning) for warning in caught]
print(*(warning.category.__name__ for warning in caught))
"""
UNCERTAIN = "UncertainNormaliserWarning"
# A flow takes ten seconds to compile.
MEMBERS = [
    pytest.param(name, marks=pytest.mark.slow if name == "SplineFlow" else ()) for name in sorted(SETTINGS)
]


def made(name):
    if name == "SplineFlow":
        pytest.importorskip("flowjax")
    return getattr(estimators, name)(**SETTINGS[name], random_state=0)


def rows_for(model):
    """Return the arguments of fit and score: rows alone, or conditions and targets."""
    if not model.conditional:
        return (two_moons().sample(ROWS, random_state=0),)
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (ROWS, 2))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=ROWS)


def drawn(model, rows, seed):
    return (
        model.sample(rows[0], DRAWS, random_state=seed)
        if model.conditional
        else model.sample(DRAWS, random_state=seed)
    )


@pytest.fixture(scope="module", params=MEMBERS)
def fitted(request):
    """Return a fitted member and the rows it was fitted to."""
    model = made(request.param)
    rows = rows_for(model)
    return model.fit(*rows), rows


def test_every_estimator_is_held_to_the_contract():
    assert set(SETTINGS) == set(estimators.ESTIMATORS)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_fit_returns_the_estimator_and_leaves_its_settings_alone(name):
    model = made(name)
    before = str(model.get_params())
    assert model.fit(*rows_for(model)) is model
    assert str(model.get_params()) == before


def test_the_score_is_the_mean_of_finite_log_densities(fitted):
    model, rows = fitted
    scores = model.score_samples(*rows)
    assert type(scores) is np.ndarray and scores.dtype == np.float64 and scores.shape == (ROWS,)
    assert np.all(np.isfinite(scores))
    assert model.score(*rows) == pytest.approx(scores.mean(), rel=1e-12)


def test_draws_are_points_alone_and_the_seeds_own(fitted):
    model, rows = fitted
    draws = drawn(model, rows, 1)
    assert type(draws) is np.ndarray
    assert draws.shape == ((ROWS, DRAWS) if model.conditional else (DRAWS, 2))
    assert np.all(np.isfinite(draws))
    np.testing.assert_array_equal(draws, drawn(model, rows, 1))
    assert not np.array_equal(draws, drawn(model, rows, 2))


def test_the_same_seed_gives_the_same_fit(fitted):
    model, rows = fitted
    np.testing.assert_array_equal(clone(model).fit(*rows).score_samples(*rows), model.score_samples(*rows))


def test_a_stored_model_is_the_same_to_the_last_bit(fitted, tmp_path):
    model, rows = fitted
    model.save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    assert type(stored) is type(model)
    np.testing.assert_array_equal(stored.score_samples(*rows), model.score_samples(*rows))
    np.testing.assert_array_equal(drawn(stored, rows, 1), drawn(model, rows, 1))


def test_a_pickled_model_is_the_same_to_the_last_bit_where_jax_is_in_single_precision(fitted):
    model, rows = fitted
    with jax.enable_x64(False):
        again = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(again.score_samples(*rows), model.score_samples(*rows))
        assert jax.numpy.ones(1).dtype == jax.numpy.float32


def test_the_training_data_are_given_back(fitted):
    model, rows = fitted
    kept = model.training_data_ if model.conditional else (model.training_data_,)
    for mine, theirs in zip(kept, rows, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_the_diagnosis_is_a_report_with_a_verdict(fitted):
    diagnosis = fitted[0].diagnose()
    assert isinstance(diagnosis, Diagnosis)
    assert diagnosis.verdict in ("good", "fair", "poor")
    assert diagnosis.rows()[0] == ("verdict", diagnosis.verdict.upper())
    for name, value in diagnosis.rows():
        assert name in str(diagnosis) and value in str(diagnosis)
    for line in diagnosis.advice:
        assert line in str(diagnosis)


def test_a_conditional_density_has_means_quantiles_and_densities_of_one_condition(fitted):
    model, rows = fitted
    if not model.conditional:
        pytest.skip("has no condition")
    x, y = rows
    middle = model.quantile(x, 0.5)
    np.testing.assert_allclose(model.cdf(x, middle), 0.5, atol=1e-6)
    assert model.predict(x).shape == middle.shape == (ROWS,)
    given = model.given(x[3])
    np.testing.assert_allclose(given.score_samples(y[3:4]), model.score_samples(x[3:4], y[3:4]), rtol=1e-9)
    assert given.sample(DRAWS, random_state=0).shape == (DRAWS,)
    assert model.diagnose(x, y).held_out_rows == ROWS


def test_a_plot_is_a_figure(fitted):
    before, backend = plt.get_fignums(), plt.get_backend()
    figure = fitted[0].plot()
    assert isinstance(figure, Figure)
    assert (plt.get_fignums(), plt.get_backend()) == (before, backend)
    named = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    assert named and all(axis.get_xlabel() and axis.get_ylabel() for axis in named)


@pytest.mark.slow
def test_a_report_is_a_page_with_the_verdict(fitted, tmp_path):
    model, rows = fitted
    page = model.report(tmp_path / "report.html", *rows)
    assert (tmp_path / "report.html").read_text("utf-8") == page.html
    assert f"<strong>{model.diagnose().verdict}.</strong>" in page.html
    assert page.html.count("<svg") >= 4
    assert type(model).__name__ in page.html and f"{ROWS} held-out rows" in page.html


def test_warnings_point_at_the_line_that_called_fit(tmp_path):
    # In a process of its own: the checks of types that tests run under put frames between the calls.
    script = tmp_path / "warned.py"
    script.write_text(WARNED)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [
        "TiesWarning",
        UNCERTAIN,
        UNCERTAIN,
        "UserWarning",
        "NearlyDeterministicWarning",
    ]
