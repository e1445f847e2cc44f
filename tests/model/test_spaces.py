import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import gram, normal, tilted_normal

from kexpfam.data.sample import Sample
from kexpfam.model import kernels
from kexpfam.model.density import Tilt
from kexpfam.model.measures import Gaussian, Nodes, mesh
from kexpfam.model.networks import Free, Network, Residual
from kexpfam.model.spaces import (
    EIGENVALUE_FLOOR,
    Constant,
    FeatureSpace,
    KernelSpan,
    RandomFeatures,
    in_chunks,
    outer_features,
    spread_rows,
)

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
    space = FeatureSpace.of_kernels(kernel, CONDITION_KERNEL, sample)
    features = space.features(sample.target, sample.condition)
    np.testing.assert_allclose(features @ features.T, slow_gram(kernel, sample, sample), atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_an_expansion_in_kernels_has_the_same_values_and_norm_in_features(kernel, sample):
    # f = sum_j a_j k(z_j, .) has |f|^2 = a K a, and its weights are the features of the centres summed with
    # a.
    space = FeatureSpace.of_kernels(kernel, CONDITION_KERNEL, sample)
    coefficients = np.random.default_rng(1).normal(size=len(sample))
    weights = coefficients @ np.asarray(space.features(sample.target, sample.condition))
    matrix = slow_gram(kernel, sample, sample)
    assert weights @ weights == pytest.approx(coefficients @ matrix @ coefficients, rel=1e-8)
    rng = np.random.default_rng(2)
    elsewhere = Sample(
        jnp.asarray(rng.normal(size=(5, 2))), jnp.asarray(rng.normal(size=(5, sample.condition.shape[1])))
    )
    values = space.evaluate(jnp.asarray(weights), elsewhere.target, elsewhere.condition)
    np.testing.assert_allclose(values, slow_gram(kernel, elsewhere, sample) @ coefficients, atol=1e-8)


def kernel_span(dim: int) -> KernelSpan:
    return KernelSpan.build(kernels.Gaussian(0.7), np.random.default_rng(6).normal(size=(12, dim)))


def random_features(dim: int) -> RandomFeatures:
    return RandomFeatures.draw(kernels.Gaussian(0.7), dim, count=20, key=jr.key(0))


SPANS = {"kernel span": kernel_span, "random features": random_features, "constant": lambda dim: Constant()}
every_span = pytest.mark.parametrize("build", SPANS.values(), ids=SPANS)


@every_span
def test_evaluate_is_features_times_weights(build):
    points, span = jr.normal(jr.key(2), (7, 2)), build(2)
    weights = jr.normal(jr.key(1), (span.size,))
    features = span.features(points)
    assert features.shape == (7, span.size)
    np.testing.assert_allclose(span.evaluate(weights, points), features @ weights, atol=1e-10)


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 12, 100])
@every_span
def test_a_matrix_in_chunks_is_the_matrix_in_one_piece(build, rows_per_chunk):
    points, span = jr.normal(jr.key(2), (12, 2)), build(2)
    chunked = in_chunks(span.features, points, rows_per_chunk=rows_per_chunk)
    assert isinstance(chunked, np.ndarray)
    np.testing.assert_allclose(chunked, span.features(points), atol=1e-12)
    np.testing.assert_allclose(chunked, span.matrix(np.asarray(points)), atol=1e-12)


@pytest.mark.parametrize("dim", [0, 3])
def test_the_constant_span_is_one_everywhere(dim):
    points = np.random.default_rng(0).normal(size=(5, dim))
    np.testing.assert_array_equal(Constant().features(jnp.asarray(points)), np.ones((5, 1)))
    np.testing.assert_array_equal(Constant().matrix(points), np.ones((5, 1)))
    assert Constant().size == 1


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_kernel_span_projects_the_kernel_on_its_centres(kernel):
    # Features are orthonormal in the RKHS, so their products are those of the projections: k(x, Z) K^-1 k(Z,
    # x).
    centres, points = (
        np.random.default_rng(0).normal(size=(10, 2)),
        np.random.default_rng(1).normal(size=(6, 2)),
    )
    features = np.asarray(KernelSpan.build(kernel, centres).features(jnp.asarray(points)))
    cross = gram(kernel, points, centres)
    projected = cross @ np.linalg.solve(gram(kernel, centres, centres), cross.T)
    np.testing.assert_allclose(features @ features.T, projected, atol=1e-9)


