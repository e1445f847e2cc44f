"""Frames of every library in and out: names, types, rows and the library itself come back."""

import builtins

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
from sklearn.base import clone

import kexpfam
from kexpfam.data.frames import Layout, as_table, framed, layout_of, row_name
from kexpfam.estimators import ConditionalKernelDensity, GaussianMixtureDensity, KernelDensity

ROWS = 30
VALUES = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32).astype(float)
LIBRARIES = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.table}
SERIES = {"pandas": pd.Series, "polars": pl.Series, "pyarrow": pa.ChunkedArray}
FRAME = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.Table}


@pytest.fixture(params=LIBRARIES)
def library(request):
    return request.param


def frame(library, values=VALUES, names=("left", "right", "load"), dtype=np.float32):
    return LIBRARIES[library](
        {name: column.astype(dtype) for name, column in zip(names, values.T, strict=True)}
    )


def content(native):
    """Return the names, types and values of a frame of any library."""
    found = nw.from_native(native)
    return list(found.columns), [str(found.schema[name]) for name in found.columns], found.to_numpy()


class TestLayouts:
    def test_a_frame_comes_back_as_it_was(self, library):
        names, dtypes, values = content(framed(list(VALUES.T), layout_of(frame(library))))
        assert names == ["left", "right", "load"]
        assert dtypes == ["Float32"] * 3
        np.testing.assert_array_equal(values, VALUES)

    def test_a_series_comes_back_as_it_was(self, library):
        column = nw.from_native(frame(library))["left"].to_native()
        layout = layout_of(column)
        found = framed([VALUES[:, 0]], layout)
        assert isinstance(found, SERIES[library])
        assert (layout_of(found), layout.series) == (layout, True)
        np.testing.assert_array_equal(nw.from_native(found, series_only=True).to_numpy(), VALUES[:, 0])

    def test_labels_and_whole_numbers_have_their_types_again(self, library):
        cells = {
            "kind": ["u", "v", "u"],
            "count": np.array([1, 2, 3], np.int16),
            "mean": np.array([1.0, 2.0, 3.0]),
        }
        native = (
            nw.from_native(LIBRARIES[library](cells))
            .with_columns(nw.col("kind").cast(nw.Categorical))
            .to_native()
        )
        columns = [np.array(["v", "u", "v"], object), np.array([7, 8, 9]), np.array([7.5, 8.5, 9.5])]
        found = nw.from_native(framed(columns, layout_of(native)))
        assert [str(dtype) for dtype in found.schema.values()] == ["Categorical", "Int16", "Float64"]
        assert found["kind"].to_list() == ["v", "u", "v"]
        assert found["count"].to_list() == [7, 8, 9]

    def test_numbers_between_whole_ones_are_not_rounded(self, library):
        whole = LIBRARIES[library]({"count": np.array([1, 2, 3])})
        assert content(framed([np.array([0.5])], layout_of(whole)))[2].tolist() == [[0.5]]

    @pytest.mark.parametrize(
        "names", [[0, 1, 2], [("a", "x"), ("a", "y"), ("b", "x")]], ids=["numbers", "levels"]
    )
    def test_names_that_are_no_texts_come_back_to_pandas(self, names):
        columns = pd.MultiIndex.from_tuples(names) if isinstance(names[0], tuple) else names
        original = pd.DataFrame(VALUES, columns=columns)
        layout = layout_of(original)
        pd.testing.assert_frame_equal(framed(list(VALUES.T), layout), original)
        assert layout.texts == [str(name) for name in names]

    def test_arrays_and_lists_have_no_layout(self):
        assert layout_of(VALUES) is layout_of([[1.0]]) is layout_of(None) is None
        assert as_table(VALUES) is VALUES

    def test_what_arrow_calls_otherwise_is_a_table_too(self):
        batch = pa.record_batch({"a": VALUES[:, 0]})
        assert layout_of(batch) == layout_of(pa.table({"a": VALUES[:, 0]}))
        assert isinstance(as_table(batch), pa.Table)
        np.testing.assert_array_equal(as_table(pa.array(VALUES[:, 0])), VALUES[:, 0])

    def test_a_frame_of_narwhals_is_the_frame_in_it(self):
        assert layout_of(nw.from_native(frame("polars"))) == layout_of(frame("polars"))

    def test_a_query_is_refused_with_what_to_do(self):
        with pytest.raises(TypeError, match=r"call collect\(\) on it first"):
            KernelDensity().fit(pl.LazyFrame({"a": VALUES[:, 0]}))

    def test_two_columns_of_one_name_are_refused_by_name(self):
        with pytest.raises(ValueError, match="several columns are called 'a': rename them"):
            KernelDensity().fit(pd.DataFrame(VALUES, columns=["a", "b", "a"]))

    def test_masked_cells_are_missing_cells(self):
        masked = np.ma.masked_array(np.arange(6).reshape(3, 2), mask=[[0, 0], [0, 1], [0, 0]])
        np.testing.assert_array_equal(as_table(masked), [[0.0, 1.0], [2.0, np.nan], [4.0, 5.0]])
        np.testing.assert_array_equal(as_table(np.ma.masked_array([1.0, 2.0])), [1.0, 2.0])

    def test_the_column_of_rows_has_a_name_of_its_own(self):
        assert (row_name(["a"]), row_name(["row", "row_"])) == ("row", "row__")

    def test_a_library_that_is_not_there_is_named(self, monkeypatch):
        ordinary = builtins.__import__

        def without_polars(name, *args, **kwargs):
            if name == "polars":
                raise ImportError(name)
            return ordinary(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_polars)
        with pytest.raises(ImportError, match=r"a polars frame, which is not installed.*transform='numpy'"):
            framed([VALUES[:, 0]], Layout("polars", ["a"], ["Float64"]))


