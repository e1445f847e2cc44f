import bz2
import datetime
import gzip
import io
import lzma
import os
import pickle
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from kexpfam.data.tables import (
    DroppedRowsWarning,
    MissingColumnError,
    Reading,
    TableError,
    by_name_or_order,
    numbered,
    read_table,
    write_table,
)
from kexpfam.data.text import BATCH_BYTES, OPENING

VALUES = np.array([[1.0, 2.5, -3.0], [4.0, 1e-300, 6.0]])
NAMES = ["a", "b", "c"]


def read_values(path, columns):
    return read_table(path, choose=by_name_or_order(columns)).values


def columns_of(values):
    """Return rows as one block of columns."""
    return [list(np.asarray(values).T)]


def csv_file(folder, text, name="data.csv", encoding="utf-8"):
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def npy_file(folder, values):
    np.save(folder / "data.npy", values)
    return folder / "data.npy"


def parquet_file(folder, **columns):
    pyarrow.parquet.write_table(pa.table(columns), folder / "data.parquet")
    return folder / "data.parquet"


def feather_file(folder, **columns):
    pyarrow.feather.write_feather(pa.table(columns), folder / "data.feather")
    return folder / "data.feather"


# One table in every format that can hold it, and the names that it has there.
FILES = {
    "csv with a header": (lambda d: csv_file(d, "a,b,c\n1,2.5,-3\n4,1e-300,6\n"), NAMES),
    "csv without a header": (lambda d: csv_file(d, "1,2.5,-3\n4,1e-300,6\n"), ["x0", "x1", "x2"]),
    "csv of a spreadsheet": (
        lambda d: csv_file(d, 'a, b ,"c"\r\n 1 ,2.5,"-3"\r\n\r\n4,1e-300,6', encoding="utf-8-sig"),
        NAMES,
    ),
    "suffix in capitals": (lambda d: csv_file(d, "a,b,c\n1,2.5,-3\n4,1e-300,6\n", name="DATA.CSV"), NAMES),
    "npy": (lambda d: npy_file(d, VALUES), ["x0", "x1", "x2"]),
    "npy in Fortran's order": (lambda d: npy_file(d, np.asfortranarray(VALUES)), ["x0", "x1", "x2"]),
    "parquet": (lambda d: parquet_file(d, **dict(zip(NAMES, VALUES.T, strict=True))), NAMES),
    "feather": (lambda d: feather_file(d, **dict(zip(NAMES, VALUES.T, strict=True))), NAMES),
}


@pytest.mark.parametrize(("write", "names"), FILES.values(), ids=FILES)
class TestEveryFormat:
    def test_the_table_is_all_of_it_by_default(self, tmp_path, write, names):
        table = read_table(write(tmp_path))
        assert table.names == names
        assert table.values.dtype == np.float64
        np.testing.assert_array_equal(table.values, VALUES)

    def test_columns_come_in_the_order_asked_for(self, tmp_path, write, names):
        table = read_table(write(tmp_path), [names[2], names[0]])
        assert table.names == [names[2], names[0]]
        np.testing.assert_array_equal(table.values, VALUES[:, [2, 0]])

    def test_a_missing_column_is_named_beside_those_that_are_there(self, tmp_path, write, names):
        with pytest.raises(MissingColumnError, match=f"no column 'd', 'e'; there are {', '.join(names)}"):
            read_table(write(tmp_path), ["d", names[0], "e"])


