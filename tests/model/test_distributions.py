"""Polygons as distribution functions, against closed forms and sums."""

import numpy as np
import pytest
from scipy.stats import expon, norm, t

from kexpfam.data.kinds import Category, Periodic, Real
from kexpfam.model.distributions import Distributions, MomentWarning


@pytest.fixture
def normal() -> Distributions:
    """Two normal laws as fine polygons."""
    points = np.linspace(-9.0, 9.0, 4001) * np.array([[1.0], [2.0]]) + np.array([[0.0], [3.0]])
    return Distributions(points, norm.cdf(points, [[0.0], [3.0]], [[1.0], [2.0]]))


def test_cdf_and_quantile_are_those_of_the_normal_law_and_inverse_to_each_other(normal):
    y = np.array([[-1.0, 0.3], [2.0, 7.0]])
    assert normal.cdf(y) == pytest.approx(norm.cdf(y, [[0.0], [3.0]], [[1.0], [2.0]]), abs=1e-6)
    assert normal.quantile(normal.cdf(y)) == pytest.approx(y, abs=1e-9)


def test_mean_is_that_of_the_law(normal):
    assert normal.mean() == pytest.approx([0.0, 3.0], abs=1e-9)


def test_crps_is_the_closed_form_of_the_normal_law(normal):
    y, mean, sd = np.array([0.7, -2.0]), np.array([0.0, 3.0]), np.array([1.0, 2.0])
    z = (y - mean) / sd
    expected = sd * (z * (2.0 * norm.cdf(z) - 1.0) + 2.0 * norm.pdf(z) - 1.0 / np.sqrt(np.pi))
    assert normal.crps(y) == pytest.approx(expected, abs=1e-5)


def test_crps_of_a_target_beyond_the_last_point_counts_the_distance():
    cells = Distributions.of_cells(np.array([[0.0, 1.0]]), np.array([[1.0]]))
    # F = t on [0, 1]: the integral of t^2 is a third, and from 1 to 3 the error is 1.
    assert cells.crps(np.array([3.0])) == pytest.approx([1.0 / 3.0 + 2.0])


def test_cells_need_not_be_normalised_and_may_be_empty():
    cells = Distributions.of_cells(np.array([[0.0, 1.0, 2.0, 4.0]]), np.array([[2.0, 0.0, 2.0]]))
    assert cells.cdf(np.array([[0.5, 1.5, 3.0, 9.0, -1.0]])) == pytest.approx(
        np.array([[0.25, 0.5, 0.75, 1.0, 0.0]])
    )


def test_mixture_is_the_weighted_sum_of_distribution_functions(normal):
    other = Distributions.of_cells(np.array([[-1.0, 0.0, 5.0]] * 2), np.array([[0.3, 0.7]] * 2))
    mixed = Distributions.mixture([normal, other], np.array([0.25, 0.75]))
    y = np.random.default_rng(0).normal(size=(2, 50))
    assert mixed.cdf(y) == pytest.approx(0.25 * normal.cdf(y) + 0.75 * other.cdf(y), abs=1e-12)
    assert mixed.mean() == pytest.approx(0.25 * normal.mean() + 0.75 * other.mean())


@pytest.mark.parametrize("rows", [1, 300])
def test_rows_do_not_see_each_other(rows):
    rng = np.random.default_rng(rows)
    points = np.sort(rng.normal(size=(rows, 40)) * 10.0 ** rng.uniform(-6, 6, size=(rows, 1)), axis=1)
    levels = np.sort(rng.uniform(size=(rows, 40)), axis=1)
    levels[:, 0], levels[:, -1] = 0.0, 1.0
    y = points[:, :1] + rng.uniform(-0.2, 1.2, size=(rows, 9)) * np.ptp(points, axis=1, keepdims=True)
    slow = np.stack([np.interp(*row) for row in zip(y, points, levels, strict=True)])
    assert Distributions(points, levels).cdf(y) == pytest.approx(slow, abs=1e-9)


@pytest.fixture(scope="module")
def unsure():
    """One member has the target near 2; the other has its logarithm far past the largest number."""
    edges = np.linspace(-900.0, 900.0, 6001)
    masses = lambda centre, width: np.diff(norm.cdf(edges, centre, width))[None]
    with np.errstate(over="ignore"):
        points = np.sinh(edges)[None]
    parts = [Distributions.of_cells(points, masses(np.arcsinh(2.0), width)) for width in (0.05, 40.0)]
    return Distributions.mixture(parts, np.array([1.0 - 1e-5, 1e-5]))


