"""Is the fit good? Numbers with error bars, and one verdict in words."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.random as jr
import numpy as np
import scipy.stats
from jaxtyping import Array, Key

from kexpfam.conditional import ConditionalDensity
from kexpfam.density import refine
from kexpfam.metrics import Distance, mmd_squared
from kexpfam.nodes import effective_share, grid_nodes, importance_nodes
from kexpfam.partition import FEW_EFFECTIVE_DRAWS, FINER, QUADRATURE_DIMS, QUADRATURE_SAFETY, Estimate
from kexpfam.potentials import Tilt
from kexpfam.solvers import convex
from kexpfam.solvers.convex import Likelihood
from kexpfam.solvers.loop import Status
from kexpfam.solvers.task import Task, integration_nodes, likelihood, shortfall
from kexpfam.transports import Sampler, WeightedDraws

DRAWS = 4000
NODES = 16384
REFINING_STEPS = 5
# The certificate divides squares of noise by the penalty, so it takes many draws; a thousand show how large they are.
CERTIFYING_DRAWS, TRACE_DRAWS = 32768, 1000
# Where Newton's method stops on the way to the density that certifies: far below what one over the penalty could make visible.
CERTIFIED_DECREMENT = 1e-14
# The certificate's key is apart from those of the other measurements.
CERTIFICATE = 1
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
    # Estimators that do not maximise the penalised likelihood have none.
    certificate: "Certificate | None"

    @property
    def duality_gap(self) -> float:
        """Return how far the pair (f, q) is from a saddle point: f's shortfall in the primal plus q's in the dual."""
        return self.f_gap + max(self.sampler_kl.value, 0.0)

    @property
    def primal(self) -> Estimate | None:
        """Return the penalised likelihood of f: a lower bound of its optimum."""
        return None if self.certificate is None else self.certificate.primal

    @property
    def dual(self) -> Estimate | None:
        """Return an upper bound of the optimum of the penalised likelihood."""
        return None if self.certificate is None else self.certificate.dual

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
            *([] if self.certificate is None else self.certificate.lines()),
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
    certificate: "Certificate"

    def rows(self) -> list[tuple[str, str]]:
        mmd = f"{self.sampler_mmd.value:+.2e} ± {self.sampler_mmd.standard_error:.1e}"
        return [*super().rows(), ("log Z", str(self.log_partition)), ("MMD^2 to refined draws", mmd)]


class Certificate(NamedTuple):
    """Values of the two problems between which the optimum of the penalised likelihood lies (nats), and their errors.

    ``primal`` is the penalised likelihood of f: no f has more than the optimum. ``dual`` is the value of the maximum-entropy
    problem at a distribution: none has less. Both are bounds if their integrals are exact; they are estimates, with the
    errors given, because these are sums over a grid or over draws. ``sampler_dual`` is the dual value of the sampler, which
    certifies the sampler as ``dual`` certifies f; one over the penalty multiplies what its moments miss, so
    that with a small penalty it lies far above.
    """

    primal: Estimate
    dual: Estimate
    sampler_dual: Estimate

    @property
    def gap(self) -> Estimate:
        """Return by how much f can be below the optimum at most, up to the error."""
        error = float(np.hypot(self.primal.standard_error, self.dual.standard_error))
        return Estimate(self.dual.value - self.primal.value, error, self.dual.effective_draws)

    def lines(self) -> list[tuple[str, str]]:
        """Return what a report says of it."""
        brief = lambda estimate: f"{estimate.value:.4f} ± {estimate.standard_error:.1g}"
        return [
            ("certified", f"optimum between {brief(self.primal)} and {brief(self.dual)} nats"),
            ("dual value of the sampler", f"{brief(self.sampler_dual)} nats"),
        ]


def diagnose(
    task: Task, tilt: Tilt, sampler: Sampler, log_partition: Estimate, status: Status, *, key: Key[Array, ""]
) -> Diagnosis:
    """Return the diagnosis of a fitted pair of density and sampler."""
    gap_key, kl_key, mmd_key, refine_key = jr.split(key, 4)
    f_gap = shortfall(task, tilt, sampler.reference, NODES, key=gap_key).value
    kl, share = sampler_divergence(tilt, sampler, log_partition, key=kl_key)
    refined = refine(tilt, sampler, DRAWS, REFINING_STEPS, key=refine_key)
    plain = sampler.weighted_draws(np.zeros((DRAWS, 0)), key=mmd_key).points
    mmd = mmd_squared(plain, refined)
    verdict, advice = judge(status, log_partition, f_gap, kl, share)
    certificate = certify(task, tilt, sampler, log_partition, key=jr.fold_in(key, CERTIFICATE))
    return Diagnosis(status, log_partition, f_gap, kl, mmd, share, verdict, advice, certificate)


def sampler_divergence(tilt: Tilt, sampler: Sampler, log_partition: Estimate, *, key: Key[Array, ""]) -> tuple[Estimate, float]:
    """Return KL(q || p_f) with its error, and the effective share of sampler draws weighted by p_f / q."""
    draws = sampler.weighted_draws(np.zeros((DRAWS, 0)), key=key)
    log_p = tilt.base.log_densities(draws.points) + tilt.values(draws.points) - log_partition.value
    log_ratio = draws.log_density - log_p
    error = float(np.hypot(log_ratio.std() / np.sqrt(DRAWS), log_partition.standard_error))
    return Estimate(float(log_ratio.mean()), error, float(DRAWS)), effective_share(-log_ratio)


def certify(task: Task, tilt: Tilt, sampler: Sampler, log_partition: Estimate, *, key: Key[Array, ""]) -> Certificate:
    """Return the certificate of a fit without conditions.

    The dual is taken at the best density near the fitted one where there is a grid, and on importance draws at the fitted
    density itself elsewhere; if too few of these are effective, at the sampler, whose density is known.
    """
    task, data = task.within(tilt.space), np.asarray(task.sample.target)
    draw_key, nodes_key = jr.split(key)
    nothing = np.zeros((CERTIFYING_DRAWS, 0))
    draws = sampler.weighted_draws(nothing, key=draw_key)
    if data.shape[1] <= QUADRATURE_DIMS:
        problem, coarse = (likelihood(task, grid_nodes(task.base, data, fineness=fineness)) for fineness in (FINER, 1.0))
        primal = primal_value(problem, task.rkhs_penalty, tilt, log_partition)
        dual, check = (best_dual_value(grid, task.rkhs_penalty, tilt, primal) for grid in (problem, coarse))
        error = np.hypot(primal.standard_error, QUADRATURE_SAFETY * (dual.value - check.value))
        dual = dual._replace(standard_error=float(error))
    else:
        problem = likelihood(task, importance_nodes(task.base, sampler.reference, CERTIFYING_DRAWS, key=nodes_key))
        primal = primal_value(problem, task.rkhs_penalty, tilt, log_partition)
        dual = dual_value(problem, task.rkhs_penalty, tilt, primal, draws=True)
    by_sampler = sampler_dual_value(task, problem.mean_feature, draws, nothing)
    return Certificate(primal, dual if dual.effective_draws > FEW_EFFECTIVE_DRAWS else by_sampler, by_sampler)


def primal_value(problem: Likelihood, penalty: float, tilt: Tilt, log_partition: Estimate) -> Estimate:
    r"""Return :math:`P(f) = \hat E[f] - \eta/2 |f|^2 - A(f)`, with the error of the normaliser."""
    weights = np.asarray(tilt.weights)
    value = float(weights @ problem.mean_feature - 0.5 * penalty * weights @ weights) - log_partition.value
    return log_partition._replace(value=value)


def dual_value(problem: Likelihood, penalty: float, tilt: Tilt, primal: Estimate, *, draws: bool) -> Estimate:
    r"""Return the dual :math:`D(q) = KL(q || p_0) + |\hat\mu - \mu_q|^2 / (2 \eta)` at the density of f itself.

    There it is :math:`P(f) + |\nabla P(f)|^2 / (2 \eta)`, which is how it is computed: near the optimum the errors of KL and
    moments cancel. On a grid the moments are taken as exact. On draws, the square of their noise is taken off the squared
    gradient (delta method, for one condition), and the error has the noise's part that is linear and the one that is squared.
    Equation ledger: ``DUAL-GAP``.
    """
    weights = np.asarray(tilt.weights)
    gradient = convex.gradient(problem, penalty, weights)
    squared = float(gradient @ gradient)
    if not draws:
        return primal._replace(value=primal.value + 0.5 * squared / penalty)
    exponents = problem.exponents(weights)[0]
    masses = np.exp(exponents - np.logaddexp.reduce(exponents))
    noise = masses[:, None] * (problem.node_features - masses @ problem.node_features)
    squared -= float(np.sum(noise**2))
    error = np.sqrt(4.0 * np.sum((noise @ gradient) ** 2) + 2.0 * np.sum((noise.T @ noise) ** 2))
    error = float(np.hypot(primal.standard_error, 0.5 * error / penalty))
    return Estimate(primal.value + 0.5 * squared / penalty, error, effective_share(exponents) * len(exponents))


def best_dual_value(problem: Likelihood, penalty: float, tilt: Tilt, primal: Estimate) -> Estimate:
    """Return the dual at the density of a better f: where Newton's method on the grid ends that starts at the fitted one.

    Every density gives an upper bound. That of the fitted one can be loose although f is as good as optimal: what its moments
    miss is divided by the penalty.
    """
    start = convex.maximise(problem, penalty, np.asarray(tilt.weights), most=0)
    best = convex.maximise(problem, penalty, start.weights, tolerance=CERTIFIED_DECREMENT)
    gradient = convex.gradient(problem, penalty, best.weights)
    return primal._replace(value=primal.value + best.value - start.value + 0.5 * float(gradient @ gradient) / penalty)


def sampler_dual_value(task: Task, mean_feature: np.ndarray, draws: WeightedDraws, condition: np.ndarray) -> Estimate:
    r"""Return the dual :math:`D(q) = KL(q || p_0) + |\hat\mu - \mu_q|^2 / (2 \eta)` of a sampler, from draws under conditions.

    Unbiased: the square is a U-statistic. The KL is that of the draws' stated log density; where a transport folds
    space the true density is larger, and so is D.
    """
    missed = task.space.matrix(draws.points, condition) - mean_feature
    count, mean = len(missed), missed.mean(0)
    log_ratio = draws.log_density - task.base.log_densities(draws.points)
    squared = float(count * mean @ mean - np.mean(np.sum(missed**2, 1))) / (count - 1)
    linear = np.std(log_ratio + missed @ mean / task.rkhs_penalty) / np.sqrt(count)
    # The squared part of the noise has the variance 2 tr(Cov^2) / n^2; some of the pairs are enough to know it.
    few = missed[:TRACE_DRAWS] - mean
    products = few @ few.T
    trace = (np.sum(products**2) - np.sum(np.diag(products) ** 2)) / (len(few) * (len(few) - 1))
    error = float(np.hypot(linear, 0.5 * np.sqrt(2.0 * trace) / count / task.rkhs_penalty))
    return Estimate(float(log_ratio.mean()) + 0.5 * squared / task.rkhs_penalty, error, float(count))


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
    certificate: "Certificate | None" = None

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
    fit = conditional_divergence(density, training, key=kl_key)
    error = float(fit.errors.max())
    verdict, advice = judge_conditional(status, f_gap, fit.kl, fit.share, error, calibration)
    log_partition = Estimate(float(fit.partitions.mean()), float(fit.errors.mean()), float(len(density.nodes.log_weights)))
    primal = primal_value(finer, task.rkhs_penalty, density.tilt, log_partition)
    by_sampler = sampler_dual_value(task.within(density.tilt.space), finer.mean_feature, fit.draws, fit.conditions)
    # Without a grid the nodes serve all conditions at once, and their noise would be mistaken for a gradient.
    on_grid = density.coarse_nodes is not None
    dual = dual_value(finer, task.rkhs_penalty, density.tilt, primal, draws=False) if on_grid else by_sampler
    certificate = Certificate(primal, dual, by_sampler)
    return ConditionalDiagnosis(status, f_gap, fit.kl, fit.share, error, calibration, verdict, advice, certificate)


class SamplerFit(NamedTuple):
    """KL(q || p_f) over training conditions, the effective share of draws, ``log Z(x)`` with its errors, and the draws."""

    kl: Estimate
    share: float
    partitions: np.ndarray
    errors: np.ndarray
    draws: WeightedDraws
    conditions: np.ndarray


def conditional_divergence(density: ConditionalDensity, training: np.ndarray, *, key: Key[Array, ""]) -> SamplerFit:
    """Return how the sampler fits the density at training conditions, given in the data's units."""
    row_key, draw_key = jr.split(key)
    rows = np.asarray(jr.randint(row_key, (DRAWS,), 0, len(training)))
    conditions = density.conditions(training[rows])
    draws = density.sampler.weighted_draws(conditions, key=draw_key)
    partitions, errors = density.log_partitions(training), density.partition_errors(training)
    log_p = density.tilt.base.log_densities(draws.points) + density.tilt.values(draws.points, conditions) - partitions[rows]
    log_ratio = draws.log_density - log_p
    kl = Estimate(float(log_ratio.mean()), float(log_ratio.std() / np.sqrt(DRAWS)), float(DRAWS))
    return SamplerFit(kl, effective_share(-log_ratio), partitions, errors, draws, conditions)


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
