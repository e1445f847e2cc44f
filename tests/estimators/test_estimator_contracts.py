"""Contracts of all estimators, solvers and kinds of columns, for every public method.

A public method without a contract in ``CONTRACTS`` fails, and so does a name in a registry without a case.
"""

import copy
import dataclasses
import functools
import inspect
import pickle
import subprocess
import sys
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from oracles import changed, midpoint_grid
from sklearn.base import clone

import kexpfam
from kexpfam import Integration, Kernel, estimators
from kexpfam.data.kinds import KINDS, Periodic, Real
from kexpfam.datasets import two_moons
from kexpfam.fit.learned import Learned
from kexpfam.fit.problem import SOLVERS, solver_from
from kexpfam.model.distributions import AbstractDensity
from kexpfam.paper.ascent import Annealing, Chains, NaturalAscent
from kexpfam.paper.functional import FunctionalAscent
from kexpfam.paper.learned_features import Learning

ROWS, DRAWS = 40, 30
GIVEN = {"lengthscale": 0.8, "rkhs_penalty": 1e-2}
COARSE = Integration(cells=(80, 24), tail_cells=(8, 3), conditional_cells=(80,))
JOINT = {"model": "kernel", "kernel": Kernel(**GIVEN, n_centres=20, integration=COARSE)}
CONDITIONAL = changed(JOINT, condition_lengthscale=0.8, base_width=1.0, power=False, n_centres=10)
SMALL = Learned(folds=2, repeats=1, width=10, epochs=8, cells=48, steps=60)
# Settings that make a fit of each estimator quick.
SETTINGS = {
    "KernelExpFamily": JOINT,
    "ConditionalKernelExpFamily": CONDITIONAL,
    "ScoreMatchingExpFamily": GIVEN | {"n_centres": 10},
    "ConditionalScoreMatching": GIVEN | {"condition_lengthscale": 0.8},
    "KernelDensity": {"bandwidth": 0.3},
    "GaussianMixtureDensity": {},
    "LeastSquaresConditional": {"width": 0.5, "penalty": 0.1, "n_centres": 20},
    "NeighbourDensity": {"radius": 0.5, "width": 0.3},
    "ConditionalKernelDensity": {"condition_width": 0.3, "width": 0.3},
    "SplineFlow": {"n_layers": 1, "n_knots": 3, "width": 4, "max_epochs": 2},
}
ASCENT = FunctionalAscent(batch_size=16, ascents=1, width=8, depth=1)
LEARNING = Learning(batch_size=64, nodes_per_batch=128, stages=2)
# Settings that make a run of each solver quick.
QUICK = {
    "auto": {},
    "exact": {},
    "dde": {"steps": 5},
    "functional": {"steps": 5, "ascent": ASCENT, "centres": 20},
    "random_features": {"steps": 5, "ascent": ASCENT, "count": 10},
    "adapted": {"count": 5, "steps": 40, "learning": LEARNING},
    "deep": {"width": 8, "depth": 1, "steps": 40, "learning": LEARNING},
    "singly_dual": {"steps": 5, "batch_size": 64},
    "mmd_gan": {"steps": 5, "batch_size": 64},
    "contrastive": {"steps": 2, "ascent": NaturalAscent(Chains(count=16, transitions=1))},
    "annealed": {"steps": 2, "ascent": NaturalAscent(Annealing(particles=64, stages=4))},
    "moment_matching": {},
}
# Each kind: its short form with parameters, values from uniform numbers, and points with weights that
# integrate (or sum) a density over the support.
LINE = (np.linspace(-30.0, 30.0, 6001), 0.01)
COLUMNS = {
    "real": ("real", lambda u: 4.0 * u - 2.0, LINE),
    "positive": ("positive", lambda u: np.exp(2.0 * u), (np.arange(0.0025, 60.0, 0.005), 0.005)),
    "bounded": ("bounded:0:1", lambda u: u**2, (np.arange(0.0005, 1.0, 0.001), 0.001)),
    "periodic": ("periodic:360", lambda u: 360.0 * u, (np.arange(0.05, 360.0, 0.1), 0.1)),
    "integer": ("integer", lambda u: np.floor(7.0 * u) - 3.0, (np.arange(-300.0, 301.0), 1.0)),
    "count": ("count", lambda u: np.floor(5.0 * u), (np.arange(0.0, 601.0), 1.0)),
    "rounded": ("rounded:0.5", lambda u: np.floor(7.0 * u) / 2.0 - 1.5, (np.arange(-150.0, 150.5, 0.5), 0.5)),
    "category": ("category", lambda u: np.floor(3.0 * u), (np.arange(3.0), 1.0)),
    "atom": (
        "atom:0:real",
        lambda u: np.where(u < 0.3, 0.0, 4.0 * u - 2.0),
        (np.append(LINE[0] + 0.005, 0.0), np.append(np.full(6001, 0.01), 1.0)),
    ),
}

