"""``log Z`` of ``p0 exp(f)`` with a standard error: quadrature, importance sampling, tempered SMC."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.sample import RandomKey
from kexpfam.integrate.nodes import Integration, grid_nodes, importance_nodes, uses_grid
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import QUADRATURE_SAFETY, Estimate, Tilt
from kexpfam.model.measures import AbstractMeasure, logsumexp
from kexpfam.settings import one_of

METHODS = ("auto", "quadrature", "importance", "smc")
# From this shape of the tail of the weights on, the error of their mean is not known (Vehtari et al., 2024).
HEAVY_SHAPE = 0.7


def log_mean_exp(log_weights: np.ndarray) -> Estimate:
    """Return ``log E[exp(a)]`` estimated from draws of a, with the standard error of the delta method."""
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
    key: RandomKey,
) -> Estimate:
    """Return ``log Z``.

    The method "auto" takes the first trustworthy estimate of a grid, importance draws and SMC.
    """
    settings = settings or Integration()
    one_of("normaliser", method, METHODS)
    grid = uses_grid(data.shape[1], conditional=False, settings=settings)
    if method == "quadrature" and not grid:
        most = len(settings.cells)
        raise ValueError(
            f"normaliser='quadrature' is for f of at most {most} dimensions; use 'importance' or 'smc'."
        )
    draws = settings.partition_draws
    estimators = {
        "quadrature": lambda: by_quadrature(tilt, data, settings=settings),
        "importance": lambda: by_importance(tilt, proposal, draws=draws, key=jr.fold_in(key, 0)),
        "smc": lambda: by_smc(tilt, settings=settings, key=jr.fold_in(key, 1)),
    }
    if method != "auto":
        return estimators[method]()
    estimates = []
    for name in estimators if grid else ("importance", "smc"):
        estimates.append(estimators[name]())
        if estimates[-1].trustworthy:
            return estimates[-1]
    return min(estimates, key=lambda candidate: candidate.standard_error)


def by_quadrature(tilt: Tilt, data: np.ndarray, *, settings: Integration | None = None) -> Estimate:
    """Return the sum over a fine grid.

    The error is a multiple of the change from a coarser grid, plus the share of the outermost cells: the mass
    beyond the grid is smaller, because the base falls by more than a half from one tail cell to the next."""
    settings = settings or Integration()
    grids = [grid_nodes(tilt.base, data, settings, fineness=fineness) for fineness in (settings.finer, 1.0)]
    finer, coarse = (float(tilt.log_partitions(nodes, np.zeros((1, 0)))[0]) for nodes in grids)
    error = QUADRATURE_SAFETY * abs(finer - coarse)
    near, far = (np.stack(tilt.base.bounds(k * settings.base_spread)) for k in (1.0, 2.0))
    if not np.array_equal(near, far):  # a box has no mass beyond its grid
        (exponents,) = next(tilt.exponents(grids[0], np.zeros((1, 0))))
        masses = np.exp(exponents - logsumexp(exponents))
        masses = masses.reshape([len(edges) - 1 for edges in grids[0].edges])
        error += float(1.0 - min(masses[(slice(1, -1),) * masses.ndim].sum(), 1.0))
    return Estimate(finer, error, float(len(grids[0].points)))


def by_importance(tilt: Tilt, proposal: AbstractMeasure, *, key: RandomKey, draws: int) -> Estimate:
    """Return the average over draws from base and proposal.

    The standard error is infinite if the weights have a tail too heavy to be known from these draws."""
    nodes = importance_nodes(tilt.base, proposal, draws, key=key)
    log_weights = nodes.log_weights + np.log(draws) + tilt.values(nodes.points)
    found = log_mean_exp(log_weights)
    return found if tail_shape(log_weights) < HEAVY_SHAPE else found._replace(standard_error=np.inf)


def tail_shape(log_weights: np.ndarray) -> float:
    """Return the shape k of the generalised Pareto law of the largest weights.

    Moments of the weights up to order 1 / k are finite. The estimate is the posterior mean of Zhang and
    Stephens (2009), on the largest ``min(n / 5, 3 sqrt(n))`` weights as in Vehtari et al. (2024), with their
    prior of mean 1/2 worth ten observations."""
    count = len(log_weights)
    tail = int(min(0.2 * count, 3.0 * np.sqrt(count)))
    ordered = np.sort(np.exp(log_weights - log_weights.max()))
    excess = ordered[-tail:] - ordered[-tail - 1]
    if tail < 5 or excess[-1] <= 0.0:
        return 0.0
    grid = 30 + int(np.sqrt(tail))
    quartile = max(excess[int(tail / 4 + 0.5) - 1], np.finfo(float).tiny)
    steps = 1.0 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    rates = 1.0 / excess[-1] + steps / (3.0 * quartile)
    shapes = np.log1p(-rates[:, None] * excess).mean(axis=1)
    likelihoods = tail * (np.log(-rates / shapes) - shapes - 1.0)
    weights = np.exp(likelihoods - likelihoods.max())
    rate = np.sum(rates * weights) / weights.sum()
    return float((tail * np.log1p(-rate * excess).mean() + 5.0) / (tail + 10.0))


def by_smc(tilt: Tilt, *, settings: Integration | None = None, key: RandomKey) -> Estimate:
    """Return the mean over independent runs of tempered SMC, with its standard error.

    The error is scaled such that 1.96 times it is half a 95 % interval of Student's t for so few runs."""
    import scipy.stats  # slow to import

    settings = settings or Integration()
    with double_precision():
        runs = jr.split(key, settings.smc_repeats)
        estimates = np.array([float(_smc(tilt, run, settings)) for run in runs])
    finite = bool(np.all(np.isfinite(estimates)))
    few = scipy.stats.t.ppf(0.975, len(estimates) - 1) / scipy.stats.norm.ppf(0.975)
    error = float(few * estimates.std(ddof=1) / np.sqrt(len(estimates))) if finite else np.inf
    return Estimate(float(estimates.mean()), error, float(settings.smc_particles * len(estimates)))


@eqx.filter_jit
def _smc(tilt: Tilt, key: RandomKey, settings: Integration) -> Float[Array, ""]:
    from kexpfam.integrate.chains import tempered  # BlackJAX is slow to import

    particles_key, loop_key = jr.split(key)
    starts = tilt.base.sample(settings.smc_particles, key=particles_key)
    outcome = tempered(tilt, starts, settings.smc_stages, settings=settings, key=loop_key)
    # A run that has not reached temperature 1 has no estimate; infinity makes its standard error infinite.
    return jnp.where(outcome.arrived, outcome.log_partition, jnp.inf)
