"""Models for the tests of all adapters, run by ``make test-adapters`` in their own environment."""

import numpy as np
import pytest

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily
from kexpfam.datasets import two_moons

GIVEN = {"model": "kernel", "kernel": Kernel(lengthscale=0.8, rkhs_penalty=1e-2), "random_state": 0}


@pytest.fixture(scope="session")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=300)


@pytest.fixture(scope="session")
def conditional(rows):
    kernel = {"condition_lengthscale": 0.8, "base_width": 1.0, "power": False}
    settings = GIVEN | {"kernel": Kernel(lengthscale=0.8, rkhs_penalty=1e-2, **kernel)}
    return ConditionalKernelExpFamily(**settings).fit(rows[0][:200], rows[1][:200])


@pytest.fixture(scope="session")
def joint():
    return KernelExpFamily(**GIVEN | {"kernel": Kernel(lengthscale=0.5, rkhs_penalty=1e-2)}).fit(
        two_moons().sample(200, random_state=0)
    )
