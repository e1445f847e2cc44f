"""Measurements of a fitted density: normaliser, sampler, certificate, candidates and calibration."""

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.data.sample import Sample
from kexpfam.data.weights import weighted_mean
from kexpfam.integrate.nodes import effective_share
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.metrics import mmd_squared, neighbour_log_density
from kexpfam.model.density import Density, Estimate, WeightedDraws
from kexpfam.model.distributions import AbstractDensity
from kexpfam.model.ensemble import LearnedDensity, Stack
from kexpfam.model.precision import double_precision

__all__ = ["MEASURES", "SamplerFit", "diagnose", "measure_log_partition", "measure_status", "sampler_fit"]

PASS_ROWS = "Pass held-out X and y to diagnose() to measure the calibration of the predicted distributions."
SAMPLER_DIFFERS = "The plain sampler differs from the density: use sample(..., refine=10)."
# Folded into the key of the certificate, so that its draws are not those of the other measurements.
CERTIFICATE = 1

Certify = Callable[..., Mapping[str, float | Estimate]]


@runtime_checkable
class Scored(Protocol):
    """A candidate: its name, its weight in the density and its mean held-out log density."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def score(self) -> float: ...
    @property
    def standard_error(self) -> float: ...


class SamplerFit(NamedTuple):
    """KL(q || p_f) over training conditions, effective share of the draws, draws and their conditions."""

    kl: Estimate
    share: float
    draws: WeightedDraws
    conditions: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """The arguments of ``diagnose``, and the parts of the density."""

    density: AbstractDensity
    training: np.ndarray
    weight: np.ndarray | None
    candidates: Sequence[Scored]
    status: Mapping[str, enum.Enum]
    facts: Mapping[str, Mapping[str, float | Estimate]]
    certify: Certify | None
    calibration: Sequence[Measurement]
    settings: Judgement
    key: Key[Array, ""]

    def part(self, kind: type) -> AbstractDensity | None:
        """Return the first part of this class."""
        parts = self.density.parts if isinstance(self.density, Stack) else (self.density,)
        return next((part for part in parts if isinstance(part, kind)), None)

    def label(self, part: str, label: str) -> str:
        """Return a label that names the part, unless the density is a single kernel model."""
        return label if isinstance(self.density, Density) else f"{part}: {label}"

    @functools.cached_property
    def sampler(self) -> SamplerFit:
        """Return the fit of the kernel model's sampler."""
        return self.sampled(self.settings.draws, jr.split(self.key, 3)[1])

    def sampled(self, count: int, key: Key[Array, ""]) -> SamplerFit:
        kernel = self.part(Density)
        assert isinstance(kernel, Density)
        return sampler_fit(kernel, self.training, count, self.settings, weight=self.weight, key=key)


def diagnose(
    density: AbstractDensity,
    training: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    candidates: Sequence[Scored] = (),
    status: Mapping[str, enum.Enum] | None = None,
    facts: Mapping[str, Mapping[str, float | Estimate]] | None = None,
    certify: Certify | None = None,
    calibration: Iterable[Measurement] = (),
    settings: Judgement | None = None,
    key: Key[Array, ""],
) -> Diagnosis:
    """Return the diagnosis of a fitted density.

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
    calibration : iterable of Measurement
        Measurements on held-out rows.
    """
    found = Evidence(
        density,
        training,
        weight,
        candidates,
        status or {},
        facts or {},
        certify,
        tuple(calibration),
        Judgement.of(settings),
        key,
    )
    return Diagnosis(one for measure in MEASURES for one in measure(found))


def measure_candidates(found: Evidence) -> Iterator[Measurement]:
    """Yield weight and held-out score of each candidate that was scored."""
    for one in found.candidates:
        if np.isfinite(one.score):
            meaning = f"The weight of the {one.name} in the density is {one.weight:.0%}."
            text = (
                f"{one.weight:.0%} of the density; held-out score {one.score:.3f} ± {one.standard_error:.1g}"
            )
            yield Measurement(f"{one.name}_weight", one.weight, meaning=meaning)
            score = f"Mean log density of held-out rows under the {one.name}."
            yield Measurement(
                f"{one.name}_score", one.score, one.standard_error, None, score, label=one.name, text=text
            )


