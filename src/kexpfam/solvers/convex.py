"""The convex problem behind every f: penalised maximum likelihood with the partition function as a weighted sum.

The nodes of that sum are a quadrature grid (the exact solver) or importance draws (the polish of f in high dimension);
the program is the same. Conditional and unconditional too: there is one partition function per condition, and the
unconditional problem has a single empty one. All of it in float64, on NumPy's BLAS.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg

# A node this much less probable than the likeliest one does not move a Hessian.
NEGLIGIBLE = 1e-8


class Likelihood(NamedTuple):
    """``w . mean_feature - sum_c share_c log sum_j exp(log_weights[c, j] + node_features[c, j] . w)``."""

    mean_feature: np.ndarray  # (r,)
    node_features: np.ndarray  # (c, j, r)
    log_weights: np.ndarray  # (c, j)
    shares: np.ndarray  # (c,)


class Optimum(NamedTuple):
    """The maximiser, with what a reader needs to trust it."""

    weights: np.ndarray
    value: float
    log_partitions: np.ndarray  # (c,)
    decrement: float
    iterations: int
    factor: tuple
    converged: bool


def maximise(problem: Likelihood, penalty: float, start: np.ndarray, *, tolerance: float = 1e-9, most: int = 100) -> Optimum:
    r"""Return the maximiser of ``likelihood - penalty / 2 |w|^2`` by damped Newton steps.

    The gradient is :math:`\hat\mu - E_{p_f}[\phi] - \eta w`, the negative Hessian :math:`Cov_{p_f}[\phi] + \eta I`; half the
    squared Newton decrement bounds the distance to the optimum in nats. Equation ledger: ``KEF-MLE``.
    """
    weights = np.array(start, dtype=np.float64)
    value, exponents, partitions = _value(problem, penalty, weights)
    decrement, factor = np.inf, ()
    for iteration in range(most + 1):
        gradient, hessian = _derivatives(problem, penalty, weights, exponents, partitions)
        factor = _factored(hessian)
        step = scipy.linalg.cho_solve(factor, gradient)
        decrement = float(gradient @ step)
        if decrement <= tolerance or iteration == most:
            break
        weights, value, exponents, partitions, moved = _line_search(problem, penalty, weights, step, value, decrement)
        if not moved:
            break
    return Optimum(weights, value, partitions, decrement, iteration, factor, bool(decrement <= max(tolerance, 1e-7)))


def fold_weights(
    problem: Likelihood, optimum: Optimum, penalty: float, fold_means: np.ndarray, *, steps: int = 4
) -> np.ndarray:
    """Return the maximisers for other data means (one per fold), by chord steps with the full problem's Hessian.

    A fold moves the mean by a tenth of its own noise, so the Hessian hardly changes and a handful of steps solve all folds
    together at the price of a few matrix products. This is what makes cross-validation as cheap as a single fit.
    """
    weights = np.repeat(optimum.weights[None], len(fold_means), 0)
    for _ in range(steps):
        gradient = fold_means - penalty * weights - _expected_features(problem, weights)
        # A step longer than the trust region of the quadratic model is cut back.
        step = scipy.linalg.cho_solve(optimum.factor, gradient.T).T
        length = np.sqrt(np.maximum(np.sum(step * gradient, 1), 0.0))
        weights = weights + step * np.minimum(1.0, 2.0 / np.maximum(length, 1e-300))[:, None]
    return weights


def log_partitions(problem: Likelihood, weights: np.ndarray) -> np.ndarray:
    """Return ``log Z`` per condition for one weight vector (c,), or for several (k, c)."""
    rows = np.atleast_2d(weights)
    partitions = _logsumexp(problem.log_weights[..., None] + problem.node_features @ rows.T).T
    return partitions[0] if weights.ndim == 1 else partitions


def without_negligible_nodes(problem: Likelihood, weights: np.ndarray, *, share: float = 1e-10) -> Likelihood:
    """Return the problem without the nodes that carry no mass at these weights under any condition."""
    exponents = problem.log_weights + problem.node_features @ weights
    live = np.any(exponents - exponents.max(axis=1, keepdims=True) > np.log(share), axis=0)
    return problem._replace(node_features=problem.node_features[:, live], log_weights=problem.log_weights[:, live])


def _logsumexp(exponents):
    """Return the log of the sum over nodes (axis 1); an empty support has no place here, so the maximum is finite."""
    top = exponents.max(axis=1, keepdims=True)
    return np.log(np.exp(exponents - top).sum(axis=1)) + top.squeeze(1)


def _value(problem, penalty, weights):
    exponents = problem.log_weights + problem.node_features @ weights
    partitions = _logsumexp(exponents)
    value = weights @ problem.mean_feature - problem.shares @ partitions - 0.5 * penalty * weights @ weights
    return value, exponents, partitions


def _derivatives(problem, penalty, weights, exponents, partitions):
    features = problem.node_features
    probabilities = np.exp(exponents - partitions[:, None])
    means = (probabilities[:, None, :] @ features)[:, 0]
    gradient = problem.mean_feature - problem.shares @ means - penalty * weights
    masses = (problem.shares[:, None] * probabilities).ravel()
    live = masses > NEGLIGIBLE * masses.max()
    scaled = features.reshape(-1, weights.size)[live] * np.sqrt(masses[live])[:, None]
    weighted = means * np.sqrt(problem.shares)[:, None]
    hessian = scaled.T @ scaled - weighted.T @ weighted
    hessian[np.diag_indices_from(hessian)] += penalty
    return gradient, hessian


def _factored(hessian):
    """Return the Cholesky factor, with as little added to the diagonal as makes rounding harmless."""
    jitter = 0.0
    while True:
        try:
            return scipy.linalg.cho_factor(hessian + jitter * np.eye(len(hessian)))
        except np.linalg.LinAlgError:
            jitter = max(10.0 * jitter, np.finfo(float).eps * float(np.trace(hessian)))


def _line_search(problem, penalty, weights, step, value, decrement):
    size = 1.0
    while size > 1e-10:
        candidate = weights + size * step
        new_value, exponents, partitions = _value(problem, penalty, candidate)
        if new_value >= value + 0.25 * size * decrement:
            return candidate, new_value, exponents, partitions, True
        size *= 0.5
    _, exponents, partitions = _value(problem, penalty, weights)
    return weights, value, exponents, partitions, False


def _expected_features(problem, weights):
    """Return ``sum_c share_c E_c[features]`` for each row of weights."""
    exponents = problem.log_weights[..., None] + problem.node_features @ weights.T
    masses = problem.shares[:, None, None] * np.exp(exponents - _logsumexp(exponents)[:, None])
    features = problem.node_features.reshape(-1, problem.node_features.shape[-1])
    return masses.reshape(-1, len(weights)).T @ features
