"""How people call it: every estimator by its name, and how to get one back from a file."""

import importlib
import inspect
import os
from typing import Any

import numpy as np

from kexpfam import storage
from kexpfam.estimators.base import Estimator

__all__ = ["ESTIMATORS", "load"]

# The module of each estimator; the baselines share the interface.
ESTIMATORS: dict[str, str] = {
    "KernelExpFamily": "kexpfam.estimators.kernel_exp_family",
    "ConditionalKernelExpFamily": "kexpfam.estimators.kernel_exp_family",
    "ScoreMatchingExpFamily": "kexpfam.baselines.score_matching",
    "ConditionalScoreMatching": "kexpfam.baselines.score_matching",
    "KernelDensity": "kexpfam.baselines.kernel_density",
    "GaussianMixtureDensity": "kexpfam.baselines.gaussian_mixture",
    "LeastSquaresConditional": "kexpfam.baselines.kernel_density",
    "NeighbourDensity": "kexpfam.baselines.kernel_density",
    "ConditionalKernelDensity": "kexpfam.baselines.kernel_density",
    "SplineFlow": "kexpfam.baselines.flow",
}


def __getattr__(name: str) -> type[Estimator]:
    # Each is imported when it is asked for: no one pays for the others.
    if name not in ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(ESTIMATORS[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *ESTIMATORS])


def load(path: str | os.PathLike) -> Estimator:
    """Return the estimator stored at ``path``; no code of the file is executed."""
    kind, state, metadata = storage.load_tree(path)
    kind = storage.RENAMED.get(kind) or kind
    if kind not in ESTIMATORS:
        raise storage.StorageError(f"{path} contains a {kind!r}, which is not an estimator of this kexpfam.")
    try:
        return _restored(__getattr__(kind), state, metadata)
    except storage.StorageError as problem:
        raise storage.StorageError(f"{path}: {problem}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise storage.StorageError(f"{path} is damaged: it does not contain a fitted {kind}.") from problem


def _restored(cls: type[Estimator], state: dict[str, Any], metadata: dict[str, Any]) -> Estimator:
    """Return a fitted estimator; parameters and attributes that are not stored take their defaults."""
    parameters = inspect.signature(cls).parameters
    params = storage.restored_fields(
        cls.__name__, state.pop("params"), parameters, lambda name: parameters[name].default
    )
    estimator = cls(**params)
    stored = {name.strip("_"): name for name in (*estimator._stored, *estimator._shared)}
    class_attributes = {key: getattr(cls, name) for key, name in stored.items() if hasattr(cls, name)}
    for key, value in storage.restored_fields(
        cls.__name__, state, stored, class_attributes.__getitem__
    ).items():
        setattr(estimator, stored[key], value)
    estimator.n_features_in_ = metadata["n_features_in"]
    if metadata["columns"] is not None:
        estimator.column_names_ = metadata["columns"]
    if metadata["targets"] is not None:
        estimator.target_names_ = metadata["targets"]
    if metadata["fitted_to_frame"]:
        estimator.feature_names_in_ = np.array(metadata["columns"], dtype=object)
    return estimator
