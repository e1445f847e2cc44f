"""Fits in several processes: membership and exchange of results.

Every process runs the same program with the same settings. Stages whose cost grows with the number of rows
are divided among the processes, which then exchange their results. Without ``join`` a process is alone.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Seconds without a heartbeat after which a process counts as lost.
HEARTBEAT = 20
# Types of errors that are raised in all processes; any other is raised as a RuntimeError.
SHARED_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, ImportError, OSError)}
SUCCESS, FAILURE = b"0", b"1"


class LostProcessError(RuntimeError):
    """Raised if another process has ended, so that a collective operation cannot complete."""


class Place(NamedTuple):
    """The rank of this process and the number of processes."""

    rank: int
    size: int


_place = Place(0, 1)


def place() -> Place:
    """Return the place of this process: rank 0 of 1, unless it has joined others."""
    return _place


def join(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> Place:
    """Make this process one of several that fit together, and return its place.

    ``coordinator`` is "host:port" of the first process, the same in all processes. Without arguments JAX
    detects the cluster (Slurm, Open MPI, Kubernetes), or uses a previous ``jax.distributed.initialize``. Call
    it before any computation with JAX.
    """
    global _place
    import jax

    if not jax.distributed.is_initialized():
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            # Cluster detection assigns one local device per process; a CPU host has only device 0.
            local_device_ids=0 if coordinator is None and processes is None else None,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    _place = Place(jax.process_index(), jax.process_count())
    return _place


def gathered(work: Callable[[], bytes]) -> list[bytes]:
    """Return the result of ``work`` of every process, by rank; an error in one process is raised in all."""
    if _place.size == 1:
        return [work()]
    own = None
    try:
        message = SUCCESS + work()
    except Exception as error:
        own, message = error, FAILURE + _described(error).encode()
    messages = _exchanged(message)
    for rank, received in enumerate(messages):
        if received[:1] == FAILURE:
            name, _, text = received[1:].decode().partition(":")
            if own is not None and rank == _place.rank:
                raise own
            raise SHARED_ERRORS.get(name, RuntimeError)(text)
    return [received[1:] for received in messages]


@contextlib.contextmanager
def first_process_file(path: Path) -> Iterator[Path | None]:
    """Give the path of the first process's file, or of a copy of it in other processes; None if absent."""
    if _place.size == 1:
        yield path if path.exists() else None
        return
    content = lambda: SUCCESS + path.read_bytes() if _place.rank == 0 and path.exists() else b""
    found = gathered(content)[0]
    if _place.rank == 0 or not found:
        yield path if found else None
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(found[1:])
        yield copy


@contextlib.contextmanager
def lost_process_errors() -> Iterator[None]:
    """Re-raise a failed collective operation as ``LostProcessError``."""
    import jax

    try:
        yield
    # The type of error depends on the moment at which the connection breaks.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise LostProcessError("another process has ended; start all of them again") from error


def _exchanged(message: bytes) -> list[bytes]:
    """Return the messages of all processes, by rank."""
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    with lost_process_errors():
        sizes = process_allgather(np.array([len(message)], np.int32)).ravel()
        # Arrays must have equal lengths; powers of two limit the number of compiled programs.
        padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = np.asarray(process_allgather(padded))
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _described(error: Exception) -> str:
    """Return the name of the error's shared type and its message."""
    name = next((name for name, kind in SHARED_ERRORS.items() if isinstance(error, kind)), "RuntimeError")
    if isinstance(error, OSError) and error.filename:
        return f"{name}:{error.filename}: {error.strerror}"
    return f"{name}:{error}"
