"""A diagnosis is computed once for the same fit and arguments."""

import numpy as np

from kexpfam.baselines import gaussian_mixture
from kexpfam.estimators import GaussianMixtureDensity


def test_a_second_diagnosis_of_the_same_fit_is_not_computed(monkeypatch):
    X = np.random.default_rng(0).normal(size=(60, 2))
    model = GaussianMixtureDensity(random_state=0).fit(X)
    calls, diagnosis = [], gaussian_mixture.Diagnosis
    monkeypatch.setattr(gaussian_mixture, "Diagnosis", lambda found: calls.append(1) or diagnosis(found))
    first = model.diagnose()
    assert model.diagnose() is first
    assert len(calls) == 1
    assert model.diagnose(random_state=1) is not first
    model.diagnose(None, np.random.RandomState(0))
    model.diagnose(None, np.random.RandomState(0))
    assert len(calls) == 4, "another seed, and states that draw on"
    model.fit(X)
    model.diagnose(None, np.random.RandomState(0))
    assert len(calls) == 5
