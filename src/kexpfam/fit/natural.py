r"""f's step in the saddle point: a damped natural gradient on draws of the sampler.

The gradient of the saddle function in f is ``E_data[features] - E_q[features] - eta f``.

*Metric.* The gradient is solved against the mean of two second moments around the sampler's mean, of the
sampler's features and of the data's, plus ``eta + damping``. Where the sampler has no draws its own
covariance is zero, and the data's second moment bounds the step. A large damping restricts f to its leading,
smooth directions; as it falls, finer directions follow.

*Lag.* The sampler follows f with a delay: what f has already changed is missing in the sampler's moments, so
that f would overshoot. With ``nu`` as the log density ratio of the sampler, the lag is ``f - nu``. Draws are
weighted by ``exp(share * lag)``: share 0 is the plain gradient, share 1 the gradient at the density of f. At
the saddle point the lag is constant and the weights are equal.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, ScalarLike

from kexpfam.data.sample import RandomKey, Sample
from kexpfam.model.measures import logsumexp
from kexpfam.model.spaces import AbstractFunctionSpace, FeatureSpace
from kexpfam.settings import SettingsRecord, at_least


class FStep(SettingsRecord):
    """Sizes of a step of f in the saddle point; all are static."""

    rows: int = at_least(1, 1024, static=True)  # rows of data, and draws of the sampler, at most
    groups: int = at_least(1, 128, static=True)  # groups of rows by condition, at most
    metric_draws: int = at_least(1, 512, static=True)  # draws that the metric is measured on
    metric_every: int = at_least(1, 5, static=True)  # steps between two measurements of the metric
    metric_memory: float = at_least(1, 4.0, static=True)  # measurements in its running mean
    most_log_weight: float = at_least(0, 3.0, static=True)  # of a draw, relative to the mean logarithm


class Groups(NamedTuple):
    """Rows grouped by condition: g groups with n rows of data and e draws of the sampler each.

    Without conditions there is one group of all rows; with conditions each row is a group.
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


