r"""The KL-regularised MMD-GAN: the dual problem with f in closed form, and the kernel as a player.

.. math:: \min_{q \in Q} \max_\phi \; \tfrac{1}{2 \eta} MMD_{k_\phi}^2(\hat p, q) + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

q falls by Adam on unbiased estimates of it, and the kernel's parameters climb. The kernel climbs on the discrepancy of
*distinct* data points: with the diagonal of the data's own Gram matrix it would shrink its length scales until every point is
alone. The density is f's in the space of the learned kernel, on the problem's centres.
"""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.data.sample import AnyArray
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.dde import pose
from kexpfam.fit.loop import averaged, run, stepped
from kexpfam.fit.problem import Checkpoint, Problem, Solution, Solver, check_at_least
from kexpfam.fit.saddle import SaddleProblem
from kexpfam.model.kernels import AbstractKernel
from kexpfam.model.networks import Network
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan
from kexpfam.paper.duals import AbstractDual, held
from kexpfam.paper.expansions import kernel_span
from kexpfam.paper.objective import MatchingTerms, regularised_mmd
from kexpfam.paper.singly_dual import averaging_share, begin, check_family, dual_optimiser, finish
from kexpfam.progress import Listener

__all__ = ["MMDGAN", "Deep", "Players", "Scaled", "witness"]

LEARNED = ("nothing", "lengthscales", "deep")
# Length scales stay within this factor of where they start.
FARTHEST_FACTOR = 3.0
# The network of a deep kernel.
WIDTH, DEPTH = 32, 2


class Scaled(AbstractKernel):
    """``k(x / s, z / s)`` with one factor s per dimension: a kernel with its length scales free."""

    kernel: AbstractKernel
    log_factors: Float[Array, " d"]

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return self.kernel(x / self._factors(), z / self._factors())

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[Array, "n m"]:
        return self.kernel.gram(xs / self._factors(), zs / self._factors())

    def _factors(self) -> Float[Array, " d"]:
        bound = jnp.log(FARTHEST_FACTOR)
        return jnp.exp(bound * jnp.tanh(self.log_factors / bound))


class Deep(AbstractKernel):
    """``k(x + net(x), z + net(z))``: a kernel of learned features, which starts as the kernel itself."""

    kernel: AbstractKernel
    network: Network

    @classmethod
    def draw(cls, kernel: AbstractKernel, dim: int, *, key: Key[Array, ""]) -> "Deep":
        """Return the kernel as it is, with a zero-initialised network in front."""
        return cls(kernel, Network.draw(dim, dim, width=WIDTH, depth=DEPTH, zero_initialised=True, key=key))

    def __call__(self, x: Float[AnyArray, " d"], z: Float[AnyArray, " d"]) -> Float[AnyArray, ""]:
        return self.gram(x[None], z[None])[0, 0]

    def gram(self, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]) -> Float[Array, "n m"]:
        return self.kernel.gram(self._moved(xs), self._moved(zs))

    def _moved(self, points: Float[AnyArray, "n d"]) -> Float[Array, "n d"]:
        return points + self.network(jnp.asarray(points), jnp.zeros((points.shape[0], 0)))


class Players(eqx.Module):
    """The dual, which falls, and the kernel, which climbs."""

    dual: AbstractDual
    kernel: AbstractKernel


class State(eqx.Module):
    """What the next step needs; ``averaged`` is the moving average of the players, which is what is kept in the end."""

    players: Players
    averaged: Players
    dual_moments: Any
    kernel_moments: Any
    step: Int[Array, ""]


class Health(NamedTuple):
    """The regularised MMD before a step."""

    terms: MatchingTerms


