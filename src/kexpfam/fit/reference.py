"""Plain densities on the held-out rows of a fit: the score that any useful fit reaches.

They are fitted to the rows outside each held-out part, like the candidates: a normal, two normals, a kernel
density estimate; a normal linear model of p(y | x); independent columns of tables with labels or gaps."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
from scipy.spatial import cKDTree

from kexpfam.data.sample import RandomKey
from kexpfam.data.weights import part_of, standard_error, weighted_mean
from kexpfam.fit.bases import MOST_CENTRES, kernel_density_scores
from kexpfam.fit.folds import Folds, left_out_rows
from kexpfam.fit.kernel import KernelFit
from kexpfam.fit.mixture import MixtureShape, fit_mixture
from kexpfam.fit.problem import Status
from kexpfam.fit.stack import CandidateScore, Stacked
from kexpfam.fit.task import Fitted, Task
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.ensemble import LawDensity
from kexpfam.model.measures import Gaussian
from kexpfam.stacklevel import caller_level

# Rows that a kernel density estimate is scored on.
MOST_SCORED = 1000
# The largest loss (nats) of a default fit against a normal, and the fewest held-out rows that show it.
WORST_LOSS, FEWEST_ROWS = 0.1, 30
# The weight of |coefficients|^2 / 2 of a linear model of standardised inputs, in rows.
RIDGE = 1.0
# The cross-validation of given settings: fits, rows under conditions, draws where there is no grid, and the
# fineness of the grid of the scores: f can be large between the nodes that it was fitted on.
FOLDS, MOST_CONDITIONS, FOLD_DRAWS, CHECKED = 5, 600, 8192, 1.3


class FallbackWarning(UserWarning):
    """The fit scored lower than a normal on held-out rows, and the normal is the density."""


class Comparison(NamedTuple):
    """Mean held-out log densities (nats) on the same rows.

    ``score`` is that of the fit, None if its settings were given and nothing was held out. ``references`` are
    those of plain densities. ``errors`` are the standard errors of ``references - score``."""

    rows: int
    score: float | None
    references: dict[str, float]
    errors: dict[str, float]

    @staticmethod
    def of(
        held_out: np.ndarray | None, plain: Mapping[str, np.ndarray], weight: np.ndarray | None
    ) -> "Comparison | None":
        """Return the comparison on the rows that all plain densities were scored on, or None."""
        if not plain:
            return None
        seen = np.all([np.isfinite(scores) for scores in plain.values()], axis=0)
        if held_out is not None:
            seen &= ~np.isnan(held_out)
        mean = lambda scores: float(weighted_mean(scores[seen], part_of(weight, seen)))
        if not np.any(seen):
            return None
        references = {name: mean(scores) for name, scores in plain.items()}
        if held_out is None:
            return Comparison(int(seen.sum()), None, references, {})
        error = lambda scores: standard_error((scores - held_out)[seen], part_of(weight, seen))
        finite = bool(np.all(np.isfinite(held_out[seen])))
        errors = {name: error(scores) if finite else np.inf for name, scores in plain.items()}
        return Comparison(int(seen.sum()), mean(held_out), references, errors)

    @property
    def best(self) -> str:
        """Return the name of the best plain density."""
        return max(self.references, key=lambda name: self.references[name])


def plain_scores(task: Task) -> dict[str, np.ndarray]:
    """Return the log density of each held-out row, in data units, under plain densities that have not seen
    its part; NaN for other rows."""
    laws = {"independent columns": _independent}
    if task.numeric and task.conditional:
        laws = {"normal linear model": _linear}
    elif task.numeric:
        laws = {"normal": _normal, "mixture": _mixture, "kernel density": _kernel_density}
    found = {}
    for name, law in laws.items():
        found[name] = scores = np.full(len(task.values), np.nan)
        for kept, held in zip(task.splits.kept, task.splits.held, strict=True):
            scores[held] = law(task, kept, held)
        scores += 0.0 if law is _independent else task.log_jacobian
    return found


def _normal(task: Task, kept: np.ndarray, held: np.ndarray) -> np.ndarray:
    z, weight = task.sample.target, task.sample.weight
    return Gaussian.fitted(z[kept], weight=part_of(weight, kept)).log_densities(z[held])


def _mixture(task: Task, kept: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return scores under a mixture of two normals, without a search."""
    z, weight, kept = task.sample.target, task.sample.weight, kept[:MOST_CENTRES]
    law = fit_mixture(z[kept], MixtureShape(2, False), seed=task.keys.seed, weight=part_of(weight, kept))
    return law.log_densities(z[held])


