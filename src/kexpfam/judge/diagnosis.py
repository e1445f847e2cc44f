"""The diagnosis of a fit: named measurements, each with an error and a level, and the verdicts."""

import dataclasses
import enum
import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kexpfam.settings import SettingsRecord, at_least, between

VERDICTS = ("poor", "fair", "good")
COLOURS = {"good": "#2e9e5b", "fair": "#c98a1b", "poor": "#d9534f"}


class Judgement(SettingsRecord):
    """Settings of a diagnosis: numbers of draws, and the thresholds between good, fair and poor.

    Parameters
    ----------
    draws : int
        Draws of the sampler that are compared with the density.
    certifying_draws : int
        Draws behind the certificate, which divides squared noise by the penalty.
    refine : int
        HMC steps of the draws that plain draws are compared with; 0 omits the comparison.
    good_sampler_kl : float
        Up to this divergence (nats) the sampler is good, and up to ``poor`` times it, fair.
    good_f_gap : float
        The same for the distance of f from its optimum.
    good_normaliser_error : float
        The same for the error of log Z.
    good_reference_loss : float
        Up to this loss (nats) against the best plain density on held-out rows, a fit is good.
    good_overfit : float
        Up to this difference (nats per column) between training and held-out rows, a fit is good.
    good_hole : float
        Up to this difference (nats) between training rows and points half-way to their nearest neighbours, a
        density of real columns has no holes.
    good_effective_share : float
        From this effective share of the draws on, the sampler is good; from a ``poor``-th of it on, fair.
    poor : float
        Ratio of the two thresholds of a measurement.
    suspicious_p_value : float
        Held-out rows with a smaller p-value show that the predicted distributions are not calibrated.
    poor_distance : float
        Calibration is poor if two distribution functions also differ by more than this somewhere.
    pit_draws : int
        Draws per held-out row for ranks, TARP and PIT values of the sampler.
    coverages : tuple of float
        Nominal coverages of intervals and regions that are compared with held-out rows.
    few_rows : int
        With fewer held-out rows, the range that chance explains is part of the diagnosis.
    discrete_share : float
        A target with fewer distinct values than this share of its rows has a randomised PIT.
    neighbour_dims : int
        In up to so many dimensions, the density of a sampler that is not one-to-one is estimated from its
        draws; in more dimensions neighbours are too far apart.
    neighbour_draws : int
        The number of these draws.
    """

    draws: int = at_least(10, 4000)
    certifying_draws: int = at_least(10, 32768)
    refine: int = at_least(0, 5)
    good_sampler_kl: float = at_least(0, 0.1)
    good_f_gap: float = at_least(0, 0.02)
    good_normaliser_error: float = at_least(0, 0.05)
    good_reference_loss: float = at_least(0, 0.05)
    good_overfit: float = at_least(0, 0.5)
    good_hole: float = at_least(0, 0.1)
    good_effective_share: float = at_least(0, 0.3)
    poor: float = at_least(1, 5.0)
    suspicious_p_value: float = at_least(0, 0.01)
    poor_distance: float = between(0, 1, 0.2)
    pit_draws: int = at_least(1, 200)
    coverages: tuple[float, ...] = between(0, 1, (0.5, 0.8, 0.9, 0.95))
    few_rows: int = at_least(0, 30)
    discrete_share: float = at_least(0, 0.5)
    neighbour_dims: int = at_least(0, 3)
    neighbour_draws: int = at_least(10, 20_000)

    @staticmethod
    def of(settings: Any) -> "Judgement":
        """Return the settings, or the defaults for None; raise TypeError for anything else."""
        if not isinstance(settings, Judgement | None):
            raise TypeError(f"settings must be a Judgement or None, got {settings!r}.")
        return settings or Judgement()

    def below(self, value: float, good: float) -> str:
        """Return the level of a value that should be small."""
        return "good" if value <= good else "fair" if value <= self.poor * good else "poor"


