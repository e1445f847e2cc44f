"""Progress of a fit: reports, and a bar with stage, rate, remaining time and health."""

import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# Health values that the bar shows, with their labels; without any of these, the first values are shown.
SHOWN = {"sampler_gap": "gap", "effective_share": "effective", "value": "value", "score": "score"}
MOST_SHOWN = 3
# Stages that count rows.
ROWS = ("reading", "summing", "scoring")
# Seconds of observation before a rate is shown.
SHORTEST = 0.5


class Report(NamedTuple):
    """The progress of one stage of a fit; ``steps`` is 0 if the total is unknown."""

    stage: str
    step: int
    steps: int
    health: dict[str, float]


Listener = Callable[[Report], None]


class OutOfTimeError(Exception):
    """The time budget of a fit is spent."""


class TimeBudget(NamedTuple):
    """The seconds that a fit may take, from its start on the monotonic clock."""

    seconds: float
    start: float

    @staticmethod
    def of(seconds: Any) -> "TimeBudget | None":
        """Return a budget that starts now; None stays None."""
        if seconds is None:
            return None
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0.0:
            raise ValueError(f"time_budget must be a positive number of seconds, got {seconds!r}.")
        return TimeBudget(float(seconds), time.monotonic())

    def spent(self) -> float:
        """Return the share of the budget that is spent."""
        return (time.monotonic() - self.start) / self.seconds

    def watched(self, listener: Listener | None, share: float) -> Listener:
        """Return a listener that raises ``OutOfTimeError`` once this share of the budget is spent."""

        def listen(report: Report) -> None:
            if listener is not None:
                listener(report)
            if self.spent() > share:
                raise OutOfTimeError

        return listen


class _Stage(NamedTuple):
    """A line of the bar, its last step, and step and time of its first report, which follows compilation."""

    task: "TaskID"
    last: int
    first: int
    since: float


class Bar:
    """A listener that draws on the terminal; a context manager that clears the bar at its end."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console  # slow to import
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
        from rich.table import Column

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[count]:>9} {task.fields[rate]:>10}"),
            TextColumn("{task.fields[left]}"),
            # On a narrow terminal this column wraps.
            TextColumn("{task.fields[health]}", table_column=Column()),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._stages: dict[str, _Stage] = {}

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, report: Report) -> None:
        stage = self._stages[report.stage] = self._stage(report)
        rate, left = _speed(report, report.step - stage.first, time.monotonic() - stage.since)
        self._progress.update(
            stage.task,
            total=report.steps or None,
            completed=report.step,
            count=f"{report.step}/{report.steps}" if report.steps else f"{report.step}",
            rate=rate,
            left=left,
            health=_health(report.health),
        )

    def _stage(self, report: Report) -> _Stage:
        """Return the line of the stage; the time of a restarted stage begins at 0."""
        known = self._stages.get(report.stage)
        if known is not None and report.step >= known.last:
            return known._replace(last=report.step)
        if known is not None:
            return _Stage(known.task, report.step, report.step, time.monotonic())
        task = self._progress.add_task(report.stage, total=None, count="", rate="", left="", health="")
        return _Stage(task, report.step, report.step, time.monotonic())


def _speed(report: Report, steps: int, seconds: float) -> tuple[str, str]:
    """Return the rate and an upper bound of the remaining time; empty strings if they are unknown."""
    if steps <= 0 or seconds < SHORTEST or (not report.steps and report.stage not in ROWS):
        return "", ""
    rate, left = steps / seconds, max(report.steps - report.step, 0)
    shown = f"{1.0 / rate:.1f} s each" if rate < 1.0 else f"{rate:.1f}/s" if rate < 10.0 else f"{rate:,.0f}/s"
    shown = f"{rate:,.0f} rows/s" if report.stage in ROWS else shown
    return shown, f"at most {datetime.timedelta(seconds=round(left / rate))} left" if left else ""


def _health(health: dict[str, float]) -> str:
    names = [name for name in SHOWN if name in health] or list(health)[:MOST_SHOWN]
    return "  ".join(f"{SHOWN.get(name, name.replace('_', ' '))} {health[name]:.3g}" for name in names)
