"""Synthetic densities with exact draws and normalised log densities.

They use NumPy and no other part of the library, so that reference values share no code with the estimates.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state

LOG_TWO_PI = float(np.log(2.0 * np.pi))


class Synthetic(Protocol):
    """Interface of the synthetic densities."""

    @property
    def dim(self) -> int:
        """Return the number of columns."""

    def sample(self, n_samples: int, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """Draw ``n_samples`` points, shape ``(n_samples, dim)``."""

    def log_density(self, X: ArrayLike) -> np.ndarray:
        """Return the normalised log density of each row of ``X``."""


@dataclass(frozen=True)
class TwoMoons:
    r"""Two crescents on a circle around the origin: a ring times two bumps in the first coordinate.

    .. math:: p(x) \propto \exp\Big(-\tfrac12 \big(\tfrac{|x| - 2}{0.4}\big)^2\Big)
        \Big(e^{-\frac12 (\frac{x_1 - 2}{0.6})^2} + e^{-\frac12 (\frac{x_1 + 2}{0.6})^2}\Big)
    """

    radius: ClassVar[float] = 2.0
    radius_spread: ClassVar[float] = 0.4
    bump_spread: ClassVar[float] = 0.6
    dim: ClassVar[int] = 2

    def sample(self, n_samples: int, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """Draw exactly by rejection in polar coordinates."""
        rng = check_random_state(random_state)
        accepted = [np.empty((0, 2))]
        missing = n_samples
        while missing > 0:
            points = self._proposals(rng, 4 * missing + 16)[:missing]
            accepted.append(points)
            missing -= len(points)
        return np.concatenate(accepted)

    def log_density(self, X: ArrayLike) -> np.ndarray:
        X = _checked(X, self.dim)
        ring = -0.5 * ((np.linalg.norm(X, axis=1) - self.radius) / self.radius_spread) ** 2
        return ring + self._log_bumps(X[:, 0]) - _two_moons_log_normaliser()

    def _proposals(self, rng: np.random.RandomState, count: int) -> np.ndarray:
        # The radius has density r exp(-(r - R)^2 / 2s^2), and r <= R exp(r / R - 1) turns that bound into a
        # normal of mean R + s^2 / R. The bumps are at most 1 plus the far one's height at the centre.
        radius = rng.normal(self.radius + self.radius_spread**2 / self.radius, self.radius_spread, count)
        angle = rng.uniform(0.0, 2.0 * np.pi, count)
        log_bumps_bound = np.log1p(np.exp(-0.5 * (self.radius / self.bump_spread) ** 2))
        ratio = np.maximum(radius, 0.0) / self.radius * np.exp(1.0 - radius / self.radius)
        chance = ratio * np.exp(self._log_bumps(radius * np.cos(angle)) - log_bumps_bound)
        kept = rng.uniform(size=count) < chance
        return _on_circle(radius[kept], angle[kept])

    def _log_bumps(self, first: np.ndarray) -> np.ndarray:
        right = -0.5 * ((first - self.radius) / self.bump_spread) ** 2
        left = -0.5 * ((first + self.radius) / self.bump_spread) ** 2
        return np.logaddexp(right, left)


@dataclass(frozen=True)
class Rings:
    """Noisy circles of radius 1, 3 and 5 with equal mass per unit length, and noise in further dimensions.

    The log density ignores negative radii, which have probability 1e-23 (ten standard deviations).
    """

    dim: int = 2
    radii: ClassVar[np.ndarray] = np.array([1.0, 3.0, 5.0])
    spread: ClassVar[float] = 0.1

    def __post_init__(self) -> None:
        if self.dim < 2:
            raise ValueError(f"rings need dim >= 2, got {self.dim}.")

    @property
    def shares(self) -> np.ndarray:
        """Return the probability of each circle: proportional to its circumference."""
        return self.radii / self.radii.sum()

    def sample(self, n_samples: int, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """Draw a circle, an angle, a radius, and the noise of the further dimensions."""
        rng = check_random_state(random_state)
        circle = rng.choice(self.radii, size=n_samples, p=self.shares)
        radius = circle + rng.normal(0.0, self.spread, n_samples)
        angle = rng.uniform(0.0, 2.0 * np.pi, n_samples)
        further = rng.normal(0.0, self.spread, (n_samples, self.dim - 2))
        return np.concatenate([_on_circle(radius, angle), further], axis=1)

    def log_density(self, X: ArrayLike) -> np.ndarray:
        X = _checked(X, self.dim)
        # The density has a pole at the origin; the floor keeps its logarithm finite.
        radius = np.maximum(np.linalg.norm(X[:, :2], axis=1), np.finfo(float).tiny)
        log_radii = _log_normal(radius[:, None] - self.radii, self.spread)
        plane = np.logaddexp.reduce(np.log(self.shares) + log_radii, axis=1) - LOG_TWO_PI - np.log(radius)
        return plane + _log_normal(X[:, 2:], self.spread).sum(axis=1)


@dataclass(frozen=True)
class Grid:
    """An equal mixture of ``dim`` normals of standard deviation 0.1, one at each unit vector."""

    dim: int = 2
    spread: ClassVar[float] = 0.1

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"the grid needs dim >= 1, got {self.dim}.")

    def sample(self, n_samples: int, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """Draw a centre, and the noise around it."""
        rng = check_random_state(random_state)
        centres = np.eye(self.dim)[rng.randint(self.dim, size=n_samples)]
        return centres + rng.normal(0.0, self.spread, (n_samples, self.dim))

    def log_density(self, X: ArrayLike) -> np.ndarray:
        X = _checked(X, self.dim)
        # |x - e_k|^2 = |x|^2 - 2 x_k + 1 avoids the n x d x d array of differences.
        squared = np.sum(X**2, axis=1, keepdims=True) - 2.0 * X + 1.0
        peak = _log_normal(np.zeros(self.dim), self.spread).sum()
        return np.logaddexp.reduce(-0.5 * squared / self.spread**2, axis=1) + peak - np.log(self.dim)


two_moons = TwoMoons
rings = Rings
grid = Grid

SYNTHETIC: dict[str, type[Synthetic]] = {"two-moons": TwoMoons, "rings": Rings, "grid": Grid}


@functools.cache
def _two_moons_log_normaliser() -> float:
    """Return the log integral: Gauss-Legendre in the radius, trapezium (spectrally accurate) in the angle."""
    moons = TwoMoons()
    # Beyond fifteen standard deviations the density is 0 in float64.
    end = moons.radius + 15.0 * moons.radius_spread
    roots, weights = np.polynomial.legendre.leggauss(200)
    radius = 0.5 * end * (roots + 1.0)
    angle = np.arange(400) * (2.0 * np.pi / 400)
    bumps = np.exp(moons._log_bumps(radius[:, None] * np.cos(angle))).mean(axis=1) * 2.0 * np.pi
    ring = np.exp(-0.5 * ((radius - moons.radius) / moons.radius_spread) ** 2)
    return float(np.log(0.5 * end * np.sum(weights * radius * ring * bumps)))


def _on_circle(radius: np.ndarray, angle: np.ndarray) -> np.ndarray:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def _log_normal(difference: np.ndarray, spread: float) -> np.ndarray:
    return -0.5 * (difference / spread) ** 2 - np.log(spread) - 0.5 * LOG_TWO_PI


def _checked(X: ArrayLike, dim: int) -> np.ndarray:
    X = np.asarray(X, dtype=float)
    if X.ndim != 2 or X.shape[1] != dim:
        raise ValueError(f"X must have shape (n, {dim}), got {X.shape}.")
    return X
