"""Functions of a fitted density as StableHLO files, which other programs run without kexpfam."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import export

from kexpfam.jax_settings import double_precision

__all__ = ["FUNCTIONS", "exported"]

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def _scores(density: Any, inputs: int) -> tuple[Callable, list[int]]:
    """Return the log density of rows, and the widths of its arguments."""
    width = density.scaling.width
    if not inputs:
        return jax.vmap(density.log_prob), [width]
    return jax.vmap(lambda x, y: density.log_prob(y, x)), [inputs, width]


def _draws(density: Any, inputs: int) -> tuple[Callable, list[int]]:
    """Return draws of rows, each a function of its seed and, under a condition, of its inputs."""
    one = lambda seed, *x: density.draw(*x, key=jr.key(seed.astype(jnp.uint32)[0]))
    return jax.vmap(one), [1, inputs] if inputs else [1]


FUNCTIONS: dict[str, Callable[[Any, int], tuple[Callable, list[int]]]] = {
    "score_samples": _scores,
    "sample": _draws,
}


def exported(density: Any, function: str, inputs: int) -> bytes:
    """Return a function of a density for any number of rows, serialised by ``jax.export``.

    Arguments are float64 arrays of shape (n, width); ``inputs`` is the width of the condition."""
    with double_precision():
        compute, widths = FUNCTIONS[function](density, inputs)
        (rows,) = export.symbolic_shape("n")
        shapes = [jax.ShapeDtypeStruct((rows, width), jnp.float64) for width in widths]
        program = export.export(jax.jit(compute), platforms=PLATFORMS)(*shapes)
        try:
            return bytes(program.serialize())
        except ImportError:
            raise ImportError(
                'export() needs the package flatbuffers: pip install "kexpfam[export]".'
            ) from None
