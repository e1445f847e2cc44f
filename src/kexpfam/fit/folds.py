"""Cross-validated scores of a penalised likelihood, at little more than the cost of one fit.

Newton's method finds the fit to all rows. A fit without a fold is near it, so that a few chord steps with its
own Hessian at that point are enough; that Hessian is the common one less the fold's rows. Without conditions
the Hessian does not depend on the rows, and one factor serves all folds.
"""

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve

from kexpfam.data.sample import AnyArray, Sample, distinct_conditions, row_slices
from kexpfam.fit import convex
from kexpfam.fit.newton import factored
from kexpfam.fit.problem import Problem
from kexpfam.model.measures import Nodes

# Longest chord step in the metric of the curvature, chord steps at most, and Newton steps where they fail.
TRUST, CHORD_STEPS, NEWTON_STEPS = 2.0, 10, 3
# Squared decrements of the common fit and of the folds. The fits of the folds start at a fit that has seen
# the fold, and their error is of first order in the fold's score: their tolerance is smaller.
TOLERANCE, FOLD_TOLERANCE = 1e-3, 1e-6


class Folds:
    """The fits that leave one fold out, each continued from penalty to penalty."""

    def __init__(self, problem: Problem, nodes: Nodes, check: Nodes, left_out: np.ndarray):
        """Prepare the fits; ``left_out`` are masks of rows, (fits, n), and scores use the ``check`` nodes.

        On a grid the nodes may be the same. Importance draws must differ: an optimum can place mass between
        its own nodes, which only fresh draws reveal.
        """
        self.all = convex.likelihood(problem, nodes)
        self.check = self.all if check is nodes else convex.likelihood(problem, check)
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
        """Move the common fit to a penalty, on the way to a smaller one."""
        self.weights = self._common(penalty).weights

    def scores(self, penalty: float) -> np.ndarray:
        """Return each row's mean log density ratio to the base under the fits without it; NaN for none."""
        optimum = self._common(penalty)
        self.weights = optimum.weights
        problem = self.all
        if len(problem.shares) == 1:
            problem = convex.without_negligible_nodes(problem, optimum.weights)
        weights = np.tile(optimum.weights, (len(self.means), 1))
        factors = self._factors(problem, optimum.weights, penalty, optimum.factor)
        # Fits are solved in blocks of constant memory.
        size = max(1, convex.BLOCK_NUMBERS // (len(problem.shares) * len(problem.node_features)))
        for fits in row_slices(len(weights), size):
            part = problem._replace(mean_feature=self.means[fits], shares=self.shares[fits])
            weights[fits] = chord(part, penalty, weights[fits], factors[fits])
        totals, counts = np.zeros(len(self.psi)), np.zeros(len(self.psi))
        for row, out in zip(weights, self.left_out, strict=True):
            members = self.membership[out]
            seen, place = np.unique(members, return_inverse=True)
            check = self.check._replace(condition_features=self.check.condition_features[seen])
            partitions = convex.log_partitions(check, row)
            totals[out] += np.sum(check.coefficients(row)[place] * self.psi[out], 1) - partitions[place]
            counts[out] += 1.0
        return np.where(counts > 0.0, totals / np.maximum(counts, 1.0), np.nan)

    def _common(self, penalty: float) -> convex.Optimum:
        return convex.maximise(self.all, penalty, self.weights, tolerance=TOLERANCE)

    def _factors(
        self, problem: convex.Likelihood, weights: np.ndarray, penalty: float, factor: tuple
    ) -> list[tuple]:
        """Return the factored Hessian of each fit at the common optimum."""
        if len(problem.shares) == 1:
            return [factor] * len(self.left_out)
        probabilities = convex.normalised(problem.exponents(weights)).probabilities
        triangles = convex.covariances(problem, probabilities, probabilities @ problem.node_features)
        whole = self.total * convex.information(problem, triangles, problem.shares)
        factors = []
        for counts in self.counts:
            seen = counts > 0.0
            part = problem._replace(condition_features=problem.condition_features[seen])
            hessian = whole - convex.information(part, triangles[seen], counts[seen])
            hessian /= self.total - counts.sum()
            hessian.flat[:: len(hessian) + 1] += penalty
            factors.append(factored(hessian))
        return factors


def chord(problem: convex.Likelihood, penalty: float, start: np.ndarray, factors: list[tuple]) -> np.ndarray:
    """Return the maximisers of several problems, by chord steps with a fixed Hessian each from nearby starts.

    The problems are solved side by side until each has converged; Newton's method continues the others.
    """
    weights, moving, failed = np.array(start), np.arange(len(start)), list[int]()
    only = lambda fits: problem._replace(mean_feature=problem.mean_feature[fits], shares=problem.shares[fits])
    value, masses = convex.objective(problem, penalty, weights)
    for _ in range(CHORD_STEPS):
        if not len(moving):
            break
        _, slopes = convex.moments(only(moving), penalty, weights[moving], masses.probabilities)
        steps = _solved([factors[k] for k in moving], slopes)
        decrements = np.sum(steps * slopes, axis=1)
        far = decrements >= FOLD_TOLERANCE
        moving, value = moving[far], np.asarray(value)[far]
        if not len(moving):
            break
        sizes = np.minimum(1.0, TRUST / np.sqrt(decrements[far]))
        candidates = weights[moving] + sizes[:, None] * steps[far]
        new_value, masses = convex.objective(only(moving), penalty, candidates)
        better = np.asarray(new_value) >= value
        failed.extend(moving[~better])
        if not np.all(better):
            masses = convex.NodeMasses(*(part[better] for part in masses))
        moving, value = moving[better], np.asarray(new_value)[better]
        weights[moving] = candidates[better]
    for k in (*failed, *moving):
        found = convex.maximise(only(k), penalty, weights[k], tolerance=FOLD_TOLERANCE, most=NEWTON_STEPS)
        weights[k] = found.weights
    return weights


def _solved(factors: list[tuple], rows: np.ndarray) -> np.ndarray:
    """Return the solution of each row's equations; rows with a common factor are solved at once."""
    if all(factor is factors[0] for factor in factors):
        return cho_solve(factors[0], rows.T, check_finite=False).T
    pairs = zip(factors, rows, strict=True)
    return np.stack([cho_solve(factor, row, check_finite=False) for factor, row in pairs])


def left_out_rows(sample: Sample, folds: int, repeats: int, *, seed: int) -> np.ndarray:
    """Return masks of the rows that each fit leaves out, (fits, rows)."""
    rng, rows = np.random.default_rng(seed), len(sample)
    count = min(folds, rows)
    parts = [rng.permutation(rows) % count for _ in range(repeats)]
    return np.concatenate([part == np.arange(count)[:, None] for part in parts])


def elsewhere(scores: Float[AnyArray, " m"], parts: int) -> Float[AnyArray, " m"]:
    """Return for each member the mean score of the members of its repeat with other held-out parts.

    Selecting a member by its own held-out rows would bias its score: with few rows by a tenth of a nat.
    """
    by_repeat = scores.reshape(-1, parts)
    others = (by_repeat.sum(axis=1, keepdims=True) - by_repeat) / (parts - 1)
    return others.ravel()
