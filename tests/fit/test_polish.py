"""The convex polish of learned tilts: gradient, optimality gap and choice by held-out rows."""

import jax.random as jr
import numpy as np
import pytest
from scipy.optimize import check_grad

from kexpfam.data.sample import Sample
from kexpfam.fit.learned import Learned, learn
from kexpfam.fit.polish import polished, tilted_columns
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import Chain, Layout
from kexpfam.model.ensemble import uniform_levels

CELLS = 96


def skewed(seed: int, rows: int, dim: int = 1) -> Sample:
    """Targets with an exponential residual around a line: no location and scale describes them."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, size=(rows, 1))
    return Sample(0.5 * x + rng.exponential(size=(rows, dim)) - 1.0, x)


def drawn(dim: int = 1, members: int = 2) -> Chain:
    """An ensemble as it is before training."""
    return Chain.draw(1, np.tile(np.arange(dim), (members, 1)), Layout.real(dim), width=8, depth=1, seed=0)


def parts_of(rows: int) -> tuple[np.ndarray, np.ndarray]:
    halves = np.arange(rows).reshape(2, -1)
    return halves[::-1], halves


@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_the_gradient_is_that_of_the_cost(penalty):
    (link,) = tilted_columns(drawn().member(0), skewed(0, 40), CELLS)
    weights = 0.3 * np.random.default_rng(1).normal(size=link.units.shape[1] * link.features.shape[1])
    error = check_grad(lambda w: link.cost(w, penalty)[0], lambda w: link.cost(w, penalty)[1], weights)
    assert error < 1e-5


@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_no_weights_are_better_than_the_bound_allows(penalty):
    """Wherever one starts from, what is found is within the sum of both bounds."""
    (link,) = tilted_columns(drawn().member(0), skewed(0, 60), CELLS)
    rng, shape = np.random.default_rng(2), (link.units.shape[1], link.features.shape[1])
    (zero, near), (far, other) = (
        link.improved(start, penalty, 100) for start in (np.zeros(shape), rng.normal(size=shape))
    )
    difference = link.cost(zero.ravel(), penalty)[0] - link.cost(far.ravel(), penalty)[0]
    assert max(near, other) < 1e-4
    assert -other <= difference <= near


@pytest.mark.parametrize("dim", [1, 3])
def test_a_corrected_chain_has_the_density_that_was_fitted_and_draws_from_it(dim):
    sample, chain = skewed(0, 120, dim), drawn(dim)
    better, polish = polished(chain, sample, *parts_of(120), 2, (0.1, 0.01), CELLS)
    assert polish is not None and polish.gain > 0.05 and polish.gap < 1e-4
    new = skewed(1, 4_000, dim)
    gain = [
        better.member(k).log_densities(new.target, new.condition, cells=CELLS).sum(1)
        - chain.member(k).log_densities(new.target, new.condition, cells=CELLS).sum(1)
        for k in (0, 1)
    ]
    assert np.mean(gain) > 0.05
    levels = uniform_levels(np.random.default_rng(3), 4_000, dim)
    draws = better.member(0).sample(new.condition, levels, cells=CELLS)
    log_density = better.member(0).log_densities(draws.targets, new.condition, cells=CELLS).sum(1)
    ratio = draws.log_density - log_density
    assert abs(ratio.mean()) < 0.03 + 4.0 * ratio.std() / np.sqrt(len(ratio))


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_not_polished(seed):
    """The chain is standard normal before training, as the targets are: no correction generalises."""
    rng = np.random.default_rng(seed)
    sample = Sample(rng.normal(size=(200, 1)), rng.normal(size=(200, 1)))
    _, polish = polished(drawn(), sample, *parts_of(200), 2, (0.1, 0.01), CELLS)
    assert polish is None or polish.gain < 0.05


def test_a_fit_says_whether_it_was_polished():
    settings = Learned(folds=2, repeats=1, width=8, epochs=2, cells=64, polish=(0.1, 0.01))
    with double_precision():
        plain, better = (
            learn(skewed(0, 200), one, key=jr.key(0))
            for one in (Learned(**{**vars(settings), "polish": ()}), settings)
        )
    assert plain.polish is None and better.polish is not None
    assert np.nanmean(better.held_out) > np.nanmean(plain.held_out)
