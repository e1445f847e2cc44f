import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.optimize
import scipy.special
from oracles import linear_space, log_ratio, normal, normal_divergence, normal_quantiles

from kexpfam.data.sample import Sample
from kexpfam.fit import convex
from kexpfam.fit.saddle import (
    DoublyDual,
    SaddleBatch,
    SaddlePoint,
    SaddleProblem,
    anchor,
    carry,
    draw_batch,
    evaluate_nu,
    saddle_terms,
)
from kexpfam.model.kernels import Gaussian
from kexpfam.model.measures import Box
from kexpfam.model.networks import AbstractTransport, Identity, Network, Residual
from kexpfam.model.spaces import FeatureSpace

PENALTY = 0.1


class Affine(AbstractTransport):
    """``scale * noise + shift`` in float64, for derivatives by differences."""

    scale: jax.Array
    shift: jax.Array

    def __call__(self, noise, condition):
        return self.scale * noise + self.shift


def network(inputs, outputs, *, zero_initialised, seed=0):
    return Network.draw(
        inputs, outputs, width=8, depth=2, zero_initialised=zero_initialised, key=jr.key(seed)
    )


def anchored_normal(mean, *, space=None, penalty=PENALTY, inverse_temperature=1.0, anchored=True):
    """Return a problem over p0 = N(0, 1) whose reference is q = N(mean, 1)."""
    sample = Sample.unconditional(np.random.default_rng(0).normal(1.0, 0.5, (40, 1)))
    space = linear_space() if space is None else space
    temperature = jnp.asarray(inverse_temperature)
    return SaddleProblem(sample, normal(), space, normal(mean), jnp.asarray(penalty), temperature, anchored)


def kernel_space():
    return FeatureSpace.of_kernels(
        Gaussian(0.8), Gaussian(0.8), Sample.unconditional(np.linspace(-2.0, 3.0, 7)[:, None])
    )


def at_anchor(problem, transport=None):
    """Return f = 0 and nu = its anchor, with noise as it is unless there is a transport."""
    return SaddlePoint(
        jnp.zeros(problem.space.size), network(1, "scalar", zero_initialised=True), transport or Identity()
    )


