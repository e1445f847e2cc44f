"""The only module that changes settings of JAX: precision and compilation cache, each within a context.

Data, features and densities are NumPy arrays of float64, whatever the precision of the caller's JAX. Code
that passes them to a compiled program runs inside ``double_precision()``.

Inside this context compiled programs are stored in ``~/.cache/kexpfam``, so that another process need not
compile them. The environment variable ``KEXPFAM_CACHE`` names another folder; ``KEXPFAM_CACHE=off`` disables
the cache. A cache folder that the caller has configured in JAX is used instead.

Precision is set for the current thread. JAX has no thread-local setting of the cache: a program that another
thread compiles while a context is open may be stored in the folder too.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

# The least recently used programs are deleted beyond this size; programs that compile faster are not stored.
CACHE_BYTES = 2**30
CACHE_SECONDS = 0.1

_lock = threading.Lock()
_open_contexts = 0
_caller_settings: dict[str, Any] = {}
_used = _forked_after_use = False


def _note_fork() -> None:
    global _forked_after_use
    _forked_after_use = _used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def check_fork() -> None:
    """Raise in a process that was forked after JAX was used: its threads are missing there, and it would wait
    for them without end."""
    if _forked_after_use:
        raise RuntimeError(
            "this process was forked after kexpfam was used, and JAX does not work in it: start processes "
            "with multiprocessing.get_context('spawn'), or fork before the first call."
        )


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Return a context in which JAX computes in float64 and compiled programs are cached.

    A process that was forked after such a context is refused (``check_fork``).
    """
    global _used
    check_fork()
    _used = True
    with _cache(), jax.enable_x64(True):
        yield


def double(value: Any) -> jax.Array:
    """Return a setting as an array of float64, whatever the precision of the caller's JAX."""
    with jax.enable_x64(True):
        return jax.numpy.asarray(value, jax.numpy.float64)


def single_precision() -> AbstractContextManager:
    """Return a context in which JAX computes in float32."""
    return jax.enable_x64(False)


@contextlib.contextmanager
def _cache() -> Iterator[None]:
    """Return a context with a cache, unless the caller has one; the last to close restores all settings."""
    global _open_contexts
    with _lock:
        _open_contexts += 1
        if _open_contexts == 1 and jax.config.values["jax_compilation_cache_dir"] is None:
            for name, value in _cache_settings(os.environ.get("KEXPFAM_CACHE") or None).items():
                _caller_settings[name] = jax.config.values[name]
                jax.config.update(name, value)
    try:
        yield
    finally:
        with _lock:
            _open_contexts -= 1
            if _open_contexts == 0 and _caller_settings:
                from jax.experimental.compilation_cache import compilation_cache

                for name, value in _caller_settings.items():
                    jax.config.update(name, value)
                _caller_settings.clear()
                compilation_cache.reset_cache()  # JAX would keep the folder that it has opened


@functools.cache
def _cache_settings(folder: str | None) -> dict[str, Any]:
    """Return the settings of the cache, empty if it is disabled or its folder cannot be created."""
    if folder == "off":
        return {}
    try:
        path = Path.home() / ".cache" / "kexpfam" if folder is None else Path(folder)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return {}
    return {
        "jax_compilation_cache_dir": str(path),
        "jax_compilation_cache_max_size": CACHE_BYTES,
        "jax_persistent_cache_min_compile_time_secs": CACHE_SECONDS,
    }
