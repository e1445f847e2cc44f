"""The settings that a search has tried, as a table, whatever kind of search it was."""

import itertools
from typing import Any

import numpy as np

from kexpfam.report.page import paragraph, table, text

__all__ = ["trials_table"]

MOST_SHOWN, MOST_LISTED = 8, 200
OUTCOMES = ("score", "loss", "standard_error")


def trials_table(selection: Any) -> str:
    """Return the best trials, the others behind a fold, and what all of them share; nothing where there was no search."""
    trials = _trials(selection)
    if not trials:
        return ""
    score = "score" if "score" in trials[0] else "loss"
    trials.sort(key=lambda trial: -trial[score] if score == "score" else trial[score])
    names = [name for name in trials[0] if name not in OUTCOMES]
    shown = [
        {name: _value(trial[name]) for name in names}
        | {name: trial[name] for name in OUTCOMES if name in trial}
        for trial in trials
    ]
    varied = [name for name in names if len({trial[name] for trial in shown}) > 1]
    shared = ", ".join(
        f"{_words(name)} {shown[0][name]}" for name in names if name not in varied and shown[0][name]
    )
    header = [*varied, *(name for name in OUTCOMES if name in trials[0])]
    rows = [[trial[name] for name in header] for trial in shown]
    words = f"{len(rows):,} settings were tried, the best first; " + (
        "the score is the mean log density of held-out rows."
        if score == "score"
        else "a loss is better where it is lower."
    )
    if shared:
        words += f" All have {shared}."
    titles = [_words(name) for name in header]
    rest = table(rows[MOST_SHOWN:MOST_LISTED], titles)
    folded = f"<details><summary>{len(rows) - MOST_SHOWN} more</summary>{rest}</details>" if rest else ""
    return paragraph(text(words)) + table(rows[:MOST_SHOWN], titles) + folded


def _trials(selection: Any) -> list[dict[str, Any]]:
    """Return each trial as its settings and its score or loss."""
    if hasattr(selection, "grids"):
        places = itertools.product(*selection.grids)
        losses = np.asarray(selection.losses).ravel()
        named = [dict(zip(selection.names, place, strict=True)) for place in places]
        return [settings | {"loss": float(loss)} for settings, loss in zip(named, losses, strict=True)]
    found = []
    for trial in getattr(selection, "trials", None) or ():
        fields = trial._asdict()
        settings = fields.pop("settings", None)
        found.append(({} if settings is None else settings._asdict()) | {k: v for k, v in fields.items()})
    return found


def _value(value: Any) -> str:
    """Return a setting in few characters: several numbers that are equal once, infinite ones as such."""
    if isinstance(value, bool | str):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else value
    numbers = np.asarray(value, float).ravel()
    shown = [f"{number:.3g}" if np.isfinite(number) else "∞" for number in numbers]
    return ", ".join(shown[:1] if len(set(shown)) == 1 else shown[:6]) + (
        ", …" if len(set(shown)) > 1 and len(shown) > 6 else ""
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
