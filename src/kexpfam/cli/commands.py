"""The command line: fit, score, sample, plot, diagnose, report, compare, reproduce.

Nothing heavy is imported before a command runs: help has to be there at once.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

import kexpfam
from kexpfam.cli.draws import Scores, draws_at, draws_in_blocks
from kexpfam.cli.fitting import fitted, fitted_to_blocks, training_blocks
from kexpfam.cli.inputs import (
    Columns,
    built_in,
    kinds_of,
    model_blocks,
    model_rows,
    names_in,
    reads_tables,
    training,
)
from kexpfam.cli.launcher import (
    LOST,
    Coordinator,
    Processes,
    ProcessId,
    is_first_process,
    started_by_launcher,
)
from kexpfam.cli.reproduce import checkout, reproduce
from kexpfam.cli.results import column_names, facts, summary, tell, write_rows
from kexpfam.files import written
from kexpfam.processes import LostProcessError

__all__ = ["app", "main"]

STANDARD_OUTPUT = Path("/dev/stdout")
# The base of all that can be wrong with arguments; typer names only this kind of it in every version.
USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])


def _lines(heading: str, *commands: str) -> str:
    """Return what stands below a help text, a command on each line."""
    return "\n".join((heading, *(f"  kexpfam {command}" for command in commands)))


def _table_output(path: Path | None) -> Path | None:
    return None if path == Path("-") else path


def _file_output(path: Path | None) -> Path | None:
    """Return the path to write to; - is standard output, which is written into like any device."""
    return STANDARD_OUTPUT if path == Path("-") else path


# What to do, in the order in which one would, and what it is good for.
FIRST_STEPS = {
    "fit two-moons -o moons.kexpfam": "a density of a built-in set, or of a .csv, .npy or .parquet file",
    "diagnose moons.kexpfam": "is it good, and what to do if not",
    "report moons.kexpfam -o moons.html": "one page with pictures, which opens anywhere",
    "sample moons.kexpfam -n 1000 -o draws.csv": "draws",
    "fit data.csv --target y -o model.kexpfam": "the density of y given the other columns",
}

app = typer.Typer(
    name="kexpfam", add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)

Model = Annotated[Path, typer.Argument(help="A model file written by [bold]kexpfam fit[/bold].")]
Data = Annotated[
    Path,
    typer.Argument(help="A .csv, .tsv, .txt, .npy or .parquet file, compressed or not; - is standard input."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", callback=_table_output, help="Where to write; default, or -: standard output."
    ),
]
Seed = Annotated[int, typer.Option(help="Same seed, same result.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")]


def main() -> None:
    """Run the command line; what the user can mend ends in one line and exit code 2."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say("warning", str(message))
        try:
            if not sys.argv[1:]:
                _show_first_steps()
                sys.exit()
            sys.exit(app(args=sys.argv[1:], standalone_mode=False))
        except USAGE_ERROR as error:
            context, message = getattr(error, "ctx", None), cast(Any, error).format_message()
            _say(
                "error",
                f"{message.rstrip('.')}. See {context.command_path if context else 'kexpfam'} --help.",
            )
        except BrokenPipeError:
            _leave_quietly()
        except OSError as error:
            _say("error", f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (ValueError, ImportError) as error:
            _say("error", str(error))
        except LostProcessError as error:
            if not started_by_launcher():  # which has a line of its own for it
                _say("error", str(error))
            _leave(LOST)
        sys.exit(2)


def _say(kind: str, message: str) -> None:
    """Write one line to standard error."""
    colour = {"error": "red", "warning": "yellow"}[kind]
    typer.echo(f"{typer.style(f'{kind}:', fg=colour)} {' '.join(message.split())}", err=True)


def _leave(code: int) -> NoReturn:
    """End at once: an orderly end would wait for a process that is gone."""
    sys.stderr.flush()
    os._exit(code)


def _leave_quietly() -> NoReturn:
    """End because nobody reads any further, as ``head`` does after some lines: that is no error of anyone's."""
    # What is still to be flushed at the end of the process must not fail a second time.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def _show_first_steps() -> None:
    width = max(map(len, FIRST_STEPS))
    steps = "\n".join(f"  kexpfam {step:<{width}}  {what}" for step, what in FIRST_STEPS.items())
    typer.echo(
        f"kexpfam {kexpfam.__version__}: densities from tables.\n\n{steps}\n\nAll commands: kexpfam --help"
    )


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"kexpfam {kexpfam.__version__}")
        raise typer.Exit
    return asked


