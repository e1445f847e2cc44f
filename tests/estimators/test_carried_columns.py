"""``collinear="carry"``: linear combinations are left out of the model and computed from the other columns.

The oracle is a fit to the other columns alone."""

import numpy as np
import pandas as pd
import pytest

import kexpfam
from kexpfam import KernelExpFamily
from kexpfam.data.columns import CollinearWarning

SETTINGS = {"model": "mixture", "random_state": 0}
FREE = ["a", "b", "d"]


def table(seed: int = 0, count: int = 150) -> pd.DataFrame:
    """Return a frame in which c = 2 a - b + 1 stands before the last column."""
    a, b, d = np.random.default_rng(seed).normal(size=(3, count))
    return pd.DataFrame({"a": a, "b": b, "c": 2.0 * a - b + 1.0, "d": a + d})


def carry(rows, **settings) -> KernelExpFamily:
    with pytest.warns(CollinearWarning, match="are linear combinations of others and are carried along"):
        return KernelExpFamily(**(SETTINGS | settings), collinear="carry").fit(rows)


@pytest.fixture(scope="module")
def model() -> KernelExpFamily:
    return carry(table())


@pytest.fixture(scope="module")
def oracle() -> KernelExpFamily:
    return KernelExpFamily(**SETTINGS).fit(table()[FREE])


def test_the_default_error_names_the_setting():
    with pytest.raises(ValueError, match='a, b, c are collinear and have no joint .* collinear="carry"'):
        KernelExpFamily(**SETTINGS).fit(table())
    with pytest.raises(ValueError, match="collinear"):
        KernelExpFamily(collinear="drop").fit(table())


def test_carried_columns_are_named_with_their_coefficients(model, oracle):
    assert model.carried_ == {"c": (1.0, {"a": 2.0, "b": -1.0})}
    assert list(model.columns_) == list("abcd")
    assert oracle.carried_ == {}


def test_scores_are_those_of_the_other_columns(model, oracle):
    fresh = table(1)
    np.testing.assert_allclose(model.score_samples(fresh), oracle.score_samples(fresh[FREE]), rtol=1e-12)
    off = fresh.assign(c=fresh["c"] + 1e-3)
    assert np.all(model.score_samples(off) == -np.inf)


def test_a_stack_of_candidates_gives_the_same_scores():
    small = {"model": "auto", "kernel": kexpfam.Kernel(lengthscale=1.0, rkhs_penalty=1e-2)}
    rows = table(count=60)[["a", "b", "c"]]
    alone = KernelExpFamily(**(SETTINGS | small)).fit(rows[["a", "b"]])
    np.testing.assert_allclose(
        carry(rows, **small).score_samples(rows), alone.score_samples(rows[["a", "b"]]), rtol=1e-9
    )


def test_draws_have_all_columns_and_keep_the_combination(model, oracle):
    draws = model.sample(200, random_state=1)
    assert list(draws) == list("abcd")
    np.testing.assert_allclose(draws["c"], 2.0 * draws["a"] - draws["b"] + 1.0, rtol=0, atol=1e-13)
    np.testing.assert_allclose(draws[FREE], oracle.sample(200, random_state=1), rtol=1e-12)
    np.testing.assert_allclose(model.training_data_, table(), rtol=0, atol=1e-12)


def test_copies_of_a_rounded_column_are_carried():
    rows = np.round(
        np.random.default_rng(0).normal(size=(200, 3)) @ [[1.0, 0.5, 0.0], [0.0, 1.0, 0.5], [0, 0, 1]], 3
    )
    model = carry(rows[:, [0, 1, 0, 2, 0]])
    assert {place: parts for place, (_, parts) in model.carried_.items()} == {2: {0: 1.0}, 4: {0: 1.0}}
    draws = model.sample(100, random_state=0)
    assert np.array_equal(draws[:, 2], draws[:, 0]) and np.array_equal(draws[:, 4], draws[:, 0])
    assert np.array_equal(draws, np.round(draws, 3)) and np.all(np.isfinite(model.score_samples(draws)))
    by_copy = model.given({2: rows[0, 0]}).score_samples(rows[:2, 1:])
    np.testing.assert_allclose(by_copy, model.given({0: rows[0, 0]}).score_samples(rows[:2, 1:]), rtol=1e-12)
    known = np.array([[np.nan, 0.1, 0.2, 0.3, np.nan]])
    np.testing.assert_array_equal(model.impute(known, random_state=0), [[0.2, 0.1, 0.2, 0.3, 0.2]])


def test_draws_of_whole_numbers_are_whole():
    counts = np.random.default_rng(0).poisson(5000.0, size=(150, 2)).astype(float)
    rows = np.column_stack([counts, counts.sum(axis=1)])
    draws = carry(rows).sample(300, random_state=0)
    assert np.array_equal(draws, np.round(draws))
    assert np.array_equal(draws[:, 2], draws[:, 0] + draws[:, 1])


