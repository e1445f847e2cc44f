"""Write the golden files of the current storage format: small models and their scores at fixed rows.

``python tools/golden.py`` writes ``tests/golden/FORMAT/NAME.kexpfam`` and ``expected.json``. Existing files
are kept, because they show that files of earlier versions load; ``--replace`` writes them anew.
``tests/test_golden.py`` loads all of them. Run it after adding an estimator or raising ``storage.FORMAT``.
"""

import argparse
import dataclasses
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kexpfam import (
    Atom,
    Bounded,
    ConditionalKernelExpFamily,
    Integration,
    Kernel,
    KernelExpFamily,
    Periodic,
    estimators,
    storage,
)
from kexpfam.fit.learned import Learned
from kexpfam.fit.problem import SOLVERS
from kexpfam.fit.saddle import DoublyDual
from kexpfam.fit.trees import Boosting
from kexpfam.model.kernels import KERNELS

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
SCORED_ROWS = 6
COARSE = Integration(cells=(24, 8), tail_cells=(4, 2), conditional_cells=(24,), draws=64, partition_draws=128)
TINY = Learned(folds=2, repeats=1, width=4, epochs=2, steps=4, bumps=2, most_bumps=2, cells=8, units=2)
TREES = dataclasses.replace(TINY, views=("encoded+trees",), boosting=Boosting(trees=3, rows_per_leaf=10))
FIELDS: dict[str, Any] = {"lengthscale": 1.0, "rkhs_penalty": 0.1, "n_centres": 6, "integration": COARSE}
INPUTS: dict[str, Any] = {"condition_lengthscale": 1.0, "base_width": 1.0, "power": False}
KERNEL = {"model": "kernel", "kernel": Kernel(**FIELDS)}
CONDITIONAL = {"model": "kernel", "kernel": Kernel(**FIELDS, **INPUTS)}
CHAIN = {"model": "chain", "learned": TINY}
SMALL = {"steps": 2, "width": 4, "depth": 1, "count": 8, "centres": 8, "saddle": DoublyDual(width=4)}
KINDS = {
    "height": "positive",
    "share": Bounded(0.0, 1.0),
    "angle": Periodic(6.5),
    "children": "count",
    "wage": Atom(0.0, "positive"),
}
# One entry per estimator of the registry; a test compares the two.
SETTINGS: dict[str, dict[str, Any]] = {
    "KernelExpFamily": KERNEL,
    "ConditionalKernelExpFamily": CONDITIONAL,
    "ScoreMatchingExpFamily": {"lengthscale": 1.0, "rkhs_penalty": 0.1, "n_centres": 6},
    "ConditionalScoreMatching": {"lengthscale": 1.0, "rkhs_penalty": 0.1, "condition_lengthscale": 1.0},
    "KernelDensity": {"bandwidth": 0.5},
    "GaussianMixtureDensity": {},
    "LeastSquaresConditional": {"width": 0.5, "penalty": 0.1, "n_centres": 6},
    "NeighbourDensity": {"radius": 2.0, "width": 0.5},
    "ConditionalKernelDensity": {"condition_width": 0.5, "width": 0.5},
    "SplineFlow": {"n_layers": 1, "n_knots": 3, "width": 4, "max_epochs": 2},
}


def joint_rows(columns: int = 1) -> tuple[np.ndarray]:
    """Return the training rows of a density ``p(x)``."""
    return (np.random.default_rng(0).normal(size=(30, columns)),)


