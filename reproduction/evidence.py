"""Evidence for a claim: its kind, a stated criterion, and the verdict that follows from it.

A reading is a function of all records under a criterion; the criterion's text and the comparison share their
numbers. A reading of too few records is None: nothing is called reproduced because a record or a file exists.
What follows "because" in a verdict was measured; a guess says "perhaps".
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from reproduction.records import Record, good

__all__ = [
    "BETTER",
    "MEASURED",
    "NOT_REPRODUCED",
    "REPRODUCED",
    "SHOWN",
    "TESTED",
    "Finding",
    "Reading",
    "Records",
    "because",
    "by_seed",
    "measured",
    "paired",
    "perhaps",
    "shown",
    "standard_error",
    "tested",
    "unless",
]

# The kinds of evidence.
MEASURED, TESTED, SHOWN = "measured", "tested", "shown in a figure"
REPRODUCED, BETTER, NOT_REPRODUCED = "reproduced", "better", "not reproduced"

Records = dict[str, list[Record]]


class Finding(NamedTuple):
    """Our number in words, and whether it bears the claim out."""

    ours: str
    verdict: str


class Reading(NamedTuple):
    """Kind of the evidence, criterion of a claim, and the finding of the records."""

    evidence: str
    criterion: str
    read: Callable[[Records], Finding | None]


def measured(criterion: str) -> Callable[[Callable[[Records], Finding | None]], Reading]:
    """Make a reading of a function of the records, under a criterion."""
    return lambda read: Reading(MEASURED, criterion, read)


def tested(tolerance: str) -> Reading:
    """Return the reading of an identity that a test of this repository checks."""
    return Reading(TESTED, tolerance, lambda records: Finding("–", "tested"))


def shown(measure: str, *datasets: str, **wanted: str) -> Reading:
    """Return the reading of a figure of every set, without a verdict."""

    def read(records: Records) -> Finding | None:
        found = good(records.get("figures", []), measure=measure, **wanted)
        return (
            Finding("figure below", "shown")
            if {record["cell"]["dataset"] for record in found} >= set(datasets)
            else None
        )

    return Reading(SHOWN, "none: by eye", read)


def because(fact: str) -> str:
    """Return a measured reason."""
    return f"because {fact}"


def perhaps(guess: str) -> str:
    """Return a reason that is a conjecture, not a measurement."""
    return f"perhaps because {guess}"


def unless(holds: bool, reason: str, *, verdict: str = REPRODUCED) -> str:
    """Return the verdict if the criterion holds, and otherwise that it does not, with the reason."""
    return verdict if holds else f"{NOT_REPRODUCED}, {reason}"


def by_seed(records: list[Record], name: str) -> dict[int, float]:
    """Return a value of the records that did not fail, by seed."""
    return {record["cell"]["seed"]: record["values"][name] for record in good(records)}


def standard_error(values: Mapping[int, float]) -> float:
    """Return the standard error of a mean; infinite for a single value."""
    return float(np.std(list(values.values()), ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.inf


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """Return the differences on the draws that both have."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}
