"""What the tests of the solvers share."""

import pytest

from kexpfam.datasets import two_moons


@pytest.fixture(scope="module")
def moons():
    return two_moons().sample(150, random_state=0)
