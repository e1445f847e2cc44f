"""Ctrl-C during a fit."""

import _thread
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# The module of JAX that waits for a compilation, which continues in another thread if the wait ends before
# it. The process then crashes if it ends before the compilation.
COMPILER = "jax._src.compiler"
# Seconds after which Ctrl-C is repeated if it was pressed during a compilation.
AGAIN = 0.1


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Provide a function that raises KeyboardInterrupt if Ctrl-C was pressed in this context.

    Ctrl-C raises KeyboardInterrupt at once, during a compilation at its end. Python discards the exception if
    it is raised in a callback of the garbage collector or of a weak reference, which JAX has; calls of the
    function and the end of the context raise it again. Handlers of the caller and threads other than the main
    one are left alone.
    """
    pressed, ended = False, threading.Event()

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    def repeat() -> None:
        if not ended.wait(AGAIN):
            _thread.interrupt_main()

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        if frame is not None and frame.f_globals.get("__name__") == COMPILER:
            threading.Thread(target=repeat, daemon=True).start()
            return
        ended.set()
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
        ended.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
