"""The command ``fit``: its training data, in memory or in blocks of rows, and the fitted model."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kexpfam.cli.inputs import ColumnOptions

if TYPE_CHECKING:
    import numpy as np

    from kexpfam.data.tables import Reading, Table

__all__ = ["Training", "built_in", "fitted", "training"]


class Training(NamedTuple):
    """Training data: the names of features and targets, the arguments of ``fit``, and the weights of rows."""

    features: list[str]
    targets: list[str] | None
    rows: tuple[Any, ...]
    weights: "np.ndarray | None" = None


def fitted(data: Training, settings: dict[str, Any]) -> tuple[Any, str, float]:
    """Return the fitted model, a description of its columns, and the mean log density of all rows."""
    from kexpfam import ConditionalKernelExpFamily, KernelExpFamily

    features, targets, rows, weights = data
    # The names are set before the fit, whose errors name columns.
    if targets is None:
        estimator: Any = KernelExpFamily(**settings)
        what = f"{len(features)} columns"
    else:
        estimator = ConditionalKernelExpFamily(**settings)
        estimator.target_names_ = targets
        what = f"{', '.join(targets)} given {', '.join(features)}"
    estimator.column_names_ = features
    estimator.fit(*rows, sample_weight=weights)
    return estimator, what, estimator.score(*rows)


def built_in(name: str, chosen: ColumnOptions, rows: int, seed: int) -> Training | None:
    """Return rows of a built-in data set, or None if there is none of this name."""
    from kexpfam.datasets import SYNTHETIC

    if name not in SYNTHETIC:
        return None
    from kexpfam.data.tables import numbered

    if chosen.targets is not None:
        raise ValueError(f"{name} is a built-in set without a target; --target is for files.")
    given = {"columns": chosen.columns, "features": chosen.features, "weight": chosen.weight}
    for option, value in {**given, "kind": chosen.kinds}.items():
        if value:
            raise ValueError(f"{name} is a built-in set; --{option} is for files.")
    values = SYNTHETIC[name]().sample(rows, random_state=seed)
    return Training(numbered(values.shape[1]), None, (values,))


def training(data: Path, chosen: ColumnOptions, reading: "Reading") -> Training:
    """Return the training data of a file; the features are all other columns unless they are named.

    A folder of Parquet files, and a binary file of more rows than fit in memory, are read in blocks.
    """
    from kexpfam.data.blocks import DATASETS, Rows, row_blocks
    from kexpfam.data.tables import read_parts, read_table

    chosen.check()
    reading = reading._replace(labels=chosen.labels)
    if data.is_dir() or (data.is_file() and data.suffix.lower() in (".npy", *DATASETS)):
        blocks = row_blocks(data, Rows())
        if blocks is not None and (data.is_dir() or (blocks.rows or 0) > Rows().in_memory):
            return _in_blocks(data, blocks, chosen, reading)
    used = chosen.columns if chosen.targets is None else chosen.features
    parts = [part for part in (chosen.targets, [chosen.weight] if chosen.weight else None) if part]
    if not parts:
        table = read_table(data, used, reading)
        return Training(table.names, None, (table.values,))
    features, *rest = read_parts(data, parts, used, reading)
    weights = rest[-1].values[:, 0] if chosen.weight else None
    if chosen.targets is None:
        return Training(features.names, None, (features.values,), weights)
    return Training(features.names, rest[0].names, (features.values, _target(rest[0])), weights)


def _target(table: "Table") -> "np.ndarray":
    """Return targets, a single one as a vector."""
    return table.values[:, 0] if len(table.names) == 1 else table.values


def _in_blocks(data: Path, blocks: Any, chosen: ColumnOptions, reading: "Reading") -> Training:
    import numpy as np

    from kexpfam.data.blocks import RowBlocks, Rows, row_blocks
    from kexpfam.data.tables import Table, converted, warn_of_dropped

    features, targets, weight = _roles(data, _names(blocks, data), chosen)
    names, ends = [*features, *targets, *weight], (len(features), len(features) + len(targets))
    if data.suffix.lower() != ".npy":
        blocks = row_blocks(data, Rows(), columns=names)
    convert = partial(converted, str(data), names)

    def split(table: Table) -> Any:
        X, y = table.part(range(ends[0])).values, table.part(range(*ends))
        return (X, _target(y)) if targets else X

    def whole_rows(_: Any) -> Iterator[Table]:
        seen = kept = 0
        for block in blocks:
            table = convert(block, reading, seen)
            seen, kept = seen + len(block), kept + len(table.values)
            yield table
        warn_of_dropped(str(data), seen - kept, seen)

    weights = None
    if weight:
        of_block = lambda table: table.part([ends[1]]).values[:, 0]
        weights = np.concatenate([of_block(table) for table in whole_rows(None)])
    if reading.gaps == "drop":  # the numbers of rows that remain are unknown before reading
        rows = RowBlocks(lambda source: map(split, whole_rows(source)))
    else:
        rows = blocks.then(lambda block, start: split(convert(block, reading, start)))
    return Training(features, targets or None, (rows,), weights)


def _names(blocks: Any, data: Path) -> list[str]:
    """Return the names of the columns of the first block."""
    from kexpfam.data.tables import numbered

    first = next(iter(blocks), None)
    if first is None:
        raise ValueError(f"{data}: there is no row of data.")
    return list(getattr(first, "column_names", numbered(first.shape[1])))


def _roles(data: Path, names: list[str], chosen: ColumnOptions) -> tuple[list[str], list[str], list[str]]:
    """Return the names of features, targets and weights; each must exist and have one role."""
    used = chosen.columns or chosen.features
    targets = chosen.targets or []
    weight = [chosen.weight] if chosen.weight else []
    features = [name for name in names if name not in (*targets, *weight)] if used is None else used
    named = [*features, *targets, *weight]
    missing = [name for name in named if name not in names]
    if missing:
        raise ValueError(f"{data}: no column {', '.join(map(repr, missing))}; there are {', '.join(names)}.")
    twice = [name for name in named if named.count(name) > 1]
    if twice:
        raise ValueError(
            f"{data}: column {twice[0]!r} is named twice; a column is a feature, a target or a weight."
        )
    if not features:
        raise ValueError(f"{data}: no column is left for the features; there are {', '.join(names)}.")
    return features, targets, weight
