import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.optimize
from oracles import linear_space, normal

from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.fit import convex
from kexpfam.fit.convex import continuation, likelihood
from kexpfam.fit.problem import Problem, Status
from kexpfam.integrate.nodes import grid_nodes
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper import MomentMatching


def problem_of(data, lengthscale, penalty):
    sample, base, kernel = Sample.unconditional(data), Gaussian.fitted(data), kernels.Gaussian(lengthscale)
    return Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), penalty, base)


def line(penalty=1e-3):
    rng = np.random.default_rng(0)
    return problem_of(
        np.concatenate([rng.normal(-1.5, 0.4, 25), rng.normal(1.0, 0.6, 40)])[:, None], 0.5, penalty
    )


def moons(penalty=1e-3):
    data = two_moons().sample(50, random_state=0)
    return problem_of((data - data.mean(0)) / data.std(0), 0.6, penalty)


def on_nodes(problem, fineness=1.0):
    return likelihood(problem, grid_nodes(problem.base, np.asarray(problem.sample.target), fineness=fineness))


def matched(posed, penalty, **settings):
    return MomentMatching(**settings).match(
        posed.mean_feature, posed.node_features, posed.log_weights[0], penalty
    )


@pytest.mark.parametrize("penalty", [1e-1, 1e-3, 1e-4])
@pytest.mark.parametrize("data", [line, moons])
def test_the_matched_distribution_is_the_density_of_the_penalised_likelihood(data, penalty):
    posed = on_nodes(data(penalty), 0.5)
    optimum = convex.maximise(posed, penalty, continuation(posed, penalty).weights, tolerance=1e-14)
    match = matched(posed, penalty)
    log_p = posed.exponents(optimum.weights)[0] - optimum.log_partitions[0]
    assert match.decrement < 1e-9
    seen = log_p > -30.0
    np.testing.assert_allclose(match.log_masses[seen], log_p[seen], atol=1e-4)
    log_q = posed.exponents(match.weights)[0]
    np.testing.assert_allclose(log_q - np.logaddexp.reduce(log_q), log_p, atol=1e-4)
    # The two problems have one value; the base's mass on the nodes is what the likelihood has besides.
    missing = np.logaddexp.reduce(posed.log_weights[0])
    assert match.value == pytest.approx(optimum.value + missing, abs=1e-8)


def test_no_other_distribution_has_a_smaller_value():
    posed, penalty = on_nodes(line(), 0.05), 1e-3
    match, rng = matched(posed, penalty), np.random.default_rng(1)
    log_base = posed.log_weights[0] - np.logaddexp.reduce(posed.log_weights[0])

    def value(log_masses):
        masses = np.exp(log_masses - np.logaddexp.reduce(log_masses))
        mismatch = masses @ posed.node_features - posed.mean_feature
        return masses @ (np.log(masses) - log_base) + 0.5 * mismatch @ mismatch / penalty

    assert value(match.log_masses) == pytest.approx(match.value, rel=1e-9)
    for size in (1e-3, 1e-1):
        assert value(match.log_masses + size * rng.normal(size=len(log_base))) > match.value


def test_the_form_with_a_constraint_has_the_same_solution():
    # Moments within eta' / 2 of the data's, with eta' = 2 eta |f|, by a general solver on few nodes.
    penalty = 1e-2
    posed = on_nodes(line(penalty), 0.04)
    match = matched(posed, penalty)
    radius = penalty * np.linalg.norm(match.weights)
    log_base = posed.log_weights[0] - np.logaddexp.reduce(posed.log_weights[0])
    miss = lambda q: q @ posed.node_features - posed.mean_feature
    result = scipy.optimize.minimize(
        lambda q: q @ (np.log(q) - log_base),
        np.exp(log_base),
        jac=lambda q: np.log(q) - log_base + 1.0,
        bounds=[(1e-12, 1.0)] * len(log_base),
        constraints=[
            {"type": "eq", "fun": lambda q: q.sum() - 1.0, "jac": lambda q: np.ones_like(q)},
            {
                "type": "ineq",
                "fun": lambda q: radius**2 - miss(q) @ miss(q),
                "jac": lambda q: -2.0 * posed.node_features @ miss(q),
            },
        ],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert result.success
    np.testing.assert_allclose(np.linalg.norm(miss(result.x)), radius, rtol=1e-4)
    np.testing.assert_allclose(result.x, np.exp(match.log_masses), atol=1e-4)


def test_a_linear_feature_over_a_normal_has_the_closed_form():
    # f = w x with w = mean / (1 + penalty); two distant points make the grid wide enough for all of the mass.
    data = np.concatenate([np.random.default_rng(0).normal(0.8, 1.0, (60, 1)), [[-9.0], [9.0]]])
    problem = Problem(Sample.unconditional(data), normal(), linear_space(), 0.1, normal())
    solution = MomentMatching().solve(problem, key=jr.key(0))
    assert float(solution.tilt.values(np.ones((1, 1)))[0]) == pytest.approx(data.mean() / 1.1, abs=1e-4)


@pytest.mark.parametrize("data", [line, moons])
def test_the_solver_gives_the_f_of_the_exact_one(data):
    problem = data()
    first, second = (solver.solve(problem, key=jr.key(0)) for solver in (MomentMatching(), convex.Convex()))
    assert first.status is Status.CONVERGED
    np.testing.assert_allclose(
        first.tilt.values(problem.sample.target), second.tilt.values(problem.sample.target), atol=1e-4
    )
    assert np.all(np.isfinite(first.sampler.draw(jnp.zeros((50, 0)), key=jr.key(1))))


def test_too_few_steps_are_not_called_converged():
    problem = line(1e-5)
    assert MomentMatching(steps=1).solve(problem, key=jr.key(0)).status is Status.RAN_ALL_STEPS


def test_a_function_of_many_dimensions_is_referred_to_the_other_solver():
    data = np.random.default_rng(0).normal(size=(20, 4))
    with pytest.raises(ValueError, match=r"at most 3 dimensions and f depends on 4: use solver='auto'"):
        MomentMatching().solve(problem_of(data, 1.0, 1e-3), key=jr.key(0))


def test_the_gradient_of_the_likelihood_vanishes_at_the_match():
    posed = on_nodes(line(), 0.5)
    weights = matched(posed, 1e-3).weights
    assert np.linalg.norm(convex.gradient(posed, 1e-3, weights)) < 1e-7
    assert np.linalg.norm(convex.gradient(posed, 1e-3, 0.9 * weights)) > 1e-3
