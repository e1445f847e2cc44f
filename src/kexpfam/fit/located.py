"""The start of a conditional saddle point: a normal law around a regression of the targets, and f that
represents it.

Neither uses an integral over the target: the regression is a ridge regression in closed form, and f its log
ratio to the base by least squares.
"""

import jax.random as jr
import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import RandomKey
from kexpfam.fit.problem import Problem
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.located import Located
from kexpfam.model.measures import Box, Mixture

# Ridges relative to the largest eigenvalue. A row with a larger leverage has no meaningful left-out residual.
RIDGES, MOST_LEVERAGE = 10.0 ** np.arange(-12.0, 4.0), 0.95
# The share and the relative width of the wide part of the law.
TAIL_SHARE, TAIL_WIDTH = 0.1, 3.0
# Conditions, and draws under each, of the regression of f; the spread of the draws in scales.
CONDITIONS, DRAWS, SPREAD = 256, 16, 1.5
# Targets with at most this many values are labels, which no single location represents.
MOST_LABELS = 10
# The largest scale of a narrow law, in standard deviations of the targets.
NARROW = 0.5


def narrow_law(problem: Problem) -> Located | None:
    """Return a law around one location per condition if it is narrow; None without a condition, with bounds
    and for labels."""
    if not problem.conditional or isinstance(problem.base, Box):
        return None
    targets = np.asarray(problem.sample.target)
    if len(np.unique(targets, axis=0)) <= MOST_LABELS:
        return None
    law = located(problem)
    return law if np.all(law.scale < NARROW * targets.std(axis=0)) else None


def located(problem: Problem) -> Located:
    """Return the law around the ridge regression of least left-out error, as wide as left-out residuals."""
    sample, span = problem.sample, problem.space.condition
    targets, features = np.asarray(sample.target, float), span.matrix(np.asarray(sample.condition))
    shares = np.asarray(sample.shares, float)
    middle, mean = shares @ features, shares @ targets
    root = np.sqrt(shares)[:, None]
    u, d, vt = np.linalg.svd(root * (features - middle), full_matrices=False)
    coefficients, least = u.T @ (root * (targets - mean)), np.inf
    for ridge in (*(RIDGES * d[0] ** 2), np.inf):
        kept = d**2 / (d**2 + ridge)
        leverage = (u**2 * kept).sum(1) + shares
        if leverage.max() > MOST_LEVERAGE and np.isfinite(ridge):
            continue
        residuals = targets - mean - (u * kept) @ coefficients / root
        squares = (residuals / (1.0 - np.minimum(leverage, MOST_LEVERAGE))[:, None]) ** 2
        if (error := float(shares @ squares.sum(1))) < least:
            least, variance = error, shares @ squares
            weights = vt.T @ ((d / (d**2 + ridge))[:, None] * coefficients)
    dim = targets.shape[1]
    choleskys = np.stack([np.eye(dim), TAIL_WIDTH * np.eye(dim)])
    shape = Mixture.of(np.log([1.0 - TAIL_SHARE, TAIL_SHARE]), np.zeros((2, dim)), choleskys)
    return Located(span, weights, mean - middle @ weights, np.sqrt(variance), shape)


def log_ratio(problem: Problem, law: Located, *, key: RandomKey) -> Float[np.ndarray, " r"]:
    r"""Return the weights of f nearest to the log ratio of the law's narrow part and the base.

    They minimise :math:`E_x Var_y[f - \log law / p_0] + \eta |f|^2` over draws around the location: the
    penalised likelihood to second order. A function of the condition alone does not count.
    """
    row_key, draw_key = jr.split(key)
    space, x = problem.space, np.asarray(problem.sample.condition)
    x = x[np.random.default_rng(seed_from(row_key)).permutation(len(x))[:CONDITIONS]]
    noise = SPREAD * np.asarray(jr.normal(draw_key, (len(x), DRAWS, len(law.scale))))
    y = (law.location(x)[:, None] + law.scale * noise).reshape(-1, len(law.scale))
    ratio = -0.5 * (noise**2).sum(2) - problem.base.log_densities(y).reshape(len(x), DRAWS)
    psi = space.target.matrix(y).reshape(len(x), DRAWS, -1)
    psi, ratio = psi - psi.mean(1, keepdims=True), ratio - ratio.mean(1, keepdims=True)
    rows = space.condition.matrix(x)[:, None, :, None] * psi[:, :, None, :]
    rows = rows.reshape(len(y), -1)
    gram = rows.T @ rows / len(y) + problem.rkhs_penalty * np.eye(rows.shape[1])
    return np.linalg.solve(gram, rows.T @ ratio.ravel() / len(y))
