"""Measurements of a fitted density: normaliser, sampler, certificate, candidates and calibration."""

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np

from kexpfam.data.sample import RandomKey, Sample
from kexpfam.data.weights import weighted_mean
from kexpfam.integrate.nodes import effective_share
from kexpfam.jax_settings import double_precision
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.metrics import mmd_squared, neighbour_log_density
from kexpfam.model.density import Estimate, TiltedDensity, WeightedDraws
from kexpfam.model.distributions import AbstractDensity
from kexpfam.model.ensemble import ChainDensity, Stack, uniform_levels

PASS_ROWS = "Pass held-out X and y to diagnose() to measure the calibration of the predicted distributions."
# Folded into the key of the certificate, so that its draws are not those of the other measurements.
CERTIFICATE = 1

Fact = float | Estimate
Certify = Callable[..., Mapping[str, Fact]]


class SamplerFit(NamedTuple):
    """KL(q || p_f) over training conditions, effective share of the draws, draws and their conditions."""

    kl: Estimate
    share: float
    draws: WeightedDraws
    conditions: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a diagnosis is based on.

    Parameters
    ----------
    density : AbstractDensity
    training, weight : arrays of shape (n, p) and (n,)
        Conditions of the training rows in the data's units (any rows if there is no condition), and
        their weights.
    candidates : sequence
        Candidates with ``name``, ``weight``, ``score`` and ``standard_error``.
    status, facts : dicts from names of candidates
        How the fit of a candidate ended (an enum with advice as its value), and further named numbers.
    certify : callable or None
        ``certify(density, log_partition, draws, conditions, key=)`` returns facts on the convex problem of
        the kernel model: ``f_gap``, ``primal``, ``dual`` and ``sampler_dual``.
    calibration : sequence of Measurement
        Measurements on held-out rows.
    comparison : object or None
        Held-out scores of the fit and of plain densities, with ``rows``, ``score``, ``best``, ``references``
        and ``errors``.
    training_score : float or None
        Mean log density of the rows of the comparison by the density, which was fitted to them.
    neighbour_scores : pair of float or None
        Mean log density of all training rows, and of the points half-way to their nearest neighbours.
    """

    density: AbstractDensity
    training: np.ndarray
    weight: np.ndarray | None = None
    candidates: Sequence[Any] = ()
    status: Mapping[str, enum.Enum] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Fact]] = field(default_factory=dict)
    certify: Certify | None = None
    calibration: Sequence[Measurement] = ()
    comparison: Any = None
    training_score: float | None = None
    neighbour_scores: tuple[float, float] | None = None
    settings: Judgement = field(default_factory=Judgement)
    key: RandomKey

    def parts(self, kind: type) -> list[Any]:
        """Return the parts of the density of this class."""
        parts = self.density.parts if isinstance(self.density, Stack) else (self.density,)
        return [part for part in parts if isinstance(part, kind)]


def diagnose(found: Evidence) -> Diagnosis:
    """Return the diagnosis of a fitted density."""
    return Diagnosis(one for measure in MEASURES for one in measure(found))


def _named(part: str, found: Evidence, measurements: Iterable[Measurement]) -> Iterator[Measurement]:
    """Yield measurements with the part in their labels, unless the density is a single kernel model."""
    for one in measurements:
        alone = isinstance(found.density, TiltedDensity) or not one.label
        yield one if alone else dataclasses.replace(one, label=f"{part}: {one.label}")


def _of_fact(name: str, fact: Fact, **fields: Any) -> Measurement:
    """Return a fact as a measurement, with its standard error if it has one."""
    value, error = fact[:2] if isinstance(fact, Estimate) else (float(fact), None)
    return Measurement(name, value, error, **fields)


def measure_candidates(found: Evidence) -> Iterator[Measurement]:
    """Yield weight and held-out score of each candidate that was scored."""
    fields = operator.attrgetter("name", "weight", "score", "standard_error")
    for name, weight, score, error in map(fields, found.candidates):
        if np.isfinite(score):
            yield Measurement(f"{name}_weight", weight, meaning=f"Weight of the {name} in the density.")
            text = f"{weight:.0%} of the density; held-out score {score:.3f} ± {error:.1g}"
            meaning = f"Mean log density of held-out rows under the {name}."
            yield Measurement(f"{name}_score", score, error, None, meaning, name, text)


def measure_fit(found: Evidence) -> Iterator[Measurement]:
    """Yield the loss against the best plain density and the difference of training and held-out scores.

    The lower one of the two scores is compared: training rows are scored by the density itself, held-out rows
    by fits to fewer rows."""
    settings, compared, trained = found.settings, found.comparison, found.training_score
    if compared is None or trained is None or compared.rows < settings.few_rows:
        return
    name, held = compared.best, compared.score
    reference, own = compared.references[name], trained if held is None else min(held, trained)
    loss, error = reference - own, compared.errors.get(name)
    level, meaning = settings.below(loss, settings.good_reference_loss), "No plain density fits better."
    least = loss - 2.0 * (error or 0.0)
    if level == "poor" and settings.below(least, settings.good_reference_loss) != "poor":
        level = "fair"  # the loss may be due to chance
    if level != "good":
        meaning = f"A plain density, {name}, fits better: use default settings, more rows or more training."
    text = f"{own:.3f}; {name} {reference:.3f} on {compared.rows} held-out rows"
    label = "against plain densities"
    yield Measurement("reference_loss", loss, error, level, meaning, label, text, of_fit=True)
    if held is None:
        return
    density: Any = found.density
    gap, most = trained - held, settings.good_overfit * density.scaling.width
    level, meaning = "good" if gap <= most else "fair", "Held-out rows score about as training rows do."
    if level != "good":
        meaning = "Training rows score much higher than held-out rows: use a larger penalty, or more rows."
    text = f"{trained:.3f}; held-out rows {held:.3f}"
    yield Measurement("overfit", gap, None, level, meaning, "on training rows", text, of_fit=True)


def measure_holes(found: Evidence) -> Iterator[Measurement]:
    """Yield how much lower the density is between neighbouring rows.

    A density can vanish between an outlier and the other rows, where few or no rows were held out."""
    if found.neighbour_scores is None:
        return
    training, between = found.neighbour_scores
    depth = training - between
    level, meaning = found.settings.below(depth, found.settings.good_hole), "The density has no holes."
    if level != "good":
        meaning = "The density is low between neighbouring rows: use a larger penalty or length scale."
    text = f"{between:.3f}; training rows {training:.3f}"
    yield Measurement("hole", depth, None, level, meaning, "between neighbours", text, of_fit=True)


def measure_facts(found: Evidence) -> Iterator[Measurement]:
    """Yield how the fit of each candidate ended, and its facts."""
    for name, status in found.status.items():
        yield from _named(name, found, [measure_status(status, f"{name}_status")])
    for name, facts in found.facts.items():
        yield from (_of_fact(f"{name}_{fact}", value) for fact, value in facts.items())


def measure_status(status: enum.Enum, name: str = "status", label: str = "solver") -> Measurement:
    """Return how a solver ended: good if it converged, fair otherwise."""
    level = "good" if status.name == "CONVERGED" else "fair"
    return Measurement(name, status.name, None, level, status.value, label=label, text=status.value)


def measure_log_partition(estimate: Estimate, *, conditional: bool = False) -> Measurement:
    """Return the log-partition function: poor if its error is large or rests on too few effective draws."""
    level = "good"
    meaning = "The normaliser is known: log densities are comparable with those of other models."
    if not estimate.trustworthy:
        level = "poor"
        meaning = (
            "log Z is uncertain: log densities share an unknown constant. Use fewer dimensions, "
            "a stronger base (base='mixture') or a larger rkhs_penalty."
        )
    label, text = "log Z", str(estimate)
    if conditional:
        label, text = "log Z(x)", f"largest error {estimate.standard_error:.1g}"
    return Measurement("log_partition", estimate.value, estimate.standard_error, level, meaning, label, text)


def measure_kernel(found: Evidence) -> Iterator[Measurement]:
    """Yield the measurements of the kernel model: optimality of f, sampler, certificate and normaliser."""
    for density in found.parts(TiltedDensity):
        with double_precision():
            measured = _kernel(found, density)
        yield from _named("kernel", found, measured)


def _kernel(found: Evidence, density: TiltedDensity) -> list[Measurement]:
    settings, (_, kl_key, mmd_key) = found.settings, jr.split(found.key, 3)
    certificate_key, draw_key = jr.split(jr.fold_in(found.key, CERTIFICATE))
    drawn = functools.partial(sampler_fit, density, found.training, settings=settings, weight=found.weight)
    fit = drawn(settings.draws, key=kl_key)
    errors = density.partition_errors(found.training)
    mean = float(weighted_mean(density.log_partitions(found.training), found.weight))
    effective = np.inf if density.log_partition is None else density.log_partition.effective_draws
    partition = Estimate(mean, float(weighted_mean(errors, found.weight)), effective)
    facts: Mapping[str, Fact] = {}
    if found.certify is not None:
        # Under conditions a draw has the features of condition and target: fewer draws have to suffice.
        many = fit if density.conditional else drawn(settings.certifying_draws, key=draw_key)
        facts = found.certify(density, partition, many.draws, many.conditions, key=certificate_key)
    worst = partition._replace(standard_error=float(errors.max()))
    measured = [
        *_convex(facts, fit, settings),
        *_sampler(fit, settings),
        *_bounds(facts),
        measure_log_partition(worst, conditional=density.conditional),
    ]
    if settings.refine and not density.conditional:
        measured.append(_sampler_mmd(density, fit.draws.points, settings, key=mmd_key))
    return measured


def _convex(facts: Mapping[str, Fact], fit: SamplerFit, settings: Judgement) -> Iterator[Measurement]:
    """Yield the distances of f from its optimum, and of f and sampler from a saddle point."""
    if "f_gap" not in facts:
        return
    gap = _of_fact("f_gap", facts["f_gap"]).value
    duality = gap + max(fit.kl.value, 0.0)
    text = f"{_at_least(fit)}{duality:.4f} nats"
    meaning = "Shortfall of f plus KL of the sampler: distance from a saddle point."
    yield Measurement("duality_gap", duality, meaning=meaning, label="duality gap", text=text)
    level, meaning = settings.below(gap, settings.good_f_gap), "f is at its optimum."
    if level != "good":
        meaning = "f is not at its optimum: use solver='auto', or more steps, or Integration(draws=...)."
    yield Measurement("f_gap", gap, None, level, meaning, "f below its optimum by", f"{gap:.4f} nats")


def _sampler(fit: SamplerFit, settings: Judgement) -> Iterator[Measurement]:
    """Yield KL(sampler || density), whether it is a lower bound, and the effective share of the draws."""
    agrees = {"good": "The plain sampler agrees with the density."}
    differs = "The plain sampler differs from the density: use sample(..., refine=10)."
    meaning = "The transport is not one-to-one, and sampler_kl is a lower bound."
    yield Measurement("sampler_folds", fit.draws.folds, meaning=meaning if fit.draws.folds else "")
    value, error, _ = fit.kl
    level = settings.below(value, settings.good_sampler_kl)
    text, label = f"{_at_least(fit)}{max(value, 0.0):.4f} ± {error:.1g} nats", "KL(sampler || density)"
    yield Measurement("sampler_kl", value, error, level, agrees.get(level, differs), label, text)
    good = settings.good_effective_share
    level = "good" if fit.share >= good else "fair" if fit.share >= good / settings.poor else "poor"
    text, label = f"{fit.share:.0%}", "effective share of draws"
    yield Measurement("effective_share", fit.share, None, level, agrees.get(level, differs), label, text)


def _at_least(fit: SamplerFit) -> str:
    return "at least " if fit.draws.folds else ""


def _bounds(facts: Mapping[str, Fact]) -> Iterator[Measurement]:
    """Yield the bounds of the optimum of the penalised likelihood."""
    if "primal" not in facts:
        return
    primal, dual, sampler = (_of_fact(name, facts[name]) for name in ("primal", "dual", "sampler_dual"))
    brief = lambda one: f"{one.value:.4f} ± {one.error or 0.0:.1g}"
    replace = dataclasses.replace
    text = f"optimum between {brief(primal)} and {brief(dual)} nats"
    meaning = "Penalised likelihood of f: a lower bound of the optimum."
    yield replace(primal, meaning=meaning, label="certified", text=text)
    yield replace(dual, meaning="Upper bound of the optimum.")
    meaning = "Upper bound of the optimum by the sampler; far above it for a small penalty."
    yield replace(sampler, meaning=meaning, label="dual value of the sampler", text=f"{brief(sampler)} nats")


def _sampler_mmd(
    density: TiltedDensity, draws: np.ndarray, settings: Judgement, *, key: RandomKey
) -> Measurement:
    from kexpfam.integrate.chains import refined  # BlackJAX is slow to import

    others = refined(density.tilt, density.sampler, settings.draws, settings.refine, key=key)
    value, error, _ = mmd_squared(draws, others)
    meaning = "Squared MMD between plain and refined draws; within its error if both have one distribution."
    text = f"{value:+.2e} ± {error:.1e}"
    return Measurement("sampler_mmd", value, error, None, meaning, "MMD^2 to refined draws", text)


def measure_chain(found: Evidence) -> Iterator[Measurement]:
    """Yield the measurements of a learned chain: errors of its cells in normaliser and sampler."""
    for density in found.parts(ChainDensity):
        yield from _named("chain", found, _chain(found, density))


def _chain(found: Evidence, density: ChainDensity) -> Iterator[Measurement]:
    settings = found.settings
    error, kl = _cell_errors(density, found)
    yield Measurement("chain_members", len(density), label="chains", text=f"{len(density)}, in equal parts")
    level = settings.below(error, settings.good_normaliser_error)
    meaning = "The cells are fine enough for the density."
    if level != "good":
        meaning = "A learned tilt is too sharp for its cells: few distinct values in a column, or few rows."
    text, label = f"at most {error:.1g}", "error of log Z(x)"
    yield Measurement("chain_normaliser_error", error, None, level, meaning, label, text)
    level = settings.below(kl.value, settings.good_sampler_kl)
    meaning = "The learned sampler agrees with the density."
    if level != "good":
        meaning = "The learned sampler differs from the density: a column may have few distinct values."
    text, label = f"{kl.value:.4f} ± {kl.standard_error:.1g} nats", "KL(sampler || density)"
    yield Measurement("chain_sampler_kl", kl.value, kl.standard_error, level, meaning, label, text)


def _cell_errors(density: ChainDensity, found: Evidence) -> tuple[float, Estimate]:
    """Return the largest change of log Z on twice as many cells, and KL(cells || density)."""
    row_key, draw_key = jr.split(found.key)
    count, training = found.settings.draws, Sample.unconditional(found.training, found.weight)
    rows = np.asarray(training.drawn(count, key=row_key))
    inputs = density.inputs.to_model(found.training[rows]) if density.conditional else np.zeros((count, 0))
    error, ratios = 0.0, []
    laws = density.laws
    for k, (law, one) in enumerate(zip(laws, jr.split(draw_key, len(laws)), strict=True)):
        conditions = inputs[k :: len(laws)]
        rng = np.random.default_rng(np.asarray(jr.key_data(one)))
        levels = uniform_levels(rng, len(conditions), law.dim)
        targets, log_q, _ = law.sample(conditions, levels)
        coarse = law.log_densities(targets, conditions)
        fine = law.log_densities(targets, conditions, cells=2 * law.columns.cells)
        change = np.abs((fine - coarse)[:, law.columns.integrated].sum(1))
        error = max(error, float(change.max(initial=0.0)))
        ratios.append(log_q - fine.sum(1))
    ratio = np.concatenate(ratios)
    standard_error = float(ratio.std() / np.sqrt(len(ratio)))
    return error, Estimate(float(ratio.mean()), standard_error, float(len(ratio)))


def measure_calibration(found: Evidence) -> Iterator[Measurement]:
    """Yield the measurements on held-out rows, or a request for them."""
    yield from found.calibration
    if found.density.conditional and not any(one.name == "pit" for one in found.calibration):
        yield Measurement("calibration", None, None, "unknown", PASS_ROWS, of_fit=True)


# Each yields measurements; their order is that of the report.
MEASURES = (
    measure_fit,
    measure_holes,
    measure_candidates,
    measure_facts,
    measure_kernel,
    measure_chain,
    measure_calibration,
)


def sampler_fit(
    density: TiltedDensity,
    training: np.ndarray,
    count: int,
    *,
    settings: Judgement | None = None,
    weight: np.ndarray | None = None,
    key: RandomKey,
) -> SamplerFit:
    """Return how the sampler fits the density at training conditions in the data's units, drawn by weight.

    The change of variables of a map that is not one-to-one underestimates its density. In few dimensions
    without a condition the density is then estimated from neighbours among further draws.
    """
    settings = Judgement.of(settings)
    row_key, draw_key, neighbour_key = jr.split(key, 3)
    rows = np.asarray(Sample.unconditional(training, weight).drawn(count, key=row_key))
    conditions = density.inputs.to_model(training)[rows] if density.conditional else np.zeros((count, 0))
    draws = density.sampler.weighted_draws(conditions, key=draw_key)
    if draws.folds and not density.conditional and draws.points.shape[1] <= settings.neighbour_dims:
        others = density.sampler.draws(settings.neighbour_draws, key=neighbour_key)
        draws = draws._replace(log_density=neighbour_log_density(draws.points, others), folds=False)
    log_p = density.tilt.log_values(draws.points, conditions) - density.log_partitions(training)[rows]
    log_ratio = draws.log_density - log_p
    shared = 0.0 if density.log_partition is None else density.log_partition.standard_error
    error = float(np.hypot(log_ratio.std() / np.sqrt(count), shared))
    kl = Estimate(float(log_ratio.mean()), error, float(count))
    return SamplerFit(kl, effective_share(-log_ratio), draws, conditions)
