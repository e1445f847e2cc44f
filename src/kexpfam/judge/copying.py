"""Whether draws repeat training rows, and whether log densities reveal which rows were in the training table.

These are measurements, not guarantees: they show what two simple attacks find out. They do not imply
differential privacy, which is a property of how a model is fitted.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import mannwhitneyu
from sklearn.neighbors import NearestNeighbors

# Draws that are nearer to a training row than this share of the held-out rows are called close.
CLOSE = 0.05

# Rows at a smaller distance are equal: training rows are stored in model units.
ROUNDING = 1e-6


class Copying(NamedTuple):
    """Distances of draws to training rows beside those of held-out rows, and a test of membership.

    Parameters
    ----------
    draw_distance : float
        Median distance of draws to the nearest training row, in standardised units.
    held_out_distance : float
        The same for held-out rows.
    close : float
        The share of draws that are nearer to a training row than 5 % of the held-out rows are; about 0.05
        without copies.
    close_error : float
        Its standard error.
    repeated : float
        Share of draws that equal a training row.
    held_out_repeated : float
        The same for held-out rows.
    p_value : float
        Of the hypothesis that draws are not nearer to training rows than held-out rows are.
    membership : float
        Probability that a training row has a higher log density than a held-out row: 0.5 if the density
        says nothing about membership.
    membership_error : float
        Its standard error.
    power : float
        Share of the training rows that are found by their log density if 5 % of others are accused.
    """

    draw_distance: float
    held_out_distance: float
    close: float
    close_error: float
    repeated: float
    held_out_repeated: float
    p_value: float
    membership: float
    membership_error: float
    power: float

    def __str__(self) -> str:
        return "\n".join(f"{label + ':':<44} {text}" for label, text in self.lines())

    def lines(self) -> list[tuple[str, str]]:
        """Return the measurements as pairs of texts."""
        return [
            (
                "median distance to the nearest training row",
                f"{self.draw_distance:.3g}, of held-out rows {self.held_out_distance:.3g}",
            ),
            (
                "draws closer than 5 % of held-out rows",
                f"{self.close:.1%} ± {self.close_error:.1%} (p = {self.p_value:.2g})",
            ),
            (
                "draws that equal a training row",
                f"{self.repeated:.1%}, of held-out rows {self.held_out_repeated:.1%}",
            ),
            ("membership by log density, AUC", f"{self.membership:.3f} ± {self.membership_error:.2g}"),
            ("training rows found at 5 % false accusations", f"{self.power:.1%}"),
        ]


def measure_copying(
    training: Float[np.ndarray, "n a"],
    held_out: Float[np.ndarray, "m a"],
    draws: Float[np.ndarray, "k a"],
    training_scores: Float[np.ndarray, " n"],
    held_out_scores: Float[np.ndarray, " m"],
) -> Copying:
    """Return the measurements for encoded rows and their log densities."""
    neighbours = NearestNeighbors(n_neighbors=1).fit(training)
    near, other = (neighbours.kneighbors(rows)[0][:, 0] for rows in (draws, held_out))
    limit = np.quantile(other, CLOSE)
    close = float(np.mean(near < limit))
    # Both the share of draws and the limit are estimated.
    error = np.sqrt(CLOSE * (1.0 - CLOSE) * (1.0 / len(near) + 1.0 / len(other)))
    n, m = len(training_scores), len(held_out_scores)
    auc = float(mannwhitneyu(training_scores, held_out_scores).statistic / (n * m))
    threshold = np.quantile(held_out_scores, 1.0 - CLOSE)
    return Copying(
        float(np.median(near)),
        float(np.median(other)),
        close,
        float(error),
        float(np.mean(near < ROUNDING)),
        float(np.mean(other < ROUNDING)),
        float(mannwhitneyu(near, other, alternative="less").pvalue),
        auc,
        float(np.sqrt((n + m + 1) / (12.0 * n * m))),
        float(np.mean(training_scores > threshold)),
    )
