"""The command line and the tables that people have: forms of text, pipes, gaps, weights."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

import kexpfam
from kexpfam import Kernel, KernelExpFamily, cli
from kexpfam.cli import inputs, results
from kexpfam.cli.fitting import training
from kexpfam.data import text as texts
from kexpfam.data.tables import DroppedRowsWarning
from kexpfam.estimators import ConditionalKernelDensity, GaussianMixtureDensity

FIXED = ["--solver", "exact", "--lengthscale", "1.0", "--rkhs-penalty", "0.01", "--quiet"]
ROWS = 40
VALUES = np.round(np.random.default_rng(0).normal(size=(ROWS, 2)), 3)
FRAME = pd.DataFrame(VALUES, columns=["left", "right"])


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command and returns exit code, standard output and standard error."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["kexpfam", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped, warnings.catch_warnings():
            warnings.simplefilter("always", DroppedRowsWarning)
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return call


def shell(command, folder, stdin=b""):
    """Return what a line of the shell does, kexpfam being the one under test."""
    program = f"{sys.executable} -c 'from kexpfam.cli import main; main()'"
    line = re.sub(r"(?<!\.)kexpfam ", f"{program} ", command)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], cwd=folder, input=stdin, capture_output=True, check=False
    )
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def model(folder):
    GaussianMixtureDensity(random_state=0).fit(FRAME).save(folder / "model.kexpfam")
    return folder / "model.kexpfam"


@pytest.fixture(scope="module")
def conditional(folder):
    ConditionalKernelDensity(random_state=0).fit(FRAME[["left"]], FRAME["right"]).save(
        folder / "conditional.kexpfam"
    )
    return folder / "conditional.kexpfam"


@pytest.fixture(scope="module")
def expected(model):
    return kexpfam.load(model).score_samples(FRAME)


def scores(result):
    code, out, _ = result
    assert code == 0, result
    return [float(line) for line in out.splitlines()[1:]]


# The same table in the forms of several programs and countries: file name and options.
FORMS = {
    "semicolons and commas": (lambda f: f.to_csv(sep=";", decimal=",", index=False), "data.csv", []),
    "told": (
        lambda f: f.to_csv(sep=";", decimal=",", index=False),
        "data.csv",
        ["--separator", ";", "--decimal", ","],
    ),
    "tabs": (lambda f: f.to_csv(sep="\t", index=False), "data.tsv", []),
    "tabs, told": (lambda f: f.to_csv(sep="\t", index=False), "data.csv", ["--separator", "tab"]),
    "spaces": (lambda f: f.to_csv(sep=" ", index=False), "data.txt", ["--separator", "space"]),
    "single quotes": (
        lambda f: f.to_csv(quotechar="'", quoting=1, index=False),
        "data.csv",
        ["--quote", "'"],
    ),
    "no header": (lambda f: f.to_csv(header=False, index=False), "data.csv", []),
    "no header, told": (lambda f: f.to_csv(header=False, index=False), "data.csv", ["--no-header"]),
    "numbers for names": (
        lambda f: f.set_axis([1, 2], axis=1).to_csv(index=False),
        "data.csv",
        ["--header", "--columns", "1,2"],
    ),
}


@pytest.mark.parametrize(("text", "name", "options"), FORMS.values(), ids=FORMS)
def test_score_reads_a_table_in_every_form(run, model, expected, tmp_path, text, name, options):
    (tmp_path / name).write_text(text(FRAME))
    np.testing.assert_allclose(scores(run("score", model, tmp_path / name, *options)), expected)


def test_a_compressed_table_and_standard_input(run, model, expected, tmp_path):
    text = FRAME.to_csv(index=False).encode()
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(text))
    np.testing.assert_allclose(scores(run("score", model, tmp_path / "data.csv.gz")), expected)
    np.testing.assert_allclose(scores(run("score", model, "-", stdin=text)), expected)
    np.testing.assert_allclose(scores(run("score", model, "-", stdin=gzip.compress(text))), expected)


def test_rows_with_gaps_are_refused_or_dropped(run, model, expected, tmp_path):
    gappy = FRAME.astype(object)
    gappy.loc[1, "right"], gappy.loc[5, "left"] = "", "unknown"
    gappy.to_csv(tmp_path / "gappy.csv", index=False)
    code, _, err = run("score", model, tmp_path / "gappy.csv", "--missing", "unknown")
    assert code == 2
    assert "row 2: column 'right' is missing, as are cells of 2 of 40 rows" in err
    assert "--drop-missing" in err
    result = run("score", model, tmp_path / "gappy.csv", "--missing", "unknown", "--drop-missing")
    np.testing.assert_allclose(scores(result), np.delete(expected, [1, 5]))
    assert "warning: " in result[2]
    assert "2 of 40 rows have missing cells and are dropped" in result[2]
    code, _, err = run("score", model, tmp_path / "gappy.csv")
    assert (code, len(err.splitlines())) == (2, 1)
    assert (
        "row 6: column 'left' is 'unknown', not a number; treat such cells as missing (--missing 'unknown')"
        in err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decimal", "x"], "--decimal must be '.' or ','"),
        (["--separator", ";;"], "the separator must be one character"),
        (["--encoding", "klingon"], "unknown encoding: klingon; --encoding takes utf-8"),
        (["--columns", "left,left"], "2 columns were named|is not in its place|named twice"),
    ],
)
def test_options_that_make_no_sense_are_one_line(run, model, tmp_path, options, message):
    FRAME.to_csv(tmp_path / "data.csv", index=False)
    code, out, err = run("score", model, tmp_path / "data.csv", *options)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert any(part in err for part in message.split("|"))


def test_every_command_that_reads_has_the_same_options(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("fit", "score", "sample", "diagnose", "report", "compare"):
        _, out, _ = run(command, "--help")
        for option in (
            "--separator",
            "--decimal",
            "--quote",
            "--no-header",
            "--encoding",
            "--comment",
            "--missing",
            "--drop-missing",
        ):
            assert option in out, (command, option)
        assert "reading" not in out.split("How the table is read")[0].replace("reading ", "")


def test_sample_and_diagnose_read_their_tables_the_same_way(run, conditional, tmp_path):
    FRAME.to_csv(tmp_path / "data.csv", sep=";", decimal=",", index=False)
    plain = run("sample", conditional, "--at", tmp_path / "data.csv", "-n", 2)
    FRAME.to_csv(tmp_path / "plain.csv", index=False)
    assert plain == run("sample", conditional, "--at", tmp_path / "plain.csv", "-n", 2)
    assert plain == run(
        "sample", conditional, "--at", "-", "-n", 2, stdin=(tmp_path / "data.csv").read_bytes()
    )
    assert len(plain[1].splitlines()) == 2 * ROWS + 1
    found = [run("diagnose", conditional, "--data", tmp_path / name) for name in ("data.csv", "plain.csv")]
    assert found[0] == found[1]
    assert found[0][0] == 0


def test_fit_reads_weights_from_a_column(run, tmp_path):
    weights = np.random.default_rng(1).integers(0, 3, size=ROWS)
    FRAME.assign(w=weights).to_csv(tmp_path / "data.csv", index=False)
    code, out, _ = run(
        "fit", tmp_path / "data.csv", "--weight", "w", "-o", tmp_path / "model.kexpfam", *FIXED
    )
    assert code == 0
    assert "of 2 columns" in out
    settings = {
        "model": "kernel",
        "kernel": Kernel(lengthscale=1.0, rkhs_penalty=0.01),
        "solver": "exact",
        "random_state": 0,
    }
    expected = KernelExpFamily(**settings).fit(VALUES, sample_weight=weights)
    loaded = kexpfam.load(tmp_path / "model.kexpfam")
    assert loaded.column_names_ == ["left", "right"]
    np.testing.assert_allclose(loaded.score_samples(VALUES), expected.score_samples(VALUES), atol=1e-6)
    code, _, err = run("fit", "rings", "--weight", "w", "-o", tmp_path / "model.kexpfam")
    assert "rings is a built-in set; --weight is for files" in err
    code, _, err = run(
        "fit",
        tmp_path / "data.csv",
        "--weight",
        "left",
        "--columns",
        "left,right",
        "-o",
        tmp_path / "model.kexpfam",
    )
    assert "column 'left' is named twice; a column is a feature, a target or a weight" in err


def test_the_parts_of_a_conditional_table(tmp_path):
    FRAME.assign(w=1.0, y=0.5).to_csv(tmp_path / "data.csv", index=False)
    chosen = inputs.ColumnOptions(None, ["y"], None, "w")
    found = training(tmp_path / "data.csv", chosen, inputs._reading())
    assert (found.features, found.targets) == (["left", "right"], ["y"])
    np.testing.assert_array_equal(found.weights, np.ones(ROWS))
    np.testing.assert_array_equal(found.rows[0], VALUES)
    np.testing.assert_array_equal(found.rows[1], np.full(ROWS, 0.5))


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (["share=bounded:0:1", "a=b=count"], {"share": "bounded:0:1", "a=b": "count"}),
        (None, {}),
        (["share"], None),
        (["=real"], None),
        (["a="], None),
        (["a=real", "a=count"], None),
    ],
)
def test_kinds_by_name(given, kinds):
    if kinds is not None:
        assert inputs.kinds_of(given) == kinds
        return
    with pytest.raises(ValueError, match="--kind "):
        inputs.kinds_of(given)


MIXED = "kind,share,code\nu,0.5,1\nv,,2\nu,0.25,1\n"


class TestKinds:
    def test_kinds_are_those_of_columns_or_of_targets(self):
        kinds = {"share": "bounded:0:1", "count": "count"}
        assert inputs.ColumnOptions(None, None, None, None, kinds).settings() == {"columns": kinds}
        assert inputs.ColumnOptions(None, ["count"], None, None, kinds).settings() == {
            "columns": {"share": "bounded:0:1"},
            "target_columns": {"count": "count"},
        }
        assert inputs.ColumnOptions(None, ["y"], None, None).settings() == {
            "columns": None,
            "target_columns": None,
        }

    def test_a_fit_gets_labels_gaps_and_kinds(self, run, monkeypatch, tmp_path):
        fits = []

        class Recorder(KernelExpFamily):
            def fit(self, X, sample_weight=None, time_budget=None):
                fits.append((self.column_names_, X.tolist(), self.columns))
                raise ValueError("seen")

        monkeypatch.setattr("kexpfam.cli.fitting.KernelExpFamily", Recorder)
        (tmp_path / "data.csv").write_text(MIXED)
        options = ["--kind", "share=bounded:0:1", "--kind", "code=category", "-o", tmp_path / "model.kexpfam"]
        assert "seen" in run("fit", tmp_path / "data.csv", *options)[2]
        names, rows, kinds = fits[0]
        assert (names, kinds) == (["kind", "share", "code"], {"share": "bounded:0:1", "code": "category"})
        assert rows[0] == ["u", 0.5, "1"]
        assert rows[1][0] == "v"
        assert np.isnan(rows[1][1])
        assert (
            "2 of 3" not in run("fit", tmp_path / "data.csv", *options, "--drop-missing")[2].splitlines()[-1]
        )
        assert fits[1][1] == [["u", 0.5, "1"], ["u", 0.25, "1"]]

    def test_a_model_that_knows_no_kinds_is_given_numbers_only(self, run, model, tmp_path):
        FRAME.assign(left="far").to_csv(tmp_path / "data.csv", index=False)
        code, _, err = run("score", model, tmp_path / "data.csv")
        assert code == 2
        assert "column 'left' is 'far', not a number" in err

    def test_the_labels_of_a_model_are_read_as_they_are(self):
        class Labelled:
            columns_ = {"code": kexpfam.Category(("01", "02")), "a": kexpfam.Bounded(0, 1)}
            target_columns_ = {"kind": kexpfam.Category(("u", "v"))}

        found = inputs.reading_for(Labelled(), inputs._reading())
        assert (found.labels, found.gaps, found.texts) == (["code", "kind"], "keep", False)

    def test_a_kind_that_is_none_is_one_line(self, run, tmp_path):
        FRAME.to_csv(tmp_path / "data.csv", index=False)
        for kind, message in (
            ("left=round", "unknown kind of column 'round'"),
            ("up=real", "there is no column 'up'"),
        ):
            code, _, err = run("fit", tmp_path / "data.csv", "--kind", kind, "-o", tmp_path / "model.kexpfam")
            assert (code, len(err.splitlines())) == (2, 1)
            assert message in err
        assert not (tmp_path / "model.kexpfam").exists()
        assert (
            "--kind is for files"
            in run("fit", "rings", "--kind", "x0=real", "-o", tmp_path / "model.kexpfam")[2]
        )

    @pytest.mark.filterwarnings("default::kexpfam.data.encoding.UnseenLabelWarning")
    def test_a_label_that_the_fit_has_not_seen_is_one_line_of_warning(self, run, tmp_path):
        rng = np.random.default_rng(0)
        frame = pd.DataFrame({"kind": rng.choice(["u", "v"], size=40), "y": rng.normal(size=40)})
        small = kexpfam.Learned(folds=2, repeats=1, width=4, epochs=2, cells=48, steps=20)
        settings = {"model": "chain", "learned": small, "random_state": 0}
        fitted = kexpfam.ConditionalKernelExpFamily(**settings).fit(frame[["kind"]], frame["y"])
        fitted.save(tmp_path / "model.kexpfam")
        frame.assign(kind="w").to_csv(tmp_path / "data.csv", index=False)
        code, out, err = run("score", tmp_path / "model.kexpfam", tmp_path / "data.csv")
        (line,) = [line for line in err.splitlines() if "warning" in line]
        assert "'kind' holds 'w'" in line
        assert np.all(np.isfinite(scores((code, out, err))))

    @pytest.mark.slow
    def test_labels_bounds_and_gaps_from_the_fit_to_the_draws(self, run, tmp_path):
        rng = np.random.default_rng(0)
        kinds = rng.choice(["u", "v"], size=120)
        frame = pd.DataFrame(
            {"kind": kinds, "share": rng.beta(2, 5, size=120), "count": rng.poisson(3, size=120)}
        )
        frame.loc[3, "share"] = np.nan
        frame.to_csv(tmp_path / "data.csv", sep=";", decimal=",", index=False)
        model, draws = tmp_path / "model.kexpfam", tmp_path / "draws.csv"
        options = ["--kind", "share=bounded:0:1", "--kind", "count=count", "--effort", "fast", "-q"]
        assert run("fit", tmp_path / "data.csv", *options, "-o", model)[0] == 0
        assert np.all(np.isfinite(scores(run("score", model, tmp_path / "data.csv"))))
        assert run("sample", model, "-n", 500, "-o", draws)[0] == 0
        found = pd.read_csv(draws)
        assert set(found["kind"]) == {"u", "v"}
        assert found["share"].dropna().between(0.0, 1.0).all()
        assert (found["count"].dropna() % 1 == 0).all()


class TestStreams:
    """Memory does not grow with the rows: none of the blocks that a model sees is large."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(texts, "BATCH_BYTES", 100)
        monkeypatch.setattr(results, "BLOCK_DRAWS", 12)

    @pytest.fixture
    def seen(self, monkeypatch):
        """Return the sizes of all blocks that models score or draw."""
        sizes = []
        for cls, name, size in (
            (GaussianMixtureDensity, "score_samples", lambda X: len(X)),
            (GaussianMixtureDensity, "sample", lambda n, **_: n),
            (ConditionalKernelDensity, "sample", lambda X, n, **_: len(X) * n),
        ):
            method = getattr(cls, name)

            def watched(self, *given, _method=method, _size=size, **more):
                sizes.append(_size(*given, **more))
                return _method(self, *given, **more)

            monkeypatch.setattr(cls, name, watched)
        return sizes

    @pytest.mark.parametrize("as_json", [False, True])
    def test_scores(self, run, model, expected, seen, tmp_path, as_json):
        FRAME.to_csv(tmp_path / "data.csv", index=False)
        code, out, err = run("score", model, tmp_path / "data.csv", *(["--json"] if as_json else []))
        assert code == 0
        assert (sum(seen), max(seen) < 15) == (ROWS, True)
        found = (
            json.loads(out) if as_json else {"log_density": [float(line) for line in out.splitlines()[1:]]}
        )
        np.testing.assert_allclose(found["log_density"], expected)
        mean = found.get("mean_log_density", float(err.split()[3]) if err else None)
        assert mean == pytest.approx(expected.mean(), abs=1e-4)
        assert as_json or f"over {ROWS} rows" in err

    def test_draws(self, run, model, seen, tmp_path):
        code, _, err = run("sample", model, "-n", 30, "--seed", 3, "-o", tmp_path / "draws.csv")
        assert (code, seen) == (0, [12, 12, 6])
        assert "30 rows written" in err
        found = pd.read_csv(tmp_path / "draws.csv")
        np.testing.assert_array_equal(found[:12], kexpfam.load(model).sample(12, random_state=3))
        assert len(np.unique(found, axis=0)) == 30

    def test_draws_at_rows(self, run, conditional, seen, tmp_path):
        FRAME.to_csv(tmp_path / "data.csv", index=False)
        code, out, _ = run("sample", conditional, "--at", tmp_path / "data.csv", "-n", 5)
        assert (code, max(seen) <= 12, sum(seen)) == (0, True, 5 * ROWS)
        rows = [line.split(",") for line in out.splitlines()]
        assert rows[0] == ["row", "right"]
        assert [int(row) for row, _ in rows[1:]] == np.repeat(np.arange(ROWS), 5).tolist()
        # Draws are rounded as the data are, so that a few of them are equal.
        assert len({draw for _, draw in rows[1:]}) > 0.9 * 5 * ROWS

    def test_a_fault_far_down_leaves_no_file(self, run, model, tmp_path):
        gappy = FRAME.astype(object)
        gappy.loc[30, "right"] = "far"
        gappy.to_csv(tmp_path / "data.csv", index=False)
        code, out, err = run("score", model, tmp_path / "data.csv", "-o", tmp_path / "scores.csv")
        assert (code, out) == (2, "")
        assert "row 31: column 'right' is 'far'" in err
        assert os.listdir(tmp_path) == ["data.csv"]


