"""The use of a fitted density: level of p-values, detection of anomalies, planted changes, and drift."""

from typing import Any

import jax
import numpy as np

from reproduction.cost import Cost
from reproduction.mixed_data import TABLES
from reproduction.real_data import chain, joint_split, stored
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["anomaly", "drift", "novelty", "planted", "update"]

NEW_ROWS, LEVEL = 2000, 0.05
# Outliers among the rows of a search for them, their number, and the false discovery rate that is asked for.
OUTLIERS, SEARCHED, FDR = 40, 400, 0.1
# A planted change, in standard deviations of its column, and the rows that have one.
CHANGE, CHANGED = 5.0, 200
# The share of new rows of an update.
NEW_SHARE = 0.1
# Rows with drift, and the shift of one column in standard deviations.
DRIFTING, SHIFT = 1000, 0.5


def novelty(cell: Cell) -> Values:
    """Return the share of new rows with p-values of at most 5 %, and of false among flagged rows."""
    rng = np.random.default_rng(cell["seed"])
    draw, kinds = _law(cell["dataset"])
    train, new = draw(rng, cell["rows"]), draw(rng, NEW_ROWS)
    model = _fitted(cell, train, kinds)
    mixed = draw(rng, SEARCHED)
    mixed[:OUTLIERS, 0] = np.nanmax(train[:, 0]) + 6.0 * np.nanstd(train[:, 0])
    flagged = model.flag(mixed, fdr=FDR)
    false = float(flagged[OUTLIERS:].sum() / max(flagged.sum(), 1))
    return {
        "level": float(np.mean(model.novelty(new) <= LEVEL)),
        "false_discoveries": false,
        "found": float(flagged[:OUTLIERS].mean()),
        "columns": train.shape[1],
        "reference": model._held_out_scores().rows,
    }


def anomaly(cell: Cell) -> Values:
    """Return AUC and average precision of anomalies; half of the other rows are for training."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    X, labels = _anomalies(cell["dataset"])
    rng = np.random.default_rng(cell["seed"])
    usual = rng.permutation(np.flatnonzero(labels == 0))
    train, rest = np.split(usual, [len(usual) // 2])
    test = np.concatenate([rest, np.flatnonzero(labels == 1)])
    jax.clear_caches()
    with Cost() as cost:
        scores = _detector(cell).fit(X[train]).score_samples(X[test])
    return {
        "auc": float(roc_auc_score(labels[test], -scores)),
        "average_precision": float(average_precision_score(labels[test], -scores)),
        "anomalies": float(labels[test].mean()),
        "seconds": cost.seconds,
        "megabytes": cost.megabytes,
    }


def planted(cell: Cell) -> Values:
    """Return how often a column that was changed in a real row is named first."""
    X, labels = _anomalies(cell["dataset"])
    rng = np.random.default_rng(cell["seed"])
    usual = rng.permutation(X[labels == 0])
    train, rows = usual[: len(usual) // 2], usual[len(usual) // 2 :][:CHANGED]
    model = _fitted(cell, train, None)
    place = rng.integers(X.shape[1], size=len(rows))
    rows[np.arange(len(rows)), place] += rng.choice([-CHANGE, CHANGE], len(rows)) * train.std(axis=0)[place]
    named = model.explain(rows, draws=256).surprise.argmax(axis=1)
    return {"named": float(np.mean(named == place)), "rows": len(rows), "columns": X.shape[1]}


def drift(cell: Cell) -> Values:
    """Return false alarms in rows without drift, and the rows until a shift of one column is found."""
    rng = np.random.default_rng(cell["seed"])
    draw, kinds = _law(cell["dataset"])
    train = draw(rng, cell["rows"])
    model = _fitted(cell, train, kinds)
    alarms, delays = [], []
    for run in range(cell["runs"]):
        monitor = model.monitor(random_state=run)
        monitor.update(draw(rng, cell["length"]))
        alarms.append(monitor.alarm)
        moved = draw(rng, DRIFTING)
        moved[:, run % moved.shape[1]] += SHIFT * np.nanstd(train[:, run % moved.shape[1]])
        monitor = model.monitor(random_state=run)
        monitor.update(moved)
        delays.append(monitor.alarm_row or np.inf)
    found = np.isfinite(delays)
    return {
        "alarms": int(np.sum(alarms)),
        "runs": cell["runs"],
        "found": float(found.mean()),
        "median_delay": float(np.median(delays)) if found.mean() > 0.5 else float(DRIFTING),
    }


def update(cell: Cell) -> Values:
    """Return the cost of an update with a tenth of new rows as a share of a fit to all, and both NLL."""
    train, test = joint_split(cell["dataset"], rows=cell["rows"], seed=cell["seed"])[:2]
    old = round((1.0 - NEW_SHARE) * len(train))
    model = _fitted(cell, train[:old], None)
    model.update(train[old:])  # compiles
    model = _fitted(cell, train[:old], None)
    with Cost() as updating:
        model.update(train[old:])
    with Cost() as fitting:
        again = _fitted(cell, train, None)
    updated, fitted = (-one.score_samples(test) for one in (model, again))
    return {
        "share": updating.processor_seconds / fitting.processor_seconds,
        "updated_nll": float(updated.mean()),
        "nll": float(fitted.mean()),
        "error": float(fitted.std() / np.sqrt(len(test))),
    }


def _law(name: str) -> tuple[Any, Any]:
    """Return draws of a law and the kinds of its columns; "chain-10" is a chain of ten columns."""
    if name in TABLES:
        return TABLES[name].draw, TABLES[name].kinds
    dim = int(name.rpartition("-")[2])
    return lambda rng, count: chain(count, dim, seed=int(rng.integers(2**31)))[0], None


def _fitted(cell: Cell, train: np.ndarray, kinds: Any) -> Any:
    from kexpfam import KernelExpFamily

    effort = cell.get("effort", "default")
    return KernelExpFamily(columns=kinds, effort=effort, random_state=cell["seed"]).fit(train)


def _anomalies(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, and which of them are anomalies."""
    from sklearn import datasets

    if name == "breast-cancer":
        X, y = datasets.load_breast_cancer(return_X_y=True)
        return X[:, :10], (y == 0).astype(int)
    if name == "wine":
        X, y = datasets.load_wine(return_X_y=True)
        return X, (y == 2).astype(int)
    content = stored("anomaly", name)
    return content["X"], content["y"].astype(int)


def _detector(cell: Cell) -> Any:
    from sklearn.ensemble import IsolationForest
    from sklearn.mixture import GaussianMixture
    from sklearn.neighbors import LocalOutlierFactor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import OneClassSVM

    from kexpfam import KernelExpFamily

    seed, method = cell["seed"], cell["method"]
    if method == "auto":
        return KernelExpFamily(effort=cell.get("effort", "default"), random_state=seed)
    scaled = {
        "isolation forest": lambda: IsolationForest(random_state=seed),
        "LOF": lambda: LocalOutlierFactor(novelty=True),
        "one-class SVM": lambda: OneClassSVM(nu=0.05),
        "mixture": lambda: GaussianMixture(8, random_state=seed, reg_covar=1e-4),
    }
    return make_pipeline(StandardScaler(), scaled[method]())
