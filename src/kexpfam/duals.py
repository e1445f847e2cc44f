"""Dual distributions with a density: what the sampler q of the singly dual saddle point may be.

A dual is trained by the pathwise gradient through its weighted draws; ``measure()`` is what it has become: a measure that draws
and scores like any other. A Gaussian, a mixture and a kernel density estimate are one class, which differ in how
many components there are and in what moves. A flow bends a normal, and dynamics carry a mixture along f itself.
"""

import abc
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.stats
from jaxtyping import Array, Float, Key

from kexpfam.measures import LOG_TWO_PI, AbstractMeasure, Gaussian, Mixture
from kexpfam.potentials import Tilt, spread_rows

COMPONENTS = 32
# Fewer points per component than this, and the start of a mixture is noise.
POINTS_PER_COMPONENT = 5
PARTICLES = 256
# Bandwidths of a kernel density estimate that are tried, in standard deviations of the data; points that judge them.
BANDWIDTHS = np.geomspace(0.02, 1.0, 24)
JUDGES = 1000
FLOW_LAYERS, FLOW_WIDTH = 4, 32
# Knots of the splines, and the half-width of the interval (in standard deviations) that they bend.
KNOTS, SPLINE_INTERVAL = 8, 4.0
LEAPFROGS, FIRST_STEP = 5, 0.05
# Momenta over which the marginal density of dynamics is averaged.
MOMENTA = 64


class Draws(NamedTuple):
    """Weighted draws: ``sum_i shares_i h(points_i)`` is an unbiased estimate of ``E_q[h]``, with its gradient.

    ``log_density`` is log q at each draw; in an augmented space, that of the joint less that of the standard normal momentum.
    """

    points: Float[Array, "b d"]
    shares: Float[Array, " b"]
    log_density: Float[Array, " b"]


class AbstractDual(eqx.Module):
    """A trainable distribution with pathwise draws and a density."""

    @abc.abstractmethod
    def draws(self, count: int, *, key: Key[Array, ""]) -> Draws:
        """Return about ``count`` weighted draws, differentiable in the parameters."""

    @abc.abstractmethod
    def measure(self) -> AbstractMeasure:
        """Return the distribution as a measure."""

    def following(self, tilt: Tilt) -> "AbstractDual":
        """Return the dual for the current f: itself, unless its draws are made with f."""
        return self