def measure_statuses(found: Evidence) -> Iterator[Measurement]:
    """Yield how the fit of each candidate ended."""
    for name, status in found.status.items():
        yield measure_status(status, f"{name}_status", found.label(name, "solver"))


def measure_status(status: enum.Enum, name: str = "status", label: str = "solver") -> Measurement:
    """Return how a solver ended: good if it converged, fair otherwise."""
    level = "good" if status.name == "CONVERGED" else "fair"
    return Measurement(name, status.name, None, level, status.value, label=label, text=status.value)


def measure_kernel(found: Evidence) -> Iterable[Measurement]:
    """Return the measurements of the kernel model: optimality of f, sampler, certificate and normaliser."""
    kernel = found.part(Density)
    if not isinstance(kernel, Density):
        return []
    with double_precision():
        return list(_kernel(found, kernel))


def _kernel(found: Evidence, kernel: Density) -> Iterator[Measurement]:
    partition = _log_partition(kernel, found.training, found.weight)
    label = functools.partial(found.label, "kernel")
    facts = _certificate(found, kernel, partition) if found.certify is not None else {}
    yield from _optimality(found, facts)
    yield from _sampler(found)
    if "primal" in facts:
        yield from _bounds(found, facts)
    yield measure_log_partition(
        partition, label("log Z(x)" if kernel.conditional else "log Z"), kernel.conditional
    )
    if found.settings.refine and not kernel.conditional:
        yield _sampler_mmd(found, kernel)


def measure_log_partition(estimate: Estimate, label: str = "log Z", conditional: bool = False) -> Measurement:
    """Return the log-partition function: poor if its error is large or rests on too few effective draws."""
    level, meaning = (
        "good",
        "The normaliser is known: log densities are comparable with those of other models.",
    )
    if not estimate.trustworthy:
        level = "poor"
        meaning = (
            "log Z is uncertain: log densities share an unknown constant. Use fewer dimensions, a stronger base "
            "(base='mixture') or a larger rkhs_penalty."
        )
    text = f"largest error {estimate.standard_error:.1g}" if conditional else str(estimate)
    return Measurement("log_partition", estimate.value, estimate.standard_error, level, meaning, label, text)


def _log_partition(density: Density, training: np.ndarray, weight: np.ndarray | None) -> Estimate:
    """Return the mean of log Z over the training rows, and its largest error."""
    partitions, errors = density.log_partitions(training), density.partition_errors(training)
    draws = np.inf if density.log_partition is None else density.log_partition.effective_draws
    return Estimate(float(weighted_mean(partitions, weight)), float(errors.max()), draws)


def _certificate(found: Evidence, kernel: Density, partition: Estimate) -> Mapping[str, float | Estimate]:
    """Return the facts of the convex problem; their normaliser has its mean error over the rows."""
    certificate_key, draw_key = jr.split(jr.fold_in(found.key, CERTIFICATE))
    # Under conditions a draw has the features of condition and target: fewer draws have to suffice.
    many = found.sampler if kernel.conditional else found.sampled(found.settings.certifying_draws, draw_key)
    error = float(weighted_mean(kernel.partition_errors(found.training), found.weight))
    mean = partition._replace(standard_error=error)
    assert found.certify is not None
    return found.certify(kernel, mean, many.draws, many.conditions, key=certificate_key)


