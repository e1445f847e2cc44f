"""How people call it: every estimator by its name, and how to get one back from a file."""

import importlib
import os

import numpy as np

from kexpfam import storage
from kexpfam.cache import use_compilation_cache
from kexpfam.estimators.base import Estimator

__all__ = ["ESTIMATORS", "load"]

# The module of each estimator; the baselines share the interface.
ESTIMATORS: dict[str, str] = {
    "KernelExpFamily": "kexpfam.estimators.kernel_exp_family",
    "ConditionalKernelExpFamily": "kexpfam.estimators.kernel_exp_family",
    "ScoreMatchingExpFamily": "kexpfam.baselines.score_matching",
    "ConditionalScoreMatching": "kexpfam.baselines.conditional_score_matching",
    "KernelDensity": "kexpfam.baselines.kernel_density",
    "GaussianMixtureDensity": "kexpfam.baselines.gaussian_mixture",
    "LeastSquaresConditional": "kexpfam.baselines.conditional_mixtures",
    "NeighbourDensity": "kexpfam.baselines.conditional_mixtures",
    "ConditionalKernelDensity": "kexpfam.baselines.conditional_mixtures",
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
    """Return the estimator stored at ``path``; no code is executed on the way."""
    use_compilation_cache()
    kind, state, metadata = storage.load_tree(path)
    if kind not in ESTIMATORS:
        raise storage.StorageError(
            f"{path} holds a {kind!r}, which is not an estimator of this version of kexpfam."
        )
    estimator = __getattr__(kind)(**state["params"])
    estimator.n_features_in_ = metadata["n_features_in"]
    if metadata["columns"] is not None:
        estimator.column_names_ = metadata["columns"]
    if metadata.get("targets") is not None:
        estimator.target_names_ = metadata["targets"]
    estimator._layout, estimator._target_layout = metadata.get("layouts", [None, None])
    if metadata["fitted_to_frame"]:
        estimator.feature_names_in_ = np.array(metadata["columns"], dtype=object)
    for name in (*estimator._stored, *estimator._shared):
        setattr(estimator, name, state[name.strip("_")])
    return estimator
