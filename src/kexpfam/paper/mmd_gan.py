r"""The KL-regularised MMD-GAN: the dual problem with f in closed form, and the kernel as a player.

.. math::
    \min_{q \in Q} \max_\phi \; \tfrac{1}{2 \eta} MMD_{k_\phi}^2(\hat p, q)
        + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

q descends and the kernel's parameters ascend by Adam on unbiased estimates. The kernel ascends on the
discrepancy of *distinct* data points: with the diagonal of the data's Gram matrix its length scales would
shrink to zero. The density is that of f in the space of the learned kernel, on the problem's centres.
"""

from typing import ClassVar, NamedTuple, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, ScalarLike

from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.dde import saddle_problem
from kexpfam.fit.loop import descended, moments_of, run
from kexpfam.fit.problem import Problem, Solution, Watchers
from kexpfam.fit.saddle import SaddleProblem
from kexpfam.jax_settings import double
from kexpfam.model.kernels import AbstractKernel
from kexpfam.model.networks import Network
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan
from kexpfam.paper.duals import AbstractDual, PathwiseDraws, stop_gradients
from kexpfam.paper.functional import kernel_span
from kexpfam.paper.singly_dual import DualSolver, DualState, divergence, dual_optimiser
from kexpfam.settings import at_least

LEARNED = ("nothing", "lengthscales", "deep")


class MatchingTerms(NamedTuple):
    """The dual objective at the optimal f; q minimises ``value``."""

    mmd: Float[Array, ""]
    kl: Float[Array, ""]

    @property
    def value(self) -> Float[Array, "..."]:
        return self.mmd + self.kl


def regularised_mmd(
    problem: SaddleProblem, kernel: AbstractKernel, first: PathwiseDraws, second: PathwiseDraws
) -> MatchingTerms:
    r"""Return ``max_f l(f, q)``, the KL-regularised squared MMD between data and q.

    .. math:: J(q) = \tfrac{1}{2 \eta} MMD_k^2(\hat p, q) + \tfrac{1}{\lambda} KL(q \,\|\, p_0), \qquad
        f_q = \tfrac{1}{\eta} \bigl( \hat E[k(x, \cdot)] - E_q[k(x, \cdot)] \bigr).

    Min over q, and max over the kernel if it is learned. Two independent sets of draws make the estimate
    unbiased; the data are a fixed measure, their diagonal included. Equation ledger: ``REG-MMD``.
    """
    data = jnp.asarray(problem.sample.target)
    x, z = (jnp.asarray(problem.base.fold(draws.points)) for draws in (first, second))
    shares = problem.sample.shares
    within_data = shares @ kernel.gram(data, data) @ shares
    across = shares @ (kernel.gram(data, x) @ first.shares + kernel.gram(data, z) @ second.shares)
    squared = within_data - across + first.shares @ kernel.gram(x, z) @ second.shares
    kl = 0.5 * (divergence(problem.base, first) + divergence(problem.base, second))
    return MatchingTerms(0.5 * squared / problem.rkhs_penalty, kl / problem.inverse_temperature)


class Scaled(AbstractKernel):
    """``k(x / s, z / s)`` with learned factors s per dimension, bounded by ``most_factor``."""

    kernel: AbstractKernel
    log_factors: Float[Array, " d"]
    most_factor: float = eqx.field(default=3.0, static=True)

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return self.kernel(x / self._factors(), z / self._factors())

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[Array, "n m"]:
        return self.kernel.gram(xs / self._factors(), zs / self._factors())

    def _factors(self) -> Float[Array, " d"]:
        bound = jnp.log(self.most_factor)
        return jnp.exp(bound * jnp.tanh(self.log_factors / bound))


class Deep(AbstractKernel):
    """``k(x + net(x), z + net(z))``: a kernel of learned features."""

    kernel: AbstractKernel
    network: Network

    @classmethod
    def draw(
        cls, kernel: AbstractKernel, dim: int, *, width: int = 32, depth: int = 2, key: RandomKey
    ) -> "Deep":
        """Return the kernel with a zero-initialised network."""
        return cls(kernel, Network.draw(dim, dim, width=width, depth=depth, zero_initialised=True, key=key))

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return self.gram(x[None], z[None])[0, 0]

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[Array, "n m"]:
        return self.kernel.gram(self._moved(xs), self._moved(zs))

    def _moved(self, points: Float[AnyArray, "n d"]) -> Float[Array, "n d"]:
        return points + self.network(jnp.asarray(points), jnp.zeros((points.shape[0], 0)))


class Players(eqx.Module):
    """The dual, which descends, and the kernel, which ascends."""

    dual: AbstractDual
    kernel: AbstractKernel


class MatchingHealth(NamedTuple):
    """The regularised MMD before a step."""

    terms: MatchingTerms