def _optimality(found: Evidence, facts: Mapping[str, float | Estimate]) -> Iterator[Measurement]:
    if "f_gap" not in facts:
        return
    gap = _value(facts["f_gap"])
    level = found.settings.below(gap, found.settings.good_f_gap)
    meaning = "f is at its optimum."
    if level != "good":
        meaning = "f is not at its optimum: use solver='auto', or more steps, or Integration(draws=...)."
    kl, folds = found.sampler.kl.value, found.sampler.draws.folds
    duality = gap + max(kl, 0.0)
    at_least = "at least " if folds else ""
    yield Measurement(
        "duality_gap",
        duality,
        meaning="Distance of f and the sampler from a saddle point: shortfall of f plus KL of the sampler.",
        label=found.label("kernel", "duality gap"),
        text=f"{at_least}{duality:.4f} nats",
    )
    label = found.label("kernel", "f below its optimum by")
    yield Measurement("f_gap", gap, None, level, meaning, label, f"{gap:.4f} nats")


def _sampler(found: Evidence) -> Iterator[Measurement]:
    settings, (kl, share, draws, _) = found.settings, found.sampler
    yield Measurement(
        "sampler_folds",
        draws.folds,
        meaning="Whether sampler_kl is a lower bound: the transport is not one-to-one.",
    )
    kl_level = settings.below(kl.value, settings.good_sampler_kl)
    text = f"{'at least ' if draws.folds else ''}{max(kl.value, 0.0):.4f} ± {kl.standard_error:.1g} nats"
    label = found.label("kernel", "KL(sampler || density)")
    yield Measurement("sampler_kl", kl.value, kl.standard_error, kl_level, _agrees(kl_level), label, text)
    good = settings.good_effective_share
    level = "good" if share >= good else "fair" if share >= good / settings.poor else "poor"
    label = found.label("kernel", "effective share of draws")
    yield Measurement("effective_share", share, None, level, _agrees(level), label, f"{share:.0%}")


def _agrees(level: str) -> str:
    return "The plain sampler agrees with the density." if level == "good" else SAMPLER_DIFFERS


def _bounds(found: Evidence, facts: Mapping[str, float | Estimate]) -> Iterator[Measurement]:
    brief = lambda name: f"{_value(facts[name]):.4f} ± {_error(facts[name]) or 0.0:.1g}"
    label, text = (
        found.label("kernel", "certified"),
        f"optimum between {brief('primal')} and {brief('dual')} nats",
    )
    yield Measurement(
        "primal",
        _value(facts["primal"]),
        _error(facts["primal"]),
        meaning="Penalised likelihood of f: a lower bound of the optimum.",
        label=label,
        text=text,
    )
    yield Measurement(
        "dual", _value(facts["dual"]), _error(facts["dual"]), meaning="Upper bound of the optimum."
    )
    yield Measurement(
        "sampler_dual",
        _value(facts["sampler_dual"]),
        _error(facts["sampler_dual"]),
        meaning="Dual value of the sampler: an upper bound of the optimum, far above it for a small penalty.",
        label=found.label("kernel", "dual value of the sampler"),
        text=f"{brief('sampler_dual')} nats",
    )


def _value(fact: float | Estimate) -> float:
    return fact.value if isinstance(fact, Estimate) else float(fact)


def _error(fact: float | Estimate) -> float | None:
    return fact.standard_error if isinstance(fact, Estimate) else None


def _sampler_mmd(found: Evidence, density: Density) -> Measurement:
    from kexpfam.integrate.chains import refined  # BlackJAX is slow to import

    settings, key = found.settings, jr.split(found.key, 3)[2]
    others = refined(density.tilt, density.sampler, settings.draws, settings.refine, key=key)
    distance = mmd_squared(found.sampler.draws.points, others)
    return Measurement(
        "sampler_mmd",
        distance.value,
        distance.standard_error,
        meaning="Squared MMD between plain and refined draws; within its error if both have one law.",
        label=found.label("kernel", "MMD^2 to refined draws"),
        text=f"{distance.value:+.2e} ± {distance.standard_error:.1e}",
    )