class TestOtherNumbers:
    def test_integers_and_single_precision(self, tmp_path):
        whole = np.array([[1, 2], [3, 4]])
        np.testing.assert_array_equal(read_table(npy_file(tmp_path, whole)).values, whole)
        np.testing.assert_array_equal(read_table(npy_file(tmp_path, np.float32(whole))).values, whole)
        np.testing.assert_array_equal(
            read_table(parquet_file(tmp_path, a=[1, 3], b=[2.0, 4.0])).values, whole
        )

    def test_a_vector_is_one_column(self, tmp_path):
        assert read_table(npy_file(tmp_path, np.arange(3.0))).values.shape == (3, 1)

    def test_what_is_wrong_in_a_column_that_is_not_asked_for_does_not_matter(self, tmp_path):
        np.testing.assert_array_equal(
            read_table(csv_file(tmp_path, "a,b\n1,x\n2,\n"), ["a"]).values, [[1.0], [2.0]]
        )
        np.testing.assert_array_equal(
            read_table(parquet_file(tmp_path, a=[1.0], b=["x"]), ["a"]).values, [[1.0]]
        )
        np.testing.assert_array_equal(
            read_table(npy_file(tmp_path, np.array([[1.0, np.nan]])), ["x0"]).values, [[1.0]]
        )


BAD_FILES = {
    "no such file": (lambda d: d / "absent.csv", "absent.csv: no such file"),
    "a folder": (
        lambda d: (d / "folder.csv").mkdir() or d / "folder.csv",
        "folder.csv: there is no row of data",
    ),
    "unknown type": (
        lambda d: csv_file(d, "1", name="data.xlsx"),
        "unknown file type .xlsx; use .csv, .tsv, .txt, .npy, .parquet or .feather",
    ),
    "no type": (lambda d: csv_file(d, "1", name="data"), r"unknown file type \(none\)"),
    "csv: empty": (lambda d: csv_file(d, ""), "the file is empty"),
    "csv: blank lines": (lambda d: csv_file(d, "\n\n"), "the file is empty"),
    "csv: header alone": (lambda d: csv_file(d, "a,b\n"), "there is a header but no row of data"),
    "csv: text": (lambda d: csv_file(d, "a,b\n1,2\n3,x\n"), "row 2: column 'b' is 'x', not a number"),
    "csv: after a blank line": (lambda d: csv_file(d, "a,b\n\n1,x\n"), "row 1: column 'b' is 'x'"),
    "csv: empty cell": (
        lambda d: csv_file(d, "a,b\n1, \n"),
        "row 1: column 'b' is missing, as are cells of 1 of 1 rows",
    ),
    "csv: nan": (lambda d: csv_file(d, "a,b\n1,nan\n"), "row 1: column 'b' is missing"),
    "csv: infinite": (lambda d: csv_file(d, "1,2\n1,-inf\n"), "row 2: column 'x1' is -inf"),
    "csv: short row": (lambda d: csv_file(d, "a,b\n1,2\n3\n"), "row 2: 1 cells where 2 were expected"),
    "csv: comment": (lambda d: csv_file(d, "# made by hand\na,b\n1,2\n"), "skip such lines with --comment"),
    "csv: long row": (lambda d: csv_file(d, "1,2\n3,4,5\n"), "row 2: 3 cells where 2 were expected"),
    "csv: not text": (lambda d: csv_file(d, "ä,ö\n", encoding="latin-1"), "name it with --encoding"),
    "csv: not text, late": (
        lambda d: csv_file(d, "a\n" + "1\n" * OPENING + "ä\n", encoding="latin-1"),
        "name it with --encoding",
    ),
    "csv: decimal commas between quotes": (
        lambda d: csv_file(d, 'a,b\n"1,5",2\n'),
        "row 1: column 'a' is '1,5', not a number; name the decimal mark",
    ),
    "csv: a row of more than a batch": (
        lambda d: csv_file(d, "a,b\n1,2\n" + "x" * (2 * BATCH_BYTES)),
        "not a readable CSV file",
    ),
    "npy: other content": (
        lambda d: csv_file(d, "text", name="data.npy"),
        "not a readable NPY file of numbers",
    ),
    "npy: no content": (lambda d: csv_file(d, "", name="data.npy"), "not a readable NPY file of numbers"),
    "npy: objects": (lambda d: npy_file(d, np.array([[None]])), "not a readable NPY file of numbers"),
    "npy: text": (
        lambda d: npy_file(d, np.array([["a"]])),
        "expected a two-dimensional array of real numbers, got <U1",
    ),
    "npy: booleans": (lambda d: npy_file(d, np.array([[True]])), "real numbers, got bool"),
    "npy: complex": (lambda d: npy_file(d, np.array([[1j]])), "real numbers, got complex128"),
    "npy: a number": (lambda d: npy_file(d, np.array(1.0)), r"got float64 of shape \(\)"),
    "npy: three axes": (lambda d: npy_file(d, np.zeros((2, 2, 2))), r"of shape \(2, 2, 2\)"),
    "npy: nan": (
        lambda d: npy_file(d, np.array([[1.0, 2.0], [3.0, np.nan]])),
        "row 2: column 'x1' is missing",
    ),
    "npy: no rows": (lambda d: npy_file(d, np.zeros((0, 2))), "there is no row of data"),
    "parquet: other content": (
        lambda d: csv_file(d, "text", name="data.parquet"),
        "not a readable Parquet file",
    ),
    "feather: other content": (
        lambda d: csv_file(d, "text", name="data.feather"),
        "not a readable Feather file",
    ),
    "parquet: text": (lambda d: parquet_file(d, a=[1.0], b=["x"]), "column 'b' does not contain numbers"),
    "parquet: lists": (lambda d: parquet_file(d, a=[[1.0], [2.0]]), "column 'a' does not contain numbers"),
    "parquet: times": (
        lambda d: parquet_file(d, a=[datetime.datetime(2020, 1, 1)]),
        "column 'a' contains dates",
    ),
    "parquet: durations": (lambda d: parquet_file(d, a=[datetime.timedelta(1)]), "column 'a' contains dates"),
    "parquet: null": (lambda d: parquet_file(d, a=[1.0, None]), "row 2: column 'a' is missing"),
    "parquet: infinite": (lambda d: parquet_file(d, a=[1.0], b=[float("inf")]), "row 1: column 'b' is inf"),
    "parquet: no rows": (lambda d: parquet_file(d, a=pa.array([], pa.float64())), "there is no row of data"),
}


