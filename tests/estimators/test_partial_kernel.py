"""Marginals and conditionals of kernel models in two columns: exact on their grid."""

import numpy as np
import pytest

from kexpfam import FewDrawsWarning, Kernel, KernelExpFamily, Learned
from kexpfam.datasets import two_moons

GRID = np.linspace(-8.0, 8.0, 2001)


@pytest.fixture(scope="module")
def model() -> KernelExpFamily:
    kernel = Kernel(lengthscale=0.5, rkhs_penalty=1e-3)
    return KernelExpFamily(kernel=kernel, random_state=0).fit(two_moons().sample(200, random_state=0))


@pytest.mark.parametrize("column", [0, 1])
def test_a_marginal_is_the_integral_of_the_density(model, column):
    points = np.array([-2.5, -1.0, 0.0, 0.7, 2.2])
    rows = np.stack(np.broadcast_arrays(points[:, None], GRID), axis=-1)[..., [column, 1 - column]]
    joint = model.score_samples(rows.reshape(-1, 2)).reshape(rows.shape[:2])
    truth = np.log(np.trapezoid(np.exp(joint), GRID, axis=1))
    found = model.marginal([column]).score_samples(points)
    np.testing.assert_allclose(found, truth, atol=1e-3)
    np.testing.assert_allclose(model.marginal([column]).score_samples(points[2:3]), found[2:3], atol=1e-12)


@pytest.mark.parametrize("at", [0.5, 2.4, 6.8])
def test_a_conditional_integrates_to_one(model, at):
    given = model.given({0: at})
    assert np.trapezoid(np.exp(given.score_samples(GRID)), GRID) == pytest.approx(1.0, abs=2e-3)
    assert given.log_evidence.standard_error == 0.0
    draws = given.sample(4000, random_state=0)[:, 0]
    density = np.exp(given.score_samples(GRID))
    mean = np.trapezoid(GRID * density, GRID)
    spread = np.sqrt(np.trapezoid((GRID - mean) ** 2 * density, GRID))
    assert draws.mean() == pytest.approx(mean, abs=4.0 * spread / np.sqrt(4000))
    assert np.mean(draws <= given.quantile(0.3)) == pytest.approx(0.3, abs=0.03)


def test_equal_rows_have_equal_scores_whatever_stands_beside_them():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3)) @ np.array([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]])
    small = Learned(folds=2, repeats=1, width=12, epochs=20, cells=64, steps=200)
    chain = KernelExpFamily(model="chain", learned=small, random_state=0).fit(X)
    for density in (chain, KernelExpFamily(model="mixture", random_state=0).fit(X)):
        part = density.marginal([0, 2])
        found = part.score_samples(np.concatenate([X[:5, [0, 2]], X[:5, [0, 2]]]))
        np.testing.assert_allclose(found[:5], found[5:], atol=1e-12)
        np.testing.assert_allclose(part.score_samples(X[3:4, [0, 2]]), found[3:4], atol=1e-6)
    with pytest.warns(FewDrawsWarning, match="few effective draws"):
        chain.given({2: 60.0, 0: -60.0}, draws=64)


def test_a_row_with_a_rare_gap_has_the_score_of_its_marginal():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(150, 3)) @ np.array([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]])
    X[:2, 0] = np.nan
    small = Learned(folds=2, repeats=1, width=12, epochs=20, cells=64, steps=200)
    model = KernelExpFamily(learned=small, random_state=0).fit(X)
    rows = X[10:40].copy()
    rows[:, 0] = np.nan
    expected = model.marginal([1, 2]).score_samples(rows[:, 1:])
    # Two sets of draws of 512 and 2048 completions, each with an error of about 0.02.
    np.testing.assert_allclose(model.score_samples(rows), expected, atol=0.15)
    assert abs(np.mean(model.score_samples(rows) - expected)) < 0.03


@pytest.fixture(scope="module")
def three() -> KernelExpFamily:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3)) @ np.array([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]])
    kernel = Kernel(lengthscale=1.5, rkhs_penalty=0.1, base="gaussian")
    return KernelExpFamily(model="kernel", kernel=kernel, random_state=0).fit(X)


@pytest.mark.parametrize("known", [{0: 1.0, 1: 1.0}, {0: 20.0, 1: -20.0}])
def test_a_value_far_out_moves_the_others_beyond_the_grid(three, known):
    given = three.given(known)
    grid = np.linspace(-60.0, 60.0, 24_001)
    assert np.trapezoid(np.exp(given.score_samples(grid)), grid) == pytest.approx(1.0, abs=1e-3)
    assert (given.log_evidence.standard_error == 0.0) == (known[0] < 20.0)


def test_a_row_is_scored_as_it_is_alone_whatever_gaps_the_others_have(three):
    rows = np.array([[0.3, 0.1, np.nan], [0.3, np.nan, np.nan], [np.nan, np.nan, np.nan], [0.1, 0.2, 0.3]])
    alone = [three.score_samples(row[None])[0] for row in rows]
    np.testing.assert_allclose(three.score_samples(rows), alone, rtol=1e-12, atol=1e-12)
    completed = three.conditionals(rows).log_evidence
    np.testing.assert_allclose(completed[[0, 2, 3]], np.array(alone)[[0, 2, 3]], atol=1e-12)
