import functools
import json
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

import kexpfam
from kexpfam import DDE, ConditionalKernelExpFamily, Kernel, KernelExpFamily, Search, cli, estimators
from kexpfam.cli.commands import FIRST_STEPS
from kexpfam.data.tables import read_table
from kexpfam.datasets import SYNTHETIC, two_moons
from kexpfam.fit.bases import BASES
from kexpfam.fit.candidates import MODELS
from kexpfam.fit.problem import SOLVERS
from kexpfam.fit.saddle import DoublyDual
from kexpfam.model.kernels import KERNELS
from kexpfam.paper.ascent import ContrastiveDivergence

FIXED = ["--solver", "exact", "--lengthscale", "1.0", "--rkhs-penalty", "0.01", "--quiet"]
ROWS = 40


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command and returns exit code, standard output and standard error."""

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
    settings = {
        "model": "kernel",
        "kernel": Kernel(lengthscale=1.0, rkhs_penalty=0.01),
        "solver": "exact",
        "random_state": 0,
    }
    estimator = KernelExpFamily(**settings).fit(data)
    estimator.column_names_ = ["left", "right"]
    estimator.save(folder / "model.kexpfam")
    return folder / "model.kexpfam"


def test_fit_writes_the_model_that_the_library_fits(run, table, model, tmp_path):
    output = tmp_path / "model.kexpfam"
    code, out, err = run("fit", table, "--columns", "left,right", "-o", output, *FIXED)
    assert (code, err) == (0, "")
    assert f"fitted {ROWS} rows of 2 columns: length scale 1, penalty 1e-02, base gaussian" in out
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


def test_explain_writes_a_line_for_each_cell(run, table, model, tmp_path):
    output = tmp_path / "cells.csv"
    code, _, _ = run("explain", model, table, "-o", output)
    assert code == 0
    found = pd.read_csv(output)
    assert list(found["row"]) == list(np.repeat(np.arange(ROWS), 2))
    data = pd.read_csv(table)[["left", "right"]].to_numpy()
    own = kexpfam.load(model).explain(data).surprise
    np.testing.assert_allclose(found["surprise"], -np.sort(-own, axis=1).ravel(), rtol=1e-6)


def test_monitor_goes_on_from_its_state_and_ends_with_one_after_an_alarm(run, table, model, tmp_path):
    data = pd.read_csv(table)[["left", "right"]]
    estimator = kexpfam.load(model).calibrate(data.to_numpy())
    estimator.save(tmp_path / "calibrated.kexpfam")
    state, figure = tmp_path / "state.kexpfam", tmp_path / "drift.png"
    code, out, _ = run("monitor", tmp_path / "calibrated.kexpfam", table, "--state", state, "--json")
    assert (code, json.loads(out)["rows"], json.loads(out)["alarm_row"]) == (0, ROWS, None)
    pd.concat([data + 3.0] * 3).to_csv(tmp_path / "moved.csv", index=False)
    arguments = (tmp_path / "calibrated.kexpfam", tmp_path / "moved.csv", "--state", state)
    code, out, _ = run("monitor", *arguments, "--figure", figure)
    assert code == 1 and "alarm at row" in out and figure.stat().st_size > 1000


@pytest.fixture(scope="module")
def expected(table, model):
    return kexpfam.load(model).score_samples(pd.read_csv(table)[["left", "right"]].to_numpy())


def scores(result):
    """Return the log densities that a command has written to standard output."""
    code, out, _ = result
    assert code == 0
    return [float(line) for line in out.splitlines()[1:]]


def test_score_finds_the_columns_by_name_wherever_they_are(run, table, model, expected, tmp_path):
    np.testing.assert_allclose(scores(run("score", model, table)), expected)
    pd.read_csv(table)[["name", "right", "left"]].to_csv(tmp_path / "swapped.csv", index=False)
    np.testing.assert_allclose(scores(run("score", model, tmp_path / "swapped.csv")), expected)
    np.testing.assert_allclose(scores(run("score", model, table, "--columns", "right, left")), expected)


def test_score_takes_columns_without_names_in_their_order(run, table, model, expected, tmp_path):
    np.save(tmp_path / "data.npy", pd.read_csv(table)[["left", "right"]].to_numpy())
    np.testing.assert_allclose(scores(run("score", model, tmp_path / "data.npy")), expected)
    np.save(tmp_path / "wide.npy", np.zeros((3, 3)))
    refused(run("score", model, tmp_path / "wide.npy"), "3 columns without names, 2 are needed: left, right")


def test_score_under_other_names_needs_to_be_told(run, table, model, expected, tmp_path):
    renamed = tmp_path / "renamed.csv"
    pd.read_csv(table).rename(columns={"left": "links", "right": "rechts"}).to_csv(renamed, index=False)
    refused(
        run("score", model, renamed),
        "no column 'left', 'right'; there are links, rechts, name. If they have other names",
    )
    np.testing.assert_allclose(scores(run("score", model, renamed, "--columns", "links,rechts")), expected)
    pd.read_csv(table).rename(columns={"left": "links"}).to_csv(renamed, index=False)
    refused(run("score", model, renamed, "--columns", "right,links"), "column right is not in its place")
    np.testing.assert_allclose(scores(run("score", model, renamed, "--columns", "links,right")), expected)


def test_a_model_without_names_does_not_guess_them(run, table, expected, model, tmp_path):
    nameless = kexpfam.load(model)
    del nameless.column_names_
    nameless.save(tmp_path / "nameless.kexpfam")
    refused(run("score", tmp_path / "nameless.kexpfam", table), "no column 'x0', 'x1'")
    found = scores(run("score", tmp_path / "nameless.kexpfam", table, "--columns", "left,right"))
    np.testing.assert_allclose(found, expected)
    _, out, _ = run("sample", tmp_path / "nameless.kexpfam", "-n", 1)
    assert out.splitlines()[0] == "x0,x1"


def test_a_model_of_a_frame_is_scored_without_a_warning(run, table, tmp_path):
    frame = pd.read_csv(table)[["left", "right"]]
    estimator = KernelExpFamily(
        model="kernel", kernel=Kernel(lengthscale=1.0, rkhs_penalty=0.01), solver="exact", random_state=0
    ).fit(frame)
    estimator.save(tmp_path / "frame.kexpfam")
    np.testing.assert_allclose(
        scores(run("score", tmp_path / "frame.kexpfam", table)), estimator.score_samples(frame)
    )


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
    "no such column": (
        lambda t, d: [t, "--columns", "left,middle"],
        "no column 'middle'; there are left, right, name",
    ),
    "column of text": (lambda t, d: [t], "constant column(s) name: a constant has no density"),
    "cell of text": (lambda t, d: [changed(t, d, 3, "right", "blue")], "row 4: column 'right' is 'blue'"),
    "cell of nan": (lambda t, d: [changed(t, d, 3, "right", "nan")], "without missing values"),
    "infinite cell": (lambda t, d: [changed(t, d, 3, "right", "inf")], "row 4: column 'right' is inf"),
    "empty cell": (lambda t, d: [changed(t, d, 3, "right", "")], "without missing values"),
    "unknown solver": (
        lambda t, d: [t, "--columns", "left,right", "--solver", "guess"],
        "unknown solver 'guess'",
    ),
    "unknown kernel": (
        lambda t, d: [t, "--columns", "left,right", "--kernel", "guess"],
        "unknown kernel 'guess'",
    ),
    "unknown base": (lambda t, d: [t, "--columns", "left,right", "--base", "guess"], "unknown base 'guess'"),
    "constant column": (
        lambda t, d: [changed(t, d, slice(None), "right", 1.0)],
        "constant column(s) right: a constant has no density",
    ),
    "columns of a built-in set": (
        lambda t, d: ["rings", "--columns", "x0"],
        "rings is a built-in set; --columns is for files",
    ),
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
    assert "1 columns were named where 2 are needed, for left, right" in err
    assert not output.exists()


def test_an_output_that_is_a_folder_is_refused_before_the_work(run, table, tmp_path):
    code, _, err = run("fit", table, "--columns", "left,right", "-o", tmp_path, *FIXED)
    assert code == 2
    assert "is a folder" in err


@pytest.mark.parametrize("name", ["draws.csv", "draws.npy", "draws.parquet", "draws.feather", "draws.tsv.gz"])
def test_tables_are_written_as_the_name_says(run, table, model, expected, tmp_path, name):
    code, out, err = run("sample", model, "-n", 25, "-o", tmp_path / name, "--seed", 3)
    assert (code, out) == (0, "")
    assert "25 rows written" in err
    found = read_table(tmp_path / name)
    assert found.names == (["x0", "x1"] if name.endswith(".npy") else ["left", "right"])
    np.testing.assert_array_equal(found.values, kexpfam.load(model).sample(25, random_state=3))
    assert run("score", model, table, "-o", tmp_path / name)[0] == 0
    np.testing.assert_allclose(read_table(tmp_path / name).values[:, 0], expected)


def test_tables_of_other_types_are_refused_before_the_work(run, table, model, tmp_path):
    for name in ("out.xlsx", "out", "out.html"):
        for command in (["sample", model], ["score", model, table]):
            refused(run(*command, "-o", tmp_path / name), "tables are written as .csv, .tsv")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_an_error(run, table, model, tmp_path):
    for command in (
        ["fit", table],
        ["score", model, table],
        ["sample", model],
        ["plot", model],
        ["report", model],
        ["compare", model, model, "--data", table],
    ):
        refused(run(*command, "-o", tmp_path / "new" / "out.csv"), "new does not exist; create it first")
    assert not (tmp_path / "new").exists()


def test_an_input_is_never_overwritten(run, table, model, one_target, labelled, tmp_path):
    copies = {}
    for path in (table, model, one_target, labelled):
        copies[path.name] = tmp_path / path.name
        copies[path.name].write_bytes(path.read_bytes())
    data, stored, conditional, rows = copies.values()
    csv = data.with_name("model.csv")
    csv.write_bytes(stored.read_bytes())
    (tmp_path / "link.csv").symlink_to(data)
    (tmp_path / "folder").mkdir()
    part = tmp_path / "folder" / "part.parquet"
    pd.read_csv(table).to_parquet(part)
    before = {path: path.read_bytes() for path in (*copies.values(), csv, part)}
    for command in (
        ["fit", data, "-o", data],
        ["fit", data, "-o", tmp_path / "link.csv"],
        ["fit", tmp_path / "link.csv", "-o", data],
        ["fit", tmp_path / "folder", "-o", part],
        ["fit", data, "--checkpoint", stored, "-o", stored],
        ["score", stored, data, "-o", data],
        ["score", csv, data, "-o", csv],
        ["score", stored, data, "--json", "-o", stored],
        ["sample", csv, "-o", csv],
        ["sample", conditional, "--at", rows, "-o", rows],
        ["plot", stored, "-o", stored],
        ["report", stored, "--data", data, "-o", data],
        ["compare", stored, csv, "--data", data, "-o", csv],
    ):
        refused(run(*command), "is an input and is not overwritten")
    assert {path: path.read_bytes() for path in before} == before


def test_a_picture_of_an_unknown_type_is_one_line(run, model, tmp_path):
    code, _, err = run("plot", model, "-o", tmp_path / "model.sketch")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "sketch" in err


def test_a_trace_that_is_not_there_is_one_line(run, model, tmp_path):
    code, _, err = run("plot", model, "--trace", "-o", tmp_path / "trace.png")
    assert code == 2
    assert "no steps to show" in err
    assert not (tmp_path / "trace.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dde", "contrastive"])
def test_the_trace_of_any_solver_with_steps_is_a_picture(run, table, tmp_path, name):
    players = DoublyDual(
        width=4, transport_depth=1, nu_depth=1, batch_size=16, transport_updates=1, nu_updates=1
    )
    solver = {"dde": DDE(steps=2, saddle=players), "contrastive": ContrastiveDivergence(steps=2)}[name]
    data = pd.read_csv(table)[["left", "right"]].to_numpy()
    estimator = KernelExpFamily(
        model="kernel", kernel=Kernel(lengthscale=1.0, rkhs_penalty=0.01), solver=solver, random_state=0
    ).fit(data)
    estimator.save(tmp_path / "model.kexpfam")
    code, _, err = run("plot", tmp_path / "model.kexpfam", "--trace", "-o", tmp_path / "trace.svg")
    assert (code, err) == (0, "")
    assert "<svg" in (tmp_path / "trace.svg").read_text()


def test_a_senseless_number_of_draws_is_one_line(run, model, tmp_path):
    code, _, err = run("sample", model, "-n", 0, "-o", tmp_path / "draws.csv")
    assert code == 2
    assert "n_samples must be a whole number of at least 1" in err
    assert not (tmp_path / "draws.csv").exists()


COMMANDS = ("fit", "score", "sample", "plot", "diagnose", "report", "compare", "reproduce")
HEAVY = {
    "jax",
    "pyarrow",
    "narwhals",
    "scipy",
    "sklearn",
    "matplotlib",
    "pandas",
    "equinox",
    "optax",
    "blackjax",
}


def test_help_lists_the_commands_and_what_to_do_first(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(command in out for command in COMMANDS)
    assert "First steps" in out
    assert all(f"kexpfam {step}" in out for step in FIRST_STEPS)


def test_without_arguments_a_few_lines_say_what_to_do(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    for step, what in FIRST_STEPS.items():
        assert any(line.split("  ", 2)[1:] and step in line and what in line for line in out.splitlines())
    assert out.rstrip().endswith("kexpfam --help")
    assert len(out.splitlines()) < 12


def test_what_is_not_for_daily_use_has_a_panel_of_its_own(run):
    _, out, _ = run("--help")
    daily, _, rest = out.partition("In a checkout of the repository")
    assert "reproduce" not in daily and "reproduce" in rest
    assert all(command in daily for command in COMMANDS if command != "reproduce")


def test_where_there_is_nothing_to_reproduce_from_it_is_not_listed(tmp_path):
    program = "import kexpfam; kexpfam.__file__ = '/a/b/c/d'; from kexpfam.cli import main; main()"
    command = [sys.executable, "-c", program, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "diagnose" in done.stdout and "reproduce" not in done.stdout


def test_the_version(run):
    assert run("--version") == (0, f"kexpfam {kexpfam.__version__}\n", "")


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "kexpfam", "--version"]
    assert subprocess.check_output(command, text=True) == f"kexpfam {kexpfam.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Example" in out
    assert f"kexpfam {command}" in out


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], ["fit", "--help"], ["guess"]], ids=" ".join
)
def test_help_waits_for_no_heavy_import(arguments):
    program = "\n".join(
        [
            "import sys",
            f"sys.argv = {['kexpfam', *arguments]!r}",
            "from kexpfam.cli import main",
            "try:",
            "    main()",
            "except SystemExit:",
            "    print('loaded:', *sys.modules)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.partition("loaded:")[2].split())
    assert "kexpfam.cli" in loaded
    assert not loaded & HEAVY


def test_every_name_in_the_help_of_fit_is_one_that_the_library_knows(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    _, out, _ = run("fit", "--help")
    listed = lambda names: set(names.replace(" or", ",").split(", ")) if names in out else set()
    assert listed("two-moons, rings or grid") == set(SYNTHETIC)
    assert listed("gaussian, box or mixture") == set(BASES)
    assert listed("auto, kernel, chain or mixture") == set(MODELS)
    assert {"auto"} < listed("auto, exact, dde") < set(SOLVERS)
    assert {"gaussian"} < listed("gaussian, laplace, matern32") < set(KERNELS)


BAD_USAGE = {
    "unknown command": (["guess"], "No such command 'guess'. See kexpfam --help."),
    "unknown option": (["fit", "--guess"], "No such option: --guess. See kexpfam fit --help."),
    "missing option": (["fit", "data.csv"], "Missing option '--output' / '-o'. See kexpfam fit --help."),
    "missing argument": (["score"], "See kexpfam score --help."),
    "no number": (["sample", "model", "-n", "many"], "Invalid value for '--number' / '-n'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_what_cannot_be_understood_is_one_line(run, arguments, message):
    refused(run(*arguments), message)


def test_a_message_is_shown_as_it_is_brackets_included(run, monkeypatch):
    def fail(path):
        raise ImportError("flows need more:\n  pip install 'kexpfam[flows]'")

    monkeypatch.setattr(kexpfam, "load", fail, raising=False)
    refused(run("sample", "model.kexpfam"), "error: flows need more: pip install 'kexpfam[flows]'")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(13, "Permission denied", "model.kexpfam"),
            "error: model.kexpfam: Permission denied",
        ),
        (FileNotFoundError("put the data there"), "error: put the data there"),
    ],
)
def test_what_the_system_refuses_is_one_line(run, monkeypatch, error, message):
    def fail(path):
        raise error

    monkeypatch.setattr(kexpfam, "load", fail, raising=False)
    refused(run("sample", "model.kexpfam"), message)


def test_a_warning_is_one_line_and_the_work_goes_on(run, model, monkeypatch):
    loaded = kexpfam.load(model)

    def load(path):
        warnings.warn("log Z is\nuncertain", UserWarning, stacklevel=1)
        return loaded

    monkeypatch.setattr(kexpfam, "load", load, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run("sample", model, "-n", 1)
    assert (code, err) == (0, "warning: log Z is uncertain\n")
    assert len(out.splitlines()) == 2


def test_a_defect_of_the_library_is_not_hidden(run, monkeypatch):
    monkeypatch.setattr(kexpfam, "load", lambda path: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        run("sample", "model.kexpfam")


FEATURES, TARGETS = ["depth", "slope"], {"one target": ["flow"], "two targets": ["flow", "load"]}
QUICK = Search(
    folds=2, penalties=(0.01,), condition_lengthscales=(1.0,), lengthscales=(1.0,), widths=(1.0,), rounds=1
)


@pytest.fixture
def quick_search(monkeypatch):
    """Leave little to choose: the command line has no option for how settings are searched for."""
    monkeypatch.setattr(kexpfam, "Kernel", functools.partial(Kernel, search=QUICK), raising=False)


@pytest.fixture(scope="module")
def labelled(folder):
    """Return a CSV file with features, targets and a column of text, in a mixed order."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (ROWS, 2))
    y = np.sin(X[:, :1]) + rng.normal(size=(ROWS, 2))
    frame = pd.DataFrame(
        {"flow": y[:, 0], "depth": X[:, 0], "load": y[:, 1], "slope": X[:, 1], "site": "river"}
    )
    frame.to_csv(folder / "labelled.csv", index=False)
    return folder / "labelled.csv"