@pytest.mark.parametrize(("write", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(tmp_path, write, message):
    path = write(tmp_path)
    with pytest.raises(TableError, match=message) as caught:
        read_table(path)
    assert str(caught.value).startswith(str(path))


def test_a_name_that_two_columns_have_is_refused_where_it_is_asked_for(tmp_path):
    path = csv_file(tmp_path, "a,a,b\n1,2,3\n")
    with pytest.raises(TableError, match="several columns are called 'a'"):
        read_table(path, ["a"])
    np.testing.assert_array_equal(read_table(path, ["b"]).values, [[3.0]])
    with pytest.raises(TableError, match="several columns are called 'a'; rename them"):
        read_table(path)


class TestValues:
    def test_named_columns_are_found_wherever_they_are(self, tmp_path):
        path = csv_file(tmp_path, "c,b,a\n-3,2.5,1\n6,1e-300,4\n")
        np.testing.assert_array_equal(read_values(path, NAMES), VALUES)

    def test_columns_without_names_are_taken_in_their_order(self, tmp_path):
        np.testing.assert_array_equal(read_values(npy_file(tmp_path, VALUES), NAMES), VALUES)

    def test_as_many_columns_as_names_are_needed_then(self, tmp_path):
        with pytest.raises(TableError, match="3 columns without names, 2 are needed: a, b"):
            read_values(npy_file(tmp_path, VALUES), ["a", "b"])

    def test_other_names_are_not_taken_for_these(self, tmp_path):
        with pytest.raises(MissingColumnError, match="no column 'd'; there are a, b, c"):
            read_values(csv_file(tmp_path, "a,b,c\n1,2,3\n"), ["a", "b", "d"])


def test_names_of_columns_without_names():
    assert numbered(3) == ["x0", "x1", "x2"]
    assert numbered(2, "y") == ["y0", "y1"]
    assert numbered(0) == []


# The same table again, as other programs and countries write it, and what has to be said of it.
DIALECTS = {
    "semicolons": ("a;b;c\n1;2.5;-3\n4;1e-300;6\n", "data.csv", Reading()),
    "decimal commas": ("a;b;c\n1;2,5;-3\n4;1e-300;6,0\n", "data.csv", Reading()),
    "decimal commas and tabs": ("a\tb\tc\n1\t2,5\t-3\n4\t1e-300\t6\n", "data.txt", Reading()),
    "decimal commas, quoted": ('a,b,c\n1,"2,5",-3\n4,1e-300,6\n', "data.csv", Reading(decimal=",")),
    "tabs": ("a\tb\tc\n1\t2.5\t-3\n4\t1e-300\t6\n", "data.tsv", Reading()),
    "tabs in a name with commas": ("a\tb, in km\tc\n1\t2.5\t-3\n4\t1e-300\t6\n", "data.tsv", Reading()),
    "bars": ("a|b|c\n1|2.5|-3\n4|1e-300|6\n", "data.dat", Reading()),
    "spaces": ("a b c\n1 2.5 -3\n4 1e-300 6\n", "data.txt", Reading(separator=" ")),
    "single quotes": ("'a','b','c'\n'1','2.5','-3'\n4,1e-300,6\n", "data.csv", Reading(quote="'")),
    "all quoted": ('"a","b","c"\n"1","2.5","-3"\n"4","1e-300","6"\n', "data.csv", Reading()),
    "a name with a line break": ('a,"b\nof it",c\n1,2.5,-3\n4,1e-300,6\n', "data.csv", Reading()),
    "long names": (f"{'a' * 90_000},b,c\n1,2.5,-3\n4,1e-300,6\n", "data.csv", Reading()),
    "numbers for names": ("2019,2020,2021\n1,2.5,-3\n4,1e-300,6\n", "data.csv", Reading(header=True)),
    "latin letters": ("ä,ö,c\n1,2.5,-3\n4,1e-300,6\n", "data.csv", Reading(encoding="latin-1")),
    "comments": ("# by hand\na,b,c\n1,2.5,-3\n #\n4,1e-300,6\n#", "data.csv", Reading(comment="#")),
    "a gap": ("a,b,c\n1,2.5,-3\n7,,8\n4,1e-300,6\n", "data.csv", Reading(gaps="drop")),
    "words for gaps": (
        "a,b,c\nNA,1,1\n1,2.5,-3\n4,1e-300,6\n1,?,1\n",
        "data.csv",
        Reading(gaps="drop", missing=("NA", "?")),
    ),
}


class TestDialects:
    @pytest.mark.parametrize(("text", "name", "reading"), DIALECTS.values(), ids=DIALECTS)
    def test_the_table_is_the_same(self, tmp_path, text, name, reading):
        encoding = "utf-8" if reading.encoding == "utf-8-sig" else reading.encoding
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DroppedRowsWarning)
            np.testing.assert_array_equal(
                read_table(csv_file(tmp_path, text, name, encoding), None, reading).values, VALUES
            )

    @pytest.mark.parametrize("packing", [gzip, bz2, lzma], ids=lambda module: module.__name__)
    @pytest.mark.parametrize("suffix", [".csv", ".npy", ".parquet"])
    def test_compressed_files(self, tmp_path, packing, suffix):
        plain = {
            ".csv": lambda: csv_file(tmp_path, "a,b,c\n1,2.5,-3\n4,1e-300,6\n"),
            ".npy": lambda: npy_file(tmp_path, VALUES),
            ".parquet": lambda: parquet_file(tmp_path, **dict(zip(NAMES, VALUES.T, strict=True))),
        }[suffix]()
        ending = {gzip: ".gz", bz2: ".bz2", lzma: ".xz"}[packing]
        packed = tmp_path / f"data{suffix}{ending}"
        packed.write_bytes(packing.compress(plain.read_bytes()))
        np.testing.assert_array_equal(read_table(packed).values, VALUES)

    def test_a_damaged_archive_is_refused(self, tmp_path):
        broken = tmp_path / "data.csv.gz"
        broken.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:30])
        with pytest.raises(TableError, match="not a readable CSV file"):
            read_table(broken)

    @pytest.mark.parametrize("content", ["csv", "npy", "parquet", "gzip"])
    def test_a_pipe_is_known_by_its_first_bytes(self, tmp_path, monkeypatch, content):
        text = b"1,2.5,-3\n4,1e-300,6\n"
        sources = {
            "csv": lambda: text,
            "gzip": lambda: gzip.compress(text),
            "npy": lambda: npy_file(tmp_path, VALUES).read_bytes(),
            "parquet": lambda: parquet_file(
                tmp_path, x0=VALUES[:, 0], x1=VALUES[:, 1], x2=VALUES[:, 2]
            ).read_bytes(),
        }
        sent = sources[content]()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sent)))
        table = read_table(Path("-"))
        assert table.names == ["x0", "x1", "x2"]
        np.testing.assert_array_equal(table.values, VALUES)
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(sent))
        writer.start()
        np.testing.assert_array_equal(read_values(tmp_path / "pipe", NAMES), table.values)
        writer.join()

    def test_what_is_wrong_on_standard_input_is_said_so(self, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a,b\n1,x\n")))
        with pytest.raises(TableError, match="standard input, row 1: column 'b' is 'x'"):
            read_table(Path("-"))

    def test_every_bit_is_read(self, tmp_path):
        values = np.random.default_rng(0).normal(size=(200, 2)) * 10.0 ** np.array([-200, 200])
        write_table(tmp_path / "out.csv", ["a", "b"], columns_of(values))
        np.testing.assert_array_equal(read_table(tmp_path / "out.csv").values, values)

    @pytest.mark.parametrize(
        ("given", "message"), [(";;", "the separator must be one character"), ("", None)]
    )
    def test_a_separator_is_one_character(self, tmp_path, given, message):
        path = csv_file(tmp_path, "a,b\n1,2\n")
        if message is None:
            assert read_table(path, None, Reading(separator=None)).names == ["a", "b"]
            return
        with pytest.raises(TableError, match=message):
            read_table(path, None, Reading(separator=given))

    def test_a_number_with_both_marks_is_not_guessed(self, tmp_path):
        path = csv_file(tmp_path, "a;b\n1.234;1,5\n2;2,5\n")
        with pytest.raises(TableError, match="column 'a' is '1.234', not a number"):
            read_table(path)

    def test_the_numbers_of_rows_that_pandas_writes_are_not_a_column(self, tmp_path):
        path = csv_file(tmp_path, ",a,b\n0,1,2\n1,3,4\n")
        with pytest.raises(TableError, match="column 1 has no name; .* select the others with --columns a,b"):
            read_table(path)
        np.testing.assert_array_equal(read_table(path, ["a", "b"]).values, [[1.0, 2.0], [3.0, 4.0]])


class TestGapsAndLabels:
    TEXT = "a,kind,b\n1,u,2\n,v,3\n4,,5\n"

    def test_gaps_are_kept_as_nan_or_none(self, tmp_path):
        table = read_table(csv_file(tmp_path, self.TEXT), None, Reading(gaps="keep", texts=True))
        first, labels, last = table.split(1, 1, 1)
        np.testing.assert_array_equal(np.hstack([first, last]), [[1.0, 2.0], [np.nan, 3.0], [4.0, 5.0]])
        assert (first.dtype, labels.dtype, last.dtype) == (float, object, float)
        assert table.values[:, 1].tolist() == ["u", "v", None]

    def test_rows_with_gaps_are_dropped(self, tmp_path):
        with pytest.warns(DroppedRowsWarning, match="2 of 3 rows have missing cells and are dropped"):
            table = read_table(csv_file(tmp_path, self.TEXT), None, Reading(gaps="drop", texts=True))
        assert table.values.tolist() == [[1.0, "u", 2.0]]
        with pytest.raises(TableError, match="every row has a missing cell"):
            read_table(csv_file(tmp_path, "a,b\n1,\n,2\n"), None, Reading(gaps="drop"))

    def test_gaps_of_other_columns_do_not_count(self, tmp_path):
        table = read_table(csv_file(tmp_path, self.TEXT), ["b"], Reading(gaps="drop"))
        assert table.values.tolist() == [[2.0], [3.0], [5.0]]

    def test_a_column_of_text_is_refused_with_what_can_be_done(self, tmp_path):
        with pytest.raises(
            TableError, match=r"column 'kind' is 'u', not a number; omit .*--columns.*--kind kind=category"
        ):
            read_table(csv_file(tmp_path, "a,kind\n1,u\n2,v\n"))

    def test_a_word_among_numbers_is_refused_even_beside_labels(self, tmp_path):
        with pytest.raises(
            TableError, match=r"row 2: column 'a' is 'low', not a number; treat .*--missing 'low'"
        ):
            read_table(csv_file(tmp_path, "a,kind\n1,u\nlow,v\n"), None, Reading(texts=True))

    def test_numbers_can_be_labels(self, tmp_path):
        table = read_table(csv_file(tmp_path, "code,a\n01,1\n3+,2\n"), None, Reading(labels=("code",)))
        assert table.values.tolist() == [["01", 1.0], ["3+", 2.0]]

    @pytest.mark.parametrize("cell", ["2020-01-31", "2020-01-31 12:00", "2020-01-31T12:00:00"])
    def test_dates_are_refused_in_text_too(self, tmp_path, cell):
        with pytest.raises(TableError, match="column 'day' contains dates"):
            read_table(csv_file(tmp_path, f"day,a\n{cell},1\n{cell},2\n"), None, Reading(texts=True))

    def test_labels_in_parquet(self, tmp_path):
        path = parquet_file(
            tmp_path, a=[1.0, 2.0], kind=pa.array(["u", None]).dictionary_encode(), flag=[True, False]
        )
        table = read_table(path, None, Reading(gaps="keep", texts=True))
        assert table.values.tolist() == [[1.0, "u", True], [2.0, None, False]]
        with pytest.raises(
            TableError, match="column 'kind' does not contain numbers; omit it .*--kind kind=category"
        ):
            read_table(path)


class Payload:
    """What leaves a mark if it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (self.mark.touch, ())


def test_pickles_are_never_loaded(tmp_path):
    mark = tmp_path / "mark"
    np.save(tmp_path / "data.npy", np.array([[Payload(mark)]], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "several.npz", a=VALUES)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    (tmp_path / "pickled.npy").write_bytes(pickle.dumps(Payload(mark)))
    for name in ("data.npy", "several.npy", "pickled.npy"):
        with pytest.raises(
            TableError, match="not a readable NPY file of numbers|an archive of several arrays"
        ):
            read_table(tmp_path / name)
    assert not mark.exists()


class TestWriting:
    @pytest.mark.parametrize(
        "name", ["out.npy", "out.parquet", "out.pq", "out.feather", "out.arrow", "OUT.CSV"]
    )
    def test_the_name_says_the_type(self, tmp_path, name):
        blocks = [*columns_of(VALUES[:1]), *columns_of(VALUES[1:])]
        assert write_table(tmp_path / name, NAMES, blocks) == 2
        table = read_table(tmp_path / name)
        assert table.names == (["x0", "x1", "x2"] if name == "out.npy" else NAMES)
        np.testing.assert_array_equal(table.values, VALUES)
        magic = {
            "npy": b"\x93NUMPY",
            "parquet": b"PAR1",
            "pq": b"PAR1",
            "feather": b"ARROW1",
            "arrow": b"ARROW1",
        }
        assert (tmp_path / name).read_bytes().startswith(magic.get(name.split(".")[1], b"a,b,c\n"))

    @pytest.mark.parametrize("name", ["out.xlsx", "out", "out.parquet.gz", "out.gz", "out.txt"])
    def test_other_names_are_refused(self, tmp_path, name):
        with pytest.raises(TableError, match="unknown file type .*tables are written as .csv"):
            write_table(tmp_path / name, NAMES, columns_of(VALUES))
        assert not os.listdir(tmp_path)

    @pytest.mark.parametrize("name", ["out.parquet", "out.feather", "out.csv"])
    def test_labels_and_missing_cells_come_back(self, tmp_path, name):
        kinds, numbers = np.array(["u", None, "v"], object), np.array([1.0, None, 3.0], object)
        blocks = [[kinds[rows], numbers[rows], np.arange(3)[rows]] for rows in (slice(0, 2), slice(2, 3))]
        write_table(tmp_path / name, NAMES, blocks)
        found = read_table(tmp_path / name, None, Reading(gaps="keep", texts=True))
        assert found.values[:, 0].tolist() == ["u", None, "v"]
        np.testing.assert_array_equal(found.split(1, 2)[1], [[1.0, 0.0], [np.nan, 1.0], [3.0, 2.0]])

    def test_labels_are_not_written_to_npy(self, tmp_path):
        with pytest.raises(TableError, match="labels cannot be written to .npy"):
            write_table(tmp_path / "out.npy", ["a"], [[np.array(["u"], object)]])
        assert not os.listdir(tmp_path)

    def test_every_bit_comes_back(self, tmp_path):
        values = np.random.default_rng(0).normal(size=(20, 3)) * 10.0 ** np.arange(-100, 200, 100)
        write_table(tmp_path / "out.csv", NAMES, columns_of(values))
        table = read_table(tmp_path / "out.csv")
        assert table.names == NAMES
        np.testing.assert_array_equal(table.values, values)

    def test_names_with_commas_and_quotes_come_back(self, tmp_path):
        names = ["speed, km/h", 'the "big" one', "größe"]
        write_table(tmp_path / "out.csv", names, columns_of(VALUES))
        assert read_table(tmp_path / "out.csv").names == names

    def test_a_file_is_as_readable_to_others_as_any_new_file(self, tmp_path):
        write_table(tmp_path / "out.csv", NAMES, columns_of(VALUES))
        (tmp_path / "plain").touch()
        assert (tmp_path / "out.csv").stat().st_mode == (tmp_path / "plain").stat().st_mode

    @pytest.mark.parametrize("name", ["out.tsv", "out.csv.gz", "out.tsv.gz"])
    def test_tabs_and_compression_by_the_name(self, tmp_path, name):
        write_table(tmp_path / name, NAMES, columns_of(VALUES))
        table = read_table(tmp_path / name)
        assert table.names == NAMES
        np.testing.assert_array_equal(table.values, VALUES)
        before = (tmp_path / name).read_bytes()
        write_table(tmp_path / name, NAMES, columns_of(VALUES))
        assert (tmp_path / name).read_bytes() == before
        assert before.startswith(b"\x1f\x8b") == name.endswith(".gz")

    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_a_failing_write_leaves_the_old_file(self, tmp_path, error):
        def rows():
            yield [np.ones(1)]
            raise error

        write_table(tmp_path / "out.csv", ["a"], [[np.zeros(1)]])
        before = (tmp_path / "out.csv").read_bytes()
        with pytest.raises(type(error)):
            write_table(tmp_path / "out.csv", ["a"], rows())
        assert (tmp_path / "out.csv").read_bytes() == before
        assert os.listdir(tmp_path) == ["out.csv"]
