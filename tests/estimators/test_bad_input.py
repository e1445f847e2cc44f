"""What a new user gets wrong, one by one: each ends in one line that says what, or in the right answer."""

import re
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import scipy.stats
from oracles import changed

from kexpfam import (
    ColumnKindWarning,
    ConditionalKernelExpFamily,
    Integration,
    Judgement,
    Kernel,
    KernelExpFamily,
    Search,
)
from kexpfam.data.columns import CollinearWarning, TiesWarning, check_columns, check_targets
from kexpfam.estimators import (
    ConditionalKernelDensity,
    GaussianMixtureDensity,
    KernelDensity,
    LeastSquaresConditional,
    NeighbourDensity,
)
from kexpfam.fit.dde import DDE, SaddleSolver
from kexpfam.judge.pit import pit_measurements
from kexpfam.settings import SettingsRecord

ROWS = 60
RNG = np.random.default_rng(0)
Z = RNG.normal(size=(ROWS, 2))
Y = Z[:, 0] + 0.5 * RNG.normal(size=ROWS)
FIXED = {
    "model": "kernel",
    "kernel": Kernel(lengthscale=1.0, rkhs_penalty=0.01, n_centres=20),
    "random_state": 0,
}


@pytest.fixture(scope="module")
def model():
    return KernelExpFamily(**FIXED).fit(Z)


@pytest.fixture(scope="module")
def conditionals():
    kernel = ConditionalKernelExpFamily(
        **changed(FIXED, condition_lengthscale=1.0, base_width=1.0, power=False)
    ).fit(Z, Y)
    others = [ConditionalKernelDensity(random_state=0), NeighbourDensity(), LeastSquaresConditional()]
    return [kernel, *(estimator.fit(Z, Y) for estimator in others)]


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


