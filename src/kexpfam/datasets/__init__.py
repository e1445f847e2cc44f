"""Synthetic data sets with their true log density, and real benchmark sets."""

from kexpfam.datasets.benchmark import BENCHMARKS, load_benchmark
from kexpfam.datasets.synthetic import SYNTHETIC, Grid, Rings, Synthetic, TwoMoons, grid, rings, two_moons

__all__ = [
    "BENCHMARKS",
    "SYNTHETIC",
    "Grid",
    "Rings",
    "Synthetic",
    "TwoMoons",
    "grid",
    "load_benchmark",
    "rings",
    "two_moons",
]
