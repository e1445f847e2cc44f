"""Pools of chains: the law whose log density is the mean of the members', up to its normaliser."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit, logsumexp
from scipy.stats import kstest

from kexpfam.data.kinds import Atom, Bounded, Integer, Positive, Real, Rounded
from kexpfam.data.scaling import Scaling
from kexpfam.jax_settings import double_precision
from kexpfam.model.chain import Chain, Layout
from kexpfam.model.density import Inputs
from kexpfam.model.ensemble import ChainDensity, Pool
from kexpfam.model.families import ConditionalParams, features, tilts

MEMBERS = 4


def density_of(kind, *, members: int = MEMBERS, strength: float = 1.0) -> tuple[ChainDensity, np.ndarray]:
    """Return a pool of members that differ in location, scale and tilt, and its conditions."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 2)), rng.lognormal(size=(200, 1))
    values = y if kind.others.family == "real" else np.round(4.0 * y)
    scaling, inputs = Scaling.of(values, (kind,)), Scaling.plain(X)
    chain = Chain.draw(2, np.zeros((members, 1), int), Layout.of(scaling), width=12, depth=2, seed=0)
    sizes = {"biases": 0.3, "out": 0.2, "skip": 0.2, "shift": 0.5}
    shake = lambda part, size: (part + strength * size * rng.normal(size=part.shape)).astype(np.float32)
    parts = {name: shake(getattr(chain, name), size) for name, size in sizes.items()}
    own = dataclasses.replace(chain, **parts)
    return ChainDensity(own, scaling, Inputs.of(inputs, inputs.to_model(X)), pooled=True), X


@pytest.mark.parametrize("kind", [Real(), Bounded(0, None), Bounded(0, 20)])
def test_the_density_is_the_geometric_mean_of_the_members(kind):
    density, X = density_of(kind)
    low, high = np.clip(density.scaling.model_ends[:, 0], -2000.0, 2000.0)
    for x in density.inputs.to_model(X[:5]):

        def mean(z: np.ndarray, x: np.ndarray = x) -> np.ndarray:
            rows = np.tile(x, (len(z), 1))
            members = map(density.members.member, range(MEMBERS))
            return np.mean([one.log_densities(z[:, None], rows)[:, 0] for one in members], axis=0)

        edges = np.unique(np.clip([low, *np.linspace(-12.0, 12.0, 25), 100.0, high], low, high))
        weight = lambda z, mean=mean: float(np.exp(mean(np.array([z]))[0]))
        total = sum(quad(weight, *ends, limit=200)[0] for ends in zip(edges[:-1], edges[1:], strict=True))
        z = np.clip(np.array([-0.5, 0.2, 1.0, 2.0]), low, high)
        found = Pool(density.members).log_densities(z[:, None], np.tile(x, (4, 1)))[:, 0]
        # A cell across a bound has the share of its width that is inside.
        assert found == pytest.approx(mean(z) - np.log(total), abs=2e-2 if kind.bounded else 1e-5)


@pytest.mark.parametrize("kind", [Real(), Positive(), Bounded(0, None), Atom(0, "positive")])
def test_it_integrates_to_its_distribution_function(kind):
    density, X = density_of(kind, strength=0.5)
    laws = density.distributions(X[:20])
    levels = np.linspace(0.02, 0.98, 2000)
    points = laws.quantile(np.tile(levels, (20, 1)))
    for row in range(20):
        y = np.unique(points[row])
        there = np.exp(density.log_density(y[:, None], np.tile(X[row], (len(y), 1))))
        inside = y[1:] > 0.0 if kind.atom is not None else np.ones(len(y) - 1, bool)
        mass = np.sum((0.5 * np.diff(y) * (there[1:] + there[:-1]))[inside][1:])
        upto = laws.cdf(np.tile(y, (20, 1)))[row]
        first = np.flatnonzero(inside)[1]
        assert mass == pytest.approx(upto[-1] - upto[first], abs=5e-3)


def test_a_lattice_has_the_masses_of_the_pool():
    density, X = density_of(Integer())
    values = np.arange(-400.0, 2000.0)
    for x in X[:3]:
        masses = np.exp(density.log_density(values[:, None], np.tile(x, (len(values), 1))))
        assert masses.sum() == pytest.approx(1.0, abs=2e-3)
        upto = density.distributions(x[None]).cdf(values[None])[0]
        assert upto == pytest.approx(np.cumsum(masses), abs=5e-3)


@pytest.mark.parametrize("kind", [Real(), Integer(), Atom(0, "positive")])
def test_draws_follow_the_distribution_function(kind):
    density, X = density_of(kind, strength=0.5)
    draws = density.sample(4000, X[:3], key=jax.random.key(0))[:, :, 0]
    rng = np.random.default_rng(1)
    for x, own in zip(X, draws, strict=False):
        law, y = density.distributions(x[None]), own[None]
        below = law.cdf(np.nextafter(y, -np.inf))
        ranks = below + rng.random(y.shape) * (law.cdf(y) - below)
        assert kstest(ranks[0], "uniform").pvalue > 2e-5


