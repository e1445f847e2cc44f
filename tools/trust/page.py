"""The page ``docs/trust.md``, made from the records of ``python -m tools.trust --record``."""

import tomllib
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "SPEC", "page"]

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


def page(records: list[dict[str, Any]]) -> str:
    """Return the page with the last record of each promise."""
    last = {record["cell"]["check"]: record for record in records}
    rows = [_row(promise, last.get(name)) for name, promise in SPEC.items()]
    made = sorted({f"{record['made_with']['commit']}" for record in last.values()})
    foot = f"\nMeasured at commit(s) {', '.join(made)}.\n" if made else ""
    return HEAD + "\n".join(rows) + "\n" + foot


def _row(promise: dict[str, Any], record: dict[str, Any] | None) -> str:
    found = ("not recorded", "", "")
    if record is not None:
        values = record["values"]
        found = (f"{values['trials']:,}", f"{values['failures']:,}", values["figure"])
    cells = (cell.replace("|", "\\|") for cell in (promise["promise"], promise["test"], *found))
    return f"| {' | '.join(cells)} |"
