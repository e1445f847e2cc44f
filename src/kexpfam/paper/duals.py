"""Dual distributions: trainable distributions with a density, for the q of the singly dual saddle point.

A dual is a measure with weighted draws that are differentiable in its parameters. A Gaussian, a mixture and a
kernel density estimate are one class; they differ in the number of components and in the parameters that
move. A flow transforms a normal, and dynamics move a mixture along the gradient of f.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.special
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.fit.mixture import MixtureShape, fit_mixture
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.density import Tilt
from kexpfam.model.measures import LOG_TWO_PI, AbstractMeasure, Gaussian, Mixture, logsumexp
from kexpfam.model.spaces import spread_rows

Family = Callable[[np.ndarray, Tilt, RandomKey], "AbstractDual"]
Points = Float[Array, "b d"]


class PathwiseDraws(NamedTuple):
    """Weighted draws: ``sum_i shares_i h(points_i)`` is an unbiased estimate of ``E_q[h]`` and its gradient.

    ``log_density`` is log q at each draw; in an augmented space it is the log density of position and
    momentum less that of the standard normal momentum.
    """

    points: Float[Array, "b d"]
    shares: Float[Array, " b"]
    log_density: Float[Array, " b"]


class AbstractDual(AbstractMeasure):
    """A trainable distribution."""

    @abc.abstractmethod
    def pathwise_draws(self, count: int, *, key: RandomKey) -> PathwiseDraws:
        """Return about ``count`` weighted draws, differentiable in the parameters."""

    def following(self, tilt: Tilt) -> "AbstractDual":
        """Return the dual for the current f; only duals whose draws depend on f differ."""
        return self


def stop_gradients(tree: Any) -> Any:
    """Return the tree with gradients of its arrays stopped."""
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_array(leaf) else leaf, tree)


class MixtureDual(AbstractDual):
    """``sum_k softmax(logits)_k N(means_k, L_k L_k^T)``; with ``only_weights`` the components are fixed.

    ``factors`` are the lower triangles of the L_k, with the logarithms of their diagonals.
    """

    logits: Float[Array, " k"]
    means: Float[Array, "k d"]
    factors: Float[Array, "k d d"]
    only_weights: bool = eqx.field(static=True)

    @classmethod
    def of(cls, mixture: Mixture, *, only_weights: bool = False) -> "MixtureDual":
        """Return the dual with the parameters of a mixture."""
        choleskys = jnp.asarray(mixture.choleskys)
        diagonals = jnp.log(jnp.diagonal(choleskys, axis1=1, axis2=2))
        factors = jnp.tril(choleskys, -1) + diagonals[:, :, None] * jnp.eye(choleskys.shape[1])
        return cls(jnp.asarray(mixture.log_weights), jnp.asarray(mixture.means), factors, only_weights)

    @property
    def mixture(self) -> Mixture:
        """Return the mixture."""
        means, factors = self.means, self.factors
        if self.only_weights:
            means, factors = stop_gradients((means, factors))
        scales = jnp.exp(jnp.diagonal(factors, axis1=1, axis2=2))
        choleskys = jnp.tril(factors, -1) + scales[:, :, None] * jnp.eye(means.shape[1])
        return Mixture.of(jax.nn.log_softmax(self.logits), means, choleskys)

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        return self.mixture.log_density(jnp.asarray(x))

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        return self.mixture.sample(count, key=key)

    def pathwise_draws(self, count: int, *, key: RandomKey) -> PathwiseDraws:
        # Each component has equally many weighted draws, so that no gradient of a random choice is needed.
        mixture = self.mixture
        components, dim = mixture.means.shape
        each = max(count // components, 1)
        noise = jr.normal(key, (components, each, dim), mixture.means.dtype)
        points = mixture.means[:, None] + jnp.einsum("kij,knj->kni", mixture.choleskys, noise)
        points = points.reshape(components * each, dim)
        shares = jnp.repeat(jnp.exp(mixture.log_weights) / each, each)
        # The gradient of log q passes through the points only: the rest has mean zero and adds noise.
        return PathwiseDraws(points, shares, stop_gradients(mixture).log_density(points))

    @property
    def _numbers_per_row(self) -> int:
        return 3 * self.means.size


def spline_flow(
    dim: int, layers: int, width: int, knots: int, interval: float, *, invert: bool, key: RandomKey
) -> Any:
    """Return an untrained flow of flowjax: masked autoregressive rational-quadratic splines of a normal.

    With ``invert`` the density costs one pass and a draw one per coordinate, else the other way round.
    """
    try:
        from flowjax.bijections import RationalQuadraticSpline
        from flowjax.distributions import Normal
        from flowjax.flows import masked_autoregressive_flow
    except ImportError:
        raise ImportError('a flow needs the package flowjax: pip install "kexpfam[flows]".') from None
    base, spline = Normal(jnp.zeros(dim)), RationalQuadraticSpline(knots=knots, interval=interval)
    sizes: Any = {"flow_layers": layers, "nn_width": width}
    return masked_autoregressive_flow(key, base_dist=base, transformer=spline, invert=invert, **sizes)


class FlowDual(AbstractDual):
    """An autoregressive flow of rational-quadratic splines from a normal; it cannot be stored."""

    flow: Any

    @classmethod
    def draw(cls, dim: int, *, layers: int = 4, width: int = 32, key: RandomKey) -> "FlowDual":
        """Return a flow near the standard normal, with splines on four standard deviations."""
        # Draws, which training needs, cost one pass; the density of other points costs one per coordinate.
        return cls(spline_flow(dim, layers, width, knots=8, interval=4.0, invert=False, key=key))

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        return self.flow.log_prob(x)

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        return self.flow.sample(key, (count,))

    def pathwise_draws(self, count: int, *, key: RandomKey) -> PathwiseDraws:
        points, log_density = self.flow.sample_and_log_prob(key, (count,))
        return PathwiseDraws(points, jnp.full(count, 1.0 / count), log_density)


class Leapfrog(eqx.Module):
    r"""Leapfrog steps of ``log p0 + f`` in position and momentum; they preserve volume and are reversible.

    One step is :math:`v \mathrel{+}= \tfrac{\epsilon}{2} \nabla, \; x \mathrel{+}= \epsilon v, \; v
    \mathrel{+}= \tfrac{\epsilon}{2} \nabla` with the gradient of :math:`\log p_0 + f` at the current x.
    """

    tilt: Tilt
    log_sizes: Float[Array, "l d"]

    def __call__(self, x: Points, v: Points) -> tuple[Points, Points]:
        """Return position and momentum at the end."""
        return self._carry(x, v, jnp.exp(self.log_sizes))

    def back(self, x: Points, v: Points) -> tuple[Points, Points]:
        """Return position and momentum at the start, by the reversed steps with reversed momentum."""
        x, v = self._carry(x, -v, jnp.exp(self.log_sizes[::-1]))
        return x, -v

    def _carry(self, x: Points, v: Points, sizes: Float[Array, "l d"]) -> tuple[Points, Points]:
        def step(state: Any, size: Float[Array, " d"]) -> tuple[Any, None]:
            x, v = state
            v = v + 0.5 * size * self._force(x)
            x = x + size * v
            return (x, v + 0.5 * size * self._force(x)), None

        return jax.lax.scan(step, (x, v), sizes)[0]

    def _force(self, x: Points) -> Points:
        def log_unnormalised(x: Points) -> Float[Array, ""]:
            inside = self.tilt.base.fold(x)
            f = self.tilt.f(inside, jnp.zeros((x.shape[0], 0)))
            return jnp.sum(f + self.tilt.base.log_density(inside))

        return jax.grad(log_unnormalised)(x)


class DynamicsDual(AbstractDual):
    r"""Draws with normal momenta, moved by learned leapfrog steps of f (adversarial dynamics embedding).

    The steps preserve volume, so that the density of position and momentum is :math:`q(x, v) = q_0(x_0)
    N(v_0)`. The KL term is the joint one, :math:`KL(q(x, v) \,\|\, p_0(x) N(v)) \ge KL(q(x) \,\|\, p_0(x))`.
    The density of the position is

    .. math:: q(x) = E_{v \sim N(0, I)} [ q(x, v) / N(v) ],

    averaged over ``momenta`` fixed momenta: exact if q(x, v) = q(x) N(v), as at the optimum of the joint KL,
    and unbiased otherwise.
    """

    start: MixtureDual
    leapfrog: Leapfrog
    momenta: int = eqx.field(default=64, static=True)

    def following(self, tilt: Tilt) -> "DynamicsDual":
        return eqx.tree_at(lambda dual: dual.leapfrog.tilt, self, tilt)

    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        x = jnp.asarray(x)
        momenta = jnp.asarray(fixed_momenta(x.shape[-1], self.momenta), x.dtype)

        def at(point: Float[Array, " d"]) -> Float[Array, ""]:
            x0, v0 = self.leapfrog.back(jnp.broadcast_to(point, momenta.shape), momenta)
            log_ratios = self.start.log_density(x0) + _log_normal(v0) - _log_normal(momenta)
            return logsumexp(log_ratios) - jnp.log(len(momenta))

        values = jax.lax.map(at, x.reshape(-1, x.shape[-1]), batch_size=256)
        return values.reshape(x.shape[:-1])

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        start_key, momentum_key = jr.split(key)
        x = self.start.sample(count, key=start_key)
        return self.leapfrog(x, jr.normal(momentum_key, x.shape, x.dtype))[0]

    def pathwise_draws(self, count: int, *, key: RandomKey) -> PathwiseDraws:
        start_key, momentum_key = jr.split(key)
        start = self.start.pathwise_draws(count, key=start_key)
        v0 = jr.normal(momentum_key, start.points.shape, start.points.dtype)
        leapfrog = eqx.tree_at(lambda steps: steps.tilt, self.leapfrog, replace_fn=stop_gradients)
        x, v = leapfrog(start.points, v0)
        return PathwiseDraws(x, start.shares, start.log_density + _log_normal(v0) - _log_normal(v))


@functools.cache
def fixed_momenta(dim: int, count: int) -> np.ndarray:
    """Return quasi-random draws of the standard normal from a fixed seed."""
    from scipy.stats import qmc  # slow to import

    return scipy.special.ndtri(qmc.Sobol(dim, seed=0).random(count))


def _log_normal(v: Float[Array, "n d"]) -> Float[Array, " n"]:
    return -0.5 * (jnp.sum(v**2, -1) + v.shape[-1] * LOG_TWO_PI)


def kernel_density(
    data: np.ndarray,
    *,
    most: int = 256,
    bandwidths: tuple[float, float, int] = (0.02, 1.0, 24),
    judges: int = 1000,
    seed: int,
) -> Mixture:
    """Return equal normals around at most ``most`` points; the bandwidth is by leave-one-out likelihood.

    ``bandwidths`` are the smallest, the largest and the number of the candidates, in standard deviations of
    the data; ``judges`` is the number of points that they are compared on.
    """
    candidates = np.geomspace(*bandwidths)
    judged = data[np.random.default_rng(seed).permutation(len(data))[:judges]]
    bandwidth = candidates[int(np.argmax(np.asarray(_left_out_scores(judged, candidates))))]
    centres = data[spread_rows(data, most, seed=seed)]
    factors = np.broadcast_to(bandwidth * np.eye(data.shape[1]), (len(centres), data.shape[1], data.shape[1]))
    return Mixture.of(np.full(len(centres), -np.log(len(centres))), centres, factors)


@eqx.filter_jit
def _left_out_scores(points: Float[AnyArray, "n d"], bandwidths: Float[AnyArray, " h"]) -> Float[Array, " h"]:
    """Return the leave-one-out log likelihood of a kernel density estimate by bandwidth, up to a constant."""
    count, dim = points.shape
    squared = jnp.sum(jnp.square(points[:, None] - points), 2) + jnp.diag(jnp.full(count, jnp.inf))
    score = lambda h: jnp.mean(logsumexp(-0.5 * squared / h**2)) - dim * jnp.log(h)
    return jax.lax.map(score, bandwidths)


def _gaussian(data: np.ndarray, tilt: Tilt, key: RandomKey) -> MixtureDual:
    return MixtureDual.of(Gaussian.fitted(data).as_mixture())


def _mixture(
    data: np.ndarray, tilt: Tilt, key: RandomKey, *, most: int = 32, points_per_component: int = 5
) -> MixtureDual:
    components = max(1, min(most, len(data) // points_per_component))
    return MixtureDual.of(fit_mixture(data, MixtureShape(components, diagonal=False), seed=seed_from(key)))


def _dynamics(
    data: np.ndarray, tilt: Tilt, key: RandomKey, *, steps: int = 5, first_size: float = 0.05
) -> DynamicsDual:
    log_sizes = jnp.full((steps, data.shape[1]), jnp.log(first_size))
    return DynamicsDual(_mixture(data, tilt, key), Leapfrog(tilt, log_sizes))


# The registry of families: the initial dual from the data (in model units), the first f, and a key.
FAMILIES: dict[str, Family] = {
    "particles": lambda data, tilt, key: MixtureDual.of(
        kernel_density(data, seed=seed_from(key)), only_weights=True
    ),
    "gaussian": _gaussian,
    "mixture": _mixture,
    "flow": lambda data, tilt, key: FlowDual.draw(data.shape[1], key=key),
    "dynamics": _dynamics,
}
