"""Draws of every estimator, solver and column kind against the density that ``score_samples`` returns.

A single target has a distribution function, and its values at draws are uniform. Other densities are
compared by importance sampling: the mean log density and the frequencies of the cells of each column, over
draws of the sampler and over weighted draws of a kernel density estimate."""

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np
import scipy.stats

from kexpfam import (
    Atom,
    Bounded,
    ConditionalKernelExpFamily,
    Kernel,
    KernelExpFamily,
    Learned,
    Periodic,
    Rounded,
)
from kexpfam import estimators as registry
from kexpfam.fit.problem import SOLVERS
from kexpfam.fit.saddle import DoublyDual
from kexpfam.integrate.exact import exact_draws
from tools.trust.outcomes import Outcome

__all__ = ["CHECKS"]

# Draws of a test, its least p-value, centres and weighted draws of the comparison, and cells of a column.
DRAWS, LEAST_P, CENTRES, WEIGHTED, CELLS = 10_000, 2e-5, 400, 10_000, 6
# Parts of the rows that draws of p(y | x) are made for.
PARTS = 10
# Rows of a table with columns of several kinds.
KIND_ROWS = 300
# The kernels of the comparison are Student's t with these degrees of freedom, and a share of wide Cauchy
# laws: the tails must be heavier than those of the density, or weights are unbounded and errors too small.
FREEDOM, WIDE_SHARE, WIDE = 5, 0.1, 4.0
BRIEF_CHAIN = Learned(folds=2, repeats=1, epochs=5)
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


# Columns of each kind: rows as numbers, labels too, and the kind, which the last two do not need.
KINDS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], Any]] = {
    "positive": (lambda rng, rows: rng.lognormal(size=rows), "positive"),
    "bounded": (lambda rng, rows: rng.uniform(size=rows), Bounded(0.0, 1.0)),
    "periodic": (lambda rng, rows: rng.vonmises(0.0, 2.0, size=rows) % 6.28, Periodic(6.28)),
    "count": (lambda rng, rows: rng.poisson(2.0, size=rows), "count"),
    # The density of a rounded number is that of its step, which is 1 as for a count.
    "rounded": (lambda rng, rows: np.round(5.0 * rng.normal(size=rows)), Rounded(1.0)),
    "atom": (
        lambda rng, rows: np.where(rng.uniform(size=rows) < 0.3, 0.0, rng.lognormal(size=rows)),
        Atom(0.0, "positive"),
    ),
    "label": (lambda rng, rows: rng.choice(3, size=rows), "category"),
    "gaps": (
        lambda rng, rows: np.where(rng.uniform(size=rows) < 0.2, np.nan, rng.normal(size=rows)),
        None,
    ),
}
# Tables of several kinds: every kind is in one. In wider tables the weights of the comparison are few.
TABLES = (("positive", "count", "label", "gaps"), ("bounded", "periodic", "rounded", "atom"))
# The kinds of a kernel model; the others have no density on the line.
SMOOTH = ("positive", "bounded")


def _table(rng: np.random.Generator, names: Iterable[str]) -> tuple[np.ndarray, dict[int, Any]]:
    """Return a table with one column of each of these kinds, and the kinds that must be named."""
    drawn = [KINDS[name][0](rng, KIND_ROWS) for name in names]
    kinds = {column: KINDS[name][1] for column, name in enumerate(names)}
    return np.column_stack(drawn).astype(float), {j: kind for j, kind in kinds.items() if kind is not None}


def _joint(names: Iterable[str], **settings: Any) -> Model:
    """Return a model of p(x) with columns of these kinds."""

    def fitted(rng: np.random.Generator) -> Any:
        table, kinds = _table(rng, names)
        return KernelExpFamily(columns=kinds or None, random_state=0, **settings).fit(table)

    return fitted


def _given(names: Iterable[str], **settings: Any) -> Model:
    """Return a model of p(y | x) with targets of these kinds."""

    def fitted(rng: np.random.Generator) -> Any:
        table, kinds = _table(rng, names)
        x = rng.uniform(-2.0, 2.0, size=(len(table), 1))
        model = ConditionalKernelExpFamily(target_columns=kinds or None, random_state=0, **settings)
        return model.fit(x, table)

    return fitted


