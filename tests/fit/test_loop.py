import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import normal

from kexpfam.data.sample import Sample
from kexpfam.fit.loop import run
from kexpfam.fit.problem import Status
from kexpfam.fit.saddle import DoublyDual, SaddleProblem
from kexpfam.model import kernels
from kexpfam.model.spaces import FeatureSpace
from kexpfam.storage import Checkpoint, StorageError

SMALL = {
    "width": 8,
    "transport_depth": 1,
    "nu_depth": 1,
    "batch_size": 32,
    "transport_updates": 2,
    "nu_updates": 2,
}
CHUNK = 5


@pytest.fixture(scope="module")
def problem():
    data = np.random.default_rng(0).normal(0.8, 0.6, (60, 1))
    kernel = kernels.Gaussian(0.8)
    space = FeatureSpace.of_kernels(kernel, kernel, Sample.unconditional(np.linspace(-1.0, 2.5, 6)[:, None]))
    settings = (normal(), space, normal(0.5), jnp.asarray(0.01), jnp.asarray(1.0))
    return SaddleProblem(Sample.unconditional(data), *settings, anchored=True)


def start(problem, solver):
    return solver.init(problem, jnp.zeros(problem.space.size), key=jr.key(0))


def go(problem, solver, *, steps, **options):
    return run(
        problem,
        solver,
        start(problem, solver),
        steps=steps,
        key=jr.key(1),
        chunk=CHUNK,
        stage="test",
        **options,
    )


