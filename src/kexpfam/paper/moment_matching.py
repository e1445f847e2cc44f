"""Maximum entropy: the distribution closest to the base with nearly the data's moments (paper, section 3).

    min_q  KL(q || p0) + 1 / (2 eta) |E_q[features] - E_data[features]|^2

is the dual of the penalised likelihood: its q is the density ``p0 exp(f - A(f))`` of the same optimum, with
``f = (E_data[features] - E_q[features]) / eta``. It is solved for q, a distribution on the nodes of a grid.
"""

from typing import NamedTuple, Unpack

import numpy as np
import scipy.linalg

from kexpfam.data.sample import RandomKey
from kexpfam.fit.convex import best_sampler, likelihood, require_grid
from kexpfam.fit.distil import Distillation
from kexpfam.fit.newton import climb, factored
from kexpfam.fit.problem import Problem, Solution, Solver, Status, Watchers
from kexpfam.model.measures import logsumexp
from kexpfam.settings import at_least, between

# Rounding may leave a squared decrement of this size.
ROUNDING = 1e-9


class Match(NamedTuple):
    """The log masses of q, f's weights, the value, the squared decrement and the number of steps."""

    log_masses: np.ndarray
    weights: np.ndarray
    value: float
    decrement: float
    steps: int


class MomentMatching(Solver):
    """Newton's method for q on the simplex of a grid's nodes, along falling penalties."""

    tolerance: float = at_least(0, 1e-13)  # squared decrement (nats) at which Newton's method stops
    steps: int = at_least(1, 100)  # for each penalty, at most
    rough_tolerance: float = at_least(0, 1e-2)  # squared decrement at the penalties before the last
    first_penalty: float = at_least(0, 1e-2)
    penalty_factor: float = between(0, 1, 0.1)  # from one penalty to the next

    @property
    def grid_only(self) -> bool:
        return True

    @property
    def uses_proposal(self) -> bool:
        return False

    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return the f of the matched distribution, and the cells of its density as the sampler."""
        require_grid(self, problem)
        nodes = problem.nodes(key=None)
        posed = likelihood(problem, nodes)
        match = self.match(posed.mean_feature, posed.node_features, nodes.log_weights, problem.rkhs_penalty)
        converged = match.decrement <= max(self.tolerance, ROUNDING)
        status = Status.CONVERGED if converged else Status.RAN_ALL_STEPS
        facts = {"dual_value": match.value, "newton_decrement": match.decrement}
        facts["newton_steps"] = float(match.steps)
        tilt = problem.tilt(match.weights)
        return Solution(tilt, best_sampler(problem, tilt, nodes, Distillation(), key=key), status, {}, facts)

    def match(self, mean: np.ndarray, features: np.ndarray, log_base: np.ndarray, penalty: float) -> Match:
        """Return the optimal q on nodes with these features and log masses of the base.

        At a large penalty q is close to the base; from one penalty to the next it changes little.
        """
        log_base = log_base - logsumexp(log_base)
        log_masses, stage, steps = log_base, max(self.first_penalty, penalty), 0
        while True:
            tolerance = self.tolerance if stage <= penalty else self.rough_tolerance
            match = _newton(mean, features, log_base, stage, log_masses, tolerance, self.steps)
            log_masses, steps = match.log_masses, steps + match.steps
            if stage <= penalty:
                return match._replace(steps=steps)
            stage = max(stage * self.penalty_factor, penalty)


def _newton(
    mean: np.ndarray,
    features: np.ndarray,
    log_base: np.ndarray,
    penalty: float,
    start: np.ndarray,
    tolerance: float,
    most: int,
) -> Match:
    r"""Return the minimum from a start by multiplicative Newton steps, which keep the masses positive.

    With the gradient :math:`s = \log q / p_0 + \phi^\top (\mu_q - \hat\mu) / \eta` and the Hessian
    :math:`diag(1 / q) + \phi \phi^\top / \eta` on :math:`\sum dq = 0`, the step is, with s and phi centred
    under q, :math:`d \log q = -s + \phi^\top (\eta I + Cov_q[\phi])^{-1} Cov_q[\phi, s]`.
    Equation ledger: ``MAX-ENT``.
    """

    def evaluate(log_masses: np.ndarray) -> tuple[float, np.ndarray]:
        masses = np.exp(log_masses)
        expected = masses @ features
        value = masses @ (log_masses - log_base) + 0.5 * np.sum((expected - mean) ** 2) / penalty
        return -float(value), expected

    def direction(log_masses: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, float, None]:
        masses = np.exp(log_masses)
        slope = log_masses - log_base + features @ (expected - mean) / penalty
        slope = slope - masses @ slope
        centred = features - expected
        scaled = centred * np.sqrt(masses)[:, None]
        system = scaled.T @ scaled
        system.flat[:: len(system) + 1] += penalty
        step = centred @ scipy.linalg.cho_solve(factored(system), centred.T @ (masses * slope)) - slope
        return step, float(-(masses * slope) @ step), None

    def move(log_masses: np.ndarray, step: np.ndarray) -> np.ndarray:
        moved = log_masses + step
        return moved - logsumexp(moved)

    found = climb(start, evaluate, direction, move=move, tolerance=tolerance, most=most)
    return Match(found.point, (mean - found.state) / penalty, -found.value, found.decrement, found.iterations)
