"""Specs, records and pages: each step by itself, and a short run of all steps."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kexpfam import cli
from reproduction import figures, pages, runner, tables
from reproduction.cost import Cost
from reproduction.measurements import MEASUREMENTS
from reproduction.methods import (
    ALGORITHMS,
    CONDITIONALS,
    COSTED,
    DENSITIES,
    DUALS,
    OPTIONS,
    options_of,
    parted,
    solver_named,
)
from reproduction.records import Ledger, chosen, good, provenance
from reproduction.specs import EXPERIMENTS, Spec, identity, load_spec

ROOT = Path(__file__).parents[2]


def record(status="ok", warnings=(), values=None, **cell):
    return {
        "cell": cell,
        "status": status,
        "warnings": list(warnings),
        "values": values or {},
        **provenance(),
    }


def density_record(method, seed, nll, *, dataset="two-moons", dim=2, status="ok", **values):
    values = {
        "nll": nll,
        "truth_nll": 2.0,
        "mmd": 1e-3,
        "seconds": 3.0,
        "megabytes": 10.0,
        "sampling_seconds": 0.01,
    } | values
    return record(
        status, values=values, measure="density", dataset=dataset, dim=dim, method=method, seed=seed
    )


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_spec_names_what_exists_and_no_cell_twice(name, quick):
    spec = load_spec(name, quick=quick)
    assert spec.title
    assert len({identity(cell) for cell in spec.cells}) == len(spec.cells)
    known = {
        "density": DENSITIES,
        "conditional": CONDITIONALS,
        "cost": COSTED,
        "algorithm": ALGORITHMS,
        "dual": DUALS,
    }
    known |= {
        "portrait": DENSITIES,
        "joint": DENSITIES,
        "regression": CONDITIONALS,
        "posterior": CONDITIONALS,
    }
    for cell in spec.cells:
        assert cell["measure"] in MEASUREMENTS
        if cell["measure"] in known:
            assert parted(cell["method"])[0] in known[cell["measure"]], cell


def test_every_algorithm_is_measured_alone_and_with_every_option_that_it_has():
    methods = {cell["method"] for cell in load_spec("algorithms").cells}
    wanted = {*ALGORITHMS, *(f"{name} + {option}" for name in ALGORITHMS for option in options_of(name))}
    assert methods == wanted


@pytest.mark.parametrize("method", sorted({cell["method"] for cell in load_spec("algorithms").cells}))
def test_an_algorithm_alone_has_no_option_switched_on(method):
    name, option = parted(method)
    solver = solver_named(method)
    assert type(solver) is type(solver_named(name))
    for label, field in OPTIONS.items():
        assert bool(getattr(solver, field, False)) == (label == option)


def test_the_default_and_the_paper_s_algorithm_are_told_apart():
    for registry in (DENSITIES, CONDITIONALS):
        assert registry["auto"](0).get_params()["solver"] == "auto"
        assert registry["dde"](0).get_params()["solver"] == "dde"
        assert registry["exact"](3).get_params()["random_state"] == 3
    assert (
        str(DENSITIES["dde"]) == "KernelExpFamily(model='kernel', solver='dde')"
        and str(DENSITIES["auto"]) == "KernelExpFamily()"
    )


def test_the_records_have_no_method_that_the_specs_do_not_have():
    """A record that was made by other code under a name of today would pass for one of today's."""
    for name, records in pages.load_all(ROOT / "reproduction").items():
        cells = {identity(cell) for cell in load_spec(name).cells}
        assert {identity(record["cell"]) for record in records} <= cells


def test_a_spec_is_the_product_of_its_lists():
    cells = load_spec("table1").cells
    plane = [cell for cell in cells if cell["dim"] == 2]
    assert len(plane) == 3 * 8 * 5
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


