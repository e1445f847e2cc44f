"""The benchmarks: what they make of their runs, and that a run is in a process and a cache of its own."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for known in (name, "ledger"):
        monkeypatch.delitem(sys.modules, known, raising=False)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def first_call(monkeypatch):
    return load("first_call", monkeypatch)


def test_a_summary_has_medians_and_their_ratios(first_call):
    runs = {
        name: [{"import": value, "first call": 2 * value} for value in (1.0, 9.0, 2.0)]
        for name in first_call.CONTESTANTS
    }
    runs["kexpfam"] = [
        {"import": 1.0, "fit": 6.0, "megabytes": 80.0, "first call": 8.0, "second fit": 2.0}
    ] * 3
    record = first_call.summary(runs)
    assert record["medians"]["SplineFlow"] == {"import": 2.0, "first call": 4.0}
    assert (
        record["ratios"]["first call / SplineFlow"] == 2.0
        and record["ratios"]["first fit / second fit"] == 3.0
    )
    text = first_call.table(record)
    assert "80.00 MB above import" in text and all(name in text for name in first_call.CONTESTANTS)


def test_a_contestant_runs_in_a_fresh_process_with_a_cache_of_its_own(first_call, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "somewhere")
    script = "import os; print('noise'); print(json.dumps([os.environ['KEXPFAM_CACHE'], sys.argv[1],"
    script += " 'jax' in sys.modules,"
    script += " 'JAX_COMPILATION_CACHE_DIR' in os.environ, clock() >= 0]))"
    found = first_call.measure(script, tmp_path / "x.npy", tmp_path / "cache")
    assert found == [str(tmp_path / "cache"), str(tmp_path / "x.npy"), False, False, True]


def test_a_contestant_that_fails_is_not_a_number(first_call, tmp_path):
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        first_call.measure("1 / 0", tmp_path / "x.npy", tmp_path / "cache")


def test_a_record_is_a_line_with_its_commit(tmp_path, monkeypatch):
    ledger = load("ledger", monkeypatch)
    monkeypatch.setattr(ledger, "RECORDS", tmp_path / "records")
    ledger.append("some", {"seconds": 1.0})
    ledger.append("some", {"seconds": 2.0})
    lines = (tmp_path / "records" / "some.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all('"commit"' in line for line in lines)


def test_a_split_is_fitted_to_the_rows_that_it_does_not_test(monkeypatch):
    conditional = load("conditional", monkeypatch)
    seen = {}

    class Model:
        def __init__(self, random_state):
            seen["seed"] = random_state

        def fit(self, X, y):
            seen["train"] = y
            return self

        def score(self, X, y):
            return -float(y.mean())

    monkeypatch.setattr(conditional, "ConditionalKernelExpFamily", Model)
    data = np.arange(20.0).reshape(10, 2)
    found = conditional.measured(data, np.array([0, 9]), seed=5)
    assert seen["seed"] == 5 and list(seen["train"]) == list(data[1:9, -1]) and found["nll"] == 10.0
