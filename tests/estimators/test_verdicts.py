"""The verdict sees the fit: a density that is worse than a plain one is not good."""

import pytest

from kexpfam import Kernel, KernelExpFamily
from kexpfam.datasets import two_moons

SETTINGS = {
    "resolved": (Kernel(lengthscale=0.8, rkhs_penalty=1e-4), ("good",)),
    "long length scale": (Kernel(lengthscale=20.0, rkhs_penalty=1e-2), ("fair", "poor")),
    "large penalty": (Kernel(lengthscale=0.8, rkhs_penalty=10.0), ("fair", "poor")),
}


@pytest.mark.parametrize(("kernel", "levels"), SETTINGS.values(), ids=SETTINGS)
def test_a_fit_below_a_plain_density_is_not_good(kernel, levels):
    X = two_moons().sample(200, random_state=0)
    diagnosis = KernelExpFamily(kernel=kernel, random_state=0).fit(X).diagnose()
    assert diagnosis["reference_loss"].level in levels
    if "good" not in levels:
        assert diagnosis.verdict in levels
