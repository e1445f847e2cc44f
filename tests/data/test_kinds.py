"""Kinds of columns: supports, names, scalings and cells."""

import numpy as np
import pandas as pd
import pytest

from kexpfam.data.encoding import ColumnKindWarning, TableSchema, categorical, columns_of
from kexpfam.data.kinds import (
    KINDS,
    Atom,
    Bounded,
    Category,
    Integer,
    Periodic,
    Positive,
    Real,
    Rounded,
    as_kind,
)
from kexpfam.data.scaling import InputScaling, Scaling

ALL = (
    Real(),
    Positive(),
    Bounded(0, 1),
    Periodic(360),
    Integer(0),
    Category(("a", "b", "c")),
    Atom(0, "positive"),
    Integer(),
    Rounded(0.1, 0.0, None, 0.05),
)


def rows_of_all(seed: int, count: int = 60) -> np.ndarray:
    rng = np.random.default_rng(seed)
    paid = np.where(rng.random(count) < 0.3, 0.0, rng.lognormal(size=count))
    columns = [
        rng.normal(size=count),
        rng.lognormal(size=count),
        rng.uniform(size=count),
        rng.uniform(0, 360, count),
    ]
    columns += [rng.poisson(2, count), rng.integers(3, size=count), paid, rng.integers(-5, 5, count)]
    columns += [rng.integers(0, 30, count) / 10 + 0.05]
    values = np.column_stack(columns).astype(float)
    values[rng.random(values.shape) < 0.1] = np.nan
    return values


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("real", Real()),
        ("positive", Positive()),
        ("bounded:0:1", Bounded(0, 1)),
        ("bounded:0:", Bounded(0, None)),
        ("bounded::2.5", Bounded(None, 2.5)),
        ("periodic:360", Periodic(360)),
        ("integer", Integer()),
        ("integer:1:6", Integer(1, 6)),
        ("count", Integer(0)),
        ("rounded", Rounded()),
        ("rounded:0.1", Rounded(0.1)),
        ("rounded:5:0:", Rounded(5, 0)),
        ("category", Category()),
        ("category:low:high", Category(("low", "high"))),
        ("atom:0", Atom(0, Real())),
        ("atom:0:bounded:0:5", Atom(0, Bounded(0, 5))),
    ],
)
def test_a_text_stands_for_a_kind(text, kind):
    assert as_kind(text) == kind


def test_kinds_differ():
    assert len({repr(kind) for kind in ALL}) == len(ALL)
    assert all((one == other) == (i == j) for i, one in enumerate(ALL) for j, other in enumerate(ALL))
    numbers = {"real", "positive", "bounded", "periodic", "integer", "count", "rounded", "atom"}
    assert set(KINDS) == numbers | {"category"}


@pytest.mark.parametrize(
    "wrong",
    [
        "angle",
        "bounded:2:1",
        "periodic",
        "periodic:0",
        "atom:0:category",
        "atom:3:count",
        "rounded:0",
        7,
        None,
    ],
)
def test_what_stands_for_no_kind_is_refused(wrong):
    with pytest.raises(ValueError, match=r"kind|bound|period|lacks|atom|step"):
        as_kind(wrong)


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        (Positive(), [1e-300, 5.0], [0.0, -1.0]),
        (Bounded(0, 1), [0.0, 1.0], [-0.1, 1.1]),
        (Bounded(None, 1), [-1e9, 1.0], [1.1]),
        (Integer(0), [0.0, 7.0], [-1.0, 0.5]),
        (Category(("a", "b")), [0.0, 1.0], [-1.0, 2.0]),
        (Rounded(0.1, 0, 2), [0.0, 0.1, 0.14, 2.0], [-0.1, 2.1]),
        (Atom(0, "positive"), [0.0, 2.0], [-1.0]),
        (Atom(-1, "count"), [-1.0, 0.0, 3.0], [-2.0, 0.5]),
    ],
)
def test_supports(kind, inside, outside):
    assert kind.inside(np.array([*inside, np.nan])).all()
    assert not kind.inside(np.array(outside)).any()


@pytest.mark.parametrize("seed", range(3))
def test_units_lead_back_to_the_data(seed):
    values = rows_of_all(seed)
    units = Scaling.of(values, ALL)
    z = units.to_model(values)
    assert units.to_data(z) == pytest.approx(values, abs=1e-12, nan_ok=True)
    assert np.array_equal(np.isinf(z[:, 6]), values[:, 6] == 0.0)
    assert not np.isinf(np.delete(z, 6, axis=1)).any()


def test_only_lengths_are_stretched():
    """The Jacobian is that of finite differences, and 0 for atoms, missing cells and discrete columns."""
    values = rows_of_all(0)
    units = Scaling.of(values, ALL)
    found = units.log_jacobians(values)
    for j in (0, 1, 2, 3, 6, 8):
        there = ~np.isnan(values[:, j]) & (values[:, j] != 0.0)
        z, near = (units.to_model(points)[there, j] for points in (values, values * (1 + 1e-6)))
        moved = (near - z) / (1e-6 * values[there, j])
        assert found[there, j] == pytest.approx(np.log(moved), abs=1e-4)
    assert np.all(found[np.isnan(values) | (values == 0.0)] == 0.0)
    assert np.all(found[:, [4, 5, 7]] == 0.0)


