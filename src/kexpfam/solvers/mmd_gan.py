r"""The KL-regularised MMD-GAN: the dual problem with f in closed form, and the kernel as a player.

.. math:: \min_{q \in Q} \max_\phi \; \tfrac{1}{2 \eta} MMD_{k_\phi}^2(\hat p, q) + \tfrac{1}{\lambda} KL(q \,\|\, p_0).

q falls by Adam on unbiased estimates of it, and the kernel's parameters climb. The kernel climbs on the discrepancy of
*distinct* data points: with the diagonal of the data's own Gram matrix it would shrink its length scales until every point is
alone. The density is f's in the space of the learned kernel, on the task's centres.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, ScalarLike

from kexpfam.duals import AbstractDual
from kexpfam.kernels import AbstractKernel
from kexpfam.objective import MatchingTerms, Problem, regularised_mmd
from kexpfam.potentials import Constant, FeatureSpace, KernelSpan, Network
from kexpfam.solvers.doubly_dual import averaged, stepped
from kexpfam.solvers.loop import run
from kexpfam.solvers.singly_dual import begin, check_family, dual_optimiser, finish, held, judging_nodes, remembered
from kexpfam.solvers.task import Solution, Task

LEARNED = ("nothing", "lengthscales", "deep")
# Length scales stay within this factor of where they start.
FARTHEST_FACTOR = 3.0
# The network of a deep kernel.
WIDTH, DEPTH = 32, 2


class Scaled(AbstractKernel):
    """``k(x / s, z / s)`` with one factor s per dimension: a kernel with its length scales free."""

    kernel: AbstractKernel
    log_factors: Float[Array, " d"]

    def __call__(self, x, z):
        return self.kernel(x / self._factors(), z / self._factors())

    def gram(self, xs, zs):
        return self.kernel.gram(xs / self._factors(), zs / self._factors())

    def _factors(self):
        bound = jnp.log(FARTHEST_FACTOR)
        return jnp.exp(bound * jnp.tanh(self.log_factors / bound))


class Deep(AbstractKernel):
    """``k(x + net(x), z + net(z))``: a kernel of learned features, which starts as the kernel itself."""

    kernel: AbstractKernel
    network: Network

    @classmethod
    def draw(cls, kernel: AbstractKernel, dim: int, *, key: Key[Array, ""]) -> Self:
        """Return the kernel as it is, with a silent network in front."""
        return cls(kernel, Network.draw(dim, dim, width=WIDTH, depth=DEPTH, silent=True, key=key))

    def __call__(self, x, z):
        return self.gram(x[None], z[None])[0, 0]

    def gram(self, xs, zs):
        return self.kernel.gram(self._moved(xs), self._moved(zs))

    def _moved(self, points):
        return points + self.network(points, jnp.zeros((points.shape[0], 0)))


class Players(eqx.Module):
    """The dual, which falls, and the kernel, which climbs."""

    dual: AbstractDual
    kernel: AbstractKernel


class State(eqx.Module):
    """What the next step needs; ``averaged`` is what is kept in the end."""

    players: Players
    averaged: Players
    dual_moments: optax.OptState
    kernel_moments: optax.OptState
    step: Int[Array, ""]


class Health(NamedTuple):
    """The regularised MMD before a step."""

    terms: MatchingTerms


class Moves(eqx.Module):
    """The settings of one step; the kernel stays if ``learns`` is false."""

    rate: ScalarLike
    kernel_rate: ScalarLike
    horizon: ScalarLike
    batch_size: int = eqx.field(static=True)
    learns: bool = eqx.field(static=True)

    def init(self, players: Players) -> State:
        moments = lambda part: dual_optimiser().init(eqx.filter(part, eqx.is_inexact_array))
        return State(players, players, moments(players.dual), moments(players.kernel), jnp.array(0))

    def step(self, problem: Problem, state: State, *, key: Key[Array, ""]) -> tuple[State, Health]:
        """Return the state after one move of each player, and the value before."""
        decay = jnp.maximum(0.05, 1.0 - state.step / self.horizon)
        dual, kernel = state.players.dual, state.players.kernel

        def cost(players):
            halves = [players.dual.draws(self.batch_size // 2, key=half) for half in jr.split(key)]
            terms = regularised_mmd(problem, held(players.kernel), *halves)
            discrepancy = regularised_mmd(problem, players.kernel, *held(halves)).mmd
            return terms.value - (discrepancy - _own_pairs(problem, players.kernel)) if self.learns else terms.value, terms

        (_, terms), gradient = eqx.filter_value_and_grad(cost, has_aux=True)(state.players)
        updates, dual_moments = dual_optimiser().update(gradient.dual, state.dual_moments)
        dual = stepped(dual, updates, -decay * self.rate)
        updates, kernel_moments = dual_optimiser().update(gradient.kernel, state.kernel_moments)
        kernel = stepped(kernel, updates, -decay * self.kernel_rate) if self.learns else kernel
        players = Players(dual, kernel)
        means = averaged(state.averaged, players, remembered(state.step))
        return State(players, means, dual_moments, kernel_moments, state.step + 1), Health(terms)


def _own_pairs(problem: Problem, kernel: AbstractKernel) -> Float[Array, ""]:
    """Return what pairs of a point with itself, and the missing share of distinct pairs, add to ``MMD^2 / (2 eta)``."""
    data = problem.sample.target
    count = data.shape[0]
    whole, own = jnp.sum(kernel.gram(data, data)), jnp.sum(jax.vmap(kernel)(data, data))
    return 0.5 * (whole / count**2 - (whole - own) / (count * (count - 1))) / problem.rkhs_penalty


class MMDGAN(eqx.Module):
    """The dual problem over q alone, with its witness as f; unconditional.

    ``family`` as in ``SinglyDual`` (but not "dynamics", which needs an f to follow). ``learn`` is what of the kernel is
    learned: "nothing", "lengthscales" or "deep". With ``polish=False`` f is the witness of the trained q, which 1 / eta makes a
    magnifying glass for q's every error.
    """

    family: str | AbstractDual = "mixture"
    learn: str = "nothing"
    steps: int = 300
    rate: ScalarLike = eqx.field(default=1e-2, converter=jnp.asarray)
    kernel_rate: ScalarLike = eqx.field(default=1e-3, converter=jnp.asarray)
    batch_size: int = eqx.field(default=2048, static=True)
    polish: bool = True
    nodes: int = 16384

    def __check_init__(self):
        check_family(self.family)
        if self.family == "dynamics":
            raise ValueError("family='dynamics' follows f, and here f is in closed form: use SinglyDual(family='dynamics').")
        if self.learn not in LEARNED:
            raise ValueError(f"learn must be one of {', '.join(LEARNED)}; got {self.learn!r}.")
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report: Callable | None = None, checkpoint=None) -> Solution:
        """Return f in the space of the kernel at the end, and the trained dual as the sampler."""
        start_key, kernel_key, run_key, end_key = jr.split(key, 4)
        dual, problem = begin(task, self.family, key=start_key)
        span = _kernel_span(task)
        players = Players(dual, self._kernel(span.kernel, task.sample.target.shape[1], key=kernel_key))
        settings = Moves(self.rate, self.kernel_rate, jnp.asarray(float(self.steps)), self.batch_size, self.learn != "nothing")
        state = settings.init(players)
        outcome = run(problem, settings, state, steps=self.steps, key=run_key, report=report, checkpoint=checkpoint)
        players = outcome.state.averaged
        if self.learn != "nothing":
            task = task.within(FeatureSpace(Constant(), KernelSpan.build(players.kernel, span.centres)))
        f_weights = witness(task, players.dual, self.nodes, key=end_key)
        return finish(task, f_weights, players.dual, outcome, polished=self.polish, nodes=self.nodes, key=end_key)

    def _kernel(self, kernel: AbstractKernel, dim: int, *, key) -> AbstractKernel:
        if self.learn == "deep":
            return Deep.draw(kernel, dim, key=key)
        return Scaled(kernel, jnp.zeros(dim)) if self.learn == "lengthscales" else kernel


def _kernel_span(task: Task) -> KernelSpan:
    if not isinstance(task.space.target, KernelSpan):
        raise ValueError("solver='mmd_gan' works with the kernel itself: use space='nystrom' or space='full'.")
    return task.space.target


def witness(task: Task, dual: AbstractDual, count: int, *, key: Key[Array, ""]) -> Array:
    """Return the weights of ``(data mean - q mean) / eta``, with q's mean on a grid of few dimensions or on draws."""
    measure = dual.measure()
    nodes = judging_nodes(task, count, key=key)
    masses = np.exp(nodes.log_weights + measure.log_densities(nodes.points) - task.base.log_densities(nodes.points))
    q_mean = (masses / masses.sum()) @ task.space.target.matrix(nodes.points)
    data_mean = task.space.target.matrix(task.sample.target).mean(0)
    return jnp.asarray((data_mean - q_mean) / task.rkhs_penalty)
