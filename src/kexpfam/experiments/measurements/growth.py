"""How cost grows with rows and dimensions, and how error falls with rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from kexpfam import datasets
from kexpfam.baselines.derivatives import Basis, base_scores
from kexpfam.experiments.cost import Cost
from kexpfam.experiments.methods import COSTED
from kexpfam.experiments.records import Values
from kexpfam.experiments.specs import Cell
from kexpfam.kernels import Gaussian as GaussianKernel
from kexpfam.measures import Gaussian
from kexpfam.potentials import Constant, FeatureSpace, KernelSpan, Tilt
from kexpfam.sample import Sample
from kexpfam.solvers.dde import DDE
from kexpfam.solvers.exact import Exact
from kexpfam.solvers.task import Task

# The truth of the rate experiment: a normal law tilted by a function with these centres and weights in the Gaussian RKHS.
TRUE_CENTRES, TRUE_WEIGHTS, TRUE_LENGTHSCALE = (-2.0, -1.0, 0.0, 1.0, 2.0), (2.0, -3.0, 3.0, -3.0, 2.5), 0.7
EDGE, GRID_CELLS = 6.0, 4000
# The penalty falls like 1 / n: the theorem's rate for a kernel whose spectrum falls faster than any power.
PENALTY_TIMES_ROWS, SCORE_PENALTY, MOST_CENTRES = 0.1, 1e-3, 200


def cost(cell: Cell) -> Values:
    """Return the peak memory of a fit with given settings, its seconds, and those of a second one, with programs compiled."""
    train = datasets.grid(cell["dim"]).sample(cell["rows"], random_state=cell["seed"])
    jax.clear_caches()
    costs = []
    for _ in range(2):
        with Cost() as spent:
            COSTED[cell["method"]](cell["seed"]).fit(train)
        costs.append(spent)
    first, second = costs
    return {"seconds": second.seconds, "first_seconds": first.seconds, "megabytes": first.megabytes}


def rate(cell: Cell) -> Values:
    """Return the divergence of the truth from a fit whose space, base and kernel are the truth's own."""
    with jax.enable_x64(True):
        points, probabilities = _truth()
        rng = np.random.default_rng(cell["seed"])
        width = points[1, 0] - points[0, 0]
        drawn = rng.choice(len(points), size=cell["rows"], p=probabilities)
        x = points[drawn] + width * rng.uniform(-0.5, 0.5, size=(cell["rows"], 1))
        fitted = RATED[cell["method"]](x, jr.key(cell["seed"]))
        exponents = fitted.values(points) + fitted.base.log_densities(points)
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


def _task(x: np.ndarray) -> Task:
    base = Gaussian(jnp.zeros(1), jnp.eye(1))
    space = FeatureSpace(Constant(), KernelSpan.build(GaussianKernel(jnp.asarray(TRUE_LENGTHSCALE)), _centres(x)))
    return Task(Sample.unconditional(jnp.asarray(x)), base, space, PENALTY_TIMES_ROWS / len(x), base)


def _centres(x: np.ndarray) -> np.ndarray:
    return np.quantile(x, np.linspace(0.0, 1.0, min(len(x), MOST_CENTRES)), axis=0)


def _solved(solver) -> Callable[[np.ndarray, jax.Array], Tilt]:
    return lambda x, key: solver.solve(_task(x), key=key).tilt


def _score_matched(x: np.ndarray, key) -> Tilt:
    """Return the score-matching solution in the same space, with its penalty falling like n^(-1/3), as its theory asks."""
    task, kernel = _task(x), GaussianKernel(jnp.asarray(TRUE_LENGTHSCALE))
    basis, scores = Basis.of_derivatives(kernel, _centres(x)), np.asarray(base_scores(task.base, jnp.asarray(x)))
    weights = basis.weights(basis.quadratic(x, scores).path(np.array([SCORE_PENALTY * len(x) ** (-1.0 / 3.0)]))[:, 0])
    return Tilt(FeatureSpace(Constant(), basis.span), jnp.asarray(weights), task.base)


RATED: dict[str, Callable[[np.ndarray, jax.Array], Tilt]] = {
    "exact": _solved(Exact()),
    "dde": _solved(DDE()),
    "score matching": _score_matched,
}