def test_a_mixed_table_with_missing_cells_carries_its_real_columns():
    rows = table(count=80)[["a", "c", "b"]].assign(label=np.tile(["u", "v"], 40))
    rows.loc[3, "a"] = rows.loc[4, "c"] = np.nan
    learned = kexpfam.Learned(folds=2, repeats=1, width=8, epochs=4, cells=48, steps=40)
    model = carry(rows, model="chain", learned=learned)
    assert list(model.carried_) == ["b"]
    draws = model.sample(20, random_state=0)
    np.testing.assert_allclose(draws["c"], 2.0 * draws["a"] - draws["b"] + 1.0, rtol=0, atol=1e-12)
    assert set(draws["label"]) <= {"u", "v"}


def test_missing_cells_are_solved_for_or_drawn(model, oracle):
    rows = table(2, 4)
    known = rows.copy()
    known.loc[0, "a"] = known.loc[1, "c"] = known.loc[2, "d"] = known.loc[3, ["a", "c"]] = np.nan
    filled = model.impute(known, random_state=0)
    np.testing.assert_allclose(filled[:2], rows[:2], rtol=1e-12)
    np.testing.assert_allclose(filled["c"], 2.0 * filled["a"] - filled["b"] + 1.0, rtol=0, atol=1e-12)
    assert filled.to_numpy()[known.notna()].tolist() == rows.to_numpy()[known.notna()].tolist()
    expected = known[FREE].assign(a=[rows.loc[0, "a"], *known["a"][1:]])
    np.testing.assert_allclose(model.score_samples(known), oracle.score_samples(expected), rtol=1e-9)
    with pytest.raises(ValueError, match=r"row 1 .* carried column \(c\) that depends on several unknown"):
        model.impute(rows.assign(a=[1.0, np.nan, 1.0, 1.0], b=np.nan, c=[np.nan, 0.0, np.nan, np.nan]))


def test_densities_given_and_marginal(model, oracle):
    point = pd.DataFrame({"d": [0.3]})
    expected = oracle.given({"a": 0.5, "b": 1.0}).score_samples(point)
    for known in ({"a": 0.5, "b": 1.0}, {"a": 0.5, "c": 1.0}, {0: 0.5, 2: 1.0}):
        np.testing.assert_allclose(model.given(known).score_samples(point), expected, rtol=1e-9)
    np.testing.assert_allclose(
        model.marginal(["d"]).score_samples(point), oracle.marginal(["d"]).score_samples(point), rtol=1e-9
    )
    with pytest.raises(ValueError, match="depends on several unknown columns"):
        model.given({"c": 1.0})
    with pytest.raises(ValueError, match="disagrees with the combinations"):
        model.given({"a": 0.5, "b": 1.0, "c": 2.0})
    with pytest.raises(ValueError, match="column 'c' is carried along and has no density of its own"):
        model.marginal(["c"])


def test_positions_are_those_of_the_table():
    model = carry(table().to_numpy())
    assert model.carried_ == {2: (1.0, {0: 2.0, 1: -1.0})}
    assert model.marginal([3]).names == ["x3"]
    assert model.given({0: 0.5}).marginal([3]).names == ["x3"]
    with pytest.raises(ValueError, match="there is no column 2"):
        model.given({0: 0.5}).marginal([2])


def test_a_stored_model_keeps_carried_columns(model, tmp_path):
    model.save(tmp_path / "model.kexpfam")
    loaded = kexpfam.load(tmp_path / "model.kexpfam")
    rows = table(3, 6)
    rows.loc[0, "c"] += 1.0
    np.testing.assert_array_equal(loaded.score_samples(rows), model.score_samples(rows))
    pd.testing.assert_frame_equal(loaded.sample(5, random_state=0), model.sample(5, random_state=0))
    assert (loaded.carried_, loaded.collinear) == (model.carried_, "carry")


def test_uses_of_the_density(model):
    rows = table(4, 40)
    rows.loc[0, "c"] += 1.0
    calibrated = kexpfam.KernelExpFamily(**SETTINGS, collinear="carry")
    with pytest.warns(CollinearWarning):
        calibrated.fit(table()).calibrate(table(5))
    assert calibrated.novelty(rows).argmin() == 0
    for use in (model.diagnose, model.copying, model.explain):
        with pytest.raises(ValueError, match="row 0 disagrees with the combinations of carried_"):
            use(rows)
    assert set(model.explain(rows[1:3]).names) == set(FREE)


def test_bounds_and_tables_without_combinations(oracle):
    with pytest.raises(ValueError, match='collinear="carry" excludes bounds'):
        KernelExpFamily(**SETTINGS, collinear="carry", bounds=(-20, 20)).fit(table())
    free = KernelExpFamily(**SETTINGS, collinear="carry").fit(table()[FREE])
    np.testing.assert_array_equal(free.score_samples(table()[FREE]), oracle.score_samples(table()[FREE]))
