import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
from oracles import with_constants

from kexpfam.fit import convex
from kexpfam.fit.convex import (
    Likelihood,
    log_partitions,
    maximise,
    moments,
    normalised,
    objective,
    without_negligible_nodes,
)
from kexpfam.fit.folds import chord
from kexpfam.integrate.nodes import grid_nodes
from kexpfam.model.measures import Gaussian

PENALTY = 0.05
# The number of conditions, that of their features, and whether all conditions have the same node weights.
UNCONDITIONAL = (1, 1, True)
PROBLEMS = {
    "unconditional": UNCONDITIONAL,
    "one condition": (1, 2, True),
    "more conditions than features": (5, 2, True),
    "more features than conditions": (2, 3, True),
    "weights of their own": (4, 3, False),
}
every_problem = pytest.mark.parametrize("shape", PROBLEMS.values(), ids=PROBLEMS)


def random_problem(shape, *, nodes=60, features=5, seed=0):
    """Return a small problem whose data mean is one that the nodes can match."""
    rng, (conditions, condition_size, shared) = np.random.default_rng(seed), shape
    node_features = rng.normal(size=(nodes, features))
    condition_features = (
        np.ones((1, 1)) if shape == UNCONDITIONAL else rng.normal(size=(conditions, condition_size))
    )
    masses, shares = (
        rng.dirichlet(np.ones(nodes), 1 if shared else conditions),
        rng.dirichlet(5.0 * np.ones(conditions)),
    )
    tilted = rng.dirichlet(0.3 * np.ones(nodes), conditions)
    problem = Likelihood(
        np.zeros(condition_size * features), node_features, np.log(masses), shares, condition_features
    )
    return problem._replace(mean_feature=np.einsum("c,cj,cjr->r", shares, tilted, slow_features(problem)))


def slow_features(problem):
    """Return the features of every node under every condition, one outer product at a time, (c, j, a * b)."""
    products = [
        [np.outer(phi, psi).ravel() for psi in problem.node_features] for phi in problem.condition_features
    ]
    return np.array(products)


def slow_log_weights(problem):
    """Return the log weight of every node under every condition, (c, j)."""
    repeats = len(problem.shares) // len(problem.log_weights)
    return np.repeat(problem.log_weights, repeats, 0)


def slow_objective(problem, penalty):
    """Return the penalised likelihood by its formula, one condition after the other."""
    features, masses = slow_features(problem), np.exp(slow_log_weights(problem))

    def objective(weights):
        total = weights @ problem.mean_feature - 0.5 * penalty * np.sum(weights**2)
        for c, share in enumerate(problem.shares):
            total -= share * np.log(np.sum(masses[c] * np.exp(features[c] @ weights)))
        return total

    return objective


def slow_information(problem, weights):
    """Return the mean over conditions of the covariance of the features under the tilted nodes."""
    total = 0.0
    for features, log_weights, share in zip(
        slow_features(problem), slow_log_weights(problem), problem.shares, strict=True
    ):
        masses = np.exp(log_weights + features @ weights)
        total = total + share * np.cov(features.T, aweights=masses / masses.sum(), ddof=0)
    return total


def random_weights(problem, *, seed=2):
    return 0.5 * np.random.default_rng(seed).normal(size=problem.mean_feature.size)


def zeros(problem):
    return np.zeros(problem.mean_feature.size)


def numerical_gradient(function, weights, step=1e-5):
    shifts = step * np.eye(weights.size)
    return np.array([(function(weights + s) - function(weights - s)) / (2 * step) for s in shifts])


@every_problem
@pytest.mark.parametrize("penalty", [1.0, PENALTY, 1e-3])
def test_maximise_agrees_with_a_general_optimiser(shape, penalty):
    problem = random_problem(shape)
    optimum, objective = maximise(problem, penalty, zeros(problem)), slow_objective(problem, penalty)
    other = scipy.optimize.minimize(
        lambda w: -objective(w), zeros(problem), method="BFGS", options={"gtol": 1e-6}
    )
    assert optimum.converged
    assert optimum.value == pytest.approx(-other.fun, abs=1e-7)
    np.testing.assert_allclose(optimum.weights, other.x, atol=1e-3)