# Fits that warn, in the order of their warnings; all of them are called from the script's own lines.
WARNED = """
import warnings
import numpy as np
from kexpfam import Integration, Kernel, Search
from kexpfam import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.estimators import KernelDensity, ScoreMatchingExpFamily

rng = np.random.default_rng(0)
wide, constant = rng.normal(size=(40, 5)), np.column_stack([rng.normal(size=40), np.ones(40)])
given = {"lengthscale": 0.3}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    KernelDensity(bandwidth=0.3).fit(np.repeat(wide, 2, axis=0))
    few = Integration(partition_draws=20)
    kernel = Kernel(**given, rkhs_penalty=0.1, normaliser="importance", integration=few)
    KernelExpFamily(model="kernel", kernel=kernel, random_state=0).fit(wide[:, :2])
    score = {"rkhs_penalty": 1e-6, "normaliser": "importance", "base": "gaussian", "random_state": 0}
    ScoreMatchingExpFamily(**score, **given).fit(wide)
    settings = given | {"condition_lengthscale": 0.5, "base_width": 1.0, "power": False}
    kernel = Kernel(**settings, search=Search(penalties=(0.1,)))
    ConditionalKernelExpFamily(model="kernel", kernel=kernel, random_state=0).fit(constant, wide[:, 0])
assert all(warning.filename == __file__ for warning in caught), [str(warning) for warning in caught]
print(*(warning.category.__name__ for warning in caught))
"""
UNCERTAIN = "UncertainNormaliserWarning"


class Case(NamedTuple):
    """A fitted estimator, the arrays of its fit, and points with weights for the integral over the target."""

    model: estimators.base.Estimator
    rows: tuple[np.ndarray, ...]
    grid: tuple[np.ndarray, np.ndarray | float] | None

    @property
    def conditional(self) -> bool:
        return self.model.conditional

    def draws(self, seed, count=DRAWS):
        sample = functools.partial(self.model.sample, self.rows[0]) if self.conditional else self.model.sample
        return sample(count, random_state=seed)


def moons_case(model):
    rows = two_moons().sample(ROWS, random_state=0)
    return Case(
        model, (rows,), midpoint_grid(rows.mean(0) - 8 * rows.std(0), rows.mean(0) + 8 * rows.std(0), 200)
    )


def sine_case(model):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (ROWS, 2))
    return Case(model, (x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=ROWS)), LINE)


def estimator_case(name):
    if name == "SplineFlow":
        pytest.importorskip("flowjax")
    model = getattr(estimators, name)(**SETTINGS[name], random_state=0)
    return sine_case(model) if model.conditional else moons_case(model)


def solver_case(name, conditional=False):
    solver = dataclasses.replace(solver_from(name, conditional=conditional), **QUICK[name])
    if conditional:
        return sine_case(estimators.ConditionalKernelExpFamily(solver=solver, **CONDITIONAL, random_state=0))
    return moons_case(estimators.KernelExpFamily(solver=solver, **JOINT, random_state=0))


