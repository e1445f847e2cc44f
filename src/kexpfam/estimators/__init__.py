"""How people call it: every estimator by its name, and how to get one back from a file."""

import importlib
import os

import numpy as np

from kexpfam import storage
from kexpfam.cache import use_compilation_cache
from kexpfam.estimators.base import Estimator
from kexpfam.estimators.codec import TableCodec

__all__ = ["ESTIMATORS", "load"]

# The one place where a name becomes an estimator: the module that holds it.
ESTIMATORS: dict[str, str] = {
    "KernelExpFamily": "kernel_exp_family",
    "ConditionalKernelExpFamily": "kernel_exp_family",
    "ScoreMatchingExpFamily": "score_matching",
    "ConditionalScoreMatching": "conditional_score_matching",
    "KernelDensity": "kernel_density",
    "GaussianMixtureDensity": "gaussian_mixture",
    "LeastSquaresConditional": "conditional_mixtures",
    "NeighbourDensity": "conditional_mixtures",
    "ConditionalKernelDensity": "conditional_mixtures",
    "SplineFlow": "flow",
}


def __getattr__(name: str) -> type[Estimator]:
    # Each is imported when it is asked for: no one pays for the others.
    if name not in ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{ESTIMATORS[name]}"), name)


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
    layouts = metadata.get("layouts", [None, None])
    columns = state["columns"], state["target_columns"]
    codecs = [
        None if one is None else TableCodec(one, layout) for one, layout in zip(columns, layouts, strict=True)
    ]
    estimator._codec, estimator._target_codec = codecs
    if metadata["fitted_to_frame"]:
        estimator.feature_names_in_ = np.array(metadata["columns"], dtype=object)
    for name in dict.fromkeys((*estimator._stored, *estimator._shared)):
        if name not in ("_columns", "_target_columns"):
            setattr(estimator, name, state[name.strip("_")])
    return estimator
