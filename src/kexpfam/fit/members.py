"""Members of an ensemble shared among processes: each process trains some of them."""

from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Int, Key

from kexpfam import processes

__all__ = ["epochs", "merged", "own_members"]


def own_members(members: int) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, ""]]:
    """Return the positions of this process's members, followed by the others, and how many are its own."""
    rank, count = processes.place()
    places = np.arange(members)
    own = places % count == rank
    return np.concatenate([places[own], places[~own]]), np.asarray(np.sum(own))


def epochs(rows: Any, trainer: Any, state: Any, key: Key[Array, ""], length: int) -> tuple[Any, Any]:
    """Return the state after some epochs and their health; each process trains its own members.

    Processes exchange the held-out scores of every epoch and the weights of the last one. A single process
    runs the same programs, because others would round differently.
    """
    healths = []
    for _ in range(length):
        members, scores = _trained(rows, trainer, state, key)
        state, health = _judged(trainer, state, members, merged(scores))
        healths.append(health)
    weights = lambda state: (state.members, state.best)
    state = eqx.tree_at(weights, state, merged(weights(state)))
    return state, jax.tree.map(lambda *series: np.stack(series), *healths)


def merged(members: Any) -> Any:
    """Return a tree with an axis of members, each from the process that trains it."""
    if processes.place().size == 1:
        return members
    leaves, structure = jax.tree.flatten(jax.tree.map(np.array, members))
    count, places = processes.place().size, np.arange(len(leaves[0]))
    mine = places % count == processes.place().rank
    contents = processes.gathered(lambda: b"".join(leaf[mine].tobytes() for leaf in leaves))
    for rank, content in enumerate(contents):
        theirs, start = places % count == rank, 0
        for leaf in leaves:
            part = np.frombuffer(content, leaf.dtype, leaf[theirs].size, start)
            leaf[theirs] = part.reshape(leaf[theirs].shape)
            start += part.nbytes
    return jax.tree.unflatten(structure, leaves)


@eqx.filter_jit
def _trained(rows: Any, trainer: Any, state: Any, key: Key[Array, ""]) -> tuple[Any, Any]:
    return trainer.trained(rows, state, jr.fold_in(key, state.step))


@eqx.filter_jit
def _judged(trainer: Any, state: Any, members: Any, scores: Any) -> tuple[Any, Any]:
    return trainer.judged(state, members, scores)
