"""Quality of a fit: one diagnosis of named measurements, calibration, conformal repair, metrics."""
