import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array, Float
from oracles import changed

from kexpfam import Kernel, KernelExpFamily, load
from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.fit.dde import saddle_problem
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import run
from kexpfam.fit.problem import Problem, Status
from kexpfam.fit.saddle import SaddlePoint, SaddleProblem, draw_batch, player_gradient
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian, StandardNormal
from kexpfam.model.networks import AbstractTransport
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan
from kexpfam.paper.functional import (
    Expansion,
    Expansions,
    FunctionalAscent,
    FunctionalGradient,
    FunctionalState,
    SpaceFunction,
    functional_step,
)

SETTINGS = {"model": "kernel", "kernel": Kernel(lengthscale=0.6, rkhs_penalty=1e-3), "random_state": 0}
SMALL = FunctionalAscent(batch_size=32, ascents=2, width=16, depth=2)
WARM = {
    "warm_start": True,
    "polish": True,
    "distillation": Distillation(components=16, draws=3000, candidates=10_000),
}
WIDTH, PENALTY = 0.7, 0.01


class Affine(AbstractTransport):
    """``noise @ matrix + shift``: a transport whose gradient can be written by hand."""

    matrix: Float[Array, "d d"]
    shift: Float[Array, " d"]

    def __call__(self, noise, condition):
        return noise @ self.matrix + self.shift


@pytest.fixture(scope="module")
def problem():
    data = np.random.default_rng(0).normal([0.5, -0.3], [0.6, 0.9], (40, 2))
    sample, base, kernel = Sample.unconditional(data), Gaussian.fitted(data), kernels.Gaussian(WIDTH)
    return Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), PENALTY, base)


def empty(slots):
    return Expansion.starting(jnp.zeros((0, 2)), jnp.zeros(0), slots=slots)


def start(problem, slots, *, reference=None):
    """Return the problem on expansions, and players at f = 0, nu = 0 and an affine transport."""
    space = Expansions(problem.space.target.kernel)
    transport = Affine(jnp.eye(2) + 0.05, jnp.array([0.1, -0.2]))
    posed = saddle_problem(problem, reference or problem.base, space)
    return posed, FunctionalState(
        SaddlePoint(empty(slots), SpaceFunction(space, empty(slots)), transport), jnp.array(0)
    )


class Twin:
    """Algorithms 1 and 2 in lists and loops, with the derivative of the Gaussian kernel by hand."""

    def __init__(self, transport):
        self.f, self.nu = [], []  # pairs of centre and coefficient
        self.matrix, self.shift = np.array(transport.matrix), np.array(transport.shift)

    def kernel(self, x, z):
        return np.exp(-np.sum((x - z) ** 2) / (2 * WIDTH**2))

    def value(self, terms, x):
        return sum(c * self.kernel(x, z) for z, c in terms)

    def slope(self, terms, x):
        return sum((c * self.kernel(x, z) * (z - x) / WIDTH**2 for z, c in terms), np.zeros(2))

    def ascend(self, data, noise, base, log_weights, anchor, rate):
        count = len(data)
        moved = noise @ self.matrix + self.shift
        masses = [
            np.exp(self.value(self.nu, x) + a + w) for x, a, w in zip(base, anchor, log_weights, strict=True)
        ]
        self.f = [(z, (1 - PENALTY * rate) * c) for z, c in self.f]
        self.f += [(x, rate / count) for x in data] + [(x, -rate / count) for x in moved]
        self.nu += [(x, rate / count) for x in moved]
        self.nu += [(x, -rate * mass / count) for x, mass in zip(base, masses, strict=True)]

    def descend(self, noise, anchor_slope, rate, clip):
        matrix, shift = np.zeros((2, 2)), np.zeros(2)
        for row in noise:
            x = row @ self.matrix + self.shift
            slope = (self.slope(self.nu, x) + anchor_slope(x) - self.slope(self.f, x)) / len(noise)
            matrix, shift = matrix + np.outer(row, slope), shift + slope
        norm = np.sqrt((matrix**2).sum() + (shift**2).sum())
        rate = rate * min(1.0, clip / norm)
        self.matrix, self.shift = self.matrix - rate * matrix, self.shift - rate * shift


