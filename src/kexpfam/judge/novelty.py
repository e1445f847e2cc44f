r"""Conformal p-values of rows: the rank of a row's log density among those of rows that were held out.

With scores :math:`s_1, \dots, s_n` of held-out rows, a row of score s has

.. math:: p = \frac{1 + \#\{i : s_i \le s\}}{1 + n} .

If the rows are exchangeable and the density has not seen the held-out ones, :math:`P(p \le t) \le t`. If
several parts of the rows were held out in turn, a row is compared in each part with the scores of that part,
under the members that held it out, and the counts are added (cross-conformal p-values, Vovk 2015). Their
level is guaranteed up to a factor of about two.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import false_discovery_control

from kexpfam.data.weights import effective_rows, is_whole, part_of
from kexpfam.model.distributions import AbstractDensity
from kexpfam.model.ensemble import ChainDensity, Stack

SIDES = ("low", "both")
# Scores are rounded, so that equal rows of labels have equal scores however these were computed.
DIGITS = 6


class Reference(eqx.Module):
    """Sorted log densities of the held-out rows of each part, and the cumulative weights of the rows."""

    scores: tuple[Float[np.ndarray, " _"], ...]
    counts: tuple[Float[np.ndarray, " _"], ...]

    @staticmethod
    def of(parts: Sequence[np.ndarray], weights: Sequence[np.ndarray | None] | None = None) -> "Reference":
        """Return the reference of these scores; fractional weights sum to the effective sample size."""
        scores, counts = [], []
        for part, weight in zip(parts, weights or [None] * len(parts), strict=True):
            seen = ~np.isnan(part)
            part, weight = np.round(part[seen], DIGITS), part_of(weight, seen)
            own = np.ones(len(part)) if weight is None else weight
            if not is_whole(own):
                own = own * (effective_rows(own, len(part)) / own.sum())
            order = np.argsort(part)
            scores.append(part[order])
            counts.append(np.cumsum(own[order]))
        return Reference(tuple(scores), tuple(counts))

    @staticmethod
    def of_fit(
        density: AbstractDensity, held_out: np.ndarray | None, held: np.ndarray, weight: np.ndarray | None
    ) -> "Reference | None":
        """Return the reference of a fit, or None if it has no held-out scores.

        ``held`` are the parts of rows that members of a chain held out in turn, of shape (parts, rows).
        Densities without members are fitted to all rows in the end: their held-out scores are one part.
        """
        if held_out is None or np.all(np.isnan(held_out)):
            return None
        rows = list(held) if _has_members(density) else [np.arange(len(held_out))]
        return Reference.of([held_out[own] for own in rows], [part_of(weight, own) for own in rows])

    @property
    def rows(self) -> int:
        """Return the number of held-out rows."""
        return sum(map(len, self.scores))

    def quantile(self, level: float) -> float:
        """Return the score below which rows have p-values of at most this level, or -inf."""
        scores = np.concatenate(self.scores)
        steps = np.concatenate([_steps(counts) for counts in self.counts])
        order = np.argsort(scores)
        p_values = (1.0 + np.cumsum(steps[order])) / (1.0 + steps.sum())
        place = int(np.searchsorted(p_values, level, side="right"))
        return float(scores[order][place]) if place else -np.inf

    def repeated(self) -> list[np.ndarray]:
        """Return the scores of each part, each as often as its weight says."""
        times = (np.maximum(np.round(_steps(counts)), 1.0).astype(int) for counts in self.counts)
        return [np.repeat(own, count) for own, count in zip(self.scores, times, strict=True)]

    def part_scores(
        self, density: AbstractDensity, score: Callable[[AbstractDensity], np.ndarray]
    ) -> list[np.ndarray]:
        """Return the scores of new rows under the members that held out each part."""
        return [score(part_density(density, k, len(self.scores))) for k in range(len(self.scores))]

    def p_values(self, scores: Sequence[np.ndarray], side: str = "low") -> Float[np.ndarray, " n"]:
        """Return the p-values of rows with these scores in each part.

        ``side="low"`` is against improbable rows, ``"both"`` also against rows that are too probable.
        """
        low = high = np.ones(len(scores[0]))
        for own, known, counts in zip(scores, self.scores, self.counts, strict=True):
            below = np.concatenate([[0.0], counts])
            own = np.round(own, DIGITS)
            low = low + below[np.searchsorted(known, own, side="right")]
            high = high + below[-1] - below[np.searchsorted(known, own, side="left")]
        total = 1.0 + sum(counts[-1] for counts in self.counts)
        return low / total if side == "low" else np.minimum(1.0, 2.0 * np.minimum(low, high) / total)


def discoveries(p_values: Float[np.ndarray, " n"], fdr: float) -> Bool[np.ndarray, " n"]:
    """Return the rows that Benjamini and Hochberg reject at this false discovery rate.

    Conformal p-values are positively dependent, so that the rate holds (Bates et al. 2023)."""
    return false_discovery_control(p_values) <= fdr


def part_density(density: Any, part: int, parts: int) -> Any:
    """Return the density of the members that held out a part; other densities have no members."""
    if isinstance(density, Stack):
        own = tuple(part_density(one, part, parts) for one in density.parts)
        return dataclasses.replace(density, parts=own)
    if not isinstance(density, ChainDensity):
        return density
    layout = density.members.layout
    members = jax.tree.map(lambda leaf: leaf[part::parts], density.members.within(None))
    return dataclasses.replace(density, members=members.within(layout))


def _steps(cumulative: np.ndarray) -> np.ndarray:
    return np.diff(cumulative, prepend=0.0)


def _has_members(density: Any) -> bool:
    own = density.parts if isinstance(density, Stack) else (density,)
    return any(isinstance(one, ChainDensity) for one in own)
