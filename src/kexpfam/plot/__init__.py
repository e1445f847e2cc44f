"""Pictures of densities: what a person looks at before reading any number.

Figures are matplotlib's own objects, made without pyplot: importing this package changes no backend, and no figure stays in
pyplot's memory. A notebook shows them; elsewhere ``figure.savefig(path)`` writes them. Functions that draw one panel take the
axes to draw on as ``ax=`` and return their figure.
"""

from typing import Any

from matplotlib.figure import Figure

from kexpfam.estimators.base import Estimator
from kexpfam.plot.calibration import plot_calibration, plot_pit, plot_reliability
from kexpfam.plot.columns import plot_columns
from kexpfam.plot.conditionals import plot_conditional, plot_given, plot_targets
from kexpfam.plot.densities import plot_density
from kexpfam.plot.marginals import plot_marginal
from kexpfam.plot.numbers import kinds_of
from kexpfam.plot.pairs import plot_pairs
from kexpfam.plot.ranking import plot_ranking
from kexpfam.plot.steps import plot_snapshots, plot_trace

__all__ = [
    "plot_calibration",
    "plot_columns",
    "plot_conditional",
    "plot_density",
    "plot_given",
    "plot_marginal",
    "plot_model",
    "plot_pairs",
    "plot_pit",
    "plot_ranking",
    "plot_reliability",
    "plot_snapshots",
    "plot_targets",
    "plot_trace",
]


def plot_model(estimator: Estimator, *args: Any, **kwargs: Any) -> Figure:
    """Return the picture that suits the model: its density, its intervals along a feature, or the pairs of its targets."""
    if not estimator.conditional:
        return plot_density(estimator, *args, **kwargs)  # type: ignore[arg-type]
    width = estimator._training_targets.shape[1]  # type: ignore[attr-defined]
    labels = kinds_of(estimator, estimator.n_features_in_, width).targets[0].categorical
    return (plot_targets if width > 1 or labels else plot_conditional)(estimator, *args, **kwargs)  # type: ignore[operator, arg-type]
