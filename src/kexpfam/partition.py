"""``log Z`` of ``p0 exp(f)``, always with an error bar: quadrature, importance sampling, tempered sequential Monte Carlo."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.chains import tempered
from kexpfam.measures import AbstractMeasure
from kexpfam.nodes import GRID_DIMS, grid_nodes, importance_nodes
from kexpfam.potentials import Tilt

METHODS = ("auto", "quadrature", "importance", "smc")
# Quadrature is the first choice up to this many coordinates; beyond, its error is worse than that of good importance draws.
QUADRATURE_DIMS = 2
FINER = 1.4
# The true error of the finer grid was found to be up to 3.5 times the change.
QUADRATURE_SAFETY = 4.0
IMPORTANCE_DRAWS = 32768
SMC_PARTICLES, SMC_REPEATS, SMC_STAGES = 2000, 4, 60
# Fewer effective draws than this, or a larger error, and log Z is not to be trusted.
FEW_EFFECTIVE_DRAWS = 200.0
LARGE_ERROR = 0.05


class Estimate(NamedTuple):
    """A number with the evidence for it."""

    value: float
    standard_error: float
    effective_draws: float

    @property
    def trustworthy(self) -> bool:
        return self.standard_error < LARGE_ERROR and self.effective_draws > FEW_EFFECTIVE_DRAWS

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.1g} ({self.effective_draws:,.0f} effective draws)"


def log_mean_exp(log_weights: np.ndarray) -> Estimate:
    """Estimate ``log E[exp(a)]`` from draws of a, with the delta method's error."""
    top = np.max(log_weights)
    weights = np.exp(log_weights - top)
    mean = weights.mean()
    return Estimate(
        value=float(top + np.log(mean)),
        standard_error=float(weights.std() / (mean * np.sqrt(weights.size))),
        effective_draws=float(weights.sum() ** 2 / np.sum(weights**2)),
    )


def log_partition(
    tilt: Tilt, proposal: AbstractMeasure, data: np.ndarray, *, method: str = "auto", key: Key[Array, ""]
) -> Estimate:
    """Return ``log Z``; "auto" is quadrature for functions of few coordinates, else importance, else SMC if that fails."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r} for the normaliser: choose one of {', '.join(METHODS)}.")
    if method == "quadrature" and data.shape[1] > GRID_DIMS:
        raise ValueError(f"normaliser='quadrature' is for f of at most {GRID_DIMS} dimensions; use 'importance' or 'smc'.")
    if method == "quadrature" or (method == "auto" and data.shape[1] <= QUADRATURE_DIMS):
        return by_quadrature(tilt, data)
    if method == "smc":
        return by_smc(tilt, key=key)
    first_key, second_key = jr.split(key)
    estimate = by_importance(tilt, proposal, key=first_key)
    if method == "importance" or estimate.trustworthy:
        return estimate
    other = by_smc(tilt, key=second_key)
    return min(estimate, other, key=lambda candidate: candidate.standard_error)


def by_quadrature(tilt: Tilt, data: np.ndarray) -> Estimate:
    """Sum over a grid; the error is a multiple of the change from a coarser one, and every node is an effective draw."""
    values = []
    for fineness in (FINER, 1.0):
        nodes = grid_nodes(tilt.base, data, fineness=fineness)
        exponents = nodes.log_weights + tilt.values(nodes.points)
        top = exponents.max()
        values.append((float(top + np.log(np.exp(exponents - top).sum())), len(exponents)))
    (finer, count), (coarse, _) = values
    return Estimate(finer, QUADRATURE_SAFETY * abs(finer - coarse), float(count))


def by_importance(tilt: Tilt, proposal: AbstractMeasure, *, key: Key[Array, ""], draws: int = IMPORTANCE_DRAWS) -> Estimate:
    """Average over draws from base and proposal."""
    nodes = importance_nodes(tilt.base, proposal, draws, key=key)
    return log_mean_exp(nodes.log_weights + np.log(draws) + tilt.values(nodes.points))


def by_smc(tilt: Tilt, *, key: Key[Array, ""]) -> Estimate:
    """Temper from the base to the density with moves by HMC; the error comes from independent repetitions."""
    estimates = np.array([float(_smc(tilt, repeat)) for repeat in jr.split(key, SMC_REPEATS)])
    spread = float(estimates.std(ddof=1) / np.sqrt(SMC_REPEATS)) if np.all(np.isfinite(estimates)) else np.inf
    return Estimate(float(estimates.mean()), spread, float(SMC_PARTICLES * SMC_REPEATS))


@eqx.filter_jit
def _smc(tilt: Tilt, key):
    particles_key, loop_key = jr.split(key)
    outcome = tempered(tilt, tilt.base.sample(SMC_PARTICLES, key=particles_key), SMC_STAGES, key=loop_key)
    # A run that has not reached temperature 1 has no estimate; infinity makes its error bar infinite too.
    return jnp.where(outcome.arrived, outcome.log_partition, jnp.inf)
