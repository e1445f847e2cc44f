"""The command line: fit, score, sample, plot, diagnose, report, compare, reproduce.

Nothing heavy is imported before a command runs: help has to be there at once.
"""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import kexpfam
from kexpfam.files import written
from kexpfam.reproducing import checkout, reproduce
from kexpfam.telling import column_names, facts, summary, tell, write_rows

if TYPE_CHECKING:
    import numpy as np

    from kexpfam.data.tables import Table

__all__ = ["app", "main"]

# The base of all that can be wrong with arguments; typer names only this kind of it in every version.
USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])


def _lines(heading: str, *commands: str) -> str:
    """Return what stands below a help text, a command on each line."""
    return "\n".join((heading, *(f"  kexpfam {command}" for command in commands)))


# What to do, in the order in which one would, and what it is good for.
FIRST_STEPS = {
    "fit two-moons -o moons.kexpfam": "a density of a built-in set, or of a .csv, .npy or .parquet file",
    "diagnose moons.kexpfam": "is it good, and what to do if not",
    "report moons.kexpfam -o moons.html": "one page with pictures, which opens anywhere",
    "sample moons.kexpfam -n 1000 -o draws.csv": "draws",
    "fit data.csv --target y -o model.kexpfam": "the density of y given the other columns",
}

app = typer.Typer(name="kexpfam", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

Model = Annotated[Path, typer.Argument(help="A model file written by [bold]kexpfam fit[/bold].")]
Data = Annotated[Path, typer.Argument(help="A .csv, .npy or .parquet file.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: standard output.")]
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
            _say("error", f"{message.rstrip('.')}. See {context.command_path if context else 'kexpfam'} --help.")
        except OSError as error:
            _say("error", f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (ValueError, ImportError) as error:
            _say("error", str(error))
        sys.exit(2)


def _say(kind: str, message: str) -> None:
    """Write one line to standard error."""
    colour = {"error": "red", "warning": "yellow"}[kind]
    typer.echo(f"{typer.style(f'{kind}:', fg=colour)} {' '.join(message.split())}", err=True)


def _show_first_steps() -> None:
    width = max(map(len, FIRST_STEPS))
    steps = "\n".join(f"  kexpfam {step:<{width}}  {what}" for step, what in FIRST_STEPS.items())
    typer.echo(f"kexpfam {kexpfam.__version__}: densities from tables.\n\n{steps}\n\nAll commands: kexpfam --help")


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"kexpfam {kexpfam.__version__}")
        raise typer.Exit
    return asked


@app.callback(epilog=_lines("First steps:", *FIRST_STEPS))
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Kernel exponential families: a normalised log density, a fast sampler, and a verdict on both."""


@app.command(
    epilog=_lines(
        "Examples:",
        "fit two-moons -o moons.kexpfam",
        "fit data.csv --columns a,b -o model.kexpfam",
        "fit data.csv --target y --features a,b -o model.kexpfam",
    )
)
def fit(
    data: Annotated[str, typer.Argument(help="A .csv, .npy or .parquet file, or a built-in set: two-moons, rings or grid.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model file to write.")],
    columns: Annotated[str | None, typer.Option(help="Columns to use, comma-separated; default: all.")] = None,
    target: Annotated[str | None, typer.Option(help="Columns to predict, comma-separated: fits p(target | features).")] = None,
    features: Annotated[str | None, typer.Option(help="Columns to predict from; default: all but the target.")] = None,
    solver: Annotated[
        str, typer.Option(help="auto, exact, dde, or another of the paper's; a name that is none lists them all.")
    ] = "auto",
    kernel: Annotated[
        str, typer.Option(help="gaussian, laplace, matern32, ...; a name that is none lists them all.")
    ] = "gaussian",
    base: Annotated[str | None, typer.Option(help="gaussian, box, mixture or chain; default: chosen from the data.")] = None,
    effort: Annotated[str, typer.Option(help="fast, default or best: what learned bases may cost.")] = "default",
    lengthscale: Annotated[float | None, typer.Option(help="Default: chosen from the data.")] = None,
    rkhs_penalty: Annotated[float | None, typer.Option(help="Default: chosen from the data.")] = None,
    rows: Annotated[int, typer.Option(help="Rows to draw if DATA is a built-in set.")] = 500,
    checkpoint: Annotated[Path | None, typer.Option(help="A file to resume from after an interruption.")] = None,
    seed: Seed = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    json: Json = False,
) -> None:
    """Fit a density to a table of numbers, or that of a target given features, and store the model."""
    _need_folder(output)
    settings = {
        "kernel": kernel,
        "base": base,
        "effort": effort,
        "lengthscale": lengthscale,
        "rkhs_penalty": rkhs_penalty,
        "solver": solver,
        "random_state": seed,
        "checkpoint": checkpoint,
        "progress": not quiet and sys.stderr.isatty(),
    }
    if target is not None:
        estimator, said = _fit_conditional(*_training_pair(data, target, features, columns), settings)
    elif features is not None:
        raise ValueError("--features needs --target, the columns to predict; for the density of some columns use --columns.")
    else:
        estimator, said = _fit_density(_training_table(data, columns, rows, seed), settings)
    estimator.save(output)
    tell(facts(estimator, output) if json else f"{said}; written to {output}")


@app.command(epilog=_lines("Example:", "score model.kexpfam new.csv -o scores.csv"))
def score(
    model: Model,
    data: Data,
    columns: Annotated[
        str | None,
        typer.Option(help="What the model's columns are called in DATA, comma-separated; default: as in the fit."),
    ] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Write the log density of each row; their mean goes to standard error.

    Columns are found by the names they had in the fit; those of a file without names are taken in their order, features first.
    """
    from kexpfam.data.tables import MissingColumnError

    estimator = _load(model)
    try:
        rows = _rows(estimator, data, _split(columns))
    except MissingColumnError as error:
        raise ValueError(f"{error} If they have other names there, give these with --columns.") from None
    log_density = estimator.score_samples(*rows)
    if json:
        tell({"rows": len(log_density), "mean_log_density": log_density.mean(), "log_density": log_density}, output)
        return
    write_rows(output, ["log_density"], log_density[:, None])
    typer.echo(f"mean log density {log_density.mean():.4f} over {len(log_density)} rows", err=True)


@app.command(
    epilog=_lines(
        "Examples:", "sample model.kexpfam -n 5000 -o draws.csv", "sample conditional.kexpfam --at new.csv -n 100 -o draws.csv"
    )
)
def sample(
    model: Model,
    number: Annotated[int, typer.Option("--number", "-n", help="How many draws, of each row of --at if that is given.")] = 1000,
    at: Annotated[
        Path | None, typer.Option(help="A table of features to draw targets for, if the model is conditional.")
    ] = None,
    refine: Annotated[int, typer.Option(help="Steps of HMC after importance resampling; 0 is the fitted sampler alone.")] = 0,
    output: Output = None,
    seed: Seed = 0,
) -> None:
    """Draw from the model; the draws of a conditional one carry the row of --at that they belong to, from 0."""
    estimator = _load(model)
    features, targets = column_names(estimator)
    if not estimator.conditional:
        _refuse_option("--at", at)
        write_rows(output, features, estimator.sample(number, random_state=seed, refine=refine))
        return
    if at is None:
        raise ValueError(f"{model} is conditional: name a table of {', '.join(features)} to draw at, as in --at new.csv.")
    from kexpfam.data.tables import read_values

    draws = estimator.sample(read_values(at, features), number, random_state=seed, refine=refine)
    draws = draws.reshape(len(draws), number, len(targets))
    write_rows(output, ["row", *targets], [(row, *draw) for row, of_row in enumerate(draws) for draw in of_row])


@app.command(epilog=_lines("Examples:", "plot model.kexpfam -o model.png", "plot model.kexpfam --trace -o steps.pdf"))
def plot(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png, .pdf or .svg file.")],
    trace: Annotated[bool, typer.Option("--trace", help="Show the steps of the solver instead of the density.")] = False,
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
    typer.echo(f"written to {output}")


@app.command(epilog=_lines("Examples:", "diagnose model.kexpfam", "diagnose conditional.kexpfam --data held_out.csv"))
def diagnose(
    model: Model,
    data: Annotated[
        Path | None, typer.Option(help="Rows that the fit has not seen, to check the calibration of a conditional model.")
    ] = None,
    json: Json = False,
    seed: Seed = 0,
) -> None:
    """Say whether the fit is good, and what to do if it is not."""
    estimator = _load(model)
    if not estimator.conditional:
        _refuse_option("--data", data)
    held_out = () if data is None else _rows(estimator, data)
    diagnosis = estimator.diagnose(*held_out, random_state=seed)
    tell(diagnosis.as_dict() if json else str(diagnosis))


@app.command(
    epilog=_lines("Examples:", "report model.kexpfam -o report.html", "report model.kexpfam --data held_out.csv -o report.html")
)
def report(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file to write.")],
    data: Annotated[Path | None, typer.Option(help="Rows that the fit has not seen; default: the training rows.")] = None,
    seed: Seed = 0,
) -> None:
    """Write one page on the model: verdict, columns, pictures, calibration, what matters; it opens anywhere."""
    _need_folder(output)
    estimator = _load(model)
    held_out = () if data is None else _rows(estimator, data)
    page = estimator.report(output, *held_out, random_state=seed)
    typer.echo(f"{page.title}: the fit is {estimator._diagnosis.verdict}; written to {output}")


@app.command(
    epilog=_lines(
        "Examples:",
        "compare a.kexpfam b.kexpfam --data held_out.csv",
        "compare a.kexpfam b.kexpfam --data new.csv -o page.html",
    )
)
def compare(
    models: Annotated[list[Path], typer.Argument(help="Two model files or more.")],
    data: Annotated[Path, typer.Option(help="Rows that none of the models has seen.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .html file with pictures.")] = None,
    json: Json = False,
    seed: Seed = 0,
) -> None:
    """Put models side by side on held-out rows: log density with paired errors, calibration, CRPS, time to draw."""
    from kexpfam.report.comparison import compare_rows

    if output is not None:
        _need_folder(output)
    loaded = [_load(model) for model in models]
    comparison = compare_rows(loaded, [_rows(one, data) for one in loaded], [str(model) for model in models], random_state=seed)
    if output is not None:
        comparison.page().save(output)
    tell(comparison.as_dict() if json else str(comparison))


# Not for daily use: it has a panel of its own, and is not listed where there is nothing to reproduce from.
app.command(
    epilog=_lines("Examples:", "reproduce table1", "reproduce all --quick", "reproduce page"),
    rich_help_panel="In a checkout of the repository",
    hidden=checkout() is None,
)(reproduce)


def _fit_density(table: "Table", settings: dict[str, Any]) -> tuple[Any, str]:
    """Return the fitted model, and what there is to say of it."""
    from kexpfam import KernelExpFamily

    estimator = KernelExpFamily(**settings)
    # The names come first: what is wrong with a column is said by its name.
    estimator.column_names_ = table.names
    estimator.fit(table.values)
    return estimator, summary(estimator, f"{len(table.names)} columns", table.values)


def _fit_conditional(features: "Table", targets: "Table", settings: dict[str, Any]) -> tuple[Any, str]:
    """Return the fitted model, and what there is to say of it."""
    from kexpfam import ConditionalKernelExpFamily

    estimator = ConditionalKernelExpFamily(**settings)
    estimator.column_names_, estimator.target_names_ = features.names, targets.names
    y = targets.values[:, 0] if len(targets.names) == 1 else targets.values
    estimator.fit(features.values, y)
    return estimator, summary(estimator, f"{', '.join(targets.names)} given {', '.join(features.names)}", features.values, y)


def _training_table(data: str, columns: str | None, rows: int, seed: int) -> "Table":
    from kexpfam.data.tables import Table, numbered, read_table
    from kexpfam.datasets import SYNTHETIC

    if data in SYNTHETIC:
        if columns is not None:
            raise ValueError(f"{data} is a built-in set; --columns is for files.")
        values = SYNTHETIC[data]().sample(rows, random_state=seed)
        return Table(numbered(values.shape[1]), values)
    return read_table(Path(data), _split(columns))


def _training_pair(data: str, target: str, features: str | None, columns: str | None) -> "tuple[Table, Table]":
    from kexpfam.data.tables import read_parts
    from kexpfam.datasets import SYNTHETIC

    if columns is not None:
        raise ValueError("--columns is for densities without a target; with --target use --features.")
    if data in SYNTHETIC:
        raise ValueError(f"{data} is a built-in set without a target; --target is for files.")
    first, second = read_parts(Path(data), [_split(target) or []], _split(features))
    return first, second


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


def _rows(estimator: Any, data: Path, columns: list[str] | None = None) -> "tuple[np.ndarray, ...]":
    """Return what the model takes from the file, by name: the features, and the targets if it is conditional."""
    from kexpfam.data.tables import read_table, read_values

    features, targets = column_names(estimator)
    known = [*features, *targets]
    values = read_values(data, known) if columns is None else read_table(data, _in_order(columns, known)).values
    return (values[:, : len(features)], values[:, len(features) :]) if targets else (values,)


def _in_order(columns: list[str], known: list[str]) -> list[str]:
    """Return the user's names in the order of the model's: its own names find their places, others stand for them in turn."""
    if sorted(columns) == sorted(known):
        return known
    if len(columns) != len(known):
        raise ValueError(f"{len(columns)} columns were named where {len(known)} are needed, for {', '.join(known)}.")
    astray = [name for name, place in zip(columns, known, strict=True) if name in known and name != place]
    if astray:
        raise ValueError(f"column {', '.join(astray)} is not in its place; name the columns in the order {', '.join(known)}.")
    return columns


def _need_folder(output: Path) -> None:
    """Fail before the work, not after it, if the result could not be written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file.")


def _split(columns: str | None) -> list[str] | None:
    return None if columns is None else [name.strip() for name in columns.split(",")]
