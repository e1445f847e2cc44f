"""Chains of several kinds: normalised, independent of later columns, and drawn as they are scored."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import simpson
from scipy.stats import kstest

from kexpfam.data.kinds import Atom, Bounded, Category, Integer, Periodic, Positive, Real, Rounded
from kexpfam.data.scaling import Scaling
from kexpfam.fit.learned import Learned, tilted_columns
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import Chain, Layout
from kexpfam.model.density import Inputs
from kexpfam.model.ensemble import ChainDensity, uniform_levels

CELLS = 288
KINDS = (
    Real(),
    Category(("a", "b", "c")),
    Integer(0),
    Periodic(1.0),
    Atom(0, "positive"),
    Bounded(0, None),
    Atom(0, "count"),
    Rounded(0.5, offset=0.2),
)


def table(seed: int, count: int = 80) -> np.ndarray:
    rng = np.random.default_rng(seed)
    columns = [
        rng.normal(size=count),
        rng.integers(3, size=count),
        rng.poisson(2, count),
        rng.uniform(size=count),
    ]
    columns += [
        np.where(rng.random(count) < 0.3, 0.0, rng.lognormal(size=count)),
        rng.exponential(size=count),
    ]
    columns += [rng.poisson(1, count), 0.5 * np.round(2.0 * rng.normal(size=count)) + 0.2]
    return np.column_stack(columns).astype(float)


def rough(kinds: tuple, values: np.ndarray, *, seed: int, condition_dim: int = 0, strength: float = 0.4):
    """Return units and a chain with random weights everywhere, far from its start."""
    rng, units = np.random.default_rng(seed), Scaling.of(values, kinds)
    z = units.to_model(values)
    orders = np.stack([rng.permutation(len(kinds))])
    chain = Chain.draw(condition_dim, orders, Layout.of(units), width=14, depth=2, seed=seed, z=z).member(0)
    shake = lambda part, size: (part + size * rng.normal(size=part.shape)).astype(np.float32)
    parts = {"biases": 0.3, "out": 0.1 * strength, "skip": 0.2 * strength, "shift": strength}
    return units, dataclasses.replace(
        chain, **{name: shake(getattr(chain, name), size) for name, size in parts.items()}
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("column", range(len(KINDS)))
def test_a_column_is_normalised_in_its_own_measure(column, seed):
    """Sums over values, integrals over lengths, atoms added: the other columns are held where they are."""
    values = table(seed)
    units, chain = rough(KINDS, values, seed=seed, strength=0.2)

    def densities(points: np.ndarray) -> np.ndarray:
        rows = np.tile(values[:1], (len(points), 1))
        rows[:, column] = points
        links = chain.log_densities(units.to_model(rows), np.zeros((len(rows), 0)), cells=CELLS)
        return np.exp(links[:, column] + units.log_jacobians(rows)[:, column])

    kind = KINDS[column]
    if isinstance(kind, Category | Integer) or (isinstance(kind, Atom) and isinstance(kind.rest, Integer)):
        total = densities(np.arange(3.0 if isinstance(kind, Category) else 1000.0)).sum()
    elif isinstance(kind, Rounded):
        total = 0.5 * densities(0.5 * np.arange(-600, 600) + 0.2).sum()
        # The density is constant within half a step.
        near = densities(np.array([0.7, 0.7 - 0.24, 0.7 + 0.24]))
        assert near == pytest.approx(near[0], rel=1e-5)
    elif isinstance(kind, Atom):
        logs = np.linspace(-14.0, 14.0, 4001)
        total = simpson(densities(np.exp(logs)) * np.exp(logs), logs) + densities(np.zeros(1))[0]
    else:
        t = np.linspace(-8.0, 8.0, 4001)
        points = {0: np.sinh(t), 3: np.linspace(0.0, 1.0, 4001), 5: np.sinh(np.abs(t[2000:]))}[column]
        total = simpson(densities(points), points)
    assert total == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_angles_are_continuous_across_the_seam(seed):
    values = table(seed)
    units, chain = rough(KINDS, values, seed=seed, strength=1.0)
    rows = np.repeat(values[:10], 2, axis=0)
    rows[::2, 3], rows[1::2, 3] = 1e-9, 1.0 - 1e-9
    scores = chain.log_densities(units.to_model(rows), np.zeros((20, 0)), cells=CELLS)[:, 3]
    assert scores[::2] == pytest.approx(scores[1::2], abs=1e-6)


@pytest.mark.parametrize("missing", [False, True])
def test_a_link_sees_the_condition_and_what_is_before_it_alone(missing):
    values, rng = table(0), np.random.default_rng(0)
    values[5:20, 0] = np.nan
    units, chain = rough(KINDS, values, seed=1, condition_dim=2)
    row, other = values[:1].copy(), values[30:31]
    x = rng.normal(size=(1, 2))
    score = lambda row: chain.log_densities(units.to_model(row), x, cells=CELLS)[0]
    for j, column in enumerate(chain.order):
        changed = row.copy()
        changed[0, column] = np.nan if missing and column == 0 else other[0, column]
        moved = score(changed) != score(row)
        assert not moved[chain.order[:j]].any(), "an earlier link has seen a later column"


def test_a_missing_cell_has_no_density_and_a_sign():
    values = table(0)
    values[5:20, 0] = np.nan
    units, chain = rough(KINDS, values, seed=1)
    scores = chain.log_densities(units.to_model(values), np.zeros((80, 0)), cells=CELLS)
    assert np.all(scores[5:20, 0] == 0.0) and np.all(scores[20:, 0] != 0.0)
    assert chain.columns.encoding.gaps == (0,)
    seen = chain.columns.encoding(units.to_model(values))
    assert np.array_equal(seen[:, -1], np.isnan(values[:, 0]))


@pytest.mark.parametrize("seed", range(2))
def test_draws_follow_the_density_and_stay_in_the_support(seed):
    """The sampler's log density is that of the chain, and draws lie in the support."""
    values, rng = table(seed), np.random.default_rng(seed)
    units, chain = rough(KINDS, values, seed=seed)
    draws = chain.sample(np.zeros((3000, 0)), uniform_levels(rng, 3000, len(KINDS)))
    found = chain.log_densities(draws.targets, np.zeros((3000, 0)), cells=CELLS).sum(1)
    ratio = draws.log_density - found
    assert abs(ratio.mean()) < 4.0 * ratio.std() / np.sqrt(3000) + 2e-3
    data = units.to_data(draws.targets)
    for kind, column in zip(KINDS, data.T, strict=True):
        assert kind.inside(column).all() and not np.isnan(column).any()


