"""Several processes that make one fit: who takes part, and what they tell each other.

Every process runs the same program on the same settings. Stages whose cost grows with the rows are shared: each process does a
part and tells the others what it found. Nobody who does not call ``join`` is concerned, whatever else JAX is used for.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

__all__ = ["LostProcessError", "Place", "copied", "gathered", "join", "lost", "place"]

# Seconds without a sign of life after which a process counts as lost.
HEARTBEAT = 20
# Errors of one process that all of them raise; any other comes as a RuntimeError.
SHARED_ERRORS = (ValueError, TypeError, ImportError, OSError)
FINE, FAILED = b"0", b"1"


class LostProcessError(RuntimeError):
    """Another process has ended, and what all of them know together cannot be had any more."""


class Place(NamedTuple):
    """Which of how many processes this is."""

    rank: int
    size: int


_place = Place(0, 1)


def place() -> Place:
    """Return which of how many processes this is: the first of one, unless it has joined others."""
    return _place


def join(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> Place:
    """Make this process one of several that fit together, and return its place.

    ``coordinator`` is "host:port" of the first process, and is the same in all of them. Without arguments JAX finds the other
    processes (Slurm, Open MPI, Kubernetes), or takes them as they are if ``jax.distributed.initialize`` was called before. To
    be called before anything is computed with JAX.
    """
    global _place
    import jax

    if not jax.distributed.is_initialized():
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            # Slurm and the like would give each process one of the devices that it sees: on a host there is only one.
            local_device_ids=0 if coordinator is None and processes is None else None,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    _place = Place(jax.process_index(), jax.process_count())
    return _place


def gathered(work: Callable[[], bytes]) -> list[bytes]:
    """Return what ``work`` gives in each of the processes, in their order; an error in one of them is raised in all."""
    if _place.size == 1:
        return [work()]
    own = None
    try:
        said = FINE + work()
    except Exception as error:
        own, said = error, FAILED + f"{_shared_name(error)}:{_text(error)}".encode()
    answers = _exchanged(said)
    for rank, answer in enumerate(answers):
        if answer[:1] == FAILED:
            if own is not None and rank == _place.rank:
                raise own
            _raise(answer[1:].decode())
    return [answer[1:] for answer in answers]


@contextlib.contextmanager
def copied(path: Path) -> Iterator[Path | None]:
    """Give the first process's file of that name, elsewhere a copy of it for the time being; None if there is none."""
    content = lambda: FINE + path.read_bytes() if _place.rank == 0 and path.exists() else b""
    if _place.size == 1:
        yield path if path.exists() else None
        return
    found = gathered(content)[0]
    if _place.rank == 0 or not found:
        yield path if found else None
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(found[1:])
        yield copy


@contextlib.contextmanager
def lost() -> Iterator[None]:
    """Say of an error in what several processes compute together that one of them is gone; others were raised in all."""
    import jax

    try:
        yield
    except (
        jax.errors.JaxRuntimeError,
        ValueError,
    ) as error:  # what a broken connection comes as depends on when it breaks
        raise LostProcessError("another process has ended; start all of them again") from error


def _exchanged(said: bytes) -> list[bytes]:
    """Return what every process says."""
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    with lost():
        sizes = process_allgather(np.array([len(said)], np.int32)).ravel()
        # Few lengths, so that few programs are compiled: arrays of all processes must be equally long.
        padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
        padded[: len(said)] = np.frombuffer(said, np.uint8)
        everything = process_allgather(padded)
        return [row[:size].tobytes() for row, size in zip(np.asarray(everything), sizes, strict=True)]


def _shared_name(error: Exception) -> str:
    return next((kind.__name__ for kind in SHARED_ERRORS if isinstance(error, kind)), "RuntimeError")


def _text(error: Exception) -> str:
    return (
        f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    )


def _raise(text: str) -> NoReturn:
    name, _, message = text.partition(":")
    raise next((kind for kind in SHARED_ERRORS if kind.__name__ == name), RuntimeError)(message)
