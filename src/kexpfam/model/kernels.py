"""Positive-definite kernels, their length scales, and spectral draws for random features.

The one convention of the library is ``exp(-|x - z|^2 / (2 lengthscale^2))``; every other one is converted here. A length
scale may differ per dimension, and an infinite one switches its dimension off. A Gram matrix of NumPy arrays is a NumPy array,
made without compiling anything; one of JAX arrays can be traced and differentiated.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key
from numpy.typing import ArrayLike

from kexpfam.data.sample import AnyArray

__all__ = [
    "KERNELS",
    "AbstractKernel",
    "AbstractRadial",
    "AbstractStationary",
    "Gaussian",
    "InverseMultiquadric",
    "Laplace",
    "Linear",
    "Matern32",
    "Matern52",
    "lengthscale_from_paper",
    "lengthscale_from_ratio",
    "median_distance",
    "safe_root",
    "student_scales",
]


def _as_array(lengthscale: ArrayLike) -> Float[AnyArray, "..."]:
    """Return the length scale as an array: a NumPy one, unless it is traced or already JAX's."""
    return lengthscale if isinstance(lengthscale, jax.Array) else np.asarray(lengthscale, float)


class AbstractKernel(eqx.Module):
    """A positive-definite kernel with ``k(x, x) = 1`` unless it says otherwise, written for one pair of points."""

    @abc.abstractmethod
    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        """Return ``k(x, z)``."""

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        """Return the matrix whose entry ``[i, j]`` is ``k(xs[i], zs[j])``."""
        return jax.vmap(lambda x: jax.vmap(lambda z: self(x, z))(zs))(xs)

    def along(self, dim: int) -> "AbstractKernel | None":
        """Return the factor that belongs to one coordinate, if the kernel is a product over coordinates."""
        return None


class Linear(AbstractKernel):
    """``x . z``: the kernel of exponential tilting, used where a closed form is wanted."""

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return x @ z

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        return xs @ zs.T


class AbstractStationary(AbstractKernel):
    """A kernel of the scaled difference ``(x - z) / lengthscale``."""

    lengthscale: eqx.AbstractVar[Float[AnyArray, "..."]]

    @abc.abstractmethod
    def frequencies(self, count: int, dim: int, *, key: Key[Array, ""]) -> Float[Array, "count dim"]:
        """Draw from the spectral measure: ``k(x, z) = E[cos(w . (x - z))]`` (Bochner)."""


class AbstractRadial(AbstractStationary):
    """A stationary kernel of the squared scaled distance alone."""

    @abc.abstractmethod
    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """Return the kernel at squared scaled distance ``squared``, which rounding may bring just below 0."""

    @abc.abstractmethod
    def spectral_scales(self, count: int, *, key: Key[Array, ""]) -> Float[Array, " count"]:
        """Draw s of the scale mixture ``w = s * normal`` that is the spectral measure at length scale 1."""

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return self.profile(jnp.sum(jnp.square((x - z) / self.lengthscale)))

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        # |x|^2 + |z|^2 - 2 x.z costs one matrix product instead of an n x m x d array; a profile takes its rounding below 0.
        xs, zs = xs / self.lengthscale, zs / self.lengthscale
        return self.profile((xs**2).sum(1)[:, None] + (zs**2).sum(1) - 2.0 * xs @ zs.T)

    def frequencies(self, count: int, dim: int, *, key: Key[Array, ""]) -> Float[Array, "count dim"]:
        scale_key, normal_key = jr.split(key)
        scales = self.spectral_scales(count, key=scale_key)
        return scales[:, None] * jr.normal(normal_key, (count, dim)) / self.lengthscale


class Gaussian(AbstractRadial):
    """``exp(-|x - z|^2 / (2 lengthscale^2))``."""

    lengthscale: Float[AnyArray, "..."] = eqx.field(converter=_as_array)

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        return squared.__array_namespace__().exp(-0.5 * squared)

    def along(self, dim: int) -> AbstractKernel:
        return Gaussian(self.lengthscale if self.lengthscale.ndim == 0 else self.lengthscale[dim])

    def spectral_scales(self, count: int, *, key: Key[Array, ""]) -> Float[Array, " count"]:
        return jnp.ones(count)


