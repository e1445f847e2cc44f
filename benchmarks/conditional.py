"""Time and held-out likelihood of the default conditional fit on boston, standard splits 0 to 2.

    python benchmarks/conditional.py [FOLDER]       # prints and appends a record

FOLDER, or the environment variable KEXPFAM_BENCHMARK_DATA, has ``uci/boston.npz``: ``data``, its last column
the target, and ``test_0``, ``test_1``, ..., the rows that each split leaves out. NLL is in nats, in the
target's own units.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from ledger import append

from kexpfam import ConditionalKernelExpFamily

__all__ = ["main", "measured"]

SPLITS = 3


def measured(data: np.ndarray, test: np.ndarray, *, seed: int) -> dict[str, float]:
    """Return the seconds of a fit to the rows outside ``test``, and the mean NLL of the rows in it."""
    train = np.setdiff1d(np.arange(len(data)), test)
    start = time.perf_counter()
    model = ConditionalKernelExpFamily(random_state=seed).fit(data[train, :-1], data[train, -1])
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 2), "nll": round(-model.score(data[test, :-1], data[test, -1]), 4)}


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KEXPFAM_BENCHMARK_DATA")
    if folder is None:
        sys.exit("name the folder of the data: as an argument, or in KEXPFAM_BENCHMARK_DATA.")
    content = np.load(Path(folder) / "uci" / "boston.npz")
    splits = [measured(content["data"], content[f"test_{split}"], seed=split) for split in range(SPLITS)]
    for split, found in enumerate(splits):
        print(f"boston, split {split}: {found['seconds']:.1f} s, NLL {found['nll']:.3f}")
    means = {name: round(statistics.mean(found[name] for found in splits), 4) for name in ("seconds", "nll")}
    print(f"mean: {means['seconds']:.1f} s, NLL {means['nll']:.3f}")
    append("conditional", {"dataset": "boston", "splits": splits, "mean": means})


if __name__ == "__main__":
    main()
