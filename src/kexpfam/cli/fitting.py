"""What the command ``fit`` does: rows that are held or come in blocks, and the model fitted to them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kexpfam.cli.inputs import Columns, Training, check_options

if TYPE_CHECKING:
    import numpy as np

    from kexpfam.data.blocks import RowBlocks
    from kexpfam.data.tables import Reading

__all__ = ["TrainingBlocks", "fitted", "fitted_to_blocks", "training_blocks"]


class TrainingBlocks(NamedTuple):
    """What a model is fitted to, block by block: names of features and targets, rows or pairs of them, and weights."""

    features: list[str]
    targets: list[str] | None
    blocks: "RowBlocks"
    weights: "np.ndarray | None"


def fitted(table: Training, settings: dict[str, Any]) -> tuple[Any, str, float]:
    """Return the fitted model, what it is of, and the mean log density of all rows."""
    from kexpfam import ConditionalKernelExpFamily, KernelExpFamily

    features, targets, weights = table
    rows, what = [features.values], f"{len(features.names)} columns"
    estimator: Any = (
        KernelExpFamily(**settings) if targets is None else ConditionalKernelExpFamily(**settings)
    )
    # The names come first: what is wrong with a column is said by its name.
    estimator.column_names_ = features.names
    if targets is not None:
        estimator.target_names_ = targets.names
        rows.append(targets.values[:, 0] if len(targets.names) == 1 else targets.values)
        what = f"{', '.join(targets.names)} given {', '.join(features.names)}"
    estimator.fit(*rows, sample_weight=weights)
    return estimator, what, estimator.score(*rows)


def fitted_to_blocks(table: TrainingBlocks, settings: dict[str, Any]) -> tuple[Any, str, float]:
    """Return the model fitted to rows that are not held, what it is of, and the mean log density of all rows."""
    from kexpfam import ConditionalKernelExpFamily, KernelExpFamily

    features, targets, blocks, weights = table
    estimator: Any = (
        KernelExpFamily(**settings) if targets is None else ConditionalKernelExpFamily(**settings)
    )
    estimator.column_names_ = features
    if targets is not None:
        estimator.target_names_ = targets
    estimator.fit(blocks, sample_weight=weights)
    what = (
        f"{len(features)} columns" if targets is None else f"{', '.join(targets)} given {', '.join(features)}"
    )
    return estimator, what, estimator.score(blocks)


def training_blocks(data: Path, chosen: Columns, reading: "Reading") -> TrainingBlocks | None:
    """Return what a model is fitted to where a file has more rows than are held, or the data are a folder of Parquet files.

    Features are all other columns unless they are named. None for anything else.
    """
    binary = data.is_file() and data.suffix.lower() in (".parquet", ".pq", ".npy")
    if not binary and not data.is_dir():
        return None
    import numpy as np

    from kexpfam.data.blocks import RowBlocks, Rows, row_blocks
    from kexpfam.data.streams import table_blocks
    from kexpfam.data.tables import by_name

    settings = Rows()
    whole = row_blocks(data, settings)
    if whole is None or (binary and (whole.rows or 0) <= settings.in_memory):
        return None
    features, targets, weight = _roles(data, _names(whole, data), chosen)
    used, ends = [*features, *targets, *weight], (len(features), len(features) + len(targets))
    labels = [name for name, kind in chosen.kinds.items() if kind.split(":")[0] == "category"]
    options: dict[str, Any] = {"rows": settings.block, "chosen": by_name(used)}
    tables = lambda blocks: table_blocks(
        data, used, reading._replace(labels=labels), blocks=blocks, **options
    )
    part = lambda table, start, stop: table.part(list(range(start, stop))).values
    weights = (
        np.concatenate([part(table, ends[1], len(used))[:, 0] for table in tables(whole)]) if weight else None
    )

    def read(source: Any) -> Iterator[Any]:
        for table in tables(whole if source is whole else whole.read(source)):
            X, y = part(table, 0, ends[0]), part(table, *ends)
            yield (X, y[:, 0] if len(targets) == 1 else y) if targets else X

    # How many rows of a source are dropped is known when it was read, and of all of them something is said at the end.
    alone = (
        RowBlocks(read, [whole]) if reading.gaps == "drop" else RowBlocks(read, whole.sources, whole.lengths)
    )
    return TrainingBlocks(features, targets or None, alone, weights)


def _names(blocks: "RowBlocks", data: Path) -> list[str]:
    """Return the names of the columns of the first block."""
    from kexpfam.data.tables import numbered

    first = next(iter(blocks), None)
    if first is None:
        raise ValueError(f"{data}: there is no row of data.")
    return list(getattr(first, "column_names", numbered(first.shape[1])))


def _roles(data: Path, names: list[str], chosen: Columns) -> tuple[list[str], list[str], list[str]]:
    """Return the names of features, targets and weights, once each is known to be there, and to be one of them only."""
    check_options(chosen)
    used, targets, weight = (
        chosen.columns or chosen.features,
        chosen.targets or [],
        [chosen.weight] if chosen.weight else [],
    )
    features = [name for name in names if name not in (*targets, *weight)] if used is None else used
    named = [*features, *targets, *weight]
    missing, twice = (
        [name for name in named if name not in names],
        [name for name in named if named.count(name) > 1],
    )
    if missing:
        raise ValueError(f"{data}: no column {', '.join(map(repr, missing))}; there are {', '.join(names)}.")
    if twice:
        raise ValueError(
            f"{data}: column {twice[0]!r} is named twice; a column is a feature, a target or a weight."
        )
    if not features:
        raise ValueError(f"{data}: no column is left for the features; there are {', '.join(names)}.")
    return features, targets, weight
