"""Output of the commands: lines for people, JSON for programs, tables of scores and draws."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kexpfam.cli.inputs import column_names, reading_for
from kexpfam.files import written

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from kexpfam.data.tables import Reading

# Draws in memory at a time.
BLOCK_DRAWS = 65536


def message(kind: str, text: str) -> None:
    """Write an error or a warning as one line to standard error."""
    colour = {"error": "red", "warning": "yellow"}[kind]
    typer.echo(f"{typer.style(f'{kind}:', fg=colour)} {' '.join(text.split())}", err=True)


def summary(estimator: Any, what: str, score: float) -> str:
    """Return lines on a fitted model: the data, the chosen settings, the mean score of the training rows."""
    listed = lambda scales: ", ".join(dict.fromkeys(f"{scale:.3g}" for scale in scales))
    kernel = "no kernel model"
    if estimator.solution_ is not None:
        scales = f"length scale {listed(estimator.lengthscale_)}"
        if estimator.conditional:
            scales += f", of the features {listed(estimator.condition_lengthscale_)}"
        base = estimator.selection_.settings.base
        kernel = f"{scales}, penalty {estimator.rkhs_penalty_:.0e}, base {base}"
    several = len(estimator.candidates_) > 1
    candidates = [f"{one.name}: {one}" for one in estimator.candidates_] if several else []
    steps = ", ".join(f"{name} to {step:g}" for name, step in estimator.steps_.items())
    rounded = [f"draws are rounded as the data are: {steps}"] if steps else []
    scored = f"mean log density of the training rows {score:.4f}"
    return "\n".join([f"fitted {estimator.n_rows_} rows of {what}: {kernel}", *candidates, *rounded, scored])


def facts(estimator: Any, output: Path, score: float) -> dict[str, Any]:
    """Return the facts on a fitted model for JSON."""
    features, targets = column_names(estimator)
    chosen = ("lengthscale_", "condition_lengthscale_", "rkhs_penalty_", "candidates_")
    return {
        "model": str(output),
        "rows": estimator.n_rows_,
        "columns": features,
        "targets": targets,
        "status": None if estimator.solution_ is None else estimator.solution_.status,
        **{name.strip("_"): getattr(estimator, name, None) for name in chosen},
        "mean_log_density_of_training_rows": score,
    }


def show(content: str | dict[str, Any], output: Path | None = None, *, err: bool = False) -> None:
    """Write lines, or a record as JSON, to a file or to standard output."""
    if not isinstance(content, str):
        import json

        from kexpfam.judge.diagnosis import plain

        content = json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=False)
    if output is None:
        typer.echo(content, err=err)
        return
    with written(output) as file:
        file.write(f"{content}\n".encode())


def write_rows(output: Path | None, names: list[str], blocks: "Iterable[Sequence[np.ndarray]]") -> None:
    """Write blocks of columns to a file, or as CSV to standard output, as they are computed."""
    from kexpfam.data import tables

    if output is None:
        tables.write_csv(sys.stdout, names, blocks)
    else:
        typer.echo(f"{tables.write_table(output, names, blocks)} rows written to {output}", err=True)


def save_figure(figure: "Figure", output: Path) -> None:
    """Write a figure to a file of the type that its suffix names, PNG without a suffix."""
    with written(output) as file:
        figure.savefig(file, format=output.suffix[1:] or "png", dpi=150)


class MeanScore:
    """The running number and mean of scores."""

    rows: int = 0
    mean: float = float("nan")

    def add(self, scores: "np.ndarray") -> "np.ndarray":
        """Count the scores and return them."""
        before = 0.0 if not self.rows else self.mean * (self.rows / (self.rows + len(scores)))
        self.rows += len(scores)
        self.mean = before + float(scores.sum()) / self.rows
        return scores


def draws_in_blocks(estimator: Any, number: int, *, seed: int, refine: int) -> "Iterator[list[np.ndarray]]":
    """Yield the columns of draws in blocks; the first block is ``sample(..., random_state=seed)``."""
    import numpy as np

    state = np.random.RandomState(seed)
    # At least one block, so that the estimator refuses a number below 1.
    for start in range(0, max(number, 1), BLOCK_DRAWS):
        count = min(number - start, BLOCK_DRAWS)
        yield list(estimator.sample(count, random_state=state, refine=refine).T)


def draws_at(
    estimator: Any, at: Path, features: list[str], number: int, *, reading: "Reading", seed: int, refine: int
) -> "Iterator[list[np.ndarray]]":
    """Yield the columns of draws at each row of a table; the first column is the row's number from 0."""
    import numpy as np

    from kexpfam.data.tables import table_blocks

    state, start = np.random.RandomState(seed), 0
    rows = max(1, BLOCK_DRAWS // max(1, number))
    for block in table_blocks(at, features, reading_for(estimator, reading), rows=rows):
        stop = start + len(block.values)
        draws = estimator.sample(block.values, number, random_state=state, refine=refine)
        yield [np.repeat(np.arange(start, stop), number), *draws.reshape((stop - start) * number, -1).T]
        start = stop
