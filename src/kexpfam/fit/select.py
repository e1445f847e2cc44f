"""Base, length scales and penalty, by cross-validation inside the training data.

A setting is a point on a geometric lattice. The search walks along the axes that are open (a power transformation of the
target, length scales of condition and target, the width of the base), with a path of falling penalties at every point it
visits; then it tries the length scale of each input on its own. Few rows make the best score a matter of luck, so the search
does not keep the best setting but the mean of all it has tried, by exponential weights of their scores. Without a condition
the axes of the condition are closed, and where there are many columns it first finds out which of them f has to depend on.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax.random as jr
import numpy as np
from threadpoolctl import threadpool_limits

from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import standard_error, weighted_mean
from kexpfam.fit.bases import fit_base, optimism, tailed_gaussian
from kexpfam.fit.features import (
    CENTRE_MARGIN,
    CENTRE_SPACING,
    MOST_TARGET_CENTRES,
    Centres,
    Features,
    build_space,
    centre_rows,
)
from kexpfam.fit.folds import Folds, left_out_rows
from kexpfam.fit.problem import Problem
from kexpfam.fit.relevance import relevant_dimensions
from kexpfam.integrate.nodes import Integration
from kexpfam.model.kernels import median_distance
from kexpfam.model.measures import AbstractMeasure, Nodes
from kexpfam.progress import Listener, Report
from kexpfam.settings import SettingsRecord, check_at_least, check_positive

__all__ = [
    "Context",
    "Fixed",
    "Scaled",
    "Search",
    "Selection",
    "Settings",
    "Trial",
    "contend",
    "reduced",
    "search",
]

# Up to this many dimensions all are taken to matter and the base need not be strong.
FEW_DIMS = 3
# Penalties on the way to that of a single length scale, so that Newton's method starts near its optimum.
WARM_PENALTIES = 2
# Penalties are tried by powers of ten; half-way to the neighbours of the best, two more.
BETWEEN = 10.0**0.5


class Search(SettingsRecord):
    """How settings are searched for.

    Parameters
    ----------
    folds, repeats : int
        Every setting is scored by this many folds, this many times over.
    rows, conditional_rows : int
        Rows that settings are ranked on, at most; under conditions each row costs a partition function of its own.
    features : Features
        Features of f while ranking; the fit itself keeps more.
    penalties : tuple of float
        Falling; a path ends after ``patience`` penalties without a better score.
    lengthscales, condition_lengthscales : tuple of float
        Rising, in units of the median distance between rows.
    widths : tuple of float
        Widths of a Gaussian base under a condition, in standard deviations of the target.
    worthwhile : float
        A step of the walk must gain this much (nats); less is noise of the folds.
    relevance_gain, relevance_errors : float
        A length scale of its own must gain this much (nats) and this many standard errors of the difference.
    relevance_factors : tuple of float
        What the length scale of a single input is multiplied by.
    weight : float
        The weight of a trial in the mean is ``exp(weight * rows * (score - best score))``.
    fineness : tuple of float
        Grids of the target while ranking, as shares of the fit's own: one entry per number of coordinates.
    draws : int
        Importance draws while ranking, where there is no grid.
    rounds : int
        Rounds over the axes, at most.
    """

    folds: int = 10
    repeats: int = 1
    rows: int = 20_000
    conditional_rows: int = 600
    features: Features = Features(
        rank=250, condition_rank=(24, 48), rows_per_feature=8, target_rank=10, floor=1e-6
    )
    penalties: tuple[float, ...] = tuple(10.0**-k for k in range(8))
    patience: int = 1
    lengthscales: tuple[float, ...] = tuple(2.0 ** (0.5 * k) for k in range(-11, 5))
    condition_lengthscales: tuple[float, ...] = tuple(2.0 ** (0.5 * k) for k in range(-8, 9))
    widths: tuple[float, ...] = (0.6, 0.8, 1.0, 1.25, 1.6)
    worthwhile: float = 0.001
    relevance_gain: float = 0.002
    relevance_errors: float = 1.0
    relevance_factors: tuple[float, ...] = (3.0, 0.5)
    weight: float = 0.5
    fineness: tuple[float, ...] = (0.25, 0.6, 0.5)
    draws: int = 8192
    rounds: int = 4

    def __check_init__(self) -> None:
        check_at_least(self, 2, "folds", "draws")
        check_at_least(self, 1, "repeats", "patience", "rounds", "rows", "conditional_rows")
        check_positive(self, "penalties", "lengthscales", "condition_lengthscales", "widths")
        check_positive(self, "relevance_factors", "fineness")


class Settings(NamedTuple):
    """What a fit needs; length scales are in model units."""

    base: str
    dims: tuple[int, ...]
    power: bool
    condition_lengthscale: np.ndarray
    lengthscale: np.ndarray
    base_width: float
    rkhs_penalty: float

    @property
    def lengthscales(self) -> tuple[np.ndarray, np.ndarray]:
        """Return those of target and condition."""
        return self.lengthscale, self.condition_lengthscale


class Trial(NamedTuple):
    """One setting and its cross-validated mean log density of the target, in the data's own units."""

    settings: Settings
    score: float
    standard_error: float


