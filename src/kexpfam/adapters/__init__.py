"""Fitted models as objects of other libraries: one module per library, imported on demand.

``scipy`` and ``outliers`` need no further package; ``arviz``, ``mapie``, ``numpyro``, ``sbi`` and ``skpro``
are extras of their own.
"""

from typing import Any

from kexpfam.estimators.derived import GivenDensity
from kexpfam.model.distributions import AbstractDensity

__all__ = ["density_of"]


def density_of(model: Any) -> Any:
    """Return the density of a fitted model or of its ``given(x)``; a density is returned unchanged."""
    density = model.density if isinstance(model, GivenDensity) else getattr(model, "density_", model)
    if not isinstance(density, AbstractDensity):
        raise TypeError(f"expected a fitted model, its given(x) or a density, got {model!r}.")
    return density
