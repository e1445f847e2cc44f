r"""How far a saddle point is from its solution, by fresh draws of its own sampler: no grid, no base, no second solver.

With the gradient of the penalised likelihood :math:`g = \hat E[\phi] - E[\phi] - \eta f` and its metric M, half of
:math:`g^\top M^{-1} g` is what a natural step would gain, in nats: f's shortfall to second order. A batch of draws gives g with
noise, whose square would pass for a shortfall; so products of *different* batches are averaged. The expectation is taken twice:

- under the density of f, with draws weighted by ``exp(f - nu)``: the shortfall of f, right where nu is right;
- under the sampler as it is, without nu: how far its moments are from the data's.

A wrong nu makes the two disagree, so both have to be small.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Key

from kexpfam.fit.natural import Metric, f_gradient, lagged
from kexpfam.fit.saddle import Point, SaddleProblem, draws_for_f
from kexpfam.jax_settings import double_precision

__all__ = ["Standing", "standing"]

# Independent batches whose products are averaged.
BATCHES = 16


class Standing(NamedTuple):
    """Nats that f misses, its standard error, nats of the sampler's moments, KL(sampler || density) by nu, effective share."""

    shortfall: float
    shortfall_error: float
    moment_gap: float
    sampler_gap: float
    effective_share: float

    def within(self, nats: float) -> bool:
        """Return whether f and the sampler's moments are this close, beyond the noise of the draws."""
        return max(self.shortfall, self.moment_gap) + 2.0 * self.shortfall_error < nats


def standing(problem: SaddleProblem, point: Point, metric: Metric, *, key: Key[Array, ""]) -> Standing:
    """Return where the players stand, on ``BATCHES`` batches of fresh draws."""
    with double_precision():
        weighted, plain, gaps, shares = _measured(problem, point, jr.split(key, BATCHES))
    factor = np.asarray(metric.factor, float)
    shortfall, error = _half_square(factor, np.asarray(weighted, float))
    moment_gap, _ = _half_square(factor, np.asarray(plain, float))
    return Standing(shortfall, error, moment_gap, float(np.mean(gaps)), float(np.mean(shares)))


def _half_square(factor: np.ndarray, gradients: np.ndarray) -> tuple[float, float]:
    """Return half the squared length of the mean gradient without the noise of its batches, and a jackknife error."""
    rows = scipy.linalg.solve_triangular(factor, gradients.T, lower=True).T

    def products(rows: np.ndarray) -> float:
        total, count = rows.sum(0), len(rows)
        return float(total @ total - np.sum(rows**2)) / (2 * count * (count - 1))

    without = np.array([products(np.delete(rows, i, axis=0)) for i in range(len(rows))])
    return products(rows), float(np.sqrt((len(rows) - 1) * np.mean((without - without.mean()) ** 2)))


@eqx.filter_jit
def _measured(
    problem: SaddleProblem, point: Point, keys: Key[Array, " n"]
) -> tuple[Float[Array, "n r"], Float[Array, "n r"], Float[Array, " n"], Float[Array, " n"]]:
    """Return f's gradient under its density and under the sampler, the gap and the effective share, for each batch."""

    def one(key: Key[Array, ""]) -> tuple[Array, Array, Array, Array]:
        groups, moved, behind = draws_for_f(problem, point, key=key)
        gradient = lambda lag: f_gradient(
            problem.space, problem.rkhs_penalty, point.f_weights, groups, moved, lag.weights
        )
        whole, none = lagged(behind, groups.draws, 1.0), lagged(jnp.zeros_like(behind), groups.draws, 0.0)
        return gradient(whole), gradient(none), whole.gap, whole.effective_share

    return jax.lax.map(one, keys)
