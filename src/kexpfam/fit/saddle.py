"""The saddle function of the doubly dual embedding and its nested players (Algorithm 1 of the paper).

``SaddleProblem`` is fixed, ``SaddlePoint`` moves. f and nu ascend the saddle function, the transport descends
it. One step is one update of f; for each there are ``transport_updates`` of the transport, and for each of
those ``nu_updates`` of nu. nu and the transport are networks and follow Adam; f follows a natural gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.fit.loop import averaged, descended, moments_of, optimiser, scan
from kexpfam.fit.natural import FStep, Groups, Lag, Metric, f_gradient, group_rows, sampler_lag
from kexpfam.jax_settings import double
from kexpfam.model.located import Defensive, InUnits, Located, TransportInUnits
from kexpfam.model.measures import AbstractMeasure, draw_each, log_density_each, logsumexp
from kexpfam.model.networks import ACTIVATIONS, AbstractTransport, Free, Layer, Network, Residual
from kexpfam.model.spaces import AbstractFunctionSpace, FeatureSpace
from kexpfam.settings import check_at_least


class SaddleProblem(eqx.Module):
    """The fixed part: every array is constant while a solver runs.

    ``reference`` is the distribution of the transport's noise. If it is *anchored* it is a distribution of
    targets that approximates the solution: nu is then measured from ``log(reference / base)``, and
    expectations under the base use importance sampling from the reference. Both rewritings are exact and
    reduce the variance of the KL term.
    """

    sample: Sample
    base: AbstractMeasure
    space: AbstractFunctionSpace
    reference: AbstractMeasure
    rkhs_penalty: Float[Array, ""]
    inverse_temperature: Float[Array, ""]
    anchored: bool = eqx.field(static=True)

    @property
    def nu_reference(self) -> AbstractMeasure:
        """Return the distribution that an anchored nu is measured from, and its draws come from."""
        rough = isinstance(self.reference, Located)
        return Defensive(self.base, self.reference) if rough else self.reference


class SaddlePoint(eqx.Module):
    """The players: every array moves. ``f_weights`` represent f in the problem's space."""

    f_weights: Any
    nu: Any
    transport: AbstractTransport


class SaddleBatch(NamedTuple):
    """The draws of one evaluation of the saddle function; ``base_log_weights`` weight the base points."""

    data: Sample
    noise: Float[Array, "b k"]
    base: Float[Array, "b d"]
    base_log_weights: Float[Array, " b"]


class SaddleTerms(NamedTuple):
    """The terms without their signs, and ``value`` with them; ``kl_dual`` is the KL if q has a density."""

    data_fit: Float[Array, ""]
    model_fit: Float[Array, ""]
    kl_dual: Float[Array, ""]
    penalty: Float[Array, ""]

    @property
    def value(self) -> Float[Array, "..."]:
        return self.data_fit - self.model_fit + self.kl_dual - self.penalty


def draw_batch(problem: SaddleProblem, size: int, *, key: Key[Array, ""]) -> SaddleBatch:
    """Draw data rows with replacement, transport noise under their conditions, and weighted base points."""
    rows_key, noise_key, base_key = jr.split(key, 3)
    data = problem.sample.rows(problem.sample.drawn(size, key=rows_key))
    noise = draw_each(problem.reference, data.condition, key=noise_key)
    if not problem.anchored:
        return SaddleBatch(data, noise, problem.base.sample(size, key=base_key), jnp.zeros(size))
    base = draw_each(problem.nu_reference, data.condition, key=base_key)
    return SaddleBatch(data, noise, base, -anchor(problem, base, data.condition))


def anchor(
    problem: SaddleProblem, x: Float[Array, "b d"], condition: Float[Array, "b p"]
) -> Float[Array, " b"]:
    """Return ``log(nu_reference / base)``, for the reference the exact nu of the identity transport; 0 if not
    anchored."""
    if not problem.anchored:
        return jnp.zeros(x.shape[0])
    return log_density_each(problem.nu_reference, x, condition) - problem.base.log_density(x)


def evaluate_nu(
    problem: SaddleProblem, nu: Callable, x: Float[Array, "b d"], condition: Float[Array, "b p"]
) -> Float[Array, " b"]:
    """Return nu: its network plus the anchor."""
    return nu(x, condition) + anchor(problem, x, condition)


