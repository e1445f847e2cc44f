import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.optimize
from oracles import changed

from kexpfam import Kernel, KernelExpFamily
from kexpfam.data.sample import Sample
from kexpfam.datasets import two_moons
from kexpfam.fit import convex
from kexpfam.fit.loop import run
from kexpfam.fit.problem import Status
from kexpfam.fit.saddle import SaddleProblem
from kexpfam.model import kernels
from kexpfam.model.measures import Gaussian, Mixture
from kexpfam.model.spaces import FeatureSpace
from kexpfam.paper import MMDGAN
from kexpfam.paper.duals import MixtureDual, PathwiseDraws
from kexpfam.paper.mmd_gan import Deep, Players, Scaled, _own_pairs, regularised_mmd
from kexpfam.paper.singly_dual import singly_dual_terms

SETTINGS = {"model": "kernel", "kernel": Kernel(lengthscale=0.6, rkhs_penalty=1e-3), "random_state": 0}
PENALTY = 0.02
KERNEL = kernels.Gaussian(0.7)


class Discrete:
    """The whole problem on 41 nodes of the line, where every expectation is a finite sum."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.nodes = np.linspace(-4.0, 4.0, 41)[:, None]
        data = np.where(rng.uniform(size=30) < 0.5, rng.normal(-1.2, 0.3, 30), rng.normal(1.0, 0.5, 30))[
            :, None
        ]
        base, sample = Gaussian(jnp.zeros(1), jnp.eye(1)), Sample.unconditional(data)
        # f's best lies in the span of data *and* nodes: both are centres.
        space = FeatureSpace.of_kernels(
            KERNEL, KERNEL, Sample.unconditional(np.concatenate([self.nodes, data]))
        )
        self.problem = SaddleProblem(
            sample, base, space, base, jnp.asarray(PENALTY), jnp.asarray(1.0), anchored=False
        )
        self.log_base = np.asarray(jax.nn.log_softmax(jnp.asarray(base.log_densities(self.nodes))))
        self.features, self.mean = space.target.matrix(self.nodes), space.target.matrix(data).mean(0)
        self.likelihood = convex.Likelihood.unconditional(self.mean, self.features, self.log_base)
        self.optimum = convex.maximise(self.likelihood, PENALTY, np.zeros(space.size))
        self.dual = jax.jit(
            lambda masses: regularised_mmd(self.problem, KERNEL, self.draws(masses), self.draws(masses)).value
        )

    def draws(self, masses):
        """Return the measure with these masses, and a density relative to the base's, as on a grid."""
        log_base = jax.vmap(self.problem.base.log_density)(jnp.asarray(self.nodes))
        return PathwiseDraws(jnp.asarray(self.nodes), masses, jnp.log(masses) - self.log_base + log_base)

    def density(self, weights):
        exponents = self.log_base + self.features @ weights
        return np.exp(exponents - np.logaddexp.reduce(exponents))


@pytest.fixture(scope="module")
def discrete():
    return Discrete()


@pytest.fixture(scope="module")
def random_masses():
    return np.random.default_rng(1).dirichlet(np.full(41, 0.5), 6) * 0.999 + 0.001 / 41


def test_the_least_regularised_mmd_is_the_largest_penalised_likelihood(discrete):
    value = jax.jit(jax.value_and_grad(lambda logits: discrete.dual(jax.nn.softmax(logits))))
    result = scipy.optimize.minimize(
        value, discrete.log_base, jac=True, method="L-BFGS-B", options={"maxiter": 2000}
    )
    assert result.fun == pytest.approx(discrete.optimum.value, abs=1e-5)
    masses = np.asarray(jax.nn.softmax(result.x))
    np.testing.assert_allclose(masses, discrete.density(discrete.optimum.weights), atol=1e-3)
    # The witness of that q is the f of the likelihood.
    witness = (discrete.mean - masses @ discrete.features) / PENALTY
    np.testing.assert_allclose(
        discrete.features @ witness, discrete.features @ discrete.optimum.weights, atol=2e-2
    )


def test_at_the_exact_density_the_dual_has_the_primal_value(discrete, random_masses):
    exact = discrete.density(discrete.optimum.weights)
    assert float(discrete.dual(exact)) == pytest.approx(discrete.optimum.value, abs=1e-6)
    assert all(float(discrete.dual(masses)) > discrete.optimum.value + 1e-3 for masses in random_masses)


def test_the_dual_is_convex_in_the_masses(discrete, random_masses):
    for a, b in zip(random_masses[:3], random_masses[3:], strict=True):
        middle = float(discrete.dual(0.5 * (a + b)))
        assert middle < 0.5 * float(discrete.dual(a)) + 0.5 * float(discrete.dual(b)) - 1e-6


def test_the_witness_is_the_best_f_and_the_mmd_its_value(discrete, random_masses):
    terms = jax.jit(
        lambda f, masses: singly_dual_terms(
            f, discrete.problem, jnp.asarray(discrete.mean), discrete.draws(masses)
        )
    )
    for masses in random_masses[:3]:
        witness = (discrete.mean - masses @ discrete.features) / PENALTY
        best = float(terms(witness, masses).value)
        assert best == pytest.approx(float(discrete.dual(masses)), abs=1e-5)
        assert float(terms(1.1 * witness, masses).value) < best