def test_repeated_centres_add_no_direction():
    points = np.random.default_rng(0).normal(size=(6, 2))
    once, twice = (
        KernelSpan.build(kernels.Gaussian(0.7), centres) for centres in (points, np.tile(points, (2, 1)))
    )
    assert once.size == twice.size == 6
    elsewhere = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2)))
    projections = [span.features(elsewhere) @ span.features(elsewhere).T for span in (once, twice)]
    np.testing.assert_allclose(projections[0], projections[1], atol=1e-9)


def test_a_rank_keeps_the_largest_directions():
    points = np.random.default_rng(0).normal(size=(20, 2))
    span = KernelSpan.build(kernels.Gaussian(0.7), points, rank=5)
    assert span.size == 5
    features = np.asarray(span.features(jnp.asarray(points)))
    values = np.linalg.eigvalsh(gram(kernels.Gaussian(0.7), points, points))
    np.testing.assert_allclose(np.linalg.eigvalsh(features.T @ features), values[-5:], rtol=1e-8)


@pytest.mark.parametrize("floor", [EIGENVALUE_FLOOR, 1e-4, 1e-2])
def test_a_floor_keeps_the_directions_above_that_share_of_the_largest(floor):
    points = np.random.default_rng(0).normal(size=(20, 2))
    span = KernelSpan.build(kernels.Gaussian(2.0), points, floor=floor)
    values = np.linalg.eigvalsh(gram(kernels.Gaussian(2.0), points, points))
    kept = values[values > floor * values[-1]]
    assert 1 < span.size == len(kept)
    features = np.asarray(span.features(jnp.asarray(points)))
    np.testing.assert_allclose(np.linalg.eigvalsh(features.T @ features), kept, rtol=1e-4)


def test_a_higher_floor_leaves_fewer_directions():
    points = np.random.default_rng(0).normal(size=(20, 2))
    sizes = [
        KernelSpan.build(kernels.Gaussian(2.0), points, floor=floor).size for floor in (1e-8, 1e-4, 1e-2)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize(
    "build", [KernelSpan.build, lambda kernel, _: RandomFeatures.draw(kernel, 3, count=20, key=jr.key(0))]
)
def test_an_infinite_length_scale_switches_its_dimension_off(build):
    points = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)))
    span = build(kernels.Gaussian(np.array([0.7, np.inf, 1.0])), points)
    moved = points + jnp.array([0.0, 3.0, 0.0])
    np.testing.assert_allclose(span.features(moved), span.features(points), atol=1e-12)


def random_features_variance(kernel, points, count) -> np.ndarray:
    """Return the variance of the entries of the Gram matrix of random features."""
    # Each entry is a mean of cos(w . (x - z)), and cos^2 t = (1 + cos 2t) / 2 gives its variance.
    exact, doubled = gram(kernel, points, points), gram(kernel, 2.0 * points, 2.0 * points)
    return np.maximum(0.5 * (1.0 + doubled) - exact**2, 0.0) / count


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_random_features_approximate_the_gram_matrix(kernel, seed):
    points, count = np.random.default_rng(3).normal(size=(12, 2)), 2000
    span = RandomFeatures.draw(kernel, 2, count=count, key=jr.key(seed))
    assert span.size == 2 * count
    features = np.asarray(span.features(jnp.asarray(points)))
    error = np.sqrt(random_features_variance(kernel, points, count))
    assert np.all(np.abs(features @ features.T - gram(kernel, points, points)) < 5 * error + 1e-12)


def kernel_space(sample: Sample) -> FeatureSpace:
    return FeatureSpace.of_kernels(kernels.Gaussian(0.7), CONDITION_KERNEL, sample)


def random_space(sample: Sample, *, counts=(7, 20), seed=0) -> FeatureSpace:
    """Return random features of the target, and of the condition if there is one."""
    keys, dim = jr.split(jr.key(seed)), sample.condition.shape[1]
    condition = (
        RandomFeatures.draw(CONDITION_KERNEL, dim, count=counts[0], key=keys[0]) if dim else Constant()
    )
    return FeatureSpace(
        condition, RandomFeatures.draw(kernels.Gaussian(0.7), 2, count=counts[1], key=keys[1])
    )


def mixed_space(sample: Sample) -> FeatureSpace:
    return FeatureSpace(kernel_space(sample).condition, random_space(sample).target)


SPACES = {"kernels": kernel_space, "random features": random_space, "both": mixed_space}
every_space = pytest.mark.parametrize("build", SPACES.values(), ids=SPACES)


