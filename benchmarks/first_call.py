"""Time of a first call: import, fit, score and sample in a new process, beside alternative packages.

    python benchmarks/first_call.py       # prints a table and appends a record

Every contestant runs in processes of its own, with an empty compilation cache, on the same 500 points of the
two moons. The contestants take turns, so that a busy moment of the machine hits all of them; the figures are
medians over the turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ledger import append

__all__ = ["CONTESTANTS", "main", "measure", "summary", "table"]

REPEATS, ROWS = 3, 500
# Every script starts its clock before its first import and prints its results as JSON.
START = (
    "import time; start = time.perf_counter(); import json, sys\n"
    "clock = lambda: time.perf_counter() - start\n"
)
KEXPFAM = """
import resource
import numpy as np
from kexpfam import KernelExpFamily
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
X, held = np.load(sys.argv[1]), peak()
found = {"import": clock()}
model = KernelExpFamily(random_state=0).fit(X)
found |= {"fit": clock() - found["import"], "megabytes": peak() - held}
model.score(X)
model.sample(1000, random_state=0)
found["first call"] = clock()
KernelExpFamily(random_state=0).fit(X)
found["second fit"] = clock() - found["first call"]
print(json.dumps(found))
"""
SCIKIT_LEARN = """
import numpy as np
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KernelDensity
X = np.load(sys.argv[1])
model = GridSearchCV(KernelDensity(), {"bandwidth": np.geomspace(0.05, 2.0, 25)}, cv=5).fit(X)
model.score(X)
model.best_estimator_.sample(1000, random_state=0)
print(json.dumps({"first call": clock()}))
"""
FLOW = """
import numpy as np
from kexpfam.estimators import SplineFlow
X = np.load(sys.argv[1])
model = SplineFlow(random_state=0).fit(X)
model.score(X)
model.sample(1000, random_state=0)
print(json.dumps({"first call": clock()}))
"""
IMPORTED = "\nprint(json.dumps({'import': clock()}))\n"
CONTESTANTS = {
    "kexpfam": KEXPFAM,
    "KernelDensity, 25 bandwidths": SCIKIT_LEARN,
    "SplineFlow": FLOW,
    "import kexpfam": "import kexpfam" + IMPORTED,
    "from kexpfam import KernelExpFamily": "from kexpfam import KernelExpFamily" + IMPORTED,
    "import jax, sklearn.base": "import jax, sklearn.base" + IMPORTED,
}


def main() -> None:
    """Measure all contestants, print the table and keep the record."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "moons.npy"
        write_moons(data)
        for turn in range(REPEATS):
            for place, (name, script) in enumerate(CONTESTANTS.items()):
                runs[name].append(measure(script, data, Path(folder) / f"cache-{turn}-{place}"))
    record = summary(runs)
    print(table(record))
    append("first_call", record | {"repeats": REPEATS, "rows": ROWS})


def write_moons(path: Path) -> None:
    """Write the points that all are fitted to; the contestants do not pay for drawing them."""
    import numpy as np

    from kexpfam.datasets import two_moons

    np.save(path, two_moons().sample(ROWS, random_state=0))


def measure(script: str, data: Path, cache: Path) -> dict[str, float]:
    """Return the output of a script in a new process with an empty compilation cache."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-W", "ignore", "-c", START + script, str(data)]
    done = subprocess.run(
        command, env=environment | {"KEXPFAM_CACHE": str(cache)}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: dict[str, list[dict[str, float]]]) -> dict:
    """Return the medians of every number of every contestant, and the ratios that matter."""
    medians = {
        name: {what: round(statistics.median(run[what] for run in each), 3) for what in each[0]}
        for name, each in runs.items()
    }
    first = lambda name: medians[name]["first call"]
    imported = lambda name: medians[name]["import"]
    ratios = {
        "first call / KernelDensity": first("kexpfam") / first("KernelDensity, 25 bandwidths"),
        "first call / SplineFlow": first("kexpfam") / first("SplineFlow"),
        "first fit / second fit": medians["kexpfam"]["fit"] / medians["kexpfam"]["second fit"],
        "import kexpfam / import jax, sklearn.base": imported("import kexpfam")
        / imported("import jax, sklearn.base"),
        "from kexpfam import KernelExpFamily / import jax, sklearn.base": (
            imported("from kexpfam import KernelExpFamily") / imported("import jax, sklearn.base")
        ),
    }
    return {"medians": medians, "ratios": {name: round(value, 3) for name, value in ratios.items()}}


def table(record: dict) -> str:
    """Return the record as lines that a person reads."""
    unit = lambda what: "MB above import" if what == "megabytes" else "s"
    lines = [
        f"{name:<38} {what:<12} {value:8.2f} {unit(what)}"
        for name, each in record["medians"].items()
        for what, value in each.items()
    ]
    return "\n".join([*lines, "", *(f"{name:<64} {value:8.2f}" for name, value in record["ratios"].items())])


if __name__ == "__main__":
    main()
