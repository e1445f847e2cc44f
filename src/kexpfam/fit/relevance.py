"""Which columns f has to depend on, where there are many."""

import jax.random as jr
import numpy as np
from threadpoolctl import threadpool_limits

from kexpfam.data.weights import part_of
from kexpfam.model.measures import AbstractMeasure

# A dimension matters if permuting it costs a classifier of data against base this much (nats), and 3 standard
# errors.
RELEVANCE_FLOOR = 0.01
# The most rows of the data that the classifier sees, the most held-out rows with a permuted column, and the
# bins of a column: quantiles of weighted rows are slow.
MOST_ROWS, PERMUTED_ROWS, BINS = 2_500, 1_500, 63


def relevant_dimensions(
    data: np.ndarray, base: AbstractMeasure, *, seed: int, weight: np.ndarray | None = None
) -> tuple[int, ...]:
    """Return the dimensions that a classifier of data against base draws makes use of.

    f models the ratio of data to base, and a classifier's logit estimates it. Boosted trees are hardly
    disturbed by irrelevant dimensions.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier  # slow to import
    from sklearn.inspection import permutation_importance

    if len(data) > MOST_ROWS:
        some = np.random.default_rng(seed).permutation(len(data))[:MOST_ROWS]
        data, weight = data[some], part_of(weight, some)
    draws = base.draws(4 * len(data), key=jr.key(seed))
    rows, labels = np.concatenate([data, draws]), np.repeat([1, 0], [len(data), len(draws)])
    weights = np.where(labels == 1, len(draws) / len(data), 1.0)
    if weight is not None:
        weights[: len(data)] *= weight / weight.mean()
    order = np.random.default_rng(seed).permutation(len(rows))
    training, held_out = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    # One thread: small trees gain nothing from more, and lose much on a busy machine.
    with threadpool_limits(limits=1):
        model = HistGradientBoostingClassifier(max_iter=60, max_bins=BINS, random_state=seed)
        model.fit(rows[training], labels[training], weights[training])
        result = permutation_importance(
            model,
            rows[held_out],
            labels[held_out],
            scoring="neg_log_loss",
            n_repeats=4,
            max_samples=min(PERMUTED_ROWS, len(held_out)),
            random_state=seed,
            sample_weight=weights[held_out],
        )
    errors = result.importances_std / np.sqrt(result.importances.shape[1])
    relevant = np.flatnonzero(result.importances_mean > np.maximum(RELEVANCE_FLOOR, 3.0 * errors))
    return tuple(int(j) for j in relevant)
