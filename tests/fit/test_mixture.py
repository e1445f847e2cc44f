"""Mixtures of normals: EM against scikit-learn's, and the choice of the number of components."""

import numpy as np
import pytest
from sklearn.mixture import GaussianMixture

from kexpfam.fit import mixture
from kexpfam.fit.mixture import MixtureShape, best_shape, fit_mixture, mixture_held_out
from kexpfam.fit.task import Splits
from kexpfam.model.measures import COVARIANCE_FLOOR


def clusters(seed: int, rows: int = 300) -> np.ndarray:
    rng = np.random.default_rng(seed)
    turned = rng.normal(size=(rows, 3)) @ rng.normal(size=(3, 3))
    return np.concatenate([turned - 3.0, rng.normal(size=(rows // 2, 3)) + 3.0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_step_of_em_is_scikit_learns(diagonal, seed, monkeypatch):
    points = clusters(seed)
    monkeypatch.setattr(mixture, "SMALLEST_RISE", 0.0)
    monkeypatch.setattr(mixture, "EM_STEPS", 1)
    monkeypatch.setattr(mixture, "BLOCK_NUMBERS", 700)
    start = fit_mixture(points, MixtureShape(4, diagonal), seed=seed)
    monkeypatch.setattr(mixture, "EM_STEPS", 5)
    mine = fit_mixture(points, MixtureShape(4, diagonal), seed=seed)
    covariances = start.choleskys @ start.choleskys.mT
    precisions = np.linalg.inv(covariances)
    theirs = GaussianMixture(
        4,
        covariance_type="diag" if diagonal else "full",
        reg_covar=COVARIANCE_FLOOR,
        weights_init=np.exp(start.log_weights),
        means_init=start.means,
        precisions_init=np.diagonal(precisions, axis1=1, axis2=2) if diagonal else precisions,
        tol=0.0,
        max_iter=4,
    )
    with pytest.warns(Warning, match="did not converge"):
        theirs.fit(points)
    np.testing.assert_allclose(mine.means, theirs.means_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(mine.log_densities(points), theirs.score_samples(points), rtol=1e-7)


def test_the_size_of_the_blocks_does_not_matter(monkeypatch):
    points = clusters(0)
    whole = fit_mixture(points, MixtureShape(4, False), seed=0)
    monkeypatch.setattr(mixture, "BLOCK_NUMBERS", 1)
    blocks = fit_mixture(points, MixtureShape(4, False), seed=0)
    np.testing.assert_allclose(blocks.log_densities(points), whole.log_densities(points), rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_held_out_rows_choose_the_number_of_components(seed):
    rng = np.random.default_rng(seed)
    points = np.concatenate(
        [rng.normal(size=(200, 2)) + shift for shift in ([-8, -8], [8, -8], [-8, 8], [8, 8])]
    )
    assert best_shape(points, seed=seed).components == 4


def test_a_held_out_row_is_scored_by_a_mixture_of_the_others():
    points = clusters(1)
    splits = Splits.draw(len(points), parts=3, share=0.2, seed=0)
    shape = MixtureShape(2, True)
    found = mixture_held_out(points, shape, splits, seed=4)
    for kept, held in zip(splits.kept, splits.held, strict=True):
        expected = fit_mixture(points[kept], shape, seed=4).log_densities(points[held])
        np.testing.assert_allclose(found[held], expected, rtol=1e-9)
    assert np.isnan(found).sum() == len(points) - splits.held.size


def test_components_without_rows_keep_finite_moments():
    points = np.zeros((20, 2))
    assert np.all(np.isfinite(fit_mixture(points, MixtureShape(3, False), seed=0).log_densities(points)))
