"""Estimators that the kernel exponential family is compared with; import them from ``kexpfam.estimators``."""

__all__: list[str] = []
