"""Conformal p-values: against ranks counted one by one, and their level on new rows."""

import numpy as np
import pytest
from labelled import SMALL
from labelled import labelled_rows as frame
from sklearn.base import clone

import kexpfam
from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily, Search
from kexpfam.adapters.outliers import OutlierDetector
from kexpfam.judge.novelty import Reference, discoveries, part_density


@pytest.fixture(scope="module")
def conditional() -> ConditionalKernelExpFamily:
    rows = frame(0)
    return ConditionalKernelExpFamily(learned=SMALL, random_state=0).fit(rows[["kind", "b"]], rows["a"])


def test_p_values_are_ranks_counted_one_by_one():
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 9, size=20).astype(float), rng.integers(0, 9, size=31).astype(float)]
    new = [rng.integers(-1, 10, size=12).astype(float) for _ in parts]
    both = list(zip(parts, new, strict=True))
    counts = lambda test, part, own: np.array([sum(test(s, t) for s in part) for t in own])
    counted = lambda test: (1 + sum(counts(test, part, own) for part, own in both)) / 52.0
    low, high = counted(lambda s, t: s <= t), counted(lambda s, t: s >= t)
    reference = Reference.of(parts)
    np.testing.assert_allclose(reference.p_values(new), low)
    np.testing.assert_allclose(reference.p_values(new, "both"), np.minimum(1.0, 2.0 * np.minimum(low, high)))


def test_a_weight_counts_a_row_that_often():
    scores, weight = np.array([0.3, -1.0, 2.0]), np.array([2.0, 1.0, 3.0])
    repeated = Reference.of([np.repeat(scores, weight.astype(int))])
    weighted = Reference.of([scores], [weight])
    np.testing.assert_allclose(weighted.p_values([scores]), repeated.p_values([scores]))


def test_the_level_holds_for_exchangeable_scores():
    rng, runs = np.random.default_rng(0), 1000
    found = [
        Reference.of([scores[:30], scores[30:59]]).p_values([scores[59:]] * 2)[0]
        for scores in rng.normal(size=(runs, 60))
    ]
    for level in (0.05, 0.2, 0.5):
        assert np.mean(np.array(found) <= level) == pytest.approx(
            level, abs=4.0 * np.sqrt(level * (1.0 - level) / runs)
        )


def test_discoveries_are_those_of_the_step_up_rule():
    p = np.random.default_rng(0).uniform(size=50) ** 3
    ordered = np.sort(p)
    last = max(np.flatnonzero(ordered <= 0.1 * np.arange(1, 51) / 50), default=-1)
    np.testing.assert_array_equal(discoveries(p, 0.1), p <= (ordered[last] if last >= 0 else -1.0))


def test_parts_are_the_members_that_held_them_out(labelled):
    parts = [part_density(labelled.density_, k, 3) for k in range(3)]
    assert {len(part) for part in parts} == {len(labelled.density_) // 3}
    rows = labelled._scored_rows(frame(1, 20), None)
    scores = np.stack([labelled._log_density(part, *rows) for part in parts])
    np.testing.assert_allclose(
        np.logaddexp.reduce(scores) - np.log(3), labelled.score_samples(frame(1, 20)), rtol=1e-5
    )


def test_held_out_scores_are_those_of_the_parts(labelled):
    """The scores that the fit keeps are those of the same rows under the members without them."""
    rows = labelled._scored_rows(frame(0), None)
    for k, known in enumerate(labelled._reference.scores):
        own = labelled._log_density(part_density(labelled.density_, k, 3), *rows)
        # Every held-out score is that of a training row, to the precision of the network.
        distance = np.abs(known[:, None] - own[None]).min(axis=1)
        assert distance.max() < 1e-3


def test_new_rows_have_uniform_p_values_and_strange_ones_small_ones(labelled, conditional):
    new, rows = frame(1, 1000), labelled._reference.rows
    strange = new.head(40).assign(b=new["a"].head(40) + 6.0)
    for p, far in (
        (labelled.novelty(new), labelled.novelty(strange)),
        (
            conditional.novelty(new[["kind", "b"]], new["a"]),
            conditional.novelty(strange[["kind", "b"]], strange["a"] - 9.0),
        ),
    ):
        for level in (0.1, 0.3):
            error = np.sqrt(level * (1.0 - level) * (1.0 / len(new) + 1.0 / rows))
            assert np.mean(p <= level) == pytest.approx(level, abs=4.0 * error)
        assert np.median(far) < 0.05


def test_flagged_rows_are_the_strange_ones(labelled):
    rows = frame(1, 60)
    rows.loc[:9, "b"] = rows.loc[:9, "a"] + 8.0
    flagged = labelled.flag(rows, fdr=0.2)
    assert flagged[:10].all()
    assert not labelled.flag(rows.iloc[10:], fdr=0.05).all()


def test_calibration_replaces_the_scores_of_the_fit_until_it_is_undone(labelled):
    own, rows = labelled.novelty(frame(2, 30)), frame(3, 99)
    labelled.calibrate(rows)
    known, new = labelled.score_samples(rows), labelled.score_samples(frame(2, 30))
    np.testing.assert_allclose(labelled.novelty(frame(2, 30)), [(1 + np.sum(known <= s)) / 100 for s in new])
    np.testing.assert_array_equal(labelled.calibrate(None).novelty(frame(2, 30)), own)
    with pytest.raises(ValueError, match="at least 10 rows"):
        labelled.calibrate(rows.head(3))


def test_a_stored_model_has_the_same_p_values(labelled, tmp_path):
    labelled.save(tmp_path / "m.kexpfam")
    loaded = kexpfam.load(tmp_path / "m.kexpfam")
    np.testing.assert_allclose(loaded.novelty(frame(2, 30)), labelled.novelty(frame(2, 30)))


def test_a_fit_without_held_out_rows_asks_for_calibration(moons):
    from kexpfam.estimators import KernelDensity

    model = KernelDensity(bandwidth=0.3).fit(moons)
    with pytest.raises(ValueError, match="call calibrate"):
        model.novelty(moons)
    assert model.calibrate(moons).novelty(moons).min() > 0.0
    with pytest.raises(ValueError, match="side"):
        model.novelty(moons, side="high")
    with pytest.raises(ValueError, match="fdr"):
        model.flag(moons, fdr=1.0)


@pytest.fixture(scope="module")
def detector(moons):
    few = Kernel(search=Search(folds=2, lengthscales=(0.5,), penalties=(1e-2, 1e-3)))
    return clone(OutlierDetector(KernelExpFamily(kernel=few, random_state=0), level=0.1)).fit(moons)


def test_few_columns_are_compared_with_their_cross_validated_scores(moons, detector):
    model = detector.estimator_
    assert model._reference.rows == len(moons)
    p = model.novelty(np.concatenate([moons, [[8.0, 8.0]]]))
    assert np.mean(p[:-1] <= 0.5) == pytest.approx(0.5, abs=4.0 * 0.5 / np.sqrt(150))
    assert p[-1] == pytest.approx(1.0 / (len(moons) + 1))


def test_the_outlier_detector_has_scikit_learns_interface(moons, detector):
    far = np.concatenate([moons[:50], [[9.0, 9.0]]])
    np.testing.assert_allclose(
        detector.decision_function(far), detector.score_samples(far) - detector.offset_
    )
    np.testing.assert_array_equal(detector.predict(far) == -1, detector.decision_function(far) < 0.0)
    assert detector.predict(far)[-1] == -1
    assert np.mean(detector.predict(moons) == -1) == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / 150))
