"""Any columns given any others: evidence and draws against closed forms and quadrature."""

import dataclasses

import jax
import jax.random as jr
import numpy as np
import pytest
from scipy.stats import kstest, multivariate_normal, norm

from kexpfam.data.kinds import Real
from kexpfam.data.scaling import Scaling
from kexpfam.model.chain import Chain, ChainSampler, Layout
from kexpfam.model.density import Inputs
from kexpfam.model.ensemble import ChainDensity, LawDensity, Stack
from kexpfam.model.measures import Gaussian
from kexpfam.model.partial import FewDrawsWarning, completed, log_evidence, patterns

COVARIANCE = np.array([[2.0, 0.8, -0.5], [0.8, 1.0, 0.3], [-0.5, 0.3, 1.5]])
MEAN = np.array([1.0, -2.0, 0.5])
NOTHING = Inputs(Scaling.plain(np.zeros((1, 0))), np.zeros(0), np.zeros(0))


@pytest.fixture(scope="module")
def normal() -> LawDensity:
    """A normal law in units of its own, so that Jacobians matter."""
    scaling = Scaling(
        MEAN, np.sqrt(np.diag(COVARIANCE)), np.zeros(3), np.ones(3), np.ones(3), arcsinh=(False,) * 3
    )
    spread = scaling.scale
    return LawDensity(
        Gaussian(np.zeros(3), np.linalg.cholesky(COVARIANCE / np.outer(spread, spread))), scaling
    )


@pytest.fixture(scope="module")
def chains() -> ChainDensity:
    """Two members with random weights and orders, in data's units that are not the model's."""
    rng = np.random.default_rng(3)
    chain = Chain.draw(0, np.array([[0, 1, 2], [2, 0, 1]]), Layout.real(3), width=12, depth=2, seed=0)
    shake = lambda part, size: (part + size * rng.normal(size=part.shape)).astype(np.float32)
    sizes = {"biases": 0.3, "out": 0.05, "skip": 0.15, "shift": 0.3}
    shaken = {name: shake(getattr(chain, name), size) for name, size in sizes.items()}
    scaling = Scaling.of(rng.normal(2.0, 3.0, (50, 3)), (Real(),) * 3)
    return ChainDensity(dataclasses.replace(chain, **shaken), scaling, NOTHING)


def by_quadrature(density, row: np.ndarray) -> float:
    """Return the log density of the known part of a row with one unknown cell."""
    (unknown,) = np.flatnonzero(np.isnan(row))
    grid = density.scaling.shift[unknown] + density.scaling.scale[unknown] * np.linspace(
        -300.0, 300.0, 30_001
    )
    rows = np.tile(row, (len(grid), 1))
    rows[:, unknown] = grid
    return float(np.log(np.trapezoid(np.exp(density.log_density(rows)), grid)))


@pytest.mark.parametrize("unknown", [(0,), (2,), (0, 1), (1, 2)])
def test_of_a_normal_law_the_evidence_is_exact(normal, unknown):
    row = np.array([[0.3, -1.0, 2.0]])
    known = [j for j in range(3) if j not in unknown]
    row[:, list(unknown)] = np.nan
    (found,) = completed(normal, row, 50, key=jr.key(0)).evidence()
    truth = multivariate_normal(MEAN[known], COVARIANCE[np.ix_(known, known)]).logpdf(row[0, known])
    assert found.value == pytest.approx(truth, abs=1e-9)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)


def test_draws_of_a_normal_law_follow_its_conditional(normal):
    row = np.array([[0.3, -1.0, np.nan]])
    draws = completed(normal, row, 4000, key=jr.key(1)).resampled(4000, np.random.default_rng(0))[0]
    gain = COVARIANCE[2, :2] @ np.linalg.inv(COVARIANCE[:2, :2])
    mean = MEAN[2] + gain @ (row[0, :2] - MEAN[:2])
    deviation = np.sqrt(COVARIANCE[2, 2] - gain @ COVARIANCE[:2, 2])
    assert kstest(draws[:, 2], norm(mean, deviation).cdf).pvalue > 1e-3
    assert np.all(draws[:, :2] == row[0, :2])


@pytest.mark.parametrize("unknown", range(3))
def test_the_evidence_of_chains_is_the_integral_within_its_error(chains, unknown):
    row = np.array([1.0, 3.0, 0.0])
    row[unknown] = np.nan
    (found,) = completed(chains, row[None], 4000, key=jr.key(unknown)).evidence()
    assert found.value == pytest.approx(by_quadrature(chains, row), abs=4.0 * found.standard_error + 1e-3)
    assert 0.0 < found.effective_draws <= 4000


