"""Compiled programs that outlive a process: the second one that fits a model does not wait for the compiler.

They are kept in ``~/.cache/kexpfam``, or in the folder that the environment variable ``KEXPFAM_CACHE`` names;
``KEXPFAM_CACHE=off`` switches this off. A JAX that has a cache of its own configured keeps it. Access is by file locks, so that
several processes can share the folder, and the least recently used programs are dropped beyond a gigabyte.
"""

import functools
import os
from pathlib import Path

__all__ = ["use_compilation_cache"]

MOST_BYTES = 2**30
# Programs that compile faster than this are not worth a file.
FEWEST_SECONDS = 0.1


@functools.cache
def use_compilation_cache() -> None:
    """Switch on JAX's persistent compilation cache, once a process, unless the user has decided otherwise."""
    import jax

    folder = os.environ.get("KEXPFAM_CACHE", str(Path.home() / ".cache" / "kexpfam"))
    if folder == "off" or getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written to costs time, not results
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", FEWEST_SECONDS)
    jax.config.update("jax_compilation_cache_dir", folder)
