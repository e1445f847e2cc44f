"""The density of one column as a SciPy distribution."""

from typing import Any

import numpy as np
from scipy.stats import rv_continuous

from kexpfam.adapters import density_of
from kexpfam.estimators.base import key_from

__all__ = ["KernelDistribution"]


class KernelDistribution(rv_continuous):
    """The density of a single column, of a model or of its ``given(x)``, as a continuous SciPy distribution.

    ``logpdf`` and ``rvs`` are the model's own; ``cdf``, ``ppf``, mean and variance are computed on its cells.

    >>> from kexpfam.adapters.scipy import KernelDistribution
    >>> KernelDistribution(model.given(x)).interval(0.9)  # doctest: +SKIP
    """

    def __init__(self, model: Any) -> None:
        density = density_of(model)
        if density.conditional:
            raise ValueError("a SciPy distribution has no condition: use model.given(x).")
        support = density.support()
        low, high = (-np.inf, np.inf) if support is None else support[:, 0]
        # SciPy copies a distribution by calling its constructor with the same arguments.
        self.model = model
        self._density = density
        self._law = density.distributions()
        super().__init__(a=low, b=high, name="kexpfam", seed=None)

    def _updated_ctor_param(self) -> dict[str, Any]:
        return {"model": self.model}

    def _logpdf(self, x: np.ndarray, *shapes: Any) -> np.ndarray:
        points = np.asarray(x, float)
        return self._density.log_density(points.reshape(-1, 1)).reshape(points.shape)

    def _pdf(self, x: np.ndarray, *shapes: Any) -> np.ndarray:
        return np.exp(self._logpdf(x))

    def _cdf(self, x: np.ndarray, *shapes: Any) -> np.ndarray:
        return self._law.cdf(np.reshape(x, (1, -1))).reshape(np.shape(x))

    def _ppf(self, q: np.ndarray, *shapes: Any) -> np.ndarray:
        return self._law.quantile(np.reshape(q, (1, -1))).reshape(np.shape(q))

    def _rvs(self, *shapes: Any, size: Any = None, random_state: Any = None) -> np.ndarray:
        size = () if size is None else size
        seed = random_state.integers(2**31) if isinstance(random_state, np.random.Generator) else random_state
        return self._density.sample(int(np.prod(size)), key=key_from(seed)).reshape(size)

    def _stats(self, *shapes: Any, **moments: Any) -> tuple[float, float, None, None]:
        return float(self._law.mean()[0]), float(self._law.variance()[0]), None, None