@dataclass(frozen=True)
class Measurement:
    """One measured quantity.

    Parameters
    ----------
    name : str
        Key in the diagnosis.
    value : float, array, dict or str
    error : float or None
        Standard error of the value.
    level : {"good", "fair", "poor", "unknown"} or None
        None is a value without thresholds; "unknown" is one that was not measured.
    meaning : str
        One sentence: what the value says at this level, and what to do unless it is good.
    label, text : str
        Row of the report; the default text is the value with its error. Without a label there is no row.
    of_fit : bool
        Whether it says how the density fits the data, rather than how well the problem was solved.
    """

    name: str
    value: Any
    error: float | None = None
    level: str | None = None
    meaning: str = ""
    label: str = ""
    text: str = ""
    of_fit: bool = False

    @property
    def shown(self) -> str:
        """Return the value as text."""
        if self.text:
            return self.text
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        return value if self.error is None else f"{value} ± {self.error:.1g}"


class Diagnosis(Mapping[str, Measurement]):
    """Measurements of a fit by name, and the verdict and advice that follow from them.

    ``diagnosis["f_gap"]`` is a measurement; ``diagnosis.f_gap`` is its value. ``str`` returns a report.
    """

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._measurements = {one.name: one for one in measurements}

    def __getitem__(self, name: str) -> Measurement:
        return self._measurements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._measurements)

    def __len__(self) -> int:
        return len(self._measurements)

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("_measurements", {})
        if name not in known:
            raise AttributeError(f"this diagnosis has no {name!r}; it has {', '.join(known)}.")
        return known[name].value

    @property
    def verdict(self) -> str:
        """Return "good", "fair" or "poor", the lower one of ``solved`` and ``fits``."""
        return verdict_of(self.values())

    @property
    def solved(self) -> str:
        """Return whether the problem was solved: the lowest level of solver, normaliser and sampler."""
        return verdict_of(one for one in self.values() if not one.of_fit)

    @property
    def fits(self) -> str:
        """Return whether the density fits held-out rows; "unknown" if there were none."""
        own = [one for one in self.values() if one.of_fit and one.level in VERDICTS]
        return verdict_of(own) if own else "unknown"

    @property
    def advice(self) -> tuple[str, ...]:
        """Return the meaning of every measurement that is not good, each sentence once."""
        lines = (one.meaning for one in self.values() if one.level not in (None, "good"))
        return tuple(dict.fromkeys(lines))

    @property
    def converged(self) -> bool:
        """Return whether every solver converged and the verdict is not poor."""
        statuses = [one for name, one in self.items() if name.endswith("status")]
        return self.verdict != "poor" and all(one.level == "good" for one in statuses)

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the report as name and value, the verdict first."""
        verdicts = [("verdict", self.verdict.upper()), ("solved", self.solved), ("fits", self.fits)]
        return [*verdicts, *((one.label, one.shown) for one in self.labelled())]

    def labelled(self) -> list[Measurement]:
        """Return the measurements that have a row in the report."""
        return [one for one in self.values() if one.label]

    def __str__(self) -> str:
        width = 1 + max(len(name) for name, _ in self.rows())
        rows = [f"{name + ':':<{width}} {value}" for name, value in self.rows()]
        return "\n".join(rows + [f"- {line}" for line in self.advice])

    def as_dict(self) -> dict[str, Any]:
        """Return verdicts, advice, and value, error, level and meaning of each measurement, for JSON."""
        fields = ("value", "error", "level", "meaning")
        found = {name: {key: getattr(one, key) for key in fields} for name, one in self.items()}
        verdicts = {"verdict": self.verdict, "solved": self.solved, "fits": self.fits}
        return plain(verdicts | {"advice": self.advice} | found)

    def _repr_html_(self) -> str:
        text, verdict = html.escape, self.verdict
        cells = "".join(
            f'<tr title="{text(one.meaning)}"><td>{text(one.label)}</td><td>{text(one.shown)}</td></tr>'
            for one in self.labelled()
        )
        advice = "".join(f"<li>{text(line)}</li>" for line in self.advice)
        heading = f'<p><strong style="color: {COLOURS[verdict]}">{verdict.upper()}</strong></p>'
        return f"{heading}<table>{cells}</table><ul>{advice}</ul>"


def verdict_of(measurements: Iterable[Measurement]) -> str:
    """Return the lowest level among the measurements; "good" if none has a level."""
    levels = (one.level for one in measurements if one.level in VERDICTS)
    return min(levels, key=VERDICTS.index, default="good")


def plain(value: Any) -> Any:
    """Return a record, an array or a number as JSON types; numbers that are not finite are None."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Diagnosis):
        return value.as_dict()
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
