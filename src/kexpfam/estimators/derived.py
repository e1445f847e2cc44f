"""Densities derived from a fitted one: under one condition, of some columns given others, and completed
rows."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from kexpfam.data.encoding import TableSchema, columns_of
from kexpfam.data.frames import as_table, layout_of
from kexpfam.data.kinds import AbstractKind
from kexpfam.data.sample import AnyArray
from kexpfam.estimators.base import Seed, key_from, whole
from kexpfam.estimators.codec import TableCodec
from kexpfam.estimators.messages import central_levels, checked_levels
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.density import Estimate
from kexpfam.model.distributions import scores
from kexpfam.model.partial import Completions, completed, log_evidence, warn_of_few_draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "GIVEN_DRAWS",
    "ROW_DRAWS",
    "CompletedRows",
    "GivenDensity",
    "PartialDensity",
    "listed",
    "position_of",
]

# Completions of one known row, of each row whose marginal density is computed, and of each row of a table.
GIVEN_DRAWS, MARGINAL_DRAWS, ROW_DRAWS = 8192, 512, 512


class GivenDensity:
    """``p(y | x)`` at one x; ``condition`` is x by the names of its columns.

    ``framed`` puts draws of y in the container of the estimator's output."""

    condition: dict[str, Any] | None = None
    target_names: list[str] | None = None
    target_kinds: Sequence[AbstractKind] = ()

    def __init__(
        self,
        density: Any,
        flat: bool,
        draws: Callable[..., np.ndarray],
        framed: Callable[[np.ndarray], Any],
    ) -> None:
        self.density, self._flat, self._draws, self._framed = density, flat, draws, framed

    def __repr__(self) -> str:
        names = ", ".join(self.target_names or ["y"])
        return f"<density of {names} given {_assigned(self.condition or {})}>"

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

    def sample(self, n_samples: int = 1, random_state: Seed = None, *, refine: int = 0) -> Any:
        """Return draws of y, of shape (n_samples,) or (n_samples, p); a series or frame if y was one."""
        return self._framed(self.encoded(n_samples, random_state, refine=refine))

    def encoded(self, n_samples: int, random_state: Seed = None, *, refine: int = 0) -> np.ndarray:
        """Return draws as numbers, labels as codes, of shape (n_samples, p)."""
        return self._draws(self.density, n_samples, random_state, refine)

    def cdf(self, y: ArrayLike) -> np.ndarray:
        """Return ``P(Y <= y | x)`` at each y; one target only."""
        points = check_array(as_table(y), dtype=np.float64, ensure_2d=False, input_name="y")
        return self.density.cdf(points.reshape(-1, 1))

    def quantile(self, levels: ArrayLike) -> Any:
        """Return the quantile at each level, or at a single one; one target only."""
        found = self.density.quantile(checked_levels(levels))[0]
        return found if np.ndim(levels) else found[0]

    def interval(self, coverage: float = 0.9) -> np.ndarray:
        """Return the two ends of the central interval with this probability; one target only."""
        return self.quantile(central_levels(coverage))

    def mean(self) -> Any:
        """Return the mean of y, a number or an array of shape (p,); the most probable label of a category."""
        mean = TableSchema(tuple(self.target_kinds)).decode(self.density.mean(), whole=False)[0]
        return mean[0] if self._flat else mean

    def plot(self, **kwargs: Any) -> "Figure":
        """Return a figure: the density of a one-dimensional y, draws of the first two columns of a wider
        one."""
        from kexpfam import plot  # matplotlib is slow to import

        return plot.plot_given(self, **kwargs)


