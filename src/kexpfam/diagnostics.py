"""Is the fit good? Numbers with error bars, and one verdict in words."""

from dataclasses import dataclass

import jax.random as jr
import numpy as np
import scipy.stats
from jaxtyping import Array, Key

from kexpfam.conditional import ConditionalDensity
from kexpfam.density import refine
from kexpfam.metrics import Distance, mmd_squared
from kexpfam.nodes import effective_share, importance_nodes
from kexpfam.partition import Estimate
from kexpfam.potentials import Tilt
from kexpfam.solvers import convex
from kexpfam.solvers.loop import Status
from kexpfam.solvers.task import Task, integration_nodes, likelihood
from kexpfam.transports import Sampler

DRAWS = 4000
NODES = 16384
REFINING_STEPS = 5
# Up to here (nats, shares) a fit is called good; up to twice the first two, fair.
GOOD_SAMPLER_KL = 0.1
GOOD_F_GAP = 0.02
GOOD_EFFECTIVE_SHARE = 0.3
# A target with fewer distinct values than this share of its rows is called discrete, and its PIT is randomised.
DISCRETE_SHARE = 0.5
COVERAGES = (0.5, 0.8, 0.9, 0.95)
PIT_DRAWS = 200
SUSPICIOUS_P_VALUE = 0.01


