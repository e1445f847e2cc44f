"""Records of the benchmarks: one line of JSON per run, with its commit."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["append", "commit", "lines", "paged"]

RECORDS = Path(__file__).parent / "records"


def commit() -> str:
    """Return the commit of the checkout, marked if files other than the records themselves differ from it."""
    said = lambda *words: subprocess.run(
        ["git", *words], cwd=RECORDS.parent, capture_output=True, text=True
    ).stdout.strip()
    changed = said("status", "--porcelain", "--untracked-files=no", "--", ":/", f":!{RECORDS.name}")
    return (said("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def append(name: str, record: dict[str, Any]) -> None:
    """Append a record to a benchmark, with the load of the machine."""
    RECORDS.mkdir(exist_ok=True)
    with (RECORDS / f"{name}.jsonl").open("a") as stream:
        stream.write(json.dumps(record | {"commit": commit(), "load": round(os.getloadavg()[0], 1)}) + "\n")


def lines(name: str) -> list[str]:
    """Return the records of a benchmark, a line each, the newest last."""
    return (RECORDS / f"{name}.jsonl").read_text().splitlines()


def paged(page: str, name: str, table: str) -> str:
    """Return a page with the table of a benchmark made anew, between its marks."""
    begin, end = f"<!-- benchmark: {name} -->\n", f"<!-- end of benchmark: {name} -->\n"
    before, rest = page.split(begin)
    return before + begin + table + end + rest.split(end)[1]
