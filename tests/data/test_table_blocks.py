"""Files in blocks are the same tables, and no block is larger than it should be."""

import gzip
import io
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from kexpfam.data import text as texts
from kexpfam.data.tables import DroppedRowsWarning, Reading, TableError, table_blocks, write_table

ROWS, BLOCK = 1000, 64
VALUES = np.random.default_rng(0).normal(size=(ROWS, 3))
NAMES = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(texts, "BATCH_BYTES", 3000)


def text(folder, name="data.csv"):
    write_table(folder / name, NAMES, [list(VALUES.T)])
    return folder / name


def array(folder):
    np.save(folder / "data.npy", VALUES[:, [2, 0]])
    return folder / "data.npy"


def packed_array(folder):
    (folder / "data.npy.gz").write_bytes(gzip.compress(array(folder).read_bytes()))
    return folder / "data.npy.gz"


def parquet(folder):
    table = pa.table(dict(zip(NAMES, VALUES.T, strict=True)))
    pyarrow.parquet.write_table(table, folder / "data.parquet", row_group_size=300)
    return folder / "data.parquet"


def parquet_folder(folder):
    (folder / "parts").mkdir()
    for part in range(4):
        rows = VALUES[250 * part : 250 * (part + 1)]
        pyarrow.parquet.write_table(
            pa.table(dict(zip(NAMES, rows.T, strict=True))), folder / "parts" / f"{part}.parquet"
        )
    return folder / "parts"


SOURCES = {
    "csv": text,
    "tsv": lambda folder: text(folder, "data.tsv"),
    "gzip": lambda folder: text(folder, "data.csv.gz"),
    "npy": array,
    "compressed npy": packed_array,
    "parquet": parquet,
    "folder of parquet": parquet_folder,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_blocks_are_the_table(tmp_path, source):
    blocks = list(table_blocks(source(tmp_path), ["c", "a"], rows=BLOCK))
    assert {tuple(block.names) for block in blocks} == {("c", "a")}
    assert max(len(block.values) for block in blocks) <= BLOCK
    assert len(blocks) >= ROWS // BLOCK
    np.testing.assert_array_equal(np.concatenate([block.values for block in blocks]), VALUES[:, [2, 0]])


@pytest.mark.parametrize("kind", ["csv", "gzip", "npy", "parquet"])
def test_what_comes_through_a_pipe(tmp_path, monkeypatch, kind):
    content = SOURCES[kind](tmp_path).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    found = np.concatenate([block.values for block in table_blocks(Path("-"), ["c", "a"], rows=BLOCK)])
    np.testing.assert_array_equal(found, VALUES[:, [2, 0]])
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(content))
    writer.start()
    found = np.concatenate(
        [block.values for block in table_blocks(tmp_path / "pipe", ["c", "a"], rows=BLOCK)]
    )
    writer.join()
    np.testing.assert_array_equal(found, VALUES[:, [2, 0]])


def test_a_pipe_of_text_is_never_held_whole(monkeypatch):
    """Every row that is read so far is given away before much more is read."""
    taken = []

    class Pipe(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            taken.append(len(buffer) if sum(taken) < 2_000_000 else 0)
            buffer[: taken[-1]] = (b"1.0,2.0\n" * (taken[-1] // 8 + 1))[: taken[-1]]
            return taken[-1]

    class Standard:
        buffer = io.BufferedReader(Pipe(), 8)

    monkeypatch.setattr(sys, "stdin", Standard)
    rows = 0
    for block in table_blocks(Path("-"), ["a", "b"], rows=BLOCK):
        rows += len(block.values)
        assert sum(taken) - 8 * rows < texts.OPENING + 40 * 3000 + 8 * BLOCK
    assert rows >= 2_000_000 // 8


def test_a_break_within_quotes_ends_no_block(tmp_path):
    rows = "".join(f'{j},"a\nb{j}"\n' for j in range(ROWS))
    (tmp_path / "data.csv").write_text(f"n,kind\n{rows}")
    blocks = list(table_blocks(tmp_path / "data.csv", ["n", "kind"], Reading(labels=("kind",)), rows=BLOCK))
    found = np.concatenate([block.values for block in blocks])
    assert found[:, 0].tolist() == list(range(ROWS))
    assert found[-1, 1] == f"a\nb{ROWS - 1}"


def test_a_fault_is_named_by_its_line_in_the_file(tmp_path):
    lines = ["a,b", *(f"{j},1" for j in range(ROWS))]
    lines[801] = "x,1"
    (tmp_path / "data.csv").write_text("\n".join(lines))
    with pytest.raises(TableError, match="row 801: column 'a' is 'x', not a number"):
        list(table_blocks(tmp_path / "data.csv", ["a", "b"]))


def test_a_row_of_another_width_is_named_by_its_number(tmp_path):
    lines = ["a,b", *(f"{j},1" for j in range(ROWS))]
    lines[801] = "1,2,3"
    (tmp_path / "data.csv").write_text("\n".join(lines))
    with pytest.raises(TableError, match="row 801: 3 cells where 2 were expected"):
        list(table_blocks(tmp_path / "data.csv", ["a", "b"]))


def test_gaps_are_dropped_and_counted_once(tmp_path):
    gappy = VALUES.copy()
    gappy[100:200, 1] = np.nan
    write_table(tmp_path / "data.csv", NAMES, [list(gappy.T)])
    with pytest.warns(DroppedRowsWarning, match="100 of 1000 rows") as caught:
        found = [
            block.values
            for block in table_blocks(tmp_path / "data.csv", NAMES, Reading(gaps="drop"), rows=BLOCK)
        ]
    assert len(caught) == 1
    np.testing.assert_array_equal(np.concatenate(found), np.delete(VALUES, np.s_[100:200], axis=0))
    with pytest.raises(TableError, match="is missing"):
        list(table_blocks(tmp_path / "data.csv", NAMES))
    gappy[:, 1] = np.nan
    write_table(tmp_path / "data.csv", NAMES, [list(gappy.T)])
    with pytest.raises(TableError, match="every row has a missing cell"):
        list(table_blocks(tmp_path / "data.csv", NAMES, Reading(gaps="drop")))


def test_columns_are_found_by_name_in_every_source(tmp_path):
    for source in (text, parquet):
        with pytest.raises(TableError, match="no column 'd'; there are a, b, c"):
            list(table_blocks(source(tmp_path), ["a", "d"]))
    with pytest.raises(TableError, match="2 columns without names, 3 are needed"):
        list(table_blocks(array(tmp_path), NAMES))