class MMDGAN(DualSolver):
    """The dual problem over q, with its witness function as f.

    ``family`` may not be "dynamics", which needs an f to follow. The witness of the trained q multiplies the
    errors of q by 1 / eta; with ``polish`` f is the convex optimum. ``learn`` is the part of the kernel that
    is learned: "nothing", "lengthscales" or "deep" (a network).
    """

    steps: int = at_least(0, 2000)
    batch_size: int = at_least(2, 2048, static=True)
    learn: str = "nothing"
    kernel_rate: ScalarLike = eqx.field(default=1e-3, converter=double)  # Adam's rate of the kernel
    kernel_width: int = at_least(1, 32, static=True)
    kernel_depth: int = at_least(1, 2, static=True)

    records: ClassVar[tuple[str, ...]] = (*MatchingTerms._fields, "value")

    def __check_init__(self) -> None:
        if self.family == "dynamics":
            raise ValueError("family='dynamics' needs an f to follow: use SinglyDual(family='dynamics').")
        if self.learn not in LEARNED:
            raise ValueError(f"learn must be one of {', '.join(LEARNED)}; got {self.learn!r}.")

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return f in the space of the final kernel, and the trained dual as the sampler."""
        start_key, kernel_key, run_key, end_key = jr.split(key, 4)
        span = kernel_span(problem)
        kernel = self._kernel(span.kernel, problem.sample.target.shape[1], key=kernel_key)
        state = self.init(Players(self.initial_dual(problem, key=start_key), kernel))
        posed = saddle_problem(problem, problem.base, problem.space)
        outcome = run(posed, self, state, steps=self.steps, stage="saddle point", key=run_key, **watchers)
        players = outcome.state.averaged
        if self._learns:
            problem = problem.within(FeatureSpace(Constant(), KernelSpan.build(players.kernel, span.centres)))
        f_weights = witness(problem, players.dual, key=end_key)
        return self.finish(problem, f_weights, players.dual, outcome, key=end_key)

    @property
    def _learns(self) -> bool:
        return self.learn != "nothing"

    def _kernel(self, kernel: AbstractKernel, dim: int, *, key: RandomKey) -> AbstractKernel:
        if self.learn == "deep":
            return Deep.draw(kernel, dim, width=self.kernel_width, depth=self.kernel_depth, key=key)
        return Scaled(kernel, jnp.zeros(dim)) if self.learn == "lengthscales" else kernel

    def init(self, players: Players) -> DualState:
        """Return the start at given players."""
        moments = [moments_of(part, dual_optimiser()) for part in (players.dual, players.kernel)]
        return DualState(players, players, moments, jnp.array(0))

    def step(
        self, problem: SaddleProblem, state: DualState, *, key: RandomKey
    ) -> tuple[DualState, MatchingHealth]:
        """Return the state after one move of the dual, and of the kernel if it is learned."""
        decay = self.schedule(state.step)

        def cost(players: Players) -> tuple[Float[Array, ""], MatchingTerms]:
            halves = [players.dual.pathwise_draws(self.batch_size // 2, key=half) for half in jr.split(key)]
            terms = regularised_mmd(problem, stop_gradients(players.kernel), *halves)
            if not self._learns:
                return terms.value, terms
            discrepancy = regularised_mmd(problem, players.kernel, *stop_gradients(halves)).mmd
            return terms.value - (discrepancy - _own_pairs(problem, players.kernel)), terms

        (_, terms), gradient = eqx.filter_value_and_grad(cost, has_aux=True)(state.players)
        adam = dual_optimiser()
        move = lambda part, slope, moments, rate: descended(part, slope, moments, decay * rate, adam)
        dual, kernel, moments = state.players.dual, state.players.kernel, list(state.moments)
        dual, moments[0] = move(dual, gradient.dual, moments[0], self.rate)
        if self._learns:
            kernel, moments[1] = move(kernel, gradient.kernel, moments[1], self.kernel_rate)
        return state.moved(Players(dual, kernel), moments), MatchingHealth(terms)


def _own_pairs(problem: SaddleProblem, kernel: AbstractKernel) -> Float[Array, ""]:
    """Return the part of ``MMD^2 / (2 eta)`` due to pairs of a point with itself."""
    data, shares = jnp.asarray(problem.sample.target), problem.sample.shares
    whole, own = shares @ kernel.gram(data, data) @ shares, shares**2 @ jax.vmap(kernel)(data, data)
    return 0.5 * (whole - (whole - own) / (1.0 - jnp.sum(shares**2))) / problem.rkhs_penalty


def witness(problem: Problem, dual: AbstractDual, *, key: RandomKey) -> np.ndarray:
    """Return the weights of ``(data mean - q mean) / eta``, with q's mean as a sum over nodes."""
    nodes = problem.nodes(key=key)
    log_ratio = dual.log_densities(nodes.points) - problem.base.log_densities(nodes.points)
    masses = np.exp(nodes.log_weights + log_ratio)
    q_mean = (masses / masses.sum()) @ problem.space.target.node_matrix(nodes)
    data_mean = weighted_mean(problem.space.target.matrix(problem.sample.target), problem.sample.weight)
    return (data_mean - q_mean) / problem.rkhs_penalty
