"""Held-out rows are scored some at a time, and to the same numbers as all at once."""

import jax
import jax.random as jr
import numpy as np

from kexpfam.data.sample import Sample
from kexpfam.fit import learned, members
from kexpfam.fit.learned import Learned, learn


def test_scores_do_not_depend_on_how_many_rows_are_scored_at_a_time(monkeypatch):
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(200, 2)))
    settings = Learned(folds=2, repeats=1, width=8, depth=1, epochs=2, cells=40)
    whole = learn(sample, settings, key=jr.key(0))
    monkeypatch.setattr(learned, "JUDGED_ROWS", 7)  # of 30, so that there is a rest
    monkeypatch.setattr(members, "SCORED_ROWS", 7)
    jax.clear_caches()
    some = learn(sample, settings, key=jr.key(0))
    jax.clear_caches()
    assert np.allclose(whole.trace["held_out"], some.trace["held_out"], atol=1e-5)
    assert np.allclose(whole.held_out, some.held_out, atol=1e-5, equal_nan=True)
