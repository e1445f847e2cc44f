"""A probabilistic regressor for skpro, and its predictive distribution."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import clone
from skpro.distributions.base import BaseDistribution
from skpro.regression.base import BaseProbaRegressor

from kexpfam.data.sample import row_slices
from kexpfam.estimators.kernel_exp_family import ConditionalKernelExpFamily
from kexpfam.fit.select import Kernel
from kexpfam.model.distributions import ROWS, AbstractDensity

__all__ = ["KernelDistribution", "KernelProbaRegressor"]


class KernelDistribution(BaseDistribution):
    """``p(y | x)`` of a fitted density, one row per condition.

    Log densities, distribution functions and energies are exact.

    Parameters
    ----------
    density : density of one target, of a fitted ConditionalKernelExpFamily
    X : 2D array, one condition per row
    index, columns : pd.Index, optional

    Examples
    --------
    >>> from kexpfam.adapters.skpro import KernelDistribution
    >>> law = KernelDistribution(**KernelDistribution.get_test_params()[0])
    >>> law.shape
    (3, 1)
    """

    _tags = {
        "capabilities:approx": ["pdfnorm"],
        "capabilities:exact": ["mean", "var", "pdf", "log_pdf", "cdf", "ppf", "energy"],
        "distr:measuretype": "continuous",
        "distr:paramtype": "nonparametric",
        "broadcast_init": "off",
    }
    index: pd.Index
    columns: pd.Index

    def __init__(
        self, density: AbstractDensity, X: np.ndarray, index: Any = None, columns: Any = None
    ) -> None:
        self.density = density
        self.X = X
        self._rows = np.asarray(X, float).reshape(-1, np.shape(X)[-1])
        super().__init__(index=index, columns=columns)

    def _init_shape_bc(self, index: Any = None, columns: Any = None) -> None:
        if index is None and columns is None and len(self._rows) == 1:
            self._shape: tuple[int, ...] = ()
            return
        self.index = pd.RangeIndex(len(self._rows)) if index is None else self.index
        self.columns = pd.RangeIndex(1) if columns is None else self.columns
        self._shape = (len(self._rows), 1)

    def _of_rows(self, function: Callable, *values: Any) -> Any:
        """Return ``function(distributions, *values)`` of all rows, in the shape of the distribution."""
        columns = [np.reshape(np.asarray(value, float), (len(self._rows), 1)) for value in values]
        pieces = []
        for rows in row_slices(len(self._rows), ROWS):
            part = self.density.distributions(self._rows[rows])
            pieces.append(np.reshape(function(part, *(column[rows] for column in columns)), -1))
        return np.concatenate(pieces).reshape(self.shape)[()]

    def _log_pdf(self, x: Any) -> Any:
        points = np.reshape(np.asarray(x, float), (-1, 1))
        return self.density.log_density(points, self._rows).reshape(self.shape)[()]

    def _pdf(self, x: Any) -> Any:
        return np.exp(self._log_pdf(x))

    def _cdf(self, x: Any) -> Any:
        return self._of_rows(lambda part, values: part.cdf(values), x)

    def _ppf(self, p: Any) -> Any:
        return self._of_rows(lambda part, levels: part.quantile(levels), p)

    def _mean(self) -> Any:
        return self._of_rows(lambda part: part.mean())

    def _var(self) -> Any:
        return self._of_rows(lambda part: part.variance())

    def _energy_self(self) -> Any:
        return self._of_rows(lambda part: part.mean_difference())

    def _energy_x(self, x: Any) -> Any:
        # The continuous ranked probability score is E|Y - x| - E|Y - Y'| / 2.
        return self._of_rows(lambda part, values: part.crps(values[:, 0]) + 0.5 * part.mean_difference(), x)

    def _iloc(self, rowidx: Any = None, colidx: Any = None) -> "KernelDistribution":
        if rowidx is not None and np.ndim(rowidx) == 0 and colidx is not None and np.ndim(colidx) == 0:
            return self._iat(rowidx, colidx)
        chosen = _positions(rowidx, len(self._rows))
        columns = self.columns.take(_positions(colidx, len(self.columns)))
        return KernelDistribution(self.density, self._rows[chosen], self.index.take(chosen), columns)

    def _iat(self, rowidx: Any = None, colidx: Any = None) -> "KernelDistribution":
        if rowidx is None or colidx is None:
            raise ValueError("iat requires both row and column index")
        return KernelDistribution(self.density, self._rows[[rowidx]])

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Return the arguments for skpro's own checks."""
        X, density = _example()
        return [
            {"density": density, "X": X[:3], "columns": pd.Index(["y"])},
            {"density": density, "X": X[:1]},
        ]


