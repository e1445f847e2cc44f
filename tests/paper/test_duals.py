import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import midpoint_grid, normal, tilted_normal

from kexpfam.data.sample import Sample
from kexpfam.model import kernels
from kexpfam.model.density import Tilt
from kexpfam.model.measures import AbstractMeasure, Gaussian, Mixture
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper.duals import FAMILIES, DynamicsDual, FlowDual, Leapfrog, MixtureDual, kernel_density
from kexpfam.paper.singly_dual import divergence

FACTOR = np.array([[0.7, 0.0], [0.3, 0.5]])
MEAN = np.array([0.4, -0.2])


def gaussian_dual(mean=MEAN, factor=FACTOR):
    return MixtureDual.of(Mixture.of(jnp.zeros(1), jnp.asarray(mean)[None], jnp.asarray(factor)[None]))


def two_components(*, only_weights=False):
    factors = np.stack([FACTOR, 0.5 * np.eye(2)])
    mixture = Mixture.of(jnp.log(jnp.array([0.3, 0.7])), jnp.array([[-1.0, 0.0], [1.0, 0.5]]), factors)
    return MixtureDual.of(mixture, only_weights=only_weights)


def bumpy_tilt():
    """Return an f with curvature over a normal in the plane, so that forces change along a path."""
    space = FeatureSpace.of_kernels(
        kernels.Gaussian(0.8),
        kernels.Gaussian(0.8),
        Sample.unconditional(np.random.default_rng(0).normal(size=(5, 2))),
    )
    return Tilt(space, jnp.array([1.0, -0.5, 0.8, 0.3, -1.0]), Gaussian(jnp.zeros(2), jnp.eye(2)))


def normal_divergence(mean, factor):
    """Return KL(N(mean, factor factor^T) || N(0, I))."""
    return 0.5 * (np.sum(factor**2) + mean @ mean - len(mean)) - np.log(np.diag(factor)).sum()


def test_a_dual_starts_as_the_mixture_it_is_made_of():
    mixture = Mixture.of(
        jnp.log(jnp.array([0.3, 0.7])), jnp.array([[-1.0, 0.0], [1.0, 0.5]]), np.stack([FACTOR, np.eye(2)])
    )
    points = np.random.default_rng(0).normal(size=(20, 2))
    np.testing.assert_allclose(
        MixtureDual.of(mixture).log_densities(points), mixture.log_densities(points), rtol=1e-10
    )


def test_the_divergence_of_a_gaussian_and_its_gradient_have_their_closed_forms():
    base, count = Gaussian(jnp.zeros(2), jnp.eye(2)), 40_000

    def estimate(dual, key):
        return divergence(base, dual.pathwise_draws(count, key=key))

    value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(estimate))(gaussian_dual(), jr.key(0))
    # log q - log p0 has a standard deviation below 1 here, and its derivatives below 2.
    error = 1.0 / np.sqrt(count)
    assert float(value) == pytest.approx(normal_divergence(MEAN, FACTOR), abs=5 * error)
    np.testing.assert_allclose(gradient.means[0], MEAN, atol=10 * error)
    # In the parameters of the factor: d/d log L_ii = L_ii^2 - 1 and d/d L_ij = L_ij below the diagonal.
    expected = np.tril(FACTOR, -1) + np.diag(np.diag(FACTOR) ** 2 - 1.0)
    np.testing.assert_allclose(gradient.factors[0], expected, atol=10 * error)


def test_the_weights_of_components_have_an_exact_gradient():
    def mean(dual):
        draws = dual.pathwise_draws(40_000, key=jr.key(0))
        return draws.shares @ draws.points[:, 0]

    value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(mean))(two_components())
    # The mean of the first coordinate is 0.7 - 0.3, and its derivatives in the logits are w_k (m_k - mean).
    assert float(value) == pytest.approx(0.4, abs=0.02)
    np.testing.assert_allclose(gradient.logits, [0.3 * (-1.0 - 0.4), 0.7 * (1.0 - 0.4)], atol=0.02)


def test_particles_move_by_their_weights_alone():
    base = Gaussian(jnp.zeros(2), jnp.eye(2))
    gradient = eqx.filter_jit(
        eqx.filter_grad(lambda dual: divergence(base, dual.pathwise_draws(200, key=jr.key(0))))
    )(two_components(only_weights=True))
    assert np.all(np.asarray(gradient.means) == 0.0) and np.all(np.asarray(gradient.factors) == 0.0)
    assert np.all(np.asarray(gradient.logits) != 0.0)


def test_leapfrog_steps_keep_volume_and_can_be_run_backwards():
    leapfrog = Leapfrog(bumpy_tilt(), jnp.log(jnp.array([[0.3, 0.2], [0.1, 0.4], [0.5, 0.3]])))
    both = jr.normal(jr.key(0), (6, 4))

    def carried(row):
        x, v = leapfrog(row[None, :2], row[None, 2:])
        return jnp.concatenate([x[0], v[0]])

    jacobians = jax.jit(jax.vmap(jax.jacfwd(carried)))(both)
    np.testing.assert_allclose(np.linalg.det(jacobians), 1.0, rtol=1e-10)
    moved = jax.jit(jax.vmap(carried))(both)
    assert np.all(np.abs(moved - both).max(1) > 0.1)
    x, v = eqx.filter_jit(leapfrog.back)(moved[:, :2], moved[:, 2:])
    np.testing.assert_allclose(np.concatenate([x, v], 1), both, atol=1e-10)


