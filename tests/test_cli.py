import sys

import numpy as np
import pandas as pd
import pytest
from oracles import with_constants

import kexpfam
from kexpfam import cli, diagnostics, estimators
from kexpfam.datasets import two_moons
from kexpfam.solvers import reference

FIXED = ["--solver", "exact", "--lengthscale", "1.0", "--rkhs-penalty", "0.01", "--quiet"]
ROWS = 40


@pytest.fixture(scope="module", autouse=True)
def quick_fits():
    with (
        with_constants(reference, COMPONENTS=6, DRAWS=1000, CANDIDATES=3000),
        with_constants(diagnostics, DRAWS=500, NODES=2048),
    ):
        yield


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command line and returns its exit code, standard output and standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["kexpfam", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def table(folder):
    """Return a CSV file with two columns of numbers and one of text."""
    data = two_moons().sample(ROWS, random_state=0)
    file = folder / "data.csv"
    pd.DataFrame(data, columns=["left", "right"]).assign(name="moon").to_csv(file, index=False)
    return file


@pytest.fixture(scope="module")
def model(folder, table):
    """Return a model file, fitted through the library."""
    data = pd.read_csv(table)[["left", "right"]].to_numpy()
    settings = {"solver": "exact", "lengthscale": 1.0, "rkhs_penalty": 0.01, "random_state": 0}
    estimator = estimators.KernelExpFamily(**settings).fit(data)
    estimator.column_names_ = ["left", "right"]
    estimator.save(folder / "model.kexpfam")
    return folder / "model.kexpfam"


def test_fit_writes_the_model_that_the_library_fits(run, table, model, tmp_path):
    output = tmp_path / "new" / "model.kexpfam"
    code, out, err = run("fit", table, "--columns", "left,right", "-o", output, *FIXED)
    assert (code, err) == (0, "")
    assert f"fitted {ROWS} rows of 2 columns" in out
    assert "mean log density of the training rows" in out
    data = pd.read_csv(table)[["left", "right"]].to_numpy()
    expected = kexpfam.load(model).score_samples(data)
    # The columns lie otherwise in memory, so that their sums are rounded in another order.
    np.testing.assert_allclose(kexpfam.load(output).score_samples(data), expected, atol=1e-8)


def test_fit_knows_the_built_in_sets_and_npy_files(run, tmp_path):
    code, out, _ = run("fit", "two-moons", "--rows", ROWS, "-o", tmp_path / "moons.kexpfam", *FIXED)
    assert code == 0
    assert f"fitted {ROWS} rows of 2 columns" in out
    np.save(tmp_path / "data.npy", two_moons().sample(ROWS, random_state=0))
    code, _, _ = run("fit", tmp_path / "data.npy", "-o", tmp_path / "copy.kexpfam", *FIXED)
    assert code == 0
    models = [kexpfam.load(tmp_path / name) for name in ("moons.kexpfam", "copy.kexpfam")]
    points = np.zeros((1, 2))
    np.testing.assert_allclose(models[0].score_samples(points), models[1].score_samples(points), atol=1e-8)


def test_score_writes_one_log_density_per_row(run, table, model, tmp_path):
    output = tmp_path / "scores.csv"
    code, out, err = run("score", model, table, "--columns", "left,right", "-o", output)
    assert (code, out) == (0, "")
    data = pd.read_csv(table)[["left", "right"]].to_numpy()
    expected = kexpfam.load(model).score_samples(data)
    np.testing.assert_array_equal(pd.read_csv(output)["log_density"], expected)
    assert f"mean log density {expected.mean():.4f} over {ROWS} rows" in err


def test_score_without_a_file_writes_to_standard_output(run, table, model):
    code, out, _ = run("score", model, table, "--columns", "left,right")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "log_density"
    assert len(lines) == ROWS + 1
    assert all(np.isfinite(float(line)) for line in lines[1:])


def test_sample_draws_what_the_library_draws_under_the_columns_names(run, model, tmp_path):
    output = tmp_path / "draws.csv"
    code, _, _ = run("sample", model, "-n", 25, "-o", output, "--seed", 3)
    assert code == 0
    draws = pd.read_csv(output)
    assert list(draws.columns) == ["left", "right"]
    np.testing.assert_array_equal(draws.to_numpy(), kexpfam.load(model).sample(25, random_state=3))


def test_sample_refines_on_request(run, model, tmp_path):
    code, _, _ = run("sample", model, "-n", 25, "--refine", 1, "-o", tmp_path / "draws.csv")
    assert code == 0
    draws = pd.read_csv(tmp_path / "draws.csv").to_numpy()
    np.testing.assert_array_equal(draws, kexpfam.load(model).sample(25, random_state=0, refine=1))


def test_plot_writes_a_picture(run, model, tmp_path):
    code, out, _ = run("plot", model, "-o", tmp_path / "model.png")
    assert code == 0
    assert "written to" in out
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_diagnose_prints_the_verdict(run, model):
    code, out, _ = run("diagnose", model)
    assert code == 0
    assert out.startswith("verdict:")
    assert str(kexpfam.load(model).diagnose(random_state=0)) == out.rstrip("\n")


def changed(table, tmp_path, row, column, value):
    """Return a copy of the table with one cell changed."""
    frame = pd.read_csv(table)[["left", "right"]].astype(object)
    frame.loc[row, column] = value
    frame.to_csv(tmp_path / "changed.csv", index=False)
    return tmp_path / "changed.csv"


BAD_FITS = {
    "no such file": (lambda t, d: [d / "nothing.csv"], "nothing.csv: no such file"),
    "unknown type": (lambda t, d: [d / "data.xlsx"], "unknown file type .xlsx"),
    "no such column": (lambda t, d: [t, "--columns", "left,middle"], "no column 'middle'; there are left, right, name"),
    "column of text": (lambda t, d: [t], "line 2: column 'name' is 'moon'"),
    "cell of text": (lambda t, d: [changed(t, d, 3, "right", "blue")], "line 5: column 'right' is 'blue'"),
    "cell of nan": (lambda t, d: [changed(t, d, 3, "right", "nan")], "line 5: column 'right' is 'nan'"),
    "infinite cell": (lambda t, d: [changed(t, d, 3, "right", "inf")], "line 5: column 'right' is 'inf'"),
    "empty cell": (lambda t, d: [changed(t, d, 3, "right", "")], "line 5: column 'right' is empty"),
    "unknown solver": (lambda t, d: [t, "--columns", "left,right", "--solver", "guess"], "unknown solver 'guess'"),
    "unknown kernel": (lambda t, d: [t, "--columns", "left,right", "--kernel", "guess"], "unknown kernel 'guess'"),
    "unknown base": (lambda t, d: [t, "--columns", "left,right", "--base", "guess"], "unknown base 'guess'"),
    "negative penalty": (
        lambda t, d: [t, "--columns", "left,right", "--rkhs-penalty", "-1"],
        "rkhs_penalty must be positive",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_FITS.values(), ids=BAD_FITS)
def test_what_the_user_can_mend_is_one_line_and_no_file(run, table, tmp_path, arguments, message):
    output = tmp_path / "model.kexpfam"
    # An option that is given twice takes its last value.
    code, out, err = run("fit", "-o", output, *FIXED, *arguments(table, tmp_path))
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert message in err
    assert not output.exists()


def test_a_damaged_model_is_one_line(run, model, table, tmp_path):
    broken = tmp_path / "broken.kexpfam"
    broken.write_bytes(model.read_bytes()[:200])
    for command in (["score", broken, table], ["sample", broken], ["diagnose", broken]):
        code, _, err = run(*command)
        assert code == 2
        assert len(err.splitlines()) == 1
        assert "cut short" in err


def test_a_table_of_another_width_is_one_line(run, model, table, tmp_path):
    output = tmp_path / "scores.csv"
    code, _, err = run("score", model, table, "--columns", "left", "-o", output)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "1 features, but KernelExpFamily is expecting 2" in err
    assert not output.exists()


def test_an_output_that_is_a_folder_is_refused_before_the_work(run, table, tmp_path):
    code, _, err = run("fit", table, "--columns", "left,right", "-o", tmp_path, *FIXED)
    assert code == 2
    assert "is a folder" in err


def test_a_picture_of_an_unknown_type_is_one_line(run, model, tmp_path):
    code, _, err = run("plot", model, "-o", tmp_path / "model.sketch")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "sketch" in err


def test_a_trace_that_is_not_there_is_one_line(run, model, tmp_path):
    code, _, err = run("plot", model, "--trace", "-o", tmp_path / "trace.png")
    assert code == 2
    assert "no saddle steps" in err
    assert not (tmp_path / "trace.png").exists()


def test_a_senseless_number_of_draws_is_one_line(run, model, tmp_path):
    code, _, err = run("sample", model, "-n", 0, "-o", tmp_path / "draws.csv")
    assert code == 2
    assert "n_samples must be a whole number of at least 1" in err
    assert not (tmp_path / "draws.csv").exists()


def test_help_lists_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("fit", "score", "sample", "plot", "diagnose"))


@pytest.mark.parametrize("command", ["fit", "score", "sample", "plot", "diagnose"])
def test_the_help_of_every_command_has_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Example" in out
    assert f"kexpfam {command}" in out


def test_an_unknown_command_or_option_is_a_usage_error(run):
    assert run("guess")[0] == 2
    assert run("fit", "--guess")[0] == 2
