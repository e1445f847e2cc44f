r"""Distance of a saddle point from its solution, estimated from fresh draws of its own sampler.

With the gradient :math:`g = \hat E[\phi] - E[\phi] - \eta f` of the penalised likelihood and its metric M,
half of :math:`g^\top M^{-1} g` is the gain of a natural step in nats: f's shortfall to second order. The
square of a noisy estimate of g would be biased, so that products of *different* batches are averaged. Two
expectations:

- under the density of f, with draws weighted by ``exp(f - nu)``: the shortfall of f, if nu is accurate;
- under the sampler, without nu: the distance of its moments from the data's.

An inaccurate nu makes the two disagree, so that both must be small. Where the normaliser is a sum over a
grid, f's shortfall is that of the likelihood on a finer grid, which does not depend on nu.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Key

from kexpfam.fit.natural import FStep, Metric, f_gradient, sampler_lag
from kexpfam.fit.saddle import SaddlePoint, SaddleProblem, draws_for_f
from kexpfam.jax_settings import double_precision


class Convergence(NamedTuple):
    """Distance from the solution, in nats.

    f's shortfall and the gap of the sampler's moments, with their standard errors, KL(sampler || density) by
    nu, and the effective share.
    """

    shortfall: float
    shortfall_error: float
    moment_gap: float
    moment_gap_error: float
    sampler_gap: float
    effective_share: float

    @property
    def distance(self) -> float:
        """Return the larger one of shortfall and moment gap, each plus two standard errors."""
        gaps = (self.shortfall, self.shortfall_error), (self.moment_gap, self.moment_gap_error)
        return max(gap + 2.0 * error for gap, error in gaps)


def convergence(
    problem: SaddleProblem,
    point: SaddlePoint,
    metric: Metric,
    *,
    settings: FStep | None = None,
    batches: int = 16,
    key: Key[Array, ""],
) -> Convergence:
    """Return the distance of the players from the solution, on independent batches of fresh draws."""
    with double_precision():
        keys = jr.split(key, batches)
        weighted, plain, gaps, shares = _measured(problem, point, settings or FStep(), keys)
    factor = np.asarray(metric.factor, float)
    of_f, of_sampler = (_half_square(factor, np.asarray(found, float)) for found in (weighted, plain))
    return Convergence(*of_f, *of_sampler, float(np.mean(gaps)), float(np.mean(shares)))


def _half_square(factor: np.ndarray, gradients: np.ndarray) -> tuple[float, float]:
    """Return half the squared length of the mean gradient, unbiased, and its jackknife standard error."""
    rows = scipy.linalg.solve_triangular(factor, gradients.T, lower=True).T

    def products(rows: np.ndarray) -> float:
        total, count = rows.sum(0), len(rows)
        return float(total @ total - np.sum(rows**2)) / (2 * count * (count - 1))

    without = np.array([products(np.delete(rows, i, axis=0)) for i in range(len(rows))])
    return products(rows), float(np.sqrt((len(rows) - 1) * np.mean((without - without.mean()) ** 2)))


@eqx.filter_jit
def _measured(
    problem: SaddleProblem, point: SaddlePoint, settings: FStep, keys: Key[Array, " n"]
) -> tuple[Float[Array, "n r"], Float[Array, "n r"], Float[Array, " n"], Float[Array, " n"]]:
    """Return per batch f's gradients under its density and the sampler, the gap and the effective share."""

    def one(key: Key[Array, ""]) -> tuple[Array, Array, Array, Array]:
        groups, moved, lag = draws_for_f(problem, point, settings, key=key)
        most = settings.most_log_weight
        full = sampler_lag(lag, groups.draws, 1.0, most_log_weight=most)
        none = sampler_lag(jnp.zeros_like(lag), groups.draws, 0.0, most_log_weight=most)
        f = (problem.space, problem.rkhs_penalty, point.f_weights)
        gradient = lambda weights: f_gradient(*f, groups, moved, weights)
        return gradient(full.weights), gradient(none.weights), full.gap, full.effective_share

    return jax.lax.map(one, keys)