@pytest.fixture(scope="module", params=TARGETS.values(), ids=TARGETS)
def targets(request):
    return request.param


def stored_conditional(folder, labelled, targets):
    """Return a model file of p(targets | features), fitted through the library with nothing to search."""
    frame = pd.read_csv(labelled)
    scales = {"condition_lengthscale": 1.0, "lengthscale": 1.0, "base_width": 1.0}
    kernel = Kernel(**scales, rkhs_penalty=0.01, power=False)
    estimator = ConditionalKernelExpFamily(model="kernel", kernel=kernel, solver="exact", random_state=0)
    estimator.fit(frame[FEATURES], frame[targets].to_numpy().squeeze())
    estimator.target_names_ = targets
    estimator.save(folder / f"{'-'.join(targets)}.kexpfam")
    return folder / f"{'-'.join(targets)}.kexpfam"


@pytest.fixture(scope="module")
def conditional(folder, labelled, targets):
    return stored_conditional(folder, labelled, targets)


@pytest.fixture(scope="module")
def one_target(folder, labelled):
    return stored_conditional(folder, labelled, TARGETS["one target"])


def expected_scores(conditional, labelled, targets):
    frame = pd.read_csv(labelled)
    return kexpfam.load(conditional).score_samples(frame[FEATURES], frame[targets].to_numpy())


