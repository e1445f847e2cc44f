import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam.fit.mixture import MixtureShape, best_mixture, fit_mixture
from kexpfam.model.measures import COVARIANCE_FLOOR, Box, Gaussian, JointMixture, Mixture

FACTORS = np.array([[[1.0, 0.0], [0.5, 0.8]], [[0.4, 0.0], [-0.3, 0.6]]])
MEANS = np.array([[-1.0, 0.5], [1.5, -1.0]])
WEIGHTS = np.array([0.3, 0.7])

MEASURES = {
    "gaussian": lambda: Gaussian(jnp.asarray(MEANS[0]), jnp.asarray(FACTORS[0])),
    "box": lambda: Box(jnp.array([-1.0, 0.5]), jnp.array([2.0, 1.5])),
    "mixture": lambda: Mixture.of(np.log(WEIGHTS), MEANS, FACTORS),
}
# Mean and covariance of each, by hand.
COVARIANCES = FACTORS @ FACTORS.transpose(0, 2, 1)
MIXTURE_MEAN = WEIGHTS @ MEANS
MIXTURE_SECOND = np.einsum("k,kij->ij", WEIGHTS, COVARIANCES + MEANS[:, :, None] * MEANS[:, None, :])
MOMENTS = {
    "gaussian": (MEANS[0], COVARIANCES[0]),
    "box": (np.array([0.5, 1.0]), np.diag([3.0**2, 1.0**2]) / 12),
    "mixture": (MIXTURE_MEAN, MIXTURE_SECOND - np.outer(MIXTURE_MEAN, MIXTURE_MEAN)),
}


@pytest.fixture(params=MEASURES)
def name(request):
    return request.param


def axes(measure, count=400):
    """Return midpoints and the cell size per dimension, over a box that holds the measure."""
    low, high = (np.asarray(side) for side in measure.bounds(8.0))
    steps = (high - low) / count
    return [low[j] + steps[j] * (np.arange(count) + 0.5) for j in range(len(low))], steps


def mesh(centres):
    return np.stack(np.meshgrid(*centres, indexing="ij"), -1).reshape(-1, len(centres))


def test_log_density_integrates_to_one(name):
    measure = MEASURES[name]()
    centres, steps = axes(measure)
    assert np.exp(measure.log_densities(mesh(centres))).sum() * steps.prod() == pytest.approx(1.0, abs=1e-6)


def test_many_points_agree_with_one(name):
    measure = MEASURES[name]()
    points = np.random.default_rng(0).normal(size=(10, 2))
    one_by_one = [float(measure.log_density(jnp.asarray(x))) for x in points]
    np.testing.assert_allclose(measure.log_densities(points), one_by_one)


def test_gaussian_and_mixture_agree_with_the_textbook_formula():
    def normal(x, mean, covariance):
        deviation = x - mean
        return np.exp(-0.5 * deviation @ np.linalg.solve(covariance, deviation)) / np.sqrt(
            np.linalg.det(2 * np.pi * covariance)
        )

    for x in np.random.default_rng(0).normal(size=(10, 2)):
        components = [normal(x, m, c) for m, c in zip(MEANS, COVARIANCES, strict=True)]
        assert float(MEASURES["gaussian"]().log_density(x)) == pytest.approx(np.log(components[0]))
        assert float(MEASURES["mixture"]().log_density(x)) == pytest.approx(np.log(WEIGHTS @ components))


def test_draws_have_the_measures_mean_and_covariance(name):
    draws = MEASURES[name]().draws(20_000, key=jr.key(0))
    mean, covariance = MOMENTS[name]
    errors = np.sqrt(np.diag(covariance) / len(draws))
    assert np.all(np.abs(draws.mean(0) - mean) < 5 * errors)
    for i in range(2):
        for j in range(2):
            products = (draws[:, i] - mean[i]) * (draws[:, j] - mean[j])
            assert abs(products.mean() - covariance[i, j]) < 5 * products.std() / np.sqrt(len(draws))


@pytest.mark.parametrize("kept", [0, 1])
def test_marginal_agrees_with_numerical_integration(name, kept):
    measure = MEASURES[name]()
    centres, steps = axes(measure)
    table = np.exp(measure.log_densities(mesh(centres))).reshape(len(centres[0]), -1)
    integrated = table.sum(axis=1 - kept) * steps[1 - kept]
    marginal = measure.marginal(jnp.array([kept]))
    np.testing.assert_allclose(
        np.exp(marginal.log_densities(centres[kept][:, None])), integrated, rtol=1e-6, atol=1e-9
    )


def test_marginal_can_reorder_the_coordinates(name):
    measure = MEASURES[name]()
    points = np.random.default_rng(0).normal(size=(10, 2))
    swapped = measure.marginal(jnp.array([1, 0]))
    np.testing.assert_allclose(swapped.log_densities(points[:, ::-1]), measure.log_densities(points))


def test_the_bounds_hold_the_draws(name):
    measure = MEASURES[name]()
    low, high = measure.bounds(7.0)  # seven standard deviations: one draw in 4e11
    draws = measure.draws(5000, key=jr.key(1))
    assert np.all((draws >= low) & (draws <= high))


def test_an_unconditional_measure_is_the_same_under_every_condition(name):
    measure = MEASURES[name]()
    assert measure.given(jnp.array([1.0])) is measure


