"""Weights of rows in every estimator: repetition, and nothing else.

Two equalities are kept. With every setting given, integer weights are repeated rows up to rounding. With
settings searched for, a table with weights is the same table with its rows repeated and weights of one: to
the last bit, because equal rows are made one before anything random happens."""

import numpy as np
import pytest
from oracles import changed
from sklearn.utils import estimator_checks
from test_estimator_contracts import SETTINGS

import kexpfam
from kexpfam import ConditionalKernelExpFamily, Features, Kernel, KernelExpFamily, Search, estimators
from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.fit import convex
from kexpfam.fit.features import Centres, build_space
from kexpfam.fit.folds import Folds, left_out_rows
from kexpfam.fit.learned import Learned
from kexpfam.fit.problem import Problem
from kexpfam.fit.stack import stacking_weights
from kexpfam.integrate.nodes import grid_nodes
from kexpfam.model.measures import Gaussian

ROWS = 40
# A mixture's EM starts at random rows, and a flow trains on random batches.
RANDOM = ("GaussianMixtureDensity", "SplineFlow")
GIVEN = {
    "ScoreMatchingExpFamily": {"base": "gaussian"},
    "KernelExpFamily": {"base": "gaussian"},
    "LeastSquaresConditional": {"n_centres": ROWS},
}
FEW = Search(
    folds=3,
    rows=50,
    conditional_rows=50,
    penalties=(0.1, 0.01),
    lengthscales=(0.5, 1.0),
    rounds=1,
    widths=(1.0,),
)
SEARCHED = {
    "KernelExpFamily": {"search": FEW, "lengthscale": None},
    "ConditionalKernelExpFamily": {
        "search": FEW,
        "condition_lengthscale": None,
        "lengthscale": None,
        "power": None,
    },
    "ScoreMatchingExpFamily": {"rkhs_penalty": None},
    "ConditionalScoreMatching": {"rkhs_penalty": None},
    "KernelDensity": {"bandwidth": None},
    "LeastSquaresConditional": {"width": None},
    "NeighbourDensity": {"width": None},
    "ConditionalKernelDensity": {"width": None},
}
CHECKS = [
    "check_sample_weights_pandas_series",
    "check_sample_weights_not_an_array",
    "check_sample_weights_list",
    "check_sample_weights_shape",
    "check_sample_weights_not_overwritten",
    "check_all_zero_sample_weights_error",
]
CONDITIONAL = sorted(
    name for name in SETTINGS if name != "SplineFlow" and getattr(estimators, name).conditional
)


def members(names):
    return [
        pytest.param(name, marks=pytest.mark.slow if name == "SplineFlow" else ()) for name in sorted(names)
    ]


def made(name, **changes):
    if name == "SplineFlow":
        pytest.importorskip("flowjax")
    settings = SETTINGS[name]
    settings = changed(settings, **changes) if "kernel" in settings else settings | changes
    return getattr(estimators, name)(**settings, random_state=0)


def rows_for(model):
    if not model.conditional:
        return (two_moons().sample(ROWS, random_state=0),)
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (ROWS, 2))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=ROWS)


@pytest.fixture(scope="module")
def weight():
    return np.random.default_rng(1).integers(0, 4, ROWS)


@pytest.mark.filterwarnings("ignore::kexpfam.TiesWarning")
@pytest.mark.parametrize("name", members(set(SETTINGS) - set(RANDOM)))
def test_with_settings_given_integer_weights_are_repeated_rows(name, weight):
    model, other = (made(name, **GIVEN.get(name, {})) for _ in range(2))
    rows = rows_for(model)
    repeated = tuple(np.repeat(part, weight, axis=0) for part in rows)
    model.fit(*rows, sample_weight=weight)
    np.testing.assert_allclose(
        model.score_samples(*rows), other.fit(*repeated).score_samples(*rows), atol=1e-8
    )
    assert model.score(*rows, sample_weight=weight) == pytest.approx(other.score(*repeated), abs=1e-8)


@pytest.mark.parametrize("name", members(SETTINGS))
def test_with_settings_searched_for_weights_are_repeated_rows_of_weight_one(name, weight):
    model, other = (made(name, **SEARCHED.get(name, {})) for _ in range(2))
    rows = rows_for(model)
    repeated = tuple(np.repeat(part, weight, axis=0) for part in rows)
    model.fit(*rows, sample_weight=weight)
    other.fit(*repeated, sample_weight=np.ones(weight.sum()))
    np.testing.assert_array_equal(model.score_samples(*rows), other.score_samples(*rows))
    assert model.diagnose().verdict == other.diagnose().verdict
    np.testing.assert_array_equal(model.training_weight_, weight[weight > 0])


