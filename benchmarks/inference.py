"""Seconds of scores, predictions, quantiles and draws, beside scikit-learn's peers in the same run.

    python benchmarks/inference.py            # prints and appends a record
    python benchmarks/inference.py --quick    # small fits, prints only

Each number is the least of REPEATS calls after a first one; ratios are to a forest of 200 trees (one target)
and to a mixture of normals (ten columns). Draws have another count in every call. Calls with many rows, with
missing cells and of a new process are measured once, each in a process of its own that loads the model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from ledger import append, lines, paged
from sklearn.ensemble import RandomForestRegressor
from sklearn.mixture import GaussianMixture

from kexpfam import ConditionalKernelExpFamily, KernelExpFamily, Learned

__all__ = ["main", "tabled"]

PAGE = Path(__file__).parents[1] / "docs" / "cost.md"

ROWS, TARGET_ROWS, COLUMNS, REPEATS = 5000, 1000, 10, 5


def least(call: Callable) -> float:
    """Return the seconds of the fastest of several calls after the first; the call gets its number."""
    call(0)
    seconds = []
    for k in range(1, 1 + REPEATS):
        start = time.perf_counter()
        call(k)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def table(rows: int) -> np.ndarray:
    """Return a table in which every column bends with the one before it."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(rows, COLUMNS))
    for j in range(1, COLUMNS):
        z[:, j] = np.sin(z[:, j - 1]) + 0.3 * z[:, j] * (1.0 + 0.5 * np.tanh(z[:, j - 1]))
    return z


CALLS = {
    "predict": "`predict`, 1,000 rows",
    "quantile": "`quantile`, 3 levels, 1,000 rows",
    "conditional_scores": "`score_samples` of p(y \\| x), 1,000 rows",
    "joint_scores": "`score_samples`, 5,000 rows of ten columns",
    "draws": "`sample` of about 5,000 rows of ten columns",
    "one_score": "`score_samples`, one row",
    "one_prediction": "`predict`, one row",
}
# Scores in a process of their own, after two calls: each makes ``rows`` from 1,000 rows Z. Seconds and
# megabytes above those of the first calls are printed.
ALONE = {
    "million": ("`score_samples`, 1,000,000 rows of ten columns", "rows = np.tile(Z, (1000, 1))"),
    "gaps": (
        "`score_samples`, 2,000 rows with a missing cell",
        "rows = np.tile(Z, (2, 1)); rows[np.arange(2000), np.arange(2000) % 10] = np.nan",
    ),
}
SCRIPT = """
import time, warnings
import jax
import numpy as np
import kexpfam
warnings.simplefilter("ignore")
# The peak of getrusage includes that of the process that started this one.
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
)
model, Z = kexpfam.load({model!r}), np.load({rows!r})
model.score_samples(Z[:1]), model.score_samples(Z)
"""
SCORED = """
{prepare}
before, start = peak(), time.perf_counter()
model.score_samples(rows)
print(time.perf_counter() - start, peak() - before)
"""
DRAWN = """
sizes = np.random.default_rng(0).integers(1, 6000, 300)
for size in (1, 1000, 6000):
    model.sample(size, random_state=0)
before, done, start = peak(), len(compiled), time.perf_counter()
for k, size in enumerate(sizes):
    model.sample(int(size), random_state=k)
print(time.perf_counter() - start, peak() - before, len(compiled) - done)
"""
PEERS = {"forest": "`predict` of a forest", "mixture": "scores of a mixture", "mixture_draws": "its draws"}


