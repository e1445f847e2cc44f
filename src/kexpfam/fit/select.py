"""Settings of the kernel model by cross-validation: base, length scales and penalty.

A setting is a point on a geometric lattice. A coordinate search moves along the open axes (power
transformation of the target, length scales of condition and target, width of the base) and follows a path of
falling penalties at each point. It then tries a length scale of its own for each input. The result is not the
best trial but the mean of all trials by exponential weights of their scores, which is less variable with few
rows. In many columns, the coordinates that f depends on are found first."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax.random as jr
import numpy as np
from numpy.typing import ArrayLike
from threadpoolctl import threadpool_limits

from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import part_of, standard_error, weighted_mean
from kexpfam.fit.bases import (
    BASES,
    MOST_CENTRES,
    fit_base,
    kernel_density_scores,
    optimism,
    tailed_gaussian,
)
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
from kexpfam.fit.task import Splits
from kexpfam.integrate.nodes import Integration
from kexpfam.integrate.partition import METHODS
from kexpfam.model.kernels import KERNELS, median_distance
from kexpfam.model.measures import AbstractMeasure, Nodes
from kexpfam.progress import Listener, Report
from kexpfam.settings import SettingsRecord, at_least, check_positive, one_of, shown

# Up to this many dimensions f depends on all of them, and the base is a Gaussian.
FEW_DIMS = 3
# Penalties on the way to that of a single length scale, so that Newton's method starts near its optimum.
WARM_PENALTIES = 2
# The path of penalties is in powers of ten; two more are tried half-way to the neighbours of the best.
BETWEEN = 10.0**0.5
SPACES = ("nystrom", "full", "random_features")
# A smooth f of this length scale, in cells, is resolved by a grid. Otherwise the score is computed on a grid
# of this relative fineness: f can be large between the nodes that it was fitted on.
CELLS_PER_SCALE, CHECKED = 2.0, 1.3
# The largest loss (nats) of a kernel with kinks against the Gaussian kernel, and of a search against a kernel
# density estimate; the second start is so many steps of the lattice below the first.
WORST_LOSS, SHORTER = 0.1, 4
# Features below this share of the strongest are left out of a product space.
PRODUCT_FLOOR = 1e-8
# Length scales and penalties beyond this and its inverse have squares beyond double precision.
SMALLEST_PENALTY, SMALLEST_LENGTH = 1e-100, 1e-6


class Search(SettingsRecord):
    """How the settings of the kernel model are searched for.

    Parameters
    ----------
    folds : int
        Folds of the cross-validation.
    repeats : int
        Repetitions of the cross-validation.
    rows : int
        Rows that settings are ranked on, at most.
    conditional_rows : int
        The same under conditions, where each row has a normaliser of its own.
    features : Features
        Features of f during the search; the final fit has more.
    penalties : tuple of float
        Penalties to try, in falling order.
    patience : int
        A path of penalties ends after so many without a better score.
    lengthscales : tuple of float
        Length scales of the target to try, in rising order, in units of the median distance between rows.
    condition_lengthscales : tuple of float
        The same for the condition.
    widths : tuple of float
        Widths of a Gaussian base under a condition, in standard deviations of the target.
    worthwhile : float
        The least gain (nats) of a step of the search.
    relevance_gain : float
        The least gain (nats) of a length scale for a single input.
    relevance_errors : float
        So many standard errors of the gain are added to it.
    relevance_factors : tuple of float
        Factors that the length scale of a single input is multiplied by.
    weight : float
        The weight of a trial in the mean is ``exp(weight * rows * (score - best score))``.
    fineness : tuple of float
        Grids of the target during the search, as shares of the fit's own: one entry per number of
        coordinates.
    draws : int
        Importance draws during the search, where there is no grid.
    rounds : int
        Rounds over the axes, at most.
    """

    folds: int = at_least(2, 10, whole=True)
    repeats: int = at_least(1, 1, whole=True)
    rows: int = at_least(1, 20_000, whole=True)
    conditional_rows: int = at_least(1, 600, whole=True)
    features: Features = Features(
        rank=250, condition_rank=(24, 48), rows_per_feature=8, target_rank=10, floor=1e-6
    )
    penalties: tuple[float, ...] = tuple(10.0**-k for k in range(8))
    patience: int = at_least(1, 1, whole=True)
    lengthscales: tuple[float, ...] = tuple(2.0 ** (0.5 * k) for k in range(-11, 5))
    condition_lengthscales: tuple[float, ...] = tuple(2.0 ** (0.5 * k) for k in range(-8, 9))
    widths: tuple[float, ...] = (0.6, 0.8, 1.0, 1.25, 1.6)
    worthwhile: float = 0.001
    relevance_gain: float = 0.002
    relevance_errors: float = 1.0
    relevance_factors: tuple[float, ...] = (3.0, 0.5)
    weight: float = 0.5
    fineness: tuple[float, ...] = (0.25, 0.6, 0.5)
    draws: int = at_least(2, 8192, whole=True)
    rounds: int = at_least(1, 4, whole=True)

    def __check_init__(self) -> None:
        check_positive(self, "penalties", "lengthscales", "condition_lengthscales", "widths")
        check_positive(self, "relevance_factors", "fineness")


class Kernel(SettingsRecord):
    """Settings of the kernel model ``p0 exp(f - A)``; None is chosen by cross-validation.

    Parameters
    ----------
    name : str
        One of "gaussian", "laplace", "matern32", "matern52", "inverse_multiquadric".
    lengthscale : float, array of shape (n_targets,) or None
        Length scale of the target, in units of the standardised data. For p(x), an infinite entry removes a
        column from f.
    condition_lengthscale : float, array of shape (n_features,) or None
        Length scales of the inputs of p(y | x); an infinite one removes an input.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``.
    base : {"gaussian", "box", "mixture"}, measure or None
        The base measure p0. A measure is in units of the standardised data.
    base_width : float or None
        Width of a Gaussian base of p(y | x), in standard deviations of the target.
    power : bool or None
        Whether the target of p(y | x) is made less skewed by a Yeo-Johnson transformation.
    space : {"nystrom", "full", "random_features"}
        Features of f for p(x): kernels at ``n_centres`` training rows, kernels at all rows, or random Fourier
        features.
    n_centres : int or None
        Number of features, at most; by default 400 for p(x), and 60 features of x, more from 1,200 rows on,
        for p(y | x).
    normaliser : {"auto", "quadrature", "importance", "smc"}
        How log Z of p(x) is computed.
    search : Search
        The cross-validation.
    integration : Integration
        Cells and draws of the integrals.
    """

    name: str = "gaussian"
    lengthscale: ArrayLike | None = None
    condition_lengthscale: ArrayLike | None = None
    rkhs_penalty: float | None = None
    base: str | AbstractMeasure | None = None
    base_width: float | None = None
    power: bool | None = None
    space: str = "nystrom"
    n_centres: int | None = None
    normaliser: str = "auto"
    search: Search = Search()
    integration: Integration = Integration()

    def __check_init__(self) -> None:
        one_of("kernel", self.name, KERNELS)
        one_of("space", self.space, SPACES)
        one_of("normaliser", self.normaliser, METHODS)
        if isinstance(self.base, str):
            one_of("base", self.base, BASES)
        elif self.base is not None and not isinstance(self.base, AbstractMeasure):
            names = ", ".join(BASES)
            raise TypeError(f"base must be one of {names}, a measure or None; got {shown(self.base)}.")
        for name, record in (("search", Search), ("integration", Integration)):
            if not isinstance(getattr(self, name), record):
                raise TypeError(f"{name} must be a {record.__name__}, got {shown(getattr(self, name))}.")
        whole = isinstance(self.n_centres, int | np.integer) and not isinstance(self.n_centres, bool)
        if self.n_centres is not None and not (whole and self.n_centres >= 1):
            raise ValueError(f"n_centres must be a whole number of at least 1, got {shown(self.n_centres)}.")
        for name in ("lengthscale", "condition_lengthscale"):
            _check_scale(name, getattr(self, name), most_axes=1)
            _check_scale(f"{name}s", getattr(self.search, f"{name}s"), most_axes=1)
        for name in ("rkhs_penalty", "base_width"):
            _check_scale(name, getattr(self, name), most_axes=0)

    def check_widths(self, targets: int, inputs: int) -> None:
        """Raise if length scales do not fit the numbers of targets and inputs."""
        for name, width in (("lengthscale", targets), ("condition_lengthscale", inputs)):
            scales = np.asarray(1.0 if getattr(self, name) is None else getattr(self, name), float)
            if scales.shape not in ((), (width,)):
                raise ValueError(
                    f"{name} must be positive and of shape () or ({width},), got {shown(scales)}."
                )
        if self.lengthscale is not None and not np.any(np.isfinite(np.asarray(self.lengthscale, float))):
            raise ValueError(
                f"lengthscale must be finite in one dimension at least; got {shown(self.lengthscale)}."
            )

    def features(self, *, conditional: bool) -> Features:
        """Return the features of the final fit."""
        if conditional:
            rank = Features().condition_rank if self.n_centres is None else (self.n_centres, self.n_centres)
            return Features(condition_rank=rank, floor=PRODUCT_FLOOR)
        if self.space == "full":
            return Features(centres=np.iinfo(np.int32).max)
        return Features() if self.n_centres is None else Features(centres=self.n_centres)


def _check_scale(name: str, value: Any, *, most_axes: int) -> None:
    """Raise unless a setting is None or positive numbers; only vectors may hold infinity."""
    if value is None:
        return
    try:
        numbers = np.asarray(value, float)
        boolean = np.asarray(value).dtype == bool
    except (TypeError, ValueError):
        numbers, boolean = np.array(np.nan), False
    infinite = np.isinf(numbers) & (most_axes > 0)
    if boolean or numbers.ndim > most_axes or not np.all(numbers > 0.0):
        raise ValueError(f"{name} must be positive, got {shown(value)}.")
    least = SMALLEST_PENALTY if name == "rkhs_penalty" else SMALLEST_LENGTH
    if not np.all(infinite | ((numbers >= least) & (numbers <= 1.0 / least))):
        ends = f"from {least:g} to {1.0 / least:g}"
        raise ValueError(f"{name} must be {ends}, got {shown(value)}: others are beyond double precision.")


class KernelSettings(NamedTuple):
    """The settings of a fit; length scales are in model units."""

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
    """A setting and its cross-validated mean log density of the target, in data units."""

    settings: KernelSettings
    score: float
    standard_error: float


class Selection(eqx.Module):
    """The settings, their base, the trial of highest score (None if all settings were given), and all trials.

    ``held_out`` is the log density of each row under fits without its held-out part; NaN for rows in no part.
    """

    settings: KernelSettings
    base: AbstractMeasure
    chosen: Trial | None
    trials: list[Trial]
    held_out: np.ndarray | None = None


class Scaled(NamedTuple):
    """The training rows under one scaling of the target, and its log-Jacobian at each row."""

    sample: Sample
    log_jacobian: np.ndarray

    @staticmethod
    def of(
        scaling: Scaling, targets: np.ndarray, condition: np.ndarray, weight: np.ndarray | None = None
    ) -> "Scaled":
        """Return the rows in the scaling's units."""
        return Scaled(Sample(scaling.to_model(targets), condition, weight), scaling.log_jacobian(targets))


