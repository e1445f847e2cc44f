"""NumPyro: a fitted density inside jit, as a prior of NUTS, and as a likelihood with a traced condition."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import pytest
from numpyro.infer import MCMC, NUTS, Predictive

from kexpfam import Kernel, KernelExpFamily
from kexpfam.adapters.numpyro import KernelDistribution

DRAWS = 1000


def errors_apart(chain, independent):
    """Return the differences of column means in standard errors, with the chain's effective sample size."""
    effective = np.array(
        [numpyro.diagnostics.effective_sample_size(chain[None, :, j]) for j in range(chain.shape[1])]
    )
    error = np.sqrt(chain.var(axis=0) / effective + independent.var(axis=0) / len(independent))
    return np.abs(chain.mean(axis=0) - independent.mean(axis=0)) / error


def test_log_prob_and_gradient_inside_jit(joint):
    law, points = KernelDistribution(joint), joint.sample(5, random_state=0).astype(np.float32)
    assert law.batch_shape == () and law.event_shape == (2,)
    assert jax.jit(law.log_prob)(points) == pytest.approx(joint.score_samples(points), rel=1e-6, abs=1e-6)
    slope = jax.jit(jax.grad(law.log_prob))(points[0])
    log_density = lambda move: joint.score_samples(points[:1].astype(float) + move)[0]
    expected = [(log_density(move) - log_density(-move)) / 2e-5 for move in 1e-5 * np.eye(2)]
    assert slope == pytest.approx(np.array(expected), rel=1e-3, abs=1e-3)


def test_draws_inside_jit_are_the_models(joint):
    draws = jax.jit(lambda key: KernelDistribution(joint).sample(key, (4000,)))(jr.key(0))
    other = joint.sample(4000, random_state=1)
    error = np.sqrt((np.var(draws, axis=0) + np.var(other, axis=0)) / 4000)
    assert draws.dtype == jnp.float32
    assert np.all(np.abs(np.mean(draws, axis=0) - np.mean(other, axis=0)) < 4.0 * error)


def test_nuts_with_the_density_as_its_prior_alone_draws_from_it(joint):
    mcmc = MCMC(
        NUTS(lambda: numpyro.sample("x", KernelDistribution(joint))),
        num_warmup=500,
        num_samples=4000,
        progress_bar=False,
    )
    mcmc.run(jr.key(0))
    assert np.all(errors_apart(np.asarray(mcmc.get_samples()["x"]), joint.sample(4000, random_state=0)) < 4.0)


def test_nuts_with_the_density_as_prior_has_the_posterior_of_importance_weights(joint):
    """A noisy observation of the first coordinate; the oracle is importance weighting of prior draws."""
    observed, noise = 0.8, 0.4

    def model():
        x = numpyro.sample("x", KernelDistribution(joint))
        numpyro.sample("seen", numpyro.distributions.Normal(x[0], noise), obs=observed)

    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(jr.key(1))
    prior = joint.sample(20000, random_state=0)
    weights = np.exp(-0.5 * ((prior[:, 0] - observed) / noise) ** 2)
    chosen = prior[np.random.default_rng(0).choice(len(prior), 4000, p=weights / weights.sum())]
    assert np.all(errors_apart(np.asarray(mcmc.get_samples()["x"]), chosen) < 4.0)


def test_a_bounded_density_is_sampled_within_its_bounds():
    x = np.random.default_rng(0).beta(2.0, 1.0, size=(200, 1))
    model = KernelExpFamily(
        model="kernel", kernel=Kernel(lengthscale=0.8, rkhs_penalty=1e-2), bounds=(0.0, 1.0), random_state=0
    ).fit(x)
    mcmc = MCMC(
        NUTS(lambda: numpyro.sample("x", KernelDistribution(model))),
        num_warmup=300,
        num_samples=2000,
        progress_bar=False,
    )
    mcmc.run(jr.key(0))
    draws = np.asarray(mcmc.get_samples()["x"])
    assert draws.shape == (2000,) and draws.min() > 0.0 and draws.max() < 1.0
    assert errors_apart(draws[:, None], model.sample(4000, random_state=0))[0] < 4.0


def test_a_likelihood_whose_condition_is_traced(conditional, rows):
    """x is unknown, y was seen: the posterior of x by NUTS against the same integral on a grid."""

    def model(y):
        x = numpyro.sample("x", numpyro.distributions.Normal(0.0, 0.5))
        numpyro.sample("y", KernelDistribution(conditional, x[None]), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=3000, progress_bar=False)
    mcmc.run(jr.key(0), y=jnp.array(0.7))
    draws, grid = np.asarray(mcmc.get_samples()["x"]), np.linspace(-3.0, 3.0, 601)
    log_weights = conditional.score_samples(grid[:, None], np.full(601, 0.7)) - 0.5 * (grid / 0.5) ** 2
    weights = np.exp(log_weights - log_weights.max())
    mean = np.sum(weights * grid) / weights.sum()
    error = draws.std() / np.sqrt(numpyro.diagnostics.effective_sample_size(draws[None]))
    assert abs(draws.mean() - mean) < 4.0 * error


def test_batches_of_conditions(conditional):
    x = np.linspace(-1.0, 1.0, 6).reshape(2, 3, 1)
    law = KernelDistribution(conditional, x)
    assert law.batch_shape == (2, 3) and law.event_shape == ()
    draws = jax.jit(law.sample, static_argnums=1)(jr.key(0), (4,))
    assert draws.shape == (4, 2, 3)
    expected = conditional.score_samples(np.tile(x.reshape(-1, 1), (4, 1)), np.asarray(draws, float).ravel())
    assert np.asarray(jax.jit(law.log_prob)(draws)).ravel() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    predicted = Predictive(lambda: numpyro.sample("y", KernelDistribution(conditional, x)), num_samples=3)(
        jr.key(0)
    )
    assert predicted["y"].shape == (3, 2, 3)


def test_a_condition_is_asked_for(conditional):
    with pytest.raises(ValueError, match="condition"):
        KernelDistribution(conditional)