class Matern32(AbstractRadial):
    """``(1 + sqrt(3) r) exp(-sqrt(3) r)`` with ``r = |x - z| / lengthscale``."""

    lengthscale: Float[AnyArray, "..."] = eqx.field(converter=_as_array)

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        r = 3.0**0.5 * safe_root(squared)
        return (1.0 + r) * squared.__array_namespace__().exp(-r)

    def spectral_scales(self, count: int, *, key: Key[Array, ""]) -> Float[Array, " count"]:
        return student_scales(3.0, count, key=key)


class Matern52(AbstractRadial):
    """``(1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r)`` with ``r = |x - z| / lengthscale``."""

    lengthscale: Float[AnyArray, "..."] = eqx.field(converter=_as_array)

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        r = 5.0**0.5 * safe_root(squared)
        return (1.0 + r + r**2 / 3.0) * squared.__array_namespace__().exp(-r)

    def spectral_scales(self, count: int, *, key: Key[Array, ""]) -> Float[Array, " count"]:
        return student_scales(5.0, count, key=key)


class InverseMultiquadric(AbstractRadial):
    """``(1 + |x - z|^2 / lengthscale^2)^(-1/2)``: heavier tails than any kernel above."""

    lengthscale: Float[AnyArray, "..."] = eqx.field(converter=_as_array)

    def profile(self, squared: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        return (1.0 + squared) ** -0.5

    def spectral_scales(self, count: int, *, key: Key[Array, ""]) -> Float[Array, " count"]:
        # (1 + r^2)^(-1/2) = E[exp(-t r^2)] with t ~ Gamma(1/2), and exp(-t r^2) has normal frequencies of variance 2t.
        return jnp.sqrt(2.0 * jr.gamma(key, 0.5, (count,)))


class Laplace(AbstractStationary):
    """``exp(-sum_j |x_j - z_j| / lengthscale_j)``: rough functions, Cauchy spectrum in each dimension."""

    lengthscale: Float[AnyArray, "..."] = eqx.field(converter=_as_array)

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return jnp.exp(-jnp.sum(jnp.abs((x - z) / self.lengthscale)))

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        # One coordinate at a time, so that memory is n x m whatever their number.
        xp, xs, zs = xs.__array_namespace__(), xs / self.lengthscale, zs / self.lengthscale
        none = xp.zeros((xs.shape[0], zs.shape[0]), dtype=xs.dtype)
        return xp.exp(-sum((xp.abs(xs[:, j, None] - zs[:, j]) for j in range(xs.shape[1])), none))

    def along(self, dim: int) -> AbstractKernel:
        return Laplace(self.lengthscale if self.lengthscale.ndim == 0 else self.lengthscale[dim])

    def frequencies(self, count: int, dim: int, *, key: Key[Array, ""]) -> Float[Array, "count dim"]:
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
    xp, positive = squared.__array_namespace__(), squared > 0.0
    return xp.where(positive, xp.sqrt(xp.where(positive, squared, 1.0)), 0.0)


def student_scales(freedom: float, count: int, *, key: Key[Array, ""]) -> Float[Array, " count"]:
    """Return scales s such that ``s * normal`` is Student-t: the spectrum of a Matérn kernel of order freedom / 2."""
    return jnp.sqrt(freedom / (2.0 * jr.gamma(key, freedom / 2.0, (count,))))


def median_distance(points: np.ndarray, *, most: int = 1000, seed: int = 0) -> float:
    """Return the median distance between distinct points, from at most ``most`` of them."""
    if len(points) > most:
        points = points[np.random.default_rng(seed).choice(len(points), most, replace=False)]
    first, second = np.triu_indices(len(points), 1)
    distances = np.linalg.norm(points[first] - points[second], axis=1)
    positive = distances[distances > 0.0]
    return float(np.median(positive)) if positive.size else 1.0


def lengthscale_from_paper(sigma: float) -> float:
    """Convert the paper's ``exp(-|x - z|^2 / sigma^2)`` to our length scale."""
    return sigma / np.sqrt(2.0)


def lengthscale_from_ratio(ratio: float, median: float) -> float:
    """Convert ``exp(-gamma |x - z|^2)`` with ``gamma = 0.5 / (ratio * median^2)``, as in the paper's code."""
    return float(np.sqrt(ratio) * median)
