"""Several models side by side on rows that none of them has seen."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kexpfam.judge.diagnosis import plain
from kexpfam.plot import plot_ranking
from kexpfam.plot.calibration import plot_reliability
from kexpfam.plot.canvas import bare_arrays
from kexpfam.report.page import Page, drawing, grid, paragraph, section, table, text
from kexpfam.report.subject import Held

__all__ = ["Comparison", "Entry", "compare", "compare_rows"]

# Draws that are timed, and how often; the fastest counts, since others only disturb.
DRAWS, RUNS = 1000, 3
CLEAR = 2.0


class Entry(NamedTuple):
    """A model on held-out rows.

    ``score`` is the mean log density and ``behind`` how far that is below the best model's, in nats, each with a standard
    error; that of the difference is paired, row by row. ``off_support`` counts rows of density zero, which leave the mean at
    -inf. The PIT is that of the single target of a conditional model; of others, the level of the region of highest density
    that a row needs. Both are uniform if the model is right: ``pit_p_value`` is that of Kolmogorov and Smirnov, ``covered``
    the share of rows in regions of 90 %. ``crps`` is for a single target, else None. These three are of at most 1,000 rows.
    """

    name: str
    score: float
    standard_error: float
    behind: float
    behind_error: float
    off_support: int
    pit_p_value: float
    covered: float
    crps: float | None
    milliseconds_per_1000_draws: float


HEADER = ("model", "log density", "behind the best", "PIT p", "90 % hold", "CRPS", "ms / 1,000 draws")


@dataclass(frozen=True)
class Comparison:
    """Models on the same rows, the best first; it prints as a table, a notebook shows it, ``page()`` has pictures."""

    rows: int
    entries: tuple[Entry, ...]
    levels: tuple[np.ndarray, ...]

    @property
    def best(self) -> str:
        """Return the name of the model with the highest mean log density."""
        return self.entries[0].name

    @property
    def verdict(self) -> str:
        """Return in words which model is best, and whether that is more than chance."""
        first, second = self.entries[:2]
        gap = f"by {second.behind:.3g} ± {second.behind_error:.2g} nats"
        if not second.behind > CLEAR * second.behind_error:
            return f"{first.name} and {second.name} cannot be told apart on {self.rows:,} rows: they differ {gap}."
        return f"{first.name} is best on {self.rows:,} rows, ahead of {second.name} {gap}."

    def cells(self) -> list[list[str]]:
        """Return the table's rows as text."""
        return [
            [
                one.name,
                f"{one.score:.4f} ± {one.standard_error:.2g}"
                if not one.off_support
                else f"-inf: {one.off_support} rows",
                "–" if one is self.entries[0] else f"{one.behind:.4f} ± {one.behind_error:.2g}",
                f"{one.pit_p_value:.2g}",
                f"{one.covered:.1%}",
                "–" if one.crps is None else f"{one.crps:.4g}",
                f"{one.milliseconds_per_1000_draws:.3g}",
            ]
            for one in self.entries
        ]

    def __str__(self) -> str:
        lines = [list(HEADER), *self.cells()]
        widths = [max(len(line[k]) for line in lines) for k in range(len(HEADER))]
        shown = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*shown, self.verdict])

    def as_dict(self) -> dict[str, Any]:
        """Return it as numbers, text and lists, ready for JSON: what is not finite is None."""
        return {"rows": self.rows, "verdict": self.verdict, "models": plain(self.entries)}

    def page(self) -> Page:
        """Return the comparison with pictures, as one HTML file."""
        title = " against ".join(one.name for one in self.entries)
        others = self.entries[1:]
        figure = plot_ranking(
            [one.name for one in others],
            [one.behind for one in others],
            [one.behind_error for one in others],
            label=f"nats behind {self.best}",
        )
        behind = drawing(
            figure,
            "behind",
            "Mean log density of the same rows below that of the best model; errors are paired.",
        )
        reliable = [
            drawing(
                plot_reliability(levels),
                f"reliability{k}",
                f"{one.name}: share of rows inside regions of each coverage.",
            )
            for k, (one, levels) in enumerate(zip(self.entries, self.levels, strict=True))
        ]
        top = f"<header><h1>{text(title)}</h1>{paragraph(text(self.verdict))}</header>"
        told = section("Held-out rows", table(self.cells(), HEADER), grid([behind], large=True))
        return Page(title, "\n".join([top, told, section("Calibration", grid(reliable, large=True))]))

    def _repr_html_(self) -> str:
        return table(self.cells(), HEADER) + paragraph(text(self.verdict))


