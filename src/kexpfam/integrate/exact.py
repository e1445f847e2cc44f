"""Draws of a density itself where its sampler is approximate."""

import dataclasses
from typing import Any

import jax.random as jr
import numpy as np

from kexpfam.data.sample import RandomKey
from kexpfam.model.density import Sampler, TiltedCells, TiltedDensity
from kexpfam.model.distributions import AbstractDensity
from kexpfam.model.ensemble import Stack
from kexpfam.model.networks import Identity

# HMC steps where there is no grid.
STEPS = 20


def exact_draws(
    density: AbstractDensity, count: int, X: np.ndarray | None = None, *, key: RandomKey
) -> np.ndarray:
    """Return draws of the density, in data units, of shape (count, d), or (rows of X, count, d).

    A kernel model is drawn from the cells of its grid. Without a grid, draws of the sampler are resampled by
    weight and moved by HMC, which leaves the density invariant. Other densities draw from themselves."""
    if isinstance(density, Stack):
        return _of_stack(density, count, X, key=key)
    if not isinstance(density, TiltedDensity):
        return density.sample(count, X, key=key)
    if density.nodes is None or not density.nodes.is_grid:
        from kexpfam.integrate.chains import refine  # BlackJAX is slow to import

        return refine(density, count, STEPS, X, key=key)
    cells = TiltedCells.on(density.tilt, density.nodes)
    sampler = Sampler(cells, Identity(), density.tilt.base)
    return dataclasses.replace(density, sampler=sampler).sample(count, X, key=key)


def _of_stack(stack: Stack, count: int, X: np.ndarray | None, *, key: RandomKey) -> np.ndarray:
    """Return draws of the parts by their weights."""
    owner_key, *keys = jr.split(key, 1 + len(stack.parts))
    draws: Any = [exact_draws(part, count, X, key=one) for part, one in zip(stack.parts, keys, strict=True)]
    several = np.stack(draws)
    rng = np.random.default_rng(np.asarray(jr.key_data(owner_key)))
    owner = rng.choice(len(stack.parts), size=several.shape[1:-1], p=stack.weights)
    return np.take_along_axis(several, owner[None, ..., None], axis=0)[0]
