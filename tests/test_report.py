import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from oracles import with_constants

from kexpfam import DDE, DoublyDual, KernelExpFamily, report
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
    saddle = DoublyDual(width=8, depth=1, batch_size=32, transport_updates=1, nu_updates=1)
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
