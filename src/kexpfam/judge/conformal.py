r"""Conformal repair: intervals, quantiles and regions with their nominal coverage for any density.

Split conformal prediction on rows that the density was not fitted to. Its one assumption is that these rows
and the next one are exchangeable. For a single target the conformity score is the PIT value :math:`u = F(y |
x)` (Vovk, Petej, Nouretdinov et al. 2020, conformal calibrators; Chernozhukov, Wüthrich and Zhu 2021,
distributional conformal prediction). For any number of targets it is the probability of all points of higher
density than y under x (HPD-split of Izbicki, Shimizu and Stern 2022), estimated from draws.
"""

import dataclasses
import warnings
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import RandomKey
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Judgement, Measurement
from kexpfam.judge.pit import coverage_text, density_ranks, inside_central
from kexpfam.stacklevel import caller_level

# Absolute slack of ranks, so that a level that is a multiple of 1 / (n + 1) is not rounded.
ROUNDING = 1e-9


class UnboundedWarning(UserWarning):
    """The rows are too few for a bound at this level: the interval or region is unbounded."""


class Conformal(eqx.Module):
    r"""Sorted conformity scores of n held-out rows, which repair distribution functions and regions.

    With :math:`u_{(1)} \le \dots \le u_{(n)}` the PIT values, the repaired distribution function is
    :math:`G(F(y | x))`, G linear through :math:`(u_{(i)}, i / (n + 1))`, from 0 to 1. For exchangeable rows
    without ties :math:`P(F(Y | X) \le u_{(i)}) = i / (n + 1)`, so that
    :math:`|P(G(F(Y | X)) \le t) - t| \le 1 / (n + 1)` for every t.
    The probability is over the held-out rows and the new one together. ``coverages`` are nominal coverages of
    intervals (regions of several targets), ``before`` the observed ones and ``after`` those of a repair by
    other rows.
    """

    levels: Float[np.ndarray, " n"] | None
    ranks: Float[np.ndarray, " n"]
    draws: int
    coverages: Float[np.ndarray, " k"]
    before: Float[np.ndarray, " k"]
    after: Float[np.ndarray, " k"]

    @property
    def rows(self) -> int:
        """Return the number of held-out rows."""
        return len(self.ranks)

    def cdf(self, u: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
        """Return G(u): the repaired probability of the density's level u."""
        return np.interp(u, self._knots(), np.arange(self.rows + 2) / (self.rows + 1))

    def level(self, t: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
        """Return the inverse of G: the density's level of a repaired probability."""
        return np.interp(t, np.arange(self.rows + 2) / (self.rows + 1), self._knots())

    def ends(self, coverage: float) -> tuple[float, float]:
        r"""Return the density's levels between which the target lies with at least this probability.

        They are :math:`u_{(k)}` and :math:`u_{(n + 1 - k)}` with :math:`k = \lfloor (n + 1)(1 - c) / 2
        \rfloor`, which cover :math:`1 - 2k / (n + 1)`: at least c, and less than :math:`2 / (n + 1)` more.
        With :math:`k = 0` they are 0 and 1.
        """
        k = int((self.rows + 1) * (1.0 - coverage) / 2.0 + ROUNDING)
        if k == 0:
            _warn_of_few(self.rows, 2.0 / (1.0 - coverage))
        knots = self._knots()
        return float(knots[k]), float(knots[self.rows + 1 - k])

    def threshold(self, level: float) -> float:
        r"""Return the largest rank :math:`r_{(k)}` of points in a region of at least this probability c.

        With :math:`k = \lceil (n + 1) c \rceil` it covers at least c and, without ties, less than :math:`1 /
        (n + 1)` more.
        """
        k = int(np.ceil((self.rows + 1) * level - ROUNDING))
        if k > self.rows:
            _warn_of_few(self.rows, 1.0 / (1.0 - level))
            return np.inf
        return float(self.ranks[k - 1])

    def coverage(
        self, density: Any, X: np.ndarray, targets: np.ndarray, *, key: RandomKey
    ) -> dict[float, float]:
        """Return the share of targets inside repaired intervals, or regions of several targets."""
        levels, ranks = None, np.zeros(len(targets))
        if self.levels is None:
            ranks = density_ranks(density, X, targets, draws=self.draws, key=key)
        else:
            levels = density.cdf(targets, X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnboundedWarning)
            return {float(c): float(np.mean(_inside(levels, ranks, c, self))) for c in self.coverages}

    def measurements(self) -> list[Measurement]:
        """Return the number of held-out rows, and the coverage before and after the repair."""
        kind = "intervals" if self.levels is not None else "regions"
        text = f"{kind} from {self.rows} rows"
        found = [Measurement("conformal_rows", self.rows, label="conformal repair", text=text)]
        for when, observed in (("before", self.before), ("after", self.after)):
            shares = dict(zip(self.coverages.tolist(), observed.tolist(), strict=True))
            meaning = f"Share of the conformal rows inside {kind} {when} a repair by the other rows."
            name, label = f"coverage_{when}_repair", f"coverage {when} repair"
            found.append(Measurement(name, shares, None, None, meaning, label, coverage_text(shares)))
        return found

    def __str__(self) -> str:
        return "\n".join(f"{one.label + ':':<27} {one.shown}" for one in self.measurements())

    def _knots(self) -> np.ndarray:
        if self.levels is None:
            raise ValueError("cdf and quantiles need targets of one dimension: use in_region.")
        return np.concatenate([[0.0], self.levels, [1.0]])


def conformalise(
    density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, folds: int = 10, key: RandomKey
) -> Conformal:
    """Return the repair of a conditional density by rows that it was not fitted to.

    Its coverage on other rows is measured on ``folds`` parts of the rows, each repaired by the others.
    """
    coverages = Judgement().coverages
    rank_key, fold_key = jr.split(key)
    ranks = density_ranks(density, X, targets, draws=draws, key=rank_key)
    levels = density.cdf(targets, X) if targets.shape[1] == 1 else None
    found = _repair(levels, ranks, draws)
    parts = np.random.default_rng(seed_from(fold_key)).permutation(len(ranks)) % folds
    before, after = (np.zeros((len(ranks), len(coverages))) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnboundedWarning)
        for j, coverage in enumerate(coverages):
            before[:, j] = _inside(levels, ranks, coverage, None)
            for out in (parts == part for part in range(folds)):
                kept, own = (None if levels is None else levels[rows] for rows in (~out, out))
                after[out, j] = _inside(own, ranks[out], coverage, _repair(kept, ranks[~out], draws))
    return dataclasses.replace(found, before=before.mean(0), after=after.mean(0))


def _repair(levels: np.ndarray | None, ranks: np.ndarray, draws: int) -> Conformal:
    """Return the repair of these scores, without its coverage."""
    coverages = np.array(Judgement().coverages)
    unknown = np.full(len(coverages), np.nan)
    ordered = None if levels is None else np.sort(levels)
    return Conformal(ordered, np.sort(ranks), draws, coverages, unknown, unknown)


def _inside(
    levels: np.ndarray | None, ranks: np.ndarray, coverage: float, repair: Conformal | None
) -> np.ndarray:
    """Return whether targets lie in their interval, or region of several targets, repaired or not."""
    if levels is None:
        return ranks <= (coverage if repair is None else repair.threshold(coverage))
    if repair is None:
        return inside_central(levels, coverage)
    low, high = repair.ends(coverage)
    return (levels >= low) & (levels <= high)


def _warn_of_few(rows: int, needed: float) -> None:
    fewest = int(np.ceil(needed - ROUNDING)) - 1
    message = f"{rows} held-out rows are too few for a bound at this level, which takes {fewest}."
    warnings.warn(message, UnboundedWarning, stacklevel=caller_level())
