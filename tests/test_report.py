import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection, PathCollection
from matplotlib.figure import Figure
from oracles import with_constants

from kexpfam import DDE, ConditionalKernelExpFamily, DoublyDual, KernelExpFamily, diagnostics, report
from kexpfam.solvers import reference

LENGTHSCALES = {1: 1.0, 2: 1.0, 4: [1.0, 1.0, np.inf, np.inf]}


@pytest.fixture(scope="module", autouse=True)
def quick_distillation():
    with with_constants(reference, COMPONENTS=4, DRAWS=500, CANDIDATES=1500):
        yield


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def data_of(dim):
    rng = np.random.default_rng(0)
    return rng.normal(rng.choice([-1.5, 1.5], (40, 1)), 0.5, (40, dim))


@pytest.fixture(scope="module", params=LENGTHSCALES, ids=lambda dim: f"{dim}-D")
def model(request):
    settings = {"rkhs_penalty": 1e-2, "base": "gaussian", "n_centres": 10, "random_state": 0}
    lengthscale = LENGTHSCALES[request.param]
    return KernelExpFamily(solver="exact", lengthscale=lengthscale, **settings).fit(data_of(request.param))


@pytest.fixture(scope="module")
def saddle():
    saddle = DoublyDual(width=8, transport_depth=1, nu_depth=1, batch_size=32, transport_updates=1, nu_updates=1)
    solver = DDE(saddle=saddle, steps=50, nodes=512, snapshots=True)
    settings = {"lengthscale": 1.0, "rkhs_penalty": 1e-2, "n_centres": 10, "random_state": 0}
    return KernelExpFamily(solver=solver, **settings).fit(data_of(2))


@pytest.mark.parametrize("with_data", [True, False], ids=["with data", "without data"])
def test_the_density_of_any_dimension_is_a_figure_that_can_be_written(model, with_data, tmp_path):
    data = data_of(model.n_features_in_) if with_data else None
    figure = report.plot_density(model, data, n_samples=100)
    assert isinstance(figure, Figure)
    assert all(axis.has_data() for axis in figure.axes)
    figure.savefig(tmp_path / "density.png", dpi=40)
    assert (tmp_path / "density.png").stat().st_size > 1000


def test_the_curve_on_the_line_is_the_density():
    settings = {"lengthscale": 1.0, "rkhs_penalty": 1e-2, "n_centres": 10, "random_state": 0}
    model = KernelExpFamily(solver="exact", **settings).fit(data_of(1))
    axis = report.plot_density(model, data_of(1), n_samples=100).axes[0]
    (curve,) = axis.get_lines()
    x, y = curve.get_data()
    np.testing.assert_allclose(np.log(y), model.score_samples(np.asarray(x)[:, None]), atol=1e-9)


def test_the_dimensions_that_are_shown_can_be_chosen():
    settings = {"rkhs_penalty": 1e-2, "base": "gaussian", "n_centres": 10, "random_state": 0}
    model = KernelExpFamily(solver="exact", lengthscale=LENGTHSCALES[4], **settings).fit(data_of(4))
    data = data_of(4)
    (axis,) = report.plot_density(model, data, n_samples=100, dims=(3, 1)).axes
    np.testing.assert_allclose(axis.collections[0].get_offsets(), data[:, [3, 1]])
    assert axis.get_xlabel().endswith("3")


@pytest.mark.slow
def test_the_trace_is_a_figure_with_a_panel_per_signal(saddle):
    figure = report.plot_trace(saddle)
    assert isinstance(figure, Figure)
    titles = [axis.get_title() for axis in figure.axes]
    assert "value" in titles
    assert "sampler gap" in titles
    (line,) = figure.axes[titles.index("value")].get_lines()
    np.testing.assert_array_equal(line.get_ydata(), saddle.solution_.trace["value"])


def test_a_model_without_saddle_steps_has_no_trace(model):
    with pytest.raises(ValueError, match="no saddle steps to show"):
        report.plot_trace(model)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, 6])
def test_snapshots_are_a_panel_each(saddle, most):
    kept = sorted(map(int, saddle.solution_.snapshots))
    figure = report.plot_snapshots(saddle, most=most)
    assert isinstance(figure, Figure)
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert len(titles) == min(most, len(kept))
    assert titles[0] == "initialisation"
    if most > 1:
        assert titles[-1] == f"after {kept[-1]} f updates"


def test_a_model_without_snapshots_says_how_to_get_them(model):
    with pytest.raises(ValueError, match=r"DDE\(snapshots=True\)"):
        report.plot_snapshots(model)


