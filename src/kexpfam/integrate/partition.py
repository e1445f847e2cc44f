"""``log Z`` of ``p0 exp(f)``, always with an error bar: quadrature, importance sampling, tempered sequential Monte Carlo."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.integrate.nodes import Integration, grid_nodes, importance_nodes, uses_grid
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import QUADRATURE_SAFETY, Estimate, Tilt
from kexpfam.model.measures import AbstractMeasure

__all__ = ["METHODS", "by_importance", "by_quadrature", "by_smc", "log_mean_exp", "log_partition"]

METHODS = ("auto", "quadrature", "importance", "smc")


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
    tilt: Tilt,
    proposal: AbstractMeasure,
    data: np.ndarray,
    *,
    method: str = "auto",
    settings: Integration | None = None,
    key: Key[Array, ""],
) -> Estimate:
    """Return ``log Z``; "auto" is a grid where there is one, else importance draws, else SMC: the first to be trusted."""
    settings = settings or Integration()
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r} for the normaliser: choose one of {', '.join(METHODS)}.")
    grid = uses_grid(data.shape[1], conditional=False, settings=settings)
    if method == "quadrature" and not grid:
        most = len(settings.cells)
        raise ValueError(
            f"normaliser='quadrature' is for f of at most {most} dimensions; use 'importance' or 'smc'."
        )
    ways = {
        "quadrature": lambda: by_quadrature(tilt, data, settings=settings),
        "importance": lambda: by_importance(
            tilt, proposal, draws=settings.partition_draws, key=jr.fold_in(key, 0)
        ),
        "smc": lambda: by_smc(tilt, settings=settings, key=jr.fold_in(key, 1)),
    }
    if method != "auto":
        return ways[method]()
    estimates = []
    for way in ways if grid else ("importance", "smc"):
        estimates.append(ways[way]())
        if estimates[-1].trustworthy:
            return estimates[-1]
    return min(estimates, key=lambda candidate: candidate.standard_error)


def by_quadrature(tilt: Tilt, data: np.ndarray, *, settings: Integration | None = None) -> Estimate:
    """Sum over a grid; the error is a multiple of the change from a coarser one, and every node is an effective draw."""
    settings, values = settings or Integration(), []
    for fineness in (settings.finer, 1.0):
        nodes = grid_nodes(
            tilt.base, data, cells=settings.cells, tail_cells=settings.tail_cells, fineness=fineness
        )
        values.append((float(tilt.log_partitions(nodes, np.zeros((1, 0)))[0]), len(nodes.points)))
    (finer, count), (coarse, _) = values
    return Estimate(finer, QUADRATURE_SAFETY * abs(finer - coarse), float(count))


def by_importance(tilt: Tilt, proposal: AbstractMeasure, *, key: Key[Array, ""], draws: int) -> Estimate:
    """Average over draws from base and proposal."""
    nodes = importance_nodes(tilt.base, proposal, draws, key=key)
    return log_mean_exp(nodes.log_weights + np.log(draws) + tilt.values(nodes.points))


def by_smc(tilt: Tilt, *, settings: Integration | None = None, key: Key[Array, ""]) -> Estimate:
    """Temper from the base to the density with moves by HMC; the error comes from independent repetitions."""
    settings = settings or Integration()
    sizes = settings.smc_particles, settings.smc_stages
    with double_precision():
        estimates = np.array(
            [float(_smc(tilt, repeat, *sizes)) for repeat in jr.split(key, settings.smc_repeats)]
        )
    spread = (
        float(estimates.std(ddof=1) / np.sqrt(len(estimates))) if np.all(np.isfinite(estimates)) else np.inf
    )
    return Estimate(float(estimates.mean()), spread, float(settings.smc_particles * len(estimates)))


@eqx.filter_jit
def _smc(tilt: Tilt, key: Key[Array, ""], particles: int, stages: int) -> Float[Array, ""]:
    from kexpfam.integrate.chains import tempered  # BlackJAX is slow to import

    particles_key, loop_key = jr.split(key)
    outcome = tempered(tilt, tilt.base.sample(particles, key=particles_key), stages, key=loop_key)
    # A run that has not reached temperature 1 has no estimate; infinity makes its error bar infinite too.
    return jnp.where(outcome.arrived, outcome.log_partition, jnp.inf)
