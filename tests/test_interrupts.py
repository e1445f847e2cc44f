import importlib
import signal
import sys
import time

import numpy as np
import pytest

from kexpfam import DDE, ConditionalKernelExpFamily, Kernel, KernelExpFamily, Learned, Search
from kexpfam.fit.saddle import DoublyDual
from kexpfam.interrupts import AGAIN, COMPILER, interruptible

ROWS = np.random.default_rng(0).normal(size=(40, 2))
FIXED = Kernel(lengthscale=1.0, rkhs_penalty=0.1, n_centres=6)
TINY = Learned(folds=2, repeats=1, width=4, epochs=6, steps=40, bumps=2, most_bumps=2, cells=8)
SADDLE = DoublyDual(batch_size=8, width=4)
STAGES = {
    "selection": {"model": "kernel", "kernel": Kernel(n_centres=6, search=Search(folds=2))},
    "learning": {"model": "chain", "kernel": "gaussian", "learned": TINY},
    "saddle point": {"model": "kernel", "kernel": FIXED, "solver": DDE(steps=50, saddle=SADDLE)},
}


class Discarded:
    """An object whose end presses Ctrl-C; Python discards exceptions there."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    """A shell starts background jobs with interrupts ignored; these tests need Python's own handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda discarded: None)


@pytest.mark.parametrize("press", [lambda: signal.raise_signal(signal.SIGINT), Discarded])
@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_ends_the_fit_in_every_stage_and_leaves_the_old_model(stage, press, silent):
    model = KernelExpFamily(model="kernel", kernel=FIXED, random_state=0).fit(ROWS)
    before, pressed = model.score_samples(ROWS), []

    def listener(report):
        if report.stage == stage and not pressed:
            pressed.append(report)
            press()

    model.set_params(**STAGES[stage], progress=listener)
    with pytest.raises(KeyboardInterrupt):
        model.fit(ROWS * 10.0)
    assert len(pressed) == 1
    np.testing.assert_array_equal(model.score_samples(ROWS), before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_discarded_after_the_last_report_ends_the_fit_too(silent, monkeypatch):
    model = ConditionalKernelExpFamily(model="kernel", kernel=FIXED, random_state=0)
    monkeypatch.setattr(ConditionalKernelExpFamily, "_keep_rows", lambda self, most: Discarded() and None)
    with pytest.raises(KeyboardInterrupt):
        model.fit(ROWS[:, :1], ROWS[:, 1])
    assert not hasattr(model, "density_")


def test_a_handler_of_the_caller_is_left_alone():
    numbers = []
    before = signal.signal(signal.SIGINT, lambda number, frame: numbers.append(number))
    try:
        with interruptible() as check:
            signal.raise_signal(signal.SIGINT)
            check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert numbers == [signal.SIGINT]


def test_an_interrupt_during_a_compilation_comes_at_its_end():
    scope, done = {"__name__": COMPILER, "press": signal.raise_signal, "number": signal.SIGINT}, []
    exec("def compiled():\n    press(number)\n    return 'compiled'", scope)
    with pytest.raises(KeyboardInterrupt), interruptible():
        done.append(scope["compiled"]())
        for _ in range(200):
            time.sleep(AGAIN / 10.0)
        done.append("not interrupted")
    assert done == ["compiled"]


def test_an_interrupt_at_the_end_of_a_fit_is_not_repeated():
    scope = {"__name__": COMPILER, "press": signal.raise_signal, "number": signal.SIGINT}
    with pytest.raises(KeyboardInterrupt), interruptible():
        exec("press(number)", scope)
    time.sleep(3.0 * AGAIN)  # a second interrupt would end the test


def test_the_compiler_of_jax_has_this_name():
    assert hasattr(importlib.import_module(COMPILER), "backend_compile_and_load")
