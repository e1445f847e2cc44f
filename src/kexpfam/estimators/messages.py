"""What people pass, as numbers and as error messages show it."""

from typing import Any

import numpy as np

__all__ = ["numbers_of", "shown"]

# Characters of a value in a message.
MOST_SHOWN = 80


def shown(value: Any) -> str:
    """Return a value as an error message shows it: on one line, and not much of it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def numbers_of(value: Any) -> np.ndarray:
    """Return a value as numbers, or NaN where it is none."""
    try:
        return np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        return np.array(np.nan)
