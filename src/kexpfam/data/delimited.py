"""Text files of cells: separators, decimal commas, quotes, headers and missing cells as people have them.

Two readers agree on what is good. pyarrow's is fast, runs on several cores and is used where it is installed; the standard
library's is slow, knows the line of every cell, and is asked when the fast one finds fault.
"""

import codecs
import contextlib
import csv
import functools
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

__all__ = ["HOLDS_DATES", "MISSING", "Cells", "Reading", "TableError", "read_text", "read_text_blocks"]

# What stands for a cell without a value, whatever the program that wrote the file.
MISSING = ("", "NA", "N/A", "n/a", "na", "NaN", "nan", "NULL", "null", "None", "#N/A", "<NA>")
SEPARATORS = (",", ";", "\t", "|")
# Characters of a file that tell its separator, and rows among them.
OPENING, OPENING_ROWS = 65536, 50
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
HOLDS_DATES = "holds dates or durations: turn them into numbers first, such as days since the first of them, or hours of the day."
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


class TableError(ValueError):
    """A file cannot be used as a table; the message says why and where."""


class Reading(NamedTuple):
    """How a table is read; ``None`` is found out from the file.

    ``gaps`` says what becomes of missing cells: "refuse", "keep" them as NaN, or "drop" their rows. ``labels`` are the columns
    whose cells are labels even if they look like numbers; other columns of text are labels too if ``texts`` may be.
    """

    separator: str | None = None
    decimal: str | None = None
    quote: str = '"'
    header: bool | None = None
    encoding: str = "utf-8-sig"
    missing: tuple[str, ...] = MISSING
    gaps: str = "refuse"
    labels: Collection[str] = ()
    texts: bool = False


class Cells(NamedTuple):
    """Chosen columns of a file: numbers with NaN, or an array of objects with None, where a cell is missing."""

    columns: list[np.ndarray]
    lines: Sequence[int] | None = None

    def place(self, row: int) -> str:
        """Return where a row stands in its file."""
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"


class _Form(NamedTuple):
    """The form of a text file, once it is known."""

    names: list[str] | None
    width: int
    separator: str
    decimal: str
    skipped: int  # lines before the first row


def read_text(
    path: str,
    opened: Callable[[], BinaryIO],
    reading: Reading,
    chosen: Callable[[list[str] | None, int], list[int]],
) -> tuple[list[str] | None, list[int], Cells]:
    """Return the names, the positions of the chosen columns, and their cells.

    ``opened`` opens the file anew each time. ``chosen`` chooses positions by the names, or by the width if there are none.
    """
    try:
        form = _form(path, opened, reading)
        positions = chosen(form.names, form.width)
        found = _fast(opened, form, reading, positions) or _slow(path, opened, form, reading, positions)
    except (UnicodeDecodeError, LookupError, csv.Error, EOFError) as error:
        raise TableError(f"{path}: not a readable CSV file ({error}).") from None
    return form.names, positions, found


def read_text_blocks(
    path: str,
    opened: Callable[[], BinaryIO],
    reading: Reading,
    chosen: Callable[[list[str] | None, int], list[int]],
    read: Callable[[], bytes],
) -> Iterator[Cells]:
    """Yield the chosen columns, some rows at a time; ``opened`` opens the start of a file, ``read`` gives its next bytes."""
    try:
        form = _form(path, opened, reading)
        positions, line = chosen(form.names, form.width), 0
        for block in _whole_rows(read, reading):
            part = form._replace(skipped=max(form.skipped - line, 0))
            again = functools.partial(io.BytesIO, block)
            yield _fast(again, part, reading, positions) or _slow(path, again, part, reading, positions, line)
            line += block.count(b"\n")
    except (UnicodeDecodeError, LookupError, csv.Error, EOFError) as error:
        raise TableError(f"{path}: not a readable CSV file ({error}).") from None


def _whole_rows(read: Callable[[], bytes], reading: Reading) -> Iterator[bytes]:
    """Yield blocks of bytes that end where a row does; a line break within quotes ends no row."""
    if "16" in reading.encoding or "32" in reading.encoding:  # their line breaks are not single bytes
        yield b"".join(iter(read, b""))
        return
    quote, rest = reading.quote.encode(), b""
    while chunk := read():
        block = rest + chunk
        end = block.rfind(b"\n") + 1
        while end and quote and block.count(quote, 0, end) % 2:
            end = block.rfind(b"\n", 0, end - 1) + 1
        rest = block[end:]
        if end:
            yield block[:end]
    if rest.strip():
        yield rest


