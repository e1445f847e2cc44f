"""Tables with a known law: a proportion, an angle, a count, a label, an amount, and all of them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logsumexp
from scipy.stats import beta, lognorm, norm, poisson, vonmises

__all__ = ["TABLES", "MixedTable", "jittered"]

Rows = np.ndarray
LABELS = ("u", "v", "w")
SHARES = np.array([0.5, 0.3, 0.2])
MISSING = 0.2


class MixedTable(NamedTuple):
    """Kinds of the columns, draws of rows, and the log density of rows with possibly missing cells."""

    kinds: dict[int, str]
    draw: Callable[[np.random.Generator, int], Rows]
    log_density: Callable[[Rows], np.ndarray]
    dim: int


def _real_and(column: Callable, log_column: Callable, kind: str) -> MixedTable:
    """Return a standard normal column, and one of another kind that depends on it."""

    def draw(rng: np.random.Generator, count: int) -> Rows:
        x = rng.normal(size=count)
        return np.column_stack([x, column(rng, x)])

    return MixedTable({1: kind}, draw, lambda rows: norm.logpdf(rows[:, 0]) + log_column(*rows.T), 2)


def _amounts(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    return np.where(rng.random(len(x)) < expit(x), 0.0, np.exp(1.0 + 0.5 * x + 0.6 * rng.normal(size=len(x))))


def _log_amounts(x: np.ndarray, paid: np.ndarray) -> np.ndarray:
    some = np.where(paid > 0.0, paid, 1.0)
    return np.where(
        paid > 0.0,
        np.log(expit(-x)) + lognorm.logpdf(some, 0.6, scale=np.exp(1.0 + 0.5 * x)),
        np.log(expit(x)),
    )


def _shares(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return 6.0 * expit(x), 6.0 * expit(-x)


def _angles(rng: np.random.Generator, count: int) -> Rows:
    narrow = rng.random(count) < 0.4
    radians = np.where(narrow, rng.vonmises(0.0, 4.0, count), rng.vonmises(2.5, 1.5, count))
    return np.degrees(radians)[:, None] % 360.0


def _log_angles(rows: Rows) -> np.ndarray:
    radians = np.radians(rows[:, 0])
    density = 0.4 * vonmises.pdf(radians, 4.0, loc=0.0) + 0.6 * vonmises.pdf(radians, 1.5, loc=2.5)
    return np.log(density) + np.log(np.pi / 180.0)


MEANS, WIDTHS = np.array([-2.0, 0.0, 2.5]), np.array([1.0, 0.5, 1.5])
RATES, TURNS, TIGHT = np.array([1.0, 4.0, 9.0]), np.array([0.0, 2.0, 4.0]), np.array([3.0, 1.0, 6.0])
NOTHING, AMOUNTS = np.array([0.6, 0.3, 0.1]), np.array([0.0, 1.0, 2.0])
FIRST, SECOND = np.array([2.0, 5.0, 3.0]), np.array([6.0, 2.0, 3.0])


def _labels(rng: np.random.Generator, count: int) -> Rows:
    label = rng.choice(3, size=count, p=SHARES)
    return np.column_stack([label, MEANS[label] + WIDTHS[label] * rng.normal(size=count)])


def _log_labels(rows: Rows) -> np.ndarray:
    label = rows[:, 0].astype(int)
    return np.log(SHARES[label]) + norm.logpdf(rows[:, 1], MEANS[label], WIDTHS[label])


def _everything(rng: np.random.Generator, count: int) -> Rows:
    """Return all kinds, independent given the label, with a fifth of the cells missing."""
    rows = _labels(rng, count)
    label = rows[:, 0].astype(int)
    angle = np.degrees(rng.vonmises(TURNS[label], TIGHT[label])) % 360.0
    paid = np.where(
        rng.random(count) < NOTHING[label], 0.0, np.exp(AMOUNTS[label] + 0.5 * rng.normal(size=count))
    )
    columns = [rows, rng.poisson(RATES[label]), angle, paid, rng.beta(FIRST[label], SECOND[label])]
    rows = np.column_stack(columns)
    rows[rng.random(rows.shape) < MISSING] = np.nan
    return rows[~np.all(np.isnan(rows), axis=1)]


def _log_everything(rows: Rows) -> np.ndarray:
    """Return the density of the cells that are there: a sum over labels, of which one is known or none."""
    label, real, count, angle, paid, share = rows.T[:, :, None]
    some = np.where(paid > 0.0, paid, 1.0)
    amounts = np.log1p(-NOTHING) + lognorm.logpdf(some, 0.5, scale=np.exp(AMOUNTS))
    parts = [
        np.where(label == np.arange(3), 0.0, -np.inf),
        norm.logpdf(real, MEANS, WIDTHS),
        poisson.logpmf(np.where(np.isnan(count), 0.0, count), RATES),
        vonmises.logpdf(np.radians(angle), TIGHT, loc=TURNS) + np.log(np.pi / 180.0),
        np.where(paid == 0.0, np.log(NOTHING), amounts),
        beta.logpdf(share, FIRST, SECOND),
    ]
    cells = [
        np.where(np.isnan(cell), 0.0, part) for cell, part in zip(rows.T[:, :, None], parts, strict=True)
    ]
    return logsumexp(np.log(SHARES) + sum(cells), axis=1)


TABLES: dict[str, MixedTable] = {
    "proportion": _real_and(
        lambda rng, x: rng.beta(*_shares(x)), lambda x, share: beta.logpdf(share, *_shares(x)), "bounded:0:1"
    ),
    "angle": MixedTable({0: "periodic:360"}, _angles, _log_angles, 1),
    "count": _real_and(
        lambda rng, x: rng.poisson(np.exp(0.5 + 0.8 * x)),
        lambda x, count: poisson.logpmf(count, np.exp(0.5 + 0.8 * x)),
        "count",
    ),
    "label": MixedTable({0: "category"}, _labels, _log_labels, 2),
    "amount": _real_and(_amounts, _log_amounts, "atom:0:positive"),
    "all": MixedTable(
        {0: "category", 2: "count", 3: "periodic:360", 4: "atom:0:positive", 5: "bounded:0:1"},
        _everything,
        _log_everything,
        6,
    ),
}


def jittered(rows: Rows, table: MixedTable, rng: np.random.Generator) -> Rows:
    """Return rows for continuous models: integers and labels jittered over unit cells, zeros over (-1, 0).

    A cell has length one, so that a log density there is, on average over the jitter, at most the log
    probability.
    """
    spread = rows.copy()
    for column, kind in table.kinds.items():
        noise = rng.random(len(rows))
        if kind in ("count", "category"):
            spread[:, column] += noise - 0.5
        if kind.startswith("atom"):
            spread[:, column] = np.where(rows[:, column] == 0.0, -noise, rows[:, column])
    return spread
