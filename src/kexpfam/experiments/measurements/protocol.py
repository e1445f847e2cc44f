"""The protocol of the code that was released with the paper, beside which the leak-free one stands."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.stats

from kexpfam.experiments.cost import Cost
from kexpfam.experiments.measurements.benchmark import halves
from kexpfam.experiments.records import Values
from kexpfam.experiments.specs import Cell
from kexpfam.kernels import Gaussian as GaussianKernel
from kexpfam.kernels import median_distance
from kexpfam.measures import Gaussian
from kexpfam.objective import Problem
from kexpfam.potentials import FeatureSpace, Tilt
from kexpfam.sample import Sample
from kexpfam.solvers.doubly_dual import DoublyDual
from kexpfam.solvers.loop import run

# The penalty was left at 0 there; this is as good as 0, and keeps the problem bounded.
NO_PENALTY = 1e-10
TEST_DRAWS, STEPS_BETWEEN_LOOKS = 1000, 50


def released_protocol(cell: Cell) -> Values:
    """Return the lowest of many looks at the test half along an unpenalised run with the median rule's length scales.

    The normaliser of each look is estimated from 1,000 draws of a normal law fitted to the *test* targets.
    """
    with jax.enable_x64(True):
        train, test = halves(cell["dataset"], cell["seed"])
        sample = Sample(jnp.asarray(train[:, -1:]), jnp.asarray(train[:, :-1]))
        init_key, run_key, look_key = jr.split(jr.key(cell["seed"]), 3)
        space = _space(sample)
        base = Gaussian.fitted(np.asarray(sample.target))
        problem = Problem(sample, base, space, base, jnp.asarray(NO_PENALTY), jnp.asarray(1.0), anchored=True)
        saddle = DoublyDual(f_rate=1.0, nu_rate=1e-3, transport_rate=5e-4, batch_size=256)
        state = saddle.init(problem, jnp.zeros(space.size), key=init_key)
        watch = lambda state: np.asarray(state.point.f_weights)
        with Cost() as cost:
            outcome = run(problem, saddle, state, steps=cell["steps"], key=run_key, chunk=STEPS_BETWEEN_LOOKS, watch=watch)
        looks = {
            int(step): _test_nll(Tilt(space, jnp.asarray(weights), base), test, look_key)
            for step, weights in outcome.watched.items()
        }
    best = min(looks, key=lambda step: looks[step])
    last = looks[max(looks)]
    return {"nll": looks[best], "best_step": best, "last_nll": last, "looks": len(looks), "seconds": cost.seconds}


def _space(sample: Sample) -> FeatureSpace:
    scale = lambda values: jnp.asarray(max(median_distance(np.asarray(values)), 1e-3) / np.sqrt(2.0))
    return FeatureSpace.of_kernels(GaussianKernel(scale(sample.target)), GaussianKernel(scale(sample.condition)), sample)


def _test_nll(tilt: Tilt, test: np.ndarray, key) -> float:
    targets, conditions = test[:, -1:], test[:, :-1]
    law = scipy.stats.norm(targets.mean(), targets.std() + 1e-6)
    nodes = law.ppf(np.asarray(jr.uniform(key, (TEST_DRAWS, 1), minval=1e-6, maxval=1.0 - 1e-6)))
    coefficients = np.asarray(tilt.space.coefficients(tilt.weights, jnp.asarray(conditions)))
    exponents = coefficients @ tilt.space.target.matrix(nodes).T + tilt.base.log_densities(nodes) - law.logpdf(nodes)[:, 0]
    top = exponents.max(1)
    log_partitions = top + np.log(np.exp(exponents - top[:, None]).mean(1))
    scores = tilt.values(targets, conditions) + tilt.base.log_densities(targets) - log_partitions
    return float(-scores.mean())
