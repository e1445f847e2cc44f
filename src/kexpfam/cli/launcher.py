"""A command in several processes: started here and watched over, or joined to those that others have started.

The processes of one command live and die together. Whoever started them reads their ends: one that is killed ends the others,
and one line says so.
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
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

import typer

__all__ = [
    "LOST",
    "Coordinator",
    "ProcessId",
    "Processes",
    "is_first_process",
    "launch",
    "started_by_launcher",
]

PANEL = "Several processes"
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that share the work, all on this machine.", rich_help_panel=PANEL),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="On several machines: host:port of the first process, or auto under Slurm and Open MPI.",
        rich_help_panel=PANEL,
    ),
]
ProcessId = Annotated[
    int | None, typer.Option(help="With --coordinator: which process this is, from 0.", rich_help_panel=PANEL)
]

# The environment variable by which a process knows that it was started by ``launch``: coordinator, processes, place.
PLACE = "KEXPFAM_PLACE"
# The exit code of a process that misses another one.
LOST = 75
# Seconds between two looks, and that the others have to end by themselves after one has said what is wrong.
LOOK, GRACE = 0.1, 5.0
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def started_by_launcher() -> bool:
    """Return whether this process is one of those that ``launch`` has started."""
    return PLACE in os.environ


def is_first_process(
    data: str, processes: int | None, coordinator: str | None, process_id: int | None, checkpoint: Path | None
) -> bool:
    """Return whether this is the process that tells and writes, once it has joined the others; a launcher does not return."""
    if processes is None and coordinator is None:
        return True
    if data == "-":
        raise ValueError("every process reads the rows: write standard input to a file first.")
    if coordinator is None and not started_by_launcher():
        raise typer.Exit(launch(processes or 1, checkpoint))
    from kexpfam.processes import join

    if started_by_launcher():
        address, count, rank = os.environ[PLACE].split()
        _end_with_launcher()
        _keep_native_messages_apart()
        return join(address, int(count), int(rank)).rank == 0
    if coordinator == "auto":
        return join().rank == 0
    if processes is None or process_id is None or not 0 <= process_id < processes:
        raise ValueError(
            "--coordinator host:port needs --processes, and --process-id from 0 to one less than that."
        )
    return join(coordinator, processes, process_id).rank == 0


def launch(count: int, checkpoint: Path | None) -> int:
    """Run this command again in so many processes and return the exit code of all; one line says it if one was lost."""
    coordinator = _free_address()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        started = [
            _start(f"{coordinator} {count} {rank}", log if rank else None, count)
            for rank, log in enumerate(logs)
        ]
        try:
            _wait(started)
            return _verdict([one.poll() for one in started], logs, _advice(checkpoint))
        except KeyboardInterrupt:
            _complain(f"interrupted, and all processes were stopped. {_advice(checkpoint)}")
            return 130
        finally:
            for one in started:
                one.kill()
                one.wait()


def _free_address() -> str:
    """Return an address of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _start(place: str, log: IO[bytes] | None, count: int) -> subprocess.Popen:
    """Start one of the processes; all but the first write to a log."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = dict.fromkeys(THREADS, threads) | os.environ | {PLACE: place}
    command = [sys.executable, "-c", "from kexpfam.cli import main; main()", *sys.argv[1:]]
    # A session of its own: an interrupt from the terminal is for the launcher. Its end of the pipe says that it lives.
    options: dict[str, Any] = {"env": environment, "stdin": subprocess.PIPE, "start_new_session": True}
    if log is not None:
        options |= {"stdout": subprocess.DEVNULL, "stderr": log}
    return subprocess.Popen(command, **options)


def _wait(started: list[subprocess.Popen]) -> None:
    """Wait until all processes have ended well, one was killed, or one has failed and the others had time to end."""
    deadline = None
    while any(one.poll() is None for one in started):
        codes = [one.poll() or 0 for one in started]
        if min(codes) < 0 or (deadline is not None and time.monotonic() > deadline):
            return
        if max(codes) > 0 and deadline is None:
            # Others may be about to say what is wrong.
            deadline = time.monotonic() + GRACE
        time.sleep(LOOK)


def _verdict(codes: list[int | None], logs: Sequence[IO[bytes]], advice: str) -> int:
    """Return the exit code of all; what went wrong is said here unless the first process has said it."""
    if not any(codes):
        return 0
    killed = [(rank, code) for rank, code in enumerate(codes) if code is not None and code < 0]
    failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)]
    if killed:
        rank, code = killed[0]
        name = signal.Signals(-code).name
        _complain(
            f"process {rank + 1} of {len(codes)} was ended by {name}, and the others were stopped. {advice}"
        )
    elif 0 in failed:
        return codes[0] or 1
    else:
        said = (
            _last_line(logs[failed[0]])
            if failed
            else "a process ended before the others, and all were stopped."
        )
        _complain(f"{said} {advice}")
    return 1


def _advice(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "With --checkpoint FILE the same command would go on where it was."
    return f"The same command resumes from {checkpoint}."


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.removeprefix("error: ").strip() for line in reversed(lines) if line.strip()), "")


def _complain(message: str) -> None:
    typer.echo(f"{typer.style('error:', fg='red')} {message}", err=True)


def _end_with_launcher() -> None:
    """End this process as soon as the one that started it is gone."""

    def wait() -> NoReturn:
        os.read(0, 1)
        os._exit(LOST)

    threading.Thread(target=wait, daemon=True).start()


def _keep_native_messages_apart() -> None:
    """Let Python go on writing to the terminal, and what lies below it to nowhere: of a lost process one line is enough."""
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
