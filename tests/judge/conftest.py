"""Fitted models that several tests of this folder share."""

import numpy as np
import pytest
from labelled import SMALL, labelled_rows

from kexpfam import ConditionalKernelExpFamily, Integration, Kernel, KernelExpFamily
from kexpfam.data import scaling

GIVEN = Kernel(
    lengthscale=0.8,
    rkhs_penalty=1e-2,
    condition_lengthscale=0.8,
    base_width=1.0,
    power=False,
    n_centres=20,
    integration=Integration(conditional_cells=(80,)),
)


@pytest.fixture(scope="session")
def labelled() -> KernelExpFamily:
    """Return a model of labels and gaps, which are so few that they are learned only because of the patch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "ENOUGH_GAPS", 1)
        return KernelExpFamily(learned=SMALL, random_state=0).fit(labelled_rows(0))


@pytest.fixture(scope="session")
def line() -> ConditionalKernelExpFamily:
    """Return a conditional model of settings that are given, so that no rows are held out."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(120, 1))
    y = 2.0 * X[:, 0] + 0.3 * rng.normal(size=120)
    return ConditionalKernelExpFamily(model="kernel", kernel=GIVEN, random_state=0).fit(X, y)
