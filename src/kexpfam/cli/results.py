"""What commands say: to people in lines, to machines in JSON, and tables to files."""

import itertools
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import typer

from kexpfam.files import written

__all__ = ["column_names", "facts", "summary", "tell", "write_rows"]


def summary(estimator: Any, what: str, score: float) -> str:
    """Return the lines on a fitted model: what it was fitted to, what was chosen, how the training rows score in the mean."""
    listed = lambda scales: ", ".join(dict.fromkeys(f"{scale:.3g}" for scale in scales))
    kernel = "a learned or plain law"
    if estimator.solution_ is not None:
        inputs = (
            f", of the features {listed(estimator.condition_lengthscale_)}" if estimator.conditional else ""
        )
        base, penalty = estimator.selection_.settings.base, estimator.rkhs_penalty_
        kernel = f"length scale {listed(estimator.lengthscale_)}{inputs}, penalty {penalty:.0e}, base {base}"
    candidates = (
        [f"{one.name}: {one}" for one in estimator.candidates_] if len(estimator.candidates_) > 1 else []
    )
    scored = f"mean log density of the training rows {score:.4f}"
    return "\n".join([f"fitted {estimator.n_rows_} rows of {what}: {kernel}", *candidates, scored])


def facts(estimator: Any, output: Path, score: float) -> dict[str, Any]:
    """Return what there is to say of a fitted model, for machines."""
    features, targets = column_names(estimator)
    chosen = ("lengthscale_", "condition_lengthscale_", "rkhs_penalty_", "candidates_")
    status = None if estimator.solution_ is None else estimator.solution_.status
    found = {
        "model": str(output),
        "rows": estimator.n_rows_,
        "columns": features,
        "targets": targets,
        "status": status,
    }
    found |= {name.strip("_"): getattr(estimator, name, None) for name in chosen}
    return found | {"mean_log_density_of_training_rows": score}


def column_names(estimator: Any) -> tuple[list[str], list[str]]:
    """Return the names of the features and of the targets, of which a density p(x) has none."""
    from kexpfam.data.tables import numbered

    features = getattr(estimator, "column_names_", None) or numbered(estimator.n_features_in_)
    if not estimator.conditional:
        return features, []
    y = estimator.training_data_[1]
    unnamed = ["y"] if y.ndim == 1 or y.shape[1] == 1 else numbered(y.shape[1], "y")
    return features, getattr(estimator, "target_names_", None) or unnamed


def tell(said: str | dict[str, Any], output: Path | None = None, *, err: bool = False) -> None:
    """Write lines for people, or what machines read, to a file or to standard output."""
    if not isinstance(said, str):
        import json

        from kexpfam.judge.diagnosis import plain

        said = json.dumps(plain(said), indent=2, allow_nan=False, ensure_ascii=False)
    if output is None:
        typer.echo(said, err=err)
        return
    with written(output) as file:
        file.write(f"{said}\n".encode())


def write_rows(output: Path | None, names: list[str], rows: Iterable[Collection[Any]]) -> None:
    """Write a table as CSV to a file, or to standard output, row by row as they come."""
    from kexpfam.data import tables

    if output is None:
        tables.write_rows(sys.stdout, names, rows)
        return
    count = itertools.count()
    tables.write_csv(output, names, (row for row, _ in zip(rows, count, strict=False)))
    typer.echo(f"{next(count)} rows written to {output}", err=True)
