"""Rounded columns: draws lie on the lattice of the data, and kind "rounded" has bounded densities."""

import numpy as np
import pandas as pd
import pytest

import kexpfam
from kexpfam import ColumnKindWarning, ConditionalKernelExpFamily, KernelExpFamily, Rounded, TiesWarning
from kexpfam.fit.learned import Learned

SMALL = Learned(folds=2, repeats=1, width=8, epochs=6, cells=48, steps=60)
SETTINGS = {"model": "chain", "learned": SMALL, "random_state": 0}


def table(seed: int = 0, count: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    a = np.round(rng.normal(2.0, 1.0, count), 1)
    b = np.round(2.0 * (a + rng.normal(size=count))) / 2 + 0.25
    return pd.DataFrame({"a": a, "b": b, "c": rng.normal(size=count)})


@pytest.fixture(scope="module")
def plain() -> KernelExpFamily:
    return KernelExpFamily(**SETTINGS).fit(table())


@pytest.fixture(scope="module")
def rounded() -> KernelExpFamily:
    columns = {"a": "rounded:0.1:-8:12", "b": Rounded(None, -9.75, 14.75)}
    return KernelExpFamily(columns=columns, **SETTINGS).fit(table()[["a", "b"]])


def test_by_default_draws_are_rounded_and_scores_are_those_of_real_numbers(plain):
    assert plain.steps_ == pytest.approx({"a": 0.1, "b": 0.5})
    draws = plain.sample(500, random_state=0)
    assert np.array_equal(draws["a"], np.round(draws["a"], 1))
    assert np.array_equal(draws["b"], np.round(2.0 * (draws["b"] - 0.25)) / 2 + 0.25)
    assert len(set(draws["c"])) == 500
    real = KernelExpFamily(columns=dict.fromkeys("abc", "real"), **SETTINGS).fit(table())
    assert real.steps_ == {}
    np.testing.assert_array_equal(real.score_samples(table(1)), plain.score_samples(table(1)))
    free = real.sample(500, random_state=0)
    assert np.abs(free[["a", "b"]] - draws[["a", "b"]]).max().tolist() == pytest.approx(
        [0.05, 0.25], rel=0.05
    )
    np.testing.assert_array_equal(free["c"], draws["c"])


def test_parts_of_a_density_are_rounded_and_known_cells_stay(plain, tmp_path):
    given = plain.given({"c": 0.3}).sample(50, random_state=0)
    assert np.array_equal(given["a"], np.round(given["a"], 1))
    rows = pd.DataFrame({"a": [0.12345, np.nan], "b": [np.nan, 0.31], "c": [0.0, 1.0]})
    full = plain.impute(rows, random_state=0)
    assert full["a"][0] == 0.12345 and full["b"][1] == 0.31
    assert full["a"][1] == np.round(full["a"][1], 1)
    plain.save(tmp_path / "model.kexpfam")
    again = kexpfam.load(tmp_path / "model.kexpfam")
    pd.testing.assert_frame_equal(again.sample(5, random_state=0), plain.sample(5, random_state=0))


def test_the_density_of_rounded_numbers_is_mass_over_step(rounded, tmp_path):
    assert rounded.columns_ == {"a": Rounded(0.1, -8, 12, 0.0), "b": Rounded(0.5, -9.75, 14.75, 0.25)}
    a, b = np.meshgrid(np.arange(-80, 121) / 10, np.arange(-20, 30) / 2 + 0.25)
    grid = pd.DataFrame({"a": a.ravel(), "b": b.ravel()})
    masses = 0.1 * 0.5 * np.exp(rounded.score_samples(grid))
    assert masses.sum() == pytest.approx(1.0, abs=1e-3)
    draws = rounded.sample(400, random_state=0)
    assert np.array_equal(draws["a"], np.round(draws["a"], 1))
    rounded.save(tmp_path / "model.kexpfam")
    again = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(again.score_samples(draws), rounded.score_samples(draws))


def test_few_values_have_a_bounded_density_if_they_are_rounded():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    y = np.round(x[:, 0] + 0.1 * rng.normal(size=200)) / 2
    settings = {**SETTINGS, "learned": Learned(folds=2, repeats=1, width=8, epochs=40, cells=48, steps=200)}
    model = ConditionalKernelExpFamily(target_columns="rounded", **settings).fit(x, y)
    found = model.score_samples(x, y)
    assert found.max() <= np.log(1.0 / 0.5) + 1e-3 and found.mean() > -0.5
    quantiles = model.quantile(x, [0.1, 0.5, 0.9])
    assert np.array_equal(quantiles, np.round(2.0 * quantiles) / 2)
    assert model.steps_ == {0: 0.5}
    with (
        pytest.warns(ColumnKindWarning, match=r"hold few rounded numbers.*'rounded'"),
        pytest.warns(TiesWarning),
    ):
        ConditionalKernelExpFamily(**SETTINGS).fit(x, y)


def test_a_column_that_is_not_on_the_lattice_is_named():
    with pytest.raises(ValueError, match="column 'c' is not rounded"):
        KernelExpFamily(columns={"c": "rounded"}).fit(table())
    with pytest.raises(ValueError, match=r"column 'a' holds .*, whose difference is no multiple of 0\.3"):
        KernelExpFamily(columns={"a": "rounded:0.3"}).fit(table())
