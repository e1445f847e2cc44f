"""The paper's objectives treat weighted rows as repeated rows, in means and in draws."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam.data.sample import Sample
from kexpfam.fit.dde import saddle_problem
from kexpfam.fit.problem import Problem
from kexpfam.fit.saddle import draw_batch
from kexpfam.integrate.nodes import Integration
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian, Mixture
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper.ascent import AscentProblem, Chains
from kexpfam.paper.duals import MixtureDual, PathwiseDraws
from kexpfam.paper.learned_features import held_out_score
from kexpfam.paper.mmd_gan import regularised_mmd, witness

KERNEL = kernels.Gaussian(0.8)
DRAWS = 20_000


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(25, 1)), rng.integers(1, 6, 25)


@pytest.fixture(scope="module")
def both(rows):
    """Return the problem with weights and the one with repeated rows."""
    data, counts = rows
    base, space = (
        Gaussian(np.zeros(1), np.eye(1)),
        FeatureSpace.of_kernels(KERNEL, KERNEL, Sample.unconditional(data[::3])),
    )
    samples = (
        Sample.unconditional(data, counts.astype(float)),
        Sample.unconditional(np.repeat(data, counts, axis=0)),
    )
    integration = Integration(cells=(100,), tail_cells=(10,), conditional_cells=(100,))
    return [Problem(sample, base, space, 0.05, base, integration) for sample in samples]


def test_the_mean_feature_of_an_ascent_is_that_of_repeated_rows(both):
    weighted, repeated = (AscentProblem.of(problem).mean_feature for problem in both)
    np.testing.assert_allclose(weighted, repeated, rtol=1e-10)


def test_the_regularised_mmd_and_its_witness_are_those_of_repeated_rows(both):
    points = jnp.linspace(-2.0, 2.0, 9)[:, None]
    draws = PathwiseDraws(points, jnp.full(9, 1.0 / 9.0), jnp.zeros(9))
    weighted, repeated = (
        regularised_mmd(saddle_problem(problem, problem.base, problem.space), KERNEL, draws, draws)
        for problem in both
    )
    np.testing.assert_allclose(weighted.value, repeated.value, rtol=1e-9)
    dual = MixtureDual.of(Mixture.of(np.zeros(1), np.zeros((1, 1)), np.ones((1, 1, 1))))
    first, second = (witness(problem, dual, key=jr.key(0)) for problem in both)
    np.testing.assert_allclose(first, second, rtol=1e-9, atol=1e-12)


def test_held_out_scores_of_learned_features_are_those_of_repeated_rows(both):
    weighted, repeated = both
    nodes = weighted.nodes(key=None)
    scores = [
        held_out_score(weighted, weighted.space.target, nodes, problem.sample, nodes)
        for problem in (weighted, repeated)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-10)


def test_batches_hold_rows_as_often_as_they_count(both, rows):
    data, counts = rows
    mean, weighted = np.average(data[:, 0], weights=counts), both[0]
    spread = np.sqrt(np.average((data[:, 0] - mean) ** 2, weights=counts) / DRAWS)
    batch = draw_batch(saddle_problem(weighted, weighted.base, weighted.space), DRAWS, key=jr.key(0))
    started = Chains(count=DRAWS)._rows(AscentProblem.of(weighted), jr.key(1))
    for drawn in (batch.data.target, started):
        assert float(np.mean(drawn)) == pytest.approx(mean, abs=5.0 * spread)
        assert abs(data.mean() - mean) > 10.0 * spread
