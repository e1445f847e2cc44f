"""Passes over rows: whoever goes through them, and however many they are, the same is left of them."""

import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest

from kexpfam.data.blocks import RowBlocks, Rows, row_blocks
from kexpfam.data.passes import Overview, Sums, from_bytes, run_pass, take_overview, to_bytes

SETTINGS = Rows(in_memory=100, block=37)


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(0).normal(size=(500, 3))


def files(values, folder):
    table = pyarrow.table(dict(zip("abc", values.T, strict=True)))
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=90)
    return folder


SOURCES = {
    "array": lambda values, folder: values,
    "files": files,
    "uneven": lambda values, folder: [values[:3], values[3:200], values[200:210], values[210:]],
    "unknown": lambda values, folder: RowBlocks(lambda _: np.array_split(values, 31), page=37),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_every_block_is_for_one_process_and_no_page_for_two(kind, count, values, tmp_path):
    blocks = row_blocks(SOURCES[kind](values, tmp_path), SETTINGS)
    shares = [list(blocks.numbered(rank, count)) for rank in range(count)]
    together = sorted((pair for share in shares for pair in share), key=lambda pair: pair[0])
    rows = [
        np.column_stack(block.columns) if isinstance(block, pyarrow.Table) else block for _, block in together
    ]
    assert np.array_equal(np.concatenate(rows), values)
    assert [start for start, _ in together] == [0, *np.cumsum([len(block) for _, block in together])[:-1]]
    pages = [{start // blocks.page for start, _ in share} for share in shares]
    assert sum(map(len, pages)) == len(set().union(*pages))


def test_a_process_reads_no_more_than_the_sources_of_its_rows(values):
    read = []
    blocks = RowBlocks(
        lambda place: read.append(place) or [values[place * 100 : place * 100 + 100]],
        range(5),
        (100,) * 5,
        page=50,
    )
    assert [start for start, _ in blocks.numbered(1, 2)] == [300, 400]
    assert read in ([3, 4], [2, 3, 4])


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("count", [2, 3])
def test_summaries_of_parts_are_those_of_all(kind, count, values, tmp_path):
    blocks = row_blocks(SOURCES[kind](values, tmp_path), SETTINGS)
    numbers = lambda parts: np.exp(np.asarray(parts[0])).sum(axis=0)
    whole, sums = (
        take_overview(blocks, 40, seed=3),
        run_pass(blocks, Sums(numbers, blocks.page), stage="summing").total,
    )
    glance, parts = Overview(40, 3, np.inf), Sums(numbers, blocks.page)
    for rank in range(count):
        for summary in (glance, parts):
            own = summary.fresh()
            for start, block in blocks.numbered(rank, count):
                own.add_block(start, block)
            summary.merge(own.packed())
    assert np.array_equal(parts.total, sums)
    assert np.allclose(sums, np.exp(values).sum(axis=0), rtol=1e-13)
    assert (glance.rows, parts.rows) == (500, 500)
    assert np.array_equal(np.asarray(glance.sample[0]), np.asarray(whole.sample[0]))
    assert np.array_equal(glance.low[0], values.min(axis=0))


FRAME = {
    "number": [1.5, None, 3.0],
    "whole": [1, 2, 3],
    "label": ["a", "b", None],
    "flag": [True, False, True],
}


@pytest.mark.parametrize(
    "table",
    [
        np.arange(6.0).reshape(3, 2),
        np.array([[1, "a"], [2.5, None], ["b", True]], dtype=object),
        pandas.DataFrame(FRAME).astype({"label": "category"}),
        pandas.Series([1.0, 2.0], name="y"),
        polars.DataFrame(FRAME),
        polars.Series("y", ["a", "b"]),
        pyarrow.table(FRAME),
    ],
    ids=lambda table: f"{type(table).__module__.split('.')[0]}-{type(table).__name__}",
)
def test_tables_come_back_as_they_were(table):
    arrays, (found,) = from_bytes(to_bytes({"n": np.arange(3)}, (table,)))
    assert type(found) is type(table)
    assert np.array_equal(arrays["n"], np.arange(3))
    if isinstance(table, pandas.DataFrame | pandas.Series):
        (pandas.testing.assert_frame_equal if table.ndim == 2 else pandas.testing.assert_series_equal)(
            found, table
        )
    elif isinstance(table, np.ndarray):
        assert found.dtype == table.dtype
        assert found.tolist() == table.tolist()
    else:
        assert found.equals(table)
