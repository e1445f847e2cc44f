"""Whatever stands where a file is to be written survives: links, devices, pipes, and the old file if the
writing fails."""

import contextlib
import errno
import io
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from kexpfam import files
from kexpfam.data.tables import write_csv
from kexpfam.files import written
from kexpfam.storage import Checkpoint, StorageError, load_tree, save_tree


def write(path, content=b"new"):
    with written(path) as file:
        file.write(content)


def write_text(path):
    with written(path) as file:
        stream = io.TextIOWrapper(file)
        write_csv(stream, ["a"], [[np.ones(1)]])
        stream.detach()


WRITERS = {
    "bytes": (write, lambda path: path.read_bytes() == b"new"),
    "csv": (write_text, lambda path: path.read_bytes() == b"a\n1.0\n"),
    "model": (lambda path: save_tree(path, "new", {}, {}), lambda path: load_tree(path)[0] == "new"),
    "checkpoint": (
        lambda path: Checkpoint(path, "task").write({"x": np.ones(2)}),
        lambda path: Checkpoint(path, "task").read({"x": np.zeros(2)})[0]["x"].tolist() == [1.0, 1.0],
    ),
}


@pytest.fixture(params=WRITERS.values(), ids=WRITERS)
def writer(request):
    return request.param


def test_a_link_stays_and_its_target_is_written(tmp_path, writer):
    save, is_right = writer
    (tmp_path / "elsewhere").mkdir()
    target, link, second = tmp_path / "elsewhere" / "target", tmp_path / "link", tmp_path / "second"
    link.symlink_to("elsewhere/target")
    second.symlink_to(link)
    save(second)  # a link whose target is not there yet
    target.unlink()
    save(second)
    assert (os.readlink(second), os.readlink(link)) == (str(link), "elsewhere/target")
    assert not target.is_symlink()
    assert is_right(target)
    assert os.listdir(tmp_path / "elsewhere") == ["target"]


def test_a_pipe_is_written_into(tmp_path, writer):
    save, is_right = writer
    pipe, copy = tmp_path / "pipe", tmp_path / "copy"
    os.mkfifo(pipe)
    if save is WRITERS["checkpoint"][0]:
        with pytest.raises(StorageError, match="name a regular file for the checkpoint"):
            save(pipe)
        return
    reader = threading.Thread(target=lambda: copy.write_bytes(pipe.read_bytes()))
    reader.start()
    save(pipe)
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert is_right(copy)
    assert sorted(os.listdir(tmp_path)) == ["copy", "pipe"]


@contextlib.contextmanager
def pretended(monkeypatch, kind):
    """Have every regular file look like a device."""
    real = os.stat_result

    def changed(path):
        state = path.stat()
        return real((stat.S_IMODE(state.st_mode) | kind, *state[1:]))

    with monkeypatch.context() as patch:
        patch.setattr(files, "_state", changed)
        yield


def test_a_device_of_characters_is_written_into_and_one_of_blocks_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "device"
    path.write_bytes(b"old")
    before = path.stat().st_ino
    with pretended(monkeypatch, stat.S_IFCHR):
        write(path)
    assert (path.read_bytes(), path.stat().st_ino) == (b"oldnew", before)
    with pretended(monkeypatch, stat.S_IFBLK), pytest.raises(PermissionError, match="is a disk"):
        write(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"oldnew", ["device"])


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_standard_output_is_written_into_wherever_it_leads(tmp_path, mode):
    program = (
        "import numpy, pathlib; from kexpfam.data.tables import write_table\n"
        "write_table(pathlib.Path('/dev/stdout'), ['a'], [[numpy.array([1])]])"
    )
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert piped.stdout == b"a\n1\n"
    (tmp_path / "out.csv").write_bytes(b"before\n")
    with open(tmp_path / "out.csv", mode) as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    kept = b"before\n" if mode == "ab" else b""
    assert (tmp_path / "out.csv").read_bytes() == kept + b"a\n1\n"
    assert os.listdir(tmp_path) == ["out.csv"]


def test_a_file_keeps_its_permissions(tmp_path, writer):
    path = tmp_path / "private"
    path.touch(mode=0o600)
    if writer is not WRITERS["checkpoint"]:
        writer[0](path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is write-protected from root")
def test_a_write_protected_file_stays(tmp_path):
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match="write-protected"):
        write(path)
    assert path.read_bytes() == b"old"


def test_a_write_protected_file_stays_whoever_asks(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="write-protected"):
        write(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["kept"])


def test_a_folder_and_a_loop_of_links_are_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError) as caught:
        write(tmp_path / "loop")
    assert caught.value.errno == errno.ELOOP
    assert os.readlink(tmp_path / "loop") == "loop"


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write(tmp_path / "nowhere" / "file")
    assert caught.value.filename == str(tmp_path / "nowhere" / "file")


def test_a_name_as_long_as_a_name_can_be(tmp_path):
    path = tmp_path / ("x" * 255)
    write(path)
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
def test_nothing_is_half_written(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), written(path) as file:
        file.write(b"half")
        raise error
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])


@pytest.mark.parametrize("name", ["out.csv", "out.npy", "out.parquet"])
def test_a_full_disk_leaves_the_old_file(tmp_path, name):
    """A limit on the size of files stands for a full disk: the system itself refuses the bytes.

    The limit is in the last buffer of the array, of which NumPy alone would not notice the loss.
    """
    path = tmp_path / name
    path.write_bytes(b"old")
    program = (
        "import numpy, resource, signal; from pathlib import Path\n"
        "from kexpfam.data.tables import write_table\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))\n"
        f"write_table(Path({str(path)!r}), ['a'], [[numpy.random.default_rng(0).normal(size=1500)]])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"File too large: '{path}'" in done.stderr
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", [name])
