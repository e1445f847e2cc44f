"""A progress bar for fits: what is being done, how fast, how long still, and whether it is healthy."""

import time
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOWN = {"sampler_gap": "gap", "effective_share": "effective", "value": "value", "score": "score"}


class Report(NamedTuple):
    """Where a fit stands; ``steps`` is 0 where the end is not known."""

    stage: str
    step: int
    steps: int
    health: dict[str, float]


Listener = Callable[[Report], None]


class Bar:
    """A listener that draws on the terminal; use as a context manager, so that the terminal is left clean."""

    def __init__(self, console: Console | None = None):
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]:>12} {task.fields[rate]:>10}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[health]}"),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()

    def __call__(self, report: Report) -> None:
        if report.stage not in self._tasks:
            self._tasks[report.stage] = self._progress.add_task(
                report.stage, total=report.steps or None, count="", rate="", health=""
            )
            self._started[report.stage] = time.monotonic()
        elapsed = max(time.monotonic() - self._started[report.stage], 1e-9)
        health = "  ".join(f"{SHOWN[name]} {value:.3g}" for name, value in report.health.items() if name in SHOWN)
        self._progress.update(
            self._tasks[report.stage],
            completed=report.step,
            count=f"{report.step}/{report.steps}" if report.steps else f"{report.step}",
            rate=f"{report.step / elapsed:.1f}/s",
            health=health,
        )
