"""Whether held-out targets look like draws of their predicted distributions: PIT, coverage, CRPS; of several, TARP."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.integrate.nodes import seed_from

__all__ = [
    "Calibration",
    "JointCalibration",
    "calibrate",
    "column_ranks",
    "density_ranks",
    "inside_central",
    "tarp",
]

# A target with fewer distinct values than this share of its rows is called discrete, and its PIT is randomised.
DISCRETE_SHARE = 0.5
COVERAGES = (0.5, 0.8, 0.9, 0.95)
PIT_DRAWS = 200
# With fewer held-out rows than this, what chance does is said beside the figures.
FEW_ROWS = 30
# Log densities that are in memory at a time.
CHUNK_DRAWS = 20_000


@dataclass(frozen=True)
class Calibration:
    """How held-out targets fall within their predicted distributions; all of it for targets of one dimension.

    ``pit`` are the values ``F(y | x)``, uniform if the density is right; ``sampler_pit`` the same from ranks among plain
    draws of the sampler. Where the target is discrete both are randomised within its steps. ``coverage`` is the share of
    targets inside each central interval, ``repaired`` that inside the intervals of a repaired model.
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
    repaired: dict[float, float] | None = None

    @property
    def words(self) -> tuple[str, str]:
        """Return what the values in ``pit`` are, and what ``coverage`` is of, for a picture."""
        return "randomised PIT" if self.randomised else "PIT, F(y | x)", "central intervals"

    @property
    def entries(self) -> np.ndarray:
        """Return the coverage at which each target enters the interval: uniform if the density is right."""
        return np.abs(2.0 * self.pit - 1.0)

    @property
    def histogram(self) -> np.ndarray:
        """Return the share of PIT values in each tenth of the unit interval."""
        return np.histogram(self.pit, bins=10, range=(0.0, 1.0))[0] / self.rows

    def lines(self) -> list[tuple[str, str]]:
        """Return what a report says of it."""
        few = [("how much that says", _of_few_rows(self.rows))] if self.rows < FEW_ROWS else []
        kind = "randomised PIT" if self.randomised else "PIT"
        return [
            ("held-out log density", f"{self.mean_log_density:.4f} over {self.rows} rows"),
            (
                f"{kind} uniform?",
                f"KS p = {self.ks_p_value:.3f}; of the sampler {self.sampler_ks_p_value:.3f}",
            ),
            *_covered("intervals", self.coverage, self.repaired),
            ("CRPS", f"{self.crps:.4g}"),
            *few,
        ]


def _of_few_rows(rows: int) -> str:
    from scipy.stats import binom  # slow to import

    low = int(binom.ppf(0.025, rows, 0.9))
    number = f"{rows} rows say" if rows > 1 else "one row says"
    return f"{number} little: 90 % intervals of a perfect model would hold {low} to {rows} of them"


@dataclass(frozen=True)
class JointCalibration:
    """How held-out targets of several columns fall within their predicted distributions.

    ``pit`` are TARP's values, uniform if the density is right (see ``tarp``); ``ranks`` are the probabilities of all points
    that are more probable than the target, uniform too, and so are the ranks of each target among draws of its column: TARP
    alone hardly sees a shift. ``coverage`` is the share of targets inside each highest-density region, ``repaired`` that
    inside the regions of a repaired model.
    """

    rows: int
    mean_log_density: float
    pit: np.ndarray
    ranks: np.ndarray
    tarp_p_value: float
    rank_p_value: float
    column_p_values: tuple[float, ...]
    coverage: dict[float, float]
    repaired: dict[float, float] | None = None

    @property
    def ks_p_value(self) -> float:
        """Return the p-value of all tests together, by Bonferroni's rule."""
        values = (self.tarp_p_value, self.rank_p_value, *self.column_p_values)
        return min(len(values) * min(values), 1.0)

    @property
    def words(self) -> tuple[str, str]:
        """Return what the values in ``pit`` are, and what ``coverage`` is of, for a picture."""
        return "TARP, share of draws nearer to a random point", "highest-density regions"

    @property
    def entries(self) -> np.ndarray:
        """Return the coverage at which each target enters the region: uniform if the density is right."""
        return self.ranks

    @property
    def histogram(self) -> np.ndarray:
        """Return the share of TARP's values in each tenth of the unit interval."""
        return np.histogram(self.pit, bins=10, range=(0.0, 1.0))[0] / self.rows

    def lines(self) -> list[tuple[str, str]]:
        """Return what a report says of it."""
        return [
            ("held-out log density", f"{self.mean_log_density:.4f} over {self.rows} rows"),
            (
                "joint calibration",
                f"TARP KS p = {self.tarp_p_value:.3f}; of density ranks {self.rank_p_value:.3f}",
            ),
            ("PIT of each target", "KS p = " + ", ".join(f"{value:.3f}" for value in self.column_p_values)),
            *_covered("regions", self.coverage, self.repaired),
            *([("how much that says", _of_few_rows(self.rows))] if self.rows < FEW_ROWS else []),
        ]


def _covered(
    what: str, coverage: dict[float, float], repaired: dict[float, float] | None
) -> list[tuple[str, str]]:
    shown = lambda shares: ", ".join(f"{level:.0%}: {share:.0%}" for level, share in shares.items())
    lines = [(f"coverage of {what}", shown(coverage))]
    return lines if repaired is None else [*lines, ("once repaired", shown(repaired))]


