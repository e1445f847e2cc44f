"""Figures of densities, conditional densities, calibration and solver traces.

Functions return matplotlib figures that are created without pyplot: the backend stays unchanged and pyplot
keeps no reference. A notebook displays them; elsewhere call ``figure.savefig(path)``. Functions that draw a
single panel accept existing axes as ``ax`` and return the figure of these axes.
"""

from typing import Any

from matplotlib.figure import Figure

from kexpfam.estimators.base import Estimator
from kexpfam.plot.calibration import plot_calibration, plot_pit, plot_reliability
from kexpfam.plot.columns import plot_columns, plot_marginal, plot_pairs
from kexpfam.plot.conditionals import plot_conditional, plot_given, plot_targets
from kexpfam.plot.densities import plot_density
from kexpfam.plot.numbers import kinds_of
from kexpfam.plot.series import plot_explanation, plot_monitor, plot_ranking, plot_snapshots, plot_trace

__all__ = [
    "plot_calibration",
    "plot_columns",
    "plot_conditional",
    "plot_density",
    "plot_explanation",
    "plot_given",
    "plot_marginal",
    "plot_model",
    "plot_monitor",
    "plot_pairs",
    "plot_pit",
    "plot_ranking",
    "plot_reliability",
    "plot_snapshots",
    "plot_targets",
    "plot_trace",
]


def plot_model(estimator: Estimator, *args: Any, **kwargs: Any) -> Figure:
    """Return the default figure of a model: density, intervals along a feature, or pairs of targets."""
    fitted: Any = estimator
    if not fitted.conditional:
        return plot_density(fitted, *args, **kwargs)
    width = fitted._training_targets.shape[1]
    categorical = kinds_of(fitted, fitted.n_features_in_, width).targets[0].categorical
    if width > 1 or categorical:
        return plot_targets(fitted, *args, **kwargs)
    return plot_conditional(fitted, *args, **kwargs)
