"""Seconds of default fits beside peers in the same run, and the mean log density of new rows.

    python benchmarks/fits.py FOLDER            # FOLDER has uci/concrete.npz; prints and appends a record
    python benchmarks/fits.py FOLDER --quick    # small tables, prints only

Peers are a forest of 200 trees (p(y | x)), a search for the number of components of scikit-learn's mixture of
normals, and a flow. A first fit of each but the flow compiles its programs and is not counted.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from inference import table
from ledger import append, lines, paged
from sklearn.ensemble import RandomForestRegressor
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from kexpfam import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.estimators import SplineFlow

__all__ = ["main", "tabled"]

SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from inference import table
from kexpfam import KernelExpFamily
# The peak of getrusage includes that of the process that started this one.
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
rows, before, start = table({rows} + 2000), peak(), time.perf_counter()
model = KernelExpFamily(random_state=0).fit(rows[:-2000])
print(time.perf_counter() - start, peak() - before, model.score(rows[-2000:]))
"""
PAGE = Path(__file__).parents[1] / "docs" / "cost.md"


def seconds(fit: Callable[[], Any], *, again: bool) -> tuple[float, Any]:
    """Return the seconds of a fit, of a second one if ``again``, and what it fitted."""
    if again:
        fit()
    start = time.perf_counter()
    fitted = fit()
    return time.perf_counter() - start, fitted


def uci(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test rows of the first split of a table."""
    stored = np.load(folder / "uci" / f"{name}.npz")
    rows, test = stored["data"].astype(float), stored["test_0"]
    return np.delete(rows, test, axis=0), rows[test]


def measured(peers: dict[str, Callable[[], Any]], test: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the seconds of each fit, and the mean log density of the test rows where it has one."""
    found: dict[str, dict[str, float]] = {}
    for name, fit in peers.items():
        spent, fitted = seconds(fit, again=name != "flow")
        found[name] = {"seconds": round(spent, 2)}
        if name == "kexpfam" and hasattr(fitted, "predict"):
            found[name]["score"] = round(fitted.score(test[:, :-1], test[:, -1]), 3)
        elif hasattr(fitted, "score_samples"):
            found[name]["score"] = round(fitted.score(test), 3)
        print(f"    {name:10} {found[name]}", flush=True)
    return found


def conditional(train: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return the fits of the last column given the others."""
    X, y = train[:, :-1], train[:, -1]
    return {
        "kexpfam": lambda: ConditionalKernelExpFamily(random_state=0).fit(X, y),
        "forest": lambda: RandomForestRegressor(200, n_jobs=-1, random_state=0).fit(X, y),
    }


def joint(train: np.ndarray, *, flow: bool) -> dict[str, Callable[[], Any]]:
    """Return the fits of all columns."""
    fits: dict[str, Callable[[], Any]] = {
        "kexpfam": lambda: KernelExpFamily(random_state=0).fit(train),
        "mixture": lambda: searched_mixture(train),
    }
    return fits | ({"flow": lambda: SplineFlow(random_state=0).fit(train)} if flow else {})


def searched_mixture(train: np.ndarray) -> GaussianMixture:
    """Return scikit-learn's mixture of the shape that a held-out fifth of the rows prefers.

    For each kind of covariance the number of components grows until two in a row score no better."""
    rows = np.random.default_rng(0).permutation(train)
    held, kept, fitted = *np.split(rows, [len(rows) // 5]), {}
    with threadpool_limits(limits=1, user_api="blas"):  # several threads are slower
        for covariance in ("full", "diag"):
            scores: list[float] = []
            for count in (1, 2, 4, 8, 16, 32, 64):
                shape = {"n_components": count, "covariance_type": covariance, "init_params": "k-means++"}
                model = GaussianMixture(**shape, max_iter=60, reg_covar=1e-5, random_state=0)
                scores.append(model.fit(kept).score(held))
                fitted[scores[-1]] = shape
                if len(scores) > 2 and max(scores[-2:]) <= max(scores[:-2]):
                    break
        return GaussianMixture(**fitted[max(fitted)], max_iter=60, reg_covar=1e-5, random_state=0).fit(train)


def alone(rows: int) -> dict[str, float]:
    """Return seconds of a first fit of so many rows of ten columns in a new process, and the megabytes of its
    peak above the memory after the imports."""
    command = [sys.executable, "-c", SCRIPT.format(folder=str(Path(__file__).parent), rows=rows)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("seconds", "megabytes", "score"), map(float, printed), strict=True))


def tabled(records: Iterable[str]) -> str:
    """Return the newest record as a table."""
    found = json.loads(list(records)[-1])
    rows = ["| table | fit | seconds | ratio | log density of new rows |", "|---|---|---|---|---|"]
    for name, fits in found["fits"].items():
        shown = name.replace("|", "\\|")
        for peer, one in fits.items():
            ratio = fits["kexpfam"]["seconds"] / one["seconds"]
            said = "" if peer == "kexpfam" else f"kexpfam takes {ratio:.2g} times as long"
            rows.append(f"| {shown} | {peer} | {one['seconds']:.1f} | {said} | {one.get('score', '')} |")
    if alone := found.get("alone"):
        rows += ["", "| first fit of a process | seconds | megabytes | log density of new rows |"]
        rows += ["|---|---|---|---|"]
        for name, one in alone.items():
            rows.append(f"| {name} | {one['seconds']:.1f} | {one['megabytes']:.0f} | {one['score']:.3f} |")
    return "\n".join(rows) + f"\n\nCommit `{found['commit']}`, load {found['load']}.\n"


def main() -> None:
    """Measure all fits, print them and append a record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="small tables, no record")
    options = parser.parse_args()
    few = options.quick
    concrete, plant = uci(options.folder, "concrete"), uci(options.folder, "power-plant")
    small, large = (200, 400) if few else (1000, 10_000)
    whole = table(large + 2000)
    cases = {
        f"concrete ({len(concrete[0])} × 8 | 1)": (conditional(concrete[0]), concrete[1]),
        f"{small} × 10": (joint(whole[:small], flow=False), whole[large:]),
        f"{large} × 10": (joint(whole[:large], flow=not few), whole[large:]),
        "power-plant (8,611 × 5)": (joint(plant[0][: 400 if few else None], flow=not few), plant[1]),
    }
    record = {}
    for name, (fits, test) in cases.items():
        print(name, flush=True)
        record[name] = measured(fits, test)
    if not few:
        found = {f"{rows:,} × 10": alone(rows) for rows in (1000, 10_000, 100_000)}
        print(found)
        append("fits", {"fits": record, "alone": found})
        PAGE.write_text(paged(PAGE.read_text(), "fits", tabled(lines("fits"))))


if __name__ == "__main__":
    main()
