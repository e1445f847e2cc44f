"""The commands: fit, score, sample, plot, diagnose, report, explain, monitor, compare, reproduce.

Heavy modules are imported inside the commands, so that help is shown at once.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer import Argument, Option

import kexpfam
from kexpfam.cli import inputs, interruption, launcher, results
from kexpfam.cli.inputs import ColumnOptions, kinds_of, names_in, reads_tables
from kexpfam.cli.reproduce import checkout, reproduce
from kexpfam.processes import LostProcessError

STANDARD_OUTPUT = Path("/dev/stdout")
# The base class of all usage errors; not every version of typer exports it.
USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])
# Commands for a beginner, in order, and their results.
FIRST_STEPS = {
    "fit two-moons -o moons.kexpfam": "a density of a built-in set, or of a .csv, .npy or .parquet file",
    "diagnose moons.kexpfam": "is it good, and what to do if not",
    "report moons.kexpfam -o moons.html": "one page with plots, a single HTML file",
    "sample moons.kexpfam -n 1000 -o draws.csv": "draws",
    "fit data.csv --target y -o model.kexpfam": "the density of y given the other columns",
}

app = typer.Typer(name="kexpfam", pretty_exceptions_enable=False, rich_markup_mode="rich")


def _lines(heading: str, *commands: str) -> str:
    return "\n".join((heading, *(f"  kexpfam {command}" for command in commands)))


def _command(*examples: str, **options: Any) -> Any:
    """Return a decorator that adds a command to the program; the examples are shown below its help."""
    return app.command(epilog=_lines("Examples:", *examples), **options)


def _output(help: str, standard: Path | None = STANDARD_OUTPUT) -> Any:
    """Return the option of an output file; the path "-" becomes ``standard``."""

    def callback(path: Path | None) -> Path | None:
        return standard if path == Path("-") else path

    return Option("--output", "-o", callback=callback, help=help)


FILES = "A .csv, .tsv, .txt, .npy, .parquet or .feather file"
TABLES = ".csv, .tsv, .npy, .parquet or .feather"
Model = Annotated[Path, Argument(help="A model file written by [bold]kexpfam fit[/bold].")]
Data = Annotated[Path, Argument(help=f"{FILES}, compressed or not; - is standard input.")]
Names = str | None
TableFile = Annotated[Path | None, _output(f"A {TABLES} file; default, -: CSV to standard output.", None)]
Seed = Annotated[int, Option(help="The same seed gives the same result.")]
Json = Annotated[bool, Option("--json", help="Write JSON.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress bar.")]


def main() -> None:
    """Run the command line. Errors of the user's input are one line, with exit code 2; Ctrl-C gives 130."""
    with warnings.catch_warnings(), interruption.ends_soon_after_interrupt():
        warnings.showwarning = lambda text, *_, **__: results.message("warning", str(text))
        try:
            if not sys.argv[1:]:
                width = max(map(len, FIRST_STEPS))
                steps = "\n".join(f"  kexpfam {step:<{width}}  {what}" for step, what in FIRST_STEPS.items())
                heading = f"kexpfam {kexpfam.__version__}: densities from tables."
                typer.echo(f"{heading}\n\n{steps}\n\nAll commands: kexpfam --help")
                sys.exit()
            if (code := app(args=sys.argv[1:], standalone_mode=False)) == interruption.INTERRUPTED:
                interruption.end()
            sys.exit(code)
        except (KeyboardInterrupt, typer.Abort):  # some versions of typer raise Abort instead of returning
            interruption.end()
        except USAGE_ERROR as error:
            context, text = getattr(error, "ctx", None), cast(Any, error).format_message()
            command = context.command_path if context else "kexpfam"
            results.message("error", f"{text.rstrip('.')}. See {command} --help.")
        except BrokenPipeError:
            # The reader of standard output has ended, as head does. The flush at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as error:
            results.message("error", f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (ValueError, ImportError) as error:
            results.message("error", str(error))
        except LostProcessError as error:
            if not launcher.started_by_launcher():  # the launcher writes its own message
                results.message("error", str(error))
            # Clean-up would wait for the lost process.
            sys.stderr.flush()
            os._exit(launcher.LOST)
        sys.exit(2)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"kexpfam {kexpfam.__version__}")
        raise typer.Exit
    return asked


VERSION: Any = Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")


@app.callback(epilog=_lines("First steps:", *FIRST_STEPS))
def start(version: Annotated[bool, VERSION] = False) -> None:
    """Kernel exponential families: a normalised log density, a fast sampler, and a diagnosis of both."""


