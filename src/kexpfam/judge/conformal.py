r"""Conformal repair: intervals, quantiles and regions that cover what they say, whatever the density is worth.

Split conformal prediction on rows that the density has not seen. Its one assumption is that these rows and the next one are
exchangeable. For a single target the conformity score is the PIT value :math:`u = F(y | x)` (Vovk, Petej, Nouretdinov et al.
2020, conformal calibrators; Chernozhukov, Wüthrich and Zhu 2021, distributional conformal prediction). For any number of
targets it is the probability of all points that are more probable than y under x (HPD-split of Izbicki, Shimizu and
Stern 2022), estimated from draws.
"""

import warnings
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.calibration import COVERAGES, density_ranks, inside_central
from kexpfam.stacklevel import caller_level

__all__ = ["Conformal", "UnboundedWarning", "conformalise"]

# Parts that take turns in showing what the repair does to rows that it was not made from.
FOLDS = 10
# A level that is a multiple of one over the rows plus one is not rounded, whatever its last digits.
ROUNDING = 1e-9


class UnboundedWarning(UserWarning):
    """There are too few rows for a bound at this level: the interval or region is unbounded."""


class Conformal(eqx.Module):
    r"""What held-out rows say about a density's distribution functions and regions; n rows, sorted.

    With :math:`u_{(1)} \le \dots \le u_{(n)}` the PIT values, the repaired distribution function is
    :math:`G(F(y | x))`, G linear through :math:`(u_{(i)}, i / (n + 1))`, from 0 to 1. For exchangeable rows without ties
    :math:`P(F(Y | X) \le u_{(i)}) = i / (n + 1)`, so that :math:`|P(G(F(Y | X)) \le t) - t| \le 1 / (n + 1)` for every t.
    The probability is over the held-out rows and the new one together. ``coverages``, ``before`` and ``after`` are what
    intervals (regions, for several targets) should cover, do cover, and cover once they are repaired by other rows.
    """

    levels: Float[np.ndarray, " n"] | None
    ranks: Float[np.ndarray, " n"]
    draws: int
    coverages: Float[np.ndarray, " k"]
    before: Float[np.ndarray, " k"]
    after: Float[np.ndarray, " k"]

    @property
    def rows(self) -> int:
        """Return how many rows it rests on."""
        return len(self.ranks)

    def cdf(self, u: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
        """Return G: what the density calls u is this probability."""
        return np.interp(u, self._knots(), np.arange(self.rows + 2) / (self.rows + 1))

    def level(self, t: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
        """Return the inverse of G: the density's own level for a probability."""
        return np.interp(t, np.arange(self.rows + 2) / (self.rows + 1), self._knots())

    def ends(self, coverage: float) -> tuple[float, float]:
        r"""Return the density's levels between which the target lies with at least this probability.

        They are :math:`u_{(k)}` and :math:`u_{(n + 1 - k)}` with :math:`k = \lfloor (n + 1)(1 - c) / 2 \rfloor`, which cover
        :math:`1 - 2k / (n + 1)`: at least c, and less than :math:`2 / (n + 1)` more. With :math:`k = 0` they are 0 and 1.
        """
        k = int((self.rows + 1) * (1.0 - coverage) / 2.0 + ROUNDING)
        if k == 0:
            _warn_of_few(self.rows, 2.0 / (1.0 - coverage))
        knots = self._knots()
        return float(knots[k]), float(knots[self.rows + 1 - k])

    def threshold(self, level: float) -> float:
        r"""Return the rank :math:`r_{(k)}`, up to which points are in a region of at least this probability c.

        With :math:`k = \lceil (n + 1) c \rceil` it covers at least c and, without ties, less than :math:`1 / (n + 1)` more.
        """
        k = int(np.ceil((self.rows + 1) * level - ROUNDING))
        if k > self.rows:
            _warn_of_few(self.rows, 1.0 / (1.0 - level))
            return np.inf
        return float(self.ranks[k - 1])

    def coverage(
        self, density: Any, X: np.ndarray, targets: np.ndarray, *, key: Key[Array, ""]
    ) -> dict[float, float]:
        """Return the share of targets inside the repaired intervals, or inside the regions of several targets."""
        ranks, levels = np.zeros(len(targets)), None if self.levels is None else density.cdf(targets, X)
        if levels is None:
            ranks = density_ranks(density, X, targets, draws=self.draws, key=key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnboundedWarning)
            return {level: float(np.mean(_inside(levels, ranks, level, self))) for level in COVERAGES}

    def lines(self) -> list[tuple[str, str]]:
        """Return what a report says of it."""
        shown = lambda shares: ", ".join(
            f"{c:.0%}: {share:.0%}" for c, share in zip(self.coverages, shares, strict=True)
        )
        kind = "intervals" if self.levels is not None else "regions"
        return [
            ("conformal repair", f"{kind} from {self.rows} held-out rows"),
            ("coverage before repair", shown(self.before)),
            ("coverage after repair", shown(self.after)),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name + ':':<27} {value}" for name, value in self.lines())

    def _knots(self) -> np.ndarray:
        if self.levels is None:
            raise ValueError(
                "distribution functions and quantiles are for targets of one dimension; use in_region instead."
            )
        return np.concatenate([[0.0], self.levels, [1.0]])


def conformalise(
    density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, key: Key[Array, ""]
) -> Conformal:
    """Return the repair of a conditional density by rows that it has not seen."""
    rank_key, fold_key = jr.split(key)
    ranks = density_ranks(density, X, targets, draws=draws, key=rank_key)
    levels = density.cdf(targets, X) if targets.shape[1] == 1 else None
    found = _repair(levels, ranks, draws)
    parts = np.random.default_rng(seed_from(fold_key)).permutation(len(ranks)) % FOLDS
    before, after = (np.zeros((len(ranks), len(COVERAGES))) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnboundedWarning)
        for j, coverage in enumerate(COVERAGES):
            before[:, j] = _inside(levels, ranks, coverage, None)
            for out in (parts == part for part in range(FOLDS)):
                kept, own = (None if levels is None else levels[rows] for rows in (~out, out))
                after[out, j] = _inside(own, ranks[out], coverage, _repair(kept, ranks[~out], draws))
    return eqx.tree_at(lambda c: (c.before, c.after), found, (before.mean(0), after.mean(0)))


def _repair(levels: np.ndarray | None, ranks: np.ndarray, draws: int) -> Conformal:
    nothing = np.full(len(COVERAGES), np.nan)
    return Conformal(
        None if levels is None else np.sort(levels),
        np.sort(ranks),
        draws,
        np.array(COVERAGES),
        nothing,
        nothing,
    )


def _inside(
    levels: np.ndarray | None, ranks: np.ndarray, coverage: float, repair: Conformal | None
) -> np.ndarray:
    """Return which targets lie in the interval, or in the region of several targets, with a repair or as they are."""
    if levels is None:
        return ranks <= (coverage if repair is None else repair.threshold(coverage))
    if repair is None:
        return inside_central(levels, coverage)
    low, high = repair.ends(coverage)
    return (levels >= low) & (levels <= high)


def _warn_of_few(rows: int, needed: float) -> None:
    message = f"{rows} held-out rows are too few for a bound at this level, which takes {int(np.ceil(needed - ROUNDING)) - 1}."
    warnings.warn(message, UnboundedWarning, stacklevel=caller_level())