@pytest.mark.parametrize("name", members(SETTINGS))
def test_weights_of_one_and_zero_keep_rows_and_leave_them_out(name):
    rows = rows_for(made(name))
    kept = np.arange(ROWS) % 3 > 0
    plain = made(name).fit(*(part[kept] for part in rows)).score_samples(*rows)
    np.testing.assert_array_equal(made(name).fit(*rows, sample_weight=kept).score_samples(*rows), plain)
    np.testing.assert_array_equal(made(name).fit(*rows, sample_weight=0.3 * kept).score_samples(*rows), plain)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", sorted(set(SETTINGS) - {"SplineFlow"}))
def test_scikit_learns_checks_of_weights(name, check):
    getattr(estimator_checks, check)(name, made(name, **GIVEN.get(name, {})))


# It compares predictions, and a joint density has none.
@pytest.mark.filterwarnings("ignore::kexpfam.TiesWarning")
@pytest.mark.parametrize("name", CONDITIONAL)
def test_scikit_learns_check_that_weights_are_repetitions(name):
    estimator_checks.check_sample_weight_equivalence_on_dense_data(name, made(name, **GIVEN.get(name, {})))


def test_weights_are_stored_with_the_model(weight, tmp_path):
    model = made("KernelDensity")
    rows = rows_for(model)
    model.fit(*rows, sample_weight=weight).save(tmp_path / "model.kexpfam")
    stored = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(stored.training_weight_, model.training_weight_)
    np.testing.assert_array_equal(stored.sample(9, random_state=0), model.sample(9, random_state=0))


def test_rows_of_labels_are_not_merged():
    x = np.repeat(np.random.default_rng(0).normal(size=(10, 1)), 5, axis=0)
    labels = np.array(["a", "b"] * 25)
    model = ConditionalKernelExpFamily(
        learned=Learned(folds=2, repeats=1, epochs=1, width=8, cells=16), random_state=0
    )
    model.fit(x, labels, sample_weight=np.r_[np.zeros(5), np.full(44, 3), 2])
    assert len(model.training_data_[0]) == 45 and model.training_weight_.sum() == 134.0


def test_too_few_rows_that_count_are_refused():
    with pytest.raises(ValueError, match="leaves 3 rows"):
        made("KernelDensity").fit(*rows_for(made("KernelDensity")), sample_weight=np.arange(ROWS) < 3)


def test_a_score_leaves_out_rows_of_weight_zero():
    model = KernelExpFamily(
        model="kernel", kernel=Kernel(base="box", lengthscale=0.8, rkhs_penalty=0.1), random_state=0
    )
    model.fit(rows_for(model)[0])
    far = np.array([[0.0, 0.0], [1e3, 0.0]])
    assert model.score(far) == -np.inf
    assert model.score(far, sample_weight=[2.0, 0.0]) == pytest.approx(model.score_samples(far)[0])
    with pytest.raises(ValueError, match="2 rows"):
        model.score(far, sample_weight=[1.0])


@pytest.mark.parametrize("conditional", [False, True])
def test_fold_scores_of_weighted_rows_agree_with_fits_to_the_folds(conditional):
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=(60, 1)), np.repeat(rng.normal(size=(30, 1)), 2, axis=0)
    sample = Sample(y, x if conditional else np.zeros((60, 0)), rng.uniform(0.2, 3.0, 60))
    base, penalty = Gaussian.fitted(y, weight=sample.weight), 0.03
    scales = np.array([0.6]), np.full(sample.condition.shape[1], 0.8)
    space = build_space(
        "gaussian", sample, Centres(y[::4], sample.condition[::4]), scales, Features(target_rank=6)
    )
    problem, nodes = Problem(sample, base, space, penalty, base), grid_nodes(base, y, fineness=0.25)
    out = left_out_rows(sample, 5, 1, seed=0)
    together, expected = Folds(problem, nodes, nodes, out).scores(penalty), np.empty(60)
    for left in out:
        kept = convex.likelihood(Problem(sample.rows(~left), base, space, penalty, base), nodes)
        tilt = problem.tilt(convex.maximise(kept, penalty, np.zeros(space.size), tolerance=1e-12).weights)
        expected[left] = tilt.values(y[left], sample.condition[left])
        expected[left] -= tilt.log_partitions(nodes, sample.condition[left])
    np.testing.assert_allclose(together, expected, atol=5e-3)


