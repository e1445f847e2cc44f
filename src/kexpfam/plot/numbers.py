"""The numbers behind a model's tables: labels are codes and gaps NaN here, so that cells of any kind can be drawn."""

from typing import Any, NamedTuple

import numpy as np

from kexpfam.data.kinds import AbstractKind, Real

__all__ = ["Kinds", "drawn", "kinds_of", "levels_of", "numbers_of", "training_rows"]

# Rows that weights of whole numbers are written out to.
MOST_REPEATED = 100_000


class Kinds(NamedTuple):
    """The kinds of features and of targets; of a density p(x) all columns are targets. Real where a model knows no kinds."""

    features: tuple[AbstractKind, ...]
    targets: tuple[AbstractKind, ...]

    @property
    def plain(self) -> bool:
        """Return whether all columns are real numbers."""
        return all(kind.is_default for kind in (*self.features, *self.targets))


def kinds_of(estimator: Any, features: int, targets: int) -> Kinds:
    """Return the kinds of a model of so many features and targets."""
    inputs, outputs = (
        getattr(getattr(estimator, name, None), "kinds", None) for name in ("_columns", "_target_columns")
    )
    if not getattr(estimator, "conditional", False):
        inputs, outputs = (), inputs
    return Kinds(inputs or (Real(),) * features, outputs or (Real(),) * targets)


def levels_of(kind: AbstractKind | None) -> list[str] | None:
    """Return the labels of a category in the order of their codes; numbers have none."""
    return None if kind is None else kind.labels


def numbers_of(estimator: Any, *tables: Any) -> tuple[np.ndarray, ...]:
    """Return a table, or features and targets, as the numbers that the model works with; targets have columns."""
    if not hasattr(estimator, "density_"):
        return tuple(np.asarray(table) for table in tables)
    if len(tables) == 1:
        return (estimator._checked_points(tables[0]),)
    rows, targets = estimator._checked_rows(*tables)
    return rows, targets.reshape(len(rows), -1)


def drawn(estimator: Any, count: int, random_state: Any, *X: np.ndarray) -> np.ndarray:
    """Return draws as numbers: (count, columns), or under conditions (rows, count, targets)."""
    if not hasattr(estimator, "density_"):
        return np.asarray(estimator.sample(count, random_state=random_state))
    return np.asarray(estimator._draws(estimator.density_, count, random_state, 0, *X))


def training_rows(estimator: Any) -> tuple[np.ndarray, ...]:
    """Return the training data as numbers, each row as often as its weight says: a table, or features and targets.

    Weights that are no counts give as many rows as there were, each by its share.
    """
    tables: tuple[np.ndarray, ...] = (estimator._training,)
    if estimator.conditional:
        tables += (estimator._training_targets,)
    else:
        tables = (estimator.density_.scaling.to_data(estimator._training),)
    weight = getattr(estimator, "_weight", None)
    if weight is None:
        return tables
    if np.all(weight == np.round(weight)) and weight.sum() <= MOST_REPEATED:
        places = np.repeat(np.arange(len(weight)), weight.astype(int))
    else:
        shares = np.cumsum(weight) / np.sum(weight)
        places = np.minimum(
            np.searchsorted(shares, (np.arange(len(weight)) + 0.5) / len(weight)), len(weight) - 1
        )
    return tuple(table[places] for table in tables)
