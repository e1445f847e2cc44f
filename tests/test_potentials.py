import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import gram, normal, tilted_normal

from kexpfam import kernels
from kexpfam.measures import Gaussian
from kexpfam.potentials import KernelSpan, Network, RandomFeatures, Tilt, choose_centres
from kexpfam.sample import Sample
from kexpfam.transports import Free, Residual

KERNELS = {
    "isotropic": kernels.Gaussian(0.7),
    "per dimension": kernels.Gaussian(np.array([0.7, 1.5])),
    "rough": kernels.Laplace(1.0),
}
CONDITION_KERNEL = kernels.Matern52(1.2)


@pytest.fixture(params=[0, 1], ids=["unconditional", "conditional"])
def sample(request):
    rng = np.random.default_rng(0)
    return Sample(jnp.asarray(rng.normal(size=(12, 2))), jnp.asarray(rng.normal(size=(12, request.param))))


def slow_gram(kernel, first: Sample, second: Sample) -> np.ndarray:
    product = gram(kernel, first.target, second.target)
    if first.condition.shape[1] == 0:
        return product
    return product * gram(CONDITION_KERNEL, first.condition, second.condition)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_features_at_the_centres_reproduce_the_gram_matrix(kernel, sample):
    space = KernelSpan.build(kernel, CONDITION_KERNEL, sample)
    features = space.features(sample.target, sample.condition)
    np.testing.assert_allclose(features @ features.T, slow_gram(kernel, sample, sample), atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_an_expansion_in_kernels_has_the_same_values_and_norm_in_features(kernel, sample):
    # f = sum_j a_j k(z_j, .) has |f|^2 = a K a, and its weights are the features of the centres summed with a.
    space = KernelSpan.build(kernel, CONDITION_KERNEL, sample)
    coefficients = np.random.default_rng(1).normal(size=len(sample))
    weights = coefficients @ np.asarray(space.features(sample.target, sample.condition))
    matrix = slow_gram(kernel, sample, sample)
    assert weights @ weights == pytest.approx(coefficients @ matrix @ coefficients, rel=1e-8)
    rng = np.random.default_rng(2)
    elsewhere = Sample(jnp.asarray(rng.normal(size=(5, 2))), jnp.asarray(rng.normal(size=(5, sample.condition.shape[1]))))
    values = space.evaluate(weights, elsewhere.target, elsewhere.condition)
    np.testing.assert_allclose(values, slow_gram(kernel, elsewhere, sample) @ coefficients, atol=1e-8)


def random_features(sample: Sample) -> RandomFeatures:
    return RandomFeatures.draw(kernels.Gaussian(0.7), CONDITION_KERNEL, sample, count=20, key=jr.key(0))


def span(sample: Sample) -> KernelSpan:
    return KernelSpan.build(kernels.Gaussian(0.7), CONDITION_KERNEL, sample)


@pytest.mark.parametrize("build", [span, random_features])
def test_evaluate_is_features_times_weights(build, sample):
    space = build(sample)
    weights = jr.normal(jr.key(1), (space.size,))
    values = space.evaluate(weights, sample.target, sample.condition)
    np.testing.assert_allclose(values, space.features(sample.target, sample.condition) @ weights, atol=1e-10)


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 12, 100])
@pytest.mark.parametrize("build", [span, random_features])
def test_a_matrix_in_chunks_is_the_matrix_in_one_piece(build, sample, rows_per_chunk):
    space = build(sample)
    target, condition = np.asarray(sample.target), np.asarray(sample.condition)
    chunked = space.matrix(target, condition, rows_per_chunk=rows_per_chunk)
    np.testing.assert_allclose(chunked, space.features(sample.target, sample.condition), atol=1e-12)


def test_repeated_centres_add_no_direction():
    points = np.random.default_rng(0).normal(size=(6, 2))
    once = KernelSpan.build(kernels.Gaussian(0.7), CONDITION_KERNEL, Sample.unconditional(points))
    twice = KernelSpan.build(kernels.Gaussian(0.7), CONDITION_KERNEL, Sample.unconditional(np.tile(points, (2, 1))))
    assert once.size == twice.size == 6
    elsewhere, empty = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2))), jnp.zeros((4, 0))
    projections = [space.features(elsewhere, empty) @ space.features(elsewhere, empty).T for space in (once, twice)]
    np.testing.assert_allclose(projections[0], projections[1], atol=1e-9)