def test_fit_with_a_target_stores_a_conditional_model_and_its_names(
    run, labelled, targets, tmp_path, quick_search
):
    output = tmp_path / "model.kexpfam"
    code, out, err = run(
        "fit", labelled, "--target", ",".join(targets), "--features", "depth, slope", "-o", output, *FIXED
    )
    assert (code, err) == (0, "")
    assert (
        f"fitted {ROWS} rows of {', '.join(targets)} given depth, slope: length scale 1, of the features"
        in out
    )
    estimator = kexpfam.load(output)
    assert (estimator.column_names_, estimator.target_names_) == (FEATURES, targets)
    frame = pd.read_csv(labelled)
    fitted_to, y = estimator.training_data_
    np.testing.assert_array_equal(fitted_to, frame[FEATURES])
    np.testing.assert_array_equal(y, frame[targets].to_numpy().squeeze())
    assert (
        f"mean log density of the training rows {estimator.score(fitted_to, y):.4f}; written to {output}"
        in out
    )
    assert (estimator.kernel.lengthscale, estimator.kernel.rkhs_penalty) == (1.0, 0.01)


def test_the_features_are_all_but_the_target_by_default(run, labelled, tmp_path, quick_search):
    np.save(tmp_path / "data.npy", pd.read_csv(labelled)[["depth", "flow", "slope"]].to_numpy())
    code, _, _ = run("fit", tmp_path / "data.npy", "--target", "x1", "-o", tmp_path / "model.kexpfam", *FIXED)
    assert code == 0
    estimator = kexpfam.load(tmp_path / "model.kexpfam")
    assert (estimator.column_names_, estimator.target_names_) == (["x0", "x2"], ["x1"])
    np.testing.assert_array_equal(estimator.training_data_[0], pd.read_csv(labelled)[FEATURES])


