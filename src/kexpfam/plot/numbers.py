"""Tables of a model as arrays of numbers: labels are codes and missing values NaN."""

from typing import Any, NamedTuple

import numpy as np

from kexpfam.data.kinds import AbstractKind, Real


class Kinds(NamedTuple):
    """Kinds of the features and the targets (default: Real). All columns of a p(x) are targets."""

    features: tuple[AbstractKind, ...]
    targets: tuple[AbstractKind, ...]

    @property
    def plain(self) -> bool:
        """Return whether all columns are real numbers."""
        return all(kind.is_default for kind in (*self.features, *self.targets))


def kinds_of(estimator: Any, features: int, targets: int) -> Kinds:
    """Return the kinds of a model with this many features and targets."""
    columns = (getattr(estimator, name, None) for name in ("_columns", "_target_columns"))
    inputs, outputs = (getattr(one, "kinds", None) for one in columns)
    if not getattr(estimator, "conditional", False):
        inputs, outputs = (), inputs
    return Kinds(inputs or (Real(),) * features, outputs or (Real(),) * targets)


def numbers_of(estimator: Any, X: Any, y: Any = None) -> tuple[np.ndarray, ...]:
    """Return a table, or features and targets, as two-dimensional arrays of numbers."""
    return estimator._scored_rows(X, y)[::-1] if hasattr(estimator, "density_") else (np.asarray(X),)


def drawn(estimator: Any, count: int, random_state: Any, *X: np.ndarray) -> np.ndarray:
    """Return draws as numbers: (count, columns), or under conditions (rows, count, targets)."""
    if not hasattr(estimator, "density_"):
        return np.asarray(estimator.sample(count, random_state=random_state))
    return np.asarray(estimator._draws(estimator.density_, count, random_state, 0, *X))


def training_rows(estimator: Any, most: int = 100_000) -> tuple[np.ndarray, ...]:
    """Return the training data as numbers, rows repeated by their weights: a table, or features and targets.

    Integer weights with a sum of at most ``most`` are counts. Other weights give as many rows as there were,
    each in proportion to its weight.
    """
    tables, weight = tuple(estimator._training_columns()), estimator._weight
    if weight is None:
        return tables
    if np.all(weight == np.round(weight)) and weight.sum() <= most:
        places = np.repeat(np.arange(len(weight)), weight.astype(int))
    else:
        levels = (np.arange(len(weight)) + 0.5) / len(weight)
        places = np.searchsorted(np.cumsum(weight) / np.sum(weight), levels).clip(max=len(weight) - 1)
    return tuple(table[places] for table in tables)
