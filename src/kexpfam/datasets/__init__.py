"""Data sets: synthetic ones with their true log density."""

from kexpfam.datasets.synthetic import SYNTHETIC, Grid, Rings, Synthetic, TwoMoons, grid, rings, two_moons

__all__ = ["SYNTHETIC", "Grid", "Rings", "Synthetic", "TwoMoons", "grid", "rings", "two_moons"]
