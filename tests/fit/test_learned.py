"""Learned chains: accuracy, held-out rows, repetition, checkpoints and interruption."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from kexpfam import storage
from kexpfam.data.sample import Sample
from kexpfam.fit import members
from kexpfam.fit.learned import Learned, best_power, learn
from kexpfam.fit.members import bounded_mean
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import Chain, Layout, piecewise, piecewise_knots
from kexpfam.model.ensemble import Pool

SMALL = Learned(folds=2, repeats=1, width=16, epochs=40, cells=64, steps=400)


def heteroscedastic(seed: int, rows: int = 600) -> Sample:
    """y = x + (0.1 + 0.4 |x|) e."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, size=(rows, 1))
    return Sample(x + (0.1 + 0.4 * np.abs(x)) * rng.normal(size=(rows, 1)), x)


def learned(sample: Sample, settings: Learned = SMALL, seed: int = 0, **options):
    with double_precision():
        return learn(sample, settings, key=jr.key(seed), **options)


@pytest.fixture(scope="module")
def ensemble():
    return learned(heteroscedastic(0))


def test_it_gets_near_the_truth(ensemble):
    """The mean excess over the true log density is a KL divergence: small, on rows that it has not seen."""
    new = heteroscedastic(1, 2000)
    truth = norm.logpdf(new.target, new.condition, 0.1 + 0.4 * np.abs(new.condition))[:, 0]
    found = np.logaddexp.reduce(
        [ensemble.chain.member(k).log_densities(new.target, new.condition, cells=96)[:, 0] for k in (0, 1)], 0
    )
    excess = truth - found + np.log(2.0)
    assert -4.0 * excess.std() / np.sqrt(len(excess)) < excess.mean() < 0.2


def test_held_out_rows_are_those_that_a_member_did_not_see(ensemble):
    rows = np.isfinite(ensemble.held_out)
    assert rows.sum() == 2 * int(SMALL.held_out * 600)
    part = heteroscedastic(0).rows(rows)
    each = np.stack([scores_of_member(ensemble, k, part) for k in (0, 1)])
    assert np.abs(each - ensemble.held_out[rows]).min(axis=0).max() < 1e-9


def test_a_member_does_not_train_on_the_rows_that_judge_it():
    """Other values there leave its weights after an epoch as they were; those of the other member change."""
    sample, once = heteroscedastic(2), Learned(**(vars(SMALL) | {"epochs": 1}))
    first = learned(sample, once)
    own = learned_rows(first, sample)
    moved = np.array(sample.target)
    moved[own] += 3.0
    second = learned(Sample(moved, sample.condition), once)
    assert np.array_equal(first.chain.member(0).out, second.chain.member(0).out)
    assert not np.array_equal(first.chain.member(1).out, second.chain.member(1).out)


def test_other_rates_and_penalties_need_no_other_program(ensemble, monkeypatch):
    traced = []
    cost = members._cost
    monkeypatch.setattr(
        members, "_cost", lambda *arguments, **cells: traced.append(1) or cost(*arguments, **cells)
    )
    other = Learned(
        **(
            vars(SMALL)
            | {
                "rate": 3e-3,
                "decay": 0.0,
                "rkhs_penalty": 0.1,
                "dropout": 0.2,
                "average": 0.5,
                "lag": 1.0,
                "epochs": 10,
            }
        )
    )
    moved = learned(heteroscedastic(0), other)
    assert not traced
    assert not np.array_equal(moved.chain.out, ensemble.chain.out)


@pytest.mark.parametrize("rows", [550, 620, 800])
def test_other_numbers_of_rows_need_no_other_program(ensemble, monkeypatch, rows):
    traced = []
    cost = members._cost
    monkeypatch.setattr(
        members, "_cost", lambda *arguments, **cells: traced.append(1) or cost(*arguments, **cells)
    )
    learned(heteroscedastic(0, rows), Learned(**(vars(SMALL) | {"epochs": 1})))
    assert not traced


