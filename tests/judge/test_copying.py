"""Draws beside training rows: an honest sampler, and one that repeats what it has seen."""

import numpy as np
import pandas as pd
import pytest

from kexpfam import KernelExpFamily
from kexpfam.judge.copying import measure_copying


def test_draws_of_the_truth_are_as_near_as_held_out_rows():
    rng = np.random.default_rng(0)
    training, held_out, draws = (rng.normal(size=(2000, 3)) for _ in range(3))
    found = measure_copying(training, held_out, draws, training[:, 0], held_out[:, 0])
    assert found.close == pytest.approx(0.05, abs=4.0 * found.close_error)
    assert found.membership == pytest.approx(0.5, abs=4.0 * found.membership_error)
    assert found.power == pytest.approx(0.05, abs=4.0 * found.close_error)
    assert found.p_value > 1e-4 and found.repeated == 0.0


def test_copies_and_scores_of_members_are_found():
    rng = np.random.default_rng(0)
    training, held_out = rng.normal(size=(500, 3)), rng.normal(size=(500, 3))
    draws = np.where(rng.random((500, 1)) < 0.3, training, rng.normal(size=(500, 3)))
    found = measure_copying(training, held_out, draws, np.ones(500), rng.random(500))
    assert found.repeated == pytest.approx(0.3, abs=4.0 * np.sqrt(0.21 / 500))
    assert found.close > 0.25 and found.p_value < 1e-3
    assert found.membership == 1.0 and found.power == 1.0


def test_a_model_is_measured_on_its_own_rows():
    rng = np.random.default_rng(0)
    table = lambda count: pd.DataFrame({"a": rng.normal(size=count), "b": rng.normal(size=count)})
    model = KernelExpFamily(model="mixture", random_state=0).fit(table(400))
    found = model.copying(table(300))
    assert found.close == pytest.approx(0.05, abs=4.0 * found.close_error)
    assert found.membership == pytest.approx(0.5, abs=4.0 * found.membership_error)
    assert found.draw_distance == pytest.approx(found.held_out_distance, rel=0.3)
    assert "nearest training row" in str(found)
