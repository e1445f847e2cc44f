"""The library's own estimators: a kernel exponential family for ``p(x)``, and one for ``p(y | x)``.

Both are one model. What they share is ``KernelModel``; they differ in what they are called with.
"""

import os
import warnings
from collections.abc import Sequence
from typing import Self

import numpy as np
from jaxtyping import Array, Key
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.blocks import Rows
from kexpfam.data.columns import check_columns, check_kinds, check_targets
from kexpfam.data.kinds import AbstractKind
from kexpfam.data.sample import Sample
from kexpfam.estimators.base import (
    ConditionalEstimator,
    DensityEstimator,
    Seed,
    check_scale,
    key_from,
    one_of,
    warn_of_uncertain_normaliser,
    whole,
)
from kexpfam.estimators.partial import AnyGivenAny
from kexpfam.estimators.showing import remembered
from kexpfam.estimators.streaming import Streamed
from kexpfam.fit.learned import Learned
from kexpfam.fit.problem import Solver
from kexpfam.fit.select import (
    Features,
    Fixed,
    Search,
    Settings,
)
from kexpfam.integrate.nodes import Integration
from kexpfam.integrate.partition import METHODS
from kexpfam.judge.diagnosis import AbstractDiagnosis, Judgement
from kexpfam.model.density import Density
from kexpfam.model.kernels import KERNELS
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.spaces import Constant, FeatureSpace, RandomFeatures
from kexpfam.progress import Listener
from kexpfam.stacklevel import caller_level

__all__ = ["ConditionalKernelExpFamily", "KernelExpFamily", "NearlyDeterministicWarning"]

SPACES = ("nystrom", "full", "random_features")
# Features below this share of the strongest are left out of a product space.
PRODUCT_FLOOR = 1e-8


class NearlyDeterministicWarning(UserWarning):
    """The targets are (nearly) a function of the inputs: no likelihood is high enough, and its height says little."""


