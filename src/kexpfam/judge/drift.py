r"""Tests of exchangeability that may be looked at after every row: conformal test martingales.

A new value is ranked among the reference values and all earlier new ones, ties in random order. If all of
them are exchangeable, the ranks :math:`u_1, u_2, \dots` are independent and uniform (Vovk, Nouretdinov and
Gammerman 2003). A bet is a density f on [0, 1]; the wealth :math:`M_t = \prod_{s \le t} f(u_s)` has
expectation one, so that :math:`P(\sup_t M_t \ge 1 / a) \le a` (Ville). The wealth is spread over bets on
location and spread of the ranks, and a small share moves between them at each step (the simple jumper of
Vovk et al. 2021), which finds changes that come late.
"""

import bisect
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from kexpfam.model.measures import logsumexp

# Bets 1 + a (2 u - 1) + b (6 u^2 - 6 u + 1): no bet, on location, on spread.
BETS = np.array(
    [(0.0, 0.0), (0.5, 0.0), (-0.5, 0.0), (0.95, 0.0), (-0.95, 0.0), (0.0, 0.9), (0.0, -0.9), (0.0, 1.8)]
)
# The share of the wealth that is divided equally among all bets at each step.
JUMP = 0.01


class Martingales:
    """Several streams of values, each with its reference values and its wealth.

    ``log_wealth`` has the logarithm of the wealth after each row, of shape (rows, streams).
    """

    def __init__(self, references: Sequence[np.ndarray], *, seed: int) -> None:
        self._known = [np.sort(_ordered(values)).tolist() for values in references]
        self._shares = np.full((len(references), len(BETS)), 1.0 / len(BETS))
        self._seed = seed
        self.log_wealth = np.zeros((0, len(references)))

    def update(self, values: Float[np.ndarray, "n streams"]) -> None:
        """Bet on new rows, one after the other."""
        start = len(self.log_wealth)
        steps = [self._step(row, start + k) for k, row in enumerate(_ordered(values).tolist())]
        last = self.log_wealth[-1:].sum(axis=0)
        gains = np.array(steps).reshape(len(steps), len(self._known))
        self.log_wealth = np.concatenate([self.log_wealth, last + np.cumsum(gains, axis=0)])

    def _step(self, row: list[float], number: int) -> np.ndarray:
        """Return the logarithm of the gain of each stream."""
        levels = np.random.default_rng([self._seed, number]).random(len(row))
        for place, (known, value) in enumerate(zip(self._known, row, strict=True)):
            below = bisect.bisect_left(known, value)
            upto = bisect.bisect_right(known, value, below)
            levels[place] = (below + levels[place] * (upto - below + 1)) / (len(known) + 1)
            known.insert(upto, value)
        location, spread = 2.0 * levels - 1.0, 6.0 * levels * (levels - 1.0) + 1.0
        shares = (1.0 - JUMP) * self._shares + JUMP / len(BETS)
        shares = shares * (1.0 + np.stack([location, spread], axis=1) @ BETS.T)
        totals = shares.sum(axis=1)
        self._shares = shares / totals[:, None]
        return np.log(totals)

    def state(self) -> dict:
        """Return the state as arrays and numbers, for a file."""
        known = [np.array(values) for values in self._known]
        return {
            "known": known,
            "shares": self._shares,
            "seed": self._seed,
            "log_wealth": self.log_wealth,
        }

    @classmethod
    def restored(cls, state: dict) -> "Martingales":
        """Return the martingales with this state."""
        found = cls(state["known"], seed=state["seed"])
        found._shares, found.log_wealth = state["shares"], state["log_wealth"]
        return found


def log_mean(log_values: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Return the logarithm of the mean; a mean of martingales is a martingale."""
    return logsumexp(log_values, axis=1) - np.log(log_values.shape[1])


def _ordered(values: np.ndarray) -> np.ndarray:
    """Return values in which missing cells are largest, and rounding errors do not break ties."""
    return np.where(np.isnan(values), np.inf, np.asarray(values, np.float32).astype(float))
