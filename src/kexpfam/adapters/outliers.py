"""scikit-learn's interface of outlier detectors around a density."""

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, OutlierMixin, clone
from sklearn.utils.validation import check_is_fitted

from kexpfam.estimators.density import DensityEstimator
from kexpfam.estimators.messages import check_share

__all__ = ["OutlierDetector"]


class OutlierDetector(OutlierMixin, BaseEstimator):
    """Rows of low density are outliers.

    Parameters
    ----------
    estimator : DensityEstimator or None
        The density; None is ``KernelExpFamily()``.
    level : float
        The share of usual rows that are called outliers.

    Attributes
    ----------
    estimator_ : DensityEstimator
        The fitted density, with p-values by its ``novelty``.
    offset_ : float
        Rows of lower log density are outliers: the quantile of the held-out rows at ``level``.
    """

    def __init__(self, estimator: DensityEstimator | None = None, *, level: float = 0.05) -> None:
        self.estimator = estimator
        self.level = level

    def fit(self, X: Any, y: object = None, sample_weight: Any = None) -> Self:
        """Fit the density to the rows of X; y is ignored."""
        from kexpfam import KernelExpFamily

        check_share("level", self.level)
        estimator = KernelExpFamily() if self.estimator is None else clone(self.estimator)
        self.estimator_ = estimator.fit(X, sample_weight=sample_weight)
        self.offset_ = estimator._held_out_scores().quantile(self.level)
        self.n_features_in_ = estimator.n_features_in_
        return self

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log density of each row."""
        check_is_fitted(self, "estimator_")
        return self.estimator_.score_samples(X)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the log density less ``offset_``; negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """Return -1 for outliers and 1 for other rows."""
        return np.where(self.decision_function(X) < 0.0, -1, 1)