def models() -> dict[str, Model]:
    """Return a function for each model, which fits it: every estimator, solver and kind of column."""
    made: dict[str, Model] = {}
    chain: Any = {"model": "chain", "learned": BRIEF_CHAIN}
    for name, one in (("chain", chain), ("all candidates", {"learned": BRIEF_CHAIN})):
        made[f"{name} of p(x)"] = lambda rng, one=one: KernelExpFamily(**one, random_state=0).fit(
            _bimodal(rng, 3)
        )
        for targets in (1, 2):
            made[f"{name} of p(y | x), targets: {targets}"] = lambda rng, one=one, targets=targets: (
                ConditionalKernelExpFamily(**one, random_state=0).fit(*_pair(rng, targets))
            )
    for kind in KINDS:
        made[f"chain, column: {kind}"] = _joint([kind], **chain)
        made[f"chain, target: {kind}"] = _given([kind], **chain)
    for kinds in TABLES:
        made[f"chain, columns: {', '.join(kinds)}"] = _joint(kinds, **chain)
        made[f"chain, targets: {', '.join(kinds)}"] = _given(kinds, **chain)
    made["mixture"] = lambda rng: KernelExpFamily(model="mixture", random_state=0).fit(_bimodal(rng, 3))
    made["mixture, column: positive"] = _joint(["positive"], model="mixture")
    return made | _other_estimators() | _by_solvers()


def _other_estimators() -> dict[str, Model]:
    """Return the other estimators with one and two columns; the flow needs an optional library."""
    made: dict[str, Model] = {}
    for name in registry.ESTIMATORS:
        cls = getattr(registry, name)
        if name in ("KernelExpFamily", "ConditionalKernelExpFamily", "SplineFlow"):
            continue
        for columns in (1, 2):
            rows = lambda rng, columns=columns, cls=cls: (
                _pair(rng, columns) if cls.conditional else (_bimodal(rng, columns),)
            )
            made[f"{name}, {columns}"] = lambda rng, cls=cls, rows=rows: cls(**_seeded(cls)).fit(*rows(rng))
    return made


def _by_solvers() -> dict[str, Model]:
    """Return the kernel models of every solver, for p(x) and, where there are conditions, for p(y | x)."""
    made: dict[str, Model] = {}
    for name in SOLVERS:
        solver = _solver(name)
        own: Any = {"model": "kernel", "kernel": FIXED, "solver": solver}
        given: Any = {"model": "kernel", "kernel": CONDITIONAL, "solver": solver}
        for columns in (1, 2):
            made[f"{name}, columns: {columns}"] = lambda rng, own=own, columns=columns: KernelExpFamily(
                random_state=0, **own
            ).fit(_bimodal(rng, columns))
        made |= {f"{name}, column: {kind}": _joint([kind], **own) for kind in SMOOTH}
        if not solver.supports_conditions:
            continue
        for targets in (1, 2):
            made[f"{name} of p(y | x), targets: {targets}"] = lambda rng, given=given, targets=targets: (
                ConditionalKernelExpFamily(random_state=0, **given).fit(*_pair(rng, targets))
            )
        made |= {f"{name} of p(y | x), target: {kind}": _given([kind], **given) for kind in SMOOTH}
    kernel: Any = {"model": "kernel", "kernel": FIXED, "random_state": 0}
    given = {"model": "kernel", "kernel": CONDITIONAL, "random_state": 0}
    made["no grid, four columns"] = lambda rng: KernelExpFamily(**kernel).fit(_bimodal(rng, 4))
    made["no grid, three targets"] = lambda rng: ConditionalKernelExpFamily(**given).fit(*_pair(rng, 3))
    return made


def _seeded(cls: Any) -> dict[str, Any]:
    return {"random_state": 0} if "random_state" in cls().get_params() else {}


