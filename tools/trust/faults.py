"""Checks of faults: damaged files, full disks, Ctrl-C, kills, and outputs that are inputs."""

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kexpfam
from kexpfam import KernelExpFamily, Learned, StorageError
from kexpfam.cli.commands import app
from kexpfam.data.tables import write_table
from kexpfam.storage import Checkpoint, CheckpointWarning
from tools.trust.mutations import forge, mutated
from tools.trust.outcomes import Outcome, golden

__all__ = ["CHECKS"]

# A command in a process of its own; a background job would ignore SIGINT.
PROGRAM = """
import signal
from kexpfam.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
main()
"""
SMALL = Learned(folds=2, repeats=1, width=8, epochs=60, steps=600, bumps=8, most_bumps=8, cells=32)
# Memory of a load that does not depend on the file: code, caches of class names, the message.
FIXED_BYTES = 2**20
# Copies of a file's bytes that a load may make.
MOST_TIMES = 20


def damaged_files(trials: int, seed: int, folder: Path) -> Outcome:
    """Load golden files after one mutation each."""
    place, copy, refused, failures = folder / "damaged", folder / "copy", 0, []
    models = [(one.name, one.path.read_bytes(), _saved(one.model, copy)) for one in golden()]
    for trial in range(trials):
        name, content, expected = models[trial % len(models)]
        place.write_bytes(mutated(content, np.random.default_rng([seed, trial])))
        try:
            same = _saved(kexpfam.load(place), copy) == expected
        except StorageError:
            refused += 1
        except Exception as error:
            failures.append(f"{name}, trial {trial}: {type(error).__name__}: {error}")
        else:
            failures += [] if same else [f"{name}, trial {trial}: another model"]
    return Outcome(trials, failures, f"{refused} refused, {trials - refused - len(failures)} equal")


def forged_files(trials: int, seed: int, folder: Path) -> Outcome:
    """Load golden files after a change of one value, with a checksum that matches."""
    place, refused, failures = folder / "forged", 0, []
    models = [(one.name, one.path.read_bytes()) for one in golden()]
    for trial in range(trials):
        name, content = models[trial % len(models)]
        place.write_bytes(content)
        forge(place, np.random.default_rng([seed, trial]))
        try:
            kexpfam.load(place)
        except StorageError:
            refused += 1
        except Exception as error:
            failures.append(f"{name}, trial {trial}: {type(error).__name__}: {error}")
    return Outcome(trials, failures, f"{refused} refused, no other exception" if not failures else "")


def memory_of_damaged_files(trials: int, seed: int, folder: Path) -> Outcome:
    """Measure the memory that loading damaged files takes, in units of the file."""
    place, failures, most = folder / "damaged", [], 0
    models = [(one.name, one.path.read_bytes()) for one in golden() if one.model]  # the classes are imported
    for trial in range(trials):
        name, content = models[trial % len(models)]
        place.write_bytes(mutated(content, np.random.default_rng([seed, trial])))
        tracemalloc.start()
        with contextlib.suppress(StorageError):
            kexpfam.load(place)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        most = max(most, peak)
        too_much = peak > FIXED_BYTES + MOST_TIMES * len(content)
        failures += [f"{name}, trial {trial}: {peak / 1e3:.0f} kB"] if too_much else []
    largest = max(len(content) for _, content in models)
    figure = f"at most {most / 1e3:.0f} kB for files of at most {largest / 1e3:.0f} kB"
    return Outcome(trials, failures, figure)


def _saved(model: Any, place: Path) -> bytes:
    model.save(place)
    return place.read_bytes()


def full_disks(trials: int, seed: int, folder: Path) -> Outcome:
    """Write models, tables and checkpoints while the system refuses bytes beyond a random number."""
    rng, failures = np.random.default_rng(seed), []
    model = next(golden()).model
    columns = [[np.arange(500.0), np.ones(500)]]
    state = {"weights": np.ones(2000)}
    writers: dict[str, Callable[[Path], object]] = {"model.kexpfam": model.save}
    for name in ("draws.csv", "draws.parquet", "draws.npy", "draws.feather"):
        writers[name] = lambda path: write_table(path, ["a", "b"], columns)
    writers["state"] = lambda path: Checkpoint(path, "task").write(state)
    sizes = {}
    for name, write in writers.items():
        write(folder / name)
        sizes[name] = (folder / name).stat().st_size
    for trial in range(trials):
        name = list(writers)[trial % len(writers)]
        path, limit = folder / name, int(rng.integers(sizes[name]))
        path.write_bytes(b"old")
        told = _message_on_full_disk(lambda path=path, name=name: writers[name](path), limit)
        kept = path.read_bytes() == b"old" and not list(folder.glob(".kexpfam-*"))
        if not kept or str(path) not in told:
            failures.append(f"{name} at {limit} bytes: {told}")
    return Outcome(trials, failures, "old file kept, message names it" if not failures else "")