def _form(path: str, opened: Callable[[], BinaryIO], reading: Reading) -> _Form:
    """Return the form of a file, from its first rows."""
    for name, value in (("separator", reading.separator), ("quote", reading.quote or None)):
        if value is not None and len(value) != 1:
            raise TableError(f"{path}: a {name} is one character, got {value!r}.")
    with _text(opened, reading) as stream:
        opening = stream.read(OPENING)
    separator = reading.separator or _separator(opening, reading)
    with _text(opened, reading) as stream:
        reader = csv.reader(stream, **_dialect(separator, reading))
        rows = [
            (reader.line_num, row) for row, _ in zip(filter(None, reader), range(OPENING_ROWS), strict=False)
        ]
    if not rows:
        raise TableError(f"{path}: the file is empty.")
    cells = [cell for _, row in rows for cell in row]
    decimal = reading.decimal or _decimal(cells, separator)
    line, first = rows[0]
    header = reading.header
    if header is None:
        header = any(_number(cell, decimal) is None and cell.strip() not in reading.missing for cell in first)
    if header and len(rows) == 1:
        raise TableError(f"{path}: there is a header but no row of data.")
    names = [cell.strip() for cell in first] if header else None
    return _Form(names, len(first), separator, decimal, line if header else 0)


def _text(opened: Callable[[], BinaryIO], reading: Reading) -> io.TextIOWrapper:
    codecs.lookup(reading.encoding)  # raises before anything is open
    return io.TextIOWrapper(opened(), encoding=reading.encoding, newline="")


def _dialect(separator: str, reading: Reading) -> dict[str, Any]:
    quoting = csv.QUOTE_MINIMAL if reading.quote else csv.QUOTE_NONE
    return {"delimiter": separator, "quotechar": reading.quote or None, "quoting": quoting}


def _separator(opening: str, reading: Reading) -> str:
    """Return the separator that cuts most of the first rows into as many cells as the first, the more the better."""

    def agreement(separator: str) -> tuple[float, int]:
        lines = opening.splitlines(keepends=True)[:OPENING_ROWS]
        widths = [len(row) for row in csv.reader(lines, **_dialect(separator, reading)) if row]
        if not widths or widths[0] == 1:
            return 0.0, 1
        return sum(width == widths[0] for width in widths) / len(widths), widths[0]

    # The first of the best: a comma, if there is no other reason.
    return max(SEPARATORS, key=agreement) if opening else SEPARATORS[0]


def _decimal(cells: list[str], separator: str) -> str:
    """Return the decimal mark: a comma, if it separates no cells and some cells are numbers only with it."""
    commas = separator != "," and any(DECIMAL_COMMA.fullmatch(cell.strip()) for cell in cells)
    return "," if commas else "."


def _number(cell: str, decimal: str) -> float | None:
    if decimal != ".":
        # "1.234" beside a decimal comma is a thousand and more to one, and one and a bit to another: it is no number here.
        cell = "no number" if "." in cell else cell.replace(decimal, ".")
    try:
        return float(cell)
    except ValueError:
        return None


def _fast(
    opened: Callable[[], BinaryIO], form: _Form, reading: Reading, positions: list[int]
) -> Cells | None:
    """Return the cells as pyarrow reads them, or None if it cannot, or if there is something to find fault with."""
    try:
        import pyarrow
        import pyarrow.csv as arrow
    except ImportError:
        return None
    labels = {str(j) for j in positions if form.names is not None and form.names[j] in reading.labels}
    quoted = reading.quote != "" and reading.quote.encode() in _head(opened)
    shape = {"column_names": [str(j) for j in range(form.width)], "skip_rows": form.skipped}
    convert = arrow.ConvertOptions(
        include_columns=[str(j) for j in positions],
        column_types=dict.fromkeys(labels, pyarrow.string()),
        null_values=list(reading.missing),
        strings_can_be_null=True,
        decimal_point=form.decimal,
    )
    parse = arrow.ParseOptions(
        delimiter=form.separator, quote_char=reading.quote or False, newlines_in_values=quoted
    )
    try:
        with opened() as file:
            table = arrow.read_csv(
                file, arrow.ReadOptions(**shape, encoding=_codec(reading.encoding)), parse, convert
            )
    except (ValueError, OSError, LookupError):
        return None
    columns = [
        _from_arrow(column, str(j) in labels, reading)
        for j, column in zip(positions, table.columns, strict=True)
    ]
    found = [column for column in columns if column is not None]
    return Cells(found) if len(found) == len(columns) else None


