"""Which candidates a density is made of: weights of a mixture, by the log density of rows that no candidate had seen."""

from typing import NamedTuple

import numpy as np

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


def stacking_weights(scores: np.ndarray) -> np.ndarray:
    r"""Return the weights that maximise :math:`\sum_i \log \sum_k w_k e^{s_{ik}}` for scores (rows, candidates).

    The problem is concave. Candidates that held-out rows can do without get no weight.
    """
    weights, score = _maximised(scores)
    if len(weights) == 1:
        return weights
    fewer = [np.delete(scores, k, axis=1) for k in range(len(weights))]
    losses = [score - _maximised(part)[1] for part in fewer]
    least = int(np.argmin(losses))
    return weights if losses[least] > SMALLEST_GAIN else np.insert(stacking_weights(fewer[least]), least, 0.0)


def _maximised(scores: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the weights of highest mean log score, by expectation maximisation, and that score."""
    weights = np.full(scores.shape[1], 1.0 / scores.shape[1])
    for _ in range(EM_STEPS):
        log_parts = scores + np.log(np.maximum(weights, np.finfo(float).tiny))
        totals = logsumexp(log_parts, axis=1)
        weights = np.exp(log_parts - totals[:, None]).mean(axis=0)
    return weights, float(totals.mean())


def compare(held_out: dict[str, np.ndarray]) -> list[Candidate]:
    """Return the candidates with their weights, by the rows that all of them were scored on without having seen them."""
    scores = np.stack(list(held_out.values()), axis=1)
    scores = scores[np.all(np.isfinite(scores), axis=1)]
    weights = stacking_weights(scores)
    errors = scores.std(axis=0) / np.sqrt(len(scores))
    return [
        Candidate(*row) for row in zip(held_out, weights.tolist(), scores.mean(axis=0).tolist(), errors.tolist(), strict=True)
    ]
