"""A mixture distilled from a fitted density: where the sampler starts, and the proposal of every importance sum.

Fitting the mixture to draws *of the density*, not to the data, has no overfitting to fear: draws are free. Weighted
draws from the best proposal so far are resampled, a mixture is fitted to them, and it becomes the next proposal, until the
proposals are good.
"""

import jax.random as jr
from jaxtyping import Array, Key

from kexpfam.measures import AbstractMeasure, Mixture
from kexpfam.nodes import effective_share, importance_nodes, resample
from kexpfam.solvers.task import Task

COMPONENTS = 64
DRAWS = 20_000
CANDIDATES = 60_000
ROUNDS = 3
# Half of the candidates come from the base on purpose, so a perfect proposal gives about one half.
GOOD_SHARE = 0.45
# Beyond this many coordinates a full covariance per component costs more time and draws than it is worth.
FULL_COVARIANCE_DIMS = 5


def distil(task: Task, weights, *, key: Key[Array, ""]) -> AbstractMeasure:
    """Return a mixture close to ``p0 exp(f)``, starting from the task's proposal."""
    tilt = task.tilt(weights)
    proposal: AbstractMeasure = task.proposal
    diagonal = task.sample.target.shape[1] > FULL_COVARIANCE_DIMS
    for round_key in jr.split(key, ROUNDS):
        nodes_key, seed_key = jr.split(round_key)
        nodes = importance_nodes(task.base, proposal, CANDIDATES, key=nodes_key)
        log_ratio = tilt.values(nodes.points)
        seed = int(jr.randint(seed_key, (), 0, 2**31 - 1))
        draws = resample(nodes, log_ratio, DRAWS, seed=seed)
        proposal = Mixture.fitted(draws, components=COMPONENTS, diagonal=diagonal, seed=seed)
        if effective_share(nodes.log_weights + log_ratio) > GOOD_SHARE:
            break
    return proposal
