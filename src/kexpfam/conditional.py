"""A fitted conditional density: log density, sampler, moments and quantiles for many conditions at once, in the data's units.

Under one condition it is an ordinary ``Density`` (``given``). Over many, everything comes from one table: the probabilities of
the same nodes of the target under each condition.
"""

from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.density import Density, refine_each
from kexpfam.nodes import Nodes
from kexpfam.partition import QUADRATURE_SAFETY, Estimate
from kexpfam.potentials import Tilt
from kexpfam.sample import Scaling
from kexpfam.solvers.task import Solution, Task, integration_nodes
from kexpfam.transports import Sampler

# Probabilities in memory at a time.
CHUNK_NUMBERS = 4_000_000
# Conditions further outside the training range than this (standard deviations) are treated as if they were here.
CONDITION_MARGIN = 1.0
# Normalisers are integrated more finely than the fit, whose grid is the check on them.
PARTITION_FINENESS, PARTITION_NODES = 1.4, 16384


class ConditionalDensity(eqx.Module):
    """``p(y | x) = p0(y) exp(f(y | x) - log Z(x))`` with a sampler.

    ``nodes`` carry the integral of every ``Z(x)``: the cells of a grid, or draws. ``coarse_nodes`` are a coarser grid, by which
    the finer one is judged; draws need none. ``low`` and ``high`` are the range of the training conditions in model units.
    """

    tilt: Tilt
    sampler: Sampler
    scaling: Scaling
    condition_scaling: Scaling
    low: Float[Array, " p"]
    high: Float[Array, " p"]
    nodes: Nodes
    coarse_nodes: Nodes | None

    @classmethod
    def of_solution(
        cls, task: Task, solution: Solution, scaling: Scaling, condition_scaling: Scaling, *, key: Key[Array, ""]
    ) -> "ConditionalDensity":
        """Return the density that solves the task, with nodes for its normalisers."""
        nodes, coarse = (
            integration_nodes(task, task.proposal, PARTITION_NODES, fineness=fineness, key=key)
            for fineness in (PARTITION_FINENESS, 1.0)
        )
        return cls(
            tilt=solution.tilt,
            sampler=solution.sampler,
            scaling=scaling,
            condition_scaling=condition_scaling,
            low=task.sample.condition.min(0),
            high=task.sample.condition.max(0),
            nodes=nodes,
            coarse_nodes=coarse if np.all(nodes.widths > 0.0) else None,
        )

    def conditions(self, X: np.ndarray) -> np.ndarray:
        """Return the conditions in model units, kept near the training range; a column that was constant stays so."""
        z, low, high = np.asarray(self.condition_scaling.to_model(X)), np.asarray(self.low), np.asarray(self.high)
        margin = np.where(high > low, CONDITION_MARGIN, 0.0)
        return np.clip(z, low - margin, high + margin)

    def log_density(self, X: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the normalised log density of each target under its condition; ``-inf`` off a bounded support."""
        condition, z = self.conditions(X), np.asarray(self.scaling.to_model(targets))
        log_tilt = self.tilt.base.log_densities(z) + self.tilt.values(z, condition)
        return log_tilt - self.log_partitions(X) + np.asarray(self.scaling.log_jacobian(targets))

    def log_partitions(self, X: np.ndarray) -> np.ndarray:
        """Return ``log Z(x)`` of each row."""
        return np.concatenate([_log_sum(exponents) for exponents in self._exponents(X, self.nodes)])

    def partition_errors(self, X: np.ndarray) -> np.ndarray:
        """Return the error of ``log Z(x)``: a multiple of the change from a coarser grid, or the standard error of draws."""
        if self.coarse_nodes is not None:
            coarse = np.concatenate([_log_sum(exponents) for exponents in self._exponents(X, self.coarse_nodes)])
            return QUADRATURE_SAFETY * np.abs(coarse - self.log_partitions(X))
        errors = []
        for masses in self.probabilities(X):
            errors.append(masses.std(axis=1) / masses.mean(axis=1) / np.sqrt(masses.shape[1]))
        return np.concatenate(errors)

    def probabilities(self, X: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the probabilities of the nodes under the conditions, some rows at a time: each (rows, nodes)."""
        for exponents in self._exponents(X, self.nodes):
            yield np.exp(exponents - _log_sum(exponents)[:, None])

    def mean(self, X: np.ndarray) -> np.ndarray:
        """Return the conditional mean of each row."""
        points = np.asarray(self.scaling.to_data(np.asarray(self.nodes.points)))
        return np.concatenate([masses @ points for masses in self.probabilities(X)])

    def cdf(self, X: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return ``P(Y <= y | x)`` of each row, for targets of one dimension."""
        z, edges = np.asarray(self.scaling.to_model(targets))[:, 0], self._edges()
        place = np.clip(np.searchsorted(edges, z, side="right") - 1, 0, len(edges) - 2)
        share = np.clip((z - edges[place]) / (edges[place + 1] - edges[place]), 0.0, 1.0)
        levels, start = [], 0
        for masses in self.probabilities(X):
            rows = np.arange(len(masses))
            here = place[start : start + len(masses)]
            below = np.cumsum(masses, axis=1) - masses
            levels.append(below[rows, here] + share[start : start + len(masses)] * masses[rows, here])
            start += len(masses)
        return np.clip(np.concatenate(levels), 0.0, 1.0)

    def quantile(self, X: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """Return the quantiles at each level, (rows, levels), for targets of one dimension."""
        edges, found = self._edges(), []
        for masses in self.probabilities(X):
            rows, cumulative = np.arange(len(masses)), np.cumsum(masses, axis=1)
            columns = []
            for level in levels:
                place = np.minimum((cumulative < level).sum(axis=1), masses.shape[1] - 1)
                mass = masses[rows, place]
                inside = (level - (cumulative[rows, place] - mass)) / np.where(mass > 0.0, mass, 1.0)
                columns.append(edges[place] + np.clip(inside, 0.0, 1.0) * (edges[place + 1] - edges[place]))
            found.append(np.stack(columns, 1))
        z = np.concatenate(found)
        return np.asarray(self.scaling.to_data(z.reshape(-1, 1))).reshape(z.shape)

    def crps(self, X: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the continuous ranked probability score of each row: the integral of ``(F(t | x) - 1[y <= t])^2``."""
        edges = np.asarray(self.scaling.to_data(self._edges()[:, None]))[:, 0]
        widths, scores, start = np.diff(edges), [], 0
        for masses in self.probabilities(X):
            y = targets[start : start + len(masses)]
            middle = np.cumsum(masses, axis=1) - 0.5 * masses
            beyond = np.clip((edges[1:] - y) / widths, 0.0, 1.0)
            outside = np.maximum(edges[0] - y[:, 0], 0.0) + np.maximum(y[:, 0] - edges[-1], 0.0)
            scores.append((beyond * (middle - 1.0) ** 2 + (1.0 - beyond) * middle**2) @ widths + outside)
            start += len(masses)
        return np.concatenate(scores)

    def sample(self, X: np.ndarray, count: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws of the sampler, (rows, count, dimensions)."""
        draws = np.asarray(_draw_several(self.sampler, jnp.asarray(self.conditions(X)), count, key))
        return np.asarray(self.scaling.to_data(draws.reshape(-1, draws.shape[2]))).reshape(draws.shape)

    def refined_sample(self, X: np.ndarray, count: int, steps: int, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws that follow the density itself, (rows, count, dimensions)."""
        condition = np.repeat(self.conditions(X), count, axis=0)
        draws = refine_each(self.tilt, self.sampler, condition, steps, key=key)
        return np.asarray(self.scaling.to_data(draws)).reshape(len(X), count, -1)

    def given(self, x: np.ndarray) -> Density:
        """Return the density under one condition."""
        row = x[None]
        estimate = Estimate(
            float(self.log_partitions(row)[0]), float(self.partition_errors(row)[0]), float(len(self.nodes.log_weights))
        )
        condition = jnp.asarray(self.conditions(row)[0])
        return Density(self.tilt.given(condition), self.sampler.given(condition), self.scaling, estimate, None)

    def _edges(self) -> np.ndarray:
        points, widths = np.asarray(self.nodes.points), np.asarray(self.nodes.widths)
        if points.shape[1] != 1:
            raise ValueError("distribution functions and quantiles are for targets of one dimension; use sample instead.")
        return np.append(points[:, 0] - 0.5 * widths[:, 0], points[-1, 0] + 0.5 * widths[-1, 0])

    def _exponents(self, X: np.ndarray, nodes: Nodes) -> Iterator[np.ndarray]:
        condition = self.conditions(X)
        psi, log_weights = self.tilt.space.target.matrix(nodes.points), np.asarray(nodes.log_weights)
        weights = np.asarray(self.tilt.weights).reshape(self.tilt.space.condition.size, -1)
        rows = max(1, CHUNK_NUMBERS // len(log_weights))
        for start in range(0, len(condition), rows):
            phi = self.tilt.space.condition.matrix(condition[start : start + rows])
            yield log_weights + (phi @ weights) @ psi.T


def _log_sum(exponents: np.ndarray) -> np.ndarray:
    top = exponents.max(axis=1)
    return top + np.log(np.exp(exponents - top[:, None]).sum(axis=1))


@eqx.filter_jit
def _draw_several(sampler: Sampler, condition, count: int, key):
    return sampler.draw_several(condition, count, key=key)