def _assigned(values: dict[str, Any]) -> str:
    """Return names and values as text, numbers of NumPy like those of Python."""
    plain = {name: one.item() if isinstance(one, np.generic) else one for name, one in values.items()}
    return ", ".join(f"{name}={one!r}" for name, one in plain.items())


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
        framed: Callable[[np.ndarray, Sequence[int]], Any] = lambda draws, kept: draws,
    ):
        self.density, self.columns, self.kept = density, columns, tuple(kept)
        self._given, self._count, self._framed = given, whole("draws", draws, 1), framed
        if not self.kept or len(set(self.kept)) < len(self.kept):
            raise ValueError(f"name one or more different columns; got {self.names}.")
        self.log_evidence = Estimate(0.0, 0.0, np.inf)
        if not np.all(np.isnan(given)):
            (self.log_evidence,) = self._completions(key_from(0)).evidence()
            if self.log_evidence.value == -np.inf:
                raise ValueError("the given values have density 0: nothing has a density given them.")
            warn_of_few_draws([self.log_evidence])

    @property
    def names(self) -> list[str]:
        """Return the names of the columns that the density is of."""
        return [self.columns.labels[j] for j in self.kept]

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Return the log density of each row of the columns in ``names``, in their order."""
        values = self._read(X)
        inside = self._own.inside(values)
        rows = np.tile(self._given, (len(values), 1))
        rows[:, self.kept] = values
        found = np.full(len(rows), -np.inf)
        if np.any(inside):
            joint = log_evidence(self.density, rows[inside], MARGINAL_DRAWS, key=key_from(1))
            found[inside] = joint - self.log_evidence.value
        return found

    def __repr__(self) -> str:
        known = np.flatnonzero(~np.isnan(self._given)).tolist()
        names, cells = list(self.columns.labels), self.columns.decode(self._given[None])[0]
        given = _assigned({names[j]: cells[j] for j in known})
        return f"<density of {', '.join(self.names)}{f' given {given}' if known else ''}>"

    def sample(self, n_samples: int = 1, random_state: Seed = None) -> Any:
        """Return draws of the columns in ``names``, of shape (n_samples, columns); a frame if the model was
        fitted to one."""
        key, count = key_from(random_state), whole("n_samples", n_samples, 1)
        rng = np.random.default_rng(seed_from(key))
        draws = self._completions(key, at_least=count).resampled(count, rng)[0]
        return self._framed(self._own.decode(draws[:, self.kept]), self.kept)

    def cdf(self, values: ArrayLike) -> np.ndarray:
        """Return ``P(X <= x)`` of a single column of numbers at each value, by weighted draws."""
        draws, levels = self._ordered()
        points = self._read(values)[:, 0]
        if np.any(np.isnan(points)):
            raise ValueError("the values contain NaN.")
        place = np.searchsorted(draws, points, side="right")
        return np.concatenate([[0.0], levels])[place]

    def interval(self, coverage: float = 0.9) -> np.ndarray:
        """Return the two ends of the central interval of a single column with this probability."""
        return self.quantile(central_levels(coverage))

    def mean(self) -> np.ndarray:
        """Return the mean of each column in ``names``, the most probable label of a category."""
        found = self._completions(key_from(0))
        shares = np.exp(found.log_weights - found.log_weights.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        kinds = zip(self.kept, self._own.kinds, strict=True)
        means = [kind.centre(found.rows[:, :, j], shares)[0] for j, kind in kinds]
        return self._own.decode(np.array([means]), whole=False)[0]

    def quantile(self, levels: ArrayLike) -> Any:
        """Return the quantiles of a single column of numbers at each level, by weighted draws."""
        draws, known = self._ordered()
        place = np.searchsorted(known, checked_levels(levels))
        quantiles = draws[np.minimum(place, len(draws) - 1)]
        return quantiles if np.ndim(levels) else quantiles[0]

    def _ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """Return draws of a single column of numbers in order, and their distribution function."""
        if len(self.kept) != 1 or self._own.kinds[0].categorical:
            raise ValueError(
                f"quantiles need one numeric column: take marginal([...]) of {', '.join(self.names)} first."
            )
        found = self._completions(key_from(0))
        values = found.rows[0, :, self.kept[0]]
        order = np.argsort(values)
        shares = np.exp(found.log_weights[0] - found.log_weights[0].max())[order]
        return values[order], np.cumsum(shares) / shares.sum()

    def marginal(self, columns: Any) -> "PartialDensity":
        """Return the density of some of the columns, under the same condition."""
        columns = listed(columns)
        kept = [position_of(column, self.columns) for column in columns]
        for column, place in zip(columns, kept, strict=True):
            if place not in self.kept:
                names = ", ".join(self.names)
                raise ValueError(f"there is no column {column!r} here: the density is of {names}.")
        options: Any = {"draws": self._count, "framed": self._framed}
        return PartialDensity(self.density, self.columns, self._given, kept, **options)

    def plot(self, n_samples: int = 2000, random_state: Seed = 0) -> "Figure":
        """Return a figure of draws, a panel for each column."""
        from kexpfam import plot  # matplotlib is slow to import

        draws = self._completions(key_from(random_state)).resampled(n_samples, np.random.default_rng(0))[0]
        return plot.plot_columns(draws[:, self.kept], None, self._own, self.names)

    @property
    def _own(self) -> TableSchema:
        return self.columns.part(self.kept)

    def _read(self, X: Any) -> np.ndarray:
        """Return rows as numbers; columns of a frame are found by name if the model has names."""
        layout, table, width = layout_of(X), as_table(X), len(self.kept)
        cells = columns_of(table if layout and not layout.series else _rows(table, width))
        if layout and not layout.series and self.columns.names is not None:
            if missing := [name for name in self.names if name not in layout.texts]:
                raise ValueError(
                    f"X has no column {missing[0]!r}: the density is of {', '.join(self.names)}."
                )
            cells = [cells[layout.texts.index(name)] for name in self.names]
        if len(cells) != width:
            raise ValueError(f"X has {len(cells)} columns, but the density is of {', '.join(self.names)}.")
        return self._own.encode(cells, unknown=True)

    def _completions(self, key: Any, *, at_least: int = 1) -> Completions:
        return completed(self.density, self._given[None], max(self._count, at_least), key=key)


class CompletedRows:
    """Rows of which some cells are known: what the others may be, row by row.

    ``log_evidence`` is the log density of what is known of each row, ``standard_errors`` its errors,
    ``effective_draws`` how many draws the completions of each row are worth."""

    def __init__(
        self, density: Any, codec: TableCodec, values: np.ndarray, draws: int, random_state: Seed
    ) -> None:
        self.columns, self._key, self._known = codec.columns, key_from(random_state), ~np.isnan(values)
        points = codec.dropped(values)
        completions = completed(density, points, whole("draws", draws, 1), key=self._key)
        if codec.carried is not None:
            # Carried cells are combinations of rounded draws, and known ones are kept.
            drawn = np.where(
                np.isnan(points)[:, None], codec.modelled.rounded(completions.rows), completions.rows
            )
            rows = np.where(self._known[:, None], values[:, None], codec.restored(drawn))
            completions = completions._replace(rows=rows)
        self._completions = completions
        found = np.array([tuple(one) for one in self._completions.evidence()])
        self.log_evidence, self.standard_errors, self.effective_draws = found.T
        if np.any(impossible := self.log_evidence == -np.inf):
            raise ValueError(f"the known cells of row {int(np.argmax(impossible))} have density 0.")

    def sample(self, n_samples: int = 1, random_state: Seed = None) -> np.ndarray:
        """Return whole rows, (rows, n_samples, columns): known cells as they are, the others drawn."""
        rng = np.random.default_rng(seed_from(key_from(random_state)))
        rows = self._completions.resampled(whole("n_samples", n_samples, 1), rng)
        known = dataclasses.replace(self.columns, roundings=()).decode(rows)
        return np.where(self._known[:, None], known, self.columns.decode(rows))

    def quantile(self, levels: ArrayLike, column: Any) -> np.ndarray:
        """Return the quantiles of one column of numbers in every row, (rows, levels)."""
        place, wanted = position_of(column, self.columns), checked_levels(levels)
        if self.columns.kinds[place].categorical:
            raise ValueError("labels have no quantiles; use sample instead.")
        return self._completions.quantile(wanted, place)


def _rows(table: Any, width: int) -> np.ndarray:
    """Return an array of rows; one dimension holds the rows of a single column."""
    rows = np.asarray(table, object)
    return rows.reshape(-1, 1) if rows.ndim < 2 and width == 1 else np.atleast_2d(rows)


def listed(columns: Any) -> list[Any]:
    """Return one or more columns, by name or position, as a list."""
    several = isinstance(columns, Iterable) and not isinstance(columns, str)
    return list(columns) if several else [columns]


def position_of(column: Any, columns: TableSchema) -> int:
    """Return the position of a column that is named, or given by its position."""
    shown = list(columns.shown)
    if not isinstance(column, bool | np.bool_):
        if column in shown:
            return shown.index(column)
        places = columns.places or range(len(shown))
        if isinstance(column, int | np.integer) and column in places:
            return places.index(int(column))
    raise ValueError(f"there is no column {column!r}: the columns are {', '.join(map(str, shown))}.")
