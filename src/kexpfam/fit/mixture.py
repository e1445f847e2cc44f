"""Mixtures of normals: maximum likelihood by EM, the number of components by held-out rows, and the
candidate."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float
from threadpoolctl import threadpool_limits

from kexpfam.data.sample import row_slices
from kexpfam.data.weights import effective_rows, part_of, weighted_mean
from kexpfam.fit.problem import Status
from kexpfam.fit.task import Candidate, Fitted, Splits, Task
from kexpfam.model.ensemble import LawDensity
from kexpfam.model.measures import COVARIANCE_FLOOR, LOG_TWO_PI, Mixture, logsumexp
from kexpfam.progress import Listener, Report

# Numbers of components that are tried, and the rows that each component needs.
COUNTS, ROWS_PER_COMPONENT = (1, 2, 4, 8, 16, 32, 64), 5
EM_STEPS = 60
# The share of the rows that decides on the number of components if no splits are given.
VALIDATION_SHARE = 0.2
# EM stops if the mean log density rises by less than this (nats).
SMALLEST_RISE = 1e-3
# The numbers in a block of features of rows, and the least number of its rows.
BLOCK_NUMBERS, LEAST_BLOCK = 200_000, 64
# Added to the number of rows of a component, so that the moments of an empty one are finite.
LEAST_ROWS = 1e-12


class MixtureShape(NamedTuple):
    """The number of components, and whether their covariances are diagonal."""

    components: int
    diagonal: bool


class MixtureCandidate(Candidate):
    """A mixture of normals in model units; the number of components is chosen on the first held-out part."""

    name: ClassVar[str] = "mixture"

    def refusal(self, task: Task) -> str | None:
        if task.conditional:
            return "model='mixture' estimates p(x); use 'kernel' or 'chain' for p(y | x)."
        if not task.numeric:
            return "model='mixture' needs real columns without missing values; use 'chain'."
        if task.support is not None:
            return "a mixture of normals has no bounds; use 'kernel' or 'chain'."
        return None

    def fit(self, task: Task, earlier: Mapping[str, Fitted]) -> Fitted:
        points, weight, seed = task.sample.target, task.sample.weight, task.keys.seed
        shape = best_shape(points, seed=seed, weight=weight, splits=task.splits, report=task.report)
        law = fit_mixture(points, shape, seed=seed, weight=weight)
        held_out = None
        if task.compared:
            scores = mixture_held_out(points, shape, task.splits, seed=seed, weight=weight)
            held_out = scores + task.log_jacobian
        facts = {"components": float(shape.components), "diagonal": float(shape.diagonal)}
        return Fitted(LawDensity(law, task.scaling), held_out, Status.CONVERGED, facts, {})


def best_mixture(
    points: np.ndarray, *, counts: tuple[int, ...] = COUNTS, seed: int, weight: np.ndarray | None = None
) -> Mixture:
    """Return the mixture of the best shape, fitted to all points."""
    shape = best_shape(points, counts=counts, seed=seed, weight=weight)
    return fit_mixture(points, shape, seed=seed, weight=weight)


def best_shape(
    points: np.ndarray,
    *,
    counts: tuple[int, ...] = COUNTS,
    seed: int,
    weight: np.ndarray | None = None,
    splits: Splits | None = None,
    report: Listener | None = None,
) -> MixtureShape:
    """Return the shape of highest log density on the first held-out part of the splits."""
    splits = splits or Splits.draw(len(points), parts=1, share=VALIDATION_SHARE, seed=seed)
    training, held_out = splits.kept[0], splits.held[0]
    rows = effective_rows(part_of(weight, training), len(training))

    def score(shape: MixtureShape) -> float:
        mixture = fit_mixture(points[training], shape, seed=seed, weight=part_of(weight, training))
        scores = Moments.of(shape, points).log_densities(mixture, points[held_out])
        return float(weighted_mean(scores, part_of(weight, held_out)))

    scores: dict[bool, list[float]] = {False: [], True: []}
    for place, components in enumerate(counts, start=1):
        rising = [diagonal for diagonal, series in scores.items() if not _falls(series)]
        if components > 1 and components * ROWS_PER_COMPONENT > rows:
            break
        found = side_by_side(score, [MixtureShape(components, diagonal) for diagonal in rising])
        for diagonal, one in zip(rising, found, strict=True):
            scores[diagonal].append(one)
        if report is not None:
            report(Report("mixture", place, len(counts), {}))
    diagonal = max(scores, key=lambda diagonal: max(scores[diagonal]))
    return MixtureShape(counts[int(np.argmax(scores[diagonal]))], diagonal)


def _falls(scores: list[float]) -> bool:
    """Return whether the last two of a series are no better than one before them."""
    return len(scores) > 2 and max(scores[-2:]) <= max(scores[:-2])


def mixture_held_out(
    points: np.ndarray, shape: MixtureShape, splits: Splits, *, seed: int, weight: np.ndarray | None = None
) -> np.ndarray:
    """Return the log density of each held-out point under a mixture fitted without its part; NaN
    elsewhere."""
    scores = np.full(len(points), np.nan)

    def score(kept: np.ndarray, held: np.ndarray) -> None:
        mixture = fit_mixture(points[kept], shape, seed=seed, weight=part_of(weight, kept))
        scores[held] = Moments.of(shape, points).log_densities(mixture, points[held])

    side_by_side(score, splits.kept, splits.held)
    return scores


def side_by_side(function: Callable, *lists: Iterable) -> list:
    """Return the results of a function in threads, each with one thread of linear algebra."""
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, *lists))


def fit_mixture(
    points: np.ndarray, shape: MixtureShape, *, seed: int, weight: np.ndarray | None = None
) -> Mixture:
    r"""Return the mixture that maximises :math:`\sum_i w_i \log \sum_k \pi_k N(x_i; m_k, C_k)`, from a
    k-means++ start.

    The log density of a normal is linear in x and its products, so a step of EM is two products of matrices:
    of moments with natural parameters, and of moments with memberships. scikit-learn's loop over components
    takes several times as long, and has no weights."""
    from sklearn.cluster import kmeans_plusplus  # slow to import
    from sklearn.metrics import pairwise_distances_argmin

    weight = np.ones(len(points)) if weight is None else weight
    moments = Moments.of(shape, points)
    columns = np.ascontiguousarray(points.T)
    # The products are small: several BLAS threads would wait for each other.
    with threadpool_limits(limits=1, user_api="blas"):
        start, _ = kmeans_plusplus(points, shape.components, sample_weight=weight, random_state=seed)
        nearest, identity = pairwise_distances_argmin(points, start), np.eye(shape.components)
        hard = lambda own: weight[own] * identity[:, nearest[own]]
        sums = sum(hard(own) @ block.T for own, block in moments.blocks(columns))
        mixture, last = moments.mixture(sums), -np.inf
        for _ in range(EM_STEPS):
            parameters, sums, value = moments.parameters(mixture), 0.0, 0.0
            for own, block in moments.blocks(columns):
                exponents = parameters @ block
                exponents -= (top := exponents.max(axis=0))
                parts = np.exp(exponents, out=exponents)
                totals = parts.sum(axis=0)
                value += weight[own] @ (top + np.log(totals))
                sums = sums + (weight[own] / totals * parts) @ block.T
            if value < last + SMALLEST_RISE * weight.sum():
                break
            mixture, last = moments.mixture(sums), value
    return mixture


class Moments(NamedTuple):
    """The features of rows that are sufficient for normals: 1, x, and products of columns, or their squares
    for diagonal covariances."""

    dim: int
    diagonal: bool

    @staticmethod
    def of(shape: MixtureShape, points: np.ndarray) -> "Moments":
        """Return the features of these points for mixtures of this shape."""
        return Moments(points.shape[1], shape.diagonal)

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns of each product."""
        return (np.arange(self.dim),) * 2 if self.diagonal else np.triu_indices(self.dim)

    def blocks(self, columns: Float[np.ndarray, "d n"]) -> Iterator[tuple[slice, Float[np.ndarray, "f b"]]]:
        """Yield the features of some rows at a time, and which rows they are."""
        first, second = self.pairs
        size = max(LEAST_BLOCK, BLOCK_NUMBERS // (1 + self.dim + len(first)))
        for own in row_slices(columns.shape[1], size):
            x = columns[:, own]
            yield own, np.concatenate([np.ones((1, x.shape[1])), x, x[first] * x[second]])

    def mixture(self, sums: Float[np.ndarray, "k f"]) -> Mixture:
        """Return the mixture with these moments."""
        first, second = self.pairs
        totals = sums[:, 0] + LEAST_ROWS
        means, products = np.split(sums[:, 1:] / totals[:, None], [self.dim], axis=1)
        covariances = np.zeros((len(means), self.dim, self.dim))
        covariances[:, first, second] = products - means[:, first] * means[:, second]
        covariances[:, second, first] = covariances[:, first, second]
        choleskys = np.linalg.cholesky(covariances + COVARIANCE_FLOOR * np.eye(self.dim))
        return Mixture.of(np.log(totals / totals.sum()), means, choleskys)

    def parameters(self, mixture: Mixture) -> Float[np.ndarray, "k f"]:
        """Return the coefficients of the log density of each weighted component in the features."""
        first, second = self.pairs
        whiteners = np.asarray(mixture.whiteners)
        precisions = whiteners.mT @ whiteners
        slopes = np.einsum("kij,kj->ki", precisions, mixture.means)
        log_determinants = np.log(np.abs(np.diagonal(whiteners, axis1=1, axis2=2))).sum(axis=1)
        squares = np.sum(slopes * mixture.means, axis=1)
        constants = mixture.log_weights + log_determinants - 0.5 * squares - 0.5 * self.dim * LOG_TWO_PI
        products = np.where(first == second, -0.5, -1.0) * precisions[:, first, second]
        return np.concatenate([constants[:, None], slopes, products], axis=1)

    def log_densities(self, mixture: Mixture, points: np.ndarray) -> Float[np.ndarray, " n"]:
        """Return the log density of each point."""
        parameters, columns = self.parameters(mixture), np.ascontiguousarray(points.T)
        return np.concatenate([logsumexp(parameters @ block, axis=0) for _, block in self.blocks(columns)])
