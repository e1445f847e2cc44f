"""Cross-validation of the score-matching loss, and the settings that it chooses.

Without a condition the candidates are a grid of length scales; with one they are visited by coordinate
ascent. Both compute the whole path of penalties at each length scale.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from threadpoolctl import threadpool_limits

from kexpfam.baselines.derivatives import Basis, Quadratic, base_scores, derivative_gram, full_path, losses
from kexpfam.data.sample import Sample
from kexpfam.data.weights import effective_rows, part_of, standard_error, weighted_mean, weighted_variance
from kexpfam.model.kernels import Gaussian, median_distance
from kexpfam.model.measures import AbstractMeasure
from kexpfam.progress import Listener, Report


class ScoreSearch(eqx.Module):
    """Settings of the search for length scale and penalty.

    Parameters
    ----------
    folds : int
        Folds of the cross-validation.
    lengthscales : tuple of float
        Candidates, in units of the median distance.
    penalties : tuple of float
        Candidates, from large to small.
    functions : int
        Functions in the basis while candidates are compared.
    """

    folds: int = 5
    lengthscales: tuple[float, ...] = tuple(2.0 ** np.arange(-4.5, 1.1, 0.5))
    penalties: tuple[float, ...] = tuple(10.0 ** np.arange(1.0, -9.1, -0.5))
    functions: int = 500


class WalkSearch(eqx.Module):
    """Settings of the search for length scales and penalty, by coordinate ascent over powers of two.

    Parameters
    ----------
    folds, rows : int
        Folds of the cross-validation, and rows in it at most.
    penalties : tuple of float
        Candidates, from large to small.
    condition_powers, separate_powers, target_powers : tuple of float
        Bounds of the exponents: of all inputs and of one input, in median distances, and of the target, in
        standard deviations. Shorter scales of the target fit ties; with longer ones the tails of f outgrow
        the base.
    strides : tuple of float
        Steps of the exponents, one pass each.
    rounds, separate_rounds : int
        Rounds over the coordinates at most: per stride, and over the separate length scales of the inputs.
    errors, separate_errors : float
        A step must lower the loss by this many standard errors of the difference.
    least_gain : float
        And by this much.
    """

    folds: int = 10
    rows: int = 300
    penalties: tuple[float, ...] = tuple(10.0 ** np.arange(1.0, -6.1, -0.5))
    condition_powers: tuple[float, float] = (-4.0, 4.0)
    separate_powers: tuple[float, float] = (-5.0, 5.0)
    target_powers: tuple[float, float] = (-1.0, 2.0)
    strides: tuple[float, ...] = (1.0, 0.5)
    rounds: int = 4
    separate_rounds: int = 2
    errors: float = 0.5
    separate_errors: float = 1.0
    least_gain: float = 1e-4


class ScoreSettings(NamedTuple):
    """Length scales in model units, and the penalty."""

    condition_lengthscale: np.ndarray
    lengthscale: np.ndarray
    rkhs_penalty: float


class ScoreTrial(NamedTuple):
    """Candidate settings with their cross-validated score-matching loss and its standard error."""

    condition_lengthscale: tuple[float, ...]
    lengthscale: float
    rkhs_penalty: float
    loss: float
    standard_error: float


class ScoreSelection(eqx.Module):
    """The settings, their trial (None if the caller gave all settings), and all trials."""

    settings: ScoreSettings
    chosen: ScoreTrial | None
    trials: list[ScoreTrial]


def trials_of(
    condition_lengthscale: np.ndarray,
    lengthscale: float,
    penalties: np.ndarray,
    table: np.ndarray,
    weight: np.ndarray | None = None,
) -> list[ScoreTrial]:
    """Return one trial per penalty from a table of losses, (folds or rows, penalties)."""
    scales = tuple(map(float, condition_lengthscale))
    errors = [standard_error(column, weight) for column in table.T]
    numbers = zip(penalties.tolist(), weighted_mean(table, weight).tolist(), errors, strict=True)
    return [ScoreTrial(scales, float(lengthscale), *row) for row in numbers]


def report_best(listener: Listener | None, step: int, steps: int, trials: list[ScoreTrial]) -> None:
    """Report the smallest loss of the trials."""
    if listener is not None:
        listener(Report("selection", step, steps, {"score": -min(trial.loss for trial in trials)}))


def folds_of(rows: np.ndarray, count: int, *, seed: int) -> list[np.ndarray]:
    """Return masks that leave out each fold; equal rows share a fold.

    A spike on a repeated value lowers the loss without limit. It would be selected if some of the equal rows
    were held out and others were not.
    """
    distinct, membership = np.unique(rows, axis=0, return_inverse=True)
    folds = np.random.default_rng(seed).permutation(len(distinct)) % min(count, len(distinct))
    of_row = folds[membership.ravel()]
    return [of_row == fold for fold in range(folds.max() + 1)]


def one_standard_error(table: Float[np.ndarray, "u q"], weight: np.ndarray | None = None) -> int:
    """Return the first column that, like all up to the best, is within one standard error of the best.

    The best column has the smallest mean loss. Rows are folds or data; columns are in order of preference
    (falling penalties, rising length scales). Few rows dominate held-out losses, so that the best column is
    largely due to chance.
    """
    best = int(np.argmin(weighted_mean(table, weight)))
    excess = table - table[:, [best]]
    errors = np.sqrt(weighted_variance(excess, weight)) / np.sqrt(effective_rows(weight, len(table)))
    within = weighted_mean(excess, weight) <= errors
    return best - int(np.argmin(np.append(within[:best][::-1], False)))


def fold_losses(
    basis: Basis, sample: Sample, scores: np.ndarray, folds: list[np.ndarray], penalties: np.ndarray
) -> np.ndarray:
    """Return the mean loss on each fold of the fit in the basis to the others, (folds, penalties)."""
    held_out = ((sample.rows(fold), scores[fold]) for fold in folds)
    parts = [basis.quadratic(part.target, slopes, part.weight) for part, slopes in held_out]
    whole = [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]
    others = [Quadratic(*map(operator.sub, whole, part)) for part in parts]
    return np.stack([part.losses(rest.path(penalties)) for part, rest in zip(parts, others, strict=True)])


def row_losses(
    blocks: np.ndarray,
    scores: np.ndarray,
    folds: list[np.ndarray],
    penalties: np.ndarray,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """Return the loss of each row under the full fit that did not see its fold, (rows, penalties)."""
    n, operators = blocks.shape[:2]
    table = np.empty((n, len(penalties)))
    for fold in folds:
        columns = blocks[:, :, ~fold]
        weights = full_path(columns[~fold], scores[~fold], penalties, part_of(weight, ~fold))
        applied = columns[fold].reshape(fold.sum() * operators, -1) @ weights.reshape(-1, len(penalties))
        table[fold] = losses(applied.reshape(fold.sum(), operators, -1), scores[fold])
    return table


def grid_selection(
    make: Callable[[np.ndarray], Basis],
    sample: Sample,
    scores: np.ndarray,
    lengthscale: ArrayLike | None,
    penalty: float | None,
    search: ScoreSearch,
    seed: int,
    listener: Listener | None,
) -> ScoreSelection:
    """Return the settings without a condition; ``make(lengthscale)`` returns the basis of f."""
    points, nothing = np.asarray(sample.target), np.zeros(0)
    shape = np.ones(points.shape[1]) * (1.0 if lengthscale is None else np.asarray(lengthscale, float))
    if lengthscale is not None and penalty is not None:
        return ScoreSelection(ScoreSettings(nothing, shape, float(penalty)), None, [])
    scales = np.array(search.lengthscales) * median_distance(points)
    factors = scales if lengthscale is None else np.ones(1)
    penalties = np.array(search.penalties if penalty is None else [float(penalty)])
    folds, tables, trials = folds_of(points, search.folds, seed=seed), [], list[ScoreTrial]()
    # One BLAS thread: the matrices are too small for several.
    with threadpool_limits(limits=1, user_api="blas"):
        for step, factor in enumerate(factors):
            tables.append(fold_losses(make(factor * shape), sample, scores, folds, penalties))
            trials += trials_of(nothing, factor * shape.min(), penalties, tables[-1])
            report_best(listener, step + 1, len(factors), trials)
    places = [one_standard_error(table) for table in tables]
    # The loss hardly depends on f far from the data, where the shortest equivalent scale makes f smallest.
    columns = [table[:, place] for table, place in zip(tables, places, strict=True)]
    best = one_standard_error(np.stack(columns, 1))
    chosen = trials[best * len(penalties) + places[best]]
    return ScoreSelection(ScoreSettings(nothing, factors[best] * shape, chosen.rkhs_penalty), chosen, trials)


def walk_selection(
    sample: Sample,
    base: AbstractMeasure,
    condition_lengthscale: ArrayLike | None,
    lengthscale: float | None,
    penalty: float | None,
    search: WalkSearch,
    seed: int,
    listener: Listener | None,
) -> ScoreSelection:
    """Return the settings with a condition."""
    given = None if condition_lengthscale is None else np.asarray(condition_lengthscale, float)
    if given is not None and lengthscale is not None and penalty is not None:
        scales = np.broadcast_to(given, (sample.condition.shape[1],)).copy()
        return ScoreSelection(ScoreSettings(scales, np.asarray(lengthscale, float), float(penalty)), None, [])
    rows = sample.rows(np.sort(np.random.default_rng(seed).permutation(len(sample))[: search.rows]))
    penalties = np.array(search.penalties if penalty is None else [float(penalty)])
    fixed = None if lengthscale is None else float(lengthscale)
    walk = Walk(rows, base_scores(base, rows.target), given, fixed, penalties, search, seed, listener)
    with threadpool_limits(limits=1, user_api="blas"):
        chosen = walk.run()
    scales = np.array(chosen.condition_lengthscale)
    settings = ScoreSettings(scales, np.array(chosen.lengthscale), chosen.rkhs_penalty)
    return ScoreSelection(settings, chosen, walk.trials)


# A trial, and its loss in each row.
Visit = tuple[ScoreTrial, np.ndarray]
# A direction among the exponents, and the bounds of those that it moves.
Move = tuple[np.ndarray, tuple[float, float]]


@dataclass
class Walk:
    """Coordinate ascent over the exponents of all inputs and, last, of the target.

    Length scales that are not None stay as they are.
    """

    sample: Sample
    scores: np.ndarray
    condition_lengthscale: np.ndarray | None
    lengthscale: float | None
    penalties: np.ndarray
    search: WalkSearch
    seed: int
    listener: Listener | None
    trials: list[ScoreTrial] = field(default_factory=list)
    grams: dict[float, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folds = folds_of(self.sample.target, self.search.folds, seed=self.seed)
        self.unit = median_distance(self.sample.condition)

    def run(self) -> ScoreTrial:
        """Return the best trial, with separate length scales of the inputs where they lower the loss."""
        search, axes = self.search, np.eye(self.sample.condition.shape[1] + 1)
        place, moves, separate = np.zeros(len(axes)), list[Move](), list[Move]()
        if self.lengthscale is None:
            moves.append((axes[-1], search.target_powers))
        if self.condition_lengthscale is None:
            moves.append((axes[:-1].sum(0), search.condition_powers))
            separate = [(axis, search.separate_powers) for axis in axes[:-1]]
        best = self.visit(place)
        for stride in search.strides:
            place, best = self._climb(place, best, moves, stride, search.errors, search.rounds)
        if len(separate) > 1:
            limits = search.separate_errors, search.separate_rounds
            place, best = self._climb(place, best, separate, search.strides[0], *limits)
        return best[0]

    def _climb(
        self, place: np.ndarray, best: Visit, moves: list[Move], stride: float, errors: float, rounds: int
    ) -> tuple[np.ndarray, Visit]:
        """Step up, then down, along each move while the loss falls, and repeat until no step lowers it."""
        for _ in range(rounds):
            start = best
            for axis, (low, high) in moves:
                for step in (stride * axis, -stride * axis):
                    while np.all((low <= place + step) & (place + step <= high) | (axis == 0.0)):
                        candidate = self.visit(place + step)
                        gains, weight = best[1] - candidate[1], self.sample.weight
                        least = self.search.least_gain + errors * standard_error(gains, weight)
                        if not weighted_mean(gains, weight) > least:
                            break
                        place, best = place + step, candidate
            if best is start:
                break
        return place, best

    def visit(self, place: np.ndarray) -> Visit:
        """Return the trial of the one-standard-error rule among the penalties, and its loss in each row."""
        given, sample, weight = self.condition_lengthscale, self.sample, self.sample.weight
        scales = self.unit * 2.0 ** place[:-1] if given is None else np.broadcast_to(given, len(place) - 1)
        lengthscale = float(2.0 ** place[-1]) if self.lengthscale is None else self.lengthscale
        if lengthscale not in self.grams:
            self.grams[lengthscale] = derivative_gram(Gaussian(lengthscale), sample.target, sample.target)
        gram = Gaussian(scales).gram(sample.condition, sample.condition)
        blocks = self.grams[lengthscale] * gram[:, None, :, None]
        table = row_losses(blocks, self.scores, self.folds, self.penalties, weight)
        path = trials_of(scales, lengthscale, self.penalties, table, weight)
        self.trials += path
        report_best(self.listener, len(self.trials), 0, self.trials)
        chosen = one_standard_error(table, weight)
        return path[chosen], table[:, chosen]
