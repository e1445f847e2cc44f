"""Golden files: models of all storage formats load and score as they did when they were written."""

import json

import numpy as np
import pytest

import kexpfam
from kexpfam import storage
from kexpfam.estimators import ESTIMATORS
from tools import golden

RECORDS = {path.parent.name: json.loads(path.read_text()) for path in golden.FOLDER.glob("*/expected.json")}
FILES = [(version, name) for version, record in sorted(RECORDS.items()) for name in sorted(record)]


def check(path, expected):
    """Load a model, compare its scores with the recorded ones, and draw a sample."""
    if "SplineFlow" in path.name:
        pytest.importorskip("flowjax")
    model, rows = kexpfam.load(path), golden.from_json(expected["rows"])
    np.testing.assert_allclose(model.score_samples(*rows), expected["scores"], rtol=1e-12, atol=1e-12)
    drawn = model.sample(*([rows[0]] if model.conditional else []), 3, random_state=0)
    assert len(drawn) == (len(rows[0]) if model.conditional else 3)


@pytest.mark.parametrize(("version", "name"), FILES)
def test_a_golden_file_scores_as_when_it_was_written(version, name):
    check(golden.FOLDER / version / f"{name}.kexpfam", RECORDS[version][name])


@pytest.mark.parametrize("version", range(storage.OLDEST_FORMAT, storage.FORMAT + 1))
def test_every_format_has_golden_files(version):
    files = {path.stem for path in (golden.FOLDER / str(version)).glob("*.kexpfam")}
    assert files == set(RECORDS.get(str(version), {})) != set(), "run python tools/golden.py"


def test_every_estimator_has_a_golden_file_of_the_current_format():
    assert set(golden.SETTINGS) == set(ESTIMATORS)
    missing = set(ESTIMATORS) - set(RECORDS.get(str(storage.FORMAT), {}))
    assert not missing, "run python tools/golden.py"


def test_the_script_writes_files_that_pass(tmp_path):
    assert golden.write(tmp_path, ["KernelDensity", "two-columns"]) == []
    expected = json.loads((tmp_path / "expected.json").read_text())
    for name, record in expected.items():
        check(tmp_path / f"{name}.kexpfam", record)
    before = (tmp_path / "KernelDensity.kexpfam").stat().st_mtime_ns
    assert golden.write(tmp_path, ["KernelDensity", "absent"]) == ["absent: KeyError: 'absent'"]
    assert (tmp_path / "KernelDensity.kexpfam").stat().st_mtime_ns == before
