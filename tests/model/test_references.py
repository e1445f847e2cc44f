"""Measures that exist under a condition: cells of a grid, and mixtures by a network."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.special
import scipy.stats
from oracles import midpoint_grid

from kexpfam.integrate.nodes import grid_nodes
from kexpfam.model.density import Tilt, TiltedCells
from kexpfam.model.kernels import Gaussian as GaussianKernel
from kexpfam.model.measures import LOG_SCALES, Box, Cells, Gaussian, MixtureNetwork
from kexpfam.model.spaces import FeatureSpace, KernelSpan

DRAWS = 4000
CONDITIONS = np.array([[-1.0, 0.5], [0.0, 0.0], [2.0, -0.3]])


def cells(*sizes: int, seed: int = 0) -> Cells:
    """Return random masses on uneven cells."""
    rng = np.random.default_rng(seed)
    masses = rng.dirichlet(np.ones(np.prod(sizes)))
    edges = tuple(jnp.asarray(np.cumsum(rng.uniform(0.2, 1.0, size + 1)) - 1.5) for size in sizes)
    return Cells(jnp.log(jnp.asarray(masses)), edges)


def tilted(dim: int, seed: int = 0, base=None) -> Tilt:
    """Return a random f of two conditions and ``dim`` targets."""
    rng = np.random.default_rng(seed)
    condition = KernelSpan.build(GaussianKernel(jnp.array([1.0, 2.0])), rng.normal(size=(6, 2)))
    target = KernelSpan.build(GaussianKernel(jnp.asarray(0.8)), rng.normal(size=(5, dim)))
    weights = 2.0 * rng.normal(size=condition.size * target.size)
    return Tilt(
        FeatureSpace(condition, target), jnp.asarray(weights), base or Gaussian(jnp.zeros(dim), jnp.eye(dim))
    )


@pytest.fixture(scope="module")
def network():
    """A network with weights in every layer, so that the condition matters."""
    measure = MixtureNetwork.draw(
        2, np.random.default_rng(0).normal(size=(50, 1)), components=3, width=8, depth=1, key=jr.key(0)
    )
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: (
            leaf + jnp.asarray(rng.normal(0.0, 0.5, leaf.shape), leaf.dtype) if eqx.is_array(leaf) else leaf
        ),
        measure,
    )


def test_cells_have_the_density_of_a_histogram():
    measure = cells(7)
    edges = np.asarray(measure.edges[0])
    masses = np.exp(np.asarray(measure.log_masses))
    histogram = scipy.stats.rv_histogram((masses / np.diff(edges), edges), density=True)
    points = np.linspace(edges[0] + 1e-3, edges[-1] - 1e-3, 101)
    np.testing.assert_allclose(measure.log_densities(points[:, None]), histogram.logpdf(points), rtol=1e-9)


@pytest.mark.parametrize("sizes", [(6,), (3, 4), (2, 3, 4)])
def test_the_density_of_cells_integrates_to_one(sizes):
    measure = cells(*sizes)
    middles = [0.5 * (edge[1:] + edge[:-1]) for edge in measure.edges]
    points = np.stack(np.meshgrid(*middles, indexing="ij"), -1).reshape(-1, len(sizes))
    volumes = np.prod(
        np.stack(np.meshgrid(*[np.diff(edge) for edge in measure.edges], indexing="ij"), -1), axis=-1
    ).ravel()
    densities = np.exp(measure.log_densities(points))
    np.testing.assert_allclose(densities * volumes, np.exp(np.asarray(measure.log_masses)), rtol=1e-9)
    assert np.sum(densities * volumes) == pytest.approx(1.0, abs=1e-9)


def test_cells_have_no_density_outside():
    measure = cells(3, 4)
    low, high = (np.asarray(side) for side in measure.bounds(5.0))
    outside = np.array(
        [[low[0] - 1e-6, low[1] + 0.1], [high[0] + 1e-6, low[1] + 0.1], [low[0] + 0.1, high[1] + 9.0]]
    )
    assert np.all(np.isneginf(measure.log_densities(outside)))
    assert np.all(np.isfinite(measure.log_densities(np.stack([low + 1e-6, high - 1e-6]))))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(6,), (3, 4)])
def test_cells_are_drawn_as_often_as_their_masses_say(sizes, seed):
    measure = cells(*sizes)
    draws = measure.draws(DRAWS, key=jr.key(seed))
    counts, _ = np.histogramdd(draws, [np.asarray(edge) for edge in measure.edges])
    assert counts.sum() == DRAWS
    masses = np.exp(np.asarray(measure.log_masses))
    errors = np.sqrt(masses * (1.0 - masses) / DRAWS)
    assert np.all(np.abs(counts.ravel() / DRAWS - masses) < 4 * errors)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_are_uniform_within_a_cell(seed):
    measure = Cells(jnp.log(jnp.array([0.3, 0.7])), (jnp.array([0.0, 1.0, 3.0]),))
    draws = measure.draws(DRAWS, key=jr.key(seed))[:, 0]
    assert scipy.stats.kstest(draws[draws < 1.0], "uniform").pvalue > 1e-4
    assert scipy.stats.kstest((draws[draws >= 1.0] - 1.0) / 2.0, "uniform").pvalue > 1e-4


def test_cells_without_mass_are_never_drawn():
    measure = Cells(jnp.array([-jnp.inf, 0.0, -jnp.inf]), (jnp.array([0.0, 1.0, 2.0, 3.0]),))
    draws = measure.draws(DRAWS, key=jr.key(0))
    assert np.all((draws >= 1.0) & (draws <= 2.0))
    assert np.isneginf(measure.log_densities(np.array([[0.5]]))[0])


@pytest.mark.parametrize("dim", [1, 2])
def test_tilted_cells_have_the_probabilities_of_the_grid(dim):
    tilt, data = tilted(dim), np.random.default_rng(1).normal(size=(40, dim))
    fineness = {1: 0.2, 2: 0.1}[dim]
    nodes = grid_nodes(tilt.base, data, fineness=fineness)
    measure = TiltedCells.on(tilt, nodes)
    for condition in CONDITIONS:
        f = tilt.values(nodes.points, np.broadcast_to(condition, (len(nodes.points), 2)))
        expected = scipy.special.log_softmax(nodes.log_weights + f)
        np.testing.assert_allclose(measure.given(jnp.asarray(condition)).log_masses, expected, atol=1e-9)


def test_fine_cells_have_nearly_the_density_itself():
    tilt, data = tilted(1), np.random.default_rng(1).normal(size=(40, 1))
    measure = TiltedCells.on(tilt, grid_nodes(tilt.base, data))
    points = np.linspace(-2.0, 2.0, 21)[:, None]
    for condition in CONDITIONS:
        grid, width = midpoint_grid([-7.0], [7.0], 5000)
        log_tilt = lambda y, c=condition: (
            tilt.base.log_densities(y) + tilt.values(y, np.broadcast_to(c, (len(y), 2)))
        )
        expected = log_tilt(points) - np.log(width * np.exp(log_tilt(grid)).sum())
        # A cell is 1/800 of the data's range, and its value is that of its middle.
        np.testing.assert_allclose(
            measure.given(jnp.asarray(condition)).log_densities(points), expected, atol=0.05
        )


def test_tilted_cells_stay_in_a_box():
    box = Box(jnp.array([-1.0]), jnp.array([1.5]))
    data = np.linspace(-0.9, 1.4, 30)[:, None]
    measure = TiltedCells.on(tilted(1, base=box), grid_nodes(box, data, fineness=0.2))
    draws = measure.given(jnp.asarray(CONDITIONS[0])).draws(DRAWS, key=jr.key(0))
    assert np.all((draws >= -1.0) & (draws <= 1.5))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_new_network_is_the_same_mixture_under_every_condition(dim):
    targets = np.random.default_rng(0).normal(3.0, 1.0, (60, dim))
    measure = MixtureNetwork.draw(2, targets, components=4, width=8, depth=1, key=jr.key(0))
    first, second = (measure.given(jnp.asarray(c)) for c in CONDITIONS[:2])
    np.testing.assert_allclose(first.means, second.means, atol=1e-6)
    np.testing.assert_allclose(np.exp(first.log_weights), 0.25, rtol=1e-5)
    assert np.all((np.asarray(first.means) >= targets.min(0)) & (np.asarray(first.means) <= targets.max(0)))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_network_gives_a_normalised_mixture(network, condition):
    mixture = network.given(jnp.asarray(condition))
    assert np.exp(np.asarray(mixture.log_weights)).sum() == pytest.approx(1.0, abs=1e-6)
    points, width = midpoint_grid([-40.0], [40.0], 80_000)
    assert width * np.exp(mixture.log_densities(points)).sum() == pytest.approx(1.0, abs=1e-4)


def test_a_networks_density_is_the_formula_with_its_outputs(network):
    points = np.linspace(-3.0, 3.0, 7)
    for condition in CONDITIONS:
        outputs = np.asarray(network.network(jnp.asarray(condition)[None], jnp.zeros((1, 0)))[0], float)
        logits, means, scales = outputs[:3], outputs[3:6], np.exp(np.clip(outputs[6:], *LOG_SCALES))
        weights = scipy.special.softmax(logits)
        slow = [np.sum(weights * scipy.stats.norm.pdf(y, means, scales)) for y in points]
        fast = np.exp(network.given(jnp.asarray(condition)).log_densities(points[:, None]))
        np.testing.assert_allclose(fast, slow, rtol=1e-4)


def test_the_condition_matters_to_a_trained_network(network):
    first, second = (network.given(jnp.asarray(c)) for c in CONDITIONS[:2])
    assert np.abs(np.asarray(first.means) - np.asarray(second.means)).max() > 0.01


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_of_a_network_have_the_moments_of_its_mixture(network, seed):
    mixture = network.given(jnp.asarray(CONDITIONS[2]))
    weights, means = np.exp(np.asarray(mixture.log_weights)), np.asarray(mixture.means)[:, 0]
    draws = mixture.draws(DRAWS, key=jr.key(seed))[:, 0]
    assert abs(draws.mean() - weights @ means) < 4 * draws.std() / np.sqrt(DRAWS)
    second = weights @ (means**2 + np.asarray(mixture.choleskys)[:, 0, 0] ** 2)
    assert abs((draws**2).mean() - second) < 4 * (draws**2).std() / np.sqrt(DRAWS)


def test_scales_of_a_network_keep_within_reason(network):
    wild = jax.tree.map(lambda leaf: 100.0 * leaf if eqx.is_array(leaf) else leaf, network)
    for condition in CONDITIONS:
        mixture = wild.given(jnp.asarray(condition))
        scales = np.asarray(mixture.choleskys)[:, 0, 0]
        assert np.all((scales >= np.exp(LOG_SCALES[0]) * 0.999) & (scales <= np.exp(LOG_SCALES[1]) * 1.001))
        np.testing.assert_allclose(np.asarray(mixture.whiteners)[:, 0, 0] * scales, 1.0, rtol=1e-5)


ASKED = {
    "log_density": lambda measure: measure.log_density(jnp.zeros(1)),
    "sample": lambda measure: measure.sample(3, key=jr.key(0)),
    "marginal": lambda measure: measure.marginal(jnp.array([0])),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("kind", ["network", "cells"])
def test_without_a_condition_there_is_nothing_to_ask(network, kind, ask):
    tilt = tilted(1)
    nodes = grid_nodes(tilt.base, np.linspace(-1, 1, 20)[:, None], fineness=0.1)
    measure = network if kind == "network" else TiltedCells.on(tilt, nodes)
    with pytest.raises(TypeError, match=f"{type(measure).__name__}"):
        ask(measure)
