"""Unconditional densities: every method on the same draws, one process per cell, one JSON record per cell.

python benchmarks/unconditional.py run      # append the records that are missing
python benchmarks/unconditional.py table    # print the tables, from the records alone
"""

import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# One at a time: BLAS threads of two processes would wait for each other.
JOBS = 1
RECORDS = Path(__file__).parent / "records" / "unconditional.jsonl"
ROOT = Path(__file__).parent.parent
LOW = [(name, 2, 500, seed) for name in ("two-moons", "rings", "grid") for seed in range(5)]
HIGH = [(name, dim, 2000, seed) for name in ("rings", "grid") for dim in (10, 20) for seed in range(1)]
TEST_ROWS = {"two-moons": 5000, "rings": 5000, "grid": 1500}
METHODS = {"low": ("dde", "exact", "kde"), "high": ("dde", "kde", "mixture")}


def cells():
    for group, tasks in (("low", LOW), ("high", HIGH)):
        for task in tasks:
            for method in METHODS[group]:
                yield (*task, method)


def commit() -> str:
    result = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip()


def load_records() -> list[dict]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


def key(record: dict) -> tuple:
    return tuple(record[name] for name in ("dataset", "dim", "rows", "seed", "method"))


def run() -> None:
    RECORDS.parent.mkdir(exist_ok=True)
    done = {key(record) for record in load_records()}
    todo = [cell for cell in cells() if cell not in done]
    with ThreadPoolExecutor(JOBS) as pool:
        for index, (cell, seconds) in enumerate(pool.map(run_apart, todo)):
            print(f"{index + 1}/{len(todo)}", *cell, f"{seconds:.0f} s", flush=True)


def run_apart(cell: tuple) -> tuple[tuple, float]:
    """Run one cell in a process of its own, so that its fit time includes every compilation."""
    start = time.monotonic()
    subprocess.run([sys.executable, __file__, "cell", *map(str, cell)], check=True)
    return cell, time.monotonic() - start


def run_cell(dataset: str, dim: int, rows: int, seed: int, method: str) -> dict:
    import numpy as np

    from kexpfam import datasets
    from kexpfam.kernels import median_distance

    truth = datasets.two_moons() if dataset == "two-moons" else getattr(datasets, dataset)(dim)
    train = truth.sample(rows, random_state=seed)
    test = truth.sample(TEST_ROWS[dataset], random_state=1000 + seed)
    lengthscale = np.sqrt(0.1) * median_distance(train, most=rows)
    record = {"dataset": dataset, "dim": dim, "rows": rows, "seed": seed, "method": method, "status": "ok"}
    record |= {"truth_nll": float(-truth.log_density(test).mean())}
    measure = {"kde": measure_kde, "mixture": measure_mixture}.get(method, measure_ours)
    try:
        record |= measure(method, dataset, train, test, lengthscale, seed)
    except Exception as error:  # a failed cell is a result, and is shown as one
        record |= {"status": f"{type(error).__name__}: {error}"}
    import jax

    versions = {"python": platform.python_version(), "jax": jax.__version__}
    return record | {"commit": commit(), "versions": versions, "cores": os.cpu_count()}


def measure_ours(method, dataset, train, test, lengthscale, seed) -> dict:
    import jax

    from kexpfam import KernelExpFamily

    start = time.perf_counter()
    model = KernelExpFamily(solver=method, random_state=seed).fit(train)
    seconds = time.perf_counter() - start
    # What follows is not timed as part of the fit, so it may reuse compiled programs.
    jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "kexpfam"))
    count = len(test)
    draws = model.sample(count, random_state=seed)
    times = []
    for repeat in range(5):
        start = time.perf_counter()
        model.sample(5000, random_state=repeat)
        times.append(time.perf_counter() - start)
    refined = model.sample(count, random_state=seed, refine=10)
    diagnosis = model.diagnose()
    result = {
        "nll": -model.score(test),
        "fit_seconds": seconds,
        "sample_5000_ms": 1e3 * sorted(times[1:])[1],
        "log_partition_error": diagnosis.log_partition.standard_error,
        "verdict": diagnosis.verdict,
        "sampler_kl": diagnosis.sampler_kl.value,
        "transport_gain": model.solution_.facts.get("transport_gain"),
        "dims": list(model.selection_.settings.dims),
        "mmd": mmd(draws, test, lengthscale),
        "mmd_refined": mmd(refined, test, lengthscale),
    }
    if dataset == "rings":
        result |= {"shares": ring_shares(draws), "true_shares": [1 / 9, 3 / 9, 5 / 9]}
    return result


