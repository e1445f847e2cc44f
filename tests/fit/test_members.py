"""Which repeats of an ensemble are trained further."""

import numpy as np
import pytest

from kexpfam.fit.learned import Learned

PARTS, EPOCHS = 2, 100


@pytest.fixture(scope="module")
def trainer():
    settings = Learned(epochs=EPOCHS, trial=0.5, lag=0.1, patience=10)
    found = settings.trainer(PARTS, rows=2000, targets=2, cells=48, seed=0)
    assert found.rates.epochs == EPOCHS and found.trial == EPOCHS // 2
    return found


def kept(trainer, epoch, scores, rises=(0.0, 0.0), stale=(0, 0)) -> list[bool]:
    """Return which of two repeats are trained after this epoch."""
    each = lambda values, kind: np.repeat(np.asarray(values, kind), PARTS)
    active = np.ones(2 * PARTS, bool)
    found = trainer.still_active(active, epoch, each(scores, float), each(rises, float), each(stale, int))
    return found[::PARTS].tolist()


def test_a_repeat_is_dropped_after_the_trial_if_it_is_behind(trainer):
    assert kept(trainer, 49, (0.0, -0.2)) == [True, True]
    assert kept(trainer, 50, (0.0, -0.2)) == [True, False]
    assert kept(trainer, 50, (0.0, -0.05)) == [True, True]


def test_a_repeat_that_is_behind_is_kept_while_its_score_rises_fast_enough(trainer):
    assert kept(trainer, 50, (0.0, -0.6), rises=(0.0, 0.011)) == [True, True]
    assert kept(trainer, 50, (0.0, -0.6), rises=(0.0, 0.009)) == [True, False]
    assert kept(trainer, 90, (0.0, -0.6), rises=(0.0, 0.011)) == [True, False]


def test_a_repeat_without_progress_is_not_trained_further(trainer):
    assert kept(trainer, 10, (0.0, 0.0), stale=(11, 0)) == [False, True]


def test_the_recent_rise_is_that_of_the_best_score(trainer):
    from kexpfam.fit.members import EnsembleState, MemberState

    weights = np.zeros((PARTS, 3))
    members = MemberState(weights, weights, ())
    none, zeros = np.full(PARTS, -np.inf), np.zeros(PARTS)
    state = EnsembleState(np.asarray(0), members, weights, none, zeros, zeros.astype(int), zeros == 0.0)
    for score in (1.0, 1.5, 1.2):
        state, _ = trainer.judged(state, weights, np.full(PARTS, score))
    assert state.top == pytest.approx(1.5)
    assert state.rise == pytest.approx(0.5 * 0.1 * 0.9)


def test_the_number_of_epochs_between_two_judgements_does_not_matter(monkeypatch):
    from kexpfam import KernelExpFamily
    from kexpfam.fit import learned

    X = np.random.default_rng(0).normal(size=(120, 4))
    settings = Learned(folds=2, repeats=2, views=("plain",), epochs=8, patience=2)
    models = []
    for chunk in (1, 4, 8):
        monkeypatch.setattr(learned, "CHUNK", chunk)
        models.append(KernelExpFamily(model="chain", learned=settings, random_state=0).fit(X))
    first = models[0].fits_["chain"].trace["held_out"]
    for model in models[1:]:
        np.testing.assert_array_equal(model.score_samples(X), models[0].score_samples(X))
        np.testing.assert_array_equal(model.fits_["chain"].trace["held_out"], first)
