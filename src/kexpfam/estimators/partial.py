"""Any columns of a joint density given any others, as people call it: densities of some columns, and rows with gaps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.encoding import Columns
from kexpfam.estimators.base import Seed, key_from, whole
from kexpfam.estimators.reading import TableReader
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.density import Estimate
from kexpfam.model.partial import Completions, completed, log_evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AnyGivenAny", "CompletedRows", "PartialDensity"]

# Completions behind one known row, behind the density of each row of a marginal, and behind each row of a table.
GIVEN_DRAWS, MARGINAL_DRAWS, ROW_DRAWS = 8192, 512, 512


class PartialDensity:
    """The density of some columns given others, whatever is left integrated out.

    ``log_evidence`` is the log density of what is given, with its standard error: all log densities share that error.
    """

    def __init__(
        self,
        density: Any,
        columns: Columns,
        given: np.ndarray,
        kept: Sequence[int],
        *,
        draws: int = GIVEN_DRAWS,
    ):
        self.density, self.columns, self.kept, self._given, self._count = (
            density,
            columns,
            tuple(kept),
            given,
            draws,
        )
        self.log_evidence = Estimate(0.0, 0.0, np.inf)
        if not np.all(np.isnan(given)):
            (self.log_evidence,) = self._completions(key_from(0)).evidence()

    @property
    def names(self) -> list[str]:
        """Return the names of the columns that the density is of."""
        names = self.columns.names or tuple(f"x{j}" for j in range(len(self.columns.kinds)))
        return [names[j] for j in self.kept]

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Return the log density of each row of the columns in ``names``, in their order."""
        values = self._read(X)
        inside = self._own.inside(values)
        rows = np.tile(self._given, (len(values), 1))
        rows[:, self.kept] = values
        found = np.full(len(rows), -np.inf)
        joint = (
            log_evidence(self.density, rows[inside], MARGINAL_DRAWS, key=key_from(1))
            if np.any(inside)
            else 0.0
        )
        found[inside] = joint - self.log_evidence.value
        return found

    def sample(self, n_samples: int = 1, random_state: Seed = None) -> np.ndarray:
        """Return draws of the columns in ``names``, of shape (n_samples, columns)."""
        key, count = key_from(random_state), whole("n_samples", n_samples, 1)
        rng = np.random.default_rng(seed_from(key))
        draws = self._completions(key, at_least=count).resampled(count, rng)[0]
        return self._own.decode(draws[:, self.kept])

    def quantile(self, levels: ArrayLike) -> np.ndarray:
        """Return the quantiles of a single column of numbers at each level, by weighted draws."""
        if len(self.kept) != 1 or self._own.kinds[0].categorical:
            raise ValueError(
                f"quantiles are for one column of numbers: take marginal([...]) of {', '.join(self.names)} first."
            )
        found = self._completions(key_from(0))
        values = found.rows[0, :, self.kept[0]]
        order = np.argsort(values)
        shares = np.exp(found.log_weights[0] - found.log_weights[0].max())[order]
        place = np.searchsorted(np.cumsum(shares) / shares.sum(), np.atleast_1d(np.asarray(levels, float)))
        quantiles = values[order][np.minimum(place, len(values) - 1)]
        return quantiles if np.ndim(levels) else quantiles[0]

    def marginal(self, columns: Sequence[Any]) -> "PartialDensity":
        """Return the density of some of the columns, under the same condition."""
        kept = [_position(column, self.columns) for column in columns]
        if strangers := [
            column for column, place in zip(columns, kept, strict=True) if place not in self.kept
        ]:
            raise ValueError(
                f"there is no column {strangers[0]!r} here: the density is of {', '.join(self.names)}."
            )
        return PartialDensity(self.density, self.columns, self._given, kept, draws=self._count)

    def plot(self, n_samples: int = 2000, random_state: Seed = 0) -> "Figure":
        """Return a figure of draws, a panel for each column."""
        from kexpfam import plot  # matplotlib is slow to import

        draws = self._completions(key_from(random_state)).resampled(n_samples, np.random.default_rng(0))[0]
        return plot.plot_columns(draws[:, self.kept], None, self._own, self.names)

    @property
    def _own(self) -> Columns:
        return Columns(tuple(self.columns.kinds[j] for j in self.kept), tuple(self.names))

    def _read(self, X: Any) -> np.ndarray:
        if hasattr(X, "columns"):
            cells = [np.asarray(X[name]) for name in self.names]
        else:
            cells = list(np.asarray(X, object).reshape(-1, len(self.kept)).T)
        return self._own.encode(cells, unknown=True)

    def _completions(self, key: Any, *, at_least: int = 1) -> Completions:
        return completed(self.density, self._given[None], max(self._count, at_least), key=key)


