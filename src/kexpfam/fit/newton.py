"""Newton's method with a line search, for all convex problems of the library."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

NOT_FINITE = "the scale of the data or the settings exceed double precision."


class Ascent(NamedTuple):
    """The final point, its value and state of evaluation, the squared Newton decrement and the curvature.

    Half the squared decrement bounds the distance to the optimum, in units of the value. ``curvature`` is the
    third result of the direction, the factored Hessian.
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
    sufficient_share: float = 0.25,
    shortest_step: float = 1e-10,
) -> Ascent:
    """Return the maximiser of a concave function.

    ``evaluate(point)`` returns the value and a state; ``direction(point, state)`` returns the Newton step,
    its squared decrement and the curvature; ``move(point, step)`` applies a step. A step is halved until it
    gains ``sufficient_share`` of the gain that the slope predicts, or is shorter than ``shortest_step``.
    """
    point, (value, state) = start, evaluate(start)
    for iteration in range(most + 1):
        step, decrement, curvature = direction(point, state)
        if not np.isfinite(decrement):
            raise FloatingPointError(f"a Newton step is not finite: {NOT_FINITE}")
        if decrement <= tolerance or iteration == most:
            break
        size = 1.0
        while size > shortest_step:
            candidate = move(point, size * step)
            new_value, new_state = evaluate(candidate)
            if new_value >= value + sufficient_share * size * decrement:
                break
            size *= 0.5
        else:
            break
        point, value, state = candidate, new_value, new_state
    return Ascent(point, value, state, decrement, iteration, curvature)


def factored(hessian: np.ndarray, *, most_tries: int = 40) -> tuple:
    """Return the Cholesky factor of a matrix, with jitter on the diagonal if rounding makes it indefinite.

    Each try adds ten times as much to the diagonal as the try before. The matrix is overwritten.
    """
    jitter = np.finfo(float).eps * float(np.trace(hessian))
    for _ in range(most_tries if np.isfinite(jitter) else 0):
        try:
            return scipy.linalg.cho_factor(hessian, check_finite=False)
        except np.linalg.LinAlgError:
            hessian.flat[:: len(hessian) + 1] += jitter
            jitter *= 10.0
    raise FloatingPointError(f"the Hessian is not finite: {NOT_FINITE}")
