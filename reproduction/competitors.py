"""Simple competitors made from scikit-learn.

For p(y | x) a linear model, and a forest with a density of its residuals; for p(x) a mixture of normals.
"""

import numpy as np
import scipy.stats
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV, ShuffleSplit, cross_val_predict
from sklearn.neighbors import KernelDensity

__all__ = ["BoostedNormal", "ForestWithResiduals", "HeldOutMixture", "LinearGaussian"]

TREES, SMALLEST_LEAF = 300, 3
BANDWIDTHS = np.geomspace(0.01, 1.0, 20)
MIXTURES = {"n_components": [1, 2, 4, 8, 16, 32, 64], "covariance_type": ["full", "diag"]}
MOST_STEPS, HELD_OUT_SHARE = 300, 0.2


class LinearGaussian:
    """A linear mean and normal errors of one variance."""

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


class BoostedNormal:
    """The mean of boosted trees with normal errors, whose variance is that of cross-validated errors."""

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> "BoostedNormal":
        """Fit the trees, and the variance of errors in five folds."""
        trees = HistGradientBoostingRegressor(random_state=self.random_state)
        self.scale_ = float(np.std(y - cross_val_predict(trees, X, y)))
        self.mean_ = trees.fit(X, y)
        return self

    def score_samples(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``log p(y | x)`` of each row."""
        return scipy.stats.norm.logpdf(y, self.mean_.predict(X), self.scale_)

    def cdf(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the distribution function of each row."""
        return scipy.stats.norm.cdf(y, self.mean_.predict(X), self.scale_)

    def quantile(self, X: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """Return quantiles, (rows, levels)."""
        return scipy.stats.norm.ppf(np.asarray(levels), self.mean_.predict(X)[:, None], self.scale_)


class ForestWithResiduals:
    """The mean of a random forest with a kernel density of its out-of-bag residuals."""

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> "ForestWithResiduals":
        """Fit the forest, and choose the bandwidth of its residuals by cross-validation."""
        settings = {"min_samples_leaf": SMALLEST_LEAF, "oob_score": True, "random_state": self.random_state}
        forest = RandomForestRegressor(TREES, **settings)
        self.mean_ = forest.fit(X, y)
        residuals = (y - forest.oob_prediction_)[:, None]
        self.residuals_ = (
            GridSearchCV(KernelDensity(), {"bandwidth": BANDWIDTHS}, cv=5).fit(residuals).best_estimator_
        )
        return self

    def score_samples(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``log p(y | x)`` of each row."""
        return self.residuals_.score_samples((y - self.mean_.predict(X))[:, None])


class HeldOutMixture:
    """A mixture of up to 64 normals by scikit-learn; size and covariance type by held-out likelihood."""

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state

    def fit(self, X: np.ndarray) -> "HeldOutMixture":
        """Choose the settings on a held-out fifth of the rows, and fit to all rows."""
        mixture = GaussianMixture(max_iter=MOST_STEPS, random_state=self.random_state)
        held_out = ShuffleSplit(1, test_size=HELD_OUT_SHARE, random_state=self.random_state)
        self.mixture_ = GridSearchCV(mixture, MIXTURES, cv=held_out).fit(X).best_estimator_
        return self

    def score_samples(self, X: np.ndarray) -> np.ndarray:
        """Return the log density of each row."""
        return self.mixture_.score_samples(X)

    def sample(self, n_samples: int = 1, random_state: int | None = None) -> np.ndarray:
        """Return draws."""
        return self.mixture_.set_params(random_state=random_state).sample(n_samples)[0]
