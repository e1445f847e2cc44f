import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import midpoint_grid, with_constants

from kexpfam import DDE, DoublyDual, KernelExpFamily, kernels
from kexpfam.measures import Gaussian
from kexpfam.objective import Problem, draw_batch, saddle_terms
from kexpfam.potentials import FeatureSpace
from kexpfam.sample import Sample
from kexpfam.solvers import reference
from kexpfam.solvers.loop import Status, run

SETTINGS = {"lengthscale": 0.6, "rkhs_penalty": 1e-3, "random_state": 0}
SMALL = DoublyDual(width=16, transport_depth=2, nu_depth=2, batch_size=128)
TRACE = {
    *("data_fit", "model_fit", "kl_dual", "penalty", "value"),
    *("sampler_gap", "effective_share", "f_gradient"),
}


@pytest.fixture(scope="module", autouse=True)
def quick_distillation():
    with with_constants(reference, COMPONENTS=16, DRAWS=3000, CANDIDATES=10_000):
        yield


@pytest.fixture(scope="module")
def exact(moons):
    return KernelExpFamily(solver="exact", **SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def warm(moons):
    return KernelExpFamily(solver=DDE(saddle=SMALL, steps=10, nodes=4096), **SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def cold(moons):
    return KernelExpFamily(solver=DDE(saddle=SMALL, steps=10, nodes=4096, start="cold"), **SETTINGS).fit(moons)


def divergence(first, second, data) -> float:
    """Return KL(first || second) on a grid."""
    points, volume = midpoint_grid(data.min(0) - 2.0, data.max(0) + 2.0, 120)
    log_first, log_second = first.score_samples(points), second.score_samples(points)
    return float(volume * np.sum(np.exp(log_first) * (log_first - log_second)))


def test_the_density_is_the_exact_one(exact, warm, moons):
    assert abs(divergence(exact, warm, moons)) < 0.05
    assert warm.score(moons) == pytest.approx(exact.score(moons), abs=0.05)


@pytest.mark.slow
def test_a_polished_cold_start_has_the_same_density(exact, cold, moons):
    assert abs(divergence(exact, cold, moons)) < 0.05


def test_the_trace_has_every_term_and_its_value(warm):
    trace = warm.solution_.trace
    assert set(trace) == TRACE
    assert len({len(series) for series in trace.values()}) == 1
    assert len(trace["value"]) >= 10
    assert all(np.all(np.isfinite(series)) for series in trace.values())
    value = trace["data_fit"] - trace["model_fit"] + trace["kl_dual"] - trace["penalty"]
    np.testing.assert_allclose(trace["value"], value, atol=1e-9)


@pytest.mark.parametrize("model", ["warm", "cold"])
def test_the_solution_is_finite_and_has_converged(model, request):
    model = request.getfixturevalue(model)
    assert model.solution_.status is Status.CONVERGED
    assert np.all(np.isfinite(model.solution_.tilt.weights))
    assert np.all(np.isfinite(list(model.solution_.facts.values())))
    assert np.all(np.isfinite(model.sample(500, random_state=0)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_warm_sampler_has_the_moments_of_the_density(warm, moons, seed):
    points, volume = midpoint_grid(moons.min(0) - 2.0, moons.max(0) + 2.0, 120)
    masses = volume * np.exp(warm.score_samples(points))
    draws = warm.sample(4000, random_state=seed)
    mean = masses @ points
    # The sampler's noise is a mixture fitted to a few thousand draws, whose own error adds to that of the draws.
    error = draws.std(0) * np.hypot(1 / np.sqrt(4000), 1 / np.sqrt(reference.DRAWS))
    assert np.all(np.abs(draws.mean(0) - mean) < 5 * error)


def test_the_sampler_that_is_kept_is_the_better_one(warm):
    facts = warm.solution_.facts
    assert facts["transport_kept"] == float(facts["transport_gain"] >= 0.0)


@pytest.mark.slow
def test_the_raw_saddle_point_from_the_cold_moves_towards_the_data(moons):
    solver = DDE(saddle=SMALL, steps=50, start="cold", polish=False)
    model = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    assert model.solution_.status is Status.RAN_ALL_STEPS
    base = model.density_.tilt.base.log_densities(np.asarray(model.density_.scaling.to_model(moons)))
    plain = (base + np.asarray(model.density_.scaling.log_jacobian(moons))).mean()
    assert model.score(moons) > plain + 0.05


def test_no_steps_leave_the_warm_start(moons):
    model = KernelExpFamily(solver=DDE(saddle=SMALL, steps=0, nodes=4096, polish=False), **SETTINGS).fit(moons)
    assert model.solution_.status is Status.NO_STEPS
    assert model.solution_.trace == {}
    assert np.isfinite(model.score(moons))


@pytest.fixture(scope="module")
def problem():
    data = np.random.default_rng(0).normal(0.8, 0.6, (100, 1))
    sample, kernel = Sample.unconditional(data), kernels.Gaussian(0.8)
    space = FeatureSpace.of_kernels(kernel, kernel, Sample.unconditional(np.linspace(-1.0, 2.5, 6)[:, None]))
    base = Gaussian(jnp.zeros(1), jnp.eye(1))
    guess = Gaussian(jnp.array([0.4]), jnp.eye(1))
    return Problem(sample, base, space, guess, jnp.asarray(0.01), jnp.asarray(1.0), anchored=True)


@pytest.mark.parametrize(("player", "climbs"), [("f", True), ("nu", True), ("transport", False)])
def test_a_solver_in_which_one_player_moves_moves_the_value_its_way(problem, player, climbs):
    rates = {"f_rate": 0.0, "nu_rate": 0.0, "transport_rate": 0.0} | {f"{player}_rate": 1e-2}
    solver = DoublyDual(width=8, transport_depth=2, nu_depth=2, batch_size=256, **rates)
    state = solver.init(problem, jnp.full(problem.space.size, 0.5), key=jr.key(0))
    # nu at its anchor is at its best, so it starts beside it.
    jiggled = state.point.nu.layers[-1].weight + 0.3
    state = eqx.tree_at(lambda s: s.point.nu.layers[-1].weight, state, jiggled)
    batch = draw_batch(problem, 20_000, key=jr.key(1))
    value = lambda state: float(saddle_terms(state.point, problem, batch).value)
    after = run(problem, solver, state, steps=20, chunk=20, key=jr.key(2)).state
    assert (value(after) > value(state)) == climbs
    moved = {
        "f": not np.array_equal(after.point.f_weights, state.point.f_weights),
        "nu": not eqx.tree_equal(after.point.nu, state.point.nu),
        "transport": not eqx.tree_equal(after.point.transport, state.point.transport),
    }
    assert [name for name, is_moved in moved.items() if is_moved] == [player]


def test_an_unknown_start_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"warm, cold; got 'lukewarm'"):
        DDE(start="lukewarm")


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="steps must not be negative, got -1"):
        DDE(steps=-1)


@pytest.mark.parametrize("name", ["transport_updates", "nu_updates", "batch_size", "width", "transport_depth", "nu_depth"])
def test_sizes_of_the_saddle_search_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        DoublyDual(**{name: 0})


def test_the_clipping_norm_is_positive():
    with pytest.raises(ValueError, match="clip must be positive"):
        DoublyDual(clip=0.0)
