"""What is measured about the saddle point itself, against closed forms."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kexpfam.data.sample import Sample
from kexpfam.fit.dde import DDE, saddle_problem
from kexpfam.fit.problem import Problem
from kexpfam.fit.saddle import DoublyDual, draw_batch
from kexpfam.model.measures import Gaussian, Mixture
from kexpfam.model.networks import AbstractTransport
from kexpfam.model.spaces import Constant, FeatureSpace, RandomFeatures
from reproduction import saddle_tables
from reproduction.measurements import roads
from reproduction.measurements.reach import near_pairs, score_matched, told_apart
from reproduction.measurements.stationarity import LENGTHSCALE, _problem, dual_objective, squared_gradient
from reproduction.measurements.synthetic import TEST_ROWS, synthetic
from reproduction.methods import with_solver

CELL = {"dataset": "two-moons", "rows": 100, "seed": 0}


class Stretched(AbstractTransport):
    """Noise times a factor: q is the base stretched, and both terms of the dual objective are known."""

    factor: jax.Array

    def __call__(self, noise, condition):
        return self.factor * noise


def stretched_objective(problem, factor):
    """Return the dual objective by closed-form normal integrals of the Gaussian kernel."""
    covariance, mean = (
        np.asarray(problem.base.cholesky @ problem.base.cholesky.T),
        np.asarray(problem.base.mean),
    )
    dim, rows = len(mean), np.asarray(problem.sample.target)

    def smoothed(points, spread):
        total = LENGTHSCALE**2 * np.eye(dim) + spread
        away = points - factor * mean
        exponents = -0.5 * np.einsum("ni,ij,nj->n", away, np.linalg.inv(total), away)
        return LENGTHSCALE**dim / np.sqrt(np.linalg.det(total)) * np.exp(exponents)

    span = problem.space.target
    centres, whitening = np.asarray(span.centres), np.asarray(span.whitening)
    data = span.matrix(rows).mean(0)
    model = smoothed(centres, factor**2 * covariance) @ whitening
    kl = 0.5 * dim * (factor**2 - 1.0 - 2.0 * np.log(factor))
    kl += 0.5 * (factor - 1.0) ** 2 * mean @ np.linalg.solve(covariance, mean)
    return np.sum((data - model) ** 2) / (2.0 * float(problem.rkhs_penalty)) + kl


@pytest.mark.parametrize("factor", [1.0, 0.8])
def test_the_dual_objective_of_a_stretched_base_is_its_closed_form(factor):
    with jax.enable_x64(True):
        problem = _problem(CELL)
        estimate = eqx.filter_jit(
            lambda key: dual_objective(problem, Stretched(jnp.asarray(factor)), key=key)
        )
        found = np.array([estimate(key) for key in jr.split(jr.key(0), 40)])
    error = found.std(ddof=1) / np.sqrt(len(found))
    assert abs(found.mean() - stretched_objective(problem, factor)) < 4.0 * error and error < 0.05


def test_the_squared_gradient_of_a_stretched_base_is_that_of_the_closed_form():
    with jax.enable_x64(True):
        problem = _problem(CELL)
        keys = jr.split(jr.key(1), 10)
        found = np.array([squared_gradient(problem, Stretched(jnp.asarray(0.8)), key=key) for key in keys])
    slope = (stretched_objective(problem, 0.8 + 1e-5) - stretched_objective(problem, 0.8 - 1e-5)) / 2e-5
    assert abs(found.mean() - slope**2) < 4.0 * found.std(ddof=1) / np.sqrt(len(found))


def test_score_matching_minimises_its_loss():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 4)) * np.array([1.0, 0.5, 1.0, 2.0])
    base, space = (
        Gaussian.fitted(rows, width=1.5),
        FeatureSpace(Constant(), RandomFeatures(near_pairs(4, seed=0)[:20])),
    )
    problem = Problem(Sample.unconditional(rows), base, space, 1e-2, base)
    with jax.enable_x64(True):
        tilt, sampler, *_ = score_matched(problem, jr.key(0))

        def loss(weights):
            f = lambda x: space.target.evaluate(weights, x[None])[0]
            each = lambda x: (
                0.5 * jnp.sum(jax.grad(f)(x) ** 2)
                + jnp.trace(jax.hessian(f)(x))
                + jax.grad(f)(x) @ jax.grad(base.log_density)(x)
            )
            return jnp.mean(jax.vmap(each)(jnp.asarray(rows))) + 0.5e-2 * weights @ weights

        gradient = np.asarray(jax.grad(loss)(jnp.asarray(tilt.weights)))
    assert sampler is None and np.abs(tilt.weights).max() > 0.1
    np.testing.assert_allclose(gradient, 0.0, atol=1e-8)


@pytest.fixture
def two_columns(monkeypatch):
    """A problem with two columns, and small mixtures and chains."""
    monkeypatch.setattr(roads, "FITTED", 200)
    monkeypatch.setattr(roads, "COMPONENTS", 2)
    rows = np.random.default_rng(0).normal(size=(100, 2))
    space = FeatureSpace(Constant(), RandomFeatures(near_pairs(2, seed=0)[:10]))
    base = Gaussian.fitted(rows)
    return Problem(Sample.unconditional(rows), base, space, 1e-2, base)


@pytest.mark.parametrize("law", ["narrow", "wide"])
def test_the_saddle_function_is_the_same_from_every_law_of_nu(two_columns, law):
    """E_p0[exp nu] by draws of another law is that by draws of the base, for the same nu."""
    base = two_columns.base
    near = Gaussian(base.mean, {"narrow": 0.5, "wide": 1.5}[law] * base.cholesky)
    with jax.enable_x64(True):
        posed = saddle_problem(two_columns, base, two_columns.space)
        followed = roads._following(posed, roads.Defensive(base, near))
        means = []
        for one in (posed, followed):
            batch = draw_batch(one, 20_000, key=jr.key(0))
            # A fixed nu in both: its anchor is a part of the weights.
            means.append(jnp.mean(jnp.exp(0.5 * batch.base[:, 0] + batch.base_log_weights)))
    np.testing.assert_allclose(means[1], means[0], rtol=0.05)


@pytest.mark.parametrize("persistent", [None, False, True])
def test_a_run_goes_on_after_its_reference_has_moved(two_columns, persistent):
    small = {"width": 4, "batch_size": 16, "horizon": 4.0}
    players = DoublyDual(**small)
    if persistent is not None:
        players = roads.Chained(**small, chains=512, moves=1, persistent=persistent)
    course = roads.follow(two_columns, jr.key(0), players, steps=4, refits=(2,))
    assert course.status == "RAN_ALL_STEPS" and len(course.kl_dual) == 4 and len(course.path) == 2
    assert np.all(np.isfinite(course.tilt.weights)) and np.any(course.tilt.weights)
    # Chains give the sampler its noise; otherwise only nu is measured from the mixture.
    assert isinstance(course.sampler.reference, Gaussian if persistent is None else Mixture)


def test_every_frequency_is_of_two_near_columns():
    active = near_pairs(7, seed=0) != 0.0
    assert np.all(active.sum(1) == 2)
    apart = {tuple(np.flatnonzero(row)) for row in active}
    assert apart == {(i, j) for i in range(7) for j in range(i + 1, 7) if j - i <= 2}


def test_a_network_tells_other_draws_apart_and_not_the_same():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(600, 3))
    # Of 600 guesses, half are right up to 0.02.
    assert abs(told_apart(rows, rng.normal(size=(600, 3))) - 0.5) < 0.08
    assert told_apart(rows, rng.normal(3.0, 1.0, size=(600, 3))) > 0.9


def reached(**values):
    values = {
        "nll": 3.0,
        "nll_error": 0.1,
        "truth_nll": 2.0,
        "fisher_divergence": 1.0,
        "status": "CONVERGED",
    } | values
    values = {"log_partition": 1.0, "log_partition_error": 0.1, "log_partition_by_truth": 0.9} | values
    return {"cell": {"base": "gaussian", "method": "saddle point"}, "status": "ok", "values": values}


def test_a_likelihood_whose_normaliser_is_doubtful_is_a_dash():
    assert "+1.00 ± 0.10" in saddle_tables.reach([reached()])
    assert "+1.00" not in saddle_tables.reach([reached(log_partition_error=1.0)])
    assert "+1.00" not in saddle_tables.reach([reached(log_partition_by_truth=2.0)])


def test_the_tables_of_the_saddle_point_show_the_worst_gap_and_the_slope():
    values = {"nll": 2.0, "mmd": 1e-3, "processor_seconds": 50.0}
    cell = {"space": "matern52", "dataset": "two-moons"}
    records = [
        {"cell": cell | {"method": method, "seed": seed}, "status": "ok", "values": values | {"nll": nll}}
        for method, seed, nll in (("exact", 0, 2.0), ("exact", 1, 2.0), ("dde", 0, 2.01), ("dde", 1, 2.03))
    ]
    assert "+0.030" in saddle_tables.spaces(records)
    records = [
        {
            "cell": {"method": "dde", "steps": steps},
            "status": "ok",
            "values": {"squared_gradient": 1.0 / steps, "folding_share": 0.0},
        }
        for steps in (10, 100, 1000)
    ]
    assert "-1.00 ± 0.00" in saddle_tables.stationarity(records)


def test_where_the_saddle_point_stands_is_its_worst_draw():
    fine = {"truth_nll": 1.0, "status": "CONVERGED", "processor_seconds": 40.0}
    cell = {"dataset": "rings", "dim": 2}
    draws = [("exact", 0, 2.0, 1e-3, None), ("exact", 1, 2.0, 1e-3, None)]
    draws += [
        ("dde", 0, 2.01, 1.2e-3, [1 / 9, 3 / 9, 5 / 9]),
        ("dde", 1, 2.03, 1.5e-3, [0.8 / 9, 3.2 / 9, 5 / 9]),
    ]
    samples = [
        {
            "cell": cell | {"method": method, "seed": seed},
            "status": "ok",
            "values": fine | {"nll": nll, "mmd_resolved": mmd} | ({"shares": shares} if shares else {}),
        }
        for method, seed, nll, mmd, shares in draws
    ]
    halves = [
        {
            "cell": {"dataset": name, "method": method, "seed": 0},
            "status": "ok",
            "values": {"nll": nll, "sampler_ks_p_value": p, "processor_seconds": 60.0},
        }
        for name, method, nll, p in (
            *(("near", "exact", 1.0, 0.5), ("near", "dde", 1.01, 0.5)),
            *(("far", "exact", 1.0, 0.5), ("far", "dde", 1.2, 0.001)),
        )
    ]
    table = saddle_tables.standing({"table1": samples, "table2": halves})
    assert "| rings, 2-D | 2 | +0.030 | +0.50 | 20% | 2 of 2 | 40 |" in table
    assert "| 2 | 1 | far +0.20 | 1 | far (0.001) | 60 |" in table


def test_the_time_of_arrival_is_shown_beside_the_whole_fit_s():
    values = {"level": 0.02, "processor_seconds": 50.0, "last_gap": 0.001}
    record = {"cell": {"dataset": "two-moons", "seed": 0}, "status": "ok"}
    arrived = record | {"values": values | {"step": 400, "arrival_processor_seconds": 30.0}}
    assert "| two-moons | 0 | 0.02 | 400 | 30 | 50 | +0.001 |" in saddle_tables.arrival([arrived])
    assert "| two-moons | 0 | 0.02 | – | – | 50 | +0.001 |" in saddle_tables.arrival(
        [record | {"values": values}]
    )


@pytest.mark.slow
def test_the_last_look_is_the_fit_itself(monkeypatch):
    module = importlib.import_module("reproduction.measurements.arrival")
    monkeypatch.setattr(module, "DDE", lambda: DDE(steps=50))
    found = module.arrival({"dataset": "two-moons", "rows": 120, "seed": 0})
    assert list(found["gaps"]) == ["25", "50"] and "step" not in found
    train = synthetic("two-moons", 2).sample(120, random_state=0)
    test = synthetic("two-moons", 2).sample(TEST_ROWS["two-moons"], random_state=1000)
    model = with_solver(DDE(steps=50), 0).fit(train)
    assert found["last_gap"] + found["exact_nll"] == pytest.approx(
        -model.score_samples(test).mean(), abs=1e-3
    )
