"""The trials of a search over settings, as a table."""

import itertools
from typing import Any

import numpy as np

from kexpfam.report.page import Block, Paragraph, Table

# Trials in the table, and those that are listed in all.
MOST_SHOWN, MOST_LISTED = 8, 200
OUTCOMES = ("score", "loss", "standard_error")


def trial_blocks(selection: Any) -> list[Block]:
    """Return the settings that all trials share, the best trials and the others; empty without a search."""
    trials = _trials(selection)
    if not trials:
        return []
    score = "score" if "score" in trials[0] else "loss"
    trials.sort(key=lambda trial: -trial[score] if score == "score" else trial[score])
    names = [name for name in trials[0] if name not in OUTCOMES]
    shown = [{name: _value(trial[name]) for name in names} for trial in trials]
    varied = [name for name in names if len({trial[name] for trial in shown}) > 1]
    same = [name for name in names if name not in varied and shown[0][name]]
    outcomes = [name for name in OUTCOMES if name in trials[0]]
    rows = [
        [*(text[name] for name in varied), *(trial[name] for name in outcomes)]
        for text, trial in zip(shown, trials, strict=True)
    ]
    what = "a lower loss is better."
    if score == "score":
        what = "the score is the mean log density of held-out rows."
    words = f"{len(rows):,} settings were tried, the best first; {what}"
    if same:
        words += f" All have {', '.join(f'{_words(name)} {shown[0][name]}' for name in same)}."
    header = [_words(name) for name in (*varied, *outcomes)]
    rest = Table(rows[MOST_SHOWN:MOST_LISTED], header, summary=f"{len(rows) - MOST_SHOWN} more")
    return [Paragraph(words), Table(rows[:MOST_SHOWN], header), rest]


def _trials(selection: Any) -> list[dict[str, Any]]:
    """Return each trial as its settings and its score or loss."""
    if hasattr(selection, "grids"):
        losses = np.asarray(selection.losses).ravel()
        return [
            dict(zip(selection.names, place, strict=True)) | {"loss": float(loss)}
            for place, loss in zip(itertools.product(*selection.grids), losses, strict=True)
        ]
    found = []
    for trial in getattr(selection, "trials", None) or ():
        fields = trial._asdict()
        settings = fields.pop("settings", None)
        found.append(({} if settings is None else settings._asdict()) | fields)
    return found


def _value(value: Any) -> str:
    """Return a setting as text: equal numbers once, at most six different ones."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    shown = [f"{number:.3g}" if np.isfinite(number) else "∞" for number in np.asarray(value, float).ravel()]
    if len(set(shown)) == 1:
        return shown[0]
    return ", ".join(shown[:6]) + (", …" if len(shown) > 6 else "")


def _words(name: str) -> str:
    return name.replace("_", " ")
