"""Cross-validated scores of a penalised likelihood, at little more than the price of one fit.

The fit to all rows is found by Newton's method. A fit that leaves out a fold is near it, so its own Hessian at that place
serves it for a few chord steps; and that Hessian is the common one without the fold's rows, which is cheap to take off. Without
conditions the Hessian does not depend on the rows at all, and one factor serves all folds.
"""

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve

from kexpfam.data.sample import AnyArray, Sample, distinct_conditions
from kexpfam.fit.convex import (
    BLOCK_NUMBERS,
    Likelihood,
    NodeMasses,
    covariances,
    information,
    likelihood,
    log_partitions,
    maximise,
    moments,
    normalised,
    objective,
    without_negligible_nodes,
)
from kexpfam.fit.newton import factored
from kexpfam.fit.problem import Problem
from kexpfam.model.measures import Nodes

__all__ = ["Folds", "chord", "elsewhere", "left_out_rows"]

# The longest chord step, in the metric of the curvature; beyond, the quadratic model is not to be trusted.
TRUST = 2.0
CHORD_STEPS, NEWTON_STEPS = 10, 3
# Squared decrements at which the common fit and those to the folds stop. The latter start at a fit that has seen the fold, and
# what is left of that start shows in the fold's score to first order: its square must be small.
TOLERANCE, FOLD_TOLERANCE = 1e-3, 1e-6


