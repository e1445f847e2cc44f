"""Fits to rows in blocks: sums are over all rows, the rest over a sample of a stated size, and little of it
stays."""

import jax.random as jr
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
from oracles import changed

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily, Rows, load
from kexpfam.fit.convex import gradient, likelihood, shortfall
from kexpfam.fit.learned import Learned

SMALL = {"model": "kernel", "kernel": Kernel(lengthscale=0.7, rkhs_penalty=1e-3), "random_state": 0}
QUICK = Learned(folds=2, repeats=1, width=8, depth=1, epochs=2, batch=64, cells=40)


class Counted:
    """Blocks that tell how often, and how many rows at a time, they were read."""

    def __init__(self, values, pieces):
        self.parts, self.passes, self.largest = np.array_split(values, pieces), 0, 0

    def __iter__(self):
        self.passes += 1
        for part in self.parts:
            self.largest = max(self.largest, len(part))
            yield part.copy()


def gap(model):
    """Return how far f is from its optimum, as the diagnosis of the rows that were kept has it."""
    return shortfall(model._problem, model.density_.tilt, model._problem.proposal, 100, key=jr.key(0)).value


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    return np.concatenate([rng.normal(-2.0, 0.6, (1_500, 1)), rng.normal(1.0, 1.0, (2_500, 1))])


@pytest.fixture(scope="module")
def streamed(values):
    source = Counted(values, 9)
    return KernelExpFamily(**changed(SMALL, n_centres=60), rows=Rows(in_memory=400, kept=50)).fit(
        source
    ), source


def test_a_source_of_few_rows_is_the_table(values):
    whole = KernelExpFamily(**SMALL).fit(values[::20])
    blocks = KernelExpFamily(**SMALL).fit(np.array_split(values[::20], 3))
    assert np.array_equal(whole.score_samples(values), blocks.score_samples(values))
    assert blocks.n_rows_ == whole.n_rows_ == 200


def test_means_of_features_are_over_all_rows(streamed, values):
    model, source = streamed
    problem, points = model._problem, model.density_.scaling.to_model(values)
    assert np.allclose(problem.mean_feature, problem.space.target.matrix(points).mean(axis=0), atol=1e-10)
    # f is the optimum of the likelihood of all rows: the gradient vanishes with their mean, and not with the
    # sample's.
    nodes, weights = problem.nodes(key=None), model.solution_.tilt.weights
    posed = likelihood(problem, nodes)
    assert np.abs(gradient(posed, problem.rkhs_penalty, weights)).max() < 1e-6
    ours = posed._replace(mean_feature=problem.space.target.matrix(problem.sample.target).mean(axis=0))
    assert np.abs(gradient(ours, problem.rkhs_penalty, weights)).max() > 1e-3
    assert (source.passes, source.largest) == (2, 445)
    assert model.n_rows_ == 4_000


def test_an_array_of_many_rows_goes_the_same_way(streamed, values):
    model, _ = streamed
    array = KernelExpFamily(
        **changed(SMALL, n_centres=60), rows=Rows(in_memory=400, kept=50, block=1_000)
    ).fit(values)
    assert np.allclose(array.score_samples(values), model.score_samples(values), atol=1e-10)


def test_weights_of_rows_reach_the_sums(values):
    weight = np.where(values[:, 0] < 0.0, 3.0, 1.0)
    model = KernelExpFamily(**SMALL, rows=Rows(in_memory=400)).fit(
        np.array_split(values, 5), sample_weight=weight
    )
    points = model.density_.scaling.to_model(values)
    expected = np.average(model._problem.space.target.matrix(points), axis=0, weights=weight)
    assert np.allclose(model._problem.mean_feature, expected, atol=1e-10)
    shares = [model.score(part, sample_weight=weight) for part in (values, np.array_split(values, 7))]
    assert shares[0] == pytest.approx(shares[1], abs=1e-12)