class Context(NamedTuple):
    """Inputs of a search besides the rows.

    ``bases`` are given base measures by power transformation. ``most_dims`` is the largest number of
    coordinates of f, if limited. ``compared`` asks for held-out scores."""

    kernel: Kernel
    splits: Splits
    seed: int
    proposal: AbstractMeasure | None = None
    bases: dict[bool, AbstractMeasure] | None = None
    most_dims: int | None = None
    compared: bool = False
    report: Listener | None = None


def search(scaled: dict[bool, Scaled], context: Context) -> Selection | None:
    """Return the settings for the training rows, given under each scaling that may be chosen.

    The result is None if f would depend on more than ``context.most_dims`` coordinates.
    """
    kinds = _base_kinds(scaled, context)
    dims = _coordinates(scaled, kinds[0], context)
    if context.most_dims is not None and len(dims) > context.most_dims:
        return None
    searches = [_LatticeSearch(kind, dims, scaled, context) for kind in kinds]
    if len(searches) == 1 and searches[0].settled:
        (only,) = searches
        settings = only.settings(only.start(), float(context.kernel.rkhs_penalty or 0.0))
        return Selection(settings, only.base(settings, whole=True), None, [])
    ranked = []
    for one in searches:
        # Products of small matrices are slower with several BLAS threads.
        with threadpool_limits(limits=1, user_api="blas"):
            settings = one.run()
        # The base was fitted to the points that the folds are scored on.
        data, weight = one.data, one.training.weight
        several = len(searches) > 1
        gain = optimism(one.kind, data, context.splits, seed=context.seed, weight=weight) if several else 0.0
        ranked.append((one.best.score - gain, gain, settings, one))
    _, gain, settings, best = max(ranked, key=lambda entry: entry[0])
    _refuse_poor_kernel(best, scaled, context)
    held_out = best.held_out(settings, gain=gain) if context.compared else best.cross_validated()
    trials = [trial for one in searches for trial in one.trials]
    return Selection(settings, best.base(settings, whole=True), best.best, trials, held_out)