def carry(
    problem: SaddleProblem,
    transport: AbstractTransport,
    noise: Float[AnyArray, "b k"],
    condition: Float[AnyArray, "b p"],
) -> Float[Array, "b d"]:
    """Return the sampler's points: transported noise, folded onto the base's support."""
    return problem.base.fold(transport(noise, condition))


def saddle_terms(point: SaddlePoint, problem: SaddleProblem, batch: SaddleBatch) -> SaddleTerms:
    r"""Return the terms of the saddle function on one batch.

    With :math:`f \in H`, dual potential :math:`\nu`, transport :math:`g` and noise :math:`\xi`,

    .. math::
        L(f, g, \nu) = \hat E[f(x)] - E_\xi[f(g(\xi))] - \tfrac{\eta}{2} \|f\|_H^2
            + \tfrac{1}{\lambda} \bigl( E_\xi[\nu(g(\xi))] - E_{p_0}[e^{\nu}] + 1 \bigr).

    Max over f, min over g, max over nu; :math:`\eta` is ``rkhs_penalty`` and :math:`\lambda` is
    ``inverse_temperature``. The value is exact given the draws of the batch. Equation ledger: ``DDE-SADDLE``.

    The bracket is a lower bound of :math:`KL(g_\# \xi \,\|\, p_0)`, attained at :math:`\nu = \log q / p_0`.
    """
    condition = batch.data.condition
    moved = carry(problem, point.transport, batch.noise, condition)
    f = lambda x: problem.space.evaluate(point.f_weights, x, condition)
    nu = lambda x: evaluate_nu(problem, point.nu, x, condition)
    kl_bound = jnp.mean(nu(moved)) + 1.0 - jnp.mean(jnp.exp(nu(batch.base) + batch.base_log_weights))
    return SaddleTerms(
        data_fit=jnp.mean(f(batch.data.target)),
        model_fit=jnp.mean(f(moved)),
        kl_dual=kl_bound / problem.inverse_temperature,
        penalty=0.5 * problem.rkhs_penalty * problem.space.squared_norm(point.f_weights),
    )


def player_gradient(problem: SaddleProblem, point: SaddlePoint, batch: SaddleBatch, player: Callable) -> Any:
    """Return the gradient of the saddle value with respect to one player."""
    value = lambda part: saddle_terms(eqx.tree_at(player, point, part), problem, batch).value
    return eqx.filter_grad(value)(player(point))


def _best_constant(problem: SaddleProblem, point: SaddlePoint, batch: SaddleBatch) -> SaddlePoint:
    """Return the point with the optimal constant in nu on the batch, ``E_p0[exp nu] = 1``.

    An error of the constant would scale nu's gradient at all base points.
    """
    values = evaluate_nu(problem, point.nu, batch.base, batch.data.condition) + batch.base_log_weights
    shift = logsumexp(values) - jnp.log(values.size)
    shifted = lambda bias: (bias - shift).astype(bias.dtype)
    return eqx.tree_at(lambda p: p.nu.layers[-1].bias, point, replace_fn=shifted)


def draws_for_f(
    problem: SaddleProblem, point: SaddlePoint, settings: FStep, *, key: Key[Array, ""]
) -> tuple[Groups, Float[Array, "ge d"], Float[Array, " ge"]]:
    """Return rows of data by condition, draws of the sampler under these conditions, and ``f - nu`` there."""
    rows_key, noise_key = jr.split(key)
    groups = group_rows(problem.sample, settings, key=rows_key)
    condition = groups.draw_conditions
    moved = carry(problem, point.transport, draw_each(problem.reference, condition, key=noise_key), condition)
    ahead = problem.inverse_temperature * problem.space.evaluate(point.f_weights, moved, condition)
    return groups, moved, ahead - evaluate_nu(problem, point.nu, moved, condition)


class FDraws(NamedTuple):
    """Rows of data, weighted draws for f's gradient, and the lag of the sampler."""

    groups: Groups
    points: Float[Array, "ge d"]
    weights: Float[Array, " ge"]
    lag: Lag


class SaddleHealth(NamedTuple):
    """Measurements of a step for the trace."""

    terms: SaddleTerms
    sampler_gap: Float[Array, ""]
    effective_share: Float[Array, ""]
    f_gradient: Float[Array, ""]