@app.callback(epilog=_lines("First steps:", *FIRST_STEPS))
def start(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Kernel exponential families: a normalised log density, a fast sampler, and a verdict on both."""


@app.command(
    epilog=_lines(
        "Examples:",
        "fit two-moons -o moons.kexpfam",
        "fit data.csv --columns a,b -o model.kexpfam",
        "fit data.csv --target y --features a,b -o model.kexpfam",
        "fit data.csv --kind share=bounded:0:1 --weight w --drop-missing -o model.kexpfam",
        "fit - -o model.kexpfam < data.csv",
        "fit big.parquet --processes 2 --checkpoint big.checkpoint -o model.kexpfam",
    )
)
@reads_tables
def fit(
    data: Annotated[
        str,
        typer.Argument(
            help="A .csv, .tsv, .txt, .npy or .parquet file, a folder of .parquet files, - for standard input, or a built-in "
            "set: two-moons, rings or grid."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=_file_output, help="The model file to write.")
    ],
    reading: Any,
    columns: Annotated[
        str | None, typer.Option(help="Columns to use, comma-separated; default: all.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Columns to predict, comma-separated: fits p(target | features).")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Columns to predict from; default: all but the target.")
    ] = None,
    weight: Annotated[
        str | None, typer.Option(help="The column of weights: a row of weight 2 counts twice.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="What a column is, say share=bounded:0:1: real, positive, bounded, periodic, integer, count, category, atom; "
            "may be repeated. Columns of text are categories."
        ),
    ] = None,
    solver: Annotated[
        str,
        typer.Option(help="auto, exact, dde, or another of the paper's; a name that is none lists them all."),
    ] = "auto",
    kernel: Annotated[
        str, typer.Option(help="gaussian, laplace, matern32, ...; a name that is none lists them all.")
    ] = "gaussian",
    base: Annotated[
        str | None, typer.Option(help="gaussian, box, mixture or chain; default: chosen from the data.")
    ] = None,
    effort: Annotated[
        str, typer.Option(help="fast, default or best: what learned bases may cost.")
    ] = "default",
    lengthscale: Annotated[float | None, typer.Option(help="Default: chosen from the data.")] = None,
    rkhs_penalty: Annotated[float | None, typer.Option(help="Default: chosen from the data.")] = None,
    rows: Annotated[int, typer.Option(help="Rows to draw if DATA is a built-in set.")] = 500,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file to resume from after an interruption.")
    ] = None,
    processes: Processes = None,
    coordinator: Coordinator = None,
    process_id: ProcessId = None,
    seed: Seed = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    json: Json = False,
) -> None:
    """Fit a density to a table of numbers, or that of a target given features, and store the model."""
    _need_folder(output)
    first = is_first_process(data, processes, coordinator, process_id, checkpoint)
    settings = {
        "kernel": kernel,
        "base": base,
        "effort": effort,
        "lengthscale": lengthscale,
        "rkhs_penalty": rkhs_penalty,
        "solver": solver,
        "random_state": seed,
        "checkpoint": checkpoint,
        "progress": first and not quiet and sys.stderr.isatty(),
    }
    chosen = Columns(names_in(columns), names_in(target), names_in(features), weight, kinds_of(kind))
    table = built_in(data, chosen, rows, seed)
    blocks = None if table is not None else training_blocks(Path(data), chosen, reading)
    settings |= chosen.settings()
    if blocks is not None:
        estimator, what, score = fitted_to_blocks(blocks, settings)
    else:
        estimator, what, score = fitted(table or training(Path(data), chosen, reading), settings)
    if not first:
        return
    estimator.save(output)
    said = (
        facts(estimator, output, score) if json else f"{summary(estimator, what, score)}; written to {output}"
    )
    tell(said, err=output == STANDARD_OUTPUT)


@app.command(
    epilog=_lines(
        "Examples:", "score model.kexpfam new.csv -o scores.csv", "score model.kexpfam - < new.csv | sort -g"
    )
)
@reads_tables
def score(
    model: Model,
    data: Data,
    reading: Any,
    columns: Annotated[
        str | None,
        typer.Option(
            help="What the model's columns are called in DATA, comma-separated; default: as in the fit."
        ),
    ] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Write the log density of each row; their mean goes to standard error.

    Columns are found by the names they had in the fit; those of a file without names are taken in their order, features first.
    """
    from kexpfam.data.tables import MissingColumnError

    estimator, found = _load(model), Scores()
    blocks = (
        found.add(estimator.score_samples(*rows))
        for rows in model_blocks(estimator, data, names_in(columns), reading)
    )
    try:
        if json:
            scores = [score for block in blocks for score in block]
            tell({"rows": found.rows, "mean_log_density": found.mean, "log_density": scores}, output)
            return
        write_rows(output, ["log_density"], ([score] for block in blocks for score in block))
    except MissingColumnError as error:
        raise ValueError(f"{error} If they have other names there, give these with --columns.") from None
    typer.echo(f"mean log density {found.mean:.4f} over {found.rows} rows", err=True)


@app.command(
    epilog=_lines(
        "Examples:",
        "sample model.kexpfam -n 5000 -o draws.csv",
        "sample conditional.kexpfam --at new.csv -n 100 -o draws.csv",
    )
)
@reads_tables
def sample(
    model: Model,
    reading: Any,
    number: Annotated[
        int, typer.Option("--number", "-n", help="How many draws, of each row of --at if that is given.")
    ] = 1000,
    at: Annotated[
        Path | None,
        typer.Option(help="A table of features to draw targets for, if the model is conditional."),
    ] = None,
    refine: Annotated[
        int, typer.Option(help="Steps of HMC after importance resampling; 0 is the fitted sampler alone.")
    ] = 0,
    output: Output = None,
    seed: Seed = 0,
) -> None:
    """Draw from the model; the draws of a conditional one carry the row of --at that they belong to, from 0."""
    estimator = _load(model)
    features, targets = column_names(estimator)
    if not estimator.conditional:
        _refuse_option("--at", at)
        write_rows(output, features, draws_in_blocks(estimator, number, seed=seed, refine=refine))
        return
    if at is None:
        raise ValueError(
            f"{model} is conditional: name a table of {', '.join(features)} to draw at, as in --at new.csv."
        )
    draws = draws_at(estimator, at, features, number, reading=reading, seed=seed, refine=refine)
    write_rows(output, ["row", *targets], draws)


@app.command(
    epilog=_lines("Examples:", "plot model.kexpfam -o model.png", "plot model.kexpfam --trace -o steps.pdf")
)
def plot(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=_file_output, help="A .png, .pdf or .svg file.")
    ],
    trace: Annotated[
        bool, typer.Option("--trace", help="Show the steps of the solver instead of the density.")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Draw the density, the learned f, and data beside samples; of a conditional model, its intervals and the data."""
    from kexpfam.plot import plot_model, plot_trace

    _need_folder(output)
    estimator = _load(model)
    seeded = {} if estimator.conditional else {"random_state": seed}
    figure = plot_trace(estimator) if trace else plot_model(estimator, **seeded)
    with written(output) as file:
        figure.savefig(file, format=output.suffix[1:] or "png", dpi=150)
    typer.echo(f"written to {output}", err=output == STANDARD_OUTPUT)


@app.command(
    epilog=_lines("Examples:", "diagnose model.kexpfam", "diagnose conditional.kexpfam --data held_out.csv")
)
@reads_tables
def diagnose(
    model: Model,
    reading: Any,
    data: Annotated[
        Path | None,
        typer.Option(help="Rows that the fit has not seen, to check the calibration of a conditional model."),
    ] = None,
    json: Json = False,
    seed: Seed = 0,
) -> None:
    """Say whether the fit is good, and what to do if it is not."""
    estimator = _load(model)
    if not estimator.conditional:
        _refuse_option("--data", data)
    held_out = () if data is None else model_rows(estimator, data, reading)
    diagnosis = estimator.diagnose(*held_out, random_state=seed)
    tell(diagnosis.as_dict() if json else str(diagnosis))


@app.command(
    epilog=_lines(
        "Examples:",
        "report model.kexpfam -o report.html",
        "report model.kexpfam --data held_out.csv -o report.html",
    )
)
@reads_tables
def report(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=_file_output, help="The .html file to write.")
    ],
    reading: Any,
    data: Annotated[
        Path | None, typer.Option(help="Rows that the fit has not seen; default: the training rows.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Write one page on the model: verdict, columns, pictures, calibration, what matters; it opens anywhere."""
    _need_folder(output)
    estimator = _load(model)
    held_out = () if data is None else model_rows(estimator, data, reading)
    page = estimator.report(output, *held_out, random_state=seed)
    typer.echo(
        f"{page.title}: the fit is {estimator._diagnosis.verdict}; written to {output}",
        err=output == STANDARD_OUTPUT,
    )


@app.command(
    epilog=_lines(
        "Examples:",
        "compare a.kexpfam b.kexpfam --data held_out.csv",
        "compare a.kexpfam b.kexpfam --data new.csv -o page.html",
    )
)
@reads_tables
def compare(
    models: Annotated[list[Path], typer.Argument(help="Two model files or more.")],
    data: Annotated[Path, typer.Option(help="Rows that none of the models has seen.")],
    reading: Any,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .html file with pictures.")] = None,
    json: Json = False,
    seed: Seed = 0,
) -> None:
    """Put models side by side on held-out rows: log density with paired errors, calibration, CRPS, time to draw."""
    if data == Path("-"):
        raise ValueError("compare reads the rows once for each model: write standard input to a file first.")
    from kexpfam.report.comparison import compare_rows

    if output is not None:
        _need_folder(output)
    loaded = [_load(model) for model in models]
    comparison = compare_rows(
        loaded,
        [model_rows(one, data, reading) for one in loaded],
        [str(model) for model in models],
        random_state=seed,
    )
    if output is not None:
        comparison.page().save(output)
    tell(comparison.as_dict() if json else str(comparison))


# Not for daily use: it has a panel of its own, and is not listed where there is nothing to reproduce from.
app.command(
    epilog=_lines("Examples:", "reproduce table1", "reproduce all --quick", "reproduce page"),
    rich_help_panel="In a checkout of the repository",
    hidden=checkout() is None,
)(reproduce)


def _load(model: Path) -> Any:
    """Return the stored estimator."""
    from kexpfam import load

    estimator = load(model)
    # Which column is which is settled here; scikit-learn would warn that the bare arrays it is given have no names.
    vars(estimator).pop("feature_names_in_", None)
    return estimator.set_output(transform="numpy")


def _refuse_option(name: str, value: Path | None) -> None:
    if value is not None:
        raise ValueError(f"{name} is for conditional models, and this one was fitted without --target.")


def _need_folder(output: Path) -> None:
    """Fail before the work, not after it, if the result could not be written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file.")
