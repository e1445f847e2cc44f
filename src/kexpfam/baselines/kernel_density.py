"""Kernel density estimation, and three conditional densities: mixtures of normals at training targets.

The conditional ones differ in the weights: by least squares (LSCDE), from the neighbours of the condition
(epsilon-KDE), and by a kernel of the condition (Nadaraya-Watson).
"""

import abc
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from kexpfam.baselines.grid_search import GridSearch, deal, grid_of
from kexpfam.baselines.mixture_density import (
    AbstractWeights,
    KernelWeights,
    MixtureDensity,
    NeighbourWeights,
    chunks,
    log_volume,
    safe_log,
    squared_distances,
    standardised,
)
from kexpfam.data.columns import check_columns, check_targets
from kexpfam.data.sample import RandomKey, Sample
from kexpfam.data.scaling import Scaling, constant_columns
from kexpfam.data.weights import distinct_rows, weighted_mean
from kexpfam.estimators.base import Seed, check_scale, key_from, whole
from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.estimators.density import DensityEstimator
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.model.measures import logsumexp
from kexpfam.progress import Listener

# Default bandwidths, in standard deviations; a step of 10% is less than the error of a held-out likelihood.
BANDWIDTHS = np.geomspace(0.01, 3.0, 60)
# Default grids of LSCDE, those of the authors' program.
RATIO_WIDTHS, RATIO_PENALTIES = np.logspace(-1.5, 1.5, 9), np.logspace(-3.0, 1.0, 9)
# Default grids of the others: widths of y in standard deviations, of x in shares of the largest distance.
WIDTHS, DISTANCE_SHARES = np.geomspace(0.01, 2.0, 24), np.geomspace(0.004, 1.0, 24)
# Lower bound of held-out densities, so that their logarithms are finite.
SMALLEST_DENSITY = np.finfo(float).tiny

Chosen = tuple[GridSearch, AbstractWeights, np.ndarray]


@dataclass(kw_only=True, eq=False, repr=False)
class KernelDensity(DensityEstimator):
    r"""Density :math:`p(x) = \frac1n \sum_i N(x; x_i, h^2 I)` of the standardised data.

    Parameters
    ----------
    bandwidth : float, sequence of float or None
        h, in standard deviations of each column. One of several candidates, or of 60 values from 0.01 to 3
        for None, is chosen by cross-validation of the log likelihood.
    folds : int
        Folds of the cross-validation.
    held_out_rows : int
        Held-out rows at most; with more rows a random part of them is held out.
    random_state : int, RandomState or None
        Seed of the folds.

    Attributes
    ----------
    density_ : MixtureDensity
    selection_ : GridSearch
        The candidates and their held-out losses.
    n_features_in_ : int

    Examples
    --------
    >>> from kexpfam.estimators import KernelDensity
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(300, random_state=0)
    >>> density = KernelDensity(random_state=0).fit(X)
    >>> density.score_samples(X[:2]).shape
    (2,)
    >>> density.sample(5, random_state=1).shape
    (5, 2)
    """

    _stored = ("density_", "_training", "selection_")

    bandwidth: ArrayLike | None = None
    folds: int = 5
    held_out_rows: int = 2000
    random_state: Seed = None

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        bandwidths = grid_of("bandwidth", self.bandwidth, BANDWIDTHS)
        folds, most = whole("folds", self.folds, 2), whole("held_out_rows", self.held_out_rows, 1)
        check_columns(X, self._names)
        rng = np.random.default_rng(seed_from(key_from(self.random_state)))
        scaling = Scaling.plain(X, weight=self._weight)
        self._training = points = scaling.to_model(X)
        fold, held = deal(len(points), folds, rng), rng.permutation(len(points))[:most]
        rows = Sample.unconditional(points, self._weight)
        losses = held_out_losses(rows, bandwidths, fold, held)
        self.selection_ = GridSearch(("bandwidth",), (bandwidths,), losses)
        chosen = self.selection_.chosen["bandwidth"]
        self.density_ = MixtureDensity.unconditional(points, self._weight, (chosen, 0.0, 1.0), scaling)
        return self

    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        return Diagnosis([*self.selection_.measurements(), *calibration])


