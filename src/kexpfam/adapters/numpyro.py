"""A fitted density as a NumPyro distribution: a prior, a likelihood, or a part of a larger model."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from kexpfam.adapters import density_of
from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.model.distributions import AbstractDensity

__all__ = ["KernelDistribution"]


class _Fixed:
    """A wrapper that compares by identity, as NumPyro requires of auxiliary fields."""

    def __init__(self, density: AbstractDensity) -> None:
        self.density = density


class KernelDistribution(dist.Distribution):
    """``p(x)`` of a fitted model, or ``p(y | x)`` at conditions x, which may be traced and batched.

    ``log_prob`` and ``sample`` are pure JAX functions and run inside ``jit``; gradients exist with respect to
    the value and the condition, not through draws. The event of a density of one column is a scalar, of
    several columns a vector.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("x",)
    pytree_aux_fields = ("_fixed",)

    def __init__(
        self, model: Any, x: Float[AnyArray, "... p"] | None = None, *, validate_args: bool | None = None
    ) -> None:
        density = density_of(model)
        if density.conditional and x is None:
            raise ValueError("this density has a condition: pass x, or use model.given(x).")
        self.x = jnp.asarray(x) if density.conditional else None
        self._fixed = _Fixed(density)
        batch = () if self.x is None else self.x.shape[:-1]
        event = () if density.scaling.width == 1 else (density.scaling.width,)
        super().__init__(batch, event, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        bounds = self._fixed.density.support()
        if bounds is None:
            return constraints.real_vector if self.event_shape else constraints.real
        low, high = np.reshape(bounds, (2, *self.event_shape))
        if np.all(np.isfinite(bounds)):
            return constraints.independent(constraints.interval(low, high), len(self.event_shape))
        # If only some columns are positive, the constraint is real and the density is 0 below 0.
        constraint = constraints.positive if np.all(low == 0.0) else constraints.real
        return constraints.independent(constraint, len(self.event_shape))

    def log_prob(self, value: Float[AnyArray, "..."]) -> Float[Array, "..."]:
        batch = value.shape[: jnp.ndim(value) - len(self.event_shape)]
        shape = jnp.broadcast_shapes(batch, self.batch_shape)
        rows = jnp.broadcast_to(value, (*shape, *self.event_shape)).reshape(-1, *self.event_shape)
        return jax.vmap(self._fixed.density.log_prob)(rows, *self._conditions(shape)).reshape(shape)

    def sample(self, key: RandomKey, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        shape = (*sample_shape, *self.batch_shape)
        keys = jr.split(key, int(np.prod(shape)))
        draw = lambda key, *x: self._fixed.density.draw(*x, key=key)
        return jax.vmap(draw)(keys, *self._conditions(shape)).reshape(*shape, *self.event_shape)

    def _conditions(self, shape: tuple[int, ...]) -> tuple[Float[Array, "n p"], ...]:
        """Return the conditions, broadcast to this batch shape, as rows; empty without a condition."""
        if self.x is None:
            return ()
        width = self.x.shape[-1]
        return (jnp.broadcast_to(self.x, (*shape, width)).reshape(-1, width),)
