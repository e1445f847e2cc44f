"""A conditional density estimator for sbi: the posterior of a simulator's parameters given its output."""

from typing import Any

import jax
import numpy as np
import torch
from sbi.inference.posteriors import DirectPosterior
from sbi.neural_nets.estimators.base import ConditionalDensityEstimator
from sbi.neural_nets.estimators.shape_handling import reshape_to_batch_event
from torch import Tensor

from kexpfam.adapters import density_of
from kexpfam.estimators.base import key_from
from kexpfam.estimators.conditional import ConditionalEstimator
from kexpfam.model.distributions import AbstractDensity

__all__ = ["KernelEstimator", "posterior"]


class _LogProb(torch.autograd.Function):
    """``log p(theta | x)`` of rows, with gradients computed by JAX."""

    @staticmethod
    def forward(ctx: Any, estimator: "KernelEstimator", theta: Tensor, x: Tensor) -> Tensor:
        ctx.estimator = estimator
        ctx.save_for_backward(theta, x)
        values = estimator.density.log_density(_rows(theta), _rows(x))
        return torch.as_tensor(values, dtype=theta.dtype, device=theta.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        theta, x = ctx.saved_tensors
        slopes = ctx.estimator.slopes(_rows(theta), _rows(x))
        tensor = lambda slope, at: torch.as_tensor(np.array(slope), dtype=at.dtype, device=at.device)
        own, other = (grads[0][:, None] * tensor(*pair) for pair in zip(slopes, (theta, x), strict=True))
        return None, own, other


class KernelEstimator(ConditionalDensityEstimator):
    """A fitted ``ConditionalKernelExpFamily`` of parameters theta (its y) given data x (its X).

    Its weights are fixed: sbi cannot train it. ``log_prob`` has gradients with respect to theta and x.
    """

    def __init__(self, model: ConditionalEstimator) -> None:
        density = density_of(model)
        if not density.conditional:
            raise ValueError("a posterior needs a conditional model of the parameters given the data.")
        shapes = torch.Size([density.scaling.width]), torch.Size([model.n_features_in_])
        super().__init__(torch.nn.Identity(), *shapes)
        self.density: AbstractDensity = density
        # sbi reads the device from a module's tensors, and this module has no other.
        self.register_buffer("device_anchor", torch.zeros(1))
        self.slopes = jax.jit(jax.vmap(jax.grad(density.log_prob, argnums=(0, 1))))

    def log_prob(self, input: Tensor, condition: Tensor, **kwargs: Any) -> Tensor:
        self._check_input_shape(input)
        self._check_condition_shape(condition)
        theta, x, batch = self._broadcast_and_align(input, condition)
        flat = _LogProb.apply(self, theta.reshape(-1, theta.shape[-1]), x.reshape(-1, x.shape[-1]))
        return flat.reshape(theta.shape[0], batch)

    def loss(self, input: Tensor, condition: Tensor, **kwargs: Any) -> Tensor:
        return -self.log_prob(input, condition)[0]

    def sample(self, sample_shape: torch.Size, condition: Tensor, **kwargs: Any) -> Tensor:
        x = reshape_to_batch_event(condition, event_shape=self.condition_shape)
        # Draws depend on torch.manual_seed, as users of sbi expect.
        key = key_from(int(torch.randint(2**31 - 1, ())))
        draws = self.density.sample(torch.Size(sample_shape).numel(), _rows(x), key=key).swapaxes(0, 1)
        draws = torch.as_tensor(draws, dtype=x.dtype, device=x.device)
        return draws.reshape(*sample_shape, x.shape[0], *self.input_shape)


def posterior(
    model: ConditionalEstimator, prior: torch.distributions.Distribution, **settings: Any
) -> DirectPosterior:
    """Return sbi's posterior of a model fitted to simulations, ``model.fit(x, theta)`` with theta ~ prior.

    It supports all methods of sbi posteriors: ``sample``, ``log_prob``, ``map``, simulation-based
    calibration. Draws outside the prior are rejected; set the model's ``bounds`` to those of the prior to
    reject few.
    """
    return DirectPosterior(KernelEstimator(model), prior, **settings)


def _rows(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float64)
