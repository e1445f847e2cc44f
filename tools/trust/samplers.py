"""Draws of every estimator, solver and column kind against the density that ``score_samples`` returns.

A single target has a distribution function, and its values at draws are uniform. Other densities are
compared by importance sampling: the mean log density and the frequencies of the cells of each column, over
draws of the sampler and over weighted draws of a kernel density estimate."""

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np
import scipy.stats

from kexpfam import Atom, Bounded, ConditionalKernelExpFamily, Kernel, KernelExpFamily, Learned, Periodic
from kexpfam import estimators as registry
from kexpfam.fit.problem import SOLVERS
from kexpfam.fit.saddle import DoublyDual
from kexpfam.integrate.exact import exact_draws
from tools.trust.outcomes import Outcome

__all__ = ["CHECKS"]

# Draws of a test, its least p-value, centres and weighted draws of the comparison, and cells of a column.
DRAWS, LEAST_P, CENTRES, WEIGHTED, CELLS = 10_000, 2e-5, 400, 10_000, 6
# Degrees of freedom of the kernels of the comparison: its tails are heavier than those of the density.
FREEDOM = 5
BRIEF_CHAIN = Learned(folds=2, repeats=1, epochs=5, polish=())
# A solver with few steps leaves an approximate sampler, which exact draws do not need.
SMALL = {"steps": 20, "saddle": DoublyDual(width=16)}
FIXED = Kernel(lengthscale=0.7, rkhs_penalty=1e-2)
CONDITIONAL = Kernel(
    lengthscale=0.7, rkhs_penalty=1e-2, condition_lengthscale=1.0, base_width=1.0, power=False
)
# Samplers that are approximate by design; only their exact draws are promised.
APPROXIMATE = (
    "dde",
    "adapted",
    "deep",
    "functional",
    "random_features",
    "singly_dual",
    "mmd_gan",
    "no grid",
    "Score",
)

Model = Callable[[np.random.Generator], Any]


def _bimodal(rng: np.random.Generator, columns: int, rows: int = 200) -> np.ndarray:
    return rng.choice([-1.5, 1.5], size=(rows, 1)) + 0.6 * rng.normal(size=(rows, columns))


def _pair(rng: np.random.Generator, targets: int = 1, rows: int = 150) -> tuple[np.ndarray, np.ndarray]:
    x = rng.uniform(-2.0, 2.0, size=(rows, 1))
    y = np.sin(x) + rng.choice([-0.8, 0.8], size=(rows, 1)) + 0.3 * rng.normal(size=(rows, targets))
    return x, y[:, 0] if targets == 1 else y


def _solver(name: str) -> Any:
    """Return a solver with few steps."""
    module, cls, settings = SOLVERS[name]
    found = getattr(importlib.import_module(f"kexpfam.{module}"), cls)
    names = {field.name for field in dataclasses.fields(found)}
    return found(**settings | {name: value for name, value in SMALL.items() if name in names})


def _kinds(rng: np.random.Generator) -> tuple[np.ndarray, dict[int, Any]]:
    """Return a table with one column of each kind, labels as numbers, and gaps in the last column."""
    rows = 300
    table = np.column_stack(
        [
            rng.lognormal(size=rows),
            rng.uniform(size=rows),
            rng.vonmises(0.0, 2.0, size=rows) % 6.28,
            rng.poisson(2.0, size=rows),
            np.where(rng.uniform(size=rows) < 0.3, 0.0, rng.lognormal(size=rows)),
            rng.choice(3, size=rows),
            np.where(rng.uniform(size=rows) < 0.2, np.nan, rng.normal(size=rows)),
        ]
    )
    kinds = {0: "positive", 1: Bounded(0.0, 1.0), 2: Periodic(6.28), 3: "count", 4: Atom(0.0, "positive")}
    return table, kinds | {5: "category"}


def _one_kind(column: int) -> Model:
    def fitted(rng: np.random.Generator) -> Any:
        table, kinds = _kinds(rng)
        columns = {0: kinds[column]} if column in kinds else None
        model = KernelExpFamily(model="chain", learned=BRIEF_CHAIN, columns=columns, random_state=0)
        return model.fit(table[:, [column]])

    return fitted