@pytest.mark.parametrize("kind", [Category(("a", "b", "c")), Integer(0), Integer(-2, 3), Atom(0, "count")])
def test_draws_of_values_are_as_frequent_as_they_are_probable(kind):
    values = np.random.default_rng(0).integers(0, 3, (60, 1)).astype(float)
    units, chain = rough((kind,), values, seed=3)
    draws = units.to_data(
        chain.sample(np.zeros((5000, 0)), uniform_levels(np.random.default_rng(1), 5000, 1)).targets
    )[:, 0]
    seen, counts = np.unique(draws, return_counts=True)
    chances = np.exp(
        chain.log_densities(units.to_model(seen[:, None]), np.zeros((len(seen), 0)), cells=CELLS)[:, 0]
    )
    errors = np.sqrt(5000 * chances * (1.0 - chances))
    assert np.all(np.abs(counts - 5000 * chances) < 4.5 * errors + 1.0)


@pytest.mark.parametrize(
    "kind",
    [
        Real(),
        Positive(),
        Bounded(0, 3),
        Periodic(3.0),
        Integer(0),
        Rounded(0.25, 0, offset=0.1),
        Atom(0, "positive"),
        Atom(1, "real"),
    ],
)
def test_a_distribution_function_is_that_of_the_draws(kind):
    values = np.random.default_rng(0).integers(0, 3, (60, 1)).astype(float) + (0.0 if kind.discrete else 0.1)
    values[:20] = getattr(kind, "value", values[:20])
    units, chain = rough((kind,), values, seed=4)
    stacked = jax.tree.map(lambda leaf: leaf[None], chain.within(None)).within(chain.layout)
    nothing = Inputs(Scaling.plain(np.zeros((1, 0))), np.zeros(0), np.zeros(0))
    density = ChainDensity(stacked, units, nothing)
    draws = units.to_data(
        chain.sample(np.zeros((4000, 0)), uniform_levels(np.random.default_rng(1), 4000, 1)).targets
    )
    below = density.cdf(draws - 1e-6)
    pit = below + np.random.default_rng(2).random(4000) * (density.cdf(draws) - below)
    assert kstest(pit, "uniform").pvalue > 1e-3
    quantiles = density.quantile(np.array([0.05, 0.5, 0.9]))[0]
    assert quantiles == pytest.approx(
        np.quantile(draws, [0.05, 0.5, 0.9], method="inverted_cdf"), abs=0.25 * draws.std()
    )
    assert kind.inside(quantiles).all()


