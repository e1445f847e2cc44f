"""The saddle functions for a sampler that knows its density.

Where q has a density there is no nu: the KL term is q's own (``singly_dual_terms``), and with f at its best the saddle
function is a regularised MMD (``regularised_mmd``).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kexpfam.fit.saddle import SaddleProblem, SaddleTerms
from kexpfam.model.kernels import AbstractKernel
from kexpfam.model.measures import AbstractMeasure
from kexpfam.paper.duals import PathwiseDraws

__all__ = ["MatchingTerms", "divergence", "regularised_mmd", "singly_dual_terms"]


def divergence(base: AbstractMeasure, draws: PathwiseDraws) -> Float[Array, ""]:
    """Return KL(q || p0) of weighted draws with their density; in an augmented space the joint one, which is no smaller."""
    return draws.shares @ (draws.log_density - base.log_density(base.fold(draws.points)))


def singly_dual_terms(
    f_weights: Float[Array, " r"],
    problem: SaddleProblem,
    data_features: Float[Array, " r"],
    draws: PathwiseDraws,
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
    def value(self) -> Float[Array, "..."]:
        return self.mmd + self.kl


def regularised_mmd(
    problem: SaddleProblem, kernel: AbstractKernel, first: PathwiseDraws, second: PathwiseDraws
) -> MatchingTerms:
    r"""Return ``max_f l(f, q)``: the KL-regularised squared MMD between data and q, with the kernel in place of f's features.

    .. math:: J(q) = \tfrac{1}{2 \eta} MMD_k^2(\hat p, q) + \tfrac{1}{\lambda} KL(q \,\|\, p_0), \qquad
        f_q = \tfrac{1}{\eta} \bigl( \hat E[k(x, \cdot)] - E_q[k(x, \cdot)] \bigr).

    Min over q, and max over the kernel where it is learned. Two independent sets of draws make the estimate unbiased; the data
    are a fixed measure, their diagonal included. Equation ledger: ``REG-MMD``.
    """
    data = jnp.asarray(problem.sample.target)
    x, z = (jnp.asarray(problem.base.fold(draws.points)) for draws in (first, second))
    shares = problem.sample.shares
    within_data = shares @ kernel.gram(data, data) @ shares
    across = shares @ (kernel.gram(data, x) @ first.shares + kernel.gram(data, z) @ second.shares)
    squared = within_data - across + first.shares @ kernel.gram(x, z) @ second.shares
    kl = 0.5 * (divergence(problem.base, first) + divergence(problem.base, second))
    return MatchingTerms(0.5 * squared / problem.rkhs_penalty, kl / problem.inverse_temperature)
