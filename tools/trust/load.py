"""Checks of repeated and simultaneous use: rows alone, versions, threads, processes, forks, many sizes."""

import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tools.trust.outcomes import Golden, Outcome, golden

__all__ = ["CHECKS"]

THREADS, PROCESSES = 8, 4
# Seconds after which a forked process counts as stuck.
STUCK = 120.0
# Part of the message of a forked process.
REFUSED = b"with multiprocessing.get_context('spawn')"
# Megabytes by which memory may grow in a thousand calls; allocators keep some pages.
GROWTH = 30.0
# Prints the digest of scores and draws of all golden models.
PROGRAM = "from tools.trust.load import digest; print(digest())"


def _inputs(one: Golden, rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    """Return rows near those that the model was fitted to."""
    parts = [part[rng.integers(len(part), size=rows)] for part in one.rows]
    return tuple(part + 0.1 * rng.normal(size=part.shape) for part in parts)


def _numeric() -> list[Golden]:
    """Return the golden models of plain arrays."""
    return [one for one in golden() if all(isinstance(part, np.ndarray) for part in one.rows)]


def golden_scores(trials: int, seed: int, folder: Path) -> Outcome:
    """Compare the scores of golden models with those of the versions that wrote them."""
    del seed, folder
    models, failures, most = list(golden())[:trials], [], 0.0
    for one in models:
        gap = float(np.max(np.abs(one.model.score_samples(*one.rows) - one.scores)))
        most = max(most, gap)
        failures += [f"{one.name}: {gap:.1e}"] if not gap <= 1e-9 else []
    return Outcome(len(models), failures, f"largest difference {most:.1e}")


def rows_alone(trials: int, seed: int, folder: Path) -> Outcome:
    """Score random rows alone and in a batch of random size."""
    del folder
    models, failures, most = _numeric(), [], 0.0
    for trial in range(trials):
        one, rng = models[trial % len(models)], np.random.default_rng([seed, trial])
        parts = _inputs(one, rng, int(rng.integers(2, 40)))
        batch, place = one.model.score_samples(*parts), int(rng.integers(len(parts[0])))
        alone = one.model.score_samples(*(part[place : place + 1] for part in parts))[0]
        gap = abs(alone - batch[place]) / max(1.0, abs(alone))
        most = max(most, gap)
        failures += [f"{one.name}, trial {trial}: {gap:.1e}"] if not gap <= 1e-12 else []
    return Outcome(trials, failures, f"largest relative difference {most:.1e}")


def _used(one: Golden) -> bytes:
    """Return scores and draws of a model as bytes."""
    rows = one.rows[:1] if one.model.conditional else ()
    draws = one.model.sample(*rows, 5, random_state=0)
    return one.model.score_samples(*one.rows).tobytes() + np.asarray(draws).tobytes()


def digest() -> str:
    """Return the scores and draws of the golden models as text."""
    return b"".join(map(_used, _numeric())).hex()


def threads(trials: int, seed: int, folder: Path) -> Outcome:
    """Score and draw from golden models in eight threads at once."""
    del folder
    models = _numeric()
    expected = [_used(one) for one in models]
    order = np.random.default_rng(seed).integers(len(models), size=trials).tolist()
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda place: _used(models[place]), order))
    pairs = zip(order, found, strict=True)
    failures = [models[place].name for place, result in pairs if result != expected[place]]
    return Outcome(trials, failures, f"{trials - len(failures)} equal to serial calls, bit by bit")


def processes(trials: int, seed: int, folder: Path) -> Outcome:
    """Score and draw from golden models in four processes at once."""
    del seed, folder
    expected, failures = digest(), []
    for start in range(0, trials, PROCESSES):
        command = [sys.executable, "-c", PROGRAM]
        count = min(PROCESSES, trials - start)
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        found = [process.communicate()[0].strip() for process in started]
        failures += [f"process {start + k}" for k, text in enumerate(found) if text != expected]
    return Outcome(trials, failures, f"{trials - len(failures)} equal to this process, bit by bit")


def forks(trials: int, seed: int, folder: Path) -> Outcome:
    """Fork this process, which has used JAX, and score in the child, which may refuse."""
    del seed
    models, failures, refused = _numeric(), [], 0
    expected = [_used(one) for one in models]
    for trial in range(trials):
        place, result = trial % len(models), folder / f"child{trial}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of forks
            child = os.fork()
        if not child:
            try:
                result.write_bytes(_used(models[place]))
            except RuntimeError as error:
                result.write_text(str(error))
            os._exit(0)
        found = result.read_bytes() if _wait(child) else b"stuck"
        refused += REFUSED in found
        if REFUSED not in found and found != expected[place]:
            failures.append(f"{models[place].name}: {found[:40]!r}")
    equal = trials - refused - len(failures)
    return Outcome(trials, failures, f"{equal} equal to the parent, {refused} refused with a reason")


def _wait(child: int) -> bool:
    """Return whether a child ended in time; kill it otherwise."""
    deadline = time.monotonic() + STUCK
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def many_sizes(trials: int, seed: int, folder: Path) -> Outcome:
    """Score tables of many different numbers of rows."""
    del folder
    models = [one for one in _numeric() if one.name in ("chain", "two-columns", "chain-conditional")]
    rng, sizes = np.random.default_rng(seed), np.arange(1, trials + 1)
    rng.shuffle(sizes)
    started, warm = 0.0, max(3, trials // 10)
    for call, size in enumerate(sizes.tolist()):
        one = models[call % len(models)]
        one.model.score_samples(*_inputs(one, rng, size))
        if call == warm:
            gc.collect()
            started = _megabytes()
    gc.collect()
    grown = _megabytes() - started
    failures = [f"memory grew by {grown:.0f} MB"] if grown > GROWTH else []
    return Outcome(trials, failures, f"memory grew by {max(grown, 0.0):.0f} MB after the first tenth")


def _megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


CHECKS = {one.__name__: one for one in (golden_scores, rows_alone, threads, processes, forks, many_sizes)}