def twin_after(posed, transport, ascent, steps, *, key):
    """Return the twin after the steps, given the same draws."""
    twin, measure, base = Twin(transport), posed.reference, posed.base
    log_ratio = lambda rows: measure.log_density(rows) - base.log_density(rows)
    whiten = lambda normal: np.linalg.inv(np.asarray(normal.cholesky) @ np.asarray(normal.cholesky).T)
    slope = lambda normal, x: -whiten(normal) @ (x - np.asarray(normal.mean))
    draws = eqx.filter_jit(jax.vmap(lambda key: draw_batch(posed, ascent.batch_size, key=key)))
    for step in range(steps):
        with jax.threefry_partitionable(False):  # the loop's own setting
            batches = draws(jr.split(jr.fold_in(key, step), ascent.ascents + 1))
        rows = [
            np.asarray(part)
            for part in (batches.data.target, batches.noise, batches.base, batches.base_log_weights)
        ]
        for inner in range(ascent.ascents):
            rate = float(ascent.rate) / np.sqrt(1 + (step * ascent.ascents + inner) / float(ascent.horizon))
            twin.ascend(*(part[inner] for part in rows), log_ratio(rows[2][inner]), rate)
        rate = float(ascent.transport_rate) / np.sqrt(1 + step / float(ascent.horizon))
        twin.descend(rows[1][-1], lambda x: slope(measure, x) - slope(base, x), rate, float(ascent.clip))
    return twin


LONG = pytest.param(200, 1, 5.0, marks=pytest.mark.slow)