def _codec(encoding: str) -> str:
    return "utf8" if encoding.lower() in ("utf-8-sig", "utf-8", "utf8") else encoding


def _head(opened: Callable[[], BinaryIO]) -> bytes:
    with opened() as file:
        return file.read(OPENING)


def _from_arrow(column: Any, label: bool, reading: Reading) -> np.ndarray | None:
    """Return a column, or None where a look at single cells is needed: numbers among texts, infinities, dates."""
    kind = str(column.type)
    if kind.startswith(("int", "uint", "double", "float")):
        numbers = column.to_numpy().astype(float)
        return None if np.isinf(numbers).any() else numbers
    if kind == "null":
        return np.full(len(column), np.nan)
    if kind != "string" or not (label or reading.texts):
        return None
    if not label and any(
        value is not None and _number(value, ".") is not None for value in column.unique().to_pylist()
    ):
        return None
    return np.array(column.to_pylist(), dtype=object)


def _slow(
    path: str,
    opened: Callable[[], BinaryIO],
    form: _Form,
    reading: Reading,
    positions: list[int],
    before: int = 0,
) -> Cells:
    """Return the cells as the standard library reads them; what is wrong is named with its line, after ``before`` others."""
    with _text(opened, reading) as stream:
        rows = [(before + line, row) for line, row in _rows(stream, form, reading)]
    uneven = next(((line, row) for line, row in rows if len(row) != form.width), None)
    if uneven is not None:
        line, row = uneven
        raise TableError(f"{path}, line {line}: {len(row)} cells where {form.width} were expected.")
    lines = [line for line, _ in rows]
    columns = []
    for j in positions:
        name = f"x{j}" if form.names is None else form.names[j]
        columns.append(_column(path, name, [row[j] for _, row in rows], lines, form, reading))
    return Cells(columns, lines)


def _rows(stream: io.TextIOWrapper, form: _Form, reading: Reading) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(stream, **_dialect(form.separator, reading))
    for row in reader:
        if row and reader.line_num > form.skipped:
            yield reader.line_num, row


def _column(
    path: str, name: str, cells: list[str], lines: list[int], form: _Form, reading: Reading
) -> np.ndarray:
    """Return a column of numbers, or of labels if no cell is a number."""
    missing = set(reading.missing)
    if name not in reading.labels and form.decimal == ".":
        with contextlib.suppress(ValueError):  # most columns are nothing but numbers
            if np.all(np.isfinite(found := np.array(list(map(float, cells))))):
                return found
    cells = [cell.strip() for cell in cells]
    if name not in reading.labels:
        numbers = [np.nan if cell in missing else _number(cell, form.decimal) for cell in cells]
        wrong = [row for row, number in enumerate(numbers) if number is None]
        if not wrong:
            found = np.array(numbers, dtype=float)
            if np.isinf(found).any():
                row = int(np.flatnonzero(np.isinf(found))[0])
                raise TableError(
                    f"{path}, line {lines[row]}: column {name!r} is {cells[row]!r}, not a finite number."
                )
            return found
        if not reading.texts or any(number is not None and not np.isnan(number) for number in numbers):
            raise TableError(
                _not_a_number(path, name, cells[wrong[0]], lines[wrong[0]], len(wrong) == len(cells))
            )
    present = [cell for cell in cells if cell not in missing]
    if name not in reading.labels and all(map(DATE.match, present)):
        raise TableError(f"{path}: column {name!r} {HOLDS_DATES}")
    return np.array([None if cell in missing else cell for cell in cells], dtype=object)


def _not_a_number(path: str, name: str, cell: str, line: int, everywhere: bool) -> str:
    """Return what is wrong with a cell, and the options that are there for it."""
    ways = [
        f"leave the column out (name the others with --columns), or have it as labels (--kind {name}=category)"
    ]
    if not everywhere:
        ways.insert(0, f"have such cells taken for missing ones (--missing {cell!r})")
    return f"{path}, line {line}: column {name!r} is {cell!r}, not a number; {'; or '.join(ways)}."
