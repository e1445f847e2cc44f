"""A kernel that is worse than the Gaussian kernel is refused, with the scores that show it."""

import numpy as np
import pytest

from kexpfam import Integration, Kernel, KernelExpFamily, Search
from kexpfam.datasets import rings, two_moons
from kexpfam.fit.kernel import UnresolvedFitWarning, _note_raised_penalty
from kexpfam.fit.select import KernelSettings, Selection, Trial
from kexpfam.model.measures import Gaussian

SEARCH = Search(folds=2, lengthscales=(0.1, 0.2, 0.4), penalties=(1.0, 1e-2, 1e-4))
COARSE = Integration(cells=(100, 20), tail_cells=(10, 3))


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_a_kernel_that_is_worse_than_the_gaussian_is_refused(name):
    X = two_moons().sample(80, random_state=0)
    kernel = Kernel(name, search=SEARCH, integration=COARSE)
    model = KernelExpFamily(model="kernel", kernel=kernel, random_state=0)
    if name == "gaussian":
        model.fit(X)
        return
    with pytest.raises(ValueError, match=r"of -3\.\d+ with kernel='laplace' and of -3\.1\d with 'gaussian'"):
        model.fit(X)


@pytest.mark.filterwarnings("ignore::kexpfam.UnresolvedFitWarning")
def test_a_smooth_kernel_is_refused_only_where_it_is_worse():
    search = Search(folds=2, lengthscales=(0.1, 0.2, 0.4, 0.8), penalties=(1.0, 1e-2, 1e-3, 1e-4, 1e-5))
    kernel = Kernel("matern32", search=search, integration=Integration(cells=(200, 56), tail_cells=(20, 5)))
    model = KernelExpFamily(model="kernel", kernel=kernel, random_state=0)
    model.fit(np.random.default_rng(0).normal(size=(100, 1)))
    with pytest.raises(ValueError, match=r"with kernel='matern32' and of .* with 'gaussian'\. Use"):
        model.fit(rings().sample(500, random_state=0))
    given = Kernel("matern32", lengthscale=0.2, rkhs_penalty=1e-2, integration=kernel.integration)
    KernelExpFamily(model="kernel", kernel=given, random_state=0).fit(rings().sample(200, random_state=0))


def test_a_kernel_whose_penalty_the_grid_raises_is_refused_if_held_out_rows_lose():
    settings = KernelSettings("gaussian", (0,), False, np.zeros(0), np.ones(1), 1.0, 1e-3)
    trials = [Trial(settings._replace(rkhs_penalty=10.0**-k), -2.0 + 0.08 * k, 0.01) for k in (1, 2, 3)]
    selection = Selection(settings, Gaussian(np.zeros(1), np.eye(1)), trials[-1], trials)
    with pytest.raises(ValueError, match=r"of -1\.92 at the penalty .* of -1\.76 at the chosen one"):
        _note_raised_penalty(selection, 0.1, "laplace")
    with pytest.warns(UnresolvedFitWarning):
        _note_raised_penalty(selection, 0.01 + 1e-8, "laplace")
    with pytest.warns(UnresolvedFitWarning):
        _note_raised_penalty(selection, 0.1, "gaussian")
