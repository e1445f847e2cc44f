"""Ctrl-C during a fit."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Provide a function that raises KeyboardInterrupt if Ctrl-C was pressed in this context.

    Ctrl-C raises KeyboardInterrupt at once. Python discards the exception if it is raised in a callback of
    the garbage collector or of a weak reference, which JAX has; calls of the function and the end of the
    context raise it again. Handlers of the caller and threads other than the main one are left alone.
    """
    pressed = False

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