class TestSpread:
    @pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-160, 1e160, 1e200, 1e308])
    def test_one_that_overflows_or_underflows_is_named(self, scale):
        frame = pd.DataFrame(np.clip(Z, -1.0, 1.0) * [1.0, scale], columns=["fine", "extreme"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of scikit-learn's own check
            with pytest.raises(
                ValueError, match=r"the spread of column\(s\) extreme is beyond double precision"
            ):
                GaussianMixtureDensity().fit(frame)

    def test_units_are_no_matter_up_to_there(self):
        plain = GaussianMixtureDensity(random_state=0).fit(Z).score_samples(Z)
        extreme = (
            GaussianMixtureDensity(random_state=0).fit(Z * [1e-140, 1e140]).score_samples(Z * [1e-140, 1e140])
        )
        np.testing.assert_allclose(extreme, plain, atol=1e-8)

    @pytest.mark.parametrize(
        "estimator",
        [KernelExpFamily(**changed(FIXED, n_centres=ROWS)), GaussianMixtureDensity(random_state=0)],
    )
    def test_a_large_offset_is_not_a_constant(self, estimator):
        offset = (1e9 + 1e-3 * Z) - 1e9  # what is left of the numbers after their rounding
        plain, far = (
            estimator.fit(offset).score_samples(offset),
            estimator.fit(1e9 + offset).score_samples(1e9 + offset),
        )
        np.testing.assert_allclose(far, plain, atol=1e-3)
        assert np.all(np.abs(estimator.sample(100, random_state=0) - 1e9) < 0.1)

    @pytest.mark.parametrize("constant", [0.0, 3.0, 1e9, 1e-300])
    def test_a_constant_is_one_up_to_rounding(self, constant):
        noise = 1.0 + 4e-16 * RNG.integers(-3, 4, size=ROWS)
        with pytest.raises(ValueError, match=r"constant column\(s\) 1: a constant has no density"):
            check_columns(np.column_stack([Z[:, 0], constant * noise]), None)


class TestCollinear:
    def test_columns_are_named(self):
        frame = pd.DataFrame({"a": Z[:, 0], "b": Z[:, 1], "alone": Y, "sum": Z[:, 0] + 2.0 * Z[:, 1] - 7.0})
        with pytest.raises(
            ValueError, match=r"column\(s\) a, b, sum are collinear and have no joint density"
        ):
            GaussianMixtureDensity().fit(frame)

    def test_targets_are_named(self):
        frame = pd.DataFrame({"metres": Y, "feet": 3.28 * Y})
        with pytest.raises(ValueError, match=r"target column\(s\) metres, feet are collinear"):
            ConditionalKernelDensity().fit(Z, frame)

    def test_rounding_of_short_decimals_is_a_warning(self):
        rows = np.column_stack([Z, np.round(Z.sum(axis=1), 7)])
        with pytest.warns(
            CollinearWarning, match=r"column\(s\) left, right, sum are collinear up to rounding"
        ):
            check_columns(rows, ["left", "right", "sum"])

    @pytest.mark.parametrize("noise", [1e-5, 1e-2, 1.0])
    def test_correlated_columns_are_fine(self, noise):
        check_columns(np.column_stack([Z[:, 0], Z[:, 0] + noise * Z[:, 1]]), None)

    def test_few_rows_of_many_columns_are_not_called_collinear(self):
        check_columns(RNG.normal(size=(10, 12)), None)

    def test_inputs_may_be(self):
        check_targets(np.column_stack([Z, Z[:, 0]]), Y[:, None], None)


FAR = (1e155, -1e160, 1e300, 1e308, -1.7e308)


class TestPoints:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_no_number_is_an_error(self, model, conditionals, bad):
        with pytest.raises(ValueError, match="NaN|infinity"):
            GaussianMixtureDensity(random_state=0).fit(Z).score_samples([[0.0, bad]])
        for conditional in conditionals:
            for score in (
                conditional.given(Z[0]).score_samples,
                lambda y, c=conditional: c.score_samples(Z[:1], y),
            ):
                with pytest.raises(ValueError, match="NaN|infinity"):
                    score([bad])
            with pytest.raises(ValueError, match="NaN|infinity"):
                conditional.given([0.0, bad]).score_samples([0.0])

    @pytest.mark.parametrize("far", FAR)
    def test_a_huge_point_has_density_zero_and_others_keep_theirs(self, model, far):
        for density in (
            model,
            GaussianMixtureDensity(random_state=0).fit(Z),
            KernelDensity(random_state=0).fit(Z),
        ):
            found = density.score_samples([[far, 0.0], [0.0, 0.0], [0.0, far], [far, far]])
            np.testing.assert_allclose(
                found, [-np.inf, density.score_samples([[0.0, 0.0]])[0], -np.inf, -np.inf]
            )

    def test_a_far_point_has_the_tail_that_it_should(self, model):
        """The tail is the Gaussian base's: the log density falls with the square of the distance."""
        near, far = model.score_samples([[1e6, 0.0], [1e7, 0.0]])
        assert far / near == pytest.approx(100.0, rel=1e-4)

    @pytest.mark.parametrize("far", FAR)
    def test_a_huge_target_has_density_zero(self, conditionals, far):
        for conditional in conditionals:
            assert conditional.score_samples(Z[:2], [far, 0.0])[0] == -np.inf
            np.testing.assert_array_equal(
                np.isfinite(conditional.given(Z[0]).score_samples([far, 0.0])), [False, True]
            )
            assert conditional.cdf(Z[:1], [far])[0] == pytest.approx(float(far > 0.0), abs=1e-12)

    @pytest.mark.parametrize("far", FAR)
    def test_a_huge_condition_has_a_density_all_the_same(self, conditionals, far):
        for conditional in conditionals:
            assert np.all(np.isfinite(conditional.score_samples([[far, 0.0], [0.0, far]], [0.0, 0.0])))
            assert np.all(np.isfinite(conditional.predict([[far, 0.0]])))
            assert np.all(np.isfinite(conditional.sample([[far, 0.0]], 3, random_state=0)))

    def test_targets_of_another_width_are_refused(self, conditionals):
        for conditional in conditionals:
            with pytest.raises(ValueError, match="y has 2 columns, but the model was fitted to 1"):
                conditional.given(Z[0]).score_samples(np.zeros((3, 2)))

    def test_names_that_the_model_does_not_know(self, conditionals):
        with pytest.raises(ValueError, match="fitted without column names"):
            conditionals[0].given({"a": 1.0})


class TestNumbersOfDraws:
    @pytest.mark.parametrize("count", [None, 0, -1, 1.5, "3", True, [3], np.nan, np.inf, 1e30], ids=repr)
    def test_what_is_none_is_named(self, model, conditionals, count):
        with pytest.raises(ValueError, match="n_samples must be a whole number of at least 1, got"):
            model.sample(count)
        with pytest.raises(ValueError, match="n_samples must be a whole number of at least 1, got"):
            conditionals[0].sample(Z[:1], count)

    @pytest.mark.parametrize("count", [3, 3.0, np.int64(3), np.array(3)], ids=repr)
    def test_whole_numbers_of_any_type_are_fine(self, model, count):
        assert model.sample(count).shape == (3, 2)

    @pytest.mark.parametrize(
        "seed",
        ["seed", 1.5, -1, 2**40, True],
        ids=lambda seed: type(seed).__name__ + str(seed)[:8],
    )
    def test_a_seed_that_is_none_is_named(self, model, seed):
        with pytest.raises(ValueError, match="random_state must be a whole number from 0 to"):
            model.sample(3, random_state=seed)

    @pytest.mark.parametrize("coverage", [None, "x", [0.5], 1.0, np.nan], ids=repr)
    def test_a_coverage_that_is_none_is_named(self, conditionals, coverage):
        with pytest.raises(ValueError, match="coverage must lie strictly between 0 and 1, got"):
            conditionals[0].interval(Z[:1], coverage)

    @pytest.mark.parametrize("levels", [None, "x", [0.5, "x"], [], 1.0], ids=repr)
    def test_levels_that_are_none_are_named(self, conditionals, levels):
        with pytest.raises(ValueError, match="levels must be one or more numbers strictly between 0 and 1"):
            conditionals[0].quantile(Z[:1], levels)


JUNK = (
    "junk",
    -1,
    1.5,
    np.nan,
    np.inf,
    [1],
    [1, 2, 3],
    {"a": 1},
    True,
    object(),
    np.arange(99.0),
    int,
    b"x",
    None,
    0,
)
# What each setting may be after all, among those.
ALLOWED = {
    "model": (),
    "kernel": (),
    "bounds": (None,),
    "solver": (),
    "rows": (None,),
    "effort": (),
    "learned": (None,),
    "random_state": (None, 0),
    "progress": (True, None, int),
    "checkpoint": (None, "junk"),
}
ALLOWED_KERNEL = {
    "name": (),
    "lengthscale": (1.5, None),
    "condition_lengthscale": (1.5, None, np.inf),
    "rkhs_penalty": (1.5, None),
    "base_width": (1.5, None),
    "base": (None,),
    "space": (),
    "n_centres": (None,),
    "normaliser": (),
    "search": (),
    "integration": (),
}
LEFT = {
    "power": "a truth value",
    "target_columns": "tested beside the kinds of columns",
    "columns": "tested beside the kinds of columns",
    "collinear": "a setting of p(x) alone, tested beside carried columns",
}


@pytest.mark.parametrize("setting", ALLOWED)
@pytest.mark.parametrize("cls", [KernelExpFamily, ConditionalKernelExpFamily])
def test_a_setting_of_a_wrong_type_is_named_in_one_line(cls, setting):
    data = (Z, Y) if cls.conditional else (Z,)
    for value in JUNK:
        if any(value is fine for fine in ALLOWED[setting]):
            continue
        estimator = cls(**(FIXED | {setting: value}))
        with pytest.raises((ValueError, TypeError)) as error:
            estimator.fit(*data)
        assert setting in one_line(error), value


@pytest.mark.parametrize("setting", ALLOWED_KERNEL)
@pytest.mark.parametrize("cls", [KernelExpFamily, ConditionalKernelExpFamily])
def test_a_kernel_setting_of_a_wrong_type_is_named_in_one_line(cls, setting):
    if setting == "condition_lengthscale" and not cls.conditional:
        pytest.skip("p(x) has no condition")
    data = (Z, Y) if cls.conditional else (Z,)
    for value in JUNK:
        if any(value is fine for fine in ALLOWED_KERNEL[setting]):
            continue
        if cls.conditional and setting == "lengthscale" and isinstance(value, list) and len(value) == 1:
            continue  # one length scale for the one target
        with pytest.raises((ValueError, TypeError)) as error:
            cls(**changed(FIXED, **{setting: value})).fit(*data)
        assert ("kernel" if setting == "name" else setting) in one_line(error), value


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e200], ids=repr)
@pytest.mark.parametrize(
    ("setting", "ends"),
    [("lengthscale", "1e-06 to 1e+06"), ("rkhs_penalty", "1e-100 to 1e+100")],
)
def test_a_scale_beyond_double_precision_is_named(setting, ends, scale):
    with pytest.raises(ValueError, match=re.escape(f"{setting} must be from {ends}, got")):
        Kernel(**{setting: scale})


