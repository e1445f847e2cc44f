"""Variants of the saddle point in many columns: a reference that follows the sampler, batches that grow, and
chains for the gradient of f.

The reference is exact for every law r: ``KL(q || p0) = KL(q || r) + E_q[log r / p0]``, and nu estimates the
first term only.
"""

import dataclasses
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.fit.dde import saddle_problem
from kexpfam.fit.loop import run, scan
from kexpfam.fit.mixture import MixtureShape, fit_mixture
from kexpfam.fit.problem import Problem
from kexpfam.fit.saddle import DoublyDual, FDraws, SaddleProblem, SaddleState, draw_batch
from kexpfam.integrate.chains import HMC, hmc_start, hmc_step, jump, moved
from kexpfam.integrate.nodes import seed_from
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Sampler, Tilt
from kexpfam.model.located import Defensive
from kexpfam.model.measures import AbstractMeasure, Mixture
from kexpfam.paper.iterates import Averaged

__all__ = ["CHAINED", "Chained", "Course", "Defensive", "Following", "follow"]

# Draws that a mixture is fitted to, its components, and transitions of HMC that the draws take before.
FITTED, COMPONENTS, WALK = 6000, 48, 4
# The width of a mixture that only nu is measured from, and updates of nu alone after it has changed.
WIDTH, NU_UPDATES = 1.4, 100
# The gain of the step size of the chains, and steps after which the gains of f fall.
ADAPTATION, DELAY = 0.3, 20.0


class Following(SaddleProblem):
    """The problem with nu measured from ``law``."""

    law: AbstractMeasure

    @property
    def nu_reference(self) -> AbstractMeasure:
        return self.law


class ChainedState(SaddleState):
    """The state with the positions of the chains and the logarithm of their step size."""

    positions: Float[Array, "c d"]
    log_step_size: Float[Array, ""]


class Chained(DoublyDual):
    """f's gradient from HMC chains in the density of f.

    The chains start at draws of the sampler in every step. If they are persistent they continue instead, and
    jump to draws of base and reference by Metropolis steps. The gains of all players are those of contrastive
    divergence.
    """

    chains: int = eqx.field(default=512, static=True)
    moves: int = eqx.field(default=3, static=True)
    persistent: bool = eqx.field(default=False, static=True)
    hmc: HMC = HMC(leapfrog_steps=5)

    def init(
        self, problem: SaddleProblem, f_weights: Float[Array, " r"], *, key: Key[Array, ""]
    ) -> ChainedState:
        start_key, init_key = jr.split(key)
        state = super().init(problem, f_weights, key=init_key)
        parts = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        positions = problem.base.sample(self.chains, key=start_key)
        return ChainedState(**parts, positions=positions, log_step_size=jnp.log(self.hmc.first_step_size))

    def schedule(self, step: Array) -> Float[Array, ""]:
        return (1.0 + step / DELAY) ** -0.6

    def _draw_for_f(
        self, problem: SaddleProblem, state: Any, key: Key[Array, ""]
    ) -> tuple[ChainedState, FDraws]:
        state, drawn = super()._draw_for_f(problem, state, key)
        tilt = Tilt(problem.space, state.point.f_weights, problem.base)  # type: ignore[arg-type]
        condition, starts = jnp.zeros((self.chains, 0)), drawn.points[: self.chains]
        jump_key, move_key = jr.split(jr.fold_in(key, 1))
        if self.persistent:
            starts = jump(tilt, problem.reference, state.positions, jump_key)

        def move(carry: Any, one: Key[Array, ""]) -> tuple[Any, Any]:
            x, log_size = carry
            states = hmc_start(tilt, x, condition)
            states, info = hmc_step(tilt, states, condition, jnp.exp(log_size), one, self.hmc)
            excess = jnp.mean(info.acceptance_rate) - self.hmc.target_acceptance
            return (states.position, log_size + ADAPTATION * excess), states.position

        keys = jr.split(move_key, self.moves)
        (ends, log_size), path = jax.lax.scan(move, (starts, state.log_step_size), keys)
        points = path.reshape(-1, ends.shape[1]) if self.persistent else ends
        weights = jnp.full(len(points), 1.0 / len(points))
        state = eqx.tree_at(lambda s: (s.positions, s.log_step_size), state, (ends, log_size))
        groups = drawn.groups._replace(draws=len(points))
        return state, FDraws(groups, points, weights, drawn.lag)


# Players of runs with chains: f has full natural steps, and the sampler moves little from its reference.
CHAINED: dict[str, Any] = {"f_rate": 1.0, "trust": 0.5, "damping": 0.0, "lag_share": 0.0}
CHAINED |= {"nu_rate": 2e-3, "transport_rate": 1e-4, "transport_updates": 2, "nu_updates": 2}


