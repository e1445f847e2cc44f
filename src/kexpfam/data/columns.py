"""Checks of columns: errors for columns without a density, warnings for unbounded likelihoods."""

import warnings
from collections.abc import Sequence

import numpy as np

from kexpfam.data.encoding import TableSchema
from kexpfam.data.scaling import constant_columns
from kexpfam.stacklevel import caller_level

# Spreads below which a combination of standardised columns is constant: exactly, or up to rounding.
EXACTLY_COLLINEAR, NEARLY_COLLINEAR = 1e-10, 1e-6
# Columns whose coefficient in such a combination is below this share of the largest have no part in it.
NO_PART = 1e-3
# Shares of repeated rows from which on a warning is raised, and from which on it has the number of values.
MANY_REPEATED, MOST_REPEATED = 0.1, 0.9


class CollinearWarning(UserWarning):
    """Some columns are combinations of others up to rounding, which decides the height of their density."""


class TiesWarning(UserWarning):
    """Many rows are repeated: a spike on them can raise any likelihood without limit."""


def check_columns(X: np.ndarray, names: Sequence[str] | None, remedy: str = "leave one out") -> None:
    """Raise for columns without a density; warn of rows that make likelihoods unbounded.

    ``remedy`` ends the message on collinear columns.
    """
    check_spread(X, names)
    _refuse_constant(constant_columns(X), names)
    _check_collinear(X, names, "column(s)", remedy)
    _warn_of_ties(X, "the data", "Use kind 'rounded' for rounded columns.")


def check_targets(
    X: np.ndarray, targets: np.ndarray, names: Sequence[str] | None, target_names: Sequence[str] | None = None
) -> None:
    """Raise for targets without a density; warn of constant inputs and of unbounded likelihoods."""
    check_spread(X, names)
    check_spread(targets, target_names, what="target column(s)")
    if np.any(constant_columns(targets)):
        raise ValueError("y is constant: a constant has no density.")
    _check_collinear(targets, target_names, "target column(s)")
    constant = _named(constant_columns(X), names)
    if constant:
        message = f"constant input column(s) {constant} contain no information on y and are ignored."
        warnings.warn(message, UserWarning, stacklevel=caller_level())
    _warn_of_ties(targets, "y", "Use kind 'rounded' for rounded targets, 'category' for labels.")


def check_kinds(values: np.ndarray, columns: TableSchema) -> None:
    """Raise for columns of several kinds that are constant, or whose spread is beyond double precision."""
    constant = np.zeros(len(columns.kinds), bool)
    for j, (kind, column) in enumerate(zip(columns.kinds, values.T, strict=True)):
        seen = column[~np.isnan(column)]
        constant[j] = len(np.unique(seen)) < 2
        if kind.atom is not None:
            seen = seen[seen != kind.atom]
        if not kind.discrete and len(seen):
            check_spread(seen[:, None], None if columns.names is None else [columns.names[j]])
            constant[j] |= bool(constant_columns(seen[:, None])[0]) and len(seen) > 1
    _refuse_constant(constant, columns.names)


def _refuse_constant(constant: np.ndarray, names: Sequence[str] | None) -> None:
    if np.any(constant):
        found = _named(constant, names)
        raise ValueError(f"constant column(s) {found}: a constant has no density; remove them first.")


def check_spread(values: np.ndarray, names: Sequence[str] | None, what: str = "column(s)") -> None:
    """Raise for columns whose variance is beyond double precision."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        variance = values.var(axis=0)
        bad = ~np.isfinite(variance) | ((variance < np.finfo(float).tiny) & ~constant_columns(values))
    if np.any(bad):
        found = f"{what} {_named(bad, names)}"
        raise ValueError(f"the spread of {found} is beyond double precision: rescale before fitting.")


def _check_collinear(
    values: np.ndarray, names: Sequence[str] | None, what: str, remedy: str = "leave one out"
) -> None:
    """Raise if a combination of the columns is constant, which has no density; warn if it nearly is."""
    if len(values) <= values.shape[1] or not np.all(np.isfinite(values)):
        return  # few rows always lie on a plane
    standard = (values - values.mean(axis=0)) / values.std(axis=0)
    # A cheap test first: squares resolve spreads above 1e-8 only.
    if np.linalg.eigvalsh(standard.T @ standard / len(standard))[0] > 1e-6:
        return
    _, spreads, combinations = np.linalg.svd(standard / np.sqrt(len(standard)), full_matrices=False)
    shares = np.abs(combinations[spreads < NEARLY_COLLINEAR])
    if not len(shares):
        return
    part = np.any(shares > NO_PART * shares.max(axis=1, keepdims=True), axis=0)
    found = f"{what} {_named(part, names)} are collinear"
    if spreads[-1] < EXACTLY_COLLINEAR:
        raise ValueError(f"{found} and have no joint density: {remedy}.")
    message = f"{found} up to rounding, which decides their density: {remedy}."
    warnings.warn(message, CollinearWarning, stacklevel=caller_level())


def _named(mask: np.ndarray, names: Sequence[str] | None) -> str:
    return ", ".join(str(name) for name in np.asarray(np.arange(len(mask)) if names is None else names)[mask])


def _warn_of_ties(rows: np.ndarray, what: str, advice: str) -> None:
    """Warn if many rows are repeated: densities are unbounded there."""
    distinct = len(np.unique(rows, axis=0))
    repeated = 1.0 - distinct / len(rows)
    if repeated > MANY_REPEATED:
        kind = f"repeats in {repeated:.0%} of the rows"
        if repeated > MOST_REPEATED:
            kind = f"takes only {distinct} values"
        message = (
            f"{what} {kind}. The likelihood of repeated values is unbounded, so scores measure the width of "
            f"spikes. {advice}"
        )
        warnings.warn(message, TiesWarning, stacklevel=caller_level())
