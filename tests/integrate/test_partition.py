import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats
from oracles import (
    midpoint_grid,
    normal,
    tilted_normal,
    tilted_normal_log_density,
    tilted_normal_log_partition,
)

from kexpfam import Kernel
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.datasets import two_moons
from kexpfam.estimators.kernel_exp_family import KernelExpFamily
from kexpfam.integrate import partition
from kexpfam.integrate.nodes import Integration
from kexpfam.integrate.partition import (
    METHODS,
    by_importance,
    by_quadrature,
    by_smc,
    log_mean_exp,
    log_partition,
)
from kexpfam.model import kernels
from kexpfam.model.density import Estimate, Inputs, Sampler, Tilt, TiltedDensity
from kexpfam.model.measures import Gaussian
from kexpfam.model.networks import Identity
from kexpfam.model.spaces import FeatureSpace

SLOPES = [-0.5, 0.0, 0.7, 1.2]
# Wide enough that the grid holds all of the tilted normal's mass.
DATA = np.linspace(-8.0, 8.0, 50)[:, None]


@pytest.mark.parametrize("slope", SLOPES)
def test_quadrature_has_the_closed_form(slope):
    estimate = by_quadrature(tilted_normal(slope), DATA)
    assert estimate.value == pytest.approx(tilted_normal_log_partition(slope), abs=1e-6)
    assert estimate.standard_error < 1e-6
    assert estimate.trustworthy


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("slope", SLOPES)
def test_importance_sampling_has_the_closed_form(slope, seed):
    estimate = by_importance(tilted_normal(slope), normal(0.5), draws=32768, key=jr.key(seed))
    # A proposal apart from the density, so that there is an error to report; rounding where the weights are
    # constant.
    assert abs(estimate.value - tilted_normal_log_partition(slope)) < 5 * estimate.standard_error + 1e-12
    assert estimate.trustworthy


@pytest.mark.parametrize("slope", [0.7, 1.2])
def test_tempered_smc_has_the_closed_form(slope):
    estimates = [by_smc(tilted_normal(slope), key=jr.key(seed)) for seed in range(3)]
    # An error from four repetitions is itself uncertain (Student's t); the mean of three seeds has one of
    # nine degrees.
    error = np.sqrt(np.mean([estimate.standard_error**2 for estimate in estimates]) / 3)
    mean = np.mean([estimate.value for estimate in estimates])
    assert abs(mean - tilted_normal_log_partition(slope)) < 5 * error
    assert max(estimate.standard_error for estimate in estimates) < 0.05


def test_smc_that_does_not_arrive_has_an_infinite_error():
    space = FeatureSpace.of_kernels(kernels.Linear(), kernels.Linear(), Sample.unconditional(jnp.eye(2)))
    tilt = Tilt(space, jnp.full(2, 6.0), Gaussian(jnp.zeros(2), jnp.eye(2)))
    estimate = by_smc(tilt, settings=Integration(smc_stages=2), key=jr.key(0))
    assert estimate.standard_error == np.inf
    assert not estimate.trustworthy


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_same_normaliser(method):
    # A sum of two bumps over the plane's standard normal.
    centres = Sample.unconditional(np.array([[-1.0, 0.5], [1.0, -0.5]]))
    space = FeatureSpace.of_kernels(kernels.Gaussian(0.7), kernels.Gaussian(1.0), centres)
    tilt = Tilt(space, jnp.array([0.5, 1.5]), Gaussian(jnp.zeros(2), jnp.eye(2)))
    estimate = log_partition(tilt, tilt.base, np.tile(DATA, (1, 2)), method=method, key=jr.key(0))
    points, volume = midpoint_grid([-8.0, -8.0], [8.0, 8.0], 300)
    log_base = tilted_normal_log_density(0.0, points).sum(1)
    exact = np.log(volume * np.sum(np.exp(tilt.values(points) + log_base)))
    # Four repetitions of SMC leave an error with three degrees of freedom, so that 5 of it happen once in 65.
    multiple = 15 if method == "smc" else 5
    assert abs(estimate.value - exact) < multiple * estimate.standard_error + 1e-6


def test_quadrature_of_many_dimensions_is_refused_with_the_way_out():
    space = FeatureSpace.of_kernels(
        kernels.Gaussian(1.0), kernels.Gaussian(1.0), Sample.unconditional(np.eye(4))
    )
    tilt = Tilt(space, jnp.zeros(space.size), Gaussian(jnp.zeros(4), jnp.eye(4)))
    with pytest.raises(ValueError, match=r"at most 3 dimensions; use 'importance' or 'smc'"):
        log_partition(tilt, tilt.base, np.tile(DATA, (1, 4)), method="quadrature", key=jr.key(0))


def test_the_density_of_a_linear_f_is_the_tilted_normal():
    tilt = tilted_normal(0.7)
    estimate = by_quadrature(tilt, DATA)
    sampler = Sampler(normal(0.7), Identity(), normal())
    scaling = Scaling.standardising(np.array([[1.0], [5.0]]))  # of mean 3 and standard deviation 2
    inputs = Inputs.of(Scaling.plain(np.zeros((1, 0))), np.zeros((1, 0)))
    density = TiltedDensity(tilt, sampler, scaling, inputs, estimate, None, None, None)
    x = np.linspace(-3.0, 9.0, 13)
    expected = tilted_normal_log_density(0.7, (x - 3.0) / 2.0) - np.log(2.0)
    np.testing.assert_allclose(density.log_density(x[:, None]), expected, atol=1e-6)


