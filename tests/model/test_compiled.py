"""Compiled inference: the numbers of the slow path in float64, and no program per number of rows."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from kexpfam.data.kinds import Atom, Bounded, Category, Integer, Periodic, Positive, Real
from kexpfam.data.scaling import Scaling
from kexpfam.model.chain import AtomLaw, Chain, ChainSampler, Layout, piecewise_knots
from kexpfam.model.density import Inputs
from kexpfam.model.distributions import Distributions, MomentWarning
from kexpfam.model.ensemble import ChainDensity, LawDensity, Stack
from kexpfam.model.measures import Gaussian
from kexpfam.model.partial import log_evidence

MIXED = (Real(), Category(("a", "b", "c")), Integer(0), Periodic(1.0), Atom(0, "positive"), Bounded(0, None))
NOTHING = Inputs(Scaling.plain(np.zeros((1, 0))), np.zeros(0), np.zeros(0))


class Compilations:
    """The number of programs that JAX compiles."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, *_, **__) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations() -> Compilations:
    return Compilations()


def table(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    columns = [rng.normal(2.0, 3.0, count), rng.integers(3, size=count), rng.poisson(2, count)]
    columns += [rng.uniform(size=count), np.where(rng.random(count) < 0.3, 0.0, rng.lognormal(size=count))]
    values = np.column_stack([*columns, rng.exponential(size=count)]).astype(float)
    values[::7, 0] = np.nan
    return values


def shaken(chain: Chain, seed: int, log_scale: float = 0.0) -> Chain:
    """Return a chain with random weights everywhere; ``log_scale`` is added to those of real columns."""
    rng = np.random.default_rng(seed)
    sizes = {"biases": 0.3, "out": 0.05, "skip": 0.15, "shift": 0.3}
    shake = lambda part, size: (part + size * rng.normal(size=part.shape)).astype(np.float32)
    parts = {name: shake(getattr(chain, name), size) for name, size in sizes.items()}
    family = chain.columns.families[0]
    parts["shift"][:, 1 : len(family.columns) * family.outputs : family.outputs] += log_scale
    return dataclasses.replace(chain, **parts)


def mixed() -> ChainDensity:
    scaling = Scaling.of(table(200), MIXED)
    orders = np.stack([np.random.default_rng(k).permutation(len(MIXED)) for k in range(3)])
    chain = Chain.draw(0, orders, Layout.of(scaling), width=12, depth=2, seed=0)
    return ChainDensity(shaken(chain, 1), scaling, NOTHING)


def real(log_scale: float) -> ChainDensity:
    chain = Chain.draw(0, np.array([[0, 1, 2], [2, 0, 1]]), Layout.real(3), width=12, depth=2, seed=0)
    scaling = Scaling.of(np.random.default_rng(0).normal(2.0, 3.0, (50, 3)), (Real(),) * 3)
    return ChainDensity(shaken(chain, 2, log_scale), scaling, NOTHING)


def by_members(density: ChainDensity, values: np.ndarray) -> np.ndarray:
    """Return scores of the mixture, member by member in NumPy and float64."""
    z, condition = density.scaling.to_model(values), np.zeros((len(values), 0))
    parts = [density.members.member(k).log_densities(z, condition).sum(1) for k in range(len(density))]
    found = logsumexp(parts, axis=0) - np.log(len(parts))
    return found + density.scaling.log_jacobian(values)


@pytest.mark.parametrize("log_scale", [0.0, -3.0, -6.5])
def test_scores_are_those_in_float64_at_every_scale(log_scale):
    density = real(log_scale)
    values = density.sample(700, key=jax.random.key(0))
    assert density.log_density(values) == pytest.approx(by_members(density, values), abs=1e-10, rel=1e-10)


def test_scores_of_every_kind_are_those_in_float64():
    density, values = mixed(), table(100, seed=1)
    assert density.log_density(values) == pytest.approx(by_members(density, values), abs=1e-10, rel=1e-10)


def test_scores_do_not_depend_on_the_rows_beside_them():
    density, values = mixed(), table(590, seed=2)
    whole = density.log_density(values)
    for rows in (slice(0), slice(1), slice(3, 40), slice(70, 590)):
        assert density.log_density(values[rows]) == pytest.approx(whole[rows], abs=1e-11)


def test_other_numbers_of_rows_compile_nothing(compilations):
    density, values = real(0.0), np.random.default_rng(0).normal(size=(700, 3))
    for count in (1, 20, 700):
        density.log_density(values[:count])
    other = dataclasses.replace(density, members=shaken(density.members, 5))
    before = compilations.count
    assert before > 0
    for count in np.random.default_rng(1).integers(1, 700, 50):
        other.log_density(values[:count])
    assert compilations.count == before


def conditional(kind) -> tuple[ChainDensity, np.ndarray, np.ndarray]:
    """Return a density of one target under two inputs, with its rows."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(600, 2)), rng.lognormal(size=(600, 1))
    scaling, inputs = Scaling.of(y, (kind,)), Scaling.plain(X)
    chain = Chain.draw(2, np.zeros((4, 1), int), Layout.of(scaling), width=12, depth=2, seed=0)
    return ChainDensity(shaken(chain, 3), scaling, Inputs.of(inputs, inputs.to_model(X))), X, y


@pytest.mark.parametrize("kind", [Real(), Bounded(0, None), Positive(), Atom(0, "positive")])
def test_distributions_are_those_of_the_members_in_float64(kind):
    density, X, y = conditional(kind)
    condition, parts = density.inputs.to_model(X), []
    for k in range(len(density)):
        law = density.members.member(k).single(condition)
        (points, levels), chance = law.family.law(law.outputs, None), law.chance
        with np.errstate(over="ignore"):
            values = density.scaling.to_data(points.reshape(-1, 1)).reshape(points.shape)
        part = Distributions.of_levels(values, levels)
        parts.append(part if chance is None else part.with_atom(0.0, chance))
    levels = np.tile([0.0, 1e-4, 0.1, 0.5, 0.95, 1.0], (len(X), 1))
    mixed = Distributions.mixture(parts, np.full(4, 0.25))
    found, merged = density.distributions(X), mixed.polygon()
    assert found.quantile(levels) == pytest.approx(merged.quantile(levels), rel=1e-9, abs=1e-9)
    assert found.cdf(y) == pytest.approx(merged.cdf(y), abs=1e-12)
    if kind.atom is None:
        assert found.cdf(found.quantile(levels[:, 1:5])) == pytest.approx(levels[:, 1:5], abs=1e-9)
    assert found.crps(y[:, 0]) == pytest.approx(merged.crps(y[:, 0]), rel=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MomentWarning)
        # Rounding of levels decides moments of logarithms, whose tails are astronomic.
        logs = density.scaling.logs[0] or density.scaling.arcsinh[0]
        close = {"rel": 1e-4 if logs else 1e-9, "abs": 1e-9, "nan_ok": True}
        assert found.mean() == pytest.approx(mixed.mean(), **close)
        # These laws reach far out, where the rounding of levels near one counts.
        assert density.mean(X)[:, 0] == pytest.approx(mixed.mean(), **close | {"rel": 1e-4})
        if not logs:
            assert found.mean() == pytest.approx(merged.mean(), **close)
            assert found.variance() == pytest.approx(merged.variance(), rel=1e-9, nan_ok=True)


def test_distributions_of_other_numbers_of_rows_compile_nothing(compilations):
    density, X, y = conditional(Real())
    calls = [
        lambda rows: density.mean(X[rows]),
        lambda rows: density.quantile(np.array([0.1, 0.9]), X[rows]),
        lambda rows: density.cdf(y[rows], X[rows]),
        lambda rows: density.crps(y[rows], X[rows]),
    ]
    for call in calls:
        call(slice(100)), call(slice(1)), call(slice(200))
    before = compilations.count
    assert before > 0
    for k, count in enumerate(np.random.default_rng(1).integers(1, 100, 50)):
        calls[k % 4](slice(0, count))
    assert compilations.count == before


def stack() -> Stack:
    """Return a mixture of a law and of chains."""
    chains = real(0.0)
    law = LawDensity(Gaussian(np.zeros(3), np.linalg.cholesky(np.eye(3) + 0.5)), chains.scaling)
    return Stack((law, chains), np.array([0.4, 0.6]), chains.scaling)


def test_draws_of_a_stack_of_other_counts_compile_nothing(compilations):
    density = stack()
    for count in (10, 1000, 5000):
        density.sample(count, key=jax.random.key(0))
    before = compilations.count
    assert before > 0
    for k, count in enumerate(np.random.default_rng(1).integers(1, 6000, 50)):
        assert density.sample(int(count), key=jax.random.key(k)).shape == (count, 3)
    assert compilations.count == before


@pytest.mark.parametrize("count", [1, 300, 5000])
def test_the_same_key_and_count_give_the_same_draws(count):
    law = stack().parts[0]
    first, second = (law.sample(count, key=jax.random.key(3)) for _ in range(2))
    assert np.array_equal(first, second)
    assert len(np.unique(first, axis=0)) == count


def test_draws_in_blocks_follow_the_law():
    law = stack().parts[0]
    z = law.scaling.to_model(law.sample(10_000, key=jax.random.key(0)))
    assert np.cov(z.T) == pytest.approx(np.eye(3) + 0.5, abs=0.08)
    assert np.corrcoef(z[:4096, 0], z[4096:8192, 0])[0, 1] == pytest.approx(0.0, abs=0.06)


def encoded(kinds=MIXED) -> ChainDensity:
    """Return members whose inputs are encoded by pieces too."""
    scaling = Scaling.of(table(200), kinds)
    layout, rng = Layout.of(scaling), np.random.default_rng(0)
    rows = layout.encoding(scaling.to_model(table(200)))
    knots = np.stack([piecewise_knots(rows, 8)] * 3)
    orders = np.stack([rng.permutation(len(kinds)) for _ in range(3)])
    chain = Chain.draw(0, orders, layout, width=12, depth=2, seed=0, knots=knots)
    return ChainDensity(shaken(chain, 1), scaling, NOTHING)


def drawn_by_masked_network(member: Chain, levels: np.ndarray) -> np.ndarray:
    """Return draws of a member, the whole network once per column."""
    layout, targets = member.columns, np.zeros(levels.shape)
    for j, column in enumerate(map(int, member.order)):
        parts, logits = member.outputs(member.rows(targets.astype(np.float32), np.zeros((len(levels), 0))))
        f, place = layout.place(column)
        logit = logits[:, layout.atoms.index(column)] if column in layout.atoms else None
        law = AtomLaw(layout.families[f].at(place), parts[f][:, place], logit)
        targets[:, column] = law.drawn(levels[:, j], None)[0]
    return targets


def test_sorted_units_give_the_draws_of_the_masked_network():
    density = encoded()
    levels = np.random.default_rng(1).random((60, len(MIXED))).astype(np.float32)
    for k in range(len(density)):
        member = density.members.member(k)
        found = ChainSampler(member).sample(np.zeros((60, 0)), levels).targets
        expected = drawn_by_masked_network(member, levels)
        same = np.isclose(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        # Rounding may move a draw across the end of a label, and then the columns after it.
        assert np.mean(np.all(same, axis=1)) > 0.95


def test_fewer_draws_than_members_are_drawn():
    for count in (0, 1, 2):
        assert encoded().sample(count, key=jax.random.key(count)).shape == (count, len(MIXED))


def test_gaps_are_integrated_out_of_a_law_without_a_program(compilations):
    law, rng = stack().parts[0], np.random.default_rng(0)
    values, known = rng.normal(2.0, 3.0, (30, 3)), rng.random((30, 3)) < 0.6
    known[:2] = [[True] * 3, [False] * 3]
    before = compilations.count
    found = log_evidence(law, np.where(known, values, np.nan), 16, key=jax.random.key(0))
    z, slopes = law.scaling.to_model(values), law.scaling.log_jacobians(values)
    for row, own, score in zip(range(30), known, found, strict=True):
        normal = (
            multivariate_normal(np.zeros(own.sum()), (np.eye(3) + 0.5)[own][:, own]) if own.any() else None
        )
        expected = 0.0 if normal is None else normal.logpdf(z[row, own]) + slopes[row, own].sum()
        assert score == pytest.approx(expected, abs=1e-9)
    assert compilations.count == before


def test_draws_do_not_depend_on_inputs_that_a_member_does_not_use():
    chain = Chain.draw(
        2,
        np.zeros((2, 1), int),
        Layout.real(1),
        width=12,
        depth=2,
        seed=0,
        sees=np.array([[1.0, 0.0], [1.0, 1.0]]),
    )
    chain, levels = shaken(chain, 4), np.full((20, 1), 0.3, np.float32)
    x = np.random.default_rng(0).normal(size=(20, 2))
    other = np.column_stack([x[:, 0], x[:, 1] + 3.0])
    first, second = (
        [ChainSampler(chain.member(k)).sample(at, levels).targets for at in (x, other)] for k in (0, 1)
    )
    assert np.array_equal(*first)
    assert not np.allclose(*second)