def calibrate(
    density: Any, X: np.ndarray, targets: np.ndarray, *, key: Key[Array, ""]
) -> Calibration | JointCalibration:
    """Return the calibration of the density on rows that it has not seen."""
    return (_calibrate if targets.shape[1] == 1 else _calibrate_jointly)(density, X, targets, key=key)


def _calibrate(density: Any, X: np.ndarray, targets: np.ndarray, *, key: Key[Array, ""]) -> Calibration:
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
    coverage = {level: float(np.mean(inside_central(pit, level))) for level in COVERAGES}
    from scipy.stats import kstest  # slow to import

    p_values = [float(kstest(values, "uniform").pvalue) for values in (pit, sampler_pit)]
    score = float(density.log_density(targets, X).mean())
    crps = float(density.crps(targets, X).mean())
    return Calibration(len(y), score, pit, sampler_pit, randomised, p_values[0], p_values[1], coverage, crps)


def _calibrate_jointly(
    density: Any, X: np.ndarray, targets: np.ndarray, *, key: Key[Array, ""]
) -> JointCalibration:
    """Return the calibration of the density of several targets."""
    from scipy.stats import kstest  # slow to import

    tarp_key, rank_key, column_key = jr.split(key, 3)
    nearer = tarp(density, X, targets, draws=PIT_DRAWS, key=tarp_key)
    ranks = np.minimum(density_ranks(density, X, targets, draws=PIT_DRAWS, key=rank_key), 1.0)
    columns = column_ranks(density, X, targets, draws=PIT_DRAWS, key=column_key)
    joint, region, *single = (
        float(kstest(values, "uniform").pvalue) for values in (nearer, ranks, *columns.T)
    )
    coverage = {level: float(np.mean(ranks <= level)) for level in COVERAGES}
    score = float(density.log_density(targets, X).mean())
    return JointCalibration(len(targets), score, nearer, ranks, joint, region, tuple(single), coverage)


def inside_central(pit: np.ndarray, coverage: float) -> np.ndarray:
    """Return which targets lie in the central interval of this coverage, by their PIT values."""
    return np.abs(pit - 0.5) <= 0.5 * coverage


def tarp(density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, key: Key[Array, ""]) -> np.ndarray:
    """Return for each row the share of draws that are nearer to a random point than the target is: TARP.

    If the density is right target and draws are exchangeable, and the shares are uniform; they are spread within their steps.
    Points far from the middle make the distance to them a view of the distribution from any side (Lemos, Coogan, Hezaveh and
    Perreault-Levasseur 2023, "Sampling-based accuracy testing of posterior estimators"). Distances are in standard deviations
    of the targets, points uniform in their box.
    """
    draw_key, seed_key = jr.split(key)
    rng = np.random.default_rng(seed_from(seed_key))
    scale = np.maximum(targets.std(axis=0), np.finfo(float).tiny)
    points = rng.uniform(targets.min(axis=0), targets.max(axis=0), targets.shape)
    own = np.linalg.norm((targets - points) / scale, axis=1)
    nearer = np.zeros(len(targets))
    for rows, several in _draws(density, X, draws, key=draw_key):
        distances = np.linalg.norm((several - points[rows, None]) / scale, axis=2)
        nearer[rows] = (distances < own[rows, None]).sum(axis=1)
    return (nearer + rng.uniform(size=len(targets))) / (draws + 1)


def density_ranks(
    density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, key: Key[Array, ""]
) -> np.ndarray:
    r"""Return for each row the probability of all points that are more probable than the target, from draws.

    It estimates :math:`P(p(Y' | x) > p(y | x) | x)`: a point is in the highest-density region of level c if it is at most c.
    Between two draws it is linear in the log density. Targets less probable than every draw go on beyond 1, so that they too
    can be told apart.
    """
    own, ranks = -density.log_density(targets, X), np.zeros(len(targets))
    for rows, several in _draws(density, X, draws, key=key):
        flat = several.reshape(-1, targets.shape[1])
        seen = -density.log_density(flat, np.repeat(X[rows], draws, axis=0)).reshape(-1, draws)
        ranks[rows] = [_rank(value, np.sort(row)) for value, row in zip(own[rows], seen, strict=True)]
    return ranks


def _rank(value: float, seen: np.ndarray) -> float:
    """Return the place of a value among sorted ones as a share of them: strictly rising, beyond both ends too."""
    count = len(seen) + 1
    if value < seen[0]:
        return float(np.exp(value - seen[0])) / count
    return float(np.interp(value, seen, np.arange(1, count)) / count + max(value - seen[-1], 0.0))


def column_ranks(
    density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, key: Key[Array, ""]
) -> np.ndarray:
    """Return the ranks of each target among draws of its own column, spread within their steps: PIT values of the marginals."""
    draw_key, seed_key = jr.split(key)
    ranks = np.random.default_rng(seed_from(seed_key)).uniform(size=targets.shape)
    for rows, several in _draws(density, X, draws, key=draw_key):
        ranks[rows] += (several < targets[rows, None]).sum(axis=1)
    return ranks / (draws + 1)


def _draws(
    density: Any, X: np.ndarray, draws: int, *, key: Key[Array, ""]
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield some rows at a time, with draws under each, (rows, draws, columns)."""
    size = max(1, CHUNK_DRAWS // draws)
    for number, start in enumerate(range(0, len(X), size)):
        rows = slice(start, start + size)
        yield rows, density.sample(draws, X[rows], key=jr.fold_in(key, number))