def kind_case(name, conditional=False):
    """Return a case with a column of that kind beside or given a number; ``"all"`` has all kinds."""
    rng = np.random.default_rng(0)
    x, names = rng.normal(size=60), list(COLUMNS) if name == "all" else [name]
    columns = [COLUMNS[one][1]((rng.permutation(60) + 0.5) / 60) for one in names]
    settings = {"model": "chain", "learned": SMALL, "random_state": 0}
    if conditional:
        model = estimators.ConditionalKernelExpFamily(target_columns=COLUMNS[name][0], **settings)
        return Case(model, (x[:, None], columns[0]), COLUMNS[name][2])
    kinds = {j: COLUMNS[one][0] for j, one in enumerate(names)}
    return Case(
        estimators.KernelExpFamily(columns=kinds, **settings), (np.column_stack([*columns, x]),), None
    )


@functools.cache
def fitted(room, name, *conditional) -> Case:
    case = {"estimator": estimator_case, "solver": solver_case, "kind": kind_case}[room](name, *conditional)
    case.model.fit(*case.rows)
    return case


def class_of(room, name, conditional=False):
    if room == "estimator":
        return getattr(estimators, name)
    return estimators.ConditionalKernelExpFamily if conditional else estimators.KernelExpFamily


def public(cls):
    """Return the public methods and properties of a class, except for those that scikit-learn generates."""
    generated = {"get_metadata_routing", "set_fit_request", "set_score_request", "set_predict_request"}
    members = inspect.getmembers(cls, lambda member: callable(member) or isinstance(member, property))
    return sorted(name for name, _ in members if not name.startswith("_") and name not in generated)


def check_fit(case):
    model = clone(case.model)
    before = str(model.get_params())
    assert model.fit(*case.rows) is model
    assert str(model.get_params()) == before
    assert isinstance(model.density_, AbstractDensity) and model.density_.conditional == case.conditional
    np.testing.assert_array_equal(model.score_samples(*case.rows), case.model.score_samples(*case.rows))


def check_score_samples(case):
    scores = case.model.score_samples(*case.rows)
    assert type(scores) is np.ndarray and scores.dtype == np.float64 and scores.shape == (len(case.rows[0]),)
    assert np.all(np.isfinite(scores))
    if case.grid is None:
        return
    points, weights = case.grid
    for x in case.rows[0][:2] if case.conditional else [None]:
        at = () if x is None else (np.repeat(x[None], len(points), axis=0),)
        # Cells of a coarse grid, and draws behind a normaliser, are worth a few per cent.
        assert np.sum(weights * np.exp(case.model.score_samples(*at, points))) == pytest.approx(1.0, abs=0.03)


def check_score(case):
    mean = case.model.score_samples(*case.rows).mean()
    assert case.model.score(*case.rows) == pytest.approx(mean, rel=1e-12)


def check_log_prob(case):
    rows = [part[:4] for part in case.rows]
    order = tuple(range(len(rows)))
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(case.model.log_prob, argnums=order)))(*rows)
    np.testing.assert_allclose(values, case.model.score_samples(*rows), rtol=1e-8, atol=1e-8)
    assert all(np.all(np.isfinite(slope)) for slope in slopes)


def check_sample(case):
    draws = case.draws(1)
    assert type(draws) is np.ndarray
    assert draws.shape == ((len(case.rows[0]), DRAWS) if case.conditional else (DRAWS, case.rows[0].shape[1]))
    np.testing.assert_array_equal(draws, case.draws(1))
    assert not np.array_equal(draws, case.draws(2))
    assert np.all(
        np.isfinite(
            case.model.score_samples(*((case.rows[0], draws[:, 0]) if case.conditional else (draws,)))
        )
    )


def check_save(case, tmp_path):
    case.model.save(tmp_path / "model.kexpfam")
    again = case._replace(model=kexpfam.load(tmp_path / "model.kexpfam"))
    assert type(again.model) is type(case.model)
    np.testing.assert_array_equal(again.model.score_samples(*case.rows), case.model.score_samples(*case.rows))
    np.testing.assert_array_equal(again.draws(1), case.draws(1))


