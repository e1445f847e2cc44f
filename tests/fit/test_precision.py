"""A fit does not depend on the precision that the caller has chosen for JAX."""

import jax
import numpy as np

from kexpfam import DDE, Integration, Kernel, KernelExpFamily
from kexpfam.fit.saddle import DoublyDual


def test_a_saddle_fit_has_the_same_bits_in_both_precisions():
    X = np.random.default_rng(0).normal(size=(40, 1))
    kernel = Kernel(lengthscale=1.0, rkhs_penalty=0.1, n_centres=8, integration=Integration(cells=(60,)))
    found = []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            solver = DDE(steps=3, saddle=DoublyDual(width=4))
            model = KernelExpFamily(model="kernel", kernel=kernel, solver=solver, random_state=0).fit(X)
            found.append((model.score_samples(X), model.sample(5, random_state=0)))
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)
