"""Newton's method with a line search: the one that every convex problem of the library is solved by."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

__all__ = ["Ascent", "climb", "factored"]

# A step is accepted if it gains this share of what the slope promises; it is halved until then, or given up.
SUFFICIENT_SHARE, SHORTEST_STEP = 0.25, 1e-10
# Each try of a factorisation adds ten times as much to the diagonal as the one before.
MOST_TRIES = 40


class Ascent(NamedTuple):
    """The point that was reached, its value, the state of its evaluation, and the squared Newton decrement there.

    Half the squared decrement bounds the distance to the optimum, in units of the value. ``curvature`` is whatever the
    direction came with: the factored Hessian.
    """

    point: np.ndarray
    value: float
    state: Any
    decrement: float
    iterations: int
    curvature: Any


def climb(
    start: np.ndarray,
    evaluate: Callable[[np.ndarray], tuple[float, Any]],
    direction: Callable[[np.ndarray, Any], tuple[np.ndarray, float, Any]],
    *,
    move: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.add,
    tolerance: float,
    most: int,
) -> Ascent:
    """Return the maximiser of a concave function.

    ``evaluate(point)`` is the value and what the direction needs of it; ``direction(point, state)`` is the Newton step, its
    squared decrement and the curvature; ``move(point, step)`` is where a step leads.
    """
    point, (value, state) = start, evaluate(start)
    for iteration in range(most + 1):
        step, decrement, curvature = direction(point, state)
        if not np.isfinite(decrement):
            raise FloatingPointError(
                "a Newton step is not finite: the data's spread or the settings are beyond double precision."
            )
        if decrement <= tolerance or iteration == most:
            break
        size = 1.0
        while size > SHORTEST_STEP:
            candidate = move(point, size * step)
            new_value, new_state = evaluate(candidate)
            if new_value >= value + SUFFICIENT_SHARE * size * decrement:
                break
            size *= 0.5
        else:
            break
        point, value, state = candidate, new_value, new_state
    return Ascent(point, value, state, decrement, iteration, curvature)


def factored(hessian: np.ndarray) -> tuple:
    """Return the Cholesky factor, with as little added to the diagonal as makes rounding harmless."""
    jitter = np.finfo(float).eps * float(np.trace(hessian))
    for _ in range(MOST_TRIES if np.isfinite(jitter) else 0):
        try:
            return scipy.linalg.cho_factor(hessian, check_finite=False)
        except np.linalg.LinAlgError:
            hessian.flat[:: len(hessian) + 1] += jitter
            jitter *= 10.0
    raise FloatingPointError(
        "the Hessian is not finite: the data's spread or the settings are beyond double precision."
    )
