"""Whether held-out targets look like draws of their predicted distributions: PIT, coverage, CRPS."""

from dataclasses import dataclass
from typing import Any

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.integrate.nodes import seed_from

__all__ = ["Calibration", "calibrate"]

# A target with fewer distinct values than this share of its rows is called discrete, and its PIT is randomised.
DISCRETE_SHARE = 0.5
COVERAGES = (0.5, 0.8, 0.9, 0.95)
PIT_DRAWS = 200
# With fewer held-out rows than this, what chance does is said beside the figures.
FEW_ROWS = 30


@dataclass(frozen=True)
class Calibration:
    """How held-out targets fall within their predicted distributions; all of it for targets of one dimension.

    ``pit`` are the values ``F(y | x)``, uniform if the density is right; ``sampler_pit`` the same from ranks among plain
    draws of the sampler. Where the target is discrete both are randomised within its steps. ``coverage`` is the share of
    targets inside each central interval.
    """

    rows: int
    mean_log_density: float
    pit: np.ndarray
    sampler_pit: np.ndarray
    randomised: bool
    ks_p_value: float
    sampler_ks_p_value: float
    coverage: dict[float, float]
    crps: float

    @property
    def histogram(self) -> np.ndarray:
        """Return the share of PIT values in each tenth of the unit interval."""
        return np.histogram(self.pit, bins=10, range=(0.0, 1.0))[0] / self.rows

    def lines(self) -> list[tuple[str, str]]:
        """Return what a report says of it."""
        few = [("how much that says", _of_few_rows(self.rows))] if self.rows < FEW_ROWS else []
        covered = ", ".join(f"{level:.0%}: {share:.0%}" for level, share in self.coverage.items())
        kind = "randomised PIT" if self.randomised else "PIT"
        return [
            ("held-out log density", f"{self.mean_log_density:.4f} over {self.rows} rows"),
            (f"{kind} uniform?", f"KS p = {self.ks_p_value:.3f}; of the sampler {self.sampler_ks_p_value:.3f}"),
            ("coverage of intervals", covered),
            ("CRPS", f"{self.crps:.4g}"),
            *few,
        ]


def _of_few_rows(rows: int) -> str:
    from scipy.stats import binom  # slow to import

    low = int(binom.ppf(0.025, rows, 0.9))
    number = f"{rows} rows say" if rows > 1 else "one row says"
    return f"{number} little: 90 % intervals of a perfect model would hold {low} to {rows} of them"


def calibrate(density: Any, X: np.ndarray, targets: np.ndarray, *, key: Key[Array, ""]) -> Calibration:
    """Return the calibration of the density and its sampler on rows that it has not seen."""
    draw_key, seed_key = jr.split(key)
    rng = np.random.default_rng(seed_from(seed_key))
    y = targets[:, 0]
    distinct = np.unique(y)
    randomised = len(distinct) < DISCRETE_SHARE * len(y)
    step = 0.5 * float(np.diff(distinct).min()) if randomised and len(distinct) > 1 else 0.0
    low, high = density.cdf(targets - step, X), density.cdf(targets + step, X)
    pit = low + rng.uniform(size=len(y)) * (high - low)
    draws = density.sample(PIT_DRAWS, X, key=draw_key)[:, :, 0]
    under, upto = (draws < (y - step)[:, None]).sum(1), (draws <= (y + step)[:, None]).sum(1)
    sampler_pit = (under + rng.uniform(size=len(y)) * (upto - under + 1)) / (PIT_DRAWS + 1)
    coverage = {level: float(np.mean(np.abs(pit - 0.5) <= 0.5 * level)) for level in COVERAGES}
    from scipy.stats import kstest  # slow to import

    p_values = [float(kstest(values, "uniform").pvalue) for values in (pit, sampler_pit)]
    score = float(density.log_density(targets, X).mean())
    crps = float(density.crps(targets, X).mean())
    return Calibration(len(y), score, pit, sampler_pit, randomised, p_values[0], p_values[1], coverage, crps)