def test_a_fitted_density_integrates_to_one():
    data = two_moons().sample(100, random_state=0)
    model = KernelExpFamily(
        model="kernel", kernel=Kernel(lengthscale=0.6, rkhs_penalty=1e-3), solver="exact", random_state=0
    ).fit(data)
    low, high = data.mean(0) - 7 * data.std(0), data.mean(0) + 7 * data.std(0)
    points, volume = midpoint_grid(low, high, 350)
    mass = volume * np.sum(np.exp(model.score_samples(points)))
    assert mass == pytest.approx(1.0, abs=1e-3)
    error = model.density_.log_partition.standard_error
    assert abs(np.log(mass)) < 5 * error


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_log_mean_exp_of_a_normal_is_half_its_variance(seed):
    draws = np.random.default_rng(seed).normal(0.0, 0.8, 20_000)
    estimate = log_mean_exp(draws)
    assert abs(estimate.value - 0.5 * 0.8**2) < 5 * estimate.standard_error
    # The delta method: a lognormal's coefficient of variation over the root of the number of draws.
    assert estimate.standard_error == pytest.approx(np.sqrt(np.expm1(0.8**2) / 20_000), rel=0.1)
    assert estimate.effective_draws == pytest.approx(20_000 * np.exp(-(0.8**2)), rel=0.1)


def test_log_mean_exp_survives_large_exponents():
    estimate = log_mean_exp(np.array([2000.0, 2000.0]))
    assert estimate.value == pytest.approx(2000.0)
    assert estimate.standard_error == 0.0


def test_auto_turns_to_smc_when_importance_sampling_fails(monkeypatch):
    uncertain, sure = Estimate(1.0, 0.5, 3.0), Estimate(2.0, 0.01, 1000.0)
    draws_only = {"settings": Integration(cells=(), conditional_cells=())}
    monkeypatch.setattr(partition, "by_smc", lambda *args, **kwargs: sure)
    tilt = tilted_normal(0.7)
    arguments = (tilt, normal(0.7), DATA)
    assert log_partition(*arguments, **draws_only, key=jr.key(0)) != sure
    monkeypatch.setattr(partition, "by_importance", lambda *args, **kwargs: uncertain)
    assert log_partition(*arguments, **draws_only, key=jr.key(0)) == sure
    assert log_partition(*arguments, method="importance", key=jr.key(0)) == uncertain


def test_auto_leaves_a_grid_that_is_too_coarse():
    tilt = tilted_normal(4.0)
    coarse = Integration(cells=(4,), tail_cells=(1,), conditional_cells=())
    estimate = log_partition(tilt, normal(4.0), DATA, settings=coarse, key=jr.key(0))
    assert not by_quadrature(tilt, DATA, settings=coarse).trustworthy
    assert abs(estimate.value - tilted_normal_log_partition(4.0)) < 5 * estimate.standard_error


def test_an_unknown_method_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'guess'.*quadrature, importance, smc"):
        log_partition(tilted_normal(0.0), normal(), DATA, method="guess", key=jr.key(0))


@pytest.mark.parametrize(
    ("estimate", "trustworthy"),
    [(Estimate(0.0, 0.01, 1e4), True), (Estimate(0.0, 0.2, 1e4), False), (Estimate(0.0, 0.01, 10.0), False)],
)
def test_an_estimate_is_trusted_for_a_small_error_from_many_draws(estimate, trustworthy):
    assert estimate.trustworthy is trustworthy


@pytest.mark.parametrize("shape", [0.0, 0.4, 0.7, 1.2])
def test_the_shape_of_a_tail_is_that_of_its_pareto_law(shape):
    weights = [scipy.stats.genpareto(shape).rvs(30_000, random_state=seed) for seed in range(4)]
    found = [partition.tail_shape(np.log(one)) for one in weights]
    # The shape of the largest 519 weights has a standard error of (1 + k) / sqrt(519), and a prior at 1/2.
    assert np.mean(found) == pytest.approx(shape, abs=4.0 * (1.0 + shape) / np.sqrt(4 * 519) + 0.02)


def test_importance_draws_say_that_they_cannot_know_a_peak_that_they_miss():
    """The density is N(4.5, 1), and the draws come from N(0, 1)."""
    tilt = tilted_normal(4.5)
    found = [by_importance(tilt, normal(), draws=32768, key=jr.key(seed)) for seed in range(8)]
    truth = tilted_normal_log_partition(4.5)
    assert all(not one.trustworthy or abs(one.value - truth) < 3.0 * one.standard_error for one in found)
    assert any(np.isinf(one.standard_error) for one in found)


def test_intervals_of_few_runs_of_smc_cover(monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(partition, "_smc", lambda tilt, key, settings: rng.normal(3.0, 0.2))
    found = [by_smc(tilted_normal(0.0), key=jr.key(0)) for _ in range(2000)]
    covered = np.mean([abs(one.value - 3.0) < 1.96 * one.standard_error for one in found])
    assert covered == pytest.approx(0.95, abs=4.0 * np.sqrt(0.95 * 0.05 / 2000))
