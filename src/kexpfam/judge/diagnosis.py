"""Is the fit good? Numbers with error bars, and one verdict in words; the same for every density, conditional or not."""

import abc
import dataclasses
import enum
import html
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

from kexpfam.data.sample import Sample
from kexpfam.data.weights import weighted_mean
from kexpfam.fit.convex import shortfall
from kexpfam.fit.problem import Problem, Status, check_at_least
from kexpfam.integrate.nodes import effective_share
from kexpfam.judge.calibration import Calibration, JointCalibration
from kexpfam.judge.certificate import Certificate, certify
from kexpfam.judge.conformal import Conformal
from kexpfam.judge.metrics import Distance, mmd_squared, neighbour_log_density
from kexpfam.model.density import Estimate, TiltedDensity, WeightedDraws

__all__ = ["AbstractDiagnosis", "Diagnosis", "Judgement", "diagnose", "judge", "plain", "sampler_fit"]

# The certificate's key is apart from those of the other measurements.
CERTIFICATE = 1
SUSPICIOUS_P_VALUE = 0.01
PASS_ROWS = "Pass held-out X and y to diagnose() to see whether the predicted distributions are calibrated."

# Beyond this many dimensions the nearest of so many draws are too far away to tell a density.
NEIGHBOUR_DIMS, NEIGHBOUR_DRAWS = 3, 20_000


class Judgement(eqx.Module):
    """How a fit is judged.

    Parameters
    ----------
    draws : int
        Draws of the sampler that are compared with the density.
    certifying_draws : int
        The certificate divides squares of noise by the penalty, so it takes many.
    refine : int
        Steps of HMC behind the draws that plain ones are compared with.
    good_sampler_kl, good_f_gap : float
        Up to these (nats) a fit is called good, and up to ``poor`` times these, fair.
    good_effective_share : float
        From this share of effective draws on a fit is called good, and from a ``poor``-th of it on, fair.
    poor : float
        See above.
    """

    draws: int = 4000
    certifying_draws: int = 32768
    refine: int = 5
    good_sampler_kl: float = 0.1
    good_f_gap: float = 0.02
    good_effective_share: float = 0.3
    poor: float = 5.0

    def __check_init__(self) -> None:
        check_at_least(self, 10, "draws", "certifying_draws")
        check_at_least(self, 0, "refine", "good_sampler_kl", "good_f_gap", "good_effective_share")
        check_at_least(self, 1, "poor")


