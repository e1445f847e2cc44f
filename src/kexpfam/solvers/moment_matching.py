"""Maximum entropy: the distribution nearest to the base whose moments are nearly the data's (paper, section 3, remark).

    min_q  KL(q || p0) + 1 / (2 eta) |E_q[features] - E_data[features]|^2

is the dual of the penalised likelihood: its q is the density ``p0 exp(f - A(f))`` of the same optimum, and
``f = (E_data[features] - E_q[features]) / eta``. Here it is solved for q itself, a distribution on the nodes of a grid.
"""

from typing import NamedTuple

import equinox as eqx
import numpy as np
import scipy.linalg
from jaxtyping import Array, Key

from kexpfam.nodes import GRID_DIMS, grid_nodes
from kexpfam.solvers.loop import Status
from kexpfam.solvers.reference import distil
from kexpfam.solvers.task import FIRST_PENALTY, PENALTY_FACTOR, Solution, Task, likelihood
from kexpfam.transports import Identity, Sampler

# On the way down to the penalty that is asked for, this decrement is close enough (nats).
ROUGH = 1e-2
SHORTEST_STEP = 1e-10
# A decrement that rounding may leave, however many steps are taken.
ROUNDING = 1e-9


class Match(NamedTuple):
    """The log masses of q on the nodes, f's weights, the value of the problem, and how far from its minimum it may be."""

    log_masses: np.ndarray
    weights: np.ndarray
    value: float
    decrement: float
    steps: int


class MomentMatching(eqx.Module):
    """Newton's method for q on the simplex of a grid's nodes, for functions of at most three coordinates."""

    fineness: float = 1.0
    tolerance: float = 1e-13
    steps: int = 100

    def __check_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")

    def solve(self, task: Task, *, key: Key[Array, ""], report=None, checkpoint=None) -> Solution:
        """Return the f of the matched distribution, and a mixture distilled from its density."""
        data = np.asarray(task.sample.target)
        if data.shape[1] > GRID_DIMS:
            raise ValueError(f"solver='moment_matching' is for f of at most {GRID_DIMS} dimensions: use solver='dde'.")
        problem = likelihood(task, grid_nodes(task.base, data, fineness=self.fineness))
        match = self.match(problem.mean_feature, problem.node_features, problem.log_weights[0], task.rkhs_penalty)
        status = Status.CONVERGED if match.decrement <= max(self.tolerance, ROUNDING) else Status.RAN_ALL_STEPS
        facts = {"dual_value": match.value, "newton_decrement": match.decrement, "newton_steps": float(match.steps)}
        tilt = task.tilt(match.weights)
        sampler = Sampler(distil(task, tilt.weights, key=key), Identity(), task.base)
        return Solution(tilt, sampler, status, {}, facts)

    def match(self, mean: np.ndarray, features: np.ndarray, log_base: np.ndarray, penalty: float) -> Match:
        """Return the q of the problem on nodes with these features and log masses of the base.

        The penalty falls to its value by tens: with hardly any weight on the moments q is the base, and from one
        penalty to the next it moves little.
        """
        log_base = log_base - np.logaddexp.reduce(log_base)
        log_masses, stage = log_base, max(FIRST_PENALTY, penalty)
        steps = 0
        while True:
            tolerance = self.tolerance if stage <= penalty else ROUGH
            match = _newton(mean, features, log_base, stage, log_masses, tolerance, self.steps)
            log_masses, steps = match.log_masses, steps + match.steps
            if stage <= penalty:
                return match._replace(steps=steps)
            stage = max(stage * PENALTY_FACTOR, penalty)


def _newton(mean, features, log_base, penalty, log_masses, tolerance, most) -> Match:
    r"""Return the minimum from a start, by Newton's steps taken multiplicatively, so that masses stay positive.

    With the gradient :math:`s = \log q / p_0 + \phi^\top (\mu_q - \hat\mu) / \eta` and the Hessian
    :math:`diag(1 / q) + \phi \phi^\top / \eta` on :math:`\sum dq = 0`, the step is, with s and phi centred under q,
    :math:`d \log q = -s + \phi^\top (\eta I + Cov_q[\phi])^{-1} Cov_q[\phi, s]`. Equation ledger: ``MAX-ENT``.
    """
    value, expected = _value(mean, features, log_base, penalty, log_masses)
    for iteration in range(most + 1):
        masses = np.exp(log_masses)
        slope = log_masses - log_base + features @ (expected - mean) / penalty
        slope = slope - masses @ slope
        centred = features - expected
        scaled = centred * np.sqrt(masses)[:, None]
        system = scaled.T @ scaled
        system.flat[:: len(system) + 1] += penalty
        step = centred @ scipy.linalg.solve(system, centred.T @ (masses * slope), assume_a="pos") - slope
        decrement = float(-(masses * slope) @ step)
        if decrement <= tolerance or iteration == most:
            break
        moved = _line_search(mean, features, log_base, penalty, log_masses, step, value, decrement)
        if moved is None:
            break
        log_masses, value, expected = moved
    return Match(log_masses, (mean - expected) / penalty, value, decrement, iteration)


def _value(mean, features, log_base, penalty, log_masses):
    masses = np.exp(log_masses)
    expected = masses @ features
    return float(masses @ (log_masses - log_base) + 0.5 * np.sum((expected - mean) ** 2) / penalty), expected


def _line_search(mean, features, log_base, penalty, log_masses, step, value, decrement):
    size = 1.0
    while size > SHORTEST_STEP:
        candidate = log_masses + size * step
        candidate -= np.logaddexp.reduce(candidate)
        new_value, expected = _value(mean, features, log_base, penalty, candidate)
        if new_value <= value - 0.25 * size * decrement:
            return candidate, new_value, expected
        size *= 0.5
    return None