def test_the_processes_of_a_run_have_one_thread_and_no_programs_from_before(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.delenv("KEXPFAM_CACHE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setitem(MEASUREMENTS, "fake", lambda cell: seen.update(os.environ) or {})
    runner.run(Spec("fake", "one cell", ({"measure": "fake", "seed": 0},)), Ledger(tmp_path, "fake"), jobs=1)
    assert seen["KEXPFAM_CACHE"] == "off" and seen["OMP_NUM_THREADS"] == "2"
    assert "KEXPFAM_CACHE" not in os.environ


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


def rows_of(table):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]


def test_table_one_shows_means_gaps_and_failures():
    records = [density_record("exact", seed, 2.1) for seed in (0, 1)]
    records += [
        density_record("dde", 0, 2.2),
        density_record("dde", 1, 2.15),
        density_record("dde", 2, 0.0, status="Oops: no"),
    ]
    cells = next(row for row in rows_of(tables.table1(records)) if row[2] == "DDE alone")
    assert cells[:4] == ["two-moons", "2", "DDE alone", "2 (1 failed)"]
    assert cells[4].startswith("2.175 ±") and cells[5] == "+0.175" and cells[6] == "+0.100"
    assert cells[7].startswith("1.00") and cells[8] == "0.11"


def test_what_was_not_measured_is_a_dash_beside_what_was():
    records = [density_record("kde", 0, 2.4)]
    full, headline = tables.table1(records), rows_of(tables.headline1(records))
    assert [row[2:5] for row in rows_of(full)[2:]] == [
        ["auto (default)", "0", "–"],
        ["DDE alone", "0", "–"],
        ["KDE", "1", "2.400"],
    ]
    cells = dict(zip(headline[0], headline[2], strict=True))
    assert cells["truth"] == "2.00" and cells["KDE"] == "2.40" and cells["MMD², paper's"] == "0.11"
    assert all(
        cells[name] == "–"
        for name in ("**auto (default)**", "DDE alone", "exact", "spline flow", "fit s, DDE")
    )


def test_a_table_names_the_call_behind_each_column():
    text = tables.headline1([density_record("auto", 0, 2.0)])
    assert (
        "*auto (default)*: `KernelExpFamily()`" in text
        and "*DDE alone*: `KernelExpFamily(model='kernel', solver='dde')`" in text
    )


def test_table_two_shows_the_paper_beside_ours_and_the_competitors_and_marks_ties():
    cell = {"measure": "conditional", "dataset": "geyser"}
    records = [
        record(values={"nll": 0.5 + 0.1 * s}, warnings=["TiesWarning"], method="auto", seed=100 + s, **cell)
        for s in (0, 1)
    ]
    records += [record(values={"nll": 0.5}, method="exact", seed=100, **cell)]
    records += [record(values={"nll": 0.52, "sampler_ks_p_value": 0.4}, method="dde", seed=100, **cell)]
    records += [record(values={"nll": 0.48}, method="auto", seed=0, **cell)]
    records += [record("ValueError: x", method="kcef", seed=100, **cell)]
    records += [record(values={"nll": 0.9}, method="lscde", seed=100, **cell)]
    names, _, row = rows_of(tables.table2(records))
    assert row[:9] == ["geyser*", "2", "0.55 ± 0.05", "0.48", "0.52", "1", "+0.000", "+0.020", "0.400"]
    assert row[9:12] == ["0.55 ± 0.07", "+0.00", "–"]
    pairs = dict(zip(names, row, strict=True))
    assert pairs["KCEF, re-run"] == "– (1 failed)" and pairs["KCEF, printed"] == "1.21 ± 0.04"
    assert pairs["LSCDE, re-run"] == "0.90" and pairs["LSCDE, printed"] == "0.70 ± 0.01"
    headline = rows_of(tables.headline2(records))
    assert dict(zip(headline[0], headline[2], strict=True))["LSCDE, re-run"] == "0.90"


def solver_record(method, nll, kl=0.01, folds=False, seconds=10.0, **facts):
    values = {
        "nll": nll,
        "mmd": 1e-3,
        "sampler_kl": kl,
        "sampler_folds": folds,
        "seconds": seconds,
        "megabytes": 9.0,
    }
    return record(
        values=values | {"facts": facts}, measure="algorithm", dataset="two-moons", method=method, seed=0
    )


def test_a_solver_is_shown_alone_and_beside_it_what_its_options_add():
    records = [solver_record("exact", 2.0), solver_record("dde", 2.3, kl=-0.4, folds=True, seconds=60.0)]
    records += [
        solver_record("dde + warm start", 2.01, seconds=30.0),
        solver_record("dde + polish", 2.0, polish_gain=0.25),
    ]
    rows = {row[0]: row for row in rows_of(tables.algorithms(records))[2:]}
    assert set(rows) == {"exact", "DDE alone"}
    assert rows["DDE alone"][3:9] == ["+0.300", "+0.010", "+0.000", "0.250", "≥ 0.000", "0.010"]
    assert rows["DDE alone"][10:13] == ["60", "30", "10"]
    assert rows["exact"][4:7] == ["–", "–", "–"]
    headline = {row[0]: row for row in rows_of(tables.headline_of_solvers(records))[2:]}
    assert headline["DDE alone"] == ["DDE alone", "+0.300", "+0.010", "+0.000", "≥ 0.000", "60", "9"]


def test_a_row_that_does_not_fit_its_header_is_refused():
    with pytest.raises(ValueError, match="2 columns"):
        tables.markdown(("a", "b"), [["1", "2"], ["1"]])


def test_the_slope_of_a_power_law_is_its_exponent():
    records = [
        record(
            values={"kl": 5.0 / n * (1.0 + 0.01 * seed)}, measure="rate", method="exact", rows=n, seed=seed
        )
        for n in (100, 1000, 10000)
        for seed in range(3)
    ]
    found, half_width = tables.slope(records)
    assert abs(found + 1.0) < 1e-3 and 0.0 < half_width < 0.01
    assert tables.slope(records[:2]) is None


def test_records_are_chosen_by_their_cells():
    records = [record(method="a", seed=0), record("bad", method="a", seed=1), record(method="b", seed=0)]
    assert len(chosen(records, method="a")) == 2 and len(good(records, method="a")) == 1


def test_the_page_has_every_experiment_that_has_records_and_its_pictures(tmp_path):
    rate = [
        record(values={"kl": 1.0 / n}, measure="rate", method="exact", rows=n, seed=s)
        for n in (10, 100)
        for s in (0, 1)
    ]
    costs = [
        record(values={"seconds": 1.0, "megabytes": 5.0}, measure="cost", method="dde", rows=9, dim=d)
        for d in (2, 4)
    ]
    cloud = [[0.0, 1.0], [1.0, 0.0]]
    shown = {"data": cloud, "draws": cloud, "limits": [[-1.0, 1.0], [-1.0, 1.0]], "f": [0.0, 1.0, 2.0, 3.0]}
    pictures = [
        record(values=shown, measure="portrait", dataset="rings", method=method) for method in ("auto", "dde")
    ]
    pictures += [
        record(
            values={"data": cloud, "draws": {"0": cloud, "5": cloud}}, measure="convergence", dataset="rings"
        )
    ]
    for name, rows in {"rate": rate, "cost": costs, "figures": pictures}.items():
        for row in rows:
            Ledger(tmp_path, name).append(row)
    page = pages.write(tmp_path).read_text()
    for stem in ("rate", "cost", "samples-and-f", "samples-and-f-dde", "convergence-rings"):
        assert f"figures/{stem}.png" in page and (tmp_path / "figures" / f"{stem}.png").stat().st_size > 1000
    assert load_spec("table1").title not in page
    assert pages.rendered(pages.load_all(tmp_path)) == page


def test_every_page_copes_with_no_records_at_all(tmp_path):
    page = pages.write(tmp_path).read_text()
    assert "## Claims" in page and "reproduced |" not in page
    nothing = {name: [] for name in EXPERIMENTS}
    for name, table in pages.HEADLINES.items():
        begin, end = pages.BEGIN.format(name), pages.END.format(name)
        assert pages.with_headlines(f"{begin}\n{end}", nothing) == f"{begin}\n{table([])}\n{end}"
    for name, table in pages.OF_ALL.items():
        begin, end = pages.BEGIN.format(name), pages.END.format(name)
        assert pages.with_headlines(f"{begin}\n{end}", nothing) == f"{begin}\n{table(nothing)}\n{end}"


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