def plain(value: Any) -> Any:
    """Return a record, an array or a number as what JSON knows: dictionaries, lists, numbers; what is not finite is None."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, AbstractDiagnosis):
        return value.as_dict()
    if dataclasses.is_dataclass(value) or hasattr(value, "_asdict"):
        fields = (
            value._asdict()
            if hasattr(value, "_asdict")
            else {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        )
        return {name: plain(part) for name, part in fields.items()}
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


class SamplerFit(NamedTuple):
    """KL(q || p_f) over training conditions, the effective share of draws, and the draws with their conditions."""

    kl: Estimate
    share: float
    draws: WeightedDraws
    conditions: np.ndarray


class AbstractDiagnosis(abc.ABC):
    """What every estimator says about its fit: a verdict, what was measured, and advice; ``str()`` of it is a report."""

    verdict: str
    advice: tuple[str, ...]
    repair: Conformal | None = None

    @abc.abstractmethod
    def lines(self) -> list[tuple[str, str]]:
        """Return what was measured, as name and value."""

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the report, the verdict first, as name and value."""
        return [
            ("verdict", self.verdict.upper()),
            *self.lines(),
            *([] if self.repair is None else self.repair.lines()),
        ]

    def __str__(self) -> str:
        rows = [f"{name + ':':<27} {value}" for name, value in self.rows()]
        return "\n".join(rows + [f"- {line}" for line in self.advice])

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as numbers, text, lists and dictionaries, ready for JSON: what is not finite is None."""
        fields: Any = self
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(fields)}

    def _repr_html_(self) -> str:
        colour = {"good": "#2e9e5b", "fair": "#c98a1b", "poor": "#d9534f"}[self.verdict]
        verdict = f'<p><strong style="color: {colour}">{html.escape(self.verdict.upper())}</strong></p>'
        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
            for name, value in self.lines()
        )
        advice = "".join(f"<li>{html.escape(line)}</li>" for line in self.advice)
        return f"{verdict}<table>{cells}</table><ul>{advice}</ul>"


@dataclass(frozen=True)
class Diagnosis(AbstractDiagnosis):
    """What was measured about a fit.

    ``log_partition`` is log Z, under conditions its mean over the training rows and its largest error. ``sampler_mmd``
    compares plain with refined draws where there is no condition; ``calibration`` is that of held-out rows where there is one.
    ``sampler_kl`` is a lower bound where the transport folds space (``sampler_folds``).
    """

    status: Status
    conditional: bool
    log_partition: Estimate
    f_gap: float
    sampler_kl: Estimate
    sampler_folds: bool
    effective_share: float
    sampler_mmd: Distance | None
    calibration: Calibration | JointCalibration | None
    certificate: Certificate | None
    verdict: str
    advice: tuple[str, ...]
    repair: Conformal | None = None

    @property
    def duality_gap(self) -> float:
        """Return how far the pair (f, q) is from a saddle point: f's shortfall in the primal plus q's in the dual."""
        return self.f_gap + max(self.sampler_kl.value, 0.0)

    @property
    def primal(self) -> Estimate | None:
        """Return the penalised likelihood of f: a lower bound of its optimum."""
        return None if self.certificate is None else self.certificate.primal

    @property
    def dual(self) -> Estimate | None:
        """Return an upper bound of the optimum of the penalised likelihood."""
        return None if self.certificate is None else self.certificate.dual

    @property
    def converged(self) -> bool:
        """Return whether the solver converged and the fit is not poor."""
        return self.verdict != "poor" and self.status is Status.CONVERGED

    def lines(self) -> list[tuple[str, str]]:
        at_least = "at least " if self.sampler_folds else ""
        kl = f"{at_least}{max(self.sampler_kl.value, 0.0):.4f} ± {self.sampler_kl.standard_error:.1g} nats"
        log_z = (
            f"largest error {self.log_partition.standard_error:.1g}"
            if self.conditional
            else str(self.log_partition)
        )
        lines = [
            ("solver", self.status.value),
            ("duality gap", f"{at_least}{self.duality_gap:.4f} nats"),
            ("f below its optimum by", f"{self.f_gap:.4f} nats"),
            ("KL(sampler || density)", kl),
            ("effective share of draws", f"{self.effective_share:.0%}"),
            *([] if self.certificate is None else self.certificate.lines()),
            ("log Z(x)" if self.conditional else "log Z", log_z),
        ]
        if self.sampler_mmd is not None:
            distance = f"{self.sampler_mmd.value:+.2e} ± {self.sampler_mmd.standard_error:.1e}"
            lines.append(("MMD^2 to refined draws", distance))
        return lines + (self.calibration.lines() if self.calibration is not None else [])


def diagnose(
    problem: Problem,
    density: TiltedDensity,
    training: np.ndarray,
    status: Status,
    calibration: Calibration | JointCalibration | None = None,
    *,
    settings: Judgement | None = None,
    key: Key[Array, ""],
) -> Diagnosis:
    """Return the diagnosis of a fitted density; ``training`` are its conditions in the data's units."""
    settings = settings or Judgement()
    gap_key, kl_key, mmd_key = jr.split(key, 3)
    proposal = None if density.conditional else density.sampler.reference
    f_gap = shortfall(
        problem, density.tilt, proposal or problem.proposal, problem.integration.draws, key=gap_key
    ).value
    weight = problem.sample.weight
    fit = sampler_fit(density, training, settings.draws, weight=weight, key=kl_key)
    partitions, errors = density.log_partitions(training), density.partition_errors(training)
    evidence = np.inf if density.log_partition is None else density.log_partition.effective_draws
    worst = Estimate(float(weighted_mean(partitions, weight)), float(errors.max()), evidence)
    certificate_key, draw_key = jr.split(jr.fold_in(key, CERTIFICATE))
    # Under conditions a draw has as many features as a condition and a target together, so that fewer have to do.
    many = (
        fit
        if density.conditional
        else sampler_fit(density, training, settings.certifying_draws, weight=weight, key=draw_key)
    )
    mean_error = worst._replace(standard_error=float(weighted_mean(errors, weight)))
    certificate = certify(
        problem, density.tilt, mean_error, proposal, many.draws, many.conditions, key=certificate_key
    )
    mmd = None if density.conditional else _sampler_mmd(density, fit.draws.points, settings, key=mmd_key)
    verdict, advice = judge(
        status, worst, f_gap, fit, calibration, conditional=density.conditional, settings=settings
    )
    facts = (
        status,
        density.conditional,
        worst,
        f_gap,
        fit.kl,
        fit.draws.folds,
        fit.share,
        mmd,
        calibration,
        certificate,
    )
    return Diagnosis(*facts, verdict, advice)


