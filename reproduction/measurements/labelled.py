"""Regressions on tables with labels and missing cells: likelihood, CRPS and calibration beside peers."""

from typing import Any

import jax
import numpy as np
import pandas as pd

from reproduction.cost import Cost
from reproduction.measurements.real import COVERAGE, likelihood
from reproduction.methods import CONDITIONALS
from reproduction.peers import LEVELS, version_of
from reproduction.real_data import labelled_split
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["encoded", "labelled", "pinball_crps"]


def labelled(cell: Cell) -> Values:
    """Return likelihood, CRPS and calibration of one estimator on a random tenth of the rows.

    Ours gets the table as it is; the others get indicators of labels, and medians with an indicator in place
    of missing numbers.
    """
    train, test, target = labelled_split(cell["dataset"], cell["seed"])
    y, y_test = (table.pop(target).to_numpy(float) for table in (train, test))
    estimator = CONDITIONALS[cell["method"]]
    ours = estimator.estimator == "ConditionalKernelExpFamily"
    X, X_test = (train, test) if ours else encoded(train, test)
    model: Any = estimator(cell["seed"])
    if "effort" in cell:
        model.set_params(effort=cell["effort"])
    jax.clear_caches()
    with Cost() as cost:
        model.fit(X, y)
    quantiles = np.asarray(model.quantile(X_test, LEVELS))
    ends = np.asarray(model.quantile(X_test, [0.5 - 0.5 * COVERAGE, 0.5 + 0.5 * COVERAGE]))
    values = likelihood(np.asarray(model.score_samples(X_test, y_test))) | {
        "crps": pinball_crps(quantiles, y_test),
        "coverage_90": float(np.mean((ends[:, 0] <= y_test) & (y_test <= ends[:, 1]))),
        "seconds": cost.processor_seconds,
        "megabytes": cost.megabytes,
        "training_rows": len(train),
        "columns": train.shape[1] + 1,
    }
    # A fit in another process knows its own cost and package.
    values |= getattr(model, "facts_", {})
    return values | ({"package": version_of(cell["method"])} if version_of(cell["method"]) else {})


def pinball_crps(quantiles: np.ndarray, y: np.ndarray) -> float:
    """Return the mean CRPS as twice the mean pinball loss of quantiles at ``LEVELS``, (rows, levels)."""
    below = y[:, None] - quantiles
    return float(2.0 * np.mean(np.maximum(LEVELS * below, (LEVELS - 1.0) * below)))


def encoded(train: pd.DataFrame, test: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return both tables as numbers: indicators of the labels in training, medians for missing numbers."""
    numbers = train.select_dtypes("number")
    middle, gaps = numbers.median(), numbers.columns[numbers.isna().any()]
    labels = {name: train[name].dropna().unique() for name in train.columns.difference(numbers.columns)}

    def numeric(table: pd.DataFrame) -> np.ndarray:
        found = [table[numbers.columns].fillna(middle), table[gaps].isna()]
        found += [
            pd.DataFrame({label: table[name] == label for label in own}) for name, own in labels.items()
        ]
        return np.concatenate([part.to_numpy(float) for part in found], axis=1)

    return numeric(train), numeric(test)