@every_space
def test_the_features_of_a_row_are_the_outer_product_of_the_spans(build, sample):
    space = build(sample)
    phi, psi = space.condition.features(sample.condition), space.target.features(sample.target)
    rows = np.array([np.outer(first, second).ravel() for first, second in zip(phi, psi, strict=True)])
    assert rows.shape == (len(sample), space.size)
    np.testing.assert_allclose(space.features(sample.target, sample.condition), rows, atol=1e-14)
    np.testing.assert_allclose(outer_features(np.asarray(phi), np.asarray(psi)), rows, atol=1e-14)


@every_space
def test_f_is_features_times_weights(build, sample):
    space = build(sample)
    weights = jr.normal(jr.key(1), (space.size,))
    values = space.evaluate(weights, sample.target, sample.condition)
    np.testing.assert_allclose(values, space.features(sample.target, sample.condition) @ weights, atol=1e-10)


@every_space
def test_a_matrix_of_a_space_is_that_of_its_features(build, sample):
    space = build(sample)
    target, condition = np.asarray(sample.target), np.asarray(sample.condition)
    matrix = space.matrix(target, condition)
    assert isinstance(matrix, np.ndarray)
    np.testing.assert_allclose(matrix, space.features(sample.target, sample.condition), atol=1e-12)


@every_space
def test_coefficients_make_f_of_any_target_under_each_condition(build, sample):
    space = build(sample)
    weights, targets = jr.normal(jr.key(1), (space.size,)), jr.normal(jr.key(2), (5, 2))
    coefficients = space.coefficients(weights, sample.condition)
    assert coefficients.shape == (len(sample), space.target.size)
    for x, row in zip(sample.condition, coefficients, strict=True):
        expected = space.features(targets, jnp.tile(x, (5, 1))) @ weights
        np.testing.assert_allclose(space.target.features(targets) @ row, expected, atol=1e-10)


def test_coefficients_without_a_condition_are_the_weights():
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(12, 2)))
    space = kernel_space(sample)
    weights = jr.normal(jr.key(1), (space.size,))
    np.testing.assert_array_equal(space.coefficients(weights, jnp.zeros((3, 0))), jnp.tile(weights, (3, 1)))


@every_space
def test_f_given_a_condition_is_f_under_that_condition(build, sample):
    space = build(sample)
    weights, targets = jr.normal(jr.key(1), (space.size,)), jr.normal(jr.key(2), (5, 2))
    # One condition of the sample and one that no row had.
    for x in (sample.condition[3], sample.condition[3] + 0.1):
        given, its_weights = space.given(weights, x)
        expected = space.evaluate(weights, targets, jnp.tile(x, (5, 1)))
        assert given.size == its_weights.size == space.target.size
        np.testing.assert_allclose(
            given.evaluate(its_weights, targets, jnp.zeros((5, 0))), expected, atol=1e-10
        )


def test_a_sample_without_conditions_has_a_constant_for_them():
    space = kernel_space(Sample.unconditional(np.random.default_rng(0).normal(size=(12, 2))))
    assert isinstance(space.condition, Constant)
    assert space.size == space.target.size == 12


def test_conditions_that_rows_share_add_no_direction():
    rng = np.random.default_rng(0)
    conditions = rng.normal(size=(3, 2))
    sample = Sample(jnp.asarray(rng.normal(size=(12, 2))), jnp.asarray(np.tile(conditions, (4, 1))))
    space = kernel_space(sample)
    assert (space.condition.size, space.target.size, space.size) == (3, 12, 36)
    assert sorted(space.condition.centres.tolist()) == sorted(conditions.tolist())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_features_of_a_product_approximate_the_product(seed):
    rng, count = np.random.default_rng(3), 300
    sample = Sample(jnp.asarray(rng.normal(size=(10, 2))), jnp.asarray(rng.normal(size=(10, 1))))
    features = random_space(sample, counts=(count, count), seed=seed).matrix(sample.target, sample.condition)
    parts = (
        (kernels.Gaussian(0.7), np.asarray(sample.target)),
        (CONDITION_KERNEL, np.asarray(sample.condition)),
    )
    variances = [random_features_variance(kernel, points, count) for kernel, points in parts]
    squares = [gram(kernel, points, points) ** 2 for kernel, points in parts]
    # Two independent estimates: E[A^2 B^2] - E[A]^2 E[B]^2.
    variance = variances[0] * squares[1] + squares[0] * variances[1] + variances[0] * variances[1]
    error = np.abs(features @ features.T - slow_gram(kernels.Gaussian(0.7), sample, sample))
    assert np.all(error < 5 * np.sqrt(variance) + 1e-12)


