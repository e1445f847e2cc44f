"""Training that goes on with new rows."""

import numpy as np
import pandas as pd
import pytest

import kexpfam
from kexpfam import ConditionalKernelExpFamily, KernelExpFamily, Rows
from kexpfam.fit.learned import Learned
from kexpfam.fit.task import Splits

SMALL = Learned(folds=2, repeats=2, width=10, epochs=40, cells=48, steps=400)


def table(seed, count, shift=0.0):
    rng = np.random.default_rng(seed)
    kind = rng.choice(["u", "v"], size=count)
    a = np.where(kind == "u", 0.0, 4.0) + rng.normal(size=count) + shift
    return pd.DataFrame({"kind": kind, "a": a, "b": a + 0.5 * rng.normal(size=count)})


def test_old_rows_stay_in_their_parts_and_new_ones_join():
    old = Splits.draw(40, parts=3, share=0.2, seed=0)
    new = Splits.extended(old.part, 20, share=0.25, seed=1)
    assert new.rows == 60 and new.held.shape == (3, 13)
    for k in range(3):
        assert set(new.held[k][new.held[k] < 40]) == set(old.held[k])
        assert np.sum(new.held[k] >= 40) == 5
    assert len(np.unique(new.held)) == new.held.size


@pytest.fixture(scope="module")
def model():
    return KernelExpFamily(learned=SMALL, random_state=0).fit(table(0, 300))


def test_an_update_learns_new_rows_and_keeps_its_interface(model, tmp_path):
    model.save(tmp_path / "old.kexpfam")
    updated = kexpfam.load(tmp_path / "old.kexpfam")
    updated.learned, updated.random_state = SMALL, 0
    moved = table(1, 200, shift=2.0)
    updated.update(moved, forget=0.5)
    test = table(2, 500, shift=2.0)
    gain = updated.score_samples(test) - model.score_samples(test)
    assert gain.mean() > 4.0 * gain.std() / np.sqrt(len(gain))
    assert updated.n_rows_ == 500 and len(updated.training_data_) == 500
    assert updated.density_.members.order.tolist() == model.density_.members.order.tolist()
    p = updated.novelty(test)
    assert np.mean(p <= 0.1) <= 0.2
    updated.save(tmp_path / "new.kexpfam")
    again = kexpfam.load(tmp_path / "new.kexpfam")
    np.testing.assert_allclose(again.score_samples(test), updated.score_samples(test))


@pytest.mark.parametrize("seed", range(3))
def test_the_rows_that_are_kept_are_a_random_part_and_can_be_updated(seed):
    settings = Learned(folds=4, repeats=1, width=6, epochs=3, cells=48, steps=40)
    model = KernelExpFamily(model="chain", learned=settings, rows=Rows(kept=60), random_state=seed)
    model.fit(table(seed, 200)[["a", "b"]])
    parts, counts = np.unique(model._part, return_counts=True)
    # Four parts with 15 % of the rows each, and the others; five standard errors.
    assert parts.tolist() == [-1, 0, 1, 2, 3]
    assert np.all(np.abs(counts - 60 * np.array([0.4, 0.15, 0.15, 0.15, 0.15])) < 5 * np.sqrt(60 * 0.24))
    model.update(table(seed + 10, 40)[["a", "b"]])
    assert model.n_rows_ == 240 and np.all(np.isfinite(model.score_samples(table(3, 9)[["a", "b"]])))


def test_rows_that_do_not_fit_are_refused_and_leave_the_model(model):
    before = model.score_samples(table(1, 5))
    with pytest.raises(ValueError, match="unknown labels"):
        model.update(table(1, 20).assign(kind="w"))
    with pytest.raises(ValueError, match="forget"):
        model.update(table(1, 20), forget=1.0)
    np.testing.assert_array_equal(model.score_samples(table(1, 5)), before)


def test_a_conditional_model_is_updated(model):
    rows = table(0, 300)
    own = ConditionalKernelExpFamily(learned=SMALL, model="chain", random_state=0)
    own.fit(rows[["kind", "a"]], rows["b"])
    new = table(1, 100)
    own.update(new[["kind", "a"]], new["b"])
    assert own.n_rows_ == 400 and own.training_data_[1].shape == (400,)
    assert np.isfinite(own.score(new[["kind", "a"]], new["b"]))


def test_a_model_without_a_chain_is_fitted_again(moons):
    model = KernelExpFamily(model="mixture", random_state=0).fit(moons)
    with pytest.raises(ValueError, match="has none"):
        model.update(moons)
