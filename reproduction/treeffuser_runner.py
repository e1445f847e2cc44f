"""The part of a comparison that runs in the Python of treeffuser: ``treeffuser_runner.py VERB FOLDER``.

``fit`` reads X, y and seed from ``fit.npz``, and writes ``model.pkl`` and ``facts.json``. ``sample`` reads X,
seed and count from ``sample.npz``, and writes ``draws.npy``, (rows, draws). It imports nothing of this
repository, whose versions of packages treeffuser excludes.
"""

import json
import pickle
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from treeffuser import Treeffuser

# Rows times draws that are drawn at a time.
CHUNK = 200_000


def fit(folder: Path) -> None:
    """Fit with the defaults and one thread; write the model and what it cost."""
    given = np.load(folder / "fit.npz")
    before, start = _peak_megabytes(), time.process_time()
    model = Treeffuser(seed=int(given["seed"]), n_jobs=1).fit(given["X"], given["y"])
    facts = {
        "seconds": time.process_time() - start,
        "megabytes": _peak_megabytes() - before,
        "package": f"treeffuser {version('treeffuser')}",
    }
    (folder / "model.pkl").write_bytes(pickle.dumps(model))
    (folder / "facts.json").write_text(json.dumps(facts))


def sample(folder: Path) -> None:
    """Write draws of the target of every row."""
    given = np.load(folder / "sample.npz")
    model = pickle.loads((folder / "model.pkl").read_bytes())
    X, count, seed = given["X"], int(given["count"]), int(given["seed"])
    size = max(1, CHUNK // count)
    # Batches of draws share the noise that they start from, so that all draws of a row are one batch.
    parts = [
        model.sample(X[at : at + size], n_samples=count, n_parallel=count, seed=seed + at)
        for at in range(0, len(X), size)
    ]
    np.save(folder / "draws.npy", np.concatenate(parts, axis=1).T)


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    {"fit": fit, "sample": sample}[sys.argv[1]](Path(sys.argv[2]))