def test_a_model_keeps_few_rows(streamed, values, tmp_path):
    model, _ = streamed
    model.save(tmp_path / "model")
    tensors = safetensors.numpy.load_file(tmp_path / "model")
    sizes = {size for tensor in tensors.values() for size in tensor.shape}
    assert not {400, 4_000} & sizes
    loaded = load(tmp_path / "model")
    assert loaded.n_rows_ == 4_000
    assert len(loaded.training_data_) == 50
    assert len(loaded._problem.sample) <= 52
    assert np.isin(loaded.training_data_.round(9), values.round(9)).all()
    assert gap(loaded) == pytest.approx(gap(model), abs=1e-12)
    assert gap(loaded) < 1e-6


def test_a_table_that_is_held_leaves_few_rows_too(values):
    model = KernelExpFamily(**SMALL, rows=Rows(kept=100)).fit(values)
    assert len(model.training_data_) == len(model.training_weight_) == 100
    assert model.n_rows_ == 4_000
    assert gap(model) < 1e-6


def test_targets_are_columns_of_a_file(tmp_path):
    rng = np.random.default_rng(1)
    table = pandas.DataFrame(rng.normal(size=(900, 2)), columns=["a", "b"]).assign(
        c=rng.choice(["u", "v"], 900)
    )
    table["y"] = table.a + 0.3 * rng.normal(size=900)
    for place in range(3):
        part = pyarrow.Table.from_pandas(table[place * 300 : (place + 1) * 300], preserve_index=False)
        pyarrow.parquet.write_table(part, tmp_path / f"{place}.parquet")
    model = ConditionalKernelExpFamily(learned=QUICK, random_state=0, rows=Rows(in_memory=450)).fit(
        tmp_path, "y"
    )
    assert model.n_rows_ == 900
    assert list(model.columns_) == ["a", "b", "c"]
    each = model.score_samples(table[["a", "b", "c"]], table.y)
    assert np.allclose(model.score_samples(tmp_path, "y"), each)
    assert model.score(tmp_path, "y") == pytest.approx(each.mean())
    pairs = [(part[["a", "b", "c"]], part.y) for part in (table[:500], table[500:])]
    assert model.score(pairs) == pytest.approx(each.mean())


@pytest.mark.parametrize(
    ("spoil", "settings", "error", "message"),
    [
        (lambda v: (part for part in [v]), {}, TypeError, "can be read only once"),
        (lambda v: [v, np.full((1, 1), np.inf)], {}, ValueError, "infinity"),
        (lambda v: [v, np.full((1, 1), 99.0)], {"bounds": (-50.0, 50.0)}, ValueError, "outside the bounds"),
        (lambda v: [v], {"rows": 5}, TypeError, "rows must be a Rows"),
    ],
)
def test_what_a_sample_would_not_show_is_said(spoil, settings, error, message, values):
    with pytest.raises(error, match=message):
        KernelExpFamily(**{"rows": Rows(in_memory=100), "random_state": 0} | settings).fit(spoil(values))


def test_rare_gaps_are_left_out_of_the_sums(values):
    gaps = [values, np.full((1, 1), np.nan)]
    with pytest.warns(UserWarning, match="1 of 4001 rows have missing values"):
        model = KernelExpFamily(**SMALL, rows=Rows(in_memory=100)).fit(gaps)
    points = model.density_.scaling.to_model(values)
    assert np.allclose(
        model._problem.mean_feature, model._problem.space.target.matrix(points).mean(axis=0), atol=1e-10
    )


def test_reading_is_reported(values):
    seen = []
    KernelExpFamily(**SMALL, rows=Rows(in_memory=400, block=1_000), progress=seen.append).fit(values)
    for stage in ("reading", "summing"):
        assert [(report.step, report.steps) for report in seen if report.stage == stage] == [
            (count, 4_000) for count in (1_000, 2_000, 3_000, 4_000)
        ]
