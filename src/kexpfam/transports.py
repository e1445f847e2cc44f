"""Transport maps: noise (and condition) to a point. The sampler q of the paper is the law of ``transport(noise)``."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.measures import AbstractMeasure
from kexpfam.potentials import Network


class AbstractTransport(eqx.Module):
    """A map from noise to points, applied to a batch."""

    @abc.abstractmethod
    def __call__(self, noise: Float[Array, "b k"], condition: Float[Array, "b p"]) -> Float[Array, "b d"]:
        """Return the point that each row of noise is carried to."""


class Residual(AbstractTransport):
    """``noise + network(noise, condition)``: noise lives where the points live, and the map starts as the identity."""

    network: Network

    @classmethod
    def draw(cls, dim: int, condition_dim: int, *, key: Key[Array, ""], **shape) -> "Residual":
        """Return the identity; ``shape`` is the network's width, depth and activation."""
        return cls(Network.draw(dim + condition_dim, dim, silent=True, key=key, **shape))

    def __call__(self, noise, condition):
        return noise + self.network(noise, condition)


class Free(AbstractTransport):
    """``network(noise, condition)`` with noise of any width: the paper's own sampler."""

    network: Network

    @classmethod
    def draw(cls, noise_dim: int, dim: int, condition_dim: int, *, key: Key[Array, ""], **shape) -> "Free":
        """Return a random map; ``shape`` is the network's width, depth and activation."""
        return cls(Network.draw(noise_dim + condition_dim, dim, silent=False, key=key, **shape))

    def __call__(self, noise, condition):
        return self.network(noise, condition)


class Identity(AbstractTransport):
    """Noise as it is: the sampler is its reference measure."""

    def __call__(self, noise, condition):
        return noise


class Given(AbstractTransport):
    """A transport under one condition, as one that knows no condition."""

    transport: AbstractTransport
    condition: Float[Array, " p"]

    def __call__(self, noise, condition):
        return self.transport(noise, jnp.broadcast_to(self.condition, (noise.shape[0], self.condition.size)))


class Sampler(eqx.Module):
    """The law of ``transport(noise)`` with noise from the reference, folded onto the support of the base."""

    reference: AbstractMeasure
    transport: AbstractTransport
    base: AbstractMeasure

    def draw(self, condition: Float[Array, "b p"], *, key: Key[Array, ""]) -> Float[Array, "b d"]:
        """Return one point per condition."""
        return self.base.fold(self.transport(draw_each(self.reference, condition, key=key), condition))

    def draw_several(self, condition: Float[Array, "b p"], count: int, *, key: Key[Array, ""]) -> Float[Array, "b count d"]:
        """Return ``count`` points per condition; what the reference makes of a condition is made once."""
        keys = jr.split(key, condition.shape[0])
        noise = jax.vmap(lambda c, k: self.reference.given(c).sample(count, key=k))(condition, keys)
        move = lambda c, rows: self.transport(rows, jnp.broadcast_to(c, (count, c.size)))
        return self.base.fold(jax.vmap(move)(condition, noise))

    def given(self, condition: Float[Array, " p"]) -> "Sampler":
        """Return the sampler under one condition, as one that knows no condition."""
        return Sampler(self.reference.given(condition), Given(self.transport, condition), self.base)

    def weighted_draws(self, condition: np.ndarray, *, key: Key[Array, ""]) -> "WeightedDraws":
        r"""Return one draw per condition with its density, :math:`\log q(g(\xi)) = \log r(\xi) - \log|\det Dg(\xi)|`.

        For noise as wide as the points. Exact where the transport is injective; elsewhere the true q is larger, so that a
        KL(q || p) computed from it is a lower bound.
        """
        points, log_density = _draw_with_density(self, jnp.asarray(condition), key)
        return WeightedDraws(np.asarray(points), np.asarray(log_density))


class WeightedDraws(NamedTuple):
    """Draws of a sampler and their log density under it."""

    points: np.ndarray
    log_density: np.ndarray


@eqx.filter_jit
def _draw_with_density(sampler: Sampler, condition, key):
    noise = draw_each(sampler.reference, condition, key=key)
    move = lambda row, c: sampler.transport(row[None], c[None])[0].astype(row.dtype)
    _, log_determinants = jax.vmap(lambda row, c: jnp.linalg.slogdet(jax.jacfwd(move)(row, c)))(noise, condition)
    moved = sampler.base.fold(jax.vmap(move)(noise, condition))
    return moved, log_density_each(sampler.reference, noise, condition) - log_determinants


def draw_each(measure: AbstractMeasure, condition: Float[Array, "b p"], *, key: Key[Array, ""]) -> Float[Array, "b k"]:
    """Draw one point of the measure under each condition; a measure that does not depend on it is drawn in one call."""
    if not _depends_on_condition(measure, condition):
        return measure.sample(condition.shape[0], key=key)
    keys = jr.split(key, condition.shape[0])
    return jax.vmap(lambda c, k: measure.given(c).sample(1, key=k)[0])(condition, keys)


def log_density_each(measure: AbstractMeasure, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, " b"]:
    """Return the measure's log density at each row under its condition."""
    if not _depends_on_condition(measure, condition):
        return jax.vmap(measure.log_density)(x)
    return jax.vmap(lambda row, c: measure.given(c).log_density(row))(x, jnp.asarray(condition))


def _depends_on_condition(measure: AbstractMeasure, condition) -> bool:
    return condition.shape[1] > 0 and type(measure).given is not AbstractMeasure.given
