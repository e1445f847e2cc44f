r"""Conditionals of any columns given any others, by weighted completions of rows with known cells.

The unknown cells of a row are drawn in some order, each given the cells before it. The weight w is the
density of the known cells, each given the cells before it. Then :math:`E[w]` is the density of the known
part, and draws with these weights follow the unknown part given the known one. For a mixture of normals w is
that density itself; for chains it is where the known columns come first.
"""

from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import Chain, ChainDraws
from kexpfam.model.density import Estimate, TiltedDensity
from kexpfam.model.ensemble import ChainDensity, LawDensity, Stack, uniform_levels
from kexpfam.model.measures import AbstractMeasure, logsumexp

__all__ = ["Completions", "completed", "log_evidence", "patterns"]

# Completed cells in memory at a time.
CHUNK_NUMBERS = 1_000_000


class Completions(NamedTuple):
    """Completions of every row in data units and their log weights, equally many in each of ``strata``."""

    rows: np.ndarray  # (n, count, d)
    log_weights: np.ndarray  # (n, count)
    strata: int = 1

    def evidence(self) -> list[Estimate]:
        """Return the log density of the known part of each row, with its error and effective draws."""
        return [_estimate(row, self.strata) for row in self.log_weights]

    def resampled(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return draws of the rows in proportion to their weights, (n, count, d)."""
        shares = self._shares
        levels = np.cumsum(shares, axis=1)
        # Systematic resampling, in random order: fewer repetitions than independent choices have.
        wanted = (np.arange(count) + rng.random((len(shares), 1))) / count * levels[:, -1:]
        place = np.stack([np.searchsorted(row, level) for row, level in zip(levels, wanted, strict=True)])
        place = rng.permuted(np.minimum(place, shares.shape[1] - 1), axis=1)
        return np.take_along_axis(self.rows, place[:, :, None], axis=1)

    def quantile(self, levels: Sequence[float] | np.ndarray, column: int) -> np.ndarray:
        """Return the quantiles of one column in every row, (n, levels)."""
        values, shares = self.rows[:, :, column], self._shares
        order = np.argsort(values, axis=1)
        values = np.take_along_axis(values, order, axis=1)
        upto = np.cumsum(np.take_along_axis(shares, order, axis=1), axis=1)
        places = [np.searchsorted(own / own[-1], levels) for own in upto]
        return np.take_along_axis(values, np.minimum(np.stack(places), values.shape[1] - 1), axis=1)

    def likeliest(self, column: int) -> np.ndarray:
        """Return the most probable label of one column in every row, (n,)."""
        values, shares = self.rows[:, :, column], self._shares
        labels = np.unique(values)
        return labels[np.stack([np.sum(shares * (values == one), axis=1) for one in labels]).argmax(axis=0)]

    @property
    def _shares(self) -> np.ndarray:
        """Return the weights, which sum to one in every row, (n, count)."""
        return np.exp(self.log_weights - logsumexp(self.log_weights, axis=1)[:, None])


def completed(density: Any, values: np.ndarray, count: int, *, key: Key[Array, ""]) -> Completions:
    """Return about ``count`` completions of every row; NaN marks unknown cells."""
    parts = list(_completed_blocks(density, values, count, key))
    whole, weights = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    return Completions(whole, weights, parts[0].strata)


def _completed_blocks(
    density: Any, values: np.ndarray, count: int, key: Key[Array, ""]
) -> Iterator[Completions]:
    """Yield the completions of blocks of rows."""
    rows = max(1, CHUNK_NUMBERS // (count * values.shape[1]))
    for i in range(0, len(values), rows):
        yield _completed(density, values[i : i + rows], count, jr.fold_in(key, i))


def log_evidence(density: Any, values: np.ndarray, count: int, *, key: Key[Array, ""]) -> np.ndarray:
    """Return the log density of the known part of each row; one block of completions is in memory."""
    found = np.zeros(len(values))
    whole = ~np.isnan(values).any(axis=1)
    found[whole] = density.log_density(values[whole])
    if not np.all(whole):
        blocks = _completed_blocks(density, values[~whole], count, key)
        found[~whole] = [one.value for block in blocks for one in block.evidence()]
    return found


def patterns(values: np.ndarray) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Return the rows with the same known columns, and these columns."""
    known, membership = np.unique(~np.isnan(values), axis=0, return_inverse=True)
    columns = [tuple(np.flatnonzero(pattern).tolist()) for pattern in known]
    return [(np.flatnonzero(membership.ravel() == k), own) for k, own in enumerate(columns)]


@singledispatch
def _completed(density: Any, values: np.ndarray, count: int, key: Key[Array, ""]) -> Completions:
    raise TypeError(f"a {type(density).__name__} has no conditionals.")


@_completed.register
def _(density: ChainDensity, values: np.ndarray, count: int, key: Key[Array, ""]) -> Completions:
    """Return equally many completions by every member; columns that a member has first are exact."""
    each, dim = -(-count // len(density)), values.shape[1]
    known = np.repeat(density.scaling.to_model(values), each, axis=0)
    streams = np.random.default_rng(np.asarray(jr.key_data(key))).spawn(len(density))

    def drawn(member: Chain, k: int) -> ChainDraws:
        levels = uniform_levels(streams[k], len(known), dim)
        return member.sample(np.zeros((len(known), 0)), levels, known=known)

    found = density.of_members(drawn)
    targets = np.stack([one.targets.reshape(len(values), each, -1) for one in found], axis=1)
    weights = np.stack([one.log_weight.reshape(len(values), each) for one in found], axis=1)
    rows = density.scaling.to_data(targets.reshape(-1, dim)).reshape(len(values), -1, dim)
    log_weights = weights.reshape(len(values), -1) + _known_jacobian(density.scaling, values)[:, None]
    return Completions(_kept(rows, values), log_weights, len(density))


@_completed.register
def _(density: LawDensity, values: np.ndarray, count: int, key: Key[Array, ""]) -> Completions:
    """Return draws of the conditional law; every weight is the density of the known part."""
    rows, log_known = _by_law(density.law, density.scaling.to_model(values), count, key)
    data = density.scaling.to_data(rows.reshape(-1, values.shape[1])).reshape(rows.shape)
    weights = log_known + _known_jacobian(density.scaling, values)
    return Completions(_kept(data, values), np.tile(weights[:, None], (1, count)))


@_completed.register
def _(density: TiltedDensity, values: np.ndarray, count: int, key: Key[Array, ""]) -> Completions:
    """Return completions by the base, weighted by the tilt."""
    base = density.tilt.base if density.completion is None else density.completion.base
    z = density.scaling.to_model(values)
    rows, log_known = _by_law(base, z, count, key)
    flat = rows.reshape(-1, values.shape[1])
    data = density.scaling.to_data(flat)
    log_ratio = density.log_density(data) - density.scaling.log_jacobian(data) - base.log_densities(flat)
    weights = log_ratio.reshape(len(values), count) + log_known[:, None]
    return Completions(
        _kept(data.reshape(rows.shape), values), weights + _known_jacobian(density.scaling, values)[:, None]
    )


@_completed.register
def _(density: Stack, values: np.ndarray, count: int, key: Key[Array, ""]) -> Completions:
    """Return the completions of all parts, weighted by the weights of the parts."""
    keys = jr.split(key, len(density.parts))
    each = -(-count // len(density.parts))
    found = [_completed(part, values, each, one) for part, one in zip(density.parts, keys, strict=True)]
    total = sum(one.log_weights.shape[1] for one in found)
    scale = [
        np.log(weight * total / one.log_weights.shape[1])
        for weight, one in zip(density.weights, found, strict=True)
    ]
    weights = [one.log_weights + own for one, own in zip(found, scale, strict=True)]
    return Completions(np.concatenate([one.rows for one in found], axis=1), np.concatenate(weights, axis=1))


def _by_law(
    law: AbstractMeasure, z: np.ndarray, count: int, key: Key[Array, ""]
) -> tuple[np.ndarray, np.ndarray]:
    """Return completions by the conditionals of a law, (n, count, d), and log densities of known parts."""
    rows, log_known = np.zeros((len(z), count, z.shape[1])), np.zeros(len(z))
    for k, (own, dims) in enumerate(patterns(z)):
        with double_precision():
            if not dims:
                rows[own] = law.draws(len(own) * count, key=jr.fold_in(key, k)).reshape(len(own), count, -1)
                continue
            known = z[own][:, dims]
            values = np.repeat(known, count, axis=0)
            if len(dims) == z.shape[1]:
                rows[own], log_known[own] = values.reshape(len(own), count, -1), law.log_densities(z[own])
                continue
            found = np.asarray(law.completed(dims, jnp.asarray(values), key=jr.fold_in(key, k)))
        rows[own], log_known[own] = (
            found.reshape(len(own), count, -1),
            law.marginal(dims).log_densities(known),
        )
    return rows, log_known


def _known_jacobian(scaling: Any, values: np.ndarray) -> np.ndarray:
    """Return the log Jacobian of the known cells."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, scaling.log_jacobians(values), 0.0).sum(axis=1)


def _kept(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return completions with the known cells as they were given, to the last digit."""
    return np.where(np.isnan(values)[:, None, :], rows, values[:, None, :])


def _estimate(log_weights: np.ndarray, strata: int) -> Estimate:
    """Return the log of the mean weight; differences between strata are not part of its error."""
    count, value = len(log_weights), float(logsumexp(log_weights) - np.log(len(log_weights)))
    if not np.isfinite(value):
        return Estimate(-np.inf, 0.0, float(count))
    shares = np.exp(log_weights - value)
    error = float(np.sqrt(shares.reshape(strata, -1).var(axis=1).mean() / count))
    return Estimate(value, error, float(count / (1.0 + shares.var())))