def pair_rows(count: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a density ``p(y | x)``."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 1))
    return x, np.sin(x[:, 0]) + 0.3 * rng.normal(size=count)


def mixed_rows() -> tuple[pd.DataFrame]:
    """Return a table with a column of every kind and with missing cells."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "height": rng.lognormal(size=60),
            "share": rng.uniform(size=60),
            "angle": rng.uniform(0.0, 6.5, size=60),
            "children": rng.poisson(2.0, size=60).astype(float),
            "wage": np.where(rng.uniform(size=60) < 0.3, 0.0, rng.lognormal(size=60)),
            "depth": rng.normal(size=60),
            "colour": rng.choice(["red", "green", "blue"], size=60),
        }
    )
    table.loc[::7, "depth"] = np.nan
    return (table,)


def rounded_rows() -> tuple[np.ndarray]:
    """Return rows with a column of tenths, one of halves and one of numbers that are not rounded."""
    (rows,) = joint_rows(3)
    return (np.column_stack([np.round(rows[:, 0], 1), np.round(2.0 * rows[:, 1]) / 2.0, rows[:, 2]]),)


def solver(name: str) -> Any:
    """Return the solver of that name, with small values of those settings that it has."""
    module, cls, settings = SOLVERS[name]
    found = getattr(importlib.import_module(f"kexpfam.{module}"), cls)
    names = {field.name for field in dataclasses.fields(found)}
    return found(**settings | {name: value for name, value in SMALL.items() if name in names})


def models() -> dict[str, Callable[[], tuple[Any, tuple]]]:
    """Return a function for each golden model, which returns the estimator and the arguments of ``fit``."""
    made: dict[str, Callable[[], tuple[Any, tuple]]] = {}
    for name, settings in SETTINGS.items():
        made[name] = partial(_estimator, name, settings)
    for name in KERNELS:
        made[f"kernel-{name}"] = lambda name=name: (
            KernelExpFamily(model="kernel", kernel=Kernel(name, **FIELDS)),
            joint_rows(),
        )
    for name in SOLVERS:
        made[f"solver-{name}"] = lambda name=name: (
            KernelExpFamily(**KERNEL, solver=solver(name)),
            joint_rows(),
        )
    for name in ("random_features", "full"):
        made[f"space-{name}"] = lambda name=name: (
            KernelExpFamily(model="kernel", kernel=Kernel(space=name, **FIELDS)),
            joint_rows(),
        )
    made["two-columns"] = lambda: (KernelExpFamily(**KERNEL), joint_rows(2))
    made["bounds"] = lambda: (KernelExpFamily(**KERNEL, bounds=([-9.0], [9.0])), joint_rows())
    made["mixture"] = lambda: (KernelExpFamily(model="mixture"), joint_rows(2))
    made["chain"] = lambda: (KernelExpFamily(**CHAIN), joint_rows(3))
    made["chain-conditional"] = lambda: (ConditionalKernelExpFamily(**CHAIN), pair_rows(30))
    made["chain-trees"] = lambda: (ConditionalKernelExpFamily(model="chain", learned=TREES), pair_rows(60))
    made["chain-mixed"] = lambda: (KernelExpFamily(**CHAIN, columns=KINDS), mixed_rows())
    made["chain-rounded"] = lambda: (KernelExpFamily(**CHAIN, columns={0: "rounded"}), rounded_rows())
    return made


def _estimator(name: str, settings: dict[str, Any]) -> tuple[Any, tuple]:
    cls = getattr(estimators, name)
    return cls(**settings), pair_rows() if cls.conditional else joint_rows()


def as_json(rows: tuple) -> list:
    """Return the arguments of ``score_samples`` as JSON: lists for arrays, dictionaries for tables."""
    return [_plain(part[:SCORED_ROWS]) for part in rows]


def _plain(part: Any) -> Any:
    if isinstance(part, pd.DataFrame):
        return part.astype(object).where(part.notna(), None).to_dict("list")
    return part.tolist()


def from_json(rows: list) -> tuple:
    """Return the arguments of ``score_samples`` that ``as_json`` was given."""
    return tuple(pd.DataFrame(part) if isinstance(part, dict) else np.array(part) for part in rows)


def write(folder: Path, names: list[str], *, replace: bool = False) -> list[str]:
    """Write the golden files of these names, and return the names that failed with their errors."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "expected.json"
    expected = json.loads(record.read_text()) if record.exists() else {}
    failed = []
    for name in names:
        path = folder / f"{name}.kexpfam"
        if path.exists() and name in expected and not replace:
            continue
        try:
            estimator, rows = models()[name]()
            estimator.set_params(random_state=0).fit(*rows).save(path)
            scored = as_json(rows)
            expected[name] = {"rows": scored, "scores": estimator.score_samples(*from_json(scored)).tolist()}
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
        record.write_text(json.dumps(dict(sorted(expected.items())), indent=1) + "\n")
    return failed


def main() -> None:
    """Write the golden files of the current format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models to write; all by default")
    parser.add_argument("--replace", action="store_true", help="write files anew that exist")
    parser.add_argument("--folder", type=Path, default=FOLDER / str(storage.FORMAT))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = write(options.folder, options.names or list(models()), replace=options.replace)
    sizes = [path.stat().st_size for path in options.folder.iterdir()]
    sys.stdout.write(f"{len(sizes)} files, {sum(sizes) / 1e3:.0f} kB, in {options.folder}\n")
    sys.exit("\n".join(failed) or None)


if __name__ == "__main__":
    main()
