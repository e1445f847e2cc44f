"""``log_prob`` and ``draw``: every density as a pure function of JAX, against what it says on the host."""

import jax
import jax.random as jr
import numpy as np
import pytest
from oracles import changed

from kexpfam import ConditionalKernelExpFamily, Integration, Kernel, KernelExpFamily
from kexpfam.data.kinds import Integer, Positive
from kexpfam.data.scaling import Scaling
from kexpfam.datasets import two_moons
from kexpfam.fit.learned import Learned
from kexpfam.model.ensemble import LawDensity, Stack
from kexpfam.model.measures import Mixture

SMALL = Learned(folds=2, repeats=1, width=12, epochs=25, cells=64, steps=100)
COARSE = Integration(cells=(80, 24), tail_cells=(8, 3), conditional_cells=(80,))
KERNEL = {
    "model": "kernel",
    "kernel": Kernel(lengthscale=0.6, rkhs_penalty=1e-2, n_centres=20, integration=COARSE),
    "random_state": 0,
}
CONDITIONAL = changed(KERNEL, condition_lengthscale=0.8, base_width=1.0, power=True)
CHAIN = {"model": "chain", "learned": SMALL, "random_state": 0}
DRAWS = 4000


def rows_of(seed, count=120):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2))
    return x, 5.0 + 3.0 * (np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=count))


def skewed(seed, count=120):
    """Rows with tails that are brought in by an arcsinh."""
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.standard_t(1.2, count), rng.exponential(size=count) ** 1.5])


def law():
    points = two_moons().sample(100, random_state=0)
    factors = np.stack([np.eye(2), np.array([[0.5, 0.0], [0.3, 0.4]])])
    return LawDensity(
        Mixture.of(np.log([0.3, 0.7]), np.array([[0.0, 0.5], [1.0, -0.5]]), factors), Scaling.plain(points)
    )


def bounded(**settings):
    points = two_moons().sample(120, random_state=0)
    bounds = (points.min(0) - 0.1, points.max(0) + 0.2)
    return KernelExpFamily(bounds=bounds, **settings).fit(points).density_


def completed():
    """f depends on two of four columns, the others follow the base."""
    rows = np.random.default_rng(0).normal(size=(120, 4)) @ np.triu(np.ones((4, 4)))
    scales = [0.8, np.inf, 0.9, np.inf]
    return KernelExpFamily(**changed(KERNEL, lengthscale=scales, base="gaussian")).fit(rows).density_


MADE = {
    "kernel": lambda: KernelExpFamily(**KERNEL).fit(two_moons().sample(120, random_state=0)).density_,
    "matern": lambda: (
        KernelExpFamily(**changed(KERNEL, kernel="matern52"))
        .fit(two_moons().sample(120, random_state=0))
        .density_
    ),
    "box": lambda: bounded(**changed(KERNEL, base="box")),
    "completed": completed,
    "warped": lambda: KernelExpFamily(**KERNEL, columns={1: "real"}).fit(skewed(0)).density_,
    "law": law,
    "chain": lambda: KernelExpFamily(**CHAIN, columns={1: "real"}).fit(skewed(0)).density_,
    "bounded chain": lambda: bounded(**CHAIN),
    "conditional": lambda: ConditionalKernelExpFamily(**CONDITIONAL).fit(*rows_of(0)).density_,
    "conditional chain": lambda: ConditionalKernelExpFamily(**CHAIN).fit(*rows_of(0)).density_,
}
JOINT = [
    "kernel",
    "matern",
    "box",
    "completed",
    "warped",
    "law",
    "chain",
    "bounded chain",
    "stack",
    "given",
    "given chain",
]
CONDITIONED = ["conditional", "conditional chain", "conditional stack"]


@pytest.fixture(scope="module")
def densities():
    made = {name: make() for name, make in MADE.items()}
    stack = lambda *names: Stack(
        tuple(made[name] for name in names), np.array([0.4, 0.6]), made[names[0]].scaling
    )
    at = np.array([0.3, -0.2])
    made["stack"], made["conditional stack"] = (
        stack("kernel", "law"),
        stack("conditional", "conditional chain"),
    )
    made["given"], made["given chain"] = made["conditional"].given(at), made["conditional chain"].given(at)
    return made


def points_of(density, count=6):
    """Return targets and conditions: draws, so that none is off the support."""
    if not density.conditional:
        return density.sample(count, key=jr.key(0)), None
    x = rows_of(7, count)[0]
    return density.sample(1, x, key=jr.key(0))[:, 0], x


@pytest.mark.parametrize("name", JOINT + CONDITIONED)
def test_it_is_the_log_density_and_its_gradient_that_of_finite_differences(densities, name):
    density, step = densities[name], 1e-5
    rows = [part for part in points_of(density) if part is not None]
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(density.log_prob, argnums=tuple(range(len(rows))))))(
        *rows
    )
    assert np.asarray(values) == pytest.approx(density.log_density(*rows), rel=1e-10, abs=1e-10)
    for k, slope in enumerate(slopes):
        for j, move in enumerate(step * np.eye(rows[k].shape[1])):
            after, before = ([*rows[:k], rows[k] + sign * move, *rows[k + 1 :]] for sign in (1.0, -1.0))
            difference = (density.log_density(*after) - density.log_density(*before)) / (2.0 * step)
            assert np.asarray(slope)[:, j] == pytest.approx(difference, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["kernel", "completed", "chain", "conditional"])
