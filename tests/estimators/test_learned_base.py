"""The estimators with learned bases and stacks: everything a fitted model does, on small settings."""

import numpy as np
import pytest
from sklearn.base import clone

import kexpfam
from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily, StorageError
from kexpfam.fit.learned import Learned
from kexpfam.fit.stack import CandidateScore
from kexpfam.model.density import TiltedDensity
from kexpfam.model.ensemble import ChainDensity, LawDensity, Stack

SMALL = Learned(folds=2, repeats=1, width=12, epochs=25, cells=64, steps=300)


def rows_of(seed: int, count: int = 150) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2))
    return x, 5.0 + 3.0 * (np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=count))


@pytest.fixture(scope="module")
def learned() -> ConditionalKernelExpFamily:
    return ConditionalKernelExpFamily(model="chain", learned=SMALL, random_state=0).fit(*rows_of(0))


@pytest.fixture(scope="module")
def stacked(learned) -> ConditionalKernelExpFamily:
    """A kernel model and chains in fixed shares, so that everything meets both."""
    kernel = ConditionalKernelExpFamily(
        model="kernel",
        kernel=Kernel(
            condition_lengthscale=1.0, lengthscale=1.0, rkhs_penalty=0.01, base_width=1.0, power=False
        ),
        random_state=0,
    ).fit(*rows_of(0))
    kernel.candidates_ = [CandidateScore("kernel", 0.4, -1.0, 0.1), CandidateScore("chain", 0.6, -1.0, 0.1)]
    kernel.density_ = Stack(
        (kernel.density_, learned.density_), np.array([0.4, 0.6]), learned.density_.scaling
    )
    return kernel


@pytest.fixture(scope="module")
def joint() -> KernelExpFamily:
    x = np.random.default_rng(0).normal(size=(200, 4)) @ np.triu(np.ones((4, 4)))
    return KernelExpFamily(model="chain", learned=SMALL, random_state=0).fit(x)


@pytest.mark.parametrize("name", ["learned", "stacked"])
class TestConditional:
    def test_the_density_integrates_to_one(self, name, request):
        model, y = request.getfixturevalue(name), np.linspace(-40.0, 50.0, 4001)
        for row in rows_of(1, 3)[0]:
            density = np.exp(model.score_samples(np.tile(row, (len(y), 1)), y))
            assert np.trapezoid(density, y) == pytest.approx(1.0, abs=1e-3)

    def test_quantiles_invert_the_distribution_function(self, name, request):
        model, x = request.getfixturevalue(name), rows_of(1, 5)[0]
        quantiles = model.quantile(x, [0.1, 0.5, 0.9])
        for k, level in enumerate((0.1, 0.5, 0.9)):
            assert model.cdf(x, quantiles[:, k]) == pytest.approx(level, abs=1e-6)

    def test_the_distribution_function_is_the_integral_of_the_density(self, name, request):
        model, (x, y) = request.getfixturevalue(name), rows_of(1, 2)
        for row, end in zip(x, y, strict=True):
            t = np.linspace(-40.0, end, 4001)
            below = np.trapezoid(np.exp(model.score_samples(np.tile(row, (len(t), 1)), t)), t)
            assert model.cdf(row[None], [end])[0] == pytest.approx(below, abs=3e-3)

    def test_draws_have_the_predicted_mean(self, name, request):
        """Within 4 standard errors of 4,000 draws, at five conditions."""
        model, x = request.getfixturevalue(name), rows_of(1, 5)[0]
        draws = model.sample(x, 4000, random_state=0)
        error = draws.std(axis=1) / np.sqrt(4000)
        assert np.all(np.abs(draws.mean(axis=1) - model.predict(x)) < 4.0 * error + 0.01)

    def test_given_is_the_density_at_one_condition(self, name, request):
        model, (x, y) = request.getfixturevalue(name), rows_of(1, 4)
        given = model.given(x[0])
        assert given.score_samples(y) == pytest.approx(
            model.score_samples(np.tile(x[0], (4, 1)), y), abs=1e-9
        )
        assert given.sample(5, random_state=0).shape == (5,)

    def test_a_stored_model_says_the_same(self, name, request, tmp_path):
        model, (x, y) = request.getfixturevalue(name), rows_of(1, 4)
        model.save(tmp_path / "model")
        again = kexpfam.load(tmp_path / "model")
        assert np.array_equal(again.score_samples(x, y), model.score_samples(x, y))
        assert np.array_equal(again.sample(x, 3, random_state=0), model.sample(x, 3, random_state=0))
        assert again.candidates_ == model.candidates_ or np.isnan(model.candidates_[0].score)

    def test_the_diagnosis_speaks_of_every_part(self, name, request):
        model = request.getfixturevalue(name)
        report = str(model.diagnose(*rows_of(2, 60)))
        assert "verdict" in report
        assert "chain: KL(sampler || density)" in report
        assert ("kernel: duality gap" in report) == (name == "stacked")
        assert "coverage of intervals" in report

    def test_it_can_be_looked_at(self, name, request):
        panels = request.getfixturevalue(name).plot().axes
        assert panels and all(panel.has_data() for panel in panels)


