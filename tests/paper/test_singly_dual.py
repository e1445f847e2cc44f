import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import linear_space, normal

import kexpfam
from kexpfam import Kernel, KernelExpFamily
from kexpfam.data.sample import Sample
from kexpfam.fit.problem import Problem, Status
from kexpfam.judge.measure import sampler_fit
from kexpfam.model.measures import Mixture
from kexpfam.paper import SinglyDual
from kexpfam.paper.duals import FAMILIES, MixtureDual
from kexpfam.paper.singly_dual import family_response

SETTINGS = {"model": "kernel", "kernel": Kernel(lengthscale=0.6, rkhs_penalty=1e-3), "random_state": 0}
STEPS = 800


@pytest.fixture(scope="module")
def exact(moons):
    return KernelExpFamily(solver="exact", **SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def mixture(moons):
    return KernelExpFamily(solver=SinglyDual(steps=STEPS), **SETTINGS).fit(moons)


@pytest.fixture(scope="module")
def gaussian(moons):
    return KernelExpFamily(solver=SinglyDual(family="gaussian", steps=STEPS), **SETTINGS).fit(moons)


@pytest.mark.slow
def test_the_saddle_point_of_a_mixture_is_the_exact_density_without_polish(mixture, exact, moons):
    assert mixture.solution_.status is Status.RAN_ALL_STEPS
    assert mixture.score(moons) == pytest.approx(exact.score(moons), abs=0.05)
    assert abs(mixture.solution_.facts["saddle_kl"]) < 0.05


@pytest.mark.slow
def test_a_normal_cannot_hold_two_moons_and_the_facts_say_so(gaussian, exact, moons):
    assert gaussian.solution_.facts["saddle_kl"] > 1.0
    assert gaussian.score(moons) < exact.score(moons) - 1.0


@pytest.mark.slow
def test_the_reported_divergence_is_that_of_the_diagnosis(mixture):
    kl = mixture.diagnose()["sampler_kl"]
    assert abs(mixture.solution_.facts["sampler_kl"] - kl.value) < 5 * np.sqrt(2.0) * kl.error + 1e-3


@pytest.mark.slow
def test_the_trace_says_that_the_gap_closed(mixture):
    trace = mixture.solution_.trace
    assert trace["approximation_gap"][-20:].mean() < 0.3 * trace["approximation_gap"][0]
    value = trace["data_fit"] - trace["model_fit"] + trace["kl_dual"] - trace["penalty"]
    np.testing.assert_allclose(trace["value"], value, atol=1e-9)


@pytest.mark.slow
def test_polish_gives_any_family_the_exact_density(exact, moons):
    solver = SinglyDual(family="gaussian", steps=2, batch_size=256, polish=True)
    polished = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    assert polished.solution_.status is Status.CONVERGED
    assert polished.score(moons) == pytest.approx(exact.score(moons), abs=0.05)
    assert polished.solution_.facts["polish_gain"] > 0.1


@pytest.mark.slow
def test_a_fitted_dual_is_stored_with_the_model(mixture, moons, tmp_path):
    mixture.save(tmp_path / "model.kexpfam")
    again = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(again.score_samples(moons[:5]), mixture.score_samples(moons[:5]))
    np.testing.assert_array_equal(again.sample(5, random_state=0), mixture.sample(5, random_state=0))


@pytest.mark.slow
def test_the_joint_divergence_of_dynamics_bounds_that_of_positions(moons):
    solver = SinglyDual(family="dynamics", steps=20, batch_size=128)
    model = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    facts, kl = model.solution_.facts, sampler_fit(model.density_, moons, 500, key=jr.key(0)).kl
    assert facts["joint_kl"] > facts["sampler_kl"] > -5 * kl.standard_error
    assert kl.value > -5 * kl.standard_error


def test_a_normal_in_a_linear_space_responds_with_its_variance():
    # The mean of N(m, s^2) follows f(x) = slope x at the rate s^2, as the exponential family itself does.
    problem = Problem(Sample.unconditional(np.zeros((10, 1))), normal(), linear_space(), 0.1, normal())
    dual = MixtureDual.of(Mixture.of(jnp.zeros(1), jnp.full((1, 1), 0.3), jnp.full((1, 1, 1), 0.7)))
    response = family_response(problem, dual, key=jr.key(0))
    assert response[0, 0] == pytest.approx(0.49, rel=5 * np.sqrt(2.0 / 8192))


@pytest.mark.slow
def test_a_family_of_few_parameters_responds_in_few_directions(gaussian):
    problem = gaussian._problem
    dual = FAMILIES["gaussian"](np.asarray(problem.sample.target), gaussian.solution_.tilt, jr.key(0))
    with jax.enable_x64(True):
        response = family_response(problem, dual, key=jr.key(0))
        features = problem.space.target.matrix(dual.draws(8192, key=jr.key(0)))
    values = np.linalg.eigvalsh(response)
    # Two means and three entries of a covariance.
    assert np.sum(values > 1e-9 * values[-1]) == 5
    assert np.linalg.eigvalsh(np.cov(features, rowvar=False, bias=True) - response).min() > -1e-9


def test_a_dual_of_ones_own_is_the_start():
    data = np.random.default_rng(0).normal(0.5, 0.8, (60, 1))
    dual = MixtureDual.of(Mixture.of(jnp.zeros(1), jnp.zeros((1, 1)), jnp.ones((1, 1, 1))))
    solver = SinglyDual(family=dual, steps=0)
    model = KernelExpFamily(
        model="kernel", kernel=Kernel(lengthscale=1.0, rkhs_penalty=1e-2), solver=solver, random_state=0
    ).fit(data)
    assert model.solution_.status is Status.NO_STEPS
    assert eqx.tree_equal(model.solution_.sampler.reference.means, dual.means)


def test_bad_settings_are_named_with_the_good_ones():
    with pytest.raises(
        ValueError, match=r"particles, gaussian, mixture, flow, dynamics, or a dual; got 'cauchy'"
    ):
        SinglyDual(family="cauchy")
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        SinglyDual(steps=-1)
