"""The charts of the front page: what their bars show."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from reproduction import held_out


def _record(method, nll, *, dataset="sea", seed=0, experiment="uci", impossible=0, ties=0.0):
    values = {"nll": nll, "impossible_rows": impossible, "training_rows": 100, "columns": 4, "ties": ties}
    cell = {"dataset": dataset, "method": method, "seed": seed, "measure": experiment}
    return {"cell": cell, "status": "ok", "values": values, "kexpfam": "9.8.7", "commit": "abc1234"}


def _bars(svg):
    """Return colour, top and height of the bars, without the squares of the legend."""
    rows = [tag.attrib for tag in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")]
    return [(row["fill"], float(row["y"]), float(row["height"])) for row in rows if row.get("class") != "key"]


def test_bars_are_as_high_as_the_mean_of_the_records():
    records = {"uci": [_record("auto", 1.0), _record("auto", 3.0, seed=1), _record("ngboost", 4.0)]}
    ours, other = _bars(held_out.charts(records)["held-out.svg"])
    assert ours[0] == held_out.COLOURS[0] and other[0] == held_out.COLOURS[1]
    assert other[2] / ours[2] == pytest.approx(2.0, abs=0.02)
    assert other[1] < ours[1]


def test_joint_densities_are_divided_by_the_columns_and_infinite_ones_reach_the_top():
    records = [
        _record("auto", 8.0, experiment="joint"),
        _record("vine", 8.0, experiment="joint", impossible=1),
    ]
    svg = held_out.charts({"joint": records})["held-out-joint.svg"]
    assert ">2</text>" in svg and "∞" in svg  # 8 nats in 4 columns
    ours, infinite = _bars(svg)
    assert infinite[2] >= ours[2]


def test_sets_with_many_ties_are_left_out():
    records = {"uci": [_record("auto", 1.0), _record("auto", -9.0, dataset="tied", ties=0.5)]}
    chart = held_out.charts(records)["held-out.svg"]
    assert ">sea</text>" in chart and "tied" not in chart


def test_the_caption_states_the_version_and_the_commits():
    text = held_out.caption({"uci": [_record("auto", 1.0)], "joint": []})
    assert "9.8.7" in text and "abc1234" in text


def test_the_table_of_seconds_is_that_of_the_newest_run(tmp_path, monkeypatch):
    runs = [
        {"fits": {"a | b": {"kexpfam": {"seconds": s}, "flow": {"seconds": 5}}}, "commit": "c"}
        for s in (1, 2)
    ]
    (tmp_path / "fits.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    monkeypatch.setattr(held_out, "FITS", tmp_path / "fits.jsonl")
    assert re.search(r"\| a \\\| b \| 2\.0 \| 5\.0 \|", held_out.cost())
