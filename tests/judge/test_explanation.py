"""Explanations: against the closed form of a normal law, and planted changes."""

import numpy as np
import pandas as pd
import pytest
from labelled import labelled_rows
from matplotlib.figure import Figure
from scipy.stats import norm

from kexpfam import KernelExpFamily

COVARIANCE = np.array([[1.0, 0.8, 0.0], [0.8, 1.0, 0.3], [0.0, 0.3, 1.0]])


@pytest.fixture(scope="module")
def normal():
    X = np.random.default_rng(0).multivariate_normal(np.zeros(3), COVARIANCE, size=400)
    return KernelExpFamily(model="mixture", random_state=0).fit(X)


def test_surprise_and_usual_values_are_those_of_a_normal_law(normal):
    law = normal.density_.law
    assert len(law.means) == 1
    rows = np.array([[0.5, -1.0, 0.3], [3.0, -3.0, 0.0]])
    found = normal.explain(rows, draws=2000)
    z = normal.density_.scaling.to_model(rows)
    factor = np.diff(normal.density_.scaling.to_data(np.array([[0.0] * 3, [1.0] * 3])), axis=0)[0]
    precision = np.asarray(law.whiteners[0]).T @ np.asarray(law.whiteners[0])
    for j in range(3):
        sd = 1.0 / np.sqrt(precision[j, j])
        centred = z - np.asarray(law.means[0])
        mean = z[:, j] - (centred @ precision)[:, j] * sd**2
        t = (z[:, j] - mean) / sd
        # The log density lost is (t^2 - E t^2) / 2; 32 draws of t^2 / 2 have this error.
        np.testing.assert_allclose(found.surprise[:, j], 0.5 * (t**2 - 1.0), atol=4.0 / np.sqrt(2 * 32))
        centre = normal.density_.scaling.to_data(np.where(np.arange(3) == j, mean[:, None], z))[:, j]
        error = sd * factor[j] / np.sqrt(2000)
        np.testing.assert_allclose(found.usual[:, j], centre, atol=4.0 * 1.2533 * error)
        width = 2.0 * norm.ppf(0.95) * sd * factor[j]
        np.testing.assert_allclose(found.upper[:, j] - found.lower[:, j], width, atol=4.0 * 3.0 * error)
    assert found.first[1] in ("0", "1")


def test_a_changed_column_is_named(normal):
    rows = np.random.default_rng(1).multivariate_normal(np.zeros(3), COVARIANCE, size=60)
    place = np.arange(60) % 3
    rows[np.arange(60), place] += 8.0
    named = np.array(normal.explain(rows, draws=200).first, int)
    assert np.mean(named == place) >= 0.95


def test_labels_missing_cells_and_unknown_labels(labelled):
    rows = labelled_rows(1).dropna().head(4).reset_index(drop=True)
    rows.loc[0, "kind"] = "v" if rows.loc[0, "kind"] == "u" else "u"
    rows.loc[1, "b"] = np.nan
    rows.loc[2, "kind"] = "w"
    found = labelled.explain(rows, draws=128)
    assert found.surprise[1, 2] == 0.0
    assert found.first[2] == "kind" and found.surprise[2, 0] == np.inf
    frame = found.frame()
    assert isinstance(frame, pd.DataFrame) and len(frame) == 12
    line = frame[(frame["row"] == 0) & (frame["column"] == "kind")].iloc[0]
    assert line["value"] != line["usual"] and line["lower"] == ""
    assert (frame[frame["row"] == 2]["value"] == "unknown").sum() == 1
    assert isinstance(found.plot(2), Figure)
    np.testing.assert_array_equal(found.p_values, labelled.novelty(rows))


def test_a_target_is_explained_by_its_condition(line):
    found = line.explain([[0.5], [0.5]], [1.0, 3.0])
    assert found.surprise[0, 0] < 2.0 < found.surprise[1, 0]
    np.testing.assert_allclose(found.usual[:, 0], line.quantile([[0.5], [0.5]], 0.5))
    np.testing.assert_allclose(
        np.concatenate([found.lower, found.upper], axis=1), line.interval([[0.5]] * 2, 0.9)
    )
    assert found.names == ["y"] and np.all(np.isnan(found.p_values))