def test_a_piecewise_linear_encoding_is_that_of_interpolation():
    """The encoding times the rises between knots interpolates linearly, and is constant outside."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.normal(size=200), rng.integers(0, 2, 200)], axis=1)
    knots = piecewise_knots(rows, 8)
    values = rng.normal(size=9)
    encoded = piecewise(rows, knots)
    assert np.allclose(values[0] + encoded[:, :8] @ np.diff(values), np.interp(rows[:, 0], knots[0], values))
    assert not encoded[:, 8:].any(), "two values have no encoding"


def test_knots_stay_where_they_are():
    sample = heteroscedastic(0)
    every = {"epochs": 3, "pieces": 8, "repeats": 2, "gain": -np.inf}
    ensemble = learned(sample, Learned(**(vars(SMALL) | every)))
    knots = piecewise_knots(np.concatenate([sample.condition, sample.target], axis=1), 8)
    assert np.array_equal(ensemble.chain.knots[2:], [knots.astype(np.float32)] * 2)
    assert not ensemble.chain.knots[:2].any(), "the first repeat has plain inputs"


@pytest.mark.parametrize(("gain", "members"), [(-np.inf, 4), (np.inf, 2)])
def test_a_repeat_stays_if_held_out_rows_gain(gain, members):
    settings = Learned(**(vars(SMALL) | {"epochs": 3, "repeats": 2, "gain": gain}))
    assert len(learned(heteroscedastic(0), settings).chain.order) == members


def test_a_repeat_that_lags_is_trained_no_further():
    """Waves of twenty periods are out of reach of plain inputs in so few updates; encoded ones have knots."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(2000, 1))
    sample = Sample(np.sin(20.0 * x) + 0.05 * rng.normal(size=(2000, 1)), x)
    ensemble = learned(sample, Learned(**(vars(SMALL) | {"repeats": 2, "trial": 0.2, "lag": 0.05})))
    assert ensemble.trace["active"][0] == 4.0
    assert ensemble.trace["active"][-1] <= 2.0
    assert ensemble.chain.knots.any(axis=(1, 2)).all(), "the plain repeat is dropped"


def scores_of_member(ensemble, k: int, sample: Sample) -> np.ndarray:
    """Return the log density of rows under one member, to the power of the pool."""
    alone = Pool(ensemble.chain.member(np.array([k])), np.array([ensemble.power]))
    return alone.log_densities(np.asarray(sample.target, float), np.asarray(sample.condition, float))[:, 0]


def learned_rows(ensemble, sample: Sample) -> np.ndarray:
    """Return the rows that the first member was judged by."""
    return np.flatnonzero(np.abs(scores_of_member(ensemble, 0, sample) - ensemble.held_out) < 1e-9)


def test_the_same_key_gives_the_same_members(ensemble):
    assert np.array_equal(learned(heteroscedastic(0)).chain.out, ensemble.chain.out)
    assert not np.array_equal(learned(heteroscedastic(0), seed=1).chain.out, ensemble.chain.out)


def test_it_resumes_from_a_checkpoint_as_if_nothing_had_happened(ensemble, tmp_path):
    sample = heteroscedastic(0)
    place = storage.Checkpoint(tmp_path / "run", (sample, SMALL))
    calls = []

    def interrupt(report):
        calls.append(report)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learned(sample, report=interrupt, checkpoint=place)
    assert calls[0].stage == "learning"
    again = learned(sample, checkpoint=place)
    assert np.array_equal(again.chain.out, ensemble.chain.out)


def test_orders_of_columns_differ_between_members():
    rng = np.random.default_rng(0)
    ensemble = learned(
        Sample.unconditional(rng.normal(size=(120, 6))),
        Learned(folds=3, repeats=2, width=8, epochs=2, cells=32),
    )
    assert len({tuple(order) for order in ensemble.chain.order}) > 1
    assert all(sorted(order) == list(range(6)) for order in ensemble.chain.order)


FINENESS = [
    (277, 1, 20),
    (7_373, 1, 48),
    (10_000, 2, 64),
    (90_000, 4, 32),
    (90_000, 6, 20),
    (1_001, 10, 20),
    (1_000, 10, 12),
]


@pytest.mark.parametrize(("rows", "targets", "bumps"), FINENESS)
def test_many_rows_are_resolved_more_finely_where_targets_are_few(rows, targets, bumps):
    assert Learned().resolution(rows, targets) == bumps


@pytest.mark.parametrize(("targets", "share"), [(1, 0.02), (2, 0.02), (4, 0.04), (5, 0.05), (40, 0.05)])
def test_more_units_are_dropped_where_targets_are_many(targets, share):
    assert Learned(dropout=0.05).dropped(targets) == pytest.approx(share)


