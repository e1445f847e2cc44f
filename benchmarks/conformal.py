"""Coverage of deliberately wrong models before and after conformal repair, over repeated experiments.

    python benchmarks/conformal.py [REPETITIONS]       # prints and appends one record per model

Targets are skewed and their spread grows. Each repetition fits a model to 200 rows, repairs it with 199
others and counts the targets of 200 more that its intervals (regions, for two targets) hold. The count of a
repetition is beta-binomial if the repair is valid; its band holds 95 % of repetitions, and the mean over all
has a band of its own.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from ledger import append
from scipy.stats import betabinom

from kexpfam import ConditionalKernelExpFamily, Kernel
from kexpfam.estimators import ConditionalKernelDensity, NeighbourDensity

__all__ = ["MODELS", "coverages", "main", "repetition", "rows_of"]

TRAINING, REPAIR, TEST, REPETITIONS = 200, 199, 200, 50
LEVELS = (0.5, 0.9)


def rows_of(count: int, targets: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets: a bend, noise that is skewed and grows."""
    x = rng.uniform(-2.0, 2.0, (count, 1))
    noise = rng.gamma(2.0, size=(count, targets)) - 2.0
    y = np.sin(2.0 * x) + (0.1 + 0.4 * np.abs(x)) * noise
    return x, y[:, 0] if targets == 1 else y


# Neighbours so near that there are next to none, for one target and for two, and a fit that is far too
# smooth.
MODELS: dict[str, tuple[int, Callable[[], Any]]] = {
    "kernel density, width 0.02": (
        1,
        lambda: ConditionalKernelDensity(condition_width=0.02, width=0.02, random_state=0),
    ),
    "two targets, neighbours within 0.02": (
        2,
        lambda: NeighbourDensity(radius=0.02, width=0.05, random_state=0),
    ),
    "kernel exponential family, penalty 1": (
        1,
        lambda: ConditionalKernelExpFamily(
            model="kernel",
            kernel=Kernel(
                condition_lengthscale=1.0, lengthscale=1.0, rkhs_penalty=1.0, base_width=1.0, power=False
            ),
            random_state=0,
        ),
    ),
}


def coverages(model: Any, x: np.ndarray, y: np.ndarray) -> list[float]:
    """Return the share of targets inside intervals, or inside regions if there are several, at each level."""
    if y.ndim > 1:
        return [float(np.mean(model.in_region(x, y, level))) for level in LEVELS]
    ends = [model.interval(x, level).T for level in LEVELS]
    return [float(np.mean((low <= y) & (y <= high))) for low, high in ends]


def repetition(name: str, seed: int) -> tuple[list[float], list[float]]:
    """Return the coverage before and after the repair, with rows of their own."""
    targets, make = MODELS[name]
    rng = np.random.default_rng(seed)
    model, test = make().fit(*rows_of(TRAINING, targets, rng)), rows_of(TEST, targets, rng)
    before = coverages(model, *test)
    # Draws stand behind regions alone.
    model.calibrate(*rows_of(REPAIR, targets, rng), draws=200 if targets > 1 else 1)
    return before, coverages(model, *test)


def main() -> None:
    warnings.simplefilter("ignore")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    for name in MODELS:
        found = []
        for seed in range(count):
            found.append(repetition(name, seed))
            print(name, seed, *found[-1], flush=True)
        before, after = np.array(found).transpose(1, 0, 2)
        laws = [
            betabinom(TEST, round((REPAIR + 1) * level), REPAIR + 1 - round((REPAIR + 1) * level))
            for level in LEVELS
        ]
        bands = np.array([law.ppf([0.025, 0.975]) for law in laws]) / TEST
        errors = np.array([law.std() for law in laws]) / TEST / np.sqrt(count)
        record = {
            "model": name,
            "repetitions": count,
            "levels": LEVELS,
            "before": before.mean(0).round(4).tolist(),
            "after": after.mean(0).round(4).tolist(),
            "standard_errors": errors.round(4).tolist(),
            "within_band": [
                int(np.sum((bands[j, 0] <= a) & (a <= bands[j, 1]))) for j, a in enumerate(after.T)
            ],
        }
        print(record, flush=True)
        append("conformal", record)


if __name__ == "__main__":
    main()
