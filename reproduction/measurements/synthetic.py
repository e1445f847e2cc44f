"""Synthetic sets, whose truth is known: likelihood, distance of samples, time and memory."""

from typing import Any

import jax
import jax.random as jr
import numpy as np

from kexpfam import datasets
from kexpfam.estimators.kernel_exp_family import KernelExpFamily
from kexpfam.judge.measure import sampler_fit
from kexpfam.judge.metrics import mmd_squared
from kexpfam.model.density import TiltedDensity
from kexpfam.model.kernels import median_distance
from reproduction.cost import Cost, timed
from reproduction.methods import DENSITIES, DUALS, SPACES, solver_named, with_solver
from reproduction.real_data import stored_array
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["algorithm", "density", "dual", "moons", "ring_shares", "space", "synthetic"]

TEST_ROWS = {"two-moons": 5000, "rings": 5000, "grid": 1500}
DRAWS, JUDGED_DRAWS, REFINING_STEPS = 5000, 4000, 10
# Draws of the model and rows of the truth that tell differences of 1e-4 in MMD^2 apart, which the test rows
# do not.
MANY_DRAWS = 10_000
# The paper's distance has exp(-gamma |x - x'|^2) with gamma = 0.5 / (0.1 median^2).
MMD_SCALE = np.sqrt(0.1)


def density(cell: Cell) -> Values:
    """Return likelihood, distance of samples and cost of one estimator on one draw of a synthetic set."""
    return _measured(DENSITIES[cell["method"]](cell["seed"]), cell)


def algorithm(cell: Cell) -> Values:
    """Return the same for one solver of the kernel exponential family."""
    return _measured(with_solver(solver_named(cell["method"]), cell["seed"]), cell)


def moons(cell: Cell) -> Values:
    """Return the distance between draws and the paper's test rows of the two moons.

    The draws are those of the truth, or of an estimator fitted to the paper's training rows or to fresh ones.
    """
    truth, seed = synthetic("two-moons", 2), cell["seed"]
    rows, test = (
        stored_array("synthetic", f"two_moon_{part}.npy").astype(float) for part in ("train", "test")
    )
    lengthscale = MMD_SCALE * median_distance(rows, most=len(rows))
    if cell["method"] == "truth":
        draws = truth.sample(len(test), random_state=seed)
    else:
        train = rows if cell["train"] == "paper" else truth.sample(len(rows), random_state=seed)
        draws = DENSITIES[cell["method"]](seed).fit(train).sample(len(test), random_state=seed)
    distance = mmd_squared(draws, test, lengthscale=lengthscale)
    return {"mmd": distance.value, "mmd_error": distance.standard_error}


def dual(cell: Cell) -> Values:
    """Return the same for one family of dual distributions, f as the saddle point leaves it."""
    return _measured(with_solver(DUALS[cell["method"]](), cell["seed"]), cell)


def space(cell: Cell) -> Values:
    """Return the same for one solver with f in another space than the default's."""
    return _measured(
        KernelExpFamily(
            model="kernel", kernel=SPACES[cell["space"]], solver=cell["method"], random_state=cell["seed"]
        ),
        cell,
    )


def _measured(model: Any, cell: Cell) -> Values:
    truth = synthetic(cell["dataset"], cell["dim"])
    train = truth.sample(cell["rows"], random_state=cell["seed"])
    test = truth.sample(TEST_ROWS[cell["dataset"]], random_state=1000 + cell["seed"])
    lengthscale = MMD_SCALE * median_distance(train, most=len(train))
    jax.clear_caches()  # so that every fit pays for its own compilation, whichever cells ran before it
    with Cost() as cost:
        model.fit(train)
    scores, draws = model.score_samples(test), model.sample(len(test), random_state=cell["seed"])
    distance = mmd_squared(draws, test, lengthscale=lengthscale)
    values: Values = {
        "nll": float(-scores.mean()),
        "nll_error": float(scores.std() / np.sqrt(len(scores))),
        "truth_nll": float(-truth.log_density(test).mean()),
        "mmd": distance.value,
        "mmd_error": distance.standard_error,
        "seconds": cost.seconds,
        "processor_seconds": cost.processor_seconds,
        "megabytes": cost.megabytes,
        "sampling_seconds": timed(lambda: model.sample(DRAWS, random_state=0), repeats=3),
    }
    if cell["dataset"] == "rings":
        values["shares"] = ring_shares(draws)
    if cell["measure"] == "density" and isinstance(model, KernelExpFamily):
        refined = model.sample(len(test), random_state=cell["seed"], refine=REFINING_STEPS)
        values["mmd_refined"] = mmd_squared(refined, test, lengthscale=lengthscale).value
        many = truth.sample(MANY_DRAWS, random_state=2000 + cell["seed"])
        resolved = mmd_squared(
            model.sample(MANY_DRAWS, random_state=cell["seed"]), many, lengthscale=lengthscale
        )
        values |= {"mmd_resolved": resolved.value, "mmd_resolved_error": resolved.standard_error}
    return values | (_facts_of_ours(model, train, cell) if isinstance(model, KernelExpFamily) else {})


def _facts_of_ours(model: KernelExpFamily, train: np.ndarray, cell: Cell) -> Values:
    """Return the divergence between sampler and density, and the solver's facts, of a model that has both.

    Where other candidates share the density with the kernel model, only their weights.
    """
    weights = {"weights": {one.name: one.weight for one in model.candidates_}}
    density = model.density_
    if (
        not isinstance(density, TiltedDensity)
        or density.log_partition is None
        or model.solution_ is None
        or model.selection_ is None
    ):
        return weights
    fitted = sampler_fit(model.density_, train, JUDGED_DRAWS, key=jr.key(cell["seed"]))
    return weights | {
        "status": model.solution_.status.name,
        "sampler_kl": fitted.kl.value,
        "sampler_folds": fitted.draws.folds,
        "effective_share": fitted.share,
        "log_partition_error": density.log_partition.standard_error,
        "dims": list(model.selection_.settings.dims),
        "facts": {name: float(value) for name, value in model.solution_.facts.items() if np.isfinite(value)},
    }


def synthetic(name: str, dim: int) -> datasets.Synthetic:
    """Return the synthetic set of that name."""
    return datasets.two_moons() if name == "two-moons" else getattr(datasets, name)(dim)


def ring_shares(draws: np.ndarray) -> list[float]:
    """Return the shares of the draws on the three circles; 1/9, 3/9 and 5/9 are true."""
    radius = np.hypot(draws[:, 0], draws[:, 1])
    return [
        float(np.mean(radius < 2)),
        float(np.mean((radius >= 2) & (radius < 4))),
        float(np.mean(radius >= 4)),
    ]
