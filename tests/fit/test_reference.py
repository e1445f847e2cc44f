"""Plain densities on held-out rows, against SciPy, and the fallback to a normal."""

import jax.random as jr
import numpy as np
import pytest
import scipy.stats

from kexpfam import FallbackWarning
from kexpfam.data.kinds import Category, Real
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.fit.bases import BANDWIDTHS
from kexpfam.fit.problem import Status
from kexpfam.fit.reference import Comparison, or_normal, plain_scores
from kexpfam.fit.stack import CandidateScore, Stacked
from kexpfam.fit.task import Fitted, Keys, Splits, Task
from kexpfam.model.density import Inputs
from kexpfam.model.ensemble import LawDensity
from kexpfam.model.measures import Gaussian


def task(values: np.ndarray, X: np.ndarray | None = None, kinds: tuple | None = None) -> Task:
    """Return a task with two held-out parts of a fifth of the rows."""
    condition = np.zeros((len(values), 0)) if X is None else X
    kinds = kinds or (Real(),) * values.shape[1]
    scaling = Scaling.of(values, kinds)
    inputs = Inputs.of(Scaling.plain(condition), condition)
    splits = Splits.draw(len(values), parts=2, share=0.2, seed=0)
    sample, keys = Sample(scaling.to_model(values), condition, None), Keys(*jr.split(jr.key(0), 5))
    numeric = all(kind.has_kernel for kind in kinds)
    return Task(values, kinds, scaling, sample, inputs, splits, keys, numeric)


ROWS = np.random.default_rng(0).gamma(2.0, size=(60, 2))


def log_kernels(kept: np.ndarray, held: np.ndarray, width: float) -> np.ndarray:
    scale = width * kept.std(axis=0) * len(kept) ** (-1 / 6)
    kernels = scipy.stats.norm.pdf(held[:, None], kept[None], scale)
    return np.log(np.mean(np.prod(kernels, axis=2), axis=1))


def test_references_of_a_density_are_those_of_scipy():
    one = task(ROWS)
    found = plain_scores(one)
    for kept, held in zip(one.splits.kept, one.splits.held, strict=True):
        normal = scipy.stats.multivariate_normal(ROWS[kept].mean(axis=0), np.cov(ROWS[kept].T))
        np.testing.assert_allclose(found["normal"][held], normal.logpdf(ROWS[held]), atol=1e-3)
        # The kernel is a product over columns; SciPy's estimate of each kernel at each row.
        best = max((log_kernels(ROWS[kept], ROWS[held], width) for width in BANDWIDTHS), key=np.mean)
        np.testing.assert_allclose(found["kernel density"][held], best, atol=1e-9)
    assert np.isnan(found["normal"]).sum() == 60 - one.splits.held.size


def test_the_reference_of_a_conditional_density_is_a_linear_model():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 1))
    y = 2.0 * x + 0.5 * rng.normal(size=(400, 1))
    one = task(y, x)
    found = plain_scores(one)["normal linear model"]
    held = one.splits.held.ravel()
    exact = scipy.stats.norm.logpdf(y[held, 0], 2.0 * x[held, 0], 0.5)
    # Three parameters cost 3 / (2 n) nats on average; the tolerance is ten times that.
    assert found[held].mean() == pytest.approx(exact.mean(), abs=10 * 1.5 / 320)


def test_the_reference_of_labels_and_gaps_are_frequencies():
    rng = np.random.default_rng(2)
    labels = rng.choice(2, size=200, p=[0.8, 0.2]).astype(float)
    real = np.where(rng.uniform(size=200) < 0.3, np.nan, rng.normal(size=200))
    one = task(np.column_stack([labels, real]), kinds=(Category(("a", "b")), Real()))
    found = plain_scores(one)["independent columns"]
    kept, held = one.splits.kept[0], one.splits.held[0]
    chance = (np.sum(labels[kept]) + 1.0) / (len(kept) + 2.0)
    gap = (np.isnan(real[kept]).sum() + 1.0) / (len(kept) + 2.0)
    seen = real[kept][~np.isnan(real[kept])]
    normal = scipy.stats.norm.logpdf(real[held], seen.mean(), seen.std(ddof=1)) + np.log(1.0 - gap)
    expected = np.log(np.where(labels[held] > 0, chance, 1.0 - chance))
    expected += np.where(np.isnan(real[held]), np.log(gap), normal)
    np.testing.assert_allclose(found[held], expected, atol=1e-3)


def test_a_comparison_is_on_the_rows_of_all():
    own, plain = np.array([1.0, 2.0, np.nan, 4.0]), {"a": np.array([0.0, np.nan, 0.0, 1.0])}
    found = Comparison.of(own, plain, None)
    assert (found.rows, found.score, found.references) == (2, 2.5, {"a": 0.5})
    assert found.errors["a"] == pytest.approx(np.std([-1.0, -3.0]) / np.sqrt(2))
    assert Comparison.of(own, {}, None) is None
    assert Comparison.of(None, plain, None).score is None


def stacked(one: Task, loss: float) -> Stacked:
    """Return a candidate that scores lower than the normal by ``loss``."""
    density = LawDensity(Gaussian(np.zeros(2), np.eye(2)), one.scaling)
    held_out = plain_scores(one)["normal"] - loss
    score = CandidateScore("kernel", 1.0, float(np.nanmean(held_out)), 0.1)
    return Stacked(density, [score], {"kernel": Fitted(density, held_out, Status.CONVERGED, {}, {})})


def test_a_default_fit_below_a_normal_is_replaced_with_a_word():
    one = task(np.random.default_rng(0).normal(size=(200, 2)))
    plain, worse, fine = plain_scores(one), stacked(one, 0.5), stacked(one, 0.05)
    assert or_normal(one, fine, plain) is fine
    with pytest.warns(FallbackWarning, match="a normal scores 0.5 nats higher on held-out rows"):
        found = or_normal(one, worse, plain)
    assert [(score.name, score.weight) for score in found.scores] == [("kernel", 0.0), ("normal", 1.0)]
    law = scipy.stats.multivariate_normal(one.values.mean(axis=0), np.cov(one.values.T))
    np.testing.assert_allclose(found.density.log_density(one.values), law.logpdf(one.values), atol=1e-3)
    np.testing.assert_array_equal(found.held_out, plain["normal"])
    lost = stacked(one, np.inf)
    with pytest.warns(FallbackWarning):
        assert or_normal(one, lost, plain).density is not lost.density