class MixtureDual(AbstractDual):
    """``sum_k softmax(logits)_k N(means_k, L_k L_k^T)``; with ``only_weights`` the components stay where they are.

    ``factors`` hold the lower triangles of the L_k, with the logarithms of their diagonals.
    """

    logits: Float[Array, " k"]
    means: Float[Array, "k d"]
    factors: Float[Array, "k d d"]
    only_weights: bool = eqx.field(static=True)

    @classmethod
    def of(cls, mixture: Mixture, *, only_weights: bool = False) -> Self:
        """Return the dual that starts as this mixture."""
        diagonals = jnp.log(jnp.diagonal(mixture.choleskys, axis1=1, axis2=2))
        factors = jnp.tril(mixture.choleskys, -1) + diagonals[:, :, None] * jnp.eye(mixture.means.shape[1])
        return cls(mixture.log_weights, mixture.means, factors, only_weights)

    def measure(self) -> Mixture:
        means, factors = jax.lax.stop_gradient((self.means, self.factors)) if self.only_weights else (self.means, self.factors)
        scales = jnp.exp(jnp.diagonal(factors, axis1=1, axis2=2))
        choleskys = jnp.tril(factors, -1) + scales[:, :, None] * jnp.eye(means.shape[1])
        return Mixture.of(jax.nn.log_softmax(self.logits), means, choleskys)

    def draws(self, count, *, key):
        # As many draws of every component, weighted: then the choice of a component needs no gradient.
        mixture = self.measure()
        components, dim = mixture.means.shape
        each = max(count // components, 1)
        noise = jr.normal(key, (components, each, dim), mixture.means.dtype)
        points = mixture.means[:, None] + jnp.einsum("kij,knj->kni", mixture.choleskys, noise)
        points = points.reshape(components * each, dim)
        return Draws(points, jnp.repeat(jnp.exp(mixture.log_weights) / each, each), _log_density_at(mixture, points))


def _log_density_at(measure: AbstractMeasure, points):
    """Return log q with a gradient through the points alone: what it leaves out has mean zero, and noise."""
    return jax.vmap(jax.lax.stop_gradient(measure).log_density)(points)


class FlowMeasure(AbstractMeasure):
    """A flow of flowjax as a measure; it cannot be stored."""

    flow: Any
    dim: int = eqx.field(static=True)

    def log_density(self, x):
        return self.flow.log_prob(x)

    def sample(self, count, *, key):
        return self.flow.sample(key, (count,))

    def marginal(self, dims):
        raise TypeError("a flow does not know its marginals.")

    def bounds(self, spread):
        return jnp.full(self.dim, -jnp.inf), jnp.full(self.dim, jnp.inf)


class FlowDual(AbstractDual):
    """A normal bent by rational-quadratic splines, each coordinate's by a network of those before it."""

    law: FlowMeasure

    @classmethod
    def draw(cls, dim: int, *, key: Key[Array, ""]) -> Self:
        """Return a flow that is close to the standard normal."""
        try:
            from flowjax.bijections import RationalQuadraticSpline
            from flowjax.distributions import Normal
            from flowjax.flows import masked_autoregressive_flow
        except ImportError:
            raise ImportError('family="flow" needs flowjax: pip install "kexpfam[flows]".') from None
        # invert=False: drawing is one pass, which is what training does; the density of other points costs one per coordinate.
        flow = masked_autoregressive_flow(
            key,
            base_dist=Normal(jnp.zeros(dim)),
            transformer=RationalQuadraticSpline(knots=KNOTS, interval=SPLINE_INTERVAL),
            flow_layers=FLOW_LAYERS,
            nn_width=FLOW_WIDTH,
            invert=False,
        )
        return cls(FlowMeasure(flow, dim))

    def measure(self) -> FlowMeasure:
        return self.law

    def draws(self, count, *, key):
        points, log_density = self.law.flow.sample_and_log_prob(key, (count,))
        return Draws(points, jnp.full(count, 1.0 / count), log_density)


class Leapfrog(eqx.Module):
    r"""The dynamics of ``log p0 + f`` in position and momentum, by steps that keep volume and can be run backwards.

    One step is :math:`v \mathrel{+}= \tfrac{\epsilon}{2} \nabla, \; x \mathrel{+}= \epsilon v, \; v \mathrel{+}=
    \tfrac{\epsilon}{2} \nabla` with the gradient of :math:`\log p_0 + f` at the current x.
    """

    tilt: Tilt
    log_sizes: Float[Array, "l d"]

    def __call__(self, x: Float[Array, "b d"], v: Float[Array, "b d"]) -> tuple[Float[Array, "b d"], Float[Array, "b d"]]:
        """Return position and momentum at the end."""
        return self._carry(x, v, jnp.exp(self.log_sizes))

    def back(self, x: Float[Array, "b d"], v: Float[Array, "b d"]) -> tuple[Float[Array, "b d"], Float[Array, "b d"]]:
        """Return where position and momentum came from: the same steps, last one first, with the momentum reversed."""
        x, v = self._carry(x, -v, jnp.exp(self.log_sizes[::-1]))
        return x, -v

    def _carry(self, x, v, sizes):
        def step(state, size):
            x, v = state
            v = v + 0.5 * size * self._force(x)
            x = x + size * v
            return (x, v + 0.5 * size * self._force(x)), None

        return jax.lax.scan(step, (x, v), sizes)[0]

    def _force(self, x):
        def log_unnormalised(x):
            inside = self.tilt.base.fold(x)
            f = self.tilt.f(inside, jnp.zeros((x.shape[0], 0)))
            return jnp.sum(f + jax.vmap(self.tilt.base.log_density)(inside))

        return jax.grad(log_unnormalised)(x)


class DynamicsMeasure(AbstractMeasure):
    r"""Where leapfrog steps carry draws of a start with normal momenta.

    The joint density of position and momentum at the end is that of the start. That of the position alone is

    .. math:: q(x) = E_{v \sim N(0, I)} [ q(x, v) / N(v) ],

    averaged here over fixed momenta: exact where q(x, v) = q(x) N(v), which the joint KL drives to, and unbiased elsewhere.
    """

    start: Mixture
    leapfrog: Leapfrog
    momenta: Float[Array, "m d"]

    def log_density(self, x):
        return jax.nn.logsumexp(self._log_ratios(x)) - jnp.log(self.momenta.shape[0])

    def _log_ratios(self, x):
        x0, v0 = self.leapfrog.back(jnp.broadcast_to(x, self.momenta.shape), self.momenta.astype(x.dtype))
        return jax.vmap(self.start.log_density)(x0) + _log_normal(v0) - _log_normal(self.momenta)

    def sample(self, count, *, key):
        start_key, momentum_key = jr.split(key)
        x = self.start.sample(count, key=start_key)
        return self.leapfrog(x, jr.normal(momentum_key, x.shape, x.dtype))[0]

    def marginal(self, dims):
        raise TypeError("dynamics do not know their marginals.")

    def bounds(self, spread):
        return self.start.bounds(spread)


class DynamicsDual(AbstractDual):
    r"""Draws of a start carried by learned leapfrog steps of f itself (adversarial dynamics embedding).

    Its density is tractable on positions and momenta: :math:`q(x, v) = q_0(x_0) N(v_0)`, since the steps keep volume. The KL
    term is the joint one, :math:`KL(q(x, v) \,\|\, p_0(x) N(v)) \ge KL(q(x) \,\|\, p_0(x))`.
    """

    start: MixtureDual
    leapfrog: Leapfrog

    def following(self, tilt):
        return eqx.tree_at(lambda dual: dual.leapfrog.tilt, self, tilt)

    def draws(self, count, *, key):
        start_key, momentum_key = jr.split(key)
        start = self.start.draws(count, key=start_key)
        v0 = jr.normal(momentum_key, start.points.shape, start.points.dtype)
        x, v = eqx.tree_at(lambda steps: steps.tilt, self.leapfrog, replace_fn=jax.lax.stop_gradient)(start.points, v0)
        return Draws(x, start.shares, start.log_density + _log_normal(v0) - _log_normal(v))

    def measure(self) -> DynamicsMeasure:
        dim = self.start.means.shape[1]
        uniform = scipy.stats.qmc.Sobol(dim, seed=0).random(MOMENTA)
        return DynamicsMeasure(self.start.measure(), self.leapfrog, jnp.asarray(scipy.stats.norm.ppf(uniform)))


def _log_normal(v):
    return -0.5 * (jnp.sum(v**2, -1) + v.shape[-1] * LOG_TWO_PI)


FAMILIES = ("particles", "gaussian", "mixture", "flow", "dynamics")


def start_dual(family: str, data: np.ndarray, tilt: Tilt, *, key: Key[Array, ""]) -> AbstractDual:
    """Return the dual of that family that starts at the data (in model units); ``tilt`` is the first f of dynamics."""
    seed = int(jr.randint(key, (), 0, 2**31 - 1))
    if family == "gaussian":
        normal = Gaussian.fitted(data)
        return MixtureDual.of(Mixture.of(jnp.zeros(1), normal.mean[None], normal.cholesky[None]))
    if family == "particles":
        return MixtureDual.of(kernel_density(data, most=PARTICLES, seed=seed), only_weights=True)
    if family == "flow":
        return FlowDual.draw(data.shape[1], key=key)
    components = max(1, min(COMPONENTS, len(data) // POINTS_PER_COMPONENT))
    mixture = MixtureDual.of(Mixture.fitted(data, components=components, diagonal=False, seed=seed))
    if family == "mixture":
        return mixture
    return DynamicsDual(mixture, Leapfrog(tilt, jnp.full((LEAPFROGS, data.shape[1]), jnp.log(FIRST_STEP))))


def kernel_density(data: np.ndarray, *, most: int, seed: int) -> Mixture:
    """Return equal normals around at most ``most`` of the points, as wide as the other points like best."""
    judges = data[np.random.default_rng(seed).permutation(len(data))[:JUDGES]]
    bandwidth = BANDWIDTHS[int(np.argmax(np.asarray(_left_out_scores(jnp.asarray(judges), jnp.asarray(BANDWIDTHS)))))]
    centres = data[spread_rows(data, most, seed=seed)]
    factors = np.broadcast_to(bandwidth * np.eye(data.shape[1]), (len(centres), data.shape[1], data.shape[1]))
    return Mixture.of(np.full(len(centres), -np.log(len(centres))), centres, factors)


@eqx.filter_jit
def _left_out_scores(points, bandwidths):
    """Return the leave-one-out log likelihood of the kernel density estimate at each bandwidth, up to a constant."""
    count, dim = points.shape
    squared = jnp.sum(jnp.square(points[:, None] - points), 2) + jnp.diag(jnp.full(count, jnp.inf))
    score = lambda h: jnp.mean(jax.nn.logsumexp(-0.5 * squared / h**2, axis=1)) - dim * jnp.log(h)
    return jax.lax.map(score, bandwidths)
