"""Calibration on held-out rows: PIT values, coverage and CRPS; for several targets TARP and density ranks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import RandomKey, row_slices
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Judgement, Measurement

# Draws in memory at a time.
CHUNK_DRAWS = 20_000
# Draws per held-out row of a density without a condition: the test then has 10 / 11 of its power.
DRAWS_PER_ROW = 10


def pit_measurements(
    density: Any,
    X: np.ndarray | None,
    targets: np.ndarray,
    *,
    settings: Judgement | None = None,
    scores: np.ndarray | None = None,
    key: RandomKey,
) -> list[Measurement]:
    """Return measurements of the calibration of a density on rows that it was not fitted to.

    ``pit`` has values that are uniform if the density is right: F(y | x) of a single target, randomised
    within the steps of a discrete one, and TARP values of several targets. ``region_level`` has the coverage
    of the smallest central interval (highest-density region of several targets) that contains each target.
    Without a condition (X is None), rows are compared with draws of the density: both arrays have the shares
    of draws of higher density. ``scores`` are log densities of the rows if they are known.
    """
    settings = Judgement.of(settings)
    given = () if X is None else (X,)
    scores = density.log_density(targets, *given) if scores is None else scores
    rows, score = len(targets), float(scores.mean())
    error = float(scores.std() / np.sqrt(rows)) if np.isfinite(score) else None
    text = f"{score:.4f} over {rows} rows"
    if X is None:
        measured = _drawn(density, targets, scores, settings, key=key)
    else:
        measured = (_single if targets.shape[1] == 1 else _joint)(density, X, targets, settings, key=key)
    return [
        Measurement("held_out_rows", rows),
        Measurement("held_out_score", score, error, label="held-out log density", text=text),
        *measured,
        *([_of_few_rows(rows)] if rows < settings.few_rows else []),
    ]


def _single(
    density: Any, X: np.ndarray, targets: np.ndarray, settings: Judgement, *, key: RandomKey
) -> Iterator[Measurement]:
    """Yield PIT values, their tests, coverage and CRPS of a single target."""
    draw_key, seed_key = jr.split(key)
    rng, y, count = np.random.default_rng(seed_from(seed_key)), targets[:, 0], settings.pit_draws
    distinct = np.unique(y)
    randomised = len(distinct) < settings.discrete_share * len(y)
    step = 0.5 * float(np.diff(distinct).min()) if randomised and len(distinct) > 1 else 0.0
    low, high = density.cdf(targets - step, X), density.cdf(targets + step, X)
    pit = low + rng.uniform(size=len(y)) * (high - low)
    draws = density.sample(count, X, key=draw_key)[:, :, 0]
    under, upto = (draws < (y - step)[:, None]).sum(1), (draws <= (y + step)[:, None]).sum(1)
    sampler_pit = (under + rng.uniform(size=len(y)) * (upto - under + 1)) / (count + 1)
    kind = "randomised PIT" if randomised else "PIT"
    yield Measurement("randomised", randomised)
    yield Measurement("pit", pit, text=kind if randomised else "PIT, F(y | x)")
    yield Measurement("sampler_pit", sampler_pit)
    central = np.abs(2.0 * pit - 1.0)
    # PIT values alone have little power against a wrong spread; central intervals have none against a shift.
    tests = uniform, intervals = _uniform(pit), _uniform(central)
    sampler = _uniform(sampler_pit).p_value
    text = f"KS p = {uniform.p_value:.3f}; of intervals {intervals.p_value:.3f}; of the sampler {sampler:.3f}"
    yield _tested(tests, settings, f"{kind} uniform?", text)
    yield Measurement("sampler_pit_p_value", sampler)
    yield Measurement("region_level", central, text="central intervals")
    yield _coverage({level: np.mean(inside_central(pit, level)) for level in settings.coverages}, "intervals")
    meaning = "Mean continuous ranked probability score of the held-out targets; lower is better."
    yield Measurement("crps", float(density.crps(targets, X).mean()), meaning=meaning, label="CRPS")


def _joint(
    density: Any, X: np.ndarray, targets: np.ndarray, settings: Judgement, *, key: RandomKey
) -> Iterator[Measurement]:
    """Yield TARP values, density ranks, marginal ranks, their tests and the coverage of several targets."""
    tarp_key, rank_key, column_key = jr.split(key, 3)
    count = settings.pit_draws
    nearer = tarp(density, X, targets, draws=count, key=tarp_key)
    ranks = np.minimum(density_ranks(density, X, targets, draws=count, key=rank_key), 1.0)
    columns = column_ranks(density, X, targets, draws=count, key=column_key)
    # TARP alone has little power against a shift.
    tests = joint, region, *single = [_uniform(values) for values in (nearer, ranks, *columns.T)]
    yield Measurement("pit", nearer, text="TARP, share of draws nearer to a random point")
    yield Measurement("tarp_p_value", joint.p_value)
    yield Measurement("rank_p_value", region.p_value)
    shown = f"TARP KS p = {joint.p_value:.3f}; of density ranks {region.p_value:.3f}"
    yield _tested(tests, settings, "joint calibration", shown)
    yield _of_columns(single, "PIT of each target")
    yield Measurement("region_level", ranks, text="highest-density regions")
    yield _coverage({level: np.mean(ranks <= level) for level in settings.coverages}, "regions")


def _drawn(
    density: Any, points: np.ndarray, own: np.ndarray, settings: Judgement, *, key: RandomKey
) -> Iterator[Measurement]:
    """Yield tests of rows against draws of a density without a condition: log densities and columns."""
    from scipy.stats import ks_2samp  # slow to import

    count = max(settings.draws, DRAWS_PER_ROW * len(points))
    draw_key, seed_key = jr.split(key)
    draws = density.sample(count, key=draw_key)
    drawn = density.log_density(draws)
    same = lambda first, second: Uniformity(*ks_2samp(first, second, method="asymp")[:2])
    seen = lambda rows, column: rows[~np.isnan(rows[:, column]), column]
    columns = [(seen(points, k), seen(draws, k)) for k in range(points.shape[1])]
    single = [same(*pair) for pair in columns if min(map(len, pair))]
    joint = same(own, drawn)
    levels = region_levels(own, drawn, rng=np.random.default_rng(seed_from(seed_key)))
    yield Measurement("pit", levels, text="share of draws of higher density")
    yield _tested([joint, *single], settings, "like draws?", f"KS p of log densities = {joint.p_value:.3f}")
    yield _of_columns(single, "KS test of each column")
    yield Measurement("region_level", levels, text="highest-density regions")
    yield _coverage({level: np.mean(levels <= level) for level in settings.coverages}, "regions")


class Uniformity(NamedTuple):
    """Statistic and p-value of a Kolmogorov-Smirnov test."""

    distance: float
    p_value: float


def _of_columns(tests: Sequence[Uniformity], label: str) -> Measurement:
    p_values = tuple(float(one.p_value) for one in tests)
    shown = "p = " + ", ".join(f"{value:.3f}" for value in p_values)
    return Measurement("column_p_values", p_values, label=label, text=shown)


def _tested(tests: Sequence[Uniformity], settings: Judgement, label: str, text: str) -> Measurement:
    """Return the p-value of all tests together, by Bonferroni's correction.

    The level is "poor" if the distribution functions also differ by ``poor_distance``, as after the loss of a
    mode."""
    p_value = min(len(tests) * min(one.p_value for one in tests), 1.0)
    distance = max(one.distance for one in tests)
    level, meaning = "good", "Held-out rows look like draws of the density."
    if p_value < settings.suspicious_p_value:
        level = "poor" if distance > settings.poor_distance else "fair"
        meaning = "Held-out rows do not look like draws of the density: see plot_calibration()."
    return Measurement("pit_p_value", p_value, None, level, meaning, label, text, of_fit=True)


def _coverage(shares: dict[float, Any], what: str) -> Measurement:
    shares = {level: float(share) for level, share in shares.items()}
    meaning = f"Share of held-out targets inside {what} of each nominal coverage."
    return Measurement("coverage", shares, None, None, meaning, f"coverage of {what}", coverage_text(shares))


def coverage_text(shares: dict[float, float]) -> str:
    """Return nominal and observed coverages as text."""
    return ", ".join(f"{level:.0%}: {share:.0%}" for level, share in shares.items())


def _of_few_rows(rows: int) -> Measurement:
    from scipy.stats import binom  # slow to import

    low = int(binom.ppf(0.025, rows, 0.9))
    text = f"90 % intervals of a perfect model contain {low} to {rows} of {rows} rows"
    return Measurement("chance_range", (low, rows), label="few held-out rows", text=text)


def _uniform(values: np.ndarray) -> Uniformity:
    """Return the Kolmogorov-Smirnov test of uniformity on [0, 1]."""
    from scipy.stats import kstest  # slow to import

    found = kstest(values, "uniform")
    return Uniformity(float(found.statistic), float(found.pvalue))


def region_levels(
    rows: Float[np.ndarray, " n"], draws: Float[np.ndarray, "... m"], *, rng: np.random.Generator
) -> Float[np.ndarray, " n"]:
    r"""Return, for each row, the probability of the smallest highest-density region that contains it.

    ``rows`` and ``draws`` are log densities of each row and of draws of the model, under the condition of
    each row or the same draws for all rows. The level is the share of draws with a higher density, randomised
    among m + 1 ranks: uniform if rows are draws.
    """
    if draws.ndim == 1:
        ordered = np.sort(draws)
        upto, under = (np.searchsorted(ordered, rows, side=side) for side in ("right", "left"))
        above, equal = len(draws) - upto, upto - under
    else:
        above, equal = (draws > rows[:, None]).sum(axis=1), (draws == rows[:, None]).sum(axis=1)
    return (above + rng.uniform(size=len(rows)) * (equal + 1)) / (draws.shape[-1] + 1)


def inside_central(pit: np.ndarray, coverage: float) -> np.ndarray:
    """Return whether PIT values lie in the central interval of this coverage."""
    return np.abs(pit - 0.5) <= 0.5 * coverage


def tarp(density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, key: RandomKey) -> np.ndarray:
    """Return for each row the share of draws that are nearer to a random point than the target is: TARP.

    If the density is right, target and draws are exchangeable and the shares, randomised within their steps,
    are uniform (Lemos, Coogan, Hezaveh and Perreault-Levasseur 2023, "Sampling-based accuracy testing of
    posterior estimators"). Points are uniform in the bounding box of the targets; distances are in standard
    deviations of the targets.
    """
    draw_key, seed_key = jr.split(key)
    rng = np.random.default_rng(seed_from(seed_key))
    scale = np.maximum(targets.std(axis=0), np.finfo(float).tiny)
    points = rng.uniform(targets.min(axis=0), targets.max(axis=0), targets.shape)
    own = np.linalg.norm((targets - points) / scale, axis=1)
    nearer = np.zeros(len(targets))
    for rows, several in _draws(density, X, draws, key=draw_key):
        distances = np.linalg.norm((several - points[rows, None]) / scale, axis=2)
        nearer[rows] = (distances < own[rows, None]).sum(axis=1)
    return (nearer + rng.uniform(size=len(targets))) / (draws + 1)


def density_ranks(
    density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, key: RandomKey
) -> np.ndarray:
    r"""Return for each row the probability of all points of higher density than the target, from draws.

    The estimate of :math:`P(p(Y' | x) > p(y | x) | x)` is at most c inside the highest-density region of
    level c. Between two draws it is linear in the log density. It exceeds 1 for targets of lower density than
    every draw, so that their order is kept.
    """
    own, ranks = -density.log_density(targets, X), np.zeros(len(targets))
    for rows, several in _draws(density, X, draws, key=key):
        flat = several.reshape(-1, targets.shape[1])
        seen = -density.log_density(flat, np.repeat(X[rows], draws, axis=0)).reshape(-1, draws)
        ranks[rows] = [_rank(value, np.sort(row)) for value, row in zip(own[rows], seen, strict=True)]
    return ranks


def _rank(value: float, seen: np.ndarray) -> float:
    """Return the interpolated rank of a value among sorted ones as a share, strictly increasing."""
    count = len(seen) + 1
    if value < seen[0]:
        return float(np.exp(value - seen[0])) / count
    return float(np.interp(value, seen, np.arange(1, count)) / count + max(value - seen[-1], 0.0))


def column_ranks(
    density: Any, X: np.ndarray, targets: np.ndarray, *, draws: int, key: RandomKey
) -> np.ndarray:
    """Return randomised ranks of each target among draws of its own column: PIT values of the marginals."""
    draw_key, seed_key = jr.split(key)
    ranks = np.random.default_rng(seed_from(seed_key)).uniform(size=targets.shape)
    for rows, several in _draws(density, X, draws, key=draw_key):
        ranks[rows] += (several < targets[rows, None]).sum(axis=1)
    return ranks / (draws + 1)


def _draws(density: Any, X: np.ndarray, draws: int, *, key: RandomKey) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield chunks of rows with their draws, of shape (rows, draws, columns)."""
    for number, rows in enumerate(row_slices(len(X), max(1, CHUNK_DRAWS // draws))):
        yield rows, density.sample(draws, X[rows], key=jr.fold_in(key, number))
