"""Files that are written whole or not at all."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give the path of a file to be written, which takes the place of ``path`` once it is; a failure leaves no trace."""
    # Not tempfile: its files are readable by their owner only, and stay so after the renaming.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
