"""Columns of several kinds, with labels and gaps, in pictures and reports."""

import numpy as np
import pandas as pd
import pytest

from kexpfam import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.fit.learned import Learned

BRIEF = {
    "model": "chain",
    "learned": Learned(folds=2, repeats=1, width=8, epochs=5, cells=32, steps=20),
    "random_state": 0,
}
REGIONS = ["north", "south", "west <$\\frac$>"]


def table(rows=120):
    rng = np.random.default_rng(0)
    region, amount = rng.choice(REGIONS, rows), rng.gamma(4.0, 2.0, rows)
    score = amount + rng.normal(size=rows)
    score[:10] = np.nan
    return pd.DataFrame(
        {"region": region, "children": rng.poisson(1.5, rows), "amount": amount, "score": score}
    )


@pytest.fixture(scope="module")
def joint():
    return KernelExpFamily(columns={"children": "count"}, **BRIEF).fit(table())


@pytest.fixture(scope="module")
def conditional():
    return ConditionalKernelExpFamily(**BRIEF).fit(table()[["region", "children"]], table()["amount"])


def ticks(axis):
    return [label.get_text() for label in axis.get_xticklabels()]


def test_labels_stand_on_the_axes_of_a_pair_plot(joint):
    figure = joint.plot()
    assert len(figure.axes) == 10
    first = figure.axes[6]
    assert first.get_xlabel() == "region" and ticks(first)[:2] == ["north", "south"]
    shares = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(shares, [np.mean(table()["region"] == region) for region in REGIONS])


def test_a_report_names_kinds_gaps_and_labels(joint):
    page = joint.report().html
    for word in ("category of 3", "integer(low=0)", "8.3%", "missing", "north"):
        assert word in page
    assert "<$" not in page


def test_intervals_stand_under_each_label(conditional):
    (axis,) = conditional.plot(feature="region").axes
    assert ticks(axis)[:2] == ["north", "south"]
    wide = axis.containers[0]
    grid = pd.DataFrame({"region": REGIONS, "children": int(table()["children"].median())})
    low, high = conditional.interval(grid, 0.9).T
    np.testing.assert_allclose([bar.get_y() for bar in wide], low)
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in wide], high)
    title = conditional.given({"region": "south", "children": 2}).plot().axes[0].get_title()
    assert title == "given region = south, children = 2"


def test_a_report_on_rows_with_labels_takes_them_as_they_are(conditional):
    new = table()
    page = conditional.report(X=new[["region", "children"]], y=new["amount"]).html
    assert "120 held-out rows" in page and any(f"region = {one}" in page for one in REGIONS)


@pytest.mark.slow
def test_a_target_of_labels_has_probabilities_and_regions():
    frame = table()
    model = ConditionalKernelExpFamily(**BRIEF).fit(frame[["amount", "children"]], frame["region"])
    page = model.report(X=frame[["amount", "children"]], y=frame["region"]).html
    assert "probabilities of the model" in page and "regions of highest density" in page
    (axis,) = model.given({"amount": 9.0, "children": 2}).plot().axes
    heights = [bar.get_height() for bar in axis.patches]
    assert sum(heights) == pytest.approx(1.0, abs=1e-6) and axis.get_ylabel() == "probability"