def compare(
    *models: Any,
    X: ArrayLike,
    y: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    random_state: int = 0,
) -> Comparison:
    """Return fitted models side by side on rows that none of them has seen: densities of X, or of y given X.

    The log density of a model that has seen the rows says how well it remembers them. Models are called by ``names``, or by
    their classes.
    """
    return compare_rows(models, [(X, y)] * len(models), names, random_state=random_state)


@bare_arrays()
def compare_rows(
    models: Sequence[Any],
    rows: Sequence[tuple[Any, ...]],
    names: Sequence[str] | None = None,
    *,
    random_state: int = 0,
) -> Comparison:
    """Return fitted models side by side on the same rows, given to each in the order of its own columns."""
    called = _names(_alike(models), names)
    pairs = [(*own, None)[:2] for own in rows]
    held = [Held.against(model, X, y, random_state) for model, (X, y) in zip(models, pairs, strict=True)]
    scores = np.stack([one.log_density(one.X, one.Y) for one in held])
    best = int(np.argmax(scores.mean(axis=1)))
    entries = [
        _entry(name, one, own, scores[best]) for name, one, own in zip(called, held, scores, strict=True)
    ]
    order = sorted(range(len(held)), key=lambda k: (k != best, entries[k].behind, k))
    return Comparison(
        scores.shape[1], tuple(entries[k] for k in order), tuple(held[k].coverage[0] for k in order)
    )


def _entry(name: str, held: Held, own: np.ndarray, best: np.ndarray) -> Entry:
    from scipy.stats import kstest  # slow to import

    levels, _, calibration = held.coverage
    finite, shares = np.isfinite(own), np.sqrt(len(own))
    with np.errstate(invalid="ignore"):
        lost = np.where(finite, best - own, np.inf)
        errors = [float(one.std() / shares) if np.all(np.isfinite(one)) else np.nan for one in (own, lost)]
    p_value = float(kstest(levels, "uniform").pvalue) if calibration is None else calibration.pit_p_value
    crps = None if calibration is None else calibration.crps
    covered, mean, behind = float(np.mean(levels <= 0.9)), float(own.mean()), float(lost.mean())
    return Entry(
        name,
        mean,
        errors[0],
        behind,
        errors[1],
        int(np.sum(~finite)),
        p_value,
        covered,
        crps,
        _milliseconds(held),
    )


def _milliseconds(held: Held) -> float:
    """Return how long a thousand draws take once everything is compiled."""
    X = held.X[:DRAWS]
    count = DRAWS if not held.conditional else -(-DRAWS // len(X))
    held.drawn(X, count)
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        draws = held.drawn(X, count)
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds) * DRAWS / len(draws)


def _alike(models: Sequence[Any]) -> Sequence[Any]:
    """Return the models, once they are known to be comparable."""
    if len(models) < 2:
        raise ValueError(f"compare() takes two models at least, got {len(models)}; rows are named X=, y=.")
    if len({model.conditional for model in models}) > 1:
        raise ValueError(
            "densities p(x) and conditional densities p(y | x) are of different columns: compare like with like."
        )
    return models


def _names(models: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    """Return a name for each model: the ones that are given, or the classes, numbered where they repeat."""
    if names is not None:
        if len(names) != len(models) or len(set(names)) != len(models):
            raise ValueError(f"names must be {len(models)} different ones, got {list(names)!r}.")
        return list(map(str, names))
    classes = [type(model).__name__ for model in models]
    repeated = lambda k: classes.count(classes[k]) > 1
    return [
        f"{name} {classes[: k + 1].count(name)}" if repeated(k) else name for k, name in enumerate(classes)
    ]
