import importlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import FillBetweenPolyCollection, PathCollection, QuadMesh
from matplotlib.figure import Figure
from oracles import changed
from scipy.stats import norm

from kexpfam import DDE, ConditionalKernelExpFamily, Judgement, Kernel, KernelExpFamily, plot
from kexpfam.estimators import GaussianMixtureDensity
from kexpfam.fit.problem import SOLVERS
from kexpfam.fit.saddle import DoublyDual
from kexpfam.judge.diagnosis import Diagnosis
from kexpfam.judge.metrics import simultaneous_limits
from kexpfam.plot.numbers import training_rows

LENGTHSCALES = {1: 1.0, 2: 1.0, 4: [1.0, 1.0, np.inf, np.inf]}


def data_of(dim):
    rng = np.random.default_rng(0)
    return rng.normal(rng.choice([-1.5, 1.5], (40, 1)), 0.5, (40, dim))


@pytest.fixture(scope="module", params=LENGTHSCALES, ids=lambda dim: f"{dim}-D")
def model(request):
    settings = {
        "model": "kernel",
        "kernel": Kernel(rkhs_penalty=1e-2, base="gaussian", n_centres=10),
        "random_state": 0,
    }
    lengthscale = LENGTHSCALES[request.param]
    return KernelExpFamily(solver="exact", **changed(settings, lengthscale=lengthscale)).fit(
        data_of(request.param)
    )


@pytest.fixture(scope="module")
def saddle():
    saddle = DoublyDual(
        width=8, transport_depth=1, nu_depth=1, batch_size=32, transport_updates=1, nu_updates=1
    )
    solver = DDE(saddle=saddle, steps=50, snapshots=True)
    settings = {
        "model": "kernel",
        "kernel": Kernel(lengthscale=1.0, rkhs_penalty=1e-2, n_centres=10),
        "random_state": 0,
    }
    return KernelExpFamily(solver=solver, **settings).fit(data_of(2))


@pytest.mark.parametrize("with_data", [True, False], ids=["with data", "without data"])
def test_the_density_of_any_dimension_is_a_figure_that_can_be_written(model, with_data, tmp_path):
    data = data_of(model.n_features_in_) if with_data else None
    figure = plot.plot_density(model, data, n_samples=100)
    assert isinstance(figure, Figure)
    assert all(axis.has_data() for axis in figure.axes)
    figure.savefig(tmp_path / "density.png", dpi=40)
    assert (tmp_path / "density.png").stat().st_size > 1000


def test_the_curve_on_the_line_is_the_density():
    settings = {
        "model": "kernel",
        "kernel": Kernel(lengthscale=1.0, rkhs_penalty=1e-2, n_centres=10),
        "random_state": 0,
    }
    model = KernelExpFamily(solver="exact", **settings).fit(data_of(1))
    axis = plot.plot_density(model, data_of(1), n_samples=100).axes[0]
    (curve,) = axis.get_lines()
    x, y = curve.get_data()
    np.testing.assert_allclose(np.log(y), model.score_samples(np.asarray(x)[:, None]), atol=1e-9)


def test_the_dimensions_that_are_shown_can_be_chosen():
    settings = {
        "model": "kernel",
        "kernel": Kernel(rkhs_penalty=1e-2, base="gaussian", n_centres=10),
        "random_state": 0,
    }
    model = KernelExpFamily(solver="exact", **changed(settings, lengthscale=LENGTHSCALES[4])).fit(data_of(4))
    data = data_of(4)
    (axis,) = plot.plot_density(model, data, n_samples=100, dims=(3, "x1")).axes
    np.testing.assert_allclose(axis.collections[1].get_offsets(), data[:, [3, 1]])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("x3", "x1")


