"""Steps and early ends of contrastive divergence and annealed likelihood."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import midpoint_grid

import kexpfam
from kexpfam import DDE, Kernel, KernelExpFamily
from kexpfam.data.sample import Sample
from kexpfam.fit.convex import Convex
from kexpfam.fit.problem import Problem, Status
from kexpfam.fit.saddle import DoublyDual
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper import AnnealedLikelihood, Averaged, ContrastiveDivergence, MomentMatching, RandomIterate
from kexpfam.paper.ascent import AbstractDrawing, Annealing, AscentProblem, Chains, ModelDraws, NaturalAscent
from kexpfam.storage import load_tree, save_tree

PENALTY = 1e-3
FEW = Averaged(NaturalAscent(Chains(count=64, transitions=2)))


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    data = np.where(rng.uniform(size=100) < 0.4, rng.normal(-1.3, 0.4, 100), rng.normal(1.0, 0.5, 100))[
        :, None
    ]
    sample, kernel, base = Sample.unconditional(data), kernels.Gaussian(0.6), Gaussian.fitted(data)
    centres = Sample.unconditional(np.linspace(-2.5, 2.5, 12)[:, None])
    return Problem(sample, base, FeatureSpace.of_kernels(kernel, kernel, centres), PENALTY, base)


@pytest.fixture(scope="module")
def exact(problem):
    return Convex().solve(problem, key=jr.key(0)).tilt


def divergence(first, second) -> float:
    """Return KL(first || second) on a grid."""
    points, volume = midpoint_grid([-8.0], [8.0], 2000)
    logs = [tilt.base.log_densities(points) + tilt.values(points) for tilt in (first, second)]
    first, second = (log - np.log(volume * np.exp(log).sum()) for log in logs)
    return float(volume * np.sum(np.exp(first) * (first - second)))


class Fixed(AbstractDrawing):
    """The same weighted draws at every step."""

    points: jnp.ndarray
    weights: jnp.ndarray

    def init(self, problem, *, key):
        return None

    def draw(self, problem, tilt, drawing, *, key):
        return ModelDraws(None, self.points, self.weights, jnp.asarray(1.0))


@pytest.mark.parametrize("trust", [0.05, 100.0])
def test_a_step_is_a_newton_step_on_the_moments_of_the_draws_cut_to_the_trust_radius(problem, trust):
    rng = np.random.default_rng(1)
    points, masses = rng.normal(size=(300, 1)), rng.dirichlet(np.ones(300))
    ascent, posed = (
        NaturalAscent(Fixed(jnp.asarray(points), jnp.asarray(masses)), trust=trust),
        AscentProblem.of(problem),
    )
    start = rng.normal(size=problem.space.size)
    state = ascent.init(posed, jnp.asarray(start), key=jr.key(0))
    moved, health = ascent.step(posed, eqx.tree_at(lambda s: s.step, state, jnp.array(7)), key=jr.key(1))
    features = problem.space.matrix(points, np.zeros((300, 0)))
    data = problem.space.matrix(problem.sample.target, np.zeros((100, 0)))
    curvature = 0.95 * np.asarray(state.curvature) + 0.05 * np.cov(features.T, aweights=masses, ddof=0)
    gradient = data.mean(0) - masses @ features - PENALTY * start
    step = np.linalg.solve(curvature + PENALTY * np.eye(len(start)), gradient)
    length = np.sqrt(gradient @ step)
    expected = start + (1.0 + 7.0 / 20.0) ** -0.6 * min(1.0, trust / length) * step
    np.testing.assert_allclose(moved.point.f_weights, expected, rtol=1e-6)
    assert float(health.newton_length) == pytest.approx(length, rel=1e-6)
    assert int(moved.step) == 8


CLASSICAL = {
    "persistent": ContrastiveDivergence(steps=64),
    "short": ContrastiveDivergence(persistent=False, steps=64),
    "annealed": AnnealedLikelihood(
        steps=16, ascent=Averaged(NaturalAscent(Annealing(particles=512), delay=5.0, memory=8.0))
    ),
}


@pytest.mark.parametrize("name", CLASSICAL)
def test_the_density_is_the_exact_one(name, problem, exact):
    solution = CLASSICAL[name].solve(problem, key=jr.key(0))
    # The base is a quarter of a nat away.
    assert divergence(exact, problem.tilt(np.zeros(problem.space.size))) > 0.2
    assert divergence(exact, solution.tilt) < 0.01
    assert solution.status is Status.CONVERGED
    assert set(solution.trace) == {"newton_length", "acceptance"}
    assert len(solution.trace["acceptance"]) == CLASSICAL[name].steps


def test_a_run_that_breaks_is_rolled_back(problem):
    broken = eqx.tree_at(lambda averaged: averaged.solver.trust, FEW, jnp.asarray(np.nan))
    solution = ContrastiveDivergence(steps=8, ascent=broken).solve(problem, key=jr.key(0))
    assert solution.status is Status.DIVERGED
    np.testing.assert_array_equal(solution.tilt.weights, np.zeros(problem.space.size))


def test_too_few_steps_are_not_called_converged(problem):
    solution = ContrastiveDivergence(steps=1, ascent=FEW).solve(problem, key=jr.key(0))
    assert solution.status is Status.RAN_ALL_STEPS
    assert solution.facts["shortfall"] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("solver", [ContrastiveDivergence(steps=2, ascent=FEW), MomentMatching()])
def test_a_model_can_be_stored(solver, tmp_path):
    data = np.random.default_rng(0).normal(size=(40, 1))
    model = KernelExpFamily(
        model="kernel",
        kernel=Kernel(lengthscale=1.0, rkhs_penalty=0.1, n_centres=8),
        solver=solver,
        random_state=0,
    ).fit(data)
    model.save(tmp_path / "model.kexpfam")
    back = kexpfam.load(tmp_path / "model.kexpfam")
    np.testing.assert_array_equal(back.score_samples(data), model.score_samples(data))
    np.testing.assert_array_equal(back.sample(20, random_state=0), model.sample(20, random_state=0))
    assert type(back.solver) is type(solver)


@pytest.mark.parametrize("solver", [CLASSICAL["annealed"], DDE(saddle=RandomIterate(DoublyDual()))])
def test_settings_can_be_stored(solver, tmp_path):
    save_tree(tmp_path / "solver.kexpfam", "solver", solver, {})
    assert eqx.tree_equal(load_tree(tmp_path / "solver.kexpfam")[1], solver)


@pytest.mark.parametrize(
    "wrong", [lambda: ContrastiveDivergence(steps=-1), lambda: AnnealedLikelihood(steps=-1)]
)
def test_a_negative_number_of_steps_is_refused(wrong):
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        wrong()


@pytest.mark.parametrize(
    "wrong", [lambda: Chains(count=0), lambda: Annealing(particles=0), lambda: MomentMatching(steps=0)]
)
def test_sizes_are_at_least_one(wrong):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        wrong()
