"""The saddle functions of the dual embeddings, written once.

Problem holds what is fixed, Point what moves. The players differ only in the sign they follow: f and nu climb, the
transport falls. Where q has a density there is no nu: the KL term is q's own (``singly_dual_terms``), and with f at its
best the saddle function is a regularised MMD (``regularised_mmd``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key

from kexpfam.duals import Draws
from kexpfam.kernels import AbstractKernel
from kexpfam.measures import AbstractMeasure
from kexpfam.potentials import AbstractFunctionSpace
from kexpfam.sample import Sample
from kexpfam.transports import AbstractTransport, draw_each, log_density_each


class Problem(eqx.Module):
    """What is solved. Every array in here is fixed while a solver runs.

    ``reference`` is the law of the transport's noise. If it is *anchored* it lives in the space of targets and is itself a
    guess of the solution: nu is then measured from ``log(reference / base)``, and expectations under the base are taken by
    importance sampling from the reference. Both are exact rewritings that shrink the variance of the KL term.
    """

    sample: Sample
    base: AbstractMeasure
    space: AbstractFunctionSpace
    reference: AbstractMeasure
    rkhs_penalty: Float[Array, ""]
    inverse_temperature: Float[Array, ""]
    anchored: bool = eqx.field(static=True)


class Point(eqx.Module):
    """What is sought. Every array in here moves.

    ``f_weights`` are f as the problem's space holds it; ``nu`` is called with points and conditions.
    """

    f_weights: Any
    nu: Any
    transport: AbstractTransport


class Batch(NamedTuple):
    """The draws that one evaluation of the saddle function uses; ``base_log_weights`` carry base expectations."""

    data: Sample
    noise: Float[Array, "b k"]
    base: Float[Array, "b d"]
    base_log_weights: Float[Array, " b"]


class SaddleTerms(NamedTuple):
    """Each term as defined; ``value`` is where the signs are. ``kl_dual`` is the KL itself where q has a density."""

    data_fit: Float[Array, ""]
    model_fit: Float[Array, ""]
    kl_dual: Float[Array, ""]
    penalty: Float[Array, ""]

    @property
    def value(self) -> Float[Array, ""]:
        return self.data_fit - self.model_fit + self.kl_dual - self.penalty


def draw_batch(problem: Problem, size: int, *, key: Key[Array, ""]) -> Batch:
    """Draw data rows with replacement, transport noise under their conditions, and weighted base points."""
    rows_key, noise_key, base_key = jr.split(key, 3)
    data = problem.sample.rows(jr.randint(rows_key, (size,), 0, len(problem.sample)))
    noise = draw_each(problem.reference, data.condition, key=noise_key)
    if not problem.anchored:
        return Batch(data, noise, problem.base.sample(size, key=base_key), jnp.zeros(size))
    base = draw_each(problem.reference, data.condition, key=base_key)
    return Batch(data, noise, base, -anchor(problem, base, data.condition))


def anchor(problem: Problem, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, " b"]:
    """Return ``log(reference / base)``: the exact nu of the transport that does not move its noise; 0 if not anchored."""
    if not problem.anchored:
        return jnp.zeros(x.shape[0])
    return log_density_each(problem.reference, x, condition) - jax.vmap(problem.base.log_density)(x)


def evaluate_nu(problem: Problem, nu: Callable, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[Array, " b"]:
    """Return nu: its network, measured from the anchor."""
    return nu(x, condition) + anchor(problem, x, condition)


def carry(problem: Problem, transport: AbstractTransport, noise, condition) -> Float[Array, "b d"]:
    """Return the sampler's points: noise carried by the transport, folded onto the base's support."""
    return problem.base.fold(transport(noise, condition))


def saddle_terms(point: Point, problem: Problem, batch: Batch) -> SaddleTerms:
    r"""Return the terms of the saddle function on one batch.

    With :math:`f \in H`, dual potential :math:`\nu`, transport :math:`g` and noise :math:`\xi`,

    .. math::
        L(f, g, \nu) = \hat E[f(x)] - E_\xi[f(g(\xi))] - \tfrac{\eta}{2} \|f\|_H^2
            + \tfrac{1}{\lambda} \bigl( E_\xi[\nu(g(\xi))] - E_{p_0}[e^{\nu}] + 1 \bigr).

    Max over f, min over g, max over nu. Equation ledger: ``DDE-SADDLE``.

    Parameters
    ----------
    point
        Holds ``f_weights`` (climbs), ``nu`` (climbs) and ``transport`` (falls).
    problem
        Holds :math:`\eta` as ``rkhs_penalty`` and :math:`\lambda` as ``inverse_temperature``.
    batch
        Draws for the three expectations; the value is exact given these.

    Notes
    -----
    The bracket is a lower bound of :math:`KL(g_\# \xi \,\|\, p_0)`, attained at :math:`\nu = \log q / p_0`.
    """
    condition = batch.data.condition
    moved = carry(problem, point.transport, batch.noise, condition)
    f = lambda x: problem.space.evaluate(point.f_weights, x, condition)
    kl_bound = jnp.mean(evaluate_nu(problem, point.nu, moved, condition)) + 1.0
    kl_bound -= jnp.mean(jnp.exp(evaluate_nu(problem, point.nu, batch.base, condition) + batch.base_log_weights))
    return SaddleTerms(
        data_fit=jnp.mean(f(batch.data.target)),
        model_fit=jnp.mean(f(moved)),
        kl_dual=kl_bound / problem.inverse_temperature,
        penalty=0.5 * problem.rkhs_penalty * problem.space.squared_norm(point.f_weights),
    )


def player_gradient(problem: Problem, point: Point, batch: Batch, player: Callable):
    """Return the gradient of the saddle value with respect to one player."""
    value = lambda part: saddle_terms(eqx.tree_at(player, point, part), problem, batch).value
    return eqx.filter_grad(value)(player(point))


def divergence(base: AbstractMeasure, draws: Draws) -> Float[Array, ""]:
    """Return KL(q || p0) of weighted draws with their density; in an augmented space the joint one, which is no smaller."""
    return draws.shares @ (draws.log_density - jax.vmap(base.log_density)(base.fold(draws.points)))


def singly_dual_terms(
    f_weights: Float[Array, " r"], problem: Problem, data_features: Float[Array, " r"], draws: Draws
) -> SaddleTerms:
    r"""Return the terms of the saddle function for a q that knows its density, on weighted draws of q.

    .. math:: \ell(f, q) = \hat E[f(x)] - E_q[f(x)] - \tfrac{\eta}{2} \|f\|_H^2 + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

    Max over f, min over q. ``data_features`` is the mean embedding of the data. Equation ledger: ``DUAL-SADDLE``.
    """
    points = problem.base.fold(draws.points)
    return SaddleTerms(
        data_fit=data_features @ f_weights,
        model_fit=draws.shares @ problem.space.evaluate(f_weights, points, jnp.zeros((len(points), 0))),
        kl_dual=divergence(problem.base, draws) / problem.inverse_temperature,
        penalty=0.5 * problem.rkhs_penalty * jnp.sum(f_weights**2),
    )


class MatchingTerms(NamedTuple):
    """The dual objective with f at its best; ``value`` is what q minimises."""

    mmd: Float[Array, ""]
    kl: Float[Array, ""]

    @property
    def value(self) -> Float[Array, ""]:
        return self.mmd + self.kl


def regularised_mmd(problem: Problem, kernel: AbstractKernel, first: Draws, second: Draws) -> MatchingTerms:
    r"""Return ``max_f l(f, q)``: the KL-regularised squared MMD between data and q, with the kernel in place of f's features.

    .. math:: J(q) = \tfrac{1}{2 \eta} MMD_k^2(\hat p, q) + \tfrac{1}{\lambda} KL(q \,\|\, p_0), \qquad
        f_q = \tfrac{1}{\eta} \bigl( \hat E[k(x, \cdot)] - E_q[k(x, \cdot)] \bigr).

    Min over q, and max over the kernel where it is learned. Two independent sets of draws make the estimate unbiased; the data
    are a fixed measure, their diagonal included. Equation ledger: ``REG-MMD``.
    """
    data = problem.sample.target
    x, z = problem.base.fold(first.points), problem.base.fold(second.points)
    within_data = jnp.mean(kernel.gram(data, data))
    across = jnp.mean(kernel.gram(data, x) @ first.shares) + jnp.mean(kernel.gram(data, z) @ second.shares)
    squared = within_data - across + first.shares @ kernel.gram(x, z) @ second.shares
    kl = 0.5 * (divergence(problem.base, first) + divergence(problem.base, second))
    return MatchingTerms(0.5 * squared / problem.rkhs_penalty, kl / problem.inverse_temperature)