class MMDGAN(Solver):
    """The dual problem over q alone, with its witness as f.

    ``family`` as in ``SinglyDual`` (but not "dynamics", which needs an f to follow). ``learn`` is what of the kernel is
    learned: "nothing", "lengthscales" or "deep". f is the witness of the trained q, which 1 / eta makes a magnifying glass for
    q's every error; with ``polish`` it is replaced by the convex optimum.
    """

    family: str | AbstractDual = "mixture"
    learn: str = "nothing"
    steps: int = 2000
    rate: ScalarLike = eqx.field(default=1e-2, converter=jnp.asarray)
    kernel_rate: ScalarLike = eqx.field(default=1e-3, converter=jnp.asarray)
    batch_size: int = eqx.field(default=2048, static=True)
    polish: bool = False

    uses_proposal: ClassVar[bool] = False
    records: ClassVar[tuple[str, ...]] = (*MatchingTerms._fields, "value")

    def __check_init__(self) -> None:
        check_family(self.family)
        if self.family == "dynamics":
            raise ValueError(
                "family='dynamics' follows f, and here f is in closed form: use SinglyDual(family='dynamics')."
            )
        if self.learn not in LEARNED:
            raise ValueError(f"learn must be one of {', '.join(LEARNED)}; got {self.learn!r}.")
        check_at_least(self, 0, "steps")

    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f in the space of the kernel at the end, and the trained dual as the sampler."""
        start_key, kernel_key, run_key, end_key = jr.split(key, 4)
        span = kernel_span(problem)
        kernel = self._kernel(span.kernel, problem.sample.target.shape[1], key=kernel_key)
        state = self.init(Players(begin(problem, self.family, key=start_key), kernel))
        options: dict[str, Any] = {"stage": "saddle point", "report": report, "checkpoint": checkpoint}
        posed = pose(problem, problem.base, problem.space)
        outcome = run(posed, self, state, steps=self.steps, key=run_key, **options)
        players = outcome.state.averaged
        if self._learns:
            problem = problem.within(FeatureSpace(Constant(), KernelSpan.build(players.kernel, span.centres)))
        f_weights = witness(problem, players.dual, key=end_key)
        return finish(problem, f_weights, players.dual, outcome, polished=self.polish, key=end_key)

    @property
    def _learns(self) -> bool:
        return self.learn != "nothing"

    def _kernel(self, kernel: AbstractKernel, dim: int, *, key: Key[Array, ""]) -> AbstractKernel:
        if self.learn == "deep":
            return Deep.draw(kernel, dim, key=key)
        return Scaled(kernel, jnp.zeros(dim)) if self.learn == "lengthscales" else kernel

    def init(self, players: Players) -> State:
        """Return the start at given players."""
        moments = lambda part: dual_optimiser().init(eqx.filter(part, eqx.is_inexact_array))
        return State(players, players, moments(players.dual), moments(players.kernel), jnp.array(0))

    def step(self, problem: SaddleProblem, state: State, *, key: Key[Array, ""]) -> tuple[State, Health]:
        """Return the state after one move of each player, and the value before; the kernel stays if it is not learned."""
        decay = jnp.maximum(0.05, 1.0 - state.step / self.steps)
        dual, kernel = state.players.dual, state.players.kernel

        def cost(players: Players) -> tuple[Float[Array, ""], MatchingTerms]:
            halves = [players.dual.pathwise_draws(self.batch_size // 2, key=half) for half in jr.split(key)]
            terms = regularised_mmd(problem, held(players.kernel), *halves)
            discrepancy = regularised_mmd(problem, players.kernel, *held(halves)).mmd
            return terms.value - (
                discrepancy - _own_pairs(problem, players.kernel)
            ) if self._learns else terms.value, terms

        (_, terms), gradient = eqx.filter_value_and_grad(cost, has_aux=True)(state.players)
        updates, dual_moments = dual_optimiser().update(gradient.dual, state.dual_moments)
        dual = stepped(dual, updates, -decay * self.rate)
        updates, kernel_moments = dual_optimiser().update(gradient.kernel, state.kernel_moments)
        kernel = stepped(kernel, updates, -decay * self.kernel_rate) if self._learns else kernel
        players = Players(dual, kernel)
        means = averaged(state.averaged, players, averaging_share(state.step))
        return State(players, means, dual_moments, kernel_moments, state.step + 1), Health(terms)


def _own_pairs(problem: SaddleProblem, kernel: AbstractKernel) -> Float[Array, ""]:
    """Return what pairs of a point with itself, and the missing share of distinct pairs, add to ``MMD^2 / (2 eta)``."""
    data, shares = jnp.asarray(problem.sample.target), problem.sample.shares
    whole, own = shares @ kernel.gram(data, data) @ shares, shares**2 @ jax.vmap(kernel)(data, data)
    return 0.5 * (whole - (whole - own) / (1.0 - jnp.sum(shares**2))) / problem.rkhs_penalty


def witness(problem: Problem, dual: AbstractDual, *, key: Key[Array, ""]) -> np.ndarray:
    """Return the weights of ``(data mean - q mean) / eta``, with q's mean as a sum over nodes."""
    nodes = problem.nodes(key=key)
    masses = np.exp(
        nodes.log_weights + dual.log_densities(nodes.points) - problem.base.log_densities(nodes.points)
    )
    q_mean = (masses / masses.sum()) @ problem.space.target.node_matrix(nodes)
    data_mean = weighted_mean(problem.space.target.matrix(problem.sample.target), problem.sample.weight)
    return (data_mean - q_mean) / problem.rkhs_penalty
