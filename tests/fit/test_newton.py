"""Newton's method against closed forms, and what it does where there is none."""

import numpy as np
import pytest
import scipy.linalg

from kexpfam.fit.newton import climb, factored


def quadratic(matrix, slope):
    """Return value and step of ``slope . x - x^T matrix x / 2``; the maximiser is ``matrix^-1 slope``."""
    value = lambda x: (float(slope @ x - 0.5 * x @ matrix @ x), None)

    def direction(x, state):
        gradient = slope - matrix @ x
        step = scipy.linalg.solve(matrix, gradient)
        return step, float(gradient @ step), matrix

    return value, direction


def test_a_quadratic_takes_one_step():
    rng = np.random.default_rng(0)
    root, slope = rng.normal(size=(4, 4)), rng.normal(size=4)
    matrix = root @ root.T + np.eye(4)
    found = climb(np.zeros(4), *quadratic(matrix, slope), tolerance=1e-12, most=10)
    np.testing.assert_allclose(found.point, np.linalg.solve(matrix, slope), atol=1e-9)
    assert found.iterations == 1
    assert found.decrement <= 1e-12


def log_cosh(x):
    """Return minus ``log cosh``, on which full Newton steps from afar diverge."""
    return -float(np.sum(np.logaddexp(x, -x))), None


def log_cosh_direction(x, state):
    gradient, curvature = -np.tanh(x), 1.0 / np.cosh(x) ** 2
    return gradient / curvature, float(np.sum(gradient**2 / curvature)), None


@pytest.mark.parametrize("start", [0.5, 2.0, 5.0])
def test_steps_that_overshoot_are_cut(start):
    found = climb(np.array([start]), log_cosh, log_cosh_direction, tolerance=1e-14, most=100)
    assert abs(found.point[0]) < 1e-6


def test_a_way_of_its_own_to_move():
    # Maximise sum p log(q) over the simplex by multiplicative steps: the answer is p.
    p = np.array([0.2, 0.5, 0.3])
    normalised = lambda logs, step: logs + step - np.logaddexp.reduce(logs + step)
    value = lambda logs: (float(p @ logs), None)
    direction = lambda logs, state: (
        p / np.exp(logs) - 1.0,
        float(np.sum((p - np.exp(logs)) ** 2 / np.exp(logs))),
        None,
    )
    found = climb(np.log(np.full(3, 1 / 3)), value, direction, move=normalised, tolerance=1e-16, most=100)
    np.testing.assert_allclose(np.exp(found.point), p, atol=1e-6)


def test_a_step_that_is_no_number_ends_it():
    direction = lambda x, state: (x, np.nan, None)
    with pytest.raises(FloatingPointError, match="not finite"):
        climb(np.zeros(2), lambda x: (0.0, None), direction, tolerance=1e-9, most=5)


def test_a_matrix_that_rounding_has_made_indefinite_is_factored():
    matrix = np.ones((3, 3))
    upper = np.triu(factored(matrix.copy())[0])
    np.testing.assert_allclose(upper.T @ upper, matrix, atol=1e-6)


def test_a_matrix_that_is_not_finite_is_refused():
    with pytest.raises(FloatingPointError, match="Hessian is not finite"):
        factored(np.full((2, 2), np.inf))