def moving_point(problem):
    """Return a point at which no player is at rest."""
    weights = 0.3 * jr.normal(jr.key(5), (problem.space.size,))
    return SaddlePoint(
        weights,
        network(1, "scalar", zero_initialised=False),
        Residual(network(1, 1, zero_initialised=False, seed=1)),
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mean", [-0.5, 0.8, 1.2])
def test_the_kl_bound_is_attained_at_the_log_ratio(mean, seed):
    problem, count = anchored_normal(mean), 20_000
    terms = saddle_terms(at_anchor(problem), problem, draw_batch(problem, count, key=jr.key(seed)))
    # Weighted by importance the base expectation is exactly 1; what is left is the mean of nu, of spread
    # |mean|.
    assert abs(float(terms.kl_dual) - normal_divergence(mean)) < 5 * abs(mean) / np.sqrt(count)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_kl_bound_with_plain_base_draws_has_the_same_value(seed):
    mean, count = 0.8, 20_000
    problem = anchored_normal(mean)
    noise_key, base_key = jr.split(jr.key(seed))
    noise, base = problem.reference.sample(count, key=noise_key), problem.base.sample(count, key=base_key)
    batch = SaddleBatch(problem.sample.rows(jnp.zeros(count, int)), noise, base, jnp.zeros(count))
    bound = float(saddle_terms(at_anchor(problem), problem, batch).kl_dual)
    # exp(nu) is lognormal of variance exp(mean^2) - 1 under p0.
    error = np.sqrt((mean**2 + np.expm1(mean**2)) / count)
    assert abs(bound - normal_divergence(mean)) < 5 * error


@pytest.mark.parametrize("scale", [-1.0, -0.1, 0.1, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_other_nu_has_a_smaller_kl_bound(seed, scale):
    mean, count = 0.8, 2001
    problem = anchored_normal(mean)
    x = normal_quantiles(mean, count)
    # Points of equal mass under q stand for both expectations, and p0 / q comes from the closed form.
    points, log_weights = jnp.asarray(x)[:, None], jnp.asarray(-log_ratio(mean, x))
    batch = SaddleBatch(problem.sample.rows(jnp.zeros(count, int)), points, points, log_weights)
    best = at_anchor(problem)
    other = eqx.tree_at(lambda p: p.nu, best, network(1, "scalar", zero_initialised=False, seed=seed))
    last = lambda p: (p.nu.layers[-1].weight, p.nu.layers[-1].bias)
    other = eqx.tree_at(last, other, replace_fn=lambda leaf: scale * leaf)
    value = lambda point: float(saddle_terms(point, problem, batch).kl_dual)
    assert value(best) == pytest.approx(normal_divergence(mean), abs=1e-9)
    assert value(other) < value(best)


def test_each_term_is_its_formula():
    problem = anchored_normal(0.6, space=kernel_space(), inverse_temperature=2.0)
    point, batch = moving_point(problem), draw_batch(problem, 30, key=jr.key(1))
    terms = saddle_terms(point, problem, batch)
    moved = batch.noise + point.transport.network(batch.noise, batch.data.condition)
    f = lambda x: np.asarray(problem.space.features(x, jnp.zeros((len(x), 0))) @ point.f_weights)
    nu = lambda x: np.asarray(point.nu(x, jnp.zeros((len(x), 0)))) + log_ratio(0.6, np.asarray(x)[:, 0])
    weights = np.exp(-log_ratio(0.6, np.asarray(batch.base)[:, 0]))
    assert float(terms.data_fit) == pytest.approx(f(batch.data.target).mean(), abs=1e-12)
    assert float(terms.model_fit) == pytest.approx(f(moved).mean(), abs=1e-12)
    bound = nu(moved).mean() - np.mean(np.exp(nu(batch.base)) * weights) + 1.0
    assert float(terms.kl_dual) == pytest.approx(bound / 2.0, abs=1e-6)  # the networks are float32
    assert float(terms.penalty) == pytest.approx(0.5 * PENALTY * np.sum(np.asarray(point.f_weights) ** 2))
    signs = terms.data_fit - terms.model_fit + terms.kl_dual - terms.penalty
    assert float(terms.value) == pytest.approx(float(signs))


@pytest.mark.parametrize(("player", "climbs"), [("f_weights", True), ("nu", True), ("transport", False)])
def test_each_player_moves_the_value_its_own_way(player, climbs):
    problem = anchored_normal(0.6, space=kernel_space())
    point, batch = moving_point(problem), draw_batch(problem, 64, key=jr.key(2))
    part = lambda tree: getattr(tree, player)
    value = lambda moving: saddle_terms(eqx.tree_at(part, point, moving), problem, batch).value
    gradient = eqx.filter_grad(value)(part(point))
    # The transport's own direction is the other way.
    step = (1e-2 if climbs else -1e-2) / float(norm(gradient))
    moved = eqx.apply_updates(
        part(point), jax.tree.map(lambda leaf: (step * leaf).astype(leaf.dtype), gradient)
    )
    assert (float(value(moved)) > float(value(part(point)))) == climbs


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def best_f(problem, transport, batch):
    """Return the maximiser over f: the difference of the mean features divided by the penalty."""
    condition = batch.data.condition
    mean = lambda x: jnp.mean(problem.space.features(x, condition), 0)
    moved = carry(problem, transport, batch.noise, condition)
    return (mean(batch.data.target) - mean(moved)) / problem.rkhs_penalty


def test_the_closed_form_maximises_over_f():
    problem = anchored_normal(0.6, space=kernel_space())
    point, batch = moving_point(problem), draw_batch(problem, 64, key=jr.key(3))
    weights = best_f(problem, point.transport, batch)
    value = lambda w: saddle_terms(eqx.tree_at(lambda p: p.f_weights, point, w), problem, batch).value
    np.testing.assert_allclose(jax.grad(value)(weights), 0.0, atol=1e-12)
    assert float(value(weights)) > float(value(point.f_weights))


@pytest.mark.parametrize("parameter", ["scale", "shift"])
def test_the_gradient_of_the_maximum_over_f_is_the_partial_one_by_differences(parameter):
    problem = anchored_normal(0.6, space=kernel_space())
    transport = Affine(jnp.array([1.1]), jnp.array([0.3]))
    batch = draw_batch(problem, 64, key=jr.key(4))
    moving = lambda value: eqx.tree_at(lambda t: getattr(t, parameter), transport, value)

    def saddle(weights, value):
        point = eqx.tree_at(lambda p: p.f_weights, at_anchor(problem, moving(value)), weights)
        return saddle_terms(point, problem, batch).value

    start = getattr(transport, parameter)
    maximum = lambda value: float(saddle(best_f(problem, moving(value), batch), value))
    difference = (maximum(start + 1e-5) - maximum(start - 1e-5)) / 2e-5
    partial = jax.grad(saddle, argnums=1)(best_f(problem, transport, batch), start)
    assert abs(difference) > 1e-3
    assert float(partial[0]) == pytest.approx(difference, abs=1e-7)


def test_the_gradient_of_the_maximum_over_f_is_the_partial_one_for_a_network():
    problem = anchored_normal(0.6, space=kernel_space())
    point, batch = moving_point(problem), draw_batch(problem, 64, key=jr.key(5))

    def saddle(transport, weights):
        moved = eqx.tree_at(lambda p: (p.transport, p.f_weights), point, (transport, weights))
        return saddle_terms(moved, problem, batch).value

    through = eqx.filter_grad(lambda transport: saddle(transport, best_f(problem, transport, batch)))(
        point.transport
    )
    fixed = best_f(problem, point.transport, batch)
    partial = eqx.filter_grad(lambda transport: saddle(transport, fixed))(point.transport)
    for total, part in zip(jax.tree.leaves(through), jax.tree.leaves(partial), strict=True):
        np.testing.assert_allclose(total, part, rtol=1e-3, atol=1e-5)  # float32


@pytest.mark.parametrize("penalty", [1.0, 0.1, 0.01])
def test_primal_and_dual_agree_on_a_finite_domain(penalty):
    points = np.linspace(-3.0, 3.0, 25)[:, None]
    base = np.exp(-0.5 * points[:, 0] ** 2)
    base /= base.sum()
    features = kernel_space().matrix(points, np.zeros((25, 0)))
    data = np.random.default_rng(0).normal(1.0, 0.5, (40, 1))
    mean = kernel_space().matrix(data, np.zeros((40, 0))).mean(0)
    problem = convex.Likelihood.unconditional(mean, features, np.log(base))
    primal = convex.maximise(problem, penalty, np.zeros(mean.size), tolerance=1e-14)

    def dual(logits):
        """Return |mu_hat - mu_q|^2 / (2 penalty) + KL(q || p0) and its gradient, with q a softmax."""
        q = scipy.special.softmax(logits)
        residual = mean - q @ features
        log_q_over_base = np.log(q / base)
        slope = -features @ residual / penalty + log_q_over_base + 1.0
        return residual @ residual / (2 * penalty) + q @ log_q_over_base, q * (slope - q @ slope)

    result = scipy.optimize.minimize(
        dual, np.log(base), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000}
    )
    assert result.fun == pytest.approx(primal.value, abs=1e-6)
    # The minimiser is the density of the maximiser.
    tilted = scipy.special.softmax(np.log(base) + features @ primal.weights)
    np.testing.assert_allclose(scipy.special.softmax(result.x), tilted, atol=1e-4)


@pytest.mark.parametrize("inverse_temperature", [0.3, 2.0])
def test_the_inverse_temperature_is_a_scaling_of_f_and_the_penalty(inverse_temperature):
    warm = anchored_normal(0.6, space=kernel_space(), inverse_temperature=inverse_temperature)
    plain = anchored_normal(0.6, space=kernel_space(), penalty=PENALTY / inverse_temperature)
    point, batch = moving_point(warm), draw_batch(warm, 64, key=jr.key(6))
    scaled = eqx.tree_at(lambda p: p.f_weights, point, inverse_temperature * point.f_weights)
    value = inverse_temperature * float(saddle_terms(point, warm, batch).value)
    assert value == pytest.approx(float(saddle_terms(scaled, plain, batch).value), rel=1e-9)


def test_the_anchor_is_the_log_ratio_of_reference_and_base():
    problem, x = anchored_normal(0.8), np.linspace(-3.0, 3.0, 11)
    points, empty = jnp.asarray(x)[:, None], jnp.zeros((11, 0))
    np.testing.assert_allclose(anchor(problem, points, empty), log_ratio(0.8, x), atol=1e-12)
    silent = network(1, "scalar", zero_initialised=True)
    np.testing.assert_allclose(evaluate_nu(problem, silent, points, empty), log_ratio(0.8, x), atol=1e-12)
    np.testing.assert_array_equal(anchor(anchored_normal(0.8, anchored=False), points, empty), 0.0)


def test_base_draws_without_an_anchor_come_from_the_base_with_equal_weights():
    problem, count = anchored_normal(5.0, anchored=False), 4000
    batch = draw_batch(problem, count, key=jr.key(0))
    np.testing.assert_array_equal(batch.base_log_weights, 0.0)
    assert abs(float(batch.base.mean())) < 5 / np.sqrt(count)
    assert abs(float(batch.noise.mean()) - 5.0) < 5 / np.sqrt(count)


def test_a_bounded_base_keeps_the_samplers_points_inside():
    box = Box(jnp.array([-1.0]), jnp.array([2.0]))
    problem = eqx.tree_at(lambda p: p.base, anchored_normal(0.0), box)
    transport = Affine(jnp.array([3.0]), jnp.array([1.0]))
    moved = carry(problem, transport, jr.normal(jr.key(0), (200, 1)), jnp.zeros((200, 0)))
    assert float(moved.min()) >= -1.0
    assert float(moved.max()) <= 2.0


@pytest.mark.parametrize("enabled", [False, True])
def test_rates_do_not_depend_on_the_precision_of_the_callers_jax(enabled):
    with jax.enable_x64(enabled):
        players = DoublyDual(f_rate=0.1)
    for setting in (players.f_rate, players.nu_rate, players.horizon):
        assert setting.dtype == np.float64
    assert float(players.f_rate) == 0.1