class TestPipes:
    def test_a_model_goes_to_standard_output_and_words_elsewhere(self, folder):
        text = FRAME.to_csv(index=False).encode()
        code, out, err = shell(f"kexpfam fit - -o - --json {' '.join(FIXED)} > piped.kexpfam", folder, text)
        assert (code, out) == (0, b"")
        assert json.loads(err)["columns"] == ["left", "right"]
        assert kexpfam.load(folder / "piped.kexpfam").column_names_ == ["left", "right"]

    def test_nobody_has_to_read_to_the_end(self, model, folder):
        code, out, err = shell(
            "kexpfam sample model.kexpfam -n 200000 -o - | head -n 2; exit ${PIPESTATUS[1]}", folder
        )
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == b"left,right"
        assert len(out.splitlines()) == 2

    @pytest.mark.slow
    def test_a_picture_goes_to_standard_output(self, model, folder):
        code, out, err = shell("kexpfam plot model.kexpfam -o -", folder)
        assert code == 0
        assert out.startswith(b"\x89PNG")
        assert "written to" in err

    def test_an_output_that_is_a_link_stays_one(self, run, model, folder):
        (folder / "draws.csv").symlink_to("target.csv")
        code, _, _ = run("sample", model, "-n", 2, "-o", folder / "draws.csv")
        assert code == 0
        assert os.readlink(folder / "draws.csv") == "target.csv"
        assert len((folder / "target.csv").read_text().splitlines()) == 3

    def test_compare_cannot_read_a_pipe_twice(self, run, model):
        code, _, err = run("compare", model, model, "--data", "-")
        assert code == 2
        assert "write standard input to a file first" in err


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_of_the_shell(name, tmp_path):
    instruction = {"bash": "complete_bash", "zsh": "complete_zsh", "fish": "complete_fish"}[name]
    words = {"COMP_WORDS": "kexpfam sa", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "kexpfam sa"}
    program = "import sys; sys.argv[0] = 'kexpfam'; from kexpfam.cli import main; main()"
    environment = (
        os.environ | words | {"_KEXPFAM_COMPLETE": instruction, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert "sample" in done.stdout, done.stderr
    assert "score" not in done.stdout


def test_the_script_for_completion_is_shown(run, monkeypatch):
    # Tests may run under no shell at all, in which none can be found out.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = run("--show-completion", "bash")
    assert code == 0
    assert "_KEXPFAM_COMPLETE=complete_bash" in out