def group_rows(sample: Sample, settings: FStep | None = None, *, key: RandomKey) -> Groups:
    """Return the rows of the sample in groups, or a random part of them, drawn by their weights."""
    settings, count = settings or FStep(), len(sample)
    most = settings.groups if sample.conditional else settings.rows
    if sample.weight is not None:
        chosen = sample.drawn(min(count, most), key=key)
    else:
        chosen = jnp.arange(count) if count <= most else jr.choice(key, count, (most,), replace=False)
    rows = sample.rows(chosen)
    target, condition = jnp.asarray(rows.target), jnp.asarray(rows.condition)
    if not sample.conditional:
        return Groups(target[None], condition[:1], settings.rows)
    return Groups(target[:, None], condition, settings.rows // min(count, most))


class Lag(NamedTuple):
    """Normalised weights of the sampler's draws, ``KL(q || p_f)`` by nu, and the effective share."""

    weights: Float[Array, " ge"]
    gap: Float[Array, ""]
    effective_share: Float[Array, ""]


def sampler_lag(
    lag: Float[Array, " ge"], draws: int, share: ScalarLike, *, most_log_weight: float = FStep.most_log_weight
) -> Lag:
    r"""Return the weights and the size of a lag ``f - nu`` at the sampler's draws, ``draws`` per group.

    The gap is the mean over groups of :math:`\log E_q e^{f - \nu} - E_q[f - \nu] \ge 0`. It is exact where nu
    is. The factor ``1 - 1 / draws`` by which few draws make it too small is corrected.
    """
    by_group = lag.reshape(-1, draws)
    centred = by_group - by_group.mean(1, keepdims=True)
    exponents = jnp.minimum(jnp.asarray(share) * centred, most_log_weight)
    weights = jax.nn.softmax(exponents, axis=1) / by_group.shape[0]
    gap = jnp.mean(logsumexp(centred, axis=1) - jnp.log(draws)) * draws / (draws - 1)
    effective = jnp.exp(2 * logsumexp(centred, axis=1) - logsumexp(2 * centred, axis=1)) / draws
    return Lag(weights.ravel(), gap, jnp.mean(effective))


class Metric(eqx.Module):
    """The running mean of the metric without its diagonal, its number of measurements, and the factor."""

    moment: Float[Array, "r r"]
    count: Float[Array, ""]
    factor: Float[Array, "r r"]

    def solved(self, gradient: Float[Array, " r"]) -> tuple[Float[Array, " r"], Float[Array, ""]]:
        """Return the natural direction of a gradient, and its length in the metric."""
        direction = jax.scipy.linalg.cho_solve((self.factor, True), gradient)
        return direction, jnp.sqrt(jnp.maximum(gradient @ direction, 0.0))

    @classmethod
    def start(cls, size: int) -> "Metric":
        """Return the metric before the first measurement."""
        return cls(jnp.zeros((size, size)), jnp.zeros(()), jnp.eye(size))

    def refreshed(
        self,
        space: FeatureSpace,
        groups: Groups,
        moved: Float[Array, "ge d"],
        weights: Float[Array, " ge"],
        diagonal: Any,
        settings: FStep | None = None,
    ) -> "Metric":
        """Return the metric after one more measurement, factored with ``diagonal`` added to its diagonal."""
        settings = settings or FStep()
        moment = _second_moment(space, groups, moved, weights, settings.metric_draws)
        moment = moment.astype(self.moment.dtype)
        count = self.count + 1.0
        mean = self.moment + (moment - self.moment) / jnp.minimum(count, settings.metric_memory)
        full = mean + (diagonal * jnp.eye(len(mean))).astype(mean.dtype)
        return Metric(mean, count, jax.scipy.linalg.cholesky(full, lower=True))


def _second_moment(
    space: FeatureSpace, groups: Groups, moved: Float[Array, "ge d"], weights: Float[Array, " ge"], most: int
) -> Float[Array, "r r"]:
    """Return the mean of the second moments of data and draws around the weighted mean of the draws."""
    count, rows, dim = groups.targets.shape
    kept, seen = max(1, most // count), min(rows, most)

    def features(points: Float[Array, "gn d"], size: int) -> Float[Array, "g m b"]:
        first = points.reshape(count, -1, dim)[:, :size]
        return space.target.features(first.reshape(-1, dim)).reshape(count, size, -1)

    psi, data = features(moved, kept), features(groups.rows, seen)
    shares = weights.reshape(count, groups.draws)[:, :kept]
    shares = shares / shares.sum(1, keepdims=True)
    middle = jnp.sum(shares[:, :, None] * psi, axis=1, keepdims=True)
    phi = space.condition.features(groups.condition)[:, None, :, None]
    spread = lambda around: (phi * around[:, :, None, :]).reshape(count * around.shape[1], -1)
    scale = jnp.sqrt(shares / count * kept / (kept - 1 if kept > 1 else 1))[:, :, None]
    of_draws = spread(scale * (psi - middle))
    of_data = spread((data - middle) / jnp.sqrt(count * seen))
    return 0.5 * (of_draws.T @ of_draws + of_data.T @ of_data)


def f_gradient(
    space: AbstractFunctionSpace,
    rkhs_penalty: ScalarLike,
    f_weights: Float[Array, " r"],
    groups: Groups,
    moved: Float[Array, "ge d"],
    weights: Float[Array, " ge"],
) -> Float[Array, " r"]:
    """Return the gradient in f, ``E_data[features] - sum_b weights_b features(moved_b) - eta f``."""

    def value(f: Float[Array, " r"]) -> Float[Array, ""]:
        data_fit = jnp.mean(space.evaluate(f, groups.rows, groups.row_conditions))
        model_fit = weights @ space.evaluate(f, moved, groups.draw_conditions)
        return data_fit - model_fit - 0.5 * jnp.asarray(rkhs_penalty) * space.squared_norm(f)

    return jax.grad(value)(f_weights)
