"""Estimators that the kernel exponential family is compared with; import them from ``kexpfam.estimators``."""
