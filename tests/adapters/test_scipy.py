"""One column as a SciPy distribution, against SciPy's generic methods."""

import numpy as np
import pytest
from oracles import changed
from scipy import integrate, stats
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily
from kexpfam.adapters import density_of
from kexpfam.adapters.scipy import KernelDistribution

GIVEN = {"model": "kernel", "kernel": Kernel(lengthscale=0.8, rkhs_penalty=1e-2), "random_state": 0}
DRAWS = 4000


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 1))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=80)


@pytest.fixture(scope="module")
def conditional(rows):
    return ConditionalKernelExpFamily(
        **changed(GIVEN, condition_lengthscale=0.8, base_width=1.0, power=False)
    ).fit(*rows)


@pytest.fixture(scope="module")
def laws(conditional, rows):
    column = rows[0] ** 2
    return {
        "column": KernelDistribution(KernelExpFamily(**GIVEN).fit(column)),
        "bounded": KernelDistribution(KernelExpFamily(bounds=(0.0, 9.0), **GIVEN).fit(column)),
        "given": KernelDistribution(conditional.given([0.4])),
    }


@pytest.mark.parametrize("name", ["column", "bounded", "given"])
class TestDistribution:
    def test_the_distribution_function_is_the_integral_of_the_density(self, laws, name):
        law = laws[name]
        low, middle, high = law.ppf([1e-6, 0.4, 0.9])
        assert integrate.quad(law.pdf, low, middle)[0] == pytest.approx(0.4, abs=3e-3)
        assert integrate.quad(law.pdf, low, high)[0] == pytest.approx(0.9, abs=3e-3)

    def test_quantiles_invert_it(self, laws, name):
        levels = np.array([[0.05, 0.3], [0.5, 0.99]])
        assert laws[name].cdf(laws[name].ppf(levels)) == pytest.approx(levels, abs=1e-9)
        assert laws[name].sf(laws[name].isf(0.2)) == pytest.approx(0.2, abs=1e-9)

    def test_moments_are_the_integrals_they_stand_for(self, laws, name):
        law = laws[name]
        middles = law.ppf((np.arange(20000) + 0.5) / 20000)
        assert law.mean() == pytest.approx(middles.mean(), abs=1e-3 * law.std())
        assert law.var() == pytest.approx(middles.var(), rel=5e-3)

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_draws_pass_scipys_own_test(self, laws, name, seed):
        draws = laws[name].rvs(size=(DRAWS // 2, 2), random_state=seed)
        assert draws.shape == (DRAWS // 2, 2)
        assert stats.kstest(draws.ravel(), laws[name].cdf).pvalue > 1e-4
        assert np.array_equal(draws, laws[name].rvs(size=(DRAWS // 2, 2), random_state=seed))

    def test_it_is_shifted_and_scaled_as_scipy_does(self, laws, name):
        law, at = laws[name], laws[name].ppf(0.3)
        frozen = law(loc=2.0, scale=3.0)
        assert frozen.logpdf(2.0 + 3.0 * at) == pytest.approx(law.logpdf(at) - np.log(3.0), abs=1e-12)
        assert frozen.interval(0.8)[0] == pytest.approx(2.0 + 3.0 * law.ppf(0.1), abs=1e-9)


def test_its_support_is_the_models(laws):
    assert laws["bounded"].support() == pytest.approx((0.0, 9.0), abs=1e-9)
    assert laws["column"].support() == (-np.inf, np.inf)
    assert laws["bounded"].logpdf(-0.1) == -np.inf


def test_a_generator_repeats_its_draws(laws):
    first, second = (laws["given"].rvs(size=3, random_state=np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first, second)


def test_what_it_cannot_stand_for_is_refused(conditional):
    with pytest.raises(ValueError, match="given"):
        KernelDistribution(conditional)
    with pytest.raises(TypeError, match="fitted"):
        density_of(StandardScaler())


def test_a_frozen_model_is_never_fitted_again(conditional, rows):
    x, y = rows
    frozen = FrozenEstimator(conditional)
    refitted = clone(frozen).fit(x[:20], y[:20])
    assert np.array_equal(refitted.score_samples(x, y), conditional.score_samples(x, y))
    assert refitted.score(x, y) == conditional.score(x, y)
    # Frozen at the end of a pipeline, it is asked for predictions of what the steps before make of the rows.
    pipeline = make_pipeline(StandardScaler(with_mean=False, with_std=False), frozen).fit(x, y)
    assert np.array_equal(pipeline.predict(x), conditional.predict(x))
