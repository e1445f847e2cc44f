"""Densities under one condition, of some columns, and the conditional estimators as regressors."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import is_regressor
from sklearn.compose import TransformedTargetRegressor
from sklearn.inspection import partial_dependence

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily
from kexpfam.estimators import ConditionalKernelDensity

ROWS = 200
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 2))
Y = np.exp(0.5 * X[:, 0] + 0.3 * RNG.normal(size=ROWS))
DRAWS = 8192


@pytest.fixture(scope="module")
def conditional():
    return ConditionalKernelDensity(random_state=0).fit(X, Y)


@pytest.fixture(scope="module")
def frame():
    cells = RNG.multivariate_normal(
        [1.0, 2.0, 0.0], [[1.0, 0.6, 0.0], [0.6, 2.0, 0.3], [0.0, 0.3, 1.0]], ROWS
    )
    return pd.DataFrame(cells, columns=["a", "b", "c"])


@pytest.fixture(scope="module")
def joint(frame):
    return KernelExpFamily(model="mixture", random_state=0).fit(frame)


class TestGiven:
    def test_it_agrees_with_the_estimator(self, conditional):
        given, row = conditional.given(X[0]), X[:1]
        np.testing.assert_allclose(given.quantile([0.1, 0.9]), conditional.quantile(row, [0.1, 0.9])[0])
        np.testing.assert_allclose(given.quantile(0.5), conditional.quantile(row, 0.5)[0])
        np.testing.assert_allclose(given.interval(0.8), conditional.interval(row, 0.8)[0])
        np.testing.assert_allclose(given.cdf([1.0, 2.0]), conditional.cdf(X[[0, 0]], [1.0, 2.0]))
        np.testing.assert_allclose(given.mean(), conditional.predict(row)[0])

    def test_it_prints_its_condition(self, conditional):
        text = repr(conditional.given([0.5, -1.0]))
        assert text == "<density of y given x0=0.5, x1=-1.0>"

    def test_draws_have_the_form_of_the_targets(self, conditional):
        assert isinstance(conditional.given(X[0]).sample(3, random_state=0), np.ndarray)
        target = pd.Series(Y, name="price")
        model = ConditionalKernelDensity(random_state=0).fit(pd.DataFrame(X, columns=["a", "b"]), target)
        draws = model.given({"a": 0.0, "b": 0.0}).sample(3, random_state=0)
        assert isinstance(draws, pd.Series)
        assert (draws.name, len(draws)) == ("price", 3)

    def test_levels_and_coverage_are_checked(self, conditional):
        with pytest.raises(ValueError, match="levels must be"):
            conditional.given(X[0]).quantile(1.5)
        with pytest.raises(ValueError, match="coverage must lie strictly between 0 and 1"):
            conditional.given(X[0]).interval(True)


class TestPartial:
    def test_moments_and_distribution_are_those_of_a_normal(self, joint, frame):
        """The base of these rows is one normal, whose conditionals are known."""
        covariance, means = np.cov(frame.to_numpy().T, ddof=0), frame.mean().to_numpy()
        mean = means[1] + covariance[1, 0] / covariance[0, 0] * (2.0 - means[0])
        deviation = np.sqrt(covariance[1, 1] - covariance[1, 0] ** 2 / covariance[0, 0])
        found = joint.given({"a": 2.0}).marginal(["b"])
        error = deviation / np.sqrt(DRAWS)
        assert found.mean()[0] == pytest.approx(mean, abs=4.0 * error)
        assert found.cdf([mean])[0] == pytest.approx(0.5, abs=4.0 * 0.5 / np.sqrt(DRAWS))
        # The density of a normal at its 5 % quantile is 0.103 / deviation.
        ends = found.interval(0.9)
        tolerance = 4.0 * np.sqrt(0.05 * 0.95 / DRAWS) / 0.103 * deviation
        np.testing.assert_allclose(ends, mean + np.array([-1.645, 1.645]) * deviation, atol=tolerance)
        assert list(found.cdf([-1e9, 1e9])) == [0.0, 1.0]

    def test_draws_are_frames_where_the_training_data_were(self, joint):
        draws = joint.marginal(["c", "a"]).sample(4, random_state=0)
        assert list(draws.columns) == ["c", "a"]
        assert list(joint.given({"b": 1.0}).sample(4, random_state=0).columns) == ["a", "c"]
        array = joint.set_output(transform="numpy").marginal(["c"]).sample(4, random_state=0)
        joint.set_output(transform="default")
        assert isinstance(array, np.ndarray)

    def test_it_prints_what_it_is_of(self, joint):
        assert repr(joint.marginal(["a", "b"])) == "<density of a, b>"
        assert repr(joint.given({"a": 2.0})).startswith("<density of b, c given a=2.")

    @pytest.mark.parametrize("columns", [[], ["a", "a"], ["b", 1]], ids=repr)
    def test_no_column_and_a_repeated_one_are_refused(self, joint, columns):
        with pytest.raises(ValueError, match="name one or more different columns; got"):
            joint.marginal(columns)
        with pytest.raises(ValueError, match="name one or more different columns; got"):
            joint.given({"c": 0.0}).marginal(columns)

    @pytest.mark.parametrize("column", [True, None, 1.5, -1], ids=repr)
    def test_what_is_no_column_is_refused(self, joint, column):
        with pytest.raises(ValueError, match="there is no column"):
            joint.marginal(column)

    def test_a_numpy_integer_is_a_position(self, joint):
        assert joint.marginal(np.int64(1)).names == ["b"]

    def test_a_column_given_twice_is_refused(self, joint):
        with pytest.raises(ValueError, match="given twice"):
            joint.given({"a": 1.0, 0: 2.0})

    def test_rows_must_have_its_columns(self, joint, frame):
        part = joint.marginal(["c", "a"])
        expected = part.score_samples(frame[["c", "a"]].to_numpy()[:3])
        np.testing.assert_array_equal(part.score_samples(frame[:3]), expected)
        np.testing.assert_array_equal(part.score_samples(pl.from_pandas(frame[:3])), expected)
        for rows in (np.zeros((4, 3)), np.zeros(4), np.zeros((2, 1))):
            with pytest.raises(ValueError, match="the density is of c, a"):
                part.score_samples(rows)
        with pytest.raises(ValueError, match="X has no column 'c'"):
            part.score_samples(frame[["a", "b"]])
        with pytest.raises(ValueError, match="contain NaN"):
            joint.marginal(["a"]).cdf([np.nan])

    def test_a_frame_is_read_by_position_where_the_model_has_no_names(self, frame):
        part = KernelExpFamily(model="mixture", random_state=0).fit(frame.to_numpy()).marginal([0])
        cells = frame[["b"]][:3]
        np.testing.assert_array_equal(part.score_samples(cells), part.score_samples(cells.to_numpy()))


def test_values_beyond_the_bounds_have_no_conditional():
    ends = X.min(axis=0) - 1.0, X.max(axis=0) + 1.0
    kernel = Kernel(lengthscale=1.0, rkhs_penalty=1e-2)
    model = KernelExpFamily(kernel=kernel, bounds=ends, random_state=0).fit(X)
    beyond = float(ends[1][0]) + 1.0
    assert model.marginal([0]).score_samples([[beyond]])[0] == -np.inf
    with pytest.raises(ValueError, match="density 0"):
        model.given({0: beyond})
    with pytest.raises(ValueError, match="row 1 have density 0"):
        model.impute([[0.0, np.nan], [beyond, np.nan]])
    found = model.explain([[beyond, 0.0], [0.0, 0.0]]).frame().to_pandas()
    assert found.surprise[0] == np.inf
    assert np.all(np.isfinite(found.surprise[1:]))
    assert np.all(found.lower < found.upper)


class TestRegressor:
    def test_the_conditional_estimators_are_regressors(self, conditional):
        assert is_regressor(conditional)
        assert is_regressor(ConditionalKernelExpFamily())
        assert not is_regressor(KernelExpFamily())

    def test_targets_can_be_transformed(self):
        model = TransformedTargetRegressor(
            ConditionalKernelDensity(random_state=0), func=np.log, inverse_func=np.exp
        )
        plain = ConditionalKernelDensity(random_state=0).fit(X, np.log(Y))
        np.testing.assert_allclose(model.fit(X, Y).predict(X[:5]), np.exp(plain.predict(X[:5])))

    def test_targets_can_be_transformed_beside_a_frame(self):
        cells = pd.DataFrame(X, columns=["a", "b"])
        found = TransformedTargetRegressor(
            ConditionalKernelDensity(random_state=0), func=np.log, inverse_func=np.exp
        ).fit(cells, pd.Series(Y))
        plain = ConditionalKernelDensity(random_state=0).fit(X, np.log(Y))
        np.testing.assert_allclose(found.predict(cells[:5]), np.exp(plain.predict(X[:5])))

    def test_partial_dependence(self, conditional):
        found = partial_dependence(conditional, X[:20], [0], grid_resolution=4)["average"]
        assert np.all(np.diff(found[0]) > 0.0)


def test_a_numpy_generator_is_a_random_state(conditional):
    draws = [conditional.sample(X[:2], 3, random_state=np.random.default_rng(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.any(draws[0] == draws[2])
    generator = np.random.default_rng(0)
    first = conditional.sample(X[:2], 3, random_state=generator)
    assert not np.any(first == conditional.sample(X[:2], 3, random_state=generator))
