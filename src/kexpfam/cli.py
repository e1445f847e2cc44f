"""The command line: fit, score, sample, plot, diagnose."""

import os
import sys
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from rich.console import Console

from kexpfam import estimators, storage, tables
from kexpfam.datasets import SYNTHETIC
from kexpfam.estimators import KernelExpFamily
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
    epilog="Examples:  kexpfam fit two-moons -o moons.kexpfam   ·   kexpfam fit data.csv --columns a,b -o model.kexpfam"
)
def fit(
    data: Annotated[str, typer.Argument(help=f"A .csv, .npy or .parquet file, or one of {', '.join(SYNTHETIC)}.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model file to write.")],
    columns: Columns = None,
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
    """Fit a density to a table of numbers and store the model."""
    _need_folder(output)
    values = _training_table(data, columns, rows, seed)
    estimator = KernelExpFamily(
        kernel=kernel,
        base=base,
        lengthscale=lengthscale,
        rkhs_penalty=rkhs_penalty,
        solver=solver,
        random_state=seed,
        checkpoint=checkpoint,
        progress=not quiet and sys.stderr.isatty(),
    )
    estimator.fit(values.values)
    estimator.column_names_ = values.names
    estimator.save(output)
    won = estimator.selection_.chosen
    settings = (
        f"length scale {won.lengthscale:.3g}, penalty {won.rkhs_penalty:.0e}, base {won.base}" if won else "settings as given"
    )
    typer.echo(f"fitted {len(values.values)} rows of {len(values.names)} columns: {settings}")
    typer.echo(f"mean log density of the training rows {estimator.score(values.values):.4f}; written to {output}")


@app.command(epilog="Example:  kexpfam score model.kexpfam new.csv -o scores.csv")
def score(model: Model, data: Data, columns: Columns = None, output: Output = None) -> None:
    """Write the log density of each row; their mean goes to standard error."""
    estimator = estimators.load(model)
    table = tables.read_table(data, _split(columns))
    log_density = estimator.score_samples(table.values)
    _write(output, ["log_density"], log_density[:, None])
    typer.echo(f"mean log density {log_density.mean():.4f} over {len(log_density)} rows", err=True)


@app.command(epilog="Example:  kexpfam sample model.kexpfam -n 5000 -o draws.csv")
def sample(
    model: Model,
    number: Annotated[int, typer.Option("--number", "-n", help="How many draws.")] = 1000,
    refine: Annotated[int, typer.Option(help="Steps of HMC after importance resampling; 0 is the learned sampler alone.")] = 0,
    output: Output = None,
    seed: Seed = 0,
) -> None:
    """Draw from the model."""
    estimator = estimators.load(model)
    draws = estimator.sample(number, random_state=seed, refine=refine)
    _write(output, _names(estimator, draws.shape[1]), draws)


@app.command(epilog="Example:  kexpfam plot model.kexpfam -o model.png")
def plot(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png, .pdf or .svg file.")],
    trace: Annotated[bool, typer.Option("--trace", help="Show the saddle steps instead of the density.")] = False,
    seed: Seed = 0,
) -> None:
    """Draw the density, the learned f, and data beside samples."""
    from kexpfam import report  # matplotlib is slow to import and only this command needs it

    _need_folder(output)
    estimator = estimators.load(model)
    figure = (
        report.plot_trace(estimator) if trace else report.plot_density(estimator, estimator.training_data_, random_state=seed)
    )
    figure.savefig(output, dpi=150)
    typer.echo(f"written to {output}")


@app.command(epilog="Example:  kexpfam diagnose model.kexpfam")
def diagnose(model: Model, seed: Seed = 0) -> None:
    """Say whether the fit is good, and what to do if it is not."""
    typer.echo(str(estimators.load(model).diagnose(random_state=seed)))


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


def _training_table(data: str, columns: str | None, rows: int, seed: int) -> tables.Table:
    if data in SYNTHETIC:
        values = SYNTHETIC[data]().sample(rows, random_state=seed)
        return tables.Table([f"x{j}" for j in range(values.shape[1])], values)
    return tables.read_table(Path(data), _split(columns))


def _need_folder(output: Path) -> None:
    """Fail before the work, not after it, if the result could not be written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file.")


def _split(columns: str | None) -> list[str] | None:
    return None if columns is None else [name.strip() for name in columns.split(",")]


def _names(estimator, width: int) -> list[str]:
    return getattr(estimator, "column_names_", None) or [f"x{j}" for j in range(width)]


def _write(output: Path | None, names: list[str], values: np.ndarray) -> None:
    if output is not None:
        tables.write_csv(output, names, values)
        typer.echo(f"{len(values)} rows written to {output}", err=True)
        return
    typer.echo(",".join(names))
    for row in values:
        typer.echo(",".join(repr(float(cell)) for cell in row))