def test_known_cells_weigh_the_others():
    """The mean weight of completed rows is the density of the known part, by quadrature."""
    kinds, values = (Real(), Category(("a", "b", "c")), Real()), np.random.default_rng(0).normal(size=(60, 3))
    values[:, 1] = np.random.default_rng(1).integers(3, size=60)
    units, chain = rough(kinds, values, seed=5, strength=1.0)
    grid = np.linspace(-40.0, 40.0, 8001)
    rows = np.column_stack([grid, np.ones_like(grid), np.full_like(grid, 0.3)])
    joint = chain.log_densities(rows, np.zeros((len(grid), 0)), cells=CELLS).sum(1)
    known = np.tile([np.nan, 1.0, 0.3], (20_000, 1))
    levels = uniform_levels(np.random.default_rng(0), 20_000, 3)
    draws = chain.sample(np.zeros((20_000, 0)), levels, known=known)
    weights = np.exp(draws.log_weight)
    error = weights.std() / np.sqrt(len(weights))
    assert weights.mean() == pytest.approx(np.trapezoid(np.exp(joint), grid), abs=4.0 * error + 1e-6)
    assert np.all(draws.targets[:, 1:] == [1.0, 0.3])


def test_draws_inside_jit_follow_those_on_the_host():
    """Under the same levels the pure function gives the rows of the host, for every kind and atoms."""
    values = table(0)
    units, chain = rough(KINDS, values, seed=2)
    levels = uniform_levels(np.random.default_rng(0), 50, len(KINDS))
    host = chain.sample(np.zeros((50, 0)), levels).targets
    with double_precision():
        traced = jax.jit(lambda chain, levels: chain.drawn(jnp.zeros((50, 0)), levels))
        found = traced(jax.tree.map(jnp.asarray, chain), jnp.asarray(levels, float))
    assert np.array_equal(np.isinf(found), np.isinf(host))
    both = np.isfinite(host)
    assert np.mean(np.abs(np.asarray(found)[both] - host[both]) < 1e-2) > 0.98


def test_a_column_of_labels_leaves_the_others_as_they_are():
    rng = np.random.default_rng(0)
    plain = np.column_stack(
        [rng.normal(size=300), np.sinh(3.0 * rng.normal(size=300)), rng.uniform(size=300)]
    )
    kinds = (Real(), Real(), Bounded(0, 1))
    labelled = np.column_stack([plain, rng.integers(2, size=300)])
    alone = Scaling.of(plain, kinds)
    beside = Scaling.of(labelled, (*kinds, Category(("a", "b"))))
    for name in ("shift", "scale", "centre", "spread", "powers", "arcsinh"):
        assert np.array_equal(getattr(alone, name), getattr(beside, name)[:3])
    count = lambda scaling: Learned().resolution(100_000, len(tilted_columns(scaling)))
    assert count(alone) == count(beside)
    first, second = (Layout.of(scaling, bumps=24).families for scaling in (alone, beside))
    assert len(second) == len(first) + 1
    for one, other in zip(first, second, strict=False):
        assert eqx.tree_equal(one, other) and one.cells == other.cells
    assert [family.light_tails for family in first] == [False, True]
