"""The page ``docs/trust.md``, made from the records of ``python -m tools.trust --record``."""

import tomllib
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "SPEC", "figure", "page"]

ROOT = Path(__file__).parents[2]
SPEC: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "spec.toml").read_text())
HEAD = """# What you can rely on

Each line is a promise, the test that tries to break it, and the last recorded outcome. `make trust` runs all
tests in their quick form and ends with an error if a trial fails; `make trust FULL=--full` runs the full
form. The nightly workflow uses the date as the seed. This page is made from
`reproduction/records/trust.jsonl` by `python -m tools.trust --record`; the promises and the numbers of
trials are in `tools/trust/spec.toml`.

| promise | test | trials | failures | figure |
|---|---|---|---|---|
"""


def figure(name: str, outcome: Any) -> str:
    """Return the figure of an outcome."""
    return outcome.figure if outcome.counts is None else SPEC[name]["figure"].format(**outcome.counts)


def page(records: list[dict[str, Any]]) -> str:
    """Return the page with the last record of each promise, or the sum of its records of one commit."""
    last = {record["cell"]["check"]: record for record in records}
    rows = [_row(promise, _summed(last.get(name), records)) for name, promise in SPEC.items()]
    made = sorted({f"{record['made_with']['commit']}" for record in last.values()})
    foot = f"\nMeasured at commit(s) {', '.join(made)}.\n" if made else ""
    return HEAD + "\n".join(rows) + "\n" + foot


def _summed(last: dict[str, Any] | None, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the values of the last record; counts are added over the seeds of its commit."""
    if last is None or "counts" not in last["values"]:
        return None if last is None else last["values"]
    check, commit = last["cell"]["check"], last["made_with"]["commit"]
    seeds = {
        record["cell"]["seed"]: record["values"]
        for record in records
        if record["cell"]["check"] == check and record["made_with"]["commit"] == commit
    }
    total = {name: sum(one[name] for one in seeds.values()) for name in ("trials", "failures")}
    names = last["values"]["counts"]
    counts = {name: sum(one["counts"][name] for one in seeds.values()) for name in names}
    return total | {"figure": SPEC[check]["figure"].format(**counts)}


def _row(promise: dict[str, Any], values: dict[str, Any] | None) -> str:
    found = ("not recorded", "", "")
    if values is not None:
        found = (f"{values['trials']:,}", f"{values['failures']:,}", values["figure"])
    cells = (cell.replace("|", "\\|") for cell in (promise["promise"], promise["test"], *found))
    return f"| {' | '.join(cells)} |"
