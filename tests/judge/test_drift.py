"""Martingales: ranks against a slow twin, false alarms, and drift that is found."""

import copy

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import kstest

from kexpfam import KernelExpFamily, StorageError
from kexpfam.judge.drift import BETS, Martingales


def test_bets_are_densities():
    u = (np.arange(20_000) + 0.5) / 20_000
    bets = 1.0 + np.stack([2.0 * u - 1.0, 6.0 * u**2 - 6.0 * u + 1.0], axis=1) @ BETS.T
    assert bets.min() > 0.0
    np.testing.assert_allclose(bets.mean(axis=0), 1.0, atol=1e-6)


def test_wealth_is_a_mean_over_bets_and_has_expectation_one():
    rng, runs = np.random.default_rng(0), 3000
    martingales = Martingales([rng.normal(size=30)] * runs, seed=0)
    # Independent references: the streams are runs.
    martingales._known = [sorted(rng.normal(size=30)) for _ in range(runs)]
    martingales.update(rng.normal(size=(5, runs)))
    wealth = np.exp(martingales.log_wealth[-1])
    assert wealth.mean() == pytest.approx(1.0, abs=4.0 * wealth.std() / np.sqrt(runs))


def test_the_alarm_is_false_with_at_most_its_probability():
    rng, runs = np.random.default_rng(1), 300
    martingales = Martingales([np.zeros(1)] * runs, seed=0)
    martingales._known = [sorted(rng.integers(0, 5, size=50).astype(float)) for _ in range(runs)]
    martingales.update(rng.integers(0, 5, size=(400, runs)).astype(float))
    false = np.mean(martingales.log_wealth.max(axis=0) >= np.log(10.0))
    assert false <= 0.1 + 4.0 * np.sqrt(0.09 / runs)


def test_blocks_and_a_stored_state_change_nothing():
    rng = np.random.default_rng(0)
    reference, new = [rng.normal(size=40), rng.integers(0, 3, size=20)], rng.normal(size=(50, 2))
    whole, parts = (Martingales(reference, seed=3) for _ in range(2))
    whole.update(new)
    parts.update(new[:7])
    parts = Martingales.restored(parts.state())
    parts.update(new[7:])
    np.testing.assert_allclose(whole.log_wealth, parts.log_wealth, rtol=1e-12)


@pytest.fixture(scope="module")
def model():
    rows = np.random.default_rng(0).normal(size=(300, 4))
    return (
        KernelExpFamily(model="mixture", random_state=0)
        .fit(rows)
        .calibrate(np.random.default_rng(1).normal(size=(300, 4)))
    )


def test_drift_of_one_column_is_found_and_named(model, tmp_path):
    rng = np.random.default_rng(2)
    monitor = model.monitor()
    assert str(monitor) == "no rows tested"
    assert not monitor.update(rng.normal(size=(150, 4)))
    monitor.save(tmp_path / "state.kexpfam")
    shifted = rng.normal(size=(250, 4)) + [0.0, 0.0, 0.8, 0.0]
    assert monitor.update(shifted) and 150 < monitor.alarm_row <= 350
    assert monitor.drifted[0] == "2" and "2" in str(monitor)
    assert isinstance(monitor.plot(), Figure)
    again = model.monitor(state=tmp_path / "state.kexpfam")
    again.update(shifted)
    np.testing.assert_allclose(again.log_evidence, monitor.log_evidence)
    model.save(tmp_path / "model.kexpfam")
    with pytest.raises(StorageError, match="not the state"):
        model.monitor(state=tmp_path / "model.kexpfam")


def test_ranks_of_new_rows_are_uniform(model):
    """The values that the monitor ranks are those of the reference, to the last bit of float32."""
    rows = np.random.default_rng(3).normal(size=(500, 4))
    scores = model._monitored(rows, None)
    known = model._held_out_scores().repeated()[0]
    ranks = np.searchsorted(known, scores[:, 0]) / len(known)
    assert kstest(ranks, "uniform").pvalue > 1e-4
    np.testing.assert_allclose(scores[:, 1:], rows)


def test_a_conditional_model_tests_inputs_and_targets(line):
    rng = np.random.default_rng(1)
    rows = lambda sign, count: ((x := rng.uniform(-1, 1, size=(count, 1))), 2.0 * sign * x[:, 0])
    monitor = copy.copy(line).calibrate(*rows(1.0, 60), draws=5).monitor()
    assert len(monitor.names) == 3
    assert monitor.update(*rows(-1.0, 200)) and monitor.drifted[0] == "log density"
