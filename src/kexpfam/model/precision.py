"""Double precision: the one place where JAX's float64 is switched on.

Data, features and densities are NumPy arrays of float64, whoever calls and whatever JAX is set to. Wherever they enter a
compiled program it runs inside ``double_precision()``, which leaves the caller's JAX as it was.
"""

from contextlib import AbstractContextManager

import jax

__all__ = ["double_precision"]


def double_precision() -> AbstractContextManager:
    """Return a context in which JAX computes in float64."""
    return jax.enable_x64(True)
