"""Is the fit good? Numbers with error bars, and one verdict in words."""

from dataclasses import dataclass

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.density import refine
from kexpfam.metrics import Distance, mmd_squared
from kexpfam.nodes import effective_share, importance_nodes
from kexpfam.partition import Estimate
from kexpfam.potentials import Tilt
from kexpfam.solvers import convex
from kexpfam.solvers.loop import Status
from kexpfam.solvers.task import Task, likelihood
from kexpfam.transports import Sampler

DRAWS = 4000
NODES = 16384
REFINING_STEPS = 5
# Up to here (nats, shares) a fit is called good; up to twice the first two, fair.
GOOD_SAMPLER_KL = 0.1
GOOD_F_GAP = 0.02
GOOD_EFFECTIVE_SHARE = 0.3


@dataclass(frozen=True)
class Diagnosis:
    """What was measured about a fit; ``str()`` of it is the report a person reads."""

    status: Status
    log_partition: Estimate
    f_gap: float
    sampler_kl: Estimate
    sampler_mmd: Distance
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

    def __str__(self) -> str:
        rows = [
            ("verdict", self.verdict.upper()),
            ("solver", self.status.value),
            ("log Z", str(self.log_partition)),
            ("duality gap", f"{self.duality_gap:.4f} nats"),
            ("f below its optimum by", f"{self.f_gap:.4f} nats"),
            ("KL(sampler || density)", f"{self.sampler_kl.value:.4f} ± {self.sampler_kl.standard_error:.1g} nats"),
            ("MMD^2 to refined draws", f"{self.sampler_mmd.value:+.2e} ± {self.sampler_mmd.standard_error:.1e}"),
            ("effective share of draws", f"{self.effective_share:.0%}"),
        ]
        lines = [f"{name + ':':<26}{value}" for name, value in rows]
        return "\n".join(lines + [f"- {line}" for line in self.advice])


def diagnose(
    task: Task, tilt: Tilt, sampler: Sampler, log_partition: Estimate, status: Status, *, key: Key[Array, ""]
) -> Diagnosis:
    """Return the diagnosis of a fitted pair of density and sampler."""
    gap_key, kl_key, mmd_key, refine_key = jr.split(key, 4)
    f_gap = shortfall(task, tilt, sampler, key=gap_key)
    kl, share = sampler_divergence(tilt, sampler, log_partition, key=kl_key)
    refined = refine(tilt, sampler, DRAWS, REFINING_STEPS, key=refine_key)
    plain = sampler.weighted_draws(DRAWS, key=mmd_key).points
    mmd = mmd_squared(plain, refined)
    verdict, advice = judge(status, log_partition, f_gap, kl, mmd, share)
    return Diagnosis(status, log_partition, f_gap, kl, mmd, share, verdict, advice)


def shortfall(task: Task, tilt: Tilt, sampler: Sampler, *, key: Key[Array, ""]) -> float:
    """Return how much higher the penalised likelihood could be (nats): half the squared Newton decrement on fresh draws.

    The part that fresh draws put there by chance, about rank / (2 draws), is taken off.
    """
    problem = likelihood(task, importance_nodes(task.base, sampler.reference, NODES, key=key))
    optimum = convex.maximise(problem, task.rkhs_penalty, np.asarray(tilt.weights), most=0)
    exponents = problem.log_weights[0] + problem.node_features[0] @ np.asarray(tilt.weights)
    noise = tilt.space.size / (effective_share(exponents) * NODES)
    return max(0.5 * (optimum.decrement - noise), 0.0)


def sampler_divergence(tilt: Tilt, sampler: Sampler, log_partition: Estimate, *, key: Key[Array, ""]) -> tuple[Estimate, float]:
    """Return KL(q || p_f) with its error, and the effective share of sampler draws weighted by p_f / q."""
    draws = sampler.weighted_draws(DRAWS, key=key)
    log_p = tilt.base.log_densities(draws.points) + tilt.values(draws.points) - log_partition.value
    log_ratio = draws.log_density - log_p
    error = float(np.hypot(log_ratio.std() / np.sqrt(DRAWS), log_partition.standard_error))
    return Estimate(float(log_ratio.mean()), error, float(DRAWS)), effective_share(-log_ratio)


def judge(
    status: Status, log_partition: Estimate, f_gap: float, kl: Estimate, mmd: Distance, share: float
) -> tuple[str, tuple[str, ...]]:
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
