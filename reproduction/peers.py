"""Other packages with the interface of our estimators; the extra ``peers`` installs them.

Each package is imported when its estimator is made, so that no fit is charged for it.
"""

import importlib
import json
import os
import shutil
import subprocess
import tempfile
import weakref
from importlib.metadata import version
from pathlib import Path
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
    "TreeffuserProcess",
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
# The Python that has treeffuser, its draws per row, of which a thousand take seconds, the most held-out rows,
# and the widths of kernels that are tried, as multiples of Silverman's rule for the draws of a row.
TREEFFUSER_VARIABLE, TREEFFUSER_DRAWS, TREEFFUSER_HELD = "KEXPFAM_TREEFFUSER_PYTHON", 50, 300
MULTIPLES = np.geomspace(0.5, 8.0, 17)


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


def _log_mixture(y: np.ndarray, centres: np.ndarray, width: float | np.ndarray) -> np.ndarray:
    """Return the log density of each target under normals of equal weight at its row of centres."""
    return logsumexp(scipy.stats.norm.logpdf(y[:, None], centres, width), axis=1) - np.log(centres.shape[1])


class TreeffuserProcess:
    """treeffuser with its defaults, a diffusion model of y with boosted trees, in a process of its own.

    It excludes our versions of other packages, so an environment variable names a Python that has it. It has
    draws and no density; its documentation makes one of them by Gaussian kernels. So it is done here: the
    kernels' width of a row is a multiple of Silverman's rule for its draws. A part of the rows, held out of a
    first fit, chooses the multiple; then all rows are fitted.
    """

    RUNNER = Path(__file__).with_name("treeffuser_runner.py")

    def __init__(self, random_state: int | None = None):
        self.random_state = random_state
        self.python = os.environ.get(TREEFFUSER_VARIABLE, "")
        if not self.python:
            raise MissingPeerError(
                f"treeffuser needs a Python of its own: name one that has it by {TREEFFUSER_VARIABLE}."
            )

    def fit(self, X: np.ndarray, y: np.ndarray) -> "TreeffuserProcess":
        """Fit twice: to choose the width, and to all rows."""
        self.folder_ = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.folder_, ignore_errors=True)
        size = min(TREEFFUSER_HELD, int(HELD_OUT_SHARE * len(X)))
        kept, held, y_kept, y_held = train_test_split(X, y, test_size=size, random_state=self.random_state)
        first = self._fitted(kept, y_kept)
        draws = self._draws(held)
        scores = [_log_mixture(y_held, draws, each * _silverman(draws)).mean() for each in MULTIPLES]
        self.multiple_ = float(MULTIPLES[np.argmax(scores)])
        facts = self._fitted(X, y)
        # Of the fits alone, in the process of treeffuser.
        self.facts_ = facts | {"seconds": first["seconds"] + facts["seconds"], "multiple": self.multiple_}
        return self

    def score_samples(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``log p(y | x)`` of each row."""
        draws = self._draws(X)
        return _log_mixture(y, draws, self.multiple_ * _silverman(draws))

    def quantile(self, X: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """Return the quantiles of the draws at these levels, (rows, levels)."""
        return np.quantile(self._draws(X), levels, axis=1).T

    def _fitted(self, X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
        """Return the cost of a fit in the other process, whose model stays in the folder."""
        self.drawn_: tuple[np.ndarray, np.ndarray] | None = None
        self._run("fit", X=X, y=y)
        return json.loads((self.folder_ / "facts.json").read_text())

    def _draws(self, X: np.ndarray) -> np.ndarray:
        """Return draws of every row, (rows, draws); the same for the same rows, which are kept."""
        if self.drawn_ is None or not np.array_equal(self.drawn_[0], X):
            self._run("sample", X=X, count=TREEFFUSER_DRAWS)
            self.drawn_ = X, np.load(self.folder_ / "draws.npy")
        return self.drawn_[1]

    def _run(self, verb: str, **arrays: Any) -> None:
        np.savez(self.folder_ / f"{verb}.npz", seed=self.random_state or 0, **arrays)
        # The Python path is ours and would hide the packages of the other Python.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([self.python, self.RUNNER, verb, self.folder_], check=True, env=variables)


def _silverman(draws: np.ndarray) -> np.ndarray:
    """Return the width of kernels for each row of draws, (rows, 1), by Silverman's rule."""
    low, high = np.quantile(draws, [0.25, 0.75], axis=1)
    spread = np.minimum(draws.std(axis=1), (high - low) / 1.34)
    return (0.9 * spread * draws.shape[1] ** -0.2)[:, None]


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
