"""Networks and transports against the formulas they stand for."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam.model.networks import ACTIVATIONS, Free, Given, Identity, Layer, Network, Residual

SHAPE = {"width": 8, "depth": 2}


def test_a_layer_is_its_formula():
    layer, rows = Layer.draw(3, 2, key=jr.key(0)), jr.normal(jr.key(1), (5, 3), jnp.float32)
    np.testing.assert_allclose(
        layer(rows), np.asarray(rows) @ np.asarray(layer.weight) + np.asarray(layer.bias), rtol=1e-5
    )
    assert np.abs(layer.weight).max() <= 1 / np.sqrt(3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_network_is_its_layers_one_after_another(activation):
    network = Network.draw(3, 2, **SHAPE, zero_initialised=False, activation=activation, key=jr.key(0))
    x, condition = jr.normal(jr.key(1), (6, 2)), jr.normal(jr.key(2), (6, 1))
    rows = np.concatenate([x, condition], 1)
    function = {"silu": lambda t: t / (1 + np.exp(-t)), "relu": lambda t: np.maximum(t, 0.0)}[activation]
    for layer in network.layers[:-1]:
        rows = function(rows @ np.asarray(layer.weight) + np.asarray(layer.bias))
    rows = rows @ np.asarray(network.layers[-1].weight) + np.asarray(network.layers[-1].bias)
    np.testing.assert_allclose(network(x, condition), rows, atol=1e-5)


def test_a_scalar_network_has_a_number_per_row():
    network = Network.draw(2, "scalar", **SHAPE, zero_initialised=False, key=jr.key(0))
    assert network(jnp.ones((4, 2)), jnp.zeros((4, 0))).shape == (4,)


def test_a_zero_initialised_network_is_zero_and_can_learn():
    network = Network.draw(2, "scalar", **SHAPE, zero_initialised=True, key=jr.key(0))
    x, nothing = jr.normal(jr.key(1), (4, 2)), jnp.zeros((4, 0))
    np.testing.assert_array_equal(network(x, nothing), 0.0)
    gradient = jax.grad(
        lambda bias: jnp.sum(
            Network((*network.layers[:-1], Layer(network.layers[-1].weight, bias)), network.activation, True)(
                x, nothing
            )
        )
    )(network.layers[-1].bias)
    assert np.all(np.asarray(gradient) != 0.0)


def test_transports_carry_noise_as_they_say():
    noise, condition = jr.normal(jr.key(1), (5, 2)), jr.normal(jr.key(2), (5, 1))
    np.testing.assert_array_equal(Identity()(noise, condition), noise)
    np.testing.assert_allclose(
        Residual.draw(2, 1, key=jr.key(0), **SHAPE)(noise, condition), noise, atol=1e-7
    )
    free = Free.draw(2, 3, 1, key=jr.key(0), **SHAPE)
    np.testing.assert_array_equal(free(noise, condition), free.network(noise, condition))
    assert free(noise, condition).shape == (5, 3)


def test_a_transport_under_one_condition_knows_no_other():
    free, noise = Free.draw(2, 2, 1, key=jr.key(0), **SHAPE), jr.normal(jr.key(1), (5, 2))
    given = Given(free, np.array([0.7]))
    expected = free(noise, jnp.full((5, 1), 0.7))
    np.testing.assert_allclose(given(noise, jnp.zeros((5, 0))), expected, atol=1e-6)


def test_a_network_sees_its_point_and_the_cosines_of_its_waves():
    waves = Layer.of_frequencies(np.array([[3.0, -1.0], [0.5, 2.0], [1.0, 1.0]]), key=jr.key(0))
    options = {"width": 4, "depth": 1, "zero_initialised": False, "key": jr.key(1)}
    network = Network.draw(2, 1, waves=waves, **options)
    x = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    seen = np.concatenate([x, np.cos(x @ np.asarray(waves.weight) + np.asarray(waves.bias))], 1)
    plain = Network(network.layers, network.activation, False)
    np.testing.assert_allclose(network(x, x[:, :0]), plain(seen, x[:, :0]), atol=1e-6)