def test_the_joint_density_is_normalised(joint):
    """By importance weights of draws of a wide normal law: one within 5 of their standard errors."""
    data, rng = joint.training_data_, np.random.default_rng(0)
    mean, covariance = data.mean(0), 2.0 * np.cov(data.T)
    points = rng.multivariate_normal(mean, covariance, size=40_000)
    centred = points - mean
    log_q = (
        -0.5 * np.sum(centred @ np.linalg.inv(covariance) * centred, 1)
        - 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
    )
    weights = np.exp(joint.score_samples(points) - log_q)
    assert abs(weights.mean() - 1.0) < 5.0 * weights.std() / np.sqrt(len(weights))


def test_the_joint_density_can_be_drawn_stored_and_judged(joint, tmp_path):
    assert joint.sample(7, random_state=0).shape == (7, 4)
    joint.save(tmp_path / "joint")
    again = kexpfam.load(tmp_path / "joint")
    points = joint.training_data_[:5]
    assert np.array_equal(again.score_samples(points), joint.score_samples(points))
    assert joint.diagnose().verdict in ("good", "fair", "poor")
    with pytest.raises(TypeError, match="single f"):
        joint.potential(points)


def test_draws_of_a_bounded_density_stay_inside_and_the_outside_has_no_density():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    y = np.clip(np.stack([rng.beta(0.7, 2.0, 200), rng.uniform(size=200)], 1), 0.0, 1.0)
    model = ConditionalKernelExpFamily(model="chain", bounds=(0.0, 1.0), learned=SMALL, random_state=0).fit(
        x, y
    )
    draws = model.sample(x, 50, random_state=0)
    assert draws.min() >= 0.0
    assert draws.max() <= 1.0
    assert model.score_samples(x[:1], [[0.5, 1.2]])[0] == -np.inf
    assert np.isfinite(model.score_samples(x, y)).all()


def test_several_targets_are_a_chain_given_the_inputs():
    x, y = rows_of(0)
    targets = np.stack([y, y**2], 1)
    model = ConditionalKernelExpFamily(learned=SMALL, random_state=0).fit(x, targets)
    assert isinstance(model.density_, ChainDensity)
    assert model.sample(x[:3], 4, random_state=0).shape == (3, 4, 2)
    assert model.predict(x[:3]).shape == (3, 2)
    with pytest.raises(ValueError, match="one dimension"):
        model.quantile(x[:3], 0.5)


def test_candidates_compete_on_held_out_rows():
    x, y = rows_of(0)
    model = ConditionalKernelExpFamily(learned=SMALL, random_state=0).fit(x, y)
    assert [one.name for one in model.candidates_] == ["kernel", "chain"]
    assert sum(one.weight for one in model.candidates_) == pytest.approx(1.0)
    parts = model.density_.parts if isinstance(model.density_, Stack) else (model.density_,)
    assert len(parts) == sum(one.weight > 0.0 for one in model.candidates_)
    assert (model.solution_ is not None) == any(isinstance(part, TiltedDensity) for part in parts)


def test_with_many_columns_a_mixture_competes_too_and_wins_on_normal_data():
    """A normal law: nothing beats one component by more than noise, so that the mixture has most of the
    density."""
    x = np.random.default_rng(0).normal(size=(300, 5))
    model = KernelExpFamily(learned=SMALL, random_state=0).fit(x)
    weights = {one.name: one.weight for one in model.candidates_}
    assert "mixture" in weights
    assert max(weights, key=weights.get) in ("mixture", "kernel")
    law = next(
        part
        for part in (getattr(model.density_, "parts", None) or (model.density_,))
        if isinstance(part, LawDensity | TiltedDensity)
    )
    assert np.isfinite(law.log_density(x)).all()


@pytest.mark.parametrize(
    "given", [{"kernel": Kernel(lengthscale=1.0)}, {"kernel": "laplace"}, {"solver": "exact"}]
)
def test_a_chain_has_no_kernel_settings(given):
    with pytest.raises(ValueError, match="settings of the kernel model"):
        ConditionalKernelExpFamily(model="chain", **given).fit(*rows_of(0))


def test_an_unknown_effort_is_refused():
    with pytest.raises(ValueError, match="effort"):
        ConditionalKernelExpFamily(effort="heroic").fit(*rows_of(0))


def test_few_rows_are_left_to_the_kernel():
    x, y = rows_of(0, 60)
    model = ConditionalKernelExpFamily(random_state=0).fit(x, y)
    assert isinstance(model.density_, TiltedDensity)


def test_chains_have_light_tails_in_columns_with_heavy_tails(tmp_path):
    rows = np.random.default_rng(0).normal(size=(120, 3))
    rows[:, 1] = np.sinh(3.0 * rows[:, 1])
    model = KernelExpFamily(model="chain", learned=Learned(folds=2, repeats=1, epochs=1), random_state=0).fit(
        rows
    )
    families = model.density_.members.columns.families
    assert {family.columns: family.light_tails for family in families} == {(0, 2): False, (1,): True}
    model.save(tmp_path / "model")
    assert np.array_equal(kexpfam.load(tmp_path / "model").score_samples(rows), model.score_samples(rows))


def test_a_checkpoint_of_a_chain_is_resumed_with_its_own_held_out_rows(tmp_path):
    X = np.random.default_rng(0).normal(size=(120, 3))
    model = KernelExpFamily(model="chain", learned=SMALL, checkpoint=tmp_path / "run")
    first = clone(model).fit(X)
    again = clone(model).set_params(random_state=0).fit(X)  # None is 0
    np.testing.assert_array_equal(first.score_samples(X), again.score_samples(X))
    assert first.candidates_ == again.candidates_
    with pytest.raises(StorageError, match="other data, settings or solver"):
        clone(model).set_params(random_state=1).fit(X)
