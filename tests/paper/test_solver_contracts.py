"""What every solver of the paper's room keeps, whichever algorithm it is."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest

from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.fit.mixture import best_mixture
from kexpfam.fit.problem import SOLVERS, Problem, Solver, Status, solver_from
from kexpfam.integrate.nodes import Integration
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace, KernelSpan
from kexpfam.paper.ascent import Annealing, Chains, NaturalAscent
from kexpfam.paper.functional import FunctionalAscent
from kexpfam.paper.learned_features import Learning

SMALL = FunctionalAscent(batch_size=16, ascents=1, width=8, depth=1)
FEW = Learning(batch_size=64, nodes_per_batch=128, stages=2)
# The settings that make each of them quick; whoever registers a solver in this room says how.
QUICK = {
    "functional": {"steps": 5, "ascent": SMALL, "centres": 20},
    "random_features": {"steps": 5, "ascent": SMALL, "count": 10},
    "adapted": {"count": 5, "steps": 40, "learning": FEW},
    "deep": {"width": 8, "depth": 1, "steps": 40, "learning": FEW},
    "singly_dual": {"steps": 5, "batch_size": 64},
    "mmd_gan": {"steps": 5, "batch_size": 64},
    "contrastive": {"steps": 2, "ascent": NaturalAscent(Chains(count=16, transitions=1))},
    "annealed": {"steps": 2, "ascent": NaturalAscent(Annealing(particles=64, stages=4))},
    "moment_matching": {},
}
NAMES = [name for name, (room, _, _) in SOLVERS.items() if room.startswith("paper.")]


@pytest.fixture(scope="module")
def problem(moons):
    data = Scaling.standardising(moons).to_model(moons)
    kernel, sample = kernels.Gaussian(0.6), Sample.unconditional(data)
    space = FeatureSpace.of_kernels(kernel, kernel, Sample.unconditional(data[::8]))
    integration = Integration(cells=(200, 50), tail_cells=(20, 5), conditional_cells=(200, 50), draws=2000)
    return Problem(sample, Gaussian.fitted(data), space, 1e-2, best_mixture(data, seed=0), integration)


class Unused(Gaussian):
    """A proposal that raises when it is used."""

    def sample(self, count, *, key):
        raise AssertionError("the proposal was drawn from")

    def log_density(self, x):
        raise AssertionError("the density of the proposal was computed")


def with_unused_proposal(problem):
    return dataclasses.replace(problem, proposal=Unused(problem.base.mean, problem.base.cholesky))


def quick(name) -> Solver:
    return dataclasses.replace(solver_from(name, conditional=False), **QUICK[name])


def test_every_solver_of_the_room_is_held_to_the_contract():
    assert set(QUICK) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_is_finite_and_its_trace_is_what_the_solver_says_it_records(name, problem):
    solver = quick(name)
    given = problem if solver.uses_proposal else with_unused_proposal(problem)
    solution = solver.solve(given, key=jr.key(0))
    assert set(solution.trace) == set(solver.records)
    assert len({len(series) for series in solution.trace.values()}) == (1 if solver.records else 0)
    assert all(np.all(np.isfinite(series)) for series in solution.trace.values())
    assert isinstance(solution.status, Status)
    assert solution.status is not Status.DIVERGED
    assert all(isinstance(fact, float) for fact in solution.facts.values())
    data = np.asarray(problem.sample.target)
    assert np.any(solution.tilt.weights)
    assert np.all(np.isfinite(solution.tilt.log_values(data)))
    assert np.isfinite(solution.tilt.log_partitions(problem.nodes(key=None), np.zeros((1, 0)))[0])
    draws = solution.sampler.draws(64, key=jr.key(1))
    assert draws.shape == (64, 2)
    assert np.all(np.isfinite(draws))
    assert np.all(np.isfinite(solution.sampler.reference.log_densities(draws)))


@pytest.mark.parametrize(
    "name", [name for name in NAMES if solver_from(name, conditional=False).uses_proposal]
)
def test_a_solver_that_uses_the_proposal_does(name, problem):
    with pytest.raises(AssertionError, match="the proposal"):
        quick(name).solve(with_unused_proposal(problem), key=jr.key(0))


@pytest.mark.parametrize("name", NAMES)
def test_the_algorithm_stands_alone_by_default(name):
    solver = solver_from(name, conditional=False)
    assert not getattr(solver, "warm_start", False)
    assert not getattr(solver, "polish", False)
    with pytest.raises(ValueError, match="does not support conditions"):
        solver_from(name, conditional=True)


@pytest.mark.parametrize("name", [name for name in NAMES if solver_from(name, conditional=False).grid_only])
def test_a_solver_that_needs_a_grid_says_so(name):
    data = np.random.default_rng(0).normal(size=(20, 4))
    base, kernel, sample = Gaussian.fitted(data), kernels.Gaussian(1.0), Sample.unconditional(data)
    problem = Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, sample), 1e-2, base)
    assert isinstance(problem.space.target, KernelSpan)
    with pytest.raises(ValueError, match=r"at most 3 dimensions and f depends on 4: use solver='auto'"):
        quick(name).solve(problem, key=jr.key(0))
