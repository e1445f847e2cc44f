r"""Conditionals of any columns given any others, by weighted completions of rows with known cells.

The unknown cells of a row are drawn in some order, each given the cells before it. The weight w is the
density of the known cells, each given the cells before it. Then :math:`E[w]` is the density of the known
part, and draws with these weights follow the unknown part given the known one. For a mixture of normals w is
that density itself; for chains it is where the known columns come first. A kernel model on a grid is summed
over the cells of the unknown columns. Scores of all rows use the same levels (a Sobol sequence for chains) or
random numbers, so that the score of a row does not depend on the others; draws of different rows are
independent.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from kexpfam.data.sample import RandomKey
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import ChainDraws, ChainSampler
from kexpfam.model.density import Estimate, TiltedDensity
from kexpfam.model.ensemble import ChainDensity, LawDensity, Stack, uniform_levels
from kexpfam.model.measures import AbstractMeasure, grid_cells, logsumexp
from kexpfam.stacklevel import caller_level

# Completed cells in memory at a time.
CHUNK_NUMBERS = 1_000_000
# A mean over fewer effective draws has an error that its own variance does not show.
FEW_DRAWS = 50.0
# Completions of rows that had few effective draws at first, as a multiple.
MORE_DRAWS = 8
# The standard error of an exact log density is below this, by rounding.
EXACT = 1e-9
# Cells of the unknown columns of a row, at most, and the cells that are added beyond each end of the grid,
# because a known value far out moves the others beyond it.
MOST_CELLS, OUTER_CELLS = 4096, 32
# Rows with a larger share of their mass in the outermost cells are completed by the base.
MOST_BEYOND = 1e-5


class FewDrawsWarning(UserWarning):
    """A density given or marginal rests on few effective draws, so that its error is large and unknown."""


class Completions(NamedTuple):
    """Completions of every row in data units and their log weights, equally many in each of ``strata``.

    They are draws or, in rows that are ``exact``, the cells of a grid."""

    rows: np.ndarray  # (n, count, d)
    log_weights: np.ndarray  # (n, count)
    strata: int = 1
    exact: np.ndarray | None = None  # (n,); None if no row is

    def evidence(self) -> list[Estimate]:
        """Return the log density of the known part of each row, with its error and effective draws."""
        found = [_estimate(row, self.strata) for row in self.log_weights]
        exact = np.zeros(len(found), bool) if self.exact is None else self.exact
        return [
            Estimate(one.value, 0.0, np.inf) if sure else one for one, sure in zip(found, exact, strict=True)
        ]

    def widened(self, count: int) -> "Completions":
        """Return the completions with others of weight zero, ``count`` in all."""
        rows, size = self.rows, self.log_weights.shape[1]
        if count == size:
            return self
        others = np.repeat(rows[:, :1], count - size, axis=1)
        weights = np.full(others.shape[:2], -np.inf)
        return self._replace(
            rows=np.concatenate([rows, others], axis=1),
            log_weights=np.concatenate([self.log_weights + np.log(count / size), weights], axis=1),
        )

    @staticmethod
    def merged(parts: Sequence[tuple[np.ndarray, "Completions"]]) -> "Completions":
        """Return the completions of all rows, of parts with the positions of their rows."""
        count = max(part.log_weights.shape[1] for _, part in parts)
        order = np.argsort(np.concatenate([own for own, _ in parts]))
        wide = [part.widened(count) for _, part in parts]
        exact = [np.zeros(len(part.rows), bool) if part.exact is None else part.exact for part in wide]
        return Completions(
            np.concatenate([part.rows for part in wide])[order],
            np.concatenate([part.log_weights for part in wide])[order],
            wide[0].strata,
            np.concatenate(exact)[order],
        )

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


def completed(density: Any, values: np.ndarray, count: int, *, key: RandomKey) -> Completions:
    """Return about ``count`` completions of every row, independent of other rows; NaN marks unknown cells."""
    parts = list(_completed_blocks(density, values, count, key, shared=False))
    ends = np.cumsum([len(part.rows) for part in parts])
    places = np.split(np.arange(len(values)), ends[:-1])
    return Completions.merged(list(zip(places, parts, strict=True)))


def _completed_blocks(
    density: Any, values: np.ndarray, count: int, key: RandomKey, *, shared: bool
) -> Iterator[Completions]:
    """Yield the completions of blocks of rows; with ``shared`` random numbers equal rows have equal ones."""
    rows = max(1, CHUNK_NUMBERS // (count * values.shape[1]))
    for i in range(0, len(values), rows):
        own = jr.fold_in(key, 0 if shared else i)
        yield _completed(density, values[i : i + rows], count, own, shared)


def log_evidence(density: Any, values: np.ndarray, count: int, *, key: RandomKey) -> np.ndarray:
    """Return the log density of the known part of each row, by about ``count`` completions.

    Rows with few effective draws are completed more often; warn if some still have few. One block of
    completions is in memory."""
    found = np.zeros(len(values))
    whole = ~np.isnan(values).any(axis=1)
    found[whole] = density.log_density(values[whole])
    rows, estimates = np.flatnonzero(~whole), []
    for draws in (count, MORE_DRAWS * count):
        blocks = _completed_blocks(density, values[rows], draws, key, shared=True)
        estimates = [one for block in blocks for one in block.evidence()]
        found[rows] = [one.value for one in estimates]
        rows = rows[[_is_uncertain(one) for one in estimates]]
        if not len(rows):
            return found
    warn_of_few_draws(estimates)
    return found


def warn_of_few_draws(estimates: list[Estimate]) -> None:
    """Warn if an estimate that is not exact rests on few effective draws."""
    few = [one.effective_draws for one in estimates if _is_uncertain(one)]
    if few:
        message = (
            f"{len(few)} densities rest on few effective draws, down to {min(few):.1f}: "
            "what is given is rare under the model. Ask for more draws, or for values nearer to the data."
        )
        warnings.warn(message, FewDrawsWarning, stacklevel=caller_level())


def _is_uncertain(estimate: Estimate) -> bool:
    """Return whether an estimate that is not exact rests on few effective draws."""
    return estimate.standard_error > EXACT and estimate.effective_draws < FEW_DRAWS


def patterns(values: np.ndarray) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Return the rows with the same known columns, and these columns."""
    known, membership = np.unique(~np.isnan(values), axis=0, return_inverse=True)
    columns = [tuple(np.flatnonzero(pattern).tolist()) for pattern in known]
    return [(np.flatnonzero(membership.ravel() == k), own) for k, own in enumerate(columns)]


