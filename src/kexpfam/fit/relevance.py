"""Which columns f has to depend on, where there are many."""

import jax.random as jr
import numpy as np
from threadpoolctl import threadpool_limits

from kexpfam.data.weights import part_of, standard_error, weighted_mean
from kexpfam.model.measures import AbstractMeasure

# A dimension matters if permuting it costs a classifier of data against base this much (nats) and 3 standard
# errors of the held-out rows, on the mean of so many permutations.
RELEVANCE_FLOOR, REPEATS = 0.01, 4
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

    if len(data) > MOST_ROWS:
        some = np.random.default_rng(seed).permutation(len(data))[:MOST_ROWS]
        data, weight = data[some], part_of(weight, some)
    draws = base.draws(4 * len(data), key=jr.key(seed))
    rows, labels = np.concatenate([data, draws]), np.repeat([1, 0], [len(data), len(draws)])
    weights = np.where(labels == 1, len(draws) / len(data), 1.0)
    if weight is not None:
        weights[: len(data)] *= weight / weight.mean()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(rows))
    training, held_out = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :][:PERMUTED_ROWS]
    # One thread: small trees gain nothing from more, and lose much on a busy machine.
    with threadpool_limits(limits=1):
        model = HistGradientBoostingClassifier(max_iter=60, max_bins=BINS, random_state=seed)
        model.fit(rows[training], labels[training], weights[training])
        judged, side, shares = rows[held_out], 2.0 * labels[held_out] - 1.0, weights[held_out]
        losses = lambda points: np.logaddexp(0.0, -side * model.decision_function(points))
        before, relevant = losses(judged), []
        for j in range(rows.shape[1]):
            moved = np.tile(judged, (REPEATS, 1, 1))
            moved[:, :, j] = rng.permuted(moved[:, :, j], axis=1)
            rise = np.mean([losses(points) for points in moved], axis=0) - before
            if weighted_mean(rise, shares) > max(RELEVANCE_FLOOR, 3.0 * standard_error(rise, shares)):
                relevant.append(j)
    return tuple(relevant)
