r"""Dependence between columns of a joint density: mutual information, and a test of independence.

.. math:: I(A; B | C) = E[\log p(a, b, c) + \log p(c) - \log p(a, c) - \log p(b, c)]

is a mean over draws of the density. The conditional randomisation test (Candès et al. 2018) compares the log
density of rows with that of rows whose A was drawn from :math:`p(a | c)`: if A and B are independent given
C, these are exchangeable.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import RandomKey
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.density import Estimate
from kexpfam.model.partial import FewDrawsWarning, completed, log_evidence


class Independence(NamedTuple):
    """The p-value of a randomisation test, the mean log density of the rows, and that of each copy."""

    p_value: float
    statistic: float
    copies: Float[np.ndarray, " m"]

    def __str__(self) -> str:
        return f"p = {self.p_value:.3g} by {len(self.copies)} randomised copies"


def mutual_information(
    density: Any,
    a: Sequence[int],
    b: Sequence[int],
    given: Sequence[int],
    *,
    rows: int,
    draws: int,
    key: RandomKey,
) -> Estimate:
    """Return the mutual information of columns a and b given others, in nats, with its Monte Carlo error.

    The mean is over ``rows`` draws of the density; marginal densities are means over ``draws`` completions.
    """
    row_key, key = jr.split(key)
    values = density.sample(rows, key=row_key)
    part = lambda *sets: _log_marginal(density, values, [j for own in sets for j in own], draws, key)
    with warnings.catch_warnings():
        # The few draws of each row are averaged over all rows.
        warnings.simplefilter("ignore", FewDrawsWarning)
        terms = part(a, b, given) + part(given) - part(a, given) - part(b, given)
    return Estimate(float(terms.mean()), float(terms.std() / np.sqrt(rows)), float(rows))


def independence_test(
    density: Any,
    values: Float[np.ndarray, "n d"],
    a: Sequence[int],
    b: Sequence[int],
    given: Sequence[int],
    *,
    copies: int,
    draws: int,
    key: RandomKey,
) -> Independence:
    """Return the test of whether columns a and b of the rows are independent given others.

    The p-value is :math:`(1 + k) / (1 + m)` with k of the m copies at least as probable as the rows. It is
    valid if the density of a given the others is right."""
    draw_key, key = jr.split(key)
    hidden = _only(values, given)
    drawn = completed(density, hidden, draws, key=draw_key)
    replaced = drawn.resampled(copies, np.random.default_rng(seed_from(draw_key)))
    used = [*a, *b, *given]
    rows = np.repeat(values[None], copies + 1, axis=0)
    rows[1:, :, list(a)] = replaced.transpose(1, 0, 2)[:, :, list(a)]
    flat = rows.reshape(-1, values.shape[1])
    scores = _log_marginal(density, flat, used, draws, key).reshape(copies + 1, -1).mean(axis=1)
    p_value = float(np.mean(scores >= scores[0]))
    return Independence(p_value, float(scores[0]), scores[1:])


def _log_marginal(
    density: Any, values: np.ndarray, columns: Sequence[int], draws: int, key: RandomKey
) -> np.ndarray:
    """Return the log density of some columns of each row."""
    return log_evidence(density, _only(values, columns), draws, key=key) if columns else np.zeros(len(values))


def _only(values: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    """Return the rows with all other cells missing."""
    kept = np.isin(np.arange(values.shape[1]), list(columns))
    return np.where(kept, values, np.nan)
