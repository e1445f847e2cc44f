"""Which candidates a density is made of: weights of a mixture, by the log density of rows that no candidate had seen."""

from typing import NamedTuple

import numpy as np

from kexpfam.model.measures import logsumexp

__all__ = ["Candidate", "compare", "stacking_weights"]

# A candidate with a smaller share of the mixture is left out: it would cost more than it says.
SMALLEST_WEIGHT = 0.05
# Steps of expectation maximisation; a mixture of few candidates is settled long before.
EM_STEPS = 500


class Candidate(NamedTuple):
    """A model that competed: its weight in the fitted density, and the mean log density of held-out rows."""

    name: str
    weight: float
    score: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.weight:.0%} of the density; held-out rows score {self.score:.3f} ± {self.standard_error:.1g}"


def stacking_weights(scores: np.ndarray) -> np.ndarray:
    r"""Return the weights that maximise :math:`\sum_i \log \sum_k w_k e^{s_{ik}}` for scores (rows, candidates).

    The problem is concave. A candidate with next to no weight gets none.
    """
    weights = np.full(scores.shape[1], 1.0 / scores.shape[1])
    for _ in range(EM_STEPS):
        with np.errstate(divide="ignore"):
            log_parts = scores + np.log(weights)
        weights = np.exp(log_parts - logsumexp(log_parts, axis=1)[:, None]).mean(axis=0)
    small = weights < SMALLEST_WEIGHT
    if not np.any(small & (weights > 0.0)):
        return weights / weights.sum()
    found = np.zeros_like(weights)
    found[~small] = stacking_weights(scores[:, ~small])
    return found


def compare(held_out: dict[str, np.ndarray]) -> list[Candidate]:
    """Return the candidates with their weights, by the rows that all of them were scored on without having seen them."""
    scores = np.stack(list(held_out.values()), axis=1)
    scores = scores[np.all(np.isfinite(scores), axis=1)]
    weights = stacking_weights(scores)
    errors = scores.std(axis=0) / np.sqrt(len(scores))
    return [
        Candidate(*row) for row in zip(held_out, weights.tolist(), scores.mean(axis=0).tolist(), errors.tolist(), strict=True)
    ]
