"""Every estimator by its name, and how to get one back from a file."""

import numpy as np

from kexpfam import storage
from kexpfam.baselines import (
    ConditionalKernelDensity,
    ConditionalScoreMatching,
    GaussianMixtureDensity,
    KernelDensity,
    LeastSquaresConditional,
    NeighbourDensity,
    ScoreMatchingExpFamily,
    SplineFlow,
)
from kexpfam.estimators import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.face import FittedModel, in_double_precision

ESTIMATORS: dict[str, type[FittedModel]] = {
    estimator.__name__: estimator
    for estimator in (
        KernelExpFamily,
        ConditionalKernelExpFamily,
        ScoreMatchingExpFamily,
        ConditionalScoreMatching,
        KernelDensity,
        GaussianMixtureDensity,
        LeastSquaresConditional,
        NeighbourDensity,
        ConditionalKernelDensity,
        SplineFlow,
    )
}


@in_double_precision
def load(path):
    """Return the estimator stored at ``path``; no code is executed on the way."""
    kind, state, metadata = storage.load_tree(path)
    if kind not in ESTIMATORS:
        raise storage.StorageError(f"{path} holds a {kind!r}, which is not an estimator of this version of kexpfam.")
    estimator = ESTIMATORS[kind](**state["params"])
    estimator.n_features_in_ = metadata["n_features_in"]
    if metadata["columns"] is not None:
        estimator.column_names_ = metadata["columns"]
    if metadata.get("targets") is not None:
        estimator.target_names_ = metadata["targets"]
    if metadata["fitted_to_frame"]:
        estimator.feature_names_in_ = np.array(metadata["columns"], dtype=object)
    for name in estimator._stored:
        setattr(estimator, name, state[name.strip("_")])
    return estimator