@pytest.fixture(scope="module")
def densities():
    return {name: GaussianMixtureDensity(random_state=0).fit(frame(name)) for name in LIBRARIES}


@pytest.fixture(scope="module")
def conditionals():
    return {name: ConditionalKernelDensity(random_state=0).fit(*split(frame(name))) for name in LIBRARIES}


def split(native, targets=("load",)):
    table = nw.from_native(native)
    chosen = table[targets[0]] if len(targets) == 1 else table[list(targets)]
    return table[["left", "right"]].to_native(), chosen.to_native()


class TestDensities:
    def test_draws_are_a_frame_like_the_data(self, densities, library):
        draws = densities[library].sample(5, random_state=1)
        assert isinstance(draws, FRAME[library])
        names, dtypes, values = content(draws)
        assert (names, dtypes) == (["left", "right", "load"], ["Float32"] * 3)
        plain = clone(densities[library]).fit(VALUES).sample(5, random_state=1)
        assert isinstance(plain, np.ndarray)
        np.testing.assert_allclose(values, plain, rtol=1e-5)

    def test_scores_are_the_same_numbers_whatever_the_frame(self, densities, library):
        expected = clone(densities[library]).fit(VALUES).score_samples(VALUES)
        np.testing.assert_allclose(densities[library].score_samples(frame(library)), expected)

    def test_names_and_library_outlive_a_file(self, densities, library, tmp_path):
        densities[library].save(tmp_path / "model.kexpfam")
        again = kexpfam.load(tmp_path / "model.kexpfam")
        assert again.column_names_ == ["left", "right", "load"]
        first, second = (content(model.sample(3, random_state=1)) for model in (densities[library], again))
        assert first[:2] == second[:2]
        np.testing.assert_array_equal(first[2], second[2])

    def test_a_reordered_frame_is_refused(self, densities, library):
        other = nw.from_native(frame(library))[["right", "left", "load"]].to_native()
        with pytest.raises(ValueError, match="must be in the same order"):
            densities[library].score_samples(other)

    def test_numeric_headers_are_names(self):
        model = GaussianMixtureDensity(random_state=0).fit(pd.DataFrame(VALUES))
        assert model.column_names_ == ["0", "1", "2"]
        assert list(model.sample(2, random_state=0).columns) == [0, 1, 2]

    def test_names_of_frames_are_forgotten_by_a_fit_to_an_array(self):
        model = GaussianMixtureDensity(random_state=0).fit(frame("pandas"))
        model.fit(VALUES)
        assert not hasattr(model, "column_names_")
        assert isinstance(model.sample(2), np.ndarray)

    def test_masked_rows_are_not_fitted_in_silence(self):
        with pytest.raises(ValueError, match="NaN"):
            GaussianMixtureDensity().fit(np.ma.masked_array(VALUES, mask=VALUES > 1.0))


