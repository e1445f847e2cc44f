"""Members of an ensemble shared among processes: each trains some of them, and tells the others how they do."""

from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Int, Key

from kexpfam import processes

__all__ = ["epochs", "merged", "own_members"]


def own_members(members: int) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, ""]]:
    """Return the places of the members that this process trains, before those of the others, and how many they are."""
    rank, count = processes.place()
    places = np.arange(members)
    own = places % count == rank
    return np.concatenate([places[own], places[~own]]), np.asarray(np.sum(own))


def epochs(task: Any, trainer: Any, state: Any, key: Key[Array, ""], length: int) -> tuple[Any, Any]:
    """Return the state after so many epochs and their health, each process having trained its own members.

    Of every epoch the others are told the held-out scores, by which all members are judged, and of the last the weights. One
    process does the same with nobody to tell: only the same programs round the same way, and one for several epochs is another.
    """
    healths = []
    for _ in range(length):
        players, scores = _trained(task, trainer, state, key)
        state, health = _judged(trainer, state, players, merged(scores))
        healths.append(health)
    weights = lambda state: (state.players, state.best)
    state = eqx.tree_at(weights, state, merged(weights(state)))
    return state, jax.tree.map(lambda *series: np.stack(series), *healths)


def merged(members: Any) -> Any:
    """Return a tree with an axis of members in which each is as the process has it that trains it."""
    if processes.place().size == 1:
        return members
    leaves, structure = jax.tree.flatten(jax.tree.map(np.array, members))
    count, places = processes.place().size, np.arange(len(leaves[0]))
    mine = places % count == processes.place().rank
    said = processes.gathered(lambda: b"".join(leaf[mine].tobytes() for leaf in leaves))
    for rank, content in enumerate(said):
        theirs, start = places % count == rank, 0
        for leaf in leaves:
            part = np.frombuffer(content, leaf.dtype, leaf[theirs].size, start)
            leaf[theirs], start = part.reshape(leaf[theirs].shape), start + part.nbytes
    return jax.tree.unflatten(structure, leaves)


@eqx.filter_jit
def _trained(task: Any, trainer: Any, state: Any, key: Key[Array, ""]) -> tuple[Any, Any]:
    return trainer.trained(task, state, jr.fold_in(key, state.step))


@eqx.filter_jit
def _judged(trainer: Any, state: Any, players: Any, scores: Any) -> tuple[Any, Any]:
    return trainer.judged(state, players, scores)
