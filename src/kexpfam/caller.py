"""Where a warning points: the line outside the package that asked for the work, whatever calls lie between."""

import sys

__all__ = ["caller_level"]


def caller_level() -> int:
    """Return the ``stacklevel`` at which ``warnings.warn``, called next to this, names the first line outside the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "kexpfam":
        frame, level = frame.f_back, level + 1
    return level
