"""Algorithms 1, 2 and 3 of the paper as printed: stochastic functional gradients of f and nu.

They alternate with gradient steps of the transport. In the space of kernel expansions a step adds a term per
draw (Algorithm 2); in a space of random features the same step moves the weights (Algorithm 3).
"""

from typing import Any, ClassVar, NamedTuple, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, Int, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.fit.dde import SaddleSolver, saddle_problem
from kexpfam.fit.loop import Run, run, scan, stepped
from kexpfam.fit.problem import Problem, Solution, Watchers
from kexpfam.fit.saddle import (
    SaddleBatch,
    SaddlePoint,
    SaddleProblem,
    carry,
    draw_batch,
    evaluate_nu,
    player_gradient,
    saddle_terms,
)
from kexpfam.integrate.nodes import seed_from
from kexpfam.jax_settings import double
from kexpfam.model.kernels import AbstractKernel, AbstractStationary
from kexpfam.model.measures import NUMBERS_PER_CHUNK, in_chunks
from kexpfam.model.networks import Residual
from kexpfam.model.spaces import (
    AbstractFunctionSpace,
    Constant,
    FeatureSpace,
    KernelSpan,
    RandomFeatures,
    Rows,
    Scalar,
    Values,
    spread_rows,
)
from kexpfam.settings import SettingsRecord, at_least

Conditions = Float[AnyArray, "b p"] | None


class Expansion(eqx.Module):
    """``sum_j coefficients_j k(centres_j, .)`` in a fixed number of slots; empty slots have coefficient 0.

    New terms fill the slots after the first ``kept`` ones, in the end those of the oldest terms.
    """

    centres: Float[Array, "m d"]
    coefficients: Float[Array, " m"]
    written: Int[Array, ""]
    kept: int = eqx.field(static=True)

    @classmethod
    def starting(cls, centres: ArrayLike, coefficients: ArrayLike, *, slots: int) -> "Expansion":
        """Return the expansion with these terms, which are kept, and ``slots`` empty slots."""
        centres, coefficients = jnp.asarray(centres), jnp.asarray(coefficients)
        padded = jnp.concatenate([centres, jnp.zeros((slots, centres.shape[1]), centres.dtype)])
        return cls(padded, jnp.concatenate([coefficients, jnp.zeros(slots)]), jnp.array(0), len(centres))