BAD_TARGETS = {
    "columns": (["--target", "flow", "--columns", "depth,flow"], "with --target use --features"),
    "features alone": (["--features", "depth"], "--features needs --target"),
    "target among the features": (
        ["--target", "flow", "--features", "depth,flow"],
        "column 'flow' is named twice",
    ),
    "no such target": (
        ["--target", "flood", "--features", "depth"],
        "no column 'flood'; there are flow, depth, load",
    ),
    "no such feature": (
        ["--target", "flow", "--features", "height"],
        "no column 'height'; there are flow, depth, load",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_TARGETS.values(), ids=BAD_TARGETS)
def test_a_target_that_cannot_be_used_is_one_line_and_no_file(run, labelled, tmp_path, arguments, message):
    refused(run("fit", labelled, "-o", tmp_path / "model.kexpfam", *FIXED, *arguments), message)
    assert not (tmp_path / "model.kexpfam").exists()


def refused(result, message):
    """Assert that a command ended with one line for the user."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert message in err


def test_a_target_leaves_a_feature_to_predict_from(run, tmp_path):
    np.save(tmp_path / "data.npy", np.zeros((ROWS, 2)))
    result = run("fit", tmp_path / "data.npy", "--target", "x0,x1", "-o", tmp_path / "model.kexpfam")
    refused(result, "no column is left for the features")


def test_the_built_in_sets_have_no_target(run, tmp_path):
    result = run("fit", "two-moons", "--target", "x1", "-o", tmp_path / "model.kexpfam")
    refused(result, "two-moons is a built-in set without a target")


def test_score_finds_the_columns_of_a_conditional_model_by_name(
    run, labelled, conditional, targets, tmp_path
):
    output = tmp_path / "scores.csv"
    code, out, err = run("score", conditional, labelled, "-o", output)
    assert (code, out) == (0, "")
    expected = expected_scores(conditional, labelled, targets)
    np.testing.assert_allclose(pd.read_csv(output)["log_density"], expected, atol=1e-8)
    assert f"mean log density {expected.mean():.4f} over {ROWS} rows" in err


def test_score_takes_columns_without_names_in_order_features_first(
    run, labelled, conditional, targets, tmp_path
):
    columns = [*FEATURES, *targets]
    np.save(tmp_path / "data.npy", pd.read_csv(labelled)[columns].to_numpy())
    code, _, _ = run("score", conditional, tmp_path / "data.npy", "-o", tmp_path / "scores.csv")
    assert code == 0
    expected = expected_scores(conditional, labelled, targets)
    np.testing.assert_allclose(pd.read_csv(tmp_path / "scores.csv")["log_density"], expected, atol=1e-8)
    np.save(tmp_path / "narrow.npy", np.zeros((3, 2)))
    message = f"2 columns without names, {len(columns)} are needed: {', '.join(columns)}"
    refused(run("score", conditional, tmp_path / "narrow.npy"), message)


def test_score_of_a_conditional_model_under_other_names(run, labelled, one_target, tmp_path):
    renamed = pd.read_csv(labelled).rename(columns={"depth": "tiefe", "slope": "hang", "flow": "fluss"})
    renamed.to_csv(tmp_path / "renamed.csv", index=False)
    refused(run("score", one_target, tmp_path / "renamed.csv"), "no column 'depth', 'slope', 'flow'")
    refused(
        run("score", one_target, tmp_path / "renamed.csv", "--columns", "tiefe,hang"),
        "2 columns were named where 3",
    )
    code, out, _ = run("score", one_target, tmp_path / "renamed.csv", "--columns", "tiefe,hang,fluss")
    assert code == 0
    expected = expected_scores(one_target, labelled, ["flow"])
    np.testing.assert_allclose([float(line) for line in out.splitlines()[1:]], expected, atol=1e-8)


def test_sample_draws_targets_at_each_row_of_a_table(run, labelled, conditional, targets, tmp_path):
    conditions = pd.read_csv(labelled)[["slope", "depth", "site"]][:3]
    conditions.to_csv(tmp_path / "new.csv", index=False)
    code, _, _ = run(
        "sample",
        conditional,
        "--at",
        tmp_path / "new.csv",
        "-n",
        4,
        "--seed",
        3,
        "-o",
        tmp_path / "draws.csv",
    )
    assert code == 0
    draws = pd.read_csv(tmp_path / "draws.csv")
    assert list(draws.columns) == ["row", *targets]
    assert draws["row"].dtype == np.int64
    np.testing.assert_array_equal(draws["row"], np.repeat([0, 1, 2], 4))
    expected = kexpfam.load(conditional).sample(conditions[FEATURES], 4, random_state=3)
    np.testing.assert_array_equal(draws["row"], expected["row"])
    np.testing.assert_allclose(draws[targets], expected.iloc[:, 1:])


def test_names_that_a_conditional_model_does_not_know_are_y(run, labelled, conditional, targets, tmp_path):
    nameless = kexpfam.load(conditional)
    vars(nameless).pop("target_names_", None)
    nameless.save(tmp_path / "nameless.kexpfam")
    pd.read_csv(labelled)[FEATURES][:1].to_csv(tmp_path / "new.csv", index=False)
    _, out, _ = run("sample", tmp_path / "nameless.kexpfam", "--at", tmp_path / "new.csv", "-n", 1)
    assert out.splitlines()[0] == ("row,y" if len(targets) == 1 else "row,y0,y1")


def test_sample_needs_at_for_a_conditional_model_and_for_no_other(run, model, labelled, one_target):
    refused(run("sample", one_target), "give a table of depth, slope with --at")
    refused(run("sample", model, "--at", labelled), "--at is for conditional models")


def test_plot_of_a_conditional_model_writes_a_picture(run, one_target, tmp_path):
    code, _, _ = run("plot", one_target, "-o", tmp_path / "model.png")
    assert code == 0
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    refused(run("plot", one_target, "--trace", "-o", tmp_path / "trace.png"), "no steps to show")


def test_diagnose_checks_the_calibration_of_a_conditional_model(run, labelled, one_target):
    code, out, _ = run("diagnose", one_target)
    assert code == 0
    assert "held-out log density" not in out
    code, out, _ = run("diagnose", one_target, "--data", labelled)
    assert code == 0
    frame = pd.read_csv(labelled)
    diagnosis = kexpfam.load(one_target).diagnose(frame[FEATURES], frame["flow"], random_state=0)
    assert f"over {ROWS} rows" in out
    assert str(diagnosis) == out.rstrip("\n")


def test_diagnose_checks_the_calibration_of_a_joint_model(run, model, table):
    code, out, _ = run("diagnose", model, "--data", table)
    assert code == 0
    diagnosis = kexpfam.load(model).diagnose(pd.read_csv(table)[["left", "right"]].to_numpy(), random_state=0)
    assert str(diagnosis) == out.rstrip("\n")
    assert "like draws?" in out and "coverage of regions" in out


@pytest.fixture(
    scope="module", params=["NeighbourDensity", "ConditionalKernelDensity", "LeastSquaresConditional"]
)
def baseline(request, folder, labelled):
    """Return a model file of p(flow | features) that is no kernel exponential family."""
    frame = pd.read_csv(labelled)
    estimator = getattr(estimators, request.param)().fit(frame[FEATURES], frame["flow"])
    estimator.target_names_ = ["flow"]
    estimator.save(folder / f"{request.param}.kexpfam")
    return folder / f"{request.param}.kexpfam"


def test_every_command_knows_a_conditional_baseline(run, baseline, labelled, tmp_path):
    frame, estimator = pd.read_csv(labelled), kexpfam.load(baseline)
    expected = estimator.score_samples(frame[FEATURES], frame["flow"])
    np.testing.assert_allclose(scores(run("score", baseline, labelled)), expected)
    refused(run("sample", baseline), "give a table of depth, slope with --at")
    frame[["slope", "depth"]][:2].to_csv(tmp_path / "new.csv", index=False)
    _, out, _ = run("sample", baseline, "--at", tmp_path / "new.csv", "-n", 2)
    assert [line.split(",")[0] for line in out.splitlines()] == ["row", "0", "0", "1", "1"]
    code, out, _ = run("diagnose", baseline, "--data", labelled)
    assert code == 0
    assert f"over {ROWS} rows" in out
    assert run("plot", baseline, "-o", tmp_path / "model.png")[0] == 0
    assert (tmp_path / "model.png").exists()
    refused(run("plot", baseline, "--trace", "-o", tmp_path / "trace.png"), "no steps to show")


REPRODUCTION = {
    "__init__.py": "",
    "specs.py": "EXPERIMENTS = ('first', 'second')\n"
    "def load_spec(name, quick=False): return f'{name}, quick {quick}'\n",
    "records.py": (
        "class Ledger:\n"
        "    def __init__(self, folder, name): self.path = folder / f'{name}.jsonl'\n"
        "    def __str__(self): return f'{self.path}, there {self.path.exists()}'\n"
    ),
    "runner.py": "def run(spec, ledger, *, jobs, report): print(spec, ledger, jobs, report)\n",
    "pages.py": (
        "def write(folder): return folder / 'README.md'\n"
        "def load_all(folder): return {'first': [{'status': 'ok'}, {'status': 'ValueError'}]}\n"
        "def with_headlines(page, records): return page.upper()\n"
    ),
}


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with a package that looks like the repository's, and records and a page beside it."""
    (tmp_path / "reproduction").mkdir()
    for name, content in REPRODUCTION.items():
        (tmp_path / "reproduction" / name).write_text(content)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "first.jsonl").touch()
    (tmp_path / "page.md").write_text("tables")
    return tmp_path


