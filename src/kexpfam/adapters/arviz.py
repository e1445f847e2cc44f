"""Draws as ArviZ's InferenceData, for its summaries, pair plots and predictive checks."""

from collections.abc import Sequence
from typing import Any

import arviz as az
import numpy as np
from numpy.typing import ArrayLike

from kexpfam.adapters import density_of
from kexpfam.estimators.base import Seed, keys_from

__all__ = ["to_inference_data"]


def to_inference_data(
    model: Any,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    draws: int = 1000,
    chains: int = 4,
    names: Sequence[str] | None = None,
    random_state: Seed = None,
) -> az.InferenceData:
    """Return independent draws in ``chains`` chains as InferenceData.

    Draws of a density, or of ``given(x)``, form the group ``posterior`` with one variable per column. A
    conditional model needs X: its draws form ``posterior_predictive``, X is ``constant_data`` and y, if
    given, is ``observed_data``. There is no group of pointwise log likelihoods, because a single fitted
    density has no posterior over its parameters.
    """
    density = density_of(model)
    width = density.scaling.width
    names = list(names or _names(model, width))
    if len(names) != width:
        raise ValueError(f"expected {width} names, one per column; got {names}.")
    by_name = lambda values: {name: values[..., j] for j, name in enumerate(names)}
    keys = keys_from(random_state, chains)
    if not density.conditional:
        return az.from_dict(posterior=by_name(np.stack([density.sample(draws, key=key) for key in keys])))
    if X is None:
        raise ValueError("a conditional model needs conditions: pass X, or use model.given(x).")
    rows = np.asarray(X, float)
    predicted = np.stack([density.sample(draws, rows, key=key).swapaxes(0, 1) for key in keys])
    return az.from_dict(
        posterior_predictive=by_name(predicted),
        observed_data=None if y is None else by_name(np.asarray(y, float).reshape(len(rows), width)),
        constant_data={"X": rows},
    )


def _names(model: Any, width: int) -> list[str]:
    """Return the names of the columns of the draws: those seen in fit, or x0, x1, ... and y0, y1, ..."""
    conditional = getattr(model, "conditional", True)
    columns = None if conditional else getattr(model, "_columns", None)
    if columns is not None and columns.places is not None:
        return columns.labels  # without carried columns
    names = getattr(model, "target_names_" if conditional else "column_names_", None)
    letter = "y" if conditional else "x"
    return names or (["y"] if conditional and width == 1 else [f"{letter}{j}" for j in range(width)])