def _linear(task: Task, kept: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return scores under a linear regression with normal residuals."""
    z, weight = task.sample.target, task.sample.weight
    inputs = np.column_stack([np.ones(len(z)), task.sample.condition])
    counts = task.sample.counts[kept]
    penalty = RIDGE * np.diag([0.0, *np.ones(inputs.shape[1] - 1)])
    gram = (inputs[kept].T * counts) @ inputs[kept] + penalty
    residuals = z - inputs @ np.linalg.lstsq(gram, (inputs[kept].T * counts) @ z[kept])[0]
    law = Gaussian.fitted(residuals[kept], weight=part_of(weight, kept))
    return law.log_densities(residuals[held])


def _kernel_density(task: Task, kept: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return scores under the kernel density estimate of the best bandwidth; NaN for rows beyond a number."""
    few = held[: MOST_SCORED // len(task.splits.held)]
    scores = kernel_density_scores(task.sample.target, task.sample.weight, kept, few)
    return np.append(scores, np.full(len(held) - len(few), np.nan))


def _independent(task: Task, kept: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return scores under independent columns: frequencies of labels, atoms and gaps, normals elsewhere."""
    values, scaling, total = task.values, task.scaling, np.zeros(len(held))
    z, slopes, atoms = task.sample.target, scaling.log_jacobians(values), scaling.atoms(values)
    counts = task.sample.counts
    for column, kind in enumerate(task.kinds):
        cells = values[:, column]
        real = ~np.isnan(cells) & ~atoms[:, column] & ~np.full(len(cells), kind.discrete)
        # All real cells are one level of the table of frequencies.
        levels, level = np.unique(np.where(real, -np.inf, cells), return_inverse=True)
        seen = np.bincount(level[kept], counts[kept], len(levels)) + 1.0
        total += np.log(seen[level[held]] / seen.sum())
        own = kept[real[kept]]
        if len(own) > 1:
            law = Gaussian.fitted(z[own, column, None], weight=part_of(task.sample.weight, own))
            scores = law.log_densities(np.where(real, z[:, column], 0.0)[held, None]) + slopes[held, column]
            total += np.where(real[held], scores, 0.0)
    return total


def or_normal(task: Task, stacked: Stacked, plain: Mapping[str, np.ndarray]) -> Stacked:
    """Return the stack, or a normal of the columns in model units if it scores higher on held-out rows.

    Model units of columns with heavy tails are those of their logarithm."""
    held_out, normal, weight = stacked.held_out, plain.get("normal"), task.sample.weight
    if held_out is None or normal is None or task.support is not None:
        return stacked
    seen = np.isfinite(normal) & ~np.isnan(held_out)
    counts, gains = part_of(weight, seen), (normal - held_out)[seen]
    if len(gains) < FEWEST_ROWS:
        return stacked
    gain, error = weighted_mean(gains, counts), standard_error(np.clip(gains, -1e6, 1e6), counts)
    if gain <= max(WORST_LOSS, 2.0 * error):
        return stacked
    message = (
        f"a normal scores {gain:.2g} nats higher on held-out rows than the fit and is the density: see "
        "candidates_. Columns may need another kind, such as columns={...: 'positive'}."
    )
    warnings.warn(message, FallbackWarning, stacklevel=caller_level())
    law = LawDensity(Gaussian.fitted(task.sample.target, weight=weight), task.scaling)
    own = CandidateScore(
        "normal", 1.0, float(weighted_mean(normal[seen], counts)), standard_error(normal[seen], counts)
    )
    others = [one._replace(weight=0.0) for one in stacked.scores]
    fitted = Fitted(law, normal, Status.CONVERGED, {}, {})
    return Stacked(law, [*others, own], stacked.fitted | {"normal": fitted})


def nearest_other(points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the position of the nearest other point of each of the points in ``rows``."""
    _, places = cKDTree(points).query(points[rows], k=2)
    return np.where(places[:, 0] == rows, places[:, 1], places[:, 0])


def cross_validated(fit: KernelFit, targets: np.ndarray, *, key: RandomKey) -> np.ndarray | None:
    """Return the log density of each row in model units under fits of the same settings without its fold.

    ``targets`` are all columns of the rows of the problem; f may depend on some of them. Rows beyond a number
    have NaN. The result is None if the problem has only a part of the rows."""
    nodes_key, check_key, row_key = jr.split(key, 3)
    problem, rows, seed = fit.problem, np.arange(len(targets)), seed_from(row_key)
    if len(problem.sample) != len(targets):
        return None
    if problem.conditional and len(rows) > MOST_CONDITIONS:
        rows = np.sort(np.random.default_rng(seed).permutation(rows)[:MOST_CONDITIONS])
    part: Any = {"sample": problem.sample.rows(rows), "space": fit.solution.tilt.space, "mean_feature": None}
    problem = dataclasses.replace(problem, **part)
    nodes = problem.nodes(draws=FOLD_DRAWS, key=nodes_key)
    check = problem.nodes(draws=FOLD_DRAWS, fineness=CHECKED, key=check_key)
    folds = Folds(problem, nodes, check, left_out_rows(problem.sample, FOLDS, 1, seed=seed))
    scores = np.full(len(targets), np.nan)
    penalty = fit.solution.facts.get("rkhs_penalty", problem.rkhs_penalty)
    scores[rows] = folds.scores(float(penalty)) + fit.selection.base.log_densities(targets[rows])
    return scores
