"""The verdict sees the fit: a density that is worse than a plain one is not good."""

import numpy as np
import pytest

from kexpfam import ConditionalKernelExpFamily, Judgement, Kernel, KernelExpFamily, Learned, load
from kexpfam.datasets import two_moons

BRIEF = Judgement(draws=500, certifying_draws=500, refine=0)
KERNEL = {"model": "kernel", "random_state": 0}
RESOLVED = Kernel(lengthscale=0.8, rkhs_penalty=1e-4)
BROKEN = {
    "long length scale": {"kernel": Kernel(lengthscale=20.0, rkhs_penalty=1e-2)},
    "large penalty": {"kernel": Kernel(lengthscale=0.8, rkhs_penalty=10.0)},
    "overfitted": {"kernel": Kernel(lengthscale=0.15, rkhs_penalty=1e-7)},
    "one epoch": {"model": "chain", "learned": Learned(folds=2, repeats=1, epochs=1)},
}


@pytest.fixture(scope="module")
def moons():
    return two_moons().sample(200, random_state=0)


@pytest.fixture(scope="module")
def resolved(moons):
    return KernelExpFamily(kernel=RESOLVED, **KERNEL).fit(moons)


@pytest.mark.parametrize("settings", BROKEN.values(), ids=BROKEN)
def test_a_fit_below_a_plain_density_is_poor(moons, settings):
    diagnosis = KernelExpFamily(**KERNEL | settings).fit(moons).diagnose(settings=BRIEF)
    assert diagnosis["reference_loss"].level == "poor"
    assert diagnosis.verdict == diagnosis.fits == "poor"
    assert "kernel density, fits better" in str(diagnosis)


def test_a_problem_can_be_solved_and_the_fit_be_poor(moons):
    diagnosis = KernelExpFamily(**KERNEL | BROKEN["large penalty"]).fit(moons).diagnose(settings=BRIEF)
    assert (diagnosis.solved, diagnosis.fits) == ("good", "poor")
    assert diagnosis.rows()[:3] == [("verdict", "POOR"), ("solved", "good"), ("fits", "poor")]
    assert diagnosis.as_dict()["fits"] == "poor"


def test_an_overfitted_density_scores_training_rows_much_higher(moons):
    diagnosis = KernelExpFamily(**KERNEL | BROKEN["overfitted"]).fit(moons).diagnose(settings=BRIEF)
    assert diagnosis["overfit"].level == "fair"
    assert diagnosis.overfit > 1.0


def test_a_resolved_fit_is_good_and_the_comparison_is_stored(resolved, tmp_path):
    diagnosis = resolved.diagnose(settings=BRIEF)
    assert diagnosis.verdict == diagnosis.fits == "good"
    resolved.save(tmp_path / "model.kexpfam")
    assert (
        load(tmp_path / "model.kexpfam").diagnose(settings=BRIEF).reference_loss == diagnosis.reference_loss
    )


def test_a_fit_is_compared_on_the_rows_that_were_held_out():
    """All training rows score 0.7 nats lower than the held-out ones, under every density."""
    x = -np.exp(3.0 * np.random.default_rng(3).normal(size=200))
    diagnosis = KernelExpFamily(**KERNEL, effort="fast").fit(x[:, None]).diagnose(settings=BRIEF)
    assert diagnosis["reference_loss"].level == "good"
    assert abs(diagnosis.overfit) < 0.1


def test_a_diagnosis_searches_no_mixture(resolved, monkeypatch):
    def searched(*args, **kwargs):
        raise AssertionError("diagnose searched a mixture")

    monkeypatch.setattr("kexpfam.fit.mixture.best_shape", searched)
    monkeypatch.setattr("kexpfam.fit.reference.fit_mixture", searched)
    resolved.diagnose(random_state=1, settings=BRIEF)


def test_a_hole_between_an_outlier_and_the_other_rows_is_found():
    rng = np.random.default_rng(0)
    X = np.append(rng.gamma(2.0, size=199), 14.0)[:, None]
    sharp = KernelExpFamily(kernel=Kernel(lengthscale=0.5, rkhs_penalty=1e-7), **KERNEL).fit(X)
    smooth = KernelExpFamily(kernel=Kernel(lengthscale=2.0, rkhs_penalty=1e-2), **KERNEL).fit(X)
    found = [one.diagnose(settings=BRIEF)["hole"] for one in (sharp, smooth)]
    assert [one.level == "good" for one in found] == [False, True]
    # Half-way to the nearest neighbour of a row, by a second implementation.
    distances = np.abs(X - X.T) + np.where(np.eye(len(X)), np.inf, 0.0)
    half_way = 0.5 * (X + X[distances.argmin(axis=1)])
    assert found[0].value == pytest.approx(sharp.score(X) - sharp.score(half_way), rel=1e-9)


def test_held_out_rows_of_a_lost_mode_are_poor(resolved, moons):
    upper = moons[moons[:, 1] > np.median(moons[:, 1])]
    half = KernelExpFamily(kernel=RESOLVED, **KERNEL).fit(upper)
    for seed in (1, 2, 3):
        fresh = two_moons().sample(600, random_state=seed)
        found, lost = (one.diagnose(fresh, settings=BRIEF) for one in (resolved, half))
        assert found["pit_p_value"].level in ("good", "fair")
        assert lost["pit_p_value"].level == lost.fits == "poor"


def test_a_conditional_fit_is_compared_with_a_linear_model():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, size=(200, 1))
    y = np.sin(3.0 * x[:, 0]) + 0.1 * rng.normal(size=200)
    given = {"condition_lengthscale": 0.5, "base_width": 1.0, "power": False}
    levels = []
    for penalty in (1e-3, 100.0):
        kernel = Kernel(lengthscale=0.5, rkhs_penalty=penalty, **given)
        model = ConditionalKernelExpFamily(kernel=kernel, **KERNEL).fit(x, y)
        diagnosis = model.diagnose(settings=BRIEF)
        assert "normal linear model" in diagnosis["reference_loss"].text
        levels.append(diagnosis["reference_loss"].level)
    assert levels[0] == "good"
    assert levels[1] != "good"
