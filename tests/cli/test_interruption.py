import os
import signal
import subprocess
import sys

import pytest

from kexpfam import cli
from kexpfam.cli import fitting

# A command that discards KeyboardInterrupt.
STUBBORN = """
import signal
import time

from kexpfam.cli import commands

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT

class Discarding:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def stubborn(model):
    Discarding()
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass

commands._load = stubborn
commands.main()
"""


@pytest.fixture
def interrupted(monkeypatch, capsys):
    """Return a function that interrupts a fit; it returns the exit code and standard error."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(code)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["kexpfam", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, capsys.readouterr().err

    monkeypatch.setattr(fitting, "fitted", interrupt)
    monkeypatch.setattr(os, "_exit", leave)
    return call


@pytest.mark.parametrize("checkpoint", [True, False])
def test_an_interrupted_fit_keeps_the_old_file_and_says_how_to_resume(interrupted, tmp_path, checkpoint):
    output = tmp_path / "model.kexpfam"
    output.write_bytes(b"old")
    options = [f"--checkpoint={tmp_path / 'state'}"] if checkpoint else []
    code, err = interrupted("fit", "two-moons", "-o", output, *options)
    assert (code, output.read_bytes()) == (130, b"old")
    advice = "The same command resumes from the checkpoint." if checkpoint else "with --checkpoint FILE"
    assert err.startswith("error: interrupted. ")
    assert advice in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model.kexpfam"]


def test_a_command_that_discards_the_interrupt_ends_too(tmp_path):
    (tmp_path / "model").touch()
    command = [sys.executable, "-c", STUBBORN, "diagnose", tmp_path / "model"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    with process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: interrupted. No file was changed.\n")


def test_an_interrupt_while_the_interpreter_ends_does_not_change_the_exit_code():
    program = """if True:
        import atexit, os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))  # after those that are registered later
        sys.argv = ["kexpfam", "--version"]
        from kexpfam.cli import main
        main()
    """
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
