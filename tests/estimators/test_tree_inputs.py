"""Conditional models whose networks have predictions by trees among their inputs."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.stats import norm

import kexpfam
from kexpfam import ConditionalKernelExpFamily, Learned
from kexpfam.fit.trees import Boosting

SMALL = Learned(
    folds=2,
    repeats=2,
    views=("plain", "trees"),
    gain=-np.inf,
    lag=np.inf,
    width=12,
    epochs=20,
    cells=64,
    steps=200,
    boosting=Boosting(trees=10),
)


def table(seed: int, rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """y = 2 sign(x_0) + 0.3 noise."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 3))
    return X, 2.0 * np.sign(X[:, 0]) + 0.3 * rng.normal(size=rows)


@pytest.fixture(scope="module")
def model():
    return ConditionalKernelExpFamily(model="chain", learned=SMALL, random_state=0).fit(*table(0))


def test_only_the_repeats_with_trees_use_them(model):
    sees = model.density_.members.sees
    assert sees.tolist() == [[1.0, 1.0, 1.0, 0.0]] * 2 + [[1.0, 1.0, 1.0, 1.0]] * 2
    condition = model.density_.inputs.to_model(table(1)[0])
    assert condition.shape[1] == 4
    changed = condition + np.array([0.0, 0.0, 0.0, 1.0])
    plain, trees = (model.density_.members.member(k) for k in (0, 2))
    targets = np.zeros((len(condition), 1))
    for member, same in ((plain, True), (trees, False)):
        found = [member.log_densities(targets, rows) for rows in (condition, changed)]
        assert np.array_equal(*found) == same
        drawn = [member.sample(rows, np.full((len(rows), 1), 0.3)).targets for rows in (condition, changed)]
        assert np.array_equal(*drawn) == same


def test_a_step_is_found(model):
    X, y = table(2, 2000)
    truth = norm.logpdf(y, 2.0 * np.sign(X[:, 0]), 0.3)
    lost = truth - model.score_samples(X, y)
    assert -4.0 * lost.std() / np.sqrt(len(lost)) < lost.mean() < 1.0


def test_stored_compiled_and_conditioned_models_have_the_same_density(model, tmp_path):
    X, y = table(3, 5)
    scores, file = model.score_samples(X, y), tmp_path / "model.kexpfam"
    model.save(file)
    assert np.array_equal(kexpfam.load(file).score_samples(X, y), scores)
    assert np.allclose(jax.jit(model.log_prob)(X[0], y[:1]), scores[0], atol=1e-4)
    assert np.allclose(model.given(X[0]).score_samples(y[:1, None]), scores[0], atol=1e-10)


def test_an_update_fits_trees_again(model):
    learned = ConditionalKernelExpFamily(model="chain", learned=SMALL, random_state=0).fit(*table(0))
    before = learned.density_.inputs.trees
    learned.update(*table(4, 200))
    assert learned.density_.members.sees is not None
    assert not np.array_equal(before.numbers, learned.density_.inputs.trees.numbers)
    assert np.isfinite(learned.score(*table(5)))


def test_noise_has_no_trees_and_an_honest_held_out_score():
    """The held-out score of noise does not exceed the truth by more than 4 standard errors, in 3 tables."""
    forced = dataclasses.replace(SMALL, boosting=Boosting(trees=10, explained=-np.inf))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        X, y = rng.normal(size=(300, 3)), rng.normal(size=300)
        fitted = ConditionalKernelExpFamily(model="chain", learned=forced, random_state=seed).fit(X, y)
        (score,) = fitted.candidates_
        assert score.score < norm.logpdf(y).mean() + 4.0 * score.standard_error
    plain = ConditionalKernelExpFamily(model="chain", learned=SMALL, random_state=0).fit(X, y)
    assert plain.density_.inputs.trees is None
