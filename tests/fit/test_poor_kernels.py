"""A kernel whose kinks no grid resolves is refused, with the scores that show it."""

import pytest

from kexpfam import Integration, Kernel, KernelExpFamily, Search
from kexpfam.datasets import two_moons

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
