"""Experiments: TOML files whose tables are expanded to cells.

Each ``[[cells]]`` table is a product: a list stands for one cell per entry, anything else is the same in all
of them. ``seeds = 5`` means the seeds 0 to 4, and a list the seeds in it. A ``quick`` table inside overrides
what a quick run makes smaller; ``quick = false`` leaves the product out of quick runs.
"""

import itertools
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["COMMAND", "EXPERIMENTS", "Cell", "Spec", "identity", "load_spec"]

FOLDER = Path(__file__).parent / "specs"
# How an experiment is run, in a checkout.
COMMAND = "kexpfam reproduce"
EXPERIMENTS = (
    "table1",
    "moons",
    "table2",
    "larger",
    "figures",
    "cost",
    "rate",
    "algorithms",
    "duals",
    "uci",
    "unseen",
    "labelled",
    "ablation",
    "joint",
    "posteriors",
    "mixed",
    "spaces",
    "stationarity",
    "reach",
    "arrival",
    "using",
)

Cell = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """Name, title, measurement and cells of an experiment."""

    name: str
    title: str
    cells: tuple[Cell, ...]


def load_spec(name: str, *, quick: bool = False, methods: Collection[str] | None = None) -> Spec:
    """Return the experiment of that name, with small cells if ``quick``, or with some methods only."""
    with (FOLDER / f"{name}.toml").open("rb") as stream:
        content = tomllib.load(stream)
    products = [_sized(product, quick) for product in content["cells"]]
    cells = [cell for product in products if product is not None for cell in _multiplied(product)]
    if methods is not None:
        cells = [cell for cell in cells if cell.get("method") in methods]
    return Spec(name, content["title"], tuple(cells))


def identity(cell: Cell) -> tuple:
    """Return the identifying values of a cell."""
    return tuple(sorted((name, repr(value)) for name, value in cell.items()))


def _sized(product: dict[str, Any], quick: bool) -> dict[str, Any] | None:
    smaller = product.get("quick", {})
    full = {name: value for name, value in product.items() if name != "quick"}
    if not quick:
        return full
    return None if smaller is False else full | smaller


def _multiplied(product: dict[str, Any]) -> list[Cell]:
    lists = {"seed" if name == "seeds" else name: _choices(name, value) for name, value in product.items()}
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def _choices(name: str, value: Any) -> list:
    if name == "seeds" and isinstance(value, int):
        return list(range(value))
    return value if isinstance(value, list) else [value]
