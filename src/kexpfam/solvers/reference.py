"""A mixture distilled from a fitted density: where the sampler starts, and the proposal of every importance sum.

Fitting the mixture to draws *of the density*, not to the data, has no overfitting to fear: draws are free. Weighted
draws from the best proposal so far are resampled, a mixture is fitted to them, and it becomes the next proposal, until the
proposals are good.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.measures import AbstractMeasure, Mixture
from kexpfam.nodes import Nodes, effective_share, importance_nodes, resample
from kexpfam.solvers.task import Task

COMPONENTS = 64
DRAWS = 20_000
CANDIDATES = 60_000
ROUNDS = 3
# Half of the candidates come from the base on purpose, so a perfect proposal gives about one half.
GOOD_SHARE = 0.3


def distil(task: Task, weights, proposal: AbstractMeasure, *, key: Key[Array, ""]) -> Mixture:
    """Return a mixture close to ``p0 exp(f)``, starting from any proposal."""
    for round_key in jr.split(key, ROUNDS):
        nodes_key, seed_key = jr.split(round_key)
        nodes = importance_nodes(task.base, proposal, CANDIDATES, key=nodes_key)
        log_ratio = task.tilt(weights).values(nodes.points)
        share = effective_share(nodes.log_weights + log_ratio)
        seed = int(jr.randint(seed_key, (), 0, 2**31 - 1))
        draws = resample(nodes, log_ratio, DRAWS, seed=seed)
        # A full covariance per component only where there are enough draws to know it.
        dim = draws.shape[1]
        diagonal = COMPONENTS * dim * (dim + 3) / 2 > DRAWS / 4
        proposal = Mixture.fitted(draws, components=COMPONENTS, diagonal=diagonal, seed=seed)
        if share > GOOD_SHARE:
            break
    return proposal


def active_nodes(task: Task, proposal: AbstractMeasure, count: int, *, key: Key[Array, ""]) -> Nodes:
    """Return importance nodes over the coordinates f depends on, at 0 in the others, which f does not see."""
    dims = jnp.asarray(task.active)
    nodes = importance_nodes(task.base.marginal(dims), proposal.marginal(dims), count, key=key)
    points = np.zeros((count, task.sample.target.shape[1]))
    points[:, task.active] = nodes.points
    return Nodes(points, nodes.log_weights, np.zeros_like(points))