class Selection(eqx.Module):
    """The settings, the base they name, the best single trial (none if the user fixed everything), and every trial.

    ``held_out`` is, if asked for, the log density of each row under fits that did not see it; NaN where there was none.
    """

    settings: Settings
    base: AbstractMeasure
    chosen: Trial | None
    trials: list[Trial]
    held_out: np.ndarray | None = None


class Fixed(NamedTuple):
    """What the user has fixed; ``None`` means: choose. A base in data units is one for each scaling of the target."""

    kernel: str = "gaussian"
    base: str | AbstractMeasure | dict[bool, AbstractMeasure] | None = None
    power: bool | None = None
    condition_lengthscale: float | np.ndarray | None = None
    lengthscale: float | np.ndarray | None = None
    base_width: float | None = None
    rkhs_penalty: float | None = None


class Scaled(NamedTuple):
    """The training rows under one scaling of the target, and what that scaling adds to each log density."""

    sample: Sample
    log_jacobian: np.ndarray

    @staticmethod
    def of(
        scaling: Scaling, targets: np.ndarray, condition: np.ndarray, weight: np.ndarray | None = None
    ) -> "Scaled":
        """Return the rows in the scaling's units."""
        return Scaled(Sample(scaling.to_model(targets), condition, weight), scaling.log_jacobian(targets))


class Context(NamedTuple):
    """What a search is run with."""

    fixed: Fixed
    search: Search
    integration: Integration
    proposal: AbstractMeasure | None
    seed: int
    report: Listener | None = None


def search(scaled: dict[bool, Scaled], context: Context) -> Selection:
    """Return the settings for the training rows, given under each scaling that may be chosen."""
    selection = contend(scaled, context, most_dims=None, held_out=False)
    assert selection is not None, "without a limit on its coordinates a search always finds something"
    return selection


def contend(
    scaled: dict[bool, Scaled], context: Context, *, most_dims: int | None, held_out: bool = True
) -> Selection | None:
    """Return the settings and, where other models compete, the held-out scores to be compared with theirs.

    With ``most_dims``, only models whose f depends on so few coordinates enter; there may be none.
    """
    walks = {kind: _Walk(kind, scaled, context) for kind in _base_kinds(scaled, context)}
    walks = {kind: walk for kind, walk in walks.items() if most_dims is None or len(walk.dims) <= most_dims}
    if not walks:
        return None
    first = next(iter(walks.values()))
    if len(walks) == 1 and first.settled:
        settings = first.settings(first.start(), float(context.fixed.rkhs_penalty or 0.0))
        return Selection(settings, first.base(settings, whole=True), None, [])
    ranked = []
    for kind, walk in walks.items():
        # Products of small matrices: waking a second thread for each costs more than it saves.
        with threadpool_limits(limits=1, user_api="blas"):
            settings = walk.run()
        # A base has seen the points that the folds are scored on; what it gains by that is taken off.
        gain = optimism(kind, walk.data, seed=context.seed, weight=walk.weight) if len(walks) > 1 else 0.0
        ranked.append((walk.best.score - gain, settings, walk))
    score, settings, walk = max(ranked, key=lambda entry: entry[0])
    rows = walk.held_out(settings, gain=walk.best.score - score) if held_out else None
    trials = [trial for walk in walks.values() for trial in walk.trials]
    return Selection(settings, walk.base(settings, whole=True), walk.best, trials, rows)