@pytest.mark.parametrize(("rows", "parts"), [(100, 5), (1000, 5), (8000, 2), (50_000, 2)])
def test_many_rows_need_fewer_parts(rows, parts):
    assert Learned().parts(rows) == parts


@pytest.mark.parametrize(
    "wrong", [{"folds": 1}, {"held_out": 0.9}, {"epochs": 0}, {"width": 0}, {"rate": -1.0}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Learned(**wrong)


def test_how_far_a_row_is_off_does_not_end_the_training():
    """The rows that decide are the many: a member goes on improving whatever becomes of a far one."""
    scores = np.random.default_rng(0).normal(size=100)
    bad, worse = np.append(scores, -1e2), np.append(scores, -1e6)
    assert float(bounded_mean(bad, 20.0)) == pytest.approx(float(bounded_mean(worse, 20.0)))
    assert float(bounded_mean(scores, 20.0)) == pytest.approx(scores.mean(), abs=1e-6)


def test_held_out_parts_may_be_given():
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(90, 2)))
    parts = np.arange(60).reshape(3, 20)
    settings = Learned(folds=2, repeats=2, width=8, epochs=1, cells=32, gain=-np.inf)
    ensemble = learned(sample, settings, held=parts)
    assert len(ensemble.chain.order) == 6, "three parts of two members each"
    assert np.array_equal(np.isfinite(ensemble.held_out), np.arange(90) < 60)


def test_views_are_checked_and_repeated():
    with pytest.raises(ValueError, match="views must be made of"):
        Learned(views=("plain", "forest"))
    settings = Learned(repeats=4)
    assert settings.repeated_views(trees=True) == ("plain", "encoded", "encoded+trees", "plain")
    assert settings.repeated_views(trees=False) == ("plain", "encoded", "plain")


def test_one_target_has_at_least_some_passes_over_many_rows():
    settings = Learned(steps=2_000, passes=90)
    assert [settings.updates(1, each) for each in (10, 100, 1_000)] == [5_000, 9_000, 20_000]
    assert settings.updates(10, 1_000) == 2_000
    assert [settings.patient(targets) for targets in (1, 2, 5)] == [40, 20, 10]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("repeats", "noise"), [(1, 0.0), (2, 0.5), (3, 0.5)])
def test_held_out_rows_tell_the_power_of_the_pool_of_all_members(seed, repeats, noise):
    """Members are a fifth wider than the target and have locations with errors of their own. The power is
    compared with the best one for fresh rows and all members, which held-out rows never see."""
    rng = np.random.default_rng(seed)
    parts, inputs, rows = 2, 10, 2000
    members = repeats * parts
    chain = Chain.draw(inputs, np.zeros((members, 1), int), Layout.real(1), width=8, depth=1, seed=seed)
    out, skip, shift = (np.zeros_like(part) for part in (chain.out, chain.skip, chain.shift))
    skip[:, :inputs, 0] = np.sqrt(noise / inputs) * rng.normal(size=(members, inputs))
    chain = dataclasses.replace(chain, out=out, skip=skip, shift=shift)
    x, fresh_x = rng.normal(size=(2, rows, inputs))
    y, fresh_y = rng.normal(size=(2, rows, 1)) / 1.2
    held = np.tile(rng.permutation(rows).reshape(parts, -1), (repeats, 1))
    found = best_power(chain, Sample(y, x), held, parts, Learned())
    pool = lambda power: Pool(chain, np.full(members, power / members))
    score = lambda power: pool(power).log_densities(fresh_y, fresh_x).mean()
    wanted = {"bounds": (0.5, 2.0), "method": "bounded", "options": {"xatol": 0.05}}
    best = minimize_scalar(lambda power: -score(power), **wanted).x
    assert found == pytest.approx(best, rel=0.2)
    assert score(found) > score(best) - 0.01


def test_few_rows_have_a_power_near_one():
    rng = np.random.default_rng(0)
    chain = Chain.draw(1, np.zeros((2, 1), int), Layout.real(1), width=8, depth=1, seed=0)
    sample = Sample(0.5 * rng.normal(size=(40, 1)), rng.normal(size=(40, 1)))
    held = np.arange(40).reshape(2, 20)
    assert 1.0 < best_power(chain, sample, held, 2, Learned()) < 1.1


def test_joint_densities_have_no_power(ensemble):
    assert learned(Sample(np.random.default_rng(0).normal(size=(60, 2)), np.zeros((60, 0)))).power == 1.0
