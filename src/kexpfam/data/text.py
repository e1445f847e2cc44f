"""Text files of cells: the form of a file is detected from its first rows, pyarrow parses it in batches."""

import codecs
import csv
import io
import lzma
import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kexpfam.data.encoding import DATES

if TYPE_CHECKING:
    import pyarrow

# Cells that mean a missing value, as common programs write them.
MISSING = ("", "NA", "N/A", "n/a", "na", "NaN", "nan", "NULL", "null", "None", "#N/A", "<NA>")
SEPARATORS = (",", ";", "\t", "|")
# Bytes and rows of the start of a file from which its form is detected.
OPENING, OPENING_ROWS = 2**18, 50
# Bytes per batch; pyarrow reads at most 32 batches ahead.
BATCH_BYTES = 2**20
NUMBER = r"^[+-]?((\d+{0}?\d*|{0}\d+)([eE][+-]?\d+)?|(?i:nan|inf|infinity))$"
DATE = r"^\d{4}-\d{2}-\d{2}"
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
UNREADABLE = (ValueError, LookupError, csv.Error, EOFError, OSError, lzma.LZMAError)


class TableError(ValueError):
    """A file cannot be used as a table. The message names the file, the place and the remedy."""


class Reading(NamedTuple):
    """How a table is read; ``None`` means detected from the file.

    ``gaps`` is the treatment of missing cells: "refuse", "keep" them as NaN, or "drop" their rows. ``labels``
    are the columns that are read as labels even if they look like numbers. With ``texts``, any other column
    without a number in it is read as labels, too. Lines that start with ``comment`` are skipped.
    """

    separator: str | None = None
    decimal: str | None = None
    quote: str = '"'
    header: bool | None = None
    encoding: str = "utf-8-sig"
    missing: tuple[str, ...] = MISSING
    gaps: str = "refuse"
    labels: tuple[str, ...] | list[str] = ()
    texts: bool = False
    comment: str | None = None


class TextFile(NamedTuple):
    """The form of a text file."""

    place: str
    names: list[str] | None
    width: int
    separator: str
    decimal: str
    skipped: int  # lines before the first row of data

    def batches(self, stream: Any, positions: list[int], reading: Reading) -> Iterator["pyarrow.Table"]:
        """Yield the columns at these positions as strings, some rows at a time."""
        import pyarrow
        import pyarrow.csv as arrow

        uneven = list[Any]()

        def refuse(row: Any) -> str:
            uneven.append(row)
            return "error"

        columns = [str(j) for j in range(self.width)]
        parse = arrow.ParseOptions(
            delimiter=self.separator,
            quote_char=reading.quote or False,
            newlines_in_values=bool(reading.quote),
            invalid_row_handler=refuse,
        )
        convert = arrow.ConvertOptions(
            include_columns=[str(j) for j in positions], column_types=dict.fromkeys(columns, pyarrow.string())
        )
        read = arrow.ReadOptions(
            column_names=columns,
            skip_rows=self.skipped,
            block_size=BATCH_BYTES,
            use_threads=False,  # rows are numbered only without threads
            encoding="utf8" if reading.encoding.lower().startswith("utf-8") else reading.encoding,
        )
        names = [f"x{j}" if self.names is None else self.names[j] for j in positions]
        try:
            for batch in arrow.open_csv(stream, read, parse, convert):
                yield pyarrow.Table.from_batches([batch]).rename_columns(names)
        except UNREADABLE as error:
            if not uneven:
                raise unreadable(self.place, error) from None
            row, found = uneven[0].number - self.skipped, uneven[0].actual_columns
            message = f"{self.place}, row {row}: {found} cells where {self.width} were expected."
            if self.names is not None and self.names[0].startswith("#"):
                message += " The first line begins with '#': skip such lines with --comment '#'."
            raise TableError(message) from None


