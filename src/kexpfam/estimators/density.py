"""The face of a density ``p(x)``."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike
from sklearn.base import DensityMixin
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.sample import AnyArray
from kexpfam.data.tables import numbered
from kexpfam.data.weights import counted_mean
from kexpfam.estimators.base import Estimator, Seed, key_from, remembered
from kexpfam.estimators.codec import FEWEST_ROWS
from kexpfam.judge.diagnosis import Diagnosis, Judgement
from kexpfam.judge.pit import pit_measurements

__all__ = ["DensityEstimator"]


class DensityEstimator(DensityMixin, Estimator):
    """Base class of estimators of ``p(x)``."""

    conditional: ClassVar[bool] = False
    _fit: Callable[..., Any]  # to rows that were checked; not needed with a ``fit`` of its own

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the density to the rows of X; y is ignored.

        A row of weight 2 counts as two equal rows, a row of weight 0 is left out; see ``docs/weights.md``.
        """
        with self._fitting() as listener:
            self._note_names(X)
            points = self._read(X, reset=True)
            (points,) = self._counted(sample_weight, points)
            self._fit(points, listener)
        return self

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Return the normalised log density of each row, in the data's own units; -inf outside a bounded
        support."""
        points = self._checked_points(X)
        return self._log_density(self.density_, points)

    def log_prob(self, x: Float[AnyArray, "*d"]) -> Float[Array, ""]:
        """Return ``log p(x)`` at one point as a pure JAX function, to be jitted, differentiated and vmapped.

        It equals ``score_samples`` of that point. It is computed in float64 and returned in the precision of
        x."""
        check_is_fitted(self, "density_")
        return self.density_.log_prob(x)

    def score(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> float:
        """Return the (weighted) mean log density of the rows."""
        return counted_mean(self.score_samples(X), sample_weight)

    def sample(
        self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0, exact: bool = False
    ) -> Any:
        """Return draws of shape (n_samples, n_features), in a frame if the model was fitted to one (see
        ``set_output``).

        ``refine=0`` draws from the fitted sampler. ``refine=k`` resamples by importance weight and moves each
        draw by k steps of HMC, which leaves the density invariant.

        The sampler of most models is that of the density. Approximate are the transports of ``solver="dde"``
        and of the paper's solvers, and the mixture of a kernel model of four or more columns. By how much is
        ``diagnose().sampler_kl``, the divergence of sampler and density in nats; the page *Choosing settings*
        has it for every solver on the two moons. ``exact=True`` draws from the cells of a grid, or by HMC
        where there is none."""
        check_is_fitted(self, "density_")
        draws = self._decoded(self._draws(self.density_, n_samples, random_state, refine, exact=exact))
        return self._codec.rows(draws, self._output, self._names or numbered(draws.shape[1]))

    @property
    def training_data_(self) -> np.ndarray:
        """The rows the model was fitted to, in the data's own units."""
        check_is_fitted(self, "density_")
        return self._decoded(self.density_.scaling.to_data(self._training))

    def calibrate(self, X: ArrayLike | None) -> Self:
        """Compare rows in ``novelty`` with these held-out rows; return the estimator.

        The p-values are then valid whatever the density. ``calibrate(None)`` and a new fit undo it."""
        points = None if X is None else self._checked_points(X)
        if points is None:
            self._calibrated = None
        elif len(points) < FEWEST_ROWS:
            raise ValueError(f"calibrate needs at least {FEWEST_ROWS} rows, got {len(points)}.")
        else:
            self._calibrate_scores(points)
        return self

    @remembered
    def diagnose(
        self, X: ArrayLike | None = None, random_state: Seed = 0, *, settings: Judgement | None = None
    ) -> Diagnosis:
        """Return measurements of the quality of the fit; with held-out rows X, they are compared with draws.

        The measurements print as a short report with a verdict."""
        check_is_fitted(self, "density_")
        key, settings, calibration = key_from(random_state), Judgement.of(settings), []
        if X is not None:
            points = self._agreeing_points(X)
            own = self._log_density(self.density_, points)
            calibration = pit_measurements(
                self.density_, None, points, settings=settings, scores=own, key=key
            )
        return self._diagnosed(calibration, settings, key)

    def _training_columns(self) -> list[np.ndarray]:
        return [self.density_.scaling.to_data(self._training)]

    def _scored_rows(self, X: Any, y: Any) -> tuple[np.ndarray, ...]:
        return (self._checked_points(X),)

    def _checked_points(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self, "density_")
        return self._read(X)

    def _agreeing_points(self, X: ArrayLike) -> np.ndarray:
        """Return the cells of X as numbers; raise if carried columns disagree with their combinations."""
        points = self._checked_points(X)
        if np.any(off := np.isinf(points).any(axis=1)):
            raise ValueError(f"row {int(np.argmax(off))} disagrees with the combinations of carried_.")
        return points
