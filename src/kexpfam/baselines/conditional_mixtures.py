"""Three conditional densities that are mixtures of normals at training targets, and differ in how the weights are found.

By least squares (LSCDE), from neighbours of the condition (epsilon-KDE), and by a kernel of the condition (Nadaraya-Watson).
"""

import abc
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist
from sklearn.utils.validation import check_is_fitted

from kexpfam.baselines.kernel_density import (
    FOLDS,
    MOST_HELD_OUT,
    GridSearch,
    SearchDiagnosis,
    chunks,
    deal,
    grid_of,
    log_volume,
)
from kexpfam.baselines.mixture_density import (
    AbstractWeights,
    ConditionalMixture,
    KernelWeights,
    NeighbourWeights,
    inputs,
    safe_log,
)
from kexpfam.data.columns import check_targets
from kexpfam.data.scaling import Scaling, constant_columns
from kexpfam.data.weights import distinct_rows, part_of, weighted_mean
from kexpfam.estimators.base import ConditionalEstimator, Seed, key_from, whole
from kexpfam.estimators.showing import remembered
from kexpfam.fit.bases import TAIL_WIDTH
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.measures import logsumexp
from kexpfam.progress import Listener

__all__ = ["ConditionalKernelDensity", "LeastSquaresConditional", "MixtureEstimator", "NeighbourDensity"]

# The candidates of the authors' own program for LSCDE.
RATIO_WIDTHS, RATIO_PENALTIES = np.logspace(-1.5, 1.5, 9), np.logspace(-3.0, 1.0, 9)
# Widths in y (standard deviations), and in x (shares of the largest distance).
WIDTHS, SHARES_OF_REACH = np.geomspace(0.01, 2.0, 24), np.geomspace(0.004, 1.0, 24)
# Held-out densities that underflow count as this one: no setting with such a density is ever the best.
SMALLEST_DENSITY = np.finfo(float).tiny


class MixtureEstimator(ConditionalEstimator):
    """What the three estimators share; each says in ``_chosen`` how weights, centres and width come from the data."""

    _stored = ("density_", "_training", "_training_targets", "_flat_targets", "selection_")

    @abc.abstractmethod
    def _chosen(
        self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator
    ) -> tuple[GridSearch, AbstractWeights, np.ndarray]:
        """Return the search, the weights and the centres, from standardised rows; raise for senseless settings."""

    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None) -> Self:
        if not 0.0 <= self.background < 1.0:
            raise ValueError(f"background must be a share, at least 0 and below 1; got {self.background!r}.")
        check_targets(X, targets, self._names, self._target_names)
        rng = np.random.default_rng(seed_from(key_from(self.random_state)))
        scaling, condition_scaling = (Scaling.plain(part, weight=self._weight) for part in (targets, X))
        varying = ~constant_columns(X)
        x, y = inputs(condition_scaling, varying, X), scaling.to_model(targets)
        self.selection_, weights, centres = self._chosen(x, y, rng)
        width, background = self.selection_.chosen["width"], float(self.background)
        self.density_ = ConditionalMixture(
            weights, centres, width, background, scaling, condition_scaling, varying
        )
        return self

    @remembered
    def diagnose(
        self, X: ArrayLike | None = None, y: ArrayLike | None = None, random_state: Seed = 0
    ) -> SearchDiagnosis:
        """Return how the settings were chosen; with held-out X and y, the calibration too."""
        check_is_fitted(self, "density_")
        return self._repaired(
            SearchDiagnosis.of(self.selection_, self._calibration(X, y, key=key_from(random_state)))
        )


