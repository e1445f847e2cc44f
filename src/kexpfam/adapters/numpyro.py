"""A fitted density as a distribution of NumPyro: a prior, a likelihood, or a part of a larger model."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float, Key
from numpyro.distributions import constraints

from kexpfam.adapters import density_of
from kexpfam.data.sample import AnyArray
from kexpfam.model.distributions import AbstractDensity

__all__ = ["KernelDistribution"]


class _Fixed:
    """A density as NumPyro wants what does not change: equal to itself alone."""

    def __init__(self, density: AbstractDensity) -> None:
        self.density = density


class KernelDistribution(dist.Distribution):
    """``p(x)`` of a fitted model, or ``p(y | x)`` at the conditions x, which may be traced and may come in batches.

    ``log_prob`` and ``sample`` are pure functions of JAX and run inside ``jit``; gradients reach the value and the condition.
    A density of one column has events without a dimension, one of several has vectors. Draws have no gradient.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("x",)
    pytree_aux_fields = ("_fixed",)

    def __init__(
        self, model: Any, x: Float[AnyArray, "... p"] | None = None, *, validate_args: bool | None = None
    ) -> None:
        density = density_of(model)
        if density.conditional and x is None:
            raise ValueError("this density has a condition: pass x, or take model.given(x).")
        self.x, self._fixed = (jnp.asarray(x) if density.conditional else None), _Fixed(density)
        batch = self.x.shape[:-1] if self.x is not None else ()
        event = () if density.scaling.width == 1 else (density.scaling.width,)
        super().__init__(batch, event, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        bounds = self._fixed.density.support()
        if bounds is None:
            return constraints.real if not self.event_shape else constraints.real_vector
        low, high = np.reshape(bounds, (2, *self.event_shape))
        if np.all(np.isfinite(bounds)):
            return constraints.independent(constraints.interval(low, high), len(self.event_shape))
        # Where only some columns are positive, the density says so by being 0 elsewhere.
        some = constraints.positive if np.all(low == 0.0) else constraints.real
        return constraints.independent(some, len(self.event_shape))

    def log_prob(self, value: Float[AnyArray, "..."]) -> Float[Array, "..."]:
        batch = value.shape[: jnp.ndim(value) - len(self.event_shape)]
        shape = jnp.broadcast_shapes(batch, self.batch_shape)
        rows = jnp.broadcast_to(value, (*shape, *self.event_shape)).reshape(-1, *self.event_shape)
        if self.x is None:
            return jax.vmap(self._fixed.density.log_prob)(rows).reshape(shape)
        return jax.vmap(self._fixed.density.log_prob)(rows, self._conditions(shape)).reshape(shape)

    def sample(self, key: Key[Array, ""], sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        shape = (*sample_shape, *self.batch_shape)
        keys, draw = jr.split(key, int(np.prod(shape))), self._fixed.density.draw
        if self.x is None:
            draws = jax.vmap(lambda one: draw(key=one))(keys)
        else:
            draws = jax.vmap(lambda x, one: draw(x, key=one))(self._conditions(shape), keys)
        return draws.reshape(*shape, *self.event_shape)

    def _conditions(self, shape: tuple[int, ...]) -> Float[Array, "n p"]:
        x = jnp.asarray(self.x)
        return jnp.broadcast_to(x, (*shape, x.shape[-1])).reshape(-1, x.shape[-1])
