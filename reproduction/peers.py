"""Other packages with the interface of our estimators; the extra ``peers`` installs them.

Each package is imported when its estimator is made, so that no fit is charged for it.
"""

import importlib
from importlib.metadata import version
from typing import Any

import numpy as np
import scipy.stats
from scipy.special import logsumexp
from sklearn.model_selection import train_test_split

from reproduction.records import Unavailable

__all__ = [
    "LEVELS",
    "PACKAGES",
    "KernelVine",
    "MissingPeerError",
    "MixedKernelDensity",
    "NGBoostNormal",
    "SmoothedQuantileForest",
    "version_of",
]

# The package that a method of the specs requires.
PACKAGES = {
    "ngboost": "ngboost",
    "quantile forest": "quantile-forest",
    "vine": "pyvinecopulib",
    "spline flow": "flowjax",
    "sklearn mixture": "scikit-learn",
    "mixed kde": "statsmodels",
}
HELD_OUT_SHARE, PATIENCE = 0.1, 50
# The levels whose quantiles stand for a forest's distribution, and the widths tried, in standard deviations
# of the target.
LEVELS = (np.arange(50) + 0.5) / 50
WIDTHS = np.geomspace(0.002, 1.0, 28)


class MissingPeerError(Unavailable):
    """A package of the extra ``peers`` is not installed."""


def version_of(method: str) -> str:
    """Return name and version of the package of a method; empty for methods of this library."""
    package = PACKAGES.get(method)
    return f"{package} {version(package)}" if package else ""


def imported(module: str) -> Any:
    """Return a module of the extra ``peers``."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPeerError(f'{module} is not installed: pip install "kexpfam[peers]".') from None


class NGBoostNormal:
    """NGBoost with its defaults: a normal law of y whose mean and log scale are boosted trees of x.

    A tenth of the rows decides after how many of the 500 rounds to stop; then all rows are fitted with that
    many.
    """

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state
        self.package = imported("ngboost")

    def fit(self, X: np.ndarray, y: np.ndarray) -> "NGBoostNormal":
        """Fit twice: to find the number of rounds, and with it."""
        kept, held, y_kept, y_held = train_test_split(
            X, y, test_size=HELD_OUT_SHARE, random_state=self.random_state
        )
        first = self._boosted().fit(kept, y_kept, held, y_held, early_stopping_rounds=PATIENCE)
        # The best round is counted from 0.
        self.model_ = self._boosted(n_estimators=first.best_val_loss_itr + 1).fit(X, y)
        return self

    def score_samples(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``log p(y | x)`` of each row."""
        return self._law(X).logpdf(y)

    def cdf(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``P(Y <= y | x)`` of each row."""
        return self._law(X).cdf(y)

    def quantile(self, X: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """Return the quantiles at these levels, (rows, levels)."""
        return np.stack([self._law(X).ppf(level) for level in levels], axis=1)

    def _boosted(self, **settings: Any) -> Any:
        return self.package.NGBRegressor(verbose=False, random_state=self.random_state, **settings)

    def _law(self, X: np.ndarray) -> Any:
        found = self.model_.pred_dist(X).params
        return scipy.stats.norm(found["loc"], found["scale"])


class SmoothedQuantileForest:
    """A quantile regression forest, and a density made of it: normals of one width at 50 of its quantiles.

    The forest has its defaults. It has no density of its own; the width is the one under which the training
    targets are most likely, each by the quantiles of the trees that have not seen it.
    """

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state
        self.package = imported("quantile_forest")

    def fit(self, X: np.ndarray, y: np.ndarray) -> "SmoothedQuantileForest":
        """Grow the forest, and choose the width out of bag."""
        self.forest_ = self.package.RandomForestQuantileRegressor(random_state=self.random_state).fit(X, y)
        unseen = self.forest_.predict(X, quantiles=list(LEVELS), oob_score=True)
        fine = np.isfinite(unseen).all(1)  # a row that every tree has seen has no such quantiles
        widths = y.std() * WIDTHS
        self.width_ = widths[
            np.argmax([_log_mixture(y[fine], unseen[fine], width).mean() for width in widths])
        ]
        return self

    def score_samples(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``log p(y | x)`` of each row."""
        return _log_mixture(y, self._quantiles(X), self.width_)

    def cdf(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``P(Y <= y | x)`` of each row."""
        return scipy.stats.norm.cdf(y[:, None], self._quantiles(X), self.width_).mean(1)

    def quantile(self, X: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """Return the forest's own quantiles at these levels, (rows, levels)."""
        return self.forest_.predict(X, quantiles=list(levels))

    def _quantiles(self, X: np.ndarray) -> np.ndarray:
        return self.quantile(X, LEVELS)


def _log_mixture(y: np.ndarray, centres: np.ndarray, width: float) -> np.ndarray:
    """Return the log density of each target under normals of equal weight at its row of centres."""
    return logsumexp(scipy.stats.norm.logpdf(y[:, None], centres, width), axis=1) - np.log(centres.shape[1])


class KernelVine:
    """A vine copula of pyvinecopulib: kernel estimates of margins and pair copulas, continuous columns."""

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state
        self.package = imported("pyvinecopulib")

    def fit(self, X: np.ndarray) -> "KernelVine":
        """Fit margins, structure and pair copulas, deterministically."""
        controls = self.package.FitControlsVinecop(family_set=[self.package.BicopFamily.tll])
        self.law_ = self.package.Vinedist.from_data(X, controls)
        return self

    def score_samples(self, X: np.ndarray) -> np.ndarray:
        """Return the log density of each row."""
        return np.asarray(self.law_.logpdf(X))

    def sample(self, n_samples: int = 1, random_state: int | None = None) -> np.ndarray:
        """Return draws."""
        return np.asarray(self.law_.sample(n_samples, seeds=[] if random_state is None else [random_state]))


class MixedKernelDensity:
    """The kernel density of statsmodels for continuous, ordered and unordered columns, widths by likelihood.

    With more than so many rows the widths are found on parts of that size. An angle is a continuous column
    here, and a zero among amounts is one value among others.
    """

    PART_ROWS = 500

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state
        self.package = imported("statsmodels.nonparametric.kernel_density")

    def fit_kinds(self, X: np.ndarray, kinds: dict[int, str]) -> "MixedKernelDensity":
        """Fit the widths to columns of these kinds."""
        types = "".join({"count": "o", "category": "u"}.get(kinds.get(j, ""), "c") for j in range(X.shape[1]))
        many = (
            {"efficient": True, "n_sub": self.PART_ROWS, "n_res": 3, "randomize": True}
            if len(X) > self.PART_ROWS
            else {}
        )
        settings = self.package.EstimatorSettings(**many)
        np.random.seed(self.random_state)  # noqa: NPY002, the package has no other way
        self.law_ = self.package.KDEMultivariate(data=X, var_type=types, bw="cv_ml", defaults=settings)
        return self

    def score_samples(self, X: np.ndarray) -> np.ndarray:
        """Return the log density of each row."""
        with np.errstate(divide="ignore"):
            return np.log(self.law_.pdf(X))