def test_a_plane_is_framed_by_the_data_and_not_by_the_outermost_draws():
    data = data_of(2)
    draws = np.tile(data, (25, 1))
    draws[0] = 1e3
    model = SimpleNamespace(
        sample=lambda *_, **__: draws, score_samples=lambda points: -0.5 * np.sum(points**2, axis=1)
    )
    framed = [axis for axis in plot.plot_density(model, data).axes if axis.get_xlabel()]
    for axis in framed:
        low, high = axis.get_xlim()
        assert low < data[:, 0].min() < data[:, 0].max() < high < 2.0 * data[:, 0].max()


@pytest.mark.parametrize(("stretch", "aspect"), [(1.0, 1.0), (1000.0, "auto")])
def test_columns_share_a_scale_only_if_they_are_of_comparable_size(stretch, aspect):
    data = data_of(2) * [1.0, stretch]
    model = GaussianMixtureDensity(random_state=0).fit(data)
    assert {axis.get_aspect() for axis in plot.plot_density(model, data).axes if axis.get_xlabel()} == {
        aspect
    }


def test_axes_have_the_names_of_the_columns_and_a_model_of_a_frame_gives_no_warning():
    frame = pd.DataFrame(data_of(2), columns=["age", "height"])
    settings = {
        "model": "kernel",
        "kernel": Kernel(lengthscale=1.0, rkhs_penalty=1e-2, n_centres=10),
        "random_state": 0,
    }
    figure = KernelExpFamily(solver="exact", **settings).fit(frame).plot(frame, n_samples=50)
    named = [(axis.get_xlabel(), axis.get_ylabel()) for axis in figure.axes if axis.get_xlabel()]
    assert named == [("age", "height")] * 3


def test_a_density_without_an_f_has_no_panel_for_it():
    model = GaussianMixtureDensity(random_state=0).fit(data_of(2))
    figure = plot.plot_density(model, data_of(2), n_samples=50)
    assert (
        sum(
            any(isinstance(kept, QuadMesh) for kept in axis.collections)
            for axis in figure.axes
            if axis.get_title()
        )
        == 1
    )
    assert (
        len(plot.plot_density(GaussianMixtureDensity(random_state=0).fit(data_of(1)), n_samples=50).axes) == 1
    )


def panels(figure):
    """Return the curve of each panel, by its title."""
    return {axis.get_title(): axis.get_lines()[0] for axis in figure.axes}


@pytest.mark.slow
def test_the_trace_is_a_figure_with_a_panel_per_signal(saddle):
    figure = plot.plot_trace(saddle)
    assert isinstance(figure, Figure)
    assert set(panels(figure)) == {name.replace("_", " ") for name in DDE.records}
    line = panels(figure)["sampler gap"]
    np.testing.assert_array_equal(line.get_ydata(), saddle.solution_.trace["sampler_gap"])
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 51))


@pytest.mark.parametrize("name", SOLVERS)
def test_the_trace_of_every_solver_is_shown_under_its_own_names(name):
    module, solver, _ = SOLVERS[name]
    records = getattr(importlib.import_module(f"kexpfam.{module}"), solver).records
    trace = {record: np.arange(3.0) + place for place, record in enumerate(records)}
    model = type("Solved", (KernelExpFamily,), {"solution_": SimpleNamespace(trace=trace)})()
    if not records:
        with pytest.raises(ValueError, match="no steps to show"):
            plot.plot_trace(model)
        return
    curves = panels(plot.plot_trace(model))
    assert list(curves) == [record.replace("_", " ") for record in records]
    for curve, series in zip(curves.values(), trace.values(), strict=True):
        np.testing.assert_array_equal(curve.get_ydata(), series)


def test_a_model_without_steps_has_no_trace(model):
    for fitted in (model, GaussianMixtureDensity(random_state=0).fit(data_of(1))):
        with pytest.raises(ValueError, match="no steps to show"):
            plot.plot_trace(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, 6])
