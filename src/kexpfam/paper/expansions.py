"""Kernel expansions that grow: functions of an RKHS held by their own centres, with no space fixed in advance."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from kexpfam.data.sample import AnyArray
from kexpfam.fit.problem import Problem
from kexpfam.model.kernels import AbstractKernel
from kexpfam.model.spaces import AbstractFunctionSpace, KernelSpan, in_chunks, spread_rows

__all__ = ["Expansion", "Expansions", "Member", "kernel_span"]

# Kernel values held at a time where an expansion with any number of terms is evaluated at any number of points.
NUMBERS_PER_CHUNK = 8_000_000


class Expansion(eqx.Module):
    """``sum_j coefficients_j k(centres_j, .)`` in a fixed number of slots; empty ones have coefficient 0.

    New terms fill the slots after the first ``kept`` ones; once these are full, the oldest terms are overwritten.
    """

    centres: Float[Array, "m d"]
    coefficients: Float[Array, " m"]
    written: Int[Array, ""]
    kept: int = eqx.field(static=True)

    @classmethod
    def starting(cls, centres: ArrayLike, coefficients: ArrayLike, *, slots: int) -> "Expansion":
        """Return the expansion with these terms, to be kept, and room for ``slots`` more."""
        centres, coefficients = jnp.asarray(centres), jnp.asarray(coefficients)
        padded = jnp.concatenate([centres, jnp.zeros((slots, centres.shape[1]), centres.dtype)])
        return cls(padded, jnp.concatenate([coefficients, jnp.zeros(slots)]), jnp.array(0), len(centres))


class Expansions(AbstractFunctionSpace):
    """The finite kernel expansions: a function of the RKHS held by its own centres, with no space fixed in advance."""

    kernel: AbstractKernel

    def evaluate(
        self, f: Expansion, target: Float[AnyArray, "b d"], condition: Float[AnyArray, "b p"] | None
    ) -> Float[Array, " b"]:
        return self.kernel.gram(target.astype(f.centres.dtype), f.centres) @ f.coefficients

    def squared_norm(self, f: Expansion) -> Float[Array, ""]:
        return f.coefficients @ self.kernel.gram(f.centres, f.centres) @ f.coefficients

    def stepped(
        self,
        f: Expansion,
        shrinkage: float | Float[AnyArray, ""],
        target: Float[AnyArray, "b d"],
        condition: Float[AnyArray, "b p"] | None,
        coefficients: Float[AnyArray, " b"],
    ) -> Expansion:
        slots = f.coefficients.size - f.kept
        places = f.kept + (f.written + jnp.arange(coefficients.size)) % slots
        return Expansion(
            f.centres.at[places].set(target.astype(f.centres.dtype)),
            (shrinkage * f.coefficients).at[places].set(coefficients),
            f.written + coefficients.size,
            f.kept,
        )

    def projected(self, f: Expansion, *, most: int, seed: int) -> tuple[KernelSpan, np.ndarray]:
        """Return the nearest function to f on at most ``most`` of its centres: a span, and f's weights there."""
        live = np.flatnonzero(np.asarray(f.coefficients))
        centres = np.asarray(f.centres)[live if live.size else slice(1)]
        span = KernelSpan.build(self.kernel, centres[spread_rows(centres, most, seed=seed)])
        # The features are orthonormal, so that f's weights are <f, feature>; by the reproducing property, values of f.
        return span, self.values(f, span.centres) @ span.whitening

    def values(self, f: Expansion, points: AnyArray) -> np.ndarray:
        """Return f at many points, in chunks of constant memory."""
        rows_per_chunk = max(1, NUMBERS_PER_CHUNK // f.coefficients.size)
        return in_chunks(lambda rows: self.evaluate(f, rows, None), points, rows_per_chunk=rows_per_chunk)


class Member(eqx.Module):
    """One function of a space, as a thing to call: a nu with weights in place of a network."""

    space: AbstractFunctionSpace
    f: Any

    def __call__(self, x: Float[Array, "b d"], condition: Float[Array, "b p"]) -> Float[AnyArray, " b"]:
        return self.space.evaluate(self.f, x, condition)

    def stepped(
        self,
        shrinkage: float | Float[AnyArray, ""],
        target: Float[AnyArray, "b d"],
        condition: Float[AnyArray, "b p"],
        coefficients: Float[AnyArray, " b"],
    ) -> "Member":
        """Return ``shrinkage`` times this function plus kernels at the targets."""
        return Member(self.space, self.space.stepped(self.f, shrinkage, target, condition, coefficients))


def kernel_span(problem: Problem) -> KernelSpan:
    """Return the problem's space of f as the span of a kernel, for solvers that have other plans with that kernel."""
    if not isinstance(problem.space.target, KernelSpan):
        raise ValueError("this solver works with the kernel itself: leave space at 'nystrom' or 'full'.")
    return problem.space.target
