"""Chains: normalised whatever their weights, blind to what comes after, and drawn from as they are scored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import kstest, norm

from kexpfam.data.kinds import Bounded, Real
from kexpfam.data.scaling import Scaling
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import Chain, Layout
from kexpfam.model.ensemble import uniform_levels
from kexpfam.model.families import (
    HEAD,
    OTHERS,
    ConditionalParams,
    features,
    log_base,
    residual_cells,
)
from kexpfam.model.measures import logsumexp

CELLS = 288


def layout_of(*kinds, arcsinh: tuple[bool, ...] | None = None) -> Layout:
    """Return the layout of columns that are in model units already."""
    dim = len(kinds)
    scaling = Scaling.linear(np.zeros(dim), np.ones(dim), kinds=kinds, gaps=(False,) * dim)
    return Layout.of(dataclasses.replace(scaling, arcsinh=arcsinh or scaling.arcsinh))


def rough(
    condition_dim: int, dim: int, *, seed: int, strength: float = 0.5, layout: Layout | None = None
) -> Chain:
    """Return a chain with random weights everywhere, far from its start."""
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(dim)])
    layout = layout or Layout.real(dim)
    chain = Chain.draw(condition_dim, orders, layout, width=12, depth=2, seed=seed).member(0)
    sizes = {"biases": 0.3, "out": 0.1 * strength, "skip": 0.2 * strength, "shift": strength}
    shake = lambda part, size: (part + size * rng.normal(size=part.shape)).astype(np.float32)
    shaken = {name: shake(getattr(chain, name), size) for name, size in sizes.items()}
    return dataclasses.replace(chain, **shaken)


def params_of(chain: Chain, y: np.ndarray, x: np.ndarray) -> ConditionalParams:
    """Return the parameters of all columns, in the order of the table."""
    (outputs,), _ = chain.outputs(chain.rows(y, x))
    return chain.columns.families[0].params(outputs)


def test_the_base_of_residuals_is_normalised():
    assert quad(lambda r: np.exp(log_base(np.array([r])))[0], -300, 300, points=[-5, 0, 5], limit=500)[
        0
    ] == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_link_integrates_to_one_by_adaptive_quadrature(seed):
    told = np.random.default_rng(seed).normal(size=(1, 1, HEAD + residual_cells(8).features.shape[1]))
    density = lambda y: float(np.exp(ConditionalParams.of(told).log_density(np.array([[y]]), CELLS))[0, 0])
    location, scale = told[0, 0, 0], np.exp(told[0, 0, 1])
    inner, outer = location + scale * np.array([-6.0, 6.0]), location + scale * np.array([-150.0, 150.0])
    total = sum(
        quad(density, a, b, limit=400)[0]
        for a, b in [(outer[0], inner[0]), tuple(inner), (inner[1], outer[1])]
    )
    assert total == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_half_the_cells_change_a_log_density_by_little(seed):
    chain, rng = rough(2, 3, seed=seed), np.random.default_rng(seed)
    y, x = rng.normal(size=(50, 3)), rng.normal(size=(50, 2))
    coarse, fine = (chain.log_densities(y, x, cells=cells) for cells in (CELLS // 2, CELLS))
    assert coarse == pytest.approx(fine, abs=1e-5)


@pytest.mark.parametrize(("condition_dim", "dim"), [(0, 4), (3, 1), (2, 4), (0, 1)])
def test_a_link_sees_the_condition_and_what_is_before_it_alone(condition_dim, dim):
    chain, rng = rough(condition_dim, dim, seed=1), np.random.default_rng(0)
    y, x = rng.normal(size=(1, dim)), rng.normal(size=(1, condition_dim))

    def told(y, x):
        parts = params_of(chain, y, x)[:3]
        return np.concatenate([np.reshape(part, (dim, -1)) for part in parts], axis=1)[chain.order]

    for j in range(dim):
        moved = y.copy()
        moved[0, chain.order[j]] += 1.0
        changed = np.abs(told(moved, x) - told(y, x)).max(axis=1) > 1e-9
        assert not changed[: j + 1].any()
        assert changed[j + 1 :].all()
    for k in range(condition_dim):
        other = x.copy()
        other[0, k] += 1.0
        assert (np.abs(told(y, other) - told(y, x)).max(axis=1) > 1e-9).all()


def test_numpy_and_jax_agree():
    chain, rng = rough(2, 3, seed=4), np.random.default_rng(0)
    y, x = rng.normal(size=(7, 3)), rng.normal(size=(7, 2))
    with double_precision():
        traced = jax.jit(lambda y, x: chain.log_densities(y, x, cells=CELLS))(jnp.asarray(y), jnp.asarray(x))
    assert np.asarray(traced) == pytest.approx(chain.log_densities(y, x, cells=CELLS), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_draws_follow_the_density(seed):
    """PIT values of 4,000 draws are uniform in each column: no p-value of the KS test below 1e-4."""
    chain, rng = rough(2, 3, seed=seed), np.random.default_rng(seed)
    x = rng.normal(size=(4000, 2))
    draws = chain.sample(x, uniform_levels(rng, 4000, 3), cells=CELLS)
    (outputs,), _ = chain.outputs(chain.rows(draws.targets, x))
    for column in range(3):
        points, levels = chain.columns.families[0].at(column).law(outputs[:, column], 4 * CELLS)
        each = zip(draws.targets[:, column], points, levels, strict=True)
        below = np.array([np.interp(*row) for row in each])
        assert kstest(below, "uniform").pvalue > 1e-4


def test_draws_carry_their_own_log_density():
    """The mean log ratio of cells and density is 0 within 4 standard errors and 0.002."""
    chain, rng = rough(1, 2, seed=3), np.random.default_rng(3)
    x = rng.normal(size=(20_000, 1))
    draws = chain.sample(x, uniform_levels(rng, len(x), chain.dim), cells=CELLS)
    ratio = draws.log_density - chain.log_densities(draws.targets, x, cells=CELLS).sum(1)
    assert abs(ratio.mean()) < 4.0 * ratio.std() / np.sqrt(len(ratio)) + 0.002


def test_at_its_start_every_link_is_nearly_standard_normal():
    chain = Chain.draw(2, np.arange(3)[None], Layout.real(3), width=64, depth=2, seed=0).member(0)
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=(200, 3)), rng.normal(size=(200, 2))
    assert chain.log_densities(y, x, cells=CELLS).mean() == pytest.approx(norm.logpdf(y).mean(), abs=0.05)


@pytest.mark.parametrize("bumps", [20, 40, 64])
def test_cells_grow_with_the_bumps_and_resolve_the_sharpest_tilt(bumps):
    """Normalisers of tilts at the bound of their norm, single kernels among them, are right to 1e-3."""
    rng, family = np.random.default_rng(0), Layout.real(1, bumps=bumps).families[0]
    peaks = features(rng.uniform(-4.0, 4.0, 100), bumps + OTHERS)[:, OTHERS:]
    free = np.concatenate([rng.normal(size=(100, bumps + OTHERS)), np.pad(peaks, ((0, 0), (OTHERS, 0)))])
    free *= 1e6 / np.linalg.norm(free, axis=1, keepdims=True)
    told = ConditionalParams.of(np.concatenate([np.zeros((200, HEAD)), free], axis=1))
    counts = family.cells, family.nodes, 8 * family.cells
    enough, few, many = (logsumexp(told.log_masses(cells)) for cells in counts)
    assert enough == pytest.approx(many, abs=1e-3)
    assert few == pytest.approx(many, abs=2e-3)


@pytest.mark.parametrize("bumps", [20, 64])
def test_bumps_are_orthonormal_functions_of_an_rkhs(bumps):
    """|psi(r)|^2 of the bumps is the share of k(r, r) = 1 in their span: nearly all between the centres."""
    norms = (features(np.linspace(-3.9, 3.9, 200), bumps + OTHERS)[:, OTHERS:] ** 2).sum(axis=1)
    assert np.all((norms > 0.98) & (norms < 1.0 + 1e-9))


def test_features_are_bounded():
    far = np.abs(features(np.array([-1e6, 1e6])))
    assert np.isfinite(far).all()
    assert far.max() <= 12.5


BOUNDS = np.array([[-1.0, -0.5, -2.0], [0.5, 3.0, 0.1]])


@pytest.mark.parametrize("seed", range(3))
def test_a_bounded_link_integrates_to_one_and_its_draws_stay_inside(seed):
    """The share of a cell across a bound is that of its width: an error of the second order in the cells."""
    layout, rng = layout_of(*(Bounded(*ends) for ends in BOUNDS.T.tolist())), np.random.default_rng(seed)
    chain = rough(1, 3, seed=seed, layout=layout)
    x = rng.normal(size=(500, 1))
    draws = chain.sample(x, uniform_levels(rng, len(x), 3), cells=CELLS)
    assert np.all((draws.targets >= BOUNDS[0] - 1e-6) & (draws.targets <= BOUNDS[1] + 1e-6))
    told = params_of(chain, draws.targets[:20], x[:20])
    for column in range(3):
        link = ConditionalParams(*(part[:, column : column + 1] for part in told[:5]))
        y = np.linspace(*BOUNDS[:, column], 3001)
        density = np.exp(link.log_density(np.broadcast_to(y, (20, len(y))), CELLS))
        assert np.trapezoid(density, y, axis=1) == pytest.approx(1.0, abs=0.01)
    ratio = draws.log_density - chain.log_densities(draws.targets, x, cells=CELLS).sum(1)
    assert abs(ratio.mean()) < 4.0 * ratio.std() / np.sqrt(len(ratio)) + 0.005


@pytest.fixture
def half_light():
    """A chain whose first column, the second of the chain, has units like logarithms."""
    layout = layout_of(Real(), Real(), arcsinh=(True, False))
    return Chain.draw(0, np.array([[1, 0]]), layout, width=4, depth=1, seed=0).member(0)


def test_columns_like_logarithms_have_light_tails_and_others_have_not(half_light):
    far = np.array([[60.0, 0.0], [0.0, 60.0]])
    found = half_light.log_densities(far, np.zeros((2, 0)), cells=288)
    traced = half_light.log_densities(jnp.asarray(far), jnp.zeros((2, 0)), cells=288)
    # Light tails are those of a normal law three times as wide, others have one that is 27 times as wide.
    assert found[0, 0] < -150.0 < -20.0 < found[1, 1]
    assert np.allclose(found, traced, rtol=1e-4)


def test_the_density_of_a_column_with_light_tails_integrates_to_one(half_light):
    line = np.linspace(-30.0, 30.0, 6001)
    rows = np.stack([line, np.full(line.shape, 0.4)], axis=1)
    values = np.exp(half_light.log_densities(rows, np.zeros((len(line), 0)), cells=288)[:, 0])
    assert np.trapezoid(values, line) == pytest.approx(1.0, abs=1e-6)


def test_a_column_with_light_tails_stays_in_reach_whatever_its_network_says(half_light):
    shift = half_light.shift.copy()
    for column in (0, 1):
        start = np.flatnonzero(half_light.columns.output_owners == column)[0]
        shift[start : start + 2] = 100.0, 5.0
    wild = dataclasses.replace(half_light, shift=shift)
    draws = wild.sample(np.zeros((4000, 0)), uniform_levels(np.random.default_rng(0), 4000, 2)).targets
    # At most one standard deviation around eight, with tails three times as wide.
    assert np.abs(draws[:, 0]).max() < 8.0 + 5.0 * 3.0 < 50.0 < np.median(draws[:, 1])
