"""Level and power of the tests of calibration, on densities that are known in closed form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
from scipy.stats import norm

from kexpfam.judge.pit import pit_measurements
from tools.trust.outcomes import Outcome

__all__ = ["CHECKS"]

ROWS, LEVEL = 1000, 0.05
# Bounds of the level, and the least power.
LEVELS, LEAST_POWER = (0.03, 0.07), 0.9


class Normal(NamedTuple):
    """Independent normals of standard deviation 1 around x, or around 0 without a condition."""

    dim: int

    def log_density(self, targets: np.ndarray, X: np.ndarray | None = None) -> np.ndarray:
        """Return the log density of each row."""
        return norm.logpdf(targets - (0.0 if X is None else X)).sum(axis=1)

    def cdf(self, targets: np.ndarray, X: np.ndarray) -> np.ndarray:
        """Return the distribution function of a single target."""
        return norm.cdf(targets - X)[:, 0]

    def sample(self, count: int, X: np.ndarray | None = None, *, key: Any) -> np.ndarray:
        """Return draws, (count, d), or (n, count, d) under conditions."""
        rng = np.random.default_rng(np.asarray(jr.key_data(key)))
        if X is None:
            return rng.normal(size=(count, self.dim))
        return X[:, None] + rng.normal(size=(len(X), count, self.dim))

    def crps(self, targets: np.ndarray, X: np.ndarray) -> np.ndarray:
        """Return the continuous ranked probability score of a single target."""
        z = (targets - X)[:, 0]
        return z * (2.0 * norm.cdf(z) - 1.0) + 2.0 * norm.pdf(z) - 1.0 / np.sqrt(np.pi)


Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _two_modes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return rows of which a quarter is in a second mode, four standard deviations away."""
    second = 4.0 * (rng.uniform(size=(shape[0], 1)) < 0.25)
    return rng.normal(size=shape) + second


# How the residuals differ from those of the density.
TRUTHS: dict[str, Draw] = {
    "right": lambda rng, shape: rng.normal(size=shape),
    "shifted by 0.3 sd": lambda rng, shape: 0.3 + rng.normal(size=shape),
    "variance x 1.5": lambda rng, shape: np.sqrt(1.5) * rng.normal(size=shape),
    "t3 tails": lambda rng, shape: rng.standard_t(3, size=shape),
    "lost mode": _two_modes,
}
# Columns of the target, and whether there is a condition.
SHAPES = {"p(y | x)": (1, True), "p(y1, y2 | x)": (2, True), "p(x)": (1, False), "p(x1, x2, x3)": (3, False)}


def _p_value(shape: str, truth: str, seed: int, trial: int) -> float:
    """Return the p-value of all tests of calibration for one set of held-out rows."""
    dim, conditional = SHAPES[shape]
    rng = np.random.default_rng([seed, trial, list(SHAPES).index(shape), list(TRUTHS).index(truth)])
    targets = TRUTHS[truth](rng, (ROWS, dim))
    X = rng.normal(size=(ROWS, dim)) if conditional else None
    key = jr.key(int(rng.integers(2**31)))
    found = pit_measurements(Normal(dim), X, targets if X is None else targets + X, key=key)
    return next(one.value for one in found if one.name == "pit_p_value")


def _rates(trials: int, seed: int, truths: list[str]) -> dict[tuple[str, str], float]:
    """Return the share of rejections at 5 % of each density and truth."""
    rejected = lambda *case: np.mean([_p_value(*case, seed, k) < LEVEL for k in range(trials)])
    return {(shape, truth): float(rejected(shape, truth)) for shape in SHAPES for truth in truths}


def calibration_level(trials: int, seed: int, folder: Path) -> Outcome:
    """Test held-out rows that are draws of the density; chance of two standard errors is allowed for."""
    del folder
    rates, chance = _rates(trials, seed, ["right"]), 2.0 * np.sqrt(LEVEL * (1.0 - LEVEL) / trials)
    low, high = LEVELS[0] - chance, LEVELS[1] + chance
    failures = [f"{shape}: {rate:.1%}" for (shape, _), rate in rates.items() if not low <= rate <= high]
    figure = "; ".join(f"{shape} {rate:.1%}" for (shape, _), rate in rates.items())
    return Outcome(trials * len(rates), failures, f"rejected at 5 %: {figure}")


def calibration_power(trials: int, seed: int, folder: Path) -> Outcome:
    """Test held-out rows that are not draws of the density."""
    del folder
    rates = _rates(trials, seed, [truth for truth in TRUTHS if truth != "right"])
    failures = [f"{' of '.join(case)}: {rate:.2f}" for case, rate in rates.items() if rate < LEAST_POWER]
    (shape, truth), least = min(rates.items(), key=lambda item: item[1])
    return Outcome(trials * len(rates), failures, f"least power {least:.2f} ({truth}, {shape})")


CHECKS = {one.__name__: one for one in (calibration_level, calibration_power)}