def _first_sample(scaled: dict[bool, Scaled]) -> Sample:
    """Return the rows under the first scaling."""
    return next(iter(scaled.values())).sample


def _refuse_poor_kernel(found: "_LatticeSearch", scaled: dict[bool, Scaled], context: Context) -> None:
    """Raise if a kernel scores lower than the Gaussian kernel on held-out rows."""
    name = context.kernel.name
    if name == "gaussian":
        return
    plain = context._replace(kernel=dataclasses.replace(context.kernel, name="gaussian"))
    other = _LatticeSearch(found.kind, found.dims, scaled, plain)
    other.walk()
    if found.best.score < other.best.score - WORST_LOSS:
        reason = "" if KERNELS[name].smooth else ": grids do not resolve its kinks"
        raise ValueError(
            f"held-out rows have a mean log density of {found.best.score:.2f} with kernel={name!r} and of "
            f"{other.best.score:.2f} with 'gaussian'{reason}. Use 'gaussian', or give lengthscale and "
            "rkhs_penalty."
        )


def _base_kinds(scaled: dict[bool, Scaled], context: Context) -> list[str]:
    """Return the names of the bases to choose from."""
    sample, given = _first_sample(scaled), context.kernel.base
    if context.bases is not None or isinstance(given, AbstractMeasure):
        return ["given"]
    if given is not None or sample.conditional or sample.target.shape[1] <= FEW_DIMS:
        return [given or "gaussian"]
    return ["gaussian", "mixture"]


