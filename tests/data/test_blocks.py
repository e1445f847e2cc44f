"""Rows in blocks: every source gives the same rows, the sample is uniform, and what cannot be read twice is
refused."""

import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest

from kexpfam.data.blocks import RowBlocks, Rows, row_blocks, with_targets
from kexpfam.data.passes import take_overview

SETTINGS = Rows(in_memory=100, block=37)
NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(0).normal(size=(500, 3))


class Chunks:
    """A source of our own that starts anew each time."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(np.array_split(self.values, 7))


class FakeDask:
    """The part of a Dask frame that is used."""

    npartitions = 4

    def __init__(self, frame):
        self.parts = [frame.iloc[rows] for rows in np.array_split(np.arange(len(frame)), 4)]

    def get_partition(self, place):
        return type("Lazy", (), {"compute": lambda _: self.parts[place]})()


def parquet_file(values, folder):
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table(dict(zip(NAMES, values.T, strict=True))), path, row_group_size=90
    )
    return path


def parquet_folder(values, folder):
    for place, part in enumerate(np.array_split(values, 3)):
        table = pyarrow.table(dict(zip(NAMES, part.T, strict=True)))
        pyarrow.parquet.write_table(table, folder / f"{place}.parquet")
    return folder


def npy_file(values, folder):
    np.save(folder / "rows.npy", values)
    return str(folder / "rows.npy")


SOURCES = {
    "array": lambda values, folder: values,
    "pandas": lambda values, folder: pandas.DataFrame(values, columns=NAMES),
    "polars": lambda values, folder: polars.DataFrame(values, schema=NAMES),
    "arrow": lambda values, folder: pyarrow.table(dict(zip(NAMES, values.T, strict=True))),
    "dataset": lambda values, folder: pyarrow.dataset.dataset(parquet_file(values, folder)),
    "parquet": parquet_file,
    "folder": parquet_folder,
    "npy": npy_file,
    "dask": lambda values, folder: FakeDask(pandas.DataFrame(values, columns=NAMES)),
    "list": lambda values, folder: np.array_split(values, 5),
    "batches": lambda values, folder: pyarrow.table(dict(zip(NAMES, values.T, strict=True))).to_batches(
        max_chunksize=60
    ),
    "iterable": lambda values, folder: Chunks(values),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_all_rows_in_order_each_time(kind, values, tmp_path):
    blocks = row_blocks(SOURCES[kind](values, tmp_path), SETTINGS)
    assert blocks.rows in (None, 500)
    for _ in range(2):
        read = [
            np.column_stack([block[name] for name in NAMES]) if hasattr(block, "columns") else block
            for block in blocks
        ]
        assert len(read) > 1
        assert np.array_equal(np.concatenate(read), values)


@pytest.mark.parametrize("kind", SOURCES)
def test_the_sample_does_not_depend_on_the_source(kind, values, tmp_path):
    overview = take_overview(row_blocks(SOURCES[kind](values, tmp_path), SETTINGS), 40, seed=3)
    expected = np.sort(np.argsort(np.random.default_rng(3).random(500))[:40])
    assert overview.rows == 500
    assert np.array_equal(np.asarray(overview.sample[0]), values[expected])
    assert np.array_equal(overview.low[0], values.min(axis=0))
    assert np.array_equal(overview.high[0], values.max(axis=0))


def test_every_row_is_as_likely_to_be_in_the_sample():
    rows, most, draws = np.arange(60.0)[:, None], 15, 500
    blocks = RowBlocks(lambda _: np.array_split(rows, 4))
    seen = np.zeros(60)
    for seed in range(draws):
        seen[take_overview(blocks, most, seed=seed).sample[0][:, 0].astype(int)] += 1.0
    share = most / 60
    # 60 frequencies: the largest of so many normal deviates is beyond 4.5 once in two thousand runs.
    assert np.abs(seen / draws - share).max() < 4.5 * np.sqrt(share * (1.0 - share) / draws)


def test_few_rows_are_no_blocks_and_are_all_in_a_sample(values):
    assert row_blocks(values[:100], SETTINGS) is None
    assert row_blocks(values[:100].tolist(), SETTINGS) is None
    assert np.array_equal(
        take_overview(RowBlocks(lambda _: [values[:30], values[30:50]]), 200, seed=0).sample[0], values[:50]
    )


@pytest.mark.parametrize("y", ["c", ["c"], "array", "npy"])
def test_targets_stand_beside_their_rows(y, values, tmp_path):
    source, width = parquet_file(values, tmp_path), 2 if y in ("c", ["c"]) else 3
    if y == "npy":
        y = npy_file(values[:, 2], tmp_path)
    blocks = with_targets(row_blocks(source, SETTINGS), values[:, 2] if y == "array" else y)
    X, targets = take_overview(blocks, 80, seed=1).sample
    assert np.asarray(X).shape == (80, width)
    places = np.searchsorted(np.sort(values[:, 0]), np.asarray(X)[:, 0])
    assert np.array_equal(np.asarray(targets).ravel(), values[np.argsort(values[:, 0])[places], 2])


def test_a_generator_is_refused_with_advice(values):
    with pytest.raises(TypeError, match=r"generator can be read only once.*Pass a list of tables"):
        row_blocks((block for block in [values]), SETTINGS)
    reader = pyarrow.RecordBatchReader.from_batches(pyarrow.schema([]), [])
    with pytest.raises(TypeError, match="can be read only once"):
        row_blocks(reader, SETTINGS)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (lambda v: RowBlocks(lambda _: []), "no row of data"),
        (
            lambda v: RowBlocks(lambda _: [v, v[:, :2]]),
            r"after row 500, a block has 2 columns where the first has 3",
        ),
        (
            lambda v: with_targets(RowBlocks(lambda _: [v]), v[:20, 0]),
            r"y must have one entry|20 and 500 rows",
        ),
        (lambda v: with_targets(RowBlocks(lambda _: [v]), "c"), "blocks are arrays"),
        (lambda v: with_targets(RowBlocks(lambda _: [pandas.DataFrame(v)]), "c"), "no column 'c'"),
    ],
)
def test_what_is_wrong_with_blocks_is_said(blocks, message, values):
    with pytest.raises(ValueError, match=message):
        take_overview(blocks(values), 50, seed=0)


def test_files_that_are_no_tables_are_named(tmp_path):
    for name, content in (("a.parquet", b"no"), ("a.npy", b"no"), ("a.csv", b"1,2\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            row_blocks(tmp_path / name, SETTINGS)
    with pytest.raises(FileNotFoundError, match="nothing"):
        row_blocks(tmp_path / "nothing.npy", SETTINGS)


def test_settings_are_checked():
    for wrong in ({"in_memory": 10}, {"kept": 0}, {"block": True}):
        with pytest.raises(ValueError, match="must be a whole number"):
            Rows(**wrong)