def reproduce(folder, *arguments):
    """Run ``kexpfam reproduce`` in a subprocess that does not import from its working directory."""
    program = "from kexpfam.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "reproduce", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_reproduce_runs_what_the_checkout_in_the_current_folder_has(checkout):
    code, out, err = reproduce(
        checkout, "all", "--folder", "kept", "--quick", "--jobs", 1, "--tables-in", "page.md", "--fresh"
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "first, quick True kept/first.jsonl, there False 1 None",
        "second, quick True kept/second.jsonl, there False 1 None",
        "kept/README.md written; 1 failed cells.",
    ]
    assert (checkout / "page.md").read_text() == "TABLES"


def test_reproduce_lists_the_experiments_that_there_are(checkout):
    refused(
        reproduce(checkout, "third"), "unknown experiment 'third': choose one of all, page, first, second."
    )


def test_reproduce_finds_the_checkout_that_the_library_is_in(tmp_path):
    refused(reproduce(tmp_path, "third"), "unknown experiment 'third': choose one of all, page, table1")


def test_reproduce_without_a_checkout_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        kexpfam, "__file__", str(tmp_path / "lib" / "site-packages" / "kexpfam" / "__init__.py")
    )
    refused(run("reproduce", "table1"), "kexpfam reproduce needs the repository")


