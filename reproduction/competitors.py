"""What a user would try first for p(y | x): a linear model, and a forest with a density of its residuals."""

import numpy as np
import scipy.stats
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KernelDensity

__all__ = ["ForestWithResiduals", "LinearGaussian"]

TREES, SMALLEST_LEAF = 300, 3
BANDWIDTHS = np.geomspace(0.01, 1.0, 20)


class LinearGaussian:
    """A linear mean and normal errors of one variance; nothing in it is random."""

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> "LinearGaussian":
        """Fit the mean by least squares, the variance by the residuals."""
        self.mean_ = LinearRegression().fit(X, y)
        self.scale_ = float((y - self.mean_.predict(X)).std())
        return self

    def score_samples(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``log p(y | x)`` of each row."""
        return scipy.stats.norm.logpdf(y, self.mean_.predict(X), self.scale_)


class ForestWithResiduals:
    """The mean of a random forest, and a kernel density of the residuals of rows that its trees had not seen."""

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> "ForestWithResiduals":
        """Fit the forest, and choose the bandwidth of its residuals by cross-validation."""
        settings = {"min_samples_leaf": SMALLEST_LEAF, "oob_score": True, "random_state": self.random_state}
        forest = RandomForestRegressor(TREES, **settings)
        self.mean_ = forest.fit(X, y)
        residuals = (y - forest.oob_prediction_)[:, None]
        self.residuals_ = GridSearchCV(KernelDensity(), {"bandwidth": BANDWIDTHS}, cv=5).fit(residuals).best_estimator_
        return self

    def score_samples(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``log p(y | x)`` of each row."""
        return self.residuals_.score_samples((y - self.mean_.predict(X))[:, None])
