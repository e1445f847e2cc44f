"""What commands read: the options that say how a table is read, and the columns that a model takes from it."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kexpfam.cli.results import column_names

if TYPE_CHECKING:
    import numpy as np

    from kexpfam.data.tables import Reading, Table

__all__ = [
    "Columns",
    "Training",
    "built_in",
    "check_options",
    "kinds_of",
    "model_blocks",
    "model_rows",
    "names_in",
    "reading_for",
    "reads_tables",
    "training",
]

PANEL = "How the table is read"
# Characters that a shell makes hard to type.
CHARACTERS = {"tab": "\t", r"\t": "\t", "space": " ", "comma": ",", "semicolon": ";", "none": ""}


class Training(NamedTuple):
    """What a model is fitted to: features, targets if there are some, and the weights of rows if they have any."""

    features: "Table"
    targets: "Table | None"
    weights: "np.ndarray | None"


def _reading(
    separator: Annotated[
        str | None,
        typer.Option(
            help="What stands between cells: ';', tab, space, ...; default: found out.", rich_help_panel=PANEL
        ),
    ] = None,
    decimal: Annotated[
        str | None,
        typer.Option(help="The decimal mark, '.' or ','; default: found out.", rich_help_panel=PANEL),
    ] = None,
    quote: Annotated[
        str,
        typer.Option(help="What stands around cells that hold separators, or none.", rich_help_panel=PANEL),
    ] = '"',
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="Whether the first row holds names; default: found out.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="The letters of the file: utf-8, latin-1, ...", rich_help_panel=PANEL)
    ] = "utf-8",
    missing: Annotated[
        list[str] | None,
        typer.Option(
            help="A word for missing cells beside NA, nan, null and the like; may be repeated.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Leave out rows with missing cells.", rich_help_panel=PANEL)
    ] = False,
) -> "Reading":
    """Return the record of these options."""
    from kexpfam.data.delimited import MISSING, Reading

    if decimal not in (None, ".", ","):
        raise ValueError(f"--decimal is '.' or ',', got {decimal!r}.")
    return Reading(
        separator=None if separator is None else CHARACTERS.get(separator, separator),
        decimal=decimal,
        quote=CHARACTERS.get(quote, quote),
        header=header,
        encoding="utf-8-sig" if encoding == "utf-8" else encoding,
        missing=(*MISSING, *(missing or ())),
        gaps="drop" if drop_missing else "keep",
        texts=True,
    )


def reads_tables(command: Callable) -> Callable:
    """Give a command the options that say how a table is read; it gets them as one record, ``reading``."""
    own, options = inspect.signature(command), inspect.signature(_reading).parameters

    @functools.wraps(command)
    def reader(**given: Any) -> Any:
        chosen = {name: given.pop(name) for name in options}
        return command(**given, reading=_reading(**chosen))

    kept = [parameter for name, parameter in own.parameters.items() if name != "reading"]
    added = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in options.values()]
    reader.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    reader.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *added]}
    return reader


class Columns(NamedTuple):
    """The names that were given: of a density, of targets and their features, and of the weights."""

    columns: list[str] | None
    targets: list[str] | None
    features: list[str] | None
    weight: str | None
    kinds: dict[str, str] = {}

    def settings(self) -> dict[str, Any]:
        """Return the kinds as an estimator takes them: those of targets are a setting of their own."""
        if self.targets is None:
            return {"columns": self.kinds or None}
        own = {name: kind for name, kind in self.kinds.items() if name in self.targets}
        return {
            "columns": {name: kind for name, kind in self.kinds.items() if name not in own} or None,
            "target_columns": own or None,
        }


def training(data: Path, chosen: Columns, reading: "Reading") -> Training:
    """Return what a model is fitted to; the features are all other columns unless they are named."""
    from kexpfam.data.tables import read_parts, read_table

    columns, targets, features, weight, kinds = chosen
    reading = reading._replace(
        labels=[name for name, kind in kinds.items() if kind.split(":")[0] == "category"]
    )
    check_options(chosen)
    used = columns if targets is None else features
    parts = [*([targets] if targets else []), *([[weight]] if weight else [])]
    if not parts:
        return Training(read_table(data, used, reading), None, None)
    table, *rest = read_parts(data, parts, used, reading)
    return Training(table, rest[0] if targets else None, rest[-1].values[:, 0] if weight else None)


def check_options(chosen: Columns) -> None:
    """Raise if names were given that do not go together."""
    if chosen.targets is not None and chosen.columns is not None:
        raise ValueError("--columns is for densities without a target; with --target use --features.")
    if chosen.targets is None and chosen.features is not None:
        raise ValueError(
            "--features needs --target, the columns to predict; for the density of some columns use --columns."
        )


def built_in(name: str, chosen: Columns, rows: int, seed: int) -> Training | None:
    """Return rows of a built-in set, or None if there is none of that name."""
    from kexpfam.datasets import SYNTHETIC

    if name not in SYNTHETIC:
        return None
    from kexpfam.data.tables import Table, numbered

    if chosen.targets is not None:
        raise ValueError(f"{name} is a built-in set without a target; --target is for files.")
    given = {
        "--columns": chosen.columns,
        "--features": chosen.features,
        "--weight": chosen.weight,
        "--kind": chosen.kinds,
    }
    for option, value in given.items():
        if value:
            raise ValueError(f"{name} is a built-in set; {option} is for files.")
    values = SYNTHETIC[name]().sample(rows, random_state=seed)
    return Training(Table(numbered(values.shape[1]), values), None, None)


def model_rows(estimator: Any, data: Path, reading: "Reading | None" = None) -> "tuple[np.ndarray, ...]":
    """Return what the model takes from the file, by name: the features, and the targets if it is conditional."""
    from kexpfam.data.tables import Table, read_values

    names = column_names(estimator)
    known = [*names[0], *names[1]]
    return _parts(Table(known, read_values(data, known, reading_for(estimator, reading))), *names)


def model_blocks(
    estimator: Any, data: Path, columns: list[str] | None, reading: "Reading | None"
) -> "Iterator[tuple[np.ndarray, ...]]":
    """Yield what the model takes from the file, some rows at a time; ``columns`` are the names that its columns have there."""
    from kexpfam.data.streams import table_blocks
    from kexpfam.data.tables import by_name

    names = column_names(estimator)
    known, reading = [*names[0], *names[1]], reading_for(estimator, reading)
    chosen = None
    if columns is not None:
        columns = _in_order(columns, known)
        reading = reading._replace(labels=[columns[known.index(name)] for name in reading.labels])
        chosen = by_name(columns)
    for block in table_blocks(data, columns or known, reading, chosen=chosen):
        yield _parts(block, *names)


def _parts(table: "Table", features: list[str], targets: list[str]) -> "tuple[np.ndarray, ...]":
    width = len(features)
    parts = [range(width), range(width, width + len(targets))] if targets else [range(width)]
    return tuple(table.part(list(part)).values for part in parts)


def reading_for(estimator: Any, reading: "Reading | None") -> "Reading":
    """Return how a table is read for a model: its labels as texts, and gaps only if it knows what to do with them."""
    from kexpfam.data.delimited import Reading
    from kexpfam.data.kinds import Category

    reading = reading or Reading()
    kinds = getattr(estimator, "columns_", None)
    if kinds is None:
        return reading._replace(texts=False, gaps=reading.gaps.replace("keep", "refuse"))
    labels = [
        name for name, kind in (kinds | estimator.target_columns_).items() if isinstance(kind, Category)
    ]
    # A column that is not one of labels holds numbers, and what is none is best named by its line.
    return reading._replace(labels=[str(name) for name in labels], texts=False)


def names_in(columns: str | None) -> list[str] | None:
    """Return the names in a list with commas between them."""
    return None if columns is None else [name.strip() for name in columns.split(",")]


def kinds_of(given: list[str] | None) -> dict[str, str]:
    """Return the kinds of columns in ``share=bounded:0:1`` and the like, by name."""
    kinds = {}
    for text in given or ():
        name, sign, kind = text.rpartition("=")
        if not sign or not name.strip() or not kind.strip():
            raise ValueError(
                f"--kind is a column and its kind, as in --kind share=bounded:0:1; got {text!r}."
            )
        if name.strip() in kinds:
            raise ValueError(f"--kind gives column {name.strip()!r} two kinds.")
        kinds[name.strip()] = kind.strip()
    return kinds


def _in_order(columns: list[str], known: list[str]) -> list[str]:
    """Return the user's names in the order of the model's: its own names find their places, others stand for them in turn."""
    if sorted(columns) == sorted(known):
        return known
    if len(columns) != len(known):
        raise ValueError(
            f"{len(columns)} columns were named where {len(known)} are needed, for {', '.join(known)}."
        )
    astray = [name for name, place in zip(columns, known, strict=True) if name in known and name != place]
    if astray:
        raise ValueError(
            f"column {', '.join(astray)} is not in its place; name the columns in the order {', '.join(known)}."
        )
    return columns
