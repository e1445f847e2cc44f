import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam import Kernel, KernelExpFamily, load
from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.fit import convex
from kexpfam.fit.convex import likelihood
from kexpfam.fit.loop import AdamState, run
from kexpfam.fit.problem import Problem, Status
from kexpfam.integrate.nodes import grid_nodes
from kexpfam.model import kernels
from kexpfam.model.density import Tilt
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import Constant, FeatureSpace, NetworkSpan, RandomFeatures
from kexpfam.paper.learned_features import (
    AdaptedFeatures,
    DeepNetwork,
    Learning,
    LearningProblem,
    Linear,
    held_out_score,
)

SETTINGS = {"model": "kernel", "kernel": Kernel(lengthscale=0.6, rkhs_penalty=1e-3), "random_state": 0}
LEARNING = Learning(stages=4)


@pytest.fixture(scope="module")
def held_out():
    return two_moons().sample(2000, random_state=1)


@pytest.fixture(scope="module")
def exact(moons):
    return KernelExpFamily(solver="exact", **SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def adapted(moons):
    return KernelExpFamily(solver=AdaptedFeatures(count=20, steps=100, learning=LEARNING), **SETTINGS).fit(
        moons
    )


@pytest.fixture(scope="module")
def deep(moons):
    learning = Learning(decay=1e-3, nodes_per_batch=512, batch_size=128, stages=4)
    return KernelExpFamily(solver=DeepNetwork(width=24, steps=400, learning=learning), **SETTINGS).fit(moons)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapted", "deep"])
def test_the_density_is_near_the_exact_one_or_better(name, exact, held_out, request):
    model = request.getfixturevalue(name)
    assert model.solution_.status is Status.CONVERGED
    assert (
        model.score(held_out) > exact.score(held_out) - 0.08
    )  # 150 rows: both are some tenths from the truth


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapted", "deep"])
def test_a_stored_model_scores_the_same(name, moons, tmp_path, request):
    model = request.getfixturevalue(name)
    model.save(tmp_path / "model.kexpfam")
    np.testing.assert_allclose(
        load(tmp_path / "model.kexpfam").score_samples(moons), model.score_samples(moons)
    )


@pytest.mark.slow
def test_the_facts_and_the_trace_tell_how_the_features_were_learned(adapted, deep):
    for model in (adapted, deep):
        facts, trace = model.solution_.facts, model.solution_.trace
        assert facts["learning_steps"] > 0.0
        assert facts["held_out_gain"] > 0.0
        assert len(trace["value"]) == model.solver.steps
        assert facts["learning_steps"] <= model.solver.steps
    assert isinstance(adapted.solution_.tilt.space.target, RandomFeatures)
    assert isinstance(deep.solution_.tilt.space.target, NetworkSpan)
    assert deep.solution_.tilt.weights.size == 24


def small_problem(penalty=1e-2):
    data = np.random.default_rng(0).normal(0.8, 0.6, (60, 1))
    base, kernel = Gaussian(jnp.zeros(1), jnp.eye(1)), kernels.Gaussian(0.7)
    sample = Sample.unconditional(data)
    return Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), penalty, base)


def evidence_of(problem, nodes):
    arrays = problem.sample.target, nodes.points, nodes.log_weights, problem.rkhs_penalty
    return LearningProblem(*(jnp.asarray(array) for array in arrays))


def test_the_features_of_a_network_are_its_last_hidden_layer():
    span = NetworkSpan.draw(2, width=5, depth=2, key=jr.key(0))
    points = np.random.default_rng(0).normal(size=(3, 2))
    silu = lambda x: x / (1.0 + np.exp(-x))
    rows = points
    for layer in span.body.layers:
        rows = silu(rows @ np.asarray(layer.weight).T + np.asarray(layer.bias))
    assert len(span.body.layers) == 2
    np.testing.assert_allclose(span.matrix(points), rows / np.sqrt(5), rtol=1e-9)


def test_the_value_of_a_step_is_the_penalised_likelihood():
    problem = small_problem()
    nodes = grid_nodes(problem.base, np.asarray(problem.sample.target))
    span = NetworkSpan.draw(1, width=6, depth=1, key=jr.key(0))
    weights = np.random.default_rng(1).normal(size=6)
    evidence = LearningProblem(
        jnp.asarray(problem.sample.target),
        jnp.asarray(nodes.points),
        jnp.asarray(nodes.log_weights),
        jnp.asarray(1e-2),
    )
    learning = Learning(decay=0.1, batch_size=20_000, nodes_per_batch=20_000)
    state = AdamState.start(Linear(span, jnp.asarray(weights)))
    health = jax.jit(lambda key: learning.step(evidence, state, key=key)[1])(jr.key(0))
    posed = likelihood(problem.within(FeatureSpace(Constant(), span)), nodes)
    value = (
        weights @ posed.mean_feature - convex.log_partitions(posed, weights)[0] - 0.005 * weights @ weights
    )
    layer = span.body.layers[0]
    value -= 0.05 * (np.sum(np.asarray(layer.weight) ** 2) + np.sum(np.asarray(layer.bias) ** 2))
    masses = np.exp(posed.exponents(weights)[0])
    # The batch is drawn: the error of its mean of f, and that of the logarithm of its mean mass.
    error = np.hypot(
        (span.matrix(problem.sample.target) @ weights).std(), masses.std() / masses.mean()
    ) / np.sqrt(20_000)
    assert float(health.value) == pytest.approx(value, abs=5 * error)


def test_learning_climbs_the_penalised_likelihood():
    problem = small_problem()
    nodes = grid_nodes(problem.base, np.asarray(problem.sample.target))
    span = RandomFeatures.draw(kernels.Gaussian(3.0), 1, count=2, key=jr.key(1))
    evidence = LearningProblem(
        jnp.asarray(problem.sample.target),
        jnp.asarray(nodes.points),
        jnp.asarray(nodes.log_weights),
        jnp.asarray(1e-2),
    )
    learning = Learning(rate=1e-2, batch_size=64, nodes_per_batch=256)
    outcome = run(
        evidence,
        learning,
        AdamState.start(Linear(span, jnp.zeros(4))),
        steps=200,
        key=jr.key(0),
        chunk=100,
        stage="features",
    )

    def optimum(span):
        posed = likelihood(problem.within(FeatureSpace(Constant(), span)), nodes)
        return convex.maximise(posed, 1e-2, np.zeros(4)).value

    assert optimum(outcome.state.model.span) > optimum(span) + 0.01


def test_the_held_out_score_is_the_mean_log_ratio_to_the_base():
    problem, others = small_problem(), np.random.default_rng(5).normal(0.8, 0.6, (30, 1))
    nodes = grid_nodes(problem.base, np.asarray(problem.sample.target))
    span = problem.space.target
    score = held_out_score(problem, span, nodes, Sample.unconditional(others), nodes)
    weights = convex.maximise(likelihood(problem, nodes), problem.rkhs_penalty, np.zeros(span.size)).weights
    tilt = Tilt(problem.space, jnp.asarray(weights), problem.base)
    masses = np.exp(nodes.log_weights + tilt.values(nodes.points))
    assert score == pytest.approx(tilt.values(others).mean() - np.log(masses.sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaptedFeatures(count=0), "count must be at least 1"),
        (lambda: DeepNetwork(depth=0), "depth must be at least 1"),
        (lambda: DeepNetwork(activation="step"), "unknown activation 'step'.*silu, relu"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
