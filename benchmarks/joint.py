"""Time, memory and draws of the default joint fit and of its peers, each the first fit of a new process.

    python benchmarks/joint.py [ROWS ...]         # prints and appends a record; 1,000 and 10,000 rows unless
    told python benchmarks/joint.py --page             # writes the newest record of each size into
    docs/real-tables.md

Ten columns, each a wave of the one before it. Peers that are not installed are left out. ``megabytes`` are
those at the peak above what was held before the fit; ``sampling_seconds`` the median of five times 5,000
draws after a first one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ledger import append, lines, paged

sys.path.insert(0, str(Path(__file__).parents[1]))

__all__ = ["main", "measured", "tabled"]

METHODS = ("auto", "sklearn mixture", "spline flow", "vine")
ROWS = (1_000, 10_000)
PAGE = Path(__file__).parents[1] / "docs" / "real-tables.md"
SHOWN = ("seconds", "megabytes", "sampling_seconds", "nll", "nll_error", "truth_nll")


def measured(rows: int, method: str) -> dict[str, float]:
    """Return cost and held-out score of one fit; to be run in a new process."""
    from reproduction.measurements import real

    real.REPEATS = 5
    found = real.joint({"dataset": "chain", "dim": 10, "rows": rows, "method": method, "seed": 0})
    return {name: round(found[name], 4) for name in SHOWN}


def tabled(records: Iterable[str]) -> str:
    """Return the newest record of every size as a table in Markdown, from the lines of the ledger."""
    newest = {record["rows"]: record["methods"] for record in map(json.loads, records)}
    rows = [
        f"| {count:,} | {method} | {one['seconds']:.0f} | {one['megabytes']:.0f} "
        f"| {1e3 * one['sampling_seconds']:.0f} | {one['nll']:.2f} |"
        for count, methods in sorted(newest.items())
        for method, one in methods.items()
    ]
    return (
        "\n".join(["| rows | | fit s | MB | ms per 5,000 draws | NLL |", "|---|---|---|---|---|---|", *rows])
        + "\n"
    )


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--cell"]:
        print(json.dumps(measured(int(arguments[1]), arguments[2])))
        return
    if arguments[:1] == ["--page"]:
        PAGE.write_text(paged(PAGE.read_text(), "joint", tabled(lines("joint"))))
        return
    for rows in tuple(map(int, arguments)) or ROWS:
        cells = {}
        for method in METHODS:
            command = [sys.executable, "-W", "ignore", __file__, "--cell", str(rows), method]
            done = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | {"KEXPFAM_CACHE": "off"}
            )
            if done.returncode == 0:
                cells[method] = json.loads(done.stdout.splitlines()[-1])
                print(rows, method, cells[method], flush=True)
        append("joint", {"rows": rows, "columns": 10, "methods": cells})


if __name__ == "__main__":
    main(sys.argv[1:])
