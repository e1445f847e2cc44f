"""A known density of twenty relevant columns, beyond the reach of grids and importance sampling.

f is a sum of functions of every two columns at most two apart (random features of that kernel), the same
space for every method: only how they come to f differs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.fit.bases import fit_base
from kexpfam.fit.convex import Convex
from kexpfam.fit.dde import DDE
from kexpfam.fit.problem import Problem, Solver
from kexpfam.fit.saddle import DoublyDual
from kexpfam.integrate.nodes import Integration, effective_share, importance_nodes
from kexpfam.integrate.partition import by_smc
from kexpfam.jax_settings import double_precision
from kexpfam.judge.metrics import mmd_squared
from kexpfam.model.density import Sampler, Tilt
from kexpfam.model.kernels import median_distance
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import Constant, FeatureSpace, RandomFeatures
from kexpfam.paper import AnnealedLikelihood, ContrastiveDivergence, SinglyDual
from reproduction.cost import Cost
from reproduction.measurements.roads import CHAINED, Chained, follow
from reproduction.real_data import CHAIN_NOISE, chain
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["ROADS", "near_pairs", "reach", "score_matched", "told_apart"]

LENGTHSCALE, PENALTY, FREQUENCIES, APART = 0.6, 1e-5, 400, 2
TEST_ROWS, DRAWS, IMPORTANCE_DRAWS = 4000, 4000, 32768
# Importance draws of a fit: as many as take the time of the others.
FITTING_DRAWS = 49152
# Steps at the end of a run over which its estimates are averaged.
LAST = 50
# Rows whose derivatives of all features are there at a time.
ROWS_PER_CHUNK = 250
SMC = Integration(smc_particles=1024, smc_stages=80, smc_repeats=4)
FEW = Integration(smc_particles=1024, smc_stages=80, smc_repeats=2)


class Law(NamedTuple):
    """Training and test rows, standardised by the training rows, and the true log density in these units."""

    train: Float[np.ndarray, "n d"]
    test: Float[np.ndarray, "m d"]
    log_density: Callable[[Float[AnyArray, " d"]], Float[Array, ""]]


def reach(cell: Cell) -> Values:
    """Return distances of one method's density from the truth, with and without normaliser, and the cost."""
    law = _law(cell)
    problem = _problem(cell, law)
    solve_key, smc_key, draw_key, node_key = jr.split(jr.key(cell["seed"]), 4)
    jax.clear_caches()
    with double_precision(), Cost() as cost:
        tilt, sampler, status, kl_dual, path = ROADS[cell["method"]](problem, solve_key)
    values: Values = {
        "fisher_divergence": _fisher_divergence(law, tilt),
        "status": status,
        "seconds": cost.seconds,
        "processor_seconds": cost.processor_seconds,
        "megabytes": cost.megabytes,
    }
    nodes = importance_nodes(problem.base, problem.proposal, IMPORTANCE_DRAWS, key=node_key)
    values["effective_draws"] = float(
        effective_share(nodes.log_weights + tilt.values(nodes.points)) * IMPORTANCE_DRAWS
    )
    values |= _likelihood(law, tilt, smc_key)
    if path:
        found = [(seconds, _likelihood(law, problem.tilt(f), smc_key, FEW)) for seconds, f in path]
        values["path"] = [[seconds, some.get("nll")] for seconds, some in found]
    if kl_dual is not None:
        values["kl_dual"] = kl_dual
    if sampler is not None:
        draws = np.asarray(sampler.draws(DRAWS, key=draw_key))
        values["mmd"] = mmd_squared(draws, law.test, lengthscale=median_distance(law.test)).value
        values["c2st"] = told_apart(law.test, draws)
    return values


