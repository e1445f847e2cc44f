"""Exported functions give what the model gives, in a process without kexpfam."""

import subprocess
import sys

import numpy as np
import pytest
from jax import export

from kexpfam import KernelExpFamily
from kexpfam.estimators import KernelDensity
from kexpfam.fit.learned import Learned

SMALL = Learned(folds=2, repeats=1, width=10, epochs=8, cells=48, steps=60)
READER = """
import sys
import numpy as np
import jax

jax.config.update("jax_enable_x64", True)
from jax import export

score, draw = (export.deserialize(bytearray(open(name, "rb").read())) for name in ("score.bin", "draw.bin"))
for count in (5, 9):
    np.save(f"scores{count}.npy", score.call(np.load("rows.npy")[:count]))
np.save("draws.npy", draw.call(np.arange(400.0)[:, None]))
assert not any(name.startswith("kexpfam") for name in sys.modules)
"""


def test_a_program_without_kexpfam_scores_and_draws(tmp_path):
    rng = np.random.default_rng(0)
    a = rng.normal(size=120)
    rows = np.column_stack([a, rng.integers(0, 3, size=120), np.exp(0.3 * a)])
    model = KernelExpFamily(columns={1: "category", 2: "positive"}, learned=SMALL, random_state=0).fit(rows)
    model.export(tmp_path / "score.bin")
    model.export(tmp_path / "draw.bin", "sample")
    np.save(tmp_path / "rows.npy", rows)
    subprocess.run([sys.executable, "-c", READER], cwd=tmp_path, check=True)
    for count in (5, 9):
        found = np.load(tmp_path / f"scores{count}.npy")
        np.testing.assert_allclose(found, model.score_samples(rows[:count]), atol=1e-5)
    draws, others = np.load(tmp_path / "draws.npy"), model.density_.sample(400, key=_key())
    error = np.sqrt((draws.var(0) + others.var(0)) / 400)
    assert np.all(np.abs(draws.mean(0) - others.mean(0)) < 5.0 * error)
    with pytest.raises(ValueError, match="unknown function"):
        model.export(tmp_path / "x", "quantile")


def _key():
    import jax

    return jax.random.key(0)


def test_without_flatbuffers_the_extra_is_named(tmp_path, monkeypatch):
    def serialize(program):
        raise ImportError("no module flatbuffers")

    monkeypatch.setattr(export.Exported, "serialize", serialize)
    model = KernelDensity().fit(np.random.default_rng(0).normal(size=(40, 2)))
    with pytest.raises(ImportError, match=r"kexpfam\[export\]"):
        model.export(tmp_path / "score.bin")
    assert not (tmp_path / "score.bin").exists()
