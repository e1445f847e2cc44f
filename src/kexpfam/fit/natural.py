r"""f's own step in the saddle point: a damped natural gradient on the sampler's draws.

The gradient of the saddle function in f is ``E_data[features] - E_q[features] - eta f``. Two things are made of it here.

*The metric.* A unit of f's weights means nothing; a unit of log density does. The gradient is solved against the mean of
two second moments, of the sampler's features and of the data's around the sampler's mean, plus ``eta + damping``. Both are
needed: where the sampler has no draws its own covariance is zero, and a step there would have no bound. A large damping lets f
move along its leading, coarse directions alone; as it falls, finer ones are let in.

*The lag.* The sampler follows f with a delay, and what f has already done is not yet in the sampler's moments: f would do it
again, and overshoot. With ``nu`` as the log density of the sampler, ``lag = f - nu`` is what it still has to do. Its draws
are weighted by ``exp(share * lag)``: 0 is the plain gradient, 1 the gradient at the density of f. At the saddle point the lag
is constant, and the weights change nothing.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key, ScalarLike

from kexpfam.data.sample import Sample
from kexpfam.model.measures import logsumexp
from kexpfam.model.spaces import AbstractFunctionSpace, FeatureSpace

__all__ = ["Groups", "Lag", "Metric", "f_gradient", "group_rows", "lagged"]

# Rows and draws that a step of f sees, the groups they are in under conditions, and how many of them measure its metric.
MOST_ROWS, MOST_GROUPS, METRIC_DRAWS = 1024, 128, 512
# The running mean of the metric is over about this many measurements.
MEMORY = 4.0
# No draw weighs more than exp of this, in terms of the mean logarithm.
MOST_LOG_WEIGHT = 3.0


class Groups(NamedTuple):
    """Data and conditions by condition: g groups, in each of them n rows of data and room for e draws of the sampler.

    Without a condition there is one group of all rows; with one, each row is a group of its own.
    """

    targets: Float[Array, "g n d"]
    condition: Float[Array, "g p"]
    draws: int

    @property
    def draw_conditions(self) -> Float[Array, "ge p"]:
        """Return the condition of each draw."""
        return jnp.repeat(self.condition, self.draws, axis=0)

    @property
    def row_conditions(self) -> Float[Array, "gn p"]:
        """Return the condition of each row of data."""
        return jnp.repeat(self.condition, self.targets.shape[1], axis=0)

    @property
    def rows(self) -> Float[Array, "gn d"]:
        """Return the rows of data, group by group."""
        return self.targets.reshape(-1, self.targets.shape[2])


def group_rows(sample: Sample, *, key: Key[Array, ""]) -> Groups:
    """Return all rows of the sample in groups, or so many of them at random, each as often as its weight says."""
    count = len(sample)
    if not sample.conditional:
        rows = sample.rows(_some(sample, MOST_ROWS, key))
        return Groups(jnp.asarray(rows.target)[None], jnp.asarray(rows.condition)[:1], MOST_ROWS)
    rows = sample.rows(_some(sample, MOST_GROUPS, key))
    return Groups(
        jnp.asarray(rows.target)[:, None], jnp.asarray(rows.condition), MOST_ROWS // min(count, MOST_GROUPS)
    )


def _some(sample: Sample, most: int, key: Key[Array, ""]) -> Array:
    if sample.weight is not None:
        return sample.drawn(min(len(sample), most), key=key)
    return (
        jnp.arange(len(sample))
        if len(sample) <= most
        else jr.choice(key, len(sample), (most,), replace=False)
    )


class Lag(NamedTuple):
    """How far the sampler is behind f: weights of its draws that sum to 1, ``KL(q || p_f)`` by nu, and the effective share."""

    weights: Float[Array, " ge"]
    gap: Float[Array, ""]
    effective_share: Float[Array, ""]


def lagged(lag: Float[Array, " ge"], draws: int, share: ScalarLike) -> Lag:
    r"""Return the weights and the size of a lag ``f - nu`` at draws of the sampler, of which ``draws`` are in a group.

    The gap is :math:`\log E_q e^{f - \nu} - E_q[f - \nu]`, the mean over groups: exact where nu is, and never negative. Few
    draws in a group make it too small by ``1 - 1 / draws``, to first order, which is made good.
    """
    by_group = lag.reshape(-1, draws)
    centred = by_group - by_group.mean(1, keepdims=True)
    exponents = jnp.minimum(jnp.asarray(share) * centred, MOST_LOG_WEIGHT)
    weights = jax.nn.softmax(exponents, axis=1) / by_group.shape[0]
    gap = jnp.mean(logsumexp(centred, axis=1) - jnp.log(draws)) * draws / (draws - 1)
    effective = jnp.exp(2 * logsumexp(centred, axis=1) - logsumexp(2 * centred, axis=1)) / draws
    return Lag(weights.ravel(), gap, jnp.mean(effective))


class Metric(eqx.Module):
    """The running mean of the metric without its diagonal, how often it was measured, and the factor in use."""

    moment: Float[Array, "r r"]
    count: Float[Array, ""]
    factor: Float[Array, "r r"]

    def solved(self, gradient: Float[Array, " r"]) -> tuple[Float[Array, " r"], Float[Array, ""]]:
        """Return the natural direction of a gradient, and its length in the metric."""
        direction = jax.scipy.linalg.cho_solve((self.factor, True), gradient)
        return direction, jnp.sqrt(jnp.maximum(gradient @ direction, 0.0))

    @classmethod
    def start(cls, size: int) -> "Metric":
        """Return a metric that was never measured."""
        return cls(jnp.zeros((size, size)), jnp.zeros(()), jnp.eye(size))

    def refreshed(
        self,
        space: FeatureSpace,
        groups: Groups,
        moved: Float[Array, "ge d"],
        weights: Float[Array, " ge"],
        diagonal: Any,
    ) -> "Metric":
        """Return the metric after one more measurement, factored with this on its diagonal."""
        moment = _second_moment(space, groups, moved, weights).astype(self.moment.dtype)
        count = self.count + 1.0
        mean = self.moment + (moment - self.moment) / jnp.minimum(count, MEMORY)
        full = mean + (diagonal * jnp.eye(len(mean))).astype(mean.dtype)
        return Metric(mean, count, jax.scipy.linalg.cholesky(full, lower=True))


def _second_moment(
    space: FeatureSpace, groups: Groups, moved: Float[Array, "ge d"], weights: Float[Array, " ge"]
) -> Float[Array, "r r"]:
    """Return the mean of the second moments of data and draws around the weighted mean of the draws, by condition."""
    count, draws, rows = groups.condition.shape[0], groups.draws, groups.targets.shape[1]
    kept, seen = max(1, METRIC_DRAWS // count), min(rows, METRIC_DRAWS)
    some = lambda values, each, of: values.reshape(count, of, -1)[:, :each]
    psi = space.target.features(some(moved, kept, draws).reshape(-1, moved.shape[1])).reshape(count, kept, -1)
    shares = weights.reshape(count, draws)[:, :kept]
    shares = shares / shares.sum(1, keepdims=True)
    middle = jnp.sum(shares[:, :, None] * psi, axis=1, keepdims=True)
    data = space.target.features(some(groups.rows, seen, rows).reshape(-1, moved.shape[1])).reshape(
        count, seen, -1
    )
    phi = space.condition.features(groups.condition)[:, None, :, None]
    spread = lambda around: (phi * around[:, :, None, :]).reshape(count * around.shape[1], -1)
    scale = jnp.sqrt(shares / count * kept / (kept - 1 if kept > 1 else 1))[:, :, None]
    of_draws, of_data = spread(scale * (psi - middle)), spread((data - middle) / jnp.sqrt(count * seen))
    return 0.5 * (of_draws.T @ of_draws + of_data.T @ of_data)


def f_gradient(
    space: AbstractFunctionSpace,
    rkhs_penalty: ScalarLike,
    f_weights: Float[Array, " r"],
    groups: Groups,
    moved: Float[Array, "ge d"],
    weights: Float[Array, " ge"],
) -> Float[Array, " r"]:
    """Return ``E_data[features] - sum_b weights_b features(moved_b) - eta f``, the gradient of the saddle function in f."""

    def value(f: Float[Array, " r"]) -> Float[Array, ""]:
        data_fit = jnp.mean(space.evaluate(f, groups.rows, groups.row_conditions))
        model_fit = weights @ space.evaluate(f, moved, groups.draw_conditions)
        return data_fit - model_fit - 0.5 * jnp.asarray(rkhs_penalty) * space.squared_norm(f)

    return jax.grad(value)(f_weights)