def _message_on_full_disk(write: Callable[[], object], limit: int) -> str:
    """Return the error or warning of a write that exceeds the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            write()
        except (OSError, CheckpointWarning) as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "no error"


def outputs_that_are_inputs(trials: int, seed: int, folder: Path) -> Outcome:
    """Run every command with an output that is one of its inputs, directly and through links."""
    del seed
    model, data = folder / "model.csv", folder / "data.csv"
    model.write_bytes(next(golden()).path.read_bytes())
    data.write_text("x0\n" + "\n".join(map(str, np.linspace(-2.0, 2.0, 20))))
    (folder / "link.csv").symlink_to(data)
    (folder / "hard.csv").hardlink_to(model)
    link, hard = folder / "link.csv", folder / "hard.csv"
    commands = [["fit", data, "-o", other] for other in (data, link)]
    commands += [["fit", link, "-o", data], ["fit", "two-moons", "--checkpoint", model, "-o", hard]]
    commands += [["score", model, data, "-o", other] for other in (data, link, model, hard)]
    commands += [["score", model, data, "--json", "-o", other] for other in (data, model)]
    commands += [["sample", model, "-o", other] for other in (model, hard)]
    commands += [["plot", model, "-o", other] for other in (model, hard)]
    commands += [["report", model, "--data", data, "-o", other] for other in (data, model)]
    commands += [["compare", model, hard, "--data", data, "-o", other] for other in (data, model)]
    before, failures = {path: path.read_bytes() for path in (model, data)}, []
    for command in itertools.islice(itertools.cycle(commands), trials):
        try:
            app(args=[str(part) for part in command], standalone_mode=False)
            failures.append(" ".join(map(str, command)))
        except ValueError as error:
            failures += [] if "is not overwritten" in str(error) else [str(error)]
    failures += [str(path) for path, content in before.items() if path.read_bytes() != content]
    return Outcome(trials, failures, "all refused, inputs unchanged" if not failures else "")


def interrupted_fits(trials: int, seed: int, folder: Path) -> Outcome:
    """Press Ctrl-C at random moments of fits in this process."""
    del folder
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
    rng, failures, raised = np.random.default_rng(seed), [], 0
    rows = rng.normal(size=(150, 3))
    fit = lambda scale: KernelExpFamily(model="chain", learned=SMALL, random_state=0).fit(scale * rows)
    model, new = fit(1.0), fit(10.0)
    states = [one.score_samples(rows) for one in (model, new)]
    start = time.perf_counter()
    new.fit(10.0 * rows)
    seconds = time.perf_counter() - start
    for trial in range(trials):
        moment = rng.uniform(0.0, seconds)
        timer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT))
        finished = False
        try:
            timer.start()
            model.fit(10.0 * rows)
            finished = True
            timer.cancel()
            timer.join()
        except KeyboardInterrupt:  # a late one comes after the fit
            raised += not finished
        found, expected = model.score_samples(rows), states[finished]
        failures += [] if np.array_equal(found, expected) else [f"trial {trial}: another model"]
        model = fit(1.0) if finished else model
    failures += [] if raised else ["no fit was interrupted"]
    return Outcome(trials, failures, f"{raised} raised KeyboardInterrupt and kept the old model")


def interrupted_commands(trials: int, seed: int, folder: Path) -> Outcome:
    """Press Ctrl-C at random moments of the command ``fit``."""
    rng, failures, longest, codes = np.random.default_rng(seed), [], 0.0, {0: 0, 130: 0}
    seconds = _fitted(folder, folder / "reference")
    for trial in range(trials):
        output = folder / "model"
        output.write_bytes(b"old")
        with _fit(folder, output) as process:
            time.sleep(rng.uniform(0.0, seconds))
            process.send_signal(signal.SIGINT)
            start = time.perf_counter()
            _, err = process.communicate()
            longest = max(longest, time.perf_counter() - start)
        code, old = process.returncode, output.read_bytes() == b"old"
        codes[code] = codes.get(code, 0) + 1
        one_line = err.count("\n") == 1 and "--checkpoint" in err
        if not (code == 130 and old and one_line) and not (code == 0 and not old and not err):
            failures.append(f"trial {trial}: exit code {code}, {err!r}")
    figure = f"{codes[130]} exit codes 130, {codes[0]} finished before; ended within {longest:.1f} s"
    return Outcome(trials, failures, figure)


def killed_commands(trials: int, seed: int, folder: Path) -> Outcome:
    """Kill the command ``fit`` at random moments and run it again from its checkpoint."""
    rng, failures = np.random.default_rng(seed), []
    seconds = _fitted(folder, folder / "reference", "--checkpoint", folder / "state")
    expected = (folder / "reference").read_bytes()
    for trial in range(trials):
        output, state = folder / f"model{trial}", folder / f"state{trial}"
        with _fit(folder, output, "--checkpoint", state) as process:
            time.sleep(rng.uniform(0.0, seconds))
            process.kill()
        _fitted(folder, output, "--checkpoint", state)
        failures += [] if output.read_bytes() == expected else [f"trial {trial}: another model"]
    return Outcome(trials, failures, f"{trials - len(failures)} models equal to the last bit")


@contextlib.contextmanager
def _fit(folder: Path, output: Path, *options: object) -> Iterator[subprocess.Popen]:
    """Start the command ``fit`` on a small table and wait until it has begun."""
    data = folder / "data.csv"
    if not data.exists():
        np.savetxt(data, np.random.default_rng(0).normal(size=(150, 3)), delimiter=",")
    arguments = ["fit", data, "--model", "chain", "--effort", "fast", "-o", output, *options]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def _fitted(folder: Path, output: Path, *options: object) -> float:
    """Run the command to its end and return its seconds."""
    with _fit(folder, output, *options) as process:
        start = time.perf_counter()
        _, err = process.communicate()
    if process.returncode:
        raise RuntimeError(err)
    return time.perf_counter() - start


CHECKS = {
    one.__name__: one
    for one in (
        damaged_files,
        forged_files,
        memory_of_damaged_files,
        full_disks,
        outputs_that_are_inputs,
        interrupted_fits,
        interrupted_commands,
        killed_commands,
    )
}
