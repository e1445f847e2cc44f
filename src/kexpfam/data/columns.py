"""What a column must be to have a density: checks that raise, and warnings of what makes likelihoods unbounded."""

import warnings
from collections.abc import Sequence

import numpy as np

from kexpfam.data.encoding import Columns
from kexpfam.data.scaling import constant_columns
from kexpfam.stacklevel import caller_level

__all__ = ["CollinearWarning", "TiesWarning", "check_columns", "check_kinds", "check_targets"]

MANY_TIES, FEW_VALUES = 0.1, 0.9
# A combination of standardised columns with less than this spread is constant: exactly, or up to the rounding of decimals.
EXACTLY_COLLINEAR, NEARLY_COLLINEAR = 1e-10, 1e-6
# Columns whose coefficient in such a combination is below this share of the largest have no part in it.
NO_PART = 1e-3


class CollinearWarning(UserWarning):
    """Some columns are a combination of others up to rounding: the height of their density is that of the rounding."""


class TiesWarning(UserWarning):
    """So many rows are repeated that no density describes the data: any likelihood can be raised by a spike on the ties."""


def check_columns(X: np.ndarray, names: Sequence[str] | None) -> None:
    """Raise for columns that no density can describe; warn of rows that make likelihoods unbounded."""
    check_spread(X, names)
    constant = _named(constant_columns(X), names)
    if constant:
        raise ValueError(
            f"constant column(s) {constant}: a constant has no density; remove them before fitting."
        )
    _check_collinear(X, names, "column(s)")
    _warn_of_ties(X, "the data", "Jitter rounded data by its rounding step.")


def check_targets(
    X: np.ndarray, targets: np.ndarray, names: Sequence[str] | None, target_names: Sequence[str] | None = None
) -> None:
    """Raise for targets that have no density; warn of inputs that say nothing and targets that make likelihoods unbounded."""
    check_spread(X, names)
    check_spread(targets, target_names, what="target column(s)")
    if np.any(constant_columns(targets)):
        raise ValueError("y is constant: a constant has no density.")
    _check_collinear(targets, target_names, "target column(s)")
    constant = _named(constant_columns(X), names)
    if constant:
        warnings.warn(
            f"constant input column(s) {constant} say nothing about y and are ignored.",
            UserWarning,
            stacklevel=caller_level(),
        )
    _warn_of_ties(targets, "y", "Jitter rounded targets by their rounding step; use a classifier for labels.")


def check_kinds(values: np.ndarray, columns: Columns) -> None:
    """Raise for columns of several kinds of which one cell is like all others, or whose spread is beyond double precision."""
    constant = np.zeros(len(columns.kinds), bool)
    for j, (kind, column) in enumerate(zip(columns.kinds, values.T, strict=True)):
        seen = column[~np.isnan(column)]
        constant[j] = len(np.unique(seen)) < 2
        if kind.atom is not None:
            seen = seen[seen != kind.atom]
        if not kind.discrete and len(seen):
            check_spread(seen[:, None], None if columns.names is None else [columns.names[j]])
            constant[j] |= bool(constant_columns(seen[:, None])[0]) and len(seen) > 1
    if np.any(constant):
        found = _named(constant, columns.names)
        raise ValueError(
            f"constant column(s) {found}: a constant has no density; remove them before fitting."
        )


def check_spread(values: np.ndarray, names: Sequence[str] | None, what: str = "column(s)") -> None:
    """Raise for columns whose variance is beyond double precision."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        variance = values.var(axis=0)
        bad = ~np.isfinite(variance) | ((variance < np.finfo(float).tiny) & ~constant_columns(values))
    if np.any(bad):
        raise ValueError(
            f"the spread of {what} {_named(bad, names)} is beyond double precision: rescale before fitting."
        )


def _check_collinear(values: np.ndarray, names: Sequence[str] | None, what: str) -> None:
    """Raise if some combination of the columns is constant: mass on a plane has no density; warn if it is nearly so."""
    if len(values) <= values.shape[1] or not np.all(np.isfinite(values)):
        return  # few rows lie on a plane whatever they are
    standard = (values - values.mean(axis=0)) / values.std(axis=0)
    # Squares cannot tell less than 1e-8, but they are cheap, and most tables are far from it.
    if np.linalg.eigvalsh(standard.T @ standard / len(standard))[0] > 1e-6:
        return
    _, spreads, combinations = np.linalg.svd(standard / np.sqrt(len(standard)), full_matrices=False)
    shares = np.abs(combinations[spreads < NEARLY_COLLINEAR])
    if not len(shares):
        return
    part = np.any(shares > NO_PART * shares.max(axis=1, keepdims=True), axis=0)
    if spreads[-1] < EXACTLY_COLLINEAR:
        raise ValueError(
            f"{what} {_named(part, names)} are collinear and have no joint density: leave one out."
        )
    message = f"{what} {_named(part, names)} are collinear up to rounding: the height of their density is that of the rounding."
    warnings.warn(message, CollinearWarning, stacklevel=caller_level())


def _named(mask: np.ndarray, names: Sequence[str] | None) -> str:
    return ", ".join(str(name) for name in np.asarray(np.arange(len(mask)) if names is None else names)[mask])


def _warn_of_ties(rows: np.ndarray, what: str, advice: str) -> None:
    """Warn of rows that repeat, on which a density can be made as high as one likes."""
    distinct = len(np.unique(rows, axis=0))
    repeated = 1.0 - distinct / len(rows)
    if repeated > MANY_TIES:
        kind = (
            f"takes only {distinct} values"
            if repeated > FEW_VALUES
            else f"repeats in {repeated:.0%} of the rows"
        )
        message = (
            f"{what} {kind}: a density can be made as high as one likes on repeated values, so its score says how narrow the "
            f"spikes are, not how good the fit is. {advice}"
        )
        warnings.warn(message, TiesWarning, stacklevel=caller_level())