@singledispatch
def _completed(density: Any, values: np.ndarray, count: int, key: RandomKey, shared: bool) -> Completions:
    raise TypeError(f"a {type(density).__name__} has no conditionals.")


@_completed.register
def _(density: ChainDensity, values: np.ndarray, count: int, key: RandomKey, shared: bool) -> Completions:
    """Return equally many completions by every member; columns that a member has first are exact.

    Scores, whose levels are shared, need the weights alone: no row is completed for them."""
    if shared:
        weights = density.log_completion_weights(density.scaling.to_model(values), count)
        rows = np.broadcast_to(values[:, None], (*weights.shape, values.shape[1]))
    else:
        rows, weights = _by_members(density, values, count, key)
    return Completions(rows, weights + _known_jacobian(density.scaling, values)[:, None], len(density))


def _by_members(
    density: ChainDensity, values: np.ndarray, count: int, key: RandomKey
) -> tuple[np.ndarray, np.ndarray]:
    """Return completions by every member in data units, and their log weights in model units."""
    each, dim = -(-count // len(density)), values.shape[1]
    known = np.repeat(density.scaling.to_model(values), each, axis=0)
    streams = np.random.default_rng(np.asarray(jr.key_data(key))).spawn(len(density))

    def drawn(member: ChainSampler, k: int) -> ChainDraws:
        levels = uniform_levels(streams[k], len(known), dim)
        return member.sample(np.zeros((len(known), 0)), levels, known=known)

    found = density.of_members(drawn)
    targets = np.stack([one.targets.reshape(len(values), each, -1) for one in found], axis=1)
    weights = np.stack([one.log_weight.reshape(len(values), each) for one in found], axis=1)
    rows = density.scaling.to_data(targets.reshape(-1, dim)).reshape(len(values), -1, dim)
    return _kept(rows, values), weights.reshape(len(values), -1)


@_completed.register
def _(density: LawDensity, values: np.ndarray, count: int, key: RandomKey, shared: bool) -> Completions:
    """Return draws of the conditional law; every weight is the density of the known part.

    Scores, whose random numbers are shared, need the weights alone: no row is drawn for them."""
    z, dim = density.scaling.to_model(values), values.shape[1]
    weights = _log_known(density.law, z) + _known_jacobian(density.scaling, values)
    data = np.full((len(values), count, dim), np.nan)
    if not shared:
        rows = _by_law(density.law, z, count, key, shared)
        data = density.scaling.to_data(rows.reshape(-1, dim)).reshape(rows.shape)
    return Completions(_kept(data, values), np.tile(weights[:, None], (1, count)))


@_completed.register
def _(density: TiltedDensity, values: np.ndarray, count: int, key: RandomKey, shared: bool) -> Completions:
    """Return the cells of a grid, or completions by the base, weighted by the tilt."""
    parts = []
    for own, known in patterns(values):
        found = _on_grid(density, values[own], known, count, key)
        sure = np.zeros(len(own), bool) if found is None or found.exact is None else found.exact
        if found is not None and np.any(sure):
            exact = Completions(found.rows[sure], found.log_weights[sure], exact=sure[sure])
            parts.append((own[sure], exact))
        if not np.all(sure):
            parts.append((own[~sure], _by_base(density, values[own[~sure]], count, key, shared)))
    return Completions.merged(parts)


def _on_grid(
    density: TiltedDensity, values: np.ndarray, known: tuple[int, ...], count: int, key: RandomKey
) -> Completions | None:
    """Return the cells of the unknown columns of rows with these known ones, or None if there is no grid or
    too many cells.

    Rows without a known cell have draws of the density instead. Rows with mass beyond the grid are not exact:
    a known value far out moves the others there."""
    if density.completion is not None or density.nodes is None:
        return None
    if not known:
        drawn = np.tile(density.sample(count, key=key), (len(values), 1, 1))
        return Completions(drawn, np.zeros(drawn.shape[:2]), exact=np.ones(len(values), bool))
    unknown = [j for j in range(values.shape[1]) if j not in known]
    axes = [_extended(density.nodes.edges[j]) for j in unknown]
    if np.prod([len(axis) - 1.0 for axis in axes]) > MOST_CELLS:
        return None
    points, widths = grid_cells(axes)
    z, rng = density.scaling.to_model(values), np.random.default_rng(np.asarray(jr.key_data(key)))
    rows = np.tile(z[:, None], (1, len(points), 1))
    rows[:, :, unknown] = points
    log_masses = density.tilt.log_values(rows.reshape(-1, values.shape[1])).reshape(len(z), -1)
    log_masses += np.log(widths).sum(1)
    outermost = np.any((points == points.min(0)) | (points == points.max(0)), axis=1)
    total = logsumexp(log_masses)
    # A row without any mass lies outside the support.
    sure = np.isneginf(total) | (logsumexp(log_masses[:, outermost]) <= np.log(MOST_BEYOND) + total)
    rows[:, :, unknown] += widths * rng.uniform(-0.5, 0.5, points.shape)
    data = density.scaling.to_data(rows.reshape(-1, values.shape[1])).reshape(rows.shape)
    weights = log_masses + np.log(len(points)) - density.log_partitions()[0]
    weights += _known_jacobian(density.scaling, values)[:, None]
    return Completions(_kept(data, values), weights, exact=sure)


def _extended(edge: np.ndarray) -> np.ndarray:
    """Return the borders of cells that reach half a range further on both sides."""
    outer = np.linspace(0.0, 0.5 * (edge[-1] - edge[0]), OUTER_CELLS + 1)[1:]
    return np.concatenate([edge[0] - outer[::-1], edge, edge[-1] + outer])


def _by_base(
    density: TiltedDensity, values: np.ndarray, count: int, key: RandomKey, shared: bool
) -> Completions:
    """Return completions by the base, weighted by the tilt."""
    base = density.tilt.base if density.completion is None else density.completion.base
    z = density.scaling.to_model(values)
    rows, log_known = _by_law(base, z, count, key, shared), _log_known(base, z)
    flat = rows.reshape(-1, values.shape[1])
    data = density.scaling.to_data(flat)
    log_ratio = density.log_density(data) - density.scaling.log_jacobian(data) - base.log_densities(flat)
    weights = log_ratio.reshape(len(values), count) + log_known[:, None]
    return Completions(
        _kept(data.reshape(rows.shape), values), weights + _known_jacobian(density.scaling, values)[:, None]
    )


@_completed.register
def _(density: Stack, values: np.ndarray, count: int, key: RandomKey, shared: bool) -> Completions:
    """Return the completions of all parts, weighted by the weights of the parts."""
    keys = jr.split(key, len(density.parts))
    each = -(-count // len(density.parts))
    # Cells of a grid have no effective draws that could be added to those of the other parts.
    complete: Any = lambda part: _by_base if isinstance(part, TiltedDensity) else _completed
    parts = zip(density.parts, keys, strict=True)
    found = [complete(part)(part, values, each, one, shared) for part, one in parts]
    counts = [one.log_weights.shape[1] for one in found]
    shares = zip(density.weights, counts, strict=True)
    scale = [np.log(weight * sum(counts) / count) for weight, count in shares]
    weights = [one.log_weights + own for one, own in zip(found, scale, strict=True)]
    return Completions(np.concatenate([one.rows for one in found], axis=1), np.concatenate(weights, axis=1))


def _by_law(law: AbstractMeasure, z: np.ndarray, count: int, key: RandomKey, shared: bool) -> np.ndarray:
    """Return completions by the conditionals of a law, (n, count, d)."""
    rows = np.zeros((len(z), count, z.shape[1]))
    for own, dims in patterns(z):
        if not dims:
            drawn = law.draws(count * (1 if shared else len(own)), key=key)
            rows[own] = drawn if shared else drawn.reshape(len(own), count, -1)
            continue
        if len(dims) == z.shape[1]:
            rows[own] = z[own][:, None]
            continue
        several = lambda row, key, dims=dims: law.completed(dims, jnp.tile(row, (count, 1)), key=key)
        keys = jnp.broadcast_to(key, len(own)) if shared else jr.split(key, len(own))
        with double_precision():
            rows[own] = np.asarray(jax.vmap(several)(jnp.asarray(z[own][:, dims]), keys))
    return rows


def _log_known(law: AbstractMeasure, z: np.ndarray) -> np.ndarray:
    """Return the log density of the known part of each row, 0 if nothing is known."""
    found = np.zeros(len(z))
    for own, dims in patterns(z):
        if dims:
            found[own] = law.marginal(dims).log_densities(z[own][:, dims])
    return found


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
