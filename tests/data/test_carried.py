"""Carried columns: which they are, their coefficients, and rows with missing cells."""

import numpy as np
import pytest

from kexpfam.data.carried import Carried

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(80, 3))


def rows(values: np.ndarray) -> np.ndarray:
    """Return four columns: two free ones, a combination of them, and a third free one."""
    return np.column_stack([values[:, :2], 2.0 * values[:, 0] - values[:, 1] + 1.0, values[:, 2]])


@pytest.fixture
def carried() -> Carried:
    return Carried.found(rows(Z), range(4))


def test_the_combination_is_the_one_of_the_table(carried):
    (found,) = carried.combinations
    assert (found.place, found.parts, found.constant) == (2, (0, 1), 1.0)
    assert found.coefficients.tolist() == [2.0, -1.0]
    assert carried.modelled == [0, 1, 3]


def test_four_of_forty_columns_are_found_in_any_units():
    free = RNG.normal(size=(200, 36))
    mixed = free @ RNG.normal(size=(36, 4)) + 5.0
    table = np.column_stack([free, mixed]) * 10.0 ** RNG.uniform(-6, 6, size=40)
    found = Carried.found(table, range(40))
    assert found.places == [36, 37, 38, 39]
    restored = found.restored(found.dropped(table))
    assert np.all(np.abs(restored - table) <= 1e-10 * table.std(axis=0))


@pytest.mark.parametrize("noise", [1e-5, 1e-2])
def test_correlated_columns_are_not_carried(noise):
    assert Carried.found(np.column_stack([Z[:, 0], Z[:, 0] + noise * Z[:, 1]]), range(2)) is None


def test_a_combination_up_to_decimals_is_carried_with_its_own_tolerance():
    table = np.column_stack([Z, np.round(Z.sum(axis=1), 6)])
    found = Carried.found(table, range(4))
    assert found.places == [3]
    assert np.all(np.isfinite(found.dropped(table)))


def test_constant_columns_and_few_rows_are_left_to_the_checks():
    assert Carried.found(np.column_stack([Z, np.full(80, 3.0)]), range(4)) is None
    assert Carried.found(RNG.normal(size=(10, 12)), range(12)) is None


def test_only_the_columns_asked_for_are_considered():
    assert Carried.found(rows(Z), [0, 2, 3]) is None


def test_rows_that_disagree_are_infinite(carried):
    table = rows(Z[:3])
    table[1, 2] += 1e-3
    assert np.isfinite(carried.dropped(table)).all(axis=1).tolist() == [True, False, True]


def test_a_single_missing_cell_is_solved_for_and_several_are_not(carried):
    table = rows(Z[:4])
    table[0, 0] = table[1, 2] = table[2, :2] = table[3, 3] = np.nan
    found = carried.dropped(table)
    np.testing.assert_allclose(found[0], Z[0], rtol=1e-13)
    np.testing.assert_array_equal(found[1], Z[1])
    np.testing.assert_array_equal(np.isnan(found[2:]), [[True, True, False], [False, False, True]])
    assert carried.undetermined(table).tolist() == [False, False, True, False]
