"""A command in several processes, which are started and supervised here, or were started elsewhere.

If one process of a command ends early, the launcher stops the others and writes one line.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Annotated, Any, NoReturn

import typer

from kexpfam.cli.interruption import advice
from kexpfam.cli.results import message


def _option(help: str, **limits: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Several processes", **limits)


ADDRESS = "On several machines: host:port of the first process, or auto under Slurm and Open MPI."
Processes = Annotated[int | None, _option("Number of processes on this machine.", min=1)]
Coordinator = Annotated[str | None, _option(ADDRESS)]
ProcessId = Annotated[int | None, _option("With --coordinator: the number of this process, from 0.")]

# Set in processes started by ``launch``: address of the coordinator, number of processes, rank.
PLACE = "KEXPFAM_PLACE"
# Exit code of a process that has lost another one.
LOST = 75
# Seconds between two polls, and seconds to wait for the other processes after the first failure.
POLL, GRACE = 0.1, 5.0
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def started_by_launcher() -> bool:
    """Return whether ``launch`` has started this process."""
    return PLACE in os.environ


def is_first_process(
    data: str, processes: int | None, coordinator: str | None, process_id: int | None
) -> bool:
    """Join the other processes and return whether this is the first one, which writes the output.

    A launcher runs the processes and raises ``typer.Exit``.
    """
    if processes is None and coordinator is None:
        return True
    if data == "-":
        raise ValueError("every process reads the rows; write standard input to a file first.")
    if coordinator is None and not started_by_launcher():
        raise typer.Exit(launch(processes or 1))
    from kexpfam.processes import join

    if started_by_launcher():
        address, count, rank = os.environ[PLACE].split()
        _follow_launcher()
        return join(address, int(count), int(rank)).rank == 0
    if coordinator == "auto":
        return join().rank == 0
    if processes is None or process_id is None or not 0 <= process_id < processes:
        raise ValueError("--coordinator host:port needs --processes N, and --process-id from 0 to N - 1.")
    return join(coordinator, processes, process_id).rank == 0


def launch(count: int) -> int:
    """Run this command in ``count`` processes and return the exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        started = [_start(f"{address} {count} {rank}", logs[rank], rank, count) for rank in range(count)]
        try:
            _wait(started)
            return _exit_code([one.poll() for one in started], logs)
        finally:
            for one in started:
                one.kill()
                one.wait()


def _start(place: str, log: IO[bytes], rank: int, count: int) -> subprocess.Popen:
    """Start one process; all but the first write to a log."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    env = dict.fromkeys(THREADS, threads) | os.environ | {PLACE: place}
    command = [sys.executable, "-c", "from kexpfam.cli import main; main()", *sys.argv[1:]]
    # In a new session an interrupt of the terminal reaches the launcher only; the pipe closes when that ends.
    outputs: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": log} if rank else {}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True, **outputs)


def _wait(started: list[subprocess.Popen]) -> None:
    """Wait until all processes have ended, one was killed, or ``GRACE`` seconds after one has failed."""
    deadline = None
    while any(one.poll() is None for one in started):
        codes = [one.poll() or 0 for one in started]
        if min(codes) < 0 or (deadline is not None and time.monotonic() > deadline):
            return
        if max(codes) > 0 and deadline is None:
            # Other processes may still write the cause.
            deadline = time.monotonic() + GRACE
        time.sleep(POLL)


def _exit_code(codes: list[int | None], logs: Sequence[IO[bytes]]) -> int:
    """Return the exit code of all processes; write the error unless the first process has written it."""
    if not any(codes):
        return 0
    killed = [(rank, code) for rank, code in enumerate(codes) if code is not None and code < 0]
    failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)]
    if killed:
        rank, code = killed[0]
        name = signal.Signals(-code).name
        error = f"process {rank + 1} of {len(codes)} was ended by {name}, and the others were stopped."
    elif 0 in failed:
        return codes[0] or 1
    elif failed:
        log = logs[failed[0]]
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").split("\n")]
        error = next((line.removeprefix("error: ") for line in reversed(lines) if line), "")
    else:
        error = "a process ended before the others, and all were stopped."
    message("error", f"{error} {advice()}")
    return 1


def _follow_launcher() -> None:
    """Exit as soon as the launcher has ended; discard the output of native code, but not Python's.

    So a lost process prints a single line.
    """

    def wait() -> NoReturn:
        os.read(0, 1)
        os._exit(LOST)

    threading.Thread(target=wait, daemon=True).start()
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