def test_compiled_draws_are_those_of_the_host():
    density, X = density_of(Real())
    pool, condition = Pool(density.members), density.inputs.to_model(X[:50])
    levels = np.random.default_rng(0).random((50, 1))
    host = pool.sample(condition, levels)
    points = density.distributions(X[:50]).quantile(levels)
    # Both are linear within cells, in model units and in data units.
    assert density.scaling.to_data(host.targets) == pytest.approx(points, rel=5e-3)
    with double_precision():
        one = density.draw(jnp.asarray(X[0]), key=jax.random.key(0))
    assert np.isfinite(one).all()


def test_a_pool_of_equal_members_is_the_member():
    density, X = density_of(Real(), members=1, strength=0.3)
    several = dataclasses.replace(density, members=density.members.member(np.zeros(3, int)))
    alone = dataclasses.replace(density, pooled=False)
    y = np.random.default_rng(2).normal(size=(200, 1))
    assert several.log_density(y, X) == pytest.approx(alone.log_density(y, X), abs=1e-5)
    assert several.mean(X) == pytest.approx(alone.mean(X), rel=1e-3)


def test_weights_are_those_of_the_potentials():
    density, X = density_of(Real(), members=2, strength=0.3)
    condition, z = density.inputs.to_model(X), np.random.default_rng(3).normal(size=(200, 1))
    first = Pool(density.members, np.array([1.0, 0.0])).log_densities(z, condition)
    assert first == pytest.approx(density.members.member(0).log_densities(z, condition), abs=1e-6)


def test_the_chance_of_an_atom_is_the_mean_of_the_members():
    density, X = density_of(Atom(0, "positive"))
    condition = density.inputs.to_model(X[:20])
    chances = [expit(density.members.member(k).single(condition).logit) for k in range(MEMBERS)]
    found = density.log_density(np.zeros((20, 1)), X[:20])
    assert np.exp(found) == pytest.approx(np.mean(chances, axis=0), rel=1e-9)


@pytest.mark.parametrize("bumps", [12, 20, 64, 100])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_tilts_are_sums_of_features(bumps, dtype):
    rng = np.random.default_rng(bumps)
    r = (4.0 * rng.normal(size=(30, 5, 40))).astype(dtype)
    r[0, 0] = np.linspace(-500.0, 500.0, 40)
    coefficients = rng.normal(size=(30, 5, bumps + 2)).astype(dtype)
    slow = (coefficients[..., None, :] * features(r, bumps + 2)).sum(axis=-1)
    close = 1e-10 if dtype is np.float64 else 2e-3
    assert tilts(r, coefficients) == pytest.approx(slow, abs=close)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("distance", "close"), [(0.3, 1e-6), (1.0, 1e-4)])
def test_normalisers_are_those_of_many_cells(seed, distance, close):
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(40, 6, 24))
    outputs[..., 0] *= distance
    outputs[..., 1] = distance * rng.uniform(-1.5, 1.5, size=(40, 6))
    pool = ConditionalParams.of(outputs).pooled(np.full(6, 1.0 / 6.0))
    found, fine = (logsumexp(pool.log_masses(cells), axis=-1) for cells in (192, 6000))
    assert found == pytest.approx(fine, abs=close)


@pytest.mark.parametrize("kind", [Rounded(0.5), Integer()])
def test_one_row_scores_as_in_a_batch(kind):
    density, X = density_of(kind)
    y = np.round(np.random.default_rng(4).lognormal(size=(200, 1)))
    whole = density.log_density(y, X)
    for row in (0, 7, 199):
        assert density.log_density(y[[row]], X[[row]]) == pytest.approx(whole[[row]], abs=1e-11)


@pytest.mark.parametrize("power", [0.7, 1.6])
@pytest.mark.parametrize("kind", [Real(), Bounded(0, None), Rounded(0.25)])
def test_a_pool_to_a_power_is_that_power_of_the_density_normalised(kind, power):
    """Ratios of densities at two points are those of the mean law to the power; the law sums to one."""
    density, X = density_of(kind, strength=0.3)
    raised = dataclasses.replace(density, power=power)
    rows = np.tile(X[:20], (2, 1))
    y = np.repeat([[1.0], [2.5]], 20, axis=0)
    ratio = lambda own: np.diff(own.log_density(y, rows).reshape(2, 20), axis=0)[0]
    jacobian = np.diff(density.scaling.log_jacobian(y).reshape(2, 20), axis=0)[0]
    if kind.others.family == "real":
        assert ratio(raised) - jacobian == pytest.approx(power * (ratio(density) - jacobian), abs=1e-6)
    levels = np.tile(np.linspace(0.02, 0.98, 2000), (20, 1))
    points, before = (own.distributions(X[:20]).quantile(levels) for own in (raised, density))
    assert (np.ptp(points, axis=1).mean() < np.ptp(before, axis=1).mean()) == (power > 1.0)
    if kind.others.family == "real":
        rows = np.repeat(X[:20], 2000, axis=0)
        there = np.exp(raised.log_density(points.reshape(-1, 1), rows)).reshape(20, -1)
        mass = np.sum(0.5 * np.diff(points, axis=1) * (there[:, 1:] + there[:, :-1]), axis=1)
        assert mass == pytest.approx(np.full(20, 0.96), abs=5e-3)
