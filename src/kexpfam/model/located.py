"""A normal law around a function of the condition as the noise of a sampler, and networks in its units.

Where targets have little noise, a conditional density is a narrow ridge in a wide base. In the units ``(y -
location(x)) / scale`` it is about as wide as a standard normal, and networks of ordinary size represent it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.model.measures import AbstractMeasure, ConditionalMeasure, Mixture
from kexpfam.model.networks import AbstractTransport, Conditions, Layer, Network, Noise
from kexpfam.model.spaces import AbstractSpan


class Located(ConditionalMeasure):
    """``location(x) + scale * noise``, noise of law ``shape``; the location is a constant plus a function in
    a span of the condition."""

    span: AbstractSpan
    weights: Float[AnyArray, "r d"]
    constant: Float[AnyArray, " d"]
    scale: Float[AnyArray, " d"]
    shape: Mixture

    def location(self, condition: Conditions) -> Float[AnyArray, "b d"]:
        """Return the centre of the law under each condition."""
        xp = condition.__array_namespace__()
        functions = [self.span.evaluate(weights, condition) for weights in self.weights.T]
        return self.constant + xp.stack(functions, axis=1)

    def in_units(self, x: Float[AnyArray, "b d"], condition: Conditions) -> Float[Array, "b d"]:
        """Return points as differences from the location, in scales; training moves neither."""
        law = jax.lax.stop_gradient(jax.tree.map(jnp.asarray, self))
        return (x - law.location(jnp.asarray(condition))) / law.scale

    def given(self, condition: Float[AnyArray, " p"]) -> Mixture:
        scale, shape = jnp.asarray(self.scale), self.shape
        means = self.location(jnp.asarray(condition)[None]) + scale * shape.means
        return Mixture(
            jnp.asarray(shape.log_weights), means, scale[:, None] * shape.choleskys, shape.whiteners / scale
        )


class Defensive(AbstractMeasure):
    """Half of a base and half of another law: the log ratio to the base is at least -log 2."""

    base: AbstractMeasure
    near: AbstractMeasure

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        return jnp.logaddexp(self.base.log_density(x), self.near.log_density(x)) - jnp.log(2.0)

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        base_key, near_key, side_key = jr.split(key, 3)
        draws = self.base.sample(count, key=base_key), self.near.sample(count, key=near_key)
        return jnp.where(jr.bernoulli(side_key, 0.5, (count, 1)), *draws)

    def given(self, condition: Float[AnyArray, " p"]) -> "Defensive":
        return Defensive(self.base.given(condition), self.near.given(condition))


class InUnits(eqx.Module):
    """A network of targets in the units of a law, and of conditions."""

    network: Network
    law: Located

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of the network."""
        return self.network.layers

    def __call__(self, x: Float[AnyArray, "b d"], condition: Conditions) -> Float[Array, "b ..."]:
        return self.network(self.law.in_units(x, condition), condition)


class TransportInUnits(AbstractTransport):
    """``noise + scale * network(noise, condition)``; the network sees the noise in the units of the law."""

    network: Network
    law: Located

    def __call__(self, noise: Noise, condition: Conditions) -> Float[Array, "b d"]:
        scale = jax.lax.stop_gradient(jnp.asarray(self.law.scale))
        return noise + scale * self.network(self.law.in_units(noise, condition), condition)
