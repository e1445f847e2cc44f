"""The library's own estimators: ``KernelExpFamily`` for ``p(x)``, ``ConditionalKernelExpFamily`` for ``p(y |
x)``."""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.blocks import Rows
from kexpfam.data.carried import Carried
from kexpfam.data.columns import CollinearWarning
from kexpfam.data.encoding import TableSchema
from kexpfam.data.frames import layout_of
from kexpfam.data.kinds import AbstractKind
from kexpfam.data.scaling import InputScaling
from kexpfam.estimators.base import Seed, key_from, one_of, warn_of_uncertain_normaliser, whole
from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.estimators.density import DensityEstimator
from kexpfam.estimators.derived import (
    GIVEN_DRAWS,
    ROW_DRAWS,
    CompletedRows,
    PartialDensity,
    listed,
    position_of,
)
from kexpfam.estimators.messages import check_share
from kexpfam.estimators.model import KernelModel
from kexpfam.estimators.uses import Explanation
from kexpfam.fit.learned import Learned
from kexpfam.fit.problem import Solver
from kexpfam.fit.select import Kernel
from kexpfam.judge.copying import Copying, measure_copying
from kexpfam.judge.dependence import Independence, independence_test, mutual_information
from kexpfam.judge.explanation import explain_cells
from kexpfam.model.density import Estimate, TiltedDensity
from kexpfam.progress import Listener, TimeBudget
from kexpfam.stacklevel import caller_level

__all__ = ["ConditionalKernelExpFamily", "KernelExpFamily", "NearlyDeterministicWarning"]

# What is done with columns that are linear combinations of others.
COLLINEAR = ("refuse", "carry")


class NearlyDeterministicWarning(UserWarning):
    """The targets are (nearly) a function of the inputs, so that the likelihood has no upper bound."""