class Expansions(AbstractFunctionSpace):
    """The space of finite expansions of a kernel."""

    kernel: AbstractKernel

    def evaluate(self, f: Expansion, target: Rows, condition: Conditions) -> Float[Array, " b"]:
        return self.kernel.gram(target.astype(f.centres.dtype), f.centres) @ f.coefficients

    def squared_norm(self, f: Expansion) -> Float[Array, ""]:
        return f.coefficients @ self.kernel.gram(f.centres, f.centres) @ f.coefficients

    def stepped(
        self, f: Expansion, shrinkage: Scalar, target: Rows, condition: Conditions, coefficients: Values
    ) -> Expansion:
        slots = f.coefficients.size - f.kept
        places = f.kept + (f.written + jnp.arange(coefficients.size)) % slots
        return Expansion(
            f.centres.at[places].set(target.astype(f.centres.dtype)),
            (shrinkage * f.coefficients).at[places].set(coefficients),
            f.written + coefficients.size,
            f.kept,
        )

    def projected(self, f: Expansion, *, most: int, seed: int) -> tuple[KernelSpan, np.ndarray]:
        """Return the projection of f onto at most ``most`` of its centres: a span, and f's weights there."""
        live = np.flatnonzero(np.asarray(f.coefficients))
        centres = np.asarray(f.centres)[live if live.size else slice(1)]
        span = KernelSpan.build(self.kernel, centres[spread_rows(centres, most, seed=seed)])
        # The features are orthonormal: f's weights are <f, feature>, by the reproducing property values of f.
        return span, self.values(f, span.centres) @ span.whitening

    def values(self, f: Expansion, points: AnyArray) -> np.ndarray:
        """Return f at many points, in chunks of constant memory."""
        rows_per_chunk = max(1, NUMBERS_PER_CHUNK // f.coefficients.size)
        return in_chunks(lambda rows: self.evaluate(f, rows, None), points, rows_per_chunk=rows_per_chunk)


class SpaceFunction(eqx.Module):
    """A callable function of a space: a nu with weights instead of a network."""

    space: AbstractFunctionSpace
    f: Any

    def __call__(self, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[AnyArray, " b"]:
        return self.space.evaluate(self.f, x, condition)

    def stepped(
        self, shrinkage: Scalar, target: Rows, condition: Conditions, coefficients: Values
    ) -> "SpaceFunction":
        """Return ``shrinkage`` times this function plus kernels at the targets."""
        f = self.space.stepped(self.f, shrinkage, target, condition, coefficients)
        return SpaceFunction(self.space, f)


def kernel_span(problem: Problem) -> KernelSpan:
    """Return the problem's space of f as the span of a kernel; raise ``ValueError`` if it is none."""
    if not isinstance(problem.space.target, KernelSpan):
        raise ValueError("this solver works with the kernel itself: leave space at 'nystrom' or 'full'.")
    return problem.space.target


class FunctionalHealth(NamedTuple):
    """Terms of the saddle function after a step, except the penalty, which costs more than a batch."""

    data_fit: Float[Array, ""]
    model_fit: Float[Array, ""]
    kl_dual: Float[Array, ""]


class FunctionalState(eqx.Module):
    """The players; ``step`` counts updates of the transport."""

    point: SaddlePoint
    step: Int[Array, ""]


class FunctionalAscent(SettingsRecord):
    r"""Settings of Algorithm 1: for each step of the transport, ``ascents`` steps of f and nu.

    The step sizes are :math:`\tau_k = \tau / \sqrt{1 + k / h}` for f and :math:`\rho_l = \rho / \sqrt{1 + l /
    h}` for the transport, with :math:`\tau` = ``rate``, :math:`\rho` = ``transport_rate`` and h =
    ``horizon``; those of nu are ``nu_speed`` times f's, in the paper 1. f and nu continue after a move of the
    transport. Gradients of the transport are clipped by their norm.
    """

    rate: ScalarLike = eqx.field(default=0.1, converter=double)
    nu_speed: ScalarLike = eqx.field(default=1.0, converter=double)
    transport_rate: ScalarLike = eqx.field(default=1e-3, converter=double)
    horizon: ScalarLike = eqx.field(default=100.0, converter=double)
    clip: ScalarLike = eqx.field(default=5.0, converter=double)
    ascents: int = at_least(1, 5, static=True)
    batch_size: int = at_least(1, 64, static=True)
    width: int = at_least(1, 64, static=True)
    depth: int = at_least(1, 3, static=True)

    @classmethod
    def cold(cls) -> "FunctionalAscent":
        """Return the settings for a start at f = 0.

        f must be slow enough for the sampler to follow, and nu fast enough to restrain the sampler: with the
        paper's single step size f overtakes the sampler and does not return.
        """
        return cls(rate=0.03, nu_speed=30.0, transport_rate=0.1, horizon=10_000.0, batch_size=32, ascents=2)

    def init(self, problem: SaddleProblem, f: Any, nu: SpaceFunction, *, key: RandomKey) -> FunctionalState:
        """Return the start: the given f and nu, and the identity transport."""
        dim, condition_dim = problem.sample.target.shape[1], problem.sample.condition.shape[1]
        transport = Residual.draw(dim, condition_dim, width=self.width, depth=self.depth, key=key)
        return FunctionalState(SaddlePoint(f, nu, transport), jnp.array(0))

    def answer(self, state: FunctionalState) -> SaddlePoint:
        """Return the result of a run: the last players, as printed."""
        return state.point

    def step(
        self, problem: SaddleProblem, state: FunctionalState, *, key: RandomKey
    ) -> tuple[FunctionalState, FunctionalHealth]:
        """Return the state after ``ascents`` steps of f and nu and one step of the transport."""
        draw = jax.vmap(lambda key: draw_batch(problem, self.batch_size, key=key))
        batches = draw(jr.split(key, self.ascents + 1))
        first = state.step * self.ascents
        rates = self.rate / jnp.sqrt(1.0 + (first + jnp.arange(self.ascents)) / self.horizon)
        speed = self.nu_speed
        ascend = lambda point, inputs: (functional_step(problem, point, *inputs, nu_speed=speed), None)
        point, _ = scan(ascend, state.point, (jax.tree.map(lambda rows: rows[:-1], batches), rates))
        last = jax.tree.map(lambda rows: rows[-1], batches)
        gradient = player_gradient(problem, point, last, lambda point: point.transport)
        stride = self.transport_rate / jnp.sqrt(1.0 + state.step / self.horizon)
        stride = stride * jnp.minimum(1.0, self.clip / jnp.maximum(optax.tree.norm(gradient), 1e-12))
        point = eqx.tree_at(lambda p: p.transport, point, stepped(point.transport, gradient, -stride))
        terms = saddle_terms(point, problem, last)
        health = FunctionalHealth(terms.data_fit, terms.model_fit, terms.kl_dual)
        return FunctionalState(point, state.step + 1), health


def functional_step(
    problem: SaddleProblem,
    point: SaddlePoint,
    batch: SaddleBatch,
    rate: Float[Array, ""],
    *,
    nu_speed: ScalarLike = 1.0,
) -> SaddlePoint:
    r"""Return the players after one stochastic functional gradient step of f and nu.

    .. math::
        f_{k+1} &= (1 - \eta \tau_k) f_k + \tau_k \bigl( k(x, \cdot) - k(g(\xi), \cdot) \bigr), \\
        \nu_{k+1} &= \nu_k
            + \tfrac{\tau_k}{\lambda} \bigl( k(g(\xi), \cdot) - e^{\nu_k(x')} k(x', \cdot) \bigr),

    as means over the batch, with steps of nu scaled by ``nu_speed``. Equation ledger: ``DDE-FUNCTIONAL``.
    """
    condition = jnp.asarray(batch.data.condition)
    moved = carry(problem, point.transport, batch.noise, condition)
    share = jnp.full(condition.shape[0], rate / condition.shape[0])
    both = jnp.concatenate([condition, condition])
    rows, signed = jnp.concatenate([batch.data.target, moved]), jnp.concatenate([share, -share])
    f = problem.space.stepped(point.f_weights, 1.0 - problem.rkhs_penalty * rate, rows, both, signed)
    masses = jnp.exp(evaluate_nu(problem, point.nu, batch.base, condition) + batch.base_log_weights)
    rows, weighted = jnp.concatenate([moved, batch.base]), jnp.concatenate([share, -share * masses])
    nu = point.nu.stepped(1.0, rows, both, jnp.asarray(nu_speed) / problem.inverse_temperature * weighted)
    return SaddlePoint(f, nu, point.transport)


class FunctionalSolver(SaddleSolver):
    """Base class of Algorithms 2 and 3; ``ascent`` has the step sizes, batches and steps of f and nu."""

    ascent: FunctionalAscent | None = None

    records: ClassVar[tuple[str, ...]] = FunctionalHealth._fields

    @property
    def used_ascent(self) -> FunctionalAscent:
        """Return the settings of the steps; next to the solution they are small."""
        return self.ascent or (FunctionalAscent() if self.warm_start else FunctionalAscent.cold())

    def players(
        self, posed: SaddleProblem, f: Any, nu: Any, *keys: RandomKey, **watchers: Unpack[Watchers]
    ) -> tuple[SaddlePoint, Run]:
        """Return the players at the end of all steps from f and nu, and the run."""
        ascent, (init_key, run_key) = self.used_ascent, keys
        state = ascent.init(posed, f, SpaceFunction(posed.space, nu), key=init_key)
        stage, steps = "saddle point", self.step_count
        outcome = run(posed, ascent, state, steps=steps, stage=stage, key=run_key, **watchers)
        return ascent.answer(outcome.state), outcome


class FunctionalGradient(FunctionalSolver):
    """Algorithms 1 and 2: f and nu as kernel expansions that grow by the draws of every step.

    At the end f is projected onto some of its own centres; the fact ``projection_error`` is the largest
    change at a training point, in nats. ``ascent=FunctionalAscent(nu_speed=1.0)`` is the paper's scheme.
    ``steps`` are updates of the transport; the cost of all steps is quadratic in their number. By default
    there are 500, from a warm start 50.

    Parameters
    ----------
    budget : int or None
        Slots of an expansion; when they are full the oldest terms are overwritten, except those of the warm
        start. None has room for all terms.
    centres : int
        Centres that f is projected onto at the end, at most.
    """

    budget: int | None = None
    centres: int = at_least(1, 400)

    default_steps: ClassVar[tuple[int, int]] = (500, 50)

    def __check_init__(self) -> None:
        fewest = 2 * self.used_ascent.batch_size
        if self.budget is not None and self.budget < fewest:
            raise ValueError(f"budget must be at least twice the batch size ({fewest}), got {self.budget}.")

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return f on some of its centres, the sampler, and the trace of the steps."""
        start_key, init_key, run_key, seed_key, *keys = jr.split(key, 6)
        span = kernel_span(problem)
        space = Expansions(span.kernel)
        weights, reference = self.start(problem, key=start_key)
        empty = jnp.zeros((0, problem.sample.target.shape[1])), jnp.zeros(0)
        terms = (span.centres, span.whitening @ weights) if self.warm_start else empty
        ascent = self.used_ascent
        slots = 2 * ascent.batch_size * ascent.ascents * max(self.step_count, 1)
        slots = slots if self.budget is None else min(self.budget, slots)
        f, nu = (Expansion.starting(*start, slots=slots) for start in (terms, empty))
        posed = saddle_problem(problem, reference, space)
        answer, outcome = self.players(posed, f, nu, init_key, run_key, **watchers)
        span, projected = space.projected(answer.f_weights, most=self.centres, seed=seed_from(seed_key))
        found, data = problem.within(FeatureSpace(Constant(), span)), np.asarray(problem.sample.target)
        error = np.abs(space.values(answer.f_weights, data) - found.tilt(projected).values(data)).max()
        solution = self.finish(found, projected, answer.transport, reference, outcome, keys=keys)
        return solution._replace(facts=solution.facts | {"projection_error": float(error)})


class RandomFeatureGradient(FunctionalSolver):
    r"""Algorithms 1 and 3: :math:`f = \beta_f^\top \Phi` and :math:`\nu = \beta_\nu^\top \Phi`.

    The penalty is :math:`\tfrac{\eta}{2} |\beta_f|^2`, the steps are decaying stochastic gradients, and
    :math:`\Phi` are ``2 * count`` random features of the problem's kernel. The default is 3,000 steps, from a
    warm start 50.
    """

    count: int = at_least(1, 300)

    default_steps: ClassVar[tuple[int, int]] = (3000, 50)

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return f in a space of random features, the sampler, and the trace of the steps."""
        features_key, start_key, init_key, run_key, *keys = jr.split(key, 6)
        span = spectral_features(problem, self.count, key=features_key)
        problem = problem.within(FeatureSpace(problem.space.condition, span))
        weights, reference = self.start(problem, key=start_key)
        posed, nu = saddle_problem(problem, reference, problem.space), jnp.zeros_like(weights)
        answer, outcome = self.players(posed, weights, nu, init_key, run_key, **watchers)
        return self.finish(problem, answer.f_weights, answer.transport, reference, outcome, keys=keys)


def spectral_features(problem: Problem, count: int, *, key: RandomKey) -> RandomFeatures:
    """Return ``2 * count`` random features of the problem's kernel."""
    kernel = kernel_span(problem).kernel
    if not isinstance(kernel, AbstractStationary):
        name = type(kernel).__name__
        raise ValueError(f"random features need the spectrum of a stationary kernel; a {name} has none.")
    return RandomFeatures.draw(kernel, problem.sample.target.shape[1], count=count, key=key)
