"""Measures that depend on a condition: where the sampler of a conditional density starts.

``TiltedCells`` is the density itself on a grid of the target, drawn cell by cell: exact where there is a grid.
``MixtureNetwork`` is a Gaussian mixture whose parameters are a network of the condition: fast, in any dimension.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.measures import AbstractMeasure, Mixture
from kexpfam.nodes import grid_edges
from kexpfam.potentials import Network, Tilt

# Logarithms of component scales, in standard deviations of the target, are kept in this range.
LOG_SCALES = (-6.0, 2.0)


class ConditionalMeasure(AbstractMeasure):
    """A measure that exists under a condition only: use ``given(condition)``."""

    def log_density(self, x):
        raise TypeError(f"a {type(self).__name__} has a density under a condition only.")

    def sample(self, count, *, key):
        raise TypeError(f"a {type(self).__name__} can be drawn from under a condition only.")

    def marginal(self, dims):
        raise TypeError(f"a {type(self).__name__} does not know its marginals.")

    def bounds(self, spread):
        raise TypeError(f"a {type(self).__name__} has bounds under a condition only.")


class Cells(AbstractMeasure):
    """A density that is constant on each cell of a grid."""

    log_masses: Float[Array, " j"]
    edges: tuple[Float[Array, " e"], ...]

    def log_density(self, x):
        sizes = [edge.size - 1 for edge in self.edges]
        places = [jnp.searchsorted(edge, x[j], side="right") - 1 for j, edge in enumerate(self.edges)]
        inside = jnp.all(jnp.stack([(place >= 0) & (place < size) for place, size in zip(places, sizes, strict=True)]))
        places = [jnp.clip(place, 0, size - 1) for place, size in zip(places, sizes, strict=True)]
        index = jnp.ravel_multi_index(tuple(places), tuple(sizes), mode="clip")
        log_volume = sum(jnp.log(jnp.diff(edge))[place] for edge, place in zip(self.edges, places, strict=True))
        return jnp.where(inside, self.log_masses[index] - log_volume, -jnp.inf)

    def sample(self, count, *, key):
        cell_key, place_key = jr.split(key)
        # Inversion of the cumulative masses: one uniform number per draw, where a categorical would take one per cell.
        cumulative = jnp.cumsum(jnp.exp(self.log_masses))
        levels = jr.uniform(cell_key, (count,), self.log_masses.dtype) * cumulative[-1]
        index = jnp.clip(jnp.searchsorted(cumulative, levels, side="right"), 0, cumulative.size - 1)
        places = jnp.unravel_index(index, tuple(edge.size - 1 for edge in self.edges))
        low = jnp.stack([edge[place] for edge, place in zip(self.edges, places, strict=True)], 1)
        width = jnp.stack([jnp.diff(edge)[place] for edge, place in zip(self.edges, places, strict=True)], 1)
        return low + width * jr.uniform(place_key, low.shape, low.dtype)

    def marginal(self, dims):
        raise TypeError("marginals of cells are not needed: they stand for a fitted density.")

    def bounds(self, spread):
        return jnp.stack([edge[0] for edge in self.edges]), jnp.stack([edge[-1] for edge in self.edges])


class TiltedCells(ConditionalMeasure):
    """The tilted density under a condition, on the cells of a grid of the target."""

    tilt: Tilt
    log_weights: Float[Array, " j"]
    node_features: Float[Array, "j b"]
    edges: tuple[Float[Array, " e"], ...]

    @classmethod
    def on_grid(cls, tilt: Tilt, data: np.ndarray, *, fineness: float) -> "TiltedCells":
        """Return the density on the grid of these targets."""
        edges = [jnp.asarray(edge) for edge in grid_edges(tilt.base, data, fineness=fineness)]
        middles = [0.5 * (edge[1:] + edge[:-1]) for edge in edges]
        points = jnp.stack(jnp.meshgrid(*middles, indexing="ij"), -1).reshape(-1, len(edges))
        volumes = jnp.stack(jnp.meshgrid(*[jnp.diff(edge) for edge in edges], indexing="ij"), -1).reshape(-1, len(edges))
        log_weights = tilt.base.log_densities(points) + np.log(volumes).sum(1)
        return cls(tilt, jnp.asarray(log_weights), jnp.asarray(tilt.space.target.matrix(points)), tuple(edges))

    def given(self, condition):
        coefficients = self.tilt.space.coefficients(self.tilt.weights, condition[None])[0]
        return Cells(jax.nn.log_softmax(self.log_weights + self.node_features @ coefficients), self.edges)


class MixtureNetwork(ConditionalMeasure):
    """``sum_k weight_k(x) N(mean_k(x), diag(scale_k(x))^2)`` with weights, means and scales by a network of the condition."""

    network: Network
    components: int = eqx.field(static=True)
    dim: int = eqx.field(static=True)

    @classmethod
    def draw(
        cls, condition_dim: int, targets: np.ndarray, *, components: int, width: int, depth: int, key: Key[Array, ""]
    ) -> "MixtureNetwork":
        """Return a network whose components start at targets spread over all, with scales to match."""
        dim = targets.shape[1]
        network = Network.draw(condition_dim, components * (1 + 2 * dim), width=width, depth=depth, silent=True, key=key)
        levels = np.quantile(targets, (np.arange(components) + 0.5) / components, axis=0)
        if dim > 1:
            levels = targets[np.random.default_rng(0).choice(len(targets), components)]
        start = np.concatenate([np.zeros(components), levels.ravel(), np.full(components * dim, -np.log(components) / dim)])
        bias = lambda measure: measure.network.layers[-1].bias
        return eqx.tree_at(bias, cls(network, components, dim), jnp.asarray(start, jnp.float32))

    def given(self, condition):
        k, d = self.components, self.dim
        logits, means, log_scales = jnp.split(self.network(condition[None], jnp.zeros((1, 0)))[0], [k, k + k * d])
        scales = jnp.exp(jnp.clip(log_scales, *LOG_SCALES)).reshape(k, d)
        diagonal = lambda values: values[:, :, None] * jnp.eye(d)
        return Mixture(jax.nn.log_softmax(logits), means.reshape(k, d), diagonal(scales), diagonal(1.0 / scales))