class KernelExpFamily(KernelModel, DensityEstimator):
    r"""Density estimator for :math:`p(x)`.

    Kernel exponential family :math:`p_0(x) \exp(f(x) - A(f))` with f in an RKHS, by penalised maximum
    likelihood; with more than three columns, a stack of it with a mixture of normals and a chain of
    one-dimensional kernel exponential families.

    Parameters
    ----------
    model : {"auto", "kernel", "chain", "mixture"}
        The candidates. "auto" chooses by the number of rows and columns, and stacks several by held-out log
        density (see ``candidates_``).
    kernel : str or Kernel
        Settings of the kernel model: a ``Kernel``, or the name of its kernel.
    solver : str or Solver
        How the kernel model finds f. "auto" solves the convex problem; "exact" requires a grid; "dde" is the
        doubly dual embedding of the paper.
    learned : Learned or None
        Settings of the chain; None is those of ``effort``.
    bounds : pair of float or of arrays of shape (n_features,), or None
        Lower and upper end of the support, in the data's own units. The density is 0 outside.
    columns : dict or None
        The kinds of the columns of X, by name or position: "real", "positive", "integer", "count",
        "category", "bounded:0:1", "periodic:360", "rounded:0.1", "atom:0:positive", or objects such
        as ``Bounded(0, 1)``.
        Text, booleans and categories of a frame are categories; other columns are real unless they are named
        here. See ``docs/mixed-tables.md``.
    collinear : {"refuse", "carry"}
        Columns that are linear combinations of others have no joint density. "refuse" raises an error.
        "carry" models the others and computes these from them: a real column is carried if its residual
        given the columns before it has a standard deviation below 1e-6 times its own. Scores are then log
        densities of the other columns; ``log_prob``, ``density_`` and ``export`` take those only. A row has
        the score -inf if a carried cell deviates by more than twice the largest residual of the training
        rows and by more than 1e-6 standard deviations.
    effort : {"fast", "default", "best"}
        Cost of chains: fewer or more members and epochs. "best" adds a chain in few columns too.
    rows : Rows or None
        Numbers of rows in memory, in the model and in a block; see ``docs/many-rows.md``.
    random_state : int, RandomState or None
        The same seed gives the same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of
        steps.
    checkpoint : path or None
        A file that is rewritten during training; ``fit`` resumes from it if it exists. A file of
        another ``random_state`` is refused; None then means 0.

    Attributes
    ----------
    density_ : AbstractDensity
        The fitted density.
    candidates_ : list of CandidateScore
        The candidates with their weights in the density and their held-out log densities.
    fits_ : dict of Fitted
        Status, facts and trace of each candidate, by name.
    solution_ : Solution or None
        f, sampler, status and trace of the solver, if a kernel model has a part in the density.
    selection_ : Selection or None
        The selected settings of the kernel model and all trials.
    lengthscale_, rkhs_penalty_, base_
        The settings of the kernel model, or None.
    columns_ : dict
        The kind of each column, by name or position.
    carried_ : dict
        The constant and the coefficients of each carried column, by name or position.
    steps_ : dict
        The step of each column of the density that holds rounded numbers, to which draws are rounded.
    n_features_in_ : int
    n_rows_ : int
        The number of rows of the fit, some of which ``training_data_`` keeps.

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

    def __init__(
        self,
        *,
        model: str = "auto",
        kernel: str | Kernel = "gaussian",
        solver: str | Solver = "auto",
        learned: Learned | None = None,
        bounds: Sequence[ArrayLike] | None = None,
        columns: dict | None = None,
        collinear: str = "refuse",
        effort: str = "default",
        rows: Rows | None = None,
        random_state: Seed = None,
        progress: bool | Listener = False,
        checkpoint: str | os.PathLike | None = None,
    ) -> None:
        self.model = model
        self.kernel = kernel
        self.solver = solver
        self.learned = learned
        self.bounds = bounds
        self.columns = columns
        self.collinear = collinear
        self.effort = effort
        self.rows = rows
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def fit(
        self,
        X: Any,
        y: object = None,
        sample_weight: ArrayLike | None = None,
        *,
        time_budget: float | None = None,
    ) -> Self:
        """Fit the density to the rows of X; y is ignored.

        X is a table, or a source of row blocks: the path of a .npy or Parquet file or of a folder of Parquet
        files, an Arrow dataset, a Dask frame, or an iterable of tables that can be read several times. With
        more rows than ``rows.in_memory``, everything but the means of f's features is computed on a uniform
        sample of that many rows (see ``docs/many-rows.md``). A row of weight 2 counts as two equal rows, a
        row of weight 0 is left out. ``time_budget`` bounds the seconds of the fit, see
        ``docs/cost.md``."""
        budget = TimeBudget.of(time_budget)
        one_of("collinear", self.collinear, COLLINEAR)
        with self._fitting() as listener:
            source = self._source(X, None, sample_weight, listener)
            (table,) = source.tables
            self._note_names(table)
            points = self._read(table, reset=True)
            (points,) = self._counted(source.weight, points)
            points = self._carry(points)
            self._fit_model(points, np.zeros((len(points), 0)), source, listener, budget)
            self._training = self.density_.scaling.to_model(points)
            warn_of_uncertain_normaliser(self.density_, points)
            self._keep_rows((self.rows or Rows()).kept)
        return self

    def _carry(self, points: np.ndarray) -> np.ndarray:
        """Return the columns to model; with ``collinear="carry"`` the others are kept as combinations."""
        real = [j for j, kind in enumerate(self._columns.kinds) if kind.is_default]
        if self.collinear == "refuse" or (carried := Carried.found(points, real)) is None:
            return points
        if self.bounds is not None:
            raise ValueError('collinear="carry" excludes bounds: use columns={...: "bounded:0:1"} instead.')
        self._codec = self._codec._replace(carried=carried)
        message = (
            f"column(s) {', '.join(map(str, self.carried_))} are linear combinations of others and are "
            "carried along: scores are log densities of the other columns. See carried_."
        )
        warnings.warn(message, CollinearWarning, stacklevel=caller_level())
        return self._codec.dropped(points)

    @property
    def carried_(self) -> dict[str | int, tuple[float, dict[str | int, float]]]:
        """The constant and the coefficients of each carried column, by name or position."""
        check_is_fitted(self, "_codec")
        names, carried = list(self.columns_), self._codec.carried
        return {
            names[one.place]: (
                one.constant,
                dict(zip([names[j] for j in one.parts], one.coefficients.tolist(), strict=True)),
            )
            for one in (carried.combinations if carried else ())
        }

    def score_samples(self, X: Any) -> np.ndarray:
        """Return ``log p(x)`` of each row, normalised and in the data's own units; -inf outside the support.

        X is a table or a source of row blocks, which are read one at a time. With carried columns it is the
        log density of the other columns, and -inf where a carried cell disagrees with its combination.
        """
        check_is_fitted(self, "density_")
        blocks = self._blocks(X, None)
        if blocks is None:
            return super().score_samples(X)
        return np.concatenate([DensityEstimator.score_samples(self, block) for block in blocks])

    def score(self, X: Any, y: object = None, sample_weight: ArrayLike | None = None) -> float:
        """Return the (weighted) mean log density of the rows; of row blocks, in constant memory."""
        check_is_fitted(self, "density_")
        blocks = self._blocks(X, None, sample_weight)
        if blocks is None:
            return super().score(X, y, sample_weight)
        return self._mean_score(blocks, weighted=sample_weight is not None)

    def potential(self, X: ArrayLike) -> np.ndarray:
        """Return f at each row: ``log p - log p0 + log Z`` in standardised units."""
        X = self._agreeing_points(X)
        if not isinstance(self.density_, TiltedDensity):
            raise TypeError("this density has no single f: fit with model='kernel'.")
        if np.any(np.isnan(X)):
            raise ValueError("X contains NaN: f is a function of all its columns.")
        return self.density_.potential(X)

    def given(self, known: Mapping[Any, Any], *, draws: int = GIVEN_DRAWS) -> PartialDensity:
        """Return the density of the other columns given values of some, by name or position.

        Its ``log_evidence`` is the log density of the given values, with a standard error; it is computed
        from ``draws`` completions where it is not exact. A value of a carried column is accepted if it
        determines a value of another column; the density is of columns that are not carried."""
        check_is_fitted(self, "density_")
        if not isinstance(known, Mapping) or not known:
            raise ValueError(
                f"given() takes a dict, such as {{{next(iter(self.columns_))!r}: ...}}; got {known!r}."
            )
        row = self._row(known)
        return self._partial(row, np.flatnonzero(np.isnan(row)).tolist(), draws)

    def marginal(self, columns: Any, *, draws: int = GIVEN_DRAWS) -> PartialDensity:
        """Return the density of some columns, by name or position."""
        check_is_fitted(self, "density_")
        kept = [self._position(column) for column in listed(columns)]
        return self._partial(np.full(len(self._columns.kinds), np.nan), kept, draws)

    def _partial(self, row: np.ndarray, kept: list[int], draws: int) -> PartialDensity:
        def framed(cells: np.ndarray, kept: Sequence[int]) -> Any:
            columns = self._columns
            places = list(kept) if columns.places is None else [columns.places[j] for j in kept]
            return self._codec.rows(cells, self._output, [columns.labels[j] for j in kept], places)

        return PartialDensity(self.density_, self._columns, row, kept, draws=draws, framed=framed)

    def conditionals(self, X: ArrayLike, *, draws: int = ROW_DRAWS, random_state: Seed = 0) -> CompletedRows:
        """Return completions of the rows of X: the missing cells given the others."""
        check_is_fitted(self, "density_")
        points = self._read_all(X)
        inside = self._columns.inside(self._dropped(points))
        if not np.all(inside):
            raise ValueError(f"row {int(np.argmin(inside))} has cells that lie outside the support.")
        return CompletedRows(self.density_, self._codec, points, draws, random_state)

    def _dropped(self, rows: np.ndarray) -> np.ndarray:
        """Return the modelled columns; raise where a carried cell is known and several of its parts are
        not."""
        carried = self._codec.carried
        if carried is not None and np.any(open_rows := carried.undetermined(rows)):
            raise ValueError(
                f"row {int(np.argmax(open_rows))} has a value of a carried column "
                f"({', '.join(map(str, self.carried_))}) that depends on several unknown columns: leave it "
                "out, or state all but one of them (see carried_)."
            )
        return self._codec.dropped(rows)

    def _position(self, column: Any) -> int:
        """Return the position of a column among those that are modelled."""
        place = position_of(column, self._codec.columns)
        if self._codec.carried is not None and place in self._codec.carried.places:
            raise ValueError(
                f"column {column!r} is carried along and has no density of its own: ask for the columns of "
                "which it is a combination (see carried_)."
            )
        return position_of(place if self._names is None else list(self.columns_)[place], self._columns)

    def impute(
        self, X: ArrayLike, n_samples: int = 1, random_state: Seed = None, *, draws: int = ROW_DRAWS
    ) -> Any:
        """Return the rows of X with their missing cells drawn given the others.

        One sample is a table like X; several are of shape (rows, n_samples, columns).
        """
        rows = self.conditionals(X, draws=draws, random_state=0).sample(n_samples, random_state)
        if n_samples > 1:
            return rows
        return self._codec.rows(rows[:, 0], self._output, self._names or [], like=X)

    def explain(
        self, X: ArrayLike, *, coverage: float = 0.9, draws: int = ROW_DRAWS, random_state: Seed = 0
    ) -> Explanation:
        """Return how much each column makes each row unusual, and the value that would have been usual.

        The surprise of a column is the log density (nats) that the row lacks because of it, given the other
        cells. Usual values are conditional medians with an interval of this coverage, by ``draws`` weighted
        completions. ``frame()`` of the result is a table, ``plot(row)`` a figure."""
        points = self._agreeing_points(X)
        check_share("coverage", coverage)
        score = lambda rows: self._log_density(self.density_, rows)
        options: Any = {"coverage": coverage, "draws": whole("draws", draws, 1)}
        found = explain_cells(
            self.density_, self._columns, points, score, key=key_from(random_state), **options
        )
        backend = getattr(layout_of(X), "backend", "pyarrow")
        return Explanation(self._columns, points, *found, self._p_values_or_nan(X, None), backend)

    def mutual_information(
        self,
        a: Any,
        b: Any,
        given: Any = (),
        *,
        rows: int = 1000,
        draws: int = ROW_DRAWS,
        random_state: Seed = 0,
    ) -> Estimate:
        """Return the mutual information of columns a and b, given others, in nats, with a standard error.

        Columns are names or positions, or lists of them. The value is that of the fitted density; the error
        is that of the mean over ``rows`` draws, without the error of the fit."""
        check_is_fitted(self, "density_")
        sets = self._disjoint(a, b, given)
        options: Any = {"rows": whole("rows", rows, 2), "draws": whole("draws", draws, 1)}
        return mutual_information(self.density_, *sets, key=key_from(random_state), **options)

    def independence_test(
        self,
        X: ArrayLike,
        a: Any,
        b: Any,
        given: Any = (),
        *,
        copies: int = 199,
        draws: int = ROW_DRAWS,
        random_state: Seed = 0,
    ) -> Independence:
        """Test whether columns a and b of the rows X are independent given others.

        The conditional randomisation test, with the log density as its statistic: column a is drawn given
        the others ``copies`` times. Use rows that the model has not seen. Rows that lack one of the columns
        are left out."""
        points, sets = self._agreeing_points(X), self._disjoint(a, b, given)
        points = points[~np.isnan(points[:, sum(sets, [])]).any(axis=1)]
        options: Any = {"copies": whole("copies", copies, 1), "draws": whole("draws", draws, 1)}
        return independence_test(self.density_, points, *sets, key=key_from(random_state), **options)

    def copying(self, X: ArrayLike, n_samples: int | None = None, random_state: Seed = 0) -> Copying:
        """Return whether draws repeat training rows, and whether scores give away who was one of them.

        X are held-out rows. There are as many draws as held-out rows unless ``n_samples`` says otherwise.
        The result promises no differential privacy."""
        points, (own,) = self._agreeing_points(X), self._training_columns()
        if not len(points):
            raise ValueError("copying needs at least one held-out row.")
        count = len(points) if n_samples is None else whole("n_samples", n_samples, 1)
        draws = self.density_.sample(count, key=key_from(random_state))
        # A draw has no missing cells: it gets those of a held-out row.
        draws = np.where(np.isnan(points[np.arange(count) % len(points)]), np.nan, draws)
        encode = InputScaling.of(np.concatenate([own, points]), self._columns.kinds, inputs=True).to_model
        scored = (self._log_density(self.density_, rows) for rows in (own, points))
        return measure_copying(encode(own), encode(points), encode(draws), *scored)

    def _disjoint(self, *sets: Any) -> list[list[int]]:
        """Return the positions of sets of columns that have none in common."""
        places = [[self._position(column) for column in listed(() if one is None else one)] for one in sets]
        every = sum(places, [])
        if len(set(every)) < len(every) or not places[0] or not places[1]:
            raise ValueError("a, b and given must be different columns, at least one each for a and b.")
        return places

    def _row(self, known: Mapping[Any, Any]) -> np.ndarray:
        columns = self._codec.columns
        row = np.full(len(columns.kinds), np.nan)
        for column, cell in known.items():
            place = position_of(column, columns)
            if not np.isnan(row[place]):
                raise ValueError(f"column {column!r} is given twice: by its name and by its position.")
            one = TableSchema((columns.kinds[place],), (str(column),))
            row[place] = one.encode([np.array([cell], object)])[0, 0]
            if not one.inside(row[place].reshape(1, 1))[0] or np.isnan(row[place]):
                raise ValueError(f"{cell!r} is not a value of column {column!r}, which is {one.kinds[0]}.")
        row = self._dropped(row[None])[0]
        if np.any(np.isinf(row)):
            raise ValueError(f"{known!r} disagrees with the combinations of carried columns (see carried_).")
        return row


class ConditionalKernelExpFamily(KernelModel, ConditionalEstimator):
    r"""Density estimator for :math:`p(y | x)`.

    Kernel exponential family :math:`p_0(y) \exp(f(x, y) - A_x(f))` with f in the RKHS of the product kernel
    :math:`k(x, x') k(y, y')`, by penalised maximum likelihood, and chains of one-dimensional kernel
    exponential families whose parameters are functions of x.

    Parameters
    ----------
    model : {"auto", "kernel", "chain"}
        The candidates. "auto" chooses by the number of rows and columns, and stacks several by held-out log
        density (see ``candidates_``).
    kernel : str or Kernel
        Settings of the kernel model: a ``Kernel``, or the name of its kernel.
    solver : str or Solver
        How the kernel model finds f. "auto" solves the convex problem, on a grid for y of up to two columns;
        "exact" requires the grid; "dde" is the doubly dual embedding of the paper.
    learned : Learned or None
        Settings of the chain; None is those of ``effort``.
    bounds : pair of float or of arrays of shape (n_targets,), or None
        Lower and upper end of the support of y, in the data's own units. The density is 0 outside.
    columns : dict or None
        The kinds of the columns of X, by name or position: "real", "positive", "integer", "count",
        "category", "bounded:0:1", "periodic:360", "rounded:0.1", "atom:0:positive", or objects such
        as ``Bounded(0, 1)``.
        Text, booleans and categories of a frame are categories; other columns are real unless they are named
        here. See ``docs/mixed-tables.md``.
    target_columns : dict, kind or None
        The kinds of the columns of y; a single kind is that of the only target.
    effort : {"fast", "default", "best"}
        Cost of chains: fewer or more members and epochs. "best" adds a chain in few columns too.
    rows : Rows or None
        Numbers of rows in memory, in the model and in a block; see ``docs/many-rows.md``.
    random_state : int, RandomState or None
        The same seed gives the same result.
    progress : bool or callable
        ``True`` draws a progress bar; a callable gets a ``Report`` after each stage of selection and chunk of
        steps.
    checkpoint : path or None
        A file that is rewritten during training; ``fit`` resumes from it if it exists. A file of
        another ``random_state`` is refused; None then means 0.

    Attributes
    ----------
    density_ : AbstractDensity
        The fitted density.
    candidates_ : list of CandidateScore
        The candidates with their weights in the density and their held-out log densities.
    fits_ : dict of Fitted
        Status, facts and trace of each candidate, by name.
    solution_ : Solution or None
        f, sampler, status and trace of the solver, if a kernel model has a part in the density.
    selection_ : Selection or None
        The selected settings of the kernel model and all trials.
    lengthscale_, rkhs_penalty_, base_, condition_lengthscale_
        The settings of the kernel model, or None.
    columns_, target_columns_ : dict
        The kind of each column, by name or position.
    steps_ : dict
        The step of each column of the density that holds rounded numbers, to which draws are rounded.
    n_features_in_ : int
    n_rows_ : int
        The number of rows of the fit, some of which ``training_data_`` keeps.

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

    def __init__(
        self,
        *,
        model: str = "auto",
        kernel: str | Kernel = "gaussian",
        solver: str | Solver = "auto",
        learned: Learned | None = None,
        bounds: Sequence[ArrayLike] | None = None,
        columns: dict | None = None,
        target_columns: dict | str | AbstractKind | None = None,
        effort: str = "default",
        rows: Rows | None = None,
        random_state: Seed = None,
        progress: bool | Listener = False,
        checkpoint: str | os.PathLike | None = None,
    ) -> None:
        self.model = model
        self.kernel = kernel
        self.solver = solver
        self.learned = learned
        self.bounds = bounds
        self.columns = columns
        self.target_columns = target_columns
        self.effort = effort
        self.rows = rows
        self.random_state = random_state
        self.progress = progress
        self.checkpoint = checkpoint

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: ArrayLike | None = None,
        *,
        time_budget: float | None = None,
    ) -> Self:
        """Fit the density of y given X; y has shape (n,) or (n, p).

        X is a table, or a source of row blocks: the path of a .npy or Parquet file or of a folder of Parquet
        files, an Arrow dataset, a Dask frame, or an iterable of tables that can be read several times. y may
        then name columns of X, or be omitted if the tables come in pairs (X, y). With more rows than
        ``rows.in_memory``, everything but the means of f's features is computed on a uniform sample of that
        many rows (see ``docs/many-rows.md``). A row of weight 2 counts as two equal rows, a row of weight 0
        is left out. ``time_budget`` bounds the seconds of the fit, see ``docs/cost.md``."""
        budget = TimeBudget.of(time_budget)
        with self._fitting() as listener:
            source = self._source(X, y, sample_weight, listener)
            table, targets = source.tables
            self._read_training(table, targets, source.weight)
            self._fit_model(self._training_targets, self._training, source, listener, budget)
            warn_of_uncertain_normaliser(self.density_, self._training)
            self._warn_if_nearly_deterministic()
            self._keep_rows((self.rows or Rows()).kept)
        return self

    def score_samples(self, X: Any, y: Any = None) -> np.ndarray:
        """Return ``log p(y | x)`` of each row, normalised and in the data's own units; -inf outside the
        support.

        X is a table or a source of row blocks, which are read one at a time.
        """
        check_is_fitted(self, "density_")
        blocks = self._blocks(X, y)
        if blocks is None:
            return super().score_samples(X, y)
        return np.concatenate([ConditionalEstimator.score_samples(self, *block) for block in blocks])

    def score(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> float:
        """Return the (weighted) mean of ``log p(y | x)`` over the rows; of row blocks, in constant memory."""
        check_is_fitted(self, "density_")
        blocks = self._blocks(X, y, sample_weight)
        if blocks is None:
            return super().score(X, y, sample_weight)
        return self._mean_score(blocks, weighted=sample_weight is not None)

    @property
    def condition_lengthscale_(self) -> np.ndarray | None:
        """The length scales of the inputs in the kernel model, or None."""
        return None if self._kernel_fit is None else self._kernel_fit.selection.settings.condition_lengthscale

    def _warn_if_nearly_deterministic(self) -> None:
        kernel, chosen = self._kernel, self.rkhs_penalty_
        if kernel.rkhs_penalty is None and chosen is not None and chosen < 2.0 * min(kernel.search.penalties):
            message = (
                "the smallest penalty was selected: the targets are (nearly) a function of the inputs, or "
                "take few values. Their likelihood is unbounded: a high score does not mean a good fit."
            )
            warnings.warn(message, NearlyDeterministicWarning, stacklevel=caller_level())
