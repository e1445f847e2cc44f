"""A short program for the lowest versions of the dependencies and for a newly built wheel."""

import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import kexpfam
from kexpfam import DDE, ConditionalKernelExpFamily, Kernel, KernelExpFamily
from kexpfam.datasets import two_moons

GIVEN = {"model": "kernel", "kernel": Kernel(lengthscale=1.0, rkhs_penalty=1e-2), "random_state": 0}


def main() -> None:
    """Fit, score, draw, store, draw a picture and call the command line; raise if anything is amiss."""
    X = two_moons().sample(60, random_state=0)
    model = KernelExpFamily(**GIVEN).fit(X)
    assert model.sample(20, random_state=0, refine=1).shape == (20, 2)
    traced = jax.jit(jax.vmap(model.log_prob))(X)
    assert np.allclose(traced, model.score_samples(X.astype(np.float32)), atol=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.kexpfam"
        model.save(file)
        assert np.array_equal(kexpfam.load(file).score_samples(X), model.score_samples(X))
    conditional = ConditionalKernelExpFamily(
        model="kernel",
        kernel=Kernel(
            lengthscale=1.0, rkhs_penalty=1e-2, condition_lengthscale=1.0, base_width=1.0, power=False
        ),
        random_state=0,
    )
    assert conditional.fit(X[:, :1], X[:, 1]).sample(X[:2, :1], 3, random_state=0).shape == (2, 3)
    assert np.isfinite(KernelExpFamily(**GIVEN, solver=DDE(steps=2)).fit(X).score(X))
    assert model.plot() is not None
    subprocess.run(
        [Path(sys.executable).with_name("kexpfam"), "--help"], check=True, stdout=subprocess.DEVNULL
    )
    print(f"kexpfam {kexpfam.__version__} works here.")


if __name__ == "__main__":
    main()
