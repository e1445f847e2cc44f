"""The convex problem behind every f: penalised maximum likelihood with the partition function as a weighted sum.

The nodes of that sum are a quadrature grid (the exact solver) or importance draws (the polish of f in high dimension);
the program is the same. Conditional and unconditional too: there is one partition function per condition, and the
unconditional problem has a single empty one. Features are products of a function of the condition and one of the target, so
that nothing is ever stored per condition, node *and* feature. All of it in float64, on NumPy's BLAS.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg

# A node this much less probable than the likeliest one does not move a Hessian.
NEGLIGIBLE = 1e-8
# Numbers in the largest array of a Hessian's assembly: about 100 MB.
BLOCK_NUMBERS = 12_000_000


class Likelihood(NamedTuple):
    """``w . mean_feature - sum_c share_c log sum_j exp(log_weights[c, j] + features[c, j] . w)``.

    ``features[c, j]`` is the outer product of ``condition_features[c]`` and ``node_features[j]``, flattened. Log weights that
    are the same under every condition have a first axis of length 1. Without conditions there is one condition feature, 1.
    """

    mean_feature: np.ndarray  # (a * b,)
    node_features: np.ndarray  # (j, b)
    log_weights: np.ndarray  # (c or 1, j)
    shares: np.ndarray  # (c,)
    condition_features: np.ndarray  # (c, a)

    @staticmethod
    def unconditional(mean_feature: np.ndarray, node_features: np.ndarray, log_weights: np.ndarray) -> "Likelihood":
        """Return the likelihood with a single, empty condition."""
        return Likelihood(mean_feature, node_features, log_weights[None], np.ones(1), np.ones((1, 1)))

    def exponents(self, weights: np.ndarray) -> np.ndarray:
        """Return ``log_weights + f`` at every condition and node, (c, j)."""
        return self.log_weights + self.coefficients(weights) @ self.node_features.T

    def coefficients(self, weights: np.ndarray) -> np.ndarray:
        """Return the weights of the node features under each condition, (c, b)."""
        return self.condition_features @ weights.reshape(self.condition_features.shape[1], -1)


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
    """Return the maximisers of an unconditional problem for other data means (one per fold), by chord steps with its Hessian.

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
    partitions = np.stack([_logsumexp(problem.exponents(row)) for row in rows])
    return partitions[0] if weights.ndim == 1 else partitions


def gradient(problem: Likelihood, penalty: float, weights: np.ndarray) -> np.ndarray:
    """Return the gradient of ``likelihood - penalty / 2 |w|^2``."""
    exponents = problem.exponents(weights)
    return _moments(problem, penalty, weights, exponents, _logsumexp(exponents))[2]


def without_negligible_nodes(problem: Likelihood, weights: np.ndarray, *, share: float = 1e-10) -> Likelihood:
    """Return the problem without the nodes that carry no mass at these weights under any condition."""
    exponents = problem.exponents(weights)
    live = np.any(exponents - exponents.max(axis=1, keepdims=True) > np.log(share), axis=0)
    return problem._replace(node_features=problem.node_features[live], log_weights=problem.log_weights[:, live])


def _logsumexp(exponents):
    """Return the log of the sum over nodes (axis 1); an empty support has no place here, so the maximum is finite."""
    top = exponents.max(axis=1, keepdims=True)
    return np.log(np.exp(exponents - top).sum(axis=1)) + top.squeeze(1)


def _value(problem, penalty, weights):
    exponents = problem.exponents(weights)
    partitions = _logsumexp(exponents)
    value = weights @ problem.mean_feature - problem.shares @ partitions - 0.5 * penalty * weights @ weights
    return value, exponents, partitions


def _moments(problem, penalty, weights, exponents, partitions):
    """Return the probabilities of the nodes, their mean features under each condition, and the gradient."""
    probabilities = np.exp(exponents - partitions[:, None])
    means = probabilities @ problem.node_features
    expected = problem.condition_features.T @ (problem.shares[:, None] * means)
    return probabilities, means, problem.mean_feature - expected.ravel() - penalty * weights


def _derivatives(problem, penalty, weights, exponents, partitions):
    probabilities, means, gradient = _moments(problem, penalty, weights, exponents, partitions)
    hessian = np.zeros((weights.size, weights.size))
    for rows in _blocks(problem):
        hessian += _information(problem, probabilities[rows], means[rows], rows)
    hessian.flat[:: weights.size + 1] += penalty
    return gradient, hessian


def _information(problem, probabilities, means, rows):
    """Return ``sum_c share_c (phi_c phi_c^T) x Cov_c[psi]`` over some conditions, as a matrix."""
    phi, shares, psi = problem.condition_features[rows], problem.shares[rows], problem.node_features
    a, b = phi.shape[1], psi.shape[1]
    if len(phi) == 1:
        live = probabilities[0] > NEGLIGIBLE * probabilities[0].max()
        scaled = psi[live] * np.sqrt(probabilities[0, live])[:, None]
        covariances = (scaled.T @ scaled)[None]
    else:
        # One product for all conditions: their features are few, so that the squares of all nodes' features are small.
        covariances = (probabilities @ (psi[:, :, None] * psi[:, None, :]).reshape(len(psi), -1)).reshape(len(phi), b, b)
    covariances -= means[:, :, None] * means[:, None, :]
    outer = (phi[:, :, None] * (shares[:, None, None] * phi[:, None, :])).reshape(len(phi), a * a)
    blocks = (outer.T @ covariances.reshape(len(phi), b * b)).reshape(a, a, b, b)
    return blocks.transpose(0, 2, 1, 3).reshape(a * b, a * b)


def _blocks(problem):
    """Return slices of the conditions, each small enough for its arrays of products of features."""
    conditions, a, b = len(problem.shares), problem.condition_features.shape[1], problem.node_features.shape[1]
    size = max(1, BLOCK_NUMBERS // max(a * a, b * b))
    return [slice(start, start + size) for start in range(0, conditions, size)]


def _factored(hessian):
    """Return the Cholesky factor, with as little added to the diagonal as makes rounding harmless."""
    jitter = np.finfo(float).eps * float(np.trace(hessian))
    while True:
        try:
            return scipy.linalg.cho_factor(hessian, check_finite=False)
        except np.linalg.LinAlgError:
            hessian.flat[:: len(hessian) + 1] += jitter
            jitter *= 10.0


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
    """Return ``sum_c share_c E_c[features]`` for each row of weights, with a single condition."""
    exponents = (problem.log_weights[0] + weights @ problem.node_features.T)[:, :, None]
    masses = np.exp(exponents - _logsumexp(exponents)[:, None])
    return masses[:, :, 0] @ problem.node_features
