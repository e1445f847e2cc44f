"""Algorithm 1 of the paper with nested players: the innermost player gets the most updates.

One step is one update of f; for each, ``transport_updates`` of the sampler; for each of those, ``nu_updates`` of nu. Every
gradient is one of the same saddle function, clipped by its norm.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.objective import Point, Problem, SaddleTerms, carry, draw_batch, evaluate_nu, player_gradient, saddle_terms
from kexpfam.potentials import ACTIVATIONS, Network
from kexpfam.solvers.loop import scan
from kexpfam.transports import AbstractTransport, Free, Residual


class Health(NamedTuple):
    """What a reader wants to know after a step; the solver never reads it back."""

    terms: SaddleTerms
    sampler_gap: Float[Array, ""]
    effective_share: Float[Array, ""]
    f_gradient: Float[Array, ""]


class State(eqx.Module):
    """What the next step needs; ``averaged`` is the running mean of the transport, which is what is kept in the end."""

    point: Point
    averaged: AbstractTransport
    nu_moments: optax.OptState
    transport_moments: optax.OptState
    step: Int[Array, ""]


class DoublyDual(eqx.Module):
    """Settings of the nested stochastic saddle-point search.

    The rates are arrays, so changing one does not recompile; the counts and sizes are static. ``horizon`` is the number
    of steps over which the rates fall to a tenth.
    """

    f_rate: ScalarLike = eqx.field(default=1.0, converter=jnp.asarray)
    nu_rate: ScalarLike = eqx.field(default=1e-3, converter=jnp.asarray)
    transport_rate: ScalarLike = eqx.field(default=1e-4, converter=jnp.asarray)
    averaging: ScalarLike = eqx.field(default=0.99, converter=jnp.asarray)
    horizon: ScalarLike = eqx.field(default=1000.0, converter=jnp.asarray)
    clip: float = eqx.field(default=5.0, static=True)
    transport_updates: int = eqx.field(default=5, static=True)
    nu_updates: int = eqx.field(default=3, static=True)
    batch_size: int = eqx.field(default=512, static=True)
    width: int = eqx.field(default=64, static=True)
    transport_depth: int = eqx.field(default=3, static=True)
    nu_depth: int = eqx.field(default=3, static=True)
    activation: str = eqx.field(default="silu", static=True)

    def __check_init__(self):
        for name in ("transport_updates", "nu_updates", "batch_size", "width", "transport_depth", "nu_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}.")
        if self.clip <= 0.0:
            raise ValueError(f"clip must be positive, got {self.clip}.")

    def init(self, problem: Problem, f_weights: Float[Array, " r"], *, key: Key[Array, ""]) -> State:
        """Return the start: given f, a transport that carries noise to itself (or a random one), nu at its anchor."""
        nu_key, transport_key = jr.split(key)
        dim, condition_dim = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        shape: dict[str, Any] = {"width": self.width, "activation": self.activation}
        nu = Network.draw(dim + condition_dim, "scalar", silent=True, key=nu_key, depth=self.nu_depth, **shape)
        shape["depth"] = self.transport_depth
        transport: AbstractTransport
        if problem.anchored:
            transport = Residual.draw(dim, condition_dim, key=transport_key, **shape)
        else:
            noise_dim = jax.eval_shape(lambda k: problem.reference.sample(1, key=k), transport_key).shape[1]
            transport = Free.draw(noise_dim, dim, condition_dim, key=transport_key, **shape)
        optimiser = self._optimiser()
        return State(
            point=Point(f_weights, nu, transport),
            averaged=transport,
            nu_moments=optimiser.init(eqx.filter(nu, eqx.is_array)),
            transport_moments=optimiser.init(eqx.filter(transport, eqx.is_array)),
            step=jnp.array(0),
        )

    def step(self, problem: Problem, state: State, *, key: Key[Array, ""]) -> tuple[State, Health]:
        """Return the state after one update of f, and how the saddle point looked just before that update."""
        # All batches of the step in one call: on a CPU the many small calls of a random generator cost more than its numbers.
        draws = jax.vmap(lambda key: draw_batch(problem, self.batch_size, key=key))
        inner_key, f_key = jr.split(key)
        inner = jax.vmap(draws)(jr.split(inner_key, (self.transport_updates, self.nu_updates + 1)))
        decay = self.pace(state.step)
        update = lambda state, batches: (self._move_transport(problem, state, decay, batches), None)
        state, _ = scan(update, state, inner)
        batch = draw_batch(problem, self.batch_size, key=f_key)
        gradient = player_gradient(problem, state.point, batch, lambda point: point.f_weights)
        norm = jnp.linalg.norm(gradient)
        health = self._health(problem, state.point, batch, norm)
        stride = decay * self.f_rate * jnp.minimum(1.0, self.clip / jnp.maximum(norm, 1e-12))
        point = eqx.tree_at(lambda p: p.f_weights, state.point, state.point.f_weights + stride * gradient)
        kept = averaged(state.averaged, point.transport, self.averaging)
        state = State(point, kept, state.nu_moments, state.transport_moments, state.step + 1)
        return state, health

    def pace(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the share of the rates that a step uses."""
        return jnp.maximum(0.1, 1.0 - 0.9 * step / self.horizon)

    def answer(self, state: State) -> Point:
        """Return the point that a run hands back: the players, the transport as its running mean."""
        return Point(state.point.f_weights, state.point.nu, state.averaged)

    def _move_transport(self, problem, state, decay, batches):
        update = lambda state, batch: (self._move_nu(problem, state, decay, batch), None)
        state, _ = scan(update, state, jax.tree.map(lambda rows: rows[:-1], batches))
        batch = jax.tree.map(lambda rows: rows[-1], batches)
        gradient = player_gradient(problem, state.point, batch, lambda point: point.transport)
        updates, moments = self._optimiser().update(gradient, state.transport_moments)
        transport = stepped(state.point.transport, updates, -decay * self.transport_rate)
        where = lambda s: (s.point.transport, s.transport_moments)
        return eqx.tree_at(where, state, (transport, moments))

    def _move_nu(self, problem, state, decay, batch):
        gradient = player_gradient(problem, state.point, batch, lambda point: point.nu)
        updates, moments = self._optimiser().update(gradient, state.nu_moments)
        nu = stepped(state.point.nu, updates, decay * self.nu_rate)
        return eqx.tree_at(lambda s: (s.point.nu, s.nu_moments), state, (nu, moments))

    def _health(self, problem, point, batch, norm):
        # On the points that the gradient of f has just been taken at, so that it costs next to nothing.
        condition = batch.data.condition
        moved = carry(problem, point.transport, batch.noise, condition)
        log_ratio = problem.inverse_temperature * problem.space.evaluate(point.f_weights, moved, condition)
        log_ratio = log_ratio - evaluate_nu(problem, point.nu, moved, condition)
        gap = jax.nn.logsumexp(log_ratio) - jnp.log(log_ratio.size) - jnp.mean(log_ratio)
        share = jnp.exp(2 * jax.nn.logsumexp(log_ratio) - jax.nn.logsumexp(2 * log_ratio)) / log_ratio.size
        return Health(saddle_terms(point, problem, batch), gap, share, norm)

    def _optimiser(self):
        # Little momentum: in a saddle point the other players' moves make old gradients stale.
        return optax.chain(optax.clip_by_global_norm(self.clip), optax.scale_by_adam(b1=0.5, b2=0.99))


def averaged(old, new, share):
    """Return the running mean ``share * old + (1 - share) * new`` of two players."""
    mean = lambda a, b: (share * a + (1.0 - share) * b).astype(a.dtype) if eqx.is_inexact_array(a) else a
    return jax.tree.map(mean, old, new)


def stepped(part, updates, rate):
    """Return the player moved by ``rate`` times the updates, in its own precision."""
    return eqx.apply_updates(part, jax.tree.map(lambda update: (rate * update).astype(update.dtype), updates))