def check_given(case):
    if case.conditional:
        x, y = (part[3:6] for part in case.rows)
        found = [
            case.model.given(row).score_samples(target.reshape(1))[0]
            for row, target in zip(x, y, strict=True)
        ]
        np.testing.assert_allclose(found, case.model.score_samples(x, y), rtol=1e-8, atol=1e-8)
        given = case.model.given(x[0])
        assert np.asarray(given.log_prob(y[:1])) == pytest.approx(found[0], rel=1e-8)
        assert given.sample(DRAWS, random_state=0).shape == (DRAWS,)
        return
    row = case.rows[0][3]
    given = case.model.given(dict(enumerate(row[1:], 1)))
    joint = given.score_samples(row[:1].reshape(1, 1))[0] + given.log_evidence.value
    tolerance = 5 * given.log_evidence.standard_error + 0.05
    assert joint == pytest.approx(case.model.score_samples(row[None])[0], abs=tolerance)
    assert np.all(np.isfinite(np.asarray(given.sample(5, random_state=0), float)))


def check_marginal(case):
    rows = case.rows[0][:5]
    everything = case.model.marginal(list(range(rows.shape[1]))).score_samples(rows)
    np.testing.assert_allclose(everything, case.model.score_samples(rows), atol=0.05)
    assert np.all(np.isfinite(case.model.marginal([0]).score_samples(rows[:, :1])))


def with_gaps(case):
    rows = case.rows[0][:6].copy()
    rows[::2, 0] = np.nan
    return rows


def check_impute(case):
    rows = with_gaps(case)
    found = np.asarray(case.model.impute(rows, random_state=0, draws=64), float)
    np.testing.assert_allclose(found[np.isfinite(rows)], rows[np.isfinite(rows)])
    assert np.all(np.isfinite(case.model.score_samples(found)))


def check_conditionals(case):
    rows = case.model.conditionals(with_gaps(case), draws=64)
    assert np.asarray(rows.sample(3, random_state=0)).shape == (6, 3, case.rows[0].shape[1])


def check_potential(case):
    found = case.model.potential(case.rows[0])
    assert found.shape == (ROWS,) and np.ptp(found) > 0.0


def check_cdf(case):
    x, y = case.rows
    low, high = (case.model.cdf(x, np.full_like(y, end)) for end in (y.min(), y.max()))
    assert low.shape == y.shape and np.all((low >= 0.0) & (high <= 1.0) & (low < high))


def check_quantile(case):
    levels = [0.1, 0.5, 0.8]
    found = case.model.quantile(case.rows[0], levels)
    assert found.shape == (len(case.rows[0]), 3) and np.all(np.diff(found, axis=1) >= 0.0)
    for column, level in zip(found.T, levels, strict=True):
        reached = case.model.cdf(case.rows[0], column)
        # A distribution function with jumps exceeds the level at its quantile.
        if len(np.unique(case.rows[1])) < len(case.rows[1]):
            assert np.all(reached >= level - 1e-6)
        else:
            np.testing.assert_allclose(reached, level, atol=1e-6)


def check_interval(case):
    expected = case.model.quantile(case.rows[0], [0.1, 0.9])
    np.testing.assert_allclose(case.model.interval(case.rows[0], 0.8), expected, rtol=1e-12)


def check_predict(case):
    means, draws = case.model.predict(case.rows[0]), case.draws(3, 400)
    assert means.shape == case.rows[1].shape
    kinds = getattr(getattr(case.model.density_, "scaling", None), "kinds", ()) or (Real(),)
    away, allowed = draws - means[:, None], 0.02 * case.rows[1].std()
    if isinstance(kinds[0], Periodic):  # the mean direction: sines of the angles from it cancel
        turns = 2.0 * np.pi / kinds[0].period * away
        away, allowed = np.sin(turns), 0.02
        assert np.all(np.cos(turns).mean(1) > -6.0 / np.sqrt(draws.shape[1]))
    if kinds[0].categorical:  # the likeliest label: no other is drawn more often
        shares = np.stack([(draws == label).mean(1) for label in np.unique(draws)], axis=1)
        best, error = shares.max(axis=1), np.sqrt(0.5 / draws.shape[1])
        assert np.all((away == 0.0).mean(1) > best - 6.0 * error)
        return
    error = away.std(1) / np.sqrt(draws.shape[1])
    assert np.all(np.abs(away.mean(1)) < 6.0 * error + allowed)


def check_in_region(case):
    draws = case.draws(4, 5)
    inside = np.stack([case.model.in_region(case.rows[0], column, 0.8) for column in draws.T])
    assert inside.dtype == bool and abs(inside.mean() - 0.8) < 6 * np.sqrt(0.16 / inside.size)