CHEAP = {
    "solver": "exact",
    "condition_lengthscale": 1.0,
    "lengthscale": 1.0,
    "rkhs_penalty": 1e-2,
    "base_width": 1.0,
    "power": False,
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
    with with_constants(diagnostics, DRAWS=200, NODES=1024, CERTIFYING_DRAWS=1024, TRACE_DRAWS=200):
        return conditional.diagnose(*rows_of(1))


def offsets(axis):
    """Return the points of the scatter on the axis."""
    (points,) = [kept for kept in axis.collections if isinstance(kept, PathCollection)]
    return points.get_offsets()


@pytest.mark.parametrize("feature", [0, 1])
def test_the_conditional_median_and_its_intervals_run_along_one_feature(conditional, feature):
    X, y = conditional.training_data_
    (axis,) = report.plot_conditional(conditional, feature=feature, coverages=(0.5, 0.9)).axes
    (median,) = axis.get_lines()
    grid = np.tile(np.median(X, axis=0), (len(median.get_xdata()), 1))
    grid[:, feature] = median.get_xdata()
    np.testing.assert_allclose(median.get_ydata(), conditional.quantile(grid, 0.5))
    bands = {band.get_label(): band.get_paths()[0] for band in axis.collections if isinstance(band, FillBetweenPolyCollection)}
    assert list(bands) == ["90% interval", "50% interval"]
    low, high = conditional.interval(grid, 0.9).T
    extent = bands["90% interval"].get_extents()
    np.testing.assert_allclose([extent.y0, extent.y1], [low.min(), high.max()])
    np.testing.assert_allclose(offsets(axis), np.column_stack([X[:, feature], y]))
    assert axis.get_xlabel().startswith(FEATURES[feature])
    assert axis.get_ylabel() == "y"


def test_a_conditional_model_can_be_held_against_other_data(conditional, tmp_path):
    X, y = rows_of(1)
    figure = report.plot_conditional(conditional, X, y[:, None], coverages=())
    np.testing.assert_allclose(offsets(figure.axes[0]), np.column_stack([X[:, 0], y]))
    figure.savefig(tmp_path / "conditional.png", dpi=40)
    assert (tmp_path / "conditional.png").stat().st_size > 1000


def test_a_conditional_model_of_a_frame_is_shown_without_a_warning(conditional, monkeypatch):
    monkeypatch.setattr(conditional, "feature_names_in_", np.array(FEATURES, dtype=object), raising=False)
    assert report.plot_conditional(conditional).axes


BAD_CONDITIONAL = {
    "features alone": ({"X": rows_of(1)[0]}, "both X and y"),
    "no such feature": ({"feature": 2}, "feature must be from 0 to 1, got 2"),
    "senseless coverage": ({"coverages": (1.5,)}, "coverage must lie strictly between 0 and 1"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CONDITIONAL.values(), ids=BAD_CONDITIONAL)
def test_what_a_conditional_plot_cannot_show_is_an_error(conditional, arguments, message):
    with pytest.raises(ValueError, match=message):
        report.plot_conditional(conditional, **arguments)


def test_intervals_of_several_targets_are_refused_with_what_to_use(two_targets):
    with pytest.raises(ValueError, match=r"plot_given\(estimator.given\(x\)\)"):
        report.plot_conditional(two_targets)


def test_calibration_shows_the_counts_and_the_coverage(diagnosis, tmp_path):
    figure = report.plot_calibration(diagnosis)
    histogram, coverage = figure.axes
    counts = [bar.get_height() for bar in histogram.patches if bar.get_width() < 0.5]
    np.testing.assert_allclose(counts, np.histogram(diagnosis.calibration.pit, bins=10, range=(0.0, 1.0))[0])
    (band,) = [patch for patch in histogram.patches if patch.get_width() > 0.5]
    # Of 60 rows, 6 are expected in each tenth; P(2 <= count <= 11) is the first to reach 95 %.
    assert (band.get_y(), band.get_height()) == (2.0, 9.0)
    (uniform,) = histogram.get_lines()
    np.testing.assert_allclose(uniform.get_ydata(), 6.0)
    observed = dict(zip(*coverage.get_lines()[-1].get_data(), strict=True))
    assert observed == diagnosis.calibration.coverage
    figure.savefig(tmp_path / "calibration.png", dpi=40)
    assert (tmp_path / "calibration.png").stat().st_size > 1000


def test_calibration_needs_held_out_rows(diagnosis):
    with pytest.raises(ValueError, match="pass held-out X and y"):
        report.plot_calibration(dataclasses.replace(diagnosis, calibration=None))


def test_a_given_density_is_a_curve_over_its_draws(conditional):
    given = conditional.given([0.5, 0.0])
    (axis,) = given.plot().axes
    (curve,) = axis.get_lines()
    x, density = curve.get_data()
    np.testing.assert_allclose(np.log(density), given.score_samples(x), atol=1e-9)
    np.testing.assert_allclose(np.trapezoid(density, x), 1.0, atol=0.02)


def test_a_given_density_of_two_targets_is_a_cloud_of_draws(two_targets):
    given = two_targets.given([0.5, 0.0])
    (axis,) = report.plot_given(given, n_samples=50, random_state=3).axes
    np.testing.assert_allclose(offsets(axis), given.sample(50, random_state=3))