@every_problem
def test_the_value_is_the_formula_and_its_gradient_vanishes_at_the_optimum(shape):
    problem = random_problem(shape)
    optimum, objective = (
        maximise(problem, PENALTY, zeros(problem), tolerance=1e-14),
        slow_objective(problem, PENALTY),
    )
    assert optimum.value == pytest.approx(objective(optimum.weights), abs=1e-12)
    np.testing.assert_allclose(numerical_gradient(objective, optimum.weights), 0.0, atol=1e-7)
    np.testing.assert_allclose(optimum.log_partitions, log_partitions(problem, optimum.weights), atol=1e-12)


@every_problem
def test_exponents_and_partitions_are_those_of_the_outer_products(shape):
    problem = random_problem(shape)
    weights = random_weights(problem)
    slow = slow_log_weights(problem) + slow_features(problem) @ weights
    np.testing.assert_allclose(problem.exponents(weights), slow, atol=1e-12)
    np.testing.assert_allclose(log_partitions(problem, weights), np.log(np.exp(slow).sum(1)), atol=1e-12)
    # The coefficients make the outer products' values with the node features alone.
    values = problem.coefficients(weights) @ problem.node_features.T
    np.testing.assert_allclose(values, slow_features(problem) @ weights, atol=1e-12)


@every_problem
# All conditions in one block, a block for each, and blocks that do not divide them.
@pytest.mark.parametrize("block_numbers", [convex.BLOCK_NUMBERS, 1, 3 * 60 * 5])
def test_the_newton_step_is_that_of_the_outer_products(shape, block_numbers):
    problem = random_problem(shape)
    weights = random_weights(problem)
    # Dropping the nodes of little mass is a saving that would hide small errors.
    with with_constants(convex, BLOCK_NUMBERS=block_numbers, NEGLIGIBLE=0.0):
        start = maximise(problem, PENALTY, weights, most=0)
    upper = np.triu(start.factor[0])
    hessian = slow_information(problem, weights) + PENALTY * np.eye(weights.size)
    np.testing.assert_allclose(upper.T @ upper, hessian, atol=1e-11)
    gradient = numerical_gradient(slow_objective(problem, PENALTY), weights)
    assert start.decrement == pytest.approx(gradient @ np.linalg.solve(hessian, gradient), rel=1e-7)


@every_problem
def test_the_start_does_not_matter(shape):
    problem = random_problem(shape)
    near = maximise(problem, PENALTY, zeros(problem)).weights
    far = maximise(problem, PENALTY, zeros(problem) + 20.0).weights
    np.testing.assert_allclose(near, far, atol=1e-4)


def test_too_few_iterations_are_not_called_convergence():
    problem = random_problem(UNCONDITIONAL)
    assert not maximise(problem, 1e-3, zeros(problem), most=1).converged


def test_the_unconditional_likelihood_has_one_condition_that_says_nothing():
    problem = random_problem(UNCONDITIONAL)
    short = Likelihood.unconditional(problem.mean_feature, problem.node_features, problem.log_weights[0])
    for part, same in zip(short, problem._replace(shares=np.ones(1)), strict=True):
        np.testing.assert_array_equal(part, same)
    weights = random_weights(problem)
    np.testing.assert_allclose(
        short.exponents(weights)[0], problem.log_weights[0] + problem.node_features @ weights
    )
    np.testing.assert_array_equal(short.coefficients(weights), weights[None])


def test_conditions_with_a_feature_each_are_problems_of_their_own():
    # The part of the weights that belongs to a condition maximises its share of the likelihood, with the
    # whole penalty.
    problem = random_problem((3, 3, False))
    means = np.random.default_rng(1).normal(0.0, 0.1, (3, 5))
    apart = problem._replace(
        condition_features=np.eye(3), mean_feature=(problem.shares[:, None] * means).ravel()
    )
    together = maximise(apart, PENALTY, zeros(apart), tolerance=1e-14)
    for c, share in enumerate(problem.shares):
        single = Likelihood.unconditional(means[c], problem.node_features, problem.log_weights[c])
        alone = maximise(single, PENALTY / share, np.zeros(5), tolerance=1e-14)
        np.testing.assert_allclose(together.weights.reshape(3, 5)[c], alone.weights, atol=1e-6)
        assert together.log_partitions[c] == pytest.approx(alone.log_partitions[0], abs=1e-6)


