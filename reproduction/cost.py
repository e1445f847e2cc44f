"""Cost of a computation: seconds, processor seconds, and peak memory above the start."""

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Cost", "timed"]

MEGABYTE = 2**20


class Cost:
    """Context manager: seconds, processor seconds and peak memory above the start (megabytes) of its body.

    Where several processes share a processor its own seconds say more than those of the clock.
    """

    seconds: float
    processor_seconds: float
    megabytes: float

    def __enter__(self) -> "Cost":
        gc.collect()
        _give_back()
        _forget_peak()
        self._memory, self._start, self._used = _memory("VmRSS"), time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.processor_seconds = time.process_time() - self._used
        self.megabytes = max(_memory("VmHWM") - self._memory, 0.0)


def timed(call: Callable[[], Any], *, repeats: int) -> float:
    """Return the median processor seconds of a call, after a first one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return sorted(times)[repeats // 2]


def _give_back() -> None:
    """Return freed memory to the system if the C library can; otherwise it would hide the next peak."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _forget_peak() -> None:
    """Make the kernel count the peak of memory from now on, where it can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _memory(field: str) -> float:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return float(line.split()[1]) * 1024 / MEGABYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
