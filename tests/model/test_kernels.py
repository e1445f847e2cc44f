import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam.model.kernels import (
    KERNELS,
    Linear,
    Matern32,
    Matern52,
    lengthscale_from_paper,
    lengthscale_from_ratio,
    median_distance,
)


def gaussian(u):
    return np.exp(-0.5 * np.sum(u**2))


def laplace(u):
    return np.exp(-np.sum(np.abs(u)))


def matern32(u):
    r = np.sqrt(3 * np.sum(u**2))
    return (1 + r) * np.exp(-r)


def matern52(u):
    r = np.sqrt(np.sum(u**2))
    return (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r)


def inverse_multiquadric(u):
    return 1 / np.sqrt(1 + np.sum(u**2))


# The kernels of the scaled difference, written once more, slowly and without the library.
TWINS = {
    "gaussian": gaussian,
    "laplace": laplace,
    "matern32": matern32,
    "matern52": matern52,
    "inverse_multiquadric": inverse_multiquadric,
}
LENGTHSCALES = {"one for all": 0.7, "per dimension": np.array([0.5, 1.0, 3.0])}


@pytest.fixture
def points():
    rng = np.random.default_rng(0)
    return rng.normal(size=(12, 3)), rng.normal(size=(9, 3))


def test_every_stationary_kernel_has_a_twin():
    assert TWINS.keys() == KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengthscale", LENGTHSCALES.values(), ids=LENGTHSCALES)
def test_gram_and_pair_agree_with_the_slow_twin(name, lengthscale, points):
    xs, zs = points
    kernel = KERNELS[name](lengthscale)
    twin = np.array([[TWINS[name]((x - z) / lengthscale) for z in zs] for x in xs])
    np.testing.assert_allclose(kernel.gram(jnp.asarray(xs), jnp.asarray(zs)), twin, rtol=1e-9)
    assert float(kernel(jnp.asarray(xs[0]), jnp.asarray(zs[1]))) == pytest.approx(twin[0, 1], rel=1e-12)


def test_linear_kernel_is_the_scalar_product(points):
    xs, zs = points
    twin = np.array([[np.sum(x * z) for z in zs] for x in xs])
    np.testing.assert_allclose(Linear().gram(jnp.asarray(xs), jnp.asarray(zs)), twin, rtol=1e-12)
    assert float(Linear()(jnp.asarray(xs[0]), jnp.asarray(zs[0]))) == pytest.approx(twin[0, 0])


@pytest.mark.parametrize("name", KERNELS)
def test_gram_is_symmetric_positive_semi_definite_with_unit_diagonal(name, points):
    xs = jnp.asarray(np.concatenate([*points, points[0][:2]]))  # tied points included
    matrix = np.asarray(KERNELS[name](0.8).gram(xs, xs))
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-14)
    np.testing.assert_allclose(np.diag(matrix), 1.0, atol=1e-6)
    assert np.linalg.eigvalsh(matrix)[0] > -1e-7


@pytest.mark.parametrize("name", KERNELS)
def test_an_infinite_lengthscale_switches_its_dimension_off(name, points):
    xs, zs = (jnp.asarray(p) for p in points)
    kernel, smaller = KERNELS[name](np.array([0.6, np.inf, 2.0])), KERNELS[name](np.array([0.6, 2.0]))
    kept = np.array([0, 2])
    np.testing.assert_allclose(kernel.gram(xs, zs), smaller.gram(xs[:, kept], zs[:, kept]), rtol=1e-12)
    np.testing.assert_array_equal(kernel.frequencies(20, 3, key=jr.key(0))[:, 1], 0.0)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengthscale", LENGTHSCALES.values(), ids=LENGTHSCALES)
def test_cosines_of_spectral_draws_average_to_the_kernel(name, lengthscale, points):
    kernel = KERNELS[name](lengthscale)
    frequencies = np.asarray(kernel.frequencies(20_000, 3, key=jr.key(1)))
    for x, z in zip(points[0][:8], points[1][:8], strict=True):
        cosines = np.cos(frequencies @ (x - z))
        error = cosines.std() / np.sqrt(len(cosines))
        assert abs(cosines.mean() - TWINS[name]((x - z) / lengthscale)) < 5 * error


@pytest.mark.parametrize("name", KERNELS)
def test_points_of_width_zero_give_one(name):
    kernel, empty = KERNELS[name](1.0), jnp.zeros((3, 0))
    assert float(kernel(empty[0], empty[1])) == 1.0
    np.testing.assert_array_equal(kernel.gram(empty, empty), np.ones((3, 3)))
    assert kernel.frequencies(5, 0, key=jr.key(0)).shape == (5, 0)


@pytest.mark.parametrize("kind", [Matern32, Matern52])
def test_matern_kernels_have_gradient_zero_where_the_points_meet(kind):
    point = jnp.array([0.3, -1.0])
    np.testing.assert_array_equal(jax.grad(lambda x: kind(0.5)(x, point))(point), 0.0)


def test_the_papers_sigma_is_converted():
    sigma, distance = 1.7, 0.9
    kernel = KERNELS["gaussian"](lengthscale_from_paper(sigma))
    value = float(kernel(jnp.array([0.0]), jnp.array([distance])))
    assert value == pytest.approx(np.exp(-(distance**2) / sigma**2))


def test_the_ratio_of_the_papers_code_is_converted():
    ratio, median, distance = 0.3, 2.5, 1.1
    kernel = KERNELS["gaussian"](lengthscale_from_ratio(ratio, median))
    gamma = 0.5 / (ratio * median**2)
    assert float(kernel(jnp.array([0.0]), jnp.array([distance]))) == pytest.approx(
        np.exp(-gamma * distance**2)
    )


def test_median_distance_is_that_of_the_distinct_pairs(points):
    xs = points[0]
    twin = np.median([np.linalg.norm(xs[i] - xs[j]) for i in range(len(xs)) for j in range(i)])
    assert median_distance(xs) == pytest.approx(twin)
    assert median_distance(np.zeros((4, 2))) == 1.0


def test_median_distance_of_a_subset_is_near_that_of_all():
    xs = np.random.default_rng(0).normal(size=(1500, 2))
    # Half of 1000 points' pairs: the median's relative error is well below 1 / sqrt(1000).
    assert median_distance(xs, most=1000) == pytest.approx(median_distance(xs, most=1500), rel=0.05)