def test_box_is_uniform_inside_and_nothing_outside():
    box = MEASURES["box"]()
    inside, outside = jnp.array([0.0, 1.0]), jnp.array([0.0, 1.6])
    assert float(box.log_density(inside)) == pytest.approx(-np.log(3.0))
    assert float(box.log_density(outside)) == -np.inf


def test_fold_keeps_points_inside_and_is_the_identity_there():
    box = MEASURES["box"]()
    inside = box.draws(500, key=jr.key(0))
    np.testing.assert_allclose(box.fold(jnp.asarray(inside)), inside, atol=1e-12)
    anywhere = 20.0 * np.random.default_rng(0).normal(size=(2000, 2))
    folded = np.asarray(box.fold(jnp.asarray(anywhere)))
    assert np.all((folded >= box.low) & (folded <= box.high))
    np.testing.assert_allclose(box.fold(jnp.array([2.25, 0.3])), [1.75, 0.7])  # reflected at either wall


def test_fold_preserves_the_measure():
    box = MEASURES["box"]()
    jacobian = jax.jacfwd(box.fold)(jnp.array([7.3, -4.1]))
    assert abs(float(jnp.linalg.det(jacobian))) == pytest.approx(1.0)


def test_fold_of_an_unbounded_measure_is_the_identity():
    points = jnp.array([[100.0, -3.0]])
    np.testing.assert_array_equal(MEASURES["gaussian"]().fold(points), points)


def joint_mixture():
    """A mixture of three normals over a condition of width 2 and a target of width 1 or more."""
    rng = np.random.default_rng(3)
    factors = np.tril(rng.normal(size=(3, 4, 4)), -1) * 0.5 + np.eye(4) * rng.uniform(0.5, 1.5, (3, 4, 1))
    return Mixture.of(np.log([0.2, 0.3, 0.5]), rng.normal(size=(3, 4)), factors)


@pytest.mark.parametrize("condition_dim", [1, 2, 3])
def test_a_joint_mixture_under_a_condition_is_joint_over_marginal(condition_dim):
    joint = joint_mixture()
    conditional = JointMixture(joint, condition_dim)
    marginal = joint.marginal(jnp.arange(condition_dim))
    for row in np.random.default_rng(0).normal(size=(10, 4)):
        condition, target = jnp.asarray(row[:condition_dim]), jnp.asarray(row[condition_dim:])
        ratio = joint.log_density(jnp.asarray(row)) - marginal.log_density(condition)
        assert float(conditional.given(condition).log_density(target)) == pytest.approx(
            float(ratio), rel=1e-9
        )


def test_draws_of_a_joint_mixture_under_a_condition_follow_its_density():
    conditional = JointMixture(joint_mixture(), 3).given(jnp.array([0.5, -0.2, 0.3]))
    (centres,), (step,) = axes(conditional, 4000)
    masses = np.exp(conditional.log_densities(centres[:, None])) * step
    draws = conditional.draws(20_000, key=jr.key(0))[:, 0]
    for power in (1, 2):
        moments = draws**power
        assert abs(moments.mean() - masses @ centres**power) < 5 * moments.std() / np.sqrt(len(draws))


def test_a_joint_mixture_without_condition_is_the_mixture():
    joint = joint_mixture()
    assert JointMixture(joint, 0).given(jnp.zeros(0)) is joint


def test_fitted_measures_match_the_points():
    points = np.random.default_rng(0).normal(size=(300, 2)) @ FACTORS[0].T + MEANS[0]
    covariance = np.cov(points, rowvar=False) + COVARIANCE_FLOOR * np.eye(2)
    normal = Gaussian.fitted(points, width=2.0)
    np.testing.assert_allclose(normal.mean, points.mean(0))
    np.testing.assert_allclose(normal.cholesky @ normal.cholesky.T, 4.0 * covariance, rtol=1e-9)
    box = Box.fitted(points, padding=0.1)
    np.testing.assert_allclose(box.high - box.low, 1.2 * np.ptp(points, axis=0))


@pytest.mark.parametrize("diagonal", [True, False])
def test_a_fitted_mixture_of_one_component_is_the_maximum_likelihood_normal(diagonal):
    points = np.random.default_rng(0).normal(size=(300, 2)) @ FACTORS[0].T + MEANS[0]
    mixture = fit_mixture(points, MixtureShape(1, diagonal), seed=0)
    covariance = np.cov(points, rowvar=False, bias=True) + COVARIANCE_FLOOR * np.eye(2)
    covariance = covariance * np.eye(2) if diagonal else covariance
    np.testing.assert_allclose(mixture.means[0], points.mean(0), rtol=1e-6)
    np.testing.assert_allclose(
        mixture.choleskys[0] @ mixture.choleskys[0].T, covariance, rtol=1e-6, atol=1e-12
    )


def test_the_best_mixture_finds_separate_clusters():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(centre, 0.1, (200, 2)) for centre in ([-1, 0], [1, 0])])
    mixture = best_mixture(points, counts=(1, 2, 4), seed=0)
    single = fit_mixture(points, MixtureShape(1, False), seed=0)
    # Two separate clusters are told apart from one wide normal by far more than half a nat per point.
    assert mixture.log_densities(points).mean() > single.log_densities(points).mean() + 0.5
