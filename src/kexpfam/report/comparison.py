"""Comparison of several models on the same held-out rows."""

import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kexpfam.judge.diagnosis import plain
from kexpfam.plot import plot_ranking
from kexpfam.plot.calibration import plot_reliability
from kexpfam.plot.canvas import bare_arrays
from kexpfam.report.page import Page, Section, drawn, figures, paragraph, table
from kexpfam.report.subject import Evaluation


class Entry(NamedTuple):
    """A model on held-out rows.

    ``score`` is the mean log density and ``behind`` its difference from the best model's, in nats, each with
    a standard error; that of the difference is paired by row. ``off_support`` counts rows of density zero,
    for which the mean is -inf. ``pit_p_value`` is that of the Kolmogorov-Smirnov test of PIT values (single
    target of a conditional model), or of the levels of highest-density regions. ``covered`` is the share of
    rows in regions of 90 %. ``crps`` is None unless there is a single target. These three use at most 1,000
    rows.
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


HEADER = ("model", "log density", "behind the best", "PIT p", "inside 90 %", "CRPS", "ms / 1,000 draws")


@dataclass(frozen=True)
class Comparison:
    """Models on the same rows, the best first; ``str`` is a table and ``page()`` has figures."""

    rows: int
    entries: tuple[Entry, ...]
    levels: tuple[np.ndarray, ...]

    @property
    def best(self) -> str:
        """Return the name of the model with the highest mean log density."""
        return self.entries[0].name

    @property
    def verdict(self) -> str:
        """Return the best model as a sentence, and whether its lead is significant."""
        first, second = self.entries[:2]
        gap = f"by {second.behind:.3g} ± {second.behind_error:.2g} nats"
        if not second.behind > 2.0 * second.behind_error:
            return f"{first.name} and {second.name} do not differ significantly on {self.rows:,} rows: {gap}."
        return f"{first.name} is best on {self.rows:,} rows, ahead of {second.name} {gap}."

    def cells(self) -> list[list[str]]:
        """Return the table's rows as text."""
        rows = []
        for one in self.entries:
            score = f"{one.score:.4f} ± {one.standard_error:.2g}"
            score = f"-inf: {one.off_support} rows" if one.off_support else score
            behind = "–" if one is self.entries[0] else f"{one.behind:.4f} ± {one.behind_error:.2g}"
            crps = "–" if one.crps is None else f"{one.crps:.4g}"
            calibration = [f"{one.pit_p_value:.2g}", f"{one.covered:.1%}", crps]
            rows.append([one.name, score, behind, *calibration, f"{one.milliseconds_per_1000_draws:.3g}"])
        return rows

    def __str__(self) -> str:
        lines = [list(HEADER), *self.cells()]
        widths = [max(len(line[k]) for line in lines) for k in range(len(HEADER))]
        shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*shown, self.verdict])

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, text and lists, ready for JSON; numbers that are not finite are None."""
        return {"rows": self.rows, "verdict": self.verdict, "models": plain(self.entries)}

    def page(self) -> Page:
        """Return the comparison with figures, as one HTML file."""
        others = self.entries[1:]
        behind = [one.behind for one in others]
        errors = [one.behind_error for one in others]
        ranking = plot_ranking([one.name for one in others], behind, errors, label=f"nats behind {self.best}")
        caption = "Mean log density of the same rows below that of the best model; errors are paired."
        reliability = []
        for k, (one, levels) in enumerate(zip(self.entries, self.levels, strict=True)):
            words = f"{one.name}: share of rows inside its regions."
            reliability.append(drawn(plot_reliability(levels), f"reliability{k}", words))
        scores = figures([drawn(ranking, "behind", caption)], large=True)
        sections = [
            Section("Held-out rows", table(self.cells(), HEADER), scores),
            Section("Calibration", figures(reliability, large=True)),
        ]
        title = " against ".join(one.name for one in self.entries)
        return Page(title, [paragraph(self.verdict)], sections)

    def _repr_html_(self) -> str:
        return table(self.cells(), HEADER) + paragraph(self.verdict)


def compare(
    *models: Any,
    X: ArrayLike,
    y: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    random_state: int = 0,
) -> Comparison:
    """Return the comparison of fitted models on held-out rows: densities of X, or of y given X.

    No model should be fitted to any of the rows. The default names are those of the classes.
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
    """Return the comparison on the same rows, given to each model in the order of its own columns."""
    if len(models) < 2:
        raise ValueError(f"compare() takes two models at least, got {len(models)}; rows are named X=, y=.")
    if len({model.conditional for model in models}) > 1:
        raise ValueError("densities p(x) and p(y | x) cannot be compared: they have different columns.")
    called = _names(models, names)
    pairs = [(*own, None)[:2] for own in rows]
    held = [Evaluation.of(model, X, y, random_state) for model, (X, y) in zip(models, pairs, strict=True)]
    scores = np.stack([one.log_density(one.X, one.Y) for one in held])
    best = int(np.argmax(scores.mean(axis=1)))
    entries = [_entry(*one, scores[best]) for one in zip(called, held, scores, strict=True)]
    order = sorted(range(len(held)), key=lambda k: (k != best, entries[k].behind, k))
    levels = tuple(held[k].coverage[0] for k in order)
    return Comparison(scores.shape[1], tuple(entries[k] for k in order), levels)


def _entry(name: str, held: Evaluation, own: np.ndarray, best: np.ndarray) -> Entry:
    from scipy.stats import kstest  # slow to import

    levels, _, calibration = held.coverage
    finite, root = np.isfinite(own), np.sqrt(len(own))
    with np.errstate(invalid="ignore"):
        behind = np.where(finite, best - own, np.inf)
    error = lambda values: float(values.std() / root) if np.all(np.isfinite(values)) else np.nan
    p_value = float(kstest(levels, "uniform").pvalue) if calibration is None else calibration.pit_p_value
    return Entry(
        name,
        score=float(own.mean()),
        standard_error=error(own),
        behind=float(behind.mean()),
        behind_error=error(behind),
        off_support=int(np.sum(~finite)),
        pit_p_value=p_value,
        covered=float(np.mean(levels <= 0.9)),
        crps=None if calibration is None else calibration.crps,
        milliseconds_per_1000_draws=_milliseconds(held),
    )


def _milliseconds(held: Evaluation, runs: int = 3) -> float:
    """Return the time of a thousand draws after compilation: the shortest of several."""
    X = held.X[:1000]
    count = -(-1000 // len(X)) if held.conditional else 1000
    draws = held.drawn(X, count)
    seconds = timeit.repeat(lambda: held.drawn(X, count), repeat=runs, number=1)
    return 1e6 * min(seconds) / len(draws)


def _names(models: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    """Return the given names, or those of the classes, numbered if they repeat."""
    if names is not None:
        if len(names) != len(models) or len(set(names)) != len(models):
            raise ValueError(f"names must be {len(models)} different names, got {list(names)!r}.")
        return list(map(str, names))
    classes = [type(model).__name__ for model in models]
    number = lambda k: f" {classes[: k + 1].count(classes[k])}" if classes.count(classes[k]) > 1 else ""
    return [name + number(k) for k, name in enumerate(classes)]
