"""Stack level of warnings: a warning names the line of the user's code that called the package."""

import sys


def caller_level() -> int:
    """Return the ``stacklevel`` with which ``warnings.warn`` names the first line outside the package.

    It must be called in the same function as ``warnings.warn``.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "kexpfam":
        frame, level = frame.f_back, level + 1
    return level