def same(first, second) -> bool:
    """Return whether two states agree in every bit."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) if eqx.is_array(a) else a is b for a, b in pairs)


def test_a_run_has_one_row_of_health_per_step(problem):
    outcome = go(problem, DoublyDual(**SMALL), steps=10)
    assert outcome.status is Status.RAN_ALL_STEPS
    assert int(outcome.state.step) == 10
    assert {len(series) for series in outcome.trace.values()} == {10}


def test_a_run_is_the_steps_one_after_another(problem):
    solver = DoublyDual(**SMALL)
    state = start(problem, solver)
    step = eqx.filter_jit(lambda state, key: solver.step(problem, state, key=key)[0])
    with jax.threefry_partitionable(False):  # the loop's own setting
        for index in range(CHUNK):
            state = step(state, jr.fold_in(jr.key(1), index))
    looped = go(problem, solver, steps=CHUNK).state
    np.testing.assert_allclose(looped.point.f_weights, state.point.f_weights, atol=1e-6)
    for a, b in zip(jax.tree.leaves(looped.averaged), jax.tree.leaves(state.averaged), strict=True):
        if eqx.is_array(a):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_same_key_gives_the_same_run_and_another_key_another(problem):
    solver = DoublyDual(**SMALL)
    state = start(problem, solver)
    first, second, third = (
        run(problem, solver, state, steps=10, key=jr.key(seed), chunk=CHUNK, stage="test").state
        for seed in (1, 1, 2)
    )
    assert same(first, second)
    assert not same(first, third)


@pytest.mark.parametrize("steps_before", [5, 10])
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(problem, tmp_path, steps_before):
    solver = DoublyDual(**SMALL)
    whole = go(problem, solver, steps=20)
    file = tmp_path / "state.kexpfam"
    go(problem, solver, steps=steps_before, checkpoint=Checkpoint(file, problem))
    rest = go(problem, solver, steps=20, checkpoint=Checkpoint(file, problem))
    assert same(whole.state, rest.state)
    assert rest.status is whole.status
    for name, series in whole.trace.items():
        np.testing.assert_array_equal(rest.trace[name], series, err_msg=name)


def test_a_finished_checkpoint_runs_no_further(problem, tmp_path):
    solver, file = DoublyDual(**SMALL), tmp_path / "state.kexpfam"
    done = go(problem, solver, steps=10, checkpoint=Checkpoint(file, problem))
    again = go(problem, solver, steps=10, checkpoint=Checkpoint(file, problem))
    assert same(done.state, again.state)
    assert again.status is Status.RAN_ALL_STEPS


def test_a_checkpoint_of_another_problem_is_refused(problem, tmp_path):
    solver, file = DoublyDual(**SMALL), tmp_path / "state.kexpfam"
    go(problem, solver, steps=5, checkpoint=Checkpoint(file, problem))
    other = eqx.tree_at(lambda p: p.rkhs_penalty, problem, jnp.asarray(0.02))
    with pytest.raises(StorageError, match="other data, settings or solver"):
        go(other, solver, steps=10, checkpoint=Checkpoint(file, other))


def test_a_rate_of_nan_is_divergence_and_leaves_the_start(problem):
    solver = DoublyDual(f_rate=np.nan, **SMALL)
    outcome = go(problem, solver, steps=10)
    assert outcome.status is Status.DIVERGED
    assert same(outcome.state, start(problem, solver))
    assert outcome.trace == {}


class Poisoned(DoublyDual):
    """A solver whose f becomes NaN at its eighth step."""

    def step(self, problem, state, *, key):
        new, health = DoublyDual.step(self, problem, state, key=key)
        weights = jnp.where(state.step == 7, jnp.nan, new.point.f_weights)
        return eqx.tree_at(lambda s: s.point.f_weights, new, weights), health


def test_a_run_that_breaks_is_rolled_back_to_its_last_healthy_chunk(problem):
    outcome = go(problem, Poisoned(**SMALL), steps=20)
    assert outcome.status is Status.DIVERGED
    healthy = go(problem, DoublyDual(**SMALL), steps=5)
    assert same(outcome.state, healthy.state)
    assert len(outcome.trace["value"]) == 5
    assert np.all(np.isfinite(outcome.trace["value"]))


def interrupt_at(step):
    def listener(report):
        if report.stage in ("test", "saddle point") and report.step >= step:
            raise KeyboardInterrupt

    return listener


def test_an_interrupted_run_can_be_resumed_where_it_was(problem, tmp_path):
    solver, file = DoublyDual(**SMALL), tmp_path / "state.kexpfam"
    with pytest.raises(KeyboardInterrupt):
        go(problem, solver, steps=20, report=interrupt_at(10), checkpoint=Checkpoint(file, problem))
    resumed = go(problem, solver, steps=20, checkpoint=Checkpoint(file, problem))
    assert same(resumed.state, go(problem, solver, steps=20).state)


def test_the_listener_hears_of_every_chunk(problem):
    reports = []
    go(problem, DoublyDual(**SMALL), steps=15, report=reports.append)
    assert {report.stage for report in reports} == {"test"}
    assert [(report.step, report.steps) for report in reports] == [(5, 15), (10, 15), (15, 15)]
    assert all(np.isfinite(list(report.health.values())).all() for report in reports)


def test_no_steps_are_no_work(problem):
    solver = DoublyDual(**SMALL)
    outcome = go(problem, solver, steps=0)
    assert outcome.status is Status.NO_STEPS
    assert same(outcome.state, start(problem, solver))


class Counting(DoublyDual):
    """A solver that notes every time it is traced."""

    def step(self, problem, state, *, key):
        TRACES.append(self)
        return DoublyDual.step(self, problem, state, key=key)


TRACES = []


def test_another_rate_or_penalty_or_number_of_steps_does_not_recompile(problem):
    TRACES.clear()
    first = go(problem, Counting(**SMALL), steps=5)
    compiled = len(TRACES)
    assert compiled >= 1
    second = go(
        problem, Counting(f_rate=0.3, nu_rate=2e-3, transport_rate=3e-4, horizon=50.0, **SMALL), steps=10
    )
    heavier = eqx.tree_at(lambda p: p.rkhs_penalty, problem, jnp.asarray(0.5))
    go(heavier, Counting(**SMALL), steps=5)
    assert len(TRACES) == compiled
    assert not np.array_equal(first.state.point.f_weights, second.state.point.f_weights)


def test_another_size_does_recompile(problem):
    TRACES.clear()
    go(problem, Counting(**SMALL | {"batch_size": 16}), steps=5)
    assert len(TRACES) >= 1
