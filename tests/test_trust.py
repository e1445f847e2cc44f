"""The checks of ``make trust`` with few trials, and the page that is made from their records."""

import numpy as np
import pytest

from kexpfam.estimators import KernelDensity
from reproduction.records import Ledger
from tools.trust.__main__ import CHECKS, measure
from tools.trust.page import ROOT, SPEC, page
from tools.trust.samplers import CENTRES, DRAWS, LEAST_P, _by_weights, models

# Checks that start processes or train are left to ``make trust``.
SHORT = {
    "damaged_files": 60,
    "forged_files": 30,
    "memory_of_damaged_files": 5,
    "full_disks": 12,
    "outputs_that_are_inputs": 18,
    "random_calls": 20,
}


def test_every_promise_has_a_check_and_more_trials_in_the_full_form():
    assert set(SPEC) == set(CHECKS)
    assert all(1 <= promise["quick"] <= promise["full"] for promise in SPEC.values())


@pytest.mark.parametrize("name", SHORT)
def test_a_check_with_few_trials(name):
    outcome, _ = measure(name, SHORT[name], seed=1)
    assert outcome.failures == []
    assert outcome.trials == SHORT[name]


def test_the_page_is_made_from_the_records():
    assert (ROOT / "docs" / "trust.md").read_text() == page(Ledger(ROOT / "reproduction", "trust").records())


def test_counts_are_added_over_the_seeds_of_the_last_commit():
    counts = {"good": 3, "found": 1, "bad": 2, "poor": 0, "defaults": 2}
    values = {"trials": 4, "failures": 0, "figure": "", "counts": counts}
    records = [
        {"cell": {"check": "verdicts", "seed": seed}, "values": values, "made_with": {"commit": commit}}
        for seed, commit in ((1, "old"), (1, "new"), (2, "new"), (2, "new"))
    ]
    assert "| 8 | 0 | 6 good; 2 of 4 fits" in page(records)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_draws_of_another_density_fail(shift):
    rng = np.random.default_rng(0)
    model = KernelDensity().fit(rng.normal(size=(200, 1)))
    draws = shift + model.sample(DRAWS + CENTRES, random_state=1)
    assert (_by_weights(model.density_, draws, rng) > LEAST_P) == (shift == 0.0)


def test_every_model_of_the_samplers_is_in_the_full_form():
    assert len(models()) <= SPEC["samplers"]["full"]