def test_equal_conditions_are_one_condition():
    problem = random_problem((2, 3, True))
    split = problem._replace(
        shares=np.concatenate([0.3 * problem.shares, 0.7 * problem.shares]),
        condition_features=np.tile(problem.condition_features, (2, 1)),
    )
    once, twice = (maximise(p, PENALTY, zeros(p), tolerance=1e-14) for p in (problem, split))
    np.testing.assert_allclose(twice.weights, once.weights, atol=1e-6)
    np.testing.assert_allclose(twice.log_partitions, np.tile(once.log_partitions, 2), atol=1e-6)


def test_weights_shared_by_the_conditions_are_the_same_weights_for_each():
    problem = random_problem((4, 2, True))
    written_out = problem._replace(log_weights=slow_log_weights(problem))
    assert problem.log_weights.shape == (1, 60)
    assert written_out.log_weights.shape == (4, 60)
    shared, own = (maximise(p, PENALTY, zeros(p)) for p in (problem, written_out))
    np.testing.assert_allclose(shared.weights, own.weights, atol=1e-12)


@every_problem
@pytest.mark.parametrize("shift", [0.01, 0.1])
def test_chord_steps_agree_with_newton_s_method(shape, shift):
    problem = random_problem(shape)
    optimum = maximise(problem, PENALTY, zeros(problem), tolerance=1e-14)
    means = problem.mean_feature + shift * np.random.default_rng(0).normal(
        size=(4, problem.mean_feature.size)
    )
    stack = problem._replace(mean_feature=means, shares=np.tile(problem.shares, (4, 1)))
    side_by_side = chord(stack, PENALTY, np.tile(optimum.weights, (4, 1)), [optimum.factor] * 4)
    for mean, weights in zip(means, side_by_side, strict=True):
        other = problem._replace(mean_feature=mean)
        alone = maximise(other, PENALTY, optimum.weights, tolerance=1e-14)
        near = maximise(other, PENALTY, weights, most=0)
        # Half the decrement at which chord steps stop, and what a few of Newton's steps may leave from afar.
        assert alone.value - near.value < (1e-3 if shift < 0.1 else 2e-2)


def test_chord_steps_that_all_lead_down_leave_the_way_to_newton_s_method():
    problem = random_problem(UNCONDITIONAL)
    optimum = maximise(problem, PENALTY, zeros(problem), tolerance=1e-14)
    stack = problem._replace(mean_feature=np.tile(problem.mean_feature, (2, 1)), shares=np.ones((2, 1)))
    # A Hessian far too small: its steps go too far.
    factor = (1e-3 * optimum.factor[0], optimum.factor[1])
    found = chord(stack, PENALTY, np.zeros((2, problem.mean_feature.size)), [factor, factor])
    for weights in found:
        assert optimum.value - maximise(problem, PENALTY, weights, most=0).value < 2e-2


@every_problem
def test_a_stack_of_problems_has_the_values_and_gradients_of_each(shape):
    problem, rng = random_problem(shape), np.random.default_rng(1)
    means, weights = rng.normal(size=(2, 3, problem.mean_feature.size))
    shares = rng.dirichlet(np.ones(len(problem.shares)), 3)
    stack = problem._replace(mean_feature=means, shares=shares)
    values, masses = objective(stack, PENALTY, weights)
    _, gradients = moments(stack, PENALTY, weights, masses.probabilities)
    for k in range(3):
        alone = problem._replace(mean_feature=means[k], shares=shares[k])
        np.testing.assert_allclose(values[k], slow_objective(alone, PENALTY)(weights[k]), rtol=1e-10)
        np.testing.assert_allclose(
            gradients[k], numerical_gradient(slow_objective(alone, PENALTY), weights[k]), atol=1e-7
        )


def test_probabilities_and_normalisers_come_together():
    exponents = np.random.default_rng(0).normal(0.0, 300.0, (4, 30))
    found = normalised(exponents.copy())
    np.testing.assert_allclose(found.log_partitions, scipy.special.logsumexp(exponents, axis=1), rtol=1e-13)
    np.testing.assert_allclose(
        found.probabilities, scipy.special.softmax(exponents, axis=1), rtol=1e-9, atol=1e-300
    )


