"""The command ``fit``: its training data, in memory or in blocks of rows, and the fitted model."""

from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from kexpfam import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.cli.inputs import ColumnOptions
from kexpfam.data.blocks import DATASETS, RowBlocks, Rows, row_blocks
from kexpfam.data.tables import Reading, Table, by_name, converted, numbered, read_table, table_blocks
from kexpfam.datasets import SYNTHETIC


class Training(NamedTuple):
    """Training data: the names of features and targets, the arguments of ``fit``, and the weights of rows."""

    features: list[str]
    targets: list[str] | None
    rows: tuple[Any, ...]
    weights: np.ndarray | None = None


def fitted(
    data: Training, settings: dict[str, Any], time_budget: float | None = None
) -> tuple[Any, str, float]:
    """Return the fitted model, a description of its columns, and the mean log density of all rows."""
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
    estimator.fit(*rows, sample_weight=weights, time_budget=time_budget)
    return estimator, what, estimator.score(*rows)


def built_in(name: str, chosen: ColumnOptions, rows: int, seed: int) -> Training | None:
    """Return rows of a built-in data set, or None if there is none of this name."""
    if name not in SYNTHETIC:
        return None
    if chosen.targets is not None:
        raise ValueError(f"{name} is a built-in set without a target; --target is for files.")
    given = {"columns": chosen.columns, "features": chosen.features, "weight": chosen.weight}
    for option, value in {**given, "kind": chosen.kinds}.items():
        if value:
            raise ValueError(f"{name} is a built-in set; --{option} is for files.")
    values = SYNTHETIC[name]().sample(rows, random_state=seed)
    return Training(numbered(values.shape[1]), None, (values,))


def training(data: Path, chosen: ColumnOptions, reading: Reading) -> Training:
    """Return the training data of a file; the features are all other columns unless they are named.

    A folder of Parquet files, and a binary file of more rows than fit in memory, are read in blocks.
    """
    if chosen.targets is not None and chosen.columns is not None:
        raise ValueError("--columns is for densities without a target; with --target use --features.")
    if chosen.targets is None and chosen.features is not None:
        raise ValueError("--features needs --target, the columns to predict; else use --columns.")
    categories = [name for name, kind in chosen.kinds.items() if kind.split(":")[0] == "category"]
    reading = reading._replace(labels=categories)
    if data.is_dir() or (data.is_file() and data.suffix.lower() in (".npy", *DATASETS)):
        blocks = row_blocks(data, Rows())
        if blocks is not None and (data.is_dir() or (blocks.rows or 0) > Rows().in_memory):
            return _in_blocks(data, blocks, chosen, reading)
    roles: list[_Roles] = []

    def choose(place: str, names: list[str] | None, width: int) -> list[int]:
        positions, found = _roles(place, names, width, chosen)
        roles.append(found)
        return positions

    table = read_table(data, reading=reading, choose=choose)
    (found,) = roles
    return Training(found.features, found.targets or None, *found.split(table))


class _Roles(NamedTuple):
    """The names of features, targets and weights, which are the columns of a table in this order."""

    features: list[str]
    targets: list[str]
    weight: list[str]

    def split(self, table: Table) -> tuple[tuple[Any, ...], np.ndarray | None]:
        """Return the arguments of ``fit``, of which a single target is a vector, and the weights if any."""
        X, y, weight = table.split(*map(len, self))
        rows = (X, y[:, 0] if y.shape[1] == 1 else y) if self.targets else (X,)
        return rows, weight[:, 0] if self.weight else None


def _roles(place: str, names: list[str] | None, width: int, given: ColumnOptions) -> tuple[list[int], _Roles]:
    """Return the positions and the roles of the columns; each column must exist and have one role."""
    used = given.columns if given.targets is None else given.features
    targets, weight = given.targets or [], [given.weight] if given.weight else []
    known = numbered(width) if names is None else names
    if used is None:
        by_name(None)(place, names, width)
        used = [name for name in known if name not in (*targets, *weight)]
    named = [*used, *targets, *weight]
    twice = [name for name in named if named.count(name) > 1]
    if twice:
        roles = "a column is a feature, a target or a weight"
        raise ValueError(f"{place}: column {twice[0]!r} is named twice; {roles}.")
    positions = by_name(named)(place, names, width)
    if not used:
        raise ValueError(f"{place}: no column is left for the features; there are {', '.join(known)}.")
    return positions, _Roles(used, targets, weight)


def _in_blocks(data: Path, blocks: RowBlocks, chosen: ColumnOptions, reading: Reading) -> Training:
    place, first = str(data), next(iter(blocks), None)
    if first is None:
        raise ValueError(f"{place}: there is no row of data.")
    _, roles = _roles(place, getattr(first, "column_names", None), first.shape[1], chosen)
    names = [*roles.features, *roles.targets, *roles.weight]
    if not isinstance(first, np.ndarray):
        blocks = row_blocks(data, Rows(), columns=names) or blocks

    def split(table: Table) -> Any:
        parts, _ = roles.split(table)
        return parts if len(parts) > 1 else parts[0]

    whole_rows = lambda: table_blocks(data, names, reading, choose=by_name(names))
    rows = blocks.then(lambda block, start: split(converted(place, names, block, reading, start)))
    if reading.gaps == "drop":  # the number of rows that remain is unknown before reading
        rows = RowBlocks(lambda _: map(split, whole_rows()))
    weights = None
    if roles.weight:
        weights = np.concatenate([cast(np.ndarray, roles.split(table)[1]) for table in whole_rows()])
    return Training(roles.features, roles.targets or None, (rows,), weights)
