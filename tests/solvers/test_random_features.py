import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import with_constants

from kexpfam import DDE, KernelExpFamily, kernels, load
from kexpfam.datasets import two_moons
from kexpfam.measures import Gaussian
from kexpfam.potentials import FeatureSpace, RandomFeatures
from kexpfam.sample import Sample
from kexpfam.solvers import reference
from kexpfam.solvers.functional import Ascent
from kexpfam.solvers.loop import Status
from kexpfam.solvers.random_features import RandomFeatureGradient
from kexpfam.solvers.task import Task

SETTINGS = {"lengthscale": 0.6, "rkhs_penalty": 1e-3, "random_state": 0}
SMALL = Ascent(batch_size=32, ascents=2, width=16, depth=2)


@pytest.fixture(scope="module", autouse=True)
def quick_distillation():
    with with_constants(reference, COMPONENTS=16, DRAWS=3000, CANDIDATES=10_000):
        yield


@pytest.fixture(scope="module")
def warm(moons):
    return KernelExpFamily(solver=RandomFeatureGradient(ascent=SMALL, steps=20, count=100, nodes=4096), **SETTINGS).fit(moons)


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
    assert np.std(np.asarray(span.frequencies)) * SETTINGS["lengthscale"] == pytest.approx(1.0, abs=error)


@pytest.mark.slow
def test_a_stored_model_scores_the_same(warm, moons, tmp_path):
    warm.save(tmp_path / "model.kexpfam")
    np.testing.assert_allclose(load(tmp_path / "model.kexpfam").score_samples(moons), warm.score_samples(moons))


@pytest.mark.slow
def test_the_raw_steps_from_the_cold_climb_the_likelihood(moons):
    quick = Ascent(rate=0.1, nu_speed=30.0, transport_rate=0.3, batch_size=64, ascents=2, width=16, depth=2)
    solver = RandomFeatureGradient(start="cold", ascent=quick, steps=75, count=50, polish=False)
    model = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    assert model.solution_.status is Status.RAN_ALL_STEPS
    still = KernelExpFamily(solver=DDE(start="cold", steps=0, polish=False), **SETTINGS).fit(moons)
    assert model.score(moons) > still.score(moons) + 0.1


def test_conditional_steps_come_with_the_product_space():
    rng = np.random.default_rng(0)
    condition = rng.uniform(-1.0, 1.0, (60, 1))
    sample = Sample(jnp.asarray(condition + 0.3 * rng.normal(size=(60, 1))), jnp.asarray(condition))
    kernel, base = kernels.Gaussian(0.8), Gaussian(jnp.zeros(1), jnp.eye(1))
    task = Task(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), 1e-2, base)
    solver = RandomFeatureGradient(start="cold", steps=50, count=20, polish=False, ascent=Ascent(0.3, 5.0, 0.05, batch_size=64))
    tilt = solver.solve(task, key=jr.key(0)).tilt
    # f has learned that the target follows its condition.
    targets = jnp.array([[0.8], [-0.8]])
    along, across = (np.asarray(tilt.f(targets, condition)) for condition in (targets, -targets))
    assert np.all(along > across)


@pytest.mark.parametrize(("settings", "message"), [({"count": 0}, "count must be at least 1"), ({"start": "hot"}, "got 'hot'")])
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RandomFeatureGradient(**settings)
