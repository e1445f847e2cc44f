import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam import KernelExpFamily
from kexpfam.integrate import nodes
from kexpfam.integrate.nodes import Integration, effective_share, grid_nodes, importance_nodes, resample
from kexpfam.model.measures import Box, Gaussian


def normal(*deviations, mean=0.0):
    return Gaussian(jnp.full(len(deviations), mean), jnp.diag(jnp.array(deviations)))


def test_a_grid_in_one_dimension_integrates_polynomials():
    data = np.random.default_rng(0).normal(size=(200, 1))
    nodes = grid_nodes(normal(1.5, mean=0.5), data)
    weights, x = np.exp(nodes.log_weights), nodes.points[:, 0] - 0.5
    # The coarse cells beyond the data err by width^2 / 24 times the base's slope there, about 1e-4 in all.
    assert weights.sum() == pytest.approx(1.0, abs=3e-4)
    for power, moment in {1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0}.items():
        assert weights @ (x / 1.5) ** power == pytest.approx(moment, abs=2e-3)


@pytest.mark.parametrize(("dim", "tolerance"), [(2, 1e-4), (3, 2e-3)])
def test_a_grid_in_more_dimensions_integrates_polynomials(dim, tolerance):
    data = np.random.default_rng(0).normal(size=(300, dim))
    nodes = grid_nodes(normal(*np.ones(dim)), data)
    weights = np.exp(nodes.log_weights)
    assert weights.sum() == pytest.approx(1.0, abs=tolerance)
    second = nodes.points.T @ (weights[:, None] * nodes.points)
    np.testing.assert_allclose(second, np.eye(dim), atol=tolerance)


def test_a_grid_over_a_box_has_the_boxs_volume_and_stays_inside():
    box = Box(jnp.array([0.0, -1.0]), jnp.array([2.0, 1.0]))
    data = np.random.default_rng(0).uniform([0.0, -1.0], [2.0, 1.0], (200, 2))
    nodes = grid_nodes(box, data)
    assert np.exp(nodes.log_weights).sum() == pytest.approx(1.0, abs=1e-9)
    assert np.all((nodes.points >= box.low) & (nodes.points <= box.high))
    np.testing.assert_allclose(np.exp(nodes.log_weights) @ nodes.points, [1.0, 0.0], atol=1e-9)


def test_fineness_makes_a_finer_grid():
    data = np.random.default_rng(0).normal(size=(50, 2))
    sizes = [len(grid_nodes(normal(1.0, 1.0), data, fineness=f).points) for f in (0.5, 1.0)]
    assert sizes[1] > 3 * sizes[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_importance_nodes_integrate_polynomials(seed):
    base, proposal = normal(1.0, 2.0), normal(0.7, 1.0, mean=1.0)
    nodes = importance_nodes(base, proposal, 20_000, key=jr.key(seed))
    count = len(nodes.points)
    assert np.exp(nodes.log_weights).max() <= 2.0 / count + 1e-12
    functions = {
        1.0: np.ones(count),
        0.0: nodes.points[:, 0],
        4.0: nodes.points[:, 1] ** 2,
        3.0: nodes.points[:, 0] ** 4,
    }
    for expected, values in functions.items():
        # The two halves are strata, each with its own spread.
        terms = (np.exp(nodes.log_weights) * values * count).reshape(2, -1)
        error = np.sqrt(np.sum(terms.var(axis=1) / terms.shape[1])) / 2
        assert abs(terms.mean() - expected) < 5 * error


@pytest.mark.parametrize("slope", [0.0, 0.8])
def test_resampling_a_grid_gives_the_tilted_normal(slope):
    # p0 exp(slope x) is N(slope, 1) for p0 = N(0, 1).
    nodes = grid_nodes(normal(1.0), np.linspace(-3.0, 3.0, 50)[:, None])
    draws = resample(nodes, slope * nodes.points[:, 0], 5000, seed=0)
    check_tilted(draws[:, 0], slope)
    assert len(np.unique(draws)) == len(draws)  # spread within the cells


def test_resampling_importance_nodes_gives_the_tilted_normal():
    slope = 0.8
    nodes = importance_nodes(normal(1.0), normal(1.0, mean=1.0), 50_000, key=jr.key(0))
    draws = resample(nodes, slope * nodes.points[:, 0], 5000, seed=0)
    check_tilted(draws[:, 0], slope)


def check_tilted(draws, slope):
    centred = draws - slope
    assert abs(centred.mean()) < 5 / np.sqrt(len(draws))
    assert abs(np.mean(centred**2) - 1.0) < 5 * np.sqrt(2 / len(draws))  # a normal's squares have variance 2


def test_effective_share_is_one_for_equal_weights_and_one_over_n_for_a_single_one():
    assert effective_share(np.full(7, 3.0)) == pytest.approx(1.0)
    assert effective_share(np.array([0.0, -800.0, -800.0, -800.0])) == pytest.approx(0.25)
    assert effective_share(np.log([1.0, 2.0])) == pytest.approx(9 / 5 / 2)


def test_equal_requests_share_one_grid_and_others_do_not():
    data = np.random.default_rng(0).normal(size=(50, 1))
    first = grid_nodes(normal(1.0), data)
    assert grid_nodes(normal(1.0), data[::-1].copy()).points is first.points
    with pytest.raises(ValueError, match="read-only"):
        first.points[0] = 0.0
    others = [
        grid_nodes(normal(1.5), data),
        grid_nodes(normal(1.0, mean=0.1), data),
        grid_nodes(normal(1.0), 2.0 * data),
        grid_nodes(normal(1.0), data, fineness=0.9),
        grid_nodes(normal(1.0), data, Integration(data_margin=0.3)),
        grid_nodes(normal(1.0), data, Integration(base_spread=6.0)),
    ]
    for other in others:
        same = other.points.shape == first.points.shape and np.array_equal(other.points, first.points)
        assert not (same and np.array_equal(other.log_weights, first.log_weights))


def test_a_fit_in_two_dimensions_builds_each_of_its_grids_once(moons):
    nodes._built.cache_clear()
    KernelExpFamily(random_state=0).fit(moons)
    built = nodes._built.cache_info()
    # The grid of the search, and in the fit the coarse one of the start, that of the optimum and the finer
    # check.
    assert built.misses == 1 + 3
    assert built.hits >= 4
