"""Choice between candidates: weights of a mixture of densities by held-out log density."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kexpfam.data.weights import part_of, standard_error, weighted_mean
from kexpfam.fit.task import Candidate, Fitted, Task
from kexpfam.model.distributions import AbstractDensity
from kexpfam.model.ensemble import Stack
from kexpfam.model.measures import logsumexp
from kexpfam.progress import OutOfTimeError

__all__ = ["CandidateScore", "Stacked", "compare", "compete", "stacking_weights"]

# A candidate is left out if the mean held-out log density falls by less than this (nats) without it. The
# weight is no criterion: a candidate of small weight can raise the score of a single row by hundreds of nats.
SMALLEST_GAIN = 0.003
# The share of a time budget that each candidate but the last may take.
FIRST_SHARE = 0.2
# Steps of expectation maximisation.
EM_STEPS = 500


class CandidateScore(NamedTuple):
    """Weight of a candidate in the fitted density, and its mean held-out log density with standard error."""

    name: str
    weight: float
    score: float
    standard_error: float

    def __str__(self) -> str:
        return f"weight {self.weight:.0%}, held-out log density {self.score:.3f} ± {self.standard_error:.1g}"


class Stacked(NamedTuple):
    """The stacked density, the scores of the candidates, and the candidates."""

    density: AbstractDensity
    scores: list[CandidateScore]
    fitted: dict[str, Fitted]

    @property
    def held_out(self) -> np.ndarray | None:
        """Return the held-out log density of each row under the stack; NaN for rows in no part."""
        parts = [(self.fitted[one.name].held_out, one.weight) for one in self.scores if one.weight > 0.0]
        scores = [held + np.log(weight) for held, weight in parts if held is not None]
        return logsumexp(np.stack(scores), axis=0) if len(scores) == len(parts) else None


def compete(task: Task, candidates: Sequence[Candidate]) -> Stacked:
    """Fit the candidates in order and stack those that raise the held-out log density.

    With a time budget each but the last may take ``FIRST_SHARE`` of it, and is left out if it takes longer.
    """
    fitted: dict[str, Fitted] = {}
    for place, candidate in enumerate(candidates, start=1):
        share = 1.0 if place == len(candidates) else FIRST_SHARE * place
        try:
            found = candidate.fit(_within(task, share), fitted)
        except OutOfTimeError:
            found = None
        if found is not None:
            fitted[candidate.name] = found
    if not fitted and task.budget is not None:
        raise ValueError(f"no model was fitted in {task.budget.seconds:g} seconds: raise time_budget.")
    scores = compare(fitted, task.sample.weight)
    parts: tuple[Any, ...] = tuple(fitted[one.name].density for one in scores if one.weight > 0.0)
    weights = np.array([one.weight for one in scores if one.weight > 0.0])
    density = parts[0] if len(parts) == 1 else Stack(parts, weights, parts[0].scaling)
    return Stacked(density, scores, fitted)


def _within(task: Task, share: float) -> Task:
    """Return a task whose listener ends it after this share of its time budget, if it has one."""
    if task.budget is None:
        return task
    return task._replace(report=task.budget.watched(task.report, share))


def compare(fitted: dict[str, Fitted], counts: np.ndarray | None = None) -> list[CandidateScore]:
    """Return the weights of the candidates by the rows that all of them were scored on without having seen
    them."""
    held_out = {name: one.held_out for name, one in fitted.items() if one.held_out is not None}
    if not held_out:
        return [CandidateScore(name, 1.0, np.nan, np.nan) for name in fitted]
    scores = np.stack(list(held_out.values()), axis=1)
    scored = np.all(np.isfinite(scores), axis=1)
    scores, counts = scores[scored], part_of(counts, scored)
    weights = stacking_weights(scores, counts)
    means = weighted_mean(scores, counts)
    errors = [standard_error(column, counts) for column in scores.T]
    return [
        CandidateScore(*row) for row in zip(held_out, weights.tolist(), means.tolist(), errors, strict=True)
    ]


def stacking_weights(scores: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    r"""Return the weights that maximise :math:`\sum_i c_i \log \sum_k w_k e^{s_{ik}}` for scores (rows,
    candidates).

    ``counts`` are the weights of the rows. The problem is concave. Candidates that gain less than
    ``SMALLEST_GAIN`` get weight 0."""
    if scores.shape[1] == 1:
        return np.ones(1)
    weights, score = _maximised(scores, counts)
    fewer = [np.delete(scores, k, axis=1) for k in range(len(weights))]
    losses = [score - _maximised(part, counts)[1] for part in fewer]
    least = int(np.argmin(losses))
    if losses[least] > SMALLEST_GAIN:
        return weights
    return np.insert(stacking_weights(fewer[least], counts), least, 0.0)


def _maximised(scores: np.ndarray, counts: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Return the weights of highest mean log score, by expectation maximisation, and that score."""
    weights = np.full(scores.shape[1], 1.0 / scores.shape[1])
    for _ in range(EM_STEPS):
        log_parts = scores + np.log(np.maximum(weights, np.finfo(float).tiny))
        totals = logsumexp(log_parts, axis=1)
        weights = weighted_mean(np.exp(log_parts - totals[:, None]), counts)
    return weights, float(weighted_mean(totals, counts))