def told(result):
    """Return what a command has written for machines."""
    code, out, _ = result
    assert code == 0
    return json.loads(out)


def test_machines_get_the_facts_of_a_fit(run, table, tmp_path):
    output = tmp_path / "model.kexpfam"
    facts = told(run("fit", table, "--columns", "left,right", "-o", output, "--json", *FIXED))
    model = kexpfam.load(output)
    assert facts["model"] == str(output)
    assert (facts["rows"], facts["columns"], facts["targets"]) == (ROWS, ["left", "right"], [])
    assert facts["rkhs_penalty"] == 0.01
    assert facts["candidates"][0]["name"] == "kernel" and facts["candidates"][0]["score"] is None
    assert facts["mean_log_density_of_training_rows"] == pytest.approx(model.score(model.training_data_))


def test_machines_get_log_densities(run, table, model, expected, tmp_path):
    scored = told(run("score", model, table, "--json"))
    np.testing.assert_array_equal(scored["log_density"], expected)
    assert (scored["rows"], scored["mean_log_density"]) == (ROWS, pytest.approx(expected.mean()))
    assert run("score", model, table, "--json", "-o", tmp_path / "scores.json")[0] == 0
    assert json.loads((tmp_path / "scores.json").read_text()) == scored


def test_machines_get_the_diagnosis(run, labelled, one_target):
    diagnosis = told(run("diagnose", one_target, "--data", labelled, "--json"))
    assert diagnosis["verdict"] in ("good", "fair", "poor")
    assert diagnosis["held_out_rows"]["value"] == ROWS
    assert len(diagnosis["pit"]["value"]) == ROWS
    assert set(diagnosis["sampler_kl"]) == {"value", "error", "level", "meaning"}
    assert diagnosis["kernel_status"]["value"] in ("CONVERGED", "GRID_TOO_COARSE", "RAN_ALL_STEPS")


