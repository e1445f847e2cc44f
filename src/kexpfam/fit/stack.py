"""Which candidates a density is made of: weights of a mixture, by the log density of rows that no candidate had seen."""

from typing import NamedTuple

import numpy as np

from kexpfam.data.weights import part_of, standard_error, weighted_mean
from kexpfam.model.measures import logsumexp

__all__ = ["Candidate", "compare", "stacking_weights"]

# A candidate is left out if held-out rows lose less than this (nats per row, mean) without it. Not its weight counts: one that
# describes a row in a thousand has next to none, and may save the thousandth row from a score of -300.
SMALLEST_GAIN = 0.003
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


def stacking_weights(scores: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    r"""Return the weights that maximise :math:`\sum_i c_i \log \sum_k w_k e^{s_{ik}}` for scores (rows, candidates).

    ``counts`` is what the rows count, by default all the same. The problem is concave. Candidates that held-out rows can do
    without get no weight.
    """
    weights, score = _maximised(scores, counts)
    if len(weights) == 1:
        return weights
    fewer = [np.delete(scores, k, axis=1) for k in range(len(weights))]
    losses = [score - _maximised(part, counts)[1] for part in fewer]
    least = int(np.argmin(losses))
    return (
        weights
        if losses[least] > SMALLEST_GAIN
        else np.insert(stacking_weights(fewer[least], counts), least, 0.0)
    )


def _maximised(scores: np.ndarray, counts: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Return the weights of highest mean log score, by expectation maximisation, and that score."""
    weights = np.full(scores.shape[1], 1.0 / scores.shape[1])
    for _ in range(EM_STEPS):
        log_parts = scores + np.log(np.maximum(weights, np.finfo(float).tiny))
        totals = logsumexp(log_parts, axis=1)
        weights = weighted_mean(np.exp(log_parts - totals[:, None]), counts)
    return weights, float(weighted_mean(totals, counts))


def compare(held_out: dict[str, np.ndarray], counts: np.ndarray | None = None) -> list[Candidate]:
    """Return the candidates with their weights, by the rows that all of them were scored on without having seen them."""
    scores = np.stack(list(held_out.values()), axis=1)
    scored = np.all(np.isfinite(scores), axis=1)
    scores, counts = scores[scored], part_of(counts, scored)
    weights, means = stacking_weights(scores, counts), weighted_mean(scores, counts)
    errors = [standard_error(column, counts) for column in scores.T]
    return [Candidate(*row) for row in zip(held_out, weights.tolist(), means.tolist(), errors, strict=True)]