def tabled(records: Iterable[str]) -> str:
    """Return the newest record as a table."""
    found = json.loads(list(records)[-1])
    rows = ["| call | milliseconds | times its peer |", "|---|---|---|"]
    for name, words in CALLS.items():
        rows.append(f"| {words} | {1e3 * found['seconds'][name]:.1f} | {found['ratios'][name]:.3g} |")
    rows += [f"| {words} | {1e3 * found['seconds'][name]:.1f} | 1 |" for name, words in PEERS.items()]
    if alone := found.get("alone"):
        rows += [
            "",
            "| call, in a process of its own | seconds | megabytes | programs |",
            "|---|---|---|---|",
        ]
        titles = {name: words for name, (words, _) in ALONE.items()} | {
            "process": "start, load and `score_samples` of 1,000 rows",
            "sizes": "300 calls of `sample` with random sizes up to 6,000",
        }
        rows += [_row(titles[name], *numbers) for name, numbers in alone.items()]
    return "\n".join(rows) + f"\n\nCommit `{found['commit']}`, load {found['load']}.\n"


def _row(title: str, seconds: float, megabytes: float | None = None, programs: float | None = None) -> str:
    """Return a row of the table of single processes."""
    shown = ["" if value is None else f"{value:.0f}" for value in (megabytes, programs)]
    return f"| {title} | {seconds:.1f} | {shown[0]} | {shown[1]} |"


def run_alone(model: KernelExpFamily, Z: np.ndarray) -> dict[str, list[float]]:
    """Return seconds, megabytes and compiled programs of calls in new processes; programs are cached."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"model": f"{folder}/model.kexpfam", "rows": f"{folder}/rows.npy"}
        model.save(files["model"])
        np.save(files["rows"], Z)

        def run(body: str) -> list[float]:
            command = [sys.executable, "-c", SCRIPT.format(**files) + body]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            return [float(word) for word in found.stdout.split()]

        run("")  # fills the cache of programs
        start = time.perf_counter()
        run("")
        found = {"process": [time.perf_counter() - start], "sizes": run(DRAWN)}
        for name, (_, prepare) in ALONE.items():
            found[name] = run(SCORED.format(prepare=prepare))
    return found


def main() -> None:
    """Measure all calls, print them and append a record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small fits, no record")
    few = parser.parse_args().quick
    learned = Learned(steps=100) if few else Learned()
    Z, whole = table(ROWS), slice(TARGET_ROWS)
    X, y = Z[whole, :-1], Z[whole, -1]
    joint = KernelExpFamily(learned=learned).fit(Z[whole])
    target = ConditionalKernelExpFamily(learned=learned).fit(X, y)
    forest = RandomForestRegressor(200, n_jobs=-1, random_state=0).fit(X, y)
    mixture = GaussianMixture(8, random_state=0).fit(Z[whole])
    beside = {
        "forest": least(lambda _: forest.predict(X)),
        "mixture": least(lambda _: mixture.score_samples(Z)),
        "mixture_draws": least(lambda k: mixture.sample(ROWS - 37 * k)),
    }
    calls: dict[str, tuple[Callable, str]] = {
        "predict": (lambda _: target.predict(X), "forest"),
        "quantile": (lambda _: target.quantile(X, [0.05, 0.5, 0.95]), "forest"),
        "conditional_scores": (lambda _: target.score_samples(X, y), "forest"),
        "joint_scores": (lambda _: joint.score_samples(Z), "mixture"),
        "draws": (lambda k: joint.sample(ROWS - 37 * k, random_state=k), "mixture_draws"),
        "one_score": (lambda _: joint.score_samples(Z[:1]), "mixture"),
        "one_prediction": (lambda _: target.predict(X[:1]), "forest"),
    }
    seconds = {name: least(call) for name, (call, _) in calls.items()}
    ratios = {name: round(seconds[name] / beside[peer], 2) for name, (_, peer) in calls.items()}
    for name, value in seconds.items():
        print(f"{name:20} {1e3 * value:9.1f} ms   {ratios[name]:8.2f} times {calls[name][1]}")
    if not few:
        alone = run_alone(joint, Z[whole])
        print(*(f"{name:20} {numbers}" for name, numbers in alone.items()), sep="\n")
        found = {"seconds": seconds | beside, "ratios": ratios, "alone": alone}
        append("inference", found | {"rows": ROWS, "columns": COLUMNS})
        PAGE.write_text(paged(PAGE.read_text(), "inference", tabled(lines("inference"))))


if __name__ == "__main__":
    main()