def test_stacking_weights_of_weighted_rows_are_those_of_repeated_rows():
    rng = np.random.default_rng(0)
    scores, counts = rng.normal(size=(80, 3)), rng.integers(1, 5, 80).astype(float)
    repeated = stacking_weights(np.repeat(scores, counts.astype(int), axis=0))
    np.testing.assert_allclose(stacking_weights(scores, counts), repeated, atol=1e-10)


# Rows of one normal law, with the ratio to another as their weights.
SHIFTED = {
    "KernelExpFamily": {"lengthscale": None, "rkhs_penalty": None, "search": FEW},
    "KernelDensity": {"bandwidth": None},
    "GaussianMixtureDensity": {},
    "ScoreMatchingExpFamily": {"rkhs_penalty": None, "lengthscale": 2.0},
}


@pytest.mark.parametrize("name", sorted(SHIFTED))
def test_importance_weights_lead_to_the_law_they_stand_for(name):
    x = np.random.default_rng(0).normal(size=(800, 1))
    model = made(name, **SHIFTED[name]).fit(x, sample_weight=np.exp(0.7 * x[:, 0]))
    truth = -0.5 * (x[:, 0] - 0.7) ** 2 - 0.5 * np.log(2.0 * np.pi)
    near = np.abs(x[:, 0] - 0.7) < 1.5
    # About 500 effective rows: a log density that is off by 0.1 on average would be noise of 50.
    assert np.mean(np.abs(model.score_samples(x) - truth)[near]) < 0.12


@pytest.mark.slow
def test_importance_weights_lead_learned_chains_to_the_law_they_stand_for():
    x = np.random.default_rng(0).normal(size=(1500, 2))
    brief = Learned(folds=2, repeats=1, epochs=60, patience=10)
    model = KernelExpFamily(model="chain", learned=brief, random_state=0).fit(
        x, sample_weight=np.exp(0.7 * x[:, 0])
    )
    truth = -0.5 * np.sum((x - [0.7, 0.0]) ** 2, axis=1) - np.log(2.0 * np.pi)
    near = np.sum((x - [0.7, 0.0]) ** 2, axis=1) < 2.0
    assert np.mean(np.abs(model.score_samples(x) - truth)[near]) < 0.15
    draws = model.sample(4000, random_state=0)
    # The weighted mean of 1,500 rows has an error of 0.033.
    assert draws.mean(axis=0) == pytest.approx([0.7, 0.0], abs=0.15)


EQUAL = {"two": 2.0, "seven": 7.0, "a tenth": 0.1, "large": 1e308, "small": 1e-308}


@pytest.mark.parametrize("size", EQUAL.values(), ids=EQUAL)
def test_equal_weights_change_nothing(size):
    X = np.random.default_rng(0).normal(size=(40, 1))
    kernel = Kernel(lengthscale=0.7, rkhs_penalty=1e-2)
    plain, weighted = (
        KernelExpFamily(kernel=kernel, random_state=0).fit(X, sample_weight=weight)
        for weight in (None, np.full(len(X), size))
    )
    np.testing.assert_array_equal(plain.score_samples(X), weighted.score_samples(X))


@pytest.mark.parametrize("count", [1, 4])
def test_dominating_weights_are_refused_by_the_effective_sample_size(count):
    X, weight = np.random.default_rng(0).normal(size=(40, 1)), np.ones(40)
    weight[:count] = 1e6
    with pytest.raises(ValueError, match=f"leaves {count} effective rows"):
        KernelExpFamily(random_state=0).fit(X, sample_weight=weight)


def test_weights_beyond_double_precision_are_relative():
    X, weight = np.random.default_rng(0).normal(size=(40, 1)), np.random.default_rng(1).uniform(size=40)
    kernel = Kernel(lengthscale=0.7, rkhs_penalty=1e-2)
    small, large = (
        KernelExpFamily(kernel=kernel, random_state=0).fit(X, sample_weight=weight * size)
        for size in (1.0, 1e308)
    )
    np.testing.assert_allclose(small.score_samples(X), large.score_samples(X), rtol=1e-9)
