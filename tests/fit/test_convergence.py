import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.optimize
from oracles import normal

from kexpfam.data.sample import Sample
from kexpfam.fit.convergence import Convergence, convergence
from kexpfam.fit.natural import Metric, group_rows
from kexpfam.fit.saddle import SaddlePoint, SaddleProblem
from kexpfam.jax_settings import double_precision
from kexpfam.model.kernels import Gaussian
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import FeatureSpace

PENALTY = 0.01


@pytest.fixture(scope="module")
def problem():
    with double_precision():
        data = Sample.unconditional(np.random.default_rng(0).normal(0.6, 0.8, (400, 1)))
        space = FeatureSpace.of_kernels(
            Gaussian(1.0), Gaussian(1.0), Sample.unconditional(np.linspace(-2.0, 2.5, 5)[:, None])
        )
        return SaddleProblem(
            data, normal(), space, normal(), jnp.asarray(PENALTY), jnp.asarray(1.0), anchored=True
        )


def likelihood(problem, weights):
    """Return the penalised likelihood of f by quadrature."""
    nodes = np.linspace(-8.0, 8.0, 2001)[:, None]
    log_masses = -0.5 * nodes[:, 0] ** 2 - 0.5 * np.log(2 * np.pi) + np.log(nodes[1, 0] - nodes[0, 0])
    partition = np.log(np.sum(np.exp(log_masses + problem.space.target.matrix(nodes) @ weights)))
    fit = problem.space.target.matrix(problem.sample.target).mean(0) @ weights
    return fit - partition - 0.5 * PENALTY * weights @ weights


@pytest.fixture(scope="module")
def optimum(problem):
    return scipy.optimize.minimize(
        lambda w: -likelihood(problem, w), np.zeros(problem.space.size), tol=1e-10
    ).x


class NoLag:
    """nu of a sampler that stays at its noise: 0."""

    def __call__(self, x, condition):
        return jnp.zeros(x.shape[0])


def measured(problem, weights, seed):
    with double_precision():
        point = SaddlePoint(jnp.asarray(weights), NoLag(), Identity())
        key = jr.key(seed)
        groups = group_rows(problem.sample, key=key)
        moved = problem.reference.sample(groups.draws, key=key)
        tilted = jnp.exp(problem.space.evaluate(point.f_weights, moved, groups.draw_conditions))
        metric = Metric.start(problem.space.size).refreshed(
            problem.space, groups, moved, tilted / tilted.sum(), PENALTY
        )
    return convergence(problem, point, metric, key=jr.key(100 + seed))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_optimum_has_no_shortfall_beyond_noise(problem, optimum, seed):
    found = measured(problem, optimum, seed)
    assert abs(found.shortfall) < 5 * found.shortfall_error + 1e-4
    # The sampler has not moved, and its moments say so whatever nu is.
    assert found.moment_gap > 0.1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shortfall_is_that_of_the_likelihood(problem, optimum, seed):
    # Near the optimum, where the second order is all there is and the metric is the curvature up to the
    # data's own noise.
    weights = 0.85 * optimum
    missing = likelihood(problem, optimum) - likelihood(problem, weights)
    found = measured(problem, weights, seed)
    assert found.shortfall == pytest.approx(missing, abs=5 * found.shortfall_error + 0.35 * missing)


def test_both_have_to_be_near():
    assert Convergence(0.001, 0.001, 0.001, 0.001, 0.1, 1.0).distance < 0.02
    assert Convergence(0.001, 0.001, 0.1, 0.001, 0.1, 1.0).distance > 0.02
    assert Convergence(0.1, 0.001, 0.001, 0.001, 0.1, 1.0).distance > 0.02
    assert Convergence(0.001, 0.01, 0.001, 0.001, 0.1, 1.0).distance > 0.02
    assert Convergence(0.001, 0.001, 0.001, 0.01, 0.1, 1.0).distance > 0.02
