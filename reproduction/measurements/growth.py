"""How cost grows with rows and dimensions, and how error falls with rows."""

from collections.abc import Callable

import jax
import jax.random as jr
import numpy as np

from kexpfam import datasets
from kexpfam.baselines.derivatives import Basis, base_scores
from kexpfam.data.sample import Sample
from kexpfam.fit.convex import Convex
from kexpfam.fit.dde import DDE
from kexpfam.fit.problem import Problem, Solver
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Tilt
from kexpfam.model.kernels import Gaussian as GaussianKernel
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan
from reproduction.cost import Cost
from reproduction.methods import COSTED
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["RATED", "cost", "rate"]

# The truth of the rate experiment: a normal law tilted by a function with these centres and weights in the
# Gaussian RKHS.
TRUE_CENTRES, TRUE_WEIGHTS, TRUE_LENGTHSCALE = (-2.0, -1.0, 0.0, 1.0, 2.0), (2.0, -3.0, 3.0, -3.0, 2.5), 0.7
EDGE, GRID_CELLS = 6.0, 4000
# The penalty falls like 1 / n: the theorem's rate for a kernel whose spectrum falls faster than any power.
PENALTY_TIMES_ROWS, SCORE_PENALTY, MOST_CENTRES = 0.1, 1e-3, 200


def cost(cell: Cell) -> Values:
    """Return peak memory and processor seconds of a fit with fixed settings, and those of a compiled fit.

    A conditional density is that of the last column given the others."""
    train = datasets.grid(cell["dim"]).sample(cell["rows"], random_state=cell["seed"])
    jax.clear_caches()
    costs = []
    for _ in range(2):
        model = COSTED[cell["method"]](cell["seed"])
        with Cost() as spent:
            model.fit(*((train[:, :-1], train[:, -1]) if model.conditional else (train,)))
        costs.append(spent)
    first, second = costs
    return {
        "seconds": second.processor_seconds,
        "first_seconds": first.processor_seconds,
        "megabytes": first.megabytes,
    }


def rate(cell: Cell) -> Values:
    """Return the divergence of the truth from a fit whose space, base and kernel are the truth's own."""
    points, probabilities = _truth()
    rng = np.random.default_rng(cell["seed"])
    width = points[1, 0] - points[0, 0]
    drawn = rng.choice(len(points), size=cell["rows"], p=probabilities)
    x = points[drawn] + width * rng.uniform(-0.5, 0.5, size=(cell["rows"], 1))
    with double_precision():
        exponents = RATED[cell["method"]](x, jr.key(cell["seed"])).log_values(points)
    exponents -= exponents.max()
    log_p = exponents - np.log(np.exp(exponents).sum())
    return {"kl": float(probabilities @ (np.log(probabilities) - log_p))}


def _truth() -> tuple[np.ndarray, np.ndarray]:
    """Return the middles of the cells and their probabilities."""
    edges = np.linspace(-EDGE, EDGE, GRID_CELLS + 1)
    points = 0.5 * (edges[1:] + edges[:-1])[:, None]
    gram = np.exp(-0.5 * ((points - np.array(TRUE_CENTRES)) / TRUE_LENGTHSCALE) ** 2)
    exponents = gram @ np.array(TRUE_WEIGHTS) - 0.5 * points[:, 0] ** 2
    masses = np.exp(exponents - exponents.max())
    return points, masses / masses.sum()


def _problem(x: np.ndarray) -> Problem:
    base = Gaussian(np.zeros(1), np.eye(1))
    space = FeatureSpace(Constant(), KernelSpan.build(GaussianKernel(TRUE_LENGTHSCALE), _centres(x)))
    return Problem(Sample.unconditional(x), base, space, PENALTY_TIMES_ROWS / len(x), base)


def _centres(x: np.ndarray) -> np.ndarray:
    return np.quantile(x, np.linspace(0.0, 1.0, min(len(x), MOST_CENTRES)), axis=0)


def _solved(solver: Solver) -> Callable[[np.ndarray, jax.Array], Tilt]:
    return lambda x, key: solver.solve(_problem(x), key=key).tilt


def _score_matched(x: np.ndarray, key: jax.Array) -> Tilt:
    """Return the score-matching solution in the same space, with a penalty of order n^(-1/3) (its theory)."""
    base, kernel = _problem(x).base, GaussianKernel(TRUE_LENGTHSCALE)
    basis, scores = Basis.of_derivatives(kernel, _centres(x)), np.asarray(base_scores(base, x))
    weights = basis.weights(
        basis.quadratic(x, scores).path(np.array([SCORE_PENALTY * len(x) ** (-1.0 / 3.0)]))[:, 0]
    )
    return Tilt(FeatureSpace(Constant(), basis.span), weights, base)


RATED: dict[str, Callable[[np.ndarray, jax.Array], Tilt]] = {
    "exact": _solved(Convex(integral="grid")),
    "dde": _solved(DDE()),
    "score matching": _score_matched,
}
