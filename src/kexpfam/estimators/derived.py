"""Densities derived from a fitted one: under one condition, of some columns given others, and completed
rows."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from kexpfam.data.encoding import TableSchema
from kexpfam.data.frames import as_table
from kexpfam.data.kinds import AbstractKind
from kexpfam.data.sample import AnyArray
from kexpfam.estimators.base import Seed, key_from, whole
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.density import Estimate
from kexpfam.model.distributions import scores
from kexpfam.model.partial import Completions, completed, log_evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GIVEN_DRAWS", "ROW_DRAWS", "CompletedRows", "GivenDensity", "PartialDensity", "position_of"]

# Completions of one known row, of each row whose marginal density is computed, and of each row of a table.
GIVEN_DRAWS, MARGINAL_DRAWS, ROW_DRAWS = 8192, 512, 512


class GivenDensity:
    """``p(y | x)`` at one x: score points, draw, and look at it; ``condition`` is x by the names of its
    columns."""

    condition: dict[str, Any] | None = None
    target_names: list[str] | None = None
    target_kinds: Sequence[AbstractKind] = ()

    def __init__(self, density: Any, flat: bool, draws: Callable[..., np.ndarray]) -> None:
        self.density, self._flat, self._draws = density, flat, draws

    def score_samples(self, y: ArrayLike) -> np.ndarray:
        """Return the log density at each y, given with shape (n,) or (n, p)."""
        points = check_array(as_table(y), dtype=np.float64, ensure_2d=False, input_name="y")
        width = self.density.scaling.width
        if points.size % width or (points.ndim > 1 and points.shape[-1] != width):
            raise ValueError(f"y has {points.shape[-1]} columns, but the model was fitted to {width}.")
        return scores(self.density, points.reshape(-1, width))

    def log_prob(self, y: Float[AnyArray, "*d"]) -> Float[Array, ""]:
        """Return the log density at one y as a pure function of JAX."""
        return self.density.log_prob(y)

    def sample(self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0) -> np.ndarray:
        """Return draws of y, of shape (n_samples,) or (n_samples, p)."""
        draws = self._draws(self.density, n_samples, random_state, refine)
        return draws[:, 0] if self._flat else draws

    def plot(self, **kwargs: Any) -> "Figure":
        """Return a figure: the density of a one-dimensional y, draws of the first two columns of a wider
        one."""
        from kexpfam import plot  # matplotlib is slow to import

        return plot.plot_given(self, **kwargs)


class PartialDensity:
    """The density of some columns given others, whatever is left integrated out.

    ``log_evidence`` is the log density of what is given, with its standard error: all log densities share
    that error."""

    def __init__(
        self,
        density: Any,
        columns: TableSchema,
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
                f"quantiles need one numeric column: take marginal([...]) of {', '.join(self.names)} first."
            )
        wanted = np.atleast_1d(np.asarray(levels, float))
        quantiles = self._completions(key_from(0)).quantile(wanted, self.kept[0])[0]
        return quantiles if np.ndim(levels) else quantiles[0]

    def marginal(self, columns: Sequence[Any]) -> "PartialDensity":
        """Return the density of some of the columns, under the same condition."""
        kept = [position_of(column, self.columns) for column in columns]
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
    def _own(self) -> TableSchema:
        return TableSchema(tuple(self.columns.kinds[j] for j in self.kept), tuple(self.names))

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

    ``log_evidence`` is the log density of what is known of each row, ``standard_errors`` its errors,
    ``effective_draws`` how many draws the completions of each row are worth."""

    def __init__(
        self, density: Any, columns: TableSchema, values: np.ndarray, draws: int, random_state: Seed
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
        place, wanted = position_of(column, self.columns), np.atleast_1d(np.asarray(levels, float))
        if self.columns.kinds[place].categorical:
            raise ValueError("labels have no quantiles; use sample instead.")
        return self._completions.quantile(wanted, place)


def position_of(column: Any, columns: TableSchema) -> int:
    """Return the position of a column that is named, or given by its position."""
    shown = list(columns.shown)
    if column in shown:
        return shown.index(column)
    if isinstance(column, int | np.integer) and not isinstance(column, bool) and 0 <= column < len(shown):
        return int(column)
    raise ValueError(f"there is no column {column!r}: the columns are {', '.join(map(str, shown))}.")