def test_a_rank_keeps_the_largest_directions():
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(20, 2)))
    space = KernelSpan.build(kernels.Gaussian(0.7), CONDITION_KERNEL, sample, rank=5)
    assert space.size == 5
    features = np.asarray(space.features(sample.target, sample.condition))
    values = np.linalg.eigvalsh(slow_gram(kernels.Gaussian(0.7), sample, sample))
    np.testing.assert_allclose(np.linalg.eigvalsh(features.T @ features), values[-5:], rtol=1e-8)


@pytest.mark.parametrize("build", [span, random_features])
def test_an_infinite_length_scale_switches_its_dimension_off(build):
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(9, 3)))
    kernel = kernels.Gaussian(np.array([0.7, np.inf, 1.0]))
    if build is span:
        space = KernelSpan.build(kernel, CONDITION_KERNEL, sample)
    else:
        space = RandomFeatures.draw(kernel, CONDITION_KERNEL, sample, count=20, key=jr.key(0))
    moved = sample.target + jnp.array([0.0, 3.0, 0.0])
    features = space.features(sample.target, sample.condition)
    np.testing.assert_allclose(space.features(moved, sample.condition), features, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_random_features_approximate_the_gram_matrix(kernel, seed):
    sample, count = Sample.unconditional(np.random.default_rng(3).normal(size=(12, 2))), 2000
    space = RandomFeatures.draw(kernel, CONDITION_KERNEL, sample, count=count, key=jr.key(seed))
    features = np.asarray(space.features(sample.target, sample.condition))
    exact, doubled = (slow_gram(kernel, s, s) for s in (sample, Sample.unconditional(2.0 * sample.target)))
    # Each entry is a mean of cos(w . (x - z)), and cos^2 t = (1 + cos 2t) / 2 gives its variance.
    error = np.sqrt(np.maximum(0.5 * (1.0 + doubled) - exact**2, 0.0) / count)
    assert np.all(np.abs(features @ features.T - exact) < 5 * error + 1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_features_of_a_product_approximate_the_product(seed):
    rng, count = np.random.default_rng(3), 2000
    sample = Sample(jnp.asarray(rng.normal(size=(10, 2))), jnp.asarray(rng.normal(size=(10, 1))))
    space = RandomFeatures.draw(kernels.Gaussian(0.7), CONDITION_KERNEL, sample, count=count, key=jr.key(seed))
    features = np.asarray(space.features(sample.target, sample.condition))
    twice = Sample(2.0 * sample.target, 2.0 * sample.condition)
    exact, doubled = (slow_gram(kernels.Gaussian(0.7), s, s) for s in (sample, twice))
    error = np.sqrt(np.maximum(0.5 * (1.0 + doubled) - exact**2, 0.0) / count)
    assert np.all(np.abs(features @ features.T - exact) < 5 * error + 1e-12)


def test_few_rows_are_all_centres():
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(8, 2)))
    assert choose_centres(sample, 8, seed=0) is sample


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_centres_are_distinct_rows_spread_over_the_sample(seed):
    rng = np.random.default_rng(4)
    crowd, outpost = rng.normal(size=(300, 2)), rng.normal(30.0, 1.0, (5, 2))
    sample = Sample.unconditional(np.concatenate([crowd, outpost]))
    centres = np.asarray(choose_centres(sample, 20, seed=seed).target)
    rows = {tuple(row) for row in np.asarray(sample.target)}
    assert len({tuple(centre) for centre in centres}) == 20
    assert all(tuple(centre) in rows for centre in centres)
    # A random choice would miss the outpost 7 times in 10; one by distance goes there at once.
    assert np.any(centres > 20.0)
    np.testing.assert_array_equal(centres, choose_centres(sample, 20, seed=seed).target)