@pytest.mark.parametrize(("steps", "ascents", "clip"), [LONG, (40, 2, 5.0), (20, 3, 0.05)])
def test_the_players_are_those_of_the_printed_algorithm(problem, steps, ascents, clip):
    ascent = FunctionalAscent(
        rate=0.5, transport_rate=0.05, horizon=20.0, clip=clip, ascents=ascents, batch_size=2
    )
    nearby = Gaussian(problem.base.mean + 0.1, 0.9 * problem.base.cholesky)
    posed, state = start(problem, 2 * 2 * ascents * steps, reference=nearby)
    outcome = run(posed, ascent, state, steps=steps, key=jr.key(3), stage="steps")
    assert outcome.status is Status.RAN_ALL_STEPS
    twin = twin_after(posed, state.point.transport, ascent, steps, key=jr.key(3))
    point = outcome.state.point
    for terms, expansion in ((twin.f, point.f_weights), (twin.nu, point.nu.f)):
        np.testing.assert_allclose(expansion.centres, np.stack([z for z, _ in terms]), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(expansion.coefficients, [c for _, c in terms], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(point.transport.matrix, twin.matrix, rtol=1e-6)
    rows = np.random.default_rng(1).normal(size=(5, 2))
    values = posed.space.evaluate(point.f_weights, jnp.asarray(rows), None)
    np.testing.assert_allclose(values, [twin.value(twin.f, x) for x in rows], rtol=1e-6)
    assert np.linalg.norm(twin.matrix - np.asarray(state.point.transport.matrix)) > 0.01


def test_a_functional_step_in_features_is_the_gradient_of_the_saddle_function(problem):
    posed = eqx.tree_at(
        lambda p: p.inverse_temperature,
        saddle_problem(problem, problem.base, problem.space),
        jnp.asarray(2.0),
    )
    rng, size = np.random.default_rng(0), problem.space.size
    f, nu = (jnp.asarray(0.3 * rng.normal(size=size)) for _ in range(2))
    point = SaddlePoint(f, SpaceFunction(problem.space, nu), Affine(jnp.eye(2), jnp.zeros(2)))
    batch = draw_batch(posed, 50, key=jr.key(0))
    after = functional_step(posed, point, batch, jnp.asarray(0.1), nu_speed=3.0)
    f_gradient = player_gradient(posed, point, batch, lambda p: p.f_weights)
    nu_gradient = player_gradient(posed, point, batch, lambda p: p.nu.f)
    np.testing.assert_allclose(after.f_weights, f + 0.1 * f_gradient, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(after.nu.f, nu + 0.3 * nu_gradient, rtol=1e-9, atol=1e-12)


def test_a_step_in_expansions_is_the_same_function_as_one_in_features(problem):
    kernel, data = problem.space.target.kernel, problem.sample.target
    expansions, rng = Expansions(kernel), np.random.default_rng(0)
    # Two steps at training points, which are in the span of the features.
    grown, weights = empty(40), jnp.zeros(problem.space.size)
    for shrinkage in (1.0, 0.8):
        rows, coefficients = data[rng.integers(0, 40, 10)], jnp.asarray(rng.normal(size=10))
        grown = expansions.stepped(grown, shrinkage, rows, None, coefficients)
        weights = problem.space.stepped(weights, shrinkage, rows, jnp.zeros((10, 0)), coefficients)
    points = jnp.asarray(rng.normal(size=(20, 2)))
    expected = problem.space.evaluate(weights, points, jnp.zeros((20, 0)))
    np.testing.assert_allclose(expansions.evaluate(grown, points, None), expected, atol=1e-5)
    assert float(expansions.squared_norm(grown)) == pytest.approx(
        float(problem.space.squared_norm(weights)), rel=1e-4
    )


def test_a_full_expansion_overwrites_its_oldest_terms_but_not_its_start():
    space = Expansions(kernels.Gaussian(1.0))
    f = Expansion.starting(jnp.array([[9.0]]), jnp.array([7.0]), slots=4)
    for value in (1.0, 2.0, 3.0):
        f = space.stepped(f, 0.5, jnp.full((2, 1), value), None, jnp.full(2, value))
    np.testing.assert_allclose(f.centres[:, 0], [9.0, 3.0, 3.0, 2.0, 2.0])
    np.testing.assert_allclose(f.coefficients, [7.0 / 8, 3.0, 3.0, 1.0, 1.0])


def test_projection_is_exact_on_all_centres_and_the_nearest_function_on_some():
    rng = np.random.default_rng(0)
    space = Expansions(kernels.Gaussian(1.0))
    f = Expansion.starting(rng.normal(size=(12, 2)), rng.normal(size=12), slots=5)
    points = jnp.asarray(rng.normal(size=(30, 2)))
    span, weights = space.projected(f, most=12, seed=0)
    np.testing.assert_allclose(span.evaluate(weights, points), space.evaluate(f, points, None), atol=1e-5)
    span, weights = space.projected(f, most=5, seed=0)
    assert len(span.centres) == 5
    # |f - h|^2 over h in the span, by expanding the square with every kernel value written out.
    gram = np.asarray(space.kernel.gram(span.centres, span.centres))
    values = np.asarray(space.evaluate(f, span.centres, None))
    np.testing.assert_allclose(span.whitening @ weights, np.linalg.solve(gram, values), rtol=1e-5)


@pytest.fixture(scope="module")
def exact(moons):
    return KernelExpFamily(solver="exact", **SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def warm(moons):
    solver = FunctionalGradient(ascent=SMALL, steps=20, budget=512, centres=150, **WARM)
    return KernelExpFamily(solver=solver, **SETTINGS).fit(moons)


@pytest.mark.slow
def test_the_density_is_near_the_exact_one(warm, exact):
    held_out = two_moons().sample(2000, random_state=1)
    assert warm.score(held_out) == pytest.approx(exact.score(held_out), abs=0.05)
    assert warm.solution_.status is Status.CONVERGED
    assert warm.diagnose().f_gap < 0.02


@pytest.mark.slow
def test_the_solution_lives_on_centres_of_its_own(warm):
    space, facts = warm.solution_.tilt.space, warm.solution_.facts
    assert isinstance(space.target, KernelSpan)
    assert isinstance(space.condition, Constant)
    assert len(space.target.centres) == 150
    assert not np.array_equal(space.target.centres, warm._problem.space.target.centres)
    assert facts["projection_error"] < 0.05
    # The steps moved f away from its start, and the polish says by how much they missed.
    assert 0.0 < facts["polish_gain"] < 0.1


@pytest.mark.slow
def test_the_trace_is_finite_and_a_stored_model_scores_the_same(warm, moons, tmp_path):
    assert set(warm.solution_.trace) == {"data_fit", "model_fit", "kl_dual"}
    assert {len(series) for series in warm.solution_.trace.values()} == {20}
    warm.save(tmp_path / "model.kexpfam")
    again = load(tmp_path / "model.kexpfam")
    np.testing.assert_allclose(again.score_samples(moons), warm.score_samples(moons))
    assert again.solution_.status is Status.CONVERGED


@pytest.mark.slow
def test_the_cold_start_without_polish_improves_on_the_base(moons):
    quick = FunctionalAscent(
        rate=0.1, nu_speed=30.0, transport_rate=0.3, batch_size=16, ascents=2, width=16, depth=2
    )
    solver = FunctionalGradient(ascent=quick, steps=75)
    model = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    assert model.solution_.status is Status.RAN_ALL_STEPS
    base = model.density_.tilt.base.log_densities(np.asarray(model.density_.scaling.to_model(moons)))
    assert model.score(moons) > (base + np.asarray(model.density_.scaling.log_jacobian(moons))).mean() + 0.1


def test_a_run_away_is_called_divergence(problem):
    ascent = FunctionalAscent(rate=1e4, batch_size=2, ascents=2)
    posed, state = start(problem, 200)
    assert run(posed, ascent, state, steps=25, key=jr.key(0), stage="steps").status is Status.DIVERGED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "steps must be at least 0"),
        ({"centres": 0}, "centres must be at least 1"),
        ({"budget": 50}, r"at least twice the batch size \(64\), got 50"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FunctionalGradient(**settings)


def test_a_space_without_a_kernel_is_refused(moons):
    with pytest.raises(ValueError, match="leave space at 'nystrom'"):
        KernelExpFamily(solver="functional", **changed(SETTINGS, space="random_features")).fit(moons)


def operations_of_a_step(dim: int, terms: int) -> float:
    """Return the floating-point operations of one step of f and nu, as the compiler counts them."""
    base, kernel = StandardNormal(dim), kernels.Gaussian(WIDTH)
    sample = Sample.unconditional(np.random.default_rng(0).normal(size=(40, dim)))
    space = Expansions(kernel)
    full = Expansion.starting(jnp.zeros((0, dim)), jnp.zeros(0), slots=terms)
    transport = Affine(jnp.eye(dim), jnp.zeros(dim))
    posed = SaddleProblem(sample, base, space, base, jnp.array(PENALTY), jnp.array(1.0), anchored=False)
    batch = draw_batch(posed, 16, key=jr.key(0))
    step = jax.jit(
        lambda f, nu: functional_step(
            posed, SaddlePoint(f, SpaceFunction(space, nu), transport), batch, jnp.array(0.1)
        )
    )
    return step.lower(full, full).compile().cost_analysis()["flops"]


def test_a_step_costs_as_many_operations_as_terms_times_dimensions():
    # K steps make K terms, so that all of them take K^2 d: appendix B of the paper. Large sizes hide what
    # does not grow.
    once = operations_of_a_step(200, 4000)
    assert operations_of_a_step(200, 8000) == pytest.approx(2.0 * once, rel=0.05)
    assert operations_of_a_step(400, 4000) == pytest.approx(2.0 * once, rel=0.05)
