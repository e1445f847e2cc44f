"""Networks of points and conditions, and the transports that carry noise to points.

The sampler q of the paper is the law of ``transport(noise)``.
"""

import abc
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, RandomKey

Noise = Float[AnyArray, "b k"]
Conditions = Float[AnyArray, "b p"]


# Functions with a name of their own, so that models can be stored and pickled.
def silu(x: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """Return ``x / (1 + exp(-x))``."""
    if isinstance(x, jax.Array):
        return jax.nn.silu(x)
    with np.errstate(over="ignore"):  # exp(-x) is infinite where the value is 0
        return x / (1.0 + np.exp(-x))


def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ``max(x, 0)``."""
    return jax.nn.relu(x)


ACTIVATIONS = {"silu": silu, "relu": relu}


class Layer(eqx.Module):
    """``rows @ weight + bias``. The weight is inputs times outputs, which is fastest on a CPU."""

    weight: Float[Array, "a b"]
    bias: Float[Array, " b"]

    @classmethod
    def draw(cls, inputs: int, outputs: int, *, key: RandomKey) -> "Layer":
        """Return a layer with everything uniform between -1 and 1 over the root of the number of inputs."""
        weight_key, bias_key = jr.split(key)
        limit = 1.0 / np.sqrt(max(inputs, 1))
        uniform = lambda key, *shape: jr.uniform(key, shape, jnp.float32, -limit, limit)
        return cls(uniform(weight_key, inputs, outputs), uniform(bias_key, outputs))

    @classmethod
    def of_frequencies(cls, frequencies: Float[AnyArray, "b a"], *, key: RandomKey) -> "Layer":
        """Return a layer whose cosines are waves of these frequencies, with random phases."""
        phases = jr.uniform(key, (frequencies.shape[0],), jnp.float32, 0.0, 2.0 * np.pi)
        return cls(jnp.asarray(frequencies, jnp.float32).T, phases)

    def __call__(self, rows: Float[Array, "n a"]) -> Float[Array, "n b"]:
        return rows @ self.weight + self.bias


class Network(eqx.Module):
    """A multilayer perceptron of a point and its condition, with one output (scalar) or a row of outputs.

    With ``waves`` the cosines of that layer are further inputs. A plain network learns slow variation
    first; with waves of the right lengths it learns fast variation as well.
    """

    layers: tuple[Layer, ...]
    activation: Callable = eqx.field(static=True)
    scalar: bool = eqx.field(static=True)
    waves: Layer | None = None

    @classmethod
    def draw(
        cls,
        inputs: int,
        outputs: int | Literal["scalar"],
        *,
        width: int,
        depth: int,
        zero_initialised: bool,
        activation: str = "silu",
        waves: Layer | None = None,
        key: RandomKey,
    ) -> "Network":
        """Return a random network; a zero-initialised one has output 0 everywhere."""
        widths = [
            inputs if waves is None else inputs + waves.bias.size,
            *[width] * depth,
            1 if outputs == "scalar" else outputs,
        ]
        keys = jr.split(key, depth + 1)
        layers = [Layer.draw(*sizes, key=key) for sizes, key in zip(pairwise(widths), keys, strict=True)]
        if zero_initialised:
            layers[-1] = jax.tree.map(jnp.zeros_like, layers[-1])
        return cls(tuple(layers), ACTIVATIONS[activation], outputs == "scalar", waves)

    def __call__(self, x: Float[AnyArray, "b a"], condition: Conditions) -> Float[Array, "b ..."]:
        rows = jnp.concatenate([x, condition], 1).astype(jnp.float32)
        if self.waves is not None:
            rows = jnp.concatenate([rows, jnp.cos(self.waves(rows))], 1)
        for layer in self.layers[:-1]:
            rows = self.activation(layer(rows))
        values = self.layers[-1](rows)
        return values[:, 0] if self.scalar else values


class AbstractTransport(eqx.Module):
    """A map from noise to points, applied to a batch."""

    @abc.abstractmethod
    def __call__(self, noise: Noise, condition: Conditions) -> Float[Array, "b d"]:
        """Return the point that each row of noise is carried to."""


class Residual(AbstractTransport):
    """``noise + network(noise, condition)``, with noise in the space of points; first the identity."""

    network: Network

    @classmethod
    def draw(cls, dim: int, condition_dim: int, *, key: RandomKey, **shape: Any) -> "Residual":
        """Return the identity; ``shape`` is the network's width, depth, activation and waves."""
        return cls(Network.draw(dim + condition_dim, dim, zero_initialised=True, key=key, **shape))

    def __call__(self, noise: Noise, condition: Conditions) -> Float[Array, "b d"]:
        return noise + self.network(noise, condition)


class Free(AbstractTransport):
    """``network(noise, condition)`` with noise of any width: the paper's own sampler."""

    network: Network

    @classmethod
    def draw(cls, noise_dim: int, dim: int, condition_dim: int, *, key: RandomKey, **shape: Any) -> "Free":
        """Return a random map; ``shape`` is the network's width, depth, activation and waves."""
        return cls(Network.draw(noise_dim + condition_dim, dim, zero_initialised=False, key=key, **shape))

    def __call__(self, noise: Noise, condition: Conditions) -> Float[Array, "b d"]:
        return self.network(noise, condition)


class Identity(AbstractTransport):
    """Noise as it is: the sampler is its reference measure."""

    def __call__(self, noise: Noise, condition: Conditions) -> Float[Array, "b d"]:
        return noise


class Given(AbstractTransport):
    """A transport under one condition, as an unconditional transport."""

    transport: AbstractTransport
    condition: Float[AnyArray, " p"]

    def __call__(self, noise: Noise, condition: Conditions) -> Float[Array, "b d"]:
        return self.transport(noise, jnp.broadcast_to(self.condition, (noise.shape[0], self.condition.size)))