def _base_kinds(scaled: dict[bool, Scaled], context: Context) -> list[str]:
    """Return the kinds of base to choose from: one, unless there are too many columns to be sure of any."""
    sample, given = next(iter(scaled.values())).sample, context.fixed.base
    if isinstance(given, AbstractMeasure | dict):
        return ["given"]
    if given is not None or sample.conditional or sample.target.shape[1] <= FEW_DIMS:
        return [given or "gaussian"]
    return ["gaussian", "mixture"]


class _Walk:
    """The walk over the lattice on one kind of base: where it has been, and the scores it found there."""

    def __init__(self, kind: str, scaled: dict[bool, Scaled], context: Context):
        self.kind, self.context, self.fixed, self.options = kind, context, context.fixed, context.search
        self.whole = scaled
        rows = len(next(iter(scaled.values())).log_jacobian)
        conditional = next(iter(scaled.values())).sample.conditional
        most = self.options.conditional_rows if conditional else self.options.rows
        self.chosen = chosen = np.sort(np.random.default_rng(context.seed).permutation(rows)[:most])
        self.scaled = {
            power: Scaled(part.sample.rows(chosen), part.log_jacobian[chosen])
            for power, part in scaled.items()
        }
        self.sample = next(iter(self.scaled.values())).sample
        self.trials: list[Trial] = []
        self.row_scores: list[np.ndarray] = []
        self.best_at: dict[tuple, float] = {}
        self.bases: dict[tuple, AbstractMeasure] = {}
        self.centres: dict[bool, Centres] = {}
        self.folds: dict[tuple | None, Folds] = {}
        self.conditional = conditional
        self.unit = median_distance(self.sample.condition) if conditional else 1.0
        self.left_out = left_out_rows(
            self.sample, self.options.folds, self.options.repeats, seed=context.seed
        )
        self.dims = self._dims()
        self.target_unit = median_distance(self.data[:, self.dims]) if not conditional else 1.0
        self.axes = self._axes()

    @property
    def data(self) -> np.ndarray:
        """Return the targets of all training rows under the first scaling."""
        return np.asarray(next(iter(self.whole.values())).sample.target)

    @property
    def weight(self) -> np.ndarray | None:
        """Return what all training rows count."""
        return next(iter(self.whole.values())).sample.weight

    @property
    def settled(self) -> bool:
        """Return whether the user has fixed everything."""
        return not self.axes and self.fixed.rkhs_penalty is not None

    @property
    def best(self) -> Trial:
        """Return the trial of highest score."""
        return max(self.trials, key=lambda trial: trial.score)

    def _axes(self) -> dict[str, tuple]:
        """Return the open axes of the lattice and the values on them."""
        options, fixed = self.options, self.fixed
        axes: dict[str, tuple] = {}
        if len(self.scaled) > 1:
            axes["power"] = (False, True)
        if self.conditional and fixed.condition_lengthscale is None:
            axes["condition_lengthscale"] = options.condition_lengthscales
        if fixed.lengthscale is None:
            # Under a condition the centres of a target cover it down to this length scale.
            least = (np.ptp(self.data) + 2.0 * CENTRE_MARGIN) / (CENTRE_SPACING * MOST_TARGET_CENTRES)
            axes["lengthscale"] = tuple(
                s for s in options.lengthscales if not self.conditional or s >= min(least, 0.125)
            )
        if self.conditional and fixed.base_width is None and self.kind == "gaussian":
            axes["base_width"] = options.widths
        return axes

    def start(self) -> dict[str, int]:
        """Return the middle of the lattice: where most data sets end nearby."""
        middle = {
            "power": True,
            "condition_lengthscale": 1.0,
            "lengthscale": 1.0 if self.conditional else 0.35,
            "base_width": 1.0,
        }
        nearest = lambda axis, values: int(
            np.argmin([abs(np.log((v + 1e-9) / (middle[axis] + 1e-9))) for v in values])
        )
        return {axis: nearest(axis, values) for axis, values in self.axes.items()}

    def settings(self, position: dict[str, int], penalty: float) -> Settings:
        """Return the settings at a point of the lattice, with what the user fixed in its place."""
        at = {axis: self.axes[axis][index] for axis, index in position.items()}
        fixed, inputs = self.fixed, self.sample.condition.shape[1]
        scales = (
            at["condition_lengthscale"] * self.unit
            if "condition_lengthscale" in at
            else fixed.condition_lengthscale
        )
        target = np.asarray(
            at["lengthscale"] * self.target_unit if "lengthscale" in at else fixed.lengthscale, float
        )
        target = np.broadcast_to(target, (len(self.dims),)) if target.ndim == 0 else target
        return Settings(
            base=self.kind,
            dims=self.dims,
            power=bool(at.get("power", max(self.scaled))),
            condition_lengthscale=np.broadcast_to(
                np.asarray(1.0 if scales is None else scales, float), (inputs,)
            ).copy(),
            lengthscale=target[np.isfinite(target)].copy(),
            base_width=float(at.get("base_width", 1.0 if fixed.base_width is None else fixed.base_width)),
            rkhs_penalty=penalty,
        )

    def run(self) -> Settings:
        """Return the settings that the trials of a walk, as far as it was let, speak for."""
        finished = self.walk()
        settings = self.weighted_mean()
        if finished and "condition_lengthscale" in self.axes and self.sample.condition.shape[1] > 1:
            settings = self.separated(settings)
        return settings

    def walk(self) -> bool:
        """Walk along each axis in the direction that improves, in long steps first; return whether it was left to finish."""
        position, stride = self.start(), 2
        try:
            score = self.visit(position)
            for _ in range(self.options.rounds):
                position, new_score = self._round(position, score, stride)
                if new_score == score:
                    if stride == 1:
                        break
                    stride = 1
                score = new_score
            if self.fixed.rkhs_penalty is None:
                best = self.best.settings
                for penalty in (BETWEEN * best.rkhs_penalty, best.rkhs_penalty / BETWEEN):
                    self._rows(best._replace(rkhs_penalty=penalty))
        except KeyboardInterrupt:
            if not self.trials:
                raise
            return False
        return True

    def _round(self, position: dict[str, int], score: float, stride: int) -> tuple[dict[str, int], float]:
        for axis, values in self.axes.items():
            step = stride if len(values) > 5 else 1
            for direction in (1, -1):
                start = position
                while True:
                    candidate = position | {axis: position[axis] + direction * step}
                    if not 0 <= candidate[axis] < len(values):
                        break
                    new_score = self.visit(candidate)
                    if new_score <= score + self.options.worthwhile:
                        break
                    position, score = candidate, new_score
                if position != start:
                    break
        return position, score

    def visit(self, position: dict[str, int]) -> float:
        """Return the best score at a point of the lattice."""
        place = tuple(position.values())
        if place not in self.best_at:
            self.best_at[place] = self._visited(self.settings(position, 1.0))
        return self.best_at[place]

    def _visited(self, settings: Settings) -> float:
        """Return the best score at these length scales: along a path from just above the best penalty that is known."""
        if self.fixed.rkhs_penalty is not None:
            return self.path(settings, (self.fixed.rkhs_penalty,))
        penalties = self.options.penalties
        known = self.best.settings.rkhs_penalty if self.trials else np.inf
        first = max(sum(penalty > 1.1 * known for penalty in penalties) - 1, 0)
        before = len(self.trials)
        best = self.path(
            settings, penalties[first:], approach=penalties[max(first - WARM_PENALTIES, 0) : first]
        )
        while first > 0 and self.trials[before].score == best:
            # The best penalty here may be larger than the known one.
            before, first = len(self.trials), first - 1
            best = max(
                best,
                self.path(
                    settings, penalties[first : first + 1], approach=penalties[max(first - 2, 0) : first]
                ),
            )
        return best

    def path(
        self, settings: Settings, penalties: Iterable[float], *, approach: Iterable[float] = ()
    ) -> float:
        """Try falling penalties until the score stops rising; keep every trial and return the best score.

        ``approach`` are larger penalties on the way to the first, which are not scored.
        """
        scaled = self.scaled[settings.power]
        offset, weight = (
            scaled.log_jacobian + self.base(settings).log_densities(scaled.sample.target),
            scaled.sample.weight,
        )
        folds, is_new = self._posed(settings)
        for penalty in approach if is_new else ():
            folds.approach(penalty)
        best, stale = -np.inf, 0
        for penalty in penalties:
            scores = folds.scores(float(penalty)) + offset
            mean, error = float(weighted_mean(scores, weight)), standard_error(scores, weight)
            self.trials.append(Trial(settings._replace(rkhs_penalty=float(penalty)), mean, error))
            self.row_scores.append(scores)
            best, stale = (mean, 0) if mean > best else (best, stale + 1)
            if stale == self.options.patience:
                break
        if self.context.report is not None:
            self.context.report(Report("selection", len(self.trials), 0, {"score": self.best.score}))
        return float(best)

    def _posed(self, settings: Settings) -> tuple[Folds, bool]:
        """Return the fits at these settings whatever the penalty, and whether they are new; the best so far stay at hand."""
        place = lambda settings: (settings.power, settings.base_width, *map(tuple, settings.lengthscales))
        wanted, best = place(settings), place(self.best.settings) if self.trials else None
        if wanted in self.folds:
            return self.folds[wanted], False
        sample, base = self.scaled[settings.power].sample, self.base(settings)
        part, part_base, proposal = reduced(sample, base, settings.dims, self.context.proposal or base)
        if settings.power not in self.centres:
            self.centres[settings.power] = centre_rows(part, self.options.features, seed=self.context.seed)
        space = build_space(
            self.fixed.kernel,
            part,
            self.centres[settings.power],
            settings.lengthscales,
            self.options.features,
        )
        problem = Problem(part, part_base, space, 1.0, proposal, self.context.integration)
        # They are large, so that all others go before new ones are made.
        self.folds = {best: self.folds[best]} if best in self.folds else {}
        self.folds[wanted] = Folds(problem, *self._nodes(problem), self.left_out)
        return self.folds[wanted], True

    def _nodes(self, problem: Problem) -> tuple[Nodes, Nodes]:
        """Return the nodes to fit on and those to score on: the same grid, or two sets of draws."""
        if problem.on_grid:
            grid = problem.nodes(fineness=self.options.fineness[problem.sample.target.shape[1] - 1], key=None)
            return grid, grid
        first, second = (
            problem.nodes(draws=self.options.draws, key=key) for key in jr.split(jr.key(self.context.seed))
        )
        return first, second

    def weighted_mean(self) -> Settings:
        """Return the mean of the trials (of their logarithms) under the best one's scaling, by exponential weights."""
        best = self.best.settings
        trials = [trial for trial in self.trials if trial.settings.power == best.power]
        gaps = np.array([trial.score for trial in trials]) - self.best.score
        weights = np.exp(self.options.weight * self.sample.effective_rows * gaps)
        found: dict[str, Any] = {}
        for name in ("condition_lengthscale", "lengthscale", "base_width", "rkhs_penalty"):
            values = np.array([getattr(trial.settings, name) for trial in trials], float)
            # Scales that the user gave may be infinite, and infinity times a vanishing weight is no number.
            same = bool(np.all(values == values[0]))
            found[name] = values[0] if same else np.exp(np.average(np.log(values), axis=0, weights=weights))
        return best._replace(**found)

    def separated(self, settings: Settings) -> Settings:
        """Return the settings with a length scale of its own for each input where that is worth it."""
        options = self.options
        try:
            scores = self._rows(settings)
            for j in range(len(settings.condition_lengthscale)):
                for factor in options.relevance_factors:
                    scales = settings.condition_lengthscale.copy()
                    scales[j] *= factor
                    candidate = settings._replace(condition_lengthscale=scales)
                    gains, weight = self._rows(candidate) - scores, self.sample.weight
                    least = options.relevance_gain + options.relevance_errors * standard_error(gains, weight)
                    if weighted_mean(gains, weight) > least:
                        settings, scores = candidate, scores + gains
                        break
        except KeyboardInterrupt:
            pass
        return settings

    def _rows(self, settings: Settings) -> np.ndarray:
        """Return the score of each row at these settings, reached from the larger penalties."""
        warm = [penalty for penalty in self.options.penalties if penalty > 3.0 * settings.rkhs_penalty]
        self.path(settings, (settings.rkhs_penalty,), approach=warm[-WARM_PENALTIES:])
        return self.row_scores[-1]

    def held_out(self, settings: Settings, *, gain: float) -> np.ndarray:
        """Return the score of each training row under fits without it, less what the base gains by having seen it."""
        scores = np.full(len(self.data), np.nan)
        scores[self.chosen] = self._rows(settings) - gain
        return scores

    def base(self, settings: Settings, *, whole: bool = False) -> AbstractMeasure:
        """Return the base of the settings, fitted to the rows of the search or to all."""
        if isinstance(self.fixed.base, AbstractMeasure):
            return self.fixed.base
        if isinstance(self.fixed.base, dict):
            return self.fixed.base[settings.power]
        place = (settings.power, settings.base_width, whole)
        if place not in self.bases:
            sample = (self.whole if whole else self.scaled)[settings.power].sample
            targets, weight = np.asarray(sample.target), sample.weight
            if self.kind == "mixture" and self.context.proposal is not None:
                self.bases[place] = self.context.proposal
            elif self.conditional and self.kind == "gaussian":
                self.bases[place] = tailed_gaussian(targets, width=settings.base_width, weight=weight)
            else:
                self.bases[place] = fit_base(self.kind, targets, seed=self.context.seed, weight=weight)
        return self.bases[place]

    def _dims(self) -> tuple[int, ...]:
        """Return the coordinates that f is to depend on."""
        everything = tuple(range(self.data.shape[1]))
        if self.conditional:
            return everything
        if self.fixed.lengthscale is not None:
            scales = np.broadcast_to(np.asarray(self.fixed.lengthscale, float), (self.data.shape[1],))
            return tuple(int(j) for j in np.flatnonzero(np.isfinite(scales)))
        if len(everything) <= FEW_DIMS:
            return everything
        base = self.base(Settings(self.kind, (), False, np.ones(0), np.ones(0), 1.0, 1.0))
        return relevant_dimensions(self.data, base, seed=self.context.seed, weight=self.weight) or everything


def reduced(
    sample: Sample, base: AbstractMeasure, dims: tuple[int, ...], proposal: AbstractMeasure
) -> tuple[Sample, AbstractMeasure, AbstractMeasure]:
    """Return sample, base and proposal in the coordinates that f is to depend on."""
    if len(dims) == sample.target.shape[1]:
        return sample, base, proposal
    return (
        Sample(sample.target[:, dims], sample.condition, sample.weight),
        base.marginal(dims),
        proposal.marginal(dims),
    )