def models() -> dict[str, Model]:
    """Return a function for each model, which fits it."""
    made: dict[str, Model] = {}
    kernel: Any = {"model": "kernel", "kernel": FIXED, "random_state": 0}
    chain: Any = {"model": "chain", "learned": BRIEF_CHAIN, "random_state": 0}
    given: Any = {"model": "kernel", "kernel": CONDITIONAL, "random_state": 0}
    for name in ("auto", "exact"):
        made[name] = lambda rng, name=name: KernelExpFamily(solver=_solver(name), **kernel).fit(
            _bimodal(rng, 1)
        )
    made["p(y | x)"] = lambda rng: ConditionalKernelExpFamily(**given).fit(*_pair(rng))
    made["two columns"] = lambda rng: KernelExpFamily(**kernel).fit(_bimodal(rng, 2))
    made["bounds"] = lambda rng: KernelExpFamily(bounds=(0, 1), **kernel).fit(rng.beta(2, 3, (200, 1)))
    made["no grid, four columns"] = lambda rng: KernelExpFamily(**kernel).fit(_bimodal(rng, 4))
    made["two targets"] = lambda rng: ConditionalKernelExpFamily(**given).fit(*_pair(rng, 2))
    made["no grid, three targets"] = lambda rng: ConditionalKernelExpFamily(**given).fit(*_pair(rng, 3))
    made["mixture"] = lambda rng: KernelExpFamily(model="mixture", random_state=0).fit(_bimodal(rng, 3))
    made["chain"] = lambda rng: KernelExpFamily(**chain).fit(_bimodal(rng, 3))
    made["chain of p(y | x)"] = lambda rng: ConditionalKernelExpFamily(**chain).fit(*_pair(rng))
    made["chain of two targets"] = lambda rng: ConditionalKernelExpFamily(**chain).fit(*_pair(rng, 2))
    for column, kind in enumerate(("positive", "bounded", "periodic", "count", "atom", "label", "gaps")):
        made[f"column: {kind}"] = _one_kind(column)
    made["columns of all kinds"] = lambda rng: _all_kinds(rng, chain)
    for name in registry.ESTIMATORS:
        cls = getattr(registry, name)
        if name not in ("KernelExpFamily", "ConditionalKernelExpFamily", "SplineFlow"):
            rows = _pair if cls.conditional else lambda rng: (_bimodal(rng, 1),)
            made[name] = lambda rng, cls=cls, rows=rows: cls(**_seeded(cls)).fit(*rows(rng))
    return made | _by_solvers(kernel, given)


def _by_solvers(kernel: dict[str, Any], given: dict[str, Any]) -> dict[str, Model]:
    """Return the models of the other solvers, which take longer."""
    made: dict[str, Model] = {}
    for name in SOLVERS:
        made[name] = lambda rng, name=name: KernelExpFamily(solver=_solver(name), **kernel).fit(
            _bimodal(rng, 1)
        )
    made["dde of p(y | x)"] = lambda rng: ConditionalKernelExpFamily(solver=_solver("dde"), **given).fit(
        *_pair(rng)
    )
    return made


def _seeded(cls: Any) -> dict[str, Any]:
    return {"random_state": 0} if "random_state" in cls().get_params() else {}


def _all_kinds(rng: np.random.Generator, settings: dict[str, Any]) -> Any:
    table, kinds = _kinds(rng)
    return KernelExpFamily(columns=kinds, **settings).fit(table)


def p_value(model: Any, rng: np.random.Generator, *, exact: bool) -> float:
    """Return the p-value of draws of a model against its density."""
    density = model.density_
    draw = exact_draws if exact else lambda one, count, *X, key: one.sample(count, *X, key=key)
    key = jr.key(int(rng.integers(2**31)))
    if density.conditional:
        X, targets = model._training, model._training_targets
        if targets.shape[1] == 1:
            rows = X[rng.integers(len(X), size=DRAWS)]
            draws = np.concatenate(
                [
                    draw(density, 1, part, key=jr.fold_in(key, k))[:, 0]
                    for k, part in enumerate(np.array_split(rows, 10))
                ]
            )
            return float(scipy.stats.kstest(density.cdf(draws, rows), "uniform").pvalue)
        density = density.given(X[int(rng.integers(len(X)))])
    draws = draw(density, DRAWS + CENTRES, key=key)
    return _by_weights(density, draws[CENTRES:], draws[:CENTRES], rng)


def _by_weights(density: Any, draws: np.ndarray, centres: np.ndarray, rng: np.random.Generator) -> float:
    """Return the p-value of draws against weighted draws of a kernel density estimate at some centres."""
    others, log_q = _proposed(density.scaling, centres, _discrete(density, centres), rng)
    inside = density.scaling.inside(others) & np.isfinite(log_q)
    weights = np.zeros(len(others))
    weights[inside] = np.exp(density.log_density(others[inside]) - log_q[inside])
    drawn = _statistics(density, draws, centres)
    weighted = np.zeros((len(others), drawn.shape[1]))
    weighted[inside] = _statistics(density, others[inside], centres)
    means = weights @ weighted / weights.sum()
    errors = np.sqrt(weights**2 @ (weighted - means) ** 2) / weights.sum()
    own, own_errors = drawn.mean(axis=0), drawn.std(axis=0) / np.sqrt(len(drawn))
    scores = (own - means) / np.maximum(np.hypot(errors, own_errors), 1e-12)
    total = (weights.mean() - 1.0) / (weights.std() / np.sqrt(len(weights)))
    scores = np.append(scores, total)
    return float(min(1.0, len(scores) * 2.0 * scipy.stats.norm.sf(np.max(np.abs(scores)))))


