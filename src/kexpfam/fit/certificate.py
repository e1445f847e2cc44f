"""Bounds of the optimum of the penalised likelihood: primal and dual values, with their errors."""

from typing import NamedTuple

import jax.random as jr
import numpy as np

from kexpfam.data.sample import RandomKey
from kexpfam.fit.convex import Likelihood, gradient, likelihood, maximise, objective, shortfall
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import effective_share
from kexpfam.model.density import (
    FEW_EFFECTIVE_DRAWS,
    QUADRATURE_SAFETY,
    Estimate,
    Tilt,
    TiltedDensity,
    WeightedDraws,
)
from kexpfam.model.measures import AbstractMeasure, logsumexp

# Draws that the variance of the squared noise is estimated from.
TRACE_DRAWS = 1000
# Newton's method for the dual stops at this decrement, which is negligible even when divided by the penalty.
CERTIFIED_DECREMENT = 1e-14


class Certificate(NamedTuple):
    """Lower and upper bounds of the optimum of the penalised likelihood (nats), with their errors.

    ``primal`` is the penalised likelihood of f, at most the optimum. ``dual`` is the value of the
    maximum-entropy problem at a distribution, at least the optimum. The errors are those of the integrals,
    which are sums over a grid or over draws. ``sampler_dual`` is the dual value of the sampler: it bounds the
    sampler as ``dual`` bounds f. Its moment mismatch is divided by the penalty, so that it lies far above
    the optimum for a small penalty.
    """

    primal: Estimate
    dual: Estimate
    sampler_dual: Estimate

    @property
    def gap(self) -> Estimate:
        """Return dual minus primal: the most that f can be below the optimum, up to the error."""
        error = float(np.hypot(self.primal.standard_error, self.dual.standard_error))
        return Estimate(self.dual.value - self.primal.value, error, self.dual.effective_draws)


def certified(
    problem: Problem,
    density: TiltedDensity,
    log_partition: Estimate,
    draws: WeightedDraws,
    conditions: np.ndarray,
    *,
    key: RandomKey,
) -> dict[str, float | Estimate]:
    """Return the facts of the convex problem that a diagnosis reads.

    ``f_gap`` is how far f is below its optimum (nats); ``primal``, ``dual`` and ``sampler_dual`` are those of
    the certificate. ``draws`` are the sampler's under ``conditions``.
    """
    gap_key, key = jr.split(key)
    proposal = None if density.conditional else density.sampler.reference
    found = certify(problem, density.tilt, log_partition, proposal, draws, conditions, key=key)
    if problem.on_grid:
        gap = max(found.gap.value, 0.0)
    else:
        count = problem.integration.draws
        gap = shortfall(problem, density.tilt, proposal or problem.proposal, count, key=gap_key).value
    return {"f_gap": gap, **found._asdict()}


def certify(
    problem: Problem,
    tilt: Tilt,
    log_partition: Estimate,
    proposal: AbstractMeasure | None,
    draws: WeightedDraws,
    conditions: np.ndarray,
    *,
    key: RandomKey,
) -> Certificate:
    """Return the certificate of a fit.

    ``log_partition`` is the mean of log Z over the rows; ``draws`` are the sampler's under ``conditions``. On
    a grid the dual is that of the best density near the fitted one. On importance draws it is that of the
    fitted density or, with too few effective draws, that of the sampler, whose density is known.
    """
    problem = problem.within(tilt.space)
    penalty, count = problem.rkhs_penalty, len(draws.points)
    finer_key, coarse_key = jr.split(key)
    finer = problem.nodes(proposal=proposal, fineness=problem.integration.finer, draws=count, key=finer_key)
    posed = likelihood(problem, finer)
    primal = primal_value(posed, penalty, tilt, log_partition)
    by_sampler = sampler_dual_value(problem, posed.mean_feature, draws, conditions)
    if finer.is_grid:
        coarse = likelihood(problem, problem.nodes(proposal=proposal, draws=count, key=coarse_key))
        dual, check = (best_dual_value(grid, penalty, tilt, primal) for grid in (posed, coarse))
        error = np.hypot(primal.standard_error, QUADRATURE_SAFETY * (dual.value - check.value))
        return Certificate(primal, dual._replace(standard_error=float(error)), by_sampler)
    if problem.conditional:
        # All conditions share the nodes, whose noise would appear as a gradient.
        return Certificate(primal, by_sampler, by_sampler)
    dual = dual_value(posed, penalty, tilt, primal)
    return Certificate(primal, dual if dual.effective_draws > FEW_EFFECTIVE_DRAWS else by_sampler, by_sampler)