def sampler_fit(
    density: TiltedDensity,
    training: np.ndarray,
    count: int,
    *,
    weight: np.ndarray | None = None,
    key: Key[Array, ""],
) -> SamplerFit:
    """Return how the sampler fits the density at training conditions, given in the data's units with what they count.

    A map that folds space has a larger density than its change of variables says. In up to three dimensions without a condition
    the density is then estimated from neighbours among further draws, and is no bound any more.
    """
    row_key, draw_key, neighbour_key = jr.split(key, 3)
    rows = np.asarray(Sample.unconditional(training, weight).drawn(count, key=row_key))
    conditions = density.inputs.to_model(training)[rows] if density.conditional else np.zeros((count, 0))
    draws = density.sampler.weighted_draws(conditions, key=draw_key)
    if draws.folds and not density.conditional and draws.points.shape[1] <= NEIGHBOUR_DIMS:
        others = density.sampler.draws(NEIGHBOUR_DRAWS, key=neighbour_key)
        draws = draws._replace(log_density=neighbour_log_density(draws.points, others), folds=False)
    log_p = density.tilt.log_values(draws.points, conditions) - density.log_partitions(training)[rows]
    log_ratio = draws.log_density - log_p
    shared = 0.0 if density.log_partition is None else density.log_partition.standard_error
    error = float(np.hypot(log_ratio.std() / np.sqrt(count), shared))
    return SamplerFit(
        Estimate(float(log_ratio.mean()), error, float(count)), effective_share(-log_ratio), draws, conditions
    )


def _sampler_mmd(
    density: TiltedDensity, plain: np.ndarray, settings: Judgement, *, key: Key[Array, ""]
) -> Distance:
    from kexpfam.integrate.chains import refined  # BlackJAX is slow to import

    return mmd_squared(
        plain, refined(density.tilt, density.sampler, settings.draws, settings.refine, key=key)
    )


def judge(
    status: Status,
    log_partition: Estimate,
    f_gap: float,
    fit: SamplerFit,
    calibration: Calibration | JointCalibration | None,
    *,
    conditional: bool,
    settings: Judgement,
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict and the advice that goes with what was measured."""
    kl, share, advice = fit.kl.value, fit.share, []
    if not log_partition.trustworthy:
        advice.append(
            "log Z is uncertain: log densities share an unknown constant. Fewer dimensions, a stronger base "
            "(base='mixture') or a larger rkhs_penalty make it sharper."
        )
    if f_gap > settings.good_f_gap:
        advice.append("f is not at its optimum: use solver='auto', or more steps, or Integration(draws=...).")
    if kl > settings.good_sampler_kl or share < settings.good_effective_share:
        advice.append("The plain sampler differs from the density: use sample(..., refine=10).")
    if status is not Status.CONVERGED:
        advice.append(status.value)
    poor = (
        not log_partition.trustworthy
        or f_gap > settings.poor * settings.good_f_gap
        or kl > settings.poor * settings.good_sampler_kl
        or share < settings.good_effective_share / settings.poor
    )
    uncalibrated = calibration is not None and calibration.ks_p_value < SUSPICIOUS_P_VALUE
    if uncalibrated:
        advice.append(
            "Held-out targets do not look like draws of their predicted distributions: look at plot_calibration()."
        )
    verdict = "poor" if poor else "fair" if advice else "good"
    if conditional and calibration is None:
        advice.append(PASS_ROWS)
    return verdict, tuple(advice)
