"""The paper's other algorithms as solvers: pass one as ``solver=`` to an estimator."""

import importlib

# Modules are imported on first use.
_PUBLIC = {
    "AdaptedFeatures": "learned_features",
    "AnnealedLikelihood": "ascent",
    "Averaged": "iterates",
    "ContrastiveDivergence": "ascent",
    "DeepNetwork": "learned_features",
    "FunctionalAscent": "functional",
    "FunctionalGradient": "functional",
    "MMDGAN": "mmd_gan",
    "MomentMatching": "moment_matching",
    "NaturalAscent": "ascent",
    "RandomFeatureGradient": "functional",
    "RandomIterate": "iterates",
    "SinglyDual": "singly_dual",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> type:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
