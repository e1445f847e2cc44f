"""Tables of several column kinds with a known law: mean shortfall of the held-out log density."""

from typing import Any

import jax
import numpy as np

from reproduction.cost import Cost
from reproduction.methods import DENSITIES
from reproduction.mixed_data import TABLES, MixedTable, jittered
from reproduction.peers import version_of
from reproduction.records import Unavailable, Values
from reproduction.specs import Cell

__all__ = ["mixed"]

TEST_ROWS = 4000
# The test rows are the same whatever the seed of the training rows.
TEST_SEED = 1_000


def mixed(cell: Cell) -> Values:
    """Return the mean shortfall of the log density per column, its standard error, and the cost.

    Ours is told the kinds and keeps rows with missing cells; the others have complete rows alone, in training
    and test.
    """
    table, rng = TABLES[cell["dataset"]], np.random.default_rng(cell["seed"])
    train, test = table.draw(rng, cell["rows"]), table.draw(np.random.default_rng(TEST_SEED), TEST_ROWS)
    scores: Any = _ours if cell["method"] == "auto" else _peer
    if scores is _peer:
        train, test = (rows[~np.any(np.isnan(rows), axis=1)] for rows in (train, test))
    jax.clear_caches()
    with Cost() as cost:
        found, extra = scores(cell, table, train, test)
    # One row of density 0 makes the mean infinite, which no record can hold: the others are averaged, and
    # such rows counted.
    possible = np.isfinite(found)
    if not np.any(possible):
        raise Unavailable(f"{cell['method']} has no finite log density on any row of {cell['dataset']}.")
    short = (table.log_density(test) - found)[possible] / table.dim
    error = float(short.std() / np.sqrt(len(short)))
    values = {
        "shortfall": float(short.mean()),
        "shortfall_error": error,
        "training_rows": len(train),
        "columns": table.dim,
    }
    extra["impossible_rows"] = int(np.sum(~possible))
    package = version_of(cell["method"])
    return (
        values
        | extra
        | {"seconds": cost.seconds, "megabytes": cost.megabytes}
        | ({"package": package} if package else {})
    )


def _ours(cell: Cell, table: MixedTable, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, Values]:
    from kexpfam import KernelExpFamily

    effort = cell.get("effort", "default")
    model = KernelExpFamily(columns=table.kinds, effort=effort, random_state=cell["seed"]).fit(train)
    draws = np.asarray(model.sample(2000, random_state=0), float)
    outside = float(np.mean(~model._columns.inside(model._columns.encode(list(draws.T), unknown=True))))
    return model.score_samples(test), {"outside": outside, "verdict": model.diagnose().verdict}


def _peer(cell: Cell, table: MixedTable, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, Values]:
    method, rng = DENSITIES[cell["method"]](cell["seed"]), np.random.default_rng(cell["seed"])
    if hasattr(method, "fit_kinds"):
        return method.fit_kinds(train, table.kinds).score_samples(test), {}
    model = method.fit(jittered(train, table, rng))
    return np.asarray(model.score_samples(jittered(test, table, rng))), {}
