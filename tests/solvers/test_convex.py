import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from kexpfam.measures import Gaussian
from kexpfam.nodes import grid_nodes
from kexpfam.solvers.convex import Likelihood, fold_weights, log_partitions, maximise, without_negligible_nodes

PENALTY = 0.05


def random_problem(conditions, *, nodes=60, features=5, seed=0):
    """Return a small problem whose data mean is one that the nodes can match."""
    rng = np.random.default_rng(seed)
    node_features = rng.normal(size=(conditions, nodes, features))
    masses, shares = rng.dirichlet(np.ones(nodes), conditions), rng.dirichlet(5.0 * np.ones(conditions))
    tilted = rng.dirichlet(0.3 * np.ones(nodes), conditions)
    mean = np.einsum("c,cj,cjr->r", shares, tilted, node_features)
    return Likelihood(mean, node_features, np.log(masses), shares)


def slow_objective(problem, weights, penalty):
    """Return the penalised likelihood from its formula, one condition after the other, careless of overflow."""
    total = weights @ problem.mean_feature - 0.5 * penalty * np.sum(weights**2)
    for c, share in enumerate(problem.shares):
        total -= share * np.log(np.sum(np.exp(problem.log_weights[c]) * np.exp(problem.node_features[c] @ weights)))
    return total


def numerical_gradient(function, weights, step=1e-5):
    shifts = step * np.eye(weights.size)
    return np.array([(function(weights + s) - function(weights - s)) / (2 * step) for s in shifts])


@pytest.mark.parametrize("conditions", [1, 3])
@pytest.mark.parametrize("penalty", [1.0, PENALTY, 1e-3])
def test_maximise_agrees_with_a_general_optimiser(conditions, penalty):
    problem = random_problem(conditions)
    optimum = maximise(problem, penalty, np.zeros(5))
    other = scipy.optimize.minimize(
        lambda w: -slow_objective(problem, w, penalty), np.zeros(5), method="BFGS", options={"gtol": 1e-6}
    )
    assert optimum.converged
    assert optimum.value == pytest.approx(-other.fun, abs=1e-7)
    np.testing.assert_allclose(optimum.weights, other.x, atol=1e-3)


@pytest.mark.parametrize("conditions", [1, 3])
def test_the_value_is_the_formula_and_its_gradient_vanishes_at_the_optimum(conditions):
    problem = random_problem(conditions)
    optimum = maximise(problem, PENALTY, np.zeros(5), tolerance=1e-14)
    objective = lambda weights: slow_objective(problem, weights, PENALTY)
    assert optimum.value == pytest.approx(objective(optimum.weights), abs=1e-12)
    np.testing.assert_allclose(numerical_gradient(objective, optimum.weights), 0.0, atol=1e-7)
    np.testing.assert_allclose(optimum.log_partitions, log_partitions(problem, optimum.weights), atol=1e-12)


@pytest.mark.parametrize("conditions", [1, 3])
def test_the_start_does_not_matter(conditions):
    problem = random_problem(conditions)
    near = maximise(problem, PENALTY, np.zeros(5)).weights
    far = maximise(problem, PENALTY, np.full(5, 20.0)).weights
    np.testing.assert_allclose(near, far, atol=1e-4)


def test_too_few_iterations_are_not_called_convergence():
    optimum = maximise(random_problem(1), 1e-3, np.zeros(5), most=1)
    assert not optimum.converged


@pytest.mark.parametrize("conditions", [1, 3])
def test_fold_weights_agree_with_separate_fits(conditions):
    problem = random_problem(conditions)
    optimum = maximise(problem, PENALTY, np.zeros(5), tolerance=1e-14)
    moved = problem.mean_feature + 0.01 * np.random.default_rng(1).normal(size=(4, 5))
    together = fold_weights(problem, optimum, PENALTY, moved)
    for mean, weights in zip(moved, together, strict=True):
        alone = maximise(problem._replace(mean_feature=mean), PENALTY, optimum.weights, tolerance=1e-14)
        np.testing.assert_allclose(weights, alone.weights, atol=1e-4)


def test_log_partitions_of_several_weights_agree_with_one_at_a_time():
    problem, weights = random_problem(3), np.random.default_rng(0).normal(size=(4, 5))
    together = log_partitions(problem, weights)
    assert together.shape == (4, 3)
    for row, one in zip(together, weights, strict=True):
        np.testing.assert_allclose(row, log_partitions(problem, one), rtol=1e-12)


def test_log_partitions_survive_large_exponents():
    problem = Likelihood(np.zeros(1), np.array([[[1.0], [2.0]]]), np.log([[0.5, 0.5]]), np.ones(1))
    assert log_partitions(problem, np.array([1000.0]))[0] == pytest.approx(2000.0 + np.log(0.5))


def test_nodes_without_mass_can_go():
    problem = random_problem(2)
    log_weights = problem.log_weights.copy()
    log_weights[:, :20] -= 100.0
    padded = problem._replace(log_weights=log_weights)
    weights = maximise(padded, PENALTY, np.zeros(5)).weights
    smaller = without_negligible_nodes(padded, weights)
    assert smaller.node_features.shape[1] <= 40
    np.testing.assert_allclose(log_partitions(smaller, weights), log_partitions(padded, weights), atol=1e-8)


def tilted_normal_problem(mean):
    """f(x) = w x over N(0, 1) on a grid: log Z = w^2 / 2, and p_f = N(w, 1)."""
    nodes = grid_nodes(Gaussian(jnp.zeros(1), jnp.eye(1)), np.linspace(-3.0, 3.0, 50)[:, None])
    return Likelihood(np.array([mean]), nodes.points[None], nodes.log_weights[None], np.ones(1))


@pytest.mark.parametrize("slope", [-0.7, 0.0, 0.7, 1.2])
def test_linear_features_over_a_normal_have_the_closed_form(slope):
    problem = tilted_normal_problem(slope)
    # The grid ends five standard deviations out, where exp(slope x) has grown a little.
    assert log_partitions(problem, np.array([slope]))[0] == pytest.approx(slope**2 / 2, abs=2e-4)
    # Maximising w mean - w^2 / 2 - penalty w^2 / 2 gives w = mean / (1 + penalty).
    optimum = maximise(problem, PENALTY, np.zeros(1))
    assert optimum.weights[0] == pytest.approx(slope / (1 + PENALTY), abs=2e-3)