class TestSetOutput:
    @pytest.mark.parametrize("wanted", LIBRARIES)
    def test_the_library_that_is_asked_for(self, densities, library, wanted):
        model = clone(densities[library]).set_output(transform=wanted)
        fitted = clone(model).fit(VALUES)  # a clone was told too
        assert isinstance(fitted.sample(2, random_state=0), FRAME[wanted])
        assert content(fitted.sample(2, random_state=0))[0] == ["x0", "x1", "x2"]
        fitted.fit(frame(library))
        assert content(fitted.sample(2, random_state=0))[:2] == (["left", "right", "load"], ["Float32"] * 3)

    def test_arrays_always_and_what_came_in_again(self, library):
        model = GaussianMixtureDensity(random_state=0).set_output(transform="numpy").fit(frame(library))
        assert isinstance(model.sample(2), np.ndarray)
        assert isinstance(model.set_output().sample(2), np.ndarray)
        assert isinstance(model.set_output(transform="default").sample(2), FRAME[library])

    def test_the_setting_of_scikit_learn_counts(self, densities):
        with sklearn.config_context(transform_output="polars"):
            assert isinstance(densities["pandas"].sample(2), pl.DataFrame)
        assert isinstance(densities["pandas"].sample(2), pd.DataFrame)

    def test_an_unknown_form_is_refused(self):
        with pytest.raises(
            ValueError, match="unknown output 'arrow': choose one of default, numpy, pandas, polars, pyarrow"
        ):
            GaussianMixtureDensity().set_output(transform="arrow")


class TestConditionals:
    def test_predictions_are_a_series_of_the_targets_name(self, conditionals, library):
        X, y = split(frame(library))
        found = conditionals[library].predict(X)
        assert isinstance(found, SERIES[library])
        assert library == "pyarrow" or found.name == "load"
        plain = (
            ConditionalKernelDensity(random_state=0).fit(VALUES[:, :2], VALUES[:, 2]).predict(VALUES[:, :2])
        )
        np.testing.assert_allclose(nw.from_native(found, series_only=True).to_numpy(), plain, rtol=1e-5)

    def test_predictions_of_several_targets_are_a_frame(self, library):
        X, y = split(frame(library), ("load", "right"))
        found = ConditionalKernelDensity(random_state=0).fit(X, y).predict(X)
        assert isinstance(found, FRAME[library])
        assert content(found)[0] == ["load", "right"]

    def test_draws_come_with_the_row_they_belong_to(self, conditionals, library):
        X, _ = split(frame(library, VALUES[:4]))
        draws = conditionals[library].sample(X, 3, random_state=0)
        names, _, values = content(draws)
        assert names == ["row", "y" if library == "pyarrow" else "load"]  # an array of Arrow has no name
        np.testing.assert_array_equal(values[:, 0], np.repeat(np.arange(4), 3))
        plain = conditionals[library].set_output(transform="numpy").sample(X, 3, random_state=0)
        conditionals[library].set_output(transform="default")
        np.testing.assert_allclose(values[:, 1].reshape(4, 3), plain, rtol=1e-5)

    def test_the_index_of_pandas_comes_back(self, conditionals):
        X, _ = split(frame("pandas", VALUES[:2]))
        X.index = ["first", "second"]
        assert list(conditionals["pandas"].predict(X).index) == ["first", "second"]
        assert list(conditionals["pandas"].sample(X, 2).index) == ["first", "first", "second", "second"]

    def test_arrays_give_arrays(self):
        model = ConditionalKernelDensity(random_state=0).fit(VALUES[:, :2], VALUES[:, 2])
        assert isinstance(model.predict(VALUES[:3, :2]), np.ndarray)
        assert model.sample(VALUES[:3, :2], 4).shape == (3, 4)

    def test_another_library_than_that_of_the_fit_gets_its_own_back(self, conditionals):
        X, _ = split(frame("polars"))
        assert isinstance(conditionals["pandas"].predict(X), pl.Series)

    def test_names_of_targets_outlive_a_file(self, conditionals, tmp_path):
        conditionals["polars"].save(tmp_path / "model.kexpfam")
        again, (X, _) = kexpfam.load(tmp_path / "model.kexpfam"), split(frame("polars"))
        assert again.target_names_ == ["load"]
        assert again.predict(X).name == "load"

    def test_one_condition_by_name(self, conditionals, library):
        model, points = conditionals[library], np.linspace(-1.0, 1.0, 5)
        X, _ = split(frame(library, VALUES[:1]))
        expected = model.given(X).score_samples(points)
        named = {"right": VALUES[0, 1], "left": VALUES[0, 0]}
        np.testing.assert_allclose(model.given(named).score_samples(points), expected)
        np.testing.assert_allclose(model.given(pd.Series(named)).score_samples(points), expected)
        with pytest.raises(ValueError, match=r"given\(\) needs left, right; missing: right"):
            model.given({"left": 0.0})

    def test_masked_targets_are_not_fitted_in_silence(self):
        masked = np.ma.masked_array(VALUES[:, 2], mask=VALUES[:, 2] > 0.0)
        with pytest.raises(ValueError, match="NaN"):
            ConditionalKernelDensity(random_state=0).fit(VALUES[:, :2], masked)


def test_pictures_of_a_model_of_a_frame(densities):
    labels = [axis.get_xlabel() for axis in densities["polars"].plot().axes]
    assert {"left", "right", "load"} <= set(labels)