@pytest.mark.parametrize("setting", ["lengthscale", "condition_lengthscale"])
def test_a_length_scale_in_the_rounding_error_is_named(setting):
    with pytest.raises(ValueError, match=f"{setting} must be from"):
        Kernel(**{setting: 1e-8})
    with pytest.raises(ValueError, match=f"{setting}s must be from"):
        Kernel(search=Search(**{f"{setting}s": (1e-8, 1.0)}))


def unchecked(cls, **fields):
    """Return a record with fields of wrong types, which the type checks of the tests would refuse."""
    record = cls()
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record


@pytest.mark.parametrize("folds", ["a", True, None, [2, 3], 1, 2.5], ids=repr)
def test_a_number_of_folds_that_is_none_is_named(folds):
    with pytest.raises(ValueError, match="folds must be a whole number of at least 2, got"):
        SettingsRecord.__check_init__(unchecked(Search, folds=folds))


@pytest.mark.parametrize("cells", [5, True, None, [5]], ids=repr)
def test_cells_that_are_no_tuple_are_named(cells):
    with pytest.raises(ValueError, match="cells must be a tuple of numbers, got"):
        unchecked(Integration, cells=cells).__check_init__()


def test_a_sparse_array_is_refused():
    with pytest.raises(TypeError, match="Sparse data was passed for X"):
        KernelExpFamily().fit(scipy.sparse.csr_array(Z))


