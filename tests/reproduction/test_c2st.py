"""The compiled two-sample test against scikit-learn's, which it stands for."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from sklearn.model_selection import KFold, cross_val_score
from sklearn.neural_network import MLPClassifier

from reproduction import c2st as module
from reproduction.c2st import State, c2st


def slow_twin(reference, draws):
    """Return the same by scikit-learn."""
    scaled = (np.concatenate([reference, draws]) - reference.mean(0)) / reference.std(0, ddof=1)
    width = 10 * reference.shape[1]
    network = MLPClassifier((width, width), max_iter=10_000, random_state=1)
    folds = KFold(5, shuffle=True, random_state=1)
    return cross_val_score(network, scaled, np.arange(len(scaled)) >= len(reference), cv=folds).mean()


def clouds(seed, count, dim, shift):
    rng = np.random.default_rng(seed)
    return rng.normal(2.0, 3.0, size=(count, dim)), rng.normal(2.0 + 3.0 * shift, 3.0, size=(count, dim))


def test_a_network_cannot_tell_equal_draws_apart_and_can_tell_others():
    # A coin on 600 rows has an error of 0.02.
    assert abs(c2st(*clouds(0, 300, 2, 0.0)) - 0.5) < 4.0 * 0.5 / np.sqrt(600)
    assert c2st(*clouds(0, 300, 2, 12.0)) > 0.99


@pytest.mark.parametrize("seed", [0, 1])
def test_it_agrees_with_scikit_learn(seed):
    reference, draws = clouds(seed, 400, 2, 0.7)
    # Both judge the same 800 rows; each alone has an error of 0.017.
    assert abs(c2st(reference, draws) - slow_twin(reference, draws)) < 2.0 * 0.017


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_it_agrees_with_scikit_learn_in_ten_dimensions(seed):
    reference, draws = clouds(seed, 1000, 10, 0.15)
    # Both judge the same 2,000 rows; each alone has an error of 0.011.
    assert abs(c2st(reference, draws) - slow_twin(reference, draws)) < 3.0 * 0.011


def test_updates_and_losses_are_those_of_scikit_learn():
    reference, draws = clouds(3, 75, 2, 0.5)
    rows, is_draw = np.concatenate([reference, draws]).astype(np.float32), np.repeat([0, 1], 75)
    twin = MLPClassifier((20, 20), random_state=0).partial_fit(rows, is_draw, classes=[0, 1])
    paired = lambda parts: [
        (jnp.asarray(w), jnp.asarray(b)) for w, b in zip(parts[:3], parts[3:], strict=True)
    ]
    layers, first, second = (
        paired([part.copy() for part in parts])
        for parts in ([*twin.coefs_, *twin.intercepts_], twin._optimizer.ms, twin._optimizer.vs)
    )
    loss, stale, one = jnp.float32(twin.best_loss_), jnp.int32(twin._no_improvement_count), jnp.int32(1)
    state = State(layers, first, second, one, one, loss, stale)
    for epoch in range(5):
        state = module._epoch(state, jnp.asarray(rows), jnp.asarray(is_draw, jnp.float32), jr.key(epoch))
        twin.partial_fit(rows, is_draw)
    assert float(state.lowest) == pytest.approx(min(twin.loss_curve_), rel=1e-5)
    for (weight, bias), weight_too, bias_too in zip(state.layers, twin.coefs_, twin.intercepts_, strict=True):
        np.testing.assert_allclose(weight, weight_too, atol=2e-5)
        np.testing.assert_allclose(bias, bias_too, atol=2e-5)


def test_every_row_is_judged_by_a_network_that_has_not_seen_it(monkeypatch):
    judged = []

    def half(rows, is_draw, other, other_is_draw, key):
        assert not {tuple(row) for row in rows} & {tuple(row) for row in other}
        judged.extend(zip(other, other_is_draw, strict=True))
        return 0.5

    monkeypatch.setattr(module, "_accuracy", half)
    reference = np.random.default_rng(0).normal(5.0, 2.0, size=(30, 3))
    assert c2st(reference, reference[:20] + 1.0) == 0.5
    scaled = np.array([row for row, is_draw in judged if not is_draw])
    assert scaled.shape == (30, 3) and len(judged) == 50
    np.testing.assert_allclose(scaled.std(0, ddof=1), 1.0, rtol=1e-5)


def test_what_is_left_of_an_epoch_is_an_update_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "BATCH", 20)
    reference, draws = clouds(4, 25, 2, 0.5)
    rows, is_draw = (
        jnp.asarray(np.concatenate([reference, draws]), jnp.float32),
        jnp.repeat(jnp.array([0.0, 1.0]), 25),
    )
    state = module._epoch(module._start(2, jr.key(0)), rows, is_draw, jr.key(1))
    assert int(state.updates) == 3 and int(state.epochs) == 1 and np.isfinite(float(state.lowest))