class LeastSquaresConditional(MixtureEstimator):
    r"""Least-squares conditional density estimation (LSCDE; Sugiyama et al. 2010, IEICE Transactions E93-D 583-594).

    The ratio :math:`r(x, y) = p(x, y) / p(x)` is modelled by :math:`\alpha^T \phi(x, y)` with Gaussians
    :math:`\phi_j = \exp(-(|x - u_j|^2 + |y - v_j|^2) / (2 \sigma^2))` at training pairs. :math:`\alpha` minimises

    .. math:: \tfrac12 \alpha^T H \alpha - h^T \alpha + \tfrac\lambda2 |\alpha|^2, \quad
        H = \tfrac1n \sum_i \int \phi(x_i, y) \phi(x_i, y)^T dy, \quad h = \tfrac1n \sum_i \phi(x_i, y_i),

    the squared error of r weighted by p(x), up to a constant; its negative entries are then set to 0 (as published: that is
    not the minimiser among non-negative ones) and r is normalised over y, all in closed form. Far from all
    centres the nearest one with a positive weight decides.

    Parameters
    ----------
    width : float or None
        :math:`\sigma`, in standard deviations of inputs and target. None: 5-fold cross-validation of the log likelihood.
    penalty : float or None
        :math:`\lambda`; None likewise.
    n_centres : int
        How many training pairs, drawn at random, carry a Gaussian; at most all.
    background : float
        The share of a normal 4 times as wide as the target, which keeps a target far from every centre from costing hundreds
        of nats; 0 is the published form.
    random_state : int, RandomState or None
        Draws the centres and deals the rows into folds.

    Attributes
    ----------
    density_ : ConditionalMixture
    selection_ : GridSearch
        The settings tried and their held-out losses.
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from kexpfam.estimators import LeastSquaresConditional
    >>> x = np.random.default_rng(0).uniform(-2, 2, size=(80, 1))
    >>> y = np.sin(2 * x[:, 0]) + 0.2 * np.random.default_rng(1).normal(size=80)
    >>> LeastSquaresConditional(random_state=0).fit(x, y).quantile(x[:3], [0.05, 0.95]).shape
    (3, 2)
    """

    def __init__(
        self,
        *,
        width: float | None = None,
        penalty: float | None = None,
        n_centres: int = 100,
        background: float = 1e-3,
        random_state: Seed = None,
    ) -> None:
        self.width = width
        self.penalty = penalty
        self.n_centres = n_centres
        self.background = background
        self.random_state = random_state

    def _chosen(
        self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator
    ) -> tuple[GridSearch, AbstractWeights, np.ndarray]:
        widths = grid_of("width", self.width, RATIO_WIDTHS)
        penalties = grid_of("penalty", self.penalty, RATIO_PENALTIES)
        centres = rng.permutation(distinct_rows(x, y))[: whole("n_centres", self.n_centres, 1)]
        fold, losses = deal(len(x), rng), np.zeros((len(widths), len(penalties)))
        counts = np.ones(len(x)) if self._weight is None else self._weight
        for i, width in enumerate(widths):
            for held in (fold == k for k in range(FOLDS)):
                others = x[~held], y[~held], x[centres], y[centres], width, part_of(self._weight, ~held)
                heights = ratio_weights(*ratio_moments(*others), penalties)
                log_density = ratio_log_densities(heights, x[held], y[held], x[centres], y[centres], width)
                losses[i] -= (
                    counts[held] @ with_background(log_density, y[held], self.background) / counts.sum()
                )
        search = GridSearch(("width", "penalty"), (widths, penalties), losses)
        width, penalty = search.chosen["width"], search.chosen["penalty"]
        moments = ratio_moments(x, y, x[centres], y[centres], width, self._weight)
        heights = ratio_weights(*moments, np.array([penalty]))
        return search, KernelWeights(x[centres], heights[:, 0], width), y[centres]


