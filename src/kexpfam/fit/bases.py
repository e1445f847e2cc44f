"""How each base measure is fitted to a sample, and what a base gains by having seen the points it is scored on."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kexpfam.data.weights import effective_rows, part_of, weighted_mean
from kexpfam.fit.mixture import weighted_mixture
from kexpfam.model.measures import COVARIANCE_FLOOR, AbstractMeasure, Box, Gaussian, Mixture

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

__all__ = [
    "BASES",
    "MixtureShape",
    "best_mixture",
    "best_shape",
    "fit_base",
    "fit_mixture",
    "held_out_split",
    "mixture_held_out",
    "optimism",
    "tailed_gaussian",
]

# A share of a base for conditional densities is this much wider than the rest: far targets are improbable, not impossible.
TAIL_SHARE, TAIL_WIDTH = 0.02, 4.0
# Numbers of components that are tried, from small to large; each component needs so many rows.
COUNTS, ROWS_PER_COMPONENT = (1, 2, 4, 8, 16, 32, 64), 5
EM_STEPS = 60


def tailed_gaussian(points: np.ndarray, *, width: float, weight: np.ndarray | None = None) -> Mixture:
    """Return the normal with ``width**2`` times the points' covariance, and a small share of a wider one."""
    narrow = Gaussian.fitted(points, width=width, weight=weight)
    choleskys = np.stack([narrow.cholesky, TAIL_WIDTH * narrow.cholesky])
    return Mixture.of(np.log([1.0 - TAIL_SHARE, TAIL_SHARE]), np.stack([narrow.mean] * 2), choleskys)


def held_out_split(rows: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of four fifths of the rows and of the fifth that judges what is fitted to them."""
    order = np.random.default_rng(seed).permutation(rows)
    return order[rows // 5 :], order[: rows // 5]


class MixtureShape(NamedTuple):
    """How many components a mixture has, and whether their covariances are diagonal."""

    components: int
    diagonal: bool


def fit_mixture(
    points: np.ndarray, shape: MixtureShape, *, seed: int, weight: np.ndarray | None = None
) -> Mixture:
    """Return the maximum-likelihood mixture, by scikit-learn's EM, or by our own where rows have weights."""
    if weight is not None:
        return weighted_mixture(points, weight, **shape._asdict(), steps=EM_STEPS, seed=seed)
    model = _expectation_maximisation(points, *shape, seed)
    if shape.diagonal:
        choleskys = np.sqrt(model.covariances_)[:, :, None] * np.eye(points.shape[1])
    else:
        choleskys = np.linalg.cholesky(model.covariances_)
    return Mixture.of(np.log(model.weights_), model.means_, choleskys)


def best_shape(
    points: np.ndarray, *, counts: tuple[int, ...] = COUNTS, seed: int, weight: np.ndarray | None = None
) -> MixtureShape:
    """Return the size and covariance type of the mixture that does best on a held-out fifth of the points."""
    training, held_out = held_out_split(len(points), seed=seed)
    rows = effective_rows(part_of(weight, training), len(training))
    best_score, best = -np.inf, MixtureShape(1, True)
    for diagonal in (False, True):
        worse, top = 0, -np.inf
        for components in counts:
            if components * ROWS_PER_COMPONENT > rows or worse == 2:
                break
            score = _held_out_score(
                points, MixtureShape(components, diagonal), training, held_out, weight, seed
            )
            worse, top = (0, score) if score > top else (worse + 1, top)
            if score > best_score:
                best_score, best = score, MixtureShape(components, diagonal)
    return best


def _held_out_score(
    points: np.ndarray,
    shape: MixtureShape,
    training: np.ndarray,
    held_out: np.ndarray,
    weight: np.ndarray | None,
    seed: int,
) -> float:
    if weight is None:
        return _expectation_maximisation(points[training], *shape, seed).score(points[held_out])
    mixture = fit_mixture(points[training], shape, seed=seed, weight=weight[training])
    return float(weighted_mean(mixture.log_densities(points[held_out]), weight[held_out]))


def best_mixture(
    points: np.ndarray, *, counts: tuple[int, ...] = COUNTS, seed: int, weight: np.ndarray | None = None
) -> Mixture:
    """Return the mixture of the best shape, fitted to all points."""
    shape = best_shape(points, counts=counts, seed=seed, weight=weight)
    return fit_mixture(points, shape, seed=seed, weight=weight)


def mixture_held_out(
    points: np.ndarray,
    shape: MixtureShape,
    parts: list[np.ndarray],
    *,
    seed: int,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """Return the log density of each point under a mixture fitted to the points outside its part; NaN where it has none."""
    scores = np.full(len(points), np.nan)
    for rows in parts:
        others = np.delete(np.arange(len(points)), rows)
        mixture = fit_mixture(points[others], shape, seed=seed, weight=part_of(weight, others))
        scores[rows] = mixture.log_densities(points[rows])
    return scores


BASES: dict[str, Callable[[np.ndarray, int, np.ndarray | None], AbstractMeasure]] = {
    "gaussian": lambda points, seed, weight: Gaussian.fitted(points, weight=weight),
    "box": lambda points, seed, weight: Box.fitted(points),
    "mixture": lambda points, seed, weight: best_mixture(points, seed=seed, weight=weight),
}


def fit_base(kind: str, data: np.ndarray, *, seed: int, weight: np.ndarray | None = None) -> AbstractMeasure:
    """Return the base measure of that name, fitted to the data (already in model units)."""
    if kind not in BASES:
        raise ValueError(f"unknown base {kind!r}: choose one of {', '.join(BASES)}, or pass a measure.")
    return BASES[kind](data, seed, weight)


def optimism(kind: str, data: np.ndarray, *, seed: int, weight: np.ndarray | None = None) -> float:
    """Return how much higher a base of this kind scores points it was fitted to than points it was not (nats)."""
    training, held_out = held_out_split(len(data), seed=seed)
    base = fit_base(kind, data[training], seed=seed, weight=part_of(weight, training))
    seen, unseen = (
        weighted_mean(base.log_densities(data[rows]), part_of(weight, rows)) for rows in (training, held_out)
    )
    return float(seen - unseen)


def _expectation_maximisation(
    points: np.ndarray, components: int, diagonal: bool, seed: int
) -> "GaussianMixture":
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture  # slow to import
    from threadpoolctl import threadpool_limits

    model = GaussianMixture(
        components,
        covariance_type="diag" if diagonal else "full",
        reg_covar=COVARIANCE_FLOOR,
        max_iter=EM_STEPS,
        init_params="k-means++",
        random_state=seed,
    )
    # EM's own warning is about its last digits; whether the mixture serves is measured later, on held-out points.
    # One BLAS thread: EM multiplies many tiny matrices, and waking threads for each costs ten times the work.
    with warnings.catch_warnings(), threadpool_limits(limits=1, user_api="blas"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(points)
