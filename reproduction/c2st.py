"""The classifier two-sample test of the simulation-based-inference benchmark, compiled with JAX.

The classifier is that of Lueckmann et al. (2021): scikit-learn's ``MLPClassifier((w, w), max_iter=10000)``
with all else at its defaults, which are rectified linear units, Adam, 200 rows per update, and a stop once
ten epochs in a row have not lowered the training loss by 1e-4. Random numbers and precision differ.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

__all__ = ["FOLDS", "boosted_c2st", "c2st"]

FOLDS, UNITS_PER_DIM, SEED = 5, 10, 1
# Those of scikit-learn: rows per update, epochs at most, the weight of the squared weights, and the stop
# rule.
BATCH, MOST_EPOCHS, DECAY, PROGRESS, PATIENCE = 200, 10_000, 1e-4, 1e-4, 10
RATE, FIRST_MOMENT, SECOND_MOMENT, SMALLEST = 1e-3, 0.9, 0.999, 1e-8

Layers = list[tuple[Float[Array, "a b"], Float[Array, " b"]]]


class State(NamedTuple):
    """A classifier in training: layers, Adam's moments, updates, epochs, state of early stopping."""

    layers: Layers
    first: Layers
    second: Layers
    updates: Int[Array, ""]
    epochs: Int[Array, ""]
    lowest: Float[Array, ""]
    stale: Int[Array, ""]


def c2st(reference: np.ndarray, draws: np.ndarray) -> float:
    """Return the cross-validated accuracy of a network that separates draws from the reference: 0.5 to 1."""
    from sklearn.model_selection import KFold

    scaled = (np.concatenate([reference, draws]) - reference.mean(0)) / reference.std(0, ddof=1)
    rows, is_draw = scaled.astype(np.float32), np.arange(len(scaled)) >= len(reference)
    parts = KFold(FOLDS, shuffle=True, random_state=SEED).split(rows)
    keys = jr.split(jr.key(SEED), FOLDS)
    found = [
        _accuracy(rows[a], is_draw[a], rows[b], is_draw[b], key)
        for (a, b), key in zip(parts, keys, strict=True)
    ]
    return float(np.mean(found))


def boosted_c2st(reference: np.ndarray, draws: np.ndarray) -> float:
    """Return the cross-validated accuracy of boosted trees that separate draws from the reference.

    Folds are shuffled: a sampler may return its draws in an order of its own.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    rows, is_draw = np.concatenate([reference, draws]), np.repeat([0, 1], [len(reference), len(draws)])
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    trees = HistGradientBoostingClassifier(random_state=SEED)
    return float(cross_val_score(trees, rows, is_draw, cv=folds).mean())


@jax.jit
def _accuracy(
    rows: Float[Array, "n d"],
    is_draw: Bool[Array, " n"],
    other: Float[Array, "m d"],
    other_is_draw: Bool[Array, " m"],
    key: Key[Array, ""],
) -> Float[Array, ""]:
    """Return the share of other rows that a classifier of these rows is right about."""
    start_key, run_key = jr.split(key)
    going = lambda state: (state.stale <= PATIENCE) & (state.epochs < MOST_EPOCHS)
    epoch = lambda state: _epoch(state, rows, is_draw.astype(rows.dtype), jr.fold_in(run_key, state.epochs))
    end = jax.lax.while_loop(going, epoch, _start(rows.shape[1], start_key))
    return jnp.mean((_logits(end.layers, other) > 0.0) == other_is_draw)


def _start(dim: int, key: Key[Array, ""]) -> State:
    """Return a classifier whose weights and biases are uniform within Glorot's bounds."""
    sizes = (dim, UNITS_PER_DIM * dim, UNITS_PER_DIM * dim, 1)
    layers = []
    for place, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        limit = np.sqrt(6.0 / (a + b))
        uniform = lambda seed, *shape, limit=limit: jr.uniform(seed, shape, jnp.float32, -limit, limit)
        weight_key, bias_key = jr.split(jr.fold_in(key, place))
        layers.append((uniform(weight_key, a, b), uniform(bias_key, b)))
    zeros, zero = jax.tree.map(jnp.zeros_like, layers), jnp.zeros((), jnp.int32)
    return State(layers, zeros, zeros, zero, zero, jnp.asarray(jnp.inf, jnp.float32), zero)


def _epoch(
    state: State, rows: Float[Array, "n d"], is_draw: Float[Array, " n"], key: Key[Array, ""]
) -> State:
    """Return a classifier after one epoch in random order; the last batch may be smaller."""
    count, batch = len(rows), min(BATCH, len(rows))
    steps = -(-count // batch)
    order = jnp.pad(jr.permutation(key, count), (0, steps * batch - count), constant_values=-1).reshape(
        steps, batch
    )

    def update(state: State, mine: Int[Array, " b"]) -> tuple[State, Float[Array, ""]]:
        there = (mine >= 0).astype(rows.dtype)
        loss, gradient = jax.value_and_grad(_loss)(state.layers, rows[mine], is_draw[mine], there)
        return _stepped(state, gradient), loss * there.sum() / count

    state, losses = jax.lax.scan(update, state, order)
    loss = losses.sum()
    stale = jnp.where(loss > state.lowest - PROGRESS, state.stale + 1, 0)
    return state._replace(epochs=state.epochs + 1, lowest=jnp.minimum(loss, state.lowest), stale=stale)


def _loss(
    layers: Layers, rows: Float[Array, "b d"], is_draw: Float[Array, " b"], there: Float[Array, " b"]
) -> Float[Array, ""]:
    """Return the mean cross entropy of the rows that are there, with the penalty of the weights."""
    logits = _logits(layers, rows)
    losses = jax.nn.softplus(logits) - is_draw * logits
    penalty = sum(jnp.sum(weight**2) for weight, _ in layers)
    return (jnp.sum(there * losses) + 0.5 * DECAY * penalty) / there.sum()


def _stepped(state: State, gradient: Layers) -> State:
    """Return a classifier after one of Adam's steps."""
    updates = state.updates + 1
    first = jax.tree.map(
        lambda old, new: FIRST_MOMENT * old + (1.0 - FIRST_MOMENT) * new, state.first, gradient
    )
    second = jax.tree.map(
        lambda old, new: SECOND_MOMENT * old + (1.0 - SECOND_MOMENT) * new**2, state.second, gradient
    )
    power = updates.astype(jnp.float32)
    rate = RATE * jnp.sqrt(1.0 - SECOND_MOMENT**power) / (1.0 - FIRST_MOMENT**power)
    step = lambda weight, m, v: weight - rate * m / (jnp.sqrt(v) + SMALLEST)
    return state._replace(
        layers=jax.tree.map(step, state.layers, first, second), first=first, second=second, updates=updates
    )


def _logits(layers: Layers, rows: Float[Array, "n d"]) -> Float[Array, " n"]:
    for weight, bias in layers[:-1]:
        rows = jax.nn.relu(rows @ weight + bias)
    weight, bias = layers[-1]
    return (rows @ weight + bias)[:, 0]