def test_snapshots_are_a_panel_each(saddle, most):
    kept = sorted(map(int, saddle.solution_.snapshots))
    figure = plot.plot_snapshots(saddle, most=most)
    assert isinstance(figure, Figure)
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert len(titles) == min(most, len(kept))
    assert titles[0] == "initialisation"
    if most > 1:
        assert titles[-1] == f"after {kept[-1]} steps"


def test_a_model_without_snapshots_says_how_to_get_them(model):
    with pytest.raises(ValueError, match=r"DDE\(snapshots=True\)"):
        plot.plot_snapshots(model)


def test_snapshots_of_one_coordinate_are_refused_with_what_to_use():
    one = SimpleNamespace(sample=SimpleNamespace(target=np.zeros((5, 1))))
    model = SimpleNamespace(solution_=SimpleNamespace(snapshots={"0": np.zeros((5, 1))}), _problem=one)
    with pytest.raises(ValueError, match="f depends on one here"):
        plot.plot_snapshots(model)


CHEAP = {
    "model": "kernel",
    "kernel": Kernel(
        condition_lengthscale=1.0, lengthscale=1.0, rkhs_penalty=1e-2, base_width=1.0, power=False
    ),
    "solver": "exact",
    "random_state": 0,
}
FEATURES = ["depth", "slope"]