def _law(cell: Cell) -> Law:
    rows, _ = chain(cell["rows"], cell["dim"], seed=cell["seed"])
    test, _ = chain(TEST_ROWS, cell["dim"], seed=1000 + cell["seed"])
    mean, scale = rows.mean(0), rows.std(0)

    def log_density(z: Float[AnyArray, " d"]) -> Float[Array, ""]:
        x = jnp.asarray(z) * scale + mean
        noise = jnp.concatenate([x[:1], (x[1:] - jnp.sin(2.0 * x[:-1])) / CHAIN_NOISE])
        constant = (
            0.5 * len(scale) * np.log(2.0 * np.pi)
            + (len(scale) - 1) * np.log(CHAIN_NOISE)
            - np.log(scale).sum()
        )
        return -0.5 * noise @ noise - constant

    return Law((rows - mean) / scale, (test - mean) / scale, log_density)


def _problem(cell: Cell, law: Law) -> Problem:
    mixture = fit_base("mixture", law.train, seed=cell["seed"])
    base = mixture if cell["base"] == "mixture" else Gaussian.fitted(law.train)
    space = FeatureSpace(Constant(), RandomFeatures(near_pairs(cell["dim"], seed=cell["seed"])))
    return Problem(
        Sample.unconditional(law.train), base, space, PENALTY, mixture, Integration(draws=FITTING_DRAWS)
    )


def near_pairs(dim: int, *, seed: int) -> Float[np.ndarray, "r d"]:
    """Return frequencies of a sum of Gaussian kernels, one per pair of columns at most ``APART`` apart."""
    rng = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(dim) for j in range(i + 1, min(dim, i + 1 + APART))]
    frequencies = np.zeros((FREQUENCIES, dim))
    for row in range(FREQUENCIES):
        frequencies[row, list(pairs[row % len(pairs)])] = rng.normal(size=2) / LENGTHSCALE
    return frequencies


class Arrival(NamedTuple):
    """Result of a method: f, sampler (if any), status, nu's estimate of KL(q || p0), and f's weights by
    processor seconds (if recorded)."""

    tilt: Tilt
    sampler: Sampler | None
    status: str
    kl_dual: float | None = None
    path: Sequence[tuple[float, np.ndarray]] = ()


Road = Callable[[Problem, Any], Arrival]


def _by(solver: Solver) -> Road:
    def road(problem: Problem, key: Any) -> Arrival:
        solution = solver.solve(problem, key=key)
        kl = solution.trace.get("kl_dual")
        return Arrival(
            solution.tilt,
            solution.sampler,
            solution.status.name,
            None if kl is None else float(kl[-LAST:].mean()),
        )

    return road


def _course(saddle: DoublyDual, **settings: Any) -> Road:
    def road(problem: Problem, key: Any) -> Arrival:
        found = follow(problem, key, saddle, **settings)
        kl = float(found.kl_dual[-LAST:].mean())
        return Arrival(found.tilt, found.sampler, found.status, kl, found.path)

    return road


def score_matched(problem: Problem, key: Any) -> Arrival:
    r"""Return the score-matching solution.

    It minimises
    :math:`E[\frac12 |\nabla f|^2 + \Delta f + \nabla f \cdot \nabla \log p_0] + \frac\eta2 |f|^2`.

    In the same space, with the same penalty; there is no sampler.
    """
    span, rows = problem.space.target, np.asarray(problem.sample.target)
    assert isinstance(span, RandomFeatures)
    with double_precision():
        scores = np.asarray(jax.vmap(jax.grad(problem.base.log_density))(rows))
    frequencies = np.asarray(span.frequencies)
    squares, slopes, scale = (frequencies**2).sum(1), frequencies.T[None], len(frequencies) ** -0.5
    hessian, linear = np.zeros((span.size, span.size)), np.zeros(span.size)
    for start in range(0, len(rows), ROWS_PER_CHUNK):
        some, score = rows[start : start + ROWS_PER_CHUNK], scores[start : start + ROWS_PER_CHUNK]
        phase = some @ frequencies.T
        cosine, sine = scale * np.cos(phase), scale * np.sin(phase)
        gradients = np.concatenate([-sine[:, None] * slopes, cosine[:, None] * slopes], axis=2).reshape(
            -1, span.size
        )
        linear += gradients.T @ score.ravel() - np.concatenate(
            [cosine * squares, sine * squares], axis=1
        ).sum(0)
        hessian += gradients.T @ gradients
    weights = -np.linalg.solve(
        hessian / len(rows) + problem.rkhs_penalty * np.eye(span.size), linear / len(rows)
    )
    return Arrival(problem.tilt(weights), None, "CONVERGED")


