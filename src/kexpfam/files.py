"""Files that are written whole or not at all, and never in the place of a link, a device or a pipe."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["written"]


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the place of ``path`` once all of it is on the disk; a failure leaves no trace.

    A symbolic link is followed and stays: what it points to is written. A pipe, a terminal, a device of characters and the
    process's own output are written into as the bytes come, since they cannot be replaced; a device of blocks is refused. A
    file that is there keeps its permissions, and one that may not be written stays as it is.
    """
    there = _state(path)
    if there is not None and not _replaceable(path, there):
        # Without O_CREAT and O_TRUNC nothing can be made or emptied here; appending is all that a stream knows.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".kexpfam-{uuid.uuid4().hex}.tmp")
    try:
        with _made(temporary, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if there is not None:
            temporary.chmod(stat.S_IMODE(there.st_mode))
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _settle(target.parent)


def _state(path: Path) -> os.stat_result | None:
    """Return what stands at the path, links followed, or None if there is nothing; a loop of links raises."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _replaceable(path: Path, there: os.stat_result) -> bool:
    """Return whether another file may take the place of this one, or raise if nothing may be written there."""
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file", str(path))
    if stat.S_ISBLK(there.st_mode):
        raise PermissionError(errno.EPERM, "is a disk; name a file on it", str(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "is write-protected; remove it or name another file", str(path))
    return stat.S_ISREG(there.st_mode) and not _is_own_output(there)


def _is_own_output(there: os.stat_result) -> bool:
    """Return whether this file is where the process prints to: /dev/stdout after ``> file``, say."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # a closed descriptor
            if os.path.samestat(there, os.fstat(descriptor)):
                return True
    return False


def _made(temporary: Path, path: Path) -> BinaryIO:
    # Not tempfile: its files are readable by their owner only, and stay so after the renaming.
    try:
        return open(temporary, "xb")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None


def _settle(folder: Path) -> None:
    """Have the folder's own entry written to the disk, so that a renaming outlives a power cut; not every system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