def _discrete(density: Any, rows: np.ndarray) -> np.ndarray:
    """Return which cells have a probability: labels, whole numbers, atoms and gaps."""
    kinds = density.scaling.kinds or ()
    discrete = np.array([kind.discrete for kind in kinds] or [False] * rows.shape[1])
    return discrete | np.isnan(rows) | density.scaling.atoms(rows) if kinds else np.isnan(rows)


def _proposed(
    scaling: Any, centres: np.ndarray, kept: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return draws of a kernel density estimate in model units and their log density in data units.

    Cells that are ``kept`` stay as they are. Points outside the support have log density infinity."""
    z = np.where(kept, 0.0, scaling.to_model(centres))
    spread = np.subtract(*np.nanpercentile(np.where(kept, np.nan, z), [75, 25], axis=0)) / 1.35
    width = np.nan_to_num(spread) * len(centres) ** (-1.0 / (centres.shape[1] + 4))
    which = rng.integers(len(centres), size=WEIGHTED)
    still, noise = kept[which], scipy.stats.t(FREEDOM).rvs((WEIGHTED, z.shape[1]), random_state=rng)
    moved = np.where(still, 0.0, z[which] + width * noise)
    draws = np.where(still, centres[which], scaling.to_data(moved))
    log_q = np.full(WEIGHTED, -np.inf)
    for start in range(0, len(centres), 100):
        rows = slice(start, start + 100)
        logs = np.zeros((WEIGHTED, len(centres[rows])))
        for j, (column, own) in enumerate(zip(centres[rows].T, z[rows].T, strict=True)):
            values = draws[:, j, None]
            same = (values == column) | (np.isnan(values) & np.isnan(column))
            with np.errstate(divide="ignore", invalid="ignore"):
                near = _log_kernel((moved[:, j, None] - own) / width[j]) - np.log(width[j])
            near = np.where(still[:, j, None] | np.isnan(near), -np.inf, near)
            logs += np.where(kept[rows, j], np.where(same, 0.0, -np.inf), near)
        log_q = np.logaddexp(log_q, np.logaddexp.reduce(logs, axis=1))
    # Points beyond an end or a period come back as other points.
    back = np.where(still, 0.0, scaling.to_model(np.where(still, 1.0, draws)))
    beyond = np.any(np.abs(back - moved) > 1e-6 * (1.0 + np.abs(moved)), axis=1)
    slopes = np.where(still, 0.0, scaling.log_jacobians(draws)).sum(axis=1)
    return draws, np.where(beyond, np.inf, log_q - np.log(len(centres)) + slopes)


def _log_kernel(z: np.ndarray) -> np.ndarray:
    """Return the log density of Student's t."""
    return scipy.stats.t.logpdf(0.0, FREEDOM) - 0.5 * (FREEDOM + 1) * np.log1p(z**2 / FREEDOM)


def _statistics(density: Any, rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return log density and indicators of the cells of each column, (rows, statistics)."""
    parts = [density.log_density(rows)]
    for column, seen in zip(rows.T, centres.T, strict=True):
        parts.append(np.isnan(column).astype(float))
        edges = np.unique(np.nanquantile(seen, np.linspace(0.0, 1.0, CELLS + 1)[1:-1]))
        parts += [(column <= edge).astype(float) for edge in edges]
    return np.column_stack(parts)


def samplers(trials: int, seed: int, folder: Path) -> Outcome:
    """Test plain draws of samplers that claim to be exact, and exact draws of all."""
    del folder
    chosen = list(models().items())[:trials]
    failures, least, tests = [], 1.0, 0
    for place, (name, fitted) in enumerate(chosen):
        rng = np.random.default_rng([seed, place])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = fitted(rng)
            for exact in (False, True) if not name.startswith(APPROXIMATE) else (True,):
                found = p_value(model, rng, exact=exact)
                tests, least = tests + 1, min(least, found)
                failures += [f"{name}, exact={exact}: p = {found:.1e}"] if found <= LEAST_P else []
    return Outcome(tests, failures, f"{len(chosen)} models; least p = {least:.1g}")


CHECKS = {one.__name__: one for one in (samplers,)}