# nu and transport that do not move: the sampler is the reference.
FIXED: dict[str, float] = {"nu_rate": 0.0, "transport_rate": 0.0}
# Steps are as many as take about the same processor time.
ROADS: dict[str, Road] = {
    "saddle point": _by(DDE(steps=650)),
    "saddle point, larger batches": _by(DDE(steps=250, saddle=DoublyDual(batch_size=1536, horizon=250.0))),
    "saddle point, batches that grow": _course(
        DoublyDual(horizon=500.0), steps=500, late=(350, DoublyDual(batch_size=1536, horizon=500.0))
    ),
    "saddle point, reference follows the sampler": _course(
        DoublyDual(horizon=500.0), steps=500, refits=tuple(range(50, 500, 50))
    ),
    "singly dual, flow": _by(SinglyDual(family="flow", steps=850)),
    "saddle point, chains from the sampler": _course(Chained(**CHAINED), steps=160, refits=(20, 60, 110)),
    "saddle point, persistent chains": _course(
        Chained(**CHAINED, persistent=True, chains=256, moves=4), steps=160, refits=(20, 60, 110)
    ),
    "persistent chains, transport fixed": _course(
        Chained(**CHAINED | FIXED, persistent=True, chains=256, moves=4), steps=160, refits=(20, 60, 110)
    ),
    "contrastive divergence": _by(ContrastiveDivergence(steps=256)),
    "annealed likelihood": _by(AnnealedLikelihood(steps=16)),
    "importance draws": _by(Convex()),
    "score matching": score_matched,
}


def _fisher_divergence(law: Law, tilt: Tilt) -> float:
    """Return half the mean squared distance of the scores of density and truth, over the test rows."""
    empty = jnp.zeros(0)
    gap = jax.grad(lambda z: law.log_density(z) - tilt.log_unnormalised(z, empty))
    with double_precision():
        gaps = np.asarray(eqx.filter_jit(jax.vmap(gap))(jnp.asarray(law.test)))
    return float(0.5 * np.mean(np.sum(gaps**2, axis=1)))


def _likelihood(law: Law, tilt: Tilt, key: Any, settings: Integration = SMC) -> Values:
    """Return the mean test NLL with its error, and a second log Z from draws of the truth as a check."""
    with double_precision():
        truth = np.asarray(jax.vmap(law.log_density)(jnp.asarray(law.test)))
        found = by_smc(tilt, settings=settings, key=key)
    values = tilt.log_values(law.test)
    ratio = values - truth
    second = float(np.log(np.mean(np.exp(ratio - ratio.max()))) + ratio.max())
    if not np.isfinite(found.standard_error):
        return {"truth_nll": float(-truth.mean()), "log_partition_by_truth": second}
    return {
        "nll": float(found.value - values.mean()),
        "nll_error": float(np.hypot(found.standard_error, values.std() / np.sqrt(len(values)))),
        "truth_nll": float(-truth.mean()),
        "log_partition": found.value,
        "log_partition_error": found.standard_error,
        "log_partition_by_truth": second,
        "effective_truth": float(effective_share(ratio) * len(ratio)),
    }


def told_apart(rows: np.ndarray, draws: np.ndarray) -> float:
    """Return the accuracy of a network that separates held-out draws from held-out rows: 0.5 to 1."""
    from sklearn.neural_network import MLPClassifier

    half = len(rows) // 2
    X, is_draw = np.concatenate([rows, draws]), np.arange(len(rows) + len(draws)) >= len(rows)
    seen = np.concatenate([np.arange(half), len(rows) + np.arange(len(draws) // 2)])
    unseen = np.setdiff1d(np.arange(len(X)), seen)
    network = MLPClassifier((64, 64), early_stopping=True, max_iter=100, random_state=0).fit(
        X[seen], is_draw[seen]
    )
    return float(network.score(X[unseen], is_draw[unseen]))