def test_a_moment_that_the_outer_mass_decides_is_nan_with_a_warning(unsure):
    for moment in (unsure.mean, unsure.variance):
        with pytest.warns(MomentWarning, match="median"):
            assert np.isnan(moment()).all()


def lognormal(sigma: float) -> Distributions:
    r = np.linspace(-14.0, 14.0, 40_001)
    upper = np.where(r > 0.0, norm.sf(r), 0.0)
    levels = np.where(r > 0.0, 1.0 - upper, norm.cdf(r))
    return Distributions(np.exp(sigma * r)[None], levels[None])


def lognormal_crps(sigma: float, y: float) -> float:
    """Baran and Lerch (2015), equation (A.2)."""
    w, mean = np.log(y) / sigma, np.exp(sigma**2 / 2.0)
    # Both terms are nearly one half and one where the mean is large: survival functions keep the digits.
    inner = norm.cdf(w - sigma) - norm.sf(sigma / np.sqrt(2.0))
    return y * (2.0 * norm.cdf(w) - 1.0) - 2.0 * mean * inner


def test_crps_is_not_trimmed():
    law = lognormal(6.0)
    with pytest.warns(MomentWarning):
        assert np.isnan(law.mean()).all()
    assert law.crps(np.array([1.7]))[0] == pytest.approx(lognormal_crps(6.0, 1.7), rel=1e-2)


def test_an_atom_with_a_rare_remainder_has_its_mean():
    """A value of 0 with probability 1 - 2e-5, and otherwise uniform between 0 and 1."""
    rare = Distributions.of_cells(np.array([[0.0, 1.0]]), np.ones((1, 1))).with_atom(
        0.0, np.array([1 - 2e-5])
    )
    assert rare.mean() == pytest.approx([1e-5])


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_moments_and_crps_of_a_lognormal_law_are_their_closed_forms(sigma):
    law, mean = lognormal(sigma), np.exp(sigma**2 / 2.0)
    assert law.mean()[0] == pytest.approx(mean, rel=1e-4)
    if sigma < 2.0:
        assert law.variance()[0] == pytest.approx(mean**2 * np.expm1(sigma**2), rel=1e-3)
    assert law.crps(np.array([1.7]))[0] == pytest.approx(lognormal_crps(sigma, 1.7), rel=1e-4)


@pytest.mark.parametrize("kind", [Category(("a", "b", "c")), Periodic(4.0), Real()])
def test_the_centre_of_a_law_is_that_of_its_kind(kind):
    labels = Distributions(
        np.array([[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]]), np.array([[0.0, 0.3, 0.3, 0.4, 0.4, 1.0]])
    )
    turned = Distributions.of_cells(np.array([[0.0, 0.5, 3.5, 4.0]]), np.array([[0.5, 0.0, 0.5]]))
    law, expected = {Category: (labels, 2.0), Periodic: (turned, 0.0), Real: (turned, 2.0)}[type(kind)]
    found = law.centre(kind)[0]
    assert np.isclose(found, expected) or np.isclose(found, getattr(kind, "period", expected))


def test_quantiles_go_where_the_tail_goes(unsure):
    assert unsure.quantile(np.array([[1.0 - 1e-6]]))[0, 0] > 1e6
    assert np.all(np.diff(unsure.polygon().levels) >= 0.0)


@pytest.mark.parametrize("law", [norm(1.0, 2.0), expon(), t(5)])
def test_moments_of_laws_with_a_mean_are_theirs(law):
    levels = np.concatenate([np.geomspace(1e-12, 1e-3, 400), np.linspace(1e-3, 1.0 - 1e-3, 4000)[1:-1]])
    levels = np.concatenate([levels, 1.0 - np.geomspace(1e-3, 1e-12, 400)])
    edges = law.ppf(levels)[None]
    found = Distributions.of_cells(edges, np.diff(levels)[None])
    assert found.mean()[0] == pytest.approx(law.mean(), abs=2e-3 * law.std())
    assert found.variance()[0] == pytest.approx(law.var(), rel=1e-2)