def check_calibrate(case):
    if not case.conditional:
        model = copy.copy(case.model)
        assert model.calibrate(case.rows[0] + 1e-3) is model
        assert model._held_out_scores().rows == ROWS
        assert model.calibrate(None)._calibrated is None
        return
    x, y = case.rows[0] + 1e-3, case.rows[1] + 1e-3
    model = copy.copy(case.model)
    assert model.calibrate(x, y, draws=20) is model
    assert model.conformal_.rows == len(x)
    assert not np.array_equal(model.interval(x, 0.8), case.model.interval(x, 0.8))
    model.calibrate(None)
    np.testing.assert_array_equal(model.interval(x, 0.8), case.model.interval(x, 0.8))


def calibrated(case):
    """Return a copy with other rows to compare with: this fit selected nothing, and held out no rows."""
    if case.conditional:
        others = (case.rows[0] + 1e-3, case.rows[1] + 1e-3)
        return copy.copy(case.model).calibrate(*others, draws=5)
    return copy.copy(case.model).calibrate(case.rows[0] + 1e-3)


def check_novelty(case):
    model = calibrated(case)
    p = model.novelty(*case.rows)
    assert p.shape == (ROWS,) and p.min() >= 1.0 / (ROWS + 1) and p.max() <= 1.0
    order = np.argsort(case.model.score_samples(*case.rows))
    assert np.all(np.diff(p[order]) >= 0.0)
    assert model.flag(*case.rows).dtype == bool


def check_monitor(case):
    monitor = calibrated(case).monitor()
    assert monitor.update(*case.rows) is monitor.alarm and monitor.rows == ROWS
    assert np.all(np.isfinite(monitor.log_evidence))


def check_explain(case):
    if case.conditional and np.ndim(case.rows[1]) > 1:
        return
    few = tuple(rows[:3] for rows in case.rows)
    found = case.model.explain(*few, **({} if case.conditional else {"draws": 32}))
    assert found.surprise.shape == found.usual.shape == (3, len(found.names))
    assert np.all(found.lower <= found.upper) and np.all(np.isfinite(found.surprise))


def check_copying(case):
    found = case.model.copying(case.rows[0] + 1e-3)
    assert 0.0 <= found.close <= 1.0 and found.membership == pytest.approx(0.5, abs=0.1)


def check_dependence(case):
    found = case.model.mutual_information(0, 1, rows=100, draws=64)
    assert np.isfinite(found.value) and found.standard_error > 0.0
    test = case.model.independence_test(case.rows[0], 0, 1, copies=9, draws=64)
    assert 0.1 <= test.p_value <= 1.0 and test.copies.shape == (9,)


def check_export(case, tmp_path):
    pytest.importorskip("flatbuffers")
    case.model.export(tmp_path / "model.bin")
    function = jax.export.deserialize(bytearray((tmp_path / "model.bin").read_bytes()))
    rows = [np.asarray(part, float).reshape(ROWS, -1) for part in case.rows]
    np.testing.assert_allclose(function.call(*rows), case.model.score_samples(*case.rows), atol=1e-5)


def check_update(case):
    """A kernel model has no members to go on from; see test_update.py for those that have."""
    with pytest.raises(ValueError, match="has none"):
        case.model.update(*case.rows)


def check_calibration(case):
    with pytest.raises(AttributeError, match="calibrate"):
        _ = case.model.conformal_


def check_diagnose(case):
    diagnosis = case.model.diagnose(*case.rows)
    assert diagnosis.held_out_rows == ROWS and 0.0 <= diagnosis.pit_p_value <= 1.0
    assert diagnosis.verdict in ("good", "fair", "poor")
    assert diagnosis.rows()[0] == ("verdict", diagnosis.verdict.upper())
    for name, value in diagnosis.rows():
        assert name in str(diagnosis) and value in str(diagnosis)
    for line in diagnosis.advice:
        assert line in str(diagnosis)


