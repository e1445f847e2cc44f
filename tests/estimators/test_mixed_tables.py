"""Tables with labels, counts, angles, proportions, amounts with zeros and missing cells."""

import jax.random as jr
import numpy as np
import pandas as pd
import pytest

import kexpfam
from kexpfam import (
    Bounded,
    ColumnKindWarning,
    ConditionalKernelExpFamily,
    Kernel,
    KernelExpFamily,
    UnseenLabelWarning,
)
from kexpfam.data.kinds import Atom, Category, Integer, Periodic, Positive, Real
from kexpfam.fit.learned import Learned

SMALL = Learned(folds=2, repeats=1, width=10, epochs=8, cells=48, steps=60)
KINDS = {"share": Bounded(0, 1), "turn": "periodic:360", "visits": "count", "paid": "atom:0:positive"}


def table(seed: int, count: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    kind = rng.choice(["u", "v"], size=count)
    frame = pd.DataFrame(
        {
            "kind": kind,
            "age": np.where(kind == "u", 30.0, 50.0) + 5.0 * rng.normal(size=count),
            "share": rng.beta(2, 3, count),
            "turn": rng.uniform(0.0, 360.0, count),
            "visits": rng.poisson(2, count),
            "paid": np.where(rng.random(count) < 0.3, 0.0, rng.lognormal(size=count)),
        }
    )
    frame.loc[rng.random(count) < 0.15, "share"] = np.nan
    frame.loc[rng.random(count) < 0.1, "kind"] = None
    return frame


@pytest.fixture(scope="module")
def model() -> KernelExpFamily:
    return KernelExpFamily(columns=KINDS, learned=SMALL, random_state=0).fit(table(0))


@pytest.fixture(scope="module")
def counts() -> ConditionalKernelExpFamily:
    frame = table(0)
    kinds = {name: kind for name, kind in KINDS.items() if name != "visits"}
    model = ConditionalKernelExpFamily(columns=kinds, target_columns="count", learned=SMALL, random_state=0)
    return model.fit(frame.drop(columns="visits"), frame["visits"])


def test_the_kinds_are_shown(model):
    assert model.columns_ == {
        "kind": Category(("u", "v")),
        "age": Real(),
        "share": Bounded(0, 1),
        "turn": Periodic(360),
        "visits": Integer(0),
        "paid": Atom(0, Positive()),
    }


def test_draws_stay_in_the_support_and_are_cells_of_the_table(model):
    draws = model.sample(500, random_state=0)
    assert set(draws["kind"]) == {"u", "v"}
    assert draws["share"].between(0.0, 1.0).all() and draws["turn"].between(0.0, 360.0).all()
    assert draws["visits"].dtype.kind == "i" and (draws["visits"] >= 0).all()
    assert (draws["paid"] >= 0.0).all() and (draws["paid"] == 0.0).any()
    assert not draws.isna().any().any()


def test_probabilities_of_labels_and_counts_sum_to_that_of_the_rest(model):
    """The sum over the labels of a row is the density of its other cells."""
    row = table(1).dropna().iloc[:1]
    several = pd.concat([row] * 2).assign(kind=["u", "v"])
    total = np.logaddexp.reduce(model.score_samples(several))
    given = model.marginal(["age", "share", "turn", "visits", "paid"], draws=4096)
    rest = given.score_samples(row.drop(columns="kind"))
    assert total == pytest.approx(rest[0], abs=0.1)


def test_a_row_with_gaps_is_scored_where_gaps_were_seen_and_integrated_where_not(model):
    rows = table(2).dropna().iloc[:3]
    seen, unseen = rows.assign(share=np.nan), rows.assign(age=np.nan)
    assert np.all(np.isfinite(model.score_samples(seen)))
    assert np.all(model.score_samples(unseen) > model.score_samples(rows)), (
        "fewer cells, of densities below one"
    )


def test_cells_outside_the_support_have_no_density(model):
    row = table(2).dropna().iloc[:1]
    for name, cell in (("share", 1.2), ("visits", 0.5), ("visits", -1), ("paid", -1.0), ("kind", "w")):
        changed = row.astype({"visits": float}) if name == "visits" else row
        assert model.score_samples(changed.assign(**{name: cell}))[0] == -np.inf, (name, cell)


def test_a_file_holds_all_of_it(model, tmp_path):
    model.save(tmp_path / "model.kx")
    loaded, rows = kexpfam.load(tmp_path / "model.kx"), table(3)
    assert loaded.columns_ == model.columns_
    assert np.array_equal(loaded.score_samples(rows), model.score_samples(rows))
    assert loaded.sample(3, random_state=0).equals(model.sample(3, random_state=0))


def test_the_diagnosis_and_the_picture_know_kinds(model, counts):
    assert model.diagnose().verdict in ("good", "fair", "poor")
    assert len(model.plot().axes) == 21, "a column by itself, and every pair"
    assert len(model.given({"kind": "u"}).plot().axes) == 5
    assert counts.diagnose().verdict in ("good", "fair", "poor")


def test_gaps_are_drawn_and_the_rest_is_left_alone(model):
    rows = table(4).iloc[5:25]
    filled = model.impute(rows, random_state=0)
    assert filled.index.equals(rows.index)
    assert not filled.isna().any().any()
    for name in rows.columns:
        there = rows[name].notna()
        assert (filled.loc[there, name].to_numpy() == rows.loc[there, name].to_numpy()).all(), name
    assert model.impute(rows, n_samples=4, random_state=0).shape == (20, 4, 6)


def test_the_density_of_the_others_is_the_joint_one_over_that_of_the_given(model):
    rows = table(5).dropna().head(3)
    first = rows.iloc[0]
    given = model.given({"age": first["age"], "kind": first["kind"]})
    assert given.names == ["share", "turn", "visits", "paid"]
    found = given.score_samples(rows[given.names].head(1))[0]
    assert found == pytest.approx(model.score_samples(rows.head(1))[0] - given.log_evidence.value, abs=1e-9)
    assert given.log_evidence.standard_error < 0.1
    draws = given.sample(50, random_state=0)
    assert list(draws.columns) == given.names and len(draws) == 50 and (draws["share"] <= 1.0).all()
    quantiles = given.marginal(["visits"]).quantile([0.1, 0.5, 0.9])
    assert np.all(np.diff(quantiles) >= 0) and np.all(quantiles == np.round(quantiles))


def test_labels_given_numbers_have_probabilities(model):
    labels = model.given({"age": 31.0}).marginal(["kind"])
    chances = np.exp(labels.score_samples(np.array([["u"], ["v"]])))
    assert chances.sum() == pytest.approx(1.0, abs=0.05)
    rows = model.conditionals(table(6).head(5))
    assert rows.log_evidence.shape == rows.standard_errors.shape == rows.effective_draws.shape == (5,)
    assert rows.sample(3, random_state=0).shape == (5, 3, 6)
    assert rows.quantile([0.1, 0.9], "share").shape == (5, 2)


def test_counts_given_everything_else(counts):
    frame = table(7).head(6)
    X, y = frame.drop(columns="visits"), frame["visits"]
    chances = [np.exp(counts.score_samples(X.head(1), np.array([k]))) for k in range(80)]
    assert np.sum(chances) == pytest.approx(1.0, abs=1e-3)
    quantiles = counts.quantile(X, [0.1, 0.5, 0.9])
    assert np.array_equal(quantiles, np.round(quantiles))
    assert np.all((counts.cdf(X, y) > 0.0) & (counts.cdf(X, y) <= 1.0))
    assert counts.sample(X, 4, random_state=0)["visits"].dtype.kind == "i"
    assert counts.predict(X).between(0.0, 20.0).all()


def test_labels_given_numbers_are_predicted():
    frame = table(0).dropna()
    model = ConditionalKernelExpFamily(learned=SMALL, random_state=0).fit(
        frame[["age", "paid"]].to_numpy(), frame["kind"]
    )
    predicted = model.predict(frame[["age", "paid"]].to_numpy())
    assert np.mean(predicted == frame["kind"].to_numpy()) > 0.65
    assert model.target_columns_ == {"kind": Category(("u", "v"))}


def test_gaps_that_inputs_did_not_have_are_named(counts):
    frame = table(7).head(3).drop(columns="visits")
    with pytest.raises(ValueError, match=r"NaN in column\(s\) age"):
        counts.score_samples(frame.assign(age=np.nan), np.array([1, 2, 3]))


def test_unseen_input_labels_are_unknown_with_one_warning_that_names_them(counts, tmp_path):
    frame, y = table(7).head(4).drop(columns="visits"), np.array([1, 2, 3, 4])
    new = frame.assign(kind=["u", "x", "z", "x"])
    with pytest.warns(UnseenLabelWarning, match=r"unknown: column 'kind' holds 'x', 'z'\.$") as caught:
        found = counts.score_samples(new, y)
    assert len(caught) == 1
    counts.save(tmp_path / "counts.kexpfam")
    again = kexpfam.load(tmp_path / "counts.kexpfam")
    with pytest.warns(UnseenLabelWarning):
        np.testing.assert_allclose(again.score_samples(new, y), found)
    seen = np.stack([counts.score_samples(frame.assign(kind=label), y) for label in "uv"])
    assert np.all(np.isfinite(found)) and found[0] == pytest.approx(seen[0, 0])
    # The law of an unknown label is not that of one of the labels.
    assert np.abs(seen[:, 1:] - found[1:]).min() > 1e-6
    with pytest.warns(UnseenLabelWarning):
        assert counts.given(new.iloc[[1]]).condition["kind"] is None
        assert counts.sample(new, 2, random_state=0).shape == (8, 2)
        assert np.all(np.diff(counts.quantile(new, [0.1, 0.5, 0.9]), axis=1) >= 0.0)
    with pytest.warns(UnseenLabelWarning), pytest.raises(ValueError, match="unknown labels"):
        counts.update(new, y)


def test_an_unseen_label_has_density_zero_as_a_target_and_in_a_joint_row(model):
    frame = table(0).dropna()
    X = frame[["age", "paid"]].to_numpy()
    labels = ConditionalKernelExpFamily(learned=SMALL, random_state=0).fit(X, frame["kind"])
    found = labels.score_samples(X[:2], np.array(["u", "x"], object))
    assert np.isfinite(found[0]) and found[1] == -np.inf
    rows = table(8).dropna().head(2).assign(kind=["u", "x"])
    joint = model.score_samples(rows)
    assert np.isfinite(joint[0]) and joint[1] == -np.inf
    assert model.marginal(["kind"]).score_samples(pd.DataFrame({"kind": ["x"]})).tolist() == [-np.inf]


@pytest.mark.parametrize(
    "settings",
    [{"solver": "exact"}, {"kernel": Kernel(lengthscale=1.0)}, {"model": "kernel"}, {"bounds": (-1, 99)}],
)
def test_what_is_a_kernel_models_is_refused_for_labels_and_gaps(settings):
    with pytest.raises(ValueError, match=r"needs real columns without missing values|bounds are for"):
        KernelExpFamily(**settings).fit(table(0)[["kind", "age"]])


def test_positive_columns_keep_the_kernel_model_and_stay_positive():
    x = np.random.default_rng(0).lognormal(size=(80, 1))
    model = KernelExpFamily(
        model="kernel",
        kernel=Kernel(lengthscale=1.0, rkhs_penalty=0.01),
        columns={0: "positive"},
        random_state=0,
    ).fit(x)
    assert (model.sample(2000, random_state=0) > 0.0).all()
    grid = np.linspace(1e-6, 60.0, 60_001)
    assert np.trapezoid(np.exp(model.score_samples(grid[:, None])), grid) == pytest.approx(1.0, abs=2e-3)
    assert model.score_samples(np.array([[-1.0], [0.0]])).tolist() == [-np.inf, -np.inf]


def test_bounds_are_a_short_form():
    x = np.random.default_rng(0).uniform(size=(60, 1))
    settings = {"model": "kernel", "kernel": Kernel(lengthscale=0.5, rkhs_penalty=0.01), "random_state": 0}
    short = KernelExpFamily(bounds=(0, 1), **settings).fit(x)
    long = KernelExpFamily(columns={0: Bounded(0, 1)}, **settings).fit(x)
    assert np.array_equal(short.score_samples(x), long.score_samples(x))


def test_counts_are_hinted_at():
    x = np.random.default_rng(0).poisson(3, (200, 1)).astype(float)
    with pytest.warns(ColumnKindWarning, match="few whole numbers"), pytest.warns(kexpfam.TiesWarning):
        KernelExpFamily(model="kernel", kernel=Kernel(lengthscale=1.0, rkhs_penalty=0.1), random_state=0).fit(
            x
        )


def test_dates_are_refused():
    frame = pd.DataFrame({"day": pd.date_range("2020-01-01", periods=30), "x": np.arange(30.0)})
    with pytest.raises(ValueError, match="days since"):
        KernelExpFamily().fit(frame)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_heavy_tailed_column_beside_labels_has_no_astronomic_draws(seed):
    """Student's t with 1.5 degrees of freedom, of which 20,000 draws reach 20 times as far as 200.

    The heavy tails of other columns would reach e^100 here.
    """
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"kind": rng.choice(["u", "v"], size=200), "heavy": rng.standard_t(1.5, size=200)})
    model = KernelExpFamily(learned=SMALL, random_state=seed).fit(frame)
    assert model.density_.scaling.arcsinh == (False, True)
    draws, width = np.abs(model.sample(20_000, random_state=seed)["heavy"].to_numpy()), np.ptp(frame["heavy"])
    assert np.isfinite(draws).all()
    assert np.quantile(draws, 0.999) < 10.0 * width
    assert draws.max() < 1e4 * width


def test_several_targets_have_a_mean_without_a_seed_and_one_with_a_key():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 1))
    y = pd.DataFrame(
        {"number": 2.0 * x[:, 0] + rng.normal(size=150), "kind": np.where(x[:, 0] > 0, "u", "v")}
    )
    model = ConditionalKernelExpFamily(learned=SMALL, random_state=0).fit(x, y)
    density, rows = model.density_, x[:4]
    quasi, again = density.mean(rows), density.mean(rows)
    assert np.array_equal(quasi, again) and np.array_equal(quasi, density.mean(rows, draws=512))
    random = [density.mean(rows, draws=4096, key=jr.key(k))[:, 0] for k in (0, 1)]
    assert not np.array_equal(*random)
    spread = density.sample(2000, rows, key=jr.key(2))[..., 0].std(axis=1)
    assert np.all(np.abs(quasi[:, 0] - random[0]) < 6.0 * spread / np.sqrt(512))
