"""Real tables: regressions on standard splits and joint densities; likelihood, calibration and cost."""

from typing import Any

import jax
import numpy as np
import scipy.stats

from reproduction import real_data
from reproduction.c2st import boosted_c2st, c2st
from reproduction.cost import Cost, timed
from reproduction.methods import CONDITIONALS, DENSITIES
from reproduction.peers import version_of
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["joint", "likelihood", "pit", "regression", "resemblance"]

DRAWS, REPEATS = 5000, 3
# A target with fewer distinct values than this share of its rows has its PIT spread over the steps between
# them.
DISCRETE_SHARE = 0.5
COVERAGE = 0.9


def regression(cell: Cell) -> Values:
    """Return likelihood, calibration and cost of one estimator on one split, in the target's units."""
    split = real_data.regression_split(cell["dataset"], cell["seed"])
    model = CONDITIONALS[cell["method"]](cell["seed"])
    jax.clear_caches()  # so that every fit pays for its own compilation, whichever cells ran before it
    with Cost() as cost:
        model.fit(split.train[:, :-1], split.train[:, -1])
    X, y = split.test[:, :-1], split.test[:, -1]
    ranks, randomised = pit(model, X, y, np.random.default_rng(cell["seed"]))
    values = likelihood(model.score_samples(X, y)) | {
        "ks_p_value": float(scipy.stats.kstest(ranks, "uniform").pvalue),
        "coverage_90": float(np.mean(np.abs(ranks - 0.5) <= 0.5 * COVERAGE)),
        "randomised": randomised,
        "distinct_targets": len(np.unique(np.concatenate([split.train[:, -1], y]))),
    }
    return values | _weights(model) | _costs(cell, split, cost)


def joint(cell: Cell) -> Values:
    """Return likelihood, resemblance of draws and cost of one joint estimator, and the largest share of one
    value in a column.

    Of our default, the verdict of its diagnosis too. It gets the rows as they are, which are rounded in most
    sets; the others get them standardised. Log densities are in units of the training rows.
    """
    sizes = {name: cell[name] for name in ("dim", "rows") if name in cell}
    split = real_data.joint_split(cell["dataset"], **sizes, seed=cell["seed"])
    ours, log_scale = cell["method"] == "auto", float(np.sum(np.log(split.scale)))
    split = split if ours else split.standardised()
    model = DENSITIES[cell["method"]](cell["seed"])
    jax.clear_caches()
    with Cost() as cost:
        model.fit(split.train)
    values = likelihood(model.score_samples(split.test) + (log_scale if ours else 0.0)) | {
        "sampling_seconds": timed(lambda: model.sample(DRAWS, random_state=0), repeats=REPEATS),
        "ties": max(
            float(np.unique(column, return_counts=True)[1].max() / len(column)) for column in split.train.T
        ),
    }
    draws = [np.asarray(model.sample(len(split.test), random_state=seed)) for seed in range(REPEATS)]
    values |= resemblance(split.test, draws)
    if split.truth_nll is not None:
        values["truth_nll"] = split.truth_nll
    if ours:
        values["verdict"] = model.diagnose().verdict
    return values | _weights(model) | _costs(cell, split, cost)


def resemblance(test: np.ndarray, draws: list[np.ndarray]) -> Values:
    """Return distances between test rows and draws, as many each: the accuracies of boosted trees and of a
    network that separate them, and mean differences of distribution functions and of rank correlations."""
    columns = range(test.shape[1])
    ks = [scipy.stats.ks_2samp(test[:, k], one[:, k]).statistic for one in draws for k in columns]
    pairs = np.triu_indices(test.shape[1], 1)
    ranked = lambda rows: np.corrcoef(scipy.stats.rankdata(rows, axis=0), rowvar=False)[pairs]
    return {
        "c2st_boosted": float(np.mean([boosted_c2st(test, one) for one in draws])),
        "c2st_network": c2st(test, draws[0]),
        "ks_distance": float(np.mean(ks)),
        "correlation_distance": float(np.mean([np.abs(ranked(one) - ranked(test)).mean() for one in draws])),
    }


def likelihood(scores: np.ndarray) -> Values:
    """Return the mean NLL of rows of positive density, its standard error, and the count of other rows.

    One such row makes the mean infinite, which no record can hold.
    """
    possible = scores[scores > -np.inf]
    error = float(possible.std() / np.sqrt(len(possible)))
    return {
        "nll": float(-possible.mean()),
        "nll_error": error,
        "impossible_rows": len(scores) - len(possible),
    }


def pit(model: Any, X: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, bool]:
    """Return ``F(y | x)`` of each row, and whether it was spread over the steps of a discrete target."""
    distinct = np.unique(y)
    randomised = len(distinct) < DISCRETE_SHARE * len(y)
    step = 0.5 * float(np.diff(distinct).min()) if randomised and len(distinct) > 1 else 0.0
    low, high = (np.asarray(model.cdf(X, y + side)) for side in (-step, step))
    return np.clip(low + rng.uniform(size=len(y)) * (high - low), 0.0, 1.0), randomised


def _weights(model: Any) -> Values:
    """Return the weight of each candidate, if several competed."""
    candidates = getattr(model, "candidates_", [])
    return {"weights": {one.name: one.weight for one in candidates}} if len(candidates) > 1 else {}


def _costs(cell: Cell, split: real_data.Split, cost: Cost) -> Values:
    """Return time and memory of a fit; its one thread has the seconds of the processor, which other work on
    the machine does not change."""
    rows, columns = split.train.shape
    found: Values = {
        "seconds": cost.processor_seconds,
        "megabytes": cost.megabytes,
        "training_rows": rows,
        "columns": columns,
    }
    return found | ({"package": version_of(cell["method"])} if version_of(cell["method"]) else {})
