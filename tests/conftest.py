"""Settings of the whole test run."""

import jax

# The oracles are good to far more digits than float32 has.
jax.config.update("jax_enable_x64", True)
