r"""The convex problem of the coefficients of tilts, once the features of the network are fixed.

A correction adds :math:`(h V) \cdot \psi(r)` to the tilt of a column on the real line, where h are a one and
the network's last hidden units. Given location, scale and h, the penalised negative log likelihood of V,

.. math:: \frac1n \sum_i A_i(V) - (h_i V) \cdot \psi(r_i) + \tfrac{\eta}{2} |V|^2 ,
          \qquad A_i(V) = \log E_i[e^{(h_i V) \cdot \psi}] ,

is strongly convex with constant eta: no V is better than the one found by more than
:math:`|g|^2 / (2 \eta)`, g the gradient there. Rows that the members did not train on choose eta.
"""

import dataclasses
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
from kexpfam.model.chain import Chain
from kexpfam.model.families import RealLine, features, residual_cells
from kexpfam.model.measures import logsumexp

__all__ = ["Polish", "TiltedColumn", "polished", "tilted_columns"]


class Polish(NamedTuple):
    """The range of the chosen penalties, the rise of the held-out score, and the largest optimality gap."""

    penalties: tuple[float, float]
    gain: float
    gap: float

    def __str__(self) -> str:
        return f"convex, held-out rows gain {self.gain:.3f} nats, within {self.gap:.1g} nats of the optimum"


class TiltedColumn(eqx.Module):
    """One column of one member on the rows that have a number there, a ``share`` of all rows.

    ``units`` are a one and the hidden units, ``features`` those of the residuals, ``log_masses`` those of
    the cells.
    """

    units: Float[np.ndarray, "n u"]
    features: Float[np.ndarray, "n k"]
    log_masses: Float[np.ndarray, "n m"]
    weight: Float[np.ndarray, " n"] | None = None
    share: float = 1.0

    def cost(
        self, weights: Float[np.ndarray, " uk"], penalty: float
    ) -> tuple[float, Float[np.ndarray, " uk"]]:
        """Return the penalised mean cost of a correction and its gradient."""
        coefficients = self.units @ weights.reshape(self.units.shape[1], -1)
        psi = residual_cells(self.log_masses.shape[1], count=self.features.shape[1]).features
        tilted = self.log_masses + coefficients @ psi.T
        log_partition = logsumexp(tilted, axis=1)
        gains = np.sum(coefficients * self.features, axis=1) - log_partition
        gain = float(weighted_mean(gains + logsumexp(self.log_masses, axis=1), self.weight))
        slopes = self.features - np.exp(tilted - log_partition[:, None]) @ psi
        total = (
            np.full(len(slopes), 1.0 / len(slopes))
            if self.weight is None
            else self.weight / self.weight.sum()
        )
        gradient = self.units.T @ (slopes * total[:, None])
        return 0.5 * penalty * weights @ weights - gain, penalty * weights - gradient.ravel()

    def improved(
        self, weights: Float[np.ndarray, "u k"], penalty: float, steps: int
    ) -> tuple[Float[np.ndarray, "u k"], float]:
        """Return the weights of least cost, and a bound on the optimality gap."""
        options = {"maxiter": steps}
        found = minimize(self.cost, weights.ravel(), (penalty,), "L-BFGS-B", jac=True, options=options)
        return found.x.reshape(weights.shape), float(found.jac @ found.jac) / (2.0 * penalty)


def tilted_columns(chain: Chain, sample: Sample, cells: int) -> list[TiltedColumn]:
    """Return the columns on the real line of a member, in the order of ``layout.corrected_owners``."""
    z, masks = np.asarray(sample.target), chain.masks()
    rows = chain.rows(z, np.asarray(sample.condition))
    units, (parts, _) = chain.masked().units(rows), chain.outputs(rows)
    found = []
    for family, outputs in zip(chain.columns.families, parts, strict=True):
        if not isinstance(family, RealLine):
            continue
        for place, column in enumerate(family.columns):
            there = np.isfinite(z[:, column])
            params = family.at(place).params(outputs[there, place])
            psi = features(params.residuals(z[there, column]), family.features)
            seen = units[there] * (masks.degrees <= masks.places[column])
            visible = np.concatenate([np.ones((len(seen), 1)), seen], axis=1)
            weight = None if sample.weight is None else np.asarray(sample.weight)[there]
            found.append(TiltedColumn(visible, psi, params.log_masses(cells), weight, float(there.mean())))
    return found


class PolishedMember(NamedTuple):
    """The columns of a member on the rows that it trains on and on those that it holds out."""

    seen: list[TiltedColumn]
    held: list[TiltedColumn]

    def improved(
        self, weights: Float[np.ndarray, "u d k"], penalty: float, steps: int
    ) -> tuple[np.ndarray, float]:
        """Return better weights, and a bound on their optimality gap."""
        found = [column.improved(weights[:, j], penalty, steps) for j, column in enumerate(self.seen)]
        return np.stack([part for part, _ in found], axis=1), sum(gap for _, gap in found)

    def gain(self, weights: Float[np.ndarray, "u d k"]) -> float:
        """Return the rise of the mean log density of held-out rows."""
        gains = [
            -column.share * column.cost(weights[:, j].ravel(), 0.0)[0] for j, column in enumerate(self.held)
        ]
        return float(np.sum(gains))


def polished(
    chain: Chain,
    sample: Sample,
    kept: Int[np.ndarray, "m k"],
    held: Int[np.ndarray, "m h"],
    parts: int,
    path: tuple[float, ...],
    cells: int,
    *,
    progress: float = 1e-3,
    steps: int = 100,
) -> tuple[Chain, Polish | None]:
    """Return stacked members with corrected tilts, and how they were found; unchanged if no score rises.

    Penalties fall along the path until no member's score rises by ``progress``, with at most ``steps``
    iterations each. A member's penalty is chosen by the rows that other members hold
    out, so that its own remain unseen.
    """
    tilted = [family.corrections for family in chain.columns.families for _ in family.columns]
    if not any(tilted) or not path:
        return chain, None
    columns = lambda k, rows: tilted_columns(chain.member(k), sample.rows(rows[k]), cells)
    member = lambda k: PolishedMember(columns(k, kept), columns(k, held))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        members = list(pool.map(member, range(len(kept))))
        weights = np.zeros((len(kept), chain.first.shape[-1] + 1, np.count_nonzero(tilted), max(tilted)))
        best, top = weights, np.zeros(len(kept))
        chosen, gaps = np.full(len(kept), np.inf), np.zeros(len(kept))
        for penalty in path:
            found = list(pool.map(PolishedMember.improved, members, weights, repeat(penalty), repeat(steps)))
            weights = np.stack([own for own, _ in found])
            scores = elsewhere(np.array(list(pool.map(PolishedMember.gain, members, weights))), parts)
            better = scores > top + progress
            best = np.where(better[:, None, None, None], weights, best)
            chosen, top = np.where(better, penalty, chosen), np.where(better, scores, top)
            gaps = np.where(better, [gap for _, gap in found], gaps)
            if not np.any(better):
                break
    if not np.any(np.isfinite(chosen)):
        return chain, None
    used = chosen[np.isfinite(chosen)]
    polish = Polish((float(used.min()), float(used.max())), float(np.mean(top)), float(gaps.max()))
    correction = best.reshape(*best.shape[:2], -1).astype(np.float32)
    return dataclasses.replace(chain, correction=correction), polish
