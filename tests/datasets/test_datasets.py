import numpy as np
import pytest

from kexpfam.datasets import SYNTHETIC, grid, rings, two_moons

# A square that holds all of the mass, and enough midpoints for the narrowest ridge (standard deviation 0.1).
SQUARES = {"two-moons": 6.0, "rings": 6.5, "grid": 2.5}


def midpoints(half_width, count):
    edges = np.linspace(-half_width, half_width, count + 1)
    centres = 0.5 * (edges[1:] + edges[:-1])
    mesh = np.stack(np.meshgrid(centres, centres, indexing="ij"), -1).reshape(-1, 2)
    return mesh, (edges[1] - edges[0]) ** 2


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_density_integrates_to_one(name):
    points, cell = midpoints(SQUARES[name], 600)
    assert np.exp(SYNTHETIC[name]().log_density(points)).sum() * cell == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_draws_have_the_entropy_of_the_density(name, seed):
    density = SYNTHETIC[name]()
    points, cell = midpoints(SQUARES[name], 600)
    log_density = density.log_density(points)
    entropy = -np.sum(np.exp(log_density) * log_density) * cell
    surprise = -density.log_density(density.sample(20_000, seed))
    assert abs(surprise.mean() - entropy) < 5 * surprise.std() / np.sqrt(len(surprise))


@pytest.mark.parametrize(("name", "entropy"), [("two-moons", 2.66), ("rings", 3.15), ("grid", -1.07)])
def test_the_entropies_are_the_known_ones(name, entropy):
    density = SYNTHETIC[name]()
    surprise = -density.log_density(density.sample(50_000, 2))
    # The known values have two decimals.
    assert abs(surprise.mean() - entropy) < 5 * surprise.std() / np.sqrt(len(surprise)) + 0.005


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_draws_fall_into_boxes_as_often_as_the_density_says(name):
    density = SYNTHETIC[name]()
    draws = density.sample(20_000, 3)
    points, cell = midpoints(SQUARES[name], 600)
    masses = np.exp(density.log_density(points)) * cell
    for sign_x in (-1, 1):
        for sign_y in (-1, 1):
            # Shifted off the axes, so that the boxes do not share the density's own symmetry.
            inside = lambda x, a=sign_x, b=sign_y: (a * (x[:, 0] - 0.5) > 0) & (b * (x[:, 1] - 0.5) > 0)
            expected = masses[inside(points)].sum()
            error = np.sqrt(max(expected * (1 - expected), 1e-4) / len(draws))
            assert (
                abs(inside(draws).mean() - expected) < 5 * error + 2e-3
            )  # 2e-3: the cells that the line cuts


@pytest.mark.parametrize("dim", [2, 5])
def test_rings_have_shares_proportional_to_their_circumference(dim):
    draws = rings(dim).sample(20_000, 0)
    nearest = np.abs(np.linalg.norm(draws[:, :2], axis=1)[:, None] - [1.0, 3.0, 5.0]).argmin(axis=1)
    for circle, share in enumerate([1 / 9, 3 / 9, 5 / 9]):
        error = np.sqrt(share * (1 - share) / len(draws))
        assert abs(np.mean(nearest == circle) - share) < 5 * error


def test_further_dimensions_of_rings_are_independent_noise():
    draws = rings(4).sample(20_000, 0)
    noise = -0.5 * (draws[:, 2:] / 0.1) ** 2 - np.log(0.1 * np.sqrt(2 * np.pi))
    expected = rings(2).log_density(draws[:, :2]) + noise.sum(axis=1)
    np.testing.assert_allclose(rings(4).log_density(draws), expected, rtol=1e-10)
    # The variance of a normal's squares is 2 sigma^4.
    assert np.all(np.abs(np.mean(draws[:, 2:] ** 2, axis=0) - 0.01) < 5 * 0.01 * np.sqrt(2 / len(draws)))


def test_rings_have_a_finite_log_density_at_the_origin():
    assert np.isfinite(rings().log_density(np.zeros((1, 2)))).all()


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_the_grid_is_an_equal_mixture_of_normals_at_the_unit_vectors(dim):
    points = grid(dim).sample(50, 0)
    constant = (2 * np.pi * 0.01) ** (-dim / 2)
    twin = [np.mean([constant * np.exp(-np.sum((x - e) ** 2) / 0.02) for e in np.eye(dim)]) for x in points]
    np.testing.assert_allclose(np.exp(grid(dim).log_density(points)), twin, rtol=1e-9)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_draws_repeat_with_their_seed_and_have_the_asked_shape(name):
    density = SYNTHETIC[name]()
    assert density.sample(0, 0).shape == (0, 2)
    assert density.sample(37, 0).shape == (37, density.dim)
    np.testing.assert_array_equal(density.sample(37, 0), density.sample(37, 0))
    assert not np.array_equal(density.sample(37, 0), density.sample(37, 1))


@pytest.mark.parametrize(("make", "dim"), [(rings, 1), (rings, 0), (grid, 0), (grid, -2)])
def test_a_bad_dimension_is_refused(make, dim):
    with pytest.raises(ValueError, match="dim"):
        make(dim)


def test_points_of_the_wrong_width_are_refused():
    with pytest.raises(ValueError, match="shape"):
        two_moons().log_density(np.zeros((3, 4)))
