"""The training loop: compiled chunks of steps, checks of their health and checkpoints."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Int, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.fit.problem import Checkpoint, Status
from kexpfam.jax_settings import double_precision
from kexpfam.progress import Listener, OutOfTimeError, Report

if TYPE_CHECKING:
    import optax


class Run(NamedTuple):
    """The last healthy state, why the run ended, the health by step, and the watched values by step."""

    state: Any
    status: Status
    trace: dict[str, np.ndarray]
    watched: dict[str, np.ndarray]


def scan(update: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: Any) -> tuple[Any, Any]:
    """Scan ``update(state, input) -> (state, info)`` over inputs; the state may contain functions."""
    arrays, rest = eqx.partition(state, eqx.is_array)

    def body(arrays: Any, one: Any) -> tuple[Any, Any]:
        new, info = update(eqx.combine(arrays, rest), one)
        return eqx.filter(new, eqx.is_array), info

    arrays, infos = jax.lax.scan(body, arrays, inputs)
    return eqx.combine(arrays, rest), infos


@eqx.filter_jit
def _chunk(problem: Any, solver: Any, state: Any, key: RandomKey, length: int) -> tuple[Any, Any]:
    keys = jax.vmap(lambda i: jr.fold_in(key, i))(state.step + jnp.arange(length))
    return scan(lambda state, key: solver.step(problem, state, key=key), state, keys)


def run(
    problem: Any,
    solver: Any,
    state: Any,
    *,
    steps: int,
    key: RandomKey,
    stage: str,
    chunk: int = 25,
    report: Listener | None = None,
    checkpoint: Checkpoint | None = None,
    watch: Callable[[Any], AnyArray] | None = None,
    judge: Callable[[Any], Any] | None = None,
    stop: Callable[[Any], bool] | None = None,
    most_gap: float = 50.0,
    compute: Callable[..., tuple[Any, Any]] = _chunk,
) -> Run:
    """Run the solver from ``state`` until ``steps`` steps are done in all.

    The key of step i is ``fold_in(key, i)``, so that a resumed run equals an uninterrupted one. ``stage`` is
    the name in the progress bar. ``watch(state)`` is recorded at the start and after every chunk.
    ``judge(state)`` returns the state after a chunk with what was measured of it. ``compute`` runs a chunk
    of steps. A median ``sampler_gap`` above ``most_gap`` nats is a divergence.
    """
    trace: dict[str, np.ndarray] = {}
    if checkpoint is not None:
        state, trace = checkpoint.read(state)
    status = Status.NO_STEPS if steps == 0 else Status.RAN_ALL_STEPS
    if trace and stop is not None and stop(state):
        return Run(state, Status.CONVERGED, trace, {})
    if int(state.step) >= steps:
        return Run(state, status, trace, {})
    watched = {} if watch is None else {str(int(state.step)): watch(state)}
    while int(state.step) < steps:
        # Partitionable random numbers cost twice as much, and these draws are not sharded.
        with double_precision(), jax.threefry_partitionable(False):
            candidate, health = compute(problem, solver, state, key, min(chunk, steps - int(state.step)))
        row = _flatten(health)
        if not _is_healthy(row, most_gap):
            status = Status.DIVERGED
            break
        state = candidate if judge is None else judge(candidate)
        trace = {name: np.concatenate([trace.get(name, row[name][:0]), row[name]]) for name in row}
        if watch is not None:
            watched[str(int(state.step))] = watch(state)
        if checkpoint is not None:
            checkpoint.write(state, trace)
        if stop is not None and stop(state):
            status = Status.CONVERGED
            break
        if report is not None:
            health = {name: float(series[-1]) for name, series in row.items()}
            try:
                report(Report(stage, int(state.step), steps, health))
            except OutOfTimeError:
                status = Status.OUT_OF_TIME
                break
    return Run(state, status, trace, watched)


def _flatten(health: Any) -> dict[str, np.ndarray]:
    """Return the health record as flat named series, with the terms of a saddle function and their value."""
    flat = health._asdict()
    if (terms := flat.pop("terms", None)) is not None:
        flat |= terms._asdict() | {"value": terms.value}
    return {name: np.asarray(series) for name, series in flat.items()}


def _is_healthy(row: dict[str, np.ndarray], most_gap: float) -> bool:
    finite = all(np.all(np.isfinite(series)) for series in row.values())
    return finite and float(np.median(row.get("sampler_gap", 0.0))) < most_gap


def optimiser(
    *, clip: float = 5.0, first: float = 0.9, second: float = 0.999
) -> "optax.GradientTransformation":
    """Return Adam's directions of gradients clipped by their norm; ``stepped`` applies the rates.

    Players of a saddle point use little momentum: the moves of the other players make old gradients stale.
    """
    import optax  # slow to import, and a fit on a grid has no steps

    return optax.chain(optax.clip_by_global_norm(clip), optax.scale_by_adam(b1=first, b2=second))


def moments_of(part: Any, transform: "optax.GradientTransformation") -> Any:
    """Return the initial state of an optimiser for the floating-point arrays of a tree."""
    return transform.init(eqx.filter(part, eqx.is_inexact_array))


def descended(
    part: Any, gradient: Any, moments: Any, rate: ScalarLike, transform: "optax.GradientTransformation"
) -> tuple[Any, Any]:
    """Return the tree after a step of ``-rate`` in the optimiser's direction, and the optimiser's state."""
    updates, moments = transform.update(gradient, moments)
    return stepped(part, updates, -jnp.asarray(rate)), moments


class AdamState(eqx.Module):
    """A model in training: its parameters, the optimiser's moments and the number of steps."""

    model: Any
    moments: Any
    step: Int[Array, ""]

    @classmethod
    def start(cls, model: Any) -> "AdamState":
        """Return the state before the first step."""
        return cls(model, moments_of(model, optimiser()), jnp.array(0))

    def descend(self, cost: Callable[[Any], Array], rate: ScalarLike) -> tuple["AdamState", Array]:
        """Return the state after one step that lowers the cost, and the cost before it."""
        value, gradient = eqx.filter_value_and_grad(cost)(self.model)
        model, moments = descended(self.model, gradient, self.moments, rate, optimiser())
        return AdamState(model, moments, self.step + 1), value


def stepped(part: Any, updates: Any, rate: ScalarLike) -> Any:
    """Return the tree plus ``rate`` times the updates, in its own precision."""
    return eqx.apply_updates(part, jax.tree.map(lambda update: (rate * update).astype(update.dtype), updates))


def averaged(old: Any, new: Any, share: ScalarLike) -> Any:
    """Return the exponential moving average ``share * old + (1 - share) * new`` of two trees."""
    mean = lambda a, b: (share * a + (1.0 - share) * b).astype(a.dtype) if eqx.is_inexact_array(a) else a
    return jax.tree.map(mean, old, new)
