import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import changed, midpoint_grid

from kexpfam import DDE, Kernel, KernelExpFamily
from kexpfam.data.sample import Sample
from kexpfam.fit import mixture
from kexpfam.fit.convergence import Convergence
from kexpfam.fit.dde import run_with_retries
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import run
from kexpfam.fit.problem import Status
from kexpfam.fit.saddle import DoublyDual, SaddleProblem, draw_batch, saddle_terms
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace

SETTINGS = {"model": "kernel", "kernel": Kernel(lengthscale=0.6, rkhs_penalty=1e-3), "random_state": 0}
SMALL = DoublyDual(width=16, transport_depth=2, nu_depth=2, batch_size=128)


@pytest.fixture(scope="module")
def exact(moons):
    return KernelExpFamily(solver="exact", **SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def warm(moons):
    return KernelExpFamily(solver=DDE(saddle=SMALL, steps=10, warm_start=True, polish=True), **SETTINGS).fit(
        moons
    )


@pytest.fixture(scope="module")
def cold(moons):
    return KernelExpFamily(solver=DDE(saddle=SMALL, steps=10, polish=True), **SETTINGS).fit(moons)


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
    assert set(trace) == set(DDE.records)
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
    # The sampler's noise is a mixture fitted to a few thousand draws, whose own error adds to that of the
    # draws.
    error = draws.std(0) * np.hypot(1 / np.sqrt(4000), 1 / np.sqrt(Distillation().draws))
    assert np.all(np.abs(draws.mean(0) - mean) < 5 * error)


def test_the_sampler_that_is_kept_is_the_better_one(warm):
    facts = warm.solution_.facts
    assert facts["transport_kept"] == float(facts["transport_gain"] >= 0.0)


@pytest.mark.slow
def test_the_raw_saddle_point_from_the_cold_moves_towards_the_data(moons):
    solver = DDE(saddle=SMALL, steps=50)
    model = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    assert model.solution_.status is Status.RAN_ALL_STEPS
    base = model.density_.tilt.base.log_densities(model.density_.scaling.to_model(moons))
    plain = (base + model.density_.scaling.log_jacobian(moons)).mean()
    assert model.score(moons) > plain + 0.05


def test_no_steps_leave_the_warm_start(moons):
    model = KernelExpFamily(solver=DDE(saddle=SMALL, steps=0, warm_start=True), **SETTINGS).fit(moons)
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
    return SaddleProblem(sample, base, space, guess, jnp.asarray(0.01), jnp.asarray(1.0), anchored=True)


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
    after = run(problem, solver, state, steps=20, chunk=20, key=jr.key(2), stage="test").state
    assert (value(after) > value(state)) == climbs
    moved = {
        "f": not np.array_equal(after.point.f_weights, state.point.f_weights),
        # nu's constant is found anew for each batch, at any rate.
        "nu": not eqx.tree_equal(after.point.nu.layers[0], state.point.nu.layers[0]),
        "transport": not eqx.tree_equal(after.point.transport, state.point.transport),
    }
    assert [name for name, is_moved in moved.items() if is_moved] == [player]


def test_by_default_it_is_the_paper_s_algorithm_alone():
    solver = DDE()
    assert not solver.warm_start
    assert not solver.polish


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        DDE(steps=-1)


@pytest.mark.parametrize(
    "name", ["transport_updates", "nu_updates", "batch_size", "width", "transport_depth", "nu_depth"]
)
def test_sizes_of_the_saddle_search_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        DoublyDual(**{name: 0})


def test_the_clipping_norm_is_positive():
    with pytest.raises(ValueError, match="clip must be positive"):
        DoublyDual(clip=0.0)


class Hot(DoublyDual):
    """Players whose health is lost while f is fast."""

    def step(self, problem, state, *, key):
        new, health = DoublyDual.step(self, problem, state, key=key)
        return new, health._replace(sampler_gap=jnp.where(self.f_rate > 0.05, jnp.nan, health.sampler_gap))


SIZES = {
    "width": 8,
    "transport_depth": 1,
    "nu_depth": 1,
    "batch_size": 32,
    "transport_updates": 1,
    "nu_updates": 1,
}


@pytest.mark.parametrize(("rate", "status"), [(0.3, Status.RAN_ALL_STEPS), (3.0, Status.DIVERGED)])
def test_a_runaway_goes_on_at_lower_rates_while_there_are_any(problem, rate, status):
    solver = Hot(f_rate=rate, **SIZES)
    state = solver.init(problem, jnp.zeros(problem.space.size), key=jr.key(0))
    outcome = run_with_retries(problem, solver, state, steps=10, key=jr.key(1), stage="test")
    assert outcome.status is status
    assert int(outcome.state.step) == (10 if status is Status.RAN_ALL_STEPS else 0)


def test_a_run_says_where_it_stands(moons):
    model = KernelExpFamily(solver=DDE(saddle=SMALL, steps=10), **SETTINGS).fit(moons)
    facts = model.solution_.facts
    assert set(Convergence._fields) <= set(facts)
    assert (
        model.solution_.status is Status.RAN_ALL_STEPS
    )  # ten steps from the cold are far from the optimum, and it says so
    assert facts["shortfall"] > 0.1


def test_the_printed_scheme_follows_the_plain_gradient_and_keeps_no_metric(problem):
    solver = DoublyDual.plain(**SIZES | {"nu_rate": 0.0, "transport_rate": 0.0})
    state = solver.init(problem, jnp.zeros(problem.space.size), key=jr.key(0))
    after = run(problem, solver, state, steps=1, key=jr.key(1), stage="test")
    assert state.point.nu.waves is None
    assert after.state.metric.moment.size == 0
    moved = np.linalg.norm(after.state.point.f_weights - state.point.f_weights)
    assert moved == pytest.approx(float(after.trace["f_gradient"][0]), rel=1e-5)


@pytest.mark.parametrize("warm_start", [False, True])
def test_a_mixture_is_searched_only_if_the_solver_draws_from_it(moons, monkeypatch, warm_start):
    searches = []
    search = mixture.best_shape
    monkeypatch.setattr(
        mixture, "best_shape", lambda *args, **options: searches.append(1) or search(*args, **options)
    )
    small = Distillation(components=2, draws=200, candidates=400, rounds=1)
    solver = DDE(steps=1, saddle=SMALL, warm_start=warm_start, distillation=small)
    KernelExpFamily(solver=solver, **changed(SETTINGS, base="gaussian")).fit(moons)
    assert len(searches) == warm_start
