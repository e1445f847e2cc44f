"""Whether a fit is good: certificates, diagnoses, calibration, distances between samples."""

__all__: list[str] = []
