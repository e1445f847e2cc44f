r"""Squared gradients of the dual objective at the iterates of the saddle point (Theorem 5 of the paper).

With f and nu at their best the saddle function of a transport g is

.. math:: \hat L(g) = \frac{1}{2 \eta} \|\hat\mu - \mu_{g_\# \xi}\|_H^2 + KL(g_\# \xi \,\|\, p_0),

and the theorem bounds the mean of :math:`\|\nabla \hat L\|^2` over the iterates of L steps of a size that
falls like :math:`1 / \sqrt L`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import Sample
from kexpfam.fit.loop import run
from kexpfam.fit.saddle import DoublyDual, SaddleProblem
from kexpfam.jax_settings import double_precision
from kexpfam.model.kernels import Gaussian as GaussianKernel
from kexpfam.model.measures import Gaussian
from kexpfam.model.networks import AbstractTransport
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan, spread_rows
from kexpfam.paper.functional import FunctionalAscent, SpaceFunction
from reproduction.cost import Cost
from reproduction.measurements.synthetic import synthetic
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["SCHEMES", "dual_objective", "squared_gradient", "stationarity"]

LENGTHSCALE, PENALTY, CENTRES = 1.0, 0.05, 100
# Independent batches of draws that the gradient is measured on, and iterates of a run that it is measured at.
BATCHES, DRAWS, LOOKS = 8, 1024, 20


def printed(steps: int) -> FunctionalAscent:
    """Return Algorithm 1 with a constant step size of the transport, proportional to steps^(-1/2)."""
    settings: dict[str, Any] = {
        "rate": 0.5,
        "nu_speed": 1.0,
        "horizon": np.inf,
        "ascents": 10,
        "batch_size": 128,
    }
    return FunctionalAscent(transport_rate=3.0 / np.sqrt(steps), **settings)


def plain(steps: int) -> DoublyDual:
    """Return the nested players with plain gradients of f, constant rates, and the same transport step."""
    return DoublyDual.plain(transport_rate=5e-3 / np.sqrt(steps), horizon=np.inf)


SCHEMES: dict[str, Callable[[int], Any]] = {"Algorithm 1": printed, "plain players": plain}


def stationarity(cell: Cell) -> Values:
    """Return mean squared gradients of the dual objective over the iterates, at the start and the end."""
    scheme, steps, (init_key, run_key, look_key) = (
        SCHEMES[cell["method"]],
        cell["steps"],
        jr.split(jr.key(cell["seed"]), 3),
    )
    with double_precision(), Cost() as cost:
        problem = _problem(cell)
        solver, zeros = scheme(steps), jnp.zeros(_space(problem).size)
        nu = (SpaceFunction(problem.space, zeros),) if isinstance(solver, FunctionalAscent) else ()
        state = solver.init(problem, zeros, *nu, key=init_key)
        # Fresh draws at every look: the error of their mean falls with their number.
        key = lambda state: jr.fold_in(look_key, int(state.step))
        look = lambda state: np.asarray(squared_gradient(problem, state.point.transport, key=key(state)))
        options: dict[str, Any] = {"stage": "stationarity", "chunk": max(1, steps // LOOKS), "watch": look}
        outcome = run(problem, solver, state, steps=steps, key=run_key, **options)
        folds = float(_folding(problem, outcome.state.point.transport, look_key))
    looks = np.array([outcome.watched[step] for step in sorted(outcome.watched, key=int)])
    return {
        "squared_gradient": float(looks[1:].mean()),
        "start": float(looks[0]),
        "end": float(looks[-1]),
        "folding_share": folds,
        "status": outcome.status.name,
        "seconds": cost.seconds,
        "processor_seconds": cost.processor_seconds,
    }


def _problem(cell: Cell) -> SaddleProblem:
    """Return standardised two moons, with kernel and penalty for which the optimal f has moderate size."""
    rows = synthetic(cell["dataset"], 2).sample(cell["rows"], random_state=cell["seed"])
    rows = (rows - rows.mean(0)) / rows.std(0)
    base = Gaussian.fitted(rows)
    span = KernelSpan.build(GaussianKernel(LENGTHSCALE), rows[spread_rows(rows, CENTRES, seed=cell["seed"])])
    space, one = FeatureSpace(Constant(), span), jnp.asarray(1.0)
    return SaddleProblem(
        Sample.unconditional(rows), base, space, base, jnp.asarray(PENALTY), one, anchored=True
    )


def _space(problem: SaddleProblem) -> FeatureSpace:
    """Return the space of f, which is one of features here."""
    assert isinstance(problem.space, FeatureSpace)
    return problem.space


def dual_objective(
    problem: SaddleProblem, transport: AbstractTransport, *, key: Key[Array, ""]
) -> Float[Array, ""]:
    """Return an estimate of the dual objective, maximal over f and nu, if the transport is injective."""
    noise = problem.reference.sample(DRAWS, key=key)
    features = _space(problem).target.features
    moved, log_volume = _with_log_volume(transport, noise)
    # Two halves of the draws: the square of one mean would hold its noise too.
    residuals = [
        jnp.mean(features(problem.sample.target), 0) - jnp.mean(features(half), 0)
        for half in jnp.split(moved, 2)
    ]
    kl = jnp.mean(problem.reference.log_density(noise) - log_volume - problem.base.log_density(moved))
    return residuals[0] @ residuals[1] / (2.0 * problem.rkhs_penalty) + kl / problem.inverse_temperature


@eqx.filter_jit
def squared_gradient(
    problem: SaddleProblem, transport: AbstractTransport, *, key: Key[Array, ""]
) -> Float[Array, ""]:
    """Return an unbiased squared norm of the dual objective's gradient, by products of different batches."""
    gradient = eqx.filter_grad(lambda transport, key: dual_objective(problem, transport, key=key))
    flat = lambda key: ravel_pytree(gradient(transport, key))[0]
    rows = jax.lax.map(flat, jr.split(key, BATCHES))
    total = jnp.sum(rows, 0)
    return (total @ total - jnp.sum(rows**2)) / (BATCHES * (BATCHES - 1))


@eqx.filter_jit
def _folding(problem: SaddleProblem, transport: AbstractTransport, key: Key[Array, ""]) -> Float[Array, ""]:
    """Return the share of the noise at which the transport turns space over."""
    return jnp.mean(jnp.linalg.det(_jacobians(transport, problem.reference.sample(DRAWS, key=key))) < 0.0)


def _with_log_volume(
    transport: AbstractTransport, noise: Float[Array, "b d"]
) -> tuple[Float[Array, "b d"], Float[Array, " b"]]:
    return transport(noise, jnp.zeros((len(noise), 0))), jnp.linalg.slogdet(_jacobians(transport, noise))[1]


def _jacobians(transport: AbstractTransport, noise: Float[Array, "b d"]) -> Float[Array, "b d d"]:
    one = lambda x: transport(x[None], jnp.zeros((1, 0)))[0]
    return jax.vmap(jax.jacfwd(one))(noise)