def measure_kde(method, dataset, train, test, lengthscale, seed) -> dict:
    import numpy as np
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KernelDensity

    scale = train.std(0)
    start = time.perf_counter()
    search = GridSearchCV(KernelDensity(), {"bandwidth": np.geomspace(0.02, 2.0, 30)}, cv=5).fit(train / scale)
    seconds = time.perf_counter() - start
    model = search.best_estimator_
    draws = model.sample(len(test), random_state=seed) * scale
    nll = -model.score(test / scale) / len(test) + np.log(scale).sum()
    return {"nll": float(nll), "fit_seconds": seconds, "mmd": mmd(draws, test, lengthscale)}


def measure_mixture(method, dataset, train, test, lengthscale, seed) -> dict:
    import numpy as np
    from sklearn.mixture import GaussianMixture
    from sklearn.model_selection import GridSearchCV
    from threadpoolctl import threadpool_limits

    scale = train.std(0)
    grid = {"n_components": [1, 2, 4, 8, 16, 24, 32], "covariance_type": ["full", "diag"]}
    start = time.perf_counter()
    with threadpool_limits(limits=1):
        search = GridSearchCV(GaussianMixture(random_state=seed, reg_covar=1e-5), grid, cv=3).fit(train / scale)
    seconds = time.perf_counter() - start
    draws = search.best_estimator_.sample(len(test))[0] * scale
    nll = -search.best_estimator_.score(test / scale) + np.log(scale).sum()
    return {
        "nll": float(nll),
        "fit_seconds": seconds,
        "mmd": mmd(draws, test, lengthscale),
        "chosen": search.best_params_,
    }


def mmd(draws, test, lengthscale) -> float:
    from kexpfam.metrics import mmd_squared

    return mmd_squared(draws, test, lengthscale=lengthscale).value


def ring_shares(draws) -> list[float]:
    import numpy as np

    radius = np.hypot(draws[:, 0], draws[:, 1])
    return [float(np.mean(radius < 2)), float(np.mean((radius >= 2) & (radius < 4))), float(np.mean(radius >= 4))]


BEGIN, END = "<!-- records: unconditional -->", "<!-- end of records -->"


def rendered() -> str:
    """Return the table of every measured quantity, mean over draws; failures are counted in sight."""
    records = load_records()
    names = (
        "data",
        "dim",
        "method",
        "draws",
        "NLL",
        "NLL − truth",
        "NLL − exact, worst",
        "MMD² ×10³",
        "refined",
        "fit s, worst",
    )
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    groups = sorted({(r["dim"], r["dataset"], r["method"]) for r in records})
    return "\n".join(lines + [_row(records, *group) for group in groups])


def _row(records: list[dict], dim: int, dataset: str, method: str) -> str:
    of = lambda m: [r for r in records if (r["dim"], r["dataset"], r["method"]) == (dim, dataset, m)]
    every, good = of(method), [r for r in of(method) if r["status"] == "ok"]
    failed = f", {len(every) - len(good)} failed" if len(good) < len(every) else ""
    exact = {r["seed"]: r["nll"] for r in of("exact") if r["status"] == "ok"}
    gaps = [r["nll"] - exact[r["seed"]] for r in good if r["seed"] in exact and method != "exact"]
    excess = sum(r["nll"] - r["truth_nll"] for r in good) / max(len(good), 1)
    slowest = max((r["fit_seconds"] for r in good), default=float("nan"))
    cells = [dataset, dim, method, f"{len(good)}{failed}", _mean(good, "nll", 1), f"{excess:+.3f}"]
    cells += [
        f"{max(gaps):+.3f}" if gaps else "–",
        _mean(good, "mmd", 1e3, 2),
        _mean(good, "mmd_refined", 1e3, 2),
        f"{slowest:.0f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def table() -> None:
    """Print the table and put it into the README, between its marks."""
    text = rendered()
    print(text)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def _mean(records, name, factor, digits=3) -> str:
    values = [factor * r[name] for r in records if r.get(name) is not None]
    return f"{sum(values) / len(values):.{digits}f}" if values else "–"


if __name__ == "__main__":
    command, arguments = sys.argv[1], sys.argv[2:]
    if command == "cell":
        dataset, dim, rows, seed, method = arguments
        outcome = run_cell(dataset, int(dim), int(rows), int(seed), method)
        with RECORDS.open("a") as stream:
            stream.write(json.dumps(outcome) + "\n")
    else:
        {"run": run, "table": table}[command]()