def measure_chain(found: Evidence) -> Iterator[Measurement]:
    """Yield the measurements of a learned chain: errors of its cells in normaliser and sampler."""
    chain = found.part(LearnedDensity)
    if not isinstance(chain, LearnedDensity):
        return
    settings, facts, label = (
        found.settings,
        found.facts.get("chain", {}),
        functools.partial(found.label, "chain"),
    )
    error, kl = _cell_errors(chain, found)
    yield Measurement(
        "chain_members", len(chain), label=label("chains"), text=f"{len(chain)}, in equal parts"
    )
    polish = "left as trained"
    if "polish_gain" in facts:
        gain, gap = _value(facts["polish_gain"]), _value(facts["polish_gap"])
        polish = f"convex, held-out rows gain {gain:.3f} nats, within {gap:.1g} nats of the optimum"
    yield Measurement("chain_polish", polish, label=label("weights of the tilts"))
    level = settings.below(error, settings.good_normaliser_error)
    meaning = "The cells are fine enough for the density."
    if level != "good":
        meaning = "A learned tilt is too sharp for its cells: a column has few distinct values, or rows are too few."
    text = f"at most {error:.1g}"
    yield Measurement("chain_normaliser_error", error, None, level, meaning, label("error of log Z(x)"), text)
    level = settings.below(kl.value, settings.good_sampler_kl)
    meaning = "The learned sampler agrees with the density."
    if level != "good":
        meaning = "The learned sampler differs from the density: a column may have few distinct values."
    text = f"{kl.value:.4f} ± {kl.standard_error:.1g} nats"
    name = label("KL(sampler || density)")
    yield Measurement("chain_sampler_kl", kl.value, kl.standard_error, level, meaning, name, text)


def _cell_errors(density: LearnedDensity, found: Evidence) -> tuple[float, Estimate]:
    """Return the largest change of log Z on twice as many cells, and KL(cells || density)."""
    row_key, draw_key = jr.split(found.key)
    count, training = found.settings.draws, Sample.unconditional(found.training, found.weight)
    rows = np.asarray(training.drawn(count, key=row_key))
    inputs = density.inputs.to_model(found.training[rows]) if density.conditional else np.zeros((count, 0))
    error, ratios = 0.0, []
    for k, one in enumerate(jr.split(draw_key, len(density))):
        conditions, member = inputs[k :: len(density)], density.members.member(k)
        rng = np.random.default_rng(np.asarray(jr.key_data(one)))
        targets, log_q, _ = member.sample(conditions, cells=member.cells, rng=rng)
        coarse = member.log_densities(targets, conditions, cells=member.cells)
        fine = member.log_densities(targets, conditions, cells=2 * member.cells)
        change = np.abs((fine - coarse)[:, member.integrated].sum(1))
        error = max(error, float(change.max(initial=0.0)))
        ratios.append(log_q - fine.sum(1))
    ratio = np.concatenate(ratios)
    standard_error = float(ratio.std() / np.sqrt(len(ratio)))
    return error, Estimate(float(ratio.mean()), standard_error, float(len(ratio)))


def measure_facts(found: Evidence) -> Iterator[Measurement]:
    """Yield the remaining facts of the candidates as they are, without a row in the report."""
    for name, facts in found.facts.items():
        for fact, value in facts.items():
            yield Measurement(f"{name}_{fact}", _value(value), _error(value))


def measure_calibration(found: Evidence) -> Iterator[Measurement]:
    """Yield the measurements on held-out rows, or a request for them."""
    yield from found.calibration
    if found.density.conditional and not any(one.name == "pit" for one in found.calibration):
        yield Measurement("calibration", None, None, "unknown", PASS_ROWS)


# Each yields measurements; their order is that of the report.
MEASURES = (
    measure_candidates,
    measure_statuses,
    measure_kernel,
    measure_chain,
    measure_facts,
    measure_calibration,
)


def sampler_fit(
    density: Density,
    training: np.ndarray,
    count: int,
    settings: Judgement | None = None,
    *,
    weight: np.ndarray | None = None,
    key: Key[Array, ""],
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
