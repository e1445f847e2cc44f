"""Positive-definite kernels, their length scales, and draws from their spectral measures.

The library has one convention, ``exp(-|x - z|^2 / (2 lengthscale^2))``; other conventions are converted here.
A length scale may be one number or one per dimension; an infinite one removes its dimension. The Gram matrix
of NumPy arrays is a NumPy array, computed without compilation; that of JAX arrays can be traced and
differentiated.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from kexpfam.data.sample import AnyArray, RandomKey


def _as_array(lengthscale: ArrayLike) -> Float[AnyArray, "..."]:
    """Return the length scale as an array: a NumPy array unless it is a JAX array."""
    return lengthscale if isinstance(lengthscale, jax.Array) else np.asarray(lengthscale, float)


class AbstractKernel(eqx.Module):
    """A positive-definite kernel, with ``k(x, x) = 1`` unless stated otherwise."""

    @abc.abstractmethod
    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        """Return ``k(x, z)`` of one pair of points."""

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        """Return the matrix with entries ``k(xs[i], zs[j])``."""
        return jax.vmap(lambda x: jax.vmap(lambda z: self(x, z))(zs))(xs)

    def along(self, dim: int) -> "AbstractKernel | None":
        """Return the factor of one coordinate if the kernel is a product over coordinates, else None."""
        return None


class Linear(AbstractKernel):
    """``x . z``: the kernel of exponential tilting, for closed forms."""

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return x @ z

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        return xs @ zs.T


class AbstractStationary(AbstractKernel):
    """A kernel of the scaled difference ``(x - z) / lengthscale``; ``smooth`` if it is differentiable."""

    lengthscale: Float[AnyArray, "..."] = eqx.field(converter=_as_array)
    is_product: ClassVar[bool] = False
    smooth: ClassVar[bool] = True

    @abc.abstractmethod
    def frequencies(self, count: int, dim: int, *, key: RandomKey) -> Float[Array, "count dim"]:
        """Draw from the spectral measure: ``k(x, z) = E[cos(w . (x - z))]`` (Bochner)."""

    def along(self, dim: int) -> AbstractKernel | None:
        if not self.is_product:
            return None
        return type(self)(self.lengthscale if self.lengthscale.ndim == 0 else self.lengthscale[dim])


class AbstractRadial(AbstractStationary):
    """A stationary kernel of the squared scaled distance."""

    @abc.abstractmethod
    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """Return the kernel at a squared scaled distance, which rounding may make slightly negative."""

    @abc.abstractmethod
    def spectral_scales(self, count: int, *, key: RandomKey) -> Float[Array, " count"]:
        """Draw s such that ``s * normal`` has the spectral measure at length scale 1."""

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return self.profile(jnp.sum(jnp.square((x - z) / self.lengthscale)))

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        # |x|^2 + |z|^2 - 2 x.z needs one matrix product instead of an n x m x d array.
        xs = xs / self.lengthscale
        zs = zs / self.lengthscale
        return self.profile((xs**2).sum(1)[:, None] + (zs**2).sum(1) - 2.0 * xs @ zs.T)

    def frequencies(self, count: int, dim: int, *, key: RandomKey) -> Float[Array, "count dim"]:
        scale_key, normal_key = jr.split(key)
        scales = self.spectral_scales(count, key=scale_key)
        return scales[:, None] * jr.normal(normal_key, (count, dim)) / self.lengthscale


class Gaussian(AbstractRadial):
    """``exp(-|x - z|^2 / (2 lengthscale^2))``."""

    is_product = True

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        return squared.__array_namespace__().exp(-0.5 * squared)

    def spectral_scales(self, count: int, *, key: RandomKey) -> Float[Array, " count"]:
        return jnp.ones(count)


class Matern32(AbstractRadial):
    """``(1 + sqrt(3) r) exp(-sqrt(3) r)`` with ``r = |x - z| / lengthscale``."""

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        r = 3.0**0.5 * safe_root(squared)
        return (1.0 + r) * squared.__array_namespace__().exp(-r)

    def spectral_scales(self, count: int, *, key: RandomKey) -> Float[Array, " count"]:
        return student_scales(3.0, count, key=key)


class Matern52(AbstractRadial):
    """``(1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r)`` with ``r = |x - z| / lengthscale``."""

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        r = 5.0**0.5 * safe_root(squared)
        return (1.0 + r + r**2 / 3.0) * squared.__array_namespace__().exp(-r)

    def spectral_scales(self, count: int, *, key: RandomKey) -> Float[Array, " count"]:
        return student_scales(5.0, count, key=key)


class InverseMultiquadric(AbstractRadial):
    """``(1 + |x - z|^2 / lengthscale^2)^(-1/2)``: heavier tails than the kernels above."""

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        return (1.0 + squared) ** -0.5

    def spectral_scales(self, count: int, *, key: RandomKey) -> Float[Array, " count"]:
        # (1 + r^2)^(-1/2) = E[exp(-t r^2)] with t ~ Gamma(1/2); exp(-t r^2) has normal frequencies of
        # variance 2t.
        return jnp.sqrt(2.0 * jr.gamma(key, 0.5, (count,)))


class Laplace(AbstractStationary):
    """``exp(-sum_j |x_j - z_j| / lengthscale_j)``: rough functions, a Cauchy spectrum in each dimension."""

    is_product = True
    smooth = False

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return jnp.exp(-jnp.sum(jnp.abs((x - z) / self.lengthscale)))

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        # One coordinate at a time: memory is n x m for any number of coordinates.
        xp = xs.__array_namespace__()
        xs = xs / self.lengthscale
        zs = zs / self.lengthscale
        zero = xp.zeros((xs.shape[0], zs.shape[0]), dtype=xs.dtype)
        return xp.exp(-sum((xp.abs(xs[:, j, None] - zs[:, j]) for j in range(xs.shape[1])), zero))

    def frequencies(self, count: int, dim: int, *, key: RandomKey) -> Float[Array, "count dim"]:
        return jr.cauchy(key, (count, dim)) / self.lengthscale


KERNELS: dict[str, type[AbstractStationary]] = {
    "gaussian": Gaussian,
    "laplace": Laplace,
    "matern32": Matern32,
    "matern52": Matern52,
    "inverse_multiquadric": InverseMultiquadric,
}


def safe_root(squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """Return the square root with derivative 0, not NaN, at 0 (the Matérn profiles are flat there)."""
    xp = squared.__array_namespace__()
    positive = squared > 0.0
    return xp.where(positive, xp.sqrt(xp.where(positive, squared, 1.0)), 0.0)


def student_scales(freedom: float, count: int, *, key: RandomKey) -> Float[Array, " count"]:
    """Return s such that ``s * normal`` is Student-t: the Matérn spectrum of order freedom / 2."""
    return jnp.sqrt(freedom / (2.0 * jr.gamma(key, freedom / 2.0, (count,))))


def median_distance(points: np.ndarray, *, most: int = 1000, seed: int = 0) -> float:
    """Return the median distance between distinct points, of a random subset of at most ``most``."""
    if len(points) > most:
        points = points[np.random.default_rng(seed).choice(len(points), most, replace=False)]
    first, second = np.triu_indices(len(points), 1)
    distances = np.linalg.norm(points[first] - points[second], axis=1)
    positive = distances[distances > 0.0]
    return float(np.median(positive)) if positive.size else 1.0


def lengthscale_from_paper(sigma: float) -> float:
    """Return the length scale of the paper's ``exp(-|x - z|^2 / sigma^2)``."""
    return sigma / np.sqrt(2.0)


def lengthscale_from_ratio(ratio: float, median: float) -> float:
    """Return the length scale of ``exp(-gamma |x - z|^2)`` with ``gamma = 0.5 / (ratio * median^2)``."""
    return float(np.sqrt(ratio) * median)