def test_a_problem_beyond_double_precision_ends_with_a_clear_error():
    problem = random_problem(UNCONDITIONAL)
    broken = problem._replace(node_features=problem.node_features * 1e200)
    with pytest.raises(FloatingPointError, match="double precision"), np.errstate(all="ignore"):
        maximise(broken, PENALTY, zeros(broken))


@every_problem
def test_log_partitions_of_several_weights_agree_with_one_at_a_time(shape):
    problem = random_problem(shape)
    weights = np.random.default_rng(0).normal(size=(4, problem.mean_feature.size))
    together = log_partitions(problem, weights)
    assert together.shape == (4, shape[0])
    for row, one in zip(together, weights, strict=True):
        np.testing.assert_allclose(row, log_partitions(problem, one), rtol=1e-12)


def test_log_partitions_survive_large_exponents():
    problem = Likelihood.unconditional(np.zeros(1), np.array([[1.0], [2.0]]), np.log([0.5, 0.5]))
    assert log_partitions(problem, np.array([1000.0]))[0] == pytest.approx(2000.0 + np.log(0.5))


@every_problem
def test_nodes_without_mass_can_go(shape):
    problem = random_problem(shape)
    log_weights = problem.log_weights.copy()
    log_weights[:, :20] -= 100.0
    padded = problem._replace(log_weights=log_weights)
    weights = maximise(padded, PENALTY, zeros(padded)).weights
    smaller = without_negligible_nodes(padded, weights)
    assert smaller.node_features.shape[0] <= 40
    assert smaller.log_weights.shape == (len(log_weights), len(smaller.node_features))
    np.testing.assert_allclose(log_partitions(smaller, weights), log_partitions(padded, weights), atol=1e-8)


def test_a_node_that_matters_under_one_condition_stays():
    problem = random_problem((4, 3, False))
    log_weights = problem.log_weights.copy()
    log_weights[1:, :20] -= 100.0
    padded = problem._replace(log_weights=log_weights)
    weights = 0.1 * random_weights(padded)
    smaller = without_negligible_nodes(padded, weights)
    np.testing.assert_array_equal(smaller.node_features, padded.node_features)
    np.testing.assert_array_equal(log_partitions(smaller, weights), log_partitions(padded, weights))


def tilted_normal_problem(mean):
    """f(x) = w x over N(0, 1) on a grid: log Z = w^2 / 2, and p_f = N(w, 1)."""
    nodes = grid_nodes(Gaussian(jnp.zeros(1), jnp.eye(1)), np.linspace(-3.0, 3.0, 50)[:, None])
    return Likelihood.unconditional(np.array([mean]), nodes.points, nodes.log_weights)


@pytest.mark.parametrize("slope", [-0.7, 0.0, 0.7, 1.2])
def test_linear_features_over_a_normal_have_the_closed_form(slope):
    problem = tilted_normal_problem(slope)
    # The grid ends five standard deviations out, where exp(slope x) has grown a little.
    assert log_partitions(problem, np.array([slope]))[0] == pytest.approx(slope**2 / 2, abs=2e-4)
    # Maximising w mean - w^2 / 2 - penalty w^2 / 2 gives w = mean / (1 + penalty).
    optimum = maximise(problem, PENALTY, np.zeros(1))
    assert optimum.weights[0] == pytest.approx(slope / (1 + PENALTY), abs=2e-3)


def test_linear_features_of_condition_and_target_have_the_closed_form():
    # f(y | x) = w x y over N(0, 1) has log Z(x) = (w x)^2 / 2, so that w = mean of x y / (mean of x^2 +
    # penalty).
    x, shares, slope = np.array([-1.0, 0.3, 0.8]), np.array([0.2, 0.5, 0.3]), 0.7
    problem = tilted_normal_problem(slope)._replace(shares=shares, condition_features=x[:, None])
    np.testing.assert_allclose(log_partitions(problem, np.array([slope])), (slope * x) ** 2 / 2, atol=2e-4)
    optimum = maximise(problem, PENALTY, np.zeros(1))
    assert optimum.weights[0] == pytest.approx(slope / (shares @ x**2 + PENALTY), abs=2e-3)
