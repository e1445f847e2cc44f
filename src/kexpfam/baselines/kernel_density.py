"""Kernel density estimation: scikit-learn's, with its bandwidth chosen by cross-validation, behind the library's face."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import equinox as eqx
import numpy as np
from jaxtyping import Array, Key
from scipy.spatial.distance import cdist
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.columns import check_columns
from kexpfam.data.sample import AnyArray
from kexpfam.data.scaling import Scaling
from kexpfam.estimators.base import DensityEstimator, Seed, key_from
from kexpfam.estimators.showing import remembered
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.calibration import Calibration, JointCalibration
from kexpfam.judge.conformal import Conformal
from kexpfam.judge.diagnosis import AbstractDiagnosis
from kexpfam.progress import Listener

if TYPE_CHECKING:
    import sklearn.neighbors

__all__ = ["GridSearch", "KernelDensity", "KernelMixture", "SearchDiagnosis", "deal", "held_out_losses"]

FOLDS = 5
# In standard deviations; neighbours differ by 10%, which moves a held-out log likelihood by less than its error.
BANDWIDTHS = np.geomspace(0.01, 3.0, 60)
# With more rows than this, a random part of them is held out: it says enough about a handful of numbers.
MOST_HELD_OUT = 2000
# Numbers in memory at a time.
CHUNK_NUMBERS = 4_000_000


class GridSearch(NamedTuple):
    """Every setting tried and its held-out loss: ``losses[i, j, ...]`` belongs to ``grids[0][i]``, ``grids[1][j]``, ..."""

    names: tuple[str, ...]
    grids: tuple[np.ndarray, ...]
    losses: np.ndarray

    @property
    def place(self) -> tuple[int, ...]:
        """Return where on the grids the loss is smallest."""
        return tuple(int(index) for index in np.unravel_index(np.argmin(self.losses), self.losses.shape))

    @property
    def chosen(self) -> dict[str, float]:
        """Return the setting of the smallest loss."""
        return {
            name: float(grid[i]) for name, grid, i in zip(self.names, self.grids, self.place, strict=True)
        }

    @property
    def on_edge(self) -> tuple[str, ...]:
        """Return the names of the settings that were chosen at an end of their grids."""
        named = zip(self.names, self.grids, self.place, strict=True)
        return tuple(name for name, grid, i in named if len(grid) > 1 and i in (0, len(grid) - 1))


@dataclass(frozen=True)
class SearchDiagnosis(AbstractDiagnosis):
    """What can be known about a fit whose only choice is a setting on a grid."""

    verdict: str
    selection: GridSearch
    calibration: Calibration | JointCalibration | None
    advice: tuple[str, ...]
    repair: Conformal | None = None

    @staticmethod
    def of(
        selection: GridSearch, calibration: Calibration | JointCalibration | None = None
    ) -> "SearchDiagnosis":
        """Return the diagnosis: good, unless the best setting may lie beyond the grid."""
        edge = selection.on_edge
        advice = (
            (f"{' and '.join(edge)} chosen at an end of the grid: a better value may lie beyond it.",)
            if edge
            else ()
        )
        return SearchDiagnosis("fair" if edge else "good", selection, calibration, advice)

    def lines(self) -> list[tuple[str, str]]:
        chosen = ", ".join(f"{name} {value:.4g}" for name, value in self.selection.chosen.items())
        tried = f"{self.selection.losses.min():.4f} nats, best of {self.selection.losses.size}"
        calibrated = self.calibration.lines() if self.calibration is not None else []
        return [("chosen", chosen), ("held-out loss", tried), *calibrated]


class KernelMixture(eqx.Module):
    """``p(x) = sum_i w_i N(x; x_i, bandwidth^2 I) / sum_i w_i`` over the standardised training points."""

    points: np.ndarray
    bandwidth: float
    scaling: Scaling
    weight: np.ndarray | None = None

    def log_density(self, targets: np.ndarray, X: None = None) -> np.ndarray:
        """Return the log density of each row, in the data's own units."""
        return self._kernels().score_samples(self.scaling.to_model(targets)) + self.scaling.log_jacobian(
            targets
        )

    def sample(self, count: int, X: None = None, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws."""
        return self.scaling.to_data(self._kernels().sample(count, random_state=seed_from(key)))

    def _kernels(self) -> "sklearn.neighbors.KernelDensity":
        import sklearn.neighbors  # slow to import

        return sklearn.neighbors.KernelDensity(bandwidth=self.bandwidth).fit(
            self.points, sample_weight=self.weight
        )


class KernelDensity(DensityEstimator):
    r"""Density :math:`p(x) = \frac1n \sum_i N(x; x_i, h^2 I)` of the standardised data: Gaussian kernel density estimation.

    Parameters
    ----------
    bandwidth : float or None
        h, in standard deviations of each column. None chooses it by 5-fold cross-validation of the log likelihood.
    random_state : int, RandomState or None
        Deals the rows into folds.

    Attributes
    ----------
    density_ : KernelMixture
    selection_ : GridSearch
        The bandwidths tried and their held-out losses.
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

    def __init__(self, *, bandwidth: float | None = None, random_state: Seed = None) -> None:
        self.bandwidth = bandwidth
        self.random_state = random_state

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        bandwidths = grid_of("bandwidth", self.bandwidth, BANDWIDTHS)
        check_columns(X, self._names)
        rng = np.random.default_rng(seed_from(key_from(self.random_state)))
        scaling = Scaling.plain(X, weight=self._weight)
        self._training = points = scaling.to_model(X)
        losses = held_out_losses(points, bandwidths, rng, self._weight)
        self.selection_ = GridSearch(("bandwidth",), (bandwidths,), losses)
        self.density_ = KernelMixture(points, self.selection_.chosen["bandwidth"], scaling, self._weight)
        return self

    @remembered
    def diagnose(self, random_state: Seed = 0) -> SearchDiagnosis:
        """Return how the bandwidth was chosen; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        return SearchDiagnosis.of(self.selection_)


def held_out_losses(
    points: np.ndarray, bandwidths: np.ndarray, rng: np.random.Generator, weight: np.ndarray | None = None
) -> np.ndarray:
    """Return minus the mean log density of held-out points under the other folds' points, at each bandwidth."""
    fold, total = deal(len(points), rng), np.zeros(len(bandwidths))
    held = rng.permutation(len(points))[:MOST_HELD_OUT]
    counts = np.ones(len(points)) if weight is None else weight
    for rows in chunks(held, len(points)):
        other = fold[rows, None] != fold
        own, others = counts[rows], other @ counts
        squares = np.where(other, cdist(points[rows], points, "sqeuclidean"), np.inf)
        nearest = squares.min(axis=1)
        beyond = squares - nearest[:, None]
        for i, bandwidth in enumerate(bandwidths):
            log_sums = np.log(np.exp(beyond * (-0.5 / bandwidth**2)) @ counts) - 0.5 * nearest / bandwidth**2
            total[i] += own @ (log_sums - np.log(others)) - own.sum() * log_volume(bandwidth, points.shape[1])
    return -total / counts[held].sum()


def log_volume(width: float | np.ndarray, dims: int) -> AnyArray:
    """Return the log of the integral of ``exp(-|x|^2 / (2 width^2))``."""
    return dims * (np.log(width) + 0.5 * np.log(2.0 * np.pi))


def deal(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the fold of each row: folds of nearly equal size, in random order."""
    return rng.permutation(np.arange(count) % FOLDS)


def chunks(rows: np.ndarray, numbers_per_row: int) -> list[np.ndarray]:
    """Return the rows in parts that need a bounded amount of memory."""
    size = max(1, CHUNK_NUMBERS // max(numbers_per_row, 1))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def grid_of(name: str, value: Any, grid: np.ndarray) -> np.ndarray:
    """Return the grid, or the one value that the user has set, once it is known to make sense."""
    if value is None:
        return grid
    if np.ndim(value) != 0 or not 0.0 < value < np.inf:
        raise ValueError(f"{name} must be a positive finite number or None, got {value!r}.")
    return np.array([float(value)])