class SaddleState(eqx.Module):
    """The state between steps; ``averaged`` is the exponential moving average of the transport.

    ``best`` is the point of least ``distance`` from the solution among those whose distance was measured.
    """

    point: SaddlePoint
    averaged: AbstractTransport
    best: SaddlePoint
    distance: Float[Array, ""]
    nu_moments: optax.OptState
    transport_moments: optax.OptState
    metric: Metric
    step: Int[Array, ""]

    def judged(self, point: SaddlePoint, distance: float) -> "SaddleState":
        """Return the state with a point of this distance as the best one, if it is."""
        if not distance < self.distance:
            return self
        return eqx.tree_at(lambda state: (state.best, state.distance), self, (point, jnp.asarray(distance)))


class DoublyDual(eqx.Module):
    """Settings of the nested stochastic saddle-point search.

    The rates are arrays: changing one does not recompile. Counts and sizes are static.

    Parameters
    ----------
    f_rate, nu_rate, transport_rate : float
        Share of a natural step that f takes, and Adam's rates of nu and the transport.
    averaging : float
        Weight of the past in the exponential moving average of the transport.
    horizon : float
        Steps of the schedules: rates are full in the first half, then fall to a tenth. In a longer run f
        stays there, and the networks repeat the schedule over twice as many steps, then over four times.
    trust : float
        Longest natural direction of f (standard deviation in nats); longer ones are scaled to it.
    damping : float
        Initial damping of f's metric, in units of the kernel; it falls to 1e-5 of that within 0.6 horizons.
    lag_share : float
        Share of the sampler's lag that is corrected in f's gradient, from 0 to 1.
    clip : float
        Largest norm of a gradient; longer ones are scaled to it.
    natural : bool
        Whether f follows the natural gradient, which takes memory for the square of the features. Otherwise f
        follows its plain, clipped gradient, as in the paper.
    transport_updates, nu_updates : int
        Updates of the transport per update of f, and of nu per update of the transport.
    batch_size, width, transport_depth, nu_depth : int
        Draws per update, and hidden layers of the networks.
    waves, octaves : int, tuple of float
        Sinusoidal input features of the networks, and the range of their frequencies in octaves of the
        frequencies of f's kernel.
    activation : str
        Activation function of the networks.
    f_step : FStep
        Sizes of a step of f.
    """

    f_rate: ScalarLike = eqx.field(default=0.1, converter=double)
    nu_rate: ScalarLike = eqx.field(default=6e-3, converter=double)
    transport_rate: ScalarLike = eqx.field(default=6e-3, converter=double)
    averaging: ScalarLike = eqx.field(default=0.99, converter=double)
    horizon: ScalarLike = eqx.field(default=800.0, converter=double)
    trust: ScalarLike = eqx.field(default=0.3, converter=double)
    damping: ScalarLike = eqx.field(default=0.02, converter=double)
    lag_share: ScalarLike = eqx.field(default=0.5, converter=double)
    clip: float = eqx.field(default=5.0, static=True)
    natural: bool = eqx.field(default=True, static=True)
    transport_updates: int = eqx.field(default=5, static=True)
    nu_updates: int = eqx.field(default=2, static=True)
    batch_size: int = eqx.field(default=384, static=True)
    width: int = eqx.field(default=64, static=True)
    transport_depth: int = eqx.field(default=2, static=True)
    nu_depth: int = eqx.field(default=2, static=True)
    waves: int = eqx.field(default=64, static=True)
    octaves: tuple[float, float] = eqx.field(default=(-2.0, 1.0), static=True)
    activation: str = eqx.field(default="silu", static=True)
    f_step: FStep = FStep()

    def __check_init__(self) -> None:
        sizes = ("batch_size", "width", "transport_depth", "nu_depth")
        check_at_least(self, 1, "transport_updates", "nu_updates", *sizes)
        check_at_least(self, 0, "waves")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}.")
        if self.clip <= 0.0:
            raise ValueError(f"clip must be positive, got {self.clip}.")

    @classmethod
    def warm(cls) -> "DoublyDual":
        """Return the settings next to the solution: small steps, and no damping of f."""
        return cls(f_rate=0.01, nu_rate=2e-3, transport_rate=2e-5, damping=0.0)

    @classmethod
    def near(cls) -> "DoublyDual":
        """Return the settings for an f that begins with the right location and scale: little damping."""
        return cls(f_rate=0.2, damping=2e-5)

    @classmethod
    def plain(cls, **settings: Any) -> "DoublyDual":
        """Return the paper's scheme: plain gradients of f, plain networks, no correction of the lag."""
        own: dict[str, Any] = {"natural": False, "waves": 0, "lag_share": 0.0, "f_rate": 1.0, "nu_rate": 1e-3}
        own |= {"transport_rate": 5e-4, "nu_updates": 3, "batch_size": 512}
        return cls(**own | {"transport_depth": 3, "nu_depth": 3} | settings)

    def init(
        self, problem: SaddleProblem, f_weights: Float[Array, " r"], *, key: Key[Array, ""]
    ) -> SaddleState:
        """Return the start: the given f, a zero-initialised nu, and the identity (or a random) transport."""
        nu_key, transport_key, *wave_keys = jr.split(key, 4)
        dim, condition_dim = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        shape: dict[str, Any] = {"width": self.width, "activation": self.activation}
        nu_shape = shape | {"depth": self.nu_depth, "waves": self._drawn_waves(problem, wave_keys[0])}
        nu: Any = Network.draw(dim + condition_dim, "scalar", zero_initialised=True, key=nu_key, **nu_shape)
        shape |= {"depth": self.transport_depth, "key": transport_key}
        transport: AbstractTransport
        if problem.anchored:
            waves = self._drawn_waves(problem, wave_keys[1])
            transport = Residual.draw(dim, condition_dim, waves=waves, **shape)
        else:
            # Noise of another width has no length scales, and so no waves.
            noise_dim = jax.eval_shape(lambda k: problem.reference.sample(1, key=k), transport_key).shape[1]
            transport = Free.draw(noise_dim, dim, condition_dim, waves=None, **shape)
        if isinstance(problem.reference, Located):
            law = problem.reference
            nu, transport = InUnits(nu, law), TransportInUnits(transport.network, law)
        moments = moments_of(nu, self._optimiser), moments_of(transport, self._optimiser)
        metric = Metric.start(f_weights.size if self.natural else 0)
        point, distance = SaddlePoint(f_weights, nu, transport), jnp.array(jnp.inf)
        return SaddleState(point, transport, point, distance, *moments, metric, jnp.array(0))

    def _drawn_waves(self, problem: SaddleProblem, key: Key[Array, ""]) -> Layer | None:
        """Return random sinusoids of points and conditions, at ``octaves`` of f's own frequencies."""
        if self.waves == 0 or not isinstance(problem.space, FeatureSpace):
            return None
        target_key, condition_key, octave_key, phase_key = jr.split(key, 4)
        dims = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        of_target = problem.space.target.waves(self.waves, dims[0], key=target_key)
        of_condition = problem.space.condition.waves(self.waves, dims[1], key=condition_key)
        low, high = self.octaves
        if isinstance(problem.reference, Located):
            of_target = of_target * problem.reference.scale
        octaves = 2.0 ** jr.uniform(octave_key, (self.waves, 1), minval=low, maxval=high)
        return Layer.of_frequencies(octaves * jnp.concatenate([of_target, of_condition], 1), key=phase_key)

    def step(
        self, problem: SaddleProblem, state: SaddleState, *, key: Key[Array, ""]
    ) -> tuple[SaddleState, SaddleHealth]:
        """Return the state after one update of f, and measurements just before that update."""
        # All batches of the step are drawn in one call: on a CPU many small calls cost more than the numbers.
        draws = jax.vmap(lambda key: draw_batch(problem, self.batch_size, key=key))
        inner_key, f_key = jr.split(key)
        inner = jax.vmap(draws)(jr.split(inner_key, (self.transport_updates, self.nu_updates + 1)))
        decay = self.schedule(state.step)
        update = lambda state, batches: (self._move_transport(problem, state, decay, batches), None)
        state, _ = scan(update, state, inner)
        state, health = self._move_f(problem, state, f_key)
        share = jnp.minimum(self.averaging, (1.0 + state.step) / (10.0 + state.step))
        kept = averaged(state.averaged, state.point.transport, share)
        return eqx.tree_at(lambda s: (s.averaged, s.step), state, (kept, state.step + 1)), health

    def schedule(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the factor of the networks' rates at a step."""
        # Cycle k has 2^k horizons and begins after 2^k - 1 horizons.
        horizons = step / self.horizon + 1.0
        cycle = 2.0 ** jnp.floor(jnp.log2(horizons))
        return jnp.clip(2.0 * (2.0 - horizons / cycle), 0.1, 1.0)

    def reached(self, state: SaddleState) -> SaddlePoint:
        """Return the players of a state, with the averaged transport."""
        return SaddlePoint(state.point.f_weights, state.point.nu, state.averaged)

    def answer(self, state: SaddleState) -> SaddlePoint:
        """Return the result of a run: the best of the measured points, or the last one if none was
        measured."""
        return state.best if np.isfinite(state.distance) else self.reached(state)

    def _move_f(
        self, problem: SaddleProblem, state: SaddleState, key: Key[Array, ""]
    ) -> tuple[SaddleState, SaddleHealth]:
        draws_key, batch_key = jr.split(key)
        decay = jnp.clip(2.0 * (1.0 - state.step / self.horizon), 0.1, 1.0)
        point, settings, penalty = state.point, self.f_step, problem.rkhs_penalty
        state, (groups, moved, weights, lag) = self._draw_for_f(problem, state, draws_key)
        gradient = f_gradient(problem.space, penalty, point.f_weights, groups, moved, weights)
        metric, direction, length = state.metric, gradient, jnp.linalg.norm(gradient)
        if self.natural:
            damping = self.damping * 10.0 ** (-5.0 * jnp.minimum(state.step / (0.6 * self.horizon), 1.0))
            measured = (problem.space, groups, moved, weights, penalty + damping, settings)
            due, refresh = state.step % settings.metric_every == 0, lambda old: old.refreshed(*measured)
            metric = jax.lax.cond(due, refresh, lambda old: old, metric)
            direction, length = metric.solved(gradient)
        terms = saddle_terms(point, problem, draw_batch(problem, self.batch_size, key=batch_key))
        health = SaddleHealth(terms, lag.gap, lag.effective_share, jnp.linalg.norm(gradient))
        longest = self.trust if self.natural else self.clip
        stride = decay * self.f_rate * jnp.minimum(1.0, longest / jnp.maximum(length, 1e-12))
        f_weights = point.f_weights + (stride * direction).astype(point.f_weights.dtype)
        return eqx.tree_at(lambda s: (s.point.f_weights, s.metric), state, (f_weights, metric)), health

    def _draw_for_f(
        self, problem: SaddleProblem, state: SaddleState, key: Key[Array, ""]
    ) -> tuple[SaddleState, FDraws]:
        """Return draws of the sampler, weighted by a share of its lag."""
        groups, moved, behind = draws_for_f(problem, state.point, self.f_step, key=key)
        most = self.f_step.most_log_weight
        lag = sampler_lag(behind, groups.draws, self.lag_share, most_log_weight=most)
        return state, FDraws(groups, moved, lag.weights, lag)

    def _move_transport(
        self, problem: SaddleProblem, state: SaddleState, decay: Float[Array, ""], batches: SaddleBatch
    ) -> SaddleState:
        update = lambda state, batch: (self._move_nu(problem, state, decay, batch), None)
        state, _ = scan(update, state, jax.tree.map(lambda rows: rows[:-1], batches))
        batch = jax.tree.map(lambda rows: rows[-1], batches)
        gradient = player_gradient(problem, state.point, batch, lambda point: point.transport)
        rate = decay * self.transport_rate
        moved = descended(state.point.transport, gradient, state.transport_moments, rate, self._optimiser)
        return eqx.tree_at(lambda s: (s.point.transport, s.transport_moments), state, moved)

    def _move_nu(
        self, problem: SaddleProblem, state: SaddleState, decay: Float[Array, ""], batch: SaddleBatch
    ) -> SaddleState:
        point = _best_constant(problem, state.point, batch)
        gradient = player_gradient(problem, point, batch, lambda point: point.nu)
        moved = descended(point.nu, gradient, state.nu_moments, -decay * self.nu_rate, self._optimiser)
        return eqx.tree_at(lambda s: (s.point.nu, s.nu_moments), state, moved)

    @property
    def _optimiser(self) -> optax.GradientTransformation:
        return optimiser(clip=self.clip, first=0.5, second=0.99)
