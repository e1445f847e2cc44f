r"""The weights of learned tilts as the convex problem they are, once the network's features are fixed.

A correction adds :math:`(h V) \cdot \psi(r)` to the tilt of a link, where h are the network's last hidden units and a one.
Given location, scale and h, the penalised negative log likelihood of V,

.. math:: \frac1n \sum_i A_i(V) - (h_i V) \cdot \psi(r_i) + \tfrac{\eta}{2} |V|^2 ,
          \qquad A_i(V) = \log E_i[e^{(h_i V) \cdot \psi}] ,

is convex, and strongly so with constant eta: no V is better than the one found by more than :math:`|g|^2 / (2 \eta)`, g the
gradient there. Which eta, or none at all, is decided by rows that the members did not train on.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize

from kexpfam.data.sample import Sample
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.folds import elsewhere
from kexpfam.model.chain import HEAD, Chain, features, residuals
from kexpfam.model.measures import logsumexp

__all__ = ["Polish", "Tilted", "polished"]

# A held-out score must rise by this much (nats) to count as better.
PROGRESS = 1e-3
STEPS = 100


class Polish(NamedTuple):
    """Penalties that held-out rows chose, from ... to; nats they rose by; how far from its optimum any member is, at most."""

    penalties: tuple[float, float]
    gain: float
    gap: float

    def __str__(self) -> str:
        return f"convex, held-out rows gain {self.gain:.3f} nats, within {self.gap:.1g} nats of the optimum"


class Tilted(eqx.Module):
    """One link of one member on some rows: hidden units and a one, features of the residuals, log masses of the cells."""

    units: Float[np.ndarray, "n u"]
    features: Float[np.ndarray, "n k"]
    exponents: Float[np.ndarray, "n m"]
    log_density: Float[np.ndarray, " n"]
    weight: Float[np.ndarray, " n"] | None = None

    def cost(
        self, weights: Float[np.ndarray, " uk"], penalty: float
    ) -> tuple[float, Float[np.ndarray, " uk"]]:
        """Return the penalised mean cost of a correction and its gradient."""
        coefficients = self.units @ weights.reshape(self.units.shape[1], -1)
        psi = residuals(self.exponents.shape[1], count=self.features.shape[1]).features
        tilted = self.exponents + coefficients @ psi.T
        log_partition = logsumexp(tilted, axis=1)
        gains = (
            np.sum(coefficients * self.features, axis=1) - log_partition + logsumexp(self.exponents, axis=1)
        )
        gain = float(weighted_mean(gains, self.weight))
        means = np.exp(tilted - log_partition[:, None]) @ psi
        gradient = self.units.T @ self._shared(self.features - means)
        return 0.5 * penalty * weights @ weights - gain, penalty * weights - gradient.ravel()

    def _shared(self, rows: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Return the rows times their shares of all."""
        return rows / len(rows) if self.weight is None else rows * (self.weight / self.weight.sum())[:, None]

    def improved(
        self, weights: Float[np.ndarray, "u k"], penalty: float
    ) -> tuple[Float[np.ndarray, "u k"], float]:
        """Return the weights of least cost, and a bound on what is missing."""
        found = minimize(
            self.cost, weights.ravel(), (penalty,), "L-BFGS-B", jac=True, options={"maxiter": STEPS}
        )
        return found.x.reshape(weights.shape), float(found.jac @ found.jac) / (2.0 * penalty)


def links(chain: Chain, sample: Sample, cells: int) -> list[Tilted]:
    """Return every link of a member on a sample, in the order of the chain."""
    rows = chain.rows(np.asarray(sample.target), np.asarray(sample.condition))
    units = chain.units(rows)
    told = chain.told(rows, units)
    targets = rows[:, sample.condition.shape[1] :]
    psi = features((targets - told.location) * np.exp(-told.log_scale), told.coefficients.shape[-1])
    log_density, seen = told.log_density(targets, cells), chain.masks.out
    one = np.ones((len(rows), 1))

    visible = lambda j: np.concatenate([one, units * seen[:, j]], axis=1)
    own = lambda j: (visible(j), psi[:, j], told.link(j).exponents(cells), log_density[:, j], sample.weight)
    return [Tilted(*own(j)) for j in range(chain.dim)]


class Member(NamedTuple):
    """A member in training: its links on the rows that it trains on and on those that it does not."""

    seen: list[Tilted]
    held: list[Tilted]

    def improved(self, weights: Float[np.ndarray, "u d k"], penalty: float) -> tuple[np.ndarray, float]:
        """Return better weights, and how far they are from the best, at most."""
        found = [link.improved(weights[:, j], penalty) for j, link in enumerate(self.seen)]
        return np.stack([part for part, _ in found], axis=1), sum(gap for _, gap in found)

    def held_out(self, weights: Float[np.ndarray, "u d k"]) -> float:
        """Return the mean log density of rows that it does not train on."""
        gains = [-link.cost(weights[:, j].ravel(), 0.0)[0] for j, link in enumerate(self.held)]
        return float(np.sum(gains)) + float(
            sum(weighted_mean(link.log_density, link.weight) for link in self.held)
        )


def polished(
    chain: Chain,
    sample: Sample,
    kept: Int[np.ndarray, "m k"],
    held: Int[np.ndarray, "m h"],
    parts: int,
    path: tuple[float, ...],
    cells: int,
) -> tuple[Chain, Polish | None]:
    """Return stacked members with corrected tilts, and how they were found; as they are if held-out rows like none better.

    Penalties fall along the path until no member gains. A member's penalty is chosen by the others' held-out rows, so that its
    own still tell how well it predicts.
    """
    rows = lambda k: Member(*(links(chain.member(k), sample.rows(which[k]), cells) for which in (kept, held)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        members = list(pool.map(rows, range(len(kept))))
        weights = np.zeros((len(kept), chain.first.shape[-1] + 1, chain.dim, chain.out.shape[-1] - HEAD))
        judge = lambda weights: elsewhere(np.array(list(pool.map(Member.held_out, members, weights))), parts)
        first = top = judge(weights)
        best, chosen, gaps = weights, np.full(len(kept), np.inf), np.zeros(len(kept))
        for penalty in path:
            found = list(pool.map(Member.improved, members, weights, repeat(penalty)))
            weights, bounds = np.stack([own for own, _ in found]), np.array([gap for _, gap in found])
            scores = judge(weights)
            better = scores > top + PROGRESS
            best = np.where(better[:, None, None, None], weights, best)
            chosen, gaps, top = (
                np.where(better, penalty, chosen),
                np.where(better, bounds, gaps),
                np.where(better, scores, top),
            )
            if not np.any(better):
                break
    if not np.any(np.isfinite(chosen)):
        return chain, None
    used = chosen[np.isfinite(chosen)]
    polish = Polish((float(used.min()), float(used.max())), float(np.mean(top - first)), float(gaps.max()))
    return chain.corrected(best.astype(np.float32)), polish
