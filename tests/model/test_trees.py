"""Sums of trees against scikit-learn's own predictions."""

import jax
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from kexpfam.data.sample import Sample
from kexpfam.fit.trees import Boosting, _held_out_stages, boosted
from kexpfam.jax_settings import double_precision

SMALL = Boosting(trees=12, rows_per_leaf=20)


def steps(seed: int, rows: int = 300, noise: float = 0.1) -> Sample:
    """y = 1[x_0 > 0] + x_1 + noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    return Sample(((x[:, 0] > 0.0) + x[:, 1] + noise * rng.normal(size=rows))[:, None], x)


def parts(rows: int) -> np.ndarray:
    return np.arange(rows) % 3


@pytest.fixture(scope="module")
def found():
    return boosted(steps(0), [0], parts(300), SMALL, seed=0)


def test_trees_predict_as_scikit_learn_does(found):
    sample, new = steps(0), steps(1).condition
    assert np.mean((found.held_out - sample.target) ** 2) < 0.2 * sample.target.var()
    models = [
        SMALL.fitted(sample.condition, sample.target[:, 0], None, seed=0, trees=count) for count in (11, 12)
    ]
    with threadpool_limits(1):
        errors = [np.abs(found.trees(new)[:, 0] - model.predict(new)).max() for model in models]
    assert min(errors) < 1e-12 < max(errors)


def test_trees_are_the_same_on_the_host_and_in_a_program(found):
    new = steps(2, rows=7).condition
    with double_precision():
        traced = np.asarray(jax.jit(lambda rows: found.trees(rows))(new))
    assert np.array_equal(traced, found.trees(new))
    assert np.allclose(found.trees(new[:1]), traced[:1], rtol=0, atol=1e-12)


def test_a_held_out_prediction_does_not_depend_on_the_part_of_its_row():
    sample, own = steps(0), parts(300) == 1
    changed = np.where(own[:, None], 7.0, sample.target)
    first, other = (
        _held_out_stages(sample.condition, y[:, 0], None, parts(300), SMALL, 0)
        for y in (sample.target, changed)
    )
    assert np.array_equal(first[own], other[own])
    assert not np.array_equal(first[~own], other[~own])


@pytest.mark.parametrize("seed", range(4))
def test_noise_has_no_trees(seed):
    noise = Sample(np.random.default_rng(seed).normal(size=(200, 1)), steps(seed, 200).condition)
    assert boosted(noise, [0], parts(200), SMALL, seed=0) is None


def test_rows_of_weight_zero_are_not_fitted():
    sample, there = steps(3, 240), np.arange(240) % 2 == 0
    changed = np.where(there[:, None], sample.target, 7.0)
    weighted = Sample(changed, sample.condition, there.astype(float))
    found = boosted(weighted, [0], np.arange(240) % 3, SMALL, seed=0)
    error = np.mean((found.held_out - sample.target)[there] ** 2)
    assert error < 0.5 * sample.target[there].var()
