"""The command line: fit, score, sample, plot, diagnose, reproduce."""

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from rich.console import Console

from kexpfam import estimators, registry, storage, tables
from kexpfam.datasets import SYNTHETIC
from kexpfam.estimators import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.experiments.specs import EXPERIMENTS, load_spec
from kexpfam.face import listening
from kexpfam.kernels import KERNELS
from kexpfam.measures import BASES

app = typer.Typer(
    name="kexpfam",
    help="Kernel exponential families: a normalised log density, a fast sampler, and a verdict on both.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

USER_ERRORS = (tables.TableError, storage.StorageError, ValueError)

Model = Annotated[Path, typer.Argument(help="A model file written by [bold]kexpfam fit[/bold].")]
Data = Annotated[Path, typer.Argument(help="A .csv, .npy or .parquet file.")]
Columns = Annotated[str | None, typer.Option(help="Columns to use, comma-separated; default: all.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: standard output.")]
Seed = Annotated[int, typer.Option(help="Same seed, same result.")]


@app.command(
    epilog="Examples:  kexpfam fit two-moons -o moons.kexpfam   ·   kexpfam fit data.csv --columns a,b -o model.kexpfam   ·   "
    "kexpfam fit data.csv --target y --features a,b -o model.kexpfam"
)
def fit(
    data: Annotated[str, typer.Argument(help=f"A .csv, .npy or .parquet file, or one of {', '.join(SYNTHETIC)}.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model file to write.")],
    columns: Columns = None,
    target: Annotated[str | None, typer.Option(help="Columns to predict, comma-separated: fits p(target | features).")] = None,
    features: Annotated[str | None, typer.Option(help="Columns to predict from; default: all but the target.")] = None,
    solver: Annotated[str, typer.Option(help=f"One of {', '.join(estimators.SOLVERS)}.")] = "dde",
    kernel: Annotated[str, typer.Option(help=f"One of {', '.join(KERNELS)}.")] = "gaussian",
    base: Annotated[str | None, typer.Option(help=f"One of {', '.join(BASES)}; default: chosen from the data.")] = None,
    lengthscale: Annotated[float | None, typer.Option(help="Default: chosen from the data.")] = None,
    rkhs_penalty: Annotated[float | None, typer.Option(help="Default: chosen from the data.")] = None,
    rows: Annotated[int, typer.Option(help="Rows to draw if DATA is a built-in set.")] = 500,
    checkpoint: Annotated[Path | None, typer.Option(help="A file to resume from after an interruption.")] = None,
    seed: Seed = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Fit a density to a table of numbers, or that of a target given features, and store the model."""
    _need_folder(output)
    settings = {
        "kernel": kernel,
        "base": base,
        "lengthscale": lengthscale,
        "rkhs_penalty": rkhs_penalty,
        "solver": solver,
        "random_state": seed,
        "checkpoint": checkpoint,
        "progress": not quiet and sys.stderr.isatty(),
    }
    if target is not None:
        estimator, said = _fit_conditional(_training_pair(data, target, features, columns), settings)
    elif features is not None:
        raise ValueError("--features needs --target, the columns to predict; for the density of some columns use --columns.")
    else:
        estimator, said = _fit_density(_training_table(data, columns, rows, seed), settings)
    estimator.save(output)
    typer.echo(f"fitted {said}; written to {output}")


@app.command(epilog="Example:  kexpfam score model.kexpfam new.csv -o scores.csv")
def score(
    model: Model,
    data: Data,
    columns: Annotated[
        str | None,
        typer.Option(help="Columns to use, comma-separated; default: all, or those that a conditional model was fitted to."),
    ] = None,
    output: Output = None,
) -> None:
    """Write the log density of each row; their mean goes to standard error."""
    estimator = _load(model)
    chosen = _split(columns)
    rows = _pair(estimator, data, chosen) if _is_conditional(estimator) else (tables.read_table(data, chosen).values,)
    log_density = estimator.score_samples(*rows)
    _write(output, ["log_density"], log_density[:, None])
    typer.echo(f"mean log density {log_density.mean():.4f} over {len(log_density)} rows", err=True)


@app.command(
    epilog="Examples:  kexpfam sample model.kexpfam -n 5000 -o draws.csv   ·   "
    "kexpfam sample conditional.kexpfam --at new.csv -n 100 -o draws.csv"
)
def sample(
    model: Model,
    number: Annotated[int, typer.Option("--number", "-n", help="How many draws, of each row of --at if that is given.")] = 1000,
    at: Annotated[
        Path | None, typer.Option(help="A table of features to draw targets for, if the model is conditional.")
    ] = None,
    refine: Annotated[int, typer.Option(help="Steps of HMC after importance resampling; 0 is the learned sampler alone.")] = 0,
    output: Output = None,
    seed: Seed = 0,
) -> None:
    """Draw from the model; the draws of a conditional one carry the row of --at that they belong to, from 0."""
    estimator = _load(model)
    if _is_conditional(estimator):
        features, targets = _column_names(estimator)
        if at is None:
            raise ValueError(f"{model} is conditional: name a table of {', '.join(features)} to draw at, as in --at new.csv.")
        draws = estimator.sample(tables.read_values(at, features), number, random_state=seed, refine=refine)
        rows = [(row, *np.atleast_1d(draw)) for row, of_row in enumerate(draws) for draw in of_row]
        _write(output, ["row", *targets], rows)
    else:
        _refuse_option("--at", at)
        draws = estimator.sample(number, random_state=seed, refine=refine)
        _write(output, _names(estimator, draws.shape[1]), draws)


@app.command(epilog="Example:  kexpfam plot model.kexpfam -o model.png")
def plot(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png, .pdf or .svg file.")],
    trace: Annotated[bool, typer.Option("--trace", help="Show the saddle steps instead of the density.")] = False,
    seed: Seed = 0,
) -> None:
    """Draw the density, the learned f, and data beside samples; of a conditional model, its intervals and the data."""
    from kexpfam import report  # matplotlib is slow to import and only this command needs it

    _need_folder(output)
    estimator = _load(model)
    if trace:
        figure = report.plot_trace(estimator)
    elif _is_conditional(estimator):
        figure = report.plot_conditional(estimator)
    else:
        figure = report.plot_density(estimator, estimator.training_data_, random_state=seed)
    figure.savefig(output, dpi=150)
    typer.echo(f"written to {output}")


@app.command(epilog="Examples:  kexpfam diagnose model.kexpfam   ·   kexpfam diagnose conditional.kexpfam --data held_out.csv")
def diagnose(
    model: Model,
    data: Annotated[
        Path | None, typer.Option(help="Rows that the fit has not seen, to check the calibration of a conditional model.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Say whether the fit is good, and what to do if it is not."""
    estimator = _load(model)
    if not _is_conditional(estimator):
        _refuse_option("--data", data)
    held_out = () if data is None else _pair(estimator, data)
    typer.echo(str(estimator.diagnose(*held_out, random_state=seed)))


def main() -> None:
    """Run the command line; what the user can mend ends in one line and exit code 2."""
    # Compiled programs are kept between commands, so that only the first one waits for the compiler.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "kexpfam"))
    try:
        app()
    except USER_ERRORS as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {' '.join(str(error).split())}", highlight=False)
        sys.exit(2)
    except OSError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"[red]error:[/red] {error.filename or ''}: {error.strerror}", highlight=False
        )
        sys.exit(2)


@app.command(epilog="Examples:  kexpfam reproduce table1   ·   kexpfam reproduce all --quick   ·   kexpfam reproduce page")
def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of all, page, {', '.join(EXPERIMENTS)}.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the records are; default: reproductions, or reproductions-quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The whole chain on reduced sizes.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes at a time, one thread each.")] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier records of these experiments first.")] = False,
    tables_in: Annotated[list[Path] | None, typer.Option(help="A page whose marked tables are made anew as well.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure the paper's tables and figures, cell by cell; cells that have a record are skipped."""
    from kexpfam.experiments import pages, records, runner  # matplotlib is slow to import

    if what not in ("all", "page", *EXPERIMENTS):
        raise ValueError(f"unknown experiment {what!r}: choose one of all, page, {', '.join(EXPERIMENTS)}.")
    folder = folder or Path("reproductions-quick" if quick else "reproductions")
    with listening(not quiet and sys.stderr.isatty()) as listener:
        for name in EXPERIMENTS if what == "all" else () if what == "page" else (what,):
            ledger = records.Ledger(folder, name)
            if fresh:
                ledger.path.unlink(missing_ok=True)
            runner.run(load_spec(name, quick=quick), ledger, jobs=jobs, report=listener)
    page = pages.write(folder)
    for other in tables_in or ():
        other.write_text(pages.with_headlines(other.read_text(), pages.load_all(folder)))
    failed = [record for rows in pages.load_all(folder).values() for record in rows if record["status"] != "ok"]
    typer.echo(f"{page} written; {len(failed)} failed cells." if failed else f"{page} written.")


def _fit_density(table: tables.Table, settings: dict) -> tuple[KernelExpFamily, str]:
    """Return the fitted model and what there is to say of it."""
    estimator = KernelExpFamily(**settings).fit(table.values)
    estimator.column_names_ = table.names
    won = estimator.selection_.chosen
    chosen = (
        f"length scale {won.lengthscale:.3g}, penalty {won.rkhs_penalty:.0e}, base {won.base}" if won else "settings as given"
    )
    return estimator, _said(f"{len(table.names)} columns", chosen, estimator, table.values)


def _fit_conditional(pair: tuple[tables.Table, tables.Table], settings: dict) -> tuple[ConditionalKernelExpFamily, str]:
    """Return the fitted model and what there is to say of it."""
    features, targets = pair
    X, y = features.values, targets.values[:, 0] if len(targets.names) == 1 else targets.values
    estimator = ConditionalKernelExpFamily(**settings).fit(X, y)
    estimator.column_names_, estimator.target_names_ = features.names, targets.names
    found = estimator.selection_.settings
    scales = ", ".join(f"{scale:.3g}" for scale in found.condition_lengthscale)
    chosen = f"length scale {found.lengthscale:.3g}, of the features {scales}, penalty {found.rkhs_penalty:.0e}"
    return estimator, _said(f"{', '.join(targets.names)} given {', '.join(features.names)}", chosen, estimator, X, y)


def _said(what: str, settings: str, estimator, *rows: np.ndarray) -> str:
    return f"{len(rows[0])} rows of {what}: {settings}\nmean log density of the training rows {estimator.score(*rows):.4f}"


def _training_table(data: str, columns: str | None, rows: int, seed: int) -> tables.Table:
    if data in SYNTHETIC:
        values = SYNTHETIC[data]().sample(rows, random_state=seed)
        return tables.Table(tables.numbered(values.shape[1]), values)
    return tables.read_table(Path(data), _split(columns))


def _training_pair(data: str, target: str, features: str | None, columns: str | None) -> tuple[tables.Table, tables.Table]:
    if columns is not None:
        raise ValueError("--columns is for densities without a target; with --target use --features.")
    if data in SYNTHETIC:
        raise ValueError(f"{data} is a built-in set without a target; --target is for files.")
    return tables.read_pair(Path(data), _split(target) or [], _split(features))


def _load(model: Path):
    """Return the stored estimator."""
    estimator = registry.load(model)
    # Which column is which is settled here; scikit-learn would warn that the bare arrays it is given have no names.
    vars(estimator).pop("feature_names_in_", None)
    return estimator


def _is_conditional(estimator) -> bool:
    return isinstance(estimator, ConditionalKernelExpFamily)


def _refuse_option(name: str, value: Path | None) -> None:
    if value is not None:
        raise ValueError(f"{name} is for conditional models, and this one was fitted without --target.")


def _pair(estimator, data: Path, columns: list[str] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and targets of the file, under the names that the model knows or those given in the same order."""
    features, targets = _column_names(estimator)
    known = [*features, *targets]
    if columns is not None and len(columns) != len(known):
        raise ValueError(f"{len(columns)} columns were named where {len(known)} are needed, for {', '.join(known)}.")
    values = tables.read_values(data, known) if columns is None else tables.read_table(data, columns).values
    return values[:, : len(features)], values[:, len(features) :]


def _need_folder(output: Path) -> None:
    """Fail before the work, not after it, if the result could not be written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file.")


def _split(columns: str | None) -> list[str] | None:
    return None if columns is None else [name.strip() for name in columns.split(",")]


def _names(estimator, width: int) -> list[str]:
    return getattr(estimator, "column_names_", None) or tables.numbered(width)


def _column_names(estimator: ConditionalKernelExpFamily) -> tuple[list[str], list[str]]:
    """Return the names of features and targets."""
    count = estimator.density_.scaling.shift.size
    targets = getattr(estimator, "target_names_", None) or (["y"] if count == 1 else tables.numbered(count, "y"))
    return _names(estimator, estimator.n_features_in_), targets


def _write(output: Path | None, names: list[str], rows: Collection[Collection[float]]) -> None:
    if output is not None:
        tables.write_csv(output, names, rows)
        typer.echo(f"{len(rows)} rows written to {output}", err=True)
        return
    for row in (names, *rows):
        typer.echo(",".join(map(str, row)))
