"""Fits to more rows than are held: one pass draws a sample, and sums over rows take another."""

import copy
import warnings
from functools import partial
from typing import Any, Self

import equinox as eqx
import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam import processes
from kexpfam.data.blocks import RowBlocks, Rows, beside, row_blocks, with_targets
from kexpfam.data.passes import Overview, Sums, run_pass, take_overview
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import checked_weights, part_of
from kexpfam.estimators.base import key_from, listening, shown
from kexpfam.estimators.kernel_model import KernelModel, checked_bounds
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.spaces import FeatureSpace
from kexpfam.progress import Listener
from kexpfam.stacklevel import caller_level

__all__ = ["Streamed"]


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
        if processes.place().size > 1 and not isinstance(self.random_state, int | np.integer):
            raise ValueError(
                f"several processes need the same number as random_state, got {shown(self.random_state)}."
            )
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
        whole = self._paired(blocks, y, None)
        return np.concatenate(
            [self._scored(*(block if isinstance(block, tuple) else (block,))) for block in whole]
        )

    def score(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> float:
        """Return the mean log density of the rows, by their weights if there are any; of row blocks in constant memory."""
        check_is_fitted(self, "density_")
        blocks = row_blocks(X, self._settings_of_rows())
        if blocks is None:
            return super().score(X, y, sample_weight)  # type: ignore[misc]
        sums = Sums(partial(self._detached()._score_sums, weighted=sample_weight is not None), blocks.page)
        with listening(self.progress) as listener:
            run_pass(self._paired(blocks, y, sample_weight), sums, stage="scoring", report=listener)
        count, total = sums.total
        return float(total / count)

    def _score_sums(self, parts: tuple[Any, ...], *, weighted: bool) -> np.ndarray:
        """Return what the rows count, and the sum of their log densities."""
        *tables, weight = parts if weighted else (*parts, None)
        found = self._scored(*tables)
        counts = np.ones(len(found)) if weight is None else np.asarray(weight)
        return np.array([counts.sum(), np.sum(found[counts > 0.0] * counts[counts > 0.0])])

    def _detached(self) -> Self:
        """Return the estimator without what stays in this process when a worker is to have it."""
        alone = copy.copy(self)
        alone._blocks, alone.progress, alone.checkpoint = None, False, None
        return alone

    @property
    def _effective_rows(self) -> float:
        # Rows that were left out of the model count like those that were kept.
        kept = len(self._training)
        return super()._effective_rows * (
            self.n_rows_ / kept if kept == self._settings_of_rows().kept else 1.0
        )

    def _scored(self, X: Any, y: Any = None) -> np.ndarray:
        return super().score_samples(*((X, y) if self.conditional else (X,)))  # type: ignore[misc]

    def _settings_of_rows(self) -> Rows:
        if not isinstance(self.rows, Rows | None):
            raise TypeError(f"rows must be a Rows or None, got {shown(self.rows)}.")
        return self.rows or Rows()

    def _paired(self, blocks: RowBlocks, y: Any, sample_weight: ArrayLike | None) -> RowBlocks:
        """Return blocks of X, of y if that has a part, and of weights if there are any."""
        if self.conditional:
            blocks = (
                blocks.then(partial(_pair, name=type(self).__name__))
                if y is None
                else with_targets(blocks, y)
            )
        if sample_weight is None:
            return blocks
        weight = checked_weights(sample_weight, len(np.atleast_1d(np.asarray(sample_weight))))
        return beside(blocks, weight, "sample_weight")

    def _fit_to(self, blocks: RowBlocks, settings: Rows, *, weighted: bool) -> None:
        """Fit to a sample of the rows, with all of them at hand for what is a sum over rows."""
        seed = seed_from(key_from(self.random_state))
        with listening(self.progress) as listener:
            overview = take_overview(blocks, settings.in_memory, seed=seed, report=listener)
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
                raise ValueError(
                    f"Input contains infinity or a value too large for dtype('float64') in column {bad[0]}."
                )
        ends = np.stack([overview.low[place], overview.high[place]])
        if self.bounds is not None and not np.any(np.isnan(ends)):
            checked_bounds(self.bounds, ends)

    def _mean_feature(
        self,
        space: FeatureSpace,
        part: Sample,
        scaling: Scaling,
        dims: tuple[int, ...],
        listener: Listener | None,
    ) -> np.ndarray:
        if self._blocks is None:
            return super()._mean_feature(space, part, scaling, dims, listener)
        work = partial(self._detached()._feature_sums, space, scaling, dims, weighted=self._weighted)
        sums = run_pass(self._blocks, Sums(work, self._blocks.page), stage="summing", report=listener)
        count, left_out, *totals = sums.total
        if left_out:
            some = f"{left_out:.0f} of {sums.rows} rows have missing cells"
            message = f"{some}, too few for a sample to show any: they are left out."
            warnings.warn(message, UserWarning, stacklevel=caller_level())
        return np.array(totals) / count

    def _feature_sums(
        self,
        space: FeatureSpace,
        scaling: Scaling,
        dims: tuple[int, ...],
        parts: tuple[Any, ...],
        *,
        weighted: bool,
    ) -> np.ndarray:
        """Return what the rows count, how many of them are left out, and the sum of the features of f over the others."""
        X, weight = parts if weighted else (*parts, None)
        values = self._validated(X, reset=False)
        # Gaps so rare that the sample has none; a density of tables with gaps is learned, and has no such sum.
        whole = ~np.any(np.isnan(values), axis=1)
        points, weight = scaling.to_model(values[whole])[:, list(dims)], part_of(weight, whole)
        count = len(points) if weight is None else float(np.sum(weight))
        return np.array([count, np.sum(~whole), *space.target.total(points, weight)])

    def _keep_some(self, most: int) -> None:
        """Leave ``most`` rows in the model, for pictures and diagnosis.

        A kernel model of p(y | x) has a normaliser per row, so that its diagnosis needs them all; so does that of an f whose
        space the solver chose, since no mean of its features is kept.
        """
        problem, solution, rows = self._problem, self.solution_, len(self._training)
        whole = problem is not None and (
            problem.mean_feature is None
            or solution is None
            or problem.within(solution.tilt.space).mean_feature is None
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


def _pair(block: Any, start: int, *, name: str) -> Any:
    if not isinstance(block, tuple) or len(block) != 2:
        raise ValueError(f"{name} requires y to be passed, but the target y is None.")
    return block