def p_value(model: Any, rng: np.random.Generator, *, exact: bool) -> float:
    """Return the p-value of draws of a model against its density."""
    density = model.density_
    if not density.conditional:
        draws = model.sample(DRAWS + CENTRES, _seed(rng), exact=exact)
        return _by_weights(density, np.asarray(draws, float), rng)
    X, targets = model._training, model._training_targets
    if targets.shape[1] == 1 and not _discrete(density, targets).any():
        rows = X[rng.integers(len(X), size=DRAWS)]
        parts = np.array_split(rows, PARTS)
        draws = np.concatenate([model.sample(part, 1, _seed(rng), exact=exact) for part in parts])
        return float(scipy.stats.kstest(density.cdf(draws.reshape(-1, 1), rows), "uniform").pvalue)
    density, key = density.given(X[int(rng.integers(len(X)))]), jr.key(_seed(rng))
    drawn = (
        exact_draws(density, DRAWS + CENTRES, key=key) if exact else density.sample(DRAWS + CENTRES, key=key)
    )
    return _by_weights(density, drawn, rng)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


def _by_weights(density: Any, drawn: np.ndarray, rng: np.random.Generator) -> float:
    """Return the p-value of draws against weighted draws of a kernel density estimate at the first of them.

    Of both, only rows count whose discrete cells are those of a centre: other rows are never proposed."""
    centres, draws = drawn[:CENTRES], drawn[CENTRES:]
    kept = _discrete(density, centres)
    others, log_q = _proposed(density.scaling, centres, kept, rng)
    used = density.scaling.inside(others) & np.isfinite(log_q) & _in_one_period(density.scaling, others)
    weights = np.zeros(len(others))
    weights[used] = np.exp(density.log_density(others[used]) - log_q[used])
    seen = {row.tobytes() for row in _discrete_part(kept, centres)}
    found = np.array([row.tobytes() in seen for row in _discrete_part(_discrete(density, draws), draws)])
    own = found[:, None] * _statistics(density, draws, centres)
    weighted = np.zeros((len(others), own.shape[1]))
    weighted[used] = weights[used, None] * _statistics(density, others[used], centres)
    errors = np.hypot(own.std(axis=0) / np.sqrt(len(own)), weighted.std(axis=0) / np.sqrt(len(weighted)))
    scores = (own.mean(axis=0) - weighted.mean(axis=0)) / np.maximum(errors, 1e-12)
    return float(min(1.0, len(scores) * 2.0 * scipy.stats.norm.sf(np.max(np.abs(scores)))))


def _in_one_period(scaling: Any, rows: np.ndarray) -> np.ndarray:
    """Return which rows have no periodic cell outside the first period, where it is another one again."""
    periods = np.array([getattr(kind, "period", np.inf) for kind in scaling.kinds or ()] or [np.inf])
    beyond = (rows < 0.0) | (rows >= periods)
    return ~np.any(beyond & np.isfinite(periods), axis=1)


def _discrete_part(discrete: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the discrete cells of rows, NaN as a large number, and infinity in place of the others."""
    return np.where(discrete, np.nan_to_num(rows + 0.0, nan=1e300), np.inf)


def _discrete(density: Any, rows: np.ndarray) -> np.ndarray:
    """Return which cells have a probability: labels, whole and rounded numbers, atoms and gaps."""
    kinds = density.scaling.kinds or ()
    stepped = [kind.discrete or kind.rounding is not None for kind in kinds]
    discrete = np.array(stepped or [False] * rows.shape[1])
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
    still, noise = kept[which], _noise(rng, (WEIGHTED, z.shape[1]))
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


def _noise(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return draws of the kernel."""
    wide = rng.uniform(size=shape) < WIDE_SHARE
    return np.where(wide, WIDE * rng.standard_cauchy(shape), rng.standard_t(FREEDOM, shape))


def _log_kernel(z: np.ndarray) -> np.ndarray:
    """Return the log density of the kernel."""
    narrow = scipy.stats.t.logpdf(0.0, FREEDOM) - 0.5 * (FREEDOM + 1) * np.log1p(z**2 / FREEDOM)
    wide = -np.log(np.pi * WIDE) - np.log1p((z / WIDE) ** 2)
    return np.logaddexp(np.log(1.0 - WIDE_SHARE) + narrow, np.log(WIDE_SHARE) + wide)


def _statistics(density: Any, rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return one, the log density, and indicators of the cells of each column, (rows, statistics)."""
    parts = [np.ones(len(rows)), density.log_density(rows)]
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
                failures += [] if found > LEAST_P else [f"{name}, exact={exact}: p = {found:.1e}"]
    return Outcome(tests, failures, f"{len(chosen)} models; least p = {least:.1g}")


CHECKS = {one.__name__: one for one in (samplers,)}
