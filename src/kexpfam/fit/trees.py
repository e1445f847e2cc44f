"""Boosted trees of the targets, whose predictions are inputs of a chain."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from threadpoolctl import threadpool_limits

from kexpfam.data.sample import Sample
from kexpfam.data.weights import weighted_mean, weighted_variance
from kexpfam.model.trees import Trees
from kexpfam.settings import SettingsRecord, above, at_least

__all__ = ["Boosted", "Boosting", "boosted"]


class Boosting(SettingsRecord):
    """Settings of the boosted trees whose predictions are inputs of a chain.

    Parameters
    ----------
    trees : int
        The largest number of trees; held-out rows choose a smaller one.
    rate : float
        The share of each tree that is added.
    leaves : int
        The largest number of leaves of a tree.
    rows_per_leaf : int
        A tree has at most one leaf per so many rows of the table.
    least : int
        The least number of rows in a leaf.
    explained : float
        The least share of the variance in held-out rows, on average over the targets, that trees must
        explain to be inputs.
    targets : int
        With more targets than this there are no trees.
    """

    trees: int = at_least(1, 200, whole=True)
    rate: float = above(0, 0.15)
    leaves: int = at_least(2, 255, whole=True)
    rows_per_leaf: int = at_least(1, 60, whole=True)
    least: int = at_least(1, 5, whole=True)
    explained: float = 0.05
    targets: int = at_least(0, 4, whole=True)

    def most_leaves(self, rows: int) -> int:
        """Return the largest number of leaves of a tree for so many rows."""
        return int(np.clip(rows // self.rows_per_leaf, 4, self.leaves))

    def fitted(self, x: np.ndarray, y: np.ndarray, weight: Any, *, seed: int, trees: int) -> Any:
        """Return scikit-learn's gradient boosting of so many trees, fitted."""
        from sklearn.ensemble import HistGradientBoostingRegressor  # slow to import

        model = HistGradientBoostingRegressor(
            max_iter=trees,
            learning_rate=self.rate,
            max_leaf_nodes=self.most_leaves(len(x)),
            min_samples_leaf=self.least,
            early_stopping=False,
            random_state=seed % 2**32,
        )
        # One thread: on a busy machine more of them take many times as long.
        with threadpool_limits(limits=1, user_api="openmp"):
            return model.fit(x, y, sample_weight=weight)


class Boosted(NamedTuple):
    """Trees that were fitted to all rows, and of each row the prediction by trees that did not see it."""

    trees: Trees
    held_out: Float[np.ndarray, "n o"]


def boosted(
    sample: Sample, targets: list[int], part: Int[np.ndarray, " n"], settings: Boosting, *, seed: int
) -> Boosted | None:
    """Return trees of these targets, or None if they explain too little.

    ``part`` is the part of each row. The held-out prediction of a row is that of trees that were fitted to
    the other parts.
    """
    condition, weight = np.asarray(sample.condition), sample.weight
    counts, columns, left = [], [], []
    for target in (values := np.asarray(sample.target)[:, targets].T):
        stages = _held_out_stages(condition, target, weight, part, settings, seed)
        errors = weighted_mean((stages - target[:, None]) ** 2, weight)
        counts.append(int(np.argmin(errors)) + 1)
        columns.append(stages[:, counts[-1] - 1])
        left.append(errors.min() / weighted_variance(target, weight))
    if np.mean(left) > 1.0 - settings.explained:
        return None
    models = [
        settings.fitted(condition, target, weight, seed=seed, trees=count)
        for target, count in zip(values, counts, strict=True)
    ]
    # Tables of similar size share compiled programs.
    shape = settings.trees, 1 << (2 * settings.most_leaves(len(condition)) - 1).bit_length()
    parts: Any = map(np.stack, zip(*(_nodes(model, shape) for model in models), strict=True))
    start, inputs, numbers, right, depths = parts
    return Boosted(Trees(start, inputs, numbers, right, depths.max()), np.stack(columns, axis=1))


def _held_out_stages(
    x: np.ndarray, y: np.ndarray, weight: Any, part: np.ndarray, settings: Boosting, seed: int
) -> Float[np.ndarray, "n t"]:
    """Return the predictions of each row by 1, 2, ... trees that were fitted to the other parts."""
    stages = np.zeros((len(y), settings.trees))
    for held in (part == k for k in np.unique(part)):
        own = None if weight is None else weight[~held]
        model = settings.fitted(x[~held], y[~held], own, seed=seed, trees=settings.trees)
        with threadpool_limits(limits=1, user_api="openmp"):
            stages[held] = np.stack(list(model.staged_predict(x[held])), axis=1)
    return stages


def _nodes(model: Any, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Return start, inputs, numbers, right children and depth of fitted trees, as in ``Trees``; missing trees
    are leaves of value 0."""
    inputs, numbers, right = np.full(shape, -1, np.int32), np.zeros(shape), np.zeros(shape, np.int32)
    depth = 0
    for k, (tree,) in enumerate(model._predictors):
        nodes, leaf = tree.nodes, tree.nodes["is_leaf"] > 0
        own = slice(len(nodes))
        inputs[k, own] = np.where(leaf, -1, nodes["feature_idx"])
        numbers[k, own] = np.where(leaf, nodes["value"], nodes["num_threshold"])
        right[k, own] = nodes["right"]
        depth = max(depth, int(nodes["depth"].max()))
    return np.asarray(model._baseline_prediction).reshape(()), inputs, numbers, right, np.asarray(depth)
