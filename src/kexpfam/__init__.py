"""Kernel exponential families: densities, samplers and verdicts from data."""

import importlib
from typing import Any

from kexpfam.version import __version__

# The public names and their modules, which are imported on first access, so that ``import kexpfam`` is fast.
_PUBLIC = {
    "KernelExpFamily": "estimators",
    "ConditionalKernelExpFamily": "estimators",
    "load": "estimators",
    "compare": "report",
    "Convex": "fit.convex",
    "DDE": "fit.dde",
    "Rows": "data.blocks",
    "Kernel": "fit.select",
    "Learned": "fit.learned",
    "Boosting": "fit.trees",
    "Search": "fit.select",
    "Features": "fit.features",
    "Distillation": "fit.distil",
    "Integration": "integrate.nodes",
    "Judgement": "judge.diagnosis",
    "Box": "model.measures",
    "Gaussian": "model.measures",
    "Mixture": "model.measures",
    "Atom": "data.kinds",
    "Bounded": "data.kinds",
    "Category": "data.kinds",
    "Integer": "data.kinds",
    "Periodic": "data.kinds",
    "Positive": "data.kinds",
    "Rounded": "data.kinds",
    "ColumnKindWarning": "data.encoding",
    "FallbackWarning": "fit.reference",
    "UnseenLabelWarning": "data.encoding",
    "FewDrawsWarning": "model.partial",
    "MomentWarning": "model.distributions",
    "TiesWarning": "data.columns",
    "UncertainNormaliserWarning": "estimators.base",
    "UnresolvedFitWarning": "fit.kernel",
    "NearlyDeterministicWarning": "estimators.kernel_exp_family",
    "StorageError": "storage",
    "CheckpointWarning": "storage",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