def text_form(place: str, opening: bytes, reading: Reading) -> TextFile:
    """Return the form of a text file from its first bytes, of which there are at most ``OPENING``."""
    for name, value in (("separator", reading.separator), ("quote", reading.quote or None)):
        if value is not None and len(value) != 1:
            raise TableError(f"{place}: the {name} must be one character, got {value!r}.")
    whole = len(opening) < OPENING
    try:
        text = codecs.getincrementaldecoder(reading.encoding)().decode(opening, final=whole)
        candidates = (reading.separator,) if reading.separator else SEPARATORS
        forms = {one: _first_rows(text, one, reading, whole=whole) for one in candidates}
    except UNREADABLE as error:
        raise unreadable(place, error) from None
    separator = max(forms, key=lambda one: _agreement(forms[one]))
    rows = forms[separator]
    if not rows:
        raise TableError(f"{place}: the file is empty.")
    # A comma is the decimal mark if it is not the separator and some cell is a number only with it.
    commas = any(DECIMAL_COMMA.fullmatch(cell.strip()) for _, row in rows for cell in row)
    decimal = reading.decimal or ("," if commas and separator != "," else ".")
    line, first = rows[0]
    header = reading.header
    if header is None:
        number = re.compile(NUMBER.format(re.escape(decimal)))
        header = any(not number.match(cell) and cell not in reading.missing for cell in map(str.strip, first))
    if header and len(rows) == 1:
        raise TableError(f"{place}: there is a header but no row of data.")
    names = [cell.strip() for cell in first] if header else None
    return TextFile(place, names, len(first), separator, decimal, line if header else 0)


def unreadable(place: str, error: BaseException) -> TableError:
    """Return the error of a file that cannot be read as text."""
    if isinstance(error, UnicodeError) or "invalid UTF8" in str(error):
        return TableError(f"{place}: the encoding is another one; name it with --encoding, such as latin-1.")
    if isinstance(error, LookupError):
        return TableError(f"{place}: {error}; --encoding takes utf-8, latin-1, cp1252, utf-16, ...")
    return TableError(f"{place}: not a readable CSV file ({error}).")


def _first_rows(text: str, separator: str, reading: Reading, *, whole: bool) -> list[tuple[int, list[str]]]:
    """Return the first rows, each after the number of its last line, without a row that is cut short."""
    quoting = csv.QUOTE_MINIMAL if reading.quote else csv.QUOTE_NONE
    dialect: dict[str, Any] = {"delimiter": separator, "quotechar": reading.quote or None, "quoting": quoting}
    reader = csv.reader(io.StringIO(text, newline=""), **dialect)
    rows = list(islice(((reader.line_num, row) for row in reader if row), OPENING_ROWS + 1))
    return rows[:OPENING_ROWS] if whole or len(rows) == 1 else rows[:-1]


def _agreement(rows: list[tuple[int, list[str]]]) -> tuple[float, int]:
    """Return the share of rows with as many cells as the first, and their number; 0 for one cell."""
    widths = [len(row) for _, row in rows] or [1]
    return (widths.count(widths[0]) / len(widths), widths[0]) if widths[0] > 1 else (0.0, 1)


def cells_of(place: str, name: str, column: Any, reading: Reading, decimal: str, start: int) -> np.ndarray:
    """Return a column of strings as numbers with NaN, or as labels with None, where cells are missing.

    ``start`` is the number of rows before the first of these. A number with both marks, such as "1.234"
    beside decimal commas, is ambiguous and not accepted.
    """
    import pyarrow
    import pyarrow.compute as compute

    cells = compute.utf8_trim_whitespace(column)
    missing = compute.is_in(cells, value_set=pyarrow.array(reading.missing, pyarrow.string()))
    cells = compute.if_else(missing, pyarrow.scalar(None, pyarrow.string()), cells)
    if name not in reading.labels:
        valid = compute.match_substring_regex(cells, NUMBER.format(re.escape(decimal)))
        wrong = np.flatnonzero(compute.invert(valid.fill_null(True)).to_numpy(zero_copy_only=False))
        if not len(wrong):
            numbers = compute.replace_substring(cells, decimal, ".").cast("float64")
            return numbers.to_numpy(zero_copy_only=False)
        present = len(cells) - cells.null_count
        if not reading.texts or len(wrong) < present:
            cell, row = cells[int(wrong[0])].as_py(), start + int(wrong[0]) + 1
            ways = f"treat such cells as missing (--missing {cell!r}); or " if len(wrong) < present else ""
            if decimal == "." and DECIMAL_COMMA.fullmatch(cell):
                ways = "name the decimal mark (--decimal ,); or "
            problem = f"{place}, row {row}: column {name!r} is {cell!r}, not a number; {ways}{omitted(name)}"
            raise TableError(f"{problem}.")
        if compute.all(compute.match_substring_regex(cells, DATE)).as_py():
            raise TableError(f"{place}: column {name!r} contains {DATES}")
    return np.array(cells.to_pylist(), dtype=object)


def omitted(name: str) -> str:
    """Return the ways to read a table with a column that does not contain numbers."""
    return f"omit it (name the others with --columns); or read it as labels (--kind {name}=category)"
