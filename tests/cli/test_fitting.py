"""The command ``fit`` on row blocks gives the same model as the library."""

import numpy as np
import pandas
import pytest

from kexpfam import Kernel, KernelExpFamily, load
from kexpfam.cli.fitting import fitted, training
from kexpfam.cli.inputs import ColumnOptions
from kexpfam.data.blocks import RowBlocks
from kexpfam.data.text import Reading

EVERY = ColumnOptions(None, None, None, None)
SETTINGS = {"model": "kernel", "kernel": Kernel(lengthscale=0.7, rkhs_penalty=1e-2), "random_state": 0}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    return pandas.DataFrame(rng.normal(size=(600, 3)), columns=["a", "b", "y"]).assign(
        w=rng.integers(1, 4, 600).astype(float)
    )


@pytest.fixture
def folder(table, tmp_path):
    for place in range(3):
        table[place * 200 : (place + 1) * 200].to_parquet(tmp_path / f"{place}.parquet", index=False)
    return tmp_path


def rows(found):
    """Return what comes out of the blocks, all together, as arrays."""
    parts = [block if isinstance(block, tuple) else (block,) for block in found.rows[0]]
    return [np.concatenate([np.asarray(part) for part in column]) for column in zip(*parts, strict=True)]


def test_a_folder_is_read_by_roles(folder, table):
    found = training(folder, ColumnOptions(None, ["y"], None, "w"), Reading(gaps="keep"))
    X, y = rows(found)
    assert (found.features, found.targets) == (["a", "b"], ["y"])
    assert np.array_equal(X, table[["a", "b"]])
    assert np.array_equal(y, table.y)
    assert np.array_equal(found.weights, table.w)
    assert found.rows[0].rows == 600


def test_rows_with_gaps_are_dropped_where_that_is_asked_for(folder, table):
    spoilt = table[:200].copy()
    spoilt.loc[3, "a"], spoilt.loc[7, "y"] = np.nan, np.nan
    spoilt.to_parquet(folder / "0.parquet", index=False)
    with pytest.warns(UserWarning, match="2 of 600 rows have missing cells"):
        X, y = rows(training(folder, ColumnOptions(None, ["y"], ["a"], None), Reading(gaps="drop")))
    kept = np.delete(np.arange(600), [3, 7])
    assert np.array_equal(X[:, 0], table.a[kept])
    assert np.array_equal(y, table.y[kept])


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_a_file_goes_by_blocks_from_some_size_on(suffix, table, tmp_path):
    few = tmp_path / f"few{suffix}"
    many = tmp_path / f"many{suffix}"
    for path, count in ((few, 600), (many, 100_200)):
        values = np.tile(table.to_numpy(), (count // 600, 1))
        np.save(path, values) if suffix == ".npy" else pandas.DataFrame(
            values, columns=table.columns
        ).to_parquet(path)
    assert isinstance(training(few, EVERY, Reading()).rows[0], np.ndarray)
    wanted = ["x1", "x0"] if suffix == ".npy" else ["b", "a"]
    found = training(many, EVERY._replace(columns=wanted), Reading())
    assert found.features == wanted
    assert np.array_equal(rows(found)[0][:600], table[["b", "a"]])
    assert isinstance(found.rows[0], RowBlocks)


def test_the_model_is_that_of_the_table(folder, table, tmp_path):
    names = ["a", "b"]
    model, what, score = fitted(training(folder, EVERY._replace(columns=names), Reading()), SETTINGS)
    expected = KernelExpFamily(**SETTINGS).fit(table[names].to_numpy())
    points = table[names].to_numpy()[:5]
    assert np.allclose(model.score_samples(points), expected.score_samples(points), atol=1e-12)
    assert score == pytest.approx(expected.score(table[names].to_numpy()))
    model.save(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert (what, loaded.column_names_, loaded.n_rows_) == ("2 columns", names, 600)
    assert isinstance(loaded.sample(3, random_state=0), np.ndarray)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (EVERY._replace(columns=["a", "q"]), "no column 'q'; there are a, b, y, w"),
        (ColumnOptions(None, ["a"], ["a"], None), "column 'a' is named twice"),
        (ColumnOptions(None, ["a", "b", "y", "w"], None, None), "no column is left for the features"),
        (ColumnOptions(["a"], ["y"], None, None), "--columns is for densities without a target"),
    ],
)
def test_names_that_cannot_be_are_refused(folder, chosen, message):
    with pytest.raises(ValueError, match=message):
        training(folder, chosen, Reading())


class TestRoles:
    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "data.csv").write_text("a,b,c\n1,2,3\n4,5,6\n")
        return tmp_path / "data.csv"

    @pytest.mark.parametrize(
        ("targets", "features", "expected"),
        [
            (["b"], None, (["a", "c"], [[1, 3], [4, 6]], [2, 5])),
            (["b"], ["c", "a"], (["c", "a"], [[3, 1], [6, 4]], [2, 5])),
            (["c", "a"], None, (["b"], [[2], [5]], [[3, 1], [6, 4]])),
        ],
    )
    def test_features_are_named_or_all_other_columns(self, path, targets, features, expected):
        found = training(path, ColumnOptions(None, targets, features, None), Reading())
        X, y = found.rows
        assert (found.features, X.tolist(), y.tolist()) == expected
        assert found.targets == targets

    @pytest.mark.parametrize(
        ("targets", "features", "message"),
        [
            (["b"], ["a", "b"], "column 'b' is named twice"),
            (["b", "b"], None, "column 'b' is named twice"),
            (["d"], None, "no column 'd'; there are a, b, c"),
            (["b"], ["d"], "no column 'd'; there are a, b, c"),
            (["a", "b", "c"], None, "no column is left for the features; there are a, b, c"),
            (["a"], [], "no column is left for the features; there are a"),
        ],
    )
    def test_names_without_a_role_are_refused(self, path, targets, features, message):
        with pytest.raises(ValueError, match=message):
            training(path, ColumnOptions(None, targets, features, None), Reading())

    def test_columns_without_a_role_are_not_read(self, tmp_path):
        (tmp_path / "data.csv").write_text("a,b,c\n1,2,x\n")
        found = training(tmp_path / "data.csv", ColumnOptions(None, ["b"], ["a"], None), Reading())
        assert found.rows[0].tolist() == [[1.0]]
        with pytest.raises(ValueError, match="column 'c' is 'x'"):
            training(tmp_path / "data.csv", ColumnOptions(None, ["b"], None, None), Reading())
