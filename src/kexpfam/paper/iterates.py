"""Rules that choose the result of a run among its iterates, as wrappers of a step solver.

A step solver has ``init``, ``step``, ``schedule(step)`` (the relative size of a step) and ``answer(state)``
(the result of a run); its states have ``point`` and ``step``. A wrapper has the same methods.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from kexpfam.data.sample import RandomKey

# Folded into the key of a step for the wrapper's own random numbers.
CHOICE = 1_000_003


class Mean(eqx.Module):
    """The mean of f's weights over some steps, and their number."""

    f_weights: Float[Array, " r"]
    count: Int[Array, ""]

    def add(self, other: "Mean") -> "Mean":
        """Return the mean over the steps of both."""
        count = self.count + other.count
        share = other.count / jnp.maximum(count, 1)
        return Mean(self.f_weights + share * (other.f_weights - self.f_weights), count)


class WrappedState(eqx.Module):
    """A state that contains the state of the wrapped solver, with its point and step."""

    inner: Any

    @property
    def point(self) -> Any:
        return self.inner.point

    @property
    def step(self) -> Int[Array, ""]:
        return self.inner.step


class Wrapper(eqx.Module):
    """A wrapper of a step solver with the same schedule."""

    solver: Any

    def schedule(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the relative size of a step."""
        return self.solver.schedule(step)


class AveragedState(WrappedState):
    """The mean since the last power of two, and that of the steps between the last two powers."""

    latest: Mean
    before: Mean


class Averaged(Wrapper):
    """The f of the result is the mean of the iterates over the last half of the steps, or slightly more.

    After t steps, with 2^k the largest power of two up to t, the mean is over the steps after 2^(k-1):
    between one half and three quarters of all. It needs no memory for the iterates.
    """

    def init(self, problem: Any, f_weights: Float[Array, " r"], *, key: RandomKey) -> AveragedState:
        nothing = Mean(jnp.zeros_like(f_weights), jnp.array(0))
        return AveragedState(self.solver.init(problem, f_weights, key=key), nothing, nothing)

    def step(self, problem: Any, state: AveragedState, *, key: RandomKey) -> tuple[AveragedState, Any]:
        inner, health = self.solver.step(problem, state.inner, key=key)
        latest = state.latest.add(Mean(inner.point.f_weights, jnp.array(1)))
        # A power of two has no bit in common with the number before it.
        turn = (inner.step & (inner.step - 1)) == 0
        choose = lambda first, second: jax.tree.map(lambda a, b: jnp.where(turn, a, b), first, second)
        nothing = jax.tree.map(jnp.zeros_like, latest)
        return AveragedState(inner, choose(nothing, latest), choose(latest, state.before)), health

    def answer(self, state: AveragedState) -> Any:
        point, mean = self.solver.answer(state.inner), state.before.add(state.latest)
        weights = jnp.where(mean.count > 0, mean.f_weights, point.f_weights)
        return eqx.tree_at(lambda point: point.f_weights, point, weights)


class RandomState(WrappedState):
    """The iterate kept so far, and the sum of all step sizes so far."""

    kept: Any
    total: Float[Array, ""]


class RandomIterate(Wrapper):
    """The result is one iterate, drawn in proportion to its step size, as in the convergence theorem.

    The paper's weights ``2 rho - C rho^2`` are equal to these to first order in the step size rho; C is
    unknown. One iterate is kept at a time: a new one replaces it with the probability of its share of all
    sizes so far.
    """

    def init(self, problem: Any, f_weights: Float[Array, " r"], *, key: RandomKey) -> RandomState:
        inner = self.solver.init(problem, f_weights, key=key)
        return RandomState(inner, inner.point, jnp.zeros((), f_weights.dtype))

    def step(self, problem: Any, state: RandomState, *, key: RandomKey) -> tuple[RandomState, Any]:
        inner, health = self.solver.step(problem, state.inner, key=key)
        size = self.solver.schedule(state.step)
        total = state.total + size
        replaced = jr.uniform(jr.fold_in(key, CHOICE)) * total < size
        choose = lambda new, old: jnp.where(replaced, new, old) if eqx.is_array(new) else new
        return RandomState(inner, jax.tree.map(choose, inner.point, state.kept), total), health

    def answer(self, state: RandomState) -> Any:
        return state.kept