def test_few_rows_are_all_centres():
    rows = np.random.default_rng(0).normal(size=(8, 2))
    np.testing.assert_array_equal(spread_rows(rows, 8, seed=0), np.arange(8))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_centres_are_distinct_rows_spread_over_the_sample(seed):
    rng = np.random.default_rng(4)
    crowd, outpost = rng.normal(size=(300, 2)), rng.normal(30.0, 1.0, (5, 2))
    rows = np.concatenate([crowd, outpost])
    chosen = spread_rows(rows, 20, seed=seed)
    assert len(set(chosen.tolist())) == 20
    # A random choice would miss the outpost 7 times in 10; one by distance goes there at once.
    assert np.any(rows[chosen] > 20.0)
    np.testing.assert_array_equal(chosen, spread_rows(rows, 20, seed=seed))


GRIDS = {
    1: [np.linspace(-2, 2, 9)],
    2: [np.linspace(-2, 2, 6), np.linspace(-1, 3, 5)],
    3: [np.linspace(-1, 1, 4)] * 3,
}


@pytest.mark.parametrize("dim", GRIDS)
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "matern52", "scales"])
def test_a_grid_has_the_features_of_its_points(kind, dim):
    scale = np.linspace(0.7, 1.4, dim) if kind == "scales" else 0.8
    kernel = kernels.KERNELS["gaussian" if kind == "scales" else kind](scale)
    span = KernelSpan.build(kernel, np.random.default_rng(0).normal(size=(15, dim)))
    edges = tuple(GRIDS[dim])
    points = mesh([0.5 * (edge[1:] + edge[:-1]) for edge in edges])
    nodes, weights = (
        Nodes(points, np.zeros(len(points)), edges),
        np.random.default_rng(1).normal(size=span.size),
    )
    np.testing.assert_allclose(span.node_matrix(nodes), span.matrix(points), atol=1e-9)
    np.testing.assert_allclose(span.node_values(weights, nodes), span.matrix(points) @ weights, atol=1e-9)


def test_a_tilt_is_base_plus_f():
    tilt = tilted_normal(0.7)
    x = np.linspace(-2.0, 2.0, 9)[:, None]
    np.testing.assert_allclose(tilt.values(x), 0.7 * x[:, 0], atol=1e-12)
    for row in x:
        expected = -0.5 * row[0] ** 2 - 0.5 * np.log(2 * np.pi) + 0.7 * row[0]
        assert float(tilt.log_unnormalised(jnp.asarray(row), jnp.zeros(0))) == pytest.approx(expected)


def random_tilt(sample: Sample) -> Tilt:
    space = kernel_space(sample)
    return Tilt(space, jr.normal(jr.key(0), (space.size,)), Gaussian(jnp.zeros(2), jnp.eye(2)))


def test_the_values_of_a_tilt_are_those_of_f(sample):
    tilt = random_tilt(sample)
    values = tilt.values(np.asarray(sample.target), np.asarray(sample.condition))
    assert isinstance(values, np.ndarray)
    np.testing.assert_allclose(values, tilt.f(sample.target, sample.condition), atol=1e-12)


def test_the_values_of_a_tilt_need_no_word_about_conditions_that_do_not_exist():
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(9, 2)))
    tilt = random_tilt(sample)
    np.testing.assert_allclose(
        tilt.values(np.asarray(sample.target)), tilt.f(sample.target, sample.condition), atol=1e-12
    )


def test_a_tilt_given_a_condition_is_the_tilt_under_that_condition(sample):
    tilt, points = random_tilt(sample), np.random.default_rng(7).normal(size=(5, 2))
    for x in (sample.condition[3], sample.condition[3] + 0.1):
        given = tilt.given(x)
        np.testing.assert_allclose(given.values(points), tilt.values(points, np.tile(x, (5, 1))), atol=1e-10)
        for point in jnp.asarray(points):
            expected = float(tilt.log_unnormalised(point, x))
            assert float(given.log_unnormalised(point, jnp.zeros(0))) == pytest.approx(expected, abs=1e-10)


def test_f_equal_to_zero_leaves_the_base():
    tilt = eqx.tree_at(lambda t: t.weights, tilted_normal(0.7), jnp.zeros(1))
    x = jnp.array([0.4])
    assert float(tilt.log_unnormalised(x, jnp.zeros(0))) == pytest.approx(float(normal().log_density(x)))