def test_centres_are_rows_of_target_and_condition_together():
    rng = np.random.default_rng(5)
    sample = Sample(jnp.asarray(rng.normal(size=(40, 1))), jnp.asarray(rng.normal(size=(40, 2))))
    centres = choose_centres(sample, 6, seed=0)
    pairs = np.concatenate([sample.target, sample.condition], 1).tolist()
    assert all(pair in pairs for pair in np.concatenate([centres.target, centres.condition], 1).tolist())


def test_a_tilt_is_base_plus_f():
    tilt = tilted_normal(0.7)
    x = np.linspace(-2.0, 2.0, 9)[:, None]
    np.testing.assert_allclose(tilt.values(x), 0.7 * x[:, 0], atol=1e-12)
    for row in x:
        expected = -0.5 * row[0] ** 2 - 0.5 * np.log(2 * np.pi) + 0.7 * row[0]
        assert float(tilt.log_unnormalised(jnp.asarray(row), jnp.zeros(0))) == pytest.approx(expected)


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 9, 100])
def test_the_values_of_a_tilt_in_chunks_are_those_in_one_piece(rows_per_chunk):
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(9, 2)))
    space = span(sample)
    tilt = Tilt(space, jr.normal(jr.key(0), (space.size,)), Gaussian(jnp.zeros(2), jnp.eye(2)))
    values = tilt.values(np.asarray(sample.target), rows_per_chunk=rows_per_chunk)
    np.testing.assert_allclose(values, tilt.f(sample.target, sample.condition), atol=1e-12)


def test_f_equal_to_zero_leaves_the_base():
    tilt = eqx.tree_at(lambda t: t.weights, tilted_normal(0.7), jnp.zeros(1))
    x = jnp.array([0.4])
    assert float(tilt.log_unnormalised(x, jnp.zeros(0))) == pytest.approx(float(normal().log_density(x)))


@pytest.mark.parametrize("outputs", ["scalar", 2])
def test_a_silent_network_is_zero_everywhere(outputs):
    network = Network.draw(3, outputs, width=8, depth=2, silent=True, key=jr.key(0))
    values = network(10.0 * jr.normal(jr.key(1), (20, 2)), jr.normal(jr.key(2), (20, 1)))
    assert values.shape == ((20,) if outputs == "scalar" else (20, 2))
    np.testing.assert_array_equal(values, 0.0)


def test_a_new_residual_transport_is_the_identity_to_the_last_bit():
    noise, condition = jr.normal(jr.key(0), (20, 2)), jr.normal(jr.key(1), (20, 1))
    transport = Residual.draw(2, 1, width=8, depth=2, key=jr.key(2))
    np.testing.assert_array_equal(transport(noise, condition), noise)


MODULES = {
    "network": lambda key: Network.draw(3, 2, width=8, depth=2, silent=True, key=key),
    "residual": lambda key: Residual.draw(2, 1, width=8, depth=2, key=key),
    "free": lambda key: Free.draw(2, 2, 1, width=8, depth=2, key=key),
}


@pytest.mark.parametrize("draw", MODULES.values(), ids=MODULES)
def test_the_gradient_reaches_every_parameter(draw):
    noise, condition = jr.normal(jr.key(0), (30, 2)), jr.normal(jr.key(1), (30, 1))
    keys = iter(jr.split(jr.key(2), 100))
    jiggle = lambda leaf: leaf + 0.1 * jr.normal(next(keys), leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf
    module = jax.tree.map(jiggle, draw(jr.key(3)))
    gradient = eqx.filter_grad(lambda m: jnp.mean((m(noise, condition) - 1.0) ** 2))(module)
    leaves = jax.tree.leaves(gradient)
    assert len(leaves) == 6  # a weight and a bias in each of three layers
    for leaf in leaves:
        assert np.all(np.asarray(leaf) != 0.0)


def test_the_gradient_of_a_silent_network_reaches_its_last_layer_only():
    network = Network.draw(2, "scalar", width=8, depth=2, silent=True, key=jr.key(0))
    x, empty = jr.normal(jr.key(1), (30, 2)), jnp.zeros((30, 0))
    *first, last = eqx.filter_grad(lambda net: jnp.mean(net(x, empty)))(network).mlp.layers
    assert np.all(np.asarray(last.weight) != 0.0)
    assert all(np.all(np.asarray(layer.weight) == 0.0) for layer in first)
