"""Atomic writing of files: completely or not at all; links, devices and pipes are not replaced."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` once it is complete; it is removed after a failure.

    The target of a symbolic link is replaced, not the link. Pipes, terminals, character devices and the
    process's own output are written to directly; block devices are refused. An existing file keeps its
    permissions, and a write-protected file is refused.
    """
    there = _state(path)
    if there is not None and not _replaceable(path, there):
        # Without O_CREAT and O_TRUNC no file is created or emptied.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".kexpfam-{uuid.uuid4().hex}.tmp")
    try:
        # Files of tempfile would be readable by their owner only.
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if there is not None:
            temporary.chmod(stat.S_IMODE(there.st_mode))
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A full disk is reported without a name, a missing folder with that of the temporary file.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            reason = error.strerror or str(error)
            raise OSError(error.errno or errno.EIO, reason, str(path)) from error
        raise
    _flush_folder(target.parent)


def _state(path: Path) -> os.stat_result | None:
    """Return the status of the path with links followed, None if it does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _replaceable(path: Path, there: os.stat_result) -> bool:
    """Return whether the file may be replaced; raise if it must not be written."""
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file", str(path))
    if stat.S_ISBLK(there.st_mode):
        raise PermissionError(errno.EPERM, "is a disk; name a file on it", str(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "is write-protected; remove it or name another file", str(path))
    return stat.S_ISREG(there.st_mode) and not _is_own_output(there)


def _is_own_output(there: os.stat_result) -> bool:
    """Return whether this is the process's own output, such as /dev/stdout after ``> file``."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # a closed descriptor
            if os.path.samestat(there, os.fstat(descriptor)):
                return True
    return False


def _flush_folder(folder: Path) -> None:
    """Write the folder to disk, where supported, so that the renaming survives a power failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