def ratio_moments(
    x: np.ndarray,
    y: np.ndarray,
    x_centres: np.ndarray,
    y_centres: np.ndarray,
    width: float,
    weight: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return H and h of LSCDE, means over the rows by their weights.

    Two Gaussians at v_j and v_k have the integral ``(sqrt(pi) width)^p exp(-|v_j - v_k|^2 / (4 width^2))`` over y.
    """
    in_x = np.exp(-0.5 * cdist(x, x_centres, "sqeuclidean") / width**2)
    in_y = np.exp(-0.5 * cdist(y, y_centres, "sqeuclidean") / width**2)
    overlap = np.exp(-0.25 * cdist(y_centres, y_centres, "sqeuclidean") / width**2)
    counted, total = (in_x, len(x)) if weight is None else (in_x * weight[:, None], weight.sum())
    H = (np.sqrt(np.pi) * width) ** y.shape[1] * overlap * (counted.T @ in_x) / total
    return H, weighted_mean(in_x * in_y, weight)


def ratio_weights(H: np.ndarray, h: np.ndarray, penalties: np.ndarray) -> np.ndarray:
    """Return ``max(0, (H + penalty I)^-1 h)`` for each penalty, (centres, penalties)."""
    values, vectors = np.linalg.eigh(H)
    # Rounding puts the smallest eigenvalues of a positive semi-definite matrix on either side of 0.
    solved = (vectors.T @ h)[:, None] / (np.maximum(values, 0.0)[:, None] + penalties)
    weights = np.maximum(vectors @ solved, 0.0)
    # All are 0 only where no row is near any centre: then no centre is better than another.
    return np.where(np.any(weights > 0.0, axis=0), weights, 1.0)


def ratio_log_densities(
    heights: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    x_centres: np.ndarray,
    y_centres: np.ndarray,
    width: float,
) -> np.ndarray:
    """Return ``log p(y | x)`` of each row under each column of heights: the ratio, normalised over y."""
    found = np.empty((len(x), heights.shape[1]))
    for rows in chunks(np.arange(len(x)), heights.size):
        in_x = safe_log(heights) - 0.5 * cdist(x[rows], x_centres, "sqeuclidean")[:, :, None] / width**2
        in_y = -0.5 * cdist(y[rows], y_centres, "sqeuclidean")[:, :, None] / width**2
        found[rows] = logsumexp(in_x + in_y, axis=1) - logsumexp(in_x, axis=1)
    return found - log_volume(width, y.shape[1])


def with_background(log_density: np.ndarray, y: np.ndarray, background: float) -> np.ndarray:
    """Return log densities, (rows, settings), with a share of the wide normal mixed in."""
    wide = -0.5 * np.sum(y**2, axis=1) / TAIL_WIDTH**2 - log_volume(TAIL_WIDTH, y.shape[1])
    return np.logaddexp(np.log1p(-background) + log_density, safe_log(background) + wide[:, None])


class NeighbourDensity(MixtureEstimator):
    r"""Kernel density of the targets of neighbouring inputs (epsilon-KDE; compared with in Sugiyama et al. 2010).

    .. math:: p(y | x) = \frac{1}{|I_x|} \sum_{i \in I_x} N(y; y_i, \sigma^2 I), \quad I_x = \{i : |x - x_i| \le \epsilon\}.

    Where no training input is that near, :math:`I_x` is the nearest one (or ones, if tied).

    Parameters
    ----------
    radius : float or None
        :math:`\epsilon`, in standard deviations of the inputs. None: 5-fold cross-validation of the log likelihood.
    width : float or None
        :math:`\sigma`, in standard deviations of the target; None likewise.
    background : float
        The share of a normal 4 times as wide as the target, which keeps a target far from every centre from costing hundreds
        of nats; 0 is the published form.
    random_state : int, RandomState or None
        Deals the rows into folds.

    Attributes
    ----------
    density_ : ConditionalMixture
    selection_ : GridSearch
        The settings tried and their held-out losses.
    n_features_in_ : int
    """

    def __init__(
        self,
        *,
        radius: float | None = None,
        width: float | None = None,
        background: float = 1e-3,
        random_state: Seed = None,
    ) -> None:
        self.radius = radius
        self.width = width
        self.background = background
        self.random_state = random_state

    def _chosen(
        self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator
    ) -> tuple[GridSearch, AbstractWeights, np.ndarray]:
        radii = grid_of("radius", self.radius, reach(x) * SHARES_OF_REACH)
        candidates = [NeighbourWeights(x, float(radius), self._weight) for radius in radii]
        search = search_widths(candidates, "radius", radii, x, y, self, rng)
        return search, candidates[search.place[0]], y


class ConditionalKernelDensity(MixtureEstimator):
    r"""Kernel conditional density of Nadaraya-Watson form, as in Hyndman, Bashtannyk and Grunwald (1996).

    .. math:: p(y | x) = \sum_i w_i(x) N(y; y_i, h_y^2 I), \quad w_i(x) \propto \exp(-|x - x_i|^2 / (2 h_x^2)).

    Far from all training inputs the nearest one decides.

    Parameters
    ----------
    condition_width : float or None
        :math:`h_x`, in standard deviations of the inputs. None: 5-fold cross-validation of the log likelihood.
    width : float or None
        :math:`h_y`, in standard deviations of the target; None likewise.
    background : float
        The share of a normal 4 times as wide as the target, which keeps a target far from every centre from costing hundreds
        of nats; 0 is the published form.
    random_state : int, RandomState or None
        Deals the rows into folds.

    Attributes
    ----------
    density_ : ConditionalMixture
    selection_ : GridSearch
        The settings tried and their held-out losses.
    n_features_in_ : int
    """

    def __init__(
        self,
        *,
        condition_width: float | None = None,
        width: float | None = None,
        background: float = 1e-3,
        random_state: Seed = None,
    ) -> None:
        self.condition_width = condition_width
        self.width = width
        self.background = background
        self.random_state = random_state

    def _chosen(
        self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator
    ) -> tuple[GridSearch, AbstractWeights, np.ndarray]:
        widths = grid_of("condition_width", self.condition_width, reach(x) * SHARES_OF_REACH)
        heights = np.ones(len(x)) if self._weight is None else self._weight
        candidates = [KernelWeights(x, heights, float(width)) for width in widths]
        search = search_widths(candidates, "condition_width", widths, x, y, self, rng)
        return search, candidates[search.place[0]], y


def reach(x: np.ndarray) -> float:
    """Return a distance that no two rows exceed; inputs that say nothing leave any."""
    return 2.0 * float(np.linalg.norm(x, axis=1).max()) or 1.0


def search_widths(
    candidates: Sequence[AbstractWeights],
    name: str,
    grid: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    estimator: NeighbourDensity | ConditionalKernelDensity,
    rng: np.random.Generator,
) -> GridSearch:
    """Return the held-out losses of all pairs of weights and target width: each row under the rows of other folds."""
    widths = grid_of("width", estimator.width, WIDTHS)
    fold, held = deal(len(x), rng), rng.permutation(len(x))[:MOST_HELD_OUT]
    losses, weight = np.zeros((len(grid), len(widths))), estimator._weight
    counts = np.ones(len(x)) if weight is None else weight
    for rows in chunks(held, len(x) * (len(grid) + len(widths))):
        squares = np.where(fold[rows, None] != fold, cdist(x[rows], x, "sqeuclidean"), np.inf)
        log_weights = np.stack([weights.at_squares(squares) for weights in candidates], axis=1)
        masses = np.exp(log_weights - log_weights.max(axis=2, keepdims=True))
        masses /= masses.sum(axis=2, keepdims=True)
        in_y = -0.5 * cdist(y[rows], y, "sqeuclidean")[:, :, None] / widths**2 - log_volume(
            widths, y.shape[1]
        )
        log_density = np.log(np.maximum(masses @ np.exp(in_y), SMALLEST_DENSITY))
        mixed = with_background(log_density.reshape(len(rows), -1), y[rows], estimator.background)
        losses -= (counts[rows] @ mixed).reshape(losses.shape) / counts[held].sum()
    return GridSearch((name, "width"), (grid, widths), losses)