@_command(
    "fit two-moons -o moons.kexpfam",
    "fit data.csv --columns a,b -o model.kexpfam",
    "fit data.csv --target y --features a,b -o model.kexpfam",
    "fit data.csv --kind share=bounded:0:1 --weight w --drop-missing -o model.kexpfam",
    "fit - -o model.kexpfam < data.csv",
    "fit big.parquet --processes 2 --checkpoint big.checkpoint -o model.kexpfam",
)
@reads_tables
def fit(
    data: Annotated[
        str,
        Argument(
            help=f"{FILES}, a folder of .parquet files, - for standard input, or a built-in set: "
            "two-moons, rings or grid."
        ),
    ],
    output: Annotated[Path, _output("The model file to write.")],
    reading: Any,
    columns: Annotated[Names, Option(help="Columns to use, comma-separated; default: all.")] = None,
    target: Annotated[Names, Option(help="Columns to predict: fits p(target | features).")] = None,
    features: Annotated[Names, Option(help="Columns to predict from; default: all others.")] = None,
    weight: Annotated[Names, Option(help="Column of weights; a row of weight 2 counts as two.")] = None,
    kind: Annotated[
        list[str] | None,
        Option(
            help="The kind of a column, as in share=bounded:0:1: real, positive, bounded, periodic, integer, "
            "count, rounded, category, atom; repeatable. Columns of text are categories."
        ),
    ] = None,
    model: Annotated[str, Option(help="auto, kernel, chain or mixture.")] = "auto",
    solver: Annotated[str, Option(help="auto, exact, dde, ...; an unknown name lists all.")] = "auto",
    kernel: Annotated[
        str, Option(help="gaussian, laplace, matern32, ...; an unknown name lists all.")
    ] = "gaussian",
    base: Annotated[Names, Option(help="gaussian, box or mixture; default: chosen.")] = None,
    effort: Annotated[str, Option(help="fast, default or best: time for chains.")] = "default",
    lengthscale: Annotated[float | None, Option(help="Default: chosen from the data.")] = None,
    rkhs_penalty: Annotated[float | None, Option(help="Default: chosen from the data.")] = None,
    rows: Annotated[int, Option(help="Number of rows of a built-in set.")] = 500,
    checkpoint: Annotated[Path | None, Option(help="File to resume from after an interruption.")] = None,
    time_budget: Annotated[float | None, Option(help="Seconds that the fit may take.")] = None,
    processes: launcher.Processes = None,
    coordinator: launcher.Coordinator = None,
    process_id: launcher.ProcessId = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Fit the density of a table, or of a target given features, and store the model."""
    from kexpfam.datasets import SYNTHETIC

    chosen = ColumnOptions(names_in(columns), names_in(target), names_in(features), weight, kinds_of(kind))
    _check_output(output, checkpoint, None if data in SYNTHETIC else Path(data))
    first = launcher.is_first_process(data, processes, coordinator, process_id)
    from kexpfam import Kernel
    from kexpfam.cli.fitting import built_in, fitted, training

    record = Kernel(kernel, lengthscale=lengthscale, rkhs_penalty=rkhs_penalty, base=base)
    settings: dict[str, Any] = {"model": model, "effort": effort, "solver": solver}
    # A report lists the settings that differ from the defaults.
    settings |= {"kernel": kernel if record == Kernel(kernel) else record}
    settings |= {"random_state": seed, "checkpoint": checkpoint}
    settings |= {"progress": first and not quiet and sys.stderr.isatty()}
    table = built_in(data, chosen, rows, seed) or training(Path(data), chosen, reading)
    estimator, what, score = fitted(table, settings | chosen.settings(), time_budget)
    if not first:
        return
    estimator.save(output)
    lines = f"{results.summary(estimator, what, score)}; written to {output}"
    results.show(results.facts(estimator, output, score) if json else lines, err=output == STANDARD_OUTPUT)


@_command("score model.kexpfam new.csv -o scores.csv", "score model.kexpfam - < new.csv | sort -g")
@reads_tables
def score(
    model: Model,
    data: Data,
    reading: Any,
    columns: Annotated[Names, Option(help="Names of the model's columns in DATA, if they differ.")] = None,
    output: TableFile = None,
    json: Json = False,
) -> None:
    """Write the log density of each row; the mean goes to standard error.

    Columns are found by name. The columns of a file without names are taken in order, features first.
    """
    from kexpfam.data.tables import MissingColumnError

    _check_output(output, model, data, table=not json)
    estimator, found = _load(model), results.MeanScore()
    rows = inputs.model_blocks(estimator, data, names_in(columns), reading)
    blocks = (found.add(estimator.score_samples(*block)) for block in rows)
    try:
        if json:
            scores = [score for block in blocks for score in block.tolist()]
            results.show({"rows": found.rows, "mean_log_density": found.mean, "log_density": scores}, output)
            return
        results.write_rows(output, ["log_density"], ([block] for block in blocks))
    except MissingColumnError as error:
        raise ValueError(f"{error} If they have other names there, give these with --columns.") from None
    typer.echo(f"mean log density {found.mean:.4f} over {found.rows} rows", err=True)


@_command(
    "sample model.kexpfam -n 5000 -o draws.csv",
    "sample conditional.kexpfam --at new.csv -n 100 -o draws.parquet",
)
@reads_tables
def sample(
    model: Model,
    reading: Any,
    number: Annotated[int, Option("--number", "-n", help="Draws, per row of --at if given.")] = 1000,
    at: Annotated[Path | None, Option(help="Table of features, for a conditional model.")] = None,
    refine: Annotated[int, Option(help="HMC steps after importance resampling; 0: sampler only.")] = 0,
    output: TableFile = None,
    seed: Seed = 0,
) -> None:
    """Draw from the model. Draws of a conditional model carry the number of their row of --at, from 0."""
    _check_output(output, model, at, table=True)
    estimator = _load(model)
    features, targets = inputs.column_names(estimator)
    if not estimator.conditional:
        if at is not None:
            raise ValueError("--at is for conditional models, and this one was fitted without --target.")
        draws = results.draws_in_blocks(estimator, number, seed=seed, refine=refine)
        results.write_rows(output, features, draws)
        return
    if at is None:
        raise ValueError(f"{model} is conditional; give a table of {', '.join(features)} with --at new.csv.")
    draws = results.draws_at(estimator, at, features, number, reading=reading, seed=seed, refine=refine)
    results.write_rows(output, ["row", *targets], draws)


@_command("plot model.kexpfam -o model.png", "plot model.kexpfam --trace -o steps.pdf")
def plot(
    model: Model,
    output: Annotated[Path, _output("A .png, .pdf or .svg file.")],
    trace: Annotated[bool, Option("--trace", help="Plot the steps of the solver instead.")] = False,
    seed: Seed = 0,
) -> None:
    """Plot the density, the learned f, and data beside samples; of a conditional model, its intervals."""
    from kexpfam.plot import plot_model, plot_trace

    _check_output(output, model)
    estimator = _load(model)
    seeded = {} if estimator.conditional else {"random_state": seed}
    figure = plot_trace(estimator) if trace else plot_model(estimator, **seeded)
    results.save_figure(figure, output)
    typer.echo(f"written to {output}", err=output == STANDARD_OUTPUT)


@_command("diagnose model.kexpfam", "diagnose model.kexpfam --data held_out.csv")
@reads_tables
def diagnose(
    model: Model,
    reading: Any,
    data: Annotated[Path | None, Option(help="Held-out rows, which test the calibration.")] = None,
    json: Json = False,
    seed: Seed = 0,
) -> None:
    """Report whether the fit is good, and what to do if it is not."""
    estimator = _load(model)
    held_out = () if data is None else inputs.model_rows(estimator, data, reading)
    diagnosis = estimator.diagnose(*held_out, random_state=seed)
    results.show(diagnosis.as_dict() if json else str(diagnosis))


@_command("report model.kexpfam -o report.html", "report model.kexpfam --data held_out.csv -o report.html")
@reads_tables
def report(
    model: Model,
    output: Annotated[Path, _output("The .html file to write.")],
    reading: Any,
    data: Annotated[Path | None, Option(help="Held-out rows; default: training rows.")] = None,
    seed: Seed = 0,
) -> None:
    """Write one page on the model: verdict, columns, plots, calibration, relevance."""
    _check_output(output, model, data)
    estimator = _load(model)
    held_out = () if data is None else inputs.model_rows(estimator, data, reading)
    page = estimator.report(output, *held_out, random_state=seed)
    line = f"{page.title}: the fit is {estimator._diagnosis.verdict}; written to {output}"
    typer.echo(line, err=output == STANDARD_OUTPUT)


@_command("explain model.kexpfam rows.csv", "explain model.kexpfam rows.csv --fdr 0.1 -o cells.csv")
@reads_tables
def explain(
    model: Model,
    data: Data,
    reading: Any,
    fdr: Annotated[float | None, Option(help="Unusual rows only, at this false discovery rate.")] = None,
    output: TableFile = None,
    seed: Seed = 0,
) -> None:
    """Write a p-value of each row, and how much each of its cells makes it unusual.

    There is a line for each cell: the number of its row from 0, surprise, value, usual value and interval.
    """
    _check_output(output, model, data, table=True)
    estimator = _load(model)
    rows = inputs.model_rows(estimator, data, reading)
    found = estimator.explain(*rows, random_state=seed).records()
    if fdr is not None:
        kept = estimator.flag(*rows, fdr=fdr)[found["row"]]
        found = {name: column[kept] for name, column in found.items()}
    results.write_rows(output, list(found), [list(found.values())])


@_command(
    "monitor model.kexpfam new.csv --state drift.kexpfam",
    "monitor model.kexpfam new.csv --figure drift.png",
)
@reads_tables
def monitor(
    model: Model,
    data: Data,
    reading: Any,
    state: Annotated[Path | None, Option(help="File with the state: continued if it exists.")] = None,
    level: Annotated[float, Option(help="Probability of a false alarm.")] = 0.05,
    figure: Annotated[Path | None, Option(help="A .png, .pdf or .svg file of the evidence.")] = None,
    json: Json = False,
    seed: Seed = 0,
) -> None:
    """Test whether new rows differ from those of the fit; the exit code is 1 after an alarm."""
    _check_output(figure, model, data)
    _check_output(state, model, data)
    estimator = _load(model)
    known = state if state is not None and state.is_file() else None
    found = estimator.monitor(level=level, state=known, random_state=seed)
    for block in inputs.model_blocks(estimator, data, None, reading):
        found.update(*block)
    if state is not None:
        found.save(state)
    if figure is not None:
        results.save_figure(found.plot(), figure)
    facts = {"rows": found.rows, "alarm_row": found.alarm_row, "drifted": found.drifted}
    results.show(facts if json else str(found))
    if found.alarm:
        raise typer.Exit(1)


@_command(
    "compare a.kexpfam b.kexpfam --data held_out.csv",
    "compare a.kexpfam b.kexpfam --data new.csv -o page.html",
)
@reads_tables
def compare(
    models: Annotated[list[Path], Argument(help="Two or more model files.")],
    data: Annotated[Path, Option(help="Rows that were not used in any of the fits.")],
    reading: Any,
    output: Annotated[Path | None, Option("--output", "-o", help="A .html file with plots.")] = None,
    json: Json = False,
    seed: Seed = 0,
) -> None:
    """Compare models on held-out rows: log density with paired errors, calibration, CRPS, sampling time."""
    if data == Path("-"):
        raise ValueError("compare reads the rows once for each model: write standard input to a file first.")
    from kexpfam.report.comparison import compare_rows

    _check_output(output, data, *models)
    loaded = [_load(model) for model in models]
    rows = [inputs.model_rows(one, data, reading) for one in loaded]
    comparison = compare_rows(loaded, rows, [str(model) for model in models], random_state=seed)
    if output is not None:
        comparison.page().save(output)
    results.show(comparison.as_dict() if json else str(comparison))


# Not for daily use: it has its own panel, and is hidden outside a checkout of the repository.
_command(
    "reproduce table1",
    "reproduce all --quick",
    "reproduce page",
    rich_help_panel="In a checkout of the repository",
    hidden=checkout() is None,
)(reproduce)


def _load(model: Path) -> Any:
    """Return the stored estimator."""
    from kexpfam import load

    estimator = load(model)
    # Columns are matched here; scikit-learn would warn that arrays have no names.
    vars(estimator).pop("feature_names_in_", None)
    return estimator.set_output(transform="numpy")


def _check_output(output: Path | None, *inputs: Path | None, table: bool = False) -> None:
    """Raise before the work if the output cannot be written, or would overwrite an input."""
    if output is None:
        return
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file.")
    if not output.parent.is_dir():
        raise ValueError(f"{output}: the folder {output.parent} does not exist; create it first.")
    if table:
        from kexpfam.data.tables import output_type

        output_type(output)
    if not output.is_file():
        return
    for path in inputs:
        inside = path is not None and path.is_dir() and path.resolve() in output.resolve().parents
        if inside or (path is not None and path.is_file() and path.samefile(output)):
            raise ValueError(f"{output} is an input and is not overwritten; name another file.")
