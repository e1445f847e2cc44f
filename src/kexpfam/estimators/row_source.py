"""Rows of a fit: a table in memory, or blocks of which a sample is kept and all are read for sums over
rows."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike

from kexpfam.data.blocks import RowBlocks, Rows, beside, row_blocks, with_targets
from kexpfam.data.passes import Sums, run_pass, take_overview
from kexpfam.data.scaling import Scaling
from kexpfam.data.weights import checked_weights, part_of
from kexpfam.model.spaces import FeatureSpace
from kexpfam.progress import Listener
from kexpfam.stacklevel import caller_level

__all__ = ["RowSource", "mean_score", "paired_blocks"]


class RowSource(NamedTuple):
    """The tables to fit to, in memory: X, and y under a condition.

    ``rows`` is the number of all rows, ``blocks`` are all of them if the tables are only a sample. ``ends``
    are the smallest and largest values of the targets over all rows, shape (2, d), if they were read in
    blocks."""

    tables: tuple[Any, ...]
    weight: ArrayLike | None
    rows: int | None = None
    blocks: RowBlocks | None = None
    ends: np.ndarray | None = None

    @staticmethod
    def of(
        X: Any,
        y: Any,
        weight: ArrayLike | None,
        settings: Rows,
        *,
        seed: int,
        report: Listener | None,
        conditional: bool,
    ) -> "RowSource":
        """Return the rows of a table, or a uniform sample of the rows of a source of blocks."""
        tables = (X, y) if conditional else (X,)
        blocks = row_blocks(X, settings)
        if blocks is None:
            counted = hasattr(X, "__len__") and not scipy.sparse.issparse(X)  # which is refused later
            return RowSource(tables, weight, len(X) if counted else None)
        blocks = paired_blocks(blocks, y, weight, conditional=conditional)
        overview = take_overview(blocks, settings.in_memory, seed=seed, report=report)
        for low, high in zip(overview.low, overview.high, strict=True):
            bad = np.flatnonzero(np.isinf(low) | np.isinf(high))
            if len(bad):
                raise ValueError(
                    f"Input contains infinity or a value too large for dtype('float64') in column {bad[0]}."
                )
        *parts, sampled_weight = overview.sample if weight is not None else (*overview.sample, None)
        place = 1 if conditional else 0
        ends = np.stack([overview.low[place], overview.high[place]])
        rest = blocks if overview.rows > settings.in_memory else None
        return RowSource(tuple(parts), sampled_weight, overview.rows, rest, ends)

    def mean_feature(self, read: Callable[[Any], np.ndarray], report: Listener | None) -> Callable | None:
        """Return a function that averages features over all rows, or None if all rows are in memory.

        ``read`` returns the cells of a block as numbers.
        """
        if self.blocks is None:
            return None
        return partial(_mean_feature, self.blocks, read, self.weight is not None, report)


def _mean_feature(
    blocks: RowBlocks,
    read: Callable[[Any], np.ndarray],
    weighted: bool,
    report: Listener | None,
    space: FeatureSpace,
    scaling: Scaling,
    dims: tuple[int, ...],
) -> np.ndarray:
    """Return the mean of the features of f over all rows of the blocks."""
    work = partial(_feature_sums, read, weighted, space, scaling, dims)
    sums = run_pass(blocks, Sums(work, blocks.page), stage="summing", report=report)
    count, left_out, *totals = sums.total
    if left_out:
        message = (
            f"{left_out:.0f} of {sums.rows} rows have missing values, or cells that disagree with carried "
            "columns, and are left out; the sample in memory has none."
        )
        warnings.warn(message, UserWarning, stacklevel=caller_level())
    return np.array(totals) / count


def _feature_sums(
    read: Callable[[Any], np.ndarray],
    weighted: bool,
    space: FeatureSpace,
    scaling: Scaling,
    dims: tuple[int, ...],
    parts: tuple[Any, ...],
) -> np.ndarray:
    """Return the total weight of the rows, the number of incomplete ones, and the sum of the features of the
    others."""
    X, weight = parts if weighted else (*parts, None)
    values = read(X)
    whole = np.all(np.isfinite(values), axis=1)
    points = scaling.to_model(values[whole])[:, list(dims)]
    weight = part_of(weight, whole)
    count = len(points) if weight is None else float(np.sum(weight))
    return np.array([count, np.sum(~whole), *space.target.total(points, weight)])


def paired_blocks(blocks: RowBlocks, y: Any, weight: ArrayLike | None, *, conditional: bool) -> RowBlocks:
    """Return blocks of X, of y under a condition, and of weights if there are any."""
    if conditional:
        blocks = blocks.then(_pair) if y is None else with_targets(blocks, y)
    if weight is None:
        return blocks
    checked = checked_weights(weight, len(np.atleast_1d(np.asarray(weight))))
    return beside(blocks, checked, "sample_weight")


def _pair(block: Any, start: int) -> Any:
    if not isinstance(block, tuple) or len(block) != 2:
        raise ValueError("the estimator requires y to be passed, but the target y is None.")
    return block


def mean_score(
    score: Callable[..., np.ndarray], blocks: RowBlocks, *, weighted: bool, report: Listener | None
) -> float:
    """Return the (weighted) mean of a score over all rows of the blocks, one block in memory at a time."""
    sums = Sums(partial(_score_sums, score, weighted), blocks.page)
    run_pass(blocks, sums, stage="scoring", report=report)
    count, total = sums.total
    return float(total / count)


def _score_sums(score: Callable[..., np.ndarray], weighted: bool, parts: tuple[Any, ...]) -> np.ndarray:
    """Return the total weight of the rows and the weighted sum of their scores."""
    *tables, weight = parts if weighted else (*parts, None)
    found = score(*tables)
    counts = np.ones(len(found)) if weight is None else np.asarray(weight)
    return np.array([counts.sum(), np.sum(found[counts > 0.0] * counts[counts > 0.0])])
