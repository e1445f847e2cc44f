"""sbi: the posterior of a simulator against its closed form, its calibration, gradients and mode."""

import numpy as np
import pytest
import torch
from sbi.diagnostics import check_sbc, run_sbc
from sbi.utils import BoxUniform

from kexpfam import ConditionalKernelExpFamily
from kexpfam.adapters.sbi import KernelEstimator, posterior
from kexpfam.fit.learned import Learned

SIMULATIONS, NOISE = 2000, 0.5
LEARNED = Learned(folds=2, repeats=1, width=24, epochs=60)


def simulate(theta):
    return theta @ torch.tensor([[1.0, 0.5], [0.0, 1.0]]).T + NOISE * torch.randn_like(theta)


@pytest.fixture(scope="module")
def prior():
    return torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))


@pytest.fixture(scope="module")
def model(prior):
    torch.manual_seed(0)
    theta = prior.sample((SIMULATIONS,))
    return ConditionalKernelExpFamily(model="chain", learned=LEARNED, random_state=0).fit(
        simulate(theta).numpy(), theta.numpy()
    )


@pytest.fixture(scope="module")
def found(model, prior):
    return posterior(model, prior)


def exact(x):
    """Return mean and covariance of the normal posterior."""
    A = np.array([[1.0, 0.5], [0.0, 1.0]])
    covariance = np.linalg.inv(np.eye(2) + A.T @ A / NOISE**2)
    return covariance @ A.T @ x / NOISE**2, covariance


def test_log_prob_and_draws_are_the_models(model, found):
    x, theta = torch.tensor([[0.4, -0.2]]), torch.randn(5, 2)
    own = model.score_samples(np.repeat(x.numpy(), 5, axis=0), theta.numpy())
    assert found.log_prob(theta, x=x).numpy() == pytest.approx(own, abs=1e-4)
    torch.manual_seed(0)
    first = found.sample((6,), x=x, show_progress_bars=False)
    torch.manual_seed(0)
    assert torch.equal(first, found.sample((6,), x=x, show_progress_bars=False))


def test_the_posterior_is_near_the_closed_form(found):
    """Means within a quarter, deviations within a quarter of the exact posterior's deviations."""
    for x in (np.array([0.5, -0.5]), np.array([-1.0, 0.3])):
        draws = found.sample(
            (4000,), x=torch.tensor(x[None], dtype=torch.float32), show_progress_bars=False
        ).numpy()
        mean, covariance = exact(x)
        deviation = np.sqrt(np.diag(covariance))
        assert np.all(np.abs(draws.mean(axis=0) - mean) < 0.25 * deviation)
        assert draws.std(axis=0) == pytest.approx(deviation, rel=0.25)


def test_it_passes_sbis_simulation_based_calibration(found, prior):
    torch.manual_seed(1)
    theta = prior.sample((200,))
    x = simulate(theta)
    ranks, averaged = run_sbc(theta, x, found, num_posterior_samples=400, show_progress_bar=False)
    checks = check_sbc(ranks, prior.sample((200,)), averaged, num_posterior_samples=400)
    assert float(checks["ks_pvals"].min()) > 1e-3


def test_sbc_sees_a_posterior_that_is_wrong(model, prior):
    """The calibration above could fail: draws moved by a deviation do."""

    class Moved(KernelEstimator):
        def sample(self, *arguments, **settings):
            return super().sample(*arguments, **settings) + 0.4

    from sbi.inference.posteriors import DirectPosterior

    torch.manual_seed(1)
    theta = prior.sample((200,))
    ranks, averaged = run_sbc(
        theta,
        simulate(theta),
        DirectPosterior(Moved(model), prior),
        num_posterior_samples=400,
        show_progress_bar=False,
    )
    checks = check_sbc(ranks, prior.sample((200,)), averaged, num_posterior_samples=400)
    assert float(checks["ks_pvals"].min()) < 1e-6


def test_gradients_reach_torch(model):
    estimator, step = KernelEstimator(model), 1e-5
    theta = torch.tensor([[0.3, -0.4], [0.1, 0.9]], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[0.2, 0.1], [0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    estimator.log_prob(theta, x).sum().backward()
    for tensor, slot in ((theta, 0), (x, 1)):
        for j in range(2):
            moved = [theta.detach().clone(), x.detach().clone()]
            moved[slot][:, j] += step
            after = estimator.log_prob(*moved)
            moved[slot][:, j] -= 2.0 * step
            difference = (after - estimator.log_prob(*moved))[0] / (2.0 * step)
            assert tensor.grad[:, j].numpy() == pytest.approx(difference.numpy(), rel=1e-3, abs=1e-3)


def test_the_mode_is_found_by_sbis_own_ascent(found):
    x = np.array([0.5, -0.5])
    found.set_default_x(torch.tensor(x[None], dtype=torch.float32))
    mode = (
        found.map(num_iter=200, num_init_samples=100, num_to_optimize=10, show_progress_bars=False)
        .numpy()
        .ravel()
    )
    mean, covariance = exact(x)
    assert np.all(np.abs(mode - mean) < 0.6 * np.sqrt(np.diag(covariance)))


def test_a_bounded_prior_and_a_bounded_model(prior):
    """With bounds in the model no draw is outside the prior: sbi's correction factor is 1."""
    torch.manual_seed(0)
    box = BoxUniform(torch.zeros(2), torch.ones(2))
    theta = box.sample((500,))
    x = theta + 0.3 * torch.randn_like(theta)
    quick = Learned(folds=2, repeats=1, width=12, epochs=25, cells=64)
    model = ConditionalKernelExpFamily(model="chain", learned=quick, bounds=(0.0, 1.0), random_state=0)
    found = posterior(model.fit(x.numpy(), theta.numpy().clip(1e-6, 1.0 - 1e-6)), box)
    factor = found.leakage_correction(torch.tensor([[0.1, 0.9]]), num_rejection_samples=2000)
    assert float(factor) > 0.999


def test_a_density_without_a_condition_is_refused(joint):
    with pytest.raises(ValueError, match="ConditionalKernelExpFamily"):
        KernelEstimator(joint)