class KernelProbaRegressor(BaseProbaRegressor):
    """``ConditionalKernelExpFamily`` as a probabilistic regressor of skpro.

    Parameters
    ----------
    estimator : ConditionalKernelExpFamily, optional
        The estimator with its settings, cloned for each fit; by default ``ConditionalKernelExpFamily()``.

    Attributes
    ----------
    estimator_ : ConditionalKernelExpFamily
        The fitted estimator.

    Examples
    --------
    >>> from kexpfam.adapters.skpro import KernelProbaRegressor
    >>> regressor = KernelProbaRegressor()
    >>> law = regressor.fit(X, y).predict_proba(X_new)  # doctest: +SKIP
    """

    _tags = {
        "authors": ["kexpfam developers"],
        "python_dependencies": ["kexpfam"],
        "capability:multioutput": False,
        "capability:missing": False,
    }

    def __init__(self, estimator: ConditionalKernelExpFamily | None = None) -> None:
        self.estimator = estimator
        super().__init__()

    def _fit(self, X: pd.DataFrame, y: pd.DataFrame, C: Any = None) -> Self:
        self._targets = y.columns
        estimator = ConditionalKernelExpFamily() if self.estimator is None else clone(self.estimator)
        self.estimator_ = estimator.fit(_plain(X), y.to_numpy(float)[:, 0])
        return self

    def _predict(self, X: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame(self.estimator_.predict(_plain(X)), index=X.index, columns=self._targets)

    def _predict_proba(self, X: pd.DataFrame) -> KernelDistribution:
        return KernelDistribution(self.estimator_.density_, _plain(X), index=X.index, columns=self._targets)

    def _predict_quantiles(self, X: pd.DataFrame, alpha: list[float]) -> pd.DataFrame:
        columns = pd.MultiIndex.from_product([self._targets, alpha])
        return pd.DataFrame(self.estimator_.quantile(_plain(X), alpha), index=X.index, columns=columns)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Return the arguments for skpro's own checks."""
        return [{"estimator": _quick()}, {"estimator": _quick(kernel="matern52")}]


def _plain(X: pd.DataFrame) -> np.ndarray:
    return X.to_numpy(float)


def _positions(index: Any, count: int) -> np.ndarray:
    """Return the positions that a pandas-style positional index selects."""
    return np.atleast_1d(np.arange(count)[slice(None) if index is None else index])


@lru_cache
def _example() -> tuple[np.ndarray, AbstractDensity]:
    """Return conditions and a fitted density for skpro's own checks."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 1))
    return X, _quick().fit(X, X[:, 0] + 0.3 * rng.normal(size=40)).density_


def _quick(**settings: Any) -> ConditionalKernelExpFamily:
    """Return an estimator with all hyperparameters fixed, so that fitting is fast."""
    scales: dict[str, Any] = {"lengthscale": 1.0, "condition_lengthscale": 2.0, "base_width": 1.0}
    kernel = Kernel(**scales, rkhs_penalty=0.01, power=False)
    return ConditionalKernelExpFamily(model="kernel", kernel=kernel, random_state=0, **settings)
