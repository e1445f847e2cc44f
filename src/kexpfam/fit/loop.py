"""The only training loop: compiled chunks of steps, a watch on their health, checkpoints, and a clean way out."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray
from kexpfam.fit.problem import Checkpoint, Status
from kexpfam.jax_settings import double_precision
from kexpfam.progress import Listener, Report

if TYPE_CHECKING:
    import optax

__all__ = ["Run", "averaged", "each", "optimiser", "run", "scan", "stepped"]

# A gap between sampler and density beyond this (in nats) is no longer an error to be worked off but a run-away.
DIVERGED_GAP = 50.0


class Run(NamedTuple):
    """The last healthy state, why the run ended, one row of health per step, and what was watched, by step."""

    state: Any
    status: Status
    trace: dict[str, np.ndarray]
    watched: dict[str, np.ndarray]


def scan(update: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: Any) -> tuple[Any, Any]:
    """Scan ``update(state, input) -> (state, info)`` over inputs, with a state that holds functions besides arrays."""
    arrays, rest = eqx.partition(state, eqx.is_array)

    def body(arrays: Any, one: Any) -> tuple[Any, Any]:
        new, info = update(eqx.combine(arrays, rest), one)
        return eqx.filter(new, eqx.is_array), info

    arrays, infos = jax.lax.scan(body, arrays, inputs)
    return eqx.combine(arrays, rest), infos


def each(
    function: Callable[..., Any], places: Int[AnyArray, " k"], count: Int[AnyArray, ""], *members: Any
) -> Any:
    """Return ``function`` of the members at the first ``count`` places, stacked as all of them are, and 0 for the others.

    They are done one after the other: under ``vmap`` the last bits of a member depend on how many others there are, and
    training makes them grow. Which members are done is no constant of the program, so that it is the same one for some and for
    all: a member comes out the same to the last bit whoever does it beside which others.
    """
    arrays, rest = eqx.partition(members, eqx.is_array)
    one = lambda place: function(*eqx.combine(jax.tree.map(lambda leaf: leaf[place], arrays), rest))
    shapes = jax.eval_shape(lambda: one(0))
    none = jax.tree.map(lambda leaf: jnp.zeros((len(places), *leaf.shape), leaf.dtype), shapes)
    put = lambda place, found: jax.tree.map(lambda stack, new: stack.at[place].set(new), found, one(place))
    return jax.lax.fori_loop(0, count, lambda i, found: put(places[i], found), none)


@eqx.filter_jit
def _chunk(problem: Any, solver: Any, state: Any, key: Key[Array, ""], length: int) -> tuple[Any, Any]:
    keys = jax.vmap(lambda i: jr.fold_in(key, i))(state.step + jnp.arange(length))
    return scan(lambda state, key: solver.step(problem, state, key=key), state, keys)


def run(
    problem: Any,
    solver: Any,
    state: Any,
    *,
    steps: int,
    key: Key[Array, ""],
    stage: str,
    chunk: int = 25,
    report: Listener | None = None,
    checkpoint: Checkpoint | None = None,
    watch: Callable[[Any], AnyArray] | None = None,
    stop: Callable[[Any], bool] | None = None,
    compute: Callable[..., tuple[Any, Any]] = _chunk,
) -> Run:
    """Run the solver from ``state`` up to ``steps`` steps in all; the only loop over steps in the library.

    The key of step i is ``fold_in(key, i)``, so a run that resumes from a checkpoint repeats the uninterrupted one.
    ``stage`` is what the progress bar calls it; ``watch(state)`` is kept at the start and after every chunk. ``compute`` is how
    a chunk of steps is done, if not in this process alone.
    """
    traces, status = [], Status.RAN_ALL_STEPS
    if checkpoint is not None:
        state = checkpoint.read(state)
    if int(state.step) >= steps:
        return Run(state, Status.NO_STEPS if steps == 0 else status, {}, {})
    watched = {} if watch is None else {str(int(state.step)): watch(state)}
    try:
        while int(state.step) < steps:
            # Unpartitionable numbers are half the work, and no one shards these draws.
            with double_precision(), jax.threefry_partitionable(False):
                candidate, health = compute(problem, solver, state, key, min(chunk, steps - int(state.step)))
            row = _flatten(health)
            if not _is_healthy(row):
                status = Status.DIVERGED
                break
            state = candidate
            traces.append(row)
            if watch is not None:
                watched[str(int(state.step))] = watch(state)
            if checkpoint is not None:
                checkpoint.write(state)
            if stop is not None and stop(state):
                status = Status.CONVERGED
                break
            if report is not None:
                health = {name: float(series[-1]) for name, series in row.items()}
                report(Report(stage, int(state.step), steps, health))
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    names = traces[0] if traces else {}
    return Run(
        state, status, {name: np.concatenate([row[name] for row in traces]) for name in names}, watched
    )


def _flatten(health: Any) -> dict[str, np.ndarray]:
    """Return the health record as flat named series; of a saddle point, its terms and their value among them."""
    flat = {name: np.asarray(getattr(health, name)) for name in health._fields if name != "terms"}
    if hasattr(health, "terms"):
        flat |= {name: np.asarray(series) for name, series in health.terms._asdict().items()}
        flat["value"] = np.asarray(health.terms.value)
    return flat


def _is_healthy(row: dict[str, np.ndarray]) -> bool:
    finite = all(np.all(np.isfinite(series)) for series in row.values())
    return finite and float(np.median(row.get("sampler_gap", 0.0))) < DIVERGED_GAP


def optimiser(
    *, clip: float = 5.0, first: float = 0.9, second: float = 0.999
) -> "optax.GradientTransformation":
    """Return Adam's directions of gradients clipped by their norm; rates are applied by ``stepped``.

    Players of a saddle point take little momentum: the other players' moves make old gradients stale.
    """
    import optax  # slow to import, and a fit on a grid has no steps

    return optax.chain(optax.clip_by_global_norm(clip), optax.scale_by_adam(b1=first, b2=second))


def stepped(part: Any, updates: Any, rate: ScalarLike) -> Any:
    """Return the player moved by ``rate`` times the updates, in its own precision."""
    return eqx.apply_updates(part, jax.tree.map(lambda update: (rate * update).astype(update.dtype), updates))


def averaged(old: Any, new: Any, share: ScalarLike) -> Any:
    """Return the exponential moving average ``share * old + (1 - share) * new`` of two players."""
    mean = lambda a, b: (share * a + (1.0 - share) * b).astype(a.dtype) if eqx.is_inexact_array(a) else a
    return jax.tree.map(mean, old, new)