@pytest.mark.parametrize("penalties", ["ab", 0.1, (0.1, "b"), (), (True,)], ids=repr)
def test_penalties_that_are_none_are_named(penalties):
    with pytest.raises(ValueError, match="penalties must be positive numbers, one at least; got"):
        unchecked(Search, penalties=penalties).__check_init__()


class TestKinds:
    """Kinds of columns that a user gets wrong."""

    @pytest.mark.parametrize("columns", ["real", ["real", "real"], 1], ids=repr)
    def test_a_kind_without_a_column_is_named(self, columns):
        with pytest.raises(
            TypeError, match=r"kinds of columns are a dict .*, such as \{0: 'positive'\}; got"
        ):
            KernelExpFamily().set_params(columns=columns).fit(Z)

    @pytest.mark.parametrize("kind", ["bounded:a:b", "bounded:1:0", "integer:a"])
    def test_a_kind_with_wrong_numbers_is_named(self, kind):
        with pytest.raises(ValueError, match=f"'{kind}' (is no kind of column|lacks a number)"):
            KernelExpFamily(columns={0: kind}).fit(Z)

    def test_a_boolean_is_no_position(self):
        with pytest.raises(ValueError, match="there is no column True"):
            KernelExpFamily(columns={True: "real"}).fit(Z)

    def test_kinds_of_targets_are_set_with_target_columns(self):
        frame = pd.DataFrame(Z, columns=["a", "b"])
        model = ConditionalKernelExpFamily(columns={"y": "count"})
        with pytest.raises(ValueError, match=r"no column 'y' .* Kinds of y are set with target_columns\."):
            model.fit(frame, pd.Series(Y, name="y"))
        counts = np.arange(ROWS) % 3
        kinds = pytest.warns(ColumnKindWarning, match=r"with target_columns=\{0: \.\.\.\}")
        with pytest.warns(TiesWarning), kinds:
            ConditionalKernelExpFamily(**FIXED).fit(Z, counts)

    @pytest.mark.parametrize("unit", ["datetime64[D]", "timedelta64[s]"])
    @pytest.mark.parametrize("make", [KernelExpFamily, KernelDensity])
    def test_arrays_of_dates_are_refused(self, make, unit):
        with pytest.raises(ValueError, match="X contains dates or durations: convert them to numbers"):
            make().fit(np.arange(40).reshape(20, 2).astype(unit))

    def test_targets_that_are_dates_are_refused(self):
        with pytest.raises(ValueError, match="y contains dates or durations"):
            ConditionalKernelDensity().fit(Z, np.arange(ROWS).astype("datetime64[D]"))

    @pytest.mark.parametrize("day", [np.datetime64("2020-01-01"), np.timedelta64(1, "D"), pd.Period("2020")])
    def test_lists_of_dates_are_refused(self, day):
        with pytest.raises(ValueError, match="column 1 contains dates or durations"):
            KernelExpFamily().fit([[0.0, day]] * 20)

    def test_a_condition_that_is_a_date_is_refused(self, conditionals):
        with pytest.raises(ValueError, match="x contains dates or durations"):
            conditionals[1].given(np.zeros(Z.shape[1], "datetime64[D]"))


