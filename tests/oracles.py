"""Closed forms and slow, obvious twins that the tests hold the library against."""

import contextlib
import itertools
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kexpfam import Kernel
from kexpfam.data.sample import Sample
from kexpfam.model.density import Tilt
from kexpfam.model.kernels import Linear
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace

LOG_TWO_PI = np.log(2.0 * np.pi)


def normal(mean: float = 0.0) -> Gaussian:
    """Return N(mean, 1) on the line."""
    return Gaussian(jnp.array([mean]), jnp.eye(1))


def linear_space() -> FeatureSpace:
    """Return the space of ``f(x) = slope * x`` on the line: one feature, which is x up to its sign."""
    return FeatureSpace.of_kernels(Linear(), Linear(), Sample.unconditional(jnp.array([[1.0]])))


def tilted_normal(slope: float) -> Tilt:
    """Return ``f(x) = slope * x`` over N(0, 1): log Z is ``slope**2 / 2``, and the density is N(slope, 1)."""
    space = linear_space()
    sign = space.features(jnp.ones((1, 1)), jnp.zeros((1, 0)))[0]
    return Tilt(space, slope * sign, normal())


def tilted_normal_log_partition(slope: float) -> float:
    """Return log E[exp(slope x)] under N(0, 1)."""
    return 0.5 * slope**2


def tilted_normal_log_density(slope: float, x: np.ndarray) -> np.ndarray:
    """Return the log density of N(slope, 1)."""
    return -0.5 * (x - slope) ** 2 - 0.5 * LOG_TWO_PI


def log_ratio(mean: float, x: np.ndarray) -> np.ndarray:
    """Return ``log q / p0`` of q = N(mean, 1) and p0 = N(0, 1): the optimal nu of the dual of their KL."""
    return mean * x - 0.5 * mean**2


def normal_divergence(mean: float) -> float:
    """Return KL(N(mean, 1) || N(0, 1))."""
    return 0.5 * mean**2


def normal_quantiles(mean: float, count: int) -> np.ndarray:
    """Return points of equal mass under N(mean, 1); symmetric, so that their mean is exact."""
    levels = (np.arange(count) + 0.5) / count
    return mean + np.array([NormalDist().inv_cdf(level) for level in levels])


def gram(kernel, xs: np.ndarray, zs: np.ndarray) -> np.ndarray:
    """Return the matrix of kernel values, one pair at a time."""
    values = [float(kernel(jnp.asarray(x), jnp.asarray(z))) for x, z in itertools.product(xs, zs)]
    return np.array(values).reshape(len(xs), len(zs))


def midpoint_grid(low, high, count: int) -> tuple[np.ndarray, float]:
    """Return the midpoints of ``count`` cells per dimension of the box, and the volume of one cell."""
    low, high = np.asarray(low, float), np.asarray(high, float)
    sizes = (high - low) / count
    axes = [a + s * (np.arange(count) + 0.5) for a, s in zip(low, sizes, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, low.size)
    return points, float(np.prod(sizes))


@contextlib.contextmanager
def with_constants(module, **values):
    """Set constants of a module temporarily, so that tests of one part run fast."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(module, name, value)
        yield


def changed(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return settings of an estimator with some changed; fields of ``kernel`` are changed in that record."""
    own = settings["kernel"].get_params(deep=False)
    if isinstance(name := changes.pop("kernel", None), str):
        changes["name"] = name
    record = Kernel(**own | {name: value for name, value in changes.items() if name in own})
    return settings | {name: value for name, value in changes.items() if name not in own} | {"kernel": record}
