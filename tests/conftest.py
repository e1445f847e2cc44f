"""Settings of the whole test run."""

import gc
import os
from pathlib import Path

# Most of the run's time goes into compiling programs that have not changed since the run before.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# Every annotated shape and type of the package is checked at every call of the run.
jaxtyping.install_import_hook("kexpfam", "typechecking.checked")

from kexpfam.datasets import two_moons  # noqa: E402

# Traced programs stay alive and are many: looking through them for garbage every so often takes a twentieth
# of the run.
gc.set_threshold(50_000, 20, 50)

# The oracles are good to far more digits than float32 has.
jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="module")
def moons():
    return two_moons().sample(150, random_state=0)
