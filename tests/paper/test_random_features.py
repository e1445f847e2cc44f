import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam import DDE, Kernel, KernelExpFamily, load
from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.fit.distil import Distillation
from kexpfam.fit.problem import Problem, Status
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace, RandomFeatures
from kexpfam.paper.functional import FunctionalAscent, RandomFeatureGradient

SETTINGS = {"model": "kernel", "kernel": Kernel(lengthscale=0.6, rkhs_penalty=1e-3), "random_state": 0}
WARM = {
    "warm_start": True,
    "polish": True,
    "distillation": Distillation(components=16, draws=3000, candidates=10_000),
}
SMALL = FunctionalAscent(batch_size=32, ascents=2, width=16, depth=2)


@pytest.fixture(scope="module")
def warm(moons):
    return KernelExpFamily(
        solver=RandomFeatureGradient(ascent=SMALL, steps=20, count=100, **WARM), **SETTINGS
    ).fit(moons)


@pytest.mark.slow
def test_the_density_is_near_the_exact_one(warm, moons):
    held_out = two_moons().sample(2000, random_state=1)
    exact = KernelExpFamily(solver="exact", **SETTINGS).fit(moons)
    assert warm.score(held_out) == pytest.approx(exact.score(held_out), abs=0.05)
    assert warm.solution_.status is Status.CONVERGED
    assert 0.0 < warm.solution_.facts["polish_gain"] < 0.1


@pytest.mark.slow
def test_f_lives_on_as_many_random_features_as_asked_for(warm):
    span = warm.solution_.tilt.space.target
    assert isinstance(span, RandomFeatures)
    assert span.size == 200 == warm.solution_.tilt.weights.size
    # Frequencies of a Gaussian kernel are normal with the inverse length scale as their deviation.
    error = 5 / np.sqrt(2 * span.frequencies.size)
    assert np.std(np.asarray(span.frequencies)) * SETTINGS["kernel"].lengthscale == pytest.approx(
        1.0, abs=error
    )


@pytest.mark.slow
def test_a_stored_model_scores_the_same(warm, moons, tmp_path):
    warm.save(tmp_path / "model.kexpfam")
    np.testing.assert_allclose(
        load(tmp_path / "model.kexpfam").score_samples(moons), warm.score_samples(moons)
    )


@pytest.mark.slow
def test_the_raw_steps_from_the_cold_climb_the_likelihood(moons):
    quick = FunctionalAscent(
        rate=0.1, nu_speed=30.0, transport_rate=0.3, batch_size=64, ascents=2, width=16, depth=2
    )
    solver = RandomFeatureGradient(ascent=quick, steps=75, count=50)
    model = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    assert model.solution_.status is Status.RAN_ALL_STEPS
    still = KernelExpFamily(solver=DDE(steps=0), **SETTINGS).fit(moons)
    assert model.score(moons) > still.score(moons) + 0.1


def test_conditional_steps_come_with_the_product_space():
    rng = np.random.default_rng(0)
    condition = rng.uniform(-1.0, 1.0, (60, 1))
    sample = Sample(jnp.asarray(condition + 0.3 * rng.normal(size=(60, 1))), jnp.asarray(condition))
    kernel, base = kernels.Gaussian(0.8), Gaussian(jnp.zeros(1), jnp.eye(1))
    problem = Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), 1e-2, base)
    solver = RandomFeatureGradient(steps=50, count=20, ascent=FunctionalAscent(0.3, 5.0, 0.05, batch_size=64))
    tilt = solver.solve(problem, key=jr.key(0)).tilt
    # f has learned that the target follows its condition.
    targets = jnp.array([[0.8], [-0.8]])
    along, across = (np.asarray(tilt.f(targets, condition)) for condition in (targets, -targets))
    assert np.all(along > across)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"count": 0}, "count must be at least 1"), ({"steps": -1}, "steps must be at least 0, got -1")],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RandomFeatureGradient(**settings)