def test_every_setting_is_tried():
    tried = {*ALLOWED, *LEFT}
    parameters = [cls().get_params(deep=False) for cls in (KernelExpFamily, ConditionalKernelExpFamily)]
    assert set(parameters[0]) | set(parameters[1]) <= tried
    assert set(Kernel().get_params(deep=False)) <= {*ALLOWED_KERNEL, *LEFT}


def test_the_settings_of_a_diagnosis_are_a_record(model):
    with pytest.raises(TypeError, match="settings must be a Judgement or None, got 3"):
        model.diagnose(settings=3)
    assert isinstance(Judgement(), Judgement)


class TestFewRows:
    def test_three_held_out_rows_say_little(self, conditionals):
        said = lambda rows: str(conditionals[1].diagnose(Z[:rows], Y[:rows], random_state=0))
        assert "few held-out rows:     90 % intervals of a perfect model contain 1 to 3 of 3 rows" in said(3)
        assert "contain 0 to 1 of 1 rows" in said(1)
        assert "few held-out rows" not in said(ROWS)

    @pytest.mark.parametrize("rows", [3, 10, 29])
    def test_the_range_is_the_binomial_one(self, conditionals, rows):
        import jax.random as jr

        found = pit_measurements(conditionals[1].density_, Z[:rows], Y[:rows, None], key=jr.key(0))
        low, high = next(one.value for one in found if one.name == "chance_range")
        assert high == rows
        below, upto = scipy.stats.binom.cdf([low - 1, low], rows, 0.9)
        assert below < 0.025 <= upto

    def test_three_rows_to_fit_are_too_few(self):
        with pytest.raises(ValueError, match=r"3 sample\(s\).*a minimum of 10 is required"):
            KernelExpFamily().fit(Z[:3])


def test_f_is_finite_at_points_whose_squares_overflow(model):
    assert model.potential([[1e308, 0.0], [-1e308, 1e308]]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("weights", [None, []])
def test_a_mean_over_no_rows_is_refused(conditionals, weights):
    for estimator in conditionals:
        with pytest.raises(ValueError, match="at least one row|0 sample") as error:
            estimator.score(np.zeros((0, 2)), np.zeros(0), sample_weight=weights)
        one_line(error)


@pytest.mark.parametrize("draws", [0, -1, 2.5, None], ids=repr)
@pytest.mark.parametrize("call", ["impute", "conditionals"])
def test_completions_need_a_whole_number_of_draws(model, call, draws):
    with pytest.raises(ValueError, match="draws must be a whole number of at least 1") as error:
        getattr(model, call)(Z[:2], draws=draws)
    one_line(error)


def test_copying_of_no_rows_is_refused(model):
    for rows in (np.zeros((0, 2)), pd.DataFrame(np.zeros((0, 2)))):
        with pytest.raises(ValueError, match="at least one|0 sample") as error:
            model.copying(rows, n_samples=3)
        one_line(error)


@pytest.mark.parametrize("wrong", [{"polish": 3}, {"warm_start": "yes"}], ids=repr)
def test_an_option_that_is_neither_true_nor_false_is_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be True or False, got"):
        SaddleSolver.__check_init__(unchecked(DDE, **{"steps": 1, **wrong}))
