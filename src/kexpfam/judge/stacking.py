"""Is a density good that is learned, or a mixture of candidates? Its parts are judged, each by what can go wrong with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.data.sample import Sample
from kexpfam.fit.polish import Polish
from kexpfam.fit.stack import Candidate
from kexpfam.judge.calibration import Calibration, JointCalibration
from kexpfam.judge.conformal import Conformal
from kexpfam.judge.diagnosis import PASS_ROWS, SUSPICIOUS_P_VALUE, AbstractDiagnosis, Diagnosis, Judgement
from kexpfam.model.density import LARGE_ERROR, Estimate
from kexpfam.model.distributions import AbstractDensity
from kexpfam.model.ensemble import ChainDensity, Stack, uniform_levels

__all__ = ["LearnedDiagnosis", "StackDiagnosis", "diagnose_stack"]

# Verdicts from worst to best.
VERDICTS = ("poor", "fair", "good")


@dataclass(frozen=True)
class LearnedDiagnosis(AbstractDiagnosis):
    """What was measured about learned chains.

    ``normaliser_error`` is the largest change of a log density on twice as many cells; ``sampler_kl`` compares the cells that
    draws come from with the density; ``polish`` says how the weights of the tilts were found, given the network's features.
    """

    members: int
    normaliser_error: float
    sampler_kl: Estimate
    polish: Polish | None
    verdict: str
    advice: tuple[str, ...]

    def lines(self) -> list[tuple[str, str]]:
        polish = "left as trained" if self.polish is None else str(self.polish)
        return [
            ("chains", f"{self.members}, in equal parts"),
            ("weights of the tilts", polish),
            ("error of log Z(x)", f"at most {self.normaliser_error:.1g}"),
            (
                "KL(sampler || density)",
                f"{self.sampler_kl.value:.4f} ± {self.sampler_kl.standard_error:.1g} nats",
            ),
        ]


@dataclass(frozen=True)
class StackDiagnosis(AbstractDiagnosis):
    """What was measured about a density of one or more candidates, and about its parts."""

    candidates: tuple[Candidate, ...]
    kernel: Diagnosis | None
    learned: LearnedDiagnosis | None
    calibration: Calibration | JointCalibration | None
    verdict: str
    advice: tuple[str, ...]
    repair: Conformal | None = None

    def lines(self) -> list[tuple[str, str]]:
        lines = [(one.name, str(one)) for one in self.candidates]
        for name, part in (("kernel", self.kernel), ("chain", self.learned)):
            lines += [] if part is None else [(f"{name}: {label}", value) for label, value in part.rows()]
        return lines + ([] if self.calibration is None else self.calibration.lines())


def diagnose_stack(
    density: AbstractDensity,
    training: np.ndarray,
    weight: np.ndarray | None,
    candidates: Sequence[Candidate],
    kernel: Diagnosis | None,
    polish: Polish | None,
    calibration: Calibration | JointCalibration | None,
    *,
    settings: Judgement | None,
    key: Key[Array, ""],
) -> StackDiagnosis:
    """Return the diagnosis; ``training`` are the conditions in the data's units and ``weight`` what they count."""
    parts = density.parts if isinstance(density, Stack) else (density,)
    learned = next((part for part in parts if isinstance(part, ChainDensity)), None)
    rows = Sample.unconditional(training, weight)
    judged = None if learned is None else _learned(learned, rows, polish, settings or Judgement(), key=key)
    verdicts = [part.verdict for part in (kernel, judged) if part is not None] or ["good"]
    advice = [line for part in (kernel, judged) if part is not None for line in part.advice]
    if calibration is not None and calibration.ks_p_value < SUSPICIOUS_P_VALUE:
        verdicts.append("fair")
        advice.append(
            "Held-out targets do not look like draws of their predicted distributions: look at plot_calibration()."
        )
    # Rows are passed to the whole and not to its parts, which ask for them in any case.
    advice = [line for line in advice if line != PASS_ROWS]
    if density.conditional and calibration is None:
        advice.append(PASS_ROWS)
    verdict = min(verdicts, key=VERDICTS.index)
    return StackDiagnosis(tuple(candidates), kernel, judged, calibration, verdict, tuple(advice))


def _learned(
    density: ChainDensity,
    training: Sample,
    polish: Polish | None,
    settings: Judgement,
    *,
    key: Key[Array, ""],
) -> LearnedDiagnosis:
    """Return what can go wrong with chains: cells that are too coarse for the density, or for the sampler."""
    row_key, draw_key = jr.split(key)
    rows = np.asarray(training.drawn(settings.draws, key=row_key))
    conditions = (
        density.inputs.to_model(training.target[rows])
        if density.conditional
        else np.zeros((settings.draws, 0))
    )
    error, ratios = 0.0, []
    for k, one in enumerate(jr.split(draw_key, len(density))):
        part = slice(k, None, len(density))
        rng, member = np.random.default_rng(np.asarray(jr.key_data(one))), density.members.member(k)
        levels = uniform_levels(rng, len(conditions[part]), member.dim)
        targets, log_q, _ = member.sample(conditions[part], levels)
        coarse, fine = (
            member.log_densities(targets, conditions[part], cells=cells)
            for cells in (None, 2 * member.columns.cells)
        )
        own = member.columns.integrated
        error = max(error, float(np.abs((fine - coarse)[:, own].sum(1)).max(initial=0.0)))
        ratios.append(log_q - fine.sum(1))
    ratio = np.concatenate(ratios)
    kl = Estimate(float(ratio.mean()), float(ratio.std() / np.sqrt(len(ratio))), float(len(ratio)))
    advice = []
    if error > LARGE_ERROR:
        advice.append(
            "A learned tilt is too sharp for its cells: columns with few distinct values, or too few rows."
        )
    if kl.value > settings.good_sampler_kl:
        advice.append("The learned sampler differs from the density: a column may have few distinct values.")
    poor = error > settings.poor * LARGE_ERROR or kl.value > settings.poor * settings.good_sampler_kl
    return LearnedDiagnosis(
        len(density), error, kl, polish, "poor" if poor else "fair" if advice else "good", tuple(advice)
    )
