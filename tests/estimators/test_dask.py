"""Frames of Dask: partitions are gone through by the workers of a client, and models are compared on them
through joblib."""

import joblib
import numpy as np
import pandas
import pytest
from oracles import changed
from sklearn.model_selection import cross_val_score

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily, Rows

distributed = pytest.importorskip("distributed")
dask_frames = pytest.importorskip("dask.dataframe")

SETTINGS = {
    "model": "kernel",
    "kernel": Kernel(lengthscale=0.7, rkhs_penalty=1e-3),
    "random_state": 0,
    "rows": Rows(in_memory=300),
}
# Libraries of Dask's own warn of what they do to each other.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def client():
    options = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    a = rng.normal(size=900)
    return pandas.DataFrame({"a": a, "b": a**2 + 0.3 * rng.normal(size=900)})


def parts(table):
    return [table[start : start + 225] for start in range(0, 900, 225)]


def test_without_a_client_partitions_come_here(table):  # the first test, before there is one
    model = KernelExpFamily(**SETTINGS).fit(dask_frames.from_pandas(table, npartitions=4))
    assert np.array_equal(
        model.score_samples(table), KernelExpFamily(**SETTINGS).fit(parts(table)).score_samples(table)
    )


def test_workers_go_through_the_partitions(client, table, monkeypatch):
    frame, seen = dask_frames.from_pandas(table, npartitions=4), []
    # A worker computes its own partition; whoever asks for one here brings it to this process.
    monkeypatch.setattr(
        type(frame), "compute", lambda *_, **__: pytest.fail("a partition came to this process")
    )
    model = KernelExpFamily(**SETTINGS, progress=seen.append).fit(frame)
    alone = KernelExpFamily(**SETTINGS).fit(parts(table))
    assert np.array_equal(model.score_samples(table), alone.score_samples(table))
    assert model.score(frame) == alone.score(parts(table))
    assert model.n_rows_ == 900
    for stage in ("reading", "summing", "scoring"):
        steps = [(report.step, report.steps) for report in seen if report.stage == stage]
        assert steps == [(count, 900) for count in (225, 450, 675, 900)]


def test_targets_are_columns_and_weights_stand_beside(client, table):
    frame, weight = dask_frames.from_pandas(table, npartitions=4), np.arange(900) % 3 + 1.0
    settings = changed(SETTINGS, condition_lengthscale=0.7, n_centres=20)
    model = ConditionalKernelExpFamily(**settings).fit(frame, "b", weight)
    pairs = [(part[["a"]], part.b) for part in parts(table)]
    alone = ConditionalKernelExpFamily(**settings).fit(pairs, None, weight)
    assert model.score(frame, "b") == alone.score(pairs)


def test_what_is_wrong_on_a_worker_is_said_here(client, table):
    spoilt = table.assign(a=table.a.where(table.index != 700, np.inf))
    with pytest.raises(ValueError, match="infinity"):
        KernelExpFamily(**SETTINGS).fit(dask_frames.from_pandas(spoilt, npartitions=4))
    with pytest.raises(ValueError, match="sample_weight must have one entry for each"):
        KernelExpFamily(**SETTINGS).fit(dask_frames.from_pandas(table, npartitions=4), None, np.ones(5))


def test_cross_validation_runs_on_the_workers(client, table):
    model, X = KernelExpFamily(**SETTINGS), table.to_numpy()
    with joblib.parallel_backend("dask"):
        found = cross_val_score(model, X, cv=3)
    assert np.allclose(found, cross_val_score(model, X, cv=3))
