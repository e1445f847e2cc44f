"""The face of a conditional density ``p(y | x)``."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key
from numpy.typing import ArrayLike
from sklearn.utils import RegressorTags, Tags
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.encoding import TableSchema
from kexpfam.data.frames import as_table, framed, layout_of
from kexpfam.data.sample import AnyArray
from kexpfam.data.tables import numbered
from kexpfam.data.weights import counted_mean
from kexpfam.estimators.base import Estimator, Seed, key_from, remembered, whole
from kexpfam.estimators.codec import FEWEST_ROWS, TableCodec, read_targets, refuse_dates
from kexpfam.estimators.derived import GivenDensity
from kexpfam.estimators.messages import central_levels, check_share, checked_levels
from kexpfam.estimators.uses import Explanation
from kexpfam.judge.conformal import Conformal, conformalise
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.explanation import SCORED_DRAWS, explain_target
from kexpfam.judge.pit import coverage_text, density_ranks, pit_measurements
from kexpfam.stacklevel import caller_level

__all__ = ["ConditionalEstimator", "SeenRowsWarning"]

# Draws per row for highest-density regions.
REGION_DRAWS = 200
# A larger share of training rows among the rows of ``calibrate`` raises a warning.
MOST_SEEN = 0.5


class SeenRowsWarning(UserWarning):
    """``calibrate`` was called with training rows; its guarantee needs rows that the model has not seen."""


class ConditionalEstimator(Estimator):
    """Base class of estimators of ``p(y | x)``.

    After ``calibrate(X, y)``, ``quantile``, ``interval``, ``cdf`` and ``in_region`` have conformal coverage
    on rows that are exchangeable with the given ones. ``score_samples``, ``log_prob``, ``sample``,
    ``predict`` and ``given`` do not change."""

    conditional: ClassVar[bool] = True
    _fit: Callable[..., Any]  # to rows that were checked; not needed with a ``fit`` of its own
    _shared: ClassVar[tuple[str, ...]] = (
        *Estimator._shared,
        "_conformal",
        "_training_targets",
        "_flat_targets",
    )
    _target_codec: TableCodec
    _training_targets: np.ndarray
    _flat_targets: bool
    _conformal: Conformal | None = None

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the density of y given X; y has shape (n,) or (n, p).

        A row of weight 2 counts as two equal rows, a row of weight 0 is left out; see ``docs/weights.md``.
        """
        with self._fitting() as listener:
            self._read_training(X, y, sample_weight)
            self._fit(self._training, self._training_targets, listener)
        return self

    def _read_training(self, X: Any, y: Any, sample_weight: ArrayLike | None) -> None:
        """Read the rows of a fit into ``_training`` and ``_training_targets``."""
        self._note_names(X, y)
        rows = self._read(X, reset=True)
        targets = self._read_targets(y, rows, reset=True)
        self._flat_targets = targets.ndim == 1
        targets = targets.astype(np.float64).reshape(len(rows), -1)
        self._training, self._training_targets = self._counted(sample_weight, rows, targets)
        self._conformal = None

    def _read_targets(self, y: Any, rows: np.ndarray, *, reset: bool = False) -> np.ndarray:
        kinds, names = self.get_params(deep=False).get("target_columns"), getattr(self, "target_names_", None)
        return read_targets(self, y, rows, kinds=kinds, reset=reset, names=names)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.estimator_type = "regressor"  # predict returns the mean
        tags.regressor_tags = RegressorTags(poor_score=True)  # score is a log density, not R^2
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    def score_samples(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return ``log p(y | x)`` of each row, normalised and in the data's own units; -inf outside a bounded
        support."""
        X, targets = self._checked_rows(X, y)
        return self._log_density(self.density_, targets, X)

    def log_prob(self, x: Float[AnyArray, "*p"], y: Float[AnyArray, "*d"]) -> Float[Array, ""]:
        """Return ``log p(y | x)`` at one x and y as a pure JAX function, to be jitted, differentiated and
        vmapped.

        It equals ``score_samples`` there. It is computed in float64 and returned in the precision of y.
        """
        check_is_fitted(self, "density_")
        return self.density_.log_prob(y, x)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the (weighted) mean of ``log p(y | x)`` over the rows."""
        return counted_mean(self.score_samples(X, y), sample_weight)

    def sample(
        self,
        X: ArrayLike,
        n_samples: int = 1,
        random_state: Seed = None,
        *,
        refine: int = 0,
        exact: bool = False,
    ) -> Any:
        """Return draws of y for each row of X, of shape (n, n_samples), or (n, n_samples, p) if y has
        columns.

        For a frame X they are a frame of n times n_samples rows; its column "row" is the position of the row
        of X. ``refine=k`` chooses among several draws by importance weight and moves the choice by k steps of
        HMC, which leaves the density invariant.

        Approximate are the transports of ``solver="dde"`` and of the paper's solvers, and the mixture network
        of a kernel model of three or more targets. By how much is ``diagnose().sampler_kl``, the divergence
        of sampler and density in nats; the page *Choosing settings* has it for every solver on the two moons.
        ``exact=True`` draws from the cells of a grid, or by HMC where there is none."""
        features = self._checked_features(X)
        drawn = self._draws(self.density_, n_samples, random_state, refine, features, exact=exact)
        draws = self._decoded(drawn)
        frame = self._target_codec.draws_beside(X, draws, self._output, self._target_names)
        if frame is not None:
            return frame
        return draws[:, :, 0] if self._flat_targets else draws

    def predict(self, X: ArrayLike) -> Any:
        """Return the conditional mean of y, the most probable label of a category; a series or frame for a
        frame X, if y was one."""
        features = self._checked_features(X)
        mean = self._decoded(self.density_.mean(features), whole=False)
        values = mean[:, 0] if self._flat_targets else mean
        return self._target_codec.beside(X, values, self._output, self._target_names)

    def given(self, x: ArrayLike) -> GivenDensity:
        """Return the density of y under one condition."""
        row = self._checked_features(self._one_row(x))
        if len(row) != 1:
            raise ValueError(
                f"given() takes one condition of {self.n_features_in_} numbers, got {len(row)} of them."
            )
        return self._given(row[0])

    def _given(self, row: np.ndarray) -> GivenDensity:
        """Return the density under a condition that is numbers."""
        features = self._names or numbered(len(row))
        cells = self._codec.decode(row[None])[0]
        given = GivenDensity(self.density_.given(row), self._flat_targets, self._draws, self._framed_targets)
        given.condition = {str(name): value for name, value in zip(features, cells, strict=True)}
        given.target_names = getattr(self, "target_names_", None)
        given.target_kinds = self._target_codec.columns.kinds
        return given

    def _framed_targets(self, draws: np.ndarray) -> Any:
        """Return draws of y as cells, in a series or frame if y was one and no other output was chosen."""
        cells = self._decoded(draws)
        cells = cells[:, 0] if self._flat_targets else cells
        return self._target_codec.rows(cells, self._output, self._target_names)

    @property
    def training_data_(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows the model was fitted to: X and y."""
        check_is_fitted(self, "density_")
        return self._training, self._training_targets[:, 0] if self._flat_targets else self._training_targets

    @property
    def _target_names(self) -> list[str]:
        width = self._training_targets.shape[1]
        return getattr(self, "target_names_", None) or (["y"] if width == 1 else numbered(width, "y"))

    def _one_row(self, x: Any) -> Any:
        """Return a condition as a table of one row; a dictionary or pandas row is put in the order of the
        columns."""
        layout = layout_of(x)
        if layout is not None and not layout.series:
            return x
        named = x if isinstance(x, Mapping) else dict(x) if hasattr(x, "index") and layout is not None else {}
        if (
            named
            and self._names is not None
            and (isinstance(x, Mapping) or set(map(str, named)) & set(self._names))
        ):
            cells = {str(name): cell for name, cell in named.items()}
            if missing := [name for name in self._names if name not in cells]:
                raise ValueError(f"given() needs {', '.join(self._names)}; missing: {', '.join(missing)}.")
            x = [cells[name] for name in self._names]
            if self._codec.layout is not None:
                return framed([np.array([cell]) for cell in x], self._codec.layout)
        if isinstance(x, Mapping):
            raise ValueError(
                "the model was fitted without column names: pass the condition as a list of numbers."
            )
        row = np.asarray(as_table(x))
        refuse_dates(row, "x")
        return np.atleast_2d(row.astype(float))

    def _checked_features(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self, "density_")
        rows = self._read(X)
        unexpected = np.isnan(rows).any(axis=0) & ~np.isnan(self._training).any(axis=0)
        if np.any(unexpected):
            names = [str(name) for name, bad in zip(self._columns.shown, unexpected, strict=True) if bad]
            raise ValueError(
                f"Input X contains NaN in column(s) {', '.join(names)}, which had none during fit."
            )
        return rows

    def _checked_rows(self, X: ArrayLike, y: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
        rows = self._checked_features(X)
        targets = self._read_targets(y, rows)
        targets = np.asarray(targets, dtype=np.float64).reshape(len(rows), -1)
        width = self._training_targets.shape[1]
        if targets.shape[1] != width:
            raise ValueError(f"y has {targets.shape[1]} columns, but the model was fitted to {width}.")
        return rows, targets

    def _training_columns(self) -> list[np.ndarray]:
        return [self._training, self._training_targets]

    def _scored_rows(self, X: Any, y: Any) -> tuple[np.ndarray, ...]:
        return self._checked_rows(X, y)[::-1]

    def quantile(self, X: ArrayLike, levels: ArrayLike) -> np.ndarray:
        """Return conditional quantiles at each level, of shape (n, n_levels), or (n,) for a single number;
        1-D y only.

        After ``calibrate`` with n rows y lies below each with its probability, up to 1 / (n + 1).
        """
        X, wanted = self._checked_features(X), checked_levels(levels)
        if self._conformal is not None:
            wanted = self._conformal.level(wanted)
        found = self.density_.quantile(wanted, X)
        return found[:, 0] if np.ndim(levels) == 0 else found

    def interval(self, X: ArrayLike, coverage: float = 0.9) -> np.ndarray:
        """Return the central interval that holds y with this probability, of shape (n, 2); 1-D y only.

        After ``calibrate`` with n rows the probability is at least that, and less than 2 / (n + 1) more; with
        too few rows for the coverage the interval is unbounded."""
        levels = central_levels(coverage)
        if self._conformal is None:
            return self.quantile(X, levels)
        low, high = self._conformal.ends(coverage)
        tiny = np.finfo(float).eps
        found = self.density_.quantile(np.clip([low, high], tiny, 1.0 - tiny), self._checked_features(X))
        # The density has no mass beyond its levels 0 and 1, but the next target may lie there.
        return np.where([low > 0.0, high < 1.0], found, [-np.inf, np.inf])

    def cdf(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return ``P(Y <= y | x)`` of each row; 1-D y only. After ``calibrate`` its values are uniform, up to
        1 / (n + 1)."""
        X, targets = self._checked_rows(X, y)
        with np.errstate(over="ignore"):  # a point too far out for the arithmetic is at infinity
            levels = self.density_.cdf(targets, X)
        return levels if self._conformal is None else self._conformal.cdf(levels)

    def in_region(self, X: ArrayLike, y: ArrayLike, level: float = 0.9) -> np.ndarray:
        """Return whether each y lies in the highest-density region of this probability under its x; y of any
        width.

        A point is in the region if draws of the density have a higher density than it with at most this
        probability, estimated from 200 draws per row. After ``calibrate`` with n rows y lies in the region
        with at least this probability."""
        check_share("level", level)
        X, targets = self._checked_rows(X, y)
        draws, threshold = REGION_DRAWS, level
        if self._conformal is not None:
            draws, threshold = self._conformal.draws, self._conformal.threshold(level)
        return density_ranks(self.density_, X, targets, draws=draws, key=jr.key(0)) <= threshold

    def explain(
        self, X: ArrayLike, y: ArrayLike, *, coverage: float = 0.9, random_state: Seed = 0
    ) -> Explanation:
        """Return how unusual each y is under its x, and the value that would have been usual; 1-D y only.

        The surprise is the log density (nats) that y lacks compared with draws under x. The usual value is
        the conditional median, with the interval of this coverage."""
        check_share("coverage", coverage)
        rows, targets = self._checked_rows(X, y)
        if targets.shape[1] > 1 or self._target_codec.columns.kinds[0].categorical:
            raise ValueError("explain is for a single numeric target.")
        draws = self.density_.sample(SCORED_DRAWS, rows, key=key_from(random_state))
        score = lambda values: self._log_density(self.density_, values, rows)
        quantile = lambda levels: self.density_.quantile(np.asarray(levels), rows)
        found = explain_target(quantile, score, targets, draws, coverage)
        columns = TableSchema(self._target_codec.columns.kinds, tuple(self._target_names))
        backend = getattr(layout_of(X), "backend", "pyarrow")
        return Explanation(columns, targets, *found, self._p_values_or_nan(X, y), backend)

    def calibrate(
        self,
        X: ArrayLike | None,
        y: ArrayLike | None = None,
        *,
        draws: int = REGION_DRAWS,
        random_state: Any = 0,
    ) -> Self:
        """Adjust quantiles, intervals, distribution functions, regions and p-values on held-out rows; return
        the estimator.

        Split conformal prediction: if these rows and the next one are exchangeable, intervals and regions
        contain the next y with at least their nominal probability, on average over x. ``conformal_`` holds
        the result. ``draws`` is the number of draws per row for regions. ``calibrate(None)`` and a new fit
        undo it."""
        self._diagnosis = None
        if X is None:
            self._conformal = self._calibrated = None
            return self
        X, targets = self._checked_rows(X, y)
        if len(X) < FEWEST_ROWS:
            raise ValueError(f"calibrate needs at least {FEWEST_ROWS} rows, got {len(X)}.")
        draws = whole("draws", draws, 1)
        self._warn_of_seen(X, targets)
        key = key_from(random_state)
        self._conformal = conformalise(self.density_, X, targets, draws=draws, key=key)
        self._calibrate_scores(targets, X)
        return self

    @property
    def conformal_(self) -> Conformal:
        """The result of ``calibrate``: its rows, and the coverage of intervals or regions before and
        after."""
        if self._conformal is None:
            raise AttributeError("call calibrate(X, y) first, with rows that the model has not seen.")
        return self._conformal

    @remembered
    def diagnose(
        self,
        X: ArrayLike | None = None,
        y: ArrayLike | None = None,
        random_state: Seed = 0,
        *,
        settings: Judgement | None = None,
    ) -> Diagnosis:
        """Return measurements of the quality of the fit; with held-out X and y, of its calibration too."""
        check_is_fitted(self, "density_")
        key, settings = key_from(random_state), Judgement.of(settings)
        return self._diagnosed(self._calibration(X, y, settings=settings, key=key), settings, key)

    def _calibration(
        self,
        X: ArrayLike | None,
        y: ArrayLike | None,
        *,
        settings: Judgement,
        key: Key[Array, ""],
    ) -> list[Measurement]:
        """Return measurements on held-out rows, if there are any, and those of ``calibrate``."""
        found: list[Measurement] = []
        conformal = self._conformal
        if X is not None:
            X, targets = self._checked_rows(X, y)
            found = pit_measurements(self.density_, X, targets, settings=settings, key=key)
            if conformal is not None:
                shares = conformal.coverage(self.density_, X, targets, key=key)
                text = coverage_text(shares)
                found.append(
                    Measurement("repaired_coverage", shares, label="coverage once repaired", text=text)
                )
        return found if conformal is None else [*found, *conformal.measurements()]

    def _warn_of_seen(self, X: np.ndarray, targets: np.ndarray) -> None:
        trained = {row.tobytes() for row in np.concatenate([self._training, self._training_targets], axis=1)}
        seen = np.mean([row.tobytes() in trained for row in np.concatenate([X, targets], axis=1)])
        if seen > MOST_SEEN:
            message = f"{seen:.0%} of these rows are training rows: calibrate needs held-out rows."
            warnings.warn(message, SeenRowsWarning, stacklevel=caller_level())
