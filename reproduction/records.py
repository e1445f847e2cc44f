"""Where results are kept: one line of JSON per cell, appended as it is measured."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kexpfam.version import __version__
from reproduction.specs import Cell, Spec, identity

__all__ = [
    "FIRST_UNSEEN_HALF",
    "Ledger",
    "Record",
    "Unavailable",
    "Values",
    "chosen",
    "good",
    "provenance",
    "unseen_halves",
]

Record = dict[str, Any]
Values = dict[str, Any]

# No choice has seen the random halves from this number on.
FIRST_UNSEEN_HALF = 100


class Unavailable(Exception):
    """Raised if a requirement of a cell is missing here, so that there is no record."""


class Ledger:
    """The records of one experiment in one file."""

    def __init__(self, folder: Path, experiment: str):
        self.path = Path(folder) / "records" / f"{experiment}.jsonl"

    def records(self) -> list[Record]:
        """Return all records; a last line that an interruption tore is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def append(self, record: Record) -> None:
        """Append one record, after removing an incomplete last line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, allow_nan=False)
        if self.path.exists():
            content = self.path.read_text()
            if not content.endswith("\n"):
                self.path.write_text(content[: content.rfind("\n") + 1])
        with self.path.open("a") as stream:
            stream.write(line + "\n")

    def missing(self, spec: Spec) -> list[Cell]:
        """Return the cells of the experiment that have no record yet."""
        done = {identity(record["cell"]) for record in self.records()}
        return [cell for cell in spec.cells if identity(cell) not in done]


def provenance() -> Record:
    """Return the versions that a record was made with, and the commit of the checkout."""
    packages = {name: version(name) for name in ("jax", "numpy", "scikit-learn")}
    return {"kexpfam": __version__, "commit": _commit(), "python": platform.python_version(), **packages}


def _commit() -> str:
    """Return the commit of the checkout, marked if its code is changed; records may have been added."""
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    ).stdout.strip()
    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", "src", "tools", "reproduction/*.py", "reproduction/specs")
    return f"{commit}-dirty" if commit and changed else commit or "unknown"


def good(records: list[Record], **wanted: Any) -> list[Record]:
    """Return the records that did not fail and whose cells have these values."""
    return [record for record in chosen(records, **wanted) if record["status"] == "ok"]


def chosen(records: list[Record], **wanted: Any) -> list[Record]:
    """Return the records whose cells have these values, failed ones among them."""
    return [
        record
        for record in records
        if all(record["cell"].get(name) == value for name, value in wanted.items())
    ]


def unseen_halves(records: list[Record]) -> list[Record]:
    """Return the records of the random halves that no choice has seen."""
    return [record for record in records if record["cell"]["seed"] >= FIRST_UNSEEN_HALF]
