"""Input of the commands: the options of reading a table, and the columns that a model takes from it."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import numpy as np

    from kexpfam.data.tables import Reading

# Names of characters that are hard to type in a shell.
CHARACTERS = {"tab": "\t", r"\t": "\t", "space": " ", "comma": ",", "semicolon": ";", "none": ""}
HEADER = "Whether the first row contains names; default: detected."
Text = str | None


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="How the table is read")


def _reading(
    separator: Annotated[Text, _option("Separator: ';', tab, space, ...; default: detected.")] = None,
    decimal: Annotated[Text, _option("Decimal mark, '.' or ','; default: detected.")] = None,
    quote: Annotated[str, _option("Quotes around cells that contain separators, or none.")] = '"',
    header: Annotated[bool | None, _option(HEADER, "--header/--no-header")] = None,
    encoding: Annotated[str, _option("Encoding of the file: utf-8, latin-1, ...")] = "utf-8",
    comment: Annotated[Text, _option("Skip lines that start with this, such as '#'.")] = None,
    missing: Annotated[list[str] | None, _option("Another word for a missing cell; repeatable.")] = None,
    drop_missing: Annotated[bool, _option("Drop the rows with missing cells.", "--drop-missing")] = False,
) -> "Reading":
    """Return the record of these options."""
    from kexpfam.data.text import MISSING, Reading

    if decimal not in (None, ".", ","):
        raise ValueError(f"--decimal must be '.' or ',', got {decimal!r}.")
    return Reading(
        separator=None if separator is None else CHARACTERS.get(separator, separator),
        decimal=decimal,
        quote=CHARACTERS.get(quote, quote),
        header=header,
        encoding="utf-8-sig" if encoding == "utf-8" else encoding,
        missing=(*MISSING, *(missing or ())),
        gaps="drop" if drop_missing else "keep",
        texts=True,
        comment=comment,
    )


def reads_tables(command: Callable) -> Callable:
    """Add the options of reading a table to a command, which gets them as one record, ``reading``."""
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


class ColumnOptions(NamedTuple):
    """Columns given on the command line: of p(x), or targets and features; of weights; and their kinds."""

    columns: list[str] | None
    targets: list[str] | None
    features: list[str] | None
    weight: str | None
    kinds: dict[str, str] = {}

    def settings(self) -> dict[str, Any]:
        """Return the kinds as settings of an estimator."""
        if self.targets is None:
            return {"columns": self.kinds or None}
        own = {name: kind for name, kind in self.kinds.items() if name in self.targets}
        others = {name: kind for name, kind in self.kinds.items() if name not in own}
        return {"columns": others or None, "target_columns": own or None}


def column_names(estimator: Any) -> tuple[list[str], list[str]]:
    """Return the names of the features and of the targets; p(x) has no targets."""
    from kexpfam.data.tables import numbered

    features = getattr(estimator, "column_names_", None) or numbered(estimator.n_features_in_)
    return features, estimator._target_names if estimator.conditional else []


def model_rows(estimator: Any, data: Path, reading: "Reading") -> "tuple[np.ndarray, ...]":
    """Return the model's columns of a file: the features, and the targets if it is conditional."""
    import numpy as np

    blocks = zip(*model_blocks(estimator, data, None, reading), strict=True)
    return tuple(np.concatenate(parts) for parts in blocks)


def model_blocks(
    estimator: Any, data: Path, columns: list[str] | None, reading: "Reading"
) -> "Iterator[tuple[np.ndarray, ...]]":
    """Yield the model's columns of a file in blocks of rows; ``columns`` are their names in the file."""
    from kexpfam.data.tables import by_name, table_blocks

    features, targets = column_names(estimator)
    known, reading = [*features, *targets], reading_for(estimator, reading)
    choose = None
    if columns is not None:
        columns = _in_order(columns, known)
        reading = reading._replace(labels=[columns[known.index(name)] for name in reading.labels])
        choose = by_name(columns)
    for block in table_blocks(data, columns or known, reading, choose=choose):
        parts = block.split(len(features), len(targets))
        yield tuple(parts if targets else parts[:1])


def reading_for(estimator: Any, reading: "Reading") -> "Reading":
    """Return the reading options for a model; missing cells are kept if the model has column kinds."""
    kinds = getattr(estimator, "columns_", None)
    if kinds is None:
        return reading._replace(texts=False, gaps=reading.gaps.replace("keep", "refuse"))
    known = (kinds | estimator.target_columns_).items()
    labels = [str(name) for name, kind in known if kind.categorical]
    return reading._replace(labels=labels, texts=False)


def names_in(columns: str | None) -> list[str] | None:
    """Return the names in a comma-separated list."""
    return None if columns is None else [name.strip() for name in columns.split(",")]


def kinds_of(given: list[str] | None) -> dict[str, str]:
    """Return the kinds of columns by name, from options such as ``share=bounded:0:1``."""
    kinds = dict[str, str]()
    for text in given or ():
        name, _, kind = (part.strip() for part in text.rpartition("="))
        if not name or not kind:
            raise ValueError(f"--kind needs a column and its kind, as in share=bounded:0:1; got {text!r}.")
        if name in kinds:
            raise ValueError(f"--kind gives column {name!r} two kinds.")
        kinds[name] = kind
    return kinds


def _in_order(columns: list[str], known: list[str]) -> list[str]:
    """Return the given names in the order of the model's columns; other names replace these in turn."""
    if sorted(columns) == sorted(known):
        return known
    if len(columns) != len(known):
        needed = f"{len(known)} are needed, for {', '.join(known)}"
        raise ValueError(f"{len(columns)} columns were named where {needed}.")
    moved = [name for name, place in zip(columns, known, strict=True) if name in known and name != place]
    if moved:
        order = f"name them in the order {', '.join(known)}"
        raise ValueError(f"column {', '.join(moved)} is not in its place; {order}.")
    return columns
