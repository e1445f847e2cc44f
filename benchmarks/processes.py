"""Several processes: results and throughput of two against one, and the state after one is killed.

    python benchmarks/processes.py shared             # throughput of the row-bound stages, and the largest
    difference python benchmarks/processes.py killed 20          # one of two killed at a random moment, and
    the command given again python benchmarks/processes.py costs              # microseconds per row of each
    stage, one process and one thread

"shared" fits rings with given settings, in one process and in two, with one thread each. The stages are timed
where they are asked for, with all that processes tell each other; processor seconds are those of the first
process, which others on the machine disturb less. "costs" are those of rings, 2 columns under 400 centres,
and of two learned members of 10 columns.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

__all__ = ["costs", "killed", "main", "shared"]

ROWS = 1_000_000
STAGES = ("reading", "summing", "scoring")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
COMMAND = [sys.executable, "-c", "from kexpfam.cli import main; main()"]


def timed_fit(path: Path, rank: int, processes: int, learned: bool = False) -> dict[str, float]:
    """Save the fitted model and return the seconds of each stage in one of several processes."""
    from kexpfam import KernelExpFamily
    from kexpfam.data import passes
    from kexpfam.estimators import row_source
    from kexpfam.fit.learned import Learned
    from kexpfam.processes import join

    if processes > 1:
        join("127.0.0.1:29533", processes, rank)
    seconds, processor, go = dict.fromkeys(STAGES, 0.0), dict.fromkeys(STAGES, 0.0), row_source.run_pass

    def timed(blocks, summary, *, stage, report=None):
        started, used = time.perf_counter(), time.process_time()
        found = go(blocks, summary, stage=stage, report=report)
        seconds[stage] += time.perf_counter() - started
        processor[stage] += time.process_time() - used
        return found

    row_source.run_pass = passes.run_pass = timed
    brief = {"model": "chain", "learned": Learned(folds=2, repeats=1, epochs=1)}
    settings = brief if learned else {"lengthscale": 0.3, "rkhs_penalty": 1e-4}
    model = KernelExpFamily(**settings, random_state=0).fit(path)
    model.score(path)
    if rank == 0:
        model.save(path.with_name(f"{processes}.kexpfam"))
    return seconds | {f"{name}, processor": value for name, value in processor.items()}


def shared(count_of_rows: int = ROWS) -> dict[str, object]:
    """Return the record of two processes against one."""
    from rows import HELD_OUT, rings, write

    from kexpfam import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rings.parquet"
        write(path, "rings", count_of_rows)
        found = {}
        for count in (1, 2):
            threads = dict.fromkeys(THREADS, "1")
            command = [sys.executable, __file__, "--cell", str(path)]
            run = [
                subprocess.Popen(
                    [*command, str(rank), str(count)],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | threads,
                )
                for rank in range(count)
            ]
            found[count] = json.loads(run[0].communicate()[0].splitlines()[-1])
            assert all(one.wait() == 0 for one in run)
        rows = rings(HELD_OUT, np.random.default_rng(1))
        one, two = (load(Path(folder) / f"{count}.kexpfam").score_samples(rows) for count in (1, 2))
    rates = {name: round(found[1][name] / found[2][name], 3) for name in found[1]}
    total = lambda count, kind: sum(found[count][f"{name}{kind}"] for name in STAGES)
    rates |= {f"all{kind}": round(total(1, kind) / total(2, kind), 3) for kind in ("", ", processor")}
    cells = {count: {name: round(value, 3) for name, value in cell.items()} for count, cell in found.items()}
    return {
        "kind": "shared",
        "rows": count_of_rows,
        "seconds": cells,
        "speed": rates,
        "difference": float(np.abs(one - two).max()),
    }


def costs(rows: int = 300_000) -> dict[str, object]:
    """Return the microseconds per row of each stage."""
    from rows import write

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for table in ("rings", "brief"):
            path = Path(folder) / f"{table}.parquet"
            write(path, table, rows)
            command = [sys.executable, __file__, "--cell", str(path), "0", "1", str(int(table == "brief"))]
            threads = dict.fromkeys(THREADS, "1")
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=os.environ | threads
            )
            seconds = json.loads(done.stdout.splitlines()[-1])
            found[table] = {stage: round(1e6 * seconds[stage] / rows, 2) for stage in STAGES}
    return {"kind": "costs", "rows": rows, "microseconds_per_row": found}


def killed(trials: int) -> dict[str, object]:
    """Return the record of processes that were killed at random moments."""
    rng = np.random.default_rng(int(time.time()))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # Enough epochs for training, which has checkpoints, to take most of the time.
        a = rng.normal(size=600)
        np.save(place / "rows.npy", np.column_stack([a, np.sin(2.0 * a) + 0.3 * rng.normal(size=600)]))
        base = ["fit", str(place / "rows.npy"), "--base", "chain"]
        # The launcher gives each of two processes half of the cores; BLAS rounds by the number of its
        # threads.
        threads = dict.fromkeys(THREADS, str(max(1, (os.cpu_count() or 1) // 2)))
        alone = [*COMMAND, *base, "-o", str(place / "alone")]
        subprocess.run(alone, check=True, capture_output=True, env=os.environ | threads)
        started = time.perf_counter()
        subprocess.run(
            [*COMMAND, *base, "--processes", "2", "-o", str(place / "two")], check=True, capture_output=True
        )
        length = time.perf_counter() - started
        cells = [
            trial(place, base, length * rng.uniform(0.05, 0.95), int(rng.integers(2)), k)
            for k in range(trials)
        ]
    return {"kind": "killed", "seconds_undisturbed": round(length, 1), "trials": cells}


def trial(place: Path, base: list[str], after: float, lost: int, number: int) -> dict[str, object]:
    """Return the results after one process was killed and after the command was repeated."""
    model, checkpoint = place / f"model{number}", place / f"checkpoint{number}"
    command = [*COMMAND, *base, "--processes", "2", "--checkpoint", str(checkpoint), "-o", str(model)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after)
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True
    ).stdout
    both = sorted(map(int, listed.split()))
    if launcher.poll() is not None or len(both) < 2:
        launcher.communicate()
        return {"after": round(after, 1), "lost": lost, "missed": True}
    os.kill(both[lost], signal.SIGKILL)
    gone = time.perf_counter()
    _, said = launcher.communicate(timeout=120)
    seconds = time.perf_counter() - gone
    kept = Path(f"{checkpoint}.chain").exists()
    again = subprocess.run(command, capture_output=True, text=True)
    return {
        "after": round(after, 1),
        "lost": lost,
        "seconds_to_end": round(seconds, 2),
        "one_line": bool(re.fullmatch(r"error: process \d of 2 was ended by SIGKILL, [^\n]*\n", said)),
        "code": launcher.returncode,
        "checkpoint": kept,
        "restarted": again.returncode == 0,
        "same_model": model.exists() and model.read_bytes() == (place / "two").read_bytes(),
        "same_as_one_process": model.exists() and model.read_bytes() == (place / "alone").read_bytes(),
    }


def main(arguments: list[str]) -> None:
    if arguments[0] == "--cell":
        print(
            json.dumps(
                timed_fit(Path(arguments[1]), *map(int, arguments[2:4]), learned=arguments[4:] == ["1"])
            )
        )
        return
    from ledger import append

    kinds = {"shared": shared, "killed": killed, "costs": costs}
    append("processes", kinds[arguments[0]](*map(int, arguments[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