@pytest.mark.parametrize("outputs", ["scalar", 2])
def test_a_silent_network_is_zero_everywhere(outputs):
    network = Network.draw(3, outputs, width=8, depth=2, zero_initialised=True, key=jr.key(0))
    values = network(10.0 * jr.normal(jr.key(1), (20, 2)), jr.normal(jr.key(2), (20, 1)))
    assert values.shape == ((20,) if outputs == "scalar" else (20, 2))
    np.testing.assert_array_equal(values, 0.0)


def test_a_new_residual_transport_is_the_identity_to_the_last_bit():
    noise, condition = jr.normal(jr.key(0), (20, 2)), jr.normal(jr.key(1), (20, 1))
    transport = Residual.draw(2, 1, width=8, depth=2, key=jr.key(2))
    np.testing.assert_array_equal(transport(noise, condition), noise)


MODULES = {
    "network": lambda key: Network.draw(3, 2, width=8, depth=2, zero_initialised=True, key=key),
    "residual": lambda key: Residual.draw(2, 1, width=8, depth=2, key=key),
    "free": lambda key: Free.draw(2, 2, 1, width=8, depth=2, key=key),
}


@pytest.mark.parametrize("draw", MODULES.values(), ids=MODULES)
def test_the_gradient_reaches_every_parameter(draw):
    noise, condition = jr.normal(jr.key(0), (30, 2)), jr.normal(jr.key(1), (30, 1))
    keys = iter(jr.split(jr.key(2), 100))
    jiggle = lambda leaf: (
        leaf + 0.1 * jr.normal(next(keys), leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf
    )
    module = jax.tree.map(jiggle, draw(jr.key(3)))
    gradient = eqx.filter_grad(lambda m: jnp.mean((m(noise, condition) - 1.0) ** 2))(module)
    leaves = jax.tree.leaves(gradient)
    assert len(leaves) == 6  # a weight and a bias in each of three layers
    for leaf in leaves:
        assert np.all(np.asarray(leaf) != 0.0)


@pytest.mark.parametrize("outputs", [3, "scalar"])
def test_a_network_is_its_layers_one_after_the_other(outputs):
    network = Network.draw(
        3, outputs, width=8, depth=2, zero_initialised=False, activation="relu", key=jr.key(0)
    )
    x, condition = np.asarray(jr.normal(jr.key(1), (30, 2))), np.asarray(jr.normal(jr.key(2), (30, 1)))
    expected = []
    for values in np.hstack([x, condition]):
        for layer in network.layers[:-1]:
            values = np.maximum(np.asarray(layer.weight).T @ values + np.asarray(layer.bias), 0.0)
        values = np.asarray(network.layers[-1].weight).T @ values + np.asarray(network.layers[-1].bias)
        expected.append(values[0] if outputs == "scalar" else values)
    np.testing.assert_allclose(network(jnp.asarray(x), jnp.asarray(condition)), expected, atol=1e-6)


def test_the_gradient_of_a_silent_network_reaches_its_last_layer_only():
    network = Network.draw(2, "scalar", width=8, depth=2, zero_initialised=True, key=jr.key(0))
    x, empty = jr.normal(jr.key(1), (30, 2)), jnp.zeros((30, 0))
    *first, last = eqx.filter_grad(lambda net: jnp.mean(net(x, empty)))(network).layers
    assert np.all(np.asarray(last.weight) != 0.0)
    assert all(np.all(np.asarray(layer.weight) == 0.0) for layer in first)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_waves_of_a_kernel_have_its_spectrum(seed):
    count, kernel = 4000, kernels.Gaussian(np.array([0.5, 2.0]))
    span = KernelSpan.build(kernel, np.random.default_rng(0).normal(size=(6, 2)))
    phases = np.asarray(span.waves(count, 2, key=jr.key(seed))) @ np.array([0.3, 0.8])
    assert abs(np.cos(phases).mean() - float(kernel(np.zeros(2), np.array([0.3, 0.8])))) < 5 / np.sqrt(
        2 * count
    )


def test_waves_of_random_features_are_their_own():
    span = RandomFeatures.draw(kernels.Gaussian(0.7), 2, count=5, key=jr.key(0))
    waves = np.asarray(span.waves(40, 2, key=jr.key(1)))
    distances = np.abs(waves[:, None] - np.asarray(span.frequencies)).max(2)
    assert distances.min(1).max() < 1e-5
    assert len(set(distances.argmin(1))) > 1