def _coordinates(scaled: dict[bool, Scaled], kind: str, context: Context) -> tuple[int, ...]:
    """Return the coordinates that f depends on, by a classifier of the data against draws of the first
    base."""
    sample = _first_sample(scaled)
    targets = np.asarray(sample.target)
    everything = tuple(range(targets.shape[1]))
    if sample.conditional:
        return everything
    if context.kernel.lengthscale is not None:
        scales = np.broadcast_to(np.asarray(context.kernel.lengthscale, float), (targets.shape[1],))
        return tuple(int(j) for j in np.flatnonzero(np.isfinite(scales)))
    if len(everything) <= FEW_DIMS:
        return everything
    base = _fitted_base(kind, sample, power=min(scaled), width=1.0, context=context)
    return relevant_dimensions(targets, base, seed=context.seed, weight=sample.weight) or everything


def _fitted_base(
    kind: str, sample: Sample, *, power: bool, width: float, context: Context
) -> AbstractMeasure:
    """Return the base of this name, fitted to the targets of a sample, or the one that was given."""
    if isinstance(context.kernel.base, AbstractMeasure):
        return context.kernel.base
    if context.bases is not None:
        return context.bases[power]
    if kind == "mixture" and context.proposal is not None:
        return context.proposal
    targets = np.asarray(sample.target)
    if sample.conditional and kind == "gaussian":
        return tailed_gaussian(targets, width=width, weight=sample.weight)
    return fit_base(kind, targets, seed=context.seed, weight=sample.weight)