def check_plot(case):
    before, backend = plt.get_fignums(), plt.get_backend()
    figure = case.model.plot()
    assert isinstance(figure, Figure)
    assert (plt.get_fignums(), plt.get_backend()) == (before, backend)
    named = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    assert named and all(axis.get_xlabel() and axis.get_ylabel() for axis in named)


def check_report(case, tmp_path):
    page = case.model.report(tmp_path / "report.html", *case.rows)
    assert (tmp_path / "report.html").read_text("utf-8") == page.html
    assert f"<strong>{case.model.diagnose(*case.rows).verdict}.</strong>" in page.html
    assert page.html.count("<svg") >= 4
    assert type(case.model).__name__ in page.html and f"{ROWS} held-out rows" in page.html


def check_set_output(case):
    model = copy.copy(case.model).set_output(transform="pandas")
    frame = case._replace(model=model).draws(1)
    assert isinstance(frame, pd.DataFrame)
    np.testing.assert_array_equal(
        frame.to_numpy(float)[:, -1], np.asarray(case.draws(1)).reshape(len(frame), -1)[:, -1]
    )
    with pytest.raises(ValueError, match="unknown output"):
        model.set_output(transform="lists")


def check_params(case):
    params = case.model.get_params(deep=False)
    again = type(case.model)().set_params(**params)
    assert str(again.get_params(deep=False)) == str(params)