def test_the_marginal_density_of_dynamics_is_the_closed_form_of_a_linear_map():
    # With log p0 + f that of N(0, 1), one step of size e is linear in (x, v), and normal starts stay normal.
    size, scale, steps = 0.4, 0.8, 3
    half = np.array([[1.0, 0.0], [-0.5 * size, 1.0]])
    step = half @ np.array([[1.0, size], [0.0, 1.0]]) @ half
    variance = (
        np.linalg.matrix_power(step, steps) @ np.diag([scale**2, 1.0]) @ np.linalg.matrix_power(step, steps).T
    )[0, 0]
    start = MixtureDual.of(Mixture.of(jnp.zeros(1), jnp.zeros((1, 1)), jnp.full((1, 1, 1), scale)))
    dual = DynamicsDual(start, Leapfrog(tilted_normal(0.0), jnp.full((steps, 1), jnp.log(size))))
    points = np.linspace(-2.0, 2.0, 9)[:, None]
    expected = -0.5 * points[:, 0] ** 2 / variance - 0.5 * np.log(2.0 * np.pi * variance)
    np.testing.assert_allclose(dual.log_densities(points), expected, atol=0.02)
    draws = dual.draws(20_000, key=jr.key(0))
    assert draws.var() == pytest.approx(variance, rel=5 * np.sqrt(2.0 / 20_000))


def test_the_joint_divergence_of_dynamics_is_its_closed_form_where_nothing_moves():
    # Steps of size 0 leave a normal start where it is: the joint KL is that of the positions.
    start = MixtureDual.of(Mixture.of(jnp.zeros(1), jnp.full((1, 1), 0.5), jnp.full((1, 1, 1), 0.8)))
    still = DynamicsDual(start, Leapfrog(tilted_normal(0.3), jnp.full((2, 1), -40.0)))
    value = float(
        eqx.filter_jit(lambda dual: divergence(normal(), dual.pathwise_draws(40_000, key=jr.key(0))))(still)
    )
    assert value == pytest.approx(
        normal_divergence(np.array([0.5]), np.array([[0.8]])), abs=5 / np.sqrt(40_000)
    )


@pytest.mark.parametrize("family", ["particles", "gaussian", "mixture", "dynamics"])
def test_every_family_starts_at_the_data_with_shares_of_a_whole(family):
    data = np.random.default_rng(0).normal(size=(60, 2))
    dual = FAMILIES[family](data, bumpy_tilt(), jr.key(0))
    draws = eqx.filter_jit(lambda dual: dual.pathwise_draws(256, key=jr.key(1)))(dual)
    assert float(draws.shares.sum()) == pytest.approx(1.0)
    assert np.all(np.isfinite(draws.log_density))
    # Not far below the best normal: 2.84 nats are the entropy of the data's law.
    log_densities = dual.log_densities(data)
    assert log_densities.mean() > -3.2
    # A dual is a measure: of one point as of rows, and with draws as NumPy arrays.
    assert isinstance(dual, AbstractMeasure)
    assert float(dual.log_density(data[0])) == pytest.approx(log_densities[0], abs=1e-9)
    assert dual.draws(7, key=jr.key(2)).shape == (7, 2)


def test_the_bandwidth_is_the_best_left_out_one():
    data = np.random.default_rng(1).normal(size=(40, 2))

    def left_out(bandwidth):
        squared = np.sum((data[:, None] - data) ** 2, 2)
        densities = np.exp(-0.5 * squared / bandwidth**2) / (2.0 * np.pi * bandwidth**2)
        np.fill_diagonal(densities, 0.0)
        return np.log(densities.sum(1) / (len(data) - 1) + 1e-300).mean()

    candidates = (0.02, 1.0, 24)
    bandwidths = np.geomspace(*candidates)
    best = max(bandwidths, key=left_out)
    mixture = kernel_density(data, most=100, bandwidths=candidates, seed=0)
    np.testing.assert_allclose(mixture.choleskys, np.broadcast_to(best * np.eye(2), (40, 2, 2)))
    assert bandwidths[0] < best < bandwidths[-1]


@pytest.mark.slow
def test_the_density_of_a_flow_integrates_to_one():
    pytest.importorskip("flowjax")
    dual = FlowDual.draw(2, layers=2, width=8, key=jr.key(0))
    moving, rest = eqx.partition(dual, eqx.is_inexact_array)
    dual = eqx.combine(
        jax.tree.map(lambda leaf: leaf + 0.2 * jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape), moving),
        rest,
    )
    points, volume = midpoint_grid([-9.0, -9.0], [9.0, 9.0], 120)
    log_densities = dual.log_densities(points)
    assert volume * np.exp(log_densities).sum() == pytest.approx(1.0, abs=5e-3)
    # It is not the normal it is made of, and its draws carry the density that the measure gives them.
    assert np.abs(log_densities + 0.5 * np.sum(points**2, 1) + np.log(2.0 * np.pi)).max() > 0.1
    draws = eqx.filter_jit(lambda dual: dual.pathwise_draws(50, key=jr.key(1)))(dual)
    np.testing.assert_allclose(draws.log_density, dual.log_densities(np.asarray(draws.points)), atol=1e-6)


def test_a_flow_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flowjax.bijections", None)
    with pytest.raises(ImportError, match=r'pip install "kexpfam\[flows\]"'):
        FlowDual.draw(2, key=jr.key(0))
