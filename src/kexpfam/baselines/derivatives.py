r"""Derivatives of the Gaussian kernel, and the quadratic problem of score matching in any span of them.

Throughout, :math:`A = (\partial_1, \dots, \partial_d, \Delta)` are the partial derivatives and the Laplacian
of f. With :math:`c_j = 1 / \ell_j^2`, :math:`r_j = c_j (x_j - z_j)` and
:math:`L = \sum_j (r_j^2 - c_j)` everything below is a polynomial in c, r and L, times the kernel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from kexpfam.data.sample import AnyArray, Sample, row_slices
from kexpfam.jax_settings import double_precision
from kexpfam.model.density import Tilt
from kexpfam.model.kernels import Gaussian
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.spaces import EIGENVALUE_FLOOR, AbstractSpan, KernelSpan

# Numbers in one chunk of a Gram matrix of derivatives.
CHUNK_NUMBERS = 8_000_000


def _compiled(function: Callable) -> Callable[..., np.ndarray]:
    """Return the function as a compiled program in float64 that gives a NumPy array."""
    program = eqx.filter_jit(function)

    @functools.wraps(function)
    def run(*arguments: Any) -> np.ndarray:
        with double_precision():
            return np.asarray(program(*arguments))

    return run


class DerivativeSpan(AbstractSpan):
    r"""The functions :math:`A_a k(z_m, \cdot)`, derivatives with respect to the centre, d + 1 per centre.

    They are not orthonormal, so that the norm of a function is not that of its weights: ``derivative_gram``
    has the inner products. All training points as centres make the span that holds the solution of score
    matching.
    """

    kernel: Gaussian
    centres: Float[AnyArray, "m d"]

    @property
    def size(self) -> int:
        return self.centres.shape[0] * (self.centres.shape[1] + 1)

    def features(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, "b r"]:
        points, rates = points.astype(self.centres.dtype), _rates(self.kernel, self.centres.shape[1])
        r = (points[:, None] - self.centres) * rates
        derivatives = r.__array_namespace__().concat([r, (r**2 - rates).sum(2, keepdims=True)], axis=2)
        return (derivatives * self.kernel.gram(points, self.centres)[:, :, None]).reshape(points.shape[0], -1)

    def evaluate(
        self, weights: Float[AnyArray, " r"], points: Float[AnyArray, "b d"]
    ) -> Float[AnyArray, " b"]:
        # With r = xs - zs each term is a polynomial in xs times the kernel: the sums over centres are its
        # coefficients, and one product with the Gram matrix makes them all.
        points, rates = points.astype(self.centres.dtype), _rates(self.kernel, self.centres.shape[1])
        xs, zs, weights = points * rates, self.centres * rates, weights.reshape(self.centres.shape[0], -1)
        slopes, bends = weights[:, :-1], weights[:, -1:]
        linear = slopes - 2.0 * bends * zs
        constant = bends * ((zs**2).sum(1, keepdims=True) - rates.sum()) - (slopes * zs).sum(1, keepdims=True)
        polynomials = linear.__array_namespace__().concat([linear, bends, constant], axis=1)
        sums = self.kernel.gram(points, self.centres) @ polynomials
        return (sums[:, :-2] * xs).sum(1) + sums[:, -2] * (xs**2).sum(1) + sums[:, -1]


class ValueSpan(AbstractSpan):
    """The functions ``k(z_m, .)`` as they are: not orthonormal, see ``DerivativeSpan``."""

    kernel: Gaussian
    centres: Float[AnyArray, "m p"]

    @property
    def size(self) -> int:
        return self.centres.shape[0]

    def features(self, points: Float[AnyArray, "b d"]) -> Float[AnyArray, "b r"]:
        return self.kernel.gram(points.astype(self.centres.dtype), self.centres)


def _rates(kernel: Gaussian, dim: int) -> Float[AnyArray, " d"]:
    return np.zeros(dim) + kernel.lengthscale**-2.0


@_compiled
def derivative_gram(
    kernel: Gaussian, xs: Float[AnyArray, "n d"], zs: Float[AnyArray, "m d"]
) -> Float[AnyArray, "n a m a"]:
    r"""Return :math:`\langle A_a k(x_i, \cdot), A_b k(z_m, \cdot) \rangle` at ``[i, a, m, b]``.

    It is also :math:`A_a` of the function :math:`A_b k(z_m, \cdot)`, at :math:`x_i`.
    """
    rates = _rates(kernel, xs.shape[1])
    r = (xs[:, None] - zs) * rates
    bend = jnp.sum(r**2 - rates, 2)
    gradients = jnp.diag(rates)[:, None, :] - r.transpose(0, 2, 1)[:, :, :, None] * r[:, None]
    mixed = r * (2.0 * rates - bend[:, :, None])
    laplacians = bend**2 - 4.0 * jnp.sum(rates * r**2, 2) + 2.0 * jnp.sum(rates**2)
    upper = jnp.concatenate([gradients, mixed.transpose(0, 2, 1)[..., None]], 3)
    lower = jnp.concatenate([-mixed, laplacians[..., None]], 2)[:, None]
    return jnp.concatenate([upper, lower], 1) * kernel.gram(xs, zs)[:, None, :, None]


@_compiled
def base_scores(base: AbstractMeasure, points: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
    """Return the gradient of the base's log density at each row."""
    return jax.vmap(jax.grad(base.log_density))(points)


