"""Bounds between which the optimum of the penalised likelihood lies: primal and dual values, with their errors."""

from typing import NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.fit.convex import Likelihood, gradient, likelihood, maximise
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import effective_share
from kexpfam.model.density import FEW_EFFECTIVE_DRAWS, QUADRATURE_SAFETY, Estimate, Tilt, WeightedDraws
from kexpfam.model.measures import AbstractMeasure, logsumexp

__all__ = ["Certificate", "certify", "dual_value", "primal_value", "sampler_dual_value"]

# A thousand draws show how large the squares of the others' noise are.
TRACE_DRAWS = 1000
# Where Newton's method stops on the way to the density that certifies: far below what one over the penalty could make visible.
CERTIFIED_DECREMENT = 1e-14


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


def certify(
    problem: Problem,
    tilt: Tilt,
    log_partition: Estimate,
    proposal: AbstractMeasure | None,
    draws: WeightedDraws,
    conditions: np.ndarray,
    *,
    key: Key[Array, ""],
) -> Certificate:
    """Return the certificate of a fit.

    ``log_partition`` is the mean of log Z over the rows, ``draws`` are the sampler's under ``conditions``. The dual is taken
    at the best density near the fitted one where there is a grid, and on importance draws at the fitted density itself
    elsewhere; if too few of these are effective, at the sampler, whose density is known.
    """
    problem = problem.within(tilt.space)
    penalty, count = problem.rkhs_penalty, len(draws.points)
    keys = jr.split(key)
    finer, coarse = (
        problem.nodes(proposal=proposal, fineness=fineness, draws=count, key=nodes_key)
        for fineness, nodes_key in zip((problem.integration.finer, 1.0), keys, strict=True)
    )
    posed = likelihood(problem, finer)
    primal = primal_value(posed, penalty, tilt, log_partition)
    by_sampler = sampler_dual_value(problem, posed.mean_feature, draws, conditions)
    if finer.is_grid:
        dual, check = (
            best_dual_value(grid, penalty, tilt, primal) for grid in (posed, likelihood(problem, coarse))
        )
        error = np.hypot(primal.standard_error, QUADRATURE_SAFETY * (dual.value - check.value))
        return Certificate(primal, dual._replace(standard_error=float(error)), by_sampler)
    if problem.conditional:
        # The nodes serve all conditions at once, and their noise would be mistaken for a gradient.
        return Certificate(primal, by_sampler, by_sampler)
    dual = dual_value(posed, penalty, tilt, primal)
    return Certificate(primal, dual if dual.effective_draws > FEW_EFFECTIVE_DRAWS else by_sampler, by_sampler)


def primal_value(problem: Likelihood, penalty: float, tilt: Tilt, log_partition: Estimate) -> Estimate:
    r"""Return :math:`P(f) = \hat E[f] - \eta/2 |f|^2 - A(f)`, with the error of the normaliser."""
    weights = np.asarray(tilt.weights)
    value = float(weights @ problem.mean_feature - 0.5 * penalty * weights @ weights) - log_partition.value
    return log_partition._replace(value=value)


def dual_value(problem: Likelihood, penalty: float, tilt: Tilt, primal: Estimate) -> Estimate:
    r"""Return the dual :math:`D(q) = KL(q || p_0) + |\hat\mu - \mu_q|^2 / (2 \eta)` at the density of f itself, on draws.

    There it is :math:`P(f) + |\nabla P(f)|^2 / (2 \eta)`, which is how it is computed: near the optimum the errors of KL and
    moments cancel. The square of the draws' noise is taken off the squared gradient (delta method, for one condition), and the
    error has the noise's part that is linear and the one that is squared. Equation ledger: ``DUAL-GAP``.
    """
    weights = np.asarray(tilt.weights)
    slope = gradient(problem, penalty, weights)
    exponents = problem.exponents(weights)[0]
    masses = np.exp(exponents - logsumexp(exponents))
    noise = masses[:, None] * (problem.node_features - masses @ problem.node_features)
    squared = float(slope @ slope) - float(np.sum(noise**2))
    error = np.sqrt(4.0 * np.sum((noise @ slope) ** 2) + 2.0 * np.sum((noise.T @ noise) ** 2))
    error = float(np.hypot(primal.standard_error, 0.5 * error / penalty))
    return Estimate(
        primal.value + 0.5 * squared / penalty, error, effective_share(exponents) * len(exponents)
    )


def best_dual_value(problem: Likelihood, penalty: float, tilt: Tilt, primal: Estimate) -> Estimate:
    """Return the dual at the density of a better f: where Newton's method on the grid ends that starts at the fitted one.

    Every density gives an upper bound. That of the fitted one can be loose although f is as good as optimal: what its moments
    miss is divided by the penalty.
    """
    start = maximise(problem, penalty, np.asarray(tilt.weights), most=0)
    best = maximise(problem, penalty, start.weights, tolerance=CERTIFIED_DECREMENT)
    slope = gradient(problem, penalty, best.weights)
    return primal._replace(
        value=primal.value + best.value - start.value + 0.5 * float(slope @ slope) / penalty
    )


def sampler_dual_value(
    problem: Problem, mean_feature: np.ndarray, draws: WeightedDraws, condition: np.ndarray
) -> Estimate:
    r"""Return the dual :math:`D(q) = KL(q || p_0) + |\hat\mu - \mu_q|^2 / (2 \eta)` of a sampler, from draws under conditions.

    Unbiased: the square is a U-statistic. The KL is that of the draws' stated log density; where a transport folds
    space the true density is larger, and so is D.
    """
    missed = problem.space.matrix(draws.points, condition) - mean_feature
    count, mean = len(missed), missed.mean(0)
    log_ratio = draws.log_density - problem.base.log_densities(draws.points)
    squared = float(count * mean @ mean - np.mean(np.sum(missed**2, 1))) / (count - 1)
    linear = np.std(log_ratio + missed @ mean / problem.rkhs_penalty) / np.sqrt(count)
    # The squared part of the noise has the variance 2 tr(Cov^2) / n^2; some of the pairs are enough to know it.
    few = missed[:TRACE_DRAWS] - mean
    products = few @ few.T
    trace = (np.sum(products**2) - np.sum(np.diag(products) ** 2)) / (len(few) * (len(few) - 1))
    error = float(np.hypot(linear, 0.5 * np.sqrt(2.0 * trace) / count / problem.rkhs_penalty))
    return Estimate(float(log_ratio.mean()) + 0.5 * squared / problem.rkhs_penalty, error, float(count))