def check_training_data(case):
    kept = case.model.training_data_ if case.conditional else (case.model.training_data_,)
    for found, expected in zip(kept, case.rows, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def check_training_weight(case):
    np.testing.assert_array_equal(case.model.training_weight_, np.ones(len(case.rows[0])))


def check_columns(case):
    assert len(case.model.columns_) == case.rows[0].shape[1]


def check_target_columns(case):
    if case.conditional:
        assert len(case.model.target_columns_) == 1


def check_carried(case):
    """No column of the cases is a linear combination of others."""
    assert case.model.carried_ == {}


def check_steps(case):
    """The columns of the cases have many decimals, except for whole numbers and halves."""
    assert set(case.model.steps_.values()) <= {0.5, 1.0}


KERNEL_ATTRIBUTES = ("base_", "lengthscale_", "rkhs_penalty_", "selection_", "solution_")


def check_kernel_fit(case):
    """A kernel model shows its settings and its solution; any other model has None."""
    model = case.model
    if model.candidates_[0].name != "kernel":
        assert model.solution_ is None and model.lengthscale_ is None and model.base_ is None
        return
    assert model.rkhs_penalty_ == model.kernel.rkhs_penalty
    np.testing.assert_array_equal(np.unique(model.lengthscale_), [model.kernel.lengthscale])
    assert model.selection_.settings.rkhs_penalty == model.rkhs_penalty_
    assert model.base_.log_densities(np.zeros((1, model.density_.scaling.width))).shape == (1,)
    assert model.solution_.status is model.fits_["kernel"].status


def check_condition_lengthscale(case):
    assert case.model.condition_lengthscale_.shape == (case.rows[0].shape[1],)


CONTRACTS = {
    **dict.fromkeys(KERNEL_ATTRIBUTES, check_kernel_fit),
    "condition_lengthscale_": check_condition_lengthscale,
    "steps_": check_steps,
    "calibrate": check_calibrate,
    "copying": check_copying,
    "explain": check_explain,
    "export": check_export,
    "flag": check_novelty,
    "independence_test": check_dependence,
    "monitor": check_monitor,
    "mutual_information": check_dependence,
    "novelty": check_novelty,
    "update": check_update,
    "conformal_": check_calibration,
    "cdf": check_cdf,
    "carried_": check_carried,
    "columns_": check_columns,
    "conditionals": check_conditionals,
    "diagnose": check_diagnose,
    "fit": check_fit,
    "get_params": check_params,
    "given": check_given,
    "impute": check_impute,
    "in_region": check_in_region,
    "interval": check_interval,
    "log_prob": check_log_prob,
    "marginal": check_marginal,
    "plot": check_plot,
    "potential": check_potential,
    "predict": check_predict,
    "quantile": check_quantile,
    "report": check_report,
    "sample": check_sample,
    "save": check_save,
    "score": check_score,
    "score_samples": check_score_samples,
    "set_output": check_set_output,
    "set_params": check_params,
    "target_columns_": check_target_columns,
    "training_data_": check_training_data,
    "training_weight_": check_training_weight,
}
# How f was found, and the kind of a column, change the density but not what is made of it.
OF_SOLVERS = ("score_samples", "log_prob", "sample", "save", "diagnose")
OF_KINDS = (
    "score_samples",
    "log_prob",
    "sample",
    "save",
    "given",
    "marginal",
    "impute",
    "cdf",
    "quantile",
    "predict",
)


def paired(room, name, method, *conditional, slow=False):
    kind = "conditional" if any(conditional) else "joint" if conditional else ""
    words = "-".join(word for word in (room, name, kind, method) if word)
    return pytest.param((room, name, *conditional), method, id=words, marks=pytest.mark.slow if slow else ())


def pairs():
    """Yield every case with every method that is checked for it."""
    for name in SETTINGS:
        for method in public(class_of("estimator", name)):
            yield paired("estimator", name, method, slow=name == "SplineFlow" or method == "report")
    for name in QUICK:
        for conditional in (False, True):
            if conditional and not solver_from(name, conditional=False).supports_conditions:
                continue
            for method in OF_SOLVERS:
                yield paired("solver", name, method, conditional, slow=method == "diagnose")
    for name in ("all", *COLUMNS):
        for conditional in (False,) if name == "all" else (False, True):
            for method in OF_KINDS:
                if method in public(class_of("kind", name, conditional)):
                    yield paired("kind", name, method, conditional, slow=name != "all")


def test_every_registered_name_has_a_case():
    assert set(SETTINGS) == set(estimators.ESTIMATORS)
    assert set(QUICK) == set(SOLVERS)
    assert set(COLUMNS) == set(KINDS)
    assert all(kind.split(":")[0] == name for name, (kind, *_) in COLUMNS.items())


@pytest.mark.parametrize("name", SETTINGS)
def test_every_public_method_has_a_contract(name):
    assert set(public(class_of("estimator", name))) <= set(CONTRACTS)


@pytest.mark.parametrize(("case", "method"), list(pairs()))
def test_contract(case, method, tmp_path):
    check = CONTRACTS[method]
    check(fitted(*case), *((tmp_path,) if "tmp_path" in inspect.signature(check).parameters else ()))


QUICK_NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name == "SplineFlow" else ()) for name in SETTINGS
]


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_draws_inside_jit_follow_the_law_of_the_sampler(name):
    case = fitted("estimator", name)
    density, at = case.model.density_, case.rows[0][:1] if case.conditional else None
    one = lambda key: density.draw(*(() if at is None else at), key=key)
    draws = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 400)))
    others = density.sample(400, at, key=jax.random.key(1)).reshape(draws.shape)
    error = np.sqrt((draws.var(0) + others.var(0)) / 400)
    assert np.all(np.abs(draws.mean(0) - others.mean(0)) < 5.0 * error)


@pytest.mark.parametrize("name", [name for name in SETTINGS if class_of("estimator", name).conditional])
def test_tabulated_distribution_functions_agree_with_the_density(name):
    case = fitted("estimator", name)
    density, (x, y) = case.model.density_, case.rows
    table = density.distributions(x)
    assert np.all(np.diff(table.points, axis=1) >= 0.0) and np.all(np.diff(table.levels, axis=1) >= 0.0)
    assert np.all(table.levels[:, 0] == 0.0) and table.levels[:, -1] == pytest.approx(np.ones(ROWS))
    np.testing.assert_allclose(table.cdf(y[:, None])[:, 0], density.cdf(y[:, None], x), atol=1e-4)
    np.testing.assert_allclose(table.crps(y), density.crps(y[:, None], x), rtol=1e-3)
    assert density.support() is None


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_a_pickled_model_is_the_same_where_jax_is_in_single_precision(name):
    case = fitted("estimator", name)
    with jax.enable_x64(False):
        again = pickle.loads(pickle.dumps(case.model))
        np.testing.assert_array_equal(again.score_samples(*case.rows), case.model.score_samples(*case.rows))
        assert jax.numpy.ones(1).dtype == jax.numpy.float32


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
