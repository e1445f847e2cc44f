"""Ctrl-C on the command line: one line that says how to resume, and exit code 130."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from kexpfam.cli.results import message

# The exit code of a command that SIGINT has ended.
INTERRUPTED = 130
# Seconds after Ctrl-C in which KeyboardInterrupt may end the command and remove temporary files.
GRACE = 1.0


@contextlib.contextmanager
def ends_soon_after_interrupt() -> Iterator[None]:
    """Return a context in which the process ends at most ``GRACE`` seconds after Ctrl-C.

    KeyboardInterrupt comes late while native code runs, and is lost if a callback discards it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # While the interpreter ends, the work is done: Ctrl-C would replace the exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while numbers := os.read(reader, 1):  # empty at the end of the context
            if numbers[0] == signal.SIGINT:
                time.sleep(GRACE)
                end()

    def report(discarded: Any) -> None:
        if discarded.exc_type is not KeyboardInterrupt:  # the line at the end is enough
            hook(discarded)

    before, hook = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), sys.unraisablehook
    sys.unraisablehook = report
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(before)
        os.close(writer)


def end() -> NoReturn:
    """Write one line and end the process at once: clean-up would wait for running computations."""
    message("error", f"interrupted. {advice()}")
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # shows the cursor, which a progress bar hides
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def advice() -> str:
    """Return how to continue after an interruption."""
    if any(argument.partition("=")[0] == "--checkpoint" for argument in sys.argv):
        return "The same command resumes from the checkpoint."
    if "reproduce" in sys.argv[1:2]:
        return "The same command continues after the last record."
    if "fit" in sys.argv[1:2]:
        return "No file was changed; with --checkpoint FILE the same command resumes."
    return "No file was changed."