class _LatticeSearch:
    """The coordinate search on one kind of base, with its trials."""

    def __init__(self, kind: str, dims: tuple[int, ...], scaled: dict[bool, Scaled], context: Context):
        self.kind, self.dims, self.whole, self.context = kind, dims, scaled, context
        options = context.kernel.search
        self.fixed, self.options = context.kernel, options
        self.training = _first_sample(scaled)
        self.conditional = self.training.conditional
        most = options.conditional_rows if self.conditional else options.rows
        self.chosen = np.sort(np.random.default_rng(context.seed).permutation(len(self.training))[:most])
        self.scaled = {
            power: Scaled(part.sample.rows(self.chosen), part.log_jacobian[self.chosen])
            for power, part in scaled.items()
        }
        self.sample = _first_sample(self.scaled)
        self.trials: list[Trial] = []
        self.row_scores: list[np.ndarray] = []
        self.best_at: dict[tuple, float] = {}
        self.bases: dict[tuple, AbstractMeasure] = {}
        self.centres: dict[bool, Centres] = {}
        self.folds: dict[tuple | None, Folds] = {}
        self.left_out = left_out_rows(self.sample, options.folds, options.repeats, seed=context.seed)
        self.unit = median_distance(self.sample.condition) if self.conditional else 1.0
        self.target_unit = 1.0 if self.conditional else median_distance(self.data[:, self.dims])
        self.axes = self._axes()

    @property
    def data(self) -> np.ndarray:
        """Return the targets of all training rows under the first scaling."""
        return np.asarray(self.training.target)

    @property
    def settled(self) -> bool:
        """Return whether all settings were given."""
        return not self.axes and self.fixed.rkhs_penalty is not None

    @property
    def best(self) -> Trial:
        """Return the trial of highest score."""
        return max(self.trials, key=lambda trial: trial.score)

    @property
    def _best_rows(self) -> np.ndarray:
        """Return the score of each row at the best trial."""
        return self.row_scores[int(np.argmax([trial.score for trial in self.trials]))]

    def _axes(self) -> dict[str, tuple]:
        """Return the open axes of the lattice and the values on them."""
        options, fixed = self.options, self.fixed
        axes: dict[str, tuple] = {}
        if len(self.scaled) > 1:
            axes["power"] = (False, True)
        if self.conditional and fixed.condition_lengthscale is None:
            axes["condition_lengthscale"] = options.condition_lengthscales
        if fixed.lengthscale is None:
            # Under a condition the centres of the target cover it down to this length scale.
            least = (np.ptp(self.data) + 2.0 * CENTRE_MARGIN) / (CENTRE_SPACING * MOST_TARGET_CENTRES)
            allowed = lambda scale: not self.conditional or scale >= min(least, 0.125)
            axes["lengthscale"] = tuple(scale for scale in options.lengthscales if allowed(scale))
        if self.conditional and fixed.base_width is None and self.kind == "gaussian":
            axes["base_width"] = options.widths
        return axes

    def start(self) -> dict[str, int]:
        """Return the middle of the lattice, which is near the optimum of most data sets."""
        middle = {"power": True, "condition_lengthscale": 1.0, "base_width": 1.0}
        middle["lengthscale"] = 1.0 if self.conditional else 0.35
        distance = lambda value, centre: abs(np.log((value + 1e-9) / (centre + 1e-9)))
        nearest = lambda axis, values: int(np.argmin([distance(value, middle[axis]) for value in values]))
        return {axis: nearest(axis, values) for axis, values in self.axes.items()}

    def settings(self, position: dict[str, int], penalty: float) -> KernelSettings:
        """Return the settings at a point of the lattice, completed by the given ones."""
        at = {axis: self.axes[axis][index] for axis, index in position.items()}
        fixed = self.fixed
        inputs = self.sample.condition.shape[1]
        scales: Any = 1.0 if fixed.condition_lengthscale is None else fixed.condition_lengthscale
        if "condition_lengthscale" in at:
            scales = at["condition_lengthscale"] * self.unit
        target = np.asarray(
            at["lengthscale"] * self.target_unit if "lengthscale" in at else fixed.lengthscale, float
        )
        target = np.broadcast_to(target, (len(self.dims),)) if target.ndim == 0 else target
        width = at.get("base_width", 1.0 if fixed.base_width is None else fixed.base_width)
        return KernelSettings(
            base=self.kind,
            dims=self.dims,
            power=bool(at.get("power", max(self.scaled))),
            condition_lengthscale=np.broadcast_to(np.asarray(scales, float), (inputs,)).copy(),
            lengthscale=target[np.isfinite(target)].copy(),
            base_width=float(width),
            rkhs_penalty=penalty,
        )

    def run(self) -> KernelSettings:
        """Return the weighted mean of the evaluated settings."""
        self.walk()
        settings = self.weighted_mean()
        if "condition_lengthscale" in self.axes and self.sample.condition.shape[1] > 1:
            settings = self.separated(settings)
        return settings

    def walk(self) -> None:
        """Climb from the middle, and again from a short length scale if that ends below a plain density."""
        start = self.start()
        self._climb(start)
        if "lengthscale" in start and not self.conditional and self._is_below_kernel_density():
            self._climb(start | {"lengthscale": max(start["lengthscale"] - SHORTER, 0)})
        if self.fixed.rkhs_penalty is None:
            best = self.best.settings
            for penalty in (BETWEEN * best.rkhs_penalty, best.rkhs_penalty / BETWEEN):
                self._rows(best._replace(rkhs_penalty=penalty))

    def _is_below_kernel_density(self) -> bool:
        """Return whether a kernel density estimate scores clearly higher than the best trial: the score has
        several maxima along the length scale."""
        targets, weight = np.asarray(self.sample.target), self.sample.weight
        own = self._best_rows - self.scaled[self.best.settings.power].log_jacobian
        gains = np.full(len(targets), np.nan)
        for mask in self.left_out:
            held = np.flatnonzero(mask)[: MOST_CENTRES // len(self.left_out)]
            other = kernel_density_scores(targets, weight, np.flatnonzero(~mask), held)
            gains[held] = other - own[held]
        seen = ~np.isnan(gains)
        return bool(weighted_mean(gains[seen], part_of(weight, seen)) > WORST_LOSS)

    def _climb(self, position: dict[str, int]) -> None:
        """Move along each axis in the direction that improves, in long steps first."""
        stride, score = 2, self.visit(position)
        for _ in range(self.options.rounds):
            position, new_score = self._round(position, score, stride)
            if new_score == score:
                if stride == 1:
                    break
                stride = 1
            score = new_score

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

    def _visited(self, settings: KernelSettings) -> float:
        """Return the best score along a path of penalties that starts just above the best known one."""
        if self.fixed.rkhs_penalty is not None:
            return self.path(settings, (self.fixed.rkhs_penalty,))
        penalties = self.options.penalties
        known = self.best.settings.rkhs_penalty if self.trials else np.inf
        first = max(sum(penalty > 1.1 * known for penalty in penalties) - 1, 0)
        warm = lambda first: penalties[max(first - WARM_PENALTIES, 0) : first]
        before = len(self.trials)
        best = self.path(settings, penalties[first:], approach=warm(first))
        while first > 0 and self.trials[before].score == best:
            # The best penalty here may be larger than the known one.
            before, first = len(self.trials), first - 1
            best = max(best, self.path(settings, penalties[first : first + 1], approach=warm(first)))
        return best

    def path(
        self, settings: KernelSettings, penalties: Iterable[float], *, approach: Iterable[float] = ()
    ) -> float:
        """Try falling penalties until the score stops rising; keep every trial and return the best score.

        ``approach`` are larger penalties on the way to the first, which are not scored.
        """
        scaled = self.scaled[settings.power]
        offset = scaled.log_jacobian + self.base(settings).log_densities(scaled.sample.target)
        weight = scaled.sample.weight
        folds, is_new = self._folds(settings)
        for penalty in approach if is_new else ():
            folds.approach(penalty)
        best, stale = -np.inf, 0
        for penalty in penalties:
            scores = folds.scores(float(penalty)) + offset
            mean = float(weighted_mean(scores, weight))
            error = standard_error(scores, weight)
            self.trials.append(Trial(settings._replace(rkhs_penalty=float(penalty)), mean, error))
            self.row_scores.append(scores)
            best, stale = (mean, 0) if mean > best else (best, stale + 1)
            if stale == self.options.patience:
                break
        if self.context.report is not None:
            self.context.report(Report("selection", len(self.trials), 0, {"score": self.best.score}))
        return float(best)

    def _folds(self, settings: KernelSettings) -> tuple[Folds, bool]:
        """Return the cross-validated fits at these length scales, and whether they are new; the best are
        kept."""
        place = lambda settings: (settings.power, settings.base_width, *map(tuple, settings.lengthscales))
        wanted, best = place(settings), place(self.best.settings) if self.trials else None
        if wanted in self.folds:
            return self.folds[wanted], False
        # Folds are large: all but the best are dropped before new ones are made.
        self.folds = {best: self.folds[best]} if best in self.folds else {}
        self.folds[wanted] = self._fits(settings, self.left_out)
        return self.folds[wanted], True

    def _fits(self, settings: KernelSettings, left_out: np.ndarray) -> Folds:
        """Return the fits that leave out these rows, masks of shape (fits, rows)."""
        sample, base = self.scaled[settings.power].sample, self.base(settings)
        part, part_base, proposal = reduced(sample, base, settings.dims, self.context.proposal or base)
        if settings.power not in self.centres:
            self.centres[settings.power] = centre_rows(part, self.options.features, seed=self.context.seed)
        centres = self.centres[settings.power]
        space = build_space(self.fixed.name, part, centres, settings.lengthscales, self.options.features)
        problem = Problem(part, part_base, space, 1.0, proposal, self.fixed.integration)
        return Folds(problem, *self._nodes(problem, settings.lengthscale), left_out)

    def _nodes(self, problem: Problem, lengthscale: np.ndarray) -> tuple[Nodes, Nodes]:
        """Return the nodes to fit on and those to score on: two sets of draws, or grids.

        They are the same grid if f is smooth within its cells."""
        if problem.on_grid:
            fineness = self.options.fineness[problem.sample.target.shape[1] - 1]
            grid = problem.nodes(fineness=fineness, key=None)
            cells = np.array([np.median(np.diff(edge)) for edge in grid.edges])
            if KERNELS[self.fixed.name].smooth and np.all(lengthscale >= CELLS_PER_SCALE * cells):
                return grid, grid
            return grid, problem.nodes(fineness=CHECKED * fineness, key=None)
        keys = jr.split(jr.key(self.context.seed))
        first, second = (problem.nodes(draws=self.options.draws, key=key) for key in keys)
        return first, second

    def weighted_mean(self) -> KernelSettings:
        """Return the mean of the logarithms of the trials under the best scaling, by exponential weights."""
        best = self.best.settings
        trials = [trial for trial in self.trials if trial.settings.power == best.power]
        gaps = np.array([trial.score for trial in trials]) - self.best.score
        weights = np.exp(self.options.weight * self.sample.effective_rows * gaps)
        found: dict[str, Any] = {}
        for name in ("condition_lengthscale", "lengthscale", "base_width", "rkhs_penalty"):
            values = np.array([getattr(trial.settings, name) for trial in trials], float)
            # Given scales may be infinite, and infinity times a vanishing weight is NaN.
            same = bool(np.all(values == values[0]))
            found[name] = values[0] if same else np.exp(np.average(np.log(values), axis=0, weights=weights))
        return best._replace(**found)

    def separated(self, settings: KernelSettings) -> KernelSettings:
        """Return the settings with a length scale for a single input where the gain is significant."""
        options, weight = self.options, self.sample.weight
        scores = self._rows(settings)
        for j in range(len(settings.condition_lengthscale)):
            for factor in options.relevance_factors:
                scales = settings.condition_lengthscale.copy()
                scales[j] *= factor
                candidate = settings._replace(condition_lengthscale=scales)
                gains = self._rows(candidate) - scores
                least = options.relevance_gain + options.relevance_errors * standard_error(gains, weight)
                if weighted_mean(gains, weight) > least:
                    settings, scores = candidate, scores + gains
                    break
        return settings

    def _rows(self, settings: KernelSettings) -> np.ndarray:
        """Return the score of each row at these settings, reached from larger penalties."""
        self.path(settings, (settings.rkhs_penalty,), approach=self._warm(settings))
        return self.row_scores[-1]

    def _warm(self, settings: KernelSettings) -> list[float]:
        """Return penalties on the way to that of the settings."""
        return [one for one in self.options.penalties if one > 3.0 * settings.rkhs_penalty][-WARM_PENALTIES:]

    def held_out(self, settings: KernelSettings, *, gain: float) -> np.ndarray:
        """Return the log density of each row of the common splits under fits without its part.

        ``gain`` is the optimism of the base, which was fitted to all rows.
        """
        masks = self.context.splits.masks[:, self.chosen]
        folds = self._fits(settings, masks[masks.any(axis=1)])
        for penalty in self._warm(settings):
            folds.approach(penalty)
        part = self.scaled[settings.power]
        offset = part.log_jacobian + self.base(settings).log_densities(part.sample.target)
        scores = np.full(len(self.data), np.nan)
        scores[self.chosen] = folds.scores(settings.rkhs_penalty) + offset - gain
        return scores

    def cross_validated(self) -> np.ndarray:
        """Return the log density of each row under the fit of the best trial without its fold."""
        scores = np.full(len(self.data), np.nan)
        scores[self.chosen] = self._best_rows
        return scores

    def base(self, settings: KernelSettings, *, whole: bool = False) -> AbstractMeasure:
        """Return the base of the settings, fitted to the rows of the search or to all."""
        place = (settings.power, settings.base_width, whole)
        if place not in self.bases:
            sample = (self.whole if whole else self.scaled)[settings.power].sample
            power, width, context = settings.power, settings.base_width, self.context
            self.bases[place] = _fitted_base(self.kind, sample, power=power, width=width, context=context)
        return self.bases[place]


def reduced(
    sample: Sample, base: AbstractMeasure, dims: tuple[int, ...], proposal: AbstractMeasure
) -> tuple[Sample, AbstractMeasure, AbstractMeasure]:
    """Return sample, base and proposal in the coordinates that f depends on."""
    if len(dims) == sample.target.shape[1]:
        return sample, base, proposal
    part = Sample(sample.target[:, dims], sample.condition, sample.weight)
    return part, base.marginal(dims), proposal.marginal(dims)
