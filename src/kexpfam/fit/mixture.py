"""Mixtures of normals: maximum likelihood by EM, the number of components by held-out rows, and the
candidate."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist
from threadpoolctl import threadpool_limits

from kexpfam.data.weights import effective_rows, part_of, weighted_mean
from kexpfam.fit.problem import Status
from kexpfam.fit.task import Candidate, Fitted, Splits, Task
from kexpfam.model.ensemble import LawDensity
from kexpfam.model.measures import COVARIANCE_FLOOR, LOG_TWO_PI, Mixture, logsumexp
from kexpfam.progress import Listener, Report

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

__all__ = [
    "MixtureCandidate",
    "MixtureShape",
    "best_mixture",
    "best_shape",
    "fit_mixture",
    "mixture_held_out",
    "weighted_mixture",
]

# Numbers of components that are tried, and the rows that each component needs.
COUNTS, ROWS_PER_COMPONENT = (1, 2, 4, 8, 16, 32, 64), 5
EM_STEPS = 60
# The share of the rows that decides on the number of components if no splits are given.
VALIDATION_SHARE = 0.2
# EM stops if the mean log density rises by less than this (nats).
SMALLEST_RISE = 1e-4
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
        return (
            "a mixture of normals has no bounds; use 'kernel' or 'chain'."
            if task.support is not None
            else None
        )

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
    best_score, best = -np.inf, MixtureShape(1, True)
    for diagonal in (False, True):
        worse, top = 0, -np.inf
        for components in counts:
            if components * ROWS_PER_COMPONENT > rows or worse == 2:
                break
            shape = MixtureShape(components, diagonal)
            mixture = fit_mixture(points[training], shape, seed=seed, weight=part_of(weight, training))
            if report is not None:
                report(Report("mixture", counts.index(components) + 1, len(counts), {}))
            scores = mixture.log_densities(points[held_out])
            score = float(weighted_mean(scores, part_of(weight, held_out)))
            worse, top = (0, score) if score > top else (worse + 1, top)
            if score > best_score:
                best_score, best = score, shape
    return best


def mixture_held_out(
    points: np.ndarray, shape: MixtureShape, splits: Splits, *, seed: int, weight: np.ndarray | None = None
) -> np.ndarray:
    """Return the log density of each held-out point under a mixture fitted without its part; NaN
    elsewhere."""
    scores = np.full(len(points), np.nan)
    for kept, held in zip(splits.kept, splits.held, strict=True):
        mixture = fit_mixture(points[kept], shape, seed=seed, weight=part_of(weight, kept))
        scores[held] = mixture.log_densities(points[held])
    return scores


def fit_mixture(
    points: np.ndarray, shape: MixtureShape, *, seed: int, weight: np.ndarray | None = None
) -> Mixture:
    """Return the maximum-likelihood mixture: scikit-learn's EM, or ``weighted_mixture`` if rows have
    weights."""
    if weight is not None:
        return weighted_mixture(points, weight, **shape._asdict(), steps=EM_STEPS, seed=seed)
    model = _expectation_maximisation(points, shape, seed)
    if shape.diagonal:
        choleskys = np.sqrt(model.covariances_)[:, :, None] * np.eye(points.shape[1])
    else:
        choleskys = np.linalg.cholesky(model.covariances_)
    return Mixture.of(np.log(model.weights_), model.means_, choleskys)


def _expectation_maximisation(points: np.ndarray, shape: MixtureShape, seed: int) -> "GaussianMixture":
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture  # slow to import

    model = GaussianMixture(
        shape.components,
        covariance_type="diag" if shape.diagonal else "full",
        reg_covar=COVARIANCE_FLOOR,
        max_iter=EM_STEPS,
        init_params="k-means++",
        random_state=seed,
    )
    # Unconverged EM is harmless: mixtures are compared by held-out log density.
    # EM multiplies many small matrices: several BLAS threads are ten times slower.
    with warnings.catch_warnings(), threadpool_limits(limits=1, user_api="blas"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(points)


def weighted_mixture(
    points: np.ndarray, weight: np.ndarray, *, components: int, diagonal: bool, steps: int, seed: int
) -> Mixture:
    r"""Return the mixture that maximises :math:`\sum_i w_i \log \sum_k \pi_k N(x_i; m_k, C_k)`, from a
    k-means++ start."""
    from sklearn.cluster import kmeans_plusplus  # slow to import

    # EM multiplies many small matrices: several BLAS threads are ten times slower.
    with threadpool_limits(limits=1, user_api="blas"):
        start, _ = kmeans_plusplus(points, components, sample_weight=weight, random_state=seed)
        nearest = np.argmin(cdist(points, start), axis=1)
        mixture, last = _maximised(points, weight, np.eye(components)[nearest], diagonal), -np.inf
        for _ in range(steps):
            log_parts = _log_parts(mixture, points)
            log_density = logsumexp(log_parts)
            value = float(np.average(log_density, weights=weight))
            if value < last + SMALLEST_RISE:
                break
            mixture = _maximised(points, weight, np.exp(log_parts - log_density[:, None]), diagonal)
            last = value
    return mixture


def _maximised(points: np.ndarray, weight: np.ndarray, membership: np.ndarray, diagonal: bool) -> Mixture:
    """Return the mixture with the weighted moments of the rows; ``membership`` has shape (rows,
    components)."""
    counts = membership * weight[:, None]
    identity = np.eye(points.shape[1])
    totals = counts.sum(axis=0) + LEAST_ROWS
    means = counts.T @ points / totals[:, None]
    covariances = np.stack(
        [(points - mean).T * c @ (points - mean) for mean, c in zip(means, counts.T, strict=True)]
    )
    covariances = covariances * identity if diagonal else covariances
    choleskys = np.linalg.cholesky(covariances / totals[:, None, None] + COVARIANCE_FLOOR * identity)
    return Mixture.of(np.log(totals / totals.sum()), means, choleskys)


def _log_parts(mixture: Mixture, points: np.ndarray) -> np.ndarray:
    """Return the log density of each row under each weighted component, shape (rows, components)."""
    parts = zip(mixture.whiteners, mixture.means, strict=True)
    squares = np.stack(
        [np.sum(((points - mean) @ whitener.T) ** 2, axis=1) for whitener, mean in parts], axis=1
    )
    log_determinants = np.log(np.abs(np.diagonal(mixture.whiteners, axis1=1, axis2=2))).sum(axis=1)
    return mixture.log_weights + log_determinants - 0.5 * squares - 0.5 * points.shape[1] * LOG_TWO_PI