def rows_of(seed, targets=1):
    """Return features, and targets that depend on the first of them."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2.0, 2.0, (60, 2))
    y = np.sin(2.0 * X[:, :1]) + rng.normal(size=(60, targets))
    return X, y[:, 0] if targets == 1 else y


@pytest.fixture(scope="module")
def conditional():
    estimator = ConditionalKernelExpFamily(**CHEAP).fit(*rows_of(0))
    estimator.column_names_ = FEATURES
    return estimator


@pytest.fixture(scope="module")
def two_targets():
    return ConditionalKernelExpFamily(**CHEAP).fit(*rows_of(0, targets=2))


@pytest.fixture(scope="module")
def diagnosis(conditional):
    return conditional.diagnose(*rows_of(1), settings=Judgement(draws=200, certifying_draws=1024))


def offsets(axis):
    """Return the points of the scatter on the axis."""
    (points,) = [kept for kept in axis.collections if isinstance(kept, PathCollection)]
    return points.get_offsets()


@pytest.mark.parametrize("feature", [0, 1])
def test_the_conditional_median_and_its_intervals_run_along_one_feature(conditional, feature):
    X, y = conditional.training_data_
    (axis,) = plot.plot_conditional(conditional, feature=feature, coverages=(0.5, 0.9)).axes
    (median,) = axis.get_lines()
    grid = np.tile(np.median(X, axis=0), (len(median.get_xdata()), 1))
    grid[:, feature] = median.get_xdata()
    np.testing.assert_allclose(median.get_ydata(), conditional.quantile(grid, 0.5))
    bands = {
        band.get_label(): band.get_paths()[0]
        for band in axis.collections
        if isinstance(band, FillBetweenPolyCollection)
    }
    assert list(bands) == ["90% interval", "50% interval"]
    low, high = conditional.interval(grid, 0.9).T
    extent = bands["90% interval"].get_extents()
    np.testing.assert_allclose([extent.y0, extent.y1], [low.min(), high.max()])
    np.testing.assert_allclose(offsets(axis), np.column_stack([X[:, feature], y]))
    assert axis.get_xlabel().startswith(FEATURES[feature])
    assert axis.get_ylabel() == "y"


def test_a_conditional_model_can_be_held_against_other_data(conditional, tmp_path):
    X, y = rows_of(1)
    figure = plot.plot_conditional(conditional, X, y[:, None], coverages=())
    np.testing.assert_allclose(offsets(figure.axes[0]), np.column_stack([X[:, 0], y]))
    figure.savefig(tmp_path / "conditional.png", dpi=40)
    assert (tmp_path / "conditional.png").stat().st_size > 1000


def test_a_conditional_model_of_a_frame_is_shown_without_a_warning(conditional, monkeypatch):
    monkeypatch.setattr(conditional, "feature_names_in_", np.array(FEATURES, dtype=object), raising=False)
    assert plot.plot_conditional(conditional).axes


BAD_CONDITIONAL = {
    "features alone": ({"X": rows_of(1)[0]}, "both X and y"),
    "no such feature": ({"feature": 2}, "feature must be from 0 to 1, got 2"),
    "senseless coverage": ({"coverages": (1.5,)}, "coverage must lie strictly between 0 and 1"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CONDITIONAL.values(), ids=BAD_CONDITIONAL)
def test_what_a_conditional_plot_cannot_show_is_an_error(conditional, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot.plot_conditional(conditional, **arguments)


def test_intervals_of_several_targets_are_refused_with_what_to_use(two_targets):
    with pytest.raises(ValueError, match=r"plot_given\(estimator.given\(x\)\)"):
        plot.plot_conditional(two_targets)


def test_calibration_shows_the_counts_and_the_coverage(diagnosis, tmp_path):
    figure = plot.plot_calibration(diagnosis)
    histogram, coverage = figure.axes
    counts = [bar.get_height() for bar in histogram.patches if bar.get_width() < 0.5]
    np.testing.assert_allclose(counts, np.histogram(diagnosis.pit, bins=10, range=(0.0, 1.0))[0])
    (band,) = [patch for patch in histogram.patches if patch.get_width() > 0.5]
    low, high = simultaneous_limits(60, np.full(10, 0.1), cumulative=False)
    assert (band.get_y(), band.get_y() + band.get_height()) == (low[0], high[0])
    assert {float(line.get_ydata()[0]) for line in histogram.get_lines()} == {6.0, low[0], high[0]}
    levels, observed = coverage.get_lines()[-1].get_data()
    for level, share in diagnosis.coverage.items():
        assert observed[np.argmin(np.abs(levels - level))] == pytest.approx(share, abs=0.05)
    figure.savefig(tmp_path / "calibration.png", dpi=40)
    assert (tmp_path / "calibration.png").stat().st_size > 1000


def test_calibration_needs_held_out_rows(diagnosis):
    with pytest.raises(ValueError, match="pass held-out X and y"):
        plot.plot_calibration(Diagnosis(one for one in diagnosis.values() if one.name != "pit"))


def test_a_given_density_is_a_curve_over_its_draws(conditional):
    given = conditional.given([0.5, 0.0])
    (axis,) = given.plot().axes
    (curve,) = axis.get_lines()
    x, density = curve.get_data()
    np.testing.assert_allclose(np.log(density), given.score_samples(x), atol=1e-9)
    np.testing.assert_allclose(np.trapezoid(density, x), 1.0, atol=0.02)


def test_a_given_density_of_two_targets_is_a_cloud_of_draws(two_targets):
    given = two_targets.given([0.5, 0.0])
    (axis,) = plot.plot_given(given, n_samples=50, random_state=3).axes
    np.testing.assert_allclose(offsets(axis), given.sample(50, random_state=3))


def test_pictures_leave_pyplot_alone(tmp_path):
    program = "\n".join(
        [
            "import sys, matplotlib",
            "matplotlib.use('svg')",
            "import numpy as np",
            "from kexpfam import plot",
            "from kexpfam.estimators import GaussianMixtureDensity",
            "data = np.random.default_rng(0).normal(size=(40, 2))",
            "model = GaussianMixtureDensity(random_state=0).fit(data)",
            "figure = plot.plot_density(model)",
            "figure.savefig(sys.argv[1])",
            "print('matplotlib.pyplot' in sys.modules, matplotlib.get_backend())",
            "import matplotlib.pyplot as plt",
            "figure = plot.plot_density(model)",
            "print(plt.get_fignums(), plt.get_backend())",
        ]
    )
    command = [sys.executable, "-c", program, str(tmp_path / "density.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False svg", "[] svg"]


def test_a_notebook_shows_a_figure_without_pyplot():
    figure = plot.plot_density(GaussianMixtureDensity(random_state=0).fit(data_of(1)), n_samples=50)
    assert figure._repr_png_().startswith(b"\x89PNG\r\n\x1a\n")


NAMES = ["age", "income", "children"]


def table(rows=300):
    """Return three columns: a skewed one, one that depends on it, and counts."""
    rng = np.random.default_rng(0)
    age = rng.gamma(6.0, 6.0, rows)
    return np.column_stack([age, 2.0 * age + rng.normal(size=rows), rng.poisson(1.3, rows)])


def test_pairs_are_named_at_the_edges_and_hold_data_and_draws():
    data, draws = table(), table(500)[::-1]
    figure = plot.plot_pairs(data, draws, NAMES)
    assert len(figure.axes) == 6
    cells = iter(figure.axes)
    for row in range(3):
        for column in range(row + 1):
            axis = next(cells)
            assert axis.get_xlabel() == (NAMES[column] if row == 2 else "")
            assert axis.get_ylabel() == (NAMES[row] if column == 0 else "")
            if column < row:
                drawn, seen = (kept.get_offsets() for kept in axis.collections)
                np.testing.assert_allclose(seen, data[:, [column, row]])
                np.testing.assert_allclose(drawn, draws[:, [column, row]])
                assert axis.get_xlim()[0] < data[:, column].min() < data[:, column].max() < axis.get_xlim()[1]


def test_a_wide_table_is_shown_by_its_first_columns_and_a_long_one_by_some_rows():
    wide = np.random.default_rng(0).normal(size=(5000, 12))
    figure = plot.plot_pairs(wide, wide, most_columns=3)
    assert len(figure.axes) == 6
    assert len(figure.axes[1].collections[0].get_offsets()) == 600


BAD_PAIRS = {"one column": (np.ones((5, 1)),) * 2, "other columns": (np.ones((5, 3)), np.ones((5, 2)))}


@pytest.mark.parametrize("pair", BAD_PAIRS.values(), ids=BAD_PAIRS)
def test_pairs_need_the_same_columns_twice_or_more(pair):
    with pytest.raises(ValueError, match="a pair plot needs data and draws of the same columns"):
        plot.plot_pairs(*pair)


def test_pairs_on_axes_of_the_caller_are_two_columns():
    model = GaussianMixtureDensity(random_state=0).fit(data_of(4))
    axis = Figure().subplots()
    with pytest.raises(ValueError, match="choose two with dims="):
        plot.plot_density(model, ax=axis)
    assert plot.plot_density(model, dims=(0, 2), ax=axis) is axis.figure
    assert axis.get_ylabel() == "x2"


@pytest.mark.parametrize("seed", range(3))
def test_the_curve_of_a_marginal_is_the_density_of_the_draws(seed):
    rng = np.random.default_rng(seed)
    draws = rng.exponential(size=20_000)
    (axis,) = plot.plot_marginal(rng.exponential(size=500), draws, name="wait").axes
    x, density = axis.get_lines()[0].get_data()
    # exp(-|x|), which is the exponential mirrored at 0, smoothed by a normal of half a bar, and five of its
    # standard errors.
    s = 0.5 * axis.patches[0].get_width()
    smooth = np.exp(0.5 * s**2) * (np.exp(-x) * norm.cdf(x / s - s) + np.exp(x) * norm.cdf(-x / s - s))
    error = np.sqrt(2.0 * smooth / (len(draws) * 2.0 * np.sqrt(np.pi) * s))
    assert x[0] >= 0.0
    assert np.all(np.abs(density - smooth)[x < x[-1] - 3.0 * s] < (5.0 * error + 0.003)[x < x[-1] - 3.0 * s])
    assert np.trapezoid(density, x) == pytest.approx(np.mean((draws >= x[0]) & (draws <= x[-1])), abs=0.03)
    assert axis.get_xlabel() == "wait"


def test_a_column_of_few_values_is_shown_as_shares():
    (axis,) = plot.plot_marginal([0, 0, 0, 1, 3], [0.2, -0.4, 1.3, 2.9]).axes
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([0.6, 0.2, 0.2])
    (shares,) = axis.get_lines()
    np.testing.assert_allclose(shares.get_ydata(), [0.5, 0.25, 0.25])


def test_several_targets_are_shown_as_pairs_under_their_names(two_targets):
    figure = two_targets.plot()
    assert [axis.get_ylabel() for axis in figure.axes] == ["y0", "y1", ""]
    drawn, seen = (kept.get_offsets() for kept in figure.axes[1].collections)
    np.testing.assert_allclose(seen, two_targets.training_data_[1])
    assert drawn.shape == seen.shape


def test_what_a_given_density_is_given_stands_above_it(conditional):
    (axis,) = conditional.given([0.5, -1.0]).plot().axes
    assert axis.get_title() == "given depth = 0.5, slope = -1"


PANELS = {
    "density on the line": lambda ax: plot.plot_density(
        GaussianMixtureDensity(random_state=0).fit(data_of(1)), ax=ax
    ),
    "density on the plane": lambda ax: plot.plot_density(
        GaussianMixtureDensity(random_state=0).fit(data_of(2)), ax=ax
    ),
    "marginal": lambda ax: plot.plot_marginal(np.arange(50.0), np.arange(40.0), ax=ax),
    "pit": lambda ax: plot.plot_pit(np.linspace(0.0, 1.0, 50), ax=ax),
    "reliability": lambda ax: plot.plot_reliability(np.linspace(0.0, 1.0, 50), ax=ax),
}


@pytest.mark.parametrize("draw", PANELS.values(), ids=PANELS)
def test_a_panel_can_be_drawn_on_axes_of_the_caller_with_labels(draw):
    figure = Figure()
    axis, other = figure.subplots(1, 2)
    assert draw(axis) is figure
    assert axis.has_data() and not other.has_data()
    assert axis.get_xlabel() and axis.get_ylabel()


@pytest.mark.parametrize("name", ["plot_conditional", "plot_given"])
def test_conditional_panels_too(conditional, name):
    figure = Figure()
    axis, other = figure.subplots(1, 2)
    shown = {"plot_conditional": conditional, "plot_given": conditional.given([0.0, 0.0])}[name]
    assert getattr(plot, name)(shown, ax=axis) is figure
    assert axis.has_data() and not other.has_data() and axis.get_xlabel() and axis.get_ylabel()


def test_a_feature_can_be_named(conditional):
    (axis,) = plot.plot_conditional(conditional, feature="slope").axes
    assert axis.get_xlabel().startswith("slope")
    with pytest.raises(ValueError, match="unknown feature 'width': choose one of depth, slope"):
        plot.plot_conditional(conditional, feature="width")


def test_rows_are_shown_as_often_as_their_weights_say():
    data = data_of(1)
    weight = np.arange(len(data)) % 3
    model = GaussianMixtureDensity(random_state=0).fit(data, sample_weight=weight)
    (shown,) = training_rows(model)
    np.testing.assert_allclose(
        np.sort(shown, axis=0), np.sort(np.repeat(data, weight, axis=0), axis=0), atol=1e-12
    )
    model.fit(data, sample_weight=weight + 0.5)
    (shown,) = training_rows(model)
    assert len(shown) == len(data)
    # In equal steps of the cumulated weights no share is off by more than a row.
    counts = np.array([np.sum(np.isclose(shown[:, 0], value)) for value in data[:, 0]])
    assert np.abs(counts - len(data) * (weight + 0.5) / np.sum(weight + 0.5)).max() < 1.0
