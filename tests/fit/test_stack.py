"""Stacking weights: the optimum of a concave problem, found against a solver of the field and checked by its
conditions."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from kexpfam.fit.stack import compare, stacking_weights


@pytest.mark.parametrize("seed", range(5))
def test_two_candidates_get_the_weights_of_a_line_search(seed):
    scores = np.random.default_rng(seed).normal(size=(400, 2)) * [1.0, 1.5]
    cost = lambda w: -np.mean(np.logaddexp(np.log(w) + scores[:, 0], np.log1p(-w) + scores[:, 1]))
    best = minimize_scalar(cost, bounds=(1e-9, 1.0 - 1e-9), method="bounded").x
    assert stacking_weights(scores) == pytest.approx([best, 1.0 - best], abs=1e-3)


def test_the_weights_are_no_worse_than_any_candidate_alone():
    scores = np.random.default_rng(0).normal(size=(300, 4))
    weights = stacking_weights(scores)
    stacked = np.mean(np.log(np.exp(scores) @ weights))
    assert stacked >= scores.mean(axis=0).max()
    assert weights.sum() == pytest.approx(1.0)


def test_a_candidate_that_is_worse_everywhere_gets_nothing():
    scores = np.random.default_rng(1).normal(size=(200, 1)) + [0.0, -1.0, -30.0]
    assert stacking_weights(scores).tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_a_candidate_that_saves_a_row_in_a_thousand_stays_and_one_that_helps_by_nothing_goes():
    scores = np.random.default_rng(2).normal(size=(2_000, 1)) + [0.0, -3.0]
    scores[:2, 0] = -300.0
    weights = stacking_weights(scores)
    assert 0.0 < weights[1] < 0.01
    assert np.mean(np.log(np.exp(scores) @ weights)) > scores[:, 0].mean() + 0.25
    assert stacking_weights(scores[2:]).tolist() == [1.0, 0.0]


def test_rows_that_one_candidate_was_not_scored_on_do_not_count():
    held_out = {"a": np.array([0.0, 0.0, np.nan, 5.0]), "b": np.array([-2.0, -2.0, 90.0, np.nan])}
    first, second = compare(held_out)
    assert (first.name, first.weight, first.score) == ("a", pytest.approx(1.0), 0.0)
    assert (second.weight, second.score) == (pytest.approx(0.0), -2.0)
