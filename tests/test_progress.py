import inspect
import io

import pytest
from rich.console import Console

from kexpfam import progress
from kexpfam.fit import loop
from kexpfam.progress import Bar, Report


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def screen():
    return io.StringIO()


@pytest.fixture
def bar(screen):
    with Bar(Console(file=screen, force_terminal=True, width=160)) as bar:
        yield bar


def line(bar, stage="saddle point"):
    """Return the fields of a stage's line."""
    (task,) = [task for task in bar._progress.tasks if task.description == stage]
    return task


def report_of(step, steps=100, stage="saddle point", **health):
    return Report(stage, step, steps, health)


def test_rows_have_a_rate_though_no_one_knows_how_many_there_are(bar, clock):
    bar(report_of(1_000, 0, "reading"))
    clock.now = 2.0
    bar(report_of(5_000, 0, "reading"))
    assert line(bar, "reading").fields["rate"] == "2,000 rows/s"
    assert line(bar, "reading").fields["left"] == ""
    bar(report_of(9_000, 17_000, "reading"))
    assert line(bar, "reading").fields["left"] == "at most 0:00:02 left"


def test_there_is_no_rate_before_the_second_report(bar, clock):
    clock.now = 30.0
    bar(report_of(25))
    assert (line(bar).fields["rate"], line(bar).fields["left"]) == ("", "")
    assert line(bar).fields["count"] == "25/100"


def test_the_rate_is_that_of_the_steps_between_the_reports(bar, clock):
    # The first chunk took a minute to compile; that says nothing of the steps to come.
    clock.now = 60.0
    bar(report_of(25))
    clock.now = 62.5
    bar(report_of(50))
    assert line(bar).fields["rate"] == "10/s"
    assert line(bar).fields["left"] == "at most 0:00:05 left"


def test_a_run_that_resumes_does_not_count_the_steps_before(bar, clock):
    bar(report_of(900, 1000))
    clock.now = 10.0
    bar(report_of(910, 1000))
    assert line(bar).fields["rate"] == "1.0/s"
    assert line(bar).fields["left"] == "at most 0:01:30 left"


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [(0.01, ""), (0.4, ""), (0.5, "20/s"), (5.0, "2.0/s"), (45.0, "4.5 s each"), (0.6, "17/s")],
)
def test_a_rate_is_shown_once_it_means_something_and_slow_steps_by_their_seconds(bar, clock, seconds, rate):
    bar(report_of(10))
    clock.now = seconds
    bar(report_of(20))
    assert line(bar).fields["rate"] == rate
    assert bool(line(bar).fields["left"]) == bool(rate)


def test_without_a_known_end_there_is_no_rate_and_no_time_left(bar, clock):
    for step in (1, 2, 3):
        clock.now += 1.0
        bar(report_of(step, 0))
    assert (line(bar).fields["rate"], line(bar).fields["left"], line(bar).fields["count"]) == ("", "", "3")
    assert line(bar).total is None


@pytest.mark.parametrize("step", [25, 50])
def test_reports_without_steps_or_time_between_them_give_no_rate(bar, clock, step):
    bar(report_of(25))
    clock.now = 0.0 if step == 50 else 5.0
    bar(report_of(step))
    assert line(bar).fields["rate"] == ""


def test_a_stage_that_begins_again_is_timed_anew(bar, clock):
    for now, step in ((0.0, 25), (1.0, 100), (50.0, 25)):
        clock.now = now
        bar(report_of(step))
    assert line(bar).fields["rate"] == ""
    clock.now = 51.0
    bar(report_of(75))
    assert line(bar).fields["rate"] == "50/s"
    assert line(bar).completed == 75


def test_a_finished_stage_has_no_time_left(bar, clock):
    for now, step in ((0.0, 50), (1.0, 100)):
        clock.now = now
        bar(report_of(step))
    assert line(bar).fields["left"] == ""
    assert line(bar).finished


def test_each_stage_has_a_line_of_its_own(bar, clock):
    bar(report_of(3, 0, "selection", score=-1.25))
    bar(report_of(25, 50, "saddle point"))
    assert [task.description for task in bar._progress.tasks] == ["selection", "saddle point"]
    assert line(bar, "selection").fields["health"] == "score -1.25"


HEALTHS = {
    "known": ({"penalty": 2.0, "value": 0.5, "sampler_gap": 0.25}, "gap 0.25  value 0.5"),
    "unknown": ({"newton_length": 0.5, "acceptance": 0.75}, "newton length 0.5  acceptance 0.75"),
    "many unknown": ({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, "a 1  b 2  c 3"),
    "none": ({}, ""),
}


@pytest.mark.parametrize(("health", "shown"), HEALTHS.values(), ids=HEALTHS)
def test_health_is_shown_by_the_names_that_matter_most_or_by_the_loops_own(bar, health, shown):
    bar(report_of(1, **health))
    assert line(bar).fields["health"] == shown


def test_what_is_seen_and_that_the_terminal_is_left_clean(screen, clock):
    with Bar(Console(file=screen, force_terminal=True, width=160)) as bar:
        bar(report_of(25, sampler_gap=0.5))
        bar._progress.refresh()
        seen = screen.getvalue()
        assert "saddle point" in seen
        assert "25/100" in seen
        assert "gap 0.5" in seen
    # A transient bar erases its line and shows the cursor again.
    assert screen.getvalue().endswith("\x1b[2K")
    assert "\x1b[?25h" in screen.getvalue()


def test_nothing_is_cut_off_on_a_narrow_terminal(screen, clock):
    with Bar(Console(file=screen, force_terminal=True, width=80)) as bar:
        for now, step in ((0.0, 25), (1.0, 50)):
            clock.now = now
            bar(report_of(step, 2000, sampler_gap=0.0891, effective_share=0.824, value=0.641))
        bar._progress.refresh()
        seen = screen.getvalue()
    assert "…" not in seen
    assert all(
        part in seen
        for part in ("saddle point", "50/2000", "25/s", "0:01:18 left", "0.0891", "0.824", "0.641")
    )


def test_the_bar_writes_to_standard_error_by_default(capsys):
    with Bar() as bar:
        bar(report_of(25))
    assert capsys.readouterr().out == ""


def test_every_loop_has_to_say_what_it_is_called():
    stage = inspect.signature(loop.run).parameters["stage"]
    assert stage.kind is inspect.Parameter.KEYWORD_ONLY
    assert stage.default is inspect.Parameter.empty
