"""A fitted density: its log, its sampler and its refined draws, in the data's own units.

It does not know how it was fitted, so that everything downstream serves every solver alike.
"""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.chains import moved, tuned_step_size
from kexpfam.measures import AbstractMeasure
from kexpfam.nodes import effective_share, importance_nodes, resample
from kexpfam.partition import Estimate
from kexpfam.potentials import Tilt
from kexpfam.sample import Scaling
from kexpfam.transports import Sampler

# Importance resampling is used as long as this share of the weighted draws is effective.
RESAMPLING_SHARE = 0.05
# Weighted draws among which one is chosen: with few, the chance in their weights shows in the shares of the modes. Under
# conditions each has candidates of its own, and fewer have to do.
CANDIDATES_PER_DRAW, CANDIDATES_PER_CONDITION = 16, 4
TUNING_CHAINS = 200


class Completion(eqx.Module):
    """The coordinates that f does not depend on: they follow the base, given the others."""

    base: AbstractMeasure
    dims: tuple[int, ...] = eqx.field(static=True)

    def log_conditional(self, points: np.ndarray) -> np.ndarray:
        """Return ``log p0(other coordinates | dims)`` of each row."""
        part = self.base.marginal(jnp.asarray(self.dims)).log_densities(points[:, self.dims])
        whole = self.base.log_densities(points)
        return np.where(np.isfinite(whole), whole - np.where(np.isfinite(part), part, 0.0), -np.inf)

    def complete(self, values: np.ndarray, *, key: Key[Array, ""]) -> np.ndarray:
        """Return points with these values in ``dims`` and the other coordinates drawn."""
        return np.asarray(_complete(self, jnp.asarray(values), key))


class Density(eqx.Module):
    """``p(x) = p0(x) exp(f(x) - log Z)`` with a sampler, in the units that ``scaling`` leads back to.

    ``tilt`` and ``sampler`` live in the coordinates that f depends on; ``completion`` adds the others, if there are any.
    """

    tilt: Tilt
    sampler: Sampler
    scaling: Scaling
    log_partition: Estimate
    completion: Completion | None

    def log_density(self, points: np.ndarray) -> np.ndarray:
        """Return the normalised log density of each row; ``-inf`` off a bounded support."""
        z = np.asarray(self.scaling.to_model(points))
        part = z if self.completion is None else z[:, self.completion.dims]
        rest = 0.0 if self.completion is None else self.completion.log_conditional(z)
        log_tilt = self.tilt.base.log_densities(part) + self.tilt.values(part)
        return log_tilt + rest - self.log_partition.value + np.asarray(self.scaling.log_jacobian(points))

    def potential(self, points: np.ndarray) -> np.ndarray:
        """Return f at each row."""
        z = np.asarray(self.scaling.to_model(points))
        return self.tilt.values(z if self.completion is None else z[:, self.completion.dims])

    def sample(self, count: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws of the transport sampler. Programs are compiled for few sizes, so counts are rounded up."""
        draw_key, rest_key = jr.split(key)
        return self._finished(np.asarray(_draw(self.sampler, _rounded(count), draw_key)), rest_key)[:count]

    def refined_sample(self, count: int, steps: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws that follow the density itself: resampled by weight, then moved by ``steps`` of HMC."""
        refine_key, rest_key = jr.split(key)
        return self._finished(refine(self.tilt, self.sampler, count, steps, key=refine_key), rest_key)

    def _finished(self, draws: np.ndarray, key: Key[Array, ""]) -> np.ndarray:
        whole = draws if self.completion is None else self.completion.complete(draws, key=key)
        return np.asarray(self.scaling.to_data(whole))


def refine(tilt: Tilt, sampler: Sampler, count: int, steps: int, *, key: Key[Array, ""]) -> np.ndarray:
    """Return draws of the tilted density in model units.

    Weighted draws from base and reference are resampled where enough of them are effective, which is exact up to the
    number of draws; otherwise the sampler's draws are the start. Steps of tuned HMC then leave the density invariant.
    """
    nodes_key, draw_key, seed_key, tune_key, move_key = jr.split(key, 5)
    nodes = importance_nodes(tilt.base, sampler.reference, CANDIDATES_PER_DRAW * count, key=nodes_key)
    log_ratio = tilt.values(nodes.points)
    if effective_share(nodes.log_weights + log_ratio) > RESAMPLING_SHARE:
        starts = resample(nodes, log_ratio, count, seed=int(jr.randint(seed_key, (), 0, 2**31 - 1)))
    else:
        starts = np.asarray(_draw(sampler, count, draw_key))
    return walked(tilt, starts, np.zeros((count, 0)), steps, tune_key, move_key)


def refine_each(tilt: Tilt, sampler: Sampler, condition: np.ndarray, steps: int, *, key: Key[Array, ""]) -> np.ndarray:
    """Return one draw of the tilted density under each condition, in model units.

    Each starts at one of a few draws of the sampler, chosen by their weights, and is moved by tuned HMC.
    """
    draw_key, choose_key, tune_key, move_key = jr.split(key, 4)
    repeated = np.repeat(condition, CANDIDATES_PER_CONDITION, axis=0)
    draws = sampler.weighted_draws(repeated, key=draw_key)
    log_ratio = tilt.base.log_densities(draws.points) + tilt.values(draws.points, repeated) - draws.log_density
    chosen = np.asarray(jr.categorical(choose_key, jnp.asarray(log_ratio).reshape(len(condition), CANDIDATES_PER_CONDITION)))
    starts = draws.points.reshape(len(condition), CANDIDATES_PER_CONDITION, -1)[np.arange(len(condition)), chosen]
    return walked(tilt, starts, condition, steps, tune_key, move_key)


def walked(tilt: Tilt, starts: np.ndarray, condition: np.ndarray, steps: int, tune_key, move_key) -> np.ndarray:
    """Return where chains of tuned HMC are after so many steps, each under its condition, in model units."""
    if steps == 0:
        return starts
    spread = np.linspace(0, len(starts) - 1, min(TUNING_CHAINS, len(starts))).astype(int)
    tuned = tuned_step_size(tilt, jnp.asarray(starts[spread]), jnp.asarray(condition[spread]), tune_key)
    return np.asarray(moved(tilt, jnp.asarray(starts), jnp.asarray(condition), tuned, jr.split(move_key, steps)))


@eqx.filter_jit
def _complete(completion: Completion, values, key):
    return completion.base.completed(completion.dims, values, key=key)


@eqx.filter_jit
def _draw(sampler: Sampler, count: int, key):
    return sampler.draw(jnp.zeros((count, 0)), key=key)


def _rounded(count: int) -> int:
    """Return the next of 4 sizes per power of two, so that any number of draws uses one of few compiled programs."""
    quantum = max(2 ** (max(count - 1, 1).bit_length() - 3), 1)
    return -(-count // quantum) * quantum