def test_report_writes_a_page_and_says_the_verdict(run, one_target, labelled, tmp_path):
    code, out, _ = run("report", one_target, "--data", labelled, "-o", tmp_path / "page.html")
    assert code == 0
    assert "the fit is" in out and "page.html" in out
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.startswith("<!doctype html>") and f"{ROWS} held-out rows" in page


def test_compare_puts_models_side_by_side(run, table, model, tmp_path):
    other = tmp_path / "other.kexpfam"
    run(
        "fit",
        table,
        "--columns",
        "right,left",
        "-o",
        other,
        "--lengthscale",
        "0.1",
        "--rkhs-penalty",
        "1.0",
        "--quiet",
    )
    code, out, _ = run("compare", model, other, "--data", table, "-o", tmp_path / "page.html")
    assert code == 0
    assert str(model) in out and str(other) in out and "behind the best" in out
    assert "<svg" in (tmp_path / "page.html").read_text("utf-8")
    facts = told(run("compare", model, other, "--data", table, "--json"))
    rows = pd.read_csv(table)
    scores = {str(model): ["left", "right"], str(other): ["right", "left"]}
    for one in facts["models"]:
        mine = kexpfam.load(one["name"]).score(rows[scores[one["name"]]].to_numpy())
        assert one["score"] == pytest.approx(mine)
    refused(run("compare", model, "--data", table), "two models at least")
