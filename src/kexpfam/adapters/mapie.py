"""Quantiles for MAPIE: conformalized quantile regression around a fitted conditional density."""

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin

from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.estimators.messages import check_share

__all__ = ["QuantileRegressor", "quantile_regressors"]


class QuantileRegressor(RegressorMixin, BaseEstimator):
    """One conditional quantile of a fitted model, as a fitted regressor."""

    def __init__(self, model: ConditionalEstimator, level: float = 0.5) -> None:
        self.model = model
        self.level = level

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Return the regressor unchanged: the model is fitted already."""
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    @property
    def n_features_in_(self) -> int:
        """The number of columns of X."""
        return self.model.n_features_in_

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the quantile of y under each row of X."""
        return self.model.quantile(X, self.level)


def quantile_regressors(
    model: ConditionalEstimator, confidence_level: float = 0.9
) -> list[QuantileRegressor]:
    """Return regressors of the lower quantile, the upper quantile and the median.

    They are the estimators of MAPIE's ``ConformalizedQuantileRegressor(prefit=True)``.
    """
    check_share("confidence_level", confidence_level)
    tail = 0.5 * (1.0 - confidence_level)
    return [QuantileRegressor(model, level) for level in (tail, 1.0 - tail, 0.5)]
