"""Specs in, records out, pages from records: each link of the chain by itself, and a short run through all of it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kexpfam import cli
from kexpfam.experiments import claims, figures, pages, runner, tables
from kexpfam.experiments.cost import Cost
from kexpfam.experiments.measurements import MEASUREMENTS
from kexpfam.experiments.methods import ALGORITHMS, CONDITIONALS, COSTED, DENSITIES, DUALS
from kexpfam.experiments.records import Ledger, chosen, good, provenance
from kexpfam.experiments.specs import EXPERIMENTS, Spec, identity, load_spec


def record(status="ok", warnings=(), values=None, **cell):
    return {"cell": cell, "status": status, "warnings": list(warnings), "values": values or {}, **provenance()}


def density_record(method, seed, nll, *, dataset="two-moons", dim=2, status="ok", **values):
    values = {"nll": nll, "truth_nll": 2.0, "mmd": 1e-3, "seconds": 3.0, "megabytes": 10.0, "sampling_seconds": 0.01} | values
    return record(status, values=values, measure="density", dataset=dataset, dim=dim, method=method, seed=seed)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_spec_names_what_exists_and_no_cell_twice(name, quick):
    spec = load_spec(name, quick=quick)
    assert spec.title
    assert len({identity(cell) for cell in spec.cells}) == len(spec.cells)
    known = {"density": DENSITIES, "conditional": CONDITIONALS, "cost": COSTED, "algorithm": ALGORITHMS, "dual": DUALS}
    for cell in spec.cells:
        assert cell["measure"] in MEASUREMENTS
        if cell["measure"] in known:
            assert cell["method"] in known[cell["measure"]], cell


def test_a_spec_is_the_product_of_its_lists():
    cells = load_spec("table1").cells
    plane = [cell for cell in cells if cell["dim"] == 2]
    assert len(plane) == 3 * 6 * 5
    assert {cell["seed"] for cell in plane} == set(range(5))
    assert len(load_spec("table1", quick=True).cells) < 8


def test_a_ledger_gives_back_what_was_appended_and_survives_a_torn_line(tmp_path):
    ledger = Ledger(tmp_path, "table1")
    assert ledger.records() == []
    ledger.append({"cell": {"seed": 0}, "status": "ok"})
    with ledger.path.open("a") as stream:
        stream.write('{"cell": {"se')
    assert [r["cell"]["seed"] for r in ledger.records()] == [0]
    ledger.append({"cell": {"seed": 1}, "status": "ok"})
    assert [r["cell"]["seed"] for r in ledger.records()] == [0, 1]
    assert all(json.loads(line) for line in ledger.path.read_text().splitlines())


def test_no_nan_is_ever_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Ledger(tmp_path, "table1").append({"cell": {}, "values": {"nll": float("nan")}})


def test_only_missing_cells_are_run_and_a_failure_is_a_record(tmp_path, monkeypatch):
    monkeypatch.setitem(MEASUREMENTS, "fake", lambda cell: {"value": 1.0 / cell["seed"]})
    spec = Spec("fake", "three cells", tuple({"measure": "fake", "seed": seed} for seed in range(3)))
    ledger, reports = Ledger(tmp_path, "fake"), []
    ledger.append(record(values={"value": 7.0}, measure="fake", seed=2))
    runner.run(spec, ledger, jobs=1, report=reports.append)
    found = {r["cell"]["seed"]: r for r in ledger.records()}
    assert found[2]["values"]["value"] == 7.0
    assert found[1]["values"]["value"] == 1.0 and found[1]["commit"]
    assert found[0]["status"].startswith("ZeroDivisionError")
    assert [r.step for r in reports] == [1, 2, 3]
    runner.run(spec, ledger, jobs=1)
    assert len(ledger.records()) == 3


def test_cost_sees_memory_that_was_held_and_let_go():
    with Cost() as cost:
        held = bytearray(200 * 2**20)
        held[::4096] = b"x" * len(held[::4096])
        del held
    assert 190 < cost.megabytes < 400 and cost.seconds > 0.0


def test_cost_sees_memory_that_an_earlier_call_needed_too():
    def peak() -> float:
        with Cost() as cost:
            blocks = [np.ones(8192) for _ in range(2000)]  # 64 kB each: freed, they stay with the process
            fence = np.ones(8192)  # the last block keeps the heap from shrinking by itself
            del blocks
        kept.append(fence)
        return cost.megabytes

    kept: list[np.ndarray] = []
    assert min(peak(), peak()) > 100


def test_table_one_shows_means_gaps_and_failures():
    records = [density_record("exact", seed, 2.1) for seed in (0, 1)]
    records += [density_record("dde", 0, 2.2), density_record("dde", 1, 2.15), density_record("dde", 2, 0.0, status="Oops: no")]
    row = next(line for line in tables.table1(records).splitlines() if "| dde |" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["two-moons", "2", "dde", "2 (1 failed)"]
    assert cells[4].startswith("2.175 ±") and cells[5] == "+0.175" and cells[6] == "+0.100"
    assert cells[7].startswith("1.00") and cells[8] == "0.11"


def test_table_two_shows_the_paper_beside_ours_and_marks_ties():
    cell = {"measure": "conditional", "dataset": "geyser"}
    records = [record(values={"nll": 0.5 + 0.1 * s}, warnings=["TiesWarning"], method="exact", seed=s, **cell) for s in (0, 1)]
    records += [record(values={"nll": 0.52, "sampler_ks_p_value": 0.4}, method="dde", seed=0, **cell)]
    records += [record("ValueError: x", method="kcef", seed=0, **cell)]
    row = [cell.strip() for cell in tables.table2(records).splitlines()[2].strip("|").split("|")]
    assert row[:7] == ["geyser*", "2", "0.55 ± 0.05", "0.52", "1", "+0.020", "0.400"]
    assert row[7] == "0.55 ± 0.07" and row[8] == "+0.00" and row[10] == "– (1 failed)" and row[11] == "1.21 ± 0.04"


def test_a_row_that_does_not_fit_its_header_is_refused():
    with pytest.raises(ValueError, match="2 columns"):
        tables.markdown(("a", "b"), [["1", "2"], ["1"]])


def test_the_slope_of_a_power_law_is_its_exponent():
    records = [
        record(values={"kl": 5.0 / n * (1.0 + 0.01 * seed)}, measure="rate", method="exact", rows=n, seed=seed)
        for n in (100, 1000, 10000)
        for seed in range(3)
    ]
    found, half_width = tables.slope(records)
    assert abs(found + 1.0) < 1e-3 and 0.0 < half_width < 0.01
    assert tables.slope(records[:2]) is None
    assert claims.rate_of("exact", -1.0)({"rate": records})[1] == claims.REPRODUCED
    assert "not reproduced" in claims.rate_of("exact", -1.5)({"rate": records})[1]


def test_a_costly_fit_is_not_called_cheap():
    costs = lambda seconds: [
        record(values={"seconds": s, "megabytes": 5.0 * s}, measure="cost", method=method, rows=rows, dim=dim)
        for method, s in (("dde", seconds), ("score matching, full", 2.0))
        for dim, rows in ((2, 400), (50, 100))
    ]
    text, verdict = claims.cost_levels({"cost": costs(1.0)})
    assert verdict == claims.REPRODUCED
    assert text == "50-D, 100 rows: 5 MB, 1.0 s against 10 MB, 2.0 s; 2-D, 400 rows: 5 MB, 1.0 s against 10 MB, 2.0 s"
    assert "not reproduced" in claims.cost_levels({"cost": costs(3.0)})[1]


def test_a_solver_is_near_exact_by_its_worst_draw():
    gaps = {"exact": (0.0, 0.0), "a": (0.01, 0.02), "b": (0.0, 0.2)}
    records = [
        record(
            values={"nll": seed + gap, "facts": {"polish_gain": gap}},
            measure="algorithm",
            dataset="two-moons",
            method=method,
            seed=seed,
        )
        for method, both in gaps.items()
        for seed, gap in enumerate(both)
    ]
    assert claims.near_exact("a")({"algorithms": records}) == ("NLL − exact, worst: a +0.020", claims.REPRODUCED)
    assert "not reproduced" in claims.near_exact("a", "b")({"algorithms": records})[1]
    assert claims.near_exact("c")({"algorithms": records}) is None
    assert claims.left_to_the_polish("a")({"algorithms": records})[1] == claims.REPRODUCED
    assert "not reproduced" in claims.left_to_the_polish("b")({"algorithms": records})[1]


def test_a_method_is_unstable_only_where_it_failed():
    halves = [
        record("bad" if name == "x" else "ok", measure="conditional", method="kcef", dataset=name, seed=0) for name in "xy"
    ]
    assert claims.unstable_on("x")({"table2": halves}) == ("x: 1 of 1 halves fail", claims.REPRODUCED)
    assert "not reproduced" in claims.unstable_on("x", "y")({"table2": halves})[1]


def test_a_claim_without_records_is_not_called_reproduced():
    text = claims.page({name: [] for name in EXPERIMENTS})
    measured = [line for line in text.splitlines() if "kexpfam reproduce" in line]
    assert measured and all("not measured" in line for line in measured)


def test_every_test_that_a_claim_names_is_there():
    from pathlib import Path

    root = Path(__file__).parents[2]
    named = {line.split("`")[3] for line in claims.page({n: [] for n in EXPERIMENTS}).splitlines() if "as a test" in line}
    assert named and all((root / path).exists() for path in named)


def test_records_are_chosen_by_their_cells():
    records = [record(method="a", seed=0), record("bad", method="a", seed=1), record(method="b", seed=0)]
    assert len(chosen(records, method="a")) == 2 and len(good(records, method="a")) == 1


def test_the_page_has_every_experiment_that_has_records_and_its_pictures(tmp_path):
    rate = [record(values={"kl": 1.0 / n}, measure="rate", method="exact", rows=n, seed=s) for n in (10, 100) for s in (0, 1)]
    costs = [record(values={"seconds": 1.0, "megabytes": 5.0}, measure="cost", method="dde", rows=9, dim=d) for d in (2, 4)]
    cloud = [[0.0, 1.0], [1.0, 0.0]]
    shown = {"data": cloud, "draws": cloud, "limits": [[-1.0, 1.0], [-1.0, 1.0]], "f": [0.0, 1.0, 2.0, 3.0]}
    pictures = [record(values=shown, measure="portrait", dataset="rings")]
    pictures += [record(values={"data": cloud, "draws": {"0": cloud, "5": cloud}}, measure="convergence", dataset="rings")]
    for name, rows in {"rate": rate, "cost": costs, "figures": pictures}.items():
        for row in rows:
            Ledger(tmp_path, name).append(row)
    page = pages.write(tmp_path).read_text()
    for stem in ("rate", "cost", "samples-and-f", "convergence-rings"):
        assert f"figures/{stem}.png" in page and (tmp_path / "figures" / f"{stem}.png").stat().st_size > 1000
    assert load_spec("table1").title not in page
    assert pages.rendered(pages.load_all(tmp_path)) == page


def test_headlines_replace_what_is_between_their_marks_and_nothing_else():
    records = {name: [] for name in EXPERIMENTS} | {"table1": [density_record("dde", 0, 2.0)]}
    begin, end = pages.BEGIN.format("table1"), pages.END.format("table1")
    text = pages.with_headlines(f"before\n{begin}\nold\n{end}\nafter", records)
    assert text == f"before\n{begin}\n{tables.headline1(records['table1'])}\n{end}\nafter"


def test_the_command_runs_an_experiment_resumes_and_refuses_what_it_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setitem(MEASUREMENTS, "rate", lambda cell: {"kl": 1.0 / cell["rows"]})
    command = ["reproduce", "rate", "--quick", "--folder", str(tmp_path), "--jobs", "1", "--quiet"]
    for _ in range(2):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.output
    assert len(Ledger(tmp_path, "rate").records()) == len(load_spec("rate", quick=True).cells)
    assert (tmp_path / "README.md").exists()
    result = CliRunner().invoke(cli.app, ["reproduce", "table9"])
    assert isinstance(result.exception, ValueError) and "table9" in str(result.exception)


def test_figures_of_nothing_are_none(tmp_path):
    assert figures.draw_all({name: [] for name in EXPERIMENTS}, tmp_path) == []
