"""Double precision; see ``kexpfam.jax_settings``."""

from kexpfam.jax_settings import double_precision

__all__ = ["double_precision"]
