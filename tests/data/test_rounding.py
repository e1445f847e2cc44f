"""Rounded columns: the lattice is found, and numbers of it are those of the table bit by bit."""

import numpy as np
import pytest

from kexpfam.data.kinds import Atom, Rounded
from kexpfam.data.rounding import Rounding, Roundings


def texts(values: list[str]) -> np.ndarray:
    return np.array([float(text) for text in values])


@pytest.mark.parametrize(
    ("values", "step", "offset"),
    [
        (["1", "2", "5"], 1.0, 0.0),
        (["10", "25", "100"], 15.0, 10.0),
        (["0.1", "0.3", "0.7", "1.2"], 0.1, 0.0),
        (["0.5", "1", "2.5"], 0.5, 0.0),
        (["0.25", "1", "1.5"], 0.25, 0.0),
        (["12.37", "14.2", "13.05"], 0.01, 0.0),
        # Halves and tenths in one column: the tenths.
        (["18", "18.5", "19.1", "20.5"], 0.1, 0.0),
        (["0.05", "0.15", "0.45"], 0.1, 0.05),
        (["-1.5", "-0.5", "2.5"], 1.0, 0.5),
        (["1e-05", "3e-05"], 2e-05, 1e-05),
        (["1200", "1300", "5000"], 100.0, 0.0),
    ],
)
def test_the_coarsest_lattice_of_all_values_is_found(values, step, offset):
    column = texts(values)
    found = Rounding.found(np.append(column, np.nan))
    assert found.size == pytest.approx(step)
    assert found.offset / found.unit == pytest.approx(offset)
    assert np.array_equal(found.nearest(column + 0.3 * step), column)
    assert np.array_equal(found.nearest(column), column)
    assert found.holds(column).all() and not found.holds(column + 0.01 * step).any()


@pytest.mark.parametrize("seed", range(3))
def test_numbers_that_are_not_rounded_have_no_lattice(seed):
    rng = np.random.default_rng(seed)
    for column in (rng.normal(size=20), rng.normal(size=20).astype(np.float32).astype(float), np.ones(20)):
        assert Rounding.found(column) is None
    assert Rounding.found(np.append(np.arange(1000.0), np.pi)) is None


def test_a_lattice_holds_the_numbers_that_tables_hold():
    """3 times 0.1 is not 0.3: each number of the lattice is the one that its text stands for."""
    for places, step in ((1, 0.1), (2, 0.01), (3, 0.001)):
        written = texts([f"{k * step:.{places}f}" for k in range(-500, 500)])
        for found in (Rounding.found(written), Rounding.of_step(step)):
            assert np.array_equal(found.nearest(written + 0.2 * step), written)
    assert Rounding.of_step(1 / 3).nearest(np.array([0.6, 1.1])).tolist() == [2 / 3, 1.0]
    assert Rounding.of_step(0.7, 0.2).nearest(np.array([1.0])) == pytest.approx(0.9)


def test_a_kind_takes_step_and_offset_from_the_column():
    column = np.array([0.05, 0.25, 0.35, np.nan])
    assert Rounded().fitted(column, "a") == Rounded(0.1, None, None, 0.05)
    assert Rounded(0.05, 0).fitted(column, "a") == Rounded(0.05, 0, None, 0.0)
    assert Rounded().fitted(np.array(["1", "3", None], object), "a") == Rounded(2.0, None, None, 1.0)
    assert Atom(0, "rounded").fitted(np.array([0.0, 2.0, 5.0]), "a").rest == Rounded(3.0, None, None, 2.0)
    with pytest.raises(
        ValueError, match=r"column a holds 0\.05 and 0\.25, whose difference is no multiple of 0\.3"
    ):
        Rounded(0.3).fitted(column, "a")
    with pytest.raises(ValueError, match="column a is not rounded"):
        Rounded().fitted(np.array([0.1, np.pi]), "a")


@pytest.mark.parametrize("seed", range(5))
def test_several_steps_in_one_column_have_their_shares(seed):
    """Whole numbers, halves, and numbers that are not rounded; every second half is whole by chance."""
    rng = np.random.default_rng(seed)
    values, kind = rng.normal(30.0, 10.0, 4000), rng.choice(3, 4000, p=[0.7, 0.25, 0.05])
    column = np.choose(kind, [np.round(values), np.round(2.0 * values) / 2.0, values])
    found = Roundings.found(column)
    assert [lattice.size for lattice in found.lattices] == [1.0, 0.5]
    assert np.array(found.shares) == pytest.approx([0.7, 0.25], abs=4.0 * 0.5 / np.sqrt(4000))
    draws = found.nearest(rng.normal(30.0, 10.0, 4000))
    whole, halves = draws == np.round(draws), 2.0 * draws == np.round(2.0 * draws)
    assert whole.mean() == pytest.approx(0.7 + 0.125, abs=0.03)
    assert halves.mean() == pytest.approx(0.95, abs=0.02)
    assert np.array_equal(found.nearest(draws), draws)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("step", [1.0, 0.5, 0.01])
def test_a_single_step_is_not_taken_for_several(seed, step):
    values = np.random.default_rng(seed).normal(30.0 * step, 20.0 * step, 500)
    found = Roundings.found(Rounding.of_step(step).nearest(values))
    assert isinstance(found, Rounding) and found.size == step


def test_steps_as_long_as_the_spread_are_chance():
    """Half of the values are 10.0: the most frequent number is no lattice of its own."""
    rng = np.random.default_rng(0)
    column = np.where(rng.random(1000) < 0.5, 10.0, np.round(rng.normal(10.0, 2.0, 1000), 1))
    assert all(lattice.size < 1.0 for lattice in getattr(Roundings.found(column), "lattices", ()))