def test_known_columns_that_come_first_are_exact(chains):
    """The last link of the first member is about column 2, of the second about column 1."""
    one = jax.tree.map(lambda leaf: leaf[:1], chains.members.within(None)).within(chains.members.layout)
    first = ChainDensity(one, chains.scaling, NOTHING)
    (found,) = completed(first, np.array([[1.0, 3.0, np.nan]]), 20, key=jr.key(0)).evidence()
    assert found.standard_error == pytest.approx(0.0, abs=1e-6)
    assert found.value == pytest.approx(by_quadrature(first, np.array([1.0, 3.0, np.nan])), abs=1e-3)


def test_a_row_without_gaps_has_its_density(chains):
    rows = np.array([[1.0, 3.0, 0.0], [0.0, 0.0, 2.0]])
    (one, other) = completed(chains, rows, 10, key=jr.key(0)).evidence()
    assert [one.value, other.value] == pytest.approx(chains.log_density(rows), abs=1e-4)
    assert one.standard_error == pytest.approx(0.0, abs=1e-6)


def test_a_stack_weighs_its_parts(normal, chains):
    stack = Stack((normal, chains), np.array([0.3, 0.7]), normal.scaling)
    row = np.array([[1.0, np.nan, 0.0]])
    (found,) = completed(stack, row, 6000, key=jr.key(2)).evidence()
    parts = [log_evidence(part, row, 6000, key=jr.key(3))[0] for part in (normal, chains)]
    truth = np.logaddexp(np.log(0.3) + parts[0], np.log(0.7) + parts[1])
    assert found.value == pytest.approx(truth, abs=5.0 * found.standard_error)


def test_rows_are_sorted_by_what_they_know():
    values = np.array([[1.0, np.nan], [np.nan, np.nan], [2.0, np.nan]])
    assert {tuple(rows.tolist()): known for rows, known in patterns(values)} == {(1,): (), (0, 2): (0,)}


@pytest.mark.parametrize("unknown", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_weights_by_shared_prefixes_are_those_of_whole_completions(chains, unknown):
    """Both members have other orders, so that unknown columns come first, in between and last."""
    known = chains.scaling.to_model(np.random.default_rng(0).normal(2.0, 3.0, (4, 3)))
    known[:, list(unknown)] = np.nan
    levels = np.random.default_rng(1).random((8, 3), np.float32)
    for k in range(len(chains)):
        member = ChainSampler(chains.members.member(k))
        repeated, tiled = np.repeat(known, 8, axis=0), np.tile(levels, (4, 1))
        whole = member.sample(np.zeros((32, 0)), tiled, known=repeated).log_weight.reshape(4, 8)
        found = member.log_weights(np.zeros((4, 0)), known, levels)
        assert found.shape in {(4, 1), (4, 8)}
        assert np.allclose(found, whole, atol=1e-5)


@pytest.mark.parametrize("unknown", range(3))
def test_scores_of_a_row_with_a_gap_agree_with_quadrature(chains, unknown):
    """Levels of a Sobol sequence have a smaller error than the standard error of as many random ones."""
    rows = np.random.default_rng(2).normal(2.0, 3.0, (20, 3))
    rows[:, unknown] = np.nan
    errors = log_evidence(chains, rows, 512, key=jr.key(0)) - [by_quadrature(chains, row) for row in rows]
    independent = completed(chains, rows, 512, key=jr.key(0)).evidence()
    standard = np.array([one.standard_error for one in independent])
    assert np.sqrt(np.mean(errors**2)) < 0.5 * np.sqrt(np.mean(standard**2))


def test_rows_with_few_effective_draws_are_completed_more_often(chains, monkeypatch):
    counts, weigh = [], ChainDensity.log_completion_weights

    def counted(self, z, count):
        counts.append((len(z), count))
        return weigh(self, z, count)

    monkeypatch.setattr(ChainDensity, "log_completion_weights", counted)
    rows = np.array([[2.0, 2.0, np.nan], [np.nan, 2.0, 2.0]])
    log_evidence(chains, rows, 32, key=jr.key(0))
    assert counts == [(2, 32), (2, 256)]


def test_rows_far_from_the_data_warn_of_few_draws(chains):
    with pytest.warns(FewDrawsWarning, match="rest on few effective draws"):
        log_evidence(chains, np.array([[np.nan, 40.0, 2.0]]), 4, key=jr.key(0))