class Verdict:
    """What every diagnosis says: the gap, whether the fit converged, and a report of its rows."""

    status: Status
    f_gap: float
    sampler_kl: Estimate
    effective_share: float
    verdict: str
    advice: tuple[str, ...]

    @property
    def duality_gap(self) -> float:
        """Return how far the pair (f, q) is from a saddle point: f's shortfall in the primal plus q's in the dual."""
        return self.f_gap + max(self.sampler_kl.value, 0.0)

    @property
    def converged(self) -> bool:
        return self.verdict != "poor" and self.status is Status.CONVERGED

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the report, as name and value."""
        return [
            ("verdict", self.verdict.upper()),
            ("solver", self.status.value),
            ("duality gap", f"{self.duality_gap:.4f} nats"),
            ("f below its optimum by", f"{self.f_gap:.4f} nats"),
            ("KL(sampler || density)", f"{self.sampler_kl.value:.4f} ± {self.sampler_kl.standard_error:.1g} nats"),
            ("effective share of draws", f"{self.effective_share:.0%}"),
        ]

    def __str__(self) -> str:
        lines = [f"{name + ':':<28}{value}" for name, value in self.rows()]
        return "\n".join(lines + [f"- {line}" for line in self.advice])


@dataclass(frozen=True)
class Diagnosis(Verdict):
    """What was measured about a fit; ``str()`` of it is the report a person reads."""

    status: Status
    log_partition: Estimate
    f_gap: float
    sampler_kl: Estimate
    sampler_mmd: Distance
    effective_share: float
    verdict: str
    advice: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        mmd = f"{self.sampler_mmd.value:+.2e} ± {self.sampler_mmd.standard_error:.1e}"
        return [*super().rows(), ("log Z", str(self.log_partition)), ("MMD^2 to refined draws", mmd)]


def diagnose(
    task: Task, tilt: Tilt, sampler: Sampler, log_partition: Estimate, status: Status, *, key: Key[Array, ""]
) -> Diagnosis:
    """Return the diagnosis of a fitted pair of density and sampler."""
    gap_key, kl_key, mmd_key, refine_key = jr.split(key, 4)
    f_gap = shortfall(task, tilt, sampler, key=gap_key)
    kl, share = sampler_divergence(tilt, sampler, log_partition, key=kl_key)
    refined = refine(tilt, sampler, DRAWS, REFINING_STEPS, key=refine_key)
    plain = sampler.weighted_draws(np.zeros((DRAWS, 0)), key=mmd_key).points
    mmd = mmd_squared(plain, refined)
    verdict, advice = judge(status, log_partition, f_gap, kl, share)
    return Diagnosis(status, log_partition, f_gap, kl, mmd, share, verdict, advice)


def shortfall(task: Task, tilt: Tilt, sampler: Sampler, *, key: Key[Array, ""]) -> float:
    """Return how much higher the penalised likelihood could be (nats): half the squared Newton decrement on fresh draws.

    The part that fresh draws put there by chance, about rank / (2 draws), is taken off.
    """
    problem = likelihood(task.within(tilt.space), importance_nodes(task.base, sampler.reference, NODES, key=key))
    optimum = convex.maximise(problem, task.rkhs_penalty, np.asarray(tilt.weights), most=0)
    exponents = problem.exponents(np.asarray(tilt.weights))[0]
    noise = tilt.space.size / (effective_share(exponents) * NODES)
    return max(0.5 * (optimum.decrement - noise), 0.0)


def sampler_divergence(tilt: Tilt, sampler: Sampler, log_partition: Estimate, *, key: Key[Array, ""]) -> tuple[Estimate, float]:
    """Return KL(q || p_f) with its error, and the effective share of sampler draws weighted by p_f / q."""
    draws = sampler.weighted_draws(np.zeros((DRAWS, 0)), key=key)
    log_p = tilt.base.log_densities(draws.points) + tilt.values(draws.points) - log_partition.value
    log_ratio = draws.log_density - log_p
    error = float(np.hypot(log_ratio.std() / np.sqrt(DRAWS), log_partition.standard_error))
    return Estimate(float(log_ratio.mean()), error, float(DRAWS)), effective_share(-log_ratio)


def judge(status: Status, log_partition: Estimate, f_gap: float, kl: Estimate, share: float) -> tuple[str, tuple[str, ...]]:
    """Return the verdict and the advice that goes with what was measured."""
    advice = []
    if not log_partition.trustworthy:
        advice.append(
            "log Z is uncertain: log densities share an unknown constant. Fewer dimensions, a stronger base "
            "(base='mixture') or a larger rkhs_penalty make it sharper."
        )
    if f_gap > GOOD_F_GAP:
        advice.append("f is not at its optimum: raise DDE(nodes=...), or use solver='exact' in up to 3 dimensions.")
    if kl.value > GOOD_SAMPLER_KL or share < GOOD_EFFECTIVE_SHARE:
        advice.append("The plain sampler differs from the density: use sample(..., refine=10), or more DDE(steps=...).")
    if status is not Status.CONVERGED:
        advice.append(status.value)
    poor = (
        not log_partition.trustworthy
        or f_gap > 5 * GOOD_F_GAP
        or kl.value > 5 * GOOD_SAMPLER_KL
        or share < 0.1 * GOOD_EFFECTIVE_SHARE
    )
    verdict = "poor" if poor else "fair" if advice else "good"
    return verdict, tuple(advice)


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
        covered = ", ".join(f"{level:.0%}: {share:.0%}" for level, share in self.coverage.items())
        kind = "randomised PIT" if self.randomised else "PIT"
        return [
            ("held-out log density", f"{self.mean_log_density:.4f} over {self.rows} rows"),
            (f"{kind} uniform?", f"KS p = {self.ks_p_value:.3f}; of the sampler {self.sampler_ks_p_value:.3f}"),
            ("coverage of intervals", covered),
            ("CRPS", f"{self.crps:.4g}"),
        ]


@dataclass(frozen=True)
class ConditionalDiagnosis(Verdict):
    """What was measured about a conditional fit; ``str()`` of it is the report a person reads."""

    status: Status
    f_gap: float
    sampler_kl: Estimate
    effective_share: float
    partition_error: float
    calibration: Calibration | None
    verdict: str
    advice: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        calibrated = self.calibration.lines() if self.calibration is not None else []
        return [*super().rows(), ("largest error of log Z(x)", f"{self.partition_error:.1g}"), *calibrated]


def diagnose_conditional(
    task: Task,
    density: ConditionalDensity,
    training: np.ndarray,
    status: Status,
    calibration: Calibration | None,
    *,
    key: Key[Array, ""],
) -> ConditionalDiagnosis:
    """Return the diagnosis of a fitted conditional density; ``training`` are its conditions in the data's units."""
    gap_key, kl_key = jr.split(key)
    finer = likelihood(
        task.within(density.tilt.space), integration_nodes(task, task.proposal, NODES, fineness=1.4, key=gap_key)
    )
    optimum = convex.maximise(finer, task.rkhs_penalty, np.asarray(density.tilt.weights), most=0)
    f_gap = max(0.5 * optimum.decrement, 0.0)
    kl, share, error = conditional_divergence(density, training, key=kl_key)
    verdict, advice = judge_conditional(status, f_gap, kl, share, error, calibration)
    return ConditionalDiagnosis(status, f_gap, kl, share, error, calibration, verdict, advice)