def test_an_unknown_input_label_has_no_indicator_or_is_a_learned_gap():
    columns = np.array([[0.0, 0.0], [1.0, np.nan], [2.0, 1.0]]).repeat(100, axis=0)
    kinds = (Category(("a", "b", "c")), Category(("d", "e")))
    scaling = InputScaling.of(columns, kinds, inputs=True)
    found = scaling.to_model(np.array([[1.0, 0.0], [-1.0, np.nan], [-1.0, -1.0]]))
    assert found[0].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert found[1].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert found[2].tolist() == found[1].tolist()
    rare = InputScaling.of(columns[::2], kinds, inputs=True).to_model(np.array([[0.0, -1.0]]))
    assert rare.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


class TestTableSchema:
    frame = pd.DataFrame(
        {
            "text": ["x", "y", None, "x"] * 6,
            "flag": [True, False, True, True] * 6,
            "code": pd.Categorical([3, 1, 1, 3] * 6),
            "whole": pd.array([1, None, 2, 3] * 6, dtype="Int64"),
            "number": np.linspace(-1.0, 1.0, 24),
        }
    )

    def encoded(self, **wanted):
        cells = columns_of(self.frame)
        columns = TableSchema.of(cells, list(self.frame.columns), wanted, categorical(self.frame))
        return columns, columns.encode(cells)

    def test_texts_booleans_and_categories_are_labels(self):
        columns, _ = self.encoded()
        assert columns.shown == {
            "text": Category(("x", "y")),
            "flag": Category((False, True)),
            "code": Category((1, 3)),
            "whole": Real(),
            "number": Real(),
        }

    def test_cells_come_back(self):
        columns, values = self.encoded(whole="count")
        text, flag, code, whole, number = columns.cells(values)
        assert text.tolist() == ["x", "y", None, "x"] * 6
        assert flag.tolist() == self.frame["flag"].tolist() and flag.dtype == bool
        assert code.tolist() == [3, 1, 1, 3] * 6
        assert np.array_equal(whole, [1, np.nan, 2, 3] * 6, equal_nan=True)
        assert np.array_equal(number, self.frame["number"])
        assert columns.decode(values).dtype == object

    def test_whole_numbers_are_whole(self):
        columns = TableSchema((Integer(), Integer(0)))
        assert columns.decode(np.array([[1.0, 2.0]])).dtype == int
        assert columns.decode(np.array([[1.5, 2.0]]), whole=False).tolist() == [[1.5, 2.0]]

    def test_a_label_that_was_not_there_is_named(self):
        columns = TableSchema((Category(("a", "b")),), ("kind",))
        with pytest.raises(ValueError, match="kind holds 'c'"):
            columns.encode([np.array(["a", "c"])])
        assert columns.encode([np.array(["a", "c"])], unknown=True).tolist() == [[0.0], [-1.0]]

    @pytest.mark.parametrize(
        "column",
        [np.array(["2020-01-01"], "M8[ns]"), np.array([3], "m8[s]"), np.array([pd.Timestamp(0)], object)],
    )
    def test_dates_are_refused_with_a_hint(self, column):
        with pytest.raises(ValueError, match="days since"):
            TableSchema.of([column])

    def test_names_of_rows_are_refused(self):
        with pytest.raises(ValueError, match="names rows"):
            TableSchema.of([np.array([f"row {i}" for i in range(40)])])

    def test_a_kind_for_no_column_is_refused(self):
        with pytest.raises(ValueError, match=r"no column 'ege'.*the columns are age"):
            TableSchema.of([np.zeros(3)], ["age"], {"ege": "real"})
        with pytest.raises(ValueError, match="positions are 0 to 0"):
            TableSchema.of([np.zeros(3)], None, {1: "real"})

    def test_cells_outside_the_support_are_named(self):
        with pytest.raises(ValueError, match=r"column share holds 1\.5"):
            TableSchema((Bounded(0, 1),), ("share",)).check(np.array([[0.5], [1.5]]))

    def test_counts_and_proportions_are_hinted_at_unless_a_kind_was_asked_for(self):
        rng = np.random.default_rng(0)
        values = np.column_stack([rng.poisson(2, 300), rng.uniform(size=300), rng.normal(size=300)])
        columns = TableSchema.of(list(values.T), ["count", "share", "real"])
        with pytest.warns(ColumnKindWarning) as caught:
            columns.hints(values, None)
        assert ["count hold few" in str(one.message) for one in caught] == [True, False]
        assert ["share hold numbers from 0" in str(one.message) for one in caught] == [False, True]
        columns.hints(values, {"count": "real", "share": "real"})