class Course(NamedTuple):
    """Result of a run: f, sampler, nu's KL by step, and f's weights by processor seconds."""

    tilt: Tilt
    sampler: Sampler
    status: str
    kl_dual: np.ndarray
    path: list[tuple[float, np.ndarray]]


def follow(
    problem: Problem,
    key: Key[Array, ""],
    saddle: DoublyDual,
    *,
    steps: int,
    refits: tuple[int, ...] = (),
    late: tuple[int, DoublyDual] | None = None,
) -> Course:
    """Return the run of a saddle point whose reference is fitted again after some steps.

    The mixture is fitted to draws of the sampler. With chains the draws are moved by them before, and the
    mixture is also the noise of a transport that starts again as the identity. ``late`` are other players
    from a step on. With chains f is the mean of the later iterates.
    """
    begin = time.process_time()
    init_key, run_key, fit_key = jr.split(key, 3)
    players: Any = Averaged(saddle) if isinstance(saddle, Chained) else saddle
    with double_precision():
        posed: SaddleProblem = _following(saddle_problem(problem, problem.base, problem.space), problem.base)
        state = players.init(posed, jnp.zeros(problem.space.size), key=init_key)
    kl, path, turns = [], [], sorted({*refits, steps, *([late[0]] if late else [])})
    note = lambda state: path.append(
        (time.process_time() - begin, np.asarray(players.answer(state).f_weights))
    )
    for turn in turns:
        # A mixture has draws far from the density of f, where the gap is large: it shows no divergence here.
        chunk = 10 if isinstance(saddle, Chained) else 25
        limits: dict[str, Any] = {"chunk": chunk, "most_gap": np.inf, "stage": "saddle point"}
        outcome = run(posed, players, state, steps=turn, key=run_key, **limits)
        state = outcome.state
        kl.append(outcome.trace.get("kl_dual", np.zeros(0)))
        note(state)
        if outcome.status.name == "DIVERGED":
            break
        if late is not None and turn == late[0]:
            players = late[1]
        if turn in refits:
            with double_precision():
                posed, state = _refitted(problem, posed, saddle, state, key=jr.fold_in(fit_key, turn))
    answer = players.answer(state)
    sampler = Sampler(posed.reference, answer.transport, problem.base)
    return Course(problem.tilt(answer.f_weights), sampler, outcome.status.name, np.concatenate(kl), path)


def _following(
    posed: SaddleProblem, law: AbstractMeasure, reference: AbstractMeasure | None = None
) -> Following:
    fields = dataclasses.fields(SaddleProblem)
    parts = {field.name: getattr(posed, field.name) for field in fields}
    return Following(**parts | {"reference": reference or posed.reference}, law=law)


def _refitted(
    problem: Problem, posed: SaddleProblem, saddle: DoublyDual, state: Any, *, key: Key[Array, ""]
) -> tuple[SaddleProblem, Any]:
    """Return problem and state with a new mixture; nu, and with chains the transport, are zero again."""
    draw_key, walk_key, seed_key = jr.split(key, 3)
    inner = lambda state: state.inner if isinstance(saddle, Chained) else state
    point = inner(state).point
    draws = Sampler(posed.reference, point.transport, problem.base).draws(FITTED, key=draw_key)
    zeroed = [lambda s: inner(s).point.nu.layers[-1]]
    if isinstance(saddle, Chained):
        size = jnp.exp(inner(state).log_step_size)
        nothing, keys = np.zeros((FITTED, 0)), jr.split(walk_key, WALK)
        tilt = Tilt(problem.space, point.f_weights, problem.base)
        draws = np.asarray(moved(tilt, draws, nothing, size, keys))
        zeroed += [lambda s: inner(s).point.transport.network.layers[-1]]
        zeroed += [lambda s: inner(s).averaged.network.layers[-1]]
    for part in zeroed:
        state = eqx.tree_at(part, state, replace_fn=lambda layer: jax.tree.map(jnp.zeros_like, layer))
    found = fit_mixture(np.asarray(draws, float), MixtureShape(COMPONENTS, False), seed=seed_from(seed_key))
    if isinstance(saddle, Chained):
        found = jax.tree.map(jnp.asarray, found)
        return _following(posed, found, found), state
    wide = Mixture.of(found.log_weights, found.means, WIDTH * found.choleskys)
    posed = _following(posed, Defensive(problem.base, jax.tree.map(jnp.asarray, wide)))
    return posed, _with_nu(saddle, posed, state, walk_key)


@eqx.filter_jit
def _with_nu(saddle: DoublyDual, posed: SaddleProblem, state: Any, key: Key[Array, ""]) -> Any:
    """Return the state after updates of nu alone."""
    decay = saddle.schedule(state.step)
    draw = lambda one: draw_batch(posed, saddle.batch_size, key=one)
    update = lambda state, one: (saddle._move_nu(posed, state, decay, draw(one)), None)
    return scan(update, state, jr.split(key, NU_UPDATES))[0]