def full_weights(
    kernel: Gaussian, condition_kernel: Gaussian, sample: Sample, scores: np.ndarray, penalty: float
) -> Float[np.ndarray, "n a"]:
    r"""Return the minimiser of the score-matching loss over the RKHS: weights of the derivatives at each row.

    It is :math:`f = -\delta / \eta + \sum_{bj} \beta_{bj}\, k(x_b, \cdot)\, \partial_j k(y_b, \cdot)` with
    :math:`(G + n \eta I)\, \beta = h / \eta`, where G are the inner products of the derivatives and h those
    with :math:`\delta` (Sriperumbudur et al. 2017, theorem 5; Arbel and Gretton 2018 with a condition). With
    weights, n is one over the share of each row. Memory ``(n d)^2``.
    """
    n, dim = sample.target.shape
    delta = _delta(scores, sample.weight)
    gram, slopes = np.empty((n * dim, n * dim)), np.empty(n * dim)
    rows = max(1, CHUNK_NUMBERS // (n * (dim + 1) ** 2))
    for start in range(0, n, rows):
        part = sample.rows(slice(start, start + rows))
        block = product_gram(kernel, condition_kernel, part, sample)[:, :dim]
        here = slice(start * dim, (start + len(part)) * dim)
        gram[here] = block[..., :dim].reshape(len(part) * dim, -1)
        slopes[here] = block.reshape(len(part) * dim, -1) @ delta.ravel()
    gram[np.diag_indices(n * dim)] += (
        n * penalty if sample.weight is None else penalty / np.repeat(sample.shares, dim)
    )
    beta = scipy.linalg.solve(gram, slopes / penalty, assume_a="pos", overwrite_a=True, check_finite=False)
    weights = -delta / penalty
    weights[:, :dim] += beta.reshape(n, dim)
    return weights


def full_path(
    blocks: Float[np.ndarray, "n a n a"],
    scores: np.ndarray,
    penalties: np.ndarray,
    weight: np.ndarray | None = None,
) -> Float[np.ndarray, "n a q"]:
    """Return the weights of ``full_weights`` at every penalty, from one decomposition; for few rows."""
    n, dim = scores.shape
    delta = _delta(scores, weight)
    rows, gram = blocks[:, :dim].reshape(n * dim, -1), blocks[:, :dim, :, :dim].reshape(n * dim, -1)
    # With S the rows' weights (mean one), G + n eta / S is symmetric and has one decomposition between two
    # roots of S.
    roots = np.ones(1) if weight is None else np.sqrt(np.repeat(weight / weight.mean(), dim))
    values, vectors = scipy.linalg.eigh(roots[:, None] * gram * roots, check_finite=False, driver="evd")
    shrunk = (vectors.T @ (roots * (rows @ delta.ravel())))[:, None] / (
        np.maximum(values, 0.0)[:, None] + n * penalties
    )
    weights = np.repeat(-delta[:, :, None], len(penalties), 2)
    weights[:, :dim] += (roots[:, None] * (vectors @ shrunk)).reshape(n, dim, -1)
    return weights / penalties


def _delta(scores: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    r"""Return the weights of :math:`\delta` on the derivatives at each row."""
    delta = np.concatenate([scores, np.ones((len(scores), 1))], 1) / len(scores)
    return delta if weight is None else delta * (weight / weight.mean())[:, None]


def product_gram(
    kernel: Gaussian, condition_kernel: Gaussian, rows: Sample, columns: Sample
) -> Float[np.ndarray, "n a m a"]:
    """Return ``derivative_gram`` of the targets times the kernel of the conditions (1 without one)."""
    conditions = condition_kernel.gram(rows.condition, columns.condition)
    return derivative_gram(kernel, rows.target, columns.target) * conditions[:, None, :, None]


def losses(applied: Float[np.ndarray, "n a q"], scores: np.ndarray) -> Float[np.ndarray, "n q"]:
    r"""Return :math:`\sum_j \frac12 (\partial_j f)^2 + \partial_j f\, \partial_j \log p_0 + \partial_j^2 f`.

    ``applied`` are the derivatives and the Laplacian of f there. The mean over rows that f has not seen
    estimates half the Fisher divergence of the density from the data, up to a constant.
    """
    slopes = applied[:, :-1]
    return (0.5 * slopes**2 + slopes * scores[:, :, None]).sum(1) + applied[:, -1]


class Quadratic(NamedTuple):
    """The score-matching loss of ``features . w``, summed over rows: ``1/2 w^T matrix w + slope^T w``."""

    matrix: Float[np.ndarray, "r r"]
    slope: Float[np.ndarray, " r"]
    rows: float

    def losses(self, weights: Float[np.ndarray, "r q"]) -> Float[np.ndarray, " q"]:
        """Return the mean loss of each column of weights."""
        return (0.5 * np.sum(weights * (self.matrix @ weights), 0) + self.slope @ weights) / self.rows

    def path(self, penalties: np.ndarray) -> Float[np.ndarray, "r q"]:
        """Return the weights that minimise the mean loss plus ``penalty / 2 |w|^2``, for each penalty."""
        values, vectors = scipy.linalg.eigh(self.matrix / self.rows, check_finite=False, driver="evd")
        slope = vectors.T @ self.slope / self.rows
        return -vectors @ (slope[:, None] / (np.maximum(values, 0.0)[:, None] + penalties))


class Basis(NamedTuple):
    """A span, and the combinations of its functions that are orthonormal in the RKHS."""

    kernel: Gaussian
    span: DerivativeSpan | KernelSpan
    whitening: Float[np.ndarray, "m r"]

    @staticmethod
    def of_derivatives(kernel: Gaussian, centres: np.ndarray) -> "Basis":
        """Return the basis of derivatives at the centres and Laplacians (Sutherland et al. 2018)."""
        span = DerivativeSpan(kernel, centres)
        gram = derivative_gram(kernel, centres, centres).reshape(span.size, span.size)
        values, vectors = scipy.linalg.eigh(gram, check_finite=False)
        kept = values > EIGENVALUE_FLOOR * values[-1]
        return Basis(kernel, span, vectors[:, kept] / np.sqrt(values[kept]))

    @staticmethod
    def of_values(kernel: Gaussian, centres: np.ndarray) -> "Basis":
        """Return the basis of kernels at the centres (Strathmann et al. 2015)."""
        span = KernelSpan.build(kernel, centres)
        return Basis(kernel, span, span.whitening)

    def weights(self, whitened: np.ndarray) -> np.ndarray:
        """Return the weights in the span of a combination of the orthonormal functions."""
        return whitened if isinstance(self.span, KernelSpan) else self.whitening @ whitened

    def quadratic(
        self, points: np.ndarray, scores: np.ndarray, weight: np.ndarray | None = None
    ) -> Quadratic:
        """Return the loss at these points, by their weights, in bounded memory."""
        functions, dim = self.whitening.shape[0], points.shape[1]
        matrix, slope = np.zeros((functions, functions)), np.zeros(functions)
        for here in row_slices(len(points), max(1, CHUNK_NUMBERS // (functions * (dim + 1)))):
            applied = self._applied(points[here])
            slopes = applied[:, :dim].reshape(-1, functions)
            counted = applied if weight is None else applied * weight[here, None, None]
            matrix += counted[:, :dim].reshape(-1, functions).T @ slopes
            slope += counted[:, :dim].reshape(-1, functions).T @ scores[here].ravel() + counted[:, dim].sum(0)
        total = len(points) if weight is None else float(weight.sum())
        return Quadratic(self.whitening.T @ matrix @ self.whitening, self.whitening.T @ slope, total)

    def _applied(self, points: np.ndarray) -> Float[np.ndarray, "n a m"]:
        """Return the derivatives and the Laplacian of each function of the span, at each point."""
        if isinstance(self.span, KernelSpan):
            return value_derivatives(self.kernel, points, self.span.centres)
        blocks = derivative_gram(self.kernel, points, self.span.centres)
        return blocks.reshape(*blocks.shape[:2], -1)


def value_derivatives(
    kernel: Gaussian, points: np.ndarray, centres: np.ndarray
) -> Float[np.ndarray, "n a m"]:
    r"""Return :math:`A_a k(x_i, z_m)`; by symmetry, the functions of ``DerivativeSpan`` with centres x_i."""
    found = DerivativeSpan(kernel, points).features(centres)
    return found.reshape(len(centres), len(points), -1).transpose(1, 2, 0)


@_compiled
def fitted_losses(tilt: Tilt, sample: Sample) -> Float[AnyArray, " n"]:
    """Return the score-matching loss of the tilted base at each row, by automatic differentiation."""
    directions = jnp.eye(sample.target.shape[1], dtype=sample.target.dtype)

    def loss(x: Float[Array, " d"], condition: Float[Array, " p"]) -> Float[Array, ""]:
        slope = jax.grad(lambda point: tilt.f(point[None], condition[None])[0])
        bend = lambda direction: direction @ jax.jvp(slope, (x,), (direction,))[1]
        # One direction at a time: memory must not grow with the square of the dimension.
        return (
            0.5 * slope(x) @ slope(x)
            + slope(x) @ jax.grad(tilt.base.log_density)(x)
            + jnp.sum(jax.lax.map(bend, directions))
        )

    return jax.vmap(loss)(sample.target, sample.condition)