def primal_value(problem: Likelihood, penalty: float, tilt: Tilt, log_partition: Estimate) -> Estimate:
    r"""Return :math:`P(f) = \hat E[f] - \eta/2 |f|^2 - A(f)`, with the error of the normaliser."""
    weights = np.asarray(tilt.weights)
    value = float(weights @ problem.mean_feature - 0.5 * penalty * weights @ weights) - log_partition.value
    return log_partition._replace(value=value)


def dual_value(problem: Likelihood, penalty: float, tilt: Tilt, primal: Estimate) -> Estimate:
    r"""Return the dual :math:`D(q) = KL(q || p_0) + |\hat\mu - \mu_q|^2 / (2 \eta)` at f, on draws.

    It is computed as :math:`P(f) + |\nabla P(f)|^2 / (2 \eta)`: near the optimum the errors of KL and moments
    cancel. The expected square of the noise is subtracted from the squared gradient (delta method, for one
    condition); the error includes the linear and the squared part of the noise.
    Equation ledger: ``DUAL-GAP``.
    """
    weights = np.asarray(tilt.weights)
    slope = gradient(problem, penalty, weights)
    exponents = problem.exponents(weights)[0]
    masses = np.exp(exponents - logsumexp(exponents))
    noise = masses[:, None] * (problem.node_features - masses @ problem.node_features)
    squared = float(slope @ slope) - float(np.sum(noise**2))
    error = np.sqrt(4.0 * np.sum((noise @ slope) ** 2) + 2.0 * np.sum((noise.T @ noise) ** 2))
    error = float(np.hypot(primal.standard_error, 0.5 * error / penalty))
    effective = effective_share(exponents) * len(exponents)
    return Estimate(primal.value + 0.5 * squared / penalty, error, effective)


def best_dual_value(problem: Likelihood, penalty: float, tilt: Tilt, primal: Estimate) -> Estimate:
    """Return the dual at the end of Newton's method on a grid, started at the fitted f.

    The density of any f gives an upper bound. That of a nearly optimal f can be loose, because its moment
    mismatch is divided by the penalty.
    """
    start = np.asarray(tilt.weights)
    value, _ = objective(problem, penalty, start)
    best = maximise(problem, penalty, start, tolerance=CERTIFIED_DECREMENT)
    slope = gradient(problem, penalty, best.weights)
    gain = best.value - float(value) + 0.5 * float(slope @ slope) / penalty
    return primal._replace(value=primal.value + gain)


def sampler_dual_value(
    problem: Problem, mean_feature: np.ndarray, draws: WeightedDraws, condition: np.ndarray
) -> Estimate:
    r"""Return the dual :math:`D(q) = KL(q || p_0) + |\hat\mu - \mu_q|^2 / (2 \eta)` of a sampler, from draws.

    The square is a U-statistic, so that the estimate is unbiased. The KL uses the log density of the draws;
    if a transport is not one-to-one, the true density and the true D are larger.
    """
    missed = problem.space.matrix(draws.points, condition) - mean_feature
    count, mean = len(missed), missed.mean(0)
    log_ratio = draws.log_density - problem.base.log_densities(draws.points)
    squared = float(count * mean @ mean - np.mean(np.sum(missed**2, 1))) / (count - 1)
    linear = np.std(log_ratio + missed @ mean / problem.rkhs_penalty) / np.sqrt(count)
    # The squared part of the noise has the variance 2 tr(Cov^2) / n^2, estimated from some of the pairs.
    few = missed[:TRACE_DRAWS] - mean
    products = few @ few.T
    trace = (np.sum(products**2) - np.sum(np.diag(products) ** 2)) / (len(few) * (len(few) - 1))
    error = float(np.hypot(linear, 0.5 * np.sqrt(2.0 * trace) / count / problem.rkhs_penalty))
    return Estimate(float(log_ratio.mean()) + 0.5 * squared / problem.rkhs_penalty, error, float(count))