class Folds:
    """The fits that leave one fold out, each continued from penalty to penalty."""

    def __init__(self, problem: Problem, nodes: Nodes, check: Nodes, left_out: np.ndarray):
        """Pose the fits; ``left_out`` are masks of rows, (fits, n). Scores are taken on the ``check`` nodes.

        These may be the same on a grid. On importance draws they must differ: an optimum can hide mass between its own nodes,
        and only fresh ones show it.
        """
        self.all = likelihood(problem, nodes)
        self.check = self.all if check is nodes else likelihood(problem, check)
        conditions = distinct_conditions(problem.sample)
        self.left_out, self.membership, counts = left_out, conditions.membership, conditions.counts
        self.psi = problem.space.target.matrix(problem.sample.target)
        phi = self.all.condition_features
        self.counts = np.array([np.bincount(self.membership[out], counts[out], len(phi)) for out in left_out])
        weighted = self.psi if problem.sample.weight is None else self.psi * counts[:, None]
        totals = [(phi[self.membership[out]].T @ weighted[out]).ravel() for out in left_out]
        self.total = counts.sum()
        kept = self.total - self.counts.sum(1)
        self.means = (self.total * self.all.mean_feature - np.array(totals)) / kept[:, None]
        self.shares = (self.total * self.all.shares - self.counts) / kept[:, None]
        self.weights = np.zeros(self.all.mean_feature.size)

    def approach(self, penalty: float) -> None:
        """Bring the common fit to a penalty, on the way to a smaller one."""
        self.weights = maximise(self.all, penalty, self.weights, tolerance=TOLERANCE).weights

    def scores(self, penalty: float) -> np.ndarray:
        """Return the log density ratio to the base of each row, averaged over the fits without it; NaN if all saw it."""
        optimum = maximise(self.all, penalty, self.weights, tolerance=TOLERANCE)
        self.weights = optimum.weights
        problem = (
            without_negligible_nodes(self.all, optimum.weights) if len(self.all.shares) == 1 else self.all
        )
        weights = np.tile(optimum.weights, (len(self.means), 1))
        factors = self._factors(problem, optimum.weights, penalty, optimum.factor)
        # As many fits at a time as have their probabilities of nodes under conditions held together.
        size = max(1, BLOCK_NUMBERS // (len(problem.shares) * len(problem.node_features)))
        for start in range(0, len(weights), size):
            fits = slice(start, start + size)
            part = problem._replace(mean_feature=self.means[fits], shares=self.shares[fits])
            weights[fits] = chord(part, penalty, weights[fits], factors[fits])
        totals, counts = np.zeros(len(self.psi)), np.zeros(len(self.psi))
        for row, out in zip(weights, self.left_out, strict=True):
            members = self.membership[out]
            seen, place = np.unique(members, return_inverse=True)
            check = self.check._replace(condition_features=self.check.condition_features[seen])
            partitions = log_partitions(check, row)
            totals[out] += np.sum(check.coefficients(row)[place] * self.psi[out], 1) - partitions[place]
            counts[out] += 1.0
        return np.where(counts > 0.0, totals / np.maximum(counts, 1.0), np.nan)

    def _factors(
        self, problem: Likelihood, weights: np.ndarray, penalty: float, factor: tuple
    ) -> list[tuple]:
        """Return the factored Hessian of each fit at the common optimum."""
        if len(problem.shares) == 1:
            return [factor] * len(self.left_out)
        probabilities = normalised(problem.exponents(weights)).probabilities
        triangles = covariances(problem, probabilities, probabilities @ problem.node_features)
        whole = self.total * information(problem, triangles, problem.shares)
        factors = []
        for counts in self.counts:
            seen = counts > 0.0
            part = problem._replace(condition_features=problem.condition_features[seen])
            hessian = (whole - information(part, triangles[seen], counts[seen])) / (self.total - counts.sum())
            hessian.flat[:: len(hessian) + 1] += penalty
            factors.append(factored(hessian))
        return factors


def chord(problem: Likelihood, penalty: float, start: np.ndarray, factors: list[tuple]) -> np.ndarray:
    """Return the maximisers of several problems from starts near them, by steps with a Hessian of each that is kept.

    They go side by side, each until it has arrived. Where such steps do not get near enough, Newton's method goes on.
    """
    weights, moving, lost = np.array(start), np.arange(len(start)), list[int]()
    only = lambda fits: problem._replace(mean_feature=problem.mean_feature[fits], shares=problem.shares[fits])
    value, masses = objective(problem, penalty, weights)
    for _ in range(CHORD_STEPS):
        if not len(moving):
            break
        _, slopes = moments(only(moving), penalty, weights[moving], masses.probabilities)
        steps = _solved([factors[k] for k in moving], slopes)
        decrements = np.sum(steps * slopes, axis=1)
        far = decrements >= FOLD_TOLERANCE
        moving, value = moving[far], np.asarray(value)[far]
        if not len(moving):
            break
        sizes = np.minimum(1.0, TRUST / np.sqrt(decrements[far]))
        candidates = weights[moving] + sizes[:, None] * steps[far]
        new_value, masses = objective(only(moving), penalty, candidates)
        better = np.asarray(new_value) >= value
        lost.extend(moving[~better])
        if not np.all(better):
            masses = NodeMasses(*(part[better] for part in masses))
        moving, value = moving[better], np.asarray(new_value)[better]
        weights[moving] = candidates[better]
    for k in (*lost, *moving):
        weights[k] = maximise(
            only(k), penalty, weights[k], tolerance=FOLD_TOLERANCE, most=NEWTON_STEPS
        ).weights
    return weights


def _solved(factors: list[tuple], rows: np.ndarray) -> np.ndarray:
    """Return the solution of each row's equations; those of a common factor are solved at once."""
    if all(factor is factors[0] for factor in factors):
        return cho_solve(factors[0], rows.T, check_finite=False).T
    return np.stack(
        [cho_solve(factor, row, check_finite=False) for factor, row in zip(factors, rows, strict=True)]
    )


def left_out_rows(sample: Sample, folds: int, repeats: int, *, seed: int) -> np.ndarray:
    """Return masks of the rows that each fit leaves out, (fits, rows)."""
    rng, rows = np.random.default_rng(seed), len(sample)
    count = min(folds, rows)
    return np.concatenate(
        [(rng.permutation(rows) % count) == np.arange(count)[:, None] for _ in range(repeats)]
    )


def elsewhere(scores: Float[AnyArray, " m"], parts: int) -> Float[AnyArray, " m"]:
    """Return for each member the mean score of those that are held out on other parts.

    A member that is kept because its own held-out rows like it best would make them like it: with few rows by a tenth of a nat.
    """
    xp = scores.__array_namespace__()
    by_part = xp.mean(scores.reshape(-1, parts), axis=0)
    return xp.tile((xp.sum(by_part) - by_part) / (parts - 1), len(scores) // parts)