def test_the_saddle_value_exceeds_the_likelihood_by_the_divergence_of_q_and_p_f(discrete, random_masses):
    weights, mean = 0.5 * discrete.optimum.weights, jnp.asarray(discrete.mean)
    likelihood = convex.maximise(discrete.likelihood, PENALTY, weights, most=0).value
    p = discrete.density(weights)
    for masses in random_masses[:3]:
        saddle = singly_dual_terms(jnp.asarray(weights), discrete.problem, mean, discrete.draws(masses)).value
        assert float(saddle) - likelihood == pytest.approx(masses @ np.log(masses / p), abs=1e-8)


def test_two_sets_of_draws_estimate_the_mmd_without_bias(discrete):
    mean, scale, length = 0.3, 0.8, 0.7
    dual = MixtureDual.of(Mixture.of(jnp.zeros(1), jnp.full((1, 1), mean), jnp.full((1, 1, 1), scale)))
    data = np.asarray(discrete.problem.sample.target)[:, 0]
    smooth = lambda gap, added: (
        np.sqrt(length**2 / (length**2 + added)) * np.exp(-0.5 * gap**2 / (length**2 + added))
    )
    squared = np.exp(-0.5 * (data[:, None] - data) ** 2 / length**2).mean()
    squared += smooth(0.0, 2 * scale**2) - 2 * smooth(data - mean, scale**2).mean()
    estimate = jax.jit(
        lambda k: (
            regularised_mmd(
                discrete.problem, KERNEL, *[dual.pathwise_draws(64, key=h) for h in jr.split(k)]
            ).mmd
        )
    )
    values = np.array([float(estimate(key)) for key in jr.split(jr.key(0), 400)])
    assert abs(values.mean() - 0.5 * squared / PENALTY) < 5 * values.std() / np.sqrt(400)


@eqx.filter_jit
def values(problem, dual, kernel):
    """Return a kernel's discrepancy of distinct points, and the regularised MMD, on fixed noise."""
    draws = [dual.pathwise_draws(2000, key=key) for key in jr.split(jr.key(5))]
    terms = regularised_mmd(problem, kernel, *draws)
    return terms.mmd - _own_pairs(problem, kernel), terms.value


def test_own_pairs_are_what_the_biased_estimate_has_more(discrete):
    gram = np.asarray(KERNEL.gram(discrete.problem.sample.target, discrete.problem.sample.target))
    distinct = (gram.sum() - np.trace(gram)) / (30 * 29)
    assert float(_own_pairs(discrete.problem, KERNEL)) == pytest.approx(
        0.5 * (gram.mean() - distinct) / PENALTY
    )


def test_the_kernel_climbs_and_the_dual_falls(discrete):
    dual = MixtureDual.of(Mixture.of(jnp.zeros(1), jnp.zeros((1, 1)), jnp.ones((1, 1, 1))))
    start = Scaled(KERNEL, jnp.zeros(1))
    for rates, player in {(0.0, 1e-2): "kernel", (1e-2, 0.0): "dual"}.items():
        solver = MMDGAN(learn="lengthscales", steps=100, rate=rates[0], kernel_rate=rates[1], batch_size=1024)
        state = solver.init(Players(dual, start))
        players = run(
            discrete.problem, solver, state, steps=20, chunk=20, key=jr.key(1), stage="steps"
        ).state.players
        before, after = (
            values(discrete.problem, dual, start),
            values(discrete.problem, players.dual, players.kernel),
        )
        assert (
            float(after[0]) > float(before[0]) if player == "kernel" else float(after[1]) < float(before[1])
        )
        assert eqx.tree_equal(players.dual, dual) == (player == "kernel")
        assert eqx.tree_equal(players.kernel, start) == (player == "dual")


def test_learned_kernels_start_as_the_kernel_itself():
    points = np.random.default_rng(0).normal(size=(7, 2))
    gram = eqx.filter_jit(lambda kernel: kernel.gram(jnp.asarray(points), jnp.asarray(points)))
    plain = gram(KERNEL)
    for kernel in (Scaled(KERNEL, jnp.zeros(2)), Deep.draw(KERNEL, 2, key=jr.key(0))):
        np.testing.assert_allclose(gram(kernel), plain, atol=1e-6)
        assert float(kernel(points[0], points[1])) == pytest.approx(float(plain[0, 1]), abs=1e-6)


@pytest.fixture(scope="module")
def exact(moons):
    return KernelExpFamily(solver="exact", **SETTINGS).fit(moons)


@pytest.mark.slow
@pytest.mark.parametrize("learn", ["lengthscales", "deep"])
def test_a_fit_with_a_learned_kernel_is_near_the_exact_density(learn, moons, exact):
    solver = MMDGAN(learn=learn, steps=25, batch_size=256, polish=True)
    model = KernelExpFamily(solver=solver, **SETTINGS).fit(moons)
    assert model.solution_.status is Status.CONVERGED
    assert model.score(moons) == pytest.approx(exact.score(moons), abs=0.1)
    assert not eqx.tree_equal(model.solution_.tilt.space, model._problem.space)


def test_bad_settings_say_what_is_good():
    with pytest.raises(ValueError, match=r"nothing, lengthscales, deep; got 'everything'"):
        MMDGAN(learn="everything")
    with pytest.raises(ValueError, match=r"use SinglyDual\(family='dynamics'\)"):
        MMDGAN(family="dynamics")
    with pytest.raises(ValueError, match=r"leave space at 'nystrom' or 'full'"):
        KernelExpFamily(solver="mmd_gan", **changed(SETTINGS, space="random_features")).fit(
            two_moons().sample(50, random_state=0)
        )
