"""Several processes on one machine: equal results, an end of all when one is lost, and a resumed run."""

import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pandas
import pytest

from kexpfam.processes import LostProcessError, lost_process_errors

COMMAND = [sys.executable, "-c", "from kexpfam.cli import main; main()"]
CHAIN = ["--base", "chain", "--effort", "fast", "--quiet"]


def started(*arguments, **options):
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def ended(process, seconds=300):
    """Return the exit code and what was said."""
    said, complaint = process.communicate(timeout=seconds)
    return process.returncode, said, complaint


def workers(launcher):
    """Return the processes that a launcher has started, in their order."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True
    ).stdout
    return sorted(map(int, found.split()))


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("rows")
    a = rng.normal(size=1_200)
    frame = pandas.DataFrame({"a": a, "b": np.sin(2.0 * a) + 0.3 * rng.normal(size=1_200)})
    for part in range(3):
        frame[part * 400 : (part + 1) * 400].to_parquet(folder / f"{part}.parquet", index=False)
    return folder


# What each of two processes does in the next test.
SHARED_FIT = """
import sys
from kexpfam import Kernel, KernelExpFamily, Rows, processes

rank, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if address != "alone":
    processes.join(address, 2, rank)
settings = {"model": "kernel", "kernel": Kernel(lengthscale=0.5, rkhs_penalty=1e-3), "random_state": 0}
model = KernelExpFamily(**settings, rows=Rows(in_memory=400, block=90)).fit(folder)
print(repr(model.score(folder)))
if rank == 0:
    model.save(address[:5])
"""


def test_two_processes_fit_what_one_does(table, tmp_path):
    run = lambda rank, address: subprocess.Popen(
        [sys.executable, "-c", SHARED_FIT, str(rank), address, str(table)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    both = [run(rank, "127.0.0.1:29511") for rank in range(2)]
    alone, _ = run(0, "alone").communicate(timeout=300)
    shared = [
        [line for line in one.communicate(timeout=300)[0].splitlines() if "Gloo" not in line] for one in both
    ]
    assert shared[0] == shared[1] == alone.splitlines()
    assert (tmp_path / "127.0").read_bytes() == (tmp_path / "alone").read_bytes()


def test_what_is_wrong_with_rows_of_one_process_is_said_once(table, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for place, value in enumerate((0.0, 1.0, np.inf)):
        frame = pandas.read_parquet(table / f"{place}.parquet")
        frame.loc[0, "b"] = value
        frame.to_parquet(folder / f"{place}.parquet", index=False)
    code, said, complaint = ended(started("fit", folder, "-o", tmp_path / "model", "--processes", 2))
    assert (code, said) == (2, "")
    assert complaint.count("\n") == 1
    assert "column 'b' is inf, not a finite number" in complaint


@pytest.mark.slow
def test_members_are_shared_and_come_out_the_same(table, tmp_path):
    models = [tmp_path / name for name in ("one", "two", "three")]
    for place, model in enumerate(models):
        code, _, complaint = ended(
            started("fit", table, "-o", model, *CHAIN, *(["--processes", place + 1] if place else []))
        )
        assert (code, complaint) == (0, "")
    assert models[0].read_bytes() == models[1].read_bytes() == models[2].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_all_and_a_restart_goes_on(lost, table, tmp_path):
    checkpoint, model, undisturbed = (tmp_path / name for name in ("checkpoint", "model", "undisturbed"))
    command = ["fit", table, "-o", model, *CHAIN, "--processes", 2, "--checkpoint", checkpoint]
    launcher = started(*command)
    wait_for((tmp_path / "checkpoint.chain").exists)
    both = workers(launcher)
    assert len(both) == 2
    os.kill(both[lost], signal.SIGKILL)
    code, said, complaint = ended(launcher, seconds=30)
    assert (code, said) == (1, "")
    assert re.fullmatch(
        rf"error: process {lost + 1} of 2 was ended by SIGKILL, .* resumes from .*checkpoint\.\n", complaint
    )
    assert not any(os.path.exists(f"/proc/{one}") for one in both)
    assert not model.exists()
    assert ended(started(*command))[0] == 0
    assert ended(started("fit", table, "-o", undisturbed, *CHAIN))[0] == 0
    assert model.read_bytes() == undisturbed.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_their_launcher(number, table, tmp_path):
    launcher = started(
        "fit",
        table,
        "-o",
        tmp_path / "model",
        *CHAIN,
        "--processes",
        2,
        "--checkpoint",
        tmp_path / "checkpoint",
    )
    wait_for((tmp_path / "checkpoint.chain").exists)
    both = workers(launcher)
    os.kill(launcher.pid, number)
    _, _, complaint = ended(launcher, seconds=30)
    assert ("interrupted. The same command resumes" in complaint) == (number == signal.SIGINT)
    assert launcher.returncode == (130 if number == signal.SIGINT else -number)
    wait_for(lambda: not any(os.path.exists(f"/proc/{one}") for one in both), seconds=30)


@pytest.mark.slow
def test_processes_that_others_start_join_by_address_or_by_slurm(table, tmp_path):
    settings = ["--lengthscale", 0.5, "--rkhs-penalty", 1e-3]
    plain = lambda rank: ["--coordinator", "127.0.0.1:29517", "--processes", 2, "--process-id", rank]
    by_hand = [started("fit", table, "-o", tmp_path / "model", *settings, *plain(rank)) for rank in range(2)]
    assert [ended(one)[0] for one in by_hand] == [0, 0]
    slurm = {
        "SLURM_JOB_ID": "29600",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    tasks = [
        started(
            *("fit", table, "-o", tmp_path / "slurm", *settings, "--coordinator", "auto"),
            env=os.environ | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [ended(one)[0] for one in tasks] == [0, 0]
    assert (tmp_path / "model").read_bytes() == (tmp_path / "slurm").read_bytes()


def test_options_that_do_not_go_together_are_refused(table, tmp_path):
    for wrong in (
        ["--coordinator", "here:1"],
        ["--processes", 0],
        ["--coordinator", "a:1", "--processes", 2, "--process-id", 2],
    ):
        code, _, complaint = ended(started("fit", table, "-o", tmp_path / "model", *wrong))
        assert code == 2
        assert complaint.count("\n") == 1


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_a_connection_that_breaks_is_a_lost_process(kind):
    with pytest.raises(LostProcessError, match="start all of them again"), lost_process_errors():
        raise kind("UNKNOWN: Gloo AllGather failed")
