"""The saddle function of the doubly dual embedding, written once, and its nested players (Algorithm 1 of the paper).

``SaddleProblem`` holds what is fixed, ``Point`` what moves. The players differ only in the sign they follow: f and nu climb,
the transport falls. The innermost player gets the most updates: one step is one update of f; for each, ``transport_updates`` of
the sampler; for each of those, ``nu_updates`` of nu. Every gradient is one of the same saddle function. nu and the transport
are networks and follow Adam; f's gradient is a natural one (``fit.natural``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.fit.loop import averaged, optimiser, scan, stepped
from kexpfam.fit.natural import Groups, Metric, f_gradient, group_rows, lagged
from kexpfam.fit.problem import check_at_least
from kexpfam.model.measures import AbstractMeasure, draw_each, log_density_each, logsumexp
from kexpfam.model.networks import ACTIVATIONS, AbstractTransport, Free, Layer, Network, Residual
from kexpfam.model.spaces import AbstractFunctionSpace, FeatureSpace

__all__ = [
    "Batch",
    "DoublyDual",
    "Health",
    "Point",
    "SaddleProblem",
    "SaddleTerms",
    "State",
    "anchor",
    "carry",
    "draw_batch",
    "draws_for_f",
    "evaluate_nu",
    "player_gradient",
    "saddle_terms",
]


# Steps between two measurements of f's metric, which cost more than a step.
METRIC_EVERY = 5
# The waves that networks see, in octaves of the frequencies of f's kernel.
OCTAVES = (-2.0, 1.0)


class SaddleProblem(eqx.Module):
    """What is solved. Every array in here is fixed while a solver runs.

    ``reference`` is the law of the transport's noise. If it is *anchored* it lives in the space of targets and is itself a
    guess of the solution: nu is then measured from ``log(reference / base)``, and expectations under the base are taken by
    importance sampling from the reference. Both are exact rewritings that shrink the variance of the KL term.
    """

    sample: Sample
    base: AbstractMeasure
    space: AbstractFunctionSpace
    reference: AbstractMeasure
    rkhs_penalty: Float[Array, ""]
    inverse_temperature: Float[Array, ""]
    anchored: bool = eqx.field(static=True)


class Point(eqx.Module):
    """What is sought. Every array in here moves.

    ``f_weights`` are f as the problem's space holds it; ``nu`` is called with points and conditions.
    """

    f_weights: Any
    nu: Any
    transport: AbstractTransport


class Batch(NamedTuple):
    """The draws that one evaluation of the saddle function uses; ``base_log_weights`` carry base expectations."""

    data: Sample
    noise: Float[Array, "b k"]
    base: Float[Array, "b d"]
    base_log_weights: Float[Array, " b"]


class SaddleTerms(NamedTuple):
    """Each term as defined; ``value`` is where the signs are. ``kl_dual`` is the KL itself where q has a density."""

    data_fit: Float[Array, ""]
    model_fit: Float[Array, ""]
    kl_dual: Float[Array, ""]
    penalty: Float[Array, ""]

    @property
    def value(self) -> Float[Array, "..."]:
        return self.data_fit - self.model_fit + self.kl_dual - self.penalty


def draw_batch(problem: SaddleProblem, size: int, *, key: Key[Array, ""]) -> Batch:
    """Draw data rows with replacement, transport noise under their conditions, and weighted base points."""
    rows_key, noise_key, base_key = jr.split(key, 3)
    data = problem.sample.rows(problem.sample.drawn(size, key=rows_key))
    noise = draw_each(problem.reference, data.condition, key=noise_key)
    if not problem.anchored:
        return Batch(data, noise, problem.base.sample(size, key=base_key), jnp.zeros(size))
    base = draw_each(problem.reference, data.condition, key=base_key)
    return Batch(data, noise, base, -anchor(problem, base, data.condition))


def anchor(
    problem: SaddleProblem, x: Float[Array, "b d"], condition: Float[Array, "b p"]
) -> Float[Array, " b"]:
    """Return ``log(reference / base)``: the exact nu of the transport that does not move its noise; 0 if not anchored."""
    if not problem.anchored:
        return jnp.zeros(x.shape[0])
    return log_density_each(problem.reference, x, condition) - problem.base.log_density(x)


def evaluate_nu(
    problem: SaddleProblem, nu: Callable, x: Float[Array, "b d"], condition: Float[Array, "b p"]
) -> Float[Array, " b"]:
    """Return nu: its network, measured from the anchor."""
    return nu(x, condition) + anchor(problem, x, condition)


def carry(
    problem: SaddleProblem,
    transport: AbstractTransport,
    noise: Float[AnyArray, "b k"],
    condition: Float[AnyArray, "b p"],
) -> Float[Array, "b d"]:
    """Return the sampler's points: noise carried by the transport, folded onto the base's support."""
    return problem.base.fold(transport(noise, condition))


def saddle_terms(point: Point, problem: SaddleProblem, batch: Batch) -> SaddleTerms:
    r"""Return the terms of the saddle function on one batch.

    With :math:`f \in H`, dual potential :math:`\nu`, transport :math:`g` and noise :math:`\xi`,

    .. math::
        L(f, g, \nu) = \hat E[f(x)] - E_\xi[f(g(\xi))] - \tfrac{\eta}{2} \|f\|_H^2
            + \tfrac{1}{\lambda} \bigl( E_\xi[\nu(g(\xi))] - E_{p_0}[e^{\nu}] + 1 \bigr).

    Max over f, min over g, max over nu. Equation ledger: ``DDE-SADDLE``.

    Parameters
    ----------
    point
        Holds ``f_weights`` (climbs), ``nu`` (climbs) and ``transport`` (falls).
    problem
        Holds :math:`\eta` as ``rkhs_penalty`` and :math:`\lambda` as ``inverse_temperature``.
    batch
        Draws for the three expectations; the value is exact given these.

    Notes
    -----
    The bracket is a lower bound of :math:`KL(g_\# \xi \,\|\, p_0)`, attained at :math:`\nu = \log q / p_0`.
    """
    condition = batch.data.condition
    moved = carry(problem, point.transport, batch.noise, condition)
    f = lambda x: problem.space.evaluate(point.f_weights, x, condition)
    kl_bound = jnp.mean(evaluate_nu(problem, point.nu, moved, condition)) + 1.0
    kl_bound -= jnp.mean(
        jnp.exp(evaluate_nu(problem, point.nu, batch.base, condition) + batch.base_log_weights)
    )
    return SaddleTerms(
        data_fit=jnp.mean(f(batch.data.target)),
        model_fit=jnp.mean(f(moved)),
        kl_dual=kl_bound / problem.inverse_temperature,
        penalty=0.5 * problem.rkhs_penalty * problem.space.squared_norm(point.f_weights),
    )


def player_gradient(problem: SaddleProblem, point: Point, batch: Batch, player: Callable) -> Any:
    """Return the gradient of the saddle value with respect to one player."""
    value = lambda part: saddle_terms(eqx.tree_at(player, point, part), problem, batch).value
    return eqx.filter_grad(value)(player(point))


def _best_constant(problem: SaddleProblem, point: Point, batch: Batch) -> Point:
    """Return the point with the constant in nu that is best on the batch, ``E_p0[exp nu] = 1``.

    An error of the constant would scale all of nu's gradient at the base's draws.
    """
    values = evaluate_nu(problem, point.nu, batch.base, batch.data.condition) + batch.base_log_weights
    shift = logsumexp(values) - jnp.log(values.size)
    return eqx.tree_at(
        lambda p: p.nu.layers[-1].bias, point, replace_fn=lambda bias: (bias - shift).astype(bias.dtype)
    )


def draws_for_f(
    problem: SaddleProblem, point: Point, *, key: Key[Array, ""]
) -> tuple[Groups, Float[Array, "ge d"], Float[Array, " ge"]]:
    """Return rows of the data by condition, draws of the sampler under the same conditions, and ``f - nu`` at these."""
    rows_key, noise_key = jr.split(key)
    groups = group_rows(problem.sample, key=rows_key)
    condition = groups.draw_conditions
    moved = carry(problem, point.transport, draw_each(problem.reference, condition, key=noise_key), condition)
    ahead = problem.inverse_temperature * problem.space.evaluate(point.f_weights, moved, condition)
    return groups, moved, ahead - evaluate_nu(problem, point.nu, moved, condition)


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
    metric: Metric
    step: Int[Array, ""]


class DoublyDual(eqx.Module):
    """Settings of the nested stochastic saddle-point search.

    The rates are arrays, so changing one does not recompile; the counts and sizes are static.

    Parameters
    ----------
    f_rate, nu_rate, transport_rate : float
        Share of a natural step that f takes, and Adam's rates of nu and the transport.
    horizon : float
        Steps over which the schedules run: rates are full in its first half, then fall to a tenth.
    trust : float
        The length (nats of standard deviation) of f's natural direction that is taken as it is; longer ones are cut to it.
    damping : float
        What the metric of f starts with on its diagonal, in units of the kernel; it falls to 1e-5 of that within 0.6 horizons.
    lag_share : float
        How much of the sampler's lag is made good in f's gradient, from 0, none, to 1.
    averaging : float
        Weight of the past in the running mean of the transport.
    natural : bool
        Whether f's direction is the natural one; it takes memory for the square of the features. Otherwise f follows its plain
        gradient, clipped by its norm, as the paper has it.
    transport_updates, nu_updates : int
        Updates of the transport for each of f, and of nu for each of the transport.
    batch_size, width, transport_depth, nu_depth, waves : int
        Draws per update, hidden layers of the networks, and the waves at f's own length scales that they see.
    """

    f_rate: ScalarLike = eqx.field(default=0.1, converter=jnp.asarray)
    nu_rate: ScalarLike = eqx.field(default=6e-3, converter=jnp.asarray)
    transport_rate: ScalarLike = eqx.field(default=6e-3, converter=jnp.asarray)
    averaging: ScalarLike = eqx.field(default=0.99, converter=jnp.asarray)
    horizon: ScalarLike = eqx.field(default=800.0, converter=jnp.asarray)
    trust: ScalarLike = eqx.field(default=0.3, converter=jnp.asarray)
    damping: ScalarLike = eqx.field(default=0.02, converter=jnp.asarray)
    lag_share: ScalarLike = eqx.field(default=0.5, converter=jnp.asarray)
    clip: float = eqx.field(default=5.0, static=True)
    natural: bool = eqx.field(default=True, static=True)
    transport_updates: int = eqx.field(default=5, static=True)
    nu_updates: int = eqx.field(default=2, static=True)
    batch_size: int = eqx.field(default=384, static=True)
    width: int = eqx.field(default=64, static=True)
    transport_depth: int = eqx.field(default=2, static=True)
    nu_depth: int = eqx.field(default=2, static=True)
    waves: int = eqx.field(default=64, static=True)
    activation: str = eqx.field(default="silu", static=True)

    def __check_init__(self) -> None:
        check_at_least(
            self, 1, "transport_updates", "nu_updates", "batch_size", "width", "transport_depth", "nu_depth"
        )
        check_at_least(self, 0, "waves")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}.")
        if self.clip <= 0.0:
            raise ValueError(f"clip must be positive, got {self.clip}.")

    def init(self, problem: SaddleProblem, f_weights: Float[Array, " r"], *, key: Key[Array, ""]) -> State:
        """Return the start: given f, a transport that carries noise to itself (or a random one), nu at its anchor."""
        nu_key, transport_key, *wave_keys = jr.split(key, 4)
        dim, condition_dim = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        shape: dict[str, Any] = {"width": self.width, "activation": self.activation}
        shape |= {"depth": self.nu_depth, "waves": self._drawn_waves(problem, wave_keys[0])}
        nu = Network.draw(dim + condition_dim, "scalar", zero_initialised=True, key=nu_key, **shape)
        shape["depth"] = self.transport_depth
        transport: AbstractTransport
        if problem.anchored:
            shape["waves"] = self._drawn_waves(problem, wave_keys[1])
            transport = Residual.draw(dim, condition_dim, key=transport_key, **shape)
        else:
            shape["waves"] = None  # noise of another width knows no length scales
            noise_dim = jax.eval_shape(lambda k: problem.reference.sample(1, key=k), transport_key).shape[1]
            transport = Free.draw(noise_dim, dim, condition_dim, key=transport_key, **shape)
        optimiser = self._optimiser
        return State(
            point=Point(f_weights, nu, transport),
            averaged=transport,
            nu_moments=optimiser.init(eqx.filter(nu, eqx.is_array)),
            transport_moments=optimiser.init(eqx.filter(transport, eqx.is_array)),
            metric=Metric.start(f_weights.size if self.natural else 0),
            step=jnp.array(0),
        )

    def _drawn_waves(self, problem: SaddleProblem, key: Key[Array, ""]) -> Layer | None:
        """Return waves of points and conditions, from four times as long as f's own to half as long."""
        if self.waves == 0 or not isinstance(problem.space, FeatureSpace):
            return None
        target_key, condition_key, octave_key, phase_key = jr.split(key, 4)
        dims = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        of_target = problem.space.target.waves(self.waves, dims[0], key=target_key)
        of_condition = problem.space.condition.waves(self.waves, dims[1], key=condition_key)
        octaves = 2.0 ** jr.uniform(octave_key, (self.waves, 1), minval=OCTAVES[0], maxval=OCTAVES[1])
        return Layer.of_frequencies(octaves * jnp.concatenate([of_target, of_condition], 1), key=phase_key)

    def step(self, problem: SaddleProblem, state: State, *, key: Key[Array, ""]) -> tuple[State, Health]:
        """Return the state after one update of f, and how the saddle point looked just before that update."""
        # All batches of the step in one call: on a CPU the many small calls of a random generator cost more than its numbers.
        draws = jax.vmap(lambda key: draw_batch(problem, self.batch_size, key=key))
        inner_key, f_key = jr.split(key)
        inner = jax.vmap(draws)(jr.split(inner_key, (self.transport_updates, self.nu_updates + 1)))
        decay = self.schedule(state.step)
        update = lambda state, batches: (self._move_transport(problem, state, decay, batches), None)
        state, _ = scan(update, state, inner)
        state, health = self._move_f(problem, state, decay, f_key)
        share = jnp.minimum(self.averaging, (1.0 + state.step) / (10.0 + state.step))
        kept = averaged(state.averaged, state.point.transport, share)
        return eqx.tree_at(lambda s: (s.averaged, s.step), state, (kept, state.step + 1)), health

    def schedule(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the share of the rates that a step uses."""
        return jnp.clip(2.0 * (1.0 - step / self.horizon), 0.1, 1.0)

    def answer(self, state: State) -> Point:
        """Return the point that a run hands back: the players, the transport as its running mean."""
        return Point(state.point.f_weights, state.point.nu, state.averaged)

    def _move_f(
        self, problem: SaddleProblem, state: State, decay: Float[Array, ""], key: Key[Array, ""]
    ) -> tuple[State, Health]:
        draws_key, batch_key = jr.split(key)
        point = state.point
        groups, moved, behind = draws_for_f(problem, point, key=draws_key)
        lag = lagged(behind, groups.draws, self.lag_share)
        gradient = f_gradient(
            problem.space, problem.rkhs_penalty, point.f_weights, groups, moved, lag.weights
        )
        metric, direction, length = state.metric, gradient, jnp.linalg.norm(gradient)
        if self.natural:
            damping = self.damping * 10.0 ** (-5.0 * jnp.minimum(state.step / (0.6 * self.horizon), 1.0))
            metric = jax.lax.cond(
                state.step % METRIC_EVERY == 0,
                lambda old: old.refreshed(
                    problem.space, groups, moved, lag.weights, problem.rkhs_penalty + damping
                ),
                lambda old: old,
                metric,
            )
            direction, length = metric.solved(gradient)
        health = Health(
            saddle_terms(point, problem, draw_batch(problem, self.batch_size, key=batch_key)),
            lag.gap,
            lag.effective_share,
            jnp.linalg.norm(gradient),
        )
        longest = self.trust if self.natural else self.clip
        stride = decay * self.f_rate * jnp.minimum(1.0, longest / jnp.maximum(length, 1e-12))
        where = lambda s: (s.point.f_weights, s.metric)
        f_weights = point.f_weights + (stride * direction).astype(point.f_weights.dtype)
        return eqx.tree_at(where, state, (f_weights, metric)), health

    def _move_transport(
        self, problem: SaddleProblem, state: State, decay: Float[Array, ""], batches: Batch
    ) -> State:
        update = lambda state, batch: (self._move_nu(problem, state, decay, batch), None)
        state, _ = scan(update, state, jax.tree.map(lambda rows: rows[:-1], batches))
        batch = jax.tree.map(lambda rows: rows[-1], batches)
        gradient = player_gradient(problem, state.point, batch, lambda point: point.transport)
        updates, moments = self._optimiser.update(gradient, state.transport_moments)
        transport = stepped(state.point.transport, updates, -decay * self.transport_rate)
        where = lambda s: (s.point.transport, s.transport_moments)
        return eqx.tree_at(where, state, (transport, moments))

    def _move_nu(self, problem: SaddleProblem, state: State, decay: Float[Array, ""], batch: Batch) -> State:
        point = _best_constant(problem, state.point, batch)
        gradient = player_gradient(problem, point, batch, lambda point: point.nu)
        updates, moments = self._optimiser.update(gradient, state.nu_moments)
        nu = stepped(point.nu, updates, decay * self.nu_rate)
        return eqx.tree_at(lambda s: (s.point.nu, s.nu_moments), state, (nu, moments))

    @classmethod
    def plain(cls, **settings: Any) -> "DoublyDual":
        """Return the paper's own scheme: plain gradients of f, plain networks, nothing made good for the sampler's lag."""
        own: dict[str, Any] = {"natural": False, "waves": 0, "lag_share": 0.0, "f_rate": 1.0, "nu_rate": 1e-3}
        own |= {
            "transport_rate": 5e-4,
            "nu_updates": 3,
            "batch_size": 512,
            "transport_depth": 3,
            "nu_depth": 3,
        }
        return cls(**own | settings)

    @property
    def _optimiser(self) -> optax.GradientTransformation:
        return optimiser(clip=self.clip, first=0.5, second=0.99)
