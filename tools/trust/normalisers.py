"""Coverage of the 95 % intervals of log Z, on random f whose normaliser is known by quadrature."""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from kexpfam.fit.kernel import on_host
from kexpfam.integrate.partition import log_partition
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Estimate, Tilt
from kexpfam.model.kernels import KERNELS
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import Constant, FeatureSpace, RandomFeatures
from tools.trust.outcomes import Outcome

__all__ = ["CHECKS"]

METHODS = ("quadrature", "importance", "smc")
# f is a random function of the plane with so many features; its standard deviation and its length scale are
# drawn between these ends, up to peaked ones that no draws of the base resolve.
FEATURES, HEIGHTS, SCALES = 10, (0.5, 3.0), (0.4, 2.0)
# The grid of the true value: midpoints up to eight standard deviations of the base.
REACH, CELLS = 8.0, 300
# The least coverage; the intervals of quadrature are bounds, and cover more.
COVERAGE = (0.93, 0.97)
# Rounding errors of the true value.
ROUNDING = 1e-9


class Case(NamedTuple):
    """A tilt of the standard normal, data, and the true log Z."""

    tilt: Tilt
    data: np.ndarray
    truth: float


def _case(seed: int, trial: int) -> Case:
    """Return a random tilt."""
    rng = np.random.default_rng([seed, trial])
    height, scale = (np.exp(rng.uniform(*np.log(ends))) for ends in (HEIGHTS, SCALES))
    with double_precision():
        kernel, key = KERNELS["gaussian"](scale), jr.key(int(rng.integers(2**31)))
        span = RandomFeatures.draw(kernel, 2, count=FEATURES, key=key)
        base = Gaussian(jnp.zeros(2), jnp.eye(2))
        tilt = on_host(Tilt(FeatureSpace(Constant(), span), height * rng.normal(size=span.size), base))
    step = 2.0 * REACH / CELLS
    axis = np.arange(-REACH + 0.5 * step, REACH, step)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    masses = tilt.values(points) - 0.5 * np.sum(points**2, axis=1) - np.log(2.0 * np.pi)
    top = masses.max()
    truth = float(top + np.log(np.sum(np.exp(masses - top)) * step**2))
    return Case(tilt, rng.normal(size=(500, 2)), truth)


def _covers(found: Estimate, truth: float) -> bool:
    return abs(found.value - truth) <= 1.96 * found.standard_error + ROUNDING


def intervals_of_normalisers(trials: int, seed: int, folder: Path) -> Outcome:
    """Compare intervals with the true value; infinite errors say that the value is not known."""
    del folder
    found: dict[str, list[tuple[Estimate, float]]] = {method: [] for method in METHODS}
    for trial in range(trials):
        tilt, data, truth = _case(seed, trial)
        for method in METHODS:
            key = jr.key(trial)
            found[method].append((log_partition(tilt, tilt.base, data, method=method, key=key), truth))
    failures, figures = [], []
    for method, cases in found.items():
        known = [case for case in cases if np.isfinite(case[0].standard_error)]
        share = float(np.mean([_covers(*case) for case in known]))
        chance = 2.0 * np.sqrt(0.05 * 0.95 / len(known))
        exact = method == "quadrature"
        if share < COVERAGE[0] - chance or (share > COVERAGE[1] + chance and not exact):
            failures.append(f"{method}: {share:.1%} of {len(known)}")
        figures.append(f"{method} {share:.1%} of {len(known)}, {len(cases) - len(known)} not known")
    return Outcome(trials * len(METHODS), failures, "; ".join(figures))


CHECKS = {one.__name__: one for one in (intervals_of_normalisers,)}
