"""Time budgets: what they end, and what is left."""

import numpy as np
import pytest

from kexpfam import KernelExpFamily, Learned, progress
from kexpfam.fit.members import Rates
from kexpfam.fit.problem import Status
from kexpfam.progress import Report, TimeBudget

LONG = Learned(folds=2, repeats=1, width=16, epochs=400, patience=400)
SHORT = Learned(folds=2, repeats=1, width=16, epochs=3)


class Clock:
    """A clock that advances by a second with every look."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(progress, "time", Clock())


def table(rows: int = 120) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 4))


def test_training_ends_with_the_budget_and_says_so(clock):
    model = KernelExpFamily(model="chain", learned=LONG, random_state=0).fit(table(), time_budget=100.0)
    fit = model.fits_["chain"]
    assert fit.status is Status.OUT_OF_TIME
    assert 0 < len(fit.trace["held_out"]) < 400
    assert np.all(np.isfinite(model.score_samples(table())))


def test_a_large_budget_changes_nothing_but_the_rates_of_time():
    plain = KernelExpFamily(model="chain", learned=SHORT, random_state=0)
    free = plain.fit(table()).score_samples(table())
    assert np.allclose(plain.fit(table(), time_budget=1e9).score_samples(table()), free, atol=1e-4)
    assert plain.fits_["chain"].status is not Status.OUT_OF_TIME


def test_rates_fall_with_the_budget(clock):
    rates = Rates(1.0, 0.0, 1.0, 1000, 0.0, TimeBudget.of(10.0))
    series = [rates.at(0) for _ in range(12)]
    assert all(after <= before for before, after in zip(series, series[1:], strict=False))
    assert series[-1] == pytest.approx(0.0)


def test_dropout_falls_to_zero_with_the_rates():
    rates = Rates(1.0, 0.0, 1.0, 100, 0.25)
    series = [rates.threshold(epoch) for epoch in range(101)]
    assert series[0] == 192 and series[50] == 224 and series[100] == 256
    assert all(after >= before for before, after in zip(series, series[1:], strict=False))


def test_candidates_that_take_too_long_are_left_out(clock):
    """Every report of the mixture takes a second of five: it ends, and the chain is fitted alone."""
    model = KernelExpFamily(learned=SHORT, random_state=0).fit(table(200), time_budget=5.0)
    assert set(model.fits_) == {"chain"}


def test_a_budget_that_buys_nothing_is_an_error(clock):
    with pytest.raises(ValueError, match="raise time_budget"):
        KernelExpFamily(model="mixture", random_state=0).fit(table(), time_budget=0.5)


@pytest.mark.parametrize("wrong", [0.0, -1.0, "1", True, float("nan")])
def test_wrong_budgets_are_refused(wrong):
    with pytest.raises(ValueError, match="time_budget must be a positive number"):
        KernelExpFamily().fit(table(), time_budget=wrong)


def test_the_listener_of_the_caller_hears_every_report(clock):
    heard = []
    listen = TimeBudget.of(3.0).watched(heard.append, 1.0)
    report = Report("learning", 1, 2, {})
    with pytest.raises(progress.OutOfTimeError):
        for _ in range(10):
            listen(report)
    assert heard == [report] * len(heard) and heard