class CompletedRows:
    """Rows of which some cells are known: what the others may be, row by row.

    ``log_evidence`` is the log density of what is known of each row, ``standard_errors`` its errors, ``effective_draws`` how
    many draws the completions of each row are worth.
    """

    def __init__(
        self, density: Any, columns: Columns, values: np.ndarray, draws: int, random_state: Seed
    ) -> None:
        self.columns, self._key = columns, key_from(random_state)
        self._completions = completed(density, values, draws, key=self._key)
        found = np.array([tuple(one) for one in self._completions.evidence()])
        self.log_evidence, self.standard_errors, self.effective_draws = found.T

    def sample(self, n_samples: int = 1, random_state: Seed = None) -> np.ndarray:
        """Return whole rows, (rows, n_samples, columns): known cells as they are, the others drawn."""
        rng = np.random.default_rng(seed_from(key_from(random_state)))
        return self.columns.decode(self._completions.resampled(whole("n_samples", n_samples, 1), rng))

    def quantile(self, levels: ArrayLike, column: Any) -> np.ndarray:
        """Return the quantiles of one column of numbers in every row, (rows, levels)."""
        place, wanted = _position(column, self.columns), np.atleast_1d(np.asarray(levels, float))
        if self.columns.kinds[place].categorical:
            raise ValueError("labels have no quantiles; use sample instead.")
        values, logs = self._completions.rows[:, :, place], self._completions.log_weights
        order = np.argsort(values, axis=1)
        shares = np.take_along_axis(np.exp(logs - logs.max(axis=1, keepdims=True)), order, axis=1)
        upto, values = (
            np.cumsum(shares, axis=1) / shares.sum(axis=1, keepdims=True),
            np.take_along_axis(values, order, axis=1),
        )
        found = [
            row[np.minimum(np.searchsorted(own, wanted), len(row) - 1)]
            for row, own in zip(values, upto, strict=True)
        ]
        return np.stack(found)


class AnyGivenAny(TableReader):
    """What a joint density can do with some of its columns."""

    def given(self, known: Mapping[Any, Any], *, draws: int = GIVEN_DRAWS) -> PartialDensity:
        """Return the density of the other columns where these have these values, by name or position.

        ``log_evidence`` of it is the log density of what is given, with its standard error; ``draws`` are behind it where it is
        not exact.
        """
        check_is_fitted(self, "density_")
        if not isinstance(known, Mapping) or not known:
            raise ValueError(
                f"given() takes values by column, such as {{{next(iter(self.columns_))!r}: ...}}; got {known!r}."
            )
        row = self._row(known)
        return PartialDensity(
            self.density_, self._columns, row, np.flatnonzero(np.isnan(row)).tolist(), draws=draws
        )

    def marginal(self, columns: Sequence[Any], *, draws: int = GIVEN_DRAWS) -> PartialDensity:
        """Return the density of some columns, by name or position."""
        check_is_fitted(self, "density_")
        kept = [
            _position(column, self._columns)
            for column in ([columns] if isinstance(columns, str | int) else columns)
        ]
        return PartialDensity(
            self.density_, self._columns, np.full(len(self._columns.kinds), np.nan), kept, draws=draws
        )

    def conditionals(self, X: ArrayLike, *, draws: int = ROW_DRAWS, random_state: Seed = 0) -> CompletedRows:
        """Return what missing cells of the rows of X may be, given the others of their row."""
        points = self._checked_points(X)  # type: ignore[attr-defined]
        if not np.all(self._columns.inside(points)):
            raise ValueError(
                f"row {int(np.argmin(self._columns.inside(points)))} has cells that lie outside the support."
            )
        return CompletedRows(self.density_, self._columns, points, draws, random_state)

    def impute(
        self, X: ArrayLike, n_samples: int = 1, random_state: Seed = None, *, draws: int = ROW_DRAWS
    ) -> Any:
        """Return the rows of X with their missing cells drawn given the others.

        One sample is a table like X; several are of shape (rows, n_samples, columns).
        """
        rows = self.conditionals(X, draws=draws, random_state=0).sample(n_samples, random_state)
        return rows if n_samples > 1 else self._rows_like(None, rows[:, 0], self._names or [])

    def _row(self, known: Mapping[Any, Any]) -> np.ndarray:
        row = np.full(len(self._columns.kinds), np.nan)
        for column, cell in known.items():
            place = _position(column, self._columns)
            one = Columns((self._columns.kinds[place],), (str(column),))
            row[place] = one.encode([np.array([cell], object)])[0, 0]
            if not one.inside(row[place].reshape(1, 1))[0] or np.isnan(row[place]):
                raise ValueError(f"{cell!r} is no value of {column!r}, which is {one.kinds[0]}.")
        return row


def _position(column: Any, columns: Columns) -> int:
    """Return the position of a column that is named, or given by its position."""
    shown = list(columns.shown)
    if column in shown:
        return shown.index(column)
    if isinstance(column, int | np.integer) and not isinstance(column, bool) and 0 <= column < len(shown):
        return int(column)
    raise ValueError(f"there is no column {column!r}: the columns are {', '.join(map(str, shown))}.")