def held_out_losses(rows: Sample, bandwidths: np.ndarray, fold: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return minus the mean log density of the rows ``held`` under the other folds, for each bandwidth."""
    points, counts, total = rows.target, rows.counts, np.zeros(len(bandwidths))
    for part in (held[part] for part in chunks(len(held), len(points))):
        other = fold[part, None] != fold
        squares = np.where(other, squared_distances(points[part], points), np.inf)
        nearest = squares.min(axis=1)
        beyond = squares - nearest[:, None]
        for i, bandwidth in enumerate(bandwidths):
            log_sums = np.log(np.exp(beyond * (-0.5 / bandwidth**2)) @ counts) - 0.5 * nearest / bandwidth**2
            log_density = log_sums - np.log(other @ counts) - log_volume(bandwidth, points.shape[1])
            total[i] += counts[part] @ log_density
    return -total / counts[held].sum()


@dataclass(kw_only=True, eq=False, repr=False)
class MixtureEstimator(ConditionalEstimator):
    """Base class of the conditional estimators; ``_chosen`` fits the weights."""

    _stored = ("density_", "_training", "selection_")

    width: ArrayLike | None = None
    background: float = 1e-3
    background_width: float = 4.0
    folds: int = 5
    random_state: Seed = None

    @abc.abstractmethod
    def _chosen(self, rows: Sample, rng: np.random.Generator) -> Chosen:
        """Return the search, the weights and the centres for standardised rows."""

    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None) -> Self:
        if not 0.0 <= self.background < 1.0:
            raise ValueError(f"background must be at least 0 and below 1, got {self.background!r}.")
        check_scale("background_width", self.background_width, ())
        whole("folds", self.folds, 2)
        check_targets(X, targets, self._names, self._target_names)
        rng = np.random.default_rng(seed_from(key_from(self.random_state)))
        scaling, condition_scaling = (Scaling.plain(part, weight=self._weight) for part in (targets, X))
        varying = ~constant_columns(X)
        conditions = standardised(condition_scaling, varying, X)
        rows = Sample(scaling.to_model(targets), conditions, self._weight)
        self.selection_, weights, centres = self._chosen(rows, rng)
        widths = (self.selection_.chosen["width"], float(self.background), float(self.background_width))
        self.density_ = MixtureDensity(weights, centres, *widths, scaling, condition_scaling, varying)
        return self

    def _with_background(self, log_density: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return log densities, (rows, settings), of the mixture with the background."""
        width, share = float(self.background_width), float(self.background)
        wide = -0.5 * np.sum(y**2, axis=1) / width**2 - log_volume(width, y.shape[1])
        return np.logaddexp(np.log1p(-share) + log_density, safe_log(share) + wide[:, None])

    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        return Diagnosis([*self.selection_.measurements(), *calibration])


@dataclass(kw_only=True, eq=False, repr=False)
class LeastSquaresConditional(MixtureEstimator):
    r"""Least-squares conditional density estimation (LSCDE; Sugiyama et al. 2010, IEICE E93-D 583-594).

    The ratio :math:`r(x, y) = p(x, y) / p(x)` is modelled by :math:`\alpha^T \phi(x, y)` with Gaussians
    :math:`\phi_j = \exp(-(|x - u_j|^2 + |y - v_j|^2) / (2 \sigma^2))` at training pairs;
    :math:`\alpha` minimises

    .. math:: \tfrac12 \alpha^T H \alpha - h^T \alpha + \tfrac\lambda2 |\alpha|^2, \quad
        H = \tfrac1n \sum_i \int \phi(x_i, y) \phi(x_i, y)^T dy, \quad h = \tfrac1n \sum_i \phi(x_i, y_i),

    the squared error of r weighted by p(x), up to a constant. Negative entries are then set to 0 (as
    published; this is not the minimiser among non-negative ones) and r is normalised over y in closed form.
    Far from all centres the nearest one with a positive weight dominates.

    Parameters
    ----------
    width : float, sequence of float or None
        :math:`\sigma`, in standard deviations of inputs and target. Of several candidates, or
        of 9 values from 0.03 to 32 for None, one is chosen by cross-validation of the log likelihood.
    penalty : float, sequence of float or None
        :math:`\lambda`; likewise, of 9 values from 0.001 to 10.
    n_centres : int
        Number of training pairs, drawn at random, that carry a Gaussian.
    background, background_width, folds, random_state
        As in ``ConditionalKernelDensity``; the seed is also that of the centres.

    Attributes
    ----------
    density_ : MixtureDensity
    selection_ : GridSearch
        The candidates and their held-out losses.
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

    penalty: ArrayLike | None = None
    n_centres: int = 100

    def _chosen(self, rows: Sample, rng: np.random.Generator) -> Chosen:
        widths = grid_of("width", self.width, RATIO_WIDTHS)
        penalties = grid_of("penalty", self.penalty, RATIO_PENALTIES)
        distinct = distinct_rows(rows.condition, rows.target)
        centres = rows.rows(rng.permutation(distinct)[: whole("n_centres", self.n_centres, 1)])
        fold, losses = deal(len(rows), self.folds, rng), np.zeros((len(widths), len(penalties)))
        counts = rows.counts
        for i, width in enumerate(widths):
            for held in (fold == k for k in range(self.folds)):
                heights = ratio_weights(*ratio_moments(rows.rows(~held), centres, width), penalties)
                log_density = ratio_log_densities(heights, rows.rows(held), centres, width)
                mixed = self._with_background(log_density, rows.target[held])
                losses[i] -= counts[held] @ mixed / counts.sum()
        search = GridSearch(("width", "penalty"), (widths, penalties), losses)
        width, penalty = search.chosen["width"], search.chosen["penalty"]
        heights = ratio_weights(*ratio_moments(rows, centres, width), np.array([penalty]))
        return search, KernelWeights(centres.condition, heights[:, 0], width), centres.target


def ratio_moments(rows: Sample, centres: Sample, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Return H and h of LSCDE: weighted means over the rows.

    Two Gaussians at v_j and v_k have the integral ``(sqrt(pi) width)^p exp(-|v_j - v_k|^2 / (4 width^2))``
    over y.
    """
    in_x = np.exp(-0.5 * squared_distances(rows.condition, centres.condition) / width**2)
    in_y = np.exp(-0.5 * squared_distances(rows.target, centres.target) / width**2)
    overlap = np.exp(-0.25 * squared_distances(centres.target, centres.target) / width**2)
    products = (in_x * rows.counts[:, None]).T @ in_x
    H = (np.sqrt(np.pi) * width) ** rows.target.shape[1] * overlap * products / rows.counts.sum()
    return H, weighted_mean(in_x * in_y, rows.weight)


def ratio_weights(H: np.ndarray, h: np.ndarray, penalties: np.ndarray) -> np.ndarray:
    """Return ``max(0, (H + penalty I)^-1 h)`` for each penalty, (centres, penalties)."""
    values, vectors = np.linalg.eigh(H)
    # Rounding may make the smallest eigenvalues of a positive semi-definite matrix negative.
    solved = (vectors.T @ h)[:, None] / (np.maximum(values, 0.0)[:, None] + penalties)
    weights = np.maximum(vectors @ solved, 0.0)
    # All are 0 only if no row is near any centre; equal weights then.
    return np.where(np.any(weights > 0.0, axis=0), weights, 1.0)


def ratio_log_densities(heights: np.ndarray, rows: Sample, centres: Sample, width: float) -> np.ndarray:
    """Return ``log p(y | x)`` of each row under each column of heights: the ratio, normalised over y."""
    found = np.empty((len(rows), heights.shape[1]))
    for part in chunks(len(rows), heights.size):
        in_x, in_y = (
            -0.5 * squared_distances(values[part], others)[:, :, None] / width**2
            for values, others in ((rows.condition, centres.condition), (rows.target, centres.target))
        )
        in_x = safe_log(heights) + in_x
        found[part] = logsumexp(in_x + in_y, axis=1) - logsumexp(in_x, axis=1)
    return found - log_volume(width, rows.target.shape[1])


@dataclass(kw_only=True, eq=False, repr=False)
class LocalEstimator(MixtureEstimator):
    """Base class of estimators with weights by the distance of the inputs; ``_scale`` names its setting."""

    _scale: ClassVar[str]

    held_out_rows: int = 2000

    @abc.abstractmethod
    def _weights(self, rows: Sample, scale: float) -> AbstractWeights:
        """Return the weights of the training rows."""

    def _chosen(self, rows: Sample, rng: np.random.Generator) -> Chosen:
        """Return the search over scale and width, in which the other folds score each held-out row."""
        x, y = rows.condition, rows.target
        # No two rows are further apart than this.
        furthest = 2.0 * float(np.linalg.norm(x, axis=1).max()) or 1.0
        grid = grid_of(self._scale, getattr(self, self._scale), furthest * DISTANCE_SHARES)
        widths = grid_of("width", self.width, WIDTHS)
        candidates = [self._weights(rows, scale) for scale in grid.tolist()]
        most, counts = whole("held_out_rows", self.held_out_rows, 1), rows.counts
        fold, held = deal(len(x), self.folds, rng), rng.permutation(len(x))[:most]
        losses = np.zeros((len(grid), len(widths)))
        for part in (held[part] for part in chunks(len(held), len(x) * (len(grid) + len(widths)))):
            squares = np.where(fold[part, None] != fold, squared_distances(x[part], x), np.inf)
            log_weights = np.stack([weights.at_squares(squares) for weights in candidates], axis=1)
            masses = np.exp(log_weights - log_weights.max(axis=2, keepdims=True))
            masses /= masses.sum(axis=2, keepdims=True)
            in_y = -0.5 * squared_distances(y[part], y)[:, :, None] / widths**2
            densities = masses @ np.exp(in_y - log_volume(widths, y.shape[1]))
            log_density = np.log(np.maximum(densities, SMALLEST_DENSITY)).reshape(len(part), -1)
            mixed = self._with_background(log_density, y[part])
            losses -= (counts[part] @ mixed).reshape(losses.shape) / counts[held].sum()
        search = GridSearch((self._scale, "width"), (grid, widths), losses)
        return search, candidates[search.place[0]], y


@dataclass(kw_only=True, eq=False, repr=False)
class NeighbourDensity(LocalEstimator):
    r"""Kernel density of the targets of neighbouring inputs (epsilon-KDE, as in Sugiyama et al. 2010).

    .. math:: p(y | x) = \frac{1}{|I_x|} \sum_{i \in I_x} N(y; y_i, \sigma^2 I), \quad
        I_x = \{i : |x - x_i| \le \epsilon\}.

    If no training input is that near, :math:`I_x` is the nearest one, or all that tie.

    Parameters
    ----------
    radius : float, sequence of float or None
        :math:`\epsilon`, in standard deviations of the inputs. Of several candidates, or of 24 shares
        of the largest distance for None, one is chosen by cross-validation of the log likelihood.
    width : float, sequence of float or None
        :math:`\sigma`, in standard deviations of the target; likewise, of 24 values from 0.01 to 2.
    background, background_width, folds, held_out_rows, random_state
        As in ``ConditionalKernelDensity``.

    Attributes
    ----------
    density_ : MixtureDensity
    selection_ : GridSearch
        The candidates and their held-out losses.
    n_features_in_ : int
    """

    _scale = "radius"

    radius: ArrayLike | None = None

    def _weights(self, rows: Sample, scale: float) -> AbstractWeights:
        return NeighbourWeights(rows.condition, scale, rows.weight)


@dataclass(kw_only=True, eq=False, repr=False)
class ConditionalKernelDensity(LocalEstimator):
    r"""Kernel conditional density of Nadaraya-Watson form, as in Hyndman, Bashtannyk and Grunwald (1996).

    .. math:: p(y | x) = \sum_i w_i(x) N(y; y_i, h_y^2 I), \quad
        w_i(x) \propto \exp(-|x - x_i|^2 / (2 h_x^2)).

    Far from all training inputs the nearest one dominates.

    Parameters
    ----------
    condition_width : float, sequence of float or None
        :math:`h_x`, in standard deviations of the inputs. Of several candidates, or of 24 shares
        of the largest distance for None, one is chosen by cross-validation of the log likelihood.
    width : float, sequence of float or None
        :math:`h_y`, in standard deviations of the target; likewise, of 24 values from 0.01 to 2.
    background : float
        Weight of a wide normal, a lower bound of the density far from all centres; 0 is the published form.
    background_width : float
        Standard deviation of that normal, in those of the target.
    folds, held_out_rows, random_state
        As in ``KernelDensity``.

    Attributes
    ----------
    density_ : MixtureDensity
    selection_ : GridSearch
        The candidates and their held-out losses.
    n_features_in_ : int
    """

    _scale = "condition_width"

    condition_width: ArrayLike | None = None

    def _weights(self, rows: Sample, scale: float) -> AbstractWeights:
        return KernelWeights(rows.condition, rows.counts, scale)