class KernelExpFamily(Streamed, DensityEstimator, AnyGivenAny):
    r"""Density :math:`p(x) = p_0(x) \exp(f(x) - A(f))` with f in an RKHS, by penalised maximum likelihood.

    Everything left at ``None`` is chosen from the training data (see ``selection_`` after the fit).

    Parameters
    ----------
    kernel : str
        One of "gaussian", "laplace", "matern32", "matern52", "inverse_multiquadric".
    lengthscale : float, array of shape (n_features,) or None
        In units of the standardised data; infinite entries switch a dimension off.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``.
    base : {"gaussian", "box", "mixture", "chain"}, measure or None
        The base measure p0. A measure given as an object is in units of the standardised data. "chain" is learned: every column
        given the ones before it, each under a tilt of its own. None chooses, with more than three columns among a kernel model
        whose f depends on few of them, a plain mixture and chains, or stacks them (see ``candidates_``).
    bounds : pair of float or of arrays of shape (n_features,), or None
        Lower and upper end of the support, in the data's own units: the density is 0 outside it.
    columns : dict or None
        The kinds of columns, by name or position: "real", "positive", "integer", "count", "category", "bounded:0:1",
        "periodic:360", "atom:0:positive", or objects such as ``Bounded(0, 1)``. Texts, booleans and categories of a frame are
        categories; anything else is real unless it is named here. See ``docs/mixed-tables.md``.
    space : {"nystrom", "full", "random_features"}
        f on spread-out centres, on all training points, or on random features.
    n_centres : int
        Number of centres, or of random frequencies.
    solver : str or Solver
        "auto" solves the convex problem outright, on a grid in up to three coordinates of f and on importance draws elsewhere;
        "exact" insists on the grid; "dde" is the doubly dual embedding. The others are the paper's, described in
        ``docs/algorithms.md``: "functional", "random_features", "adapted", "deep", "contrastive", "annealed",
        "moment_matching", "singly_dual", "mmd_gan".
    normaliser : {"auto", "quadrature", "importance", "smc"}
        How ``log Z`` is computed.
    search : Search or None
        How settings are searched for: folds, penalties, lattice.
    integration : Integration or None
        How integrals are done: cells, draws.
    effort : {"fast", "default", "best"}
        What learned bases may cost: fewer or more members and epochs; "best" learns them for few columns too.
    learned : Learned or None
        How learned bases are trained, in place of what ``effort`` stands for.
    rows : Rows or None
        How many rows are held, kept and read at a time; see ``docs/many-rows.md``.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of steps.
    checkpoint : path or None
        A file that is rewritten during the steps of a solver; ``fit`` resumes from it if it exists.

    Attributes
    ----------
    density_ : AbstractDensity
        The fitted density, independent of how it was fitted.
    candidates_ : list of Candidate
        What competed, with weights in the density and scores on held-out rows.
    polish_ : Polish or None
        What the convex polish of learned tilts gained, and how far from its optimum it can be at most; None if it did not help.
    solution_ : Solution or None
        f, sampler, status and trace of the solver, if a kernel model has a part in the density.
    selection_ : Selection or None
        The chosen settings of a kernel model and every setting tried.
    lengthscale_, rkhs_penalty_, base_
        What was chosen for the kernel model, or None.
    columns_ : dict
        The kind of each column, by name or position.
    n_features_in_ : int
    n_rows_ : int
        The rows that the model was fitted to, of which ``training_data_`` keeps some.

    Examples
    --------
    >>> from kexpfam import KernelExpFamily
    >>> from kexpfam.datasets import two_moons
    >>> X = two_moons().sample(300, random_state=0)
    >>> density = KernelExpFamily(random_state=0).fit(X)
    >>> density.score_samples(X[:2]).shape
    (2,)
    >>> density.sample(5, random_state=1).shape
    (5, 2)
    """

    _stored = (
        *("density_", "_problem", "_training", "candidates_", "polish_", "solution_", "selection_"),
        *("lengthscale_", "rkhs_penalty_", "base_", "_columns", "n_rows_"),
    )

    def __init__(
        self,
        *,
        kernel: str = "gaussian",
        lengthscale: ArrayLike | None = None,
        rkhs_penalty: float | None = None,
        base: str | AbstractMeasure | None = None,
        bounds: Sequence[ArrayLike] | None = None,
        columns: dict | None = None,
        space: str = "nystrom",
        n_centres: int = 400,
        solver: str | Solver = "auto",
        normaliser: str = "auto",
        search: Search | None = None,
        integration: Integration | None = None,
        effort: str = "default",
        learned: Learned | None = None,
        rows: Rows | None = None,
        random_state: Seed = None,
        progress: bool | Listener = False,
        checkpoint: str | os.PathLike | None = None,
    ) -> None:
        self.kernel = kernel
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.bounds = bounds
        self.columns = columns
        self.space = space
        self.n_centres = n_centres
        self.solver = solver
        self.normaliser = normaliser
        self.search = search
        self.integration = integration
        self.effort = effort
        self.learned = learned
        self.rows = rows
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        one_of("space", self.space, SPACES)
        one_of("normaliser", self.normaliser, METHODS)
        whole("n_centres", self.n_centres, 1)
        check_scale("lengthscale", self.lengthscale, (), (X.shape[1],), may_be_infinite=True)
        if self.lengthscale is not None and not np.any(np.isfinite(self.lengthscale)):
            raise ValueError(f"lengthscale must be finite in one dimension at least; got {self.lengthscale}.")
        self._checked_solver(X.shape[1], 0)
        self._hint(X, self.columns)
        if self._columns.plain and not np.any(np.isnan(X)):
            check_columns(X, self._names)
        else:
            check_kinds(X, self._columns)
        self._fit_model(X, np.zeros((len(X), 0)), listener)
        self._training = self.density_.scaling.to_model(X)
        warn_of_uncertain_normaliser(self.density_, X)
        return self

    @remembered
    def diagnose(self, random_state: Seed = 0, *, settings: Judgement | None = None) -> AbstractDiagnosis:
        """Return what can be known about the quality of the fit; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        return self._diagnosed(None, settings, key_from(random_state))

    def potential(self, X: ArrayLike) -> np.ndarray:
        """Return the learned f at each row: ``log p - log p0 + log Z``, all in standardised units."""
        X = self._checked_points(X)
        if not isinstance(self.density_, Density):
            raise TypeError(
                "this density is not a base under a single f: fit with base='gaussian' or 'mixture' to have one."
            )
        if np.any(np.isnan(X)):
            raise ValueError("X contains NaN: f is a function of all its columns.")
        return self.density_.potential(X)

    def _fixed(self) -> Fixed:
        return super()._fixed()._replace(power=False)

    def _features(self) -> Features:
        return Features(centres=np.iinfo(np.int32).max if self.space == "full" else self.n_centres)

    def _space(self, sample: Sample, settings: Settings, seed: int, *, key: Key[Array, ""]) -> FeatureSpace:
        if self.space != "random_features":
            return super()._space(sample, settings, seed, key=key)
        kernel, dim = KERNELS[self.kernel](settings.lengthscale), sample.target.shape[1]
        return FeatureSpace(Constant(), RandomFeatures.draw(kernel, dim, count=self.n_centres, key=key))


class ConditionalKernelExpFamily(Streamed, ConditionalEstimator):
    r"""Conditional density :math:`p(y | x) = p_0(y) \exp(f(x, y) - A_x(f))`, by penalised maximum likelihood.

    f lies in the RKHS of the product kernel :math:`k(x, x') k(y, y')`. Everything left at ``None`` is chosen from the training
    data by cross-validation (see ``selection_`` after the fit).

    Parameters
    ----------
    kernel : str
        One of "gaussian", "laplace", "matern32", "matern52", "inverse_multiquadric".
    condition_lengthscale : float, array of shape (n_features,) or None
        Length scales of x, in units of the standardised data; large ones say that an input matters little.
    lengthscale : float or None
        Length scale of y, in units of the standardised target.
    rkhs_penalty : float or None
        The weight of ``|f|^2 / 2``.
    base : {"gaussian", "box", "mixture", "chain"}, measure or None
        The base measure p0 on targets. "gaussian" has a small share of a wider one. "chain" is learned: a network of x, and of
        the targets before, gives every target a location, a scale and a tilt. None chooses, or stacks a kernel model on a
        Gaussian and chains (see ``candidates_``). Any other setting of the kernel's, or a solver, asks for a kernel model.
    bounds : pair of float or of arrays of shape (n_targets,), or None
        Lower and upper end of the support of y, in its own units: the density is 0 outside it.
    columns : dict or None
        The kinds of the columns of X, by name or position: "real", "positive", "integer", "count", "category", "bounded:0:1",
        "periodic:360", "atom:0:positive", or objects such as ``Bounded(0, 1)``. Texts, booleans and categories of a frame are
        categories; anything else is real unless it is named here. See ``docs/mixed-tables.md``.
    target_columns : dict, kind or None
        The same for y; a kind alone is that of the only target.
    base_width : float or None
        Width of a Gaussian base, in standard deviations of the target.
    power : bool or None
        Whether the target is first made less skewed by a Yeo-Johnson transformation.
    n_centres : int or None
        Features of x in the fit, at most; by default 60, and more from 1,200 rows on.
    solver : str or Solver
        "auto" solves the convex problem outright, on a grid for y of up to two columns; "exact" insists on the grid; "dde" is
        the doubly dual embedding.
    search : Search or None
        How settings are searched for: folds, penalties, lattice.
    integration : Integration or None
        How integrals are done: cells, draws.
    effort : {"fast", "default", "best"}
        What learned bases may cost: fewer or more members and epochs; "best" learns them for few columns too.
    learned : Learned or None
        How learned bases are trained, in place of what ``effort`` stands for.
    rows : Rows or None
        How many rows are held, kept and read at a time; see ``docs/many-rows.md``.
    random_state : int, RandomState or None
        Same seed, same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of steps.
    checkpoint : path or None
        A file that is rewritten during the steps of a solver; ``fit`` resumes from it if it exists.

    Attributes
    ----------
    density_ : AbstractDensity
        The fitted density, independent of how it was fitted.
    candidates_ : list of Candidate
        What competed, with weights in the density and scores on held-out rows.
    polish_ : Polish or None
        What the convex polish of learned tilts gained, and how far from its optimum it can be at most; None if it did not help.
    solution_ : Solution or None
        f, sampler, status and trace of the solver, if a kernel model has a part in the density.
    selection_ : Selection or None
        The chosen settings of a kernel model and every setting tried.
    lengthscale_, rkhs_penalty_, base_, condition_lengthscale_
        What was chosen for the kernel model, or None.
    columns_, target_columns_ : dict
        The kind of each column of X and of y, by name or position.
    n_features_in_ : int
    n_rows_ : int
        The rows that the model was fitted to, of which ``training_data_`` keeps some.

    Examples
    --------
    >>> import numpy as np
    >>> from kexpfam import ConditionalKernelExpFamily
    >>> x = np.random.default_rng(0).uniform(-2, 2, size=(80, 1))
    >>> y = np.sin(2 * x[:, 0]) + 0.2 * np.random.default_rng(1).normal(size=80)
    >>> model = ConditionalKernelExpFamily(random_state=0).fit(x, y)
    >>> model.score_samples(x[:3], y[:3]).shape
    (3,)
    >>> model.quantile(x[:3], [0.05, 0.95]).shape
    (3, 2)
    >>> model.sample(x[:3], 10, random_state=1).shape
    (3, 10)
    """

    _stored = (
        *(
            "density_",
            "_problem",
            "_training",
            "_training_targets",
            "_flat_targets",
            "candidates_",
            "polish_",
            "solution_",
        ),
        *(
            "selection_",
            "lengthscale_",
            "condition_lengthscale_",
            "rkhs_penalty_",
            "base_",
            "_columns",
            "_target_columns",
        ),
        "n_rows_",
    )

    def __init__(
        self,
        *,
        kernel: str = "gaussian",
        condition_lengthscale: ArrayLike | None = None,
        lengthscale: float | None = None,
        rkhs_penalty: float | None = None,
        base: str | AbstractMeasure | None = None,
        bounds: Sequence[ArrayLike] | None = None,
        columns: dict | None = None,
        target_columns: dict | str | AbstractKind | None = None,
        base_width: float | None = None,
        power: bool | None = None,
        n_centres: int | None = None,
        solver: str | Solver = "auto",
        search: Search | None = None,
        integration: Integration | None = None,
        effort: str = "default",
        learned: Learned | None = None,
        rows: Rows | None = None,
        random_state: Seed = None,
        progress: bool | Listener = False,
        checkpoint: str | os.PathLike | None = None,
    ) -> None:
        self.kernel = kernel
        self.condition_lengthscale = condition_lengthscale
        self.lengthscale = lengthscale
        self.rkhs_penalty = rkhs_penalty
        self.base = base
        self.bounds = bounds
        self.columns = columns
        self.target_columns = target_columns
        self.base_width = base_width
        self.power = power
        self.n_centres = n_centres
        self.solver = solver
        self.search = search
        self.integration = integration
        self.effort = effort
        self.learned = learned
        self.rows = rows
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def _fit(self, X: np.ndarray, targets: np.ndarray, listener: Listener | None) -> Self:
        # An infinite length scale of an input switches it off.
        check_scale(
            "condition_lengthscale", self.condition_lengthscale, (), (X.shape[1],), may_be_infinite=True
        )
        check_scale("lengthscale", self.lengthscale, ())
        check_scale("base_width", self.base_width, ())
        self._checked_solver(targets.shape[1], X.shape[1])
        self._hint(targets, self.target_columns)
        if (
            self._described.plain
            and self._columns.plain
            and not np.any(np.isnan(X))
            and not np.any(np.isnan(targets))
        ):
            check_targets(X, targets, self._names, self._target_names)
        else:
            check_kinds(targets, self._described)
        self._fit_model(targets, X, listener)
        self.condition_lengthscale_ = (
            self.selection_.settings.condition_lengthscale if self.selection_ and self.solution_ else None
        )
        warn_of_uncertain_normaliser(self.density_, X)
        self._warn_if_nearly_deterministic()
        return self

    @remembered
    def diagnose(
        self,
        X: ArrayLike | None = None,
        y: ArrayLike | None = None,
        random_state: Seed = 0,
        *,
        settings: Judgement | None = None,
    ) -> AbstractDiagnosis:
        """Return what can be known about the quality of the fit; with held-out X and y, its calibration too."""
        check_is_fitted(self, "density_")
        key = key_from(random_state)
        return self._repaired(self._diagnosed(self._calibration(X, y, key=key), settings, key))

    def _features(self) -> Features:
        rank = Features().condition_rank if self.n_centres is None else (self.n_centres, self.n_centres)
        return Features(condition_rank=rank, floor=PRODUCT_FLOOR)

    def _warn_if_nearly_deterministic(self) -> None:
        smallest = min((self.search or Search()).penalties)
        if (
            self.rkhs_penalty is None
            and self.rkhs_penalty_ is not None
            and self.rkhs_penalty_ < 2.0 * smallest
        ):
            message = (
                "the smallest penalty was the best: the targets are (nearly) a function of the inputs, or take few values. "
                "Their likelihood has no upper bound, so that a high score measures how narrow the spikes are."
            )
            warnings.warn(message, NearlyDeterministicWarning, stacklevel=caller_level())