def conditional_divergence(
    density: ConditionalDensity, training: np.ndarray, *, key: Key[Array, ""]
) -> tuple[Estimate, float, float]:
    """Return KL(q || p_f) over training conditions, the effective share of draws, and the largest error of ``log Z(x)``."""
    row_key, draw_key = jr.split(key)
    rows = np.asarray(jr.randint(row_key, (DRAWS,), 0, len(training)))
    conditions = density.conditions(training[rows])
    draws = density.sampler.weighted_draws(conditions, key=draw_key)
    partitions, errors = density.log_partitions(training), density.partition_errors(training)
    log_p = density.tilt.base.log_densities(draws.points) + density.tilt.values(draws.points, conditions) - partitions[rows]
    log_ratio = draws.log_density - log_p
    kl = Estimate(float(log_ratio.mean()), float(log_ratio.std() / np.sqrt(DRAWS)), float(DRAWS))
    return kl, effective_share(-log_ratio), float(errors.max())


def judge_conditional(
    status: Status, f_gap: float, kl: Estimate, share: float, error: float, calibration: Calibration | None
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict and the advice that goes with what was measured."""
    partition = Estimate(0.0, error, np.inf)
    verdict, advice = judge(status, partition, f_gap, kl, share)
    extra = []
    if calibration is None:
        extra.append("Pass held-out X and y to diagnose() to see whether the predicted distributions are calibrated.")
    elif calibration.ks_p_value < SUSPICIOUS_P_VALUE:
        extra.append("Held-out targets do not look like draws of their predicted distributions: look at plot_calibration().")
        verdict = "fair" if verdict == "good" else verdict
    return verdict, (*advice, *extra)


def calibrate(density: ConditionalDensity, X: np.ndarray, targets: np.ndarray, *, key: Key[Array, ""]) -> Calibration:
    """Return the calibration of the density and its sampler on rows that it has not seen."""
    draw_key, seed_key = jr.split(key)
    rng = np.random.default_rng(int(jr.randint(seed_key, (), 0, 2**31 - 1)))
    y = targets[:, 0]
    distinct = np.unique(y)
    randomised = len(distinct) < DISCRETE_SHARE * len(y)
    step = 0.5 * float(np.diff(distinct).min()) if randomised and len(distinct) > 1 else 0.0
    low, high = density.cdf(X, targets - step), density.cdf(X, targets + step)
    pit = low + rng.uniform(size=len(y)) * (high - low)
    draws = density.sample(X, PIT_DRAWS, key=draw_key)[:, :, 0]
    under, upto = (draws < (y - step)[:, None]).sum(1), (draws <= (y + step)[:, None]).sum(1)
    sampler_pit = (under + rng.uniform(size=len(y)) * (upto - under + 1)) / (PIT_DRAWS + 1)
    coverage = {level: float(np.mean(np.abs(pit - 0.5) <= 0.5 * level)) for level in COVERAGES}
    p_values = [float(scipy.stats.kstest(values, "uniform").pvalue) for values in (pit, sampler_pit)]
    score = float(density.log_density(X, targets).mean())
    crps = float(density.crps(X, targets).mean())
    return Calibration(len(y), score, pit, sampler_pit, randomised, p_values[0], p_values[1], coverage, crps)