def test_it_needs_no_double_precision_of_the_caller(densities, name):
    """The sums inside lose nothing; the number that comes back is rounded once."""
    density = densities[name]
    rows = [part.astype(np.float32) for part in points_of(density) if part is not None]
    with jax.enable_x64(False):
        found, slopes = jax.jit(jax.vmap(jax.value_and_grad(density.log_prob)))(*rows)
        drawn = jax.jit(lambda key: density.draw(*(row[0] for row in rows[1:]), key=key))(jr.key(0))
    assert {found.dtype, slopes.dtype, drawn.dtype} == {np.dtype(np.float32)}
    exact = jax.jit(jax.vmap(jax.grad(density.log_prob)))(*(part.astype(float) for part in rows))
    assert np.asarray(slopes) == pytest.approx(np.asarray(exact), rel=1e-6, abs=1e-6)
    assert np.asarray(found) == pytest.approx(
        density.log_density(*(part.astype(float) for part in rows)), rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize("name", ["box", "bounded chain"])
def test_off_the_support_it_is_minus_infinity_and_its_gradient_finite(densities, name):
    density = densities[name]
    low, high = density.support()
    points = np.stack([high + 1e-3, low - 1e-3, 0.5 * (low + high)])
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(density.log_prob)))(points)
    assert np.isneginf(values).tolist() == [True, True, False]
    assert np.all(np.isfinite(slopes))


@pytest.mark.parametrize("base", [None, "chain"])
def test_a_positive_column_has_no_density_below_zero(base):
    x = np.random.default_rng(0).exponential(size=(120, 1))
    settings = CHAIN if base else KERNEL
    density = KernelExpFamily(columns={0: Positive()}, **settings).fit(x).density_
    assert density.support().ravel().tolist() == [0.0, np.inf]
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(density.log_prob)))(np.array([[-1.0], [0.5], [0.0]]))
    assert np.isneginf(values).tolist() == [True, False, True]
    assert values[1] == pytest.approx(density.log_density(np.array([[0.5]]))[0], abs=1e-10)
    assert np.all(np.isfinite(slopes))


def test_columns_of_several_kinds_are_traced_too():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=120), rng.poisson(3.0, size=120), rng.integers(30, size=120)])
    model = KernelExpFamily(columns={1: Integer(), 2: Integer()}, **CHAIN).fit(x)
    traced = jax.jit(jax.vmap(model.log_prob))(x[:5])
    assert np.asarray(traced) == pytest.approx(model.score_samples(x[:5]), abs=1e-10)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: model.density_.draw(key=key)))(jr.split(jr.key(0), 20)))
    assert np.isfinite(draws).all() and np.array_equal(draws[:, 1:], np.round(draws[:, 1:]))


def test_an_unbounded_density_has_no_bounds(densities):
    assert densities["kernel"].support() is None
    assert densities["stack"].support() is None


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINT)
def test_traced_draws_follow_the_law_of_the_others(densities, name):
    """Each column's mean of ranks among draws of the host: within 4 standard errors, twice 1 / sqrt(12 n)."""
    density = densities[name]
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: density.draw(key=key)))(jr.split(jr.key(1), DRAWS)))
    other = density.sample(DRAWS, key=jr.key(2))
    assert drawn.shape == other.shape
    for column, reference in zip(drawn.T, other.T, strict=True):
        ranks = np.searchsorted(np.sort(reference), column) / DRAWS
        for power in (1, 2):  # location and spread
            spread = (1.0 / (2 * power + 1) - 1.0 / (power + 1) ** 2) ** 0.5
            assert abs(np.mean(ranks**power) - 1.0 / (power + 1)) < 4.0 * spread * (2.0 / DRAWS) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONED)
def test_traced_draws_under_a_condition_have_its_mean(densities, name):
    density, x = densities[name], np.array([0.4, -0.3])
    drawn = jax.jit(jax.vmap(lambda key: density.draw(x, key=key)))(jr.split(jr.key(1), DRAWS))
    error = float(drawn.std()) / DRAWS**0.5
    assert float(drawn.mean()) == pytest.approx(density.mean(x[None])[0, 0], abs=4.0 * error)


def test_the_estimators_pass_it_on():
    rows, targets = rows_of(0)
    model = ConditionalKernelExpFamily(**CONDITIONAL).fit(rows, targets)
    expected = model.score_samples(rows[:1], targets[:1])[0]
    assert float(model.log_prob(rows[0], targets[0])) == pytest.approx(expected, abs=1e-10)
    assert float(model.given(rows[0]).log_prob(targets[0])) == pytest.approx(expected, abs=1e-10)
    joint = KernelExpFamily(**KERNEL).fit(rows)
    assert float(joint.log_prob(rows[0])) == pytest.approx(joint.score_samples(rows[:1])[0], abs=1e-10)


def test_several_points_are_refused_with_the_size_of_one():
    with pytest.raises(ValueError, match="takes a point of size 2, got 6: use jax.vmap"):
        law().log_prob(np.zeros((3, 2)))
