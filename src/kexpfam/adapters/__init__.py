"""Fitted models in other people's stacks: one small module per library, imported when it is asked for.

``scipy`` needs nothing beyond the library; ``arviz``, ``mapie``, ``numpyro``, ``sbi`` and ``skpro`` are extras of their own.
"""

from typing import Any

from kexpfam.estimators.derived import GivenDensity
from kexpfam.model.distributions import AbstractDensity

__all__ = ["density_of"]


def density_of(model: Any) -> Any:
    """Return the density of a fitted model or of its ``given(x)``; a density is its own."""
    density = model.density if isinstance(model, GivenDensity) else getattr(model, "density_", model)
    if not isinstance(density, AbstractDensity):
        raise TypeError(
            f"expected a fitted KernelExpFamily or ConditionalKernelExpFamily or its given(x), got {model!r}."
        )
    return density
