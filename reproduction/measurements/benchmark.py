"""Benchmark sets of p(y | x): random halves, standardised by the training half."""

from typing import Any

import numpy as np

from kexpfam import datasets
from kexpfam.judge.diagnosis import Diagnosis
from kexpfam.model.density import TiltedDensity
from reproduction.cost import Cost
from reproduction.methods import CONDITIONALS
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["conditional", "halves"]

# Methods whose sampler is apart from their density, so that there is something to diagnose.
CALIBRATED = ("auto", "dde")


def conditional(cell: Cell) -> Values:
    """Return likelihood, calibration and time of one estimator on one random half of a benchmark set."""
    train, test = halves(cell["dataset"], cell["seed"])
    with Cost() as cost:
        model = CONDITIONALS[cell["method"]](cell["seed"]).fit(train[:, :-1], train[:, -1])
    scores = model.score_samples(test[:, :-1], test[:, -1])
    values = {
        "nll": float(-scores.mean()),
        "nll_error": float(scores.std() / np.sqrt(len(scores))),
        "seconds": cost.seconds,
        "processor_seconds": cost.processor_seconds,
        "megabytes": cost.megabytes,
        "rows": len(train),
    }
    return values | (_calibration(model, test) if cell["method"] in CALIBRATED else {})


def _calibration(model: Any, test: np.ndarray) -> Values:
    diagnosis = model.diagnose(test[:, :-1], test[:, -1])
    return {
        "crps": diagnosis.crps,
        "ks_p_value": diagnosis.pit_p_value,
        "sampler_ks_p_value": diagnosis.sampler_pit_p_value,
        "randomised": bool(diagnosis.randomised),
        "coverage_90": diagnosis.coverage[0.9],
        "verdict": diagnosis.verdict,
    } | _facts_of_the_solver(model, diagnosis)


def _facts_of_the_solver(model: Any, diagnosis: Diagnosis) -> Values:
    """Return the facts of a kernel model; for a stack, the weights of its candidates."""
    if not isinstance(model.density_, TiltedDensity):
        return {"weights": {one.name: one.weight for one in model.candidates_}}
    return {
        "status": diagnosis.kernel_status,
        "sampler_kl": diagnosis.sampler_kl,
        "sampler_folds": diagnosis.sampler_folds,
        "f_gap": diagnosis.f_gap,
    }


def halves(name: str, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two random halves of a set, features and target last, standardised by the first half."""
    data = datasets.load_benchmark(name)
    rows = np.column_stack([data.features, data.target]).astype(float)
    order = np.random.default_rng(split).permutation(len(rows))
    train, test = rows[order[: len(rows) // 2]], rows[order[len(rows) // 2 :]]
    scale = train.std(0)
    scale = np.where(scale > 1e-10, scale, 1.0)
    return (train - train.mean(0)) / scale, (test - train.mean(0)) / scale
