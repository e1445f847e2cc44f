"""Draws as ArviZ's InferenceData: summaries, pair plots and predictive checks of that library."""

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
    """Return independent draws, in as many chains as wanted, as InferenceData.

    Draws of a density, or of ``given(x)``, are the group ``posterior``, a variable per column. A conditional model needs X:
    its draws are ``posterior_predictive``, with X as ``constant_data`` and y, if it is given, as ``observed_data``. There is
    no group of pointwise log likelihoods: a single fitted density has no posterior over its parameters to weigh them by.
    """
    density, width = density_of(model), density_of(model).scaling.width
    names = list(names or _names(model, width))
    if len(names) != width:
        raise ValueError(f"{width} names are needed, one per column; got {names}.")
    keys = keys_from(random_state, chains)
    if not density.conditional:
        values = np.stack([density.sample(draws, key=key) for key in keys])
        return az.from_dict(posterior={name: values[..., j] for j, name in enumerate(names)})
    if X is None:
        raise ValueError(
            "a conditional model is drawn from under conditions: pass X, or take model.given(x)."
        )
    rows = np.asarray(X, float)
    values = np.stack([density.sample(draws, rows, key=key).swapaxes(0, 1) for key in keys])
    observed = None if y is None else np.asarray(y, float).reshape(len(rows), width)
    return az.from_dict(
        posterior_predictive={name: values[..., j] for j, name in enumerate(names)},
        observed_data=None if observed is None else {name: observed[:, j] for j, name in enumerate(names)},
        constant_data={"X": rows},
    )


def _names(model: Any, width: int) -> list[str]:
    """Return the names of what is drawn: those of the frame that the model was fitted to, if there was one."""
    if getattr(model, "conditional", True):
        known = getattr(model, "target_names_", None)
        return known or (["y"] if width == 1 else [f"y{j}" for j in range(width)])
    return getattr(model, "column_names_", None) or [f"x{j}" for j in range(width)]
