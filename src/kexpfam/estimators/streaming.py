"""Fits to more rows than are held: one pass draws a sample, and sums over rows take another."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import equinox as eqx
import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam.caller import caller_level
from kexpfam.data.blocks import Overview, RowBlocks, Rows, beside, look_over, row_blocks, with_targets
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import checked_weights, part_of
from kexpfam.estimators.base import key_from, listening, shown
from kexpfam.estimators.kernel_model import KernelModel, checked_bounds
from kexpfam.integrate.nodes import seed_from
from kexpfam.progress import Listener, Report

__all__ = ["Streamed"]


class Block(NamedTuple):
    """Some rows: X, or X and y, and what they count."""

    tables: tuple[Any, ...]
    weight: np.ndarray | None


class Streamed(KernelModel):
    """An estimator that is fitted to, and scores, rows in blocks as well as tables that are held."""

    rows: Rows | None
    n_rows_: int
    _blocks: RowBlocks | None = None  # while a fit goes on
    _weighted: bool = False

    def fit(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the density to the rows of X, or that of y given X; y has shape (n,) or (n, p), and p(x) ignores it.

        X is a table, or a source of row blocks: the path of a .npy or Parquet file or of a folder of the latter, an Arrow
        dataset, a Dask frame, or anything that yields tables each time it is iterated over; y may then name columns of X, or
        be left out if the tables come in pairs (X, y). With more rows than ``rows.in_memory``, scaling, hints, selection,
        mixtures, centres and learned bases see a uniform sample of that many; means of f's features are over all rows (see
        ``docs/many-rows.md``).

        A row of weight 2 is a row that was seen twice, one of weight 0 is left out; see ``docs/weights.md``.
        """
        settings = self._settings_of_rows()
        blocks = row_blocks(X, settings)
        if blocks is None:
            super().fit(X, y, sample_weight)  # type: ignore[misc]
            self.n_rows_ = len(X) if hasattr(X, "__len__") else len(self._training)
        else:
            self._fit_to(self._paired(blocks, y, sample_weight), settings, weighted=sample_weight is not None)
        self._keep_some(settings.kept)
        return self

    def score_samples(self, X: Any, y: Any = None) -> np.ndarray:
        """Return ``log p(x)``, or ``log p(y | x)``, of each row, normalised and in the data's own units; -inf off the support.

        X is a table or a source of row blocks, as in ``fit``; of the latter, a block is in memory at a time.
        """
        check_is_fitted(self, "density_")
        blocks = row_blocks(X, self._settings_of_rows())
        if blocks is None:
            return self._scored(X, y)
        return np.concatenate([self._scored(*block.tables) for block in self._read(self._paired(blocks, y, None))])

    def score(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> float:
        """Return the mean log density of the rows, by their weights if there are any; of row blocks in constant memory."""
        check_is_fitted(self, "density_")
        blocks = row_blocks(X, self._settings_of_rows())
        if blocks is None:
            return super().score(X, y, sample_weight)  # type: ignore[misc]
        total, count = 0.0, 0.0
        for tables, weight in self._read(self._paired(blocks, y, sample_weight), weighted=sample_weight is not None):
            found = self._scored(*tables)
            counts = np.ones(len(found)) if weight is None else weight
            total += float(np.sum(found[counts > 0.0] * counts[counts > 0.0]))
            count += float(counts.sum())
        return total / count

    @property
    def _effective_rows(self) -> float:
        # Rows that were left out of the model count like those that were kept.
        kept = len(self._training)
        return super()._effective_rows * (self.n_rows_ / kept if kept == self._settings_of_rows().kept else 1.0)

    def _scored(self, X: Any, y: Any = None) -> np.ndarray:
        return super().score_samples(*((X, y) if self.conditional else (X,)))  # type: ignore[misc]

    def _settings_of_rows(self) -> Rows:
        if not isinstance(self.rows, Rows | None):
            raise TypeError(f"rows must be a Rows or None, got {shown(self.rows)}.")
        return self.rows or Rows()

    def _paired(self, blocks: RowBlocks, y: Any, sample_weight: ArrayLike | None) -> RowBlocks:
        """Return blocks of X, of y if that has a part, and of weights if there are any."""
        if self.conditional:
            whole = blocks
            blocks = RowBlocks(lambda: map(self._pair, whole), whole.rows) if y is None else with_targets(whole, y)
        if sample_weight is None:
            return blocks
        weight = checked_weights(sample_weight, len(np.atleast_1d(np.asarray(sample_weight))))
        return RowBlocks(lambda: beside(blocks, weight, "sample_weight"), blocks.rows)

    def _pair(self, block: Any) -> Any:
        if not isinstance(block, tuple) or len(block) != 2:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        return block

    def _read(self, blocks: RowBlocks, *, weighted: bool = False) -> Iterator[Block]:
        for block in blocks:
            parts = block if isinstance(block, tuple) else (block,)
            yield Block(parts[:-1], np.asarray(parts[-1])) if weighted else Block(parts, None)

    def _fit_to(self, blocks: RowBlocks, settings: Rows, *, weighted: bool) -> None:
        """Fit to a sample of the rows, with all of them at hand for what is a sum over rows."""
        seed = seed_from(key_from(self.random_state))
        with listening(self.progress) as listener:
            overview = look_over(blocks, settings.in_memory, seed=seed, report=listener)
        self._check_ranges(overview)
        *tables, weight = overview.sample if weighted else (*overview.sample, None)
        # With few enough rows the sample is all of them.
        self._blocks = blocks if overview.rows > settings.in_memory else None
        self._weighted = weighted
        try:
            super().fit(*tables, sample_weight=weight)  # type: ignore[misc]
        finally:
            self._blocks, self._weighted = None, False
        self.n_rows_ = overview.rows

    def _check_ranges(self, overview: Overview) -> None:
        """Raise for what the sample may not show: numbers beyond double precision, and rows outside the bounds."""
        place = 1 if self.conditional else 0
        for low, high in zip(overview.low, overview.high, strict=True):
            bad = np.flatnonzero(np.isinf(low) | np.isinf(high))
            if len(bad):
                raise ValueError(f"Input contains infinity or a value too large for dtype('float64') in column {bad[0]}.")
        ends = np.stack([overview.low[place], overview.high[place]])
        if self.bounds is not None and not np.any(np.isnan(ends)):
            checked_bounds(self.bounds, ends)

    def _samples(self, scaling: Scaling, dims: tuple[int, ...], listener: Listener | None) -> Iterator[Sample] | None:
        return None if self._blocks is None else self._in_model_units(self._blocks, scaling, dims, listener)

    def _in_model_units(
        self, blocks: RowBlocks, scaling: Scaling, dims: tuple[int, ...], listener: Listener | None
    ) -> Iterator[Sample]:
        seen, left_out = 0, 0
        for (X,), weight in self._read(blocks, weighted=self._weighted):
            values = self._validated(X, reset=False)
            # Gaps so rare that the sample has none; a density of tables with gaps is learned, and has no such sum.
            whole = ~np.any(np.isnan(values), axis=1)
            points = scaling.to_model(values[whole])[:, list(dims)]
            yield Sample.unconditional(points, part_of(weight, whole))
            seen, left_out = seen + len(values), left_out + int(np.sum(~whole))
            if listener is not None:
                listener(Report("summing", seen, blocks.rows or 0, {}))
        if left_out:
            message = f"{left_out} of {seen} rows have missing cells, too few for a sample to show any: they are left out."
            warnings.warn(message, UserWarning, stacklevel=caller_level())

    def _keep_some(self, most: int) -> None:
        """Leave ``most`` rows in the model, for pictures and diagnosis.

        A kernel model of p(y | x) has a normaliser per row, so that its diagnosis needs them all; so does that of an f whose
        space the solver chose, since no mean of its features is kept.
        """
        problem, solution, rows = self._problem, self.solution_, len(self._training)
        whole = problem is not None and (
            problem.mean_feature is None or solution is None or problem.within(solution.tilt.space).mean_feature is None
        )
        if rows <= most or whole:
            return
        kept = np.sort(np.random.default_rng(seed_from(key_from(self.random_state))).permutation(rows)[:most])
        for name in ("_training", "_training_targets", "_weight"):
            if getattr(self, name, None) is not None:
                setattr(self, name, getattr(self, name)[kept])
        if problem is not None:
            self._problem = problem.trimmed(kept)
        if self.selection_ is not None and self.selection_.held_out is not None:
            self.selection_ = eqx.tree_at(lambda found: found.held_out, self.selection_, None)
